"""Leases of attempts of other homes on this node: renewals asked for and granted, and homes that go away (R1, R12).

A lease counts from the moment this node *sent* the message that was granted, never from when the answer came (R1). What
is granted or told is applied in the order of ``ts``, which only this node's clock writes; the launcher enforces the
deadline and keeps the newest ts with it, so that the next agent knows both.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from peerload.core.work import RemotePhase
from peerload.model import timers
from peerload.model.actions import SetLease
from peerload.model.messages import RENEWALS_MAX, Renew, Renewal

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.core.state import CoreState
    from peerload.core.work import RemoteTask
    from peerload.model.messages import Park, RenewOk

RENEWALS_PER_LEASE = 4


class ExecutorLeases:
    """One per node, over its guests; its timer is ``renew``. ``guest_of(home, uid)`` finds one; ``report(guest)`` says to its home what is here of it,
    ``give_back(guest, reason)`` ends one that waits, ``prioritize(guest, priority)`` has it wait elsewhere in the queue."""

    def __init__(
        self,
        state: CoreState,
        guests: dict[str, RemoteTask],
        guest_of: Callable[[str, bytes], RemoteTask | None],
        report: Callable[[RemoteTask], None],
        give_back: Callable[[RemoteTask, str], None],
        prioritize: Callable[[RemoteTask, int], None],
    ) -> None:
        self._state = state
        self._guests = guests
        self._guest_of = guest_of
        self._report = report
        self._give_back = give_back
        self._prioritize = prioritize
        self._renew_at_s = math.inf

    def began(self, guest: RemoteTask) -> None:
        """Begin to renew the lease of an attempt."""
        self._renew_within(guest.lease_s / RENEWALS_PER_LEASE)

    def _renew_within(self, seconds: float) -> None:
        renew_at_s = self._state.now.boot_s + seconds
        if renew_at_s < self._renew_at_s:
            self._renew_at_s = renew_at_s
            self._state.set_timer_in(seconds, timers.Renew())

    def renew(self) -> None:
        """One RENEW a home for all its attempts here, every quarter of the shortest lease."""
        self._renew_at_s = math.inf
        batches: dict[str, list[Renewal]] = {}
        shortest_s = math.inf
        now_s = self._state.now.boot_s
        for guest in list(self._guests.values()):
            if guest.phase not in (RemotePhase.WAITING, RemotePhase.HERE):
                continue
            if guest.phase is RemotePhase.WAITING and guest.deadline_s <= now_s:
                self._give_back(guest, "its lease ran out while it waited")
                continue
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

    def renewed(self, src: str, message: RenewOk) -> None:
        """More time, counted from when this node asked for it. A home that had parked the task learns at once that it has
        a deadline again: it waits for that."""
        for extension in message.extensions:
            guest = self._guest_of(src, extension.uid)
            if guest is None or guest.attempt != extension.attempt:
                continue
            if extension.priority is not None:
                self._prioritize(guest, extension.priority)
            if extension.ts <= guest.ts:
                continue
            was_parked = guest.is_parked
            guest.ts = extension.ts
            guest.deadline_s = extension.ts + extension.lease_s
            guest.is_parked = False
            if extension.lease_s < guest.lease_s:
                self._renew_within(extension.lease_s / RENEWALS_PER_LEASE)
            guest.lease_s = extension.lease_s
            if guest.phase is RemotePhase.HERE:
                self._state.actions.append(SetLease(guest.key, guest.deadline_s, guest.ts))
            if was_parked:
                self._report(guest)

    def park_received(self, src: str, message: Park) -> None:
        """Park attempts: their home goes away, and there is no deadline until it is back. Ignored if it is older than what the home has answered since;
        of the same age it counts, as the home said it after its answer."""
        for parking in message.parkings:
            guest = self._guest_of(src, parking.uid)
            if guest is None or guest.attempt != parking.attempt or parking.ts < guest.ts:
                continue
            if guest.phase not in (RemotePhase.WAITING, RemotePhase.HERE):
                continue
            guest.ts = parking.ts
            guest.deadline_s = math.inf
            guest.is_parked = True
            if guest.phase is RemotePhase.HERE:
                self._state.actions.append(SetLease(guest.key, 0.0, guest.ts))
