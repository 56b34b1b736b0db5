"""Process limits and CPU shares of tasks by cgroups of either version, where the launcher may make them. For a launcher
that serves all users or enforces cores; the imports are few.

Where the processes of a task cannot be counted, those of a guest are limited by its uid (RLIMIT_NPROC), and those of
other tasks are not limited. Empty cgroups are reused: making and removing one costs more than starting a process.
"""

from __future__ import annotations

import os

from peerload.launcher.containment import IDLE_MAX, Cgroup2, own_cgroup, read, removed_all, write
from peerload.launcher.record_log import log_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from peerload.launcher.containment import Units

PIDS, CPU = b"pids", b"cpu"
WEIGHT_OF_ONE, WEIGHT_MAX = 100, 10_000
"""Weight of a task that asks for one processor, in cgroups of version 2."""
SHARES_OF_ONE, SHARES_MAX = 1024, 262_144
"""Weight of a task that asks for one processor, in version 1."""
PROCESSES_MIN = 2
"""Counts the launcher, which is in the cgroup while it forks."""
NAME = "shares"
"""File with the place of these cgroups, for the next launcher."""
NO_COUNT = "the processes of a task are not counted: those of a guest are bounded by its uid, those of others are not"
NO_WEIGHT = "tasks are not given shares of the processors by what they ask for"
PERIOD_US = 100_000
"""Period of a quota of processor time."""
QUOTA_US_MIN = 1000


class CgroupLimits:
    """Cgroups beside the ``units``, by the keys of tasks. root_name: the name of their roots. unenforced: sentences about
    what cannot be enforced here."""

    def __init__(
        self, directory: str, units: Units, root_name: str, controllers: tuple[bytes, ...] = (PIDS, CPU)
    ) -> None:
        self._units = units
        self._homes: dict[bytes, int] = {}
        self._roots: dict[bytes, str] = {}
        self._numbers: dict[str, int] = {}
        self._idle: list[int] = []
        self._inside: list[bytes] = []
        self._made = 0
        _remove_left(f"{directory}/{NAME}")
        self._in_units = tuple(one for one in controllers if isinstance(units, Cgroup2) and _divides_all(units, one))
        for controller in controllers:
            if controller not in self._in_units:
                self._make_root(controller, root_name)
        _note(f"{directory}/{NAME}", list(self._roots.values()))
        known = {*self._in_units, *self._roots}
        self.enforces_cores = CPU in known
        missing = [one for one in controllers if one not in known]
        self.unenforced = (NO_COUNT,) * (PIDS in missing) + (NO_WEIGHT,) * (CPU in missing)

    def _make_root(self, controller: bytes, root_name: str) -> None:
        own = own_cgroup(controller)
        if not own:
            return
        try:
            os.mkdir(f"{own}/{root_name}")
            self._homes[controller] = os.open(f"{own}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            log_line(f"cannot make cgroups: controller={controller.decode()} error={error.strerror}")
            return
        self._roots[controller] = f"{own}/{root_name}"

    def enter(self, key: str, processes_max: int, cpus: float, cpus_max: float = 0.0) -> None:
        """Count the processes that the launcher starts from now on for this key. Their share of the processors depends on ``cpus``;
        they get at most ``cpus_max`` of them (0: no bound). Raises OSError."""
        quota_us = max(int(cpus_max * PERIOD_US), QUOTA_US_MIN) if cpus_max else 0
        if self._roots:
            number = self._numbers[key] = self._idle.pop() if self._idle else self._next()
            try:
                self._enter_cgroups(number, processes_max, cpus, quota_us)
            except FileNotFoundError:  # a service manager removes empty cgroups
                self._make(number)
                self._enter_cgroups(number, processes_max, cpus, quota_us)
        for controller in self._in_units:
            assert isinstance(self._units, Cgroup2)
            path = self._units.path(key)
            if controller == PIDS:
                write(path + "/pids.max", b"%d" % max(processes_max, PROCESSES_MIN))
            else:
                write(path + "/cpu.weight", b"%d" % min(max(int(WEIGHT_OF_ONE * cpus), 1), WEIGHT_MAX))
                _set_quota(path + "/cpu.max", b"%s %d" % (b"%d" % quota_us if quota_us else b"max", PERIOD_US))

    def _enter_cgroups(self, number: int, processes_max: int, cpus: float, quota_us: int) -> None:
        for controller, root in self._roots.items():
            path = f"{root}/{number}"
            if controller == PIDS:
                write(path + "/pids.max", b"%d" % max(processes_max, PROCESSES_MIN))
            else:
                write(path + "/cpu.shares", b"%d" % min(max(int(SHARES_OF_ONE * cpus), 2), SHARES_MAX))
                _set_quota(path + "/cpu.cfs_quota_us", b"%d" % (quota_us or -1))
            write(path + "/cgroup.procs", b"0")
            if controller not in self._inside:
                self._inside.append(controller)

    def _next(self) -> int:
        self._made += 1
        self._make(self._made)
        return self._made

    def _make(self, number: int) -> None:
        for root in self._roots.values():
            os.makedirs(f"{root}/{number}", exist_ok=True)

    def leave(self) -> None:
        while self._inside:
            os.write(self._homes[self._inside.pop()], b"0")

    def close(self, key: str) -> None:
        """Release the cgroups of a task without processes."""
        number = self._numbers.pop(key, 0)
        if not number:
            return
        paths = [f"{root}/{number}" for root in self._roots.values()]
        if len(self._idle) < IDLE_MAX and not any(read(path + "/cgroup.procs") for path in paths):
            self._idle.append(number)
            return
        for path in paths:
            removed_all(path)

    def remove(self) -> None:
        """Remove all cgroups; no task is left."""
        for root in self._roots.values():
            if not removed_all(root):
                log_line(f"cannot remove cgroup: path={root}")


def _set_quota(path: str, quota: bytes) -> None:
    """Set the quota of processor time. A kernel without quotas has no such file."""
    if os.path.exists(path):
        write(path, quota)


def _divides_all(units: Cgroup2, controller: bytes) -> bool:
    """True if each unit has this controller; only where the cgroup above may be divided, as for memory."""
    return units.has_memory and all(_divides(path, controller) for path in (os.path.dirname(units.root), units.root))


def _divides(path: str, controller: bytes) -> bool:
    if controller not in read(path + "/cgroup.controllers").split():
        return False
    try:
        write(path + "/cgroup.subtree_control", b"+" + controller)
    except OSError:
        return False
    return True


def _note(path: str, roots: list[str]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.write(fd, "\n".join(roots).encode("utf-8", "surrogateescape"))
    os.close(fd)


def _remove_left(path: str) -> None:
    """Remove the cgroups of an earlier launcher, whose tasks have been killed."""
    for root in read(path).decode("utf-8", "surrogateescape").splitlines():
        if not removed_all(root):
            log_line(f"cannot remove leftover cgroup: path={root}")
