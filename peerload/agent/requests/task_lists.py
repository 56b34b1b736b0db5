"""The verbs that list tasks: tasks, select, history and remote."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

from peerload.agent.control.authorization import display_user
from peerload.agent.node_info import now
from peerload.agent.requests.overview import own_user
from peerload.agent.store.rows import task_name
from peerload.agent.store.selector import Criteria, references
from peerload.agent.views import remote_task
from peerload.agent.views import task as views

if TYPE_CHECKING:
    from peerload.agent.control.authorization import Authorization
    from peerload.agent.control.connection import Connection
    from peerload.agent.control.quotas import Quotas
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.output.spool import Spool
    from peerload.agent.requests.durable_reads import DurableReads
    from peerload.agent.store.rows import Damage
    from peerload.core.node import Node
    from peerload.model.task import TaskRecord, TaskSpec
    from peerload.wire import control

PAGE_TASKS = 256
"""Tasks in one page; others have their turn between two pages."""
PAGE_TOKENS = 50
"""Tokens of one page."""
LISTED_HERE_MAX = 2000
"""Longer lists are queried in a thread."""


async def send_page(
    quotas: Quotas, connection: Connection, number: int, tasks: list[dict[str, object]], tokens: int = PAGE_TOKENS
) -> None:
    """Send one page of tasks, at the client's pace and within the rate of its user."""
    await connection.stream(number, {"tasks": tasks})
    await quotas.pace(connection.caller, tokens)


def task_row(node: Node, record: TaskRecord, spec: TaskSpec, user: str) -> dict[str, object]:
    """A task of this home as lists show it. ``user``: the owner of the agent's own tasks."""
    shown = views.task_here(node, record, spec, display_user(spec, user))
    shown["unreachable_since"] = views.unreachable_since(node, record, now())
    return shown


def why_waiting(node: Node, record: TaskRecord) -> str:
    """Why a queued task waits, in a few words."""
    return views.why_waiting(node, node.home.tasks.get(record.uid), record)


class TaskLists:
    """Lists of tasks of one agent."""

    def __init__(
        self,
        reads: DurableReads,
        task_ids: TaskIds,
        access: Authorization,
        quotas: Quotas,
        spool: Spool,
        node: Node,
    ) -> None:
        self._reads = reads
        self._task_ids = task_ids
        self._access = access
        self._quotas = quotas
        self._spool = spool
        self._node = node
        self._user = own_user()

    async def tasks(self, connection: Connection, request: control.Tasks) -> None:
        """List unfinished tasks, and those that have ended lately."""
        whole = await self._reads.readable(connection)
        store = self._access.store(connection.caller)
        criteria = Criteria.of(request, map(self._task_ids.parse, request.tasks))
        ended_after = now().wall_s - request.ended_within_s
        is_large = request.limit > LISTED_HERE_MAX or request.gathered
        if is_large or not connection.caller.sees_all or not criteria.is_of_columns:
            listed = functools.partial(store.listed_beside, gathered=request.gathered)
            found, truncated = await asyncio.to_thread(listed, whole.path, ended_after, request.limit, criteria)
        else:
            found, truncated = store.listed(ended_after, request.limit, states=criteria.states, node=request.node)
        damaged: list[Damage] = []
        first = 0
        while first < len(found):
            some = found[first : first + PAGE_TASKS]
            first += len(some)
            page = store.read([row.first for row in some])
            together = {task_name(self._node.state.node, *row.first[:2]): row for row in some if row.count > 1}
            damaged += page.damaged
            if hiding := [together[damage.task] for damage in page.damaged if damage.task in together]:
                found += await asyncio.to_thread(store.behind, whole.path, hiding)
            tasks = []
            for record, spec in page.rows:
                shown = task_row(self._node, record, spec, self._user)
                if request.states and shown["state"] not in request.states:
                    continue
                if shown["state"] == "queued":
                    shown["reason"] = why_waiting(self._node, record)
                if record.task in together:
                    shown |= views.array_row(shown, together[record.task])
                if request.limit <= LISTED_HERE_MAX:
                    shown |= views.error_line(self._spool, record)
                tasks.append(shown)
            await send_page(self._quotas, connection, request.id, tasks)
        if criteria == Criteria():
            damaged += store.damaged_besides(damaged, request.limit)
        answer = {"tasks": [], "truncated": truncated, "unfinished": store.counts() if truncated else {}}
        connection.ok(request.id, answer | {"damaged": views.damaged_objects(damaged)})

    async def select(self, connection: Connection, request: control.Select) -> None:
        """List matching tasks as references for other verbs. Raises NoSuchTask for an unknown reference."""
        whole = await self._reads.readable(connection)
        await self._task_ids.known_ids(request.tasks)
        caller = connection.caller
        means_all = caller.sees_all and (request.all_users or request.tasks)
        store = whole if means_all else whole.only_of(caller.who)
        criteria = Criteria.of(request, map(self._task_ids.parse, request.tasks))
        found = await asyncio.to_thread(store.selected_beside, whole.path, criteria)
        states = found.states
        for counter, member, uid, attempt in found.leased:
            task = self._node.home.tasks.get(uid)
            runs = task is not None and task.record.attempt == attempt and task.running_at
            state = "running" if runs else "leased"
            if not request.states or state in request.states:
                found.members.setdefault(counter, []).append(member)
                states[state] += 1
        chosen = await asyncio.to_thread(references, self._node.state.node, found.members, found.sizes)
        connection.ok(request.id, {"selected": chosen, "count": states.total(), "states": dict(states)})

    async def history(self, connection: Connection, request: control.History) -> None:
        """List ended tasks with their usage."""
        await self._reads.readable(connection)
        store, since = self._access.store(connection.caller), request.since
        left = request.limit
        after = None
        if request.oldest_first and left is not None:
            after = store.before_the_last(since, left)
        truncated = after is not None
        damaged: list[dict[str, object]] = []
        while True:
            page = store.ended(since, after, PAGE_TASKS, oldest_first=request.oldest_first)
            if page.last is None:
                break
            rows = page.rows
            if left is not None:
                truncated = truncated or len(rows) > left
                rows = rows[:left]
                left -= len(rows)
                if not left and not rows:
                    break
            after = page.last
            damaged += views.damaged_objects(page.damaged)
            tasks = [
                task_row(self._node, record, spec, self._user) | views.usage_object(record) for record, spec in rows
            ]
            await send_page(self._quotas, connection, request.id, tasks)
        connection.ok(request.id, {"tasks": [], "truncated": truncated, "damaged": damaged})

    async def remote(self, connection: Connection, request: control.Remote) -> None:
        """List tasks of other homes that are here."""
        await self._reads.readable(connection)
        found = remote_task.seen_by(self._node, self._access, connection.caller)
        shown = found[: request.limit]
        for first in range(0, len(shown), PAGE_TASKS):
            page = shown[first : first + PAGE_TASKS]
            tasks = [remote_task.listed(self._node, guest, display_user(guest.spec, self._user)) for guest in page]
            await send_page(self._quotas, connection, request.id, tasks)
        connection.ok(request.id, {"tasks": [], "truncated": len(found) > len(shown)})
