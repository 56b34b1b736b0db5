"""The spawner starts the process of a task in its unit. Used by the launcher alone; the imports are few.

For the process scan, a log records each spawn before and after it is made: if the launcher is killed in between, its
successor kills what it was making.
"""

from __future__ import annotations

import errno
import os
import sys
import time

from peerload.launcher.containment import PREFIX, Cgroup2, read
from peerload.launcher.orphan_cleanup import SPAWNS_NAME
from peerload.launcher.process import NOT_EXECUTABLE, CannotStart, spawn
from peerload.launcher.record_log import LOG_BYTES_MAX, RecordLog, log_line, machine_boot, process_start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.launcher.cgroup_limits import CgroupLimits
    from peerload.launcher.containment import MemoryLimits, Units
    from peerload.launcher.multi_user import MultiUser
    from peerload.launcher.protocol import SpawnRequest
    from peerload.launcher.stdin import LauncherStdin
    from peerload.launcher.task import LaunchedTask

DESCRIPTORS_RESERVED = 64
"""Descriptors reserved for other things than tasks, each of which takes one; this bounds the tasks at a time."""


ENVIRONMENT_TRIES_MAX = 50
ENVIRONMENT_PAUSE_S = 0.001


def _environment_of(pid: int) -> bytes:
    """The initial environment of a process. The kernel shows none for a moment after `posix_spawn` has returned (exec
    lets the parent go on before the new stack is made), so it is read again for up to 50 ms."""
    for _ in range(ENVIRONMENT_TRIES_MAX):
        if raw := read(f"/proc/{pid}/environ"):
            return raw
        time.sleep(ENVIRONMENT_PAUSE_S)
    return b""


class Spawner:
    """Starts the processes of ``tasks``. run: the name of this run of the launcher. system: the service for all users."""

    def __init__(
        self,
        directory: str,
        run: str,
        tasks: dict[str, LaunchedTask],
        units: Units,
        memory: MemoryLimits,
        standard_input: LauncherStdin,
        system: MultiUser | None = None,
        cores: CgroupLimits | None = None,
    ) -> None:
        """cores: enforces cores for a launcher of one user."""
        self._run = run
        self._system = system
        self._cores = cores
        self.unenforced: tuple[str, ...] = () if system is None else system.unenforced
        self.enforces_cores = system is not None and system.enforces_cores
        if cores is not None:
            self.unenforced, self.enforces_cores = cores.unenforced, cores.enforces_cores
        self._standard_input = standard_input
        self._tasks = tasks
        self._units = units
        self._memory = memory
        self._boot = machine_boot()
        self._spawns = RecordLog(f"{directory}/{SPAWNS_NAME}")
        descriptors = os.sysconf("SC_OPEN_MAX")
        self._tasks_max = max(descriptors - DESCRIPTORS_RESERVED, 1) if descriptors > 0 else sys.maxsize

    def spawn(self, request: SpawnRequest) -> int:
        """Start the process of a request in its unit → its pid. Raises CannotStart, or OSError if there can be no unit
        or this machine is short of something."""
        try:
            pid = self._spawn_in_unit(request)
        except (CannotStart, OSError):
            self._standard_input.close(request.key)
            raise
        self._standard_input.started(request.key)
        return pid

    def _spawn_in_unit(self, request: SpawnRequest) -> int:
        key, limit_bytes = request.key, request.memory_bytes_max
        if len(self._tasks) + self._standard_input.descriptors >= self._tasks_max:
            raise OSError(errno.EMFILE, f"{len(self._tasks)} tasks run already, as many as this system allows")
        inside = request.inside
        if inside:
            request = self._inside_task(request)
        if request.environment is not None:
            request.environment[b"PEERLOAD_UNIT"] = f"{self._run}/{PREFIX}{key}".encode()
        if self._units.is_proc_scan:  # if we are killed now, its output files identify it
            self._spawns.append([[key, 0, 0, self._boot, [request.stdout, request.stderr], self._run]])
        try:
            units = self._units
            forks = not request.after and self._system is None and isinstance(units, Cgroup2) and units.prefers_fork()
            units.enter(key, is_fresh=limit_bytes > 0, inside=inside, forks=forks)
            try:
                pid = self._start_process(request, units.fork if forks and isinstance(units, Cgroup2) else None)
            finally:
                self._units.leave()
        except (CannotStart, OSError):
            self._memory.close(key)
            self._units.close(key)
            raise
        if self._units.is_proc_scan:
            start = process_start(pid)
            self._spawns.append([[key, pid, start, self._boot, [], self._run]])
            self._units.leader_started(key, pid, start)
            self._compact()
        if limit_bytes:
            self._limit(key, pid, limit_bytes)
        return pid

    def _inside_task(self, request: SpawnRequest) -> SpawnRequest:
        """The request, with directory and environment of the task inside which it runs; its own variables are added.
        Raises CannotStart, SpawnRefused."""
        task = self._tasks.get(request.inside)
        if task is None or task.ended_at:
            raise CannotStart(NOT_EXECUTABLE, "the task has ended")
        if self._system is not None:
            self._system.check_inside(request.key, request.inside)
        raw = _environment_of(task.pid)
        if not raw:
            raise CannotStart(NOT_EXECUTABLE, "the environment of the task cannot be read")
        variables = dict(pair.split(b"=", 1) for pair in raw.split(b"\0") if b"=" in pair)
        environment = {**variables, **(request.environment or {})}
        return request.replace(environment=environment, directory=b"/proc/%d/cwd" % task.pid)

    def _start_process(self, request: SpawnRequest, fork: Callable[[], int] | None) -> int:
        reads = self._standard_input.open(request)
        try:
            self._memory.enter(request.key, request.memory_bytes_max, inside=request.inside)
            if self._system is not None:
                return self._system.spawn(request, reads)
            if self._cores is not None and not request.inside:
                self._cores.enter(request.key, 0, request.cpus, request.cpus_max)
            return spawn(request, reads, fork)
        finally:
            if self._cores is not None:
                self._cores.leave()
            self._memory.leave()

    def _limit(self, key: str, pid: int, limit_bytes: int) -> None:
        """Limit a process that runs already; a limit that cannot be set is only logged."""
        try:
            if not self._memory.limit(key, pid, limit_bytes):
                self._units.kill(key)
        except OSError as error:
            log_line(f"memory of a task is not limited: key={key} error={error}")

    def _compact(self) -> None:
        if self._spawns.size_bytes > LOG_BYTES_MAX:
            tasks = self._tasks.values()
            rows = [[task.key, task.pid, process_start(task.pid), self._boot, [], self._run] for task in tasks]
            self._spawns.compact(rows, len(rows))
