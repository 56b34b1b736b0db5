"""The spawner makes the process of a task, in its unit. Used by the launcher alone; the imports are few. Used by the
launcher alone; the imports are few.

Where units are found by looking, a log of spawns says what was made, and before that what is about to be: were the
launcher killed in between, its successor ends what it was making.
"""

from __future__ import annotations

import errno
import os
import sys
import time

from peerload.launcher.containment import PREFIX, read
from peerload.launcher.orphan_cleanup import SPAWNS_NAME
from peerload.launcher.process import NOT_EXECUTABLE, CannotStart, spawn
from peerload.launcher.record_log import LOG_BYTES_MAX, RecordLog, machine_boot, process_start, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from peerload.launcher.containment import Units
    from peerload.launcher.memory_limits import Memory
    from peerload.launcher.stdin import LauncherStdin
    from peerload.launcher.system.service import System
    from peerload.launcher.task import LaunchedTask

DESCRIPTORS_RESERVED = 64
"""Descriptors kept for other things than tasks, each of which takes one: more tasks at a time are not started."""


ENVIRONMENT_TRIES_MAX = 50
ENVIRONMENT_PAUSE_S = 0.001


def _environment_of(pid: int) -> bytes:
    """The environment that a process was started with. The kernel shows none for a moment after `posix_spawn` has returned
    (exec lets the parent go on before the new stack is made), so it is read again for up to 50 ms."""
    for _ in range(ENVIRONMENT_TRIES_MAX):
        if raw := read(f"/proc/{pid}/environ"):
            return raw
        time.sleep(ENVIRONMENT_PAUSE_S)
    return b""


class Spawner:
    """Of the launcher's ``tasks``, in their ``units``, with the limits of ``memory`` and something to read from
    ``standard_input``; ``run`` names this run of the launcher, whose files are in ``directory``; ``system``: that of a launcher
    that serves all users."""

    def __init__(
        self,
        directory: str,
        run: str,
        tasks: dict[str, LaunchedTask],
        units: Units,
        memory: Memory,
        standard_input: LauncherStdin,
        system: System | None = None,
    ) -> None:
        self._run = run
        self._system = system
        self.unenforced: tuple[str, ...] = () if system is None else system.unenforced
        self._standard_input = standard_input
        self._tasks = tasks
        self._units = units
        self._memory = memory
        self._boot = machine_boot()
        self._spawns = RecordLog(f"{directory}/{SPAWNS_NAME}")
        descriptors = os.sysconf("SC_OPEN_MAX")
        self._tasks_max = max(descriptors - DESCRIPTORS_RESERVED, 1) if descriptors > 0 else sys.maxsize

    def make(self, key: str, request: dict[str, Any], paths: list[str]) -> int:
        """The process that a request asks for, in its unit, with stdout and stderr at ``paths`` → its pid. Raises
        CannotStart, or OSError if there can be no unit or this machine is short of something."""
        try:
            pid = self._make(key, request, paths)
        except (CannotStart, OSError):
            self._standard_input.close(key)
            raise
        self._standard_input.started(key)
        return pid

    def _make(self, key: str, request: dict[str, Any], paths: list[str]) -> int:
        limit_bytes = memory_bytes_max(request)
        if len(self._tasks) + self._standard_input.descriptors >= self._tasks_max:
            raise OSError(errno.EMFILE, f"{len(self._tasks)} tasks run already, as many as this system allows")
        inside = self._inside(key, request)
        environment = request["environment"]
        if isinstance(environment, dict):
            environment[b"PEERLOAD_UNIT"] = f"{self._run}/{PREFIX}{key}".encode()
        if self._units.is_bare:  # were we killed now, its output would give it away
            self._spawns.append([[key, 0, 0, self._boot, paths, self._run]])
        try:
            self._units.enter(key, is_fresh=limit_bytes > 0, inside=inside)
            try:
                pid = self._spawn(key, request, paths, inside)
            finally:
                self._units.leave()
        except (CannotStart, OSError):
            self._memory.close(key)
            self._units.close(key)
            raise
        if self._units.is_bare:
            start = process_start(pid)
            self._spawns.append([[key, pid, start, self._boot, [], self._run]])
            self._units.born(key, pid, start)
            self._tidy()
        if limit_bytes:
            self._limit(key, pid, limit_bytes)
        return pid

    def _inside(self, key: str, request: dict[str, Any]) -> str:
        """The key of the task that it is to be inside of, "" if of none; its directory and environment are that task's then,
        with the variables of the request added. Raises CannotStart, NotAllowed."""
        inside = str(request.get("inside", ""))
        if not inside:
            return ""
        task = self._tasks.get(inside)
        if task is None or task.ended_at:
            raise CannotStart(NOT_EXECUTABLE, "the task has ended")
        if self._system is not None:
            self._system.check_inside(key, inside)
        raw = _environment_of(task.pid)
        if not raw:
            raise CannotStart(NOT_EXECUTABLE, "the environment of the task cannot be read")
        variables = dict(pair.split(b"=", 1) for pair in raw.split(b"\0") if b"=" in pair)
        request["environment"] = {**variables, **(request["environment"] or {})}
        request["directory"] = b"/proc/%d/cwd" % task.pid
        return inside

    def _spawn(self, key: str, request: dict[str, Any], paths: list[str], inside: str = "") -> int:
        reads = self._standard_input.open(key, request, paths[0])
        try:
            self._memory.enter(key, memory_bytes_max(request), inside=inside)
            if self._system is not None:
                return self._system.spawn(key, request, paths, reads)
            return spawn(
                request["argv"], request["environment"], request["directory"], int(request["umask"]), paths, reads
            )
        finally:
            self._memory.leave()

    def _limit(self, key: str, pid: int, limit_bytes: int) -> None:
        """It runs already: a limit that cannot be set is no reason to say that it does not."""
        try:
            if not self._memory.limit(key, pid, limit_bytes):
                self._units.kill(key)
        except OSError as error:
            say(f"the memory of {key} is not limited: {error}")

    def _tidy(self) -> None:
        if self._spawns.size_bytes > LOG_BYTES_MAX:
            tasks = self._tasks.values()
            rows = [[task.key, task.pid, process_start(task.pid), self._boot, [], self._run] for task in tasks]
            self._spawns.tidy(rows, len(rows))


def memory_bytes_max(request: dict[str, Any]) -> int:
    """The limit that a request states; 0 is none. Raises ValueError for what is no size."""
    limit_bytes = int(request.get("memory_bytes_max", 0))
    if not 0 <= limit_bytes < 1 << 60:
        raise ValueError("memory_bytes_max")
    return limit_bytes
