"""The verb `select`: which tasks match, as references that other verbs take."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from peerload.agent.store.selector import Criteria, references

if TYPE_CHECKING:
    from peerload.agent.control.connection import Connection
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.parts import Parts
    from peerload.wire import control


async def select(parts: Parts, names: TaskIds, connection: Connection, request: control.Select) -> None:
    """Answer it. Raises NoSuchTask for a reference to a task that is not there."""
    await names.all_known(request.tasks)
    caller = connection.caller
    means_all = caller.sees_all and (request.all_users or request.tasks)
    store = parts.store if means_all else parts.store.only_of(caller.who)
    criteria = Criteria.of(request, map(names.meant, request.tasks))
    found = await asyncio.to_thread(store.selected_beside, parts.store.path, criteria)
    states = found.states
    for counter, member, uid, attempt in found.leased:
        task = parts.node.home.tasks.get(uid)
        runs = task is not None and task.record.attempt == attempt and task.running_at
        state = "running" if runs else "leased"
        if not request.states or state in request.states:
            found.members.setdefault(counter, []).append(member)
            states[state] += 1
    chosen = await asyncio.to_thread(references, parts.config.node, found.members, found.sizes)
    connection.ok(request.id, {"selected": chosen, "count": states.total(), "states": dict(states)})
