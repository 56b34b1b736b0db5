"""The executor's side of the handoff: offers, remote attempts, leases, results and fences. docs/wire.md has the rules.

A COMMIT without its live reservation is refused, durably (D6), and so is every attempt not above the task's *fence*:
the highest attempt this node has started or promised never to start (R7). START is durable before the process exists
(D3).

A lease counts from the moment this node *sent* the message that was granted, never from the arrival of the answer (R1).
Grants are applied in the order of ``ts``, which only this node's clock writes; the launcher enforces the deadline and
keeps it with the newest ts, so that the next agent knows both.

RESULT is durable before it is sent (D4), and is kept and repeated until its home has acknowledged it (R10), or has left
the cluster: revoked by the CA, or declared gone for good by an operator of this node. An attempt without a result has
died, unless the launcher confirms that it never had a process: then it is refused (D6).

A fence is durable before its promise is sent or carried out (D3, D6). Messages are late by seconds at most, so a fence
that was unused for floor_kept_s may be dropped: the nonce of a COMMIT refuses the same attempts. Fences of started
attempts that may run only once are kept until their home has acknowledged their end: it would take a forgotten start
for a task that was never started.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, NamedTuple

from peerload.core.resources.admission import why_never
from peerload.core.work import RemotePhase, RemoteTask
from peerload.model import actions, messages, metrics, rules, timers
from peerload.model.task import (
    ExecutionRecord,
    ExecutionState,
    FenceKind,
    Guarantee,
    attempt_of,
    execution_key,
    how_it_ended,
    task_home,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from peerload.core.resources.admission import Ledger
    from peerload.core.state import CoreState, Mediator
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.model.events import RemoteCancelRequested
    from peerload.model.task import Exit, TaskSpec


SIGKILL = 9
REVOKED = "its home was shut out of the cluster"
FORGOTTEN = "its home was declared gone for good"
STUCK = "all tasks that run there are frozen, since their homes are silent"
OFFERS_MAX = 1024
"""Limit on pending offers of one peer; more are declined (rule P2)."""


class ExecutorHandoff:
    """The attempts of other homes on this node, by key; `by_uid` finds the newest attempt of a task."""

    def __init__(self, state: CoreState, queue: WaitingQueue, ledger: Ledger, mediator: Mediator) -> None:
        self._state = state
        self._mediator = mediator
        self._queue = queue
        self._ledger = ledger
        self._table = table = RemoteTaskTable()
        self.remote_tasks, self.by_uid = table.remote_tasks, table.by_uid
        self.fences = AttemptFences(state, self.by_uid)
        self.leases = ExecutorLeases(state, table)
        self.results = ExecutorResults(state, ledger, self.fences, table)
        self._last_spec: TaskSpec | None = None

    # -- offer and commit ----------------------------------------------------------------------------------------------

    def offer_received(
        self, src: str, offer: messages.Offer, *, directory_here: bool, refused: str = "", stalled: str = ""
    ) -> None:
        """Handle OFFER: reserve resources, or decline with the reason."""
        objection = self._objection(src, offer.task, offer.uid)
        if objection:
            self._state.broken(rules.ROLES_CHECKED, src, f"OFFER of {offer.task}: {objection}")
            self._decline(src, offer, "cannot", objection)
            return
        stale = self.by_uid.get(offer.uid)
        if (
            stale is not None
            and stale.phase is RemotePhase.RESERVED
            and stale.attempt < offer.attempt
            and stale.home == src
        ):
            self._drop(stale)
        refusal = self._refusal(src, offer, directory_here=directory_here, refused=refused, stalled=stalled)
        if refusal is not None:
            code, reason = refusal
            if reason == STUCK:
                self._state.turned_away = offer
            if offer.uid not in self.by_uid:
                self._ledger.expect_no_more(offer.uid)
            self._decline(src, offer, code, reason)
            return
        remote = self.by_uid.get(offer.uid)
        if remote is None:
            if offer.spec == self._last_spec:  # members of an array share one spec, and its cached keys
                spec = self._last_spec
            else:
                spec = self._last_spec = offer.spec
            remote = RemoteTask(offer.task, offer.uid, offer.attempt, src, spec, self._state.now.boot_s)
            self._table.add(remote)
            if offer.spec.is_staged:
                remote.is_staging = True
                others = tuple(node for node in offer.sources if node not in (self._state.node, src))
                self._state.actions.append(
                    actions.StageFiles(
                        remote.key, remote.task, remote.uid, remote.attempt, remote.home, remote.spec, others
                    )
                )
        remote.nonce = self._state.rng.getrandbits(62)  # new each time, so that an older ACCEPT cannot be committed
        remote.ts = self._state.now.boot_s
        remote.lease_s = offer.lease_s
        remote.migrations = offer.migrations
        remote.migrations_max = offer.migrations_max
        self._ledger.expect(offer.uid, offer.spec.request)
        self._state.clear_timer(timers.Inbound(offer.uid.hex()))
        remote.repeat_s = self._state.config.repeat_s
        self._accept(remote)

    def _decline(self, home: str, offered: messages.Offer | RemoteTask, code: str, reason: str) -> None:
        self._state.count(metrics.labelled(metrics.OFFERS_DECLINED_HERE, code=code))
        report = self._mediator.own_report()
        self._state.send(home, messages.Decline(offered.task, offered.uid, offered.attempt, code, reason, report))

    def _objection(self, src: str, task: str, uid: bytes) -> str:
        """The reason why src may not send messages about this task; "" if it may. Launcher, spool and queue identify an
        attempt by its task's uid, so two homes must never use the same one."""
        if task_home(task) != src:
            return "only its home may offer, start or query a task"
        remote = self.by_uid.get(uid)
        home = remote.home if remote is not None else self.fences.home(uid)
        if self._mediator.is_own_task(uid) or home not in ("", src):
            return "a task of another home has that uid here"
        return ""

    def _guest_of(self, src: str, uid: bytes) -> RemoteTask | None:
        """The attempt here of a task of src. A message from another node about it is counted."""
        remote = self.by_uid.get(uid)
        if remote is None or remote.home == src:
            return remote
        self._state.count(metrics.MESSAGES_FROM_NON_HOME)
        self._state.broken(rules.ROLES_CHECKED, src, f"it names {remote.task}, whose home is {remote.home}")
        return None

    def _is_unauthorized(self, src: str, task: str, uid: bytes) -> bool:
        """True if `_objection` has an objection, which is counted; for messages without an answer."""
        if not (objection := self._objection(src, task, uid)):
            return False
        self._state.count(metrics.MESSAGES_FROM_NON_HOME)
        self._state.broken(rules.ROLES_CHECKED, src, f"it names {task}: {objection}")
        return True

    def _accept(self, remote: RemoteTask) -> None:
        """Send ACCEPT, and repeat it until the COMMIT comes, because either may be lost. The reservation lasts
        reservation_s. While the task's files are being copied nothing is sent: the lease begins with the ACCEPT."""
        if remote.is_staging:
            return
        accept = messages.Accept(
            remote.task,
            remote.uid,
            remote.attempt,
            remote.nonce,
            remote.ts,
            self._state.identity.machine_boot,
            self._state.store,
            remote.spec.is_staged,
        )
        self._state.send(remote.home, accept)
        left_s = remote.ts + self._state.config.reservation_s - self._state.now.boot_s
        self._state.set_timer_in(min(remote.repeat_s, max(left_s, 0.0)), timers.ReservationTimeout(remote.key))
        remote.repeat_s *= 2

    def _refusal(  # noqa: C901 -- one line a reason
        self, src: str, offer: messages.Offer, *, directory_here: bool, refused: str, stalled: str
    ) -> tuple[str, str] | None:
        profile = self._state.profile
        known = self.by_uid.get(offer.uid)
        if known is not None and not (
            known.phase is RemotePhase.RESERVED and known.attempt == offer.attempt and known.home == src
        ):
            self._report(known)  # an earlier attempt is still here: notify its home
            return "floor", "an earlier attempt of it is still here"
        if offer.attempt <= self.fences.attempt(offer.uid):
            return "floor", "that attempt was started or refused here before"
        if profile.drained:
            return "drained", f"drained: {profile.drain_reason}" if profile.drain_reason else "drained"
        if not self._state.has_disk_room:
            return "disk", "its disk is nearly full"
        if profile.trouble:
            return "room", profile.trouble
        never = why_never(profile, offer.spec.request, offer.spec.placement, src)
        waits_for_frozen = self._state.runs_frozen_only and not self._ledger.fits(offer.spec.request)
        if never or waits_for_frozen:
            return ("cannot", never) if never else ("room", STUCK)
        if refused:
            return "policy", refused
        if stalled:
            return "stalled", stalled
        if not directory_here:
            return (
                "directory",
                f"no directory {offer.spec.directory.decode(errors='replace')[: messages.WHY_LENGTH_MAX]} there",
            )
        if known is None and (too_many := self._too_many(src)):
            return "busy", too_many
        if (
            known is None
            and not offer.only
            and not self._is_promised(offer)
            and not self._mediator.accepts_offer(offer)
        ):
            return "room", "no room there any more"
        return None

    def _too_many(self, src: str) -> str:
        """Reason why no more offers of src are accepted, whatever is free; "" if src may offer more."""
        if len(self._table.reserved.get(src, ())) >= OFFERS_MAX:
            self._state.broken(rules.PEERS_LIMITED, src, f"more than {OFFERS_MAX} offers pending")
            return f"{OFFERS_MAX} offers of {src} are pending here already"
        if len(self.remote_tasks) >= self._state.config.guests_max:
            return f"{len(self.remote_tasks)} tasks of other homes are here already"
        return ""

    def _is_promised(self, offer: messages.Offer) -> bool:
        """True if this node has asked for the task and keeps resources for it. The devices of a promised task were not
        known at the promise, so it counts as not promised."""
        is_expected = offer.uid in self._ledger.inbound
        if is_expected and offer.spec.request.takes_devices:
            self._ledger.expect_no_more(offer.uid)
            return False
        return is_expected

    def commit_received(self, src: str, commit: messages.Commit) -> None:
        """Queue an attempt, if the COMMIT answers its live reservation; else refuse it for good."""
        if self._is_unauthorized(src, commit.task, commit.uid):
            return
        remote = self.by_uid.get(commit.uid)
        if remote is not None and remote.attempt == commit.attempt and remote.home == src:
            if remote.phase is not RemotePhase.RESERVED:
                self._report(remote)
                return
            if remote.nonce == commit.nonce and remote.ts == commit.ts:
                self._state.clear_timer(timers.ReservationTimeout(remote.key))
                self._ledger.expect_no_more(remote.uid)
                remote.enter(RemotePhase.WAITING)
                self._table.committed(remote)
                remote.lease_s = commit.lease_s
                remote.deadline_s = remote.ts + commit.lease_s
                remote.arrived_s = self._state.now.boot_s
                self._queue.add(remote)
                self._state.count(metrics.REMOTE_TASKS_COMMITTED)
                self._state.note_remote(remote, "accepted", "committed by its home")
                self.leases.began(remote)
                self._mediator.remote_arrived(remote)
                return
            self._drop(remote)
        self._refuse(src, commit.task, commit.uid, commit.attempt, "no such reservation (any more)")

    def _refuse(self, src: str, task: str, uid: bytes, attempt: int, reason: str) -> None:
        """Answer about an attempt that is not here: NOT_STARTED, durable before it is sent (D6), or DIED. No answer yet
        while the launcher is still ending it (R8): home asks again."""
        if self._mediator.is_ending(execution_key(uid, attempt)):
            return
        if attempt > self.fences.attempt(uid):
            self.fences.raise_to(uid, attempt, FenceKind.REFUSED, src)
            self._state.note("attempt", "refused", task=task, attempt=attempt, node=src, reason=reason)
        store = self._state.store
        if self.fences.was_refused(uid, attempt):
            self._state.send(src, messages.NotStarted(task, uid, attempt, reason, store))
        else:
            self._state.send(src, messages.Died(task, uid, attempt, "it no longer exists there", store))

    def files_staged(self, key: str, code: str, why: str) -> None:
        """Accept an offer whose files are now here, or decline it with this code."""
        remote = self.remote_tasks.get(key)
        if remote is None or not remote.is_staging:
            self._state.actions.append(actions.ForgetTask(key, output=False))  # the offer was withdrawn
            return
        remote.is_staging = False
        if code:
            self._decline(remote.home, remote, code, why[: messages.WHY_LENGTH_MAX])
            self._drop(remote)
            return
        remote.ts = self._state.now.boot_s
        remote.repeat_s = self._state.config.repeat_s
        self._accept(remote)

    def not_committed(self, key: str) -> None:
        """Repeat ACCEPT, or end the reservation, because no COMMIT has come."""
        remote = self.remote_tasks.get(key)
        if remote is None or remote.phase is not RemotePhase.RESERVED:
            return
        if self._state.now.boot_s < remote.ts + self._state.config.reservation_s:
            self._accept(remote)
        else:
            self._state.count(metrics.RESERVATIONS_EXPIRED)
            self._drop(remote)

    # -- running -------------------------------------------------------------------------------------------------------

    def start(self, remote: RemoteTask, after: str = "") -> bool:
        """Make START durable, then start the process once the attempt ``after`` has ended. A task whose lease has
        expired is given back instead (→ False)."""
        if remote.deadline_s <= self._state.now.boot_s:
            self.give_back(remote, "its lease ran out while it waited")
            return False
        remote.enter(RemotePhase.HERE)
        is_once = remote.spec.guarantee is Guarantee.ONCE
        self._state.persist(
            actions.PutExecution(remote.record(ExecutionState.START)),
            self.fences.row(
                remote.uid, remote.attempt, FenceKind.STARTED_ONCE if is_once else FenceKind.STARTED, remote.home
            ),
        )
        self._state.note_remote(remote, "started", "room here")
        self._state.actions.append(
            actions.SpawnTask(
                remote.key,
                remote.task,
                remote.attempt,
                remote.home,
                remote.spec,
                0.0 if remote.is_parked else remote.deadline_s,
                remote.ts,
                self._state.config.frozen_s_max,
                remote.devices,
                after,
            )
        )
        return True

    def started(
        self,
        remote: RemoteTask,
        started_at: float,
        reason: str = "its process is there",
        *,
        is_over: bool = False,
        is_short: bool = False,
    ) -> None:
        """Notify the home that the launcher has the process; users see this as running. is_over: its RESULT follows and
        says so too, except for its devices. is_short: the end is expected soon; the notice waits a little, and is
        dropped if it ends."""
        remote.running_at = started_at
        self._state.note_remote(remote, "running", reason)
        self._state.set_time_limit(remote.key, remote.spec.time_limit_s, started_at)
        if is_short and not remote.devices:
            if not is_over:
                self.leases.tell_later(remote)
        elif not is_over or remote.devices:
            self._report(remote)

    def ack_received(self, src: str, ack: messages.ResultAck) -> None:
        remote = self._guest_of(src, ack.uid)
        if ack.uid not in self.by_uid and not self._is_unauthorized(src, ack.task, ack.uid):
            self.fences.noted(ack.uid, ack.attempt)  # its DIED
        if remote is not None and remote.attempt == ack.attempt and remote.phase is RemotePhase.ENDED:
            self.results.acknowledged(remote)

    def _report(self, remote: RemoteTask) -> None:
        """Send the state of an attempt here to its home."""
        if remote.phase is RemotePhase.ENDED:
            self.results.send(remote)
        elif remote.phase is not RemotePhase.RESERVED:
            self.leases.renew_one(remote)

    # -- leases --------------------------------------------------------------------------------------------------------

    def renew_leases(self) -> None:
        """Request renewals for all attempts here. A waiting attempt whose lease has expired is given back."""
        for remote in self.leases.expired():
            self.give_back(remote, "its lease ran out while it waited")
        self.leases.renew()

    def renewed(self, src: str, message: messages.RenewOk) -> None:
        """Extend leases of a home. A home that had parked an attempt is notified immediately that it has a deadline
        again, because the home waits for that."""
        for extension in message.extensions:
            remote = self._guest_of(src, extension.uid)
            if remote is None or remote.attempt != extension.attempt:
                continue
            if extension.priority is not None:
                self.prioritize(remote, extension.priority)
            if self.leases.extend(remote, extension):
                self._report(remote)

    def park_received(self, src: str, message: messages.Park) -> None:
        for parking in message.parkings:
            remote = self._guest_of(src, parking.uid)
            if remote is not None and remote.attempt == parking.attempt:
                self.leases.park(remote, parking.ts)

    # -- requests of the home ------------------------------------------------------------------------------------------

    def query_received(self, src: str, query: messages.Query) -> None:
        """Answer QUERY with the attempt's state, or with a promise that it will never be here. A query about a
        reservation means that it was granted and its COMMIT lost. Only its home gets an answer, because a promise
        raises the fence for good."""
        if self._is_unauthorized(src, query.task, query.uid):
            return
        remote = self.by_uid.get(query.uid)
        if remote is not None and remote.home == src and remote.attempt == query.attempt:
            if remote.phase is RemotePhase.RESERVED:
                self._accept(remote)
            else:
                self._report(remote)
            return
        self._refuse(src, query.task, query.uid, query.attempt, "it was never started there")

    def revoke_received(self, src: str, revoke: messages.Revoke) -> None:
        """End this attempt. One not started is refused for good; a running one gets the signal, then SIGKILL."""
        remote = self._guest_of(src, revoke.uid)
        if remote is None or remote.attempt != revoke.attempt:
            return
        self._let_go(remote, revoke.reason or "revoked")
        if remote.phase is RemotePhase.HERE:
            self._state.note_remote(remote, "revoked", revoke.reason)
            self._end(remote, revoke.signal)

    def home_revoked(self, home: str, until: float = math.inf) -> None:
        """End all attempts of a home that was shut out of the cluster; of started ones, those that started up to
        ``until`` (Unix s)."""
        self._home_gone(home, REVOKED, until)

    def is_home(self, node: str) -> bool:
        return any(remote.home == node for remote in self.remote_tasks.values())

    def home_forgotten(self, home: str) -> int:
        """End all attempts of a home that an operator of this node declares gone for good → the number of ended tasks.
        Reports of other nodes are never enough for this."""
        return self._home_gone(home, FORGOTTEN)

    def _home_gone(self, home: str, reason: str, until: float = math.inf) -> int:
        """End all attempts of a home that takes no more results. An attempt is forgotten durably before its processes
        are gone: an agent that starts meanwhile finds unknown processes, and ends them. Fences stay. → the number of
        tasks that end."""
        ended = 0
        for remote in [remote for remote in self.remote_tasks.values() if remote.home == home]:
            self._let_go(remote, reason)
            if remote.phase is RemotePhase.HERE and remote.running_at <= until:
                remote.unwanted_because = reason
                self._state.persist(actions.DropExecution(remote.uid, remote.attempt))
                self._state.note_remote(remote, "revoked", reason)
                self._end(remote, SIGKILL)
                ended += 1
            elif remote.exit is not None and remote.exit.started_at <= until:
                self.results.drop(remote, reason)
        return ended

    def cancel(self, event: RemoteCancelRequested) -> None:
        """Cancel remote tasks for a user of this machine: waiting ones are given back, the end of running ones is their
        result."""
        cancelled: list[str] = []
        ended: list[str] = []
        wanted = frozenset(event.tasks)
        for remote in [
            remote for remote in self.remote_tasks.values() if remote.task in wanted or remote.array in wanted
        ]:
            (ended if remote.phase is RemotePhase.ENDED else cancelled).append(remote.task)
            self._let_go(remote, event.reason)
            if remote.phase is RemotePhase.HERE:
                remote.killed_because = event.reason
                self._state.note_remote(remote, "cancelled", event.reason)
                self._end(remote, SIGKILL if event.force else event.signal)
        self._state.actions.append(actions.Answer(event.request, {"cancelled": cancelled, "already_ended": ended}))

    def _end(self, remote: RemoteTask, signal: int) -> None:
        """Send a signal to the processes of an attempt, and later SIGKILL."""
        self._state.actions.append(actions.SignalTask(remote.key, signal))
        self._state.set_timer_in(self._state.config.kill_after_s, timers.Kill(remote.key))

    def signal_received(self, src: str, message: messages.Signal) -> None:
        remote = self._guest_of(src, message.uid)
        if remote is None or remote.attempt != message.attempt:
            return
        if remote.phase is RemotePhase.HERE:
            self._state.actions.append(actions.SignalTask(remote.key, message.signal))

    def prioritize(self, remote: RemoteTask, priority: int) -> None:
        """Change the priority of an attempt that has not started: it moves in the queue."""
        if remote.spec.priority == priority or remote.phase not in (RemotePhase.RESERVED, RemotePhase.WAITING):
            return
        self._queue.prioritize(remote, priority)
        if remote.phase is RemotePhase.WAITING:
            self._state.note_remote(remote, "queued", f"its priority is {priority} now")

    def give_back(self, remote: RemoteTask, reason: str, to: str = "") -> None:
        """Return a waiting task to its home unstarted, for good (D6): RETURN, which may suggest a better node."""
        self._queue.remove(remote)
        self._remove(remote)
        self.fences.raise_to(remote.uid, remote.attempt, FenceKind.REFUSED, remote.home)
        self._state.note_remote(remote, "returned", reason)
        store = self._state.store
        self._state.send(remote.home, messages.Return(remote.task, remote.uid, remote.attempt, to, reason, store))

    def give_all_back(self, reason: str) -> int:
        """Give all waiting attempts back to their homes and drop all reservations → the number given back."""
        remotes = list(self.remote_tasks.values())
        for remote in remotes:
            self._let_go(remote, reason)
        return sum(remote.phase is RemotePhase.WAITING for remote in remotes)

    def give_unrunnable_back(self) -> None:
        """Give waiting attempts back that need something this node no longer has."""
        for remote in [remote for remote in self.remote_tasks.values() if remote.phase is RemotePhase.WAITING]:
            never = why_never(self._state.profile, remote.spec.request, remote.spec.placement, remote.home)
            if never:
                self.give_back(remote, never)

    def give_waiting_back(self) -> None:
        """Give all waiting attempts back, because their start cannot be predicted."""
        for remote in list(self.remote_tasks.values()):
            if remote.phase is RemotePhase.WAITING:
                self.give_back(remote, STUCK)

    def home_is_back(self, home: str) -> None:
        """Send the state of its tasks here to a home that has restarted."""
        for remote in list(self.remote_tasks.values()):
            if remote.home == home:
                remote.repeat_s = self._state.config.repeat_s
                self._report(remote)

    # -- after a restart of this agent ---------------------------------------------------------------------------------

    def adopt(self, record: ExecutionRecord) -> RemoteTask:
        """Add an attempt from the store; the caller reports whether it runs, has ended or died."""
        remote = RemoteTask.of(record, self._state.now.boot_s)
        self._table.add(remote)
        if record.state is ExecutionState.RESULT:
            remote.repeat_s = self._state.config.repeat_s
            self.results.send(remote)
        return remote

    def adopted_running(self, remote: RemoteTask, started_at: float, ts: float) -> None:
        """Continue with an attempt that runs on after a restart, and notify its home. ts: the launcher's newest."""
        remote.ts = max(remote.ts, ts)
        self.started(remote, started_at, "it runs on; the agent has restarted")
        self.leases.began(remote)
        if remote.unwanted_because:  # the request to end it may not have reached this launcher
            self._end(remote, SIGKILL)

    # -- internals -----------------------------------------------------------------------------------------------------

    def _let_go(self, remote: RemoteTask, reason: str) -> None:
        """End a reservation, or give a waiting attempt back. An attempt that was started stays."""
        if remote.phase is RemotePhase.RESERVED:
            self._drop(remote)
        elif remote.phase is RemotePhase.WAITING:
            self.give_back(remote, reason)

    def _drop(self, remote: RemoteTask) -> None:
        """End a reservation; nothing was started and nothing is promised."""
        self._state.clear_timer(timers.ReservationTimeout(remote.key))
        self._ledger.expect_no_more(remote.uid)
        self._remove(remote)

    def _remove(self, remote: RemoteTask) -> None:
        """Remove an attempt that was not started, and its staged files."""
        if remote.spec.is_staged:
            self._state.actions.append(actions.ForgetTask(remote.key, output=False))
        self._table.remove(remote)


RENEWALS_PER_LEASE = 4
STARTS_TOLD_S = 0.25


class RemoteTaskTable:
    """The attempts of other homes on this node, by key. by_uid: the newest attempt of each task; reserved: the keys of
    those not committed yet, by home."""

    def __init__(self) -> None:
        self.remote_tasks: dict[str, RemoteTask] = {}
        self.by_uid: dict[bytes, RemoteTask] = {}
        self.reserved: dict[str, set[str]] = {}

    def add(self, remote: RemoteTask) -> None:
        self.remote_tasks[remote.key] = remote
        self.by_uid[remote.uid] = remote
        if remote.phase is RemotePhase.RESERVED:
            self.reserved.setdefault(remote.home, set()).add(remote.key)

    def committed(self, remote: RemoteTask) -> None:
        reserved = self.reserved.get(remote.home)
        if reserved is not None:
            reserved.discard(remote.key)
            if not reserved:
                del self.reserved[remote.home]

    def remove(self, remote: RemoteTask) -> None:
        """Remove an attempt that needs no more entry here."""
        self.remote_tasks.pop(remote.key, None)
        self.committed(remote)
        if self.by_uid.get(remote.uid) is remote:
            del self.by_uid[remote.uid]


class ExecutorLeases:
    """The leases of the attempts on one node; its timer is ``renew``."""

    def __init__(self, state: CoreState, table: RemoteTaskTable) -> None:
        self._state = state
        self._remote_tasks = table.remote_tasks
        self._renew_at_s = math.inf
        self._untold: list[RemoteTask] = []
        """Started attempts whose homes are not notified yet."""

    def began(self, remote: RemoteTask) -> None:
        """Begin renewals of the lease of an attempt."""
        self._renew_within(remote.lease_s / RENEWALS_PER_LEASE)

    def _renew_within(self, seconds: float) -> None:
        renew_at_s = self._state.now.boot_s + seconds
        if renew_at_s < self._renew_at_s:
            self._renew_at_s = renew_at_s
            self._state.set_timer_in(seconds, timers.RenewalDue())

    def expired(self) -> list[RemoteTask]:
        """The attempts that still wait here and whose leases have expired."""
        now_s = self._state.now.boot_s
        return [g for g in self._remote_tasks.values() if g.phase is RemotePhase.WAITING and g.deadline_s <= now_s]

    def renew(self) -> None:
        """Send one RENEW to each home for all its attempts here, every quarter of the shortest lease."""
        self._renew_at_s = math.inf
        leased = [one for one in self._remote_tasks.values() if one.phase in (RemotePhase.WAITING, RemotePhase.HERE)]
        self._send(leased)
        if leased:
            self._renew_within(min(remote.lease_s for remote in leased) / RENEWALS_PER_LEASE)

    def _send(self, remotes: Iterable[RemoteTask]) -> None:
        """Send RENEW to each home for these of its attempts."""
        batches: dict[str, list[messages.Renewal]] = {}
        for remote in remotes:
            batches.setdefault(remote.home, []).append(self._renewal(remote))
        for home, batch in batches.items():
            for first in range(0, len(batch), messages.RENEWALS_MAX):
                self._state.send(home, messages.Renew(tuple(batch[first : first + messages.RENEWALS_MAX])))

    def renew_one(self, remote: RemoteTask) -> None:
        """Send one renewal out of turn: its home has asked, or should be notified."""
        devices = remote.devices if remote.phase is RemotePhase.HERE else ()
        self._state.send(remote.home, messages.Renew((self._renewal(remote, devices),)))

    def tell_later(self, remote: RemoteTask) -> None:
        """Notify its home within STARTS_TOLD_S that an attempt has started, with others, unless it ends before."""
        if not self._untold:
            self._state.set_timer_in(STARTS_TOLD_S, timers.StartsTold())
        self._untold.append(remote)

    def tell_starts(self) -> None:
        """Send the renewals that `tell_later` has delayed."""
        untold, self._untold = self._untold, []
        here = (remote for remote in untold if self._remote_tasks.get(remote.key) is remote)
        self._send(remote for remote in here if remote.phase is RemotePhase.HERE)

    def _renewal(self, remote: RemoteTask, devices: tuple[str, ...] = ()) -> messages.Renewal:
        now_s = self._state.now.boot_s
        ran_s = max(now_s - remote.started_s, 0.0) if remote.spec.lease_auto and remote.running_at else 0.0
        deadline_ts = 0.0 if remote.is_parked else remote.ts
        waits = remote.output_waits_because[: messages.WHY_LENGTH_MAX]
        return messages.Renewal(
            remote.task, remote.uid, remote.attempt, now_s, remote.running_at, deadline_ts, ran_s, devices, waits
        )

    def extend(self, remote: RemoteTask, extension: messages.LeaseExtension) -> bool:
        """Extend the lease of an attempt, from the time of this node's request. True if its home had parked it."""
        if extension.ts <= remote.ts:
            return False
        was_parked = remote.is_parked
        remote.ts = extension.ts
        remote.deadline_s = extension.ts + extension.lease_s
        remote.is_parked = False
        if extension.lease_s < remote.lease_s:
            self._renew_within(extension.lease_s / RENEWALS_PER_LEASE)
        remote.lease_s = extension.lease_s
        if remote.phase is RemotePhase.HERE:
            self._state.actions.append(actions.SetLease(remote.key, remote.deadline_s, remote.ts))
        return was_parked

    def park(self, remote: RemoteTask, ts: float) -> None:
        """Park an attempt: its home leaves, and the attempt has no deadline until the home has returned. A message
        older than the home's last answer is ignored; one of the same age counts, because the home sent it after
        its answer."""
        if ts < remote.ts or remote.phase not in (RemotePhase.WAITING, RemotePhase.HERE):
            return
        remote.ts = ts
        remote.deadline_s = math.inf
        remote.is_parked = True
        if remote.phase is RemotePhase.HERE:
            self._state.actions.append(actions.SetLease(remote.key, 0.0, remote.ts))


class ExecutorResults:
    """The results of the attempts on one node; its timers are ``result``."""

    def __init__(self, state: CoreState, ledger: Ledger, fences: AttemptFences, table: RemoteTaskTable) -> None:
        self._state = state
        self._ledger = ledger
        self._fences = fences
        self._table = table

    def ended(self, remote: RemoteTask, exit_: Exit) -> None:
        """Make a RESULT durable, then send it until it is acknowledged."""
        if remote.phase is RemotePhase.ENDED:
            return
        if remote.unwanted_because:  # a kill by this node is no result
            self.died(remote, f"it was ended there: {remote.unwanted_because}")
            self._state.actions.append(actions.ForgetTask(remote.key, output=True))
            return
        remote.enter(RemotePhase.ENDED)
        remote.exit = exit_
        self._state.history.learn(remote.spec, exit_)
        remote.repeat_s = self._state.config.repeat_s
        if remote.spec.time_limit_s:
            self._state.clear_timer(timers.TimeLimit(remote.key))
        self._state.persist(actions.PutExecution(remote.record(ExecutionState.RESULT)))
        self._state.note_remote(remote, "ended", how_it_ended(exit_))
        self.send(remote)

    def send(self, remote: RemoteTask) -> None:
        """Send a result, and set the timer to repeat it."""
        if remote.exit is not None:
            self._state.actions.append(
                actions.SendResult(remote.home, remote.task, remote.uid, remote.attempt, remote.exit)
            )
            self._state.set_timer_in(remote.repeat_s, timers.ResultTimeout(remote.key))

    def repeat(self, key: str) -> None:
        """Repeat a result that is not acknowledged."""
        remote = self._table.remote_tasks.get(key)
        if remote is not None and remote.phase is RemotePhase.ENDED:
            remote.repeat_s = min(remote.repeat_s * 2, self._state.config.repeat_s_max)
            self.send(remote)

    def acknowledged(self, remote: RemoteTask) -> None:
        """Forget an attempt whose result is recorded at home; its fence stays."""
        self._fences.noted(remote.uid, remote.attempt)
        self._forget(remote, "delivered", "its home has the result")

    def drop(self, remote: RemoteTask, reason: str) -> None:
        """Drop a result that its home will never take; its fence stays."""
        self._forget(remote, "lost", f"its result was dropped: {reason}")

    def _forget(self, remote: RemoteTask, state: str, reason: str) -> None:
        self._state.clear_timer(timers.ResultTimeout(remote.key))
        self._state.persist(actions.DropExecution(remote.uid, remote.attempt))
        self._state.note_remote(remote, state, reason)
        self._state.actions.append(actions.ForgetTask(remote.key, output=True))
        self._table.remove(remote)

    def died(self, remote: RemoteTask, reason: str) -> None:
        """Report an attempt that was started, left no result, and whose processes are gone."""
        self._ledger.end(remote.key)
        self._state.persist(actions.DropExecution(remote.uid, remote.attempt))
        self._state.note_remote(remote, "lost", reason)
        store = self._state.store
        self._state.send(remote.home, messages.Died(remote.task, remote.uid, remote.attempt, reason, store))
        self._table.remove(remote)

    def never_started(self, remote: RemoteTask, reason: str, *, is_returned: bool = False) -> None:
        """Refuse an attempt whose START is durable: the launcher has confirmed that it never had a process, and will
        have none (D6). is_returned: without a fault, so that it may be placed again immediately."""
        self._ledger.end(remote.key)
        refused = self._fences.row(remote.uid, remote.attempt, FenceKind.REFUSED, remote.home)
        self._state.persist(actions.DropExecution(remote.uid, remote.attempt), refused)
        self._state.note_remote(remote, "returned" if is_returned else "refused", reason)
        task, uid, attempt, store = remote.task, remote.uid, remote.attempt, self._state.store
        if is_returned:
            self._state.send(remote.home, messages.Return(task, uid, attempt, "", reason, store))
        else:
            self._state.send(remote.home, messages.NotStarted(task, uid, attempt, reason, store))
        self._table.remove(remote)


DROPPED_AT_ONCE_MAX = 1000
"""Limit on the fences that one event drops: one row each in one commit."""
DROP_AGAIN_S = 1.0


class AttemptFence(NamedTuple):
    """Fence of one task. at_s: this node's clock at its last use; home: of the task, "" if unknown."""

    attempt: int
    kind: FenceKind
    at_s: float
    home: str


class AttemptFences:
    """The fences by uid, the longest unused first; its timer is ``floors``. here: this node's attempts, by uid."""

    def __init__(self, state: CoreState, here: Mapping[bytes, RemoteTask]) -> None:
        self._state = state
        self._here = here
        self._fences: dict[bytes, AttemptFence] = {}

    def __contains__(self, uid: bytes) -> bool:
        return uid in self._fences

    def __len__(self) -> int:
        return len(self._fences)

    def restore(self, fences: Iterable[tuple[bytes, int, FenceKind, str]]) -> None:
        """Restore the durable fences at start; each is kept as if it had just been used."""
        now_s = self._state.now.boot_s
        self._fences.update((uid, AttemptFence(attempt, kind, now_s, home)) for uid, attempt, kind, home in fences)

    def attempt(self, uid: bytes) -> int:
        """The fence itself; 0 if there is none."""
        fence = self._fences.get(uid)
        return fence.attempt if fence is not None else 0

    def home(self, uid: bytes) -> str:
        """The home of the task; "" if unknown."""
        fence = self._fences.get(uid)
        return fence.home if fence is not None else ""

    def was_refused(self, uid: bytes, attempt: int) -> bool:
        """True if exactly this attempt was refused: then it has never started here."""
        fence = self._fences.get(uid)
        return fence is not None and fence.attempt == attempt and fence.kind is FenceKind.REFUSED

    def row(self, uid: bytes, attempt: int, kind: FenceKind, home: str) -> actions.PutFloor:
        """Raise a fence, or change its reason → the row to persist. Above the bound, the oldest fences are dropped."""
        now = self._state.now
        self._fences.pop(uid, None)  # moves it to the end
        self._bound()
        self._fences[uid] = AttemptFence(attempt, kind, now.boot_s, home)
        return actions.PutFloor(uid, attempt, now.wall_s, kind, home)

    def raise_to(self, uid: bytes, attempt: int, kind: FenceKind, home: str) -> None:
        """Raise the fence durably; it is never lowered."""
        if self.attempt(uid) < attempt:
            self._state.persist(self.row(uid, attempt, kind, home))

    def found_running(self, key: str) -> None:
        """Fence an attempt that the launcher runs but this node does not know (the database was lost): it has
        started."""
        with contextlib.suppress(ValueError):
            uid, attempt = attempt_of(key)
            self.raise_to(uid, attempt, FenceKind.STARTED, self.home(uid))

    def noted(self, uid: bytes, attempt: int) -> None:
        """Record that the home has acknowledged the end of an attempt that may run only once."""
        fence = self._fences.get(uid)
        if fence is not None and fence.attempt == attempt and fence.kind is FenceKind.STARTED_ONCE:
            self._state.persist(self.row(uid, attempt, FenceKind.STARTED, fence.home))

    def expire(self) -> None:
        """Drop fences that were unused for floor_kept_s."""
        now_s, kept_s = self._state.now.boot_s, self._state.config.floor_kept_s
        self._drop(now_s - kept_s)
        oldest = next(iter(self._fences.values()), None)
        left_s = oldest.at_s + kept_s - now_s if oldest is not None else kept_s
        self._state.set_timer_in(max(left_s, DROP_AGAIN_S), timers.Fences())

    def _bound(self) -> None:
        if len(self._fences) >= self._state.config.floors_kept_max + DROPPED_AT_ONCE_MAX:
            self._drop(self._state.now.boot_s)

    def _drop(self, before_s: float) -> None:
        """Drop fences unused since then, at most DROPPED_AT_ONCE_MAX; fences still needed move to the end."""
        gone: list[bytes] = []
        for _ in range(min(DROPPED_AT_ONCE_MAX, len(self._fences))):
            uid, fence = next(iter(self._fences.items()))
            if fence.at_s > before_s:
                break
            del self._fences[uid]
            if fence.kind is FenceKind.STARTED_ONCE or uid in self._here:
                self._fences[uid] = fence._replace(at_s=self._state.now.boot_s)
            else:
                gone.append(uid)
        if gone:
            self._state.persist(actions.DropFloors(tuple(gone)))
