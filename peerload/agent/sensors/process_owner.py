"""The owner of a process: the attempt that started it, or nobody here.

A process of a task bears the mark of its unit in its initial environment. One that has cleared it is found by its
cgroup (others there bear the mark), by the leader of its session, or by its ancestors. Everything else is foreign, also
what we may not read.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ANCESTORS_MAX = 64
MPS = "mps"
"""Beginning of the keys of the daemons of MPS, which run beside the tasks."""
KEPT_MAX = 4096
"""Cached owners; they never change."""
FOREIGN_KEPT_S = 10.0
"""A foreign process is examined again after this: one in exec shows no mark."""
CGROUP_PROCESSES_MAX = 256
"""Processes of a cgroup that are examined for a mark."""
INITIAL_NAMESPACE = "pid:[4026531836]"
"""The kernel's number of the initial process namespace, outside of containers."""
_MARK = re.compile(rb"(?:^|\0)PEERLOAD_UNIT=[^\0]*/peerload-([0-9a-z]+-[0-9]+)(?:\0|$)")
_UNIT_DIRECTORY = "/peerload."
_STAT_FIELDS = 20


class ProcessOwners:
    """proc, cgroups: mount points of the kernel's file systems."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        cgroups: Path = Path("/sys/fs/cgroup"),
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc = proc
        self._cgroups = cgroups
        self._now_s = now_s
        self._known: OrderedDict[tuple[int, bytes], tuple[str, float]] = OrderedDict()

    def is_contained(self) -> bool:
        """True if this process has a process namespace of its own, where the driver's pids may mean others."""
        try:
            return str((self._proc / "self/ns/pid").readlink()) != INITIAL_NAMESPACE
        except OSError:
            return False

    def key_of(self, pid: int) -> str | None:
        """The execution key of the attempt that owns a process; "" for none; None if there is no such process here (it
        has ended, or is in another namespace)."""
        _, _, start = self._stat(pid)
        if not start:
            return None
        known = self._known.get((pid, start))
        if known is not None and (known[0] or self._now_s() < known[1] + FOREIGN_KEPT_S):
            return known[0]
        key = self._found(pid)
        self._known.pop((pid, start), None)
        self._known[pid, start] = (key, self._now_s())
        if len(self._known) > KEPT_MAX:
            self._known.popitem(last=False)
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
        """True if this process is the leader that was there before, not a later one with its number."""
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
