"""`wait`: the ends of tasks, told as they come, at the client's pace."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from peerload.agent.completion import output_files
from peerload.agent.store.rows import order_of
from peerload.agent.views import task as answers
from peerload.model.task import TaskState, execution_key
from peerload.wire import control

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.agent.control.connection import Connection
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.parts import Parts
    from peerload.agent.requests.output_stream import TaskWatch
    from peerload.model.task import TaskRecord


class WaitRequest:
    """One request. ``begin(names)``: from now on the changes of these tasks are told to the watch; may raise SlowDown."""

    def __init__(
        self,
        parts: Parts,
        names: TaskIds,
        connection: Connection,
        request: control.Wait,
        watch: TaskWatch,
        begin: Callable[[set[str]], None],
    ) -> None:
        self._parts = parts
        self._names = names
        self._connection = connection
        self._request = request
        self._watch = watch
        self._begin = begin
        self._left: set[str] = set()
        self._unknown: set[str] = set()
        self._saved: list[TaskRecord] = []

    async def run(self) -> bool:
        """Tell each end as it comes, of which task it has become unknown, once, and at last, if that is asked, what has become of
        the files with their output; False if time ran out first."""
        loop, timeout_s = asyncio.get_running_loop(), self._request.timeout_s
        until_s = None if timeout_s is None else loop.time() + timeout_s
        if not await self._ends():
            return False
        try:
            async with asyncio.timeout_at(until_s):
                for record in self._saved:
                    state, why = await self._parts.chores.saved(record)
                    await self._connection.drain()
                    self._connection.more(self._request.id, {"files": {"id": record.task, "state": state, "why": why}})
        except TimeoutError:
            return False
        return True

    async def _ends(self) -> bool:
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
            while self._watch.records:  # what came in time, of which a slow reader was not told yet
                if self._is_enough():
                    return True
            return not self._left
        return True

    async def _ended_by_now(self) -> bool:
        """Tell what has ended, or is unknown, when it is read; whether that was enough. The others are watched and left."""
        async for page in self._names.all_pages(self._request.tasks):
            # No await between reading the store and watching: what ends later is told to the watch.
            unfinished = {record.task for record in page if not record.state.is_final}
            self._begin(unfinished)
            self._left |= unfinished
            self._unknown.update(record.task for record in page if record.state is TaskState.UNKNOWN)
            for record in page:
                if record.task not in unfinished:
                    self._left.discard(record.task)
                if record.task not in unfinished or record.state is TaskState.UNKNOWN:
                    await self._connection.drain()
                    self._tell(record)
            if self._request.any and len(unfinished) < len(page):
                return True
        return not self._left

    def _is_enough(self) -> bool:
        """Take the next change, and tell it if it is news → whether it is enough that this one has ended."""
        name = next(iter(self._watch.records))
        record = self._watch.records.pop(name)
        if record.state.is_final and name in self._left:
            self._left.discard(name)
            self._tell(record)
            return self._request.any
        if record.state is not TaskState.UNKNOWN:
            self._unknown.discard(name)
        elif name not in self._unknown:
            self._unknown.add(name)
            self._tell(record)
        return False

    def _tell(self, record: TaskRecord) -> None:
        """How a task ended, with what it wrote if that is asked; or that it is unknown."""
        told = answers.ended_object(record)
        if self._request.outputs:
            told |= answers.error_line(self._parts.spool, record)
        if self._request.files and record.state.is_final and self._has_files(record):
            self._saved.append(record)
        if self._request.outputs and record.state.is_final:
            told |= self._with_output(record)
        self._connection.more(self._request.id, told)

    def _has_files(self, record: TaskRecord) -> bool:
        return bool(output_files.patterns(self._parts.store.terms(order_of(record.task)[0])))

    def _with_output(self, record: TaskRecord) -> dict[str, object]:
        exit_ = record.exit
        sizes = (exit_.stdout_bytes, exit_.stderr_bytes) if exit_ is not None else (0, 0)
        told: dict[str, object] = {"started_at": record.started_at or None, "ended_at": record.ended_at or None}
        told |= dict(zip(("stdout_bytes", "stderr_bytes"), sizes, strict=True))
        was_cut = max(sizes) > self._parts.config.output_bytes_max  # what is missing would be read as zeros
        if was_cut or sum(sizes) > control.OUTPUT_TOLD_BYTES_MAX:
            return told
        key = execution_key(record.uid, record.attempt)
        stdout, stderr = self._parts.spool.read_small(key, *sizes) if any(sizes) else (b"", b"")
        return told | {"stdout": stdout, "stderr": stderr} if (len(stdout), len(stderr)) == sizes else told
