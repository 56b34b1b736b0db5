"""The reaper: tasks whose leader has ended are reported when nothing is left of them, neither their background
processes nor their unit. Used by the launcher alone; the imports are few.
"""

from __future__ import annotations

import time

from peerload.launcher.record_log import say
from peerload.launcher.task import boot_s

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.launcher.containment import Units
    from peerload.launcher.task import LaunchedTask

REMAINS_S_MAX = 10.0
"""What an ended task has left and cannot be killed (it waits for a disk) keeps its exit back no longer than this."""


class Reaper:
    """In ``units``; ``end(task)`` is called once for each, when its leader may be reaped and its exit told, and
    ``closed(key)`` as soon as nothing of it is left."""

    def __init__(self, units: Units, end: Callable[[LaunchedTask], None], closed: Callable[[str], None]) -> None:
        self._units = units
        self._closed = closed
        self._end = end
        self._ending: list[LaunchedTask] = []
        self._unclosed: list[LaunchedTask] = []

    def add(self, task: LaunchedTask) -> None:
        """Its leader has ended, and is not reaped before `end`: until then its pid is nobody else's."""
        task.ended_at = time.time()
        task.ended_s = time.monotonic()
        task.ran_s = boot_s() - task.started_boot_s
        self._ending.append(task)

    def dues_s(self) -> list[float]:
        """The moments (monotonic) at which `settle` has something to do."""
        return [task.close_due_s for task in self._ending + self._unclosed]

    def settle(self) -> None:
        """End those of which nothing is left; kill what is left of the others."""
        if not (self._ending or self._unclosed):
            return
        now_s = time.monotonic()
        for task in [task for task in self._unclosed if task.close_due_s <= now_s]:
            if self._units.close(task.key):
                self._unclosed.remove(task)
                self._closed(task.key)
            else:
                task.wait_longer()
        for task in [task for task in self._ending if task.close_due_s <= now_s]:
            if self._units.close(task.key):
                self._over(task)
                self._closed(task.key)
            elif not task.lost_because and now_s >= task.ended_s + REMAINS_S_MAX:
                say(f"{task.key} has ended, but not what it left: {self._units.processes(task.key)}")
                self._unclosed.append(task)
                self._over(task)
            else:
                task.wait_longer()

    def _over(self, task: LaunchedTask) -> None:
        self._ending.remove(task)
        self._end(task)
