"""The `output` verb: a task's output to one client, live or kept, wherever it runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from peerload.agent import answers
from peerload.model.errors import PeerloadError
from peerload.model.task import TaskState, execution_key

if TYPE_CHECKING:
    from peerload.agent.connection import Connection
    from peerload.agent.parts import Parts
    from peerload.model.task import TaskRecord
    from peerload.wire import control


class Watch:
    """Somebody waits for tasks: ``event`` is set at each change of one of them, ``records`` has the newest of each."""

    __slots__ = ("event", "records", "running", "tasks")

    def __init__(self, tasks: set[str]) -> None:
        self.tasks = tasks
        self.event = asyncio.Event()
        self.records: dict[str, TaskRecord] = {}
        self.running: set[str] = set()

    def tell(self, record: TaskRecord, *, running: bool) -> None:
        """A change."""
        self.records[record.task] = record
        if running:
            self.running.add(record.task)
        else:
            self.running.discard(record.task)
        self.event.set()


class OutputStream:
    """One request on its way. What was sent is remembered per attempt; a new attempt starts from the beginning."""

    def __init__(self, parts: Parts, connection: Connection, request: control.Output, watch: Watch) -> None:
        self._parts = parts
        self._connection = connection
        self._request = request
        self._watch = watch
        self._sent: dict[str, list[int]] = {}

    async def run(self, record: TaskRecord) -> None:
        """Send it all, then the end."""
        while self._request.follow and not record.state.is_final:
            if record.state is TaskState.UNKNOWN:
                self._connection.more(self._request.id, {"unknown": answers.ended_object(record)})
            record = await self._live(record)
        if not record.state.is_final:
            await self._bring_up_to_date(record)
        key = execution_key(record.uid, record.attempt)
        await self._pump(key, end=self._size_now(key, record))
        exit_ = record.exit
        self._connection.ok(
            self._request.id,
            {
                **answers.ended_object(record),
                "stdout_bytes": exit_.stdout_bytes if exit_ is not None else 0,
                "stderr_bytes": exit_.stderr_bytes if exit_ is not None else 0,
            },
        )

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
            self._mirror(record, key)
            pump = asyncio.get_running_loop().create_task(self._pump(key))
        try:
            while True:
                await self._watch.event.wait()
                self._watch.event.clear()
                newest = self._watch.records.get(record.task, record)
                if newest.state.is_final or newest.attempt != record.attempt or newest.state is not record.state:
                    return newest
                if pump is None and self._runs(newest):
                    return newest
        finally:
            if pump is not None:
                pump.cancel()
                await asyncio.gather(pump, return_exceptions=True)

    def _runs(self, record: TaskRecord) -> bool:
        """Whether there may be output to follow."""
        if record.state is not TaskState.LEASED:
            return False
        if record.node == self._parts.config.node:
            return True
        task = self._parts.node.home.tasks.get(record.uid)
        return task is not None and bool(task.running_at)

    def _mirror(self, record: TaskRecord, key: str) -> None:
        if record.node != self._parts.config.node:
            self._parts.output.mirror(record.node, record.task, record.uid, record.attempt, key)

    async def _bring_up_to_date(self, record: TaskRecord) -> None:
        """What there is now, of a task that runs elsewhere."""
        if self._runs(record) and record.node != self._parts.config.node:
            key = execution_key(record.uid, record.attempt)
            try:
                await self._parts.output.copy_now(record.node, record.task, record.uid, record.attempt, key)
            except (PeerloadError, OSError, TimeoutError):
                self._parts.counters["output copies failed"] += 1  # what is here is shown

    async def _pump(self, key: str, end: tuple[int, int] | None = None) -> None:
        sent = self._sent.get(key)
        if sent is None:
            sent = self._sent[key] = self._start(end)
        async for stream, offset, data in self._parts.output.follow(key, sent[0], sent[1], end=end):
            sent[stream - 1] = offset + len(data)
            if stream in self._request.streams:
                self._connection.more(self._request.id, {"stream": stream, "offset": offset, "data": data})
                await self._connection.drain()

    def _start(self, end: tuple[int, int] | None) -> list[int]:
        """Where to begin: at the beginning, or at the tail of what there is."""
        tail_bytes = self._request.tail_bytes
        if tail_bytes is None or end is None:
            return [0, 0]
        return [max(size - tail_bytes, 0) for size in end]
