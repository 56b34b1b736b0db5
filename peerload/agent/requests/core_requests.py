"""Waits of clients: for answers of the core, for changes of tasks, and for reads of the store that see every earlier decision."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from peerload.model.bounded import BoundedDict
from peerload.model.errors import PeerloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from peerload.agent.control.connection import Connection
    from peerload.agent.runtime import Inbox
    from peerload.agent.store.store import Store
    from peerload.agent.store.write_ahead import EventLog, Outbox
    from peerload.model.actions import Answer, AnswerPart, Decided
    from peerload.model.events import Event
    from peerload.model.task import TaskRecord


DECISIONS_KEPT_MAX = 10_000
STALLED_CHECK_S = 0.2
"""Interval at which a read that waits for the disk checks whether the disk is full."""


class CoreRequests:
    """Puts requests to the core, and passes its answers on to the clients that wait for them."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._waiting: dict[int, tuple[Connection, int]] = {}
        self._if_refused: dict[int, Callable[[], None]] = {}
        self._futures: dict[int, asyncio.Future[dict[str, object]]] = {}
        self._parts: dict[int, Callable[[dict[str, object]], None]] = {}
        self._next = 0

    def expect(self, connection: Connection, number: int, refused: Callable[[], None] | None = None) -> int:
        """Reserve a number for a request to the core, whose answer becomes the response. ``refused`` is called if the answer
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
        """Reserve a number for a request to the core → it, and the future of the answer. parts: gets what comes of the answer
        before its end."""
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
        """Keep a decision that was made at that time (Unix s)."""
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
    """Changes of some tasks: ``event`` is set at each, ``records`` has the newest record of each task, ``delayed`` why the
    results of some cannot be had for now."""

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
        """Let a watch have the changes of these tasks, too."""
        watch.tasks |= tasks
        for task in tasks:
            self._watches.setdefault(task, set()).add(watch)

    def changed(self, record: TaskRecord, *, running: bool) -> None:
        for watch in list(self._watches.get(record.task, ())):
            watch.add_change(record, running=running)

    def delayed(self, task: str, why: str) -> None:
        """A task has ended elsewhere, and its result cannot be brought here for now."""
        for watch in list(self._watches.get(task, ())):
            watch.add_delay(task, why)

    def __bool__(self) -> bool:
        return bool(self._watches)

    def is_watched(self, task: str) -> bool:
        return task in self._watches


class DurableReads:
    """The store of one agent as clients read it: all that was acknowledged, and nothing that a crash could undo."""

    def __init__(self, store: Store, outbox: Outbox, event_log: EventLog) -> None:
        self.store = store
        self.event_log = event_log
        self._outbox = outbox

    async def durable(self) -> Store:
        """Wait until every earlier decision is on disk and its messages are sent → the store. While the disk is full nothing
        is committed, so that the store is current as it is."""
        store, reached = self.store, asyncio.Event()
        if not store.is_stalled:
            self._outbox.when_durable(reached.set)
        while not store.is_stalled and not reached.is_set():
            with contextlib.suppress(TimeoutError):  # that very commit may find the disk full
                async with asyncio.timeout(STALLED_CHECK_S):
                    await reached.wait()
        return store

    async def readable(self, connection: Connection, *, events: bool = False) -> Store:
        """As `durable`, once the client has read most of the earlier responses. ``events``: with all events so far."""
        if events:
            self.event_log.settle()
        await self.durable()
        await connection.drain()
        return self.store
