"""Containment by cgroups of version 2: the kernel keeps the set of processes of a task. See containment.py.

Cgroups lie under one root per launcher run, below the cgroup that the launcher was started in, so that limits and the end of
that cgroup hold for tasks too. Used by the launcher alone; the imports are few.
"""

from __future__ import annotations

import _thread
import errno
import os
import signal
import time

from peerload.launcher.containment import REPORT_S, SHORT_BYTES, kill_one, read, read_short, write
from peerload.launcher.record_log import log_line

ROOT_PREFIX = "peerload."
FREEZE_LOOKS_MAX = 20
FREEZE_LOOK_S = 0.0005
"""A cgroup is looked at this many times, this far apart, until it is frozen; what has forked ahead of that is found by the next
call."""
IDLE_MAX = 64
"""Empty directories kept for the next tasks."""
OPEN_MAX = 12
"""Directories whose files are kept open, three of each."""
END_LOOK_S_MAX = 0.05
SUBGROUP = "peerload-agent"
"""The cgroup that the service of an agent has for the agent and its launcher, beside those of tasks."""
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

PAUSE_S = 0.04
"""After so long without a start a process is forked: a move between cgroups would wait for a grace period of RCU, 10 ms or
more. A stream of starts is made by moves, which cost a tenth of the processor time."""
FORKS_IN_A_ROW_MAX = 2
"""Starts by fork before a burst goes on by moves."""
SYS_CLONE3 = 435
CLONE_INTO_CGROUP = 0x2_0000_0000
_OUTSIDE = (
    "a process that its user, or root, moves to another cgroup or has started by a service (systemd-run, at, docker)"
)


class Cgroup2:
    """`Units` of the unified hierarchy: cgroup.freeze (Linux 5.2) and, where there is one, cgroup.kill (5.14). Raises OSError where
    this does not work.

    A directory that has become empty is used again: to make and to remove one costs more than to start a process. has_memory:
    memory can be limited, which is possible only where no process is in the cgroup above: in the root of all, or where a service
    manager was told to keep the agent in a cgroup by itself, called SUBGROUP (systemd 254). Processes are never moved out of the
    way: a service whose own cgroup is divided cannot be started again.
    """

    name = "cgroup2"
    is_proc_scan = False
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
        self._birthplace = -1
        self._started_s = 0.0
        self._in_a_row = 0
        self._clone: Callable[[int], int] | None = None
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
        """The directory of the root, for a launcher in the cgroup ``own``: beside the agent's, where its service has both."""
        above, _, last = own.rpartition("/")
        place = above if last == SUBGROUP and not read(above + "/cgroup.procs") else own
        if b"memory" in read(place + "/cgroup.controllers").split() and _divides_memory(place):
            self.has_memory = True
            return place
        return own

    def _make_root(self) -> None:
        os.mkdir(self.root)  # noqa: PTH102 -- pathlib costs the launcher a megabyte
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
        if _thread._count():  # noqa: SLF001 -- see prefers_fork
            return
        self._clone = _clone_into()
        self.enter("trial", forks=True)
        try:
            pid = self.fork()
            if pid == 0:
                os._exit(0)
            if os.waitpid(pid, 0)[1]:  # see kill
                self._clone = None
        except OSError as error:
            log_line(f"processes cannot be started in another cgroup: error={error.strerror}")
            self._clone = None
        finally:
            self.leave()
            self.close("trial")

    def prefers_fork(self) -> bool:
        """True if the next process had better be started by `fork`, which moves nothing, than by entering its unit: a
        fork costs more processor time, the first move after a pause 10 ms. Never beside another thread: the child would
        wait for it."""
        now_s = time.monotonic()
        self._in_a_row = self._in_a_row + 1 if now_s - self._started_s < PAUSE_S else 0
        self._started_s = now_s
        return self._clone is not None and self._in_a_row < FORKS_IN_A_ROW_MAX and not _thread._count()  # noqa: SLF001 -- as above

    def fork(self) -> int:
        """Fork into the unit that was entered with ``forks`` → the pid; 0 in the child, which may only exec or end.
        Raises OSError."""
        assert self._clone is not None
        return self._clone(self._birthplace)

    def orphans(self) -> set[int]:
        """See `Units`. Orphans go to the reaper they went to before."""
        return set()

    def path(self, key: str) -> str:
        """The directory of this unit. Raises KeyError if there is none."""
        return self._paths[key]

    def enter(self, key: str, *, is_fresh: bool = False, inside: str = "", forks: bool = False) -> None:
        """See `Units`. The launcher enters the cgroup itself, since a child starts in that of its parent; not if it
        ``forks``."""
        if key in self._paths:
            raise FileExistsError(errno.EEXIST, "its unit is there")
        if is_fresh:
            self._fresh.add(key)
        while self._idle and not is_fresh and not inside:
            path = self._idle.pop()
            try:
                self._begin_in(path, forks=forks)
            except OSError as error:  # a service manager tidies up what is empty
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
            os.mkdir(path)  # noqa: PTH102 -- as above
        except FileNotFoundError:
            if inside:
                raise
            self._make_root()
            os.mkdir(path)  # noqa: PTH102 -- as above
        self._paths[key] = path
        self._begin_in(path, forks=forks)

    def _begin_in(self, path: str, *, forks: bool) -> None:
        if forks:
            self._birthplace = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        elif path in self._files:
            os.write(self._files[path][0], b"0")
        else:
            write(path + "/cgroup.procs", b"0")

    def _open_files(self, path: str) -> None:
        """Keep the files of a directory open that is used again and again."""
        if path in self._files or len(self._files) >= OPEN_MAX:
            return
        names = (("cgroup.procs", os.O_WRONLY), ("cgroup.events", os.O_RDONLY), ("cpu.stat", os.O_RDONLY))
        fds: list[int] = []
        try:
            for name, mode in names:
                fds.append(os.open(f"{path}/{name}", mode | os.O_CLOEXEC))
        except OSError:  # short of descriptors, say
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
        words = (read_short(path + "/cpu.stat") if files is None else _read_open(files[2])).split(maxsplit=2)
        return int(words[1]) / 1e6 if words[:1] == [b"usage_usec"] else -1.0

    def leave(self) -> None:
        """See `Units`."""
        if self._birthplace >= 0:
            os.close(self._birthplace)
            self._birthplace = -1
        else:
            os.write(self._home, b"0")

    def leader_started(self, key: str, pid: int, start: int) -> None:
        """See `Units`. The kernel knows."""

    def freeze(self, key: str) -> None:
        """See `Units`."""
        self._frozen.add(key)
        _set_frozen(self._paths[key], is_frozen=True)

    def refreeze(self, keys: list[str]) -> None:
        """See `Units`. Nobody else thaws them."""

    def thaw(self, key: str) -> None:
        """See `Units`."""
        self._frozen.discard(key)
        _set_frozen(self._paths[key], is_frozen=False)

    def kill(self, key: str) -> None:
        """See `Units`. The directory is not used again: Linux 6.15 and later kill at birth what is cloned into a cgroup
        that was killed more or less often than that of its parent."""
        self._fresh.add(key)
        kill_cgroup(self._paths[key])

    def processes(self, key: str) -> list[int]:
        """See `Units`."""
        return processes_below(self._paths[key])

    def processes_of(self, keys: list[str]) -> dict[str, list[int]]:
        """See `Units`. The kernel knows them all."""
        return {key: self.processes(key) for key in keys}

    def cpu_s(self, key: str) -> float:
        """See `Units`. What the directory was used for before does not count."""
        counted_s = self._cpu_s(self._paths[key])
        return counted_s - self._used_before.get(key, 0.0) if counted_s >= 0 else -1.0

    def close(self, key: str) -> bool:
        """See `Units`."""
        path = self._paths.get(key)
        if path is None:
            return True
        if b"populated 0" not in self._events(path) and os.path.isdir(path):  # noqa: PTH112 -- gone: with the unit it was inside of
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
                log_line(f"cannot remove cgroup: {path}")
        self._fresh.discard(key)
        return True

    def remove(self) -> None:
        """See `Units`."""
        if not removed_all(self.root):
            log_line(f"cannot remove cgroup: {self.root}")


def _clone_into() -> Callable[[int], int]:
    """clone3(CLONE_INTO_CGROUP), Linux 5.7: forks into the cgroup of an open directory."""
    import ctypes  # noqa: PLC0415 -- it costs a megabyte, and is needed here alone

    libc = ctypes.PyDLL(None, use_errno=True)  # it keeps the lock of the interpreter, which the child needs

    def clone(directory: int) -> int:
        arguments = (ctypes.c_uint64 * 11)(CLONE_INTO_CGROUP, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, directory)
        pid = int(libc.syscall(SYS_CLONE3, arguments, ctypes.sizeof(arguments)))
        if pid < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return pid

    return clone


def cgroup_units(wanted: str, name: str) -> Cgroup2 | None:
    """Units in cgroups, tried out; None if they do not work, or another kind is ``wanted`` ("" for any). name: of their root."""
    if wanted not in {"", Cgroup2.name}:
        return None
    try:
        own = own_cgroup()
        return Cgroup2(own, name) if own else None
    except OSError as error:
        log_line(f"cgroup2 cannot be used here: {error}")
        return None


def own_cgroup(controller: bytes = b"") -> str:
    """The directory of this process's own cgroup: that of version 2, or that of version 1 for a controller; "" where none is mounted
    or it lies outside of what is."""
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
    """SIGKILL to all in a cgroup and below it, frozen or not. Before Linux 5.14 one by one, frozen meanwhile, so that nothing forks
    ahead of us."""
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
    """Kill all in a cgroup and remove it; returns when it is gone, however long that takes: a task that is reported as dead while it
    runs would run twice."""
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
    """Remove a cgroup with all below it, as far as they have no processes. → whether it is gone."""
    for below in reversed(directories_below(path)):
        try:
            os.rmdir(below)  # noqa: PTH106 -- as above
        except OSError:
            continue
    return not os.path.isdir(path)  # noqa: PTH112 -- as above


def directories_below(path: str) -> list[str]:
    """A cgroup and all below it, parents first; a task may have made some of its own."""
    found = [path] if os.path.isdir(path) else []  # noqa: PTH112 -- as above
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
