"""Tasks of the launcher, from the start to the exit record: a `LaunchedTask` for each process.

`Spawner` starts the process of a task in its unit. `LeaseTimers` freeze a task at its deadline. `Reaper` reports a task when
no process and no unit of it is left. `with_shortage` finds out whether it ended for lack of memory; `usage_of` measures a
running task. Used by the launcher alone; the imports are few.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time

from peerload.launcher.containment import PREFIX, Cgroup2, read
from peerload.launcher.orphan_cleanup import SPAWNS_NAME
from peerload.launcher.process import NOT_EXECUTABLE, CannotStart
from peerload.launcher.protocol import ExitRecord, FrozenEvent, ResourceUsage, TaskUsage, ThawedEvent, UsageEvent
from peerload.launcher.record_log import LOG_BYTES_MAX, RecordLog, log_line, machine_boot, process_fields, process_start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from peerload.launcher.cgroup_clone import CgroupClone
    from peerload.launcher.containment import MemoryLimits, MemoryUse, Units
    from peerload.launcher.powercap import Reading
    from peerload.launcher.process import Capture, HolePuncher, LauncherStdin, SingleUser
    from peerload.launcher.protocol import LauncherEvent, SpawnRequest, UsageRequest

LIMIT_EVERY_S = 0.5
"""Interval at which captured output is limited; shorter tasks are limited only at their end."""
FROZEN_S_MAX = 86_400.0
"""Default of how long a task may be frozen before it is killed."""
DATE_SET_S = 1.0
"""A larger difference between wall clock and boot clock over the life of a task means that the wall clock was set."""
CLOSE_S_MIN, CLOSE_S_MAX = 0.001, 0.05
"""First and longest pause between two checks for remaining processes of an ended task; each pause doubles."""


def boot_s() -> float:
    """Current time, in seconds since the machine was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LaunchedTask:
    """Running task: the leader of its session, with its descendants.

    deadline_s: CLOCK_BOOTTIME at which it is frozen, 0 = never. ts: of the newest message whose lease was applied.
    frozen_at_s: CLOCK_BOOTTIME, 0 while it is not frozen. ended_at: Unix seconds at which its leader ended, 0 while it runs.
    started_boot_s: CLOCK_BOOTTIME at its start. ran_s: run time of its leader by that clock. lost_because: reason why it
    ends without exit record and result. memory_bytes_max: its limit, 0 = none. node: display name of the machine.
    memory_use: known when its leader has ended.
    """

    __slots__ = (
        "captures", "close_due_s", "close_wait_s", "deadline_s", "ended_at", "ended_s", "frozen_at_s", "frozen_s_max",
        "is_synced", "key", "limit_due_s", "lost_because", "memory_bytes_max", "memory_use", "node", "pid", "pidfd",
        "ran_s", "started_at", "started_boot_s", "ts",
    )  # fmt: skip

    def __init__(self, key: str, pid: int, started_at: float, captures: tuple[Capture, Capture]) -> None:
        self.key = key
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.started_at = started_at
        self.started_boot_s = boot_s()
        self.captures = captures
        self.deadline_s = 0.0
        self.ts = 0.0
        self.frozen_at_s = 0.0
        self.frozen_s_max = FROZEN_S_MAX
        self.is_synced = False
        self.lost_because = ""
        self.memory_bytes_max = 0
        self.memory_use: MemoryUse | None = None
        self.node = ""
        self.ended_at = 0.0
        self.ended_s = 0.0
        self.ran_s = 0.0
        self.close_due_s = 0.0
        self.close_wait_s = CLOSE_S_MIN
        self.limit_due_s = time.monotonic() + LIMIT_EVERY_S

    def back_off(self) -> None:
        """Postpone the next check for its remaining processes; each pause is longer."""
        self.close_due_s = time.monotonic() + self.close_wait_s
        self.close_wait_s = min(self.close_wait_s * 2, CLOSE_S_MAX)

    def _start_date(self) -> float:
        """Its start by the wall clock: that of its end less the run time by the boot clock, which a set wall clock does not affect."""
        began_at = max(self.ended_at - self.ran_s, 0.0)
        return began_at if abs(began_at - self.started_at) > DATE_SET_S else self.started_at

    def reap(self, holes: HolePuncher, lost_bytes: int = 0) -> ExitRecord:
        """Reap the leader of a task without other processes → the exit record. lost_bytes: of its stdout, in addition to its
        file."""
        _, status, usage = os.wait4(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        started_at = self._start_date()
        record = ExitRecord(
            exit_code=code if code >= 0 else 128 - code,
            started_at=started_at,
            ended_at=max(self.ended_at, started_at),
            stdout_bytes=self.captures[0].close(holes) + lost_bytes,
            stderr_bytes=self.captures[1].close(holes),
            usage=ResourceUsage(usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024),
            signal=max(-code, 0),
        )
        if self.memory_use is None:
            return record
        with self.captures[1].access:
            return with_shortage(record, self.memory_use, self.node, self.captures[1].path)


def failed(started_at: float, exit_code: int, reason: str) -> ExitRecord:
    """The exit record of a task that could not be started."""
    return ExitRecord(exit_code, started_at, started_at, reason=reason)


DESCRIPTORS_RESERVED = 64
"""Descriptors reserved for other purposes than tasks. A task takes one, so this bounds the number of running tasks."""


ENVIRONMENT_TRIES_MAX = 50
ENVIRONMENT_PAUSE_S = 0.001


def _environment_of(pid: int) -> bytes:
    """The initial environment of a process. The kernel shows none for a moment after `posix_spawn` has returned (exec
    lets the parent continue before the new stack is made), so the read is repeated for up to 50 ms."""
    for _ in range(ENVIRONMENT_TRIES_MAX):
        if raw := read(f"/proc/{pid}/environ"):
            return raw
        time.sleep(ENVIRONMENT_PAUSE_S)
    return b""


class Spawner:
    """Starts the processes of ``tasks`` in their units. run: the name of this run of the launcher.

    With the process scan, a log records each spawn before and after it is made: if the launcher is killed in between,
    its successor kills the process.
    """

    def __init__(
        self,
        run: str,
        tasks: dict[str, LaunchedTask],
        units: Units,
        memory: MemoryLimits,
        standard_input: LauncherStdin,
        users: SingleUser,
    ) -> None:
        self._run = run
        self._users = users
        self._standard_input = standard_input
        self._tasks = tasks
        self._units = units
        self._memory = memory
        self._boot = machine_boot()
        self._spawns = RecordLog(f"{users.directory}/{SPAWNS_NAME}")
        descriptors = os.sysconf("SC_OPEN_MAX")
        self._tasks_max = max(descriptors - DESCRIPTORS_RESERVED, 1) if descriptors > 0 else sys.maxsize

    def spawn(self, request: SpawnRequest) -> int:
        """Start the process of a request in its unit → its pid. Raises CannotStart, or OSError if there can be no unit
        or this machine is short of a resource."""
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
        if self._units.is_proc_scan:  # if the launcher is killed now, its output files identify it
            row = [key, 0, 0, self._boot, [request.stdout, request.stderr], self._run]
            if not self._spawns.append([row]):  # no successor could kill it if this launcher is killed
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            units = self._units
            clone = None
            if isinstance(units, Cgroup2) and not inside and not self._users.serves_all:
                clone = units.clone if units.prefers_clone(in_lane=bool(request.after)) else None
            units.enter(key, is_fresh=limit_bytes > 0, inside=inside, clones=clone is not None)
            try:
                pid = self._start_process(request, clone)
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
        if task.frozen_at_s:  # the launcher would wait for a process that is frozen before it can call exec
            raise CannotStart(NOT_EXECUTABLE, "the task is frozen, since its lease has run out")
        self._users.check_inside(request.key, request.inside)
        raw = _environment_of(task.pid)
        if not raw:
            raise CannotStart(NOT_EXECUTABLE, "the environment of the task cannot be read")
        variables = dict(pair.split(b"=", 1) for pair in raw.split(b"\0") if b"=" in pair)
        environment = {**variables, **(request.environment or {})}
        return request.replace(environment=environment, directory=b"/proc/%d/cwd" % task.pid)

    def _start_process(self, request: SpawnRequest, clone: CgroupClone | None) -> int:
        reads = self._standard_input.open(request)
        inside = request.inside
        # The launcher does not enter: it could be killed there, since the task may have used up its memory.
        joins = [*self._units.entrances(request.key), *self._memory.entrances(inside)] if inside else []
        try:
            self._memory.enter(request.key, request.memory_bytes_max)
            return self._users.spawn(request, reads, clone, joins)
        finally:
            self._memory.leave()

    def _limit(self, key: str, pid: int, limit_bytes: int) -> None:
        """Limit a running process; if that fails, it is only logged."""
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


CHECK_S = 0.5
"""Maximum interval of checks of deadlines, since timers do not count suspended time."""


class LeaseTimers:
    """The leases of the launcher's tasks. ``events`` collects the events for the agent."""

    def __init__(self, tasks: dict[str, LaunchedTask], units: Units, events: list[LauncherEvent]) -> None:
        self._tasks = tasks
        self._units = units
        self._events = events
        self._count = 0

    def soonest_s(self) -> float | None:
        """Seconds until `enforce` is due; None if no task has a deadline."""
        if not self._count:
            return None
        now_s = boot_s()
        left_s = (t.deadline_s - now_s for t in self._tasks.values() if t.deadline_s and not t.frozen_at_s)
        return max(0.0, min(left_s, default=CHECK_S))

    def apply(self, task: LaunchedTask, deadline_s: float, ts: float) -> None:
        """Set a new deadline, granted for the message of ``ts`` (0: unknown); ignored if older than the last. 0 means no
        deadline. A deadline in the future thaws the task."""
        if task.ended_at or (ts or task.ts) < task.ts:
            return
        task.ts = ts or task.ts
        self._count += bool(deadline_s) - bool(task.deadline_s)
        task.deadline_s = deadline_s
        if task.frozen_at_s and (not deadline_s or deadline_s > boot_s()) and not task.lost_because:
            task.frozen_at_s = 0.0
            self._units.thaw(task.key)
            self._events.append(ThawedEvent(task.key))

    def evict(self, task: LaunchedTask, reason: str) -> None:
        """Kill the task if it is frozen, since its agent needs its resources."""
        if task.frozen_at_s and not task.ended_at and not task.lost_because:
            task.lost_because = reason
            self._units.kill(task.key)

    def drop(self, task: LaunchedTask) -> None:
        """Drop the deadline of a task whose leader has ended."""
        self._count -= bool(task.deadline_s)
        task.deadline_s = 0.0

    def enforce(self) -> None:
        """Freeze tasks past their deadline; kill tasks that were frozen for too long."""
        if not self._count:
            return
        now_s = boot_s()
        for task in self._tasks.values():
            if task.deadline_s and task.deadline_s <= now_s and not task.ended_at:
                self._enforce_one(task, now_s)

    def _enforce_one(self, task: LaunchedTask, now_s: float) -> None:
        if not task.frozen_at_s:
            task.frozen_at_s = now_s
            self._units.freeze(task.key)
            self._events.append(FrozenEvent(task.key))
        elif not task.lost_because and now_s >= task.frozen_at_s + task.frozen_s_max:
            task.lost_because = f"it was frozen for {task.frozen_s_max:g} s, without a lease"
        if task.lost_because:
            self._units.kill(task.key)

    def refreeze(self) -> None:
        """Freeze the tasks again that users have thawed."""
        frozen = [task.key for task in self._tasks.values() if task.frozen_at_s and not task.lost_because]
        if frozen:
            self._units.refreeze(frozen)


REFUSED_SHARE = 0.97
"""A process that failed with this share of its limit in use counts as short of memory."""
TAIL_BYTES = 4096
"""Number of bytes at the end of stderr that are searched."""
SAYINGS = (b"memoryerror", b"bad_alloc", b"cannot allocate", b"out of memory", b"not enough memory")
"""Messages of programs that cannot allocate memory, in lower case."""
NOT_OF_MEMORY = (b"cuda", b"gpu", b"hip error", b"rocm", b"heap")
"""Words that exclude such a message: memory of a GPU, or a heap limit of a runtime (Java, JavaScript)."""
_GIVES_UP = {0, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGTRAP}
"""Ways in which programs without memory end: an exit code, or one of these signals. Other signals come from outside.
"""


def with_shortage(record: ExitRecord, use: MemoryUse, node: str, stderr: str) -> ExitRecord:
    """The exit record with the peak memory of the whole task, as far as it is known, and with the shortage if it ended for lack
    of memory on ``node``. stderr: path of its captured stderr."""
    assert record.usage is not None
    if use.peak_bytes:
        record = record.replace(usage=record.usage.replace(memory_bytes_max=use.peak_bytes))
    if use.kills:
        reason = _oom_text(use, node, use.peak_bytes) if use.is_own else "killed: the machine ran out of memory"
        return _because(record, reason)
    if use.is_refused and use.limit_bytes and record.exit_code and record.signal in _GIVES_UP:
        assert record.usage is not None
        peak_bytes = record.usage.memory_bytes_max
        if peak_bytes >= use.limit_bytes * REFUSED_SHARE:
            return _because(record, _oom_text(use, node, peak_bytes))
        if _reports_oom(stderr):
            return _because(record, f"{_oom_text(use, node, peak_bytes)}, and was refused more")
    return record


def _because(record: ExitRecord, reason: str) -> ExitRecord:
    """Add the shortage to the record. A task that succeeded has only lost one of its processes."""
    if record.exit_code:
        return record.replace(out_of="memory", reason=reason)
    return record.replace(reason=f"ended; a process of it was killed: {reason.removeprefix('killed: ')}")


def _oom_text(use: MemoryUse, node: str, peak_bytes: int) -> str:
    where = f" on {node}" if node else ""
    peak = f", peak {size_text(peak_bytes)}" if peak_bytes else ""
    return f"out of memory{where}: limit {size_text(use.limit_bytes)}{peak}"


def size_text(size_bytes: int) -> str:
    """Size in GiB or MiB: ``2.0 GiB``."""
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 1 << 30 else f"{size_bytes / 2**20:.1f} MiB"


def _reports_oom(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        size = os.fstat(fd).st_size
        tail = os.pread(fd, TAIL_BYTES, max(size - TAIL_BYTES, 0)).lower()
    except OSError:  # it is no longer a file
        return False
    finally:
        os.close(fd)
    return any(word in tail for word in SAYINGS) and not any(word in tail for word in NOT_OF_MEMORY)


REMAINS_S_MAX = 10.0
"""Maximum delay of a task's exit by unkillable processes (which wait for a disk)."""


class Reaper:
    """``end(task)`` is called once for each task, when its leader may be reaped and its exit reported; ``closed(key)``
    as soon as none of its processes is left."""

    def __init__(self, units: Units, end: Callable[[LaunchedTask], None], closed: Callable[[str], None]) -> None:
        self._units = units
        self._closed = closed
        self._end = end
        self._awaiting_close: list[LaunchedTask] = []
        self._unkillable: list[LaunchedTask] = []

    def add(self, task: LaunchedTask) -> None:
        """Take over a task whose leader has ended. The leader is not reaped before ``end``, so that its pid cannot be
        reused until then."""
        task.ended_at = time.time()
        task.ended_s = time.monotonic()
        task.ran_s = boot_s() - task.started_boot_s
        self._awaiting_close.append(task)

    def due_at_s(self) -> list[float]:
        """The times (monotonic) at which `reap_closed` is due."""
        return [task.close_due_s for task in self._awaiting_close + self._unkillable]

    def reap_closed(self) -> None:
        """End the tasks without processes; kill the remaining processes of the others."""
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
                log_line(
                    f"task ended, but its other processes do not end: key={task.key} pids={self._units.processes(task.key)}"
                )
                self._unkillable.append(task)
                self._finish(task)
            else:
                task.back_off()

    def _finish(self, task: LaunchedTask) -> None:
        self._awaiting_close.remove(task)
        self._end(task)


PROCESSES_MAX = 1000
"""Processes read for one request, about 10 ms. Of a task with more than remain, only the number is reported."""
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def usage_of(
    tasks: Mapping[str, LaunchedTask], units: Units, request: UsageRequest, counters: list[Reading]
) -> UsageEvent:
    """Usage of each of the requested tasks that runs. Shared memory is counted for each process."""
    running = [key for key in request.keys if key in tasks and not tasks[key].ended_at]
    found: dict[str, TaskUsage] = {}
    left = PROCESSES_MAX
    if request.brief:
        counted = {key: units.cpu_s(key) for key in running}
        found = {key: TaskUsage(cpu_s, -1, -1) for key, cpu_s in counted.items() if cpu_s >= 0}
        running = [key for key in running if key not in found]
    for key, pids in units.processes_of(running).items():
        counted_s = units.cpu_s(key)
        if len(pids) > left:
            found[key] = TaskUsage(counted_s, -1, len(pids))
            continue
        left -= len(pids)
        cpu_s, memory_bytes, processes = _sum(pids)
        found[key] = TaskUsage(max(cpu_s, counted_s), memory_bytes, processes)
    return UsageEvent(request.id, time.clock_gettime(time.CLOCK_BOOTTIME), found, counters)


def _sum(pids: list[int]) -> tuple[float, int, int]:
    """Sum over live processes: processor seconds (with those of ended children), bytes in memory, number."""
    ticks = pages = count = 0
    for pid in pids:
        fields = process_fields(pid)
        if not fields:
            continue
        ticks += sum(map(int, fields[11:15]))
        if fields[0] not in b"ZX":
            pages += int(fields[21])
            count += 1
    return ticks / _TICKS, pages * _PAGE_BYTES, count
