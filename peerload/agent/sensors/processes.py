"""Processes of this machine: which attempt a process belongs to, and the processor time of this node's own work.

A process of a task has the mark of its unit in its initial environment. A process that has cleared it is found by its
cgroup (other processes there have the mark), by the leader of its session, or by its ancestors. All other processes are foreign,
including those that we may not read.

All use except by the tasks, the launcher and the agent counts as foreign load, so no use of a task may be missed. With cgroups
of version 2 the kernel counts all of it. Otherwise it is the sum over the launcher's process tree, each process with the children
that it has waited for: a child that lived shorter than a sampling period is in its parent's count, and an orphan is reparented
to the launcher.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from peerload.launcher.containment import ROOT_PREFIX
from peerload.launcher.record_log import process_fields
from peerload.model.bounded import BoundedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from peerload.core.resources.admission import Ledger


ANCESTORS_MAX = 64
MPS = "mps"
"""Prefix of the keys of MPS daemons, which run beside the tasks."""
KEPT_MAX = 4096
"""Maximum number of cached owners; they never change."""
FOREIGN_KEPT_S = 10.0
"""Time after which a foreign process is examined again: during exec, a process shows no mark."""
CGROUP_PROCESSES_MAX = 256
"""Maximum number of processes of a cgroup that are examined for a mark."""
INITIAL_NAMESPACE = "pid:[4026531836]"
"""The kernel's number of the initial process namespace, outside of containers."""
_MARK = re.compile(rb"(?:^|\0)PEERLOAD_UNIT=[^\0]*/peerload-([0-9a-z]+-[0-9]+)(?:\0|$)")
_UNIT_DIRECTORY = "/peerload."
_STAT_FIELDS = 20


class ProcessOwners:
    """Finds the attempt to which a process belongs. proc, cgroups: mount points of the kernel's file systems."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        cgroups: Path = Path("/sys/fs/cgroup"),
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc = proc
        self._cgroups = cgroups
        self._now_s = now_s
        self._known: BoundedDict[tuple[int, bytes], tuple[str, float]] = BoundedDict(KEPT_MAX)

    def is_contained(self) -> bool:
        """True if this process is in its own process namespace, where pids of the driver may mean other processes."""
        try:
            return str((self._proc / "self/ns/pid").readlink()) != INITIAL_NAMESPACE
        except OSError:
            return False

    def key_of(self, pid: int) -> str | None:
        """Execution key of the attempt that owns a process; "" for none; None if no such process exists here
        (it has ended, or is in another namespace)."""
        _, _, start = self._stat(pid)
        if not start:
            return None
        known = self._known.get((pid, start))
        if known is not None and (known[0] or self._now_s() < known[1] + FOREIGN_KEPT_S):
            return known[0]
        key = self._found(pid)
        self._known[pid, start] = (key, self._now_s())
        return key

    def _found(self, pid: int) -> str:
        for near in self._line(pid):
            key = self._marked(near) or self._of_its_cgroup(near)
            if key:
                return key
        return ""

    def _line(self, pid: int) -> Iterator[int]:
        """The process, the leader of its session, and its ancestors, nearest first."""
        parent, session, start = self._stat(pid)
        yield pid
        if session not in (0, pid) and self._is_elder(session, start):
            yield session
        for _ in range(ANCESTORS_MAX):
            if parent <= 1:
                return
            yield parent
            parent, _, _ = self._stat(parent)

    def _is_elder(self, leader: int, start: bytes) -> bool:
        """True if this process is the original leader, not a later process with the same pid."""
        _, _, begun = self._stat(leader)
        return bool(begun) and int(begun) <= int(start)

    def _marked(self, pid: int) -> str:
        found = _MARK.search(self._read(pid, "environ"))
        return found[1].decode() if found is not None else ""

    def _of_its_cgroup(self, pid: int) -> str:
        """The key of the cgroup of a task, by the marks of its processes."""
        for line in self._read(pid, "cgroup").decode("utf-8", "replace").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if _UNIT_DIRECTORY not in path:
                continue
            directory = self._cgroups / (controllers.removeprefix("name=") or ".") / path.lstrip("/")
            for other in _numbers(directory / "cgroup.procs"):
                if other != pid and (key := self._marked(other)):
                    return key
        return ""

    def _stat(self, pid: int) -> tuple[int, int, bytes]:
        """(parent, session, start); the start is empty if the process is gone."""
        raw = self._read(pid, "stat")
        fields = raw[raw.rfind(b")") + 2 :].split()
        if len(fields) < _STAT_FIELDS or fields[0] in b"ZX":
            return 0, 0, b""
        return int(fields[1]), int(fields[3]), fields[19]

    def _read(self, pid: int, name: str) -> bytes:
        try:
            return (self._proc / str(pid) / name).read_bytes()
        except OSError:
            return b""


def _numbers(file: Path) -> list[int]:
    try:
        return [int(word) for word in file.read_bytes().split()[:CGROUP_PROCESSES_MAX]]
    except (OSError, ValueError):
        return []


_USAGE = re.compile(rb"^usage_usec ([0-9]+)$", re.MULTILINE)
_TICKS = os.sysconf("SC_CLK_TCK")
READ_BYTES_MAX = 1 << 18
_PARENT, _USED, _USED_WITH_CHILDREN = 1, slice(11, 13), slice(11, 15)
"""Fields of /proc/PID/stat, counted from the third, the state."""


CGROUP_MOUNTS = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
"""Mount points of cgroups of version 2: alone, or beside version 1 ("hybrid")."""


class LauncherIdentity(Protocol):
    """The currently running launcher."""

    @property
    def pid(self) -> int:
        """The pid of the launcher; 0 if there is none."""

    @property
    def run(self) -> str:
        """The name of its run."""


class OwnUse:
    """Processor time of this node's own work: the agent, the launcher and the tasks. While no task runs by the ledger, only one
    process is read."""

    def __init__(self, launcher: LauncherIdentity, ledger: Ledger, root: Path = Path("/")) -> None:
        self._launcher = launcher
        self._ledger = ledger
        self._root = root
        self._counter: tuple[tuple[int, str], KernelFile] | None = None
        """The file in which the kernel counts all tasks of one run of the launcher."""

    @property
    def has_tasks(self) -> bool:
        """True while a task runs here."""
        return bool(self._ledger.running)

    def seconds(self) -> float | None:
        """Processor seconds so far, None if unknown. May decrease after another launcher was started, or after the end of
        a process that no parent waited for."""
        pid, run = self._launcher.pid, self._launcher.run
        launcher = process_fields(pid) if pid and run else []
        if not launcher:
            return None
        counted_s = self._counted_s(pid, run)
        if counted_s is not None:
            return counted_s + _sum_s([launcher[_USED]]) + time.process_time()
        used = [launcher[_USED_WITH_CHILDREN]]
        if self._ledger.running:
            used += self._processes(pid)
        return _sum_s(used) + time.process_time()

    def _counted_s(self, pid: int, run: str) -> float | None:
        """Use of all tasks of this run of the launcher, including ended ones, as the kernel counts it."""
        if self._counter is None or self._counter[0] != (pid, run):
            file = self._found(pid, run)
            self._counter = None if file is None else ((pid, run), file)
        found = None
        if self._counter is not None:
            try:
                found = _USAGE.search(self._counter[1].read())
            except OSError:  # the cgroup was removed
                self._counter = None
        return int(found[1]) / 1e6 if found is not None else None

    def _found(self, pid: int, run: str) -> KernelFile | None:
        for line in read_text_of(self._root / f"proc/{pid}/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                homes = [self._root / mount / path.strip("/") for mount in CGROUP_MOUNTS]
                # Beside the launcher's cgroup if a service keeps the agent in a subgroup.
                places = (home / f"{ROOT_PREFIX}{run}/cpu.stat" for one in homes for home in (one, one.parent))
                return next((KernelFile(place) for place in places if place.exists()), None)
        return None

    def _processes(self, launcher: int) -> list[list[bytes]]:
        table: dict[int, tuple[int, list[bytes]]] = {}
        for name in os.listdir("/proc"):  # noqa: PTH208 -- names are enough
            if name.isdecimal() and (fields := process_fields(int(name))):
                table[int(name)] = int(fields[_PARENT]), fields[_USED_WITH_CHILDREN]
        children: dict[int, list[int]] = {}
        for pid, (parent, _) in table.items():
            children.setdefault(parent, []).append(pid)
        found: set[int] = set()
        left = [launcher]
        while left:
            pid = left.pop()
            if pid not in found:
                found.add(pid)
                left += children.get(pid, [])
        return [table[pid][1] for pid in found - {launcher} if pid in table]


class KernelFile:
    """A file of the kernel that is read again and again, over one descriptor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read(self) -> bytes:
        """First READ_BYTES_MAX bytes of the file; empty if it is absent. After an error it is opened again: a restarted file
        system, such as lxcfs in a container, no longer knows the descriptor."""
        if self._fd < 0:
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return b""
        try:
            return os.pread(self._fd, READ_BYTES_MAX, 0)
        except OSError:
            os.close(self._fd)
            self._fd = -1
            raise


def _sum_s(used: Iterable[list[bytes]]) -> float:
    return sum(int(ticks) for fields in used for ticks in fields) / _TICKS


def read_text_of(path: Path) -> str:
    """Read a file of the kernel; empty if it is absent."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
