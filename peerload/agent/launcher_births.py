"""How the launcher makes the process of a task, in its unit. Used by the launcher alone; the imports are few.

Where units are found by looking, a log of spawns says what was made, and before that what is about to be: were the
launcher killed in between, its successor ends what it was making.
"""

from __future__ import annotations

import os
import sys

from peerload.agent.launcher_records import LOG_BYTES_MAX, RecordLog, machine_boot, process_start
from peerload.agent.launcher_spawn import NOT_EXECUTABLE, CannotStart, spawn
from peerload.agent.launcher_takeover import SPAWNS_NAME
from peerload.agent.launcher_units import PREFIX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from peerload.agent.launcher_task import Task
    from peerload.agent.launcher_units import Units

DESCRIPTORS_RESERVED = 64
"""Descriptors kept for other things than tasks, each of which takes one: more tasks at a time are not started."""


class Births:
    """Of the launcher's ``tasks``, in their ``units``; ``run`` names this run of the launcher, whose files are in
    ``directory``."""

    def __init__(self, directory: str, run: str, tasks: dict[str, Task], units: Units) -> None:
        self._run = run
        self._tasks = tasks
        self._units = units
        self._boot = machine_boot()
        self._spawns = RecordLog(f"{directory}/{SPAWNS_NAME}")
        descriptors = os.sysconf("SC_OPEN_MAX")
        self._tasks_max = max(descriptors - DESCRIPTORS_RESERVED, 1) if descriptors > 0 else sys.maxsize

    def make(self, key: str, request: dict[str, Any], paths: list[str]) -> int:
        """The process that a request asks for, in its unit, with stdout and stderr at ``paths`` → its pid. Raises
        CannotStart, or OSError if there can be no unit."""
        if len(self._tasks) >= self._tasks_max:
            why = f"{len(self._tasks)} tasks run already, as many as this system allows"
            raise CannotStart(NOT_EXECUTABLE, why)
        environment = request["environment"]
        if isinstance(environment, dict):
            environment[b"PEERLOAD_UNIT"] = f"{self._run}/{PREFIX}{key}".encode()
        if self._units.is_bare:  # were we killed now, its output would give it away
            self._spawns.append([[key, 0, 0, self._boot, paths, self._run]])
        try:
            self._units.enter(key)
            try:
                pid = spawn(request["argv"], environment, request["directory"], int(request["umask"]), paths)
            finally:
                self._units.leave()
        except (CannotStart, OSError):
            self._units.close(key)
            raise
        if self._units.is_bare:
            start = process_start(pid)
            self._spawns.append([[key, pid, start, self._boot, [], self._run]])
            self._units.born(key, pid, start)
            self._tidy()
        return pid

    def _tidy(self) -> None:
        if self._spawns.size_bytes > LOG_BYTES_MAX:
            tasks = self._tasks.values()
            rows = [[task.key, task.pid, process_start(task.pid), self._boot, [], self._run] for task in tasks]
            self._spawns.tidy(rows, len(rows))
