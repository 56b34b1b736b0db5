"""What the machine is and how busy it is."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peerload.agent.sensors import host as sensors
from peerload.agent.sensors.host import HostSensors, machine_facts
from peerload.agent.sensors.processes import KernelFile, OwnUse
from peerload.launcher.containment import SUBGROUP
from tests.support import PutEvents


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else on this machine takes memory, or gives it back."""
    monkeypatch.setattr(sensors, "_memory", lambda _meminfo: (8 << 30, 4 << 30))


def own_use(pid: int, run: str, root: Path, *, runs: bool) -> OwnUse:
    launcher: Any = SimpleNamespace(pid=pid, run=run)
    ledger: Any = SimpleNamespace(running={"a-1": None} if runs else {})
    return OwnUse(launcher, ledger, root)


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


@pytest.mark.usefixtures("quiet", "two_cores")
@pytest.mark.parametrize(
    ("group", "limit", "usage", "stat"),
    [
        ("0::/a", "a/memory.max", "memory.current", "inactive_file 1048576"),
        ("5:memory:/a", "memory/a/memory.limit_in_bytes", "memory.usage_in_bytes", "inactive_file 4096\ntotal_inactive_file 1048576"),
    ],
)  # fmt: skip
def test_memory_in_use_is_that_of_the_cgroup_whose_limit_counts(
    group: str, limit: str, usage: str, stat: str, tmp_path: Path
) -> None:
    file = tmp_path / "sys/fs/cgroup" / limit
    _write(file, f"{64 << 20}\n")
    _write(file.with_name(usage), f"{16 << 20}\n")
    _write(file.with_name("memory.stat"), f"anon 5\n{stat}\n")
    clock = Clock(tmp_path, group=group)
    clock.second(0.5, 0.5)
    assert clock.told[-1].mem_used_bytes == 15 << 20


class Clock:
    """A machine whose cores have been busy as said; `second` lets one pass, in which tasks have used so many cores."""

    def __init__(self, root: Path, cpus: int = 2, quota: str = "max 100000", group: str = "0::/a") -> None:
        self.root = root
        self.told = PutEvents()
        self.own_s: float | None = 0.0
        self.has_tasks = False
        self.ticks = [[0] * 8 for _ in range(cpus)]
        self.used_s = 0.0
        _write(root / "proc/self/cgroup", f"{group}\n")
        _write(root / "sys/fs/cgroup/a/cpu.max", quota)
        self._write()
        self.sensors = HostSensors(self.told, self, root=root)

    def seconds(self) -> float | None:
        """Of the tasks of this node."""
        return self.own_s

    def _write(self) -> None:
        lines = [f"cpu{n} {' '.join(map(str, ticks))} 0 0" for n, ticks in enumerate(self.ticks)]
        _write(self.root / "proc/stat", "\n".join(["cpu 0 0 0 0 0 0 0 0 0 0", *lines, "intr 5", ""]))
        _write(self.root / "sys/fs/cgroup/a/cpu.stat", f"usage_usec {int(self.used_s * 1e6)}\nuser_usec 0\n")

    def second(self, *busy: float, own: float | None = 0.0, kind: int = 0, used: float = 0.0) -> None:
        self.advance(*busy, kind=kind, used=used)
        self.own_s = None if own is None else (self.own_s or 0.0) + own
        self.sensors.sample()

    def advance(self, *busy: float, kind: int = 0, used: float = 0.0) -> None:
        for ticks, share in zip(self.ticks, busy, strict=True):
            ticks[kind] += round(share * sensors.TICKS)
            ticks[IDLE] += sensors.TICKS - round(share * sensors.TICKS)
        self.used_s += used
        self._write()

    @property
    def foreign(self) -> float:
        return float(self.told[-1].cpus_busy_foreign)


IDLE, IOWAIT, STEAL = 3, 4, 7


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})


@pytest.mark.usefixtures("quiet", "two_cores")
def test_utilization_is_averaged_and_told_when_it_changes(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    clock.second(0.5, 0.5, own=1.0)
    assert clock.told[-1].cpus_busy == pytest.approx(1.0)
    assert clock.told[-1].mem_used_bytes > 0
    for _ in range(60):
        clock.second(0.5, 0.5, own=1.0)
    assert len(clock.told) == 1, "nothing has changed"
    for _ in range(5):
        clock.second(1.0, 1.0, own=2.0)
    assert 1.5 < clock.told[-1].cpus_busy < 1.8, "63 % of a step after 5 s"
    for _ in range(60):
        clock.second(0.0, 0.0)
    assert clock.told[-1].cpus_busy < 0.06
    clock.sensors.sample()  # no time has passed
    assert all(one.cpus_busy_foreign < 0.06 for one in clock.told)


def test_a_file_whose_descriptor_fails_is_opened_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stat"
    path.write_text("old")
    file = KernelFile(path)
    assert file.read() == b"old"
    path.rename(tmp_path / "gone")
    path.write_text("new")

    def fails(*_: object) -> bytes:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    with monkeypatch.context() as broken:
        broken.setattr(os, "pread", fails)
        with pytest.raises(OSError, match="endpoint"):
            file.read()
    assert file.read() == b"new"


@pytest.mark.usefixtures("quiet", "two_cores")
def test_load_is_told_where_the_kernel_refuses_to_tell_of_pressure(tmp_path: Path) -> None:
    """With `psi=0` its files can be opened, but each read fails."""
    for name in ("cpu", "memory"):
        (tmp_path / "proc/pressure" / name).mkdir(parents=True)
    clock = Clock(tmp_path)
    clock.second(0.5, 0.5, own=1.0)
    told = clock.told[-1]
    assert (told.cpus_busy, told.cpu_pressure, told.mem_pressure) == (pytest.approx(1.0), 0.0, 0.0)


@pytest.mark.usefixtures("quiet", "two_cores")
def test_what_our_own_work_does_not_explain_is_foreign(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    for _ in range(15):
        clock.second(1.0, 1.0, own=0.5)
    assert 0.8 < clock.foreign < 1.0, "63 % of 1.5 cores after 15 s"
    for _ in range(60):
        clock.second(1.0, 1.0, own=0.5)
    assert clock.foreign == pytest.approx(1.5, rel=0.05)
    for _ in range(60):
        clock.second(1.0, 1.0, own=2.0)
    assert clock.foreign < 0.1


@pytest.mark.usefixtures("quiet", "two_cores")
def test_time_in_which_our_own_use_is_not_known_is_no_foreign_load(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    for _ in range(30):
        clock.second(1.0, 1.0, own=None)  # no launcher
    clock.second(1.0, 1.0, own=50.0)
    for _ in range(30):
        clock.second(1.0, 1.0, own=-1.0)  # what a process has used is gone with it
    assert clock.foreign == 0.0


@pytest.mark.usefixtures("quiet", "two_cores")
def test_readings_of_two_clocks_that_differ_make_no_foreign_load(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    for number in range(60):  # the kernel books our time in turns: too much, too little
        clock.second(0.5, 0.5, own=2.0 if number // sensors.FOREIGN_EVERY_S % 2 else 0.0)
    assert clock.foreign < 0.25


@pytest.mark.usefixtures("quiet")
def test_cores_outside_of_the_affinity_mask_are_not_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {1})
    clock = Clock(tmp_path)
    for _ in range(60):
        clock.second(1.0, 0.0)
    assert max(one.cpus_busy for one in clock.told) == max(one.cpus_busy_foreign for one in clock.told) == 0.0
    for _ in range(90):
        clock.second(1.0, 1.0)
    assert clock.told[-1].cpus == 1.0
    assert clock.told[-1].cpus_busy == pytest.approx(1.0, abs=0.05)
    assert clock.foreign == pytest.approx(1.0, abs=0.05)


@pytest.mark.usefixtures("quiet", "two_cores")
@pytest.mark.parametrize(("kind", "cpus_busy"), [(STEAL, 2.0), (IOWAIT, 0.0)])
def test_what_is_stolen_is_busy_and_what_waits_for_a_disk_is_not(kind: int, cpus_busy: float, tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    for _ in range(90):
        clock.second(1.0, 1.0, kind=kind)
    assert (clock.told[-1].cpus_busy, clock.foreign) == pytest.approx((cpus_busy, cpus_busy), abs=0.05)


@pytest.mark.usefixtures("quiet", "two_cores")
def test_under_a_quota_what_its_cgroup_uses_counts_and_what_others_leave(tmp_path: Path) -> None:
    clock = Clock(tmp_path, quota="100000 100000")
    for _ in range(60):
        clock.second(0.5, 0.5, own=0.0)
    assert clock.told[-1].cpus_busy == clock.foreign == 0.0, "the other core is enough for the quota"
    for _ in range(90):
        clock.second(0.5, 0.5, own=0.25, used=0.75)
    assert clock.told[-1].cpus == 1.0
    assert (clock.told[-1].cpus_busy, clock.foreign) == pytest.approx((0.75, 0.5), abs=0.06)
    for _ in range(90):
        clock.second(1.0, 1.0, own=0.0)
    assert (clock.told[-1].cpus_busy, clock.foreign) == pytest.approx((1.0, 1.0), abs=0.06)


# -- what our own work uses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mount", "own"),
    [
        ("sys/fs/cgroup", "user.slice/me"),
        ("sys/fs/cgroup/unified", "user.slice/me"),
        ("sys/fs/cgroup", f"user.slice/me/{SUBGROUP}"),
    ],
)
def test_what_the_kernel_counts_of_all_tasks_together(tmp_path: Path, mount: str, own: str) -> None:
    me = os.getpid()
    _write(tmp_path / f"proc/{me}/cgroup", f"3:cpu:/\n0::/{own}\n")
    stat = tmp_path / mount / "user.slice/me/peerload.ab12/cpu.stat"
    _write(stat, "usage_usec 2000000000\nuser_usec 2000000\nsystem_usec 500000\n")
    before_s = own_use(me, "ab12", tmp_path, runs=True).seconds()
    assert before_s is not None
    assert before_s > 2000.0
    assert own_use(0, "ab12", tmp_path, runs=True).seconds() is None, "there is no launcher"
    assert own_use(me, "", tmp_path, runs=True).seconds() is None


def test_the_file_of_a_run_is_looked_for_once(tmp_path: Path) -> None:
    me = os.getpid()
    _write(tmp_path / f"proc/{me}/cgroup", "0::/me\n")
    files = {run: tmp_path / f"sys/fs/cgroup/me/peerload.{run}/cpu.stat" for run in ("ab12", "cd34")}
    _write(files["cd34"], "usage_usec 7000000000\n")
    use = own_use(me, "ab12", tmp_path, runs=False)
    assert (use.seconds() or 0.0) < 1000.0, "its cgroup is not there yet"
    _write(files["ab12"], "usage_usec 2000000000\n")
    assert (use.seconds() or 0.0) > 2000.0
    _write(files["ab12"], "usage_usec 3000000000\nuser_usec 5\n")
    (tmp_path / f"proc/{me}/cgroup").rename(tmp_path / "cgroup")
    assert (use.seconds() or 0.0) > 3000.0
    (tmp_path / "cgroup").rename(tmp_path / f"proc/{me}/cgroup")
    vars(use)["_launcher"].run = "cd34"
    assert (use.seconds() or 0.0) > 7000.0, "another launcher"


@pytest.mark.usefixtures("quiet", "two_cores")
def test_while_nothing_changes_and_no_task_runs_samples_are_rarer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(tmp_path)
    pauses: list[float] = []
    busy = iter([0.0, 0.0, 0.0, 1.0, 1.0])

    async def next_tick(every_s: float) -> None:
        pauses.append(every_s)
        clock.has_tasks = len(pauses) == 3
        share = next(busy)
        clock.advance(share, share)

    monkeypatch.setattr(sensors, "next_tick", next_tick)
    with pytest.raises(RuntimeError):  # of the end of what is played
        asyncio.run(clock.sensors.run())
    assert pauses == [2.0, 2.0, 4.0, 2.0, 2.0, 2.0]


BUSY = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"


def test_without_cgroups_the_use_of_short_lived_children_and_of_orphans_is_seen(tmp_path: Path) -> None:
    """A stand-in for a launcher runs children that end before anybody looks, one that its parent leaves, and one that stays."""
    launcher = f"""
import ctypes, os, resource, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
subprocess.run(["sh", "-c", "for n in 1 2 3; do sh -c '{BUSY}'; done; (sh -c '{BUSY}; exec sleep 60' & )"])
while True:
    time.sleep(0.01)
    try:
        tree = [open(f"/proc/{{pid}}/stat").read().split() for pid in open(f"/proc/self/task/{{os.getpid()}}/children").read().split()]
    except FileNotFoundError:
        continue
    if tree and all(fields[1] == "(sleep)" for fields in tree):
        break
print(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) + sum(int(f) for one in tree for f in one[13:17]) / os.sysconf("SC_CLK_TCK"), flush=True)
sys.stdin.read()
subprocess.run(["kill", *[one[0] for one in tree]])
"""
    with subprocess.Popen(
        [sys.executable, "-I", "-c", launcher], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        used_s = float(process.stdout.readline())
        told_s = own_use(process.pid, "ab12", tmp_path, runs=True).seconds()
        before_s = time.process_time()
        at_rest_s = own_use(process.pid, "ab12", tmp_path, runs=False).seconds()
        process.communicate()
    assert told_s is not None
    assert at_rest_s is not None
    assert used_s > 0.0
    assert told_s > before_s + used_s - 0.05
    assert at_rest_s > before_s, "what has ended is in its launcher's count"


@pytest.mark.usefixtures("quiet", "two_cores")
def test_pressure_is_told_when_it_changes(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    clock.second(0.0, 0.0)  # the files may be missing
    for waited in ("0.00", "1.00", "20.00", "20.00"):
        _write(tmp_path / "proc/pressure/memory", f"some avg10={waited} avg60=0.00\n")
        clock.second(0.0, 0.0)
    assert [(one.cpu_pressure, one.mem_pressure) for one in clock.told] == [(0.0, 0.0), (0.0, 0.2)]
