"""The verbs that read tasks: tasks, select, history, remote, show and events."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peerload.agent.control.authorization import display_user
from peerload.agent.requests.overview import own_user
from peerload.agent.runtime import now
from peerload.agent.store.reader import Criteria, references
from peerload.agent.store.schema import SINGLE, is_id, member_spec, order_of, task_name
from peerload.agent.views import remote_task
from peerload.agent.views import task as views
from peerload.core.work import as_recorded
from peerload.model.errors import NoSuchTask, StoreError
from peerload.model.task import TaskState

if TYPE_CHECKING:
    from peerload.agent.control.authorization import Authorization, Quotas
    from peerload.agent.control.connection import Connection
    from peerload.agent.control.core_requests import Decisions
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.output.spool import Spool
    from peerload.agent.requests.durable_reads import DurableReads
    from peerload.agent.store.schema import Damage, RecordedEvent
    from peerload.core.node import Node
    from peerload.model.submit_options import SubmitOptions
    from peerload.model.task import TaskRecord, TaskSpec
    from peerload.wire import control

PAGE_TASKS = 256
"""Tasks in one page; others have their turn between two pages."""
SHOW_PAGE_TASKS = 50
"""Tasks in one page of `show`, with all details."""
PAGE_TOKENS = 50
"""Tokens of one page."""
LISTED_HERE_MAX = 2000
"""Longer lists are queried in a thread."""
EVENTS_AT_A_TIME = 256


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
    return views.why_waiting(node, node.home.by_id.get(record.task), record)


class TaskQueries:
    """Lists of tasks of one agent."""

    def __init__(
        self,
        reads: DurableReads,
        task_ids: TaskIds,
        access: Authorization,
        quotas: Quotas,
        spool: Spool,
        node: Node,
        decisions: Decisions,
    ) -> None:
        self._reads = reads
        self._task_ids = task_ids
        self._access = access
        self._quotas = quotas
        self._spool = spool
        self._node = node
        self._decisions = decisions
        self._user = own_user()

    async def tasks(self, connection: Connection, request: control.TasksRequest) -> None:
        """List unfinished tasks, and those that have ended lately."""
        whole = await self._reads.readable(connection)
        store = self._access.store(connection.caller)
        criteria = Criteria.of(request, map(self._task_ids.parse, request.tasks))
        ended_after = now().wall_s - request.ended_within_s
        is_large = request.limit > LISTED_HERE_MAX or request.gathered
        if is_large or not connection.caller.sees_all or not criteria.is_of_columns:
            listed = functools.partial(store.listed_in_thread, gathered=request.gathered)
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
        knows_all = connection.caller.sees_all and not store.has_damage  # of a million, which are not counted then
        counted = self._node.home.unfinished if knows_all else store.counts
        answer = {"tasks": [], "truncated": truncated, "unfinished": counted() if truncated else {}}
        connection.ok(request.id, answer | {"damaged": views.damaged_objects(damaged)})

    async def select(self, connection: Connection, request: control.Select) -> None:
        """List matching tasks as references for other verbs. Raises NoSuchTask for an unknown reference."""
        whole = await self._reads.readable(connection)
        await self._task_ids.known_ids(request.tasks)
        caller = connection.caller
        means_all = caller.sees_all and (request.all_users or request.tasks)
        store = whole if means_all else whole.only_of(caller.who)
        criteria = Criteria.of(request, map(self._task_ids.parse, request.tasks))
        found = await asyncio.to_thread(store.selected_in_thread, whole.path, criteria)
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
                task_row(self._node, record, spec, self._user)
                | views.usage_object(record)
                | views.gpu_wishes(spec)
                | views.travelling(spec, record.exit)
                for record, spec in rows
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

    async def show(self, connection: Connection, request: control.Show) -> None:
        """Show tasks of this home; with ``at`` tasks of other homes that are here, too. Raises NoSuchTask."""
        store = await self._reads.readable(connection, events=True)
        shown: list[dict[str, object]] = []
        for ref in request.tasks:
            if request.at and (guest := remote_task.find(self._node, ref)) is not None:
                shown.append(remote_task.shown(self._node, guest, display_user(guest.spec, self._user)))
                continue
            counter = self._task_ids.parse(ref).counter
            if not store.has(counter, None):
                raise self._task_ids.unknown_task(ref)
            spec = store.spec(counter)
            each, terms = store.each(counter), store.terms(counter)
            async for page in self._task_ids.pages(ref, SHOW_PAGE_TASKS):
                shown += [self._shown(record, member_spec(spec, each, record.task), terms) for record in page]
                if len(shown) >= SHOW_PAGE_TASKS:
                    await send_page(self._quotas, connection, request.id, shown, len(shown))
                    shown = []
        connection.ok(request.id, {"tasks": shown})

    def _shown(self, record: TaskRecord, submitted: TaskSpec, terms: SubmitOptions) -> dict[str, object]:
        store, spec = self._reads.store, as_recorded(submitted, record)
        task = task_row(self._node, record, spec, self._user)
        if task["state"] == "queued":
            task["reason"] = why_waiting(self._node, record)
        task |= views.error_line(self._spool, record)
        task |= views.detail_object(spec, record, views.devices_of(self._node, record))
        task |= views.output_gone_object(store, record) | views.completion_object(store, record, spec, terms)
        task |= views.submit_options_object(terms, record) | views.learned_gpu_memory(self._node.state.history, spec)
        task["history"] = [views.history_step(event) for event in store.history(record.task)]
        task["decision"] = self._decisions.of_task(record.task)
        return task


FINAL_STATES = frozenset(state.value for state in TaskState if state.is_final)


@dataclass(eq=False, repr=False)
class EventRequests:
    """The verb `events` of one agent, whose node is called ``node``."""

    _reads: DurableReads
    _task_ids: TaskIds
    _access: Authorization
    _node: str

    async def events(self, connection: Connection, request: control.Events) -> None:
        """Send the newest events, oldest first; with ``follow`` those to come."""
        await self._reads.readable(connection, events=True)
        store = self._access.store(connection.caller)
        names = [self._whole_id(ref, follow=request.follow) for ref in request.tasks]
        with self._reads.event_log.followed() as news:
            last = store.last_event()  # no await since `followed`: no event is missed
            shown = store.events(0, request.limit, newest=True, what=request.what, tasks=names) if request.limit else []
            while True:
                if shown:
                    await connection.stream(request.id, {"events": [self._object(event) for event in shown]})
                if not request.follow:
                    break
                shown = store.events(last, EVENTS_AT_A_TIME, what=request.what, tasks=names)
                last = shown[-1].number if shown else last
                if not shown:
                    await news.wait()
                    news.clear()
        connection.ok(request.id, {"events": []})

    def _object(self, event: RecordedEvent) -> dict[str, object]:
        """An event; the end of a task of this home with what it used."""
        is_end = event.attempt and event.state in FINAL_STATES and event.task.partition("/")[0] == self._node
        if not is_end or not is_id(event.task):
            return views.event_object(event)
        counter, member = order_of(event.task)
        try:
            records = self._reads.store.records(counter, member if member != SINGLE else None)
        except StoreError:  # of a damaged row nothing is known
            records = []
        return views.event_object(event, next((one for one in records if one.attempt == event.attempt), None))

    def _whole_id(self, ref: str, *, follow: bool) -> str:
        """The whole id of a task of this home, or of another that was here. Raises NoSuchTask."""
        name = self._task_ids.whole_id(ref)
        home = name.partition("/")[0]
        if home == self._node:
            return self._task_ids.known_id(ref)
        if not follow and not self._reads.store.events(0, 1, newest=True, tasks=[name]):
            why = f"its home is {home}, and nothing of it was ever here"
            raise NoSuchTask(f"no such task: {ref}", why=why, hint="ask the agent there")
        return name
