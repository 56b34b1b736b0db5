"""What each verb of the control socket does."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from typing import TYPE_CHECKING, Any, assert_never

from peerload.agent.control.authorization import user_shown
from peerload.agent.control.task_ids import TaskIds
from peerload.agent.requests import remote_task_view
from peerload.agent.requests.attach import AttachRequests
from peerload.agent.requests.cancel_wait import CancelWaits
from peerload.agent.requests.clean import cleaned
from peerload.agent.requests.group_commands import GroupCommands
from peerload.agent.requests.live_usage import LiveUsage
from peerload.agent.requests.output_stream import OutputStream, TaskWatch
from peerload.agent.requests.overview import OverviewCache, own_user
from peerload.agent.requests.select_tasks import select
from peerload.agent.requests.task_commands import TaskCommands
from peerload.agent.requests.wait_request import WaitRequest
from peerload.agent.requests.why import WhyRequest
from peerload.agent.run_state import Ending
from peerload.agent.store.rows import member_spec, task_name
from peerload.agent.store.selector import Criteria
from peerload.agent.views import node as node_answers
from peerload.agent.views import task as answers
from peerload.agent.views.completion import endings_object
from peerload.agent.views.diagnostics import checkup_object, settings_object
from peerload.core.tasks.work import as_recorded
from peerload.model import metrics
from peerload.model.errors import NoSuchTask
from peerload.model.task import execution_key
from peerload.policy import registry
from peerload.wire import control

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from peerload.agent.control.connection import Connection
    from peerload.agent.control.pending_replies import Decisions, PendingReplies
    from peerload.agent.control.quotas import WaitQuota
    from peerload.agent.parts import Parts
    from peerload.agent.store.rows import Damage
    from peerload.model.actions import TaskChanged
    from peerload.model.submit_options import SubmitOptions
    from peerload.model.task import TaskRecord, TaskSpec

SHOWN_AT_A_TIME = 256
"""Tasks put together before they are sent and others have their turn."""
PAGE_TOKENS = 50
"""Requests that so many tasks of a list count as."""
LISTED_HERE_MAX = 2000
"""A list that may have more tasks is looked for in a thread: some microseconds each, and all in one query."""
SHOWN_WHOLE_AT_A_TIME = 50
"""The same of tasks with all that there is to be said of each."""
EVENTS_AT_A_TIME = 256
STALLED_LOOK_S = 0.2
"""Who waits for the disk looks so often whether it is full."""


class RequestHandler:
    """The verbs. Reads run when everything decided before them is durable (`Release.outward`), as work of their client:
    whatever they raise is told to it alone."""

    def __init__(self, parts: Parts, pending: PendingReplies, decisions: Decisions, waited: WaitQuota) -> None:
        self._parts = parts
        self._waited = waited
        self._decisions = decisions
        self._names = TaskIds(parts)
        self._overviews = OverviewCache(parts)
        self._reasons = WhyRequest(parts, self._names, decisions)
        self._live = LiveUsage(parts, self._names)
        self.endings = CancelWaits(parts)
        self.attending = AttachRequests(parts, self._names, pending)
        self._changes = TaskCommands(parts, pending, self._names, self.endings, self._durable, self.attending)
        self._gating = GroupCommands(parts, pending, self._names, self._durable)
        self._watches: dict[str, set[TaskWatch]] = {}
        self._user = own_user()
        self._policies: dict[str, list[str]] = {}

    def handle(  # noqa: C901, PLR0912, PLR0915 -- one case for each verb
        self, connection: Connection, request: control.Request
    ) -> None:
        """Answer a request at once, or begin the work that answers it."""
        changes, gating = self._changes, self._gating
        inside, joining = self._parts.inside, self._parts.joining

        def begin(work: Coroutine[Any, Any, None]) -> None:
            connection.spawn(request.id, work)

        match request:
            case control.Submit():
                begin(changes.submit(connection, request))
            case control.Tasks():
                begin(self._tasks(connection, request))
            case control.Select():
                begin(self._select(connection, request))
            case control.History():
                begin(self._history(connection, request))
            case control.Show():
                begin(self._show(connection, request))
            case control.Usage():
                begin(self._usage(connection, request))
            case control.Why():
                begin(self._why(connection, request))
            case control.Events():
                begin(self._events(connection, request))
            case control.Wait():
                begin(self._wait(connection, request))
            case control.Output():
                begin(self._output(connection, request))
            case control.Exec():
                begin(inside.run(connection, request))
            case control.Cancel():
                begin(changes.cancel(connection, request))
            case control.Remote():
                begin(self._remote(connection, request))
            case control.Signal() if request.command:
                inside.signal(connection, request)
            case control.Signal():
                begin(changes.signal(connection, request))
            case control.Input() if request.command:
                begin(inside.input(connection, request))
            case control.Input():
                begin(self.attending.input(connection, request))
            case control.Detach():
                begin(self.attending.detach(connection, request))
            case control.Clean():
                begin(cleaned(self._parts, self._names, connection, request))
            case control.Retry():
                begin(changes.retry(connection, request))
            case control.Hold():
                begin(changes.hold(connection, request))
            case control.Release():
                begin(changes.release(connection, request))
            case control.Prio():
                begin(gating.prioritize(connection, request))
            case control.Drain():
                begin(changes.drain(connection, request))
            case control.Overview():
                begin(self._seen(connection, request))
            case control.CancelRemote():
                changes.cancel_remote(connection, request)
            case control.Resize() if request.command:
                inside.resize(connection, request)
            case control.Resize():
                self.attending.resize(connection, request)
            case control.Attend():
                self.attending.attend(connection, request)
            case control.Groups():
                gating.groups(connection, request)
            case control.Group():
                gating.group(connection, request)
            case control.Undrain():
                changes.undrain(connection, request)
            case control.Leave():
                changes.leave(connection, request)
            case control.Forget():
                changes.forget(connection, request)
            case control.Invite():
                joining.invite(connection, request)
            case control.Revoke():
                joining.revoke(connection, request)
            case control.Rotate():
                joining.rotate(connection, request)
            case control.Restart():
                joining.restart(connection, request)
            case control.Info():
                connection.ok(request.id, node_answers.agent_object(self._parts))
            case control.Nodes():
                connection.ok(request.id, {"nodes": node_answers.nodes_object(self._parts)})
            case control.Policy():
                connection.ok(request.id, self._policy())
            case control.Stats():
                connection.ok(request.id, {"counters": self._stats()})
            case control.Checkup():
                connection.ok(request.id, self._checkup(connection))
            case control.Settings():
                connection.ok(request.id, settings_object(self._parts))
            case control.Stop():
                self._stop(connection, request)
            case _:
                assert_never(request)

    async def _durable(self) -> None:
        """Wait until everything decided so far is on disk and has gone out. While the disk is full nothing gets there:
        then what is there is what is true."""
        store, reached = self._parts.store, asyncio.Event()
        if not store.is_stalled:
            self._parts.release.outward(reached.set)
        while not store.is_stalled and not reached.is_set():
            with contextlib.suppress(TimeoutError):  # it may be that very commit that finds no room
                async with asyncio.timeout(STALLED_LOOK_S):
                    await reached.wait()

    # -- verbs ---------------------------------------------------------------------------------------------------------

    async def _readable(self, connection: Connection) -> None:
        """Wait until everything decided so far is durable, and this client takes more: what it is to be told is made then."""
        await self._durable()
        await connection.drain()

    def _task_object(self, record: TaskRecord, spec: TaskSpec) -> dict[str, object]:
        node = self._parts.node
        told = answers.task_here(node, record, spec, user_shown(spec, self._user))
        return told | {"unreachable_since": answers.unreachable_since(node, record, self._parts.now())}

    async def _tasks(self, connection: Connection, request: control.Tasks) -> None:
        await self._readable(connection)
        store = self._parts.access.store(connection.caller)
        criteria = Criteria.of(request, map(self._names.meant, request.tasks))
        ended_after = self._parts.now().wall_s - request.ended_within_s
        is_large = request.limit > LISTED_HERE_MAX or request.gathered
        if is_large or not connection.caller.sees_all or not criteria.is_of_columns:
            listed = functools.partial(store.listed_beside, gathered=request.gathered)
            found, truncated = await asyncio.to_thread(
                listed, self._parts.store.path, ended_after, request.limit, criteria
            )
        else:
            found, truncated = store.listed(ended_after, request.limit, states=criteria.states, node=request.node)
        damaged: list[Damage] = []
        home = self._parts.config.node
        first = 0
        while first < len(found):
            some = found[first : first + SHOWN_AT_A_TIME]
            first += len(some)
            page = store.read([row.first for row in some])
            together = {task_name(home, *row.first[:2]): row for row in some if row.count > 1}
            damaged += page.damaged
            if hiding := [together[damage.task] for damage in page.damaged if damage.task in together]:
                found += await asyncio.to_thread(store.behind, self._parts.store.path, hiding)
            tasks = []
            for record, spec in page.rows:
                shown = self._task_object(record, spec)
                if request.states and shown["state"] not in request.states:
                    continue
                if shown["state"] == "queued":
                    shown["reason"] = self._why_waiting(record)
                if record.task in together:
                    shown |= answers.together(shown, together[record.task])
                if request.limit <= LISTED_HERE_MAX:
                    shown |= answers.error_line(self._parts.spool, record)
                tasks.append(shown)
            await self._hand_over(connection, request.id, tasks)
        if criteria == Criteria():
            damaged += store.damaged_besides(damaged, request.limit)
        answer = {"tasks": [], "truncated": truncated, "unfinished": store.counts() if truncated else {}}
        connection.ok(request.id, answer | {"damaged": answers.damaged(damaged)})

    async def _select(self, connection: Connection, request: control.Select) -> None:
        await self._readable(connection)
        await select(self._parts, self._names, connection, request)

    async def _history(self, connection: Connection, request: control.History) -> None:
        await self._readable(connection)
        store, since = self._parts.access.store(connection.caller), request.since
        left = request.limit
        after = None
        if request.oldest_first and left is not None:
            after = store.before_the_last(since, left)
        truncated = after is not None
        tasks: list[dict[str, object]] = []
        damaged: list[dict[str, object]] = []
        while True:
            page = store.ended(since, after, SHOWN_AT_A_TIME, oldest_first=request.oldest_first)
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
            damaged += answers.damaged(page.damaged)
            tasks = [self._task_object(record, spec) | answers.used(record) for record, spec in rows]
            tasks = await self._hand_over(connection, request.id, tasks)
        connection.ok(request.id, {"tasks": tasks, "truncated": truncated, "damaged": damaged})

    async def _remote(self, connection: Connection, request: control.Remote) -> None:
        await self._readable(connection)
        found = remote_task_view.seen_by(self._parts, connection.caller)
        shown = found[: request.limit]
        for first in range(0, len(shown), SHOWN_AT_A_TIME):
            page = shown[first : first + SHOWN_AT_A_TIME]
            tasks = [remote_task_view.listed(self._parts, guest, user_shown(guest.spec, self._user)) for guest in page]
            await self._hand_over(connection, request.id, tasks)
        connection.ok(request.id, {"tasks": [], "truncated": len(found) > len(shown)})

    def _why_waiting(self, record: TaskRecord) -> str:
        return answers.why_waiting(self._parts.node, self._parts.node.home.tasks.get(record.uid), record)

    async def _why(self, connection: Connection, request: control.Why) -> None:
        self._parts.journal.settle()
        await self._readable(connection)
        connection.ok(request.id, await self._reasons.about(request.task))

    async def _usage(self, connection: Connection, request: control.Usage) -> None:
        await connection.drain()
        connection.ok(request.id, {"tasks": await self._live.about(request.tasks)})

    async def _seen(self, connection: Connection, request: control.Overview) -> None:
        await self._readable(connection)
        connection.ok(request.id, self._overviews.of(connection.caller).about(request))

    async def _hand_over(
        self, connection: Connection, number: int, tasks: list[dict[str, object]], tokens: int = PAGE_TOKENS
    ) -> list[dict[str, object]]:
        """Send these ahead, at the client's pace, others having their turn → the empty list for the next. A user who is
        over the rate waits."""
        await connection.tell(number, {"tasks": tasks})
        if self._parts.access.is_system:
            await self._parts.access.quotas.wait_for_tokens(connection.caller.counted_as, tokens)
        await asyncio.sleep(0)
        return []

    async def _show(self, connection: Connection, request: control.Show) -> None:
        self._parts.journal.settle()
        await self._readable(connection)
        shown: list[dict[str, object]] = []
        store = self._parts.store
        for ref in request.tasks:
            if request.at and (guest := remote_task_view.find(self._parts, ref)) is not None:
                shown.append(remote_task_view.shown(self._parts, guest, user_shown(guest.spec, self._user)))
                continue
            counter = self._names.meant(ref).counter
            if not store.has(counter, None):
                raise self._names.unknown(ref)
            spec = store.spec(counter)
            each, terms = store.each(counter), store.terms(counter)
            async for page in self._names.pages(ref, SHOWN_WHOLE_AT_A_TIME):
                shown += [self._shown_whole(record, member_spec(spec, each, record.task), terms) for record in page]
                if len(shown) >= SHOWN_WHOLE_AT_A_TIME:
                    shown = await self._hand_over(connection, request.id, shown, len(shown))
        connection.ok(request.id, {"tasks": shown})

    def _shown_whole(self, record: TaskRecord, submitted: TaskSpec, terms: SubmitOptions) -> dict[str, object]:
        store, spec = self._parts.store, as_recorded(submitted, record)
        task = self._task_object(record, spec)
        if task["state"] == "queued":
            task["reason"] = self._why_waiting(record)
        task |= answers.error_line(self._parts.spool, record)
        task |= answers.detail(spec, record, answers.devices_of(self._parts.node, record))
        task |= answers.output_gone(store, record) | endings_object(store, record, spec, terms)
        task |= answers.agreed(terms, record) | answers.learned(self._parts.node.state.history, spec)
        task["history"] = [answers.step(event) for event in store.history(record.task)]
        task["decision"] = self._decisions.about(record.task)
        return task

    async def _events(self, connection: Connection, request: control.Events) -> None:
        self._parts.journal.settle()
        await self._readable(connection)
        store = self._parts.access.store(connection.caller)
        names = [self._told_of(ref, follow=request.follow) for ref in request.tasks]
        with self._parts.journal.followed() as news:
            last = store.last_event()  # no await since it is followed: what comes later is told to us
            shown = store.events(0, request.limit, newest=True, what=request.what, tasks=names) if request.limit else []
            while True:
                if shown:
                    await connection.tell(request.id, {"events": [answers.event_object(event) for event in shown]})
                if not request.follow:
                    break
                shown = store.events(last, EVENTS_AT_A_TIME, what=request.what, tasks=names)
                last = shown[-1].number if shown else last
                if not shown:
                    await news.wait()
                    news.clear()
        connection.ok(request.id, {"events": []})

    def _told_of(self, ref: str, *, follow: bool) -> str:
        """The whole id of a task of this home, or of another that was here. Raises NoSuchTask."""
        name = self._names.full(ref)
        home = name.partition("/")[0]
        if home == self._parts.config.node:
            return self._names.known(ref)
        if not follow and not self._parts.store.events(0, 1, newest=True, tasks=[name]):
            why = f"its home is {home}, and nothing of it was ever here"
            raise NoSuchTask(f"no such task: {ref}", why=why, hint="ask the agent there")
        return name

    def _policy(self) -> dict[str, object]:
        if not self._policies:
            self._policies = registry.policies()
        chosen = self._parts.node.state.policies
        return {
            "policies": self._policies,
            "presets": registry.presets(),
            "in_force": {"preset": chosen.name, "description": chosen.description, **chosen.names},
        }

    def _stats(self) -> dict[str, int]:
        merged = dict(self._parts.node.state.counts)
        for name, count in self._parts.counters.items():
            merged[name] = merged.get(name, 0) + count
        merged[metrics.INBOX_DROPPED] = self._parts.inbox.dropped
        merged[metrics.COMMITS_STALLED] = int(self._parts.store.is_stalled)
        return merged

    def _checkup(self, connection: Connection) -> dict[str, object]:
        told = checkup_object(self._parts)
        return told if connection.caller.sees_all else told | {"damaged": []}

    def _stop(self, connection: Connection, request: control.Stop) -> None:
        connection.ok(request.id, {"pid": os.getpid()})
        self._parts.run.stop(Ending.END_TASKS if request.all else Ending.STOP)

    # -- watching ------------------------------------------------------------------------------------------------------

    def changed(self, action: TaskChanged) -> None:
        """Tell whoever watches this task."""
        self.attending.changed(action)
        self._parts.saving.changed(action)
        for watch in list(self._watches.get(action.record.task, ())):
            watch.tell(action.record, running=action.running)
        if action.record.state.is_final and action.record.exit is not None:
            exit_ = action.record.exit
            key = execution_key(action.record.uid, action.record.attempt)
            self._parts.output.ended(key, exit_.stdout_bytes, exit_.stderr_bytes)

    def waits(self, task: str, why: str) -> None:
        """Tell whoever watches this task, which has ended elsewhere, why its result is not here yet."""
        for watch in list(self._watches.get(task, ())):
            watch.tell_waits(task, why)

    def follows(self, task: str) -> bool:
        """Whether a client watches this task right now."""
        return task in self._watches

    def _watch(self, names: set[str]) -> TaskWatch:
        watch = TaskWatch(set())
        self._watch_more(watch, names)
        return watch

    def _watch_more(self, watch: TaskWatch, names: set[str]) -> None:
        watch.tasks |= names
        for name in names:
            self._watches.setdefault(name, set()).add(watch)

    def _unwatch(self, watch: TaskWatch) -> None:
        for name in watch.tasks:
            watches = self._watches.get(name)
            if watches is not None:
                watches.discard(watch)
                if not watches:
                    del self._watches[name]

    async def _wait(self, connection: Connection, request: control.Wait) -> None:
        await self._durable()
        await self._names.all_known(request.tasks)
        watch, charge = TaskWatch(set()), self._waited.charge(connection)

        def begin(names: set[str]) -> None:
            charge.add(max(len(names) - 1, 0))  # the name of a task, or of an array, counts already
            self._watch_more(watch, names)

        try:
            timed_out = not await WaitRequest(self._parts, self._names, connection, request, watch, begin).run()
            connection.ok(request.id, {"timed_out": timed_out})
        finally:
            self._unwatch(watch)
            charge.end()

    # -- output --------------------------------------------------------------------------------------------------------

    async def _output(self, connection: Connection, request: control.Output) -> None:
        await self._durable()
        if request.at and (guest := remote_task_view.find(self._parts, request.task)) is not None:
            await remote_task_view.send_output(self._parts, connection, request, guest)
            return
        record = self._names.single(request.task)
        watch = self._watch({record.task})  # no await since the store was read: what happens later is told
        try:
            await OutputStream(self._parts, connection, request, watch).run(record)
        finally:
            self._unwatch(watch)
