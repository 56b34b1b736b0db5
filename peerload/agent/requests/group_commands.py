"""What clients want of gates: what a submission may name, the groups there are, and other priorities."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.core.tasks.groups import own_part, told
from peerload.model.errors import BadRequest
from peerload.model.events import GroupRequested, PriorityRequested
from peerload.model.task import Guarantee

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from peerload.agent.control.connection import Connection
    from peerload.agent.control.pending_replies import PendingReplies
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.parts import Parts
    from peerload.model.submit_options import SubmitOptions
    from peerload.model.task import TaskSpec
    from peerload.wire import control


class GroupCommands:
    """``durable()`` returns when everything decided so far is on disk."""

    def __init__(
        self, parts: Parts, pending: PendingReplies, names: TaskIds, durable: Callable[[], Awaitable[None]]
    ) -> None:
        self._parts = parts
        self._pending = pending
        self._names = names
        self._durable = durable

    async def prioritize(self, connection: Connection, request: control.Prio) -> None:
        """Change the priority of tasks."""
        await self._durable()
        names = await self._names.all_known(request.tasks)
        number = self._pending.expect(connection, request.id)
        self._parts.inbox.put(PriorityRequested(number, names, request.priority))

    def group(self, connection: Connection, request: control.Group) -> None:
        """Set a group, pause it, let it go on, or remove it."""
        number = self._pending.expect(connection, request.id)
        self._parts.inbox.put(
            GroupRequested(number, request.name, request.slots, request.paused, removed=request.removed)
        )

    def groups(self, connection: Connection, request: control.Groups) -> None:
        """All there are."""
        groups, caller = self._parts.node.eligibility.groups, connection.caller
        if caller.sees_all:
            connection.ok(request.id, {"groups": [told(group) for group in groups]})
            return
        found = [own_part(group, lambda task: self._parts.access.sees(caller, task)) for group in groups]
        connection.ok(request.id, {"groups": [group for group in found if group is not None]})


def agreed(names: TaskIds, spec: TaskSpec, terms: SubmitOptions) -> SubmitOptions:
    """The terms with whole ids in them. Raises BadRequest for what contradicts itself, or is no id."""
    if terms.retries and spec.guarantee is Guarantee.ONCE:
        raise BadRequest(
            "a task that may run once only cannot be tried again",
            why=f"it was submitted with retries: {terms.retries}",
            hint="without --once, or without --retries",
        )
    if not terms.awaits:
        return terms
    for ref in (*terms.after, *terms.after_ok):
        if "-" in (members := ref.rpartition("/")[2].partition(".")[2]) or "," in members:
            raise BadRequest(f"{ref}: a range cannot be waited for", why="one task, or a whole array, can")
    after, after_ok = (tuple(dict.fromkeys(map(names.full, refs))) for refs in (terms.after, terms.after_ok))
    return msgspec.structs.replace(terms, after=after, after_ok=after_ok)
