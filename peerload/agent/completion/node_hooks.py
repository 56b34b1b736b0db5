"""Hooks of the node (`[hooks]`): commands and messages when any task of this home has ended or failed, or a node is dead.

They run as children of the agent, with its rights, beside its work: a bounded queue, some at a time, each try with a time limit,
some tries. What cannot be delivered, or does not fit into the queue, is an event and is counted. Nothing is kept for the next
agent, unlike what `--notify` owes a user.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from peerload import notification
from peerload.agent.runtime import child_environment
from peerload.agent.store.schema import order_of
from peerload.model import metrics
from peerload.model.errors import PeerloadError
from peerload.model.metrics import labelled
from peerload.model.task import TaskState

if TYPE_CHECKING:
    from peerload.agent.runtime import AgentInfo
    from peerload.agent.store.store import Store
    from peerload.agent.store.write_ahead import EventLog
    from peerload.model.actions import PutEvent, TaskChanged
    from peerload.model.config import HooksSettings
    from peerload.model.task import TaskRecord

log = logging.getLogger("peerload.agent")

WAITING_MAX = 256
"""Notifications that wait; beyond this they are dropped."""
AT_A_TIME = 4
TRIES_MAX = 5
PAUSE_S = 2.0
"""Pause before the second try; it doubles."""
TIME_S_MAX = 60.0
"""Time limit of a try; then it is killed."""
SAID_BYTES_MAX = 400
DELIVER = (sys.executable, "-E", "-P", "-m", "peerload.notification")


def outcome_of(record: TaskRecord) -> dict[str, str]:
    """The outcome of a task as PEERLOAD_… variables."""
    told = {"NODE": record.node, "REASON": record.reason[:1000], "STATE": record.state.value}
    told |= {"STARTED_AT": f"{record.started_at:.3f}", "ENDED_AT": f"{record.ended_at:.3f}"}
    if record.exit is not None:
        told |= {"EXIT_CODE": str(record.exit.exit_code), "SIGNAL": str(record.exit.signal or "")}
    return told


def delivery_variables(settings: HooksSettings, target: str, *, signs: bool = True) -> dict[str, str]:
    """The variables that `notification` reads besides the facts. signs: webhooks are signed."""
    found = {"TARGET": target, "SECRET_FILE": settings.secret_file if signs else "", "SENDMAIL": settings.sendmail}
    return {f"PEERLOAD_NOTIFY_{name}": value for name, value in found.items()}


class NodeHooks:
    """The hooks of one agent. From the loop's thread only."""

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
    def hears_ends(self) -> bool:
        """True if a hook is run at the end of tasks."""
        return bool(self._settings.on_end or self._settings.on_fail)

    def changed(self, action: TaskChanged) -> None:
        """A task of this home has a new record."""
        record = action.record
        if not record.state.is_final or not self.hears_ends:
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
                    self._tell("dropped", hook, target, facts, f"{WAITING_MAX} wait already; more may be dropped")
                self._is_full = True

    def _count(self, outcome: str) -> None:
        self._info.counters[labelled(metrics.HOOKS, outcome=outcome)] += 1

    def _tell(self, state: str, hook: str, target: str, facts: dict[str, str], why: str) -> None:
        reason = f"{hook}: {notification.shown(target)}: {why}".replace("\n", " ")
        log.warning("hook %s: task=%s %s", state, facts.get("TASK_ID", ""), reason)
        task, node = facts.get("TASK_ID", ""), "" if "TASK_ID" in facts else facts["NODE"]
        self._journal.record("hook", state, task=task, node=node, reason=reason)

    async def run(self) -> None:
        """Deliver what comes, until cancelled."""
        if not self._settings.targets():
            return
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_A_TIME):
                group.create_task(self._deliver_all())

    async def _deliver_all(self) -> None:
        while True:
            hook, target, facts = await self._waiting.get()
            self._is_full = self._is_full and not self._waiting.empty()
            code, said = await self._deliver(target, facts)
            self._count("failed" if code else "delivered")
            if code:
                self._tell("failed", hook, target, facts, said or f"exit code {code}")

    async def _deliver(self, target: str, facts: dict[str, str]) -> tuple[int, str]:
        """Deliver one, in some tries → 0, or the exit code of the last, and what it printed."""
        code, said = 0, ""
        for tries in range(TRIES_MAX):
            if tries:
                await asyncio.sleep(PAUSE_S * 2.0 ** (tries - 1))
            try:
                code, said = await self._try(target, self._variables(target, facts))
            except OSError as error:
                code, said = notification.LATER, f"cannot be started: {error.strerror}"
            if code != notification.LATER:
                break
        return code, said

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
        words = DELIVER if notification.kind_of(target) else ("/bin/sh", "-c", target)
        null = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *words, stdin=null, stderr=null, env=variables, cwd="/", start_new_session=True,
            stdout=asyncio.subprocess.PIPE if words is DELIVER else null,
        )  # fmt: skip
        said = b""
        try:
            async with asyncio.timeout(TIME_S_MAX):
                if process.stdout is not None:
                    said = await process.stdout.read(SAID_BYTES_MAX)
                await process.wait()
        except TimeoutError:
            return notification.LATER, f"killed after {TIME_S_MAX:g} s"
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        return process.returncode or 0, said.decode("utf-8", "backslashreplace").strip().partition(": ")[2]
