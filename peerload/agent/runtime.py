"""The shared runtime of an agent: facts, run state, inbox and answers, background tasks, timeouts and threads.

An agent is one event loop. All events are put into the one inbox, and one consumer passes them to the `Node`, in order. Clients
wait for the resulting answers, decisions and changes of tasks (`CoreRequests`, `Decisions`, `TaskWatches`). A bug
in a background task stops the agent (crash-only). Timeouts do not count event-loop lag: a reply that arrived while the loop or the
machine was blocked is on time.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import enum
import errno
import logging
import math
import os
import queue
import signal
import threading
import time
from bisect import bisect_left
from collections import deque
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from peerload.model.bounded import BoundedDict
from peerload.model.errors import PeerloadError
from peerload.model.events import GossipReceived, Instant, LoadSampled, MessageReceived
from peerload.model.messages import ADVICE

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence

    from peerload.model.actions import Answer, AnswerPart, Decided
    from peerload.model.config import AgentConfig
    from peerload.model.events import Event
    from peerload.model.messages import Identity
    from peerload.model.task import TaskRecord


log = logging.getLogger("peerload.agent")

P = ParamSpec("P")
R = TypeVar("R")

REFUSED_BY_MAX = 16
"""Maximum number of addresses in `AgentInfo.refused_by`; the latest are kept."""
TURN_EVENTS_MAX = 256
"""Maximum number of events handled before sockets and timers get their turn."""
DECISIONS_KEPT_MAX = 10_000
STEP_S = 0.1
"""Maximum time of one turn of the loop that counts for a timeout."""
CHECK_EVERY_S = 3.0
"""Interval between two checks of a connection in the middle of a frame."""
TICK_S = 1.0
"""Common interval at which periodic work wakes the agent."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""Golden ratio: the fractions of its multiples are evenly spread."""
CHECKS_MAX = 3
"""Checks without progress after which the connection is closed: 9 s."""
PROGRESS_BYTES_MIN = 1024
"""Number of bytes between two checks that counts as progress, as does the end of a frame."""
THREADS = 8
_NOT_FOR_CHILDREN = ("PEERLOAD_", "NOTIFY_", "LISTEN_", "WATCHDOG_", "CREDENTIALS_")


# -- facts -------------------------------------------------------------------------------------------------------------


def child_environment() -> dict[str, str]:
    """The variables of this process for its children, without its settings, which contain passwords, and without those of its
    service manager."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_NOT_FOR_CHILDREN)}


def now() -> Instant:
    """The current time, by the boot clock and by the machine's date."""
    return Instant(time.clock_gettime(time.CLOCK_BOOTTIME), time.time())


class AgentInfo:
    """Facts about this agent, as plain values, for the loop's thread only. A reload replaces ``config``, so always read it
    from here."""

    def __init__(self, config: AgentConfig, identity: Identity, origins: Mapping[str, str] | None = None) -> None:
        self.config = config
        self.identity = identity
        """Name, boot and address of this node. The address is empty until the peer links listen."""
        self.origins = dict(origins or {})
        """Source of each setting (flag, variable, file), if known."""
        self.counters: collections.Counter[str] = collections.Counter()
        self.notices: list[str] = []
        """Sentences about the state of this node for users who start or inspect the agent."""
        self.refused_by: tuple[str, ...] = ()
        """Addresses of the last peers that refused this node because another node has its name."""
        self.started_at = time.time()
        self._started_s = now().boot_s

    def up_s(self) -> float:
        return now().boot_s - self._started_s

    def add_refusal(self, address: str) -> None:
        self.refused_by = (*self.refused_by, address)[-REFUSED_BY_MAX:]


class Histogram:
    """Histogram of a quantity in the form of Prometheus: counts in fixed buckets, and the sum.

    bounds: the upper bounds of the buckets, ascending; larger values are counted in one more bucket.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value ``times`` times. Call it from one thread only; another may read."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def to_dict(self) -> dict[str, object]:
        """Histogram in the form of the answer to `stats`: bounds, counts of each bucket (one more than
        bounds), sum."""
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}


# -- run state ---------------------------------------------------------------------------------------------------------


class Ending(enum.IntEnum):
    """Ending of an agent. If there are several, all are carried out, and the greatest determines how the end is reported."""

    RESTART = enum.auto()
    """The agent stops, and the same process starts it again."""
    STOP = enum.auto()
    """The agent stops; running tasks continue."""
    LEAVE = enum.auto()
    """The agent stops, and its next start knows no peer."""
    END_TASKS = enum.auto()
    """The agent ends its running tasks, and stops."""
    FAILED = enum.auto()
    """The agent makes no more decisions: acknowledged data is on disk, and continuing could break a promise."""
    REFUSED = enum.auto()
    """The agent must not run here: it ends its tasks, and stops without a message to peers."""


class RunState:
    """The run state of one agent, from its start until it has stopped."""

    def __init__(self) -> None:
        self._endings: set[Ending] = set()
        self.refusal: PeerloadError | None = None
        """The error because of which this agent must not run here; `Daemon.run` raises it."""
        self._stopping = asyncio.Event()

    @property
    def ending(self) -> Ending | None:
        """The greatest of its endings; None while it runs."""
        return max(self._endings, default=None)

    @property
    def is_stopping(self) -> bool:
        return bool(self._endings)

    @property
    def has_failed(self) -> bool:
        """True if it makes no more decisions."""
        return not self._endings.isdisjoint({Ending.FAILED, Ending.REFUSED})

    @property
    def ends_tasks(self) -> bool:
        """True if running tasks end with it, even if it fails meanwhile."""
        return not self._endings.isdisjoint({Ending.END_TASKS, Ending.REFUSED})

    @property
    def leaves(self) -> bool:
        """True if its next start must know no peer."""
        return Ending.LEAVE in self._endings

    async def stopping(self) -> None:
        await self._stopping.wait()

    def stop(self, ending: Ending = Ending.STOP) -> None:
        self._endings.add(ending)
        self._stopping.set()

    def fail(self, why: str) -> None:
        log.critical("agent stops: reason=%s", why)
        self.stop(Ending.FAILED)

    def refuse(self, error: PeerloadError) -> None:
        """Stop, since this agent must not run here at all."""
        self.refusal = error
        self.stop(Ending.REFUSED)


# -- inbox -------------------------------------------------------------------------------------------------------------


class EventSink(Protocol):
    """Receiver of events for the core, called in the loop's thread: the `Inbox`."""

    def put(self, event: Event, /) -> None:
        """Queue an event."""


class Inbox:
    """The events of one agent, in order. Its only consumer takes one `turn` of them at a time.

    A full inbox drops advice, gossip and samples, which may be lost, and counts them. All other events are bounded at their
    sources (tasks, peers, clients) and are kept.
    """

    def __init__(self, events_max: int) -> None:
        self._events_max = events_max
        self._events: deque[Event] = deque()
        self._news: asyncio.Future[None] | None = None
        """Future that the consumer awaits while the inbox is empty. An `asyncio.Event` would cost more than handling most events."""
        self.dropped = 0
        self.put_count = self.taken_count = 0
        """Total number of events that were queued, and that were handed over."""

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: Event) -> None:
        """Queue an event. Call it only in the loop's thread."""
        if len(self._events) >= self._events_max and _may_be_lost(event):
            self.dropped += 1
            return
        self._events.append(event)
        self.put_count += 1
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def turn(self) -> list[Event]:
        """Wait for events → those that have arrived, at most TURN_EVENTS_MAX. Sockets and timers get their turn first."""
        if self._events:
            await asyncio.sleep(0)
        else:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        events = [self._events.popleft() for _ in range(min(len(self._events), TURN_EVENTS_MAX))]
        self.taken_count += len(events)
        return events


def _may_be_lost(event: Event) -> bool:
    return isinstance(event, LoadSampled | GossipReceived) or (
        isinstance(event, MessageReceived) and isinstance(event.message, ADVICE)
    )


# -- answers and decisions of the core ---------------------------------------------------------------------------------


class AnswerReceiver(Protocol):
    """The connection of a client that gets answers of the core. ``pending``: number of its unanswered requests."""

    pending: int

    def ok(self, number: int, body: dict[str, Any], /) -> None:
        """Send the answer to a request. Raises PeerloadError if it cannot be sent."""

    def more(self, number: int, body: dict[str, Any], /) -> None:
        """Send a part of the answer."""

    def fail(self, number: int, error: Exception, /) -> None:
        """Send an error as the answer."""


class CoreRequests:
    """Passes requests to the core, and its answers to the waiting clients."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._waiting: dict[int, tuple[AnswerReceiver, int]] = {}
        self._if_refused: dict[int, Callable[[], None]] = {}
        self._futures: dict[int, asyncio.Future[dict[str, object]]] = {}
        self._parts: dict[int, Callable[[dict[str, object]], None]] = {}
        self._next = 0

    def expect(self, connection: AnswerReceiver, number: int, refused: Callable[[], None] | None = None) -> int:
        """Reserve a number for a request to the core, whose answer is sent as the response. ``refused`` is called if the answer
        is an error, or repeats an earlier one."""
        self._next += 1
        if refused is not None:
            self._if_refused[self._next] = refused
        self._waiting[self._next] = (connection, number)
        connection.pending += 1
        return self._next

    def put(self, event: Event) -> None:
        self._inbox.put(event)

    def expect_future(
        self, parts: Callable[[dict[str, object]], None] | None = None
    ) -> tuple[int, asyncio.Future[dict[str, object]]]:
        """Reserve a number for a request to the core → the number, and the future of the answer. parts: gets partial answers
        before the end."""
        self._next += 1
        if parts is not None:
            self._parts[self._next] = parts
        future: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
        self._futures[self._next] = future
        return self._next, future

    def withdraw(self, number: int) -> bool:
        """Drop a future of `expect_future` → True if it had no answer yet."""
        self._parts.pop(number, None)
        return self._futures.pop(number, None) is not None

    def answered_in_part(self, part: AnswerPart) -> None:
        connection, number = self._waiting.get(part.request, (None, 0))
        if connection is not None:
            connection.more(number, part.reply)
        elif (parts := self._parts.get(part.request)) is not None:
            parts(part.reply)

    def answered(self, answer: Answer) -> None:
        refused = self._if_refused.pop(answer.request, None)
        if refused is not None and (answer.error is not None or answer.reply.get("repeated")):
            refused()
        self._parts.pop(answer.request, None)
        future = self._futures.pop(answer.request, None)
        if future is not None:
            if not future.done() and answer.error is not None:
                future.set_exception(answer.error)
            elif not future.done():  # the client may have disconnected
                future.set_result(answer.reply)
            return
        connection, number = self._waiting.pop(answer.request, (None, 0))
        if connection is None:
            return
        connection.pending -= 1
        if answer.error is not None:
            connection.fail(number, answer.error)
        else:
            try:
                connection.ok(number, answer.reply)
            except PeerloadError as error:
                connection.fail(number, error)


class Decisions:
    """The newest decision about each of the last DECISIONS_KEPT_MAX tasks."""

    def __init__(self) -> None:
        self._kept: BoundedDict[str, tuple[Decided, float]] = BoundedDict(DECISIONS_KEPT_MAX)

    def add(self, decision: Decided, at: float) -> None:
        """Store a decision with its time (Unix s)."""
        if decision.task:
            self._kept[decision.task] = decision, at

    def of_task(self, task: str) -> dict[str, object] | None:
        decision, at = self._kept.get(task, (None, 0.0))
        if decision is None:
            return None
        inputs = [{"node": node, "load": load, "age_s": age_s} for node, load, age_s in decision.inputs]
        return {
            "at": at,
            "policy": decision.policy,
            "choice": decision.choice,
            "reason": decision.reason,
            "inputs": inputs,
            "compared": [
                {
                    "node": one.node,
                    "joules": one.joules,
                    "quality": one.quality.value,
                    "price": one.price,
                    "wake_s": one.wake_s or None,
                    "wake_joules": one.wake_joules or None,
                }
                for one in decision.compared
            ],
        }


class TaskWatch:
    """Changes of some tasks: each sets ``event``; ``records`` has the newest record of each task, ``delayed`` the reasons why
    results are not available for now."""

    __slots__ = ("delayed", "event", "records", "running", "tasks")

    def __init__(self) -> None:
        self.tasks: set[str] = set()
        self.event = asyncio.Event()
        self.records: dict[str, TaskRecord] = {}
        self.running: set[str] = set()
        self.delayed: dict[str, str] = {}

    def add_change(self, record: TaskRecord, *, running: bool) -> None:
        self.records[record.task] = record
        if running:
            self.running.add(record.task)
        else:
            self.running.discard(record.task)
        self.event.set()

    def add_delay(self, task: str, why: str) -> None:
        self.delayed[task] = why
        self.event.set()


class TaskWatches:
    """All watches of one agent, by task."""

    def __init__(self) -> None:
        self._watches: dict[str, set[TaskWatch]] = {}

    @contextlib.contextmanager
    def watch(self, *tasks: str) -> Iterator[TaskWatch]:
        watch = TaskWatch()
        self.add(watch, set(tasks))
        try:
            yield watch
        finally:
            for task in watch.tasks:
                if watches := self._watches.get(task):
                    watches.discard(watch)
                    if not watches:
                        del self._watches[task]

    def add(self, watch: TaskWatch, tasks: set[str]) -> None:
        """Add these tasks to a watch."""
        watch.tasks |= tasks
        for task in tasks:
            self._watches.setdefault(task, set()).add(watch)

    def changed(self, record: TaskRecord, *, running: bool) -> None:
        for watch in list(self._watches.get(record.task, ())):
            watch.add_change(record, running=running)

    def delayed(self, task: str, why: str) -> None:
        """Report that a task has ended elsewhere, and its result cannot be fetched for now."""
        for watch in list(self._watches.get(task, ())):
            watch.add_delay(task, why)

    def __bool__(self) -> bool:
        return bool(self._watches)

    def is_watched(self, task: str) -> bool:
        return task in self._watches


# -- background tasks and timeouts -------------------------------------------------------------------------------------


async def next_tick(every_s: float) -> None:
    """Sleep until the next multiple of ``every_s`` on this agent's clock. Periodic work with intervals that are multiples of each
    other wakes the process together: in an idle agent, wake-ups are the main cost."""
    await asyncio.sleep(every_s - _ticking_s() % every_s)


def coalesced_s(seconds: float) -> float:
    """The pause nearest to ``seconds`` that ends at a tick, for work that may be TICK_S / 2 early or late; repeated, it has
    the right period on average. Shorter pauses are not changed."""
    if seconds <= TICK_S / 2:
        return seconds
    now_s = _ticking_s()
    return round((now_s + seconds) / TICK_S) * TICK_S - now_s


def _ticking_s() -> float:
    """The loop's clock, shifted by a part of a tick that differs between the agents of a machine, so that they wake separately."""
    return asyncio.get_running_loop().time() + os.getpid() * GOLDEN % TICK_S


SHORT_OF = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of a lack of descriptors, memory or threads. They say nothing about the file concerned, and never end the agent."""


class BackgroundTasks:
    """The background tasks of one owner. `close` cancels the remaining ones."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("bug in a background task", exc_info=error)
            self._run.fail(f"a bug: {error!r}")

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def done_within(answer: asyncio.Future[Any], seconds: float) -> bool:
    """Wait for an answer, which is neither consumed nor cancelled → True if it arrives within ``seconds`` of time in which
    the loop was not blocked."""
    left_s = seconds
    while left_s > 0:
        done, _ = await asyncio.wait({answer}, timeout=min(left_s, STEP_S))
        if done:
            return True
        left_s -= STEP_S
    return answer.done()


async def run_command(
    command: Sequence[str],
    within_s: float,
    environment: Mapping[str, str] | None = None,
    *,
    directory: str | None = None,
    output_bytes_max: int = 0,
) -> tuple[int, bytes]:
    """Run a command of the administrator in a session of its own → its exit code and its output. If it prints more than
    output_bytes_max, it is killed after one more byte (0: nothing is read). Raises TimeoutError if it was killed, with all
    processes that it has started, because it took longer; OSError if it cannot be started."""
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, cwd=directory, start_new_session=True,
        stdin=null, stdout=asyncio.subprocess.PIPE if output_bytes_max else null, stderr=null,
    )  # fmt: skip
    output, has_ended = b"", False
    try:
        async with asyncio.timeout(within_s):
            while process.stdout is not None and len(output) <= output_bytes_max:
                part = await process.stdout.read(output_bytes_max + 1 - len(output))
                if not part:
                    break
                output += part
            if len(output) <= output_bytes_max:
                await process.wait()
                has_ended = True
    finally:
        if not has_ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001 -- nothing else closes its pipe
            ended = asyncio.ensure_future(process.wait())
            try:
                await asyncio.shield(ended)
            finally:  # even if cancelled during the kill, no child is left behind
                await ended
    return process.returncode or 0, output


class ReadTimeout:
    """The read timeout of one connection. ``expired()`` is called once, when a frame makes no progress."""

    __slots__ = ("_bytes", "_checked_bytes", "_checks", "_expired", "_is_partial", "_is_paused", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._bytes = self._checked_bytes = self._checks = 0
        self._is_partial = self._is_paused = False
        self._timer: asyncio.TimerHandle | None = None

    def received(self, count: int, *, is_whole: bool, is_partial: bool) -> None:
        """Count received bytes. is_whole: they completed a frame. is_partial: an incomplete frame remains."""
        self._bytes += PROGRESS_BYTES_MIN if is_whole else count
        self._is_partial = is_partial
        if is_partial and self._timer is None:
            self._restart()

    def pause(self, *, paused: bool) -> None:
        """Pause the timeout while reading is paused (nothing can arrive), or resume it."""
        self._is_paused = paused

    def stop(self) -> None:
        self._is_partial = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _restart(self) -> None:
        self._checked_bytes, self._checks = self._bytes, 0
        self._timer = self._loop.call_later(CHECK_EVERY_S, self._check)

    def _check(self) -> None:
        self._timer = None
        if not self._is_partial:
            return
        if self._is_paused or self._bytes - self._checked_bytes >= PROGRESS_BYTES_MIN:
            self._restart()
            return
        self._checks += 1
        self._checked_bytes = self._bytes
        if self._checks >= CHECKS_MAX:
            self._is_partial = False
            self._expired()
        else:
            self._timer = self._loop.call_later(CHECK_EVERY_S, self._check)


# -- threads -----------------------------------------------------------------------------------------------------------


M_ARENA_MAX = -8
"""Number of this parameter of `mallopt`."""


def share_heap() -> None:
    """Make the C library allocate from one heap for all threads: otherwise each thread keeps the memory that it has needed once.
    Call it before there are threads."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)


def trim_memory() -> None:
    """Return freed memory of the C library to the machine. For a thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


class Workers(Executor):
    """The thread pool of one event loop; only the loop's thread submits work. ``count``: the number of threads.

    The threads are made when the agent starts, since none can be made when the limit of processes is reached, for example by a
    fork bomb in a task. Each call tries again to make missing threads. Without any thread, a call blocks the event loop: that is
    slow, but the agent lives and can end the task.
    """

    def __init__(self, count: int = THREADS, end_s: float | None = None) -> None:
        """end_s: maximum time, in s, that `shutdown` waits for running work; None: until it is done."""
        self._count = count
        self._end_s = end_s
        self._work: queue.SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_short = False
        self._grow()

    def submit(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        future: Future[R] = Future()
        self._grow()
        work = (future, lambda: function(*args, **kwargs))
        if self._threads:
            self._work.put(work)  # type: ignore[arg-type]
        else:
            _carry_out(*work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        del cancel_futures
        for _ in self._threads:
            self._work.put(None)
        until_s = None if self._end_s is None else time.monotonic() + self._end_s
        for thread in self._threads if wait else ():
            thread.join(None if until_s is None else max(until_s - time.monotonic(), 0.0))
        self._threads.clear()
        self._count = 0

    def _grow(self) -> None:
        while len(self._threads) < self._count:
            # A daemon thread, so that an agent ends if it fails in its start, before its threads are shut down.
            thread = threading.Thread(target=self._run, name="worker", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if not self._is_short:
                    log.warning(
                        "cannot start a thread: running=%d wanted=%d error=%s", len(self._threads), self._count, error
                    )
                self._is_short = True
                return
            self._threads.append(thread)
        self._is_short = False

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            _carry_out(*work)
            del work  # arguments and result may be megabytes: do not keep them while waiting


def _carry_out(future: Future[R], work: Callable[[], R]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 -- it is the caller's
        future.set_exception(error)
    else:
        future.set_result(result)


def in_own_thread(work: Callable[[], R]) -> asyncio.Future[R]:
    """Do blocking work that may hang (a dead network mount) in a separate thread, which delays neither other work nor
    the end of the agent. Raises BlockingIOError if no thread can be made."""
    future: Future[R] = Future()
    done = asyncio.wrap_future(future)
    try:
        threading.Thread(target=_carry_out, args=(future, work), name="own thread", daemon=True).start()
    except RuntimeError:
        raise BlockingIOError(errno.EAGAIN, "no thread can be made: the limit of processes is reached") from None
    return done


def call_in_loop(loop: asyncio.AbstractEventLoop, calls: Sequence[Callable[[], object]]) -> None:
    """From another thread, make these calls in the loop's thread, in one turn; ignored if the loop is closed."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(lambda: [call() for call in calls])
