"""Processor time of this node's own work: its tasks, its launcher and its agent.

Everything else counts as foreign load, so no use of a task may be missed. With cgroups of version 2 the kernel counts
all of it. Else it is the sum over the launcher's process tree, each process with the children it has waited for: a
child that lived shorter than a sampling period is in its parent's count, and an orphan is reparented to the launcher.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from peerload.launcher.containment import ROOT_PREFIX
from peerload.launcher.record_log import process_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_TICKS = os.sysconf("SC_CLK_TCK")
_PARENT, _USED, _USED_WITH_CHILDREN = 1, slice(11, 13), slice(11, 15)
"""Fields of /proc/PID/stat, counted from the third, the state."""


CGROUP_MOUNTS = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
"""Mount points of cgroups of version 2: alone, or beside version 1 ("hybrid")."""


class OwnUse:
    """launcher: its pid (0: there is none) and the name of its run. runs_tasks: whether any task runs; while none does,
    only one process is read."""

    def __init__(
        self, launcher: Callable[[], tuple[int, str]], runs_tasks: Callable[[], bool], root: Path = Path("/")
    ) -> None:
        self._launcher = launcher
        self._runs_tasks = runs_tasks
        self._root = root

    def seconds(self) -> float | None:
        """Processor seconds so far, None if unknown. May decrease: after another launcher was started, or after a
        process ended that nobody waited for."""
        pid, run = self._launcher()
        launcher = process_fields(pid) if pid and run else []
        if not launcher:
            return None
        counted_s = self._counted_s(pid, run)
        if counted_s is not None:
            return counted_s + _sum_s([launcher[_USED]]) + time.process_time()
        used = [launcher[_USED_WITH_CHILDREN]]
        if self._runs_tasks():
            used += self._processes(pid)
        return _sum_s(used) + time.process_time()

    def _counted_s(self, pid: int, run: str) -> float | None:
        """Use of all tasks of this run of the launcher, ended ones too, as the kernel counts it."""
        path = self._cgroup(pid)
        if path is None:
            return None
        places = (self._root / mount / path / f"{ROOT_PREFIX}{run}/cpu.stat" for mount in CGROUP_MOUNTS)
        stat = next(filter(None, map(read_text_of, places)), "")
        found = dict(words for words in map(str.split, stat.splitlines()) if len(words) == 2)  # noqa: PLR2004 -- name and number
        usage = found.get("usage_usec", "")
        return int(usage) / 1e6 if usage.isdecimal() else None

    def _cgroup(self, pid: int) -> str | None:
        """The cgroup (of version 2) of a process."""
        for line in read_text_of(self._root / f"proc/{pid}/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                return path.strip("/")
        return None

    def _processes(self, launcher: int) -> list[list[bytes]]:
        """Times of the descendants of the launcher."""
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


def _sum_s(used: Iterable[list[bytes]]) -> float:
    return sum(int(ticks) for fields in used for ticks in fields) / _TICKS


def read_text_of(path: Path) -> str:
    """Read a file of the kernel; empty if it is absent."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
