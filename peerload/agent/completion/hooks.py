"""Hooks: commands and messages at the end of tasks; those of the node (`[hooks]`), and those of users (`--notify CMD`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING

from peerload import notification
from peerload.agent.runtime import child_environment, run_command
from peerload.agent.store.maintenance import pending_notifications
from peerload.model import metrics
from peerload.model.actions import SpawnTask
from peerload.model.errors import BadRequest, PeerloadError
from peerload.model.events import TaskEnded, TaskLost
from peerload.model.metrics import labelled
from peerload.model.task import (
    SCRATCH,
    SINGLE,
    Exit,
    TaskSpec,
    TaskState,
    how_it_ended,
    order_of,
    task_name,
    variables_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from peerload.agent.accounts import UserServices
    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.output.spool import Spool
    from peerload.agent.runtime import AgentInfo
    from peerload.agent.store.maintenance import DueJob
    from peerload.agent.store.reader import StoreReader
    from peerload.agent.store.store import Store
    from peerload.agent.store.write_ahead import EventLog
    from peerload.model.actions import PutEvent, TaskChanged
    from peerload.model.config import HooksSettings
    from peerload.model.events import Event
    from peerload.model.task import TaskRecord


log = logging.getLogger("peerload.agent")

WAITING_MAX = 256
"""Maximum number of waiting notifications; more are dropped."""
AT_A_TIME = 4
TRIES_MAX = 5
PAUSE_S = 2.0
"""Pause before the second try; it doubles."""
TIME_S_MAX = 60.0
"""Time limit of a try, after which it is killed."""
KEPT_BYTES_MAX, PRINTED_BYTES_MAX = 400, 64 << 10
DELIVER = (sys.executable, "-E", "-P", "-m", "peerload.notification")
PREFIX = "notify-"
NOTICE_S_MAX = 300.0
"""Time limit of a command, after which it is killed."""
KILLED_WITHIN_S = 10.0
TAIL_BYTES = 400
"""Maximum length of the end of a command's output that is reported."""
SIGKILL = 9


def outcome_of(record: TaskRecord) -> dict[str, str]:
    facts = {"NODE": record.node, "REASON": record.reason[:1000], "STATE": record.state.value}
    facts |= {"STARTED_AT": f"{record.started_at:.3f}", "ENDED_AT": f"{record.ended_at:.3f}"}
    if record.exit is not None:
        facts |= {"EXIT_CODE": str(record.exit.exit_code), "SIGNAL": str(record.exit.signal or "")}
    return facts


def delivery_variables(settings: HooksSettings, target: str, *, signs: bool = True) -> dict[str, str]:
    """The variables that `notification` needs besides the facts. signs: webhooks are signed."""
    found = {"TARGET": target, "SECRET_FILE": settings.secret_file if signs else "", "SENDMAIL": settings.sendmail}
    return {f"PEERLOAD_NOTIFY_{name}": value for name, value in found.items()}


class NodeHooks:
    """Hooks of the node: commands and messages when any task of this home has ended or failed, or a node is dead.

    They run as children of the agent, with its rights. The queue, their number at a time, the time of a try and the number of
    tries are limited. A notification that fails, or does not fit into the queue, becomes an event and is counted. Unlike those of
    users (`--notify`), notifications are lost when the agent stops. Call it only from the loop's thread.
    """

    def __init__(self, info: AgentInfo, store: Store, journal: EventLog) -> None:
        self._info = info
        self._store = store
        self._journal = journal
        self._settings = info.config.hooks
        self._waiting: asyncio.Queue[tuple[str, str, dict[str, str]]] = asyncio.Queue(WAITING_MAX)
        self._is_full = False
        if self._settings.on_node_dead:
            journal.on_note(self._noted)

    @property
    def runs_at_end(self) -> bool:
        return bool(self._settings.on_end or self._settings.on_fail)

    def changed(self, action: TaskChanged) -> None:
        """Process a change of a task of this home."""
        record = action.record
        if not record.state.is_final or not self.runs_at_end:
            return
        facts = outcome_of(record) | {"TASK_ID": record.task}
        self._put("on_end", facts)
        if record.state is TaskState.FAILED:
            self._put("on_fail", facts)

    def _noted(self, event: PutEvent) -> None:
        if event.what == "node" and event.state == "dead":
            self._put("on_node_dead", {"NODE": event.node, "STATE": "dead", "REASON": event.reason})

    def _put(self, hook: str, facts: dict[str, str]) -> None:
        for target in getattr(self._settings, hook):
            try:
                self._waiting.put_nowait((hook, target, facts | {"EVENT": hook}))
            except asyncio.QueueFull:
                self._count("dropped")
                if not self._is_full:
                    self._report("dropped", hook, target, facts, f"{WAITING_MAX} are waiting; more may be dropped")
                self._is_full = True

    def _count(self, outcome: str) -> None:
        self._info.counters[labelled(metrics.HOOKS, outcome=outcome)] += 1

    def _report(self, state: str, hook: str, target: str, facts: dict[str, str], why: str) -> None:
        reason = f"{hook}: {notification.shown(target)}: {why}".replace("\n", " ")
        log.warning("hook not delivered: state=%s task=%s reason=%s", state, facts.get("TASK_ID", ""), reason)
        task, node = facts.get("TASK_ID", ""), "" if "TASK_ID" in facts else facts["NODE"]
        self._journal.record("hook", state, task=task, node=node, reason=reason)

    async def run(self) -> None:
        """Deliver notifications as they arrive, until cancelled."""
        if not self._settings.targets():
            return
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_A_TIME):
                group.create_task(self._deliver_all())

    async def _deliver_all(self) -> None:
        while True:
            hook, target, facts = await self._waiting.get()
            self._is_full = self._is_full and not self._waiting.empty()
            code, output = await self._deliver(target, facts)
            self._count("failed" if code else "delivered")
            if code:
                self._report("failed", hook, target, facts, output or f"exit code {code}")

    async def _deliver(self, target: str, facts: dict[str, str]) -> tuple[int, str]:
        """Deliver one notification, with retries → 0, or the exit code of the last try, and its output."""
        code, output = 0, ""
        for tries in range(TRIES_MAX):
            if tries:
                await asyncio.sleep(PAUSE_S * 2.0 ** (tries - 1))
            try:
                code, output = await self._try(target, self._variables(target, facts))
            except OSError as error:
                code, output = notification.LATER, f"cannot be started: {error.strerror}"
            if code != notification.LATER:
                break
        return code, output

    def _variables(self, target: str, facts: dict[str, str]) -> dict[str, str]:
        config, own = self._info.config, child_environment()
        facts = {"HOME": config.node, **facts}
        if "TASK_ID" in facts:
            with contextlib.suppress(PeerloadError):  # it may have been removed meanwhile
                spec = self._store.spec(order_of(facts["TASK_ID"])[0])
                facts |= {"NAME": spec.name, "USER": spec.user}
        own |= {f"PEERLOAD_{name}": value.replace("\0", " ") for name, value in facts.items()}
        own |= {"PEERLOAD_SOCKET": config.socket}
        return own | delivery_variables(config.hooks, target)

    async def _try(self, target: str, variables: dict[str, str]) -> tuple[int, str]:
        command = DELIVER if notification.kind_of(target) else ("/bin/sh", "-c", target)
        printed_max = PRINTED_BYTES_MAX if command is DELIVER else 0
        try:
            code, output = await run_command(
                command, TIME_S_MAX, variables, directory="/", output_bytes_max=printed_max
            )
        except TimeoutError:
            return notification.LATER, f"killed after {TIME_S_MAX:g} s"
        return code, output[:KEPT_BYTES_MAX].decode("utf-8", "backslashreplace").strip().partition(": ")[2]


# -- of users ----------------------------------------------------------------------------------------------------------


class NotificationLost(PeerloadError):
    """The command could not be started, or the launcher was lost before the command's end was known."""

    code = "notice-lost"


class NotifyHooks:
    """Notification hook: a user's command that runs at home when a task, or the last member of an array, has ended.

    The launcher starts the command, as it starts tasks, under a key of its own. So the command outlives the agent, and the next
    agent finds it again. It is started at least once, and not again when it has ended.
    """

    PREFIX = PREFIX

    def __init__(
        self, info: AgentInfo, store: StoreReader, launcher: LauncherLink, spool: Spool, users: UserServices
    ) -> None:
        self._info = info
        self._store = store
        self._launcher = launcher
        self._spool = spool
        self._users = users
        self._waiting: dict[str, asyncio.Future[Exit]] = {}
        self._running: set[str] = set()
        self._ended: dict[str, Exit] = {}

    # -- the launcher --------------------------------------------------------------------------------------------------

    def event_received(self, event: Event) -> None:
        if isinstance(event, TaskEnded):
            self._end(event.key, event.exit)
        elif isinstance(event, TaskLost):
            self._lose(event.key, event.reason)

    def listed(self, running: AbstractSet[str], ended: Mapping[str, Exit]) -> None:
        """Record the states of the commands that the launcher lists."""
        self._running = set(running)
        self._ended = {key: exit_ for key, exit_ in ended.items() if key not in self._waiting}
        for key in list(self._waiting):
            if key in ended:
                self._end(key, ended[key])
            elif key not in running:
                self._lose(key, "the launcher was lost")

    def remove_orphans(self) -> None:
        """Forget the commands without a job: they were done when an earlier agent was killed, before it could forget them."""
        job = {_key(counter, tries) for counter, tries in pending_notifications(self._store)}
        for key in (*self._running, *self._ended):
            if key not in job:
                self._launcher.signal(key, SIGKILL)
                self._let_go(key)

    def _end(self, key: str, exit_: Exit) -> None:
        waiting = self._waiting.get(key)
        if waiting is None:  # this agent was started while the command ran, and has not resumed its job yet
            self._ended[key] = exit_
        elif not waiting.done():
            waiting.set_result(exit_)

    def _lose(self, key: str, reason: str) -> None:
        self._running.discard(key)
        waiting = self._waiting.get(key)
        if waiting is not None and not waiting.done():
            waiting.set_exception(NotificationLost(reason))

    def _let_go(self, key: str) -> None:
        self._running.discard(key)
        self._ended.pop(key, None)
        self._launcher.forget(key)
        self._spool.drop(key)

    # -- one notice ----------------------------------------------------------------------------------------------------

    async def carry_out(self, job: DueJob) -> tuple[str, str]:
        """Run the command of a job, or wait for it if it runs already → the state and the reason of its event. Raises
        NotificationLost, StoreError."""
        key = _key(job.counter, job.tries)
        exit_ = self._ended.get(key)
        late = ""
        if exit_ is None:
            ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
            self._waiting[key] = ended
            try:
                if key not in self._running:
                    await self._start(key, job)
                exit_, late = await self._await_end(key, ended)
            finally:
                del self._waiting[key]
        last = self._spool.read_tail(key, 2, TAIL_BYTES) or self._spool.read_tail(key, 1, TAIL_BYTES)
        self._let_go(key)
        how = late or how_it_ended(exit_)
        output = last.decode("utf-8", "backslashreplace").strip()
        if notification.kind_of(self._store.terms(job.counter).notify.decode("utf-8", "replace")):
            if late or exit_.exit_code == notification.LATER:
                raise NotificationLost(output or how)
            return "abandoned" if exit_.exit_code else "notified", f"the notice: {output or how}"
        state = "abandoned" if late or exit_.exit_code else "notified"
        return state, f"the notice: {how}" + (f"; output: {output}" if output else "")

    async def _await_end(self, key: str, ended: asyncio.Future[Exit]) -> tuple[Exit, str]:
        try:
            async with asyncio.timeout(NOTICE_S_MAX):
                return await asyncio.shield(ended), ""
        except TimeoutError:
            self._launcher.signal(key, SIGKILL)
        async with asyncio.timeout(KILLED_WITHIN_S):
            return await ended, f"killed after {NOTICE_S_MAX:g} s"

    async def _start(self, key: str, job: DueJob) -> None:
        home = self._info.config.node
        spec = self._store.spec(job.counter)
        terms = self._store.terms(job.counter)
        directory = spec.directory
        if directory == SCRATCH or not await self._users.admitted(spec, terms):
            directory = b"/"
        target = terms.notify.decode("utf-8", "surrogateescape")
        is_target = notification.kind_of(target) != ""
        command = tuple(map(os.fsencode, DELIVER)) if is_target else (b"/bin/sh", b"-c", terms.notify)
        notice = TaskSpec(command, directory, spec.environment, user=spec.user, named=spec.named)
        try:
            variables_of(spec.environment)
        except BadRequest as error:
            raise NotificationLost(str(error)) from None
        name = task_name(home, job.counter, job.member)
        action = SpawnTask(key, name, 1, home, notice)
        extra = {
            f"PEERLOAD_{variable}".encode(): value.replace("\0", " ").encode("utf-8", "replace")
            for variable, value in (self._of_all(job) | {"NAME": spec.name, "HOME": home, "TASK_ID": name}).items()
        }
        if is_target:  # the secret is that of the agent's user
            signs = self._info.config.mode != "system"
            own = delivery_variables(self._info.config.hooks, target, signs=signs)
            extra |= {name.encode(): os.fsencode(value) for name, value in own.items()}
        self._spool.drop(key)
        stdout, stderr = self._spool.paths(key)
        self._running.add(key)
        self._launcher.spawn(action, stdout, stderr, extra, owner=terms.owner)

    def _of_all(self, job: DueJob) -> dict[str, str]:
        """The outcome as variables. For an array: that of the first member that is not done, or else that all are done."""
        store = self._store
        counts = {
            str(state): int(count)
            for state, count in store.rows(
                "SELECT state, count(*) FROM tasks WHERE counter = ? GROUP BY state", (job.counter,)
            )
        }
        states = [state for state in (TaskState.FAILED, TaskState.CANCELLED) if counts.get(state.value)]
        worst = states[0] if states else TaskState.DONE
        members = store.rows(
            "SELECT member FROM tasks WHERE counter = ? AND state = ? ORDER BY member LIMIT 1",
            (job.counter, worst.value),
        )
        records = store.page(job.counter, members[0][0] - 1, members[0][0], 1) if members else []
        facts = {"STATE": worst.value, "EXIT_CODE": "", "SIGNAL": "", "NODE": "", "REASON": ""}
        if records:
            facts |= outcome_of(records[0])
        total = sum(counts.values())
        if total > 1 or (members and members[0][0] != SINGLE):
            facts["MEMBERS"] = str(total)
            facts |= {state.upper(): str(counts.get(state, 0)) for state in ("done", "failed", "cancelled")}
        return facts


def _key(counter: int, tries: int) -> str:
    """The launcher's key of a command: different for each try, with the number of the submission, which is never reused. A
    restarted launcher has the exit records of earlier commands."""
    return f"{PREFIX}{counter}-{tries}"
