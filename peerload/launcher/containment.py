"""Containment: a unit holds all processes of one task, wherever they are started, so that they can be frozen, thawed, killed and
limited together.

The launcher takes the first backend that works. With ``cgroup2`` the kernel keeps the set of processes: none leaves it by a
session of its own, by going into the background or by forking fast. ``bare`` (proc_scan.py) needs nothing and finds processes by
scanning /proc. Both implement `Units` and pass one conformance suite. Each lists
in ``unenforced`` what it cannot promise. The variable ``PEERLOAD_UNIT`` of a process names its unit: ``<launcher
run>/peerload-<key>``.

`MemoryLimits` has three backends. ``cgroup2``: the kernel limits the unit as a whole (swap excluded), and kills all of it.
``cgroup1``: the same by a cgroup in the memory hierarchy of version 1, with any units. ``rlimit``: limits each process by itself
(RLIMIT_DATA); works everywhere. Memory use is read when the leader of a task has ended.

Cgroups lie under one root per launcher run, below the cgroup that the launcher was started in, so that limits and the end of that
cgroup hold for tasks too. Used by the launcher alone; the imports are few.
"""

from __future__ import annotations

import _thread
import errno
import os
import signal
import time

from peerload.launcher.protocol import Message
from peerload.launcher.record_log import log_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from peerload.launcher.cgroup_clone import CgroupClone


class Units:
    """Base of the containment backends. ``key`` names the attempt."""

    name: str
    unenforced: tuple[str, ...]
    is_proc_scan = False
    root = ""
    """Directory of the units; "" if there is none."""

    def orphans(self) -> set[int]:
        """Children of the launcher, where orphans are reparented to it."""
        return set()

    def enter(self, key: str, *, is_fresh: bool = False, inside: str = "", clones: bool = False) -> None:
        """Place processes that the launcher starts, until `leave`, into the unit of this key, from their first
        instruction on. is_fresh: the unit is not reused from another task, nor for one. inside: key of the unit that it is
        part of, where units can have parts; the process enters it by itself. clones: a `CgroupClone` starts the process.
        Raises OSError if there can be no such unit, or it exists already."""

    def leave(self) -> None:
        """Stop putting new processes into the unit that was entered."""

    def entrances(self, key: str) -> list[str]:  # noqa: ARG002 -- as `Cgroup2` has it
        """The files into which a process writes 0 to enter this unit."""
        return []

    def leader_started(self, key: str, pid: int, start: int) -> None:
        """Record the leader of the session. start: clock ticks since boot (0 unless `is_proc_scan`)."""

    def freeze(self, key: str) -> None:
        """Stop all its processes, and those that they fork, until `thaw`."""
        raise NotImplementedError

    def refreeze(self, keys: list[str]) -> None:
        """Freeze again those of these tasks that a user has thawed; for backends where that is possible."""

    def thaw(self, key: str) -> None:
        raise NotImplementedError

    def kill(self, key: str) -> None:
        """Send SIGKILL to all its processes, frozen or not. Repeat it until `close` returns True."""
        raise NotImplementedError

    def processes(self, key: str) -> list[int]:
        raise NotImplementedError

    def processes_of(self, keys: list[str]) -> dict[str, list[int]]:
        """Pids of several units, cheaply: hidden processes may be missing, and some may have ended."""
        return {key: self.processes(key) for key in keys}

    def cpu_s(self, key: str) -> float:  # noqa: ARG002 -- as `Cgroup2` has it
        """Processor seconds of all its processes, ended ones too; -1 if they are not counted together."""
        return -1.0

    def close(self, key: str) -> bool:
        """Remove the unit of an ended leader that is not reaped yet. → True if no process was left. Otherwise the
        processes are being killed, and it has to be called again."""
        raise NotImplementedError

    def remove(self) -> None:
        """Remove the root; no unit is left."""


class MemoryLimits:
    """Base class of the memory backends. ``key`` names the attempt; a ``limit_bytes`` of 0 means no limit."""

    name: str
    unenforced: tuple[str, ...] = ()
    root = ""
    """Directory of its cgroups; "" if it makes none."""

    def enter(self, key: str, limit_bytes: int) -> None:
        """Count the memory of processes that the launcher starts, until `leave`, for this key, whose unit is entered.
        Raises OSError."""
        raise NotImplementedError

    def entrances(self, key: str) -> list[str]:  # noqa: ARG002 -- as `Cgroup1Memory` has it
        """The files into which a process writes 0 to have its memory counted for this key, beside those of the unit."""
        return []

    def leave(self) -> None:
        """Stop counting new processes for the task that was entered."""

    def limit(self, key: str, pid: int, limit_bytes: int) -> bool:
        """Set the limit for a running process and its descendants. → False if it has more already and has to be
        killed."""
        raise NotImplementedError

    def is_out_of_memory(self, key: str) -> bool:  # noqa: ARG002 -- as `Cgroup1Memory` has it
        """True if one of its processes was killed for lack of memory; the others have to be killed, too."""
        return False

    def used(self, key: str) -> MemoryUse:
        """Memory use of a task whose leader has ended; before its unit is closed."""
        raise NotImplementedError

    def close(self, key: str) -> None:
        raise NotImplementedError

    def remove(self) -> None:
        """Remove the root cgroup; there are no tasks left."""


SIGNALS_DEFAULT = tuple(
    number for number in range(1, signal.NSIG) if number not in {signal.SIGKILL, signal.SIGSTOP, 32, 33}
)
"""Signals that are reset to their default effect in a started process; the C library reserves two others."""
PREFIX = "peerload-"
REPORT_S = 10.0
"""Interval of log lines about processes that do not end."""
SHORT_BYTES = 4096


def kill_one(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def write(path: str, raw: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, raw)
    finally:
        os.close(fd)


def read(path: str) -> bytes:
    """Read a file of the kernel; empty if it is gone."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.readall()
    except OSError:
        return b""


def read_short(path: str) -> bytes:
    """Read a file of the kernel that is shorter than SHORT_BYTES, with one read; empty if it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, SHORT_BYTES)
    except OSError:  # as above
        return b""
    finally:
        os.close(fd)


ROOT_PREFIX = "peerload."
FREEZE_LOOKS_MAX = 20
FREEZE_LOOK_S = 0.0005
"""Number and interval of the checks that a cgroup is frozen; the next call finds processes that have forked meanwhile."""
IDLE_MAX = 64
"""Empty directories kept for the next tasks."""
OPEN_MAX = 12
"""Directories whose files (three each) are kept open."""
END_LOOK_S_MAX = 0.05
SUBGROUP = "peerload-agent"
"""The cgroup of the agent and its launcher within the agent's service, beside the cgroups of tasks."""
FORK_PAUSE_S, FORKS_IN_A_ROW_MAX = 0.04, 2
"""After such a pause, this many processes are forked by `CgroupClone`; the rest of a burst is moved between cgroups. The first
move after 10 to 20 ms waits 14 ms for an RCU grace period, but a fork takes ten times the processor time."""
SPAWN_PAUSE_S, SPAWNS_IN_A_ROW_MAX = 0.01, 50
"""Pause and number for spawns by `CgroupClone`, each of which takes 0.07 ms more processor time than a move."""
_OUTSIDE = (
    "a process that its user, or root, moves to another cgroup or has started by a service (systemd-run, at, docker)"
)


class Cgroup2(Units):
    """`Units` of the unified hierarchy: cgroup.freeze (Linux 5.2) and, if available, cgroup.kill (5.14). Raises OSError where
    these do not work.

    An empty directory is used again: making and removing one costs more than starting a process. has_memory: memory can be
    limited. This needs a parent cgroup without processes: the root of all, or that of a service whose manager
    keeps the agent in a subgroup called SUBGROUP (systemd 254). Processes are never moved out of the
    way: a service whose own cgroup is divided cannot be started again.
    """

    name = "cgroup2"
    has_memory = False
    unenforced: tuple[str, ...] = (_OUTSIDE,)

    def __init__(self, own: str, root_name: str) -> None:
        self.root = f"{self._place(own)}/{root_name}"
        self._paths: dict[str, str] = {}
        self._used_before: dict[str, float] = {}
        self._idle: list[str] = []
        self._files: dict[str, tuple[int, int, int]] = {}
        """The open files of directories: cgroup.procs, cgroup.events, cpu.stat."""
        self._made = 0
        self._frozen: set[str] = set()
        self._fresh: set[str] = set()
        self._started_s = 0.0
        self._in_a_row = 0
        self._is_moved = False
        self.clone: CgroupClone | None = None
        self._home = os.open(f"{own}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        try:
            self._make_root()
            try:
                self._try_out()
            except OSError:
                kill_and_remove(self.root)
                raise
            self._try_clone()
        except OSError:
            os.close(self._home)
            raise

    def _place(self, own: str) -> str:
        """The directory of the root, for a launcher in the cgroup ``own``: beside it if that is SUBGROUP and memory is limited."""
        above, _, last = own.rpartition("/")
        place = above if last == SUBGROUP and not read(above + "/cgroup.procs") else own
        if b"memory" in read(place + "/cgroup.controllers").split() and _divides_memory(place):
            self.has_memory = True
            return place
        return own

    def _make_root(self) -> None:
        os.mkdir(self.root)
        self.has_memory = self.has_memory and _divides_memory(self.root)

    def _try_out(self) -> None:
        try:
            self.enter("trial")
        finally:
            self.leave()
        self.freeze("trial")
        self.thaw("trial")
        self.kill("trial")
        if not self.close("trial"):
            raise OSError(errno.EBUSY, "a unit does not become empty")

    def _try_clone(self) -> None:
        """Find out whether a process can be started in another cgroup; a container may forbid that."""
        if _thread._count():  # noqa: SLF001 -- see prefers_clone
            return
        from peerload.launcher.cgroup_clone import CgroupClone  # noqa: PLC0415 -- it costs memory, and is needed here alone

        self.clone = clone = CgroupClone(SIGNALS_DEFAULT)
        self.enter("trial", clones=True)
        try:
            pid = clone.fork()
            if pid == 0:
                os._exit(0)
            if os.waitpid(pid, 0)[1]:  # see kill
                self.clone = None
        except OSError as error:
            log_line(f"processes cannot be started in another cgroup: error={error.strerror}")
            self.clone = None
        finally:
            clone.leave()
            self.close("trial")

    def prefers_clone(self, *, in_lane: bool = False) -> bool:
        """True if ``clone`` should start the next process, instead of a move to its unit. in_lane: the process follows another in a
        lane, and is not forked. Nothing is forked while another thread runs: the child would wait for it."""
        if self.clone is None or (in_lane and not self.clone.can_spawn):
            return False
        spawns = SPAWN_PAUSE_S, SPAWNS_IN_A_ROW_MAX
        pause_s, most = spawns if self.clone.can_spawn else (FORK_PAUSE_S, FORKS_IN_A_ROW_MAX)
        now_s = time.monotonic()
        self._in_a_row = self._in_a_row + 1 if now_s - self._started_s < pause_s else 0
        self._started_s = now_s
        return self._in_a_row < most and (self.clone.can_spawn or not _thread._count())  # noqa: SLF001 -- as above

    def path(self, key: str) -> str:
        """The directory of this unit. Raises KeyError if there is none."""
        return self._paths[key]

    def enter(self, key: str, *, is_fresh: bool = False, inside: str = "", clones: bool = False) -> None:
        """See `Units`. The launcher enters the cgroup itself, since a child starts in the cgroup of its parent; with
        ``clones`` it does not."""
        if key in self._paths:
            raise FileExistsError(errno.EEXIST, "its unit exists")
        if is_fresh:
            self._fresh.add(key)
        while self._idle and not is_fresh and not inside:
            path = self._idle.pop()
            try:
                self._begin_in(path, clones=clones)
            except OSError as error:  # a service manager removes empty cgroups
                if error.errno not in {errno.ENOENT, errno.ENODEV}:
                    raise
                self._close_files(path)
                continue
            self._paths[key] = path
            self._used_before[key] = self._cpu_s(path)
            return
        self._made += 1
        path = f"{self._paths[inside] if inside else self.root}/{self._made}"
        if inside:
            self._fresh.add(key)
        try:
            os.mkdir(path)
        except FileNotFoundError:
            if inside:
                raise
            self._make_root()
            os.mkdir(path)
        self._paths[key] = path
        if not inside:
            self._begin_in(path, clones=clones)

    def _begin_in(self, path: str, *, clones: bool) -> None:
        if clones and self.clone is not None:
            self.clone.enter(path)
            return
        if path in self._files:
            os.write(self._files[path][0], b"0")
        else:
            write(path + "/cgroup.procs", b"0")
        self._is_moved = True

    def _open_files(self, path: str) -> None:
        """Keep the files of a reused directory open."""
        if path in self._files or len(self._files) >= OPEN_MAX:
            return
        names = (("cgroup.procs", os.O_WRONLY), ("cgroup.events", os.O_RDONLY), ("cpu.stat", os.O_RDONLY))
        fds: list[int] = []
        try:
            for name, mode in names:
                fds.append(os.open(f"{path}/{name}", mode | os.O_CLOEXEC))
        except OSError:  # for example, no descriptor is free
            for fd in fds:
                os.close(fd)
        else:
            self._files[path] = fds[0], fds[1], fds[2]

    def _close_files(self, path: str) -> None:
        for fd in self._files.pop(path, ()):
            os.close(fd)

    def _events(self, path: str) -> bytes:
        files = self._files.get(path)
        return read_short(path + "/cgroup.events") if files is None else _read_open(files[1])

    def _cpu_s(self, path: str) -> float:
        """The processor seconds that a cgroup has counted, -1 where it counts none."""
        files = self._files.get(path)
        fields = (read_short(path + "/cpu.stat") if files is None else _read_open(files[2])).split(maxsplit=2)
        return int(fields[1]) / 1e6 if fields[:1] == [b"usage_usec"] else -1.0

    def leave(self) -> None:
        if self._is_moved:
            os.write(self._home, b"0")
            self._is_moved = False
        elif self.clone is not None:
            self.clone.leave()

    def entrances(self, key: str) -> list[str]:
        return [self._paths[key] + "/cgroup.procs"]

    def freeze(self, key: str) -> None:
        self._frozen.add(key)
        _set_frozen(self._paths[key], is_frozen=True)

    def thaw(self, key: str) -> None:
        self._frozen.discard(key)
        _set_frozen(self._paths[key], is_frozen=False)

    def kill(self, key: str) -> None:
        """See `Units`. The directory is not used again: Linux 6.15 and later immediately kill a process that is cloned
        into a cgroup with another count of kills than its parent's cgroup."""
        self._fresh.add(key)
        kill_cgroup(self._paths[key])

    def processes(self, key: str) -> list[int]:
        return processes_below(self._paths[key])

    def cpu_s(self, key: str) -> float:
        """See `Units`. Earlier tasks in the same directory do not count."""
        counted_s = self._cpu_s(self._paths[key])
        return counted_s - self._used_before.get(key, 0.0) if counted_s >= 0 else -1.0

    def close(self, key: str) -> bool:
        path = self._paths.get(key)
        if path is None:
            return True
        if b"populated 0" not in self._events(path) and os.path.isdir(path):
            self.kill(key)
            return False
        if key in self._frozen:
            self.thaw(key)
        del self._paths[key]
        self._used_before.pop(key, None)
        if key not in self._fresh and len(self._idle) < IDLE_MAX:
            self._idle.append(path)
            self._open_files(path)
        else:
            self._close_files(path)
            if not removed_all(path):
                log_line(f"cannot remove cgroup: path={path}")
        self._fresh.discard(key)
        return True

    def remove(self) -> None:
        if not removed_all(self.root):
            log_line(f"cannot remove cgroup: path={self.root}")


def cgroup_units(wanted: str, name: str) -> Cgroup2 | None:
    """Tested units in cgroups; None if they do not work, or another kind is ``wanted`` ("" for any). name: of their root."""
    if wanted not in {"", Cgroup2.name}:
        return None
    try:
        own = own_cgroup()
        return Cgroup2(own, name) if own else None
    except OSError as error:
        log_line(f"cgroup2 cannot be used here: error={error}")
        return None


def own_cgroup(controller: bytes = b"") -> str:
    """The directory of this process's own cgroup: of version 2, or of version 1 for a controller. "" if that hierarchy is not
    mounted, or the cgroup is outside of the mounted part."""
    path = ""
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, where = line.split(b":", 2)
        if controller in controllers.split(b","):
            path = os.fsdecode(where)
    if not path or "/../" in path + "/":
        return ""
    for line in read("/proc/self/mountinfo").splitlines():
        fields, _, more = line.partition(b" - ")
        system, _, options = more.split(b" ", 2)
        if (system == b"cgroup" and controller in options.split(b",")) if controller else (system == b"cgroup2"):
            root, place = (
                os.fsdecode(field.decode("unicode_escape").encode("latin-1")) for field in fields.split()[3:5]
            )
            if root == "/":
                return (place + path).rstrip("/")
            if (path + "/").startswith(root + "/"):
                return (place + path[len(root) :]).rstrip("/")
    return ""


def kill_cgroup(path: str) -> None:
    """Send SIGKILL to all processes in a cgroup and below it, frozen or not. Before Linux 5.14 they are frozen first and killed one
    by one, so that none forks meanwhile."""
    try:
        write(path + "/cgroup.kill", b"1")
    except OSError:
        _kill_one_by_one(path)


def _kill_one_by_one(path: str) -> None:
    try:
        _set_frozen(path, is_frozen=True)
        for _ in range(FREEZE_LOOKS_MAX):
            if b"frozen 1" in read(path + "/cgroup.events"):
                break
            time.sleep(FREEZE_LOOK_S)
        for pid in processes_below(path):
            kill_one(pid)
        for below in reversed(directories_below(path)):
            _set_frozen(below, is_frozen=False)
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENODEV}:  # it is gone
            log_line(f"cannot kill the processes of a cgroup: path={path} error={error.strerror}")


def kill_and_remove(root: str) -> None:
    """Kill all processes in a cgroup and remove it. Returns when it is gone, however long that takes: a task that is reported as
    dead while it runs would run twice."""
    wait_s, report_at_s = 0.001, time.monotonic() + REPORT_S
    while not removed_all(root):
        for path in directories_below(root):
            kill_cgroup(path)
        if time.monotonic() > report_at_s:
            report_at_s += REPORT_S
            log_line(f"leftover processes do not end: pids={processes_below(root)}")
        time.sleep(wait_s)
        wait_s = min(wait_s * 2, END_LOOK_S_MAX)


def removed_all(path: str) -> bool:
    """Remove a cgroup and all below it that have no processes. → True if it is gone."""
    for below in reversed(directories_below(path)):
        try:
            os.rmdir(below)
        except OSError:
            continue
    return not os.path.isdir(path)


def directories_below(path: str) -> list[str]:
    """A cgroup and all below it, parents first; a task may have made some of its own."""
    found = [path] if os.path.isdir(path) else []
    for at in found:  # grows while it is read
        try:
            with os.scandir(at) as entries:
                found += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue
    return found


def processes_below(path: str) -> list[int]:
    """The pids in a cgroup and all below it."""
    return [int(pid) for below in directories_below(path) for pid in read(below + "/cgroup.procs").split()]


def _set_frozen(path: str, *, is_frozen: bool) -> None:
    write(path + "/cgroup.freeze", b"1" if is_frozen else b"0")


def _divides_memory(path: str) -> bool:
    """True if the cgroups below this one have their memory counted, each for itself."""
    try:
        write(path + "/cgroup.subtree_control", b"+memory")
    except OSError:
        return False
    return True


def _read_open(fd: int) -> bytes:
    """The present content of an open file of the kernel; empty if it is gone."""
    try:
        return os.pread(fd, SHORT_BYTES, 0)
    except OSError:
        return b""


OWN_SHARE = 0.97
"""A killed task that used this share of its limit was killed for that limit, not because the machine was short of memory."""
SLACK_BYTES = 4 << 20
"""Memory that the launcher may take while it starts a limited process."""
TRIAL_BYTES = 64 << 20


class MemoryUse(Message):
    """Memory use of an ended task. limit_bytes: 0 = none. peak_bytes: peak of the whole task, 0 = unknown. kills: processes
    killed for lack of memory. is_own: by the task's own limit."""

    limit_bytes: int = 0
    peak_bytes: int = 0
    kills: int = 0
    is_own: bool = False
    is_refused: bool = False
    """True if nothing was killed, since a process that wants more gets an error."""


class Cgroup2Memory(MemoryLimits):
    """Limits of the units themselves, in cgroups of version 2. A unit with a limit is used only once, since its peak
    cannot be reset."""

    name = Cgroup2.name

    def __init__(self, units: Cgroup2) -> None:
        self._units = units
        self._before: dict[str, tuple[int, int]] = {}

    def enter(self, key: str, limit_bytes: int) -> None:
        """See `MemoryLimits`. Kills in a reused unit before this task do not count."""
        self._before[key] = limit_bytes, _count(self._units.path(key) + "/memory.events", b"oom_kill")

    def limit(self, key: str, pid: int, limit_bytes: int) -> bool:  # noqa: ARG002 -- as the others have it
        """See `MemoryLimits`. The kernel kills a task that has more already."""
        path = self._units.path(key)
        write(path + "/memory.oom.group", b"1")
        if os.path.exists(path + "/memory.swap.max"):
            write(path + "/memory.swap.max", b"0")
        write(path + "/memory.max", b"%d" % limit_bytes)
        return True

    def used(self, key: str) -> MemoryUse:
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


class Cgroup1Memory(MemoryLimits):
    """A cgroup of version 1 for each limited task. Raises OSError where that does not work."""

    name = "cgroup1"

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
            os.mkdir(self.root)
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

    def enter(self, key: str, limit_bytes: int) -> None:
        """See `MemoryLimits`. The launcher enters the cgroup itself, since a child starts in the cgroup of its parent.
        The limit is set later, so that it does not apply to the launcher."""
        if not limit_bytes:
            return
        self._made += 1
        path = f"{self.root}/{self._made}"
        try:
            os.mkdir(path)
        except FileNotFoundError:  # a service manager removes empty cgroups
            os.mkdir(self.root)
            os.mkdir(path)
        self._paths[key] = path
        self._limits[key] = limit_bytes
        self._is_inside = True
        write(path + "/cgroup.procs", b"0")

    def entrances(self, key: str) -> list[str]:
        return [self._paths[key] + "/cgroup.procs"] if key in self._paths else []

    def leave(self) -> None:
        if self._is_inside:
            os.write(self._home, b"0")
            self._is_inside = False

    def limit(self, key: str, pid: int, limit_bytes: int) -> bool:  # noqa: ARG002 -- as the others have it
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
        if not removed_all(self.root):
            log_line(f"cannot remove cgroup: path={self.root}")


class RlimitMemory(MemoryLimits):
    """RLIMIT_DATA of each process: its private writable memory, including untouched pages. A child inherits the limit of
    its parent, so the launcher sets the limit for itself while it starts the child."""

    name = "rlimit"
    unenforced = (
        "memory is limited for each process of a task by itself, not for the task; shared memory is not counted",
    )

    def __init__(self) -> None:
        import resource  # noqa: PLC0415 -- it costs memory, and is needed here alone

        self._resource = resource
        self._limits: dict[str, int] = {}
        self._before: tuple[int, int] | None = None

    def enter(self, key: str, limit_bytes: int) -> None:
        """See `MemoryLimits`. The launcher needs memory itself, so a limit below that is set after the start."""
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

    def used(self, key: str) -> MemoryUse:
        return MemoryUse(self._limits.get(key, 0), is_refused=True)

    def close(self, key: str) -> None:
        self._limits.pop(key, None)


def memory_limits(wanted: str, units: Units, root_name: str) -> MemoryLimits:
    """The best backend that works here. wanted: the only one that is tried ("": any). root_name: name of its directory."""
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
    """The number after this name in a file with one name and number a line; 0 if it is absent."""
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
