"""The verbs that read tasks: tasks, select, history, remote, show, events, why, and the live usage of tasks that run here."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from peerload.agent.control.authorization import display_user
from peerload.agent.control.task_ids import REF
from peerload.agent.requests.overview import own_user
from peerload.agent.runtime import now
from peerload.agent.store.reader import Criteria, references
from peerload.agent.store.schema import member_spec
from peerload.agent.views import task as views
from peerload.agent.views.task import find_remote, remote_listed, remote_shown, remote_tasks_seen_by
from peerload.core.explain import (
    EligibilityVerdict,
    Suggestion,
    WaitReasons,
    holding_reason,
    smallest_change,
    uncollected_reason,
)
from peerload.core.membership.peers import PeerState
from peerload.core.resources.admission import needs_text
from peerload.core.work import HomePhase, RemotePhase, as_recorded
from peerload.model.bounded import BoundedDict
from peerload.model.errors import NoSuchTask, StoreError
from peerload.model.task import SINGLE, TaskState, execution_key, how_it_ended, is_id, member_of, order_of, task_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peerload.agent.control.authorization import Authorization, Principal, Quotas
    from peerload.agent.control.connection import Connection
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.files.environments import Environments
    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.launcher.mps import MpsDaemons
    from peerload.agent.output.spool import Spool
    from peerload.agent.runtime import Decisions
    from peerload.agent.sensors.energy import EnergySensors
    from peerload.agent.store.reader import StoreReader
    from peerload.agent.store.schema import Damage, RecordedEvent
    from peerload.agent.store.store import Store
    from peerload.agent.store.write_ahead import EventLog, Outbox
    from peerload.agent.views.agent import ClusterView
    from peerload.core.node import Node
    from peerload.core.resources.devices import DeviceGrant, DeviceState
    from peerload.core.work import HomeTask
    from peerload.model.task import SubmitOptions, TaskRecord, TaskSpec
    from peerload.wire import control


PAGE_TASKS = 256
"""Tasks in one page; other requests are served between two pages."""
SHOW_PAGE_TASKS = 50
"""Tasks in one page of `show`, with all details."""
PAGE_TOKENS = 50
LISTED_HERE_MAX = 2000
"""Longer lists are queried in a thread."""
LISTED_AS = 4
"""Weight of a task in an unread list in the quota of tasks to wait for: its row takes more memory than a wait."""
EVENTS_AT_A_TIME = 256
FINAL_STATES = frozenset(state.value for state in TaskState if state.is_final)
MEMBERS_MAX = 10_000
"""Members of an array that are examined; an array may have a million."""
GROUPS_MAX = 8
"""Maximum number of listed groups of members with the same state and reason."""
AWAITED_NAMED_MAX = 4
"""Maximum number of dependencies named in a suggestion."""
STALLED_CHECK_S = 0.2
"""Interval at which a read that waits for the disk checks whether the disk is full."""
STEPS_MAX = 8
"""Maximum number of listed changes of a task, the latest ones."""
REVOKED = "was shut out of the cluster (revoked)"
LEFT = "has left the cluster, or was forgotten"
UNKNOWN = "is not a node that is known here"
GONE = (REVOKED, LEFT, UNKNOWN)
WAITING_PHASES = (HomePhase.WAITING, HomePhase.OFFERED, HomePhase.RESTING, HomePhase.GATED)
FRESH_S = 0.5
"""Age up to which a reading is reused."""
RATE_S_MAX = 30.0
"""Maximum distance of two readings from which the busy cores are computed."""
KEPT_MAX = 1024
"""Maximum number of tasks whose last reading is kept."""


async def send_page(
    quotas: Quotas, connection: Connection, number: int, tasks: list[dict[str, object]], tokens: int = PAGE_TOKENS
) -> None:
    """Send one page of tasks, as fast as the client reads and within the rate of its user."""
    await connection.stream(number, {"tasks": tasks})
    await quotas.pace(connection.caller, tokens)


def task_row(node: Node, record: TaskRecord, spec: TaskSpec, user: str) -> dict[str, object]:
    """A task of this home as a row of a list. ``user``: the owner of the agent's own tasks."""
    shown = views.task_here(node, record, spec, display_user(spec, user))
    shown["unreachable_since"] = views.unreachable_since(node, record, now())
    return shown


def why_waiting(node: Node, record: TaskRecord) -> str:
    return views.why_waiting(node, node.home.by_id.get(record.task), record)


class DurableReads:
    """Store of one agent as clients read it: with all acknowledged changes, and no change that a crash could undo."""

    def __init__(self, store: Store, outbox: Outbox, event_log: EventLog) -> None:
        self.store = store
        self.event_log = event_log
        self._outbox = outbox

    async def durable(self) -> Store:
        """Wait until every earlier decision is on disk and its messages are sent → the store. While the disk is full nothing is
        committed, so that the store already has the durable state."""
        store, reached = self.store, asyncio.Event()
        if not store.is_stalled:
            self._outbox.when_durable(reached.set)
        while not store.is_stalled and not reached.is_set():
            with contextlib.suppress(TimeoutError):  # that very commit may find the disk full
                async with asyncio.timeout(STALLED_CHECK_S):
                    await reached.wait()
        return store

    async def readable(self, connection: Connection, *, events: bool = False) -> Store:
        """Same as `durable`, after the client has read most of the earlier responses. ``events``: with all events so far."""
        if events:
            self.event_log.settle()
        await self.durable()
        await connection.drain()
        return self.store


@dataclass(eq=False, repr=False)
class TaskQueries:
    """Lists of tasks of one agent."""

    _reads: DurableReads
    _task_ids: TaskIds
    _access: Authorization
    _quotas: Quotas
    _spool: Spool
    _node: Node
    _decisions: Decisions
    _user: str = field(default_factory=own_user, init=False)

    async def tasks(self, connection: Connection, request: control.TasksRequest) -> None:
        """List unfinished and recently ended tasks. Raises NoSuchTask for an unknown reference."""
        whole = await self._reads.readable(connection)
        await self._task_ids.known_ids(request.tasks)
        store = self._seen(connection.caller, request)
        criteria = Criteria.of(request, map(self._task_ids.parse, request.tasks))
        ended_after = now().wall_s - request.ended_within_s
        is_large = request.limit > LISTED_HERE_MAX or request.gathered
        sees_all = connection.caller.sees_all and not request.own
        if is_large or not sees_all or not criteria.is_of_columns:
            listed = functools.partial(store.listed_in_thread, gathered=request.gathered)
            found, truncated = await asyncio.to_thread(listed, whole.path, ended_after, request.limit, criteria)
        else:
            found, truncated = store.listed(ended_after, request.limit, states=criteria.states, node=request.node)
        damaged: list[Damage] = []
        first = 0
        with self._quotas.charge(connection.caller, LISTED_AS * len(found)):
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
                    if request.limit <= LISTED_HERE_MAX:
                        shown |= views.error_line(self._spool, record)
                    if record.task in together:
                        shown |= views.array_row(shown, together[record.task])
                    tasks.append(shown)
                await send_page(self._quotas, connection, request.id, tasks)
        if criteria == Criteria():
            damaged += store.damaged_besides(damaged, request.limit)
        knows_all = sees_all and not store.has_damage  # then a million tasks need not be counted in the store
        counted = self._node.home.unfinished if knows_all else store.counts
        answer = {"tasks": [], "truncated": truncated, "unfinished": counted() if truncated else {}}
        connection.ok(request.id, answer | {"damaged": views.damaged_objects(damaged)})

    def _seen(self, caller: Principal, request: control.TasksRequest | control.History) -> StoreReader:
        """The store, restricted to the tasks that this list may contain."""
        return self._reads.store.only_of(caller.who) if request.own else self._access.store(caller)

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
        await self._reads.readable(connection)
        store, since = self._seen(connection.caller, request), request.since
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
        await self._reads.readable(connection)
        found = remote_tasks_seen_by(self._node, self._access, connection.caller)
        shown = found[: request.limit]
        for first in range(0, len(shown), PAGE_TASKS):
            page = shown[first : first + PAGE_TASKS]
            tasks = [remote_listed(self._node, remote, display_user(remote.spec, self._user)) for remote in page]
            await send_page(self._quotas, connection, request.id, tasks)
        connection.ok(request.id, {"tasks": [], "truncated": len(found) > len(shown)})

    async def show(self, connection: Connection, request: control.Show) -> None:
        """Show tasks of this home; with ``at``, also tasks of other homes that are here. Raises NoSuchTask."""
        store = await self._reads.readable(connection, events=True)
        shown: list[dict[str, object]] = []
        for ref in request.tasks:
            if request.at and (remote := find_remote(self._node, ref)) is not None:
                shown.append(remote_shown(self._node, remote, display_user(remote.spec, self._user)))
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


@dataclass(eq=False, repr=False)
class EventRequests:
    """The verb `events` of one agent, whose node is called ``node``."""

    _reads: DurableReads
    _task_ids: TaskIds
    _access: Authorization
    _node: str

    async def events(self, connection: Connection, request: control.Events) -> None:
        """Send the newest events, oldest first; with ``follow``, then each new one."""
        await self._reads.readable(connection, events=True)
        store = self._access.store(connection.caller)
        names = [self._whole_id(ref, follow=request.follow) for ref in request.tasks]
        with self._reads.event_log.followed() as news:
            last = store.last_event()  # no await since `followed`: no event is missed
            after, limit = request.after, request.limit
            shown = store.events(after, limit, newest=True, what=request.what, tasks=names) if limit else []
            if request.follow:
                begins = shown[0].number - 1 if shown else last
                await connection.stream(request.id, {"events": [], "begins": begins})
            while True:
                if shown:
                    await connection.stream(request.id, {"events": [self._object(event) for event in shown]})
                if not request.follow:
                    break
                newest = store.last_event()  # read before the query, which covers all events up to this one
                shown = store.events(last, EVENTS_AT_A_TIME, what=request.what, tasks=names)
                reached = shown[-1].number if shown else last
                last = reached if len(shown) == EVENTS_AT_A_TIME else max(reached, newest)
                if not shown:
                    await news.wait()
                    news.clear()
        connection.ok(request.id, {"events": []})

    def _object(self, event: RecordedEvent) -> dict[str, object]:
        """An event; for the end of a task of this home, with the used resources."""
        is_end = event.attempt and event.state in FINAL_STATES and event.task.partition("/")[0] == self._node
        if not is_end or not is_id(event.task):
            return views.event_object(event)
        counter, member = order_of(event.task)
        try:
            records = self._reads.store.records(counter, member if member != SINGLE else None)
        except StoreError:  # a damaged row has no usable content
            records = []
        return views.event_object(event, next((one for one in records if one.attempt == event.attempt), None))

    def _whole_id(self, ref: str, *, follow: bool) -> str:
        """The whole id of a task of this home, or of another home's task that was here. Raises NoSuchTask."""
        name = self._task_ids.whole_id(ref)
        home = name.partition("/")[0]
        if home == self._node:
            return self._task_ids.known_id(ref)
        if not follow and not self._reads.store.events(0, 1, newest=True, tasks=[name]):
            why = f"its home is {home}, and nothing of it was ever here"
            raise NoSuchTask(f"no such task: {ref}", why=why, hint="ask the agent there")
        return name


def is_waiting(task: HomeTask | None) -> bool:
    """True if a task waits for resources, at home or in the queue of another node."""
    if task is None:
        return False
    return task.phase in WAITING_PHASES or (task.phase is HomePhase.AWAY and not task.running_at)


# -- why ---------------------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class WhyRequest:
    """Answers `why` for the tasks of one home."""

    _node: Node
    _store: StoreReader
    _task_ids: TaskIds
    _decisions: Decisions
    _cluster: ClusterView
    _environments: Environments

    async def explain(self, ref: str) -> dict[str, object]:
        """Explain one task or an array. Raises NoSuchTask, BadRequest for an invalid id."""
        counter, _ = self._task_ids.resolve(ref)
        records: list[TaskRecord] = []
        async for page in self._task_ids.pages(ref):
            records += page
            if len(records) >= MEMBERS_MAX:
                break
        if not records:
            raise NoSuchTask(f"no such task: {ref}", hint="peerload ls")
        spec = self._store.spec(counter)
        return self._array(records, spec) if len(records) > 1 else self._task(records[0], spec)

    def _task(self, record: TaskRecord, spec: TaskSpec) -> dict[str, object]:
        task = self._node.home.by_id.get(record.task)
        fields = self._describe(record, spec)
        if task is not None and (task.phase is HomePhase.COLLECTING or uncollected_reason(task)):
            fields["says"] = uncollected_reason(task) or holding_reason(task)
        if task is not None and self._environments.prepares(task.key):
            fields["says"] = f"its environment is being built on {self._node.state.node}"
            fields["staging"] = {"done_bytes": 0, "size_bytes": 0, "builds": True}
        return fields | self._waiting(task) if task is not None and is_waiting(task) else fields

    def _array(self, records: list[TaskRecord], spec: TaskSpec) -> dict[str, object]:
        """Explain an array: members grouped by state and reason, and all details of the next member to start."""
        home = self._node.home
        groups: Counter[tuple[str, str]] = Counter()
        for record in records:
            task = home.by_id.get(record.task)
            is_queued = task is not None and task.phase in WAITING_PHASES
            state = "running" if task is not None and task.running_at else record.state.value
            reason = views.why_waiting(self._node, task, record) if is_queued else record.reason
            groups[state, reason] += 1
        name = records[0].task.rpartition(".")[0]
        home.touched(name, 1)
        waiting = [task for task in home.arrays.get(name, {}).values() if is_waiting(task)]
        next_one = min(waiting, key=lambda task: member_of(task.task), default=None)
        fields = self._describe(records[0] if next_one is None else next_one.record, spec)
        fields["array"] = {
            "id": name,
            "looked_at": len(records),
            "groups": [
                {"state": state, "reason": reason, "tasks": count}
                for (state, reason), count in groups.most_common(GROUPS_MAX)
            ],
            "more_groups": max(len(groups) - GROUPS_MAX, 0),
        }
        return fields | self._waiting(next_one) if next_one is not None else fields

    def _describe(self, record: TaskRecord, spec: TaskSpec) -> dict[str, object]:
        shown = views.task_here(self._node, record, spec, "")
        history = self._store.history(record.task)
        return {
            "id": record.task,
            "name": shown["name"],
            "state": shown["state"],
            "node": shown["node"],
            "needs": needs_text(spec.request, spec.placement),
            "says": _state_text(record),
            "since": history[-1].at if history else record.submitted_at,
            "steps": [views.history_step(event) for event in history[-STEPS_MAX:]],
            "devices": shown["device_names"],
            "decision": self._decisions.of_task(record.task),
            "nodes": [],
            "could_ever": None,
            "freshest_s": None,
            "oldest_s": None,
            "oldest_node": None,
            "change": None,
            "staging": None,
            "summary": "",
            "array": None,
        }

    def _waiting(self, task: HomeTask) -> dict[str, object]:
        """Explanation of a waiting task: for every node, the reason why it does not start there."""
        node, now_s = self._node, now().boot_s
        reasons = WaitReasons(node, task, now_s)
        verdicts = [*map(self._as_trusted, reasons.verdicts()), *self._pinned_elsewhere(task)]
        ages = {verdict.node: verdict.age_s for verdict in verdicts if verdict.age_s is not None}
        oldest = max(ages, key=lambda name: ages[name], default=None)
        change = None
        gate = node.eligibility.reason(task)
        staging = task.offering.staging if task.offering is not None else None
        if gate:
            change = _group_suggestion(node, task, verdicts)
        elif not any(verdict.now for verdict in verdicts):
            change = smallest_change(node, reasons, task.spec) or _another_directory(task, node.state.node)
        return {
            "says": gate or views.deferral_text(node, task) or holding_reason(task),
            "staging": None
            if staging is None
            else {"done_bytes": staging.done_bytes, "size_bytes": staging.size_bytes, "builds": staging.builds},
            "nodes": [
                {
                    "node": verdict.node,
                    "can_ever": verdict.can_ever,
                    "now": verdict.now,
                    "reason": verdict.reason,
                    "age_s": verdict.age_s,
                }
                for verdict in verdicts
            ],
            "could_ever": sum(verdict.can_ever is True for verdict in verdicts),
            "freshest_s": min(ages.values(), default=None),
            "oldest_s": ages[oldest] if oldest is not None else None,
            "oldest_node": oldest,
            "change": None if change is None else {"words": change.words, "node": change.node},
            "summary": gate or self._isolation(verdicts) or _summary(verdicts, node.state.node, task.record.node),
        }

    def _as_trusted(self, verdict: EligibilityVerdict) -> EligibilityVerdict:
        peer = self._node.membership.get(verdict.node)
        if peer is None or not self._cluster.was_revoked(verdict.node) or not self._cluster.is_peer_revoked(peer):
            return verdict
        return msgspec.structs.replace(verdict, can_ever=False, now=None, reason=REVOKED)

    def _pinned_elsewhere(self, task: HomeTask) -> list[EligibilityVerdict]:
        """A verdict about the node that the task is pinned to, if that is not a known member."""
        own, name = self._node.state.node, task.spec.placement.node or ""
        peer = self._node.membership.get(name)
        if name in ("", own) or (peer is not None and peer.state is not PeerState.LEFT):
            return []
        if self._node.membership.unmet(task.spec.placement, own):
            return []
        reason = REVOKED if self._cluster.was_revoked(name) else UNKNOWN if peer is None else LEFT
        return [EligibilityVerdict(name, can_ever=False, now=None, reason=reason)]

    def _isolation(self, verdicts: list[EligibilityVerdict]) -> str:
        """Summary for a task that cannot start here while this node is revoked; "" otherwise."""
        if not self._cluster.is_revoked() or any(verdict.now for verdict in verdicts):
            return ""
        return f"{self._node.state.node} was shut out of its cluster (revoked) and works alone: {verdicts[0].reason}"


def _state_text(record: TaskRecord) -> str:
    if record.state.is_final and record.exit is not None:
        return how_it_ended(record.exit)
    return record.reason


def _group_suggestion(node: Node, task: HomeTask, verdicts: list[EligibilityVerdict]) -> Suggestion | None:
    """The suggestion for a task that waits for its dependencies or its group, although a node has room for it."""
    room = next((verdict.node for verdict in verdicts if verdict.now), "")
    awaited = node.eligibility.dependencies.waits_for(task.terms) if task.phase is HomePhase.GATED else []
    if room and awaited:
        names = [name.partition(" (")[0] for name in awaited[:AWAITED_NAMED_MAX]]
        more = f" and {len(awaited) - len(names)} more" if len(awaited) > len(names) else ""
        return Suggestion(f"when {', '.join(names)}{more} {'has' if len(awaited) == 1 else 'have'} ended,", room)
    words = node.eligibility.opened_by(task)
    return Suggestion(f"after  {words} ", room) if room and words else None


def _another_directory(task: HomeTask, home: str) -> Suggestion | None:
    lacks = task.cannot_here.startswith("no directory ")
    return Suggestion("with -d DIR, or -d - for a fresh scratch directory,", home) if lacks else None


def _summary(verdicts: list[EligibilityVerdict], home: str, there: str | None) -> str:
    """Reason why a task waits, in one line: from the node where it waits (``there``), or else from the nearest node that could
    run it. "" if a node has room."""
    if any(verdict.now for verdict in verdicts):
        return ""
    could = [verdict for verdict in verdicts if verdict.can_ever is not False]
    if not could:
        shut_out = next((f": {verdict.node} {verdict.reason}" for verdict in verdicts if verdict.reason in GONE), "")
        return f"no node known can ever run it{shut_out}"
    nearest = min(
        could,
        key=lambda one: (one.node != there, one.can_ever is None, one.now is not None, one.node != home, one.node),
    )
    return f"{nearest.node}: {nearest.reason}"


# -- live usage --------------------------------------------------------------------------------------------------------


class UsageReading(NamedTuple):
    """A usage reading of one task. at_s: CLOCK_BOOTTIME; cpu_s: -1 = unknown; cpus_busy: since the previous
    reading, None if there is none or it is too old; memory_bytes: -1 = unknown."""

    at_s: float
    cpu_s: float
    memory_bytes: int
    processes: int
    cpus_busy: float | None = None


class LiveUsage:
    """Live resource usage of the tasks that run on this node. The launcher reads it on request, at most twice a second for each
    task, regardless of the number of clients."""

    def __init__(
        self, node: Node, launcher: LauncherLink, task_ids: TaskIds, energy: EnergySensors, mps: MpsDaemons
    ) -> None:
        self._node = node
        self._launcher = launcher
        self._task_ids = task_ids
        self._energy = energy
        self._mps = mps
        self._lock = asyncio.Lock()
        self._last: BoundedDict[str, UsageReading] = BoundedDict(KEPT_MAX)

    async def readings(self, refs: Sequence[str]) -> list[dict[str, object]]:
        """The usage of those named tasks that run here: id node cpu_s cpus_busy memory_bytes processes joules gpus, null
        if unknown. Raises NoSuchTask or BadRequest for an unknown task of this home."""
        keys = {key: task for ref in refs for key, task in [running_here(self._node, self._task_ids, ref)] if key}
        async with self._lock:  # concurrent requests share one reading
            await self._read([key for key in keys if not self._is_fresh(key)])
        return [self._object(task, key, self._last[key]) for key, task in keys.items() if self._is_fresh(key)]

    def _is_fresh(self, key: str) -> bool:
        last = self._last.get(key)
        return last is not None and now().boot_s - last.at_s < FRESH_S

    async def _read(self, keys: list[str]) -> None:
        if not keys:
            return
        usage = await self._launcher.usage(keys)
        if usage is None:
            return
        for key, used in usage.of.items():
            before = self._last.get(key)
            reading = UsageReading(usage.at_s, *used)
            self._last[key] = reading._replace(cpus_busy=_busy(before, reading))

    def _object(self, task: str, key: str, reading: UsageReading) -> dict[str, Any]:
        return {
            "id": task,
            "node": self._node.state.node,
            "cpu_s": reading.cpu_s if reading.cpu_s >= 0 else None,
            "cpus_busy": reading.cpus_busy,
            "memory_bytes": reading.memory_bytes if reading.memory_bytes >= 0 else None,
            "processes": reading.processes,
            "joules": self._energy.so_far(key),
            "gpus": [
                _gpu(state, state.grants[key]) | {"mps": self._mps.is_client(key)}
                for state in self._node.ledger.devices.of_grant(key)
            ],
        }


def running_here(node: Node, task_ids: TaskIds, ref: str) -> tuple[str, str]:
    """The key of the attempt of this task that runs here, "" if none does, and the whole id. Raises NoSuchTask or
    BadRequest for an unknown task of this home."""
    remote = find_remote(node, ref)
    if remote is not None:
        return (remote.key if remote.phase is RemotePhase.HERE else ""), remote.task
    parsed = REF.fullmatch(ref)
    if parsed is not None and parsed["home"] not in (None, node.state.node):
        return "", ref
    record = task_ids.single(ref)
    task = node.home.tasks.get(record.uid)
    is_here = task is not None and task.phase is HomePhase.HERE and task.running_at
    return (execution_key(record.uid, record.attempt) if is_here else ""), record.task


def _gpu(state: DeviceState, grant: DeviceGrant) -> dict[str, Any]:
    """A GPU of a task. ``util`` is that of the whole device; the memory is that of the task alone."""
    return {
        "id": state.device.name,
        "index": state.device.index,
        "model": state.device.model,
        "util": state.reading.busy,
        "mem_bytes": grant.now_bytes,
        "mem_peak_bytes": grant.peak_bytes,
        "mem_promised_bytes": grant.promised_bytes,
        "tasks": len(state.grants),
        "mode": grant.mode.name.lower(),
        "health": state.reading.health.name.lower(),
    }


def _busy(before: UsageReading | None, now: UsageReading) -> float | None:
    """Busy cores between two readings. None if unknown: the second reading may lack the time of ended processes."""
    if before is None or min(before.cpu_s, now.cpu_s) < 0 or not 0 < now.at_s - before.at_s <= RATE_S_MAX:
        return None
    passed = (now.cpu_s - before.cpu_s) / (now.at_s - before.at_s)
    return passed if passed >= 0 else None
