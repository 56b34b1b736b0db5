"""The launcher: one small process that starts, freezes, stops and reaps the tasks of a node, and outlives the agent.

Run with ``--directory DIR``. It listens on DIR/launcher.sock for one agent, and speaks protocol.py. A malformed request of the agent
ends only its connection, not the launcher.

Tasks end with their launcher: its watchdog kills them immediately, and a new launcher first kills the tasks that its predecessor
has left, and then answers. All processes of a task are in its unit (containment.py). One thread, epoll over sockets and pidfds;
without tasks, it never wakes up by itself. Keep the imports few: it must stay small.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import sys
import time
from typing import assert_never

from peerload.launcher import process, protocol
from peerload.launcher.containment import ROOT_PREFIX, cgroup_units, memory_limits
from peerload.launcher.lanes import HARMLESS, WAIT_S_MAX, Lanes
from peerload.launcher.orphan_cleanup import Watchdog, kill_leftovers, note_units
from peerload.launcher.record_log import LOG_BYTES_MAX, Exits, log_line
from peerload.launcher.task import (
    CHECK_S,
    CLOSE_S_MIN,
    FROZEN_S_MAX,
    LIMIT_EVERY_S,
    LaunchedTask,
    LeaseTimers,
    Reaper,
    Spawner,
    boot_s,
    failed,
    usage_of,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from peerload.launcher.containment import Units

UNSENT_BYTES_MAX = 64 << 20
"""An agent with more unread bytes than this is disconnected; it reconnects and asks for the list."""
EVENTS_PER_FRAME_MAX = 1_000
PENDING_MAX = 8
"""Bound on connections that have not asked for the list yet; the oldest is closed."""
FIRST_FRAME_BYTES_MAX = 4096
LAST_READS_MAX = 64
"""Bound on reads from an agent that is being replaced."""
READ_BYTES = 1 << 16


def claim_store(store: str) -> socket.socket | None:
    """Claim a database on this machine as its launcher, so that an agent with a copy of its directory finds out. → None if
    the name is taken, or cannot be bound."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(protocol.claim_name("launcher", store))  # nobody may connect: it does not listen
    except OSError as error:
        held.close()
        log_line(f"cannot claim the database: store={store} error={error}")
        return None
    return held


class AgentSocket:
    """A listener for one agent at a time. A newer agent replaces the older one when it asks for the list, which is the first
    request of every agent. Other connections change nothing.

    ``carry_out(request)`` gets each request; if it raises one of `REQUEST_FAILURES`, the connection is closed. listed: the
    agent has asked for the list, and gets events. users: decides which process is the agent.
    """

    def __init__(
        self, epoll: select.epoll, carry_out: Callable[[protocol.Request], None], users: process.SingleUser
    ) -> None:
        self._path = f"{users.sockets}/{protocol.SOCKET_NAME}"
        self._users = users
        self._epoll = epoll
        self._carry_out = carry_out
        self._agent: socket.socket | None = None
        self._pending: dict[int, tuple[socket.socket, bytearray]] = {}
        self._received = bytearray()
        self._unsent = bytearray()
        self._writing = False
        self.listed = False
        self._listener = self._listening()

    def _listening(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            os.chdir(self._users.sockets)  # a relative path is never too long for a socket
            if os.path.lexists(protocol.SOCKET_NAME):
                os.unlink(protocol.SOCKET_NAME)
            listener.bind(protocol.SOCKET_NAME)
            listener.listen(16)
            listener.setblocking(False)
            os.chown(protocol.SOCKET_NAME, self._users.access.uid, -1)
            self._epoll.register(listener, select.EPOLLIN)
        except OSError:
            listener.close()
            raise
        finally:
            os.umask(before)
            os.chdir("/")
        return listener

    def listen_again(self) -> None:
        """Recreate the socket if its file is gone, since no agent could connect any more. Connections stay open."""
        if os.path.lexists(self._path):
            return
        try:
            listener = self._listening()
        except OSError as error:
            log_line(f"socket is gone and cannot be restored: path={self._path} error={error}")
            return
        self._epoll.unregister(self._listener)
        self._listener.close()
        self._listener = listener
        log_line(f"socket was gone and is restored: path={self._path}")

    def close(self) -> None:
        if os.path.lexists(self._path):
            os.unlink(self._path)

    def ready(self, masks: dict[int, int]) -> None:
        """Handle epoll events: new connections, and requests."""
        if self._listener.fileno() in masks:
            self._accept()
        for fd in self._pending.keys() & masks.keys():
            self._receive_first(fd)
        if self._agent is not None and masks.get(self._agent.fileno(), 0) & ~select.EPOLLOUT:
            self._receive()

    def send(self, events: Sequence[protocol.LauncherEvent]) -> None:
        """Queue events for the agent; `flush` sends them. Without an agent they are dropped."""
        for at in range(0, len(events), EVENTS_PER_FRAME_MAX):
            if self._agent is not None:
                self._unsent += protocol.frame(
                    [protocol.encode(event) for event in events[at : at + EVENTS_PER_FRAME_MAX]]
                )

    def flush(self) -> None:
        """Send the queue, as fast as the agent reads."""
        if self._agent is None or not (self._unsent or self._writing):
            return
        try:
            while self._unsent:
                del self._unsent[: self._agent.send(self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > UNSENT_BYTES_MAX:
                self._disconnect("it does not read")
                return
        except OSError as error:
            self._receive_rest()
            self._disconnect(str(error))
            return
        if bool(self._unsent) != self._writing:
            self._writing = not self._writing
            self._epoll.modify(self._agent, select.EPOLLIN | (select.EPOLLOUT if self._writing else 0))

    def _accept(self) -> None:
        try:
            agent, _ = self._listener.accept()
        except OSError as error:
            log_line(f"cannot accept a connection: error={error}")
            return
        if not self._users.admits(agent):
            agent.close()
            return
        agent.setblocking(False)
        self._epoll.register(agent, select.EPOLLIN)
        self._receive_rest()
        if self._agent is None:
            self._agent = agent
            return
        if len(self._pending) >= PENDING_MAX:
            self._reject(next(iter(self._pending)))
        self._pending[agent.fileno()] = agent, bytearray()

    def _receive_rest(self) -> None:
        """Carry out the requests that an agent sent before it was disconnected."""
        for _ in range(LAST_READS_MAX):
            if not self._receive():
                break

    def _receive_first(self, fd: int) -> None:
        """Read the first frame of a pending connection; a request for the list makes it the agent's connection."""
        newcomer, buffer = self._pending[fd]
        try:
            raw = newcomer.recv(FIRST_FRAME_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            raw = b""
        buffer += raw
        size = int.from_bytes(buffer[: protocol.HEADER_BYTES], "big")
        if not raw or (len(buffer) >= protocol.HEADER_BYTES and size > FIRST_FRAME_BYTES_MAX):
            self._reject(fd)
        elif len(buffer) >= protocol.HEADER_BYTES + size:
            if not _starts_with_list(bytes(buffer[protocol.HEADER_BYTES : protocol.HEADER_BYTES + size])):
                self._reject(fd)
                return
            del self._pending[fd]
            self._receive_rest()
            self._disconnect("a newer agent connects")
            self._agent = newcomer
            self._process(buffer)

    def _reject(self, fd: int) -> None:
        newcomer, _ = self._pending.pop(fd)
        self._epoll.unregister(newcomer)
        newcomer.close()

    def _disconnect(self, reason: str) -> None:
        if self._agent is None:
            return
        if reason:
            log_line(f"agent connection closed: reason={reason}")
        self._epoll.unregister(self._agent)
        self._agent.close()
        self._agent = None
        self._received.clear()
        self._unsent.clear()
        self._writing = self.listed = False

    def _receive(self) -> bool:
        """Read and carry out requests. → True if there may be more."""
        if self._agent is None:
            return False
        try:
            raw = self._agent.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._disconnect(str(error))
            return False
        if not raw:
            self._disconnect("")
            return False
        return self._process(raw)

    def _process(self, raw: bytes | bytearray) -> bool:
        """Carry out the complete frames. → True if there may be more."""
        buffer = self._received
        buffer += raw
        while len(buffer) >= protocol.HEADER_BYTES:
            size = int.from_bytes(buffer[: protocol.HEADER_BYTES], "big")
            if size > protocol.FRAME_BYTES_MAX:
                self._disconnect(f"a frame that claims {size} bytes")
                return False
            if len(buffer) < protocol.HEADER_BYTES + size:
                return True
            body = bytes(buffer[protocol.HEADER_BYTES : protocol.HEADER_BYTES + size])
            del buffer[: protocol.HEADER_BYTES + size]
            try:
                for request in protocol.decode_requests(body):
                    self._carry_out(request)
            except protocol.REQUEST_FAILURES as error:
                self._disconnect(f"not a request: {type(error).__name__}: {str(error)[:200]}")
                return False
        return True


def _starts_with_list(body: bytes) -> bool:
    try:
        return isinstance(next(protocol.decode_requests(body), None), protocol.ListRequest)
    except protocol.LauncherProtocolError:
        return False


STARTS_HELD_S = 0.004
"""Longest delay of a start report, so that one frame reports both start and end of a short task and wakes the agent once."""
ENDS_HELD_S = 0.05
"""Longest delay of an end report while half of the lane still waits and the next task has started: the agent then
records many ends with one commit. Exit records are written immediately."""
LOCK_S_MAX = 0.3
"""Time for which a directory may seem locked after a launcher was killed: a process that it was starting still holds its
lock."""
LOCK_LOOK_S = 0.01


class Launcher:
    """The launcher's state and loop, in a locked directory. units, memory: the wanted backends, "" for the best that
    works. store: the id of the database whose tasks it starts, "" for several. It first kills the tasks that its
    predecessor has left, then listens."""

    def __init__(self, users: process.SingleUser, units: str = "", memory: str = "", store: str = "") -> None:
        self._directory = users.directory
        self._users = users
        self._holes = process.HolePuncher()
        self._lanes: Lanes[protocol.SpawnRequest] = Lanes()
        self._tasks: dict[str, LaunchedTask] = {}
        self._by_pidfd: dict[int, LaunchedTask] = {}
        self._events: list[protocol.LauncherEvent] = []
        self._starts: dict[str, protocol.StartedEvent] = {}
        """Unreported starts, by the key of the task."""
        self._report_due_s = 0.0
        self._waited = 0
        """Number of attempts that waited for others when the last ends were reported, or of those that have come since if more."""
        self._kill_at_s = 0.0
        self._stopping = False
        self._retiring = False
        self._watchdog: Watchdog | None = None
        self._own_children: set[int] = set()
        """Pids of children that are not tasks."""
        self._limit_due_s = 0.0
        self._must_listen = False
        self._has_no_watchdog = False
        self._exits = Exits(self._directory)
        kill_leftovers(self._directory, set(self._exits.ended))
        self._run = os.urandom(4).hex()
        root_name = ROOT_PREFIX + self._run
        self._units = self._usable_units(units, root_name)
        self._memory = memory_limits(memory, self._units, root_name)
        note_units(self._directory, self._units.name, self._units.root, self._memory.root)
        self._epoll = select.epoll()
        kept = self._exits.ended.keys()
        users.open(self._epoll, self._events, self._units, root_name, self._own_children, kept)
        self._input = process.LauncherStdin(self._epoll, self._events, users.access)
        self._spawner = Spawner(self._run, self._tasks, self._units, self._memory, self._input, users)
        self._reaper = Reaper(self._units, self._end, users.release)
        self._leases = LeaseTimers(self._tasks, self._units, self._events)
        self._wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._exits.set_wake_fd(wake_end)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGHUP, self._note_missing_socket)
        if self._units.is_proc_scan:
            signal.signal(signal.SIGCHLD, lambda *_: None)  # orphans are reparented to us
        self._epoll.register(self._wake, select.EPOLLIN)
        self._start_watchdog()
        self._agent = AgentSocket(self._epoll, users.deferring(self._carry_out), users)
        self._claim = claim_store(store) if store else None
        fd = os.open(f"{self._directory}/launcher.pid", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.write(fd, b"%d\n" % os.getpid())
        os.close(fd)

    def _usable_units(self, wanted: str, root_name: str) -> Units:
        units = cgroup_units(wanted, root_name)
        if units is not None:
            return units
        from peerload.launcher.proc_scan import ProcScan  # noqa: PLC0415 -- most launchers have no use for it

        return ProcScan(self._run, self._own_children)

    def _start_watchdog(self) -> None:
        try:
            self._watchdog = Watchdog(self._directory, self._units, self._memory.root, self._run)
        except OSError as error:
            if not self._has_no_watchdog:
                log_line(f"no watchdog: if this launcher is killed, its tasks live until the next one: error={error}")
            self._has_no_watchdog = True
            return
        if self._has_no_watchdog:
            log_line("watchdog started again")
        self._has_no_watchdog = False
        self._own_children.add(self._watchdog.pid)
        self._epoll.register(self._watchdog.pidfd, select.EPOLLIN)

    def run(self) -> None:
        """Serve until a request to stop; after `RetireRequest`, as long as there are tasks."""
        while not self._is_over():
            masks = dict(self._epoll.poll(self._timeout_s()))
            for fd in masks:
                task = self._by_pidfd.get(fd)
                if task is not None:
                    self._leader_ended(task)
                elif fd == self._wake:
                    os.read(self._wake, 512)
                    self._reap_orphans()
                elif self._watchdog is not None and fd == self._watchdog.pidfd:
                    self._replace_watchdog(self._watchdog)
            self._input.ready(masks)
            self._users.ready(masks)
            self._agent.ready(masks)
            if self._must_listen:
                self._must_listen = False
                self._agent.listen_again()
            self._enforce()
            self._reaper.reap_closed()
            self._flush()
        self._agent.close()
        self._units.remove()
        self._memory.remove()
        self._users.close()
        if self._watchdog is not None:
            os.kill(self._watchdog.pid, signal.SIGKILL)  # nothing is left to clean up
            self._watchdog.close()

    def _is_over(self) -> bool:
        if self._retiring and not (self._lanes.waiting or self._exits.unsynced()):
            return not self._tasks
        return self._stopping and not self._tasks

    def _timeout_s(self) -> float | None:
        now_s = time.monotonic()
        due_at_s = self._reaper.due_at_s() + self._users.due_at_s()
        if self._kill_at_s:
            due_at_s.append(self._kill_at_s)
        if self._report_due_s:
            due_at_s.append(self._report_due_s)
        if self._tasks:
            due_at_s.append(now_s + LIMIT_EVERY_S)
        soonest_s = self._leases.soonest_s()
        if soonest_s is not None:
            due_at_s.append(now_s + min(soonest_s, CHECK_S))
        return max(0.0, min(due_at_s) - now_s) if due_at_s else None

    # -- what is due ---------------------------------------------------------------------------------------------

    def _enforce(self) -> None:
        """Enforce leases, output limits, memory limits, and the time limit of a stop."""
        self._leases.enforce()
        now_s = time.monotonic()
        if now_s >= self._limit_due_s:
            self._limit_due_s = now_s + LIMIT_EVERY_S
            self._leases.refreeze()
            if self._watchdog is None:  # no process could be made for it
                self._start_watchdog()
            for task in self._tasks.values():
                if task.limit_due_s <= now_s:
                    self._give_back(task.key, now_s - task.limit_due_s + LIMIT_EVERY_S)
                    for capture in task.captures:
                        capture.limit(self._holes)
                if task.memory_bytes_max and not task.ended_at and self._memory.is_out_of_memory(task.key):
                    self._units.kill(task.key)
        if self._kill_at_s and now_s >= self._kill_at_s:
            self._kill_at_s = now_s + protocol.STOP_GRACE_S
            for task in self._tasks.values():
                self._units.kill(task.key)

    def _leader_ended(self, task: LaunchedTask) -> None:
        task.memory_use = self._memory.used(task.key)
        self._input.leader_ended(task.key)
        self._reaper.add(task)
        self._leases.drop(task)
        del self._by_pidfd[task.pidfd]
        os.close(task.pidfd)

    def _end(self, task: LaunchedTask) -> None:
        del self._tasks[task.key]
        lost_bytes = self._input.close(task.key)
        record = task.reap(self._holes, lost_bytes)
        failure = self._users.failure_of(task.pid)
        if failure is not None:  # the process never became the command
            record = failed(task.started_at, *failure)
        self._memory.close(task.key)
        if task.lost_because:
            self._report_lost(task.key, task.lost_because, never_started=False)
        elif failure is not None and failure[0] == process.NEVER_STARTED:
            self._report_lost(task.key, failure[1], never_started=True, shortage=failure[1])
        else:
            with_start = not task.is_synced and self._starts.pop(task.key, None) is not None
            self._exits.add(task.key, record, is_synced=task.is_synced, with_start=with_start)
        if not self._start_next(task.key):
            self._exits.may_wait = False

    def _start_next(self, key: str) -> bool:
        """Start the next task in the lane of an ended one. → True if one was started."""
        request = self._lanes.next(key)
        while request is not None and not self._stopping:
            try:
                self._start(request)
            except process.RequestPending:  # its account has to be looked up again: the agent sends it again
                self._report_lost(request.key, "its account is looked up again", never_started=True)
            except protocol.REQUEST_FAILURES as error:
                log_line(f"task cannot be started: key={request.key} error={type(error).__name__}: {error}")
                self._report_lost(request.key, f"it cannot be started: {error}", never_started=True)
            if request.key in self._tasks:
                return True
            request = self._lanes.next(request.key)
        return False

    def _give_back(self, key: str, ran_s: float) -> None:
        """Return the tasks behind one that takes longer than expected to the agent."""
        if ran_s >= WAIT_S_MAX:
            for following in self._lanes.behind(key):
                del self._lanes.waiting[following]
                self._report_lost(following, "the task before it takes longer than expected", never_started=True)

    def _report_lost(self, key: str, reason: str, *, never_started: bool, shortage: str = "") -> None:
        self._events.append(protocol.ExpiredEvent(key, reason, never_started, shortage))

    def _reap_orphans(self) -> None:
        """Reap orphans of tasks, where they are reparented to the launcher."""
        if not self._units.is_proc_scan:
            return
        mine = {task.pid for task in self._tasks.values()} | self._own_children
        for pid in self._units.orphans() - mine:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue

    def _replace_watchdog(self, watchdog: Watchdog) -> None:
        """Start another watchdog, since this one was killed."""
        log_line(f"watchdog ended, starting another: pid={watchdog.pid}")
        self._epoll.unregister(watchdog.pidfd)
        watchdog.close()
        self._own_children.discard(watchdog.pid)
        self._watchdog = None
        self._start_watchdog()

    # -- the agent -----------------------------------------------------------------------------------------------

    def _carry_out(self, request: protocol.Request) -> None:  # noqa: C901 PLR0912 -- one case for each request
        match request:
            case protocol.SpawnRequest():
                self._spawn(request)
            case protocol.ForgetRequest(key):
                self._exits.forget(key)
                if key not in self._tasks:
                    self._users.forget(key)
            case protocol.SignalRequest(key, number):
                task = self._tasks.get(key)
                if task is not None and not self._would_thaw(task, number):
                    self._signal(task, number)
                elif number not in HARMLESS and self._lanes.waiting.pop(key, None) is not None:
                    now_at = time.time()  # as if the signal had arrived right after the start
                    self._exits.add(
                        key, protocol.ExitRecord(128 + number, now_at, now_at, signal=number), is_synced=False
                    )
                    self._exits.may_wait = False
            case protocol.LeaseRequest(key, deadline_s, ts):
                task = self._tasks.get(key)
                if task is not None:
                    self._leases.apply(task, deadline_s, ts)
                elif (waiting := self._lanes.waiting.get(key)) is not None and ts >= waiting.ts:
                    self._lanes.waiting[key] = waiting.replace(deadline_s=deadline_s, ts=ts)
            case protocol.EvictRequest(key, reason):
                task = self._tasks.get(key)
                if task is not None:
                    self._leases.evict(task, reason)
            case protocol.ListRequest():
                self._list()
            case protocol.StdinRequest():
                self._input.grown(request)
            case protocol.ResizeRequest():
                self._input.resize(request)
            case protocol.UsageRequest():
                counters = self._users.counters() if request.counters else []
                self._events.append(usage_of(self._tasks, self._units, request, counters))
            case protocol.PingRequest():
                self._events.append(protocol.PongEvent())
            case protocol.ListenRequest():
                self._agent.listen_again()
            case protocol.StopRequest():
                self._stop()
            case protocol.RetireRequest():
                self._retiring = not self._users.serves_all
            case protocol.DirectoryCheck() | protocol.FileCheck() | protocol.FileAppend() | protocol.FilesJob():
                self._users.carry_out(request)
            case _:
                assert_never(request)

    def _note_missing_socket(self, *_: object) -> None:
        """Record that another launcher was started here, because no agent could connect. This is a signal handler: the loop
        wakes up and does the rest."""
        self._must_listen = True

    def _list(self) -> None:
        """Send all known tasks and exits, in parts; events are sent only after that. An exit that has to be synced first still
        counts as running."""
        self._retiring = False
        self._exits.write()
        self._exits.reportable()  # drops these events: the exits are listed
        self._events.clear()
        self._starts.clear()
        self._agent.listed = True
        unsynced = self._exits.unsynced()
        tasks = list(self._tasks.values())
        now_s = boot_s()
        running = [
            protocol.ListedTask(
                task.key, task.started_at, task.ts, task.deadline_s, bool(task.frozen_at_s), now_s - task.started_boot_s
            )
            for task in tasks
        ]
        running += [
            protocol.ListedTask(key, time.time(), waiting.ts, waiting.deadline_s, False, 0.0)
            for key, waiting in self._lanes.waiting.items()
        ]  # they run soon
        running += [
            protocol.ListedTask(key, self._exits.ended[key].started_at, 0.0, 0.0, False, 0.0) for key in unsynced
        ]
        ended = [(key, record) for key, record in self._exits.ended.items() if key not in unsynced]
        step = EVENTS_PER_FRAME_MAX
        count = max(1, -(-max(len(running), len(ended)) // step))
        for number in range(count):
            part = slice(number * step, (number + 1) * step)
            event = protocol.ListedEvent(
                pid=os.getpid(),
                more=number < count - 1,
                running=running[part],
                ended=ended[part],
                protocol=protocol.VERSION,
                run=self._run,
                units=self._units.name,
                unenforced=[*self._units.unenforced, *self._memory.unenforced, *self._users.unenforced],
                memory=self._memory.name,
                system=self._users.serves_all,
                cores=self._users.enforces_cores,
            )
            self._agent.send([event])

    def _flush(self) -> None:
        """Write the exits of one turn to disk with one write, then send them to the agent with one."""
        self._exits.write()
        if self._is_due():
            self._report_due_s = 0.0
            self._waited = len(self._lanes.waiting)
            events = [*self._starts.values(), *self._events, *self._exits.reportable()]
            if self._agent.listed:
                self._agent.send(events)
            self._starts.clear()
            self._events.clear()
        self._agent.flush()

    def _is_due(self) -> bool:
        """True if the pending reports are due now."""
        if self._stopping or self._events or not self._exits.may_wait:
            return True
        has_ends = self._exits.has_unreported
        if not self._starts and not has_ends:
            return False
        now_s = time.monotonic()
        if not self._report_due_s:
            self._report_due_s = now_s + (ENDS_HELD_S if has_ends else STARTS_HELD_S)
        return now_s >= self._report_due_s or (has_ends and 2 * len(self._lanes.waiting) <= self._waited)

    # -- tasks ---------------------------------------------------------------------------------------------------

    def _spawn(self, request: protocol.SpawnRequest) -> None:
        if self._is_settled(request):
            return
        if request.after and self._lanes.add(request, self._tasks):
            self._waited = max(self._waited, len(self._lanes.waiting))
        else:
            self._start(request)

    def _start(self, request: protocol.SpawnRequest) -> None:
        key = request.key
        if 0 < request.deadline_s <= boot_s():
            # Its home may have given it to another node by now.
            self._report_lost(key, "its lease ran out before it could be started", never_started=True)
            return
        limit = request.output_bytes_max
        captures = (
            process.Capture(request.stdout, limit, self._users.access),
            process.Capture(request.stderr, limit, self._users.access),
        )
        started_at = time.time()
        try:
            request = self._users.admit(request)
            pid = self._spawner.spawn(request)
        except (process.SpawnRefused, process.CannotStart, OSError) as why:
            self._not_started(request, started_at, captures, why)
            return
        try:
            task = LaunchedTask(key, pid, started_at, captures)
        except OSError as error:
            self._kill_unwatched(key, pid, error)
            return
        task.memory_bytes_max = request.memory_bytes_max
        task.node = request.node[: protocol.NODE_CHARS_MAX]
        task.is_synced = request.once
        task.frozen_s_max = request.frozen_s_max or FROZEN_S_MAX
        self._tasks[key] = task
        self._by_pidfd[task.pidfd] = task
        self._epoll.register(task.pidfd, select.EPOLLIN | select.EPOLLONESHOT)  # reported once, then closed
        self._leases.apply(task, request.deadline_s, request.ts)
        self._starts[key] = protocol.StartedEvent(key, pid, started_at)

    def _not_started(
        self,
        request: protocol.SpawnRequest,
        started_at: float,
        captures: tuple[process.Capture, process.Capture],
        why: process.SpawnRefused | process.CannotStart | OSError,
    ) -> None:
        """Report a task without a process: as an exit if the task is at fault, else as never started."""
        key = request.key
        self._users.release(key)
        for capture in captures:
            capture.close(self._holes)
        if isinstance(why, process.CannotStart):
            record = failed(started_at, why.exit_code, why.reason)
            self._exits.add(key, record, is_synced=request.once)
            self._exits.may_wait = False
        elif isinstance(why, process.SpawnRefused):
            self._report_lost(key, f"policy: {why}", never_started=True)
        elif shortage := process.SHORTAGES.get(why.errno or 0, ""):
            log_line(f"task not started: key={key} shortage={shortage} error={why}")
            if why.strerror != os.strerror(why.errno or 0):  # the error has a text of its own
                shortage += f": {why.strerror}"
            self._report_lost(key, shortage, never_started=True, shortage=shortage)
        else:
            self._report_lost(key, f"no containment unit can be made for it: {why}", never_started=True)

    def _kill_unwatched(self, key: str, pid: int, error: OSError) -> None:
        """Kill a task if its end could not be noticed."""
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        while not self._units.close(key):
            time.sleep(CLOSE_S_MIN)
        os.waitpid(pid, 0)
        self._memory.close(key)
        self._input.close(key)
        self._users.release(key)
        shortage = process.SHORTAGES.get(error.errno or 0, "")
        self._report_lost(key, f"its process cannot be watched: {error}", never_started=False, shortage=shortage)

    def _is_settled(self, request: protocol.SpawnRequest) -> bool:
        """True if there is nothing to start: the task was started before, or must not start."""
        key = request.key
        known = self._tasks.get(key)
        if key in self._lanes.waiting:
            pass
        elif known is not None:
            self._starts[key] = protocol.StartedEvent(key, known.pid, known.started_at)
        elif key in self._exits.ended:
            if key not in self._exits.unsynced():
                self._events.append(protocol.EndedEvent(key, self._exits.ended[key]))
        elif self._stopping:
            log_line(f"task not started, launcher is stopping: key={key}")
        elif request.run not in ("", self._run):
            log_line(f"task not started, it was meant for an earlier launcher and is reported as dead: key={key}")
        else:
            return False
        return True

    def _would_thaw(self, task: LaunchedTask, number: int) -> bool:
        """True if this signal would continue a task without a lease; a new lease continues it anyway."""
        return number == signal.SIGCONT and self._units.is_proc_scan and bool(task.frozen_at_s)

    def _signal(self, task: LaunchedTask, number: int) -> None:
        """Signal its process group, and its processes outside of that group; SIGKILL reaches all of them."""
        if number == signal.SIGKILL:
            self._units.kill(task.key)
            return
        try:
            os.killpg(task.pid, number)  # the id cannot be reused, since the leader is not reaped yet
        except (ProcessLookupError, PermissionError) as error:
            log_line(f"cannot signal a task: key={task.key} signal={number} error={error}")
        for pid in self._units.processes(task.key):
            try:
                if os.getpgid(pid) != task.pid:
                    os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                continue

    def _stop(self, *_: object) -> None:
        """Stop all tasks: SIGTERM to all, SIGKILL after STOP_GRACE_S, then exit. A frozen task has no lease, so it must not
        run even to end: it is killed, and that does not count as its exit."""
        if self._stopping:
            return
        self._stopping = True
        self._kill_at_s = time.monotonic() + protocol.STOP_GRACE_S
        for task in self._tasks.values():
            if task.frozen_at_s:
                task.lost_because = task.lost_because or "its node was stopped while it was frozen, without a lease"
                self._units.kill(task.key)
            else:
                self._signal(task, signal.SIGTERM)


def ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)


def _detach(directory: str) -> None:
    ignore_signals()
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


def _request_socket(directory: str) -> None:
    """Ask the launcher of this directory to make its socket again if it is gone."""
    try:
        with open(f"{directory}/launcher.pid", encoding="ascii") as file:
            pid = int(file.read(20))
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            arguments = file.read().split(b"\0")
        if os.fsencode(directory) in arguments and b"--directory" in arguments:
            os.kill(pid, signal.SIGHUP)
    except (OSError, ValueError):  # no pid in the file yet, or the launcher has ended
        return


def lock(directory: str) -> None:
    """Lock this directory as long as this process lives. If another launcher holds the lock, this process ends."""
    fd = os.open(f"{directory}/launcher.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    tries_until_s = time.monotonic() + LOCK_S_MAX
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= tries_until_s:
                _request_socket(directory)
                sys.stderr.write(f"another launcher runs in {directory}\n")
                sys.exit(protocol.ALREADY_RUNS)
            time.sleep(LOCK_LOOK_S)
        else:
            return


def main() -> None:
    """``--directory DIR [--units KIND] [--memory KIND] [--store ID] [--cores enforce]``: run the launcher of DIR until it is
    asked to stop. Units are cgroup2 or bare; memory is limited by cgroup2, cgroup1 or rlimit; the default is the best that works.
    ID: the database whose tasks it starts."""
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    known = {"--directory", "--units", "--memory", "--store", "--cores"}
    if len(sys.argv) % 2 == 0 or "--directory" not in flags or flags.keys() - known:
        sys.exit("usage: launcher --directory DIR [--units KIND] [--memory KIND] [--store ID] [--cores enforce]")
    directory = os.path.abspath(flags["--directory"])
    os.makedirs(directory, mode=0o700, exist_ok=True)
    lock(directory)
    _detach(directory)
    users = process.SingleUser(directory, cores="--cores" in flags)
    Launcher(users, flags.get("--units", ""), flags.get("--memory", ""), flags.get("--store", "")).run()
