"""The `output` verb: a task's output to one client, live or kept, wherever it runs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from peerload.agent.completion import output_files
from peerload.agent.output.tail import tail_start
from peerload.agent.store.rows import order_of
from peerload.agent.views import task as answers
from peerload.model import metrics
from peerload.model.errors import PeerloadError
from peerload.model.task import TaskState, execution_key

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from peerload.agent.control.connection import Connection
    from peerload.agent.output.spool import Spool
    from peerload.agent.parts import Parts
    from peerload.model.task import TaskRecord
    from peerload.wire import control


class TaskWatch:
    """Somebody waits for tasks: ``event`` is set at each change of one of them, ``records`` has the newest of each;
    ``waits``: why the results of some cannot be had."""

    __slots__ = ("event", "records", "running", "tasks", "waits")

    def __init__(self, tasks: set[str]) -> None:
        self.tasks = tasks
        self.event = asyncio.Event()
        self.records: dict[str, TaskRecord] = {}
        self.running: set[str] = set()
        self.waits: dict[str, str] = {}

    def tell_waits(self, task: str, why: str) -> None:
        """It has ended, and its result cannot be had for now."""
        self.waits[task] = why
        self.event.set()

    def tell(self, record: TaskRecord, *, running: bool) -> None:
        """A change."""
        self.records[record.task] = record
        if running:
            self.running.add(record.task)
        else:
            self.running.discard(record.task)
        self.event.set()


async def last_lines(spool: Spool, key: str, lines: int, sizes: tuple[int, int]) -> list[int]:
    """Where the last lines of both streams begin."""
    return [await asyncio.to_thread(tail_start, spool.path(key, 1 + n), lines, size) for n, size in enumerate(sizes)]


class OutputStream:
    """One request on its way. What was sent is remembered per attempt; a new attempt starts from the beginning."""

    def __init__(self, parts: Parts, connection: Connection, request: control.Output, watch: TaskWatch) -> None:
        self._parts = parts
        self._connection = connection
        self._request = request
        self._watch = watch
        self._sent: dict[str, list[int]] = {}
        self._waits = ""

    async def run(self, record: TaskRecord) -> None:
        """Send it all, then the end."""
        if self._request.tail_lines is not None:
            await self._begin_at_the_last_lines(record, self._request.tail_lines)
        while self._request.follow and not record.state.is_final:
            if record.state is TaskState.UNKNOWN:
                self._connection.more(self._request.id, {"unknown": answers.ended_object(record)})
            record = await self._live(record)
        if not record.state.is_final:
            await self._bring_up_to_date(record)
        elif self._request.tells_start:
            self._connection.more(self._request.id, {"ended": {"node": record.node, "attempt": record.attempt}})
        key = execution_key(record.uid, record.attempt)
        await self._pump(key, end=self._size_now(key, record))
        exit_ = record.exit
        self._connection.ok(
            self._request.id,
            {
                **answers.ended_object(record),
                "stdout_bytes": exit_.stdout_bytes if exit_ is not None else 0,
                "stderr_bytes": exit_.stderr_bytes if exit_ is not None else 0,
                **answers.output_gone(self._parts.store, record),
            },
        )
        if self._request.done_with and record.state.is_final and not self._is_to_be_saved(record):
            self._parts.output.cut_soon(key)

    def _is_to_be_saved(self, record: TaskRecord) -> bool:
        """Whether its user wants its output in files, too; those who write these cut it."""
        return bool(output_files.patterns(self._parts.store.terms(order_of(record.task)[0])))

    def _size_now(self, key: str, record: TaskRecord) -> tuple[int, int]:
        """How much is here; no more than the result says, less where it was cleaned away."""
        stdout_bytes, stderr_bytes = self._parts.spool.sizes(key)
        if record.exit is None:
            return stdout_bytes, stderr_bytes
        return min(stdout_bytes, record.exit.stdout_bytes), min(stderr_bytes, record.exit.stderr_bytes)

    async def _live(self, record: TaskRecord) -> TaskRecord:
        """Follow the current attempt until something changes; → the newest record."""
        pump: asyncio.Task[None] | None = None
        if self._runs(record):
            key = execution_key(record.uid, record.attempt)
            if self._request.tells_start:
                self._connection.more(self._request.id, {"running": {"node": record.node, "attempt": record.attempt}})
            pump = asyncio.get_running_loop().create_task(self._pump_live(record, key))
        try:
            while True:
                await self._watch.event.wait()
                self._watch.event.clear()
                self._say_waits(record)
                newest = self._watch.records.get(record.task, record)
                if newest.state.is_final or newest.attempt != record.attempt or newest.state is not record.state:
                    return newest
                if pump is None and self._runs(newest):
                    return newest
        finally:
            if pump is not None:
                pump.cancel()
                await asyncio.gather(pump, return_exceptions=True)

    def _say_waits(self, record: TaskRecord) -> None:
        """Why there is no end of it, though it has ended; once for each reason."""
        why = self._watch.waits.get(record.task, "")
        if why and why != self._waits:
            self._waits = why
            self._connection.more(self._request.id, {"waits": {"id": record.task, "node": record.node, "why": why}})

    def _runs(self, record: TaskRecord) -> bool:
        """Whether there may be output to follow."""
        if record.state is not TaskState.LEASED:
            return False
        if record.node == self._parts.config.node:
            return True
        task = self._parts.node.home.tasks.get(record.uid)
        return task is not None and bool(task.running_at)

    async def _bring_up_to_date(self, record: TaskRecord) -> None:
        """What there is now, of a task that runs elsewhere."""
        if self._runs(record) and record.node != self._parts.config.node:
            key = execution_key(record.uid, record.attempt)
            try:
                await self._parts.output.copy_now(record.node, record.task, record.uid, record.attempt, key)
            except (PeerloadError, OSError, TimeoutError):
                self._parts.counters[metrics.OUTPUT_COPIES_FAILED] += 1  # what is here is shown

    async def _pump_live(self, record: TaskRecord, key: str) -> None:
        """As it comes; a task that was run in the foreground waits for who reads it so. Not one with a terminal: a shell there
        would take a process that was stopped for one that its user has stopped."""
        task = self._parts.node.home.tasks.get(record.uid)
        spec = task.spec if task is not None else None
        is_paced = self._request.tells_start and spec is not None and spec.followed and spec.terminal is None
        runs_here = record.node == self._parts.config.node
        output, sent = self._parts.output, self._sent.setdefault(key, [0, 0])
        if not runs_here:
            output.mirror(record.node, record.task, record.uid, record.attempt, key, paced=is_paced)
        is_run = self._request.done_with
        pieces = (
            output.follow_paced(key, *sent, runs_here=runs_here, is_awaited=is_run)
            if is_paced
            else output.follow(key, *sent)
        )
        await self._send(pieces, sent)

    async def _pump(self, key: str, end: tuple[int, int]) -> None:
        """What there is, up to ``end``."""
        sent = self._sent.get(key)
        if sent is None:
            sent = self._sent[key] = self._start(end)
        await self._send(self._parts.output.follow(key, *sent, end=end), sent)

    async def _send(self, followed: AsyncGenerator[tuple[int, int, bytes], None], sent: list[int]) -> None:
        async with contextlib.aclosing(followed) as pieces:
            async for stream, offset, data in pieces:
                if stream in self._request.streams:
                    await self._connection.tell(self._request.id, {"stream": stream, "offset": offset, "data": data})
                sent[stream - 1] = offset + len(data)

    async def _begin_at_the_last_lines(self, record: TaskRecord, lines: int) -> None:
        """Of what there is now of the current attempt; of one that comes later everything is sent."""
        if not record.state.is_final:
            await self._bring_up_to_date(record)
        key = execution_key(record.uid, record.attempt)
        self._sent[key] = await last_lines(self._parts.spool, key, lines, self._size_now(key, record))

    def _start(self, end: tuple[int, int]) -> list[int]:
        """Where to begin: at the beginning, or at the tail of what there is."""
        tail_bytes = self._request.tail_bytes
        if tail_bytes is None:
            return [0, 0]
        return [max(size - tail_bytes, 0) for size in end]
