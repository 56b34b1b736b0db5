"""The verbs that change tasks and groups: cancel, signal, hold, release, prio, group and clean.

All but clean are put to the core as events, whose answers are sent once its decision is durable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from peerload.agent.store.pruning import RemovalCriteria
from peerload.core.tasks.eligibility import group_dict, own_part
from peerload.model.errors import BadRequest, NoSuchTask
from peerload.model.events import (
    CancelRequested,
    GroupRequested,
    HoldRequested,
    PriorityRequested,
    ReleaseRequested,
    RemoteCancelRequested,
    SignalRequested,
)

if TYPE_CHECKING:
    from peerload.agent.completion.retention import Removed, TaskRemover
    from peerload.agent.control.authorization import Authorization
    from peerload.agent.control.connection import Connection
    from peerload.agent.control.core_requests import CoreRequests
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.requests.cancel_wait import CancelWaits
    from peerload.agent.requests.durable_reads import DurableReads
    from peerload.core.node import Node
    from peerload.wire import control


@dataclass(eq=False, repr=False)
class TaskCommands:
    """Looks up the named tasks, and puts the change to the core."""

    _core: CoreRequests
    _reads: DurableReads
    _task_ids: TaskIds
    _cancel_waits: CancelWaits
    _access: Authorization
    _node: Node

    async def cancel(self, connection: Connection, request: control.Cancel) -> None:
        """Cancel tasks; with ``wait`` answer when their processes have ended."""
        await self._reads.durable()
        names = await self._task_ids.names(request.tasks)
        if not request.wait:
            number = self._core.expect(connection, request.id)
            self._core.put(CancelRequested(number, names, request.signal, request.force))
            return
        with self._cancel_waits.watched() as watch:
            number, answer = self._core.expect_future(lambda part: connection.more(request.id, part))
            self._core.put(CancelRequested(number, names, request.signal, request.force))
            connection.more(request.id, await answer)
            records = [record async for page in self._task_ids.all_pages(request.tasks) for record in page]
            await self._cancel_waits.wait(connection, request, watch, records)

    def cancel_remote(self, connection: Connection, request: control.CancelRemote) -> None:
        """Kill tasks of other homes on this node. Raises NoSuchTask for the first that is not here."""
        here = {name for guest in self._node.executor.guests.values() for name in (guest.task, guest.array)}
        for name in request.guests:
            if name not in here:
                raise NoSuchTask(f"no task {name} of another home is here", hint="what is here:  peerload ls --remote")
        by = f"ended on {self._node.state.node} by {connection.caller.user or 'its user'}"
        number = self._core.expect(connection, request.id)
        self._core.put(RemoteCancelRequested(number, request.guests, request.signal, request.force, by))

    async def signal(self, connection: Connection, request: control.SendSignal) -> None:
        """Send a signal to a running task."""
        await self._reads.durable()
        task = self._task_ids.first(request.task).task
        number = self._core.expect(connection, request.id)
        self._core.put(SignalRequested(number, task, request.signal))

    async def hold(self, connection: Connection, request: control.Hold) -> None:
        """Hold waiting tasks."""
        await self._reads.durable()
        names = await self._task_ids.known_ids(request.tasks)
        self._core.put(HoldRequested(self._core.expect(connection, request.id), names))

    async def release(self, connection: Connection, request: control.Release) -> None:
        """Release held tasks."""
        await self._reads.durable()
        names = await self._task_ids.known_ids(request.tasks)
        self._core.put(ReleaseRequested(self._core.expect(connection, request.id), names))

    async def prioritize(self, connection: Connection, request: control.Prio) -> None:
        """Change the priority of tasks."""
        await self._reads.durable()
        names = await self._task_ids.known_ids(request.tasks)
        number = self._core.expect(connection, request.id)
        self._core.put(PriorityRequested(number, names, request.priority))

    def group(self, connection: Connection, request: control.Group) -> None:
        """Set, pause, continue or remove a group."""
        number = self._core.expect(connection, request.id)
        self._core.put(GroupRequested(number, request.name, request.slots, request.paused, removed=request.removed))

    def groups(self, connection: Connection, request: control.Groups) -> None:
        """List the groups; others than administrators see their own part."""
        groups, caller = self._node.eligibility.groups, connection.caller
        if caller.sees_all:
            connection.ok(request.id, {"groups": [group_dict(group) for group in groups]})
            return
        found = [own_part(group, lambda task: self._access.sees(caller, task)) for group in groups]
        connection.ok(request.id, {"groups": [group for group in found if group is not None]})


REASON = "peerload clean"


@dataclass(eq=False, repr=False)
class CleanRequests:
    """The verb `clean` of one agent."""

    _remover: TaskRemover
    _reads: DurableReads
    _task_ids: TaskIds
    _node: Node

    async def clean(self, connection: Connection, request: control.Clean) -> None:
        """Remove ended tasks, and tell which. Raises BadRequest if one that is named has not ended, NoSuchTask if there is
        none."""
        if request.tasks and request.keep:
            raise BadRequest("clean: tasks are named, or the newest are kept; not both")
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

        gone = await self._remover.remove(
            wanted, outputs_only=request.outputs_only, why=REASON, is_tried=request.dry_run, told=stream_names
        )
        if gone.tasks and not request.dry_run:
            what = "the outputs of" if request.outputs_only else ""
            reason = f"{what} {gone.tasks} ended tasks, {gone.output_bytes} bytes of output: {REASON}".strip()
            self._reads.event_log.record("store", "removed", reason=reason)
        counts = {"outputs": gone.outputs, "output_bytes": gone.output_bytes, "in_use": gone.in_use}
        connection.ok(request.id, {"removed": gone.tasks, **counts})
