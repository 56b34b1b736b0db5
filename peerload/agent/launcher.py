"""The launcher: one small process that starts, freezes, stops and reaps the tasks of a node, and outlives the agent.

Run with ``--directory DIR``. It listens on DIR/launcher.sock for one agent; both sides send frames (4-byte length,
MessagePack), each a list of maps. Requests have ``do``: spawn, signal, lease, forget, list, stop; events have ``is``:
started, ended, expired (told to start after its lease had run out: never started), listed. An agent hears of events only after it has asked for the list, so that the list and the events
after it tell everything once. Whatever an agent says, the launcher goes on: garbage costs it the connection.

Tasks end with their launcher: a new one first ends what its predecessor has left, then answers. One thread, epoll over
sockets and pidfds; it wakes up by itself only while tasks run. Keep the imports few: it must stay small.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import time
from typing import Any

from peerload.agent.launcher_records import RecordLog, end_left_overs, machine_boot, process_start, say
from peerload.agent.launcher_socket import EVENTS_PER_FRAME_MAX, AgentSocket
from peerload.agent.launcher_spawn import NOT_EXECUTABLE, CannotStart, Capture, Holes, spawn

KEY_CHARS_MAX = 128
LOG_BYTES_MAX = 1 << 20
LIMIT_EVERY_S = 0.5
"""Captured output is held against its limit this often, while tasks run that are older than this."""
DEADLINE_CHECK_S = 1.0
"""While a deadline is set it is compared with CLOCK_BOOTTIME at least this often (timers do not count suspend)."""
STOP_GRACE_S = 2.0
DESCRIPTORS_RESERVED = 64
"""Descriptors kept for other things than tasks, each of which takes one: more tasks at a time are not started."""
ALREADY_RUNS = 75
"""The exit code of a launcher whose directory another one has (which may not answer yet: it ends left-overs first)."""


class _Task:
    """One running process, the leader of its own session."""

    __slots__ = ("captures", "deadline_s", "frozen", "key", "limit_due_s", "pid", "pidfd", "started_at", "ts")

    def __init__(self, key: str, pid: int, started_at: float, captures: tuple[Capture, Capture]) -> None:
        self.key = key
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.started_at = started_at
        self.captures = captures
        self.deadline_s = 0.0
        self.ts = 0.0
        self.frozen = False
        self.limit_due_s = time.monotonic() + LIMIT_EVERY_S

    def signal(self, number: int) -> None:
        """To the whole process group; it cannot be another's, since the process is not reaped yet."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            try:
                os.kill(self.pid, number)
            except (ProcessLookupError, PermissionError) as error:
                say(f"signal {number} for {self.key}: {error}")


class Launcher:
    """The state of the launcher and its loop. ``directory`` is absolute; raises BlockingIOError if another has it."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._lock = os.open(f"{directory}/launcher.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._holes = Holes()
        self._tasks: dict[str, _Task] = {}
        self._by_pidfd: dict[int, _Task] = {}
        self._ended: dict[str, dict[str, Any]] = {}
        self._new_exits: list[list[Any]] = []
        self._events: list[dict[str, Any]] = []
        self._kill_at_s = 0.0
        self._stopping = False
        self._deadlines = 0
        self._limit_due_s = 0.0
        descriptors = os.sysconf("SC_OPEN_MAX")
        self._tasks_max = max(descriptors - DESCRIPTORS_RESERVED, 1) if descriptors > 0 else sys.maxsize

    # -- start ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take over from the predecessor, then listen."""
        self._exits = RecordLog(f"{self._directory}/exits.log")
        self._spawns = RecordLog(f"{self._directory}/spawns.log")
        for key, record in self._exits.read():
            self._ended[key] = record
        boot = machine_boot()
        spawned = {row[0]: row for row in self._spawns.read() if row[3] == boot}  # the last row of a key counts
        self._boot = boot
        end_left_overs([row for key, row in spawned.items() if key not in self._ended])
        self._spawns.rewrite([])
        if not self._ended:
            self._exits.rewrite([])

        self._epoll = select.epoll()
        self._agent = AgentSocket(self._directory, self._epoll, self._carry_out)
        fd = os.open(f"{self._directory}/launcher.pid", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.write(fd, b"%d\n" % os.getpid())
        os.close(fd)
        self._wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._stop)
        self._epoll.register(self._wake, select.EPOLLIN)

    def run(self) -> None:
        """Serve until told to stop."""
        while not (self._stopping and not self._tasks):
            masks = dict(self._epoll.poll(self._timeout_s()))
            for fd in masks:
                task = self._by_pidfd.get(fd)
                if task is not None:
                    self._reap(task)
                elif fd == self._wake:
                    os.read(self._wake, 512)
            self._agent.ready(masks)
            self._enforce()
            self._flush()
        self._agent.close()

    def _timeout_s(self) -> float | None:
        if self._kill_at_s:
            return max(0.0, self._kill_at_s - time.monotonic())
        if not self._tasks:
            return None
        timeout_s = LIMIT_EVERY_S
        if self._deadlines:
            now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
            soonest_s = min(
                (t.deadline_s - now_s for t in self._tasks.values() if t.deadline_s and not t.frozen),
                default=DEADLINE_CHECK_S,
            )
            timeout_s = max(0.0, min(timeout_s, DEADLINE_CHECK_S, soonest_s))
        return timeout_s

    def _enforce(self) -> None:
        """Leases, output limits and the end of a stop."""
        if self._deadlines:
            now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
            for task in self._tasks.values():
                if task.deadline_s and not task.frozen and task.deadline_s <= now_s:
                    task.frozen = True
                    task.signal(signal.SIGSTOP)
        now_s = time.monotonic()
        if now_s >= self._limit_due_s:
            self._limit_due_s = now_s + LIMIT_EVERY_S
            for task in self._tasks.values():
                if task.limit_due_s <= now_s:
                    for capture in task.captures:
                        capture.limit(self._holes)
        if self._kill_at_s and now_s >= self._kill_at_s:
            self._kill_at_s = now_s + STOP_GRACE_S
            for task in self._tasks.values():
                task.signal(signal.SIGKILL)

    # -- the agent -----------------------------------------------------------------------------------------------

    def _carry_out(self, request: dict[str, Any]) -> None:
        do = request["do"]
        if do == "spawn":
            self._spawn(request)
        elif do == "forget":
            if self._ended.pop(request["key"], None) is not None:
                self._tidy()
        elif do == "signal":
            task = self._tasks.get(request["key"])
            if task is not None:
                task.signal(int(request["signal"]))
        elif do == "lease":
            task = self._tasks.get(request["key"])
            if task is not None:
                self._set_deadline(task, float(request["deadline_s"]), float(request.get("ts", 0.0)))
        elif do == "list":
            self._list()
        elif do == "stop":
            self._stop()
        else:
            raise ValueError("unknown request")

    def _list(self) -> None:
        """Everything known, in parts; events follow only from here on."""
        self._events.clear()
        self._agent.listed = True
        running = [[task.key, task.started_at, task.ts] for task in self._tasks.values()]
        ended = [[key, record] for key, record in self._ended.items()]
        step = EVENTS_PER_FRAME_MAX
        count = max(1, -(-max(len(running), len(ended)) // step))
        for number in range(count):
            part = slice(number * step, (number + 1) * step)
            more = number < count - 1
            event = {"is": "listed", "pid": os.getpid(), "more": more, "running": running[part], "ended": ended[part]}
            self._agent.send([event])

    def _flush(self) -> None:
        """Exits to disk first, then to the agent: everything of one turn in one write each."""
        if self._new_exits:
            self._exits.append(self._new_exits)
            self._new_exits.clear()
            self._tidy()
        if self._agent.listed:
            self._agent.send(self._events)
        self._events.clear()
        self._agent.flush()

    # -- tasks ---------------------------------------------------------------------------------------------------

    def _spawn(self, request: dict[str, Any]) -> None:
        key = request["key"]
        if not isinstance(key, str) or not 0 < len(key) <= KEY_CHARS_MAX:
            raise ValueError("key")
        known = self._tasks.get(key)
        if known is not None:
            self._events.append({"is": "started", "key": key, "pid": known.pid, "started_at": known.started_at})
            return
        if key in self._ended:
            self._events.append({"is": "ended", "key": key, "exit": self._ended[key]})
            return
        if self._stopping:
            say(f"{key} is not started: the launcher is stopping")
            return
        limit, umask, deadline_s = int(request["output_bytes_max"]), int(request["umask"]), float(request["deadline_s"])
        if 0 < deadline_s <= time.clock_gettime(time.CLOCK_BOOTTIME):
            self._events.append({"is": "expired", "key": key})  # its home may have given it to another by now
            return
        paths = [str(request["stdout"]), str(request["stderr"])]
        captures = (Capture(paths[0], limit), Capture(paths[1], limit))
        started_at = time.time()
        try:
            if len(self._tasks) >= self._tasks_max:
                why = f"{len(self._tasks)} tasks run already, as many as this system allows"
                raise CannotStart(NOT_EXECUTABLE, why)  # noqa: TRY301 -- it ends as every start that fails
            self._spawns.append([[key, 0, 0, self._boot, paths]])  # were we killed now, its output would give it away
            pid = spawn(request["argv"], request["environment"], request["directory"], umask, paths)
        except CannotStart as failure:
            for capture in captures:
                capture.close(self._holes)
            self._end(
                key,
                {
                    "exit_code": failure.exit_code,
                    "reason": failure.reason,
                    "started_at": started_at,
                    "ended_at": started_at,
                },
            )
            return
        self._spawns.append([[key, pid, process_start(pid), self._boot, []]])
        task = _Task(key, pid, started_at, captures)
        self._tasks[key] = task
        self._by_pidfd[task.pidfd] = task
        self._epoll.register(task.pidfd, select.EPOLLIN)
        self._set_deadline(task, deadline_s, float(request.get("ts", 0.0)))
        self._events.append({"is": "started", "key": key, "pid": pid, "started_at": started_at})

    def _set_deadline(self, task: _Task, deadline_s: float, ts: float) -> None:
        self._deadlines += bool(deadline_s) - bool(task.deadline_s)
        task.deadline_s = deadline_s
        task.ts = ts  # what this deadline was granted for: the next agent has to know
        if task.frozen and (not deadline_s or deadline_s > time.clock_gettime(time.CLOCK_BOOTTIME)):
            task.frozen = False
            task.signal(signal.SIGCONT)

    def _reap(self, task: _Task) -> None:
        pid, status, usage = os.wait4(task.pid, os.WNOHANG)
        if not pid:
            return
        ended_at = time.time()
        self._deadlines -= bool(task.deadline_s)
        self._epoll.unregister(task.pidfd)
        del self._by_pidfd[task.pidfd]
        del self._tasks[task.key]
        os.close(task.pidfd)
        code = os.waitstatus_to_exitcode(status)
        record: dict[str, Any] = {
            "exit_code": code if code >= 0 else 128 - code,
            "started_at": task.started_at,
            "ended_at": max(ended_at, task.started_at),
            "usage": {
                "user_s": usage.ru_utime,
                "system_s": usage.ru_stime,
                "memory_bytes_max": usage.ru_maxrss * 1024,
            },
            "stdout_bytes": task.captures[0].close(self._holes),
            "stderr_bytes": task.captures[1].close(self._holes),
        }
        if code < 0:
            record["signal"] = -code
        self._end(task.key, record)

    def _end(self, key: str, record: dict[str, Any]) -> None:
        self._ended[key] = record
        self._new_exits.append([key, record])
        self._events.append({"is": "ended", "key": key, "exit": record})

    def _tidy(self) -> None:
        if self._exits.size_bytes > LOG_BYTES_MAX and not self._new_exits:
            rows = [[key, record] for key, record in self._ended.items()]
            # Rewriting is worth it only if most of the file is of no use; a record has some 250 bytes.
            worth = len(rows) * 500 < self._exits.size_bytes
            self._exits.tidy(rows if worth else None, len(rows))
        if self._spawns.size_bytes > LOG_BYTES_MAX:
            tasks = self._tasks.values()
            self._spawns.tidy([[t.key, t.pid, process_start(t.pid), self._boot, []] for t in tasks], len(tasks))

    def _stop(self, *_: object) -> None:
        """TERM to all, KILL after STOP_GRACE_S, then exit."""
        if self._stopping:
            return
        self._stopping = True
        self._kill_at_s = time.monotonic() + STOP_GRACE_S
        for task in self._tasks.values():
            task.signal(signal.SIGTERM)
            if task.frozen:
                task.signal(signal.SIGCONT)


def _detach(directory: str) -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    if os.getsid(0) != os.getpid() and os.getpgid(0) != os.getpid():
        os.setsid()
    path = f"{directory}/launcher.log"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    if os.fstat(log).st_size > LOG_BYTES_MAX:
        os.ftruncate(log, 0)
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    for old, new in ((null, 0), (log, 1), (log, 2)):
        os.dup2(old, new)
    os.close(null)
    os.close(log)


def main() -> None:
    """``--directory DIR``: run the launcher of DIR until it is told to stop."""
    if len(sys.argv) != 3 or sys.argv[1] != "--directory":  # noqa: PLR2004 -- the program, the flag and its value
        sys.exit("usage: launcher --directory DIR")
    directory = os.path.abspath(sys.argv[2])  # noqa: PTH100 -- pathlib costs the launcher a megabyte
    os.makedirs(directory, mode=0o700, exist_ok=True)  # noqa: PTH103 -- as above
    try:
        launcher = Launcher(directory)
    except BlockingIOError:
        sys.stderr.write(f"another launcher runs in {directory}\n")
        sys.exit(ALREADY_RUNS)
    _detach(directory)
    launcher.open()
    launcher.run()
