"""The home's side of the handoff: offers, commits, leases, results. docs/wire.md names the rules (D1 … R11).

Home is its tasks' only writer. An attempt number is granted once: an accepted offer burns it with a durable LEASED
before COMMIT is said (D2). A leased task comes back to the queue only when its attempt is known not to run: refused
(NOT_STARTED), died, never sent, on a rebooted machine, or past ``deadline_s``, which is moved before every COMMIT and
RENEW_OK so that it always lies behind the executor's own (R2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.core.work import HomePhase, HomeTask
from peerload.model.actions import (
    FetchOutput,
    ForgetTask,
    KeepOutput,
    PutTask,
    SignalTask,
    SpawnTask,
    TaskChanged,
)
from peerload.model.errors import InvariantBroken
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
    Signal,
)
from peerload.model.task import TRANSITIONS, TaskState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from peerload.core.admission import Ledger
    from peerload.core.membership import Membership
    from peerload.core.queue import WaitingQueue
    from peerload.core.state import CoreState
    from peerload.model.messages import Identity
    from peerload.model.task import Exit, TaskRecord

SIGKILL = 9


class Home:
    """The unfinished tasks of this home by uid; each ends exactly once.

    ``requeued(task, reason)`` is called when a task is back in the queue (it counts as an arrival), and
    ``declined(task, node, reason)`` when an offer came to nothing; ``placed(task, node)`` when it needs no place any
    more: it was accepted there, starts here, is over (node = "").
    """

    def __init__(
        self,
        state: CoreState,
        queue: WaitingQueue,
        ledger: Ledger,
        membership: Membership,
    ) -> None:
        self._state = state
        self._queue = queue
        self._ledger = ledger
        self._membership = membership
        self.tasks: dict[bytes, HomeTask] = {}
        self.by_id: dict[str, HomeTask] = {}
        self.arrays: dict[str, dict[str, HomeTask]] = {}
        self.requeued: Callable[[HomeTask, str], None] = lambda _task, _reason: None
        self.declined: Callable[[HomeTask, str, str], None] = lambda _task, _node, _reason: None
        self.placed: Callable[[HomeTask, str], None] = lambda _task, _node: None

    # -- durable transitions -------------------------------------------------------------------------------------------

    def _become(self, task: HomeTask, reason: str, /, **changes: object) -> TaskRecord:
        """A new durable record; raises InvariantBroken for a transition that the table does not have."""
        record = task.record
        after = changes.get("state", record.state)
        if after is not record.state and after not in TRANSITIONS[record.state]:
            raise InvariantBroken(f"{record.task}: {record.state} → {after}", story=f"{record!r}; {reason}")
        task.record = msgspec.structs.replace(record, reason=reason, **changes)
        self._state.persist(PutTask(task.record, self._state.now.wall_s, reason))
        runs = bool(task.running_at) and task.record.state is TaskState.LEASED
        self._state.actions.append(TaskChanged(task.record, runs, reason))
        return task.record

    def _timer_name(self, task: HomeTask) -> str:
        return task.uid.hex()

    # -- arrival and local runs ----------------------------------------------------------------------------------------

    def adopt(self, task: HomeTask) -> None:
        """Take charge of a task (new, or read from the store)."""
        self.tasks[task.uid] = task
        self.by_id[task.task] = task
        array = _array(task.task)
        if array:
            self.arrays.setdefault(array, {})[task.task] = task

    def named(self, name: str) -> list[HomeTask]:
        """The unfinished tasks that a user means: one, or the members of an array."""
        task = self.by_id.get(name)
        return [task] if task is not None else list(self.arrays.get(name, {}).values())

    def start_here(self, task: HomeTask) -> None:
        """Run it on this node: LEASED to ourselves and START in one (D2 + D3)."""
        self.placed(task, self._state.node)
        task.phase = HomePhase.HERE
        self._become(
            task,
            "room here",
            state=TaskState.LEASED,
            attempt=task.record.attempt + 1,
            node=self._state.node,
            nonce=0,
            machine_boot=self._state.identity.machine_boot,
            lease_s=0.0,
        )
        self._ledger.start(task.key, task.spec.request, is_local=True)
        self._state.actions.append(SpawnTask(task.key, task.task, task.record.attempt, self._state.node, task.spec))

    def started_here(self, task: HomeTask, started_at: float) -> None:
        """The launcher has the process."""
        task.running_at = started_at
        self._arm_time_limit(task, started_at)
        self._state.actions.append(
            TaskChanged(msgspec.structs.replace(task.record, started_at=started_at), running=True, reason="started")
        )

    def ended_here(self, task: HomeTask, exit_: Exit) -> None:
        """The process is gone; its output lies in this home's spool already."""
        if task.phase is HomePhase.OVER:
            self._forget(task)
        else:
            self._finish(task, exit_)
        self._state.actions.append(ForgetTask(task.key, output=False))

    def died_here(self, task: HomeTask, reason: str) -> None:
        """Started here, no result, and its processes are gone."""
        if task.phase is HomePhase.OVER:
            self._forget(task)
        else:
            self._lose(task, reason)

    def _arm_time_limit(self, task: HomeTask, started_at: float) -> None:
        if task.spec.time_limit_s:
            left_s = started_at + task.spec.time_limit_s - self._state.now.wall_s
            self._state.set_timer_in(max(min(left_s, task.spec.time_limit_s), 0.0), "limit", task.key)

    # -- offering ------------------------------------------------------------------------------------------------------

    def offer(self, task: HomeTask, node: str, *, voluntary: bool, only: bool = False, search: bool = True) -> None:
        """Offer the next attempt to a node; the task keeps its place, withheld. ``search``: on a decline the sender's
        search goes on (False: a task given on request, whose loss triggers nothing)."""
        task.phase = HomePhase.OFFERED
        task.withheld = True
        task.offered_to = node
        task.voluntary = voluntary
        task.offer_only = only
        task.on_decline_search = search
        limit = self.migrations_max(task)
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
            ),
        )
        self._state.set_timer_in(self._state.config.offer_timeout_s, "offer", self._timer_name(task))

    def migrations_max(self, task: HomeTask) -> int | None:
        """How often it may be placed elsewhere by choice."""
        own = task.spec.placement.migrations_max
        return own if own is not None else self._state.policies.migration.migrations_max

    def may_migrate(self, task: HomeTask) -> bool:
        """Whether one more placement by choice is allowed."""
        limit = self.migrations_max(task)
        return limit is None or task.record.migrations < limit

    def withdraw(self, task: HomeTask) -> None:
        """No offer is out (any more); the task may start here again."""
        if task.phase is HomePhase.OFFERED:
            self._state.clear_timer("offer", self._timer_name(task))
            task.phase = HomePhase.WAITING
            task.offered_to = ""
            task.withheld = False

    def accept_received(self, src: str, message: Accept) -> None:
        """Room is reserved there: grant the attempt durably, then COMMIT."""
        task = self.tasks.get(message.uid)
        if (
            task is None
            or task.phase is not HomePhase.OFFERED
            or task.offered_to != src
            or message.attempt != task.record.attempt + 1
        ):
            self._state.count("accepts too late")  # that reservation ends by itself
            return
        peer = self._membership.get(src)
        self.withdraw(task)
        self._queue.remove(task)
        task.phase = HomePhase.AWAY
        task.commits = 0
        task.repeat_s = self._state.config.repeat_s
        self._become(
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
        self.placed(task, src)
        self._commit(task, message.ts)

    def _commit(self, task: HomeTask, ts: float) -> None:
        """Say COMMIT; the deadline moves first (R2)."""
        self._extend(task)
        task.commits += 1
        record = task.record
        self._state.send(record.node, Commit(task.task, task.uid, record.attempt, record.nonce, ts, record.lease_s))
        self._state.set_timer_in(task.repeat_s, "ask", self._timer_name(task))

    def _extend(self, task: HomeTask) -> None:
        task.deadline_s = self._state.now.boot_s + task.record.lease_s + self._state.config.lease_grace_s
        self._state.set_timer_in(task.deadline_s - self._state.now.boot_s, "lease", self._timer_name(task))

    def decline_received(self, src: str, message: Decline) -> None:
        """No room there after all, or never."""
        task = self.tasks.get(message.uid)
        if task is None or task.phase is not HomePhase.OFFERED or task.offered_to != src:
            return
        if message.attempt == task.record.attempt + 1:
            self._declined(task, src, message.reason)

    def _declined(self, task: HomeTask, node: str, reason: str) -> None:
        self.withdraw(task)
        self._state.count("offers declined")
        self.declined(task, node, reason)

    def offer_failed(self, node: str, uid: bytes) -> None:
        """No answer in time, or the offer never left: as a decline."""
        task = self.tasks.get(uid)
        if task is not None and task.phase is HomePhase.OFFERED and task.offered_to == node:
            self._declined(task, node, f"no answer from {node}")

    # -- while it is away ----------------------------------------------------------------------------------------------

    def ask(self, task: HomeTask) -> None:
        """Nothing was heard of it: QUERY, which every executor answers; less and less often."""
        if task.phase is not HomePhase.AWAY:
            return
        task.repeat_s = min(task.repeat_s * 2, self._state.config.repeat_s_max) or self._state.config.repeat_s
        self._state.send(task.record.node, Query(task.task, task.uid, task.record.attempt))
        self._state.set_timer_in(task.repeat_s, "ask", self._timer_name(task))

    def _ask_if_silent(self, task: HomeTask) -> None:
        """It is renewed every quarter of its lease; if twice nothing comes, ask (a RETURN or DIED may be lost)."""
        task.repeat_s = self._state.config.repeat_s
        self._state.set_timer_in(task.record.lease_s / 2, "ask", self._timer_name(task))

    def renew_received(self, src: str, message: Renew) -> None:
        """Leases are renewed in one answer; attempts that are no longer current are revoked."""
        extensions: list[LeaseExtension] = []
        for renewal in message.renewals:
            task = self.tasks.get(renewal.uid)
            if task is not None and self._is_current(task, src, renewal.attempt):
                self._extend(task)
                self._ask_if_silent(task)
                if renewal.started_at and not task.running_at:
                    task.running_at = renewal.started_at
                    record = msgspec.structs.replace(task.record, started_at=renewal.started_at)
                    self._state.actions.append(TaskChanged(record, running=True, reason=f"started on {src}"))
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
            self.withdraw(task)
            self._queue.remove(task)
            self.placed(task, src)
            task.phase = HomePhase.AWAY
            self._become(
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
        task = self.tasks.get(message.uid)
        if task is None or task.phase is not HomePhase.AWAY or task.record.node != src:
            return None
        if task.record.attempt != message.attempt:
            return None
        to = message.to if isinstance(message, Return) else ""
        self._requeue(task, message.reason or f"{src} has not started it", arrives=False)
        return to

    def died_received(self, src: str, message: Died) -> None:
        """The attempt started, its processes are gone, and there is no result."""
        task = self.tasks.get(message.uid)
        if (
            task is not None
            and task.phase is HomePhase.AWAY
            and task.record.node == src
            and (task.record.attempt == message.attempt)
        ):
            self._lose(task, f"{src}: {message.reason or 'the attempt died'}")

    def commit_never_left(self, task: HomeTask, attempt: int) -> None:
        """The only COMMIT of this attempt never left this agent: nobody can have started it."""
        if task.phase is HomePhase.AWAY and task.record.attempt == attempt and task.commits == 1:
            self._requeue(task, f"{task.record.node} went away before it could be told to start")

    def lease_ran_out(self, task: HomeTask) -> None:
        """The executor was not heard of for so long that it has frozen the task for sure."""
        if task.phase is not HomePhase.AWAY:
            return
        if task.deadline_s > self._state.now.boot_s:
            self._state.set_timer_in(task.deadline_s - self._state.now.boot_s, "lease", self._timer_name(task))
        else:
            self._lose(task, f"{task.record.node} was not heard of until its lease ran out", may_be_back=True)

    def machine_changed(self, identity: Identity) -> None:
        """A node came back with another machine boot id: nothing that ran on it before can be alive (R6)."""
        for task in list(self.tasks.values()):
            if (
                task.phase is HomePhase.AWAY
                and task.record.node == identity.node
                and task.record.machine_boot not in ("", identity.machine_boot)
            ):
                self._lose(task, f"{identity.node} was rebooted")

    def peer_is_back(self, node: str) -> None:
        """Another start of a node that holds tasks: ask at once what became of them."""
        for task in self.tasks.values():
            if task.phase is HomePhase.AWAY and task.record.node == node:
                task.repeat_s = 0.0
                self.ask(task)

    # -- the end -------------------------------------------------------------------------------------------------------

    def result_received(self, src: str, message: Result) -> None:
        """The first result of any attempt that was granted counts (R9); its output comes home before it is recorded."""
        task = self.tasks.get(message.uid)
        if task is None or task.phase is HomePhase.OVER or message.attempt > task.record.attempt:
            self._state.send(src, ResultAck(message.task, message.uid, message.attempt))
            return
        if message.attempt != task.record.attempt and message.exit.signal:
            # It was revoked: that it was killed there is no result.
            self._state.send(src, ResultAck(message.task, message.uid, message.attempt))
            return
        if task.phase is HomePhase.COLLECTING or task.phase is HomePhase.HERE:
            return  # it will be repeated
        if message.attempt != task.record.attempt or task.record.node != src:
            if task.phase is HomePhase.AWAY:
                self._revoke(task, SIGKILL, "another attempt has ended")
            self.withdraw(task)
            self._queue.remove(task)
            self.placed(task, src)
        task.phase = HomePhase.COLLECTING
        task.collected_attempt = message.attempt
        task.exit = message.exit
        task.last_node = src
        if task.record.state is TaskState.QUEUED:
            self._become(task, f"{src} has the result", state=TaskState.LEASED, node=src)
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
        task = self.tasks.get(uid)
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
        node = task.last_node
        self._finish(task, task.exit)
        self._state.send(node, ResultAck(task.task, uid, attempt))

    def _finish(self, task: HomeTask, exit_: Exit) -> None:
        state = TaskState.DONE if exit_.exit_code == 0 else TaskState.FAILED
        self._become(
            task,
            exit_.reason or ("ended" if state is TaskState.DONE else f"exit code {exit_.exit_code}"),
            state=state,
            started_at=exit_.started_at,
            ended_at=exit_.ended_at or self._state.now.wall_s,
            exit=exit_,
        )
        self._forget(task)

    def _forget(self, task: HomeTask) -> None:
        self._clear_timers(task)
        self.tasks.pop(task.uid, None)
        self.by_id.pop(task.task, None)
        array = _array(task.task)
        members = self.arrays.get(array)
        if members is not None:
            members.pop(task.task, None)
            if not members:
                del self.arrays[array]

    def _clear_timers(self, task: HomeTask) -> None:
        name = self._timer_name(task)
        if task.record.node not in ("", self._state.node):  # a task that never left has none of these
            self._state.clear_timer("lease", name)
            self._state.clear_timer("ask", name)
        if task.spec.time_limit_s:
            self._state.clear_timer("limit", task.key)

    def cancel(self, task: HomeTask, signal: int, *, force: bool) -> bool:
        """Durable before it is confirmed (D7); False if it has ended already."""
        if task.phase is HomePhase.OVER:
            if force:  # cancelled before, and its process has not obeyed yet
                self._state.actions.append(SignalTask(task.key, SIGKILL))
            return False
        was = task.phase
        key, node = task.key, task.record.node
        self.withdraw(task)
        self._queue.remove(task)
        self.placed(task, "")
        task.phase = HomePhase.OVER
        self._become(
            task,
            "cancelled",
            state=TaskState.CANCELLED,
            started_at=task.running_at,
            ended_at=self._state.now.wall_s,
        )
        first = SIGKILL if force else signal
        if was is HomePhase.HERE:
            self._state.actions.append(SignalTask(key, first))
            self._state.set_timer_in(self._state.config.kill_after_s, "kill", key)
            self._clear_timers(task)
            return True  # kept until its process is gone
        if was is HomePhase.AWAY:
            self._state.send(node, Revoke(task.task, task.uid, task.record.attempt, first, "cancelled"))
        self._forget(task)
        return True

    def signal(self, task: HomeTask, signal: int) -> bool:
        """Pass a signal on to the running task; False if it does not run."""
        if task.phase is HomePhase.HERE:
            self._state.actions.append(SignalTask(task.key, signal))
        elif task.phase is HomePhase.AWAY and task.running_at:
            self._state.send(task.record.node, Signal(task.task, task.uid, task.record.attempt, signal))
        else:
            return False
        return True

    # -- back to the queue ---------------------------------------------------------------------------------------------

    def _revoke(self, task: HomeTask, signal: int, reason: str) -> None:
        self._state.send(task.record.node, Revoke(task.task, task.uid, task.record.attempt, signal, reason))

    def _lose(self, task: HomeTask, reason: str, *, may_be_back: bool = False) -> None:
        """An attempt that may have run ended without a result."""
        task.losses += 1
        self._state.count("attempts lost")
        if task.losses >= self._state.config.attempts_max:
            self._become(
                task,
                f"given up after {task.losses} lost attempts; the last: {reason}",
                state=TaskState.FAILED,
                ended_at=self._state.now.wall_s,
            )
            self._forget(task)
            return
        self._requeue(task, reason, may_be_back=may_be_back)

    def _requeue(self, task: HomeTask, reason: str, *, arrives: bool = True, may_be_back: bool = False) -> None:
        self._clear_timers(task)
        task.last_node = task.record.node if may_be_back else ""
        task.phase = HomePhase.WAITING
        task.running_at = 0.0
        task.killed_because = ""
        self._become(task, reason, state=TaskState.QUEUED, node="", started_at=0.0)
        self._queue.add(task)
        if arrives:
            self.requeued(task, reason)

    def away(self) -> Iterable[HomeTask]:
        """The tasks that are leased to other nodes."""
        return (task for task in self.tasks.values() if task.phase is HomePhase.AWAY)


def _array(task: str) -> str:
    """The array that a task is a member of, "" for a single one."""
    return task.rpartition(".")[0]
