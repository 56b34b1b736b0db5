"""Memory limits of tasks, enforced by the first backend that works.

``cgroup2``: the kernel limits the unit of the task as a whole (swap excluded), and kills all of it. ``cgroup1``: the
same by a cgroup in the memory hierarchy of version 1, whatever the unit is. ``rlimit``: each process by itself is
refused more (RLIMIT_DATA); works everywhere. What a task was short of is read when its leader has ended. Used by the
launcher alone; the imports are few.
"""

from __future__ import annotations

import errno
import os

from peerload.launcher.cgroups import Cgroup2, own_cgroup, removed_all
from peerload.launcher.containment import read, write
from peerload.launcher.record_log import log_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from peerload.launcher.containment import Units

    class MemoryLimits(Protocol):
        """The interface of a backend. ``key`` names the attempt; a ``limit_bytes`` of 0 is no limit."""

        name: str
        unenforced: tuple[str, ...]
        root: str
        """Directory of its cgroups; "" if it makes none."""

        def enter(self, key: str, limit_bytes: int, *, inside: str = "") -> None:
            """Count what the launcher starts from here on for this key, whose unit is entered. inside: count it for
            that key as well. Raises OSError."""

        def leave(self) -> None:
            """End what `enter` began."""

        def limit(self, key: str, pid: int, limit_bytes: int) -> bool:
            """Set the limit for a running process and its descendants. → False if it has more already and has to be
            killed."""

        def is_out_of_memory(self, key: str) -> bool:
            """True if a process of it was killed for want of memory, so that the others have to be."""

        def used(self, key: str) -> MemoryUse:
            """Memory use of a task whose leader has ended; before its unit is closed."""

        def close(self, key: str) -> None:
            """Forget the task."""

        def remove(self) -> None:
            """Remove what is left; there are no tasks."""


OWN_SHARE = 0.97
"""A killed task that had this share of its limit was killed for its own limit, not for the machine's."""
SLACK_BYTES = 4 << 20
"""Memory that the launcher may take while it starts a limited process."""
TRIAL_BYTES = 64 << 20


class MemoryUse:
    """Memory use of an ended task. limit_bytes: 0 = none. peak_bytes: the most that all of it had at once, 0 = unknown.
    kills: processes killed for want of memory. is_own: for the task's own limit."""

    __slots__ = ("is_own", "is_refused", "kills", "limit_bytes", "peak_bytes")

    def __init__(
        self,
        limit_bytes: int = 0,
        peak_bytes: int = 0,
        kills: int = 0,
        *,
        is_own: bool = False,
        is_refused: bool = False,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = peak_bytes
        self.kills = kills
        self.is_own = is_own
        self.is_refused = is_refused
        """Nothing was killed: a process that wants more gets an error."""


class Cgroup2Memory:
    """Limits of the units themselves, in cgroups of version 2. A unit with a limit is used once, since its peak cannot
    be reset."""

    name = Cgroup2.name
    unenforced: tuple[str, ...] = ()
    root = ""

    def __init__(self, units: Cgroup2) -> None:
        self._units = units
        self._before: dict[str, tuple[int, int]] = {}

    def enter(self, key: str, limit_bytes: int, *, inside: str = "") -> None:  # noqa: ARG002 -- as the others have it
        """See `MemoryLimits`. Kills in a reused unit before this task do not count."""
        self._before[key] = limit_bytes, _count(self._units.path(key) + "/memory.events", b"oom_kill")

    def leave(self) -> None:
        """See `MemoryLimits`."""

    def limit(self, key: str, pid: int, limit_bytes: int) -> bool:  # noqa: ARG002 -- as the others have it
        """See `MemoryLimits`. The kernel kills a task that has more already."""
        path = self._units.path(key)
        write(path + "/memory.oom.group", b"1")
        if os.path.exists(path + "/memory.swap.max"):  # noqa: PTH110 -- pathlib costs the launcher a megabyte
            write(path + "/memory.swap.max", b"0")
        write(path + "/memory.max", b"%d" % limit_bytes)
        return True

    def is_out_of_memory(self, key: str) -> bool:  # noqa: ARG002 -- as the others have it
        """See `MemoryLimits`. The kernel kills all of it."""
        return False

    def used(self, key: str) -> MemoryUse:
        """See `MemoryLimits`."""
        limit_bytes, before = self._before.get(key, (0, 0))
        path = self._units.path(key)
        kills = max(_count(path + "/memory.events", b"oom_kill") - before, 0)
        if not limit_bytes:
            return MemoryUse(kills=kills)
        peak_bytes = _number(path + "/memory.peak")
        is_own = _count(path + "/memory.events", b"oom") > 0 or peak_bytes >= limit_bytes * OWN_SHARE
        return MemoryUse(limit_bytes, peak_bytes, kills, is_own=is_own)

    def close(self, key: str) -> None:
        """See `MemoryLimits`. The unit is closed elsewhere."""
        self._before.pop(key, None)

    def remove(self) -> None:
        """See `MemoryLimits`."""


class Cgroup1Memory:
    """A cgroup of version 1 for each limited task. Raises OSError where that does not work."""

    name = "cgroup1"
    unenforced: tuple[str, ...] = ()

    def __init__(self, own: str, root_name: str) -> None:
        self.root = f"{own}/{root_name}"
        self._paths: dict[str, str] = {}
        self._limits: dict[str, int] = {}
        self._over_limit: set[str] = set()
        self._not_removed: list[str] = []
        self._made = 0
        self._is_inside = False
        self._home = os.open(f"{own}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.mkdir(self.root)  # noqa: PTH102 -- pathlib costs the launcher a megabyte
            try:
                self._try_out()
            except OSError:
                removed_all(self.root)
                raise
        except OSError:
            os.close(self._home)
            raise

    def _try_out(self) -> None:
        key = "trial"
        try:
            self.enter(key, TRIAL_BYTES)
        finally:
            self.leave()
        path = self._paths[key]
        self.limit(key, 0, TRIAL_BYTES)
        if _number(path + "/memory.limit_in_bytes") != TRIAL_BYTES or b"oom_kill " not in read(
            path + "/memory.oom_control"
        ):
            raise OSError(errno.ENOTSUP, "memory cannot be limited, or kills are not counted")
        self.close(key)

    def enter(self, key: str, limit_bytes: int, *, inside: str = "") -> None:
        """See `MemoryLimits`. The launcher enters the cgroup itself, since a child starts in that of its parent. The
        limit is set later, so that the launcher is under no limit but that of a task inside which it starts something.
        """
        if inside in self._paths:
            self._is_inside = True
            write(self._paths[inside] + "/cgroup.procs", b"0")
            return
        if not limit_bytes:
            return
        self._made += 1
        path = f"{self.root}/{self._made}"
        try:
            os.mkdir(path)  # noqa: PTH102 -- as above
        except FileNotFoundError:  # a service manager tidies up what is empty
            os.mkdir(self.root)  # noqa: PTH102 -- as above
            os.mkdir(path)  # noqa: PTH102 -- as above
        self._paths[key] = path
        self._limits[key] = limit_bytes
        self._is_inside = True
        write(path + "/cgroup.procs", b"0")

    def leave(self) -> None:
        """See `MemoryLimits`."""
        if self._is_inside:
            os.write(self._home, b"0")
            self._is_inside = False

    def limit(self, key: str, pid: int, limit_bytes: int) -> bool:  # noqa: ARG002 -- as the others have it
        """See `MemoryLimits`."""
        path = self._paths[key]
        try:
            write(path + "/memory.limit_in_bytes", b"%d" % limit_bytes)
            write(path + "/memory.memsw.limit_in_bytes", b"%d" % limit_bytes)
        except FileNotFoundError:  # no swap is counted here
            return True
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            self._over_limit.add(key)
            return False
        return True

    def is_out_of_memory(self, key: str) -> bool:
        """See `MemoryLimits`. The kernel kills one process at a time."""
        path = self._paths.get(key, "")
        return key in self._over_limit or bool(path and _count(path + "/memory.oom_control", b"oom_kill"))

    def used(self, key: str) -> MemoryUse:
        """See `MemoryLimits`."""
        path = self._paths.get(key, "")
        if not path:
            return MemoryUse()
        limit_bytes = self._limits[key]
        peak_bytes = _number(path + "/memory.max_usage_in_bytes")
        kills = _count(path + "/memory.oom_control", b"oom_kill") + (key in self._over_limit)
        return MemoryUse(limit_bytes, peak_bytes, kills, is_own=peak_bytes >= limit_bytes * OWN_SHARE)

    def close(self, key: str) -> None:
        """See `MemoryLimits`. A cgroup that still has unkillable processes is removed later."""
        path = self._paths.pop(key, "")
        self._limits.pop(key, None)
        self._over_limit.discard(key)
        if path:
            self._not_removed = [left for left in (*self._not_removed, path) if not removed_all(left)]

    def remove(self) -> None:
        """See `MemoryLimits`."""
        if not removed_all(self.root):
            log_line(f"cannot remove cgroup: {self.root}")


class RlimitMemory:
    """RLIMIT_DATA of each process: its private writable memory, untouched pages too. A child inherits its parent's
    limit, so the launcher takes on the limit for a moment."""

    name = "rlimit"
    root = ""
    unenforced: tuple[str, ...] = (
        "memory is limited for each process of a task by itself, not for the task; shared memory is not counted",
    )

    def __init__(self) -> None:
        import resource  # noqa: PLC0415 -- it costs memory, and is needed here alone

        self._resource = resource
        self._limits: dict[str, int] = {}
        self._before: tuple[int, int] | None = None

    def enter(self, key: str, limit_bytes: int, *, inside: str = "") -> None:  # noqa: ARG002 -- as the others have it
        """See `MemoryLimits`. The launcher needs memory itself: a smaller limit is set when the process exists."""
        if not limit_bytes:
            return
        self._limits[key] = limit_bytes
        before = self._resource.getrlimit(self._resource.RLIMIT_DATA)
        soft = max(limit_bytes, _own_data_bytes() + SLACK_BYTES)
        if before[1] != self._resource.RLIM_INFINITY:
            soft = min(soft, before[1])
        self._resource.setrlimit(self._resource.RLIMIT_DATA, (soft, before[1]))
        self._before = before

    def leave(self) -> None:
        """See `MemoryLimits`."""
        if self._before is not None:
            self._resource.setrlimit(self._resource.RLIMIT_DATA, self._before)
            self._before = None

    def limit(self, key: str, pid: int, limit_bytes: int) -> bool:
        """See `MemoryLimits`. The process cannot raise the limit."""
        _, hard = self._resource.prlimit(pid, self._resource.RLIMIT_DATA)
        least = limit_bytes if hard == self._resource.RLIM_INFINITY else min(limit_bytes, hard)
        try:
            self._resource.prlimit(pid, self._resource.RLIMIT_DATA, (least, least))
        except PermissionError:  # a program that runs as another user; it inherited the limit, and may raise it
            log_line(f"task can raise its memory limit, it runs as another user: key={key}")
        return True

    def is_out_of_memory(self, key: str) -> bool:  # noqa: ARG002 -- as the others have it
        """See `MemoryLimits`. Nothing is killed."""
        return False

    def used(self, key: str) -> MemoryUse:
        """See `MemoryLimits`."""
        return MemoryUse(self._limits.get(key, 0), is_refused=True)

    def close(self, key: str) -> None:
        """See `MemoryLimits`."""
        self._limits.pop(key, None)

    def remove(self) -> None:
        """See `MemoryLimits`."""


def memory_limits(wanted: str, units: Units, root_name: str) -> MemoryLimits:
    """The best backend that works here. wanted: only this one ("": any). root_name: name of its directory."""
    if wanted in {"", Cgroup2.name} and isinstance(units, Cgroup2) and units.has_memory:
        return Cgroup2Memory(units)
    if wanted in {"", Cgroup1Memory.name}:
        try:
            own = own_cgroup(b"memory")
            if own:
                return Cgroup1Memory(own, root_name)
        except OSError as error:
            log_line(f"cannot limit memory by {Cgroup1Memory.name}: error={error}")
    return RlimitMemory()


def _count(path: str, name: bytes) -> int:
    """The number after a name in a file of such lines; 0 if it is absent."""
    for line in read(path).splitlines():
        found, _, number = line.partition(b" ")
        if found == name:
            return int(number)
    return 0


def _number(path: str) -> int:
    """The number in a file; 0 if there is none."""
    raw = read(path).strip()
    return int(raw) if raw.isdigit() else 0


def _own_data_bytes() -> int:
    fields = read("/proc/self/statm").split()
    return int(fields[5]) * os.sysconf("SC_PAGE_SIZE")
