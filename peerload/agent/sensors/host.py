"""Sensors of the host: cores, memory, load and pressure, read from /proc."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from peerload.agent.runtime import next_tick
from peerload.agent.sensors.processes import KernelFile, read_text_of
from peerload.model.events import LoadSampled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from peerload.agent.runtime import EventSink
    from peerload.agent.sensors.energy import EnergySensors

log = logging.getLogger("peerload.agent")

SAMPLE_S = 2.0
QUIET_SAMPLE_S = 4.0
"""Interval while no task runs and the last sample did not change noticeably."""
AVERAGE_S = 5.0
"""Time constant of the exponential average of utilization."""
FOREIGN_AVERAGE_S = 15.0
"""Time constant for foreign load: a short burst must not move tasks."""
FOREIGN_EVERY_S = 3.0
"""Minimum interval of readings of this node's own use: every second sample, or each one while it is quiet."""
CPUS_MIN = 0.01
TICKS = os.sysconf("SC_CLK_TCK")
IOWAIT = 4
"""Index of the iowait time in a line of /proc/stat; idle time is before it."""
REPORT_CPUS = 0.05
"""Smaller changes (in cores) are not reported."""
REPORT_PRESSURE = 0.05
REPORT_WATTS, REPORT_WATTS_SHARE = 2.0, 0.1
REPORT_MEMORY_SHARE = 1 / 32
"""Smaller changes of the memory in use, as a share of all memory, are not reported."""


class OwnTime(Protocol):
    """The processor time of this node's own work."""

    @property
    def has_tasks(self) -> bool:
        """True while a task runs."""

    def seconds(self) -> float | None:
        """Processor seconds so far, None if unknown."""


class HostSensors:
    """Puts a LoadSampled whenever the readings have changed noticeably.

    cpus_busy: cores in use by all programs, averaged over AVERAGE_S. cpus_busy_foreign: the same without our own work,
    averaged over FOREIGN_AVERAGE_S. A period in which the time of our own work is unknown, or decreases, does not count for
    foreign load.
    """

    def __init__(
        self,
        inbox: EventSink,
        own_use: OwnTime,
        energy: EnergySensors | None = None,
        root: Path = Path("/"),
    ) -> None:
        self._inbox = inbox
        self._own_use = own_use
        self._energy = energy
        self._all_busy_s = 0.0
        self._cores = Cores(root)
        self._memory = KernelFile(Path("/proc/meminfo"))
        self._mem_limits = _memory_limits(root)
        self._cpu_pressure = KernelFile(root / "proc/pressure/cpu")
        self._mem_pressure = KernelFile(root / "proc/pressure/memory")
        self._average: float | None = None
        self._foreign = 0.0
        self._before = own_use.seconds()
        self._busy_s = self._passed_s = 0.0
        self._reported = LoadSampled(-1.0, 0.0, 0)
        self._is_steady = False
        self._unreadable: set[str] = set()

    async def run(self) -> None:
        while True:
            await next_tick(QUIET_SAMPLE_S if self._is_steady and not self._own_use.has_tasks else SAMPLE_S)
            with self._reading("load"):
                self.sample()
            if self._energy is not None:
                with self._reading("energy"):
                    await self._energy.sample(self._cores.machine_s, self._all_busy_s)

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Suppress an OSError, such as too many open files: the last reading stays valid. The first error is logged."""
        try:
            yield
        except OSError as error:
            if what not in self._unreadable:
                log.warning("cannot read a sensor of this machine: sensor=%s error=%s", what, error)
            self._unreadable.add(what)
        else:
            self._unreadable.discard(what)

    def sample(self) -> None:
        busy_s, passed_s = self._cores.since_last()
        if passed_s <= 0:
            return
        self._all_busy_s += busy_s
        now = busy_s / passed_s
        before = now if self._average is None else self._average
        self._average = min(max(before + _weight(passed_s, AVERAGE_S) * (now - before), 0.0), self._cores.cpus)
        self._sample_foreign(busy_s, passed_s)
        mem_bytes, available_bytes = _memory(self._memory.read())
        mem_used_bytes = mem_bytes - available_bytes
        if self._mem_limits and (lowest := min(self._mem_limits, key=lambda one: one[0]))[0] < mem_bytes:
            mem_bytes, mem_used_bytes = lowest[0], lowest[1]()
        sampled = LoadSampled(
            self._average,
            min(max(self._foreign, 0.0), self._cores.cpus),
            mem_used_bytes,
            cpu_pressure=_waited(self._cpu_pressure),
            mem_pressure=_waited(self._mem_pressure),
            cpus=self._cores.cpus,
            watts=self._energy.measured_watts if self._energy is not None else None,
        )
        self._is_steady = not self._has_changed(sampled, mem_bytes)
        if not self._is_steady:
            self._reported = sampled
            self._inbox.put(sampled)

    def _sample_foreign(self, busy_s: float, passed_s: float) -> None:
        """Update the average of foreign load. The two clocks never tick at the same time, so that single periods may be
        negative; they are averaged unchanged."""
        self._busy_s += busy_s
        self._passed_s += passed_s
        if self._passed_s < FOREIGN_EVERY_S:
            return
        before, now = self._before, self._own_use.seconds()
        if before is not None and now is not None and now >= before:
            foreign = max((self._busy_s - (now - before)) / self._passed_s, -1.0)
            self._foreign += _weight(self._passed_s, FOREIGN_AVERAGE_S) * (foreign - self._foreign)
        self._before, self._busy_s, self._passed_s = now, 0.0, 0.0

    def _has_changed(self, now: LoadSampled, mem_bytes: int) -> bool:
        last = self._reported
        return (
            abs(now.cpus_busy - last.cpus_busy) >= REPORT_CPUS
            or abs(now.cpus_busy_foreign - last.cpus_busy_foreign) >= REPORT_CPUS
            or abs(now.cpu_pressure - last.cpu_pressure) >= REPORT_PRESSURE
            or abs(now.mem_pressure - last.mem_pressure) >= REPORT_PRESSURE
            or abs((now.watts or 0.0) - (last.watts or 0.0)) >= REPORT_WATTS_SHARE * (last.watts or 0.0) + REPORT_WATTS
            or abs(now.mem_used_bytes - last.mem_used_bytes) >= mem_bytes * REPORT_MEMORY_SHARE
        )


def _weight(passed_s: float, average_s: float) -> float:
    return 1.0 - math.exp(-passed_s / average_s)


class Cores:
    """The cores that this process and its tasks may use, and their busy time.

    cpus: the number of cores in the affinity mask, or the cgroup quota if that is less. Busy time of these cores
    excludes idle and iowait, and includes time taken by a hypervisor (steal). Under a quota, it is the time that the cgroup
    has used or, if that is more, the time that others use of the cores that the quota needs.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._stat = KernelFile(root / "proc/stat")
        self.machine_s = 0.0
        """Busy seconds of all cores of the machine, including those that this process may not use."""
        self._mask = os.sched_getaffinity(0)
        self._lines_max = max(self._mask) + 2
        self.cpus, self._usage = float(len(self._mask)), None
        for cpus, usage in _cpu_quotas(root):
            if cpus < self.cpus:
                self.cpus, self._usage = max(cpus, CPUS_MIN), usage
        self._last = self._read()

    def since_last(self) -> tuple[float, float]:
        """(busy core seconds, seconds passed) since the last call; both 0 if no time has passed."""
        last, self._last = self._last, self._read()
        busy_s, total_s, used_s = (now - before for now, before in zip(self._last, last, strict=True))
        passed_s = total_s / len(self._mask)
        if passed_s <= 0:
            return 0.0, 0.0
        if self._usage is not None:
            spare = len(self._mask) - self.cpus
            busy_s = max(used_s, busy_s - spare * passed_s)
        return max(busy_s, 0.0), passed_s

    def _read(self) -> tuple[float, float, float]:
        """(busy, total) seconds of the cores in the mask since boot, and the seconds that the quota's cgroup has used."""
        busy = total = 0
        lines = self._stat.read().split(b"\n", self._lines_max)
        if len(together := lines[0].split()[1:9]) > IOWAIT:
            times = list(map(int, together))
            self.machine_s = (sum(times) - times[IOWAIT - 1] - times[IOWAIT]) / TICKS
        for line in lines[1 : self._lines_max]:
            name, *fields = line.split(maxsplit=9)
            if not name.startswith(b"cpu"):
                break
            if int(name[3:]) in self._mask:
                times = list(map(int, fields[:8]))  # user time already includes guest time
                all_ticks = sum(times)
                total += all_ticks
                busy += all_ticks - times[IOWAIT - 1] - times[IOWAIT]
        return busy / TICKS, total / TICKS, self._usage() if self._usage is not None else 0.0


def _waited(file: KernelFile) -> float:
    """Pressure stall information: the share of the last ten seconds in which some process waited. ``some
    avg10=1.25 avg60=0.80`` → 0.0125; 0 if the kernel does not provide it, or refuses to read it (`psi=0`)."""
    try:
        text = file.read()
    except OSError:
        return 0.0
    found = re.search(rb"^some avg10=([0-9.]+)", text)
    return min(float(found[1]) / 100, 1.0) if found is not None else 0.0


def _memory(meminfo: bytes) -> tuple[int, int]:
    """(total, available) bytes of memory."""
    found = re.match(rb"MemTotal: +([0-9]+) kB\n(?:.*\n)*?MemAvailable: +([0-9]+) kB\n", meminfo)
    return (int(found[1]) << 10, int(found[2]) << 10) if found is not None else (0, 0)


def machine_facts(root: Path = Path("/")) -> tuple[float, int]:
    """(cpus, memory in bytes) this process may use: the affinity mask, and the cgroup's limits where they are lower."""
    cpus = min([float(len(os.sched_getaffinity(0))), *(quota for quota, _ in _cpu_quotas(root))])
    mem_bytes = _memory(KernelFile(Path("/proc/meminfo")).read())[0]
    for limit, _ in _memory_limits(root):
        mem_bytes = min(limit, mem_bytes)
    return max(cpus, CPUS_MIN), mem_bytes


def _cpu_quotas(root: Path) -> list[tuple[float, Callable[[], float]]]:
    """Quota in cores of each cgroup of this process, and a function that reads its processor seconds."""
    found: list[tuple[float, Callable[[], float]]] = []
    for directory in _cgroups(root, ""):
        words = read_text_of(directory / "cpu.max").split()
        if len(words) == 2 and words[0].isdecimal() and int(words[0]) > 0:  # noqa: PLR2004 -- "QUOTA PERIOD"
            found.append((int(words[0]) / int(words[1]), partial(_used_s, directory / "cpu.stat")))
    counted = _cgroups(root, "cpuacct")
    for depth, directory in enumerate(_cgroups(root, "cpu")):
        quota, period = read_text_of(directory / "cpu.cfs_quota_us"), read_text_of(directory / "cpu.cfs_period_us")
        if quota.isdecimal() and int(quota) > 0 and period.isdecimal():
            usage = counted[depth] if depth < len(counted) else directory
            found.append((int(quota) / int(period), partial(_used_s, usage / "cpuacct.usage")))
    return found


def _used_s(path: Path) -> float:
    """Processor seconds that a cgroup has counted. The file has microseconds after a name, or only nanoseconds."""
    words = read_text_of(path).split()
    if words[:1] == ["usage_usec"]:
        return int(words[1]) / 1e6
    return int(words[0]) / 1e9 if words[:1] and words[0].isdecimal() else 0.0


def _memory_limits(root: Path) -> list[tuple[int, Callable[[], int]]]:
    """Limit in bytes of each cgroup of this process, and a function that reads its use."""
    files = [(directory / "memory.max", "memory.current") for directory in _cgroups(root, "")]
    files += [(directory / "memory.limit_in_bytes", "memory.usage_in_bytes") for directory in _cgroups(root, "memory")]
    found = [(read_text_of(file), partial(_used_bytes, file.with_name(usage))) for file, usage in files]
    return [(int(text), used) for text, used in found if text.isdecimal() and int(text) > 0]


def _used_bytes(usage: Path) -> int:
    """Memory that a cgroup uses, without the file cache that it can give back."""
    used, stat = read_text_of(usage), read_text_of(usage.with_name("memory.stat"))
    cache = map(
        int, re.findall(r"^(?:total_)?inactive_file ([0-9]+)$", stat, re.MULTILINE)
    )  # v1 also has a value without the child cgroups
    return max(int(used) - max(cache, default=0), 0) if used.isdecimal() else 0


def _cgroups(root: Path, controller: str) -> list[Path]:
    """Directories of this process's cgroup and of those above it, for a v1 controller or ("") for v2."""
    for line in read_text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controllers if controller else root / "sys/fs/cgroup"
            own = base / path.lstrip("/")
            return [own, *(parent for parent in own.parents if parent.is_relative_to(base))]
    return []
