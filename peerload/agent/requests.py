"""What each verb of the control socket does."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pwd
import re
from typing import TYPE_CHECKING

import msgspec

from peerload.agent import answers
from peerload.agent.environment import variables_of
from peerload.agent.streams import OutputStream, Watch
from peerload.core.work import HomePhase
from peerload.model.errors import BadRequest, NoSuchTask
from peerload.model.events import CancelRequested, SignalRequested, TaskSubmitted
from peerload.model.task import ARGV_BYTES_MAX, ARRAY_MEMBERS_MAX, SCRATCH, execution_key
from peerload.policy import registry
from peerload.wire import control

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.agent.connection import Connection
    from peerload.agent.parts import Parts
    from peerload.agent.pending import Decisions, Pending
    from peerload.model.actions import TaskChanged
    from peerload.model.task import TaskRecord

SHOWN_AT_A_TIME = 256
"""Tasks put together before they are sent and others have their turn."""
EVENTS_AT_A_TIME = 256
REF = re.compile(r"(?:(?P<home>[a-z0-9-]{1,40})/)?(?P<counter>[0-9]{1,18})(?:\.(?P<index>[0-9]{1,9}))?")


class Requests:
    """The verbs. Reads run when everything decided before them is durable (`Release.outward`), as work of their client:
    whatever they raise is told to it alone."""

    def __init__(self, parts: Parts, pending: Pending, decisions: Decisions) -> None:
        self._parts = parts
        self._pending = pending
        self._decisions = decisions
        self._watches: dict[str, set[Watch]] = {}
        self._users: dict[int, str] = {}
        self._policies: dict[str, list[str]] = {}

    def handle(self, connection: Connection, request: control.Request) -> None:
        """Do it now, or start what does it."""
        now: dict[type, Callable[[], None]] = {
            control.Submit: lambda: connection.spawn(request.id, self._submit(connection, request)),  # type: ignore[arg-type]
            control.Tasks: lambda: connection.spawn(request.id, self._tasks(connection, request)),  # type: ignore[arg-type]
            control.History: lambda: connection.spawn(request.id, self._history(connection, request)),  # type: ignore[arg-type]
            control.Show: lambda: connection.spawn(request.id, self._show(connection, request)),  # type: ignore[arg-type]
            control.Wait: lambda: connection.spawn(request.id, self._wait(connection, request)),  # type: ignore[arg-type]
            control.Output: lambda: connection.spawn(request.id, self._output(connection, request)),  # type: ignore[arg-type]
            control.Events: lambda: connection.spawn(request.id, self._events(connection, request)),  # type: ignore[arg-type]
            control.Cancel: lambda: connection.spawn(request.id, self._cancel(connection, request)),  # type: ignore[arg-type]
            control.Signal: lambda: connection.spawn(request.id, self._signal(connection, request)),  # type: ignore[arg-type]
            control.Info: lambda: connection.ok(request.id, answers.agent_object(self._parts)),
            control.Nodes: lambda: connection.ok(request.id, {"nodes": answers.nodes(self._parts.node)}),
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

    # -- naming tasks --------------------------------------------------------------------------------------------------

    def _resolve(self, ref: str) -> tuple[int, int | None]:
        """A name as (counter, index). Raises NoSuchTask or BadRequest."""
        node = self._parts.config.node
        if ref.startswith("@"):
            last = self._parts.store.last_counter()
            if last is None:
                raise NoSuchTask("@ stands for your last task, and there is none yet", hint="peerload submit CMD")
            ref = f"{last}{ref[1:]}"
        parsed = REF.fullmatch(ref)
        if parsed is None:
            raise BadRequest(f"{ref!r} is no task id", why="ids look like 42, 42.7, ws1/42 or @", hint="peerload ls")
        if parsed["home"] not in (None, node):
            raise NoSuchTask(f"no task {ref} here", why=f"its home is {parsed['home']}", hint="ask the agent there")
        return int(parsed["counter"]), int(parsed["index"]) if parsed["index"] is not None else None

    def _name(self, ref: str) -> str:
        """A name as the id of a task or an array, whose home may be elsewhere."""
        parsed = REF.fullmatch(ref)
        if parsed is not None and parsed["home"] not in (None, self._parts.config.node):
            return ref
        counter, index = self._resolve(ref)
        return f"{self._parts.config.node}/{counter}" + ("" if index is None else f".{index}")

    def _records(self, ref: str) -> list[TaskRecord]:
        records = self._parts.store.records(*self._resolve(ref))
        if not records:
            raise NoSuchTask(f"no such task: {ref}", hint="peerload ls")
        return records

    def _single(self, ref: str) -> TaskRecord:
        records = self._records(ref)
        if len(records) > 1:
            raise BadRequest(f"{ref} is an array", why="name one of its members", hint=f"such as {records[0].task}")
        return records[0]

    def _user(self) -> str:
        uid = os.getuid()
        if uid not in self._users:
            try:
                self._users[uid] = pwd.getpwuid(uid).pw_name
            except KeyError:
                self._users[uid] = str(uid)
        return self._users[uid]

    # -- verbs ---------------------------------------------------------------------------------------------------------

    async def _submit(self, connection: Connection, request: control.Submit) -> None:
        indices = _members(request)
        spec = request.spec
        size = len(spec.environment) + sum(len(word) for word in spec.argv)
        self._parts.disk.admit(max(len(indices), 1), size)
        directories = self._parts.directories
        here = directories.seen_lately(request.spec.directory) or await directories.look(request.spec.directory)
        digest = hashlib.sha256(msgspec.msgpack.encode((request.spec, request.array))).digest()
        before = self._parts.store.submission_of(request.token)
        number = self._pending.expect(connection, request.id)
        self._parts.inbox.put(
            TaskSubmitted(number, request.token, digest, request.spec, indices, directory_here=here, before=before)
        )

    def _running_at(self, record: TaskRecord) -> float:
        task = self._parts.node.home.tasks.get(record.uid)
        return task.running_at if task is not None and task.record.attempt == record.attempt else 0.0

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
            shown = answers.task_object(record, spec, user, running_at=self._running_at(record))
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
            tasks = [answers.task_object(record, spec, user) | answers.used(record) for record, spec in rows]
            tasks = await self._hand_over(connection, request.id, tasks)
        connection.ok(request.id, {"tasks": tasks, "truncated": truncated, "damaged": damaged})

    def _why_waiting(self, record: TaskRecord) -> str:
        task = self._parts.node.home.tasks.get(record.uid)
        if task is None:
            return record.reason
        if task.stranded_because:
            return f"waits for another node: {task.stranded_because}"
        if task.phase is HomePhase.OFFERED:
            return f"offered to {task.offered_to}"
        return "waits for room"

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
            counter, index = self._resolve(ref)
            rows = store.task_rows(counter, index)
            if not rows:
                raise NoSuchTask(f"no such task: {ref}", hint="peerload ls")
            for record, spec in rows:
                if len(shown) >= SHOWN_AT_A_TIME:
                    shown = await self._hand_over(connection, request.id, shown)
                running_at = self._running_at(record)
                task = answers.task_object(record, spec, self._user(), running_at=running_at)
                if task["state"] == "queued":
                    task["reason"] = self._why_waiting(record)
                task |= answers.detail(spec, record)
                task["history"] = [answers.step(event) for event in store.history(record.task)]
                task["decision"] = self._decisions.about(record.task)
                shown.append(task)
        connection.ok(request.id, {"tasks": shown})

    async def _events(self, connection: Connection, request: control.Events) -> None:
        self._parts.journal.settle()
        await self._durable()
        names = [self._name(ref) for ref in request.tasks]
        store = self._parts.store
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

    async def _cancel(self, connection: Connection, request: control.Cancel) -> None:
        await self._durable()
        names = [record.task for ref in request.tasks for record in self._records(ref)]
        number = self._pending.expect(connection, request.id)
        self._parts.inbox.put(CancelRequested(number, tuple(names), request.signal, request.force))

    async def _signal(self, connection: Connection, request: control.Signal) -> None:
        await self._durable()
        records = self._records(request.task)
        number = self._pending.expect(connection, request.id)
        self._parts.inbox.put(SignalRequested(number, records[0].task, request.signal))

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
        records = [record for ref in request.tasks for record in self._records(ref)]
        # No await between reading the store and watching: what ends later is told to the watch.
        left = {record.task for record in records if not record.state.is_final}
        watch = self._watch(left)
        try:
            ended = [record for record in records if record.state.is_final]
            timed_out = not await self._wait_for(connection, request, watch, ended, set(left))
            connection.ok(request.id, {"timed_out": timed_out})
        finally:
            self._unwatch(watch)

    async def _wait_for(
        self,
        connection: Connection,
        request: control.Wait,
        watch: Watch,
        ended: list[TaskRecord],
        left: set[str],
    ) -> bool:
        """Tell each end as it comes; False if time ran out first."""
        for record in ended:
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
                    await connection.drain()
        except TimeoutError:
            return False
        return True

    # -- output --------------------------------------------------------------------------------------------------------

    async def _output(self, connection: Connection, request: control.Output) -> None:
        await self._durable()
        record = self._single(request.task)
        watch = self._watch({record.task})  # no await since the store was read: what happens later is told
        try:
            await OutputStream(self._parts, connection, request, watch).run(record)
        finally:
            self._unwatch(watch)


def _members(request: control.Submit) -> tuple[int, ...]:
    """The members of the array, () for a single task. Raises BadRequest for what no task may be."""
    size = sum(len(word) for word in request.spec.argv)
    if size > ARGV_BYTES_MAX:
        raise BadRequest(f"the command line has {size} bytes", why=f"at most {ARGV_BYTES_MAX} are allowed")
    if any(b"\0" in word for word in (*request.spec.argv, request.spec.directory)):
        raise BadRequest("the command line has a NUL byte in it")
    if request.spec.directory != SCRATCH and not request.spec.directory.startswith(b"/"):
        raise BadRequest("the directory is no absolute path", why=answers.text(request.spec.directory))
    variables_of(request.spec.environment)
    indices: set[int] = set()
    for first, last, step in request.array:
        if last < first:
            raise BadRequest(f"the array range {first}-{last} is empty")
        if len(indices) + (last - first) // step + 1 > ARRAY_MEMBERS_MAX:
            raise BadRequest("the array is too large", why=f"at most {ARRAY_MEMBERS_MAX} members are allowed")
        indices.update(range(first, last + 1, step))
    return tuple(sorted(indices))
