"""The verb `wait`: streams the ends of tasks as they happen, at the client's pace."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peerload.agent.accounts import output_patterns
from peerload.agent.store.schema import order_of
from peerload.agent.views import task as views
from peerload.model.task import TaskState, execution_key
from peerload.wire import control

if TYPE_CHECKING:
    from peerload.agent.completion.completion_jobs import CompletionJobs
    from peerload.agent.control.authorization import Quotas
    from peerload.agent.control.connection import Connection
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.output.spool import Spool
    from peerload.agent.requests.client_events import TaskWatches
    from peerload.agent.requests.durable_reads import DurableReads
    from peerload.agent.store.store import Store
    from peerload.model.task import TaskRecord


@dataclass(eq=False, repr=False)
class TaskEnds:
    """Ends of tasks of this home in the form of `wait`."""

    _store: Store
    _spool: Spool
    _jobs: CompletionJobs
    _output_bytes_max: int

    def describe(self, record: TaskRecord, *, with_output: bool) -> dict[str, object]:
        """How a task ended, with its output if that is asked; or that it is unknown."""
        told = views.ended_object(record)
        if with_output:
            told |= views.error_line(self._spool, record)
            if record.state.is_final:
                told |= self._output(record)
        return told

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
        told: dict[str, object] = {"started_at": record.started_at or None, "ended_at": record.ended_at or None}
        told |= dict(zip(("stdout_bytes", "stderr_bytes"), sizes, strict=True))
        was_cut = max(sizes) > self._output_bytes_max  # the missing part would be read as zeros
        if was_cut or sum(sizes) > control.OUTPUT_TOLD_BYTES_MAX:
            return told
        key = execution_key(record.uid, record.attempt)
        stdout, stderr = self._spool.read_small(key, *sizes) if any(sizes) else (b"", b"")
        return told | {"stdout": stdout, "stderr": stderr} if (len(stdout), len(stderr)) == sizes else told


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
    """One request."""

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
                        told = await self._ends.saved(record)
                        await self._connection.drain()
                        self._connection.more(self._request.id, told)
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
        """Send the tasks that have ended or are unknown already, and watch the others → True if that is enough."""
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
        """Take the next change, and send it if it is new → True if this end is enough."""
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
        told = self._ends.describe(record, with_output=self._request.outputs)
        self._connection.more(self._request.id, told)
