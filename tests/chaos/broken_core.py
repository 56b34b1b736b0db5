"""The protocol with one rule left out in the core, on either side of the handoff; parking is in `broken_parking.py`.

Every variant is the smallest change that drops its rule; the names are those of the table of broken simplifications.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from peerload.core.handoff.executor import ExecutorHandoff, ExecutorLeases, ExecutorResults
from peerload.core.handoff.home import HomeHandoff, HomeLeases, granted
from peerload.core.node import Node
from peerload.core.tasks.home import Home
from peerload.core.tasks.retries import LostAttempts
from peerload.core.work import HomePhase, HomeTask, RemotePhase, RemoteTask
from peerload.model import actions, events, messages, timers
from peerload.model.task import TaskRecord

# -- leases (R1, R2, R4, R6) -------------------------------------------------------------------------------------------


def lease_from_receipt(patch: pytest.MonkeyPatch) -> None:
    """R1: the executor counts its lease from when the answer came."""
    commit_received, extend = ExecutorHandoff.commit_received, ExecutorLeases.extend

    def commit_late(self: ExecutorHandoff, src: str, commit: messages.Commit) -> None:
        known = self.by_uid.get(commit.uid)
        was_reserved = known is not None and known.phase is RemotePhase.RESERVED
        commit_received(self, src, commit)
        guest = self.by_uid.get(commit.uid)
        if guest is not None and was_reserved:
            guest.deadline_s = self._state.now.boot_s + commit.lease_s

    def extend_late(self: ExecutorLeases, guest: RemoteTask, extension: messages.LeaseExtension) -> bool:
        return extend(self, guest, msgspec.structs.replace(extension, ts=self._state.now.boot_s))

    patch.setattr(ExecutorHandoff, "commit_received", commit_late)
    patch.setattr(ExecutorLeases, "extend", extend_late)


def renew_no_extend(patch: pytest.MonkeyPatch) -> None:
    """R2: home renews leases without moving its own deadline."""
    extend = HomeLeases.extend

    def extend_once(self: HomeLeases, task: HomeTask, lease_s: float) -> None:
        if not task.running_at or not granted(task).deadline_s:
            extend(self, task, lease_s)

    patch.setattr(HomeLeases, "extend", extend_once)


def resend_no_extend(patch: pytest.MonkeyPatch) -> None:
    """R2: home repeats COMMIT without moving its own deadline (an ACCEPT said again has a new ts, as it may have)."""
    commit, accept = HomeHandoff._commit, ExecutorHandoff._accept

    def accept_anew(self: ExecutorHandoff, guest: RemoteTask) -> None:
        guest.ts = self._state.now.boot_s
        accept(self, guest)

    patch.setattr(ExecutorHandoff, "_accept", accept_anew)

    def commit_and_leave(self: HomeHandoff, task: HomeTask, ts: float) -> None:
        deadline_s = granted(task).deadline_s
        commit(self, task, ts)
        if granted(task).commits > 1:
            granted(task).deadline_s = deadline_s
            self._state.set_timer_in(max(deadline_s - self._state.now.boot_s, 0.0), timers.Lease(task.uid.hex()))

    patch.setattr(HomeHandoff, "_commit", commit_and_leave)


def reboot_deadline(patch: pytest.MonkeyPatch) -> None:
    """R4: a restarted home trusts the deadline that it kept with the lease, from before the renewals."""
    kept: dict[str, float] = {}
    commit, restored = HomeHandoff._commit, HomeLeases.restored

    def commit_and_keep(self: HomeHandoff, task: HomeTask, ts: float) -> None:
        commit(self, task, ts)
        kept[task.key] = granted(task).deadline_s

    def restored_as_kept(self: HomeLeases, task: HomeTask) -> None:
        restored(self, task)
        granted(task).deadline_s = kept.get(task.key, granted(task).deadline_s)
        left_s = max(granted(task).deadline_s - self._state.now.boot_s, 0.0)
        self._state.set_timer_in(left_s, timers.Lease(task.uid.hex()))

    patch.setattr(HomeHandoff, "_commit", commit_and_keep)
    patch.setattr(HomeLeases, "restored", restored_as_kept)


def swim_reassign(patch: pytest.MonkeyPatch) -> None:
    """R6: a task is taken from a node as soon as that is called dead, whatever was asked of it."""

    def declared_dead(self: LostAttempts, task: HomeTask) -> None:
        if task.phase is HomePhase.AWAY:
            self._lose(task, "called dead", took_down="", last_node=task.record.node, rests=False)

    patch.setattr(LostAttempts, "declared_dead", declared_dead)


def no_expiry(patch: pytest.MonkeyPatch) -> None:
    """R6: a lease never ends at home."""
    patch.setattr(HomeLeases, "ran_out", lambda self, task: None)


def boot_id_any_new(patch: pytest.MonkeyPatch) -> None:
    """R6: a machine boot id is new if it is another than home saw last, not another than that of the ACCEPT."""
    seen: dict[tuple[str, str], str] = {}
    met = Node._met

    def any_new(self: Node, event: events.PeerMet, *, told_by_itself: bool) -> None:
        identity, losses, home = event.identity, self.handoff.lost_attempts, self.home
        pair = (self.state.node, identity.node)
        before = seen.get(pair, identity.machine_boot)
        met(self, event, told_by_itself=told_by_itself)
        if told_by_itself:
            seen[pair] = identity.machine_boot
        for task in home.at(identity.node) if told_by_itself and before != identity.machine_boot else ():
            if task.phase in (HomePhase.AWAY, HomePhase.UNKNOWN):
                losses.died(task, f"{identity.node} was rebooted")

    patch.setattr(Node, "_met", any_new)


# -- attempts, reservations and promises (R7, D6) -----------------------------------------------------------------------


def two_phase(patch: pytest.MonkeyPatch) -> None:
    """The executor starts a task as soon as it has accepted it."""
    offer_received = ExecutorHandoff.offer_received

    def accepts_and_starts(
        self: ExecutorHandoff,
        src: str,
        offer: messages.Offer,
        *,
        directory_here: bool,
        refused: str = "",
        stalled: str = "",
    ) -> None:
        offer_received(self, src, offer, directory_here=directory_here, refused=refused, stalled=stalled)
        guest = self.by_uid.get(offer.uid)
        if guest is not None and guest.phase is RemotePhase.RESERVED and guest.attempt == offer.attempt:
            commit = messages.Commit(offer.task, offer.uid, offer.attempt, guest.nonce, guest.ts, offer.lease_s)
            self.commit_received(src, commit)

    patch.setattr(ExecutorHandoff, "offer_received", accepts_and_starts)


def promise_not_kept(patch: pytest.MonkeyPatch) -> None:
    """D6: a refusal leaves the reservation, so that a late COMMIT still starts the attempt."""
    query_received = ExecutorHandoff.query_received

    def refuse_and_keep(self: ExecutorHandoff, src: str, query: messages.Query) -> None:
        guest = self.by_uid.get(query.uid)
        if guest is not None and guest.phase is RemotePhase.RESERVED and guest.attempt == query.attempt:
            self._refuse(src, query.task, query.uid, query.attempt, "not yet")
        else:
            query_received(self, src, query)

    patch.setattr(ExecutorHandoff, "query_received", refuse_and_keep)


def no_tombstone(patch: pytest.MonkeyPatch) -> None:
    """R7: with an acknowledged result all is forgotten, the floor too."""
    ack_received = ExecutorHandoff.ack_received

    def forget_all(self: ExecutorHandoff, src: str, ack: messages.ResultAck) -> None:
        ack_received(self, src, ack)
        if ack.uid not in self.by_uid and self.fences._fences.pop(ack.uid, None) is not None:
            self._state.persist(actions.DropFloors((ack.uid,)))

    patch.setattr(ExecutorHandoff, "ack_received", forget_all)


def commit_unreserved(patch: pytest.MonkeyPatch) -> None:
    """R7: a COMMIT without its reservation is taken all the same."""
    offers: dict[tuple[str, bytes], messages.Offer] = {}
    offer_received, commit_received = ExecutorHandoff.offer_received, ExecutorHandoff.commit_received

    def remembered(
        self: ExecutorHandoff,
        src: str,
        offer: messages.Offer,
        *,
        directory_here: bool,
        refused: str = "",
        stalled: str = "",
    ) -> None:
        offers[self._state.node, offer.uid] = offer
        offer_received(self, src, offer, directory_here=directory_here, refused=refused, stalled=stalled)

    def taken(self: ExecutorHandoff, src: str, commit: messages.Commit) -> None:
        offer = offers.get((self._state.node, commit.uid))
        if commit.uid not in self.by_uid and offer is not None and offer.attempt == commit.attempt:
            guest = RemoteTask(offer.task, offer.uid, offer.attempt, src, offer.spec, self._state.now.boot_s)
            guest.nonce, guest.ts, guest.lease_s = commit.nonce, commit.ts, commit.lease_s
            self.remote_tasks[guest.key] = self.by_uid[guest.uid] = guest
        commit_received(self, src, commit)

    patch.setattr(ExecutorHandoff, "offer_received", remembered)
    patch.setattr(ExecutorHandoff, "commit_received", taken)


def ignore_nonces(patch: pytest.MonkeyPatch) -> None:
    """R7: any COMMIT of its attempt is taken for the answer to a reservation, and any ACCEPT for the one that was granted."""
    commit_received = ExecutorHandoff.commit_received

    def any_nonce(self: ExecutorHandoff, src: str, commit: messages.Commit) -> None:
        guest = self.by_uid.get(commit.uid)
        if guest is not None and guest.phase is RemotePhase.RESERVED and guest.attempt == commit.attempt:
            guest.nonce, guest.ts = commit.nonce, commit.ts
        commit_received(self, src, commit)

    def waits(self: HomeHandoff, task: HomeTask, src: str, message: messages.Accept) -> bool:
        del self
        return task.phase is HomePhase.AWAY and (src, message.attempt) == (task.record.node, task.record.attempt)

    patch.setattr(ExecutorHandoff, "commit_received", any_nonce)
    patch.setattr(HomeHandoff, "_waits_for_commit", waits)


def return_not_durable(patch: pytest.MonkeyPatch) -> None:
    """D6: RETURN is said, the refusal is on no disk. Nonces refuse the same again, and are ignored beside it."""

    def give_back(self: ExecutorHandoff, guest: RemoteTask, reason: str, to: str = "") -> None:
        self._queue.remove(guest)
        self._table.remove(guest)
        self._state.send(guest.home, messages.Return(guest.task, guest.uid, guest.attempt, to, reason))

    patch.setattr(ExecutorHandoff, "give_back", give_back)


def return_queued(patch: pytest.MonkeyPatch) -> None:
    """D6: RETURN is said while the task may still leave the queue."""

    def give_back(self: ExecutorHandoff, guest: RemoteTask, reason: str, to: str = "") -> None:
        self._state.send(guest.home, messages.Return(guest.task, guest.uid, guest.attempt, to, reason))

    patch.setattr(ExecutorHandoff, "give_back", give_back)


def same_n_two_commits(patch: pytest.MonkeyPatch) -> None:
    """Home commits one attempt to two nodes that both accepted it."""
    accept_received = HomeHandoff.accept_received

    def commits_to_both(self: HomeHandoff, src: str, message: messages.Accept) -> None:
        task = self._home.tasks.get(message.uid)
        if task is not None and task.phase is HomePhase.AWAY and message.attempt == task.record.attempt:
            lease_s = self.leases.first_s(task.spec)
            self.leases.extend(task, lease_s)
            commit = messages.Commit(task.task, task.uid, message.attempt, message.nonce, message.ts, lease_s)
            self._state.send(src, commit)
        else:
            accept_received(self, src, message)

    patch.setattr(HomeHandoff, "accept_received", commits_to_both)


def n_not_burnt(patch: pytest.MonkeyPatch) -> None:
    """The number of a committed attempt is used again after it came back."""
    requeue = Home.requeue

    def requeue_unburnt(self: Home, task: HomeTask, reason: str, **given: Any) -> None:
        given.setdefault("attempt", max(task.record.attempt - 1, 0))
        requeue(self, task, reason, **given)

    patch.setattr(Home, "requeue", requeue_unburnt)


# -- ends --------------------------------------------------------------------------------------------------------------


def any_result(patch: pytest.MonkeyPatch) -> None:
    """R9: a late result overwrites the recorded one."""
    finished: dict[tuple[str, bytes], TaskRecord] = {}
    finish, result_received = Home.finish, HomeHandoff.result_received

    def finish_and_keep(self: Home, task: HomeTask, exit_: Any, **given: Any) -> None:
        finish(self, task, exit_, **given)
        finished[self._state.node, task.uid] = task.record

    def overwrite(self: HomeHandoff, src: str, message: messages.Result) -> None:
        record = finished.get((self._state.node, message.uid))
        if record is not None and not message.exit.signal:
            record = msgspec.structs.replace(record, exit=message.exit)
            self._state.persist(actions.PutTask(record, self._state.now.wall_s, "a later result"))
        result_received(self, src, message)

    patch.setattr(Home, "finish", finish_and_keep)
    patch.setattr(HomeHandoff, "result_received", overwrite)


def amo_requeue(patch: pytest.MonkeyPatch) -> None:
    """At most once: a task whose attempt was lost is queued again."""

    def unknown(self: LostAttempts, task: HomeTask, reason: str, *, is_gone: bool) -> None:
        del is_gone
        self._lose(task, reason, took_down="")

    patch.setattr(LostAttempts, "_unknown", unknown)


def launcher_lost_says_not_started(patch: pytest.MonkeyPatch) -> None:
    """After its launcher died an executor says that the attempt was never started."""

    def died(self: ExecutorResults, guest: RemoteTask, reason: str) -> None:
        self.never_started(guest, reason)

    patch.setattr(ExecutorResults, "died", died)
