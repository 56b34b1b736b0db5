"""Tasks of other homes on this node: their table, their leases and their results.

A lease counts from the moment this node *sent* the message that was granted, never from when the answer came (R1). What
is granted is applied in the order of ``ts``, which only this node's clock writes; the launcher enforces the deadline and
keeps the newest ts with it, so that the next agent knows both.

RESULT is durable before it is sent (D4), and is kept and repeated until its home has acknowledged it (R10). An attempt
without a result has died, unless the launcher confirms that it never had a process: then it is refused (D6).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from peerload.core.work import RemotePhase
from peerload.model import timers
from peerload.model.actions import DropExecution, ForgetTask, PutExecution, SendResult, SetLease
from peerload.model.messages import RENEWALS_MAX, Died, NotStarted, Renew, Renewal
from peerload.model.task import ExecutionState, FenceKind, how_it_ended

if TYPE_CHECKING:
    from peerload.core.handoff.attempt_fence import AttemptFences
    from peerload.core.resources.admission import Ledger
    from peerload.core.state import CoreState
    from peerload.core.work import RemoteTask
    from peerload.model.messages import LeaseExtension
    from peerload.model.task import Exit

RENEWALS_PER_LEASE = 4


class RemoteTaskTable:
    """The attempts of other homes on this node, by key. by_uid: the newest attempt of each task; reserved: the keys of
    those that are not committed yet, by home."""

    def __init__(self) -> None:
        self.guests: dict[str, RemoteTask] = {}
        self.by_uid: dict[bytes, RemoteTask] = {}
        self.reserved: dict[str, set[str]] = {}

    def add(self, guest: RemoteTask) -> None:
        """Add an attempt, a reservation or one that was committed."""
        self.guests[guest.key] = guest
        self.by_uid[guest.uid] = guest
        if guest.phase is RemotePhase.RESERVED:
            self.reserved.setdefault(guest.home, set()).add(guest.key)

    def committed(self, guest: RemoteTask) -> None:
        """An attempt is no reservation any more."""
        reserved = self.reserved.get(guest.home)
        if reserved is not None:
            reserved.discard(guest.key)
            if not reserved:
                del self.reserved[guest.home]

    def remove(self, guest: RemoteTask) -> None:
        """Remove an attempt, of which nothing more is to be known here."""
        self.guests.pop(guest.key, None)
        self.committed(guest)
        if self.by_uid.get(guest.uid) is guest:
            del self.by_uid[guest.uid]


class ExecutorLeases:
    """The leases of the attempts on one node; its timer is ``renew``."""

    def __init__(self, state: CoreState, table: RemoteTaskTable) -> None:
        self._state = state
        self._guests = table.guests
        self._renew_at_s = math.inf

    def began(self, guest: RemoteTask) -> None:
        """Begin to renew the lease of an attempt."""
        self._renew_within(guest.lease_s / RENEWALS_PER_LEASE)

    def _renew_within(self, seconds: float) -> None:
        renew_at_s = self._state.now.boot_s + seconds
        if renew_at_s < self._renew_at_s:
            self._renew_at_s = renew_at_s
            self._state.set_timer_in(seconds, timers.RenewalDue())

    def expired(self) -> list[RemoteTask]:
        """The attempts that still wait here, and whose leases have run out."""
        now_s = self._state.now.boot_s
        return [g for g in self._guests.values() if g.phase is RemotePhase.WAITING and g.deadline_s <= now_s]

    def renew(self) -> None:
        """Send one RENEW to each home for all its attempts here, every quarter of the shortest lease."""
        self._renew_at_s = math.inf
        batches: dict[str, list[Renewal]] = {}
        shortest_s = math.inf
        for guest in self._guests.values():
            if guest.phase in (RemotePhase.WAITING, RemotePhase.HERE):
                shortest_s = min(shortest_s, guest.lease_s)
                batches.setdefault(guest.home, []).append(self._renewal(guest))
        for home, batch in batches.items():
            for first in range(0, len(batch), RENEWALS_MAX):
                self._state.send(home, Renew(tuple(batch[first : first + RENEWALS_MAX])))
        if shortest_s < math.inf:
            self._renew_within(shortest_s / RENEWALS_PER_LEASE)

    def renew_one(self, guest: RemoteTask) -> None:
        """Send one renewal out of turn: its home has asked, or should know."""
        devices = guest.devices if guest.phase is RemotePhase.HERE else ()
        self._state.send(guest.home, Renew((self._renewal(guest, devices),)))

    def _renewal(self, guest: RemoteTask, devices: tuple[str, ...] = ()) -> Renewal:
        now_s = self._state.now.boot_s
        ran_s = max(now_s - guest.started_s, 0.0) if guest.spec.lease_auto and guest.running_at else 0.0
        deadline_ts = 0.0 if guest.is_parked else guest.ts
        return Renewal(guest.task, guest.uid, guest.attempt, now_s, guest.running_at, deadline_ts, ran_s, devices)

    def extend(self, guest: RemoteTask, extension: LeaseExtension) -> bool:
        """Give an attempt more time, counted from when this node asked for it. True if its home had parked it."""
        if extension.ts <= guest.ts:
            return False
        was_parked = guest.is_parked
        guest.ts = extension.ts
        guest.deadline_s = extension.ts + extension.lease_s
        guest.is_parked = False
        if extension.lease_s < guest.lease_s:
            self._renew_within(extension.lease_s / RENEWALS_PER_LEASE)
        guest.lease_s = extension.lease_s
        if guest.phase is RemotePhase.HERE:
            self._state.actions.append(SetLease(guest.key, guest.deadline_s, guest.ts))
        return was_parked

    def park(self, guest: RemoteTask, ts: float) -> None:
        """Park an attempt: its home goes away, and there is no deadline until it is back. This is ignored if it is older
        than the last answer of the home; of the same age it counts, since the home sent it after its answer."""
        if ts < guest.ts or guest.phase not in (RemotePhase.WAITING, RemotePhase.HERE):
            return
        guest.ts = ts
        guest.deadline_s = math.inf
        guest.is_parked = True
        if guest.phase is RemotePhase.HERE:
            self._state.actions.append(SetLease(guest.key, 0.0, guest.ts))


class ExecutorResults:
    """The results of the attempts on one node; its timers are ``result``."""

    def __init__(self, state: CoreState, ledger: Ledger, fences: AttemptFences, table: RemoteTaskTable) -> None:
        self._state = state
        self._ledger = ledger
        self._fences = fences
        self._table = table

    def ended(self, guest: RemoteTask, exit_: Exit) -> None:
        """Make a RESULT durable, then send it until it is acknowledged."""
        if guest.phase is RemotePhase.ENDED:
            return
        if guest.is_revoked:  # that it was killed is nobody's result
            self.died(guest, "it was ended there: its home was shut out of the cluster")
            self._state.actions.append(ForgetTask(guest.key, output=True))
            return
        guest.enter(RemotePhase.ENDED)
        guest.exit = exit_
        self._state.history.learn(guest.spec, exit_)
        guest.repeat_s = self._state.config.repeat_s
        if guest.spec.time_limit_s:
            self._state.clear_timer(timers.TimeLimit(guest.key))
        self._state.persist(PutExecution(guest.record(ExecutionState.RESULT)))
        self._state.note_guest(guest, "ended", how_it_ended(exit_))
        self.send(guest)

    def send(self, guest: RemoteTask) -> None:
        """Send a result, and again after a while."""
        if guest.exit is not None:
            self._state.actions.append(SendResult(guest.home, guest.task, guest.uid, guest.attempt, guest.exit))
            self._state.set_timer_in(guest.repeat_s, timers.ResultTimeout(guest.key))

    def repeat(self, key: str) -> None:
        """Send a result again that is not acknowledged."""
        guest = self._table.guests.get(key)
        if guest is not None and guest.phase is RemotePhase.ENDED:
            guest.repeat_s = min(guest.repeat_s * 2, self._state.config.repeat_s_max)
            self.send(guest)

    def acknowledged(self, guest: RemoteTask) -> None:
        """Forget an attempt whose result is recorded at home; its fence stays."""
        self._state.clear_timer(timers.ResultTimeout(guest.key))
        self._state.persist(DropExecution(guest.uid, guest.attempt))
        self._fences.noted(guest.uid, guest.attempt)
        self._state.note_guest(guest, "delivered", "its home has the result")
        self._state.actions.append(ForgetTask(guest.key, output=True))
        self._table.remove(guest)

    def died(self, guest: RemoteTask, reason: str) -> None:
        """Report an attempt that was started, left no result, and whose processes are gone."""
        self._ledger.end(guest.key)
        self._state.persist(DropExecution(guest.uid, guest.attempt))
        self._state.note_guest(guest, "lost", reason)
        store = self._state.store
        self._state.send(guest.home, Died(guest.task, guest.uid, guest.attempt, reason, store))
        self._table.remove(guest)

    def never_started(self, guest: RemoteTask, reason: str) -> None:
        """Refuse an attempt whose START is durable: the launcher has confirmed that it never had a process, and will have none (D6)."""
        self._ledger.end(guest.key)
        refused = self._fences.row(guest.uid, guest.attempt, FenceKind.REFUSED, guest.home)
        self._state.persist(DropExecution(guest.uid, guest.attempt), refused)
        self._state.note_guest(guest, "refused", reason)
        store = self._state.store
        self._state.send(guest.home, NotStarted(guest.task, guest.uid, guest.attempt, reason, store))
        self._table.remove(guest)
