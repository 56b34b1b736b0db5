"""The reaper: a task whose leader has ended is reported when nothing is left of it, neither background processes nor
its unit. Used by the launcher alone; the imports are few."""

from __future__ import annotations

import time

from peerload.launcher.record_log import log_line
from peerload.launcher.task import boot_s

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.launcher.containment import Units
    from peerload.launcher.task import LaunchedTask

REMAINS_S_MAX = 10.0
"""Unkillable remains of a task (waiting for a disk) delay its exit no longer than this."""


class Reaper:
    """``end(task)`` is called once for each task, when its leader may be reaped and its exit reported; ``closed(key)``
    as soon as nothing of it is left."""

    def __init__(self, units: Units, end: Callable[[LaunchedTask], None], closed: Callable[[str], None]) -> None:
        self._units = units
        self._closed = closed
        self._end = end
        self._awaiting_close: list[LaunchedTask] = []
        self._unkillable: list[LaunchedTask] = []

    def add(self, task: LaunchedTask) -> None:
        """Take over a task whose leader has ended. The leader is not reaped before ``end``: until then its pid cannot
        be reused."""
        task.ended_at = time.time()
        task.ended_s = time.monotonic()
        task.ran_s = boot_s() - task.started_boot_s
        self._awaiting_close.append(task)

    def due_at_s(self) -> list[float]:
        """The moments (monotonic) at which `reap_closed` has something to do."""
        return [task.close_due_s for task in self._awaiting_close + self._unkillable]

    def reap_closed(self) -> None:
        """End the tasks of which nothing is left; kill what is left of the others."""
        if not (self._awaiting_close or self._unkillable):
            return
        now_s = time.monotonic()
        for task in [task for task in self._unkillable if task.close_due_s <= now_s]:
            if self._units.close(task.key):
                self._unkillable.remove(task)
                self._closed(task.key)
            else:
                task.back_off()
        for task in [task for task in self._awaiting_close if task.close_due_s <= now_s]:
            if self._units.close(task.key):
                self._finish(task)
                self._closed(task.key)
            elif not task.lost_because and now_s >= task.ended_s + REMAINS_S_MAX:
                log_line(f"task ended, its remains do not: key={task.key} pids={self._units.processes(task.key)}")
                self._unkillable.append(task)
                self._finish(task)
            else:
                task.back_off()

    def _finish(self, task: LaunchedTask) -> None:
        self._awaiting_close.remove(task)
        self._end(task)
