"""Units that the kernel keeps: a cgroup for each, of either version. See containment.py.

Cgroups lie under one root per launcher run, below the cgroup the launcher was started in, so that limits and the end of
that cgroup hold for tasks too. Used by the launcher alone; the imports are few.
"""

from __future__ import annotations

import errno
import os
import time

from peerload.launcher.containment import REPORT_S, kill_one, read, write
from peerload.launcher.record_log import say

ROOT_PREFIX = "peerload."
FREEZE_LOOKS_MAX = 20
"""Until all stands still it is looked so often, …"""
FREEZE_LOOK_S = 0.0005
"""… this far apart; what has forked ahead of that is found by the next call."""
IDLE_MAX = 64
"""So many empty directories are kept for the next tasks."""
NLINK_OF_ONE = 2
"""The links of a directory that has none below it."""
END_LOOK_S_MAX = 0.05
SUBGROUP = "peerload-agent"
"""The cgroup that the service of an agent has for the agent and its launcher, beside those of tasks."""
_OUTSIDE = (
    "a process that its user, or root, moves to another cgroup or has started by a service (systemd-run, at, docker)"
)


class Cgroups:
    """What both versions of cgroups share: a directory per unit. Raises OSError where this does not work.

    A directory that has become empty is used again: to make and to remove one costs more than to start a process.
    """

    name = ""
    is_bare = False
    unenforced: tuple[str, ...] = (_OUTSIDE,)

    def __init__(self, own: str, root_name: str) -> None:
        self.root = f"{self._place(own)}/{root_name}"
        self._paths: dict[str, str] = {}
        self._idle: list[str] = []
        self._made = 0
        self._frozen: set[str] = set()
        self._fresh: set[str] = set()
        self._home = os.open(f"{own}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        try:
            self._make_root()
            try:
                self._try_out()
            except OSError:
                end_cgroup(self)
                raise
        except OSError:
            os.close(self._home)
            raise

    def _place(self, own: str) -> str:
        """Where the root goes, for a launcher in the cgroup ``own``."""
        return own

    def _make_root(self) -> None:
        os.mkdir(self.root)  # noqa: PTH102 -- pathlib costs the launcher a megabyte

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

    def orphans(self) -> set[int]:
        """See `Units`. They go to the reaper they went to before."""
        return set()

    def path(self, key: str) -> str:
        """The directory of this unit. Raises KeyError if there is none."""
        return self._paths[key]

    def enter(self, key: str, *, is_fresh: bool = False, inside: str = "") -> None:
        """See `Units`. The launcher goes in itself, since a child is born where its parent is."""
        if key in self._paths:
            raise FileExistsError(errno.EEXIST, "its unit is there")
        if is_fresh:
            self._fresh.add(key)
        while self._idle and not is_fresh and not inside:
            path = self._idle.pop()
            try:
                write(path + "/cgroup.procs", b"0")
            except FileNotFoundError:  # a service manager tidies up what is empty
                continue
            self._paths[key] = path
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
        write(path + "/cgroup.procs", b"0")

    def leave(self) -> None:
        """See `Units`."""
        os.write(self._home, b"0")

    def born(self, key: str, pid: int, start: int) -> None:
        """See `Units`. The kernel knows."""

    def freeze(self, key: str) -> None:
        """See `Units`."""
        self._frozen.add(key)
        self.set_frozen(self._paths[key], is_frozen=True)

    def freeze_again(self, keys: list[str]) -> None:
        """See `Units`. Nobody else thaws them."""

    def thaw(self, key: str) -> None:
        """See `Units`."""
        self._frozen.discard(key)
        self.set_frozen(self._paths[key], is_frozen=False)

    def kill(self, key: str) -> None:
        """See `Units`."""
        self.kill_path(self._paths[key])

    def processes(self, key: str) -> list[int]:
        """See `Units`."""
        return processes_below(self._paths[key])

    def processes_of(self, keys: list[str]) -> dict[str, list[int]]:
        """See `Units`. The kernel knows them all."""
        return {key: self.processes(key) for key in keys}

    def cpu_s(self, key: str) -> float:  # noqa: ARG002 -- as `Cgroup2` has it
        """See `Units`. The freezer counts nothing."""
        return -1.0

    def close(self, key: str) -> bool:
        """See `Units`."""
        path = self._paths.get(key)
        if path is None:
            return True
        if os.path.isdir(path) and not self.is_empty(path):  # noqa: PTH112 -- as above; gone: with the unit it was inside of
            self.kill_path(path)
            return False
        if key in self._frozen:
            self.thaw(key)
        del self._paths[key]
        if key not in self._fresh and len(self._idle) < IDLE_MAX:
            self._idle.append(path)
        elif not removed_all(path):
            say(f"{path} cannot be removed")
        self._fresh.discard(key)
        return True

    def remove(self) -> None:
        """See `Units`."""
        if not removed_all(self.root):
            say(f"{self.root} cannot be removed")

    # -- of a directory ----------------------------------------------------------------------------------------------

    def set_frozen(self, path: str, *, is_frozen: bool) -> None:
        """Freeze or thaw a directory with all below it."""
        raise NotImplementedError

    def is_frozen(self, path: str) -> bool:
        """Whether all of a directory stands still."""
        raise NotImplementedError

    def is_empty(self, path: str) -> bool:
        """Whether nothing is alive in a directory and below it."""
        raise NotImplementedError

    def kill_path(self, path: str) -> None:
        """One by one: frozen meanwhile, so that nothing forks ahead of us."""
        try:
            self.set_frozen(path, is_frozen=True)
            for _ in range(FREEZE_LOOKS_MAX):
                if self.is_frozen(path):
                    break
                time.sleep(FREEZE_LOOK_S)
                self.set_frozen(path, is_frozen=True)
            for pid in processes_below(path):
                kill_one(pid)
            for below in reversed(directories_below(path)):
                self.set_frozen(below, is_frozen=False)
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ENODEV}:  # it is gone
                say(f"{path}: {error.strerror}")


class Cgroup2(Cgroups):
    """The unified hierarchy: cgroup.freeze (Linux 5.2) and, where there is one, cgroup.kill (5.14).

    has_memory: memory can be limited, which is possible only where no process is in the cgroup above: in the root of all, or
    where a service manager was told to keep the agent in a cgroup by itself, called SUBGROUP (systemd 254). Processes are
    never moved out of the way: a service whose own cgroup is divided cannot be started again.
    """

    name = "cgroup2"
    has_memory = False

    def __init__(self, own: str, root_name: str) -> None:
        self._used_before: dict[str, float] = {}
        super().__init__(own, root_name)

    def enter(self, key: str, *, is_fresh: bool = False, inside: str = "") -> None:
        """See `Cgroups`. What it was used for before is not this one's."""
        made = self._made
        super().enter(key, is_fresh=is_fresh, inside=inside)
        if self._made == made:
            self._used_before[key] = _cpu_s(self._paths[key])

    def cpu_s(self, key: str) -> float:
        """See `Units`."""
        counted_s = _cpu_s(self._paths[key])
        return counted_s - self._used_before.get(key, 0.0) if counted_s >= 0 else -1.0

    def close(self, key: str) -> bool:
        """See `Units`."""
        is_closed = super().close(key)
        if is_closed:
            self._used_before.pop(key, None)
        return is_closed

    def _place(self, own: str) -> str:
        """See `Cgroups`. Beside the agent's, where its service has been given both."""
        above, _, last = own.rpartition("/")
        place = above if last == SUBGROUP and not read(above + "/cgroup.procs") else own
        if b"memory" in read(place + "/cgroup.controllers").split() and _divides_memory(place):
            self.has_memory = True
            return place
        return own

    def _make_root(self) -> None:
        super()._make_root()
        self.has_memory = self.has_memory and _divides_memory(self.root)

    def set_frozen(self, path: str, *, is_frozen: bool) -> None:
        """See `Cgroups`."""
        write(path + "/cgroup.freeze", b"1" if is_frozen else b"0")

    def is_frozen(self, path: str) -> bool:
        """See `Cgroups`."""
        return b"frozen 1" in read(path + "/cgroup.events")

    def is_empty(self, path: str) -> bool:
        """See `Cgroups`."""
        return b"populated 0" in read(path + "/cgroup.events")

    def kill_path(self, path: str) -> None:
        """At once, whatever it forks; a frozen one too."""
        try:
            write(path + "/cgroup.kill", b"1")
        except OSError:
            super().kill_path(path)


class Cgroup1(Cgroups):
    """The freezer of the first version. A frozen process takes a signal only when it is thawed."""

    name = "cgroup1"

    def freeze(self, key: str) -> None:
        """See `Units`. While processes fork, one write may leave the cgroup at FREEZING for good: a parent that waits for
        the exec of a child which is frozen already is not counted. The next write finds it (seen with Linux 6.18 in one of
        sixteen tries)."""
        super().freeze(key)
        for _ in range(FREEZE_LOOKS_MAX):
            if self.is_frozen(self._paths[key]):
                break
            time.sleep(FREEZE_LOOK_S)
            super().freeze(key)

    def freeze_again(self, keys: list[str]) -> None:
        """See `Units`. Nobody else thaws them, but they may have forked ahead of every write so far."""
        for key in keys:
            if key in self._paths and not self.is_frozen(self._paths[key]):
                super().freeze(key)

    def set_frozen(self, path: str, *, is_frozen: bool) -> None:
        """See `Cgroups`."""
        write(path + "/freezer.state", b"FROZEN" if is_frozen else b"THAWED")

    def is_frozen(self, path: str) -> bool:
        """See `Cgroups`."""
        return read(path + "/freezer.state").strip() == b"FROZEN"

    def is_empty(self, path: str) -> bool:
        """See `Cgroups`."""
        return not (read(path + "/cgroup.procs") if os.stat(path).st_nlink <= NLINK_OF_ONE else processes_below(path))  # noqa: PTH116 -- as above


def _divides_memory(path: str) -> bool:
    """Whether the cgroups below this one have their memory counted, each for itself."""
    try:
        write(path + "/cgroup.subtree_control", b"+memory")
    except OSError:
        return False
    return True


def _cpu_s(path: str) -> float:
    """The processor seconds that a cgroup has counted, -1 where it counts none."""
    words = read(path + "/cpu.stat").split()
    return int(words[1]) / 1e6 if words[:1] == [b"usage_usec"] else -1.0


_KINDS: tuple[type[Cgroups], ...] = (Cgroup2, Cgroup1)


def cgroup_units(wanted: str, name: str) -> Cgroups | None:
    """The first kind that works here, tried out; ``wanted`` narrows it to one ("" for any). ``name`` is its root's."""
    for kind in _KINDS:
        if wanted in {"", kind.name}:
            try:
                own = own_cgroup(kind.name)
                if own:
                    return kind(own, name)
            except OSError as error:
                say(f"{kind.name} is of no use here: {error}")
    return None


def own_cgroup(kind: str, controller: bytes = b"freezer") -> str:
    """The directory of this process's own cgroup (of the first version: in that controller's hierarchy); "" where none is
    mounted or it lies outside of what is."""
    path = ""
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, where = line.split(b":", 2)
        if (controllers == b"") if kind == Cgroup2.name else (controller in controllers.split(b",")):
            path = os.fsdecode(where)
    if not path or "/../" in path + "/":
        return ""
    for line in read("/proc/self/mountinfo").splitlines():
        fields, _, more = line.partition(b" - ")
        system, _, options = more.split(b" ", 2)
        if (
            (system == b"cgroup2")
            if kind == Cgroup2.name
            else (system == b"cgroup" and controller in options.split(b","))
        ):
            root, place = (
                os.fsdecode(field.decode("unicode_escape").encode("latin-1")) for field in fields.split()[3:5]
            )
            if root == "/":
                return (place + path).rstrip("/")
            if (path + "/").startswith(root + "/"):
                return (place + path[len(root) :]).rstrip("/")
    return ""


def left_root(kind: str, root: str) -> Cgroups | None:
    """What an earlier launcher made; None if it is gone."""
    if not os.path.isdir(root):  # noqa: PTH112 -- as above
        return None
    for made in _KINDS:
        if made.name == kind:
            units = made.__new__(made)
            units.root = root
            return units
    return None


def end_cgroup(units: Cgroups) -> None:
    """Kill all below its root and remove it; returns when it is gone, however long that takes: reporting a task as dead
    while it runs would let it run twice."""
    wait_s, report_at_s = 0.001, time.monotonic() + REPORT_S
    while not removed_all(units.root):
        units.kill_path(units.root)
        for path in directories_below(units.root):
            units.kill_path(path)
        if time.monotonic() > report_at_s:
            report_at_s += REPORT_S
            say(f"processes {processes_below(units.root)}, left by an earlier launcher, do not end")
        time.sleep(wait_s)
        wait_s = min(wait_s * 2, END_LOOK_S_MAX)


def removed(path: str) -> bool:
    """Remove a cgroup. → whether it is gone; it stays while it has processes or others below it."""
    try:
        os.rmdir(path)  # noqa: PTH106 -- as above
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def removed_all(path: str) -> bool:
    """The same with all below it, as far as that is empty."""
    for below in reversed(directories_below(path)):
        removed(below)
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
