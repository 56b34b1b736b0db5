"""The home's side of the handoff: offers, commits, leases, results. docs/wire.md names the rules (D1 … R11).

An attempt number is granted once: an accepted offer burns it with a durable LEASED before COMMIT is said (D2). A leased
task comes back to the queue only when its attempt is known not to run: refused (NOT_STARTED), died, never sent, on a
rebooted machine, or past ``deadline_s``, which is moved before every COMMIT and RENEW_OK so that it always lies behind
the executor's own (R2). The task's record is `home.py`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.core.work import HomePhase
from peerload.model.actions import FetchOutput, KeepOutput, TaskChanged
from peerload.model.messages import (
    Accept,
    Commit,
    Decline,
    Died,
    LeaseExtension,
    NotStarted,
    Offer,
    Query,
    Renew,
    RenewOk,
    Result,
    ResultAck,
    Return,
    Revoke,
)
from peerload.model.task import TaskState

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.core.home import Home
    from peerload.core.membership import Membership
    from peerload.core.queue import WaitingQueue
    from peerload.core.state import CoreState
    from peerload.core.work import HomeTask
    from peerload.model.messages import Identity

SIGKILL = 9


class Handoff:
    """The conversation of a home with the nodes that run its tasks; its timers are ``offer``, ``lease`` and ``ask``.

    ``declined(task, node, reason)`` is called when an offer came to nothing.
    """

    def __init__(self, state: CoreState, queue: WaitingQueue, membership: Membership, home: Home) -> None:
        self._state = state
        self._queue = queue
        self._membership = membership
        self._home = home
        self.declined: Callable[[HomeTask, str, str], None] = lambda _task, _node, _reason: None

    # -- offering ------------------------------------------------------------------------------------------------------

    def offer(
        self,
        task: HomeTask,
        node: str,
        *,
        voluntary: bool,
        only: bool = False,
        search: bool = True,
        load_tasks_max: int = -1,
    ) -> None:
        """Offer the next attempt to a node; the task keeps its place, withheld. ``search``: on a decline the sender's
        search goes on (False: a task given on request, whose loss triggers nothing)."""
        task.phase = HomePhase.OFFERED
        self._queue.withhold(task)
        task.offered_to = node
        task.voluntary = voluntary
        task.offer_only = only
        task.on_decline_search = search
        limit = self._home.migrations_max(task)
        self._state.count("offers sent")
        self._state.send(
            node,
            Offer(
                task.task,
                task.uid,
                task.record.attempt + 1,
                task.spec,
                self._state.config.lease_s,
                task.record.migrations + voluntary,
                -1 if limit is None else limit,
                only,
                load_tasks_max,
            ),
        )
        self._state.set_timer_in(self._state.config.offer_timeout_s, "offer", task.uid.hex())

    def accept_received(self, src: str, message: Accept) -> None:
        """Room is reserved there: grant the attempt durably, then COMMIT."""
        task = self._home.tasks.get(message.uid)
        if (
            task is None
            or task.phase is not HomePhase.OFFERED
            or task.offered_to != src
            or message.attempt != task.record.attempt + 1
        ):
            self._state.count("accepts too late")  # that reservation ends by itself
            return
        peer = self._membership.get(src)
        self._home.withdraw(task)
        self._queue.remove(task)
        task.phase = HomePhase.AWAY
        task.commits = 0
        task.repeat_s = self._state.config.repeat_s
        self._home.become(
            task,
            f"accepted by {src}",
            state=TaskState.LEASED,
            attempt=message.attempt,
            node=src,
            nonce=message.nonce,
            machine_boot=peer.identity.machine_boot if peer is not None else "",
            lease_s=self._state.config.lease_s,
            migrations=task.record.migrations + task.voluntary,
        )
        self._state.count("transfers")
        self._home.placed(task, src)
        self._commit(task, message.ts)

    def _commit(self, task: HomeTask, ts: float) -> None:
        """Say COMMIT; the deadline moves first (R2)."""
        self._extend(task)
        task.commits += 1
        record = task.record
        self._state.send(record.node, Commit(task.task, task.uid, record.attempt, record.nonce, ts, record.lease_s))
        self._state.set_timer_in(task.repeat_s, "ask", task.uid.hex())

    def _extend(self, task: HomeTask) -> None:
        task.deadline_s = self._state.now.boot_s + task.record.lease_s + self._state.config.lease_grace_s
        self._state.set_timer_in(task.deadline_s - self._state.now.boot_s, "lease", task.uid.hex())

    def decline_received(self, src: str, message: Decline) -> None:
        """No room there after all, or never."""
        task = self._home.tasks.get(message.uid)
        if task is None or task.phase is not HomePhase.OFFERED or task.offered_to != src:
            return
        if message.attempt == task.record.attempt + 1:
            self._declined(task, src, message.reason)

    def _declined(self, task: HomeTask, node: str, reason: str) -> None:
        self._home.withdraw(task)
        self._state.count("offers declined")
        self.declined(task, node, reason)

    def offer_failed(self, node: str, uid: bytes) -> None:
        """No answer in time, or the offer never left: as a decline."""
        task = self._home.tasks.get(uid)
        if task is not None and task.phase is HomePhase.OFFERED and task.offered_to == node:
            self._declined(task, node, f"no answer from {node}")

    # -- while it is away ----------------------------------------------------------------------------------------------

    def restored(self, task: HomeTask) -> None:
        """A lease found in the store at start: it may have been renewed just before (R4). Asks at once."""
        task.phase = HomePhase.AWAY
        task.commits = 2  # how often COMMIT was said before the restart is not known: never "never"
        task.repeat_s = self._state.config.repeat_s
        self._extend(task)
        self.ask(task)

    def ask(self, task: HomeTask) -> None:
        """Nothing was heard of it: QUERY, which every executor answers; less and less often."""
        if task.phase is not HomePhase.AWAY:
            return
        task.repeat_s = min(task.repeat_s * 2, self._state.config.repeat_s_max) or self._state.config.repeat_s
        self._state.send(task.record.node, Query(task.task, task.uid, task.record.attempt))
        self._state.set_timer_in(task.repeat_s, "ask", task.uid.hex())

    def _ask_if_silent(self, task: HomeTask) -> None:
        """It is renewed every quarter of its lease; if twice nothing comes, ask (a RETURN or DIED may be lost)."""
        task.repeat_s = self._state.config.repeat_s
        self._state.set_timer_in(task.record.lease_s / 2, "ask", task.uid.hex())

    def renew_received(self, src: str, message: Renew) -> None:
        """Leases are renewed in one answer; attempts that are no longer current are revoked."""
        extensions: list[LeaseExtension] = []
        for renewal in message.renewals:
            task = self._home.tasks.get(renewal.uid)
            if task is not None and self._is_current(task, src, renewal.attempt):
                self._extend(task)
                self._ask_if_silent(task)
                if renewal.started_at and not task.running_at:
                    task.running_at = renewal.started_at
                    record = msgspec.structs.replace(task.record, started_at=renewal.started_at)
                    self._state.actions.append(TaskChanged(record, running=True, reason=f"started on {src}"))
                    self._home.seen_running(task, f"started on {src}")
                extensions.append(LeaseExtension(renewal.uid, renewal.attempt, renewal.ts, task.record.lease_s))
            elif task is None or task.phase is not HomePhase.COLLECTING:
                self._state.send(
                    src,
                    Revoke(renewal.task, renewal.uid, renewal.attempt, SIGKILL, "no longer this attempt's turn"),
                )
        if extensions:
            self._state.send(src, RenewOk(tuple(extensions)))

    def _is_current(self, task: HomeTask, src: str, attempt: int) -> bool:
        """Whether src holds the current attempt; an attempt given up but not granted anew is taken back (R11)."""
        if attempt != task.record.attempt:
            return False
        if task.phase is HomePhase.AWAY:
            return task.record.node == src
        if task.phase in (HomePhase.WAITING, HomePhase.OFFERED) and task.last_node == src:
            self._home.withdraw(task)
            self._queue.remove(task)
            self._home.placed(task, src)
            task.phase = HomePhase.AWAY
            self._home.become(
                task,
                f"{src} is back and still has it",
                state=TaskState.LEASED,
                node=src,
                lease_s=self._state.config.lease_s,
            )
            return True
        return False

    def not_started_received(self, src: str, message: NotStarted | Return) -> str | None:
        """A durable promise that the attempt never started: back to the queue, where the caller decides about it.
        → the node a RETURN suggests ("" for none), None if it was not about a current attempt."""
        task = self._home.tasks.get(message.uid)
        if task is None or task.phase is not HomePhase.AWAY or task.record.node != src:
            return None
        if task.record.attempt != message.attempt:
            return None
        to = message.to if isinstance(message, Return) else ""
        self._home.requeue(task, message.reason or f"{src} has not started it", arrives=False)
        return to

    def died_received(self, src: str, message: Died) -> None:
        """The attempt started, its processes are gone, and there is no result."""
        task = self._home.tasks.get(message.uid)
        if (
            task is not None
            and task.phase is HomePhase.AWAY
            and task.record.node == src
            and (task.record.attempt == message.attempt)
        ):
            self._home.lose(task, f"{src}: {message.reason or 'the attempt died'}")

    def commit_never_left(self, task: HomeTask, attempt: int) -> None:
        """The only COMMIT of this attempt never left this agent: nobody can have started it."""
        if task.phase is HomePhase.AWAY and task.record.attempt == attempt and task.commits == 1:
            self._home.requeue(task, f"{task.record.node} went away before it could be told to start")

    def lease_ran_out(self, task: HomeTask) -> None:
        """The executor was not heard of for so long that it has frozen the task for sure."""
        if task.phase is not HomePhase.AWAY:
            return
        if task.deadline_s > self._state.now.boot_s:
            self._state.set_timer_in(task.deadline_s - self._state.now.boot_s, "lease", task.uid.hex())
        else:
            self._home.lose(task, f"{task.record.node} was not heard of until its lease ran out", may_be_back=True)

    def machine_changed(self, identity: Identity) -> None:
        """A node came back with another machine boot id: nothing that ran on it before can be alive (R6)."""
        for task in list(self._home.tasks.values()):
            if (
                task.phase is HomePhase.AWAY
                and task.record.node == identity.node
                and task.record.machine_boot not in ("", identity.machine_boot)
            ):
                self._home.lose(task, f"{identity.node} was rebooted")

    def peer_is_back(self, node: str) -> None:
        """Another start of a node that holds tasks: ask at once what became of them."""
        for task in self._home.tasks.values():
            if task.phase is HomePhase.AWAY and task.record.node == node:
                task.repeat_s = 0.0
                self.ask(task)

    # -- results -------------------------------------------------------------------------------------------------------

    def result_received(self, src: str, message: Result) -> None:
        """The first result of any attempt that was granted counts (R9); its output comes home before it is recorded.

        Until then another attempt that holds the lease by now runs on: should the output never come, it is needed."""
        task = self._home.tasks.get(message.uid)
        if task is None or task.phase is HomePhase.OVER or message.attempt > task.record.attempt:
            self._state.send(src, ResultAck(message.task, message.uid, message.attempt))
            return
        if message.attempt != task.record.attempt and message.exit.signal:
            # It was revoked: that it was killed there is no result.
            self._state.send(src, ResultAck(message.task, message.uid, message.attempt))
            return
        if task.phase is HomePhase.COLLECTING or task.phase is HomePhase.HERE:
            return  # it will be repeated
        if task.phase is not HomePhase.AWAY:
            self._home.withdraw(task)
            self._queue.remove(task)
            self._home.placed(task, src)
        task.phase = HomePhase.COLLECTING
        task.collected_attempt = message.attempt
        task.exit = message.exit
        task.last_node = src
        if task.record.state is TaskState.QUEUED:
            self._home.become(task, f"{src} has the result", state=TaskState.LEASED, node=src)
        if message.inline:
            self._state.actions.append(
                KeepOutput(task.key, task.task, task.uid, message.attempt, message.stdout, message.stderr)
            )
        else:
            self._state.actions.append(
                FetchOutput(
                    task.key,
                    task.task,
                    task.uid,
                    message.attempt,
                    src,
                    message.exit.stdout_bytes,
                    message.exit.stderr_bytes,
                )
            )

    def output_arrived(self, uid: bytes, attempt: int, error: str) -> None:
        """Its output lies here, synced: record the result (D5), then acknowledge it."""
        task = self._home.tasks.get(uid)
        if (
            task is None
            or task.phase is not HomePhase.COLLECTING
            or task.exit is None
            or task.collected_attempt != attempt
        ):
            return
        if error:
            self._state.count("output fetches failed")
            task.phase = HomePhase.AWAY  # the result will be repeated, and fetched again
            self._extend(task)
            return
        self._home.finish(task, task.exit)
        if task.record.attempt != attempt:
            reason = "another attempt has ended"
            self._state.send(task.record.node, Revoke(task.task, uid, task.record.attempt, SIGKILL, reason))
        self._state.send(task.last_node, ResultAck(task.task, uid, attempt))
