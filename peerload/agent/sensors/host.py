"""What this machine is and how busy it is, read with psutil."""

from __future__ import annotations

import asyncio
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from peerload.model.events import LoadSampled

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLE_S = 1.0
AVERAGE_S = 5.0
"""Utilization is averaged exponentially over this."""
TELL_CPUS = 0.05
"""A change of less than this (in cores) is not worth an event."""
TELL_PRESSURE = 0.05
TELL_MEMORY_SHARE = 1 / 32
"""Nor is a smaller change of the memory in use than this share of all."""


class Sensors:
    """Puts a LoadSampled whenever the readings have changed noticeably.

    cpus_busy: cores kept busy by anybody; cpus_busy_foreign: the same less what ``ours()``, the tasks' requested
    cores, explains (at least 0): reading every process each second would cost more than it tells.
    """

    def __init__(self, put: Callable[[LoadSampled], None], ours: Callable[[], float]) -> None:
        self._put = put
        self._ours = ours
        self._busy_s, self._total_s = _cpu_seconds()
        self._cpus = os.cpu_count() or 1
        self._average: float | None = None
        self._told = -1.0
        self._told_bytes = 0
        self._told_pressure = 0.0, 0.0
        self._pressure = Pressure()

    async def run(self) -> None:
        """Sample for ever."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += SAMPLE_S
            await asyncio.sleep(max(due - loop.time(), 0.0))
            due = max(due, loop.time() - SAMPLE_S)  # after a pause, once is enough
            self.sample()

    def sample(self) -> None:
        """Read once."""
        busy_s, total_s = _cpu_seconds()
        passed_s = total_s - self._total_s
        if passed_s <= 0:
            return
        now = (busy_s - self._busy_s) / passed_s * self._cpus
        self._busy_s, self._total_s = busy_s, total_s
        weight = 1.0 - math.exp(-SAMPLE_S / AVERAGE_S)
        before = now if self._average is None else self._average
        self._average = min(max(before + weight * (now - before), 0.0), float(self._cpus))
        memory = psutil.virtual_memory()
        used_bytes = int(memory.total - memory.available)
        pressure = self._pressure.read()
        if (
            abs(self._average - self._told) >= TELL_CPUS
            or any(abs(now - told) >= TELL_PRESSURE for now, told in zip(pressure, self._told_pressure, strict=True))
            or abs(used_bytes - self._told_bytes) >= memory.total * TELL_MEMORY_SHARE
        ):
            self._told, self._told_bytes, self._told_pressure = self._average, used_bytes, pressure
            foreign = max(self._average - self._ours(), 0.0)
            self._put(LoadSampled(self._average, foreign, used_bytes, *pressure))


class Pressure:
    """How much has to wait here, as the kernel tells it; nothing, where it does not. ``root``: where /proc is."""

    def __init__(self, root: Path = Path("/")) -> None:
        paths = (root / "proc/pressure" / name for name in ("cpu", "memory"))
        self._files: list[Path | None] = [path if _text(path) else None for path in paths]

    def read(self) -> tuple[float, float]:
        """The share of the last 10 s in which somebody had to wait for a core, and for memory."""
        cpu, memory = (0.0 if path is None else _some_10_s(_text(path)) for path in self._files)
        return cpu, memory


def _some_10_s(text: str) -> float:
    """``some avg10=1.53 …`` is 0.0153."""
    found = re.match(r"some avg10=([0-9.]+)", text)
    return min(float(found[1]) / 100, 1.0) if found is not None else 0.0


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
