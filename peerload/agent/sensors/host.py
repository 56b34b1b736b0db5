"""What this machine is and how busy it is, read with psutil."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from peerload.agent.launcher_cgroup import ROOT_PREFIX
from peerload.model.events import LoadSampled

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("peerload.agent")

SAMPLE_S = 1.0
AVERAGE_S = 5.0
"""Utilization is averaged exponentially over this."""
TELL_CPUS = 0.05
"""A change of less than this (in cores) is not worth an event."""
TELL_PRESSURE = 0.05
TELL_MEMORY_SHARE = 1 / 32
"""Nor is a smaller change of the memory in use than this share of all."""


class Pressure(NamedTuple):
    """Share of the last ten seconds in which some task of the machine had to wait for it (PSI), 0 … 1; None where the
    kernel does not say."""

    cpu: float | None = None
    memory: float | None = None


class Sensors:
    """Puts a LoadSampled whenever the readings have changed noticeably.

    cpus_busy: cores kept busy by anybody; cpus_busy_foreign: the same less what our tasks have of it (at least 0). That is
    what ``used_s()``, the processor seconds of all our tasks so far, says; where it is None, the cores that they have
    asked for (``ours()``): reading every process each second would cost more than it tells.
    """

    def __init__(
        self,
        put: Callable[[LoadSampled], None],
        ours: Callable[[], float],
        used_s: Callable[[], float | None] = lambda: None,
        root: Path = Path("/"),
    ) -> None:
        self._put = put
        self._ours = ours
        self._used_s = used_s
        self._root = root
        self._busy_s, self._total_s = _cpu_seconds()
        self._tasks_s = used_s()
        self._cpus = os.cpu_count() or 1
        self._average: float | None = None
        self._foreign = 0.0
        self._told = LoadSampled(-1.0, 0.0, 0)
        self._can_read = True

    async def run(self) -> None:
        """Sample for ever."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += SAMPLE_S
            await asyncio.sleep(max(due - loop.time(), 0.0))
            due = max(due, loop.time() - SAMPLE_S)  # after a pause, once is enough
            try:
                self.sample()
            except OSError as error:  # such as too many open files: what was read last holds
                if self._can_read:
                    log.warning("this machine cannot be read now: %s", error)
                self._can_read = False
            else:
                self._can_read = True

    def sample(self) -> None:
        """Read once."""
        busy_s, total_s = _cpu_seconds()
        passed_s = total_s - self._total_s
        if passed_s <= 0:
            return
        now = (busy_s - self._busy_s) / passed_s * self._cpus
        self._busy_s, self._total_s = busy_s, total_s
        tasks = self._cores_of_tasks(passed_s / self._cpus)
        weight = 1.0 - math.exp(-SAMPLE_S / AVERAGE_S)
        before = now if self._average is None else self._average
        self._average = min(max(before + weight * (now - before), 0.0), float(self._cpus))
        if tasks is None:
            self._foreign = max(self._average - self._ours(), 0.0)
        else:
            self._foreign += weight * (max(now - tasks, 0.0) - self._foreign)
        memory = psutil.virtual_memory()
        foreign = min(self._foreign, self._average)
        waited = pressure(self._root)
        sampled = LoadSampled(
            self._average,
            foreign,
            int(memory.total - memory.available),
            cpu_pressure=waited.cpu or 0.0,
            mem_pressure=waited.memory or 0.0,
        )
        if self._is_news(sampled, memory.total):
            self._told = sampled
            self._put(sampled)

    def _is_news(self, now: LoadSampled, mem_bytes: int) -> bool:
        told = self._told
        return (
            abs(now.cpus_busy - told.cpus_busy) >= TELL_CPUS
            or abs(now.cpus_busy_foreign - told.cpus_busy_foreign) >= TELL_CPUS
            or abs(now.cpu_pressure - told.cpu_pressure) >= TELL_PRESSURE
            or abs(now.mem_pressure - told.mem_pressure) >= TELL_PRESSURE
            or abs(now.mem_used_bytes - told.mem_used_bytes) >= mem_bytes * TELL_MEMORY_SHARE
        )

    def _cores_of_tasks(self, passed_s: float) -> float | None:
        """How many our tasks have kept busy since the last time; None where that cannot be told (there is a new launcher,
        or none that counts)."""
        before, self._tasks_s = self._tasks_s, self._used_s()
        if before is None or self._tasks_s is None or self._tasks_s < before or passed_s <= 0:
            return None
        return (self._tasks_s - before) / passed_s


def tasks_cpu_s(launcher_pid: int, run: str, root: Path = Path("/")) -> float | None:
    """The processor seconds of all tasks of this run of a launcher so far, also of those that have ended; None where the
    kernel does not count them together (without cgroups of version 2)."""
    for line in _text(root / f"proc/{launcher_pid}/cgroup").splitlines():
        if line.startswith("0::") and launcher_pid and run:
            stat = _text(root / "sys/fs/cgroup" / line[3:].lstrip("/") / f"{ROOT_PREFIX}{run}" / "cpu.stat")
            found = dict(words for words in map(str.split, stat.splitlines()) if len(words) == 2)  # noqa: PLR2004 -- name and number
            usage = found.get("usage_usec", "")
            return int(usage) / 1e6 if usage.isdecimal() else None
    return None


def pressure(root: Path = Path("/")) -> Pressure:
    """What the kernel says of waiting; it may be built, or started, without."""
    return Pressure(*(_waited(_text(root / "proc/pressure" / name)) for name in Pressure._fields))


def _waited(text: str) -> float | None:
    """``some avg10=1.25 avg60=…`` → 0.0125."""
    found = re.search(r"^some avg10=([0-9.]+)", text)
    return min(float(found[1]) / 100, 1.0) if found is not None else None


def _cpu_seconds() -> tuple[float, float]:
    """(busy, total) seconds of all cores since boot."""
    times = psutil.cpu_times()
    idle_s = times.idle + times.iowait
    total_s = sum(times[:8])  # guest time is counted in user time already
    return total_s - idle_s, total_s


def machine_facts(root: Path = Path("/")) -> tuple[float, int]:
    """(cpus, memory in bytes) this process may use: the affinity mask and the cgroup's limits where they say less."""
    cpus = float(len(os.sched_getaffinity(0)))
    mem_bytes = int(psutil.virtual_memory().total)
    for quota, period in _cpu_quotas(root):
        if quota > 0 and period > 0:
            cpus = min(cpus, quota / period)
    for limit in _memory_limits(root):
        if 0 < limit < mem_bytes:
            mem_bytes = limit
    return max(cpus, 0.01), mem_bytes


def _cpu_quotas(root: Path) -> list[tuple[int, int]]:
    found = []
    for directory in _cgroups(root, ""):
        words = _text(directory / "cpu.max").split()
        if len(words) == 2 and words[0].isdecimal():  # noqa: PLR2004 -- "QUOTA PERIOD"
            found.append((int(words[0]), int(words[1])))
    for directory in _cgroups(root, "cpu"):
        quota, period = _text(directory / "cpu.cfs_quota_us"), _text(directory / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():
            found.append((int(quota), int(period)))
    return found


def _memory_limits(root: Path) -> list[int]:
    texts = [_text(directory / "memory.max") for directory in _cgroups(root, "")]
    texts += [_text(directory / "memory.limit_in_bytes") for directory in _cgroups(root, "memory")]
    return [int(text) for text in texts if text.isdecimal()]


def _cgroups(root: Path, controller: str) -> list[Path]:
    """The directories of this process's cgroup and of those above it, for a v1 controller or ("") for v2."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controllers if controller else root / "sys/fs/cgroup"
            own = base / path.lstrip("/")
            return [own, *(parent for parent in own.parents if parent.is_relative_to(base))]
    return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
