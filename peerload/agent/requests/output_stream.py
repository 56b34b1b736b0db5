"""The verb `output`: streams a task's output to one client, live or kept, wherever the task runs."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peerload.agent.accounts import output_patterns
from peerload.agent.output.spool import tail_start
from peerload.agent.store.schema import order_of
from peerload.agent.views import remote_task
from peerload.agent.views import task as views
from peerload.model import metrics
from peerload.model.errors import PeerloadError
from peerload.model.messages import OutputEnd, OutputRequest
from peerload.model.task import TaskState, execution_key

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from peerload.agent.control.connection import Connection
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.output.output import TaskOutputs
    from peerload.agent.output.spool import Spool
    from peerload.agent.requests.client_events import TaskWatch, TaskWatches
    from peerload.agent.requests.durable_reads import DurableReads
    from peerload.agent.runtime import AgentInfo
    from peerload.agent.store.store import Store
    from peerload.core.node import Node
    from peerload.core.work import RemoteTask
    from peerload.model.task import TaskRecord
    from peerload.wire import control

    Pieces = AsyncGenerator[tuple[int, int, bytes], None]


@dataclass(eq=False, repr=False)
class OutputSource:
    """The output of tasks of this home: kept here, or copied from the node that runs them."""

    _info: AgentInfo
    _node: Node
    _output: TaskOutputs
    _spool: Spool

    def runs(self, record: TaskRecord) -> bool:
        """True if there may be output to follow."""
        if record.state is not TaskState.LEASED:
            return False
        if record.node == self._node.state.node:
            return True
        task = self._node.home.tasks.get(record.uid)
        return task is not None and bool(task.running_at)

    async def bring_up_to_date(self, record: TaskRecord) -> None:
        """Copy the current output of a task that runs elsewhere."""
        if self.runs(record) and record.node != self._node.state.node:
            key = execution_key(record.uid, record.attempt)
            try:
                await self._output.copy_now(record.node, record.task, record.uid, record.attempt, key)
            except (PeerloadError, OSError, TimeoutError):
                self._info.counters[metrics.OUTPUT_COPIES_FAILED] += 1  # the output so far is shown

    def size_now(self, record: TaskRecord) -> tuple[int, int]:
        """Sizes of the output here: at most those of the result, less if it was cleaned."""
        stdout_bytes, stderr_bytes = self._spool.sizes(execution_key(record.uid, record.attempt))
        if record.exit is None:
            return stdout_bytes, stderr_bytes
        return min(stdout_bytes, record.exit.stdout_bytes), min(stderr_bytes, record.exit.stderr_bytes)

    def follow(self, record: TaskRecord, sent: list[int], *, in_foreground: bool, is_awaited: bool) -> Pieces:
        """The output from ``sent`` on, as it is written. A task in the foreground is stopped while its reader is slow
        (backpressure). Not one with a terminal: a shell there would treat it as stopped by its user."""
        key = execution_key(record.uid, record.attempt)
        task = self._node.home.tasks.get(record.uid)
        is_paced = in_foreground and task is not None and task.spec.followed and task.spec.terminal is None
        runs_here = record.node == self._node.state.node
        if not runs_here:
            self._output.mirror(record.node, record.task, record.uid, record.attempt, key, paced=is_paced)
        if is_paced:
            return self._output.follow_paced(key, *sent, runs_here=runs_here, is_awaited=is_awaited)
        return self._output.follow(key, *sent)

    def kept(self, key: str, sent: list[int], end: tuple[int, int]) -> Pieces:
        """The output that is here, from ``sent`` up to ``end``."""
        return self._output.follow(key, *sent, end=end)

    async def last_lines(self, key: str, lines: int, sizes: tuple[int, int]) -> list[int]:
        """The offsets at which the last lines of both streams begin."""
        paths = [self._spool.path(key, stream) for stream in (1, 2)]
        return [await asyncio.to_thread(tail_start, path, lines, size) for path, size in zip(paths, sizes, strict=True)]

    def cut_soon(self, key: str) -> None:
        """Cut the output to what is kept of an ended task."""
        self._output.cut_soon(key)

    async def send_remote(self, connection: Connection, request: control.ReadOutput, guest: RemoteTask) -> None:
        """Send the output of a task of another home that runs here; with ``follow`` until it has ended."""
        first = second = 0
        sizes = self._spool.sizes(guest.key)
        if request.tail_lines is not None:
            first, second = await self.last_lines(guest.key, request.tail_lines, sizes)
        elif request.tail_bytes is not None and (guest.exit is not None or not request.follow):
            first, second = (max(size - request.tail_bytes, 0) for size in sizes)
        if request.follow and request.tells_start:
            word = "running" if guest.exit is None else "ended"
            connection.more(request.id, {word: {"node": self._node.state.node, "attempt": guest.attempt}})
        asked = OutputRequest(guest.task, guest.uid, guest.attempt, first, second, follow=request.follow)
        sizes = (0, 0)
        async for piece in self._output.serve_output(guest.home, asked):
            if isinstance(piece, OutputEnd):
                sizes = piece.stdout_bytes, piece.stderr_bytes
            elif piece.stream in request.streams:
                await connection.stream(
                    request.id, {"stream": piece.stream, "offset": piece.offset, "data": piece.data}
                )
        told = views.ended_object(remote_task.record_of(self._node, guest))
        connection.ok(request.id, {**told, "stdout_bytes": sizes[0], "stderr_bytes": sizes[1]})


@dataclass(eq=False, repr=False)
class OutputRequests:
    """The verb `output` of one agent."""

    _reads: DurableReads
    _task_ids: TaskIds
    _watches: TaskWatches
    _source: OutputSource
    _node: Node

    async def output(self, connection: Connection, request: control.ReadOutput) -> None:
        """Send the output of one task."""
        store = await self._reads.durable()
        if request.at and (guest := remote_task.find(self._node, request.task)) is not None:
            await self._source.send_remote(connection, request, guest)
            return
        record = self._task_ids.single(request.task)
        with self._watches.watch(record.task) as watch:  # no await since the store was read: no change is missed
            await OutputStream(self._source, store, connection, request, watch).run(record)


class OutputStream:
    """One request. The sent sizes are kept by attempt; a new attempt starts from the beginning."""

    def __init__(
        self,
        source: OutputSource,
        store: Store,
        connection: Connection,
        request: control.ReadOutput,
        watch: TaskWatch,
    ) -> None:
        self._source = source
        self._store = store
        self._connection = connection
        self._request = request
        self._watch = watch
        self._sent: dict[str, list[int]] = {}
        self._delay = ""

    async def run(self, record: TaskRecord) -> None:
        """Send the output, then how the task ended."""
        if self._request.tail_lines is not None:
            await self._begin_at_the_last_lines(record, self._request.tail_lines)
        while self._request.follow and not record.state.is_final:
            if record.state is TaskState.UNKNOWN:
                self._connection.more(self._request.id, {"unknown": views.ended_object(record)})
            record = await self._live(record)
        if not record.state.is_final:
            await self._source.bring_up_to_date(record)
        elif self._request.tells_start:
            self._connection.more(self._request.id, {"ended": {"node": record.node, "attempt": record.attempt}})
        key = execution_key(record.uid, record.attempt)
        await self._send_kept(key, end=self._source.size_now(record))
        exit_ = record.exit
        self._connection.ok(
            self._request.id,
            {
                **views.ended_object(record),
                "stdout_bytes": exit_.stdout_bytes if exit_ is not None else 0,
                "stderr_bytes": exit_.stderr_bytes if exit_ is not None else 0,
                **views.output_gone_object(self._store, record),
            },
        )
        if self._request.done_with and record.state.is_final and not self._is_to_be_saved(record):
            self._source.cut_soon(key)

    def _is_to_be_saved(self, record: TaskRecord) -> bool:
        """True if the output is also saved to files; then it is cut afterwards."""
        return bool(output_patterns(self._store.terms(order_of(record.task)[0])))

    async def _live(self, record: TaskRecord) -> TaskRecord:
        """Follow the current attempt until the task changes → the newest record."""
        pump: asyncio.Task[None] | None = None
        if self._source.runs(record):
            if self._request.tells_start:
                self._connection.more(self._request.id, {"running": {"node": record.node, "attempt": record.attempt}})
            pump = asyncio.get_running_loop().create_task(self._send_live(record))
        try:
            while True:
                await self._watch.event.wait()
                self._watch.event.clear()
                self._send_delay(record)
                newest = self._watch.records.get(record.task, record)
                if newest.state.is_final or newest.attempt != record.attempt or newest.state is not record.state:
                    return newest
                if pump is None and self._source.runs(newest):
                    return newest
        finally:
            if pump is not None:
                pump.cancel()
                await asyncio.gather(pump, return_exceptions=True)

    def _send_delay(self, record: TaskRecord) -> None:
        """Tell, once for each reason, why the result of an ended task is delayed."""
        why = self._watch.delayed.get(record.task, "")
        if why and why != self._delay:
            self._delay = why
            self._connection.more(self._request.id, {"waits": {"id": record.task, "node": record.node, "why": why}})

    async def _send_live(self, record: TaskRecord) -> None:
        sent = self._sent.setdefault(execution_key(record.uid, record.attempt), [0, 0])
        in_foreground, is_awaited = self._request.tells_start, self._request.done_with
        await self._send(self._source.follow(record, sent, in_foreground=in_foreground, is_awaited=is_awaited), sent)

    async def _send_kept(self, key: str, end: tuple[int, int]) -> None:
        sent = self._sent.get(key)
        if sent is None:
            sent = self._sent[key] = self._start(end)
        await self._send(self._source.kept(key, sent, end), sent)

    async def _send(self, followed: Pieces, sent: list[int]) -> None:
        async with contextlib.aclosing(followed) as pieces:
            async for stream, offset, data in pieces:
                if stream in self._request.streams:
                    await self._connection.stream(self._request.id, {"stream": stream, "offset": offset, "data": data})
                sent[stream - 1] = offset + len(data)

    async def _begin_at_the_last_lines(self, record: TaskRecord, lines: int) -> None:
        """Start at the last lines of the current attempt; later attempts are sent whole."""
        if not record.state.is_final:
            await self._source.bring_up_to_date(record)
        key = execution_key(record.uid, record.attempt)
        self._sent[key] = await self._source.last_lines(key, lines, self._source.size_now(record))

    def _start(self, end: tuple[int, int]) -> list[int]:
        """The offsets to start from: the beginning, or the tail."""
        tail_bytes = self._request.tail_bytes
        if tail_bytes is None:
            return [0, 0]
        return [max(size - tail_bytes, 0) for size in end]
