"""What the machine is and how busy it is."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from peerload.agent.sensors import host as sensors
from peerload.agent.sensors.host import Sensors, machine_facts, pressure, tasks_cpu_s
from peerload.model.events import LoadSampled


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else on this machine takes memory, or gives it back."""
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_machine_without_limits_is_what_it_is(tmp_path: Path) -> None:
    cpus, mem_bytes = machine_facts(tmp_path)
    assert cpus == len(os.sched_getaffinity(0))
    assert mem_bytes > 1 << 20


def test_the_least_limit_of_a_cgroup_and_those_above_it_counts(tmp_path: Path) -> None:
    _write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    top = tmp_path / "sys/fs/cgroup"
    _write(top / "a/cpu.max", "50000 100000\n")
    _write(top / "a/b/cpu.max", "max 100000\n")
    _write(top / "a/memory.max", "max\n")
    _write(top / "a/b/memory.max", f"{64 << 20}\n")
    assert machine_facts(tmp_path) == (0.5, 64 << 20)


def test_the_older_cgroups_count_too(tmp_path: Path) -> None:
    _write(tmp_path / "proc/self/cgroup", "5:memory:/c\n4:cpu,cpuacct:/c\n")
    top = tmp_path / "sys/fs/cgroup"
    _write(top / "cpu,cpuacct/c/cpu.cfs_quota_us", "25000")
    _write(top / "cpu,cpuacct/c/cpu.cfs_period_us", "100000")
    _write(top / "cpu,cpuacct/cpu.cfs_quota_us", "-1")
    _write(top / "cpu,cpuacct/cpu.cfs_period_us", "100000")
    _write(top / "memory/c/memory.limit_in_bytes", str(32 << 20))
    assert machine_facts(tmp_path) == (0.25, 32 << 20)


@pytest.mark.usefixtures("quiet")
def test_utilization_is_averaged_and_told_when_it_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cores = os.cpu_count() or 1
    clock = {"busy": 0.0, "total": 0.0}
    monkeypatch.setattr(sensors, "_cpu_seconds", lambda: (clock["busy"], clock["total"]))
    told: list[LoadSampled] = []
    ours = {"cpus": 0.0}
    sampler = Sensors(told.append, lambda: ours["cpus"], root=tmp_path)

    def second(share: float) -> None:
        clock["total"] += cores
        clock["busy"] += cores * share
        sampler.sample()

    second(0.5)
    assert told[-1].cpus_busy == pytest.approx(cores * 0.5)
    assert told[-1].cpus_busy_foreign == pytest.approx(cores * 0.5)
    assert told[-1].mem_used_bytes > 0
    for _ in range(60):
        second(0.5)
    assert len(told) == 1, "nothing has changed"
    ours["cpus"] = float(cores)
    for _ in range(5):
        second(1.0)
    assert cores * 0.75 < told[-1].cpus_busy < cores * 0.9, "63 % of a step after 5 s"
    assert told[-1].cpus_busy_foreign == 0.0
    for _ in range(60):
        second(0.0)
    assert told[-1].cpus_busy < 0.06
    sampler.sample()  # no time has passed


def test_what_tasks_really_use_counts_where_the_kernel_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cores = os.cpu_count() or 1
    clock = {"busy": 0.0, "total": 0.0}
    monkeypatch.setattr(sensors, "_cpu_seconds", lambda: (clock["busy"], clock["total"]))
    told: list[LoadSampled] = []
    used: list[float | None] = [0.0]
    sampler = Sensors(told.append, lambda: float(cores), lambda: used[0], tmp_path)

    def second(share: float, tasks: float | None) -> None:
        clock["total"] += cores
        clock["busy"] += cores * share
        used[0] = None if tasks is None else (used[0] or 0.0) + cores * tasks
        sampler.sample()

    for _ in range(60):
        second(1.0, 0.25)
    assert told[-1].cpus_busy_foreign == pytest.approx(cores * 0.75, rel=0.05)
    second(1.0, None)
    assert told[-1].cpus_busy_foreign == 0.0, "what they asked for explains it all"
    second(1.0, 0.0)  # a new launcher counts from nothing
    for _ in range(60):
        second(1.0, 1.0)
    assert told[-1].cpus_busy_foreign < 0.1


def test_what_the_kernel_counts_of_all_tasks_together(tmp_path: Path) -> None:
    assert tasks_cpu_s(77, "ab12", tmp_path) is None
    _write(tmp_path / "proc/77/cgroup", "3:cpu:/\n0::/user.slice/me\n")
    assert tasks_cpu_s(77, "ab12", tmp_path) is None
    stat = tmp_path / "sys/fs/cgroup/user.slice/me/peerload.ab12/cpu.stat"
    _write(stat, "usage_usec 2500000\nuser_usec 2000000\nsystem_usec 500000\n")
    assert tasks_cpu_s(77, "ab12", tmp_path) == 2.5
    assert tasks_cpu_s(77, "", tmp_path) is None
    assert tasks_cpu_s(0, "ab12", tmp_path) is None
    _write(stat, "user_usec 2000000\n")
    assert tasks_cpu_s(77, "ab12", tmp_path) is None


def test_pressure_may_be_missing(tmp_path: Path) -> None:
    assert pressure(tmp_path) == (None, None)
    _write(tmp_path / "proc/pressure/cpu", "some avg10=1.25 avg60=0.30 avg300=0.10 total=5\nfull avg10=0.00\n")
    _write(tmp_path / "proc/pressure/memory", "")
    assert pressure(tmp_path) == (0.0125, None)


@pytest.mark.usefixtures("quiet")
def test_pressure_is_told_when_it_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = {"busy": 0.0, "total": 0.0}
    monkeypatch.setattr(sensors, "_cpu_seconds", lambda: (clock["busy"], clock["total"]))
    told: list[LoadSampled] = []
    sampler = Sensors(told.append, lambda: 0.0, root=tmp_path)
    for waited in ("0.00", "1.00", "20.00", "20.00"):
        clock["total"] += 1.0
        _write(tmp_path / "proc/pressure/memory", f"some avg10={waited} avg60=0.00\n")
        sampler.sample()
    assert [(one.cpu_pressure, one.mem_pressure) for one in told] == [(0.0, 0.0), (0.0, 0.2)]
