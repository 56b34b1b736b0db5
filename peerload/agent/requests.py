"""What each verb of the control socket does."""

from __future__ import annotations

import asyncio
import os
import pwd
from typing import TYPE_CHECKING

from peerload.agent import answers
from peerload.agent.changes import Changes
from peerload.agent.endings import Endings
from peerload.agent.naming import Names
from peerload.agent.streams import OutputStream, Watch
from peerload.agent.why import Why
from peerload.core.work import with_more_memory
from peerload.model.errors import NoSuchTask
from peerload.model.task import TaskState, execution_key
from peerload.policy import registry
from peerload.wire import control

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.agent.connection import Connection
    from peerload.agent.parts import Parts
    from peerload.agent.pending import Decisions, Pending
    from peerload.model.actions import TaskChanged
    from peerload.model.task import TaskRecord, TaskSpec

SHOWN_AT_A_TIME = 256
"""Tasks put together before they are sent and others have their turn."""
EVENTS_AT_A_TIME = 256


class Requests:
    """The verbs. Reads run when everything decided before them is durable (`Release.outward`), as work of their client:
    whatever they raise is told to it alone."""

    def __init__(self, parts: Parts, pending: Pending, decisions: Decisions) -> None:
        self._parts = parts
        self._decisions = decisions
        self._names = Names(parts)
        self._reasons = Why(parts, self._names, decisions)
        self.endings = Endings(parts)
        self._changes = Changes(parts, pending, self._names, self.endings, self._durable)
        self._watches: dict[str, set[Watch]] = {}
        self._users: dict[int, str] = {}
        self._policies: dict[str, list[str]] = {}

    def handle(self, connection: Connection, request: control.Request) -> None:
        """Do it now, or start what does it."""
        spawn = connection.spawn
        changes = self._changes
        now: dict[type, Callable[[], None]] = {
            control.Submit: lambda: spawn(request.id, changes.submit(connection, request)),  # type: ignore[arg-type]
            control.Tasks: lambda: spawn(request.id, self._tasks(connection, request)),  # type: ignore[arg-type]
            control.History: lambda: spawn(request.id, self._history(connection, request)),  # type: ignore[arg-type]
            control.Show: lambda: spawn(request.id, self._show(connection, request)),  # type: ignore[arg-type]
            control.Why: lambda: spawn(request.id, self._why(connection, request)),  # type: ignore[arg-type]
            control.Events: lambda: spawn(request.id, self._events(connection, request)),  # type: ignore[arg-type]
            control.Wait: lambda: spawn(request.id, self._wait(connection, request)),  # type: ignore[arg-type]
            control.Output: lambda: spawn(request.id, self._output(connection, request)),  # type: ignore[arg-type]
            control.Cancel: lambda: spawn(request.id, changes.cancel(connection, request)),  # type: ignore[arg-type]
            control.Signal: lambda: spawn(request.id, changes.signal(connection, request)),  # type: ignore[arg-type]
            control.Retry: lambda: spawn(request.id, changes.retry(connection, request)),  # type: ignore[arg-type]
            control.Hold: lambda: spawn(request.id, changes.hold(connection, request)),  # type: ignore[arg-type]
            control.Release: lambda: spawn(request.id, changes.release(connection, request)),  # type: ignore[arg-type]
            control.Drain: lambda: spawn(request.id, changes.drain(connection, request)),  # type: ignore[arg-type]
            control.Undrain: lambda: changes.undrain(connection, request),  # type: ignore[arg-type]
            control.Leave: lambda: changes.leave(connection, request),  # type: ignore[arg-type]
            control.Forget: lambda: changes.forget(connection, request),  # type: ignore[arg-type]
            control.Info: lambda: connection.ok(request.id, answers.agent_object(self._parts)),
            control.Nodes: lambda: connection.ok(request.id, {"nodes": answers.nodes_object(self._parts)}),
            control.Policy: lambda: connection.ok(request.id, self._policy()),
            control.Stats: lambda: connection.ok(request.id, {"counters": self._stats()}),
            control.Stop: lambda: self._stop(connection, request),  # type: ignore[arg-type]
        }
        now[type(request)]()

    async def _durable(self) -> None:
        """Wait until everything decided so far is on disk and has gone out. While the disk is full nothing gets there:
        then what is there is what is true."""
        if self._parts.store.is_stalled:
            return
        reached = asyncio.Event()
        self._parts.release.outward(reached.set)
        await reached.wait()

    def _user(self) -> str:
        uid = os.getuid()
        if uid not in self._users:
            try:
                self._users[uid] = pwd.getpwuid(uid).pw_name
            except KeyError:
                self._users[uid] = str(uid)
        return self._users[uid]

    # -- verbs ---------------------------------------------------------------------------------------------------------

    def _task_object(self, record: TaskRecord, spec: TaskSpec, user: str) -> dict[str, object]:
        return answers.task_here(self._parts.node, record, spec, user)

    async def _tasks(self, connection: Connection, request: control.Tasks) -> None:
        await self._durable()
        states = {"leased" if state == "running" else state for state in request.states}
        listing = self._parts.store.list_tasks(
            ended_after=self._parts.now().wall_s - request.ended_within_s,
            limit=request.limit,
            states=tuple(states),
            node=request.node,
        )
        user = self._user()
        tasks: list[dict[str, object]] = []
        for record, spec in listing.rows:
            if len(tasks) >= SHOWN_AT_A_TIME:
                tasks = await self._hand_over(connection, request.id, tasks)
            shown = self._task_object(record, spec, user)
            if request.states and shown["state"] not in request.states:
                continue
            if shown["state"] == "queued":
                shown["reason"] = self._why_waiting(record)
            tasks.append(shown)
        counts = self._parts.store.counts() if listing.truncated else {}
        answer = {"tasks": tasks, "truncated": listing.truncated, "unfinished": counts}
        connection.ok(request.id, answer | {"damaged": answers.damaged(listing.damaged)})

    async def _history(self, connection: Connection, request: control.History) -> None:
        await self._durable()
        store, user, since = self._parts.store, self._user(), request.since
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
            tasks = [self._task_object(record, spec, user) | answers.used(record) for record, spec in rows]
            tasks = await self._hand_over(connection, request.id, tasks)
        connection.ok(request.id, {"tasks": tasks, "truncated": truncated, "damaged": damaged})

    def _why_waiting(self, record: TaskRecord) -> str:
        return answers.why_waiting(self._parts.node.home.tasks.get(record.uid), record)

    async def _why(self, connection: Connection, request: control.Why) -> None:
        self._parts.journal.settle()
        await self._durable()
        connection.ok(request.id, await self._reasons.about(request.task))

    async def _hand_over(
        self, connection: Connection, number: int, tasks: list[dict[str, object]]
    ) -> list[dict[str, object]]:
        """Send these ahead, at the client's pace, others having their turn → the empty list for the next."""
        connection.more(number, {"tasks": tasks})
        await connection.drain()
        await asyncio.sleep(0)
        return []

    async def _show(self, connection: Connection, request: control.Show) -> None:
        self._parts.journal.settle()
        await self._durable()
        shown: list[dict[str, object]] = []
        store = self._parts.store
        for ref in request.tasks:
            counter, index = self._names.resolve(ref)
            rows = store.task_rows(counter, index)
            if not rows:
                raise NoSuchTask(f"no such task: {ref}", hint="peerload ls")
            for record, submitted in rows:
                if len(shown) >= SHOWN_AT_A_TIME:
                    shown = await self._hand_over(connection, request.id, shown)
                spec = with_more_memory(submitted, record.gpu_mem_bytes, alone=record.gpu_alone)
                task = self._task_object(record, spec, self._user())
                if task["state"] == "queued":
                    task["reason"] = self._why_waiting(record)
                task |= answers.detail(spec, record, answers.devices_of(self._parts.node, record))
                task["history"] = [answers.step(event) for event in store.history(record.task)]
                task["decision"] = self._decisions.about(record.task)
                shown.append(task)
        connection.ok(request.id, {"tasks": shown})

    async def _events(self, connection: Connection, request: control.Events) -> None:
        self._parts.journal.settle()
        await self._durable()
        store = self._parts.store
        names = [self._told_of(ref, follow=request.follow) for ref in request.tasks]
        with self._parts.journal.followed() as news:
            last = store.last_event()  # no await since it is followed: what comes later is told to us
            shown = store.events(0, request.limit, newest=True, what=request.what, tasks=names) if request.limit else []
            while True:
                if shown:
                    connection.more(request.id, {"events": [answers.event_object(event) for event in shown]})
                    await connection.drain()
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
        merged["inbox dropped"] = self._parts.inbox.dropped
        merged["commits waiting for room on the disk"] = int(self._parts.store.is_stalled)
        return merged

    def _stop(self, connection: Connection, request: control.Stop) -> None:
        connection.ok(request.id, {"pid": os.getpid()})
        self._parts.stop(end_tasks=request.all)

    # -- watching ------------------------------------------------------------------------------------------------------

    def changed(self, action: TaskChanged) -> None:
        """Tell whoever watches this task."""
        for watch in list(self._watches.get(action.record.task, ())):
            watch.tell(action.record, running=action.running)
        if action.record.state.is_final and action.record.exit is not None:
            exit_ = action.record.exit
            key = execution_key(action.record.uid, action.record.attempt)
            self._parts.output.ended(key, exit_.stdout_bytes, exit_.stderr_bytes)

    def _watch(self, names: set[str]) -> Watch:
        watch = Watch(names)
        for name in names:
            self._watches.setdefault(name, set()).add(watch)
        return watch

    def _unwatch(self, watch: Watch) -> None:
        for name in watch.tasks:
            watches = self._watches.get(name)
            if watches is not None:
                watches.discard(watch)
                if not watches:
                    del self._watches[name]

    async def _wait(self, connection: Connection, request: control.Wait) -> None:
        await self._durable()
        records = [record for ref in request.tasks for record in self._names.records(ref)]
        # No await between reading the store and watching: what ends later is told to the watch.
        left = {record.task for record in records if not record.state.is_final}
        watch = self._watch(left)
        try:
            ended = [record for record in records if record.state.is_final]
            unsure = [record for record in records if record.state is TaskState.UNKNOWN]
            timed_out = not await self._wait_for(connection, request, watch, ended, unsure, set(left))
            connection.ok(request.id, {"timed_out": timed_out})
        finally:
            self._unwatch(watch)

    async def _wait_for(
        self,
        connection: Connection,
        request: control.Wait,
        watch: Watch,
        ended: list[TaskRecord],
        unsure: list[TaskRecord],
        left: set[str],
    ) -> bool:
        """Tell each end as it comes, and of which it has become unknown, once; False if time ran out first."""
        told = {record.task for record in unsure}
        for record in ended + unsure:
            connection.more(request.id, answers.ended_object(record))
        if (request.any and ended) or not left:
            return True
        try:
            async with asyncio.timeout(request.timeout_s):
                while left:
                    await watch.event.wait()
                    watch.event.clear()
                    for name, record in list(watch.records.items()):
                        del watch.records[name]
                        if record.state.is_final and name in left:
                            left.discard(name)
                            connection.more(request.id, answers.ended_object(record))
                            if request.any:
                                return True
                        elif record.state is not TaskState.UNKNOWN:
                            told.discard(name)
                        elif name not in told:
                            told.add(name)
                            connection.more(request.id, answers.ended_object(record))
                    await connection.drain()
        except TimeoutError:
            return False
        return True

    # -- output --------------------------------------------------------------------------------------------------------

    async def _output(self, connection: Connection, request: control.Output) -> None:
        await self._durable()
        record = self._names.single(request.task)
        watch = self._watch({record.task})  # no await since the store was read: what happens later is told
        try:
            await OutputStream(self._parts, connection, request, watch).run(record)
        finally:
            self._unwatch(watch)
