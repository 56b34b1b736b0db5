"""The verbs that change tasks and groups: cancel, signal, hold, release, prio, group and clean.

All but clean are passed to the core as events; the answer is sent when the core's decision is durable. `cancel --wait` waits
until no process of the cancelled tasks is left, here or elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peerload.agent.runtime import now
from peerload.agent.store.maintenance import RemovalCriteria
from peerload.core.membership.peers import PeerState
from peerload.core.tasks.eligibility import group_dict, own_part
from peerload.model import events
from peerload.model.errors import BadRequest, NoSuchTask
from peerload.model.task import TaskState, execution_key
from peerload.text.format import counted
from peerload.wire import control

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from peerload.agent.completion.retention import Removed, TaskRemover
    from peerload.agent.control.authorization import Authorization
    from peerload.agent.control.connection import Connection
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.requests.task_queries import DurableReads
    from peerload.agent.runtime import CoreRequests
    from peerload.core.node import Node
    from peerload.model.task import TaskRecord

REASON = "peerload clean"
QUERY_EVERY_S = 5.0
"""Interval between two queries for the remaining attempts."""
EXIT_REPORT_S = 1.0
"""Time for a process to end after SIGKILL and for its node to report that."""
REPORT_AFTER_S = 2.0
"""Time after which the client is told which nodes it waits for."""
ATTEMPTS_AT_A_TIME = 250
LEFT_LISTED_MAX = 100


@dataclass(eq=False, repr=False)
class TaskCommands:
    """Looks up the named tasks, and passes the change to the core."""

    _core: CoreRequests
    _reads: DurableReads
    _task_ids: TaskIds
    _cancel_waits: CancelWaits
    _access: Authorization
    _node: Node

    async def cancel(self, connection: Connection, request: control.Cancel) -> None:
        """Cancel tasks. With ``wait``, answer when their processes have ended."""
        await self._reads.durable()
        names = await self._task_ids.names(request.tasks)
        if not request.wait:
            number = self._core.expect(connection, request.id)
            self._core.put(events.CancelRequested(number, names, request.signal, request.force))
            return
        with self._cancel_waits.watched() as watch:
            number, answer = self._core.expect_future(lambda part: connection.more(request.id, part))
            self._core.put(events.CancelRequested(number, names, request.signal, request.force))
            connection.more(request.id, await answer)
            records = [record async for page in self._task_ids.all_pages(request.tasks) for record in page]
            await self._cancel_waits.wait(connection, request, watch, records)

    def cancel_remote(self, connection: Connection, request: control.CancelRemote) -> None:
        """Kill tasks of other homes on this node. Raises NoSuchTask for the first that is not here."""
        here = {name for remote in self._node.executor.remote_tasks.values() for name in (remote.task, remote.array)}
        for name in request.guests:
            if name not in here:
                raise NoSuchTask(f"no task {name} of another home is here", hint="what is here:  peerload ls --remote")
        by = f"ended on {self._node.state.node} by {connection.caller.user or 'its user'}"
        number = self._core.expect(connection, request.id)
        self._core.put(events.RemoteCancelRequested(number, request.guests, request.signal, request.force, by))

    async def signal(self, connection: Connection, request: control.SendSignal) -> None:
        await self._reads.durable()
        task = self._task_ids.first(request.task).task
        number = self._core.expect(connection, request.id)
        self._core.put(events.SignalRequested(number, task, request.signal))

    async def change(self, connection: Connection, request: control.Hold | control.Release | control.Prio) -> None:
        """Hold waiting tasks, release held ones, or change the priority of tasks."""
        await self._reads.durable()
        names = await self._task_ids.known_ids(request.tasks)
        number = self._core.expect(connection, request.id)
        match request:
            case control.Hold():
                self._core.put(events.HoldRequested(number, names))
            case control.Release():
                self._core.put(events.ReleaseRequested(number, names))
            case control.Prio():
                self._core.put(events.PriorityRequested(number, names, request.priority))

    def group(self, connection: Connection, request: control.Group) -> None:
        number = self._core.expect(connection, request.id)
        self._core.put(
            events.GroupRequested(number, request.name, request.slots, request.paused, removed=request.removed)
        )

    def groups(self, connection: Connection, request: control.Groups) -> None:
        """List the groups; a user who is no administrator sees only the own tasks in them."""
        groups, caller = self._node.eligibility.groups, connection.caller
        if caller.sees_all:
            connection.ok(request.id, {"groups": [group_dict(group) for group in groups]})
            return
        found = [own_part(group, lambda task: self._access.sees(caller, task)) for group in groups]
        connection.ok(request.id, {"groups": [group for group in found if group is not None]})


@dataclass(eq=False, repr=False)
class CleanRequests:
    """The verb `clean` of one agent."""

    _remover: TaskRemover
    _reads: DurableReads
    _task_ids: TaskIds
    _node: Node

    async def clean(self, connection: Connection, request: control.Clean) -> None:
        """Remove ended tasks, and send their names. Raises BadRequest if a named task has not ended, NoSuchTask if there is
        no such task."""
        if request.tasks and request.keep:
            raise BadRequest("clean: name tasks, or keep the newest, not both")
        for name in await self._task_ids.known_ids(request.tasks):
            if unfinished := self._node.home.unfinished_in(name) or len(self._node.home.named(name)):
                of = f": {unfinished} of its members have not" if "." not in name and unfinished > 1 else ""
                raise BadRequest(f"{name} has not ended{of}", hint=f"to end it:  peerload cancel {name}")
        wanted = RemovalCriteria(
            before=self._reads.store.date.now() - request.older_s if request.older_s else float("inf"),
            states=request.states,
            keep=request.keep,
            named=tuple(
                (meant.counter, *span) for meant in map(self._task_ids.parse, request.tasks) for span in meant.ranges
            ),
            with_output=request.outputs_only,
            who="" if connection.caller.sees_all else connection.caller.who,
        )

        async def stream_names(removed: Removed) -> None:
            names, removed.names = removed.names, []
            await connection.stream(request.id, {"tasks": names})

        removed = await self._remover.remove(
            wanted,
            outputs_only=request.outputs_only,
            why=REASON,
            is_tried=request.dry_run,
            report_progress=stream_names,
        )
        if removed.tasks and not request.dry_run:
            what = "the outputs of" if request.outputs_only else ""
            reason = f"{what} {counted(removed.tasks, 'ended task')}, {removed.output_bytes} bytes of output: {REASON}".strip()
            self._reads.event_log.record("store", "removed", reason=reason)
        counts = {"outputs": removed.outputs, "output_bytes": removed.output_bytes, "in_use": removed.in_use}
        connection.ok(request.id, {"removed": removed.tasks, **counts})


# -- cancel --wait -----------------------------------------------------------------------------------------------------


class CancelWatch:
    """The keys of attempts that have ended since the watch began; each end sets ``event``."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.event = asyncio.Event()


class CancelWaits:
    """The clients of one agent that wait for the end of cancelled tasks.

    The core reports each end that it learns of. Messages of other nodes may be lost, so these nodes are queried again while a
    client waits, but not before the end of the kill delay, since a query kills the processes immediately.
    """

    def __init__(self, core: CoreRequests, node: Node) -> None:
        self._core = core
        self._node = node
        self._watches: set[CancelWatch] = set()

    def attempt_gone(self, key: str) -> None:
        for watch in self._watches:
            watch.keys.add(key)
            watch.event.set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[CancelWatch]:
        """A watch of all attempts, until the end of the block."""
        watch = CancelWatch()
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    async def wait(
        self, connection: Connection, request: control.Cancel, watch: CancelWatch, records: Sequence[TaskRecord]
    ) -> None:
        """Answer when no process of these tasks is left, or at the timeout."""
        left = {key: attempt for record in records for key, attempt in _attempts(record)}
        newest_s = max((record.ended_at for record in records if record.state is TaskState.CANCELLED), default=0.0)
        wait = _Wait(self._core, self._node, connection, request.id, left, newest_s)
        timed_out = False
        try:
            async with asyncio.timeout(request.timeout_s):
                await wait.run(watch)
        except TimeoutError:
            timed_out = True
        names = [attempt.task for attempt in left.values()][:LEFT_LISTED_MAX]
        connection.ok(request.id, {"timed_out": timed_out, "left": names})


class _Wait:
    """The wait of one request. ``left``: the attempts that may still have processes."""

    def __init__(
        self,
        core: CoreRequests,
        node: Node,
        connection: Connection,
        number: int,
        left: dict[str, events.CancelledAttempt],
        cancelled_at: float,
    ) -> None:
        self._core = core
        self._node = node
        self._connection = connection
        self._number = number
        self._left = left
        self._reported: list[dict[str, object]] = []
        self._known_nodes: set[str] = set()
        reported_s = cancelled_at - now().wall_s + node.state.config.kill_after_s + EXIT_REPORT_S
        now_s = asyncio.get_running_loop().time()
        self._query_s = now_s + min(max(reported_s, 0.0), node.state.config.kill_after_s + EXIT_REPORT_S)
        self._report_s = now_s + REPORT_AFTER_S

    async def run(self, watch: CancelWatch) -> None:
        """Return when no attempt is left."""
        loop = asyncio.get_running_loop()
        query_at_s = loop.time()
        while True:
            watch.event.clear()
            for key in watch.keys & self._left.keys():
                del self._left[key]
            watch.keys.clear()
            if not self._left:
                return
            now_s = loop.time()
            if now_s >= query_at_s:
                await self._query_core(query=now_s >= self._query_s)
                query_at_s = loop.time() + QUERY_EVERY_S
            if now_s >= self._report_s:
                self._report_nodes()
            next_s = min([query_at_s, *(moment_s for moment_s in (self._query_s, self._report_s) if moment_s > now_s)])
            if next_s == self._query_s:
                query_at_s = next_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(watch.event.wait(), max(next_s - loop.time(), 0.0))

    async def _query_core(self, *, query: bool) -> None:
        """Make the core query again. Attempts at a node that was forgotten meanwhile count as ended."""
        membership = self._node.membership
        for node in {attempt.node for attempt in self._left.values()}:
            if membership.get(node) is not None:
                self._known_nodes.add(node)
            elif node in self._known_nodes:
                for key in [key for key, attempt in self._left.items() if attempt.node == node]:
                    del self._left[key]
        attempts = list(self._left.values())
        for first in range(0, len(attempts), ATTEMPTS_AT_A_TIME):
            self._core.put(events.EndAsked(tuple(attempts[first : first + ATTEMPTS_AT_A_TIME]), query=query))
            await asyncio.sleep(0)

    def _report_nodes(self) -> None:
        """Send the client the nodes that it waits for, if they have changed."""
        membership, own = self._node.membership, self._node.state.node
        waits_for: list[dict[str, object]] = []
        for node, tasks in sorted(Counter(attempt.node for attempt in self._left.values()).items()):
            peer = membership.get(node)
            state = PeerState.ALIVE if node == own else None if peer is None else peer.state
            waits_for.append({"node": node, "state": state, "tasks": tasks})
        if [(attempt["node"], attempt["state"]) for attempt in waits_for] != [
            (attempt["node"], attempt["state"]) for attempt in self._reported
        ]:
            self._reported = waits_for
            self._connection.more(self._number, {"waits_for": waits_for})


def _attempts(record: TaskRecord) -> Iterator[tuple[str, events.CancelledAttempt]]:
    """The attempt of a cancelled task that may still have processes. Tasks that ended otherwise have none."""
    node = record.node or record.last_node
    if record.state is TaskState.CANCELLED and record.attempt and node:
        key = execution_key(record.uid, record.attempt)
        yield key, events.CancelledAttempt(record.task, record.uid, record.attempt, node)
