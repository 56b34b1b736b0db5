"""The verbs that follow tasks: `output` streams a task's output, live or kept, wherever it runs; `wait` streams the ends of
tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from peerload.agent.accounts import output_patterns
from peerload.agent.output.spool import tail_start
from peerload.agent.views import task as views
from peerload.agent.views.task import find_remote, remote_record
from peerload.model import metrics
from peerload.model.errors import PeerloadError
from peerload.model.messages import OutputEnd, OutputRequest
from peerload.model.task import TaskState, execution_key, order_of
from peerload.wire import control

if TYPE_CHECKING:
    from peerload.agent.completion.completion_jobs import CompletionJobs
    from peerload.agent.control.authorization import Quotas
    from peerload.agent.control.connection import Connection
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.output.output import TaskOutputs
    from peerload.agent.output.spool import Spool
    from peerload.agent.requests.task_queries import DurableReads
    from peerload.agent.runtime import AgentInfo, TaskWatch, TaskWatches
    from peerload.agent.store.store import Store
    from peerload.core.node import Node
    from peerload.core.work import RemoteTask
    from peerload.model.task import TaskRecord


Pieces = AsyncGenerator[tuple[int, int, bytes], None]
"""Stream, offset and data of each piece of an output."""


@dataclass(eq=False, repr=False)
class OutputSource:
    """The output of tasks of this home: kept here, or copied from the node that runs them."""

    _info: AgentInfo
    _node: Node
    _output: TaskOutputs
    _spool: Spool

    def runs(self, record: TaskRecord) -> bool:
        """True if the task may write more output."""
        if record.state is not TaskState.LEASED:
            return False
        task = self._node.home.tasks.get(record.uid)
        is_here = record.node == self._node.state.node
        if is_here and (task is None or (task.spec.files is None and task.spec.lock is None)):
            return True  # nothing has to be put in place before its process starts
        return task is not None and bool(task.running_at)

    async def bring_up_to_date(self, record: TaskRecord) -> str:
        """Copy the current output of a task that runs elsewhere → "", or the reason why it failed."""
        if self.runs(record) and record.node != self._node.state.node:
            key = execution_key(record.uid, record.attempt)
            try:
                await self._output.copy_now(record.node, record.task, record.uid, record.attempt, key)
            except (PeerloadError, OSError, TimeoutError) as error:
                self._info.counters[metrics.OUTPUT_COPIES_FAILED] += 1  # the output so far is shown
                return str(error) or f"{record.node} does not answer"
            if views.is_unreachable(self._node, record):  # a running copy does not report it
                return f"{record.node} does not answer"
        return ""

    def size_now(self, record: TaskRecord) -> tuple[int, int]:
        """Sizes of the output here: at most those of the result, less if it was cleaned."""
        stdout_bytes, stderr_bytes = self._spool.sizes(execution_key(record.uid, record.attempt))
        if record.exit is None:
            return stdout_bytes, stderr_bytes
        return min(stdout_bytes, record.exit.stdout_bytes), min(stderr_bytes, record.exit.stderr_bytes)

    async def follow(self, record: TaskRecord, sent: list[int], *, in_foreground: bool, is_awaited: bool) -> Pieces:
        """The output from ``sent`` on, as it is written. A task in the foreground is stopped while its reader is slow
        (backpressure), except for a task with a terminal: its shell would believe that the user stopped it."""
        key = execution_key(record.uid, record.attempt)
        task = self._node.home.tasks.get(record.uid)
        is_paced = in_foreground and task is not None and task.spec.followed and task.spec.terminal is None
        runs_here = record.node == self._node.state.node
        copy: asyncio.Task[None] | None = None
        if not runs_here:
            attempt = record.node, record.task, record.uid, record.attempt, key
            copying = self._output.keep_mirrored(*attempt, paced=is_paced, runs=lambda: self.runs(record))
            copy = asyncio.get_running_loop().create_task(copying)
        followed = (
            self._output.follow_paced(key, *sent, runs_here=runs_here, is_awaited=is_awaited)
            if is_paced
            else self._output.follow(key, *sent)
        )
        try:
            async with contextlib.aclosing(followed) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            if copy is not None:
                copy.cancel()
                await asyncio.gather(copy, return_exceptions=True)

    def kept(self, key: str, sent: list[int], end: tuple[int, int]) -> Pieces:
        """The output that is stored here, from ``sent`` up to ``end``."""
        return self._output.follow(key, *sent, end=end)

    async def last_lines(self, key: str, lines: int, sizes: tuple[int, int]) -> list[int]:
        """The offsets at which the last lines of both streams begin."""
        paths = [self._spool.path(key, stream) for stream in (1, 2)]
        return [await asyncio.to_thread(tail_start, path, lines, size) for path, size in zip(paths, sizes, strict=True)]

    def cut_soon(self, key: str) -> None:
        self._output.cut_soon(key)

    async def send_remote(self, connection: Connection, request: control.ReadOutput, remote: RemoteTask) -> None:
        """Send the output of a task of another home that runs here; with ``follow`` until it has ended."""
        first = second = 0
        sizes = self._spool.sizes(remote.key)
        if request.tail_lines is not None:
            first, second = await self.last_lines(remote.key, request.tail_lines, sizes)
        elif request.tail_bytes is not None and (remote.exit is not None or not request.follow):
            first, second = (max(size - request.tail_bytes, 0) for size in sizes)
        if request.follow and request.tells_start:
            phase = "running" if remote.exit is None else "ended"
            connection.more(request.id, {phase: {"node": self._node.state.node, "attempt": remote.attempt}})
        output_request = OutputRequest(remote.task, remote.uid, remote.attempt, first, second, follow=request.follow)
        sizes = (0, 0)
        async for piece in self._output.serve_output(remote.home, output_request):
            if isinstance(piece, OutputEnd):
                sizes = piece.stdout_bytes, piece.stderr_bytes
            elif piece.stream in request.streams:
                body = {"stream": piece.stream, "offset": piece.offset, "data": piece.data, "attempt": remote.attempt}
                await connection.stream(request.id, body)
        fields = views.ended_object(remote_record(self._node, remote))
        connection.ok(request.id, {**fields, "stdout_bytes": sizes[0], "stderr_bytes": sizes[1]})


@dataclass(eq=False, repr=False)
class OutputRequests:
    """The verb `output` of one agent."""

    _reads: DurableReads
    _task_ids: TaskIds
    _watches: TaskWatches
    _source: OutputSource
    _node: Node

    async def output(self, connection: Connection, request: control.ReadOutput) -> None:
        store = await self._reads.durable()
        if request.at and (remote := find_remote(self._node, request.task)) is not None:
            await self._source.send_remote(connection, request, remote)
            return
        record = self._task_ids.single(request.task)
        with self._watches.watch(record.task) as watch:  # no await since the store was read: no change is missed
            await OutputStream(self._source, store, connection, request, watch).run(record)


@dataclass(eq=False, repr=False)
class OutputStream:
    """The work of one request `output`. It counts the sent bytes of each attempt; a new attempt starts from the beginning."""

    _source: OutputSource
    _store: Store
    _connection: Connection
    _request: control.ReadOutput
    _watch: TaskWatch
    _sent: dict[str, list[int]] = field(default_factory=dict, init=False)
    _delay: str = field(default="", init=False)
    _tells_offsets: bool = field(default=False, init=False)

    async def run(self, record: TaskRecord) -> None:
        """Send the output, then how the task ended."""
        if self._request.tail_lines is not None:
            await self._begin_at_the_last_lines(record, self._request.tail_lines)
        while self._request.follow and not record.state.is_final:
            if record.state is TaskState.UNKNOWN:
                self._connection.more(self._request.id, {"unknown": views.ended_object(record)})
            record = await self._live(record)
        behind = ""
        if not record.state.is_final:
            behind = await self._source.bring_up_to_date(record)
        elif self._request.tells_start:
            self._connection.more(self._request.id, {"ended": {"node": record.node, "attempt": record.attempt}})
        key = execution_key(record.uid, record.attempt)
        await self._send_kept(record, key, end=self._source.size_now(record))
        exit_ = record.exit
        self._connection.ok(
            self._request.id,
            {
                **views.ended_object(record),
                "stdout_bytes": exit_.stdout_bytes if exit_ is not None else 0,
                "stderr_bytes": exit_.stderr_bytes if exit_ is not None else 0,
                **views.output_gone_object(self._store, record),
                **({"behind": behind} if behind else {}),
            },
        )
        if self._request.done_with and record.state.is_final and not self._is_to_be_saved(record):
            self._source.cut_soon(key)

    def _is_to_be_saved(self, record: TaskRecord) -> bool:
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
        """Send the reason why the result of an ended task is delayed, once for each reason."""
        why = self._watch.delayed.get(record.task, "")
        if why and why != self._delay:
            self._delay = why
            self._connection.more(self._request.id, {"waits": {"id": record.task, "node": record.node, "why": why}})

    async def _send_live(self, record: TaskRecord) -> None:
        sent = self._sent.setdefault(execution_key(record.uid, record.attempt), [0, 0])
        in_foreground, is_awaited = self._request.tells_start, self._request.done_with
        pieces = self._source.follow(record, sent, in_foreground=in_foreground, is_awaited=is_awaited)
        await self._send(record, pieces, sent)

    async def _send_kept(self, record: TaskRecord, key: str, end: tuple[int, int]) -> None:
        sent = self._sent.get(key)
        if sent is None:
            sent = self._sent[key] = self._start(end)
        await self._send(record, self._source.kept(key, sent, end), sent)

    async def _send(self, record: TaskRecord, followed: Pieces, sent: list[int]) -> None:
        if self._tells_offsets:  # a client that reconnects then knows which part it has skipped
            self._tells_offsets = False
            for stream, offset in enumerate(sent, start=1):
                await self._send_piece(record, stream, offset, b"")
        async with contextlib.aclosing(followed) as pieces:
            async for stream, offset, data in pieces:
                await self._send_piece(record, stream, offset, data)
                sent[stream - 1] = offset + len(data)

    async def _send_piece(self, record: TaskRecord, stream: int, offset: int, data: bytes) -> None:
        if stream in self._request.streams:
            body = {"stream": stream, "offset": offset, "data": data, "attempt": record.attempt}
            await self._connection.stream(self._request.id, body)

    async def _begin_at_the_last_lines(self, record: TaskRecord, lines: int) -> None:
        """Start at the last lines of the current attempt; later attempts are sent whole."""
        if not record.state.is_final:
            await self._source.bring_up_to_date(record)
        key = execution_key(record.uid, record.attempt)
        self._sent[key] = await self._source.last_lines(key, lines, self._source.size_now(record))
        self._tells_offsets = self._request.follow

    def _start(self, end: tuple[int, int]) -> list[int]:
        tail_bytes = self._request.tail_bytes
        if tail_bytes is None:
            return [0, 0]
        return [max(size - tail_bytes, 0) for size in end]


# -- wait --------------------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class TaskEnds:
    """Ends of tasks of this home in the form of `wait`."""

    _store: Store
    _spool: Spool
    _jobs: CompletionJobs
    _output_bytes_max: int

    def describe(self, record: TaskRecord, *, with_output: bool) -> dict[str, object]:
        """The object of an ended or unknown task, with the output if that is asked."""
        fields = views.ended_object(record)
        if with_output:
            fields |= views.error_line(self._spool, record)
            if record.state.is_final:
                fields |= self._output(record)
        return fields

    def has_files(self, record: TaskRecord) -> bool:
        """True if the output of a task is wanted in files."""
        return bool(output_patterns(self._store.terms(order_of(record.task)[0])))

    async def saved(self, record: TaskRecord) -> dict[str, object]:
        """Wait until the output files are written → their state."""
        state, why = await self._jobs.saved(record)
        return {"files": {"id": record.task, "state": state, "why": why}}

    def _output(self, record: TaskRecord) -> dict[str, object]:
        exit_ = record.exit
        sizes = (exit_.stdout_bytes, exit_.stderr_bytes) if exit_ is not None else (0, 0)
        fields: dict[str, object] = {"started_at": record.started_at or None, "ended_at": record.ended_at or None}
        fields |= dict(zip(("stdout_bytes", "stderr_bytes"), sizes, strict=True))
        was_cut = max(sizes) > self._output_bytes_max  # the missing part would be read as zeros
        if was_cut or sum(sizes) > control.OUTPUT_TOLD_BYTES_MAX:
            return fields
        key = execution_key(record.uid, record.attempt)
        stdout, stderr = self._spool.read_small(key, *sizes) if any(sizes) else (b"", b"")
        return fields | {"stdout": stdout, "stderr": stderr} if (len(stdout), len(stderr)) == sizes else fields


@dataclass(eq=False, repr=False)
class WaitRequests:
    """The verb `wait` of one agent."""

    _reads: DurableReads
    _task_ids: TaskIds
    _watches: TaskWatches
    _quotas: Quotas
    _ends: TaskEnds

    async def wait(self, connection: Connection, request: control.Wait) -> None:
        """Send the ends of tasks until all have ended, or the first with ``any``."""
        await self._reads.durable()
        await self._task_ids.known_ids(request.tasks)
        work = WaitRequest(self._task_ids, self._watches, self._quotas, self._ends, connection, request)
        connection.ok(request.id, {"timed_out": not await work.run()})


class WaitRequest:
    """The work of one request `wait`."""

    def __init__(
        self,
        task_ids: TaskIds,
        watches: TaskWatches,
        quotas: Quotas,
        ends: TaskEnds,
        connection: Connection,
        request: control.Wait,
    ) -> None:
        self._task_ids = task_ids
        self._watches = watches
        self._charge = quotas.charge(connection.caller)
        self._ends = ends
        self._connection = connection
        self._request = request
        self._left: set[str] = set()
        self._unknown: set[str] = set()
        self._to_be_saved: list[TaskRecord] = []

    async def run(self) -> bool:
        """Send each end, each task that becomes unknown, and, if asked, the states of output files → False at the timeout.
        Raises SlowDown."""
        loop, timeout_s = asyncio.get_running_loop(), self._request.timeout_s
        until_s = None if timeout_s is None else loop.time() + timeout_s
        try:
            with self._watches.watch() as self._watch:
                if not await self._all_ended():
                    return False
                async with asyncio.timeout_at(until_s):
                    for record in self._to_be_saved:
                        fields = await self._ends.saved(record)
                        await self._connection.drain()
                        self._connection.more(self._request.id, fields)
        except TimeoutError:
            return False
        finally:
            self._charge.end()
        return True

    async def _all_ended(self) -> bool:
        if await self._ended_by_now():
            return True
        try:
            async with asyncio.timeout(self._request.timeout_s):
                while self._left:
                    await self._watch.event.wait()
                    self._watch.event.clear()
                    while self._watch.records:
                        await self._connection.drain()
                        if self._is_enough():
                            return True
        except TimeoutError:
            while self._watch.records:  # ends in time that a slow reader was not sent yet
                if self._is_enough():
                    return True
            return not self._left
        return True

    async def _ended_by_now(self) -> bool:
        """Send the tasks that have already ended or are unknown, and watch the others → True if these are enough."""
        async for page in self._task_ids.all_pages(self._request.tasks):
            # No await between reading the store and watching: no end is missed.
            unfinished = {record.task for record in page if not record.state.is_final}
            self._charge.add(max(len(unfinished) - 1, 0))  # each named task or array is charged already
            self._watches.add(self._watch, unfinished)
            self._left |= unfinished
            self._unknown.update(record.task for record in page if record.state is TaskState.UNKNOWN)
            for record in page:
                if record.task not in unfinished:
                    self._left.discard(record.task)
                if record.task not in unfinished or record.state is TaskState.UNKNOWN:
                    await self._connection.drain()
                    self._send_end(record)
            if self._request.any and len(unfinished) < len(page):
                return True
        return not self._left

    def _is_enough(self) -> bool:
        """Process the next change, and send it if it is new → True if no other end is needed."""
        name = next(iter(self._watch.records))
        record = self._watch.records.pop(name)
        if record.state.is_final and name in self._left:
            self._left.discard(name)
            self._send_end(record)
            return self._request.any
        if record.state is not TaskState.UNKNOWN:
            self._unknown.discard(name)
        elif name not in self._unknown:
            self._unknown.add(name)
            self._send_end(record)
        return False

    def _send_end(self, record: TaskRecord) -> None:
        if self._request.files and record.state.is_final and self._ends.has_files(record):
            self._to_be_saved.append(record)
        fields = self._ends.describe(record, with_output=self._request.outputs)
        self._connection.more(self._request.id, fields)
