"""Memory limits: what a task may have at most, held by whichever of these works, found by trying.

``cgroup2``: the task's unit is limited (its whole, swap excluded), and all of it is ended when it takes more. ``cgroup1``: the
same by a group of its own in the memory hierarchy, whatever its unit is. ``rlimit``: each process by itself is refused more
(RLIMIT_DATA), everywhere. What a task was short of is read when its leader has ended. Used by the launcher alone; the
imports are few.
"""

from __future__ import annotations

import errno
import os

from peerload.launcher.cgroups import Cgroup2, own_cgroup, removed_all
from peerload.launcher.containment import read, write
from peerload.launcher.record_log import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from peerload.launcher.containment import Units

    class Memory(Protocol):
        """What each does. ``key`` names the attempt, ``limit_bytes`` is 0 for one that has none."""

        name: str
        unenforced: tuple[str, ...]
        root: str
        """Where it makes directories of its own; "" if it makes none."""

        def enter(self, key: str, limit_bytes: int, *, inside: str = "") -> None:
            """What the launcher starts from here on is counted for this key, whose unit it is in; ``inside``: it is counted
            for that key as well. Raises OSError if that cannot be."""

        def leave(self) -> None:
            """Until here."""

        def limit(self, key: str, pid: int, limit_bytes: int) -> bool:
            """The limit holds from here on for this process and what it starts. → whether it does; False if it has more
            already and is to be killed."""

        def is_short(self, key: str) -> bool:
            """Whether one of its processes was killed for want of memory, so that the others are to be."""

        def used(self, key: str) -> MemoryUse:
            """Its leader has ended: how it fared. Before its unit is closed."""

        def close(self, key: str) -> None:
            """It is not needed any more."""

        def remove(self) -> None:
            """Nor is any other."""


OWN_SHARE = 0.97
"""Who had this much of its limit when it was killed has reached that, not the machine's end."""
SLACK_BYTES = 4 << 20
"""While a limited process is made the launcher itself may take no more than this."""
TRIAL_BYTES = 64 << 20


class MemoryUse:
    """How a task fared. limit_bytes: 0 = it had none; peak_bytes: the most that all of it had at once, 0 = not known;
    kills: how many of its processes were killed for want of memory; is_own: because of its own limit."""

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
        """Nothing is killed: a process that wants more is told that there is none."""


class MemoryOfUnits:
    """By the unit itself, of the unified hierarchy. What has a limit has a unit that is used once, since its peak cannot be
    set back."""

    name = Cgroup2.name
    unenforced: tuple[str, ...] = ()
    root = ""

    def __init__(self, units: Cgroup2) -> None:
        self._units = units
        self._before: dict[str, tuple[int, int]] = {}

    def enter(self, key: str, limit_bytes: int, *, inside: str = "") -> None:  # noqa: ARG002 -- as the others have it
        """See `Memory`. It is there; kills of those that were in it before are not ours."""
        self._before[key] = limit_bytes, _count(self._units.path(key) + "/memory.events", b"oom_kill")

    def leave(self) -> None:
        """See `Memory`."""

    def limit(self, key: str, pid: int, limit_bytes: int) -> bool:  # noqa: ARG002 -- as the others have it
        """See `Memory`. What has more already is killed by the kernel."""
        path = self._units.path(key)
        write(path + "/memory.oom.group", b"1")
        if os.path.exists(path + "/memory.swap.max"):  # noqa: PTH110 -- pathlib costs the launcher a megabyte
            write(path + "/memory.swap.max", b"0")
        write(path + "/memory.max", b"%d" % limit_bytes)
        return True

    def is_short(self, key: str) -> bool:  # noqa: ARG002 -- as the others have it
        """See `Memory`. The kernel kills all of it."""
        return False

    def used(self, key: str) -> MemoryUse:
        """See `Memory`."""
        limit_bytes, before = self._before.get(key, (0, 0))
        path = self._units.path(key)
        kills = max(_count(path + "/memory.events", b"oom_kill") - before, 0)
        if not limit_bytes:
            return MemoryUse(kills=kills)
        peak_bytes = _number(path + "/memory.peak")
        is_own = _count(path + "/memory.events", b"oom") > 0 or peak_bytes >= limit_bytes * OWN_SHARE
        return MemoryUse(limit_bytes, peak_bytes, kills, is_own=is_own)

    def close(self, key: str) -> None:
        """See `Memory`. The unit goes by itself."""
        self._before.pop(key, None)

    def remove(self) -> None:
        """See `Memory`."""


class MemoryGroups:
    """By a group for each limited task in the memory hierarchy of the first version. Raises OSError where it does not
    work."""

    name = "cgroup1"
    unenforced: tuple[str, ...] = ()

    def __init__(self, own: str, root_name: str) -> None:
        self.root = f"{own}/{root_name}"
        self._paths: dict[str, str] = {}
        self._limits: dict[str, int] = {}
        self._over: set[str] = set()
        self._left: list[str] = []
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
            raise OSError(errno.ENOTSUP, "memory cannot be limited, or it is not told who was killed for it")
        self.close(key)

    def enter(self, key: str, limit_bytes: int, *, inside: str = "") -> None:
        """See `Memory`. The launcher goes in itself, since a child is born where its parent is; the limit comes later, so
        that the launcher is under none but that of a task which it starts something inside of."""
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
        """See `Memory`."""
        if self._is_inside:
            os.write(self._home, b"0")
            self._is_inside = False

    def limit(self, key: str, pid: int, limit_bytes: int) -> bool:  # noqa: ARG002 -- as the others have it
        """See `Memory`."""
        path = self._paths[key]
        try:
            write(path + "/memory.limit_in_bytes", b"%d" % limit_bytes)
            write(path + "/memory.memsw.limit_in_bytes", b"%d" % limit_bytes)
        except FileNotFoundError:  # no swap is counted here
            return True
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            self._over.add(key)
            return False
        return True

    def is_short(self, key: str) -> bool:
        """See `Memory`. The kernel kills one process at a time."""
        path = self._paths.get(key, "")
        return key in self._over or bool(path and _count(path + "/memory.oom_control", b"oom_kill"))

    def used(self, key: str) -> MemoryUse:
        """See `Memory`."""
        path = self._paths.get(key, "")
        if not path:
            return MemoryUse()
        limit_bytes = self._limits[key]
        peak_bytes = _number(path + "/memory.max_usage_in_bytes")
        kills = _count(path + "/memory.oom_control", b"oom_kill") + (key in self._over)
        return MemoryUse(limit_bytes, peak_bytes, kills, is_own=peak_bytes >= limit_bytes * OWN_SHARE)

    def close(self, key: str) -> None:
        """See `Memory`. A group that still has processes, which nothing can kill, goes later."""
        path = self._paths.pop(key, "")
        self._limits.pop(key, None)
        self._over.discard(key)
        if path:
            self._left = [left for left in (*self._left, path) if not removed_all(left)]

    def remove(self) -> None:
        """See `Memory`."""
        if not removed_all(self.root):
            say(f"{self.root} cannot be removed")


class MemoryOfProcesses:
    """Each process by itself, by RLIMIT_DATA: its private writable memory, also what it has asked for and not touched yet.
    A child is born with its parent's limit, so that the launcher takes it on for a moment."""

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
        """See `Memory`. The launcher needs some itself: a smaller limit is set when the process is there."""
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
        """See `Memory`."""
        if self._before is not None:
            self._resource.setrlimit(self._resource.RLIMIT_DATA, self._before)
            self._before = None

    def limit(self, key: str, pid: int, limit_bytes: int) -> bool:
        """See `Memory`. It cannot raise that itself."""
        _, hard = self._resource.prlimit(pid, self._resource.RLIMIT_DATA)
        least = limit_bytes if hard == self._resource.RLIM_INFINITY else min(limit_bytes, hard)
        try:
            self._resource.prlimit(pid, self._resource.RLIMIT_DATA, (least, least))
        except PermissionError:  # a program that runs as another user; it was born with the limit, and may raise it
            say(f"{key} can raise its limit of memory: it runs as another user")
        return True

    def is_short(self, key: str) -> bool:  # noqa: ARG002 -- as the others have it
        """See `Memory`. Nothing is killed."""
        return False

    def used(self, key: str) -> MemoryUse:
        """See `Memory`."""
        return MemoryUse(self._limits.get(key, 0), is_refused=True)

    def close(self, key: str) -> None:
        """See `Memory`."""
        self._limits.pop(key, None)

    def remove(self) -> None:
        """See `Memory`."""


def memory_limits(wanted: str, units: Units, root_name: str) -> Memory:
    """The best that works here; ``wanted`` narrows it to one ("" for any). ``root_name``: of the directory that it may make."""
    if wanted in {"", Cgroup2.name} and isinstance(units, Cgroup2) and units.has_memory:
        return MemoryOfUnits(units)
    if wanted in {"", MemoryGroups.name}:
        try:
            own = own_cgroup(b"memory")
            if own:
                return MemoryGroups(own, root_name)
        except OSError as error:
            say(f"memory cannot be limited by {MemoryGroups.name} here: {error}")
    return MemoryOfProcesses()


def _count(path: str, name: bytes) -> int:
    """The number behind a name, in a file of such lines; 0 if it is not there."""
    for line in read(path).splitlines():
        found, _, number = line.partition(b" ")
        if found == name:
            return int(number)
    return 0


def _number(path: str) -> int:
    """The number that a file holds; 0 if there is none."""
    raw = read(path).strip()
    return int(raw) if raw.isdigit() else 0


def _own_data_bytes() -> int:
    fields = read("/proc/self/statm").split()
    return int(fields[5]) * os.sysconf("SC_PAGE_SIZE")
