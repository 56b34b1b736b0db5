"""A home that goes away politely parks its tasks: they run on elsewhere without a deadline until it is back (R12).

PARKED(n, p) is durable before PARK(n, ts=p) is said; p is the newest that the home has heard of the executor's clock.
From then on the attempt is taken back on proof alone. Coming back takes a confirmation: RENEWs of p or older are not
answered; newer ones are, with a deadline; and only a RENEW that states a deadline given for more than p ends PARKED.
So it does not matter which of these messages are late, lost or repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.core.work import HomePhase
from peerload.model import metrics, timers
from peerload.model.messages import RENEWALS_MAX, Park
from peerload.model.messages import Parking as Parked

if TYPE_CHECKING:
    from peerload.core.membership.membership import Membership
    from peerload.core.state import CoreState
    from peerload.core.tasks.home import Home
    from peerload.core.work import HomeTask
    from peerload.model.messages import Renewal


class TaskParking:
    """One per node. ``is_away``: this home has said good-bye and grants nothing until it is back."""

    def __init__(self, state: CoreState, membership: Membership, home: Home) -> None:
        self._state = state
        self._membership = membership
        self._home = home
        self.is_away = False

    def go_away(self, why: str) -> None:
        """Park what other nodes have and was heard of since this home's start. At a node that a user has said to be gone for
        good nobody would hear of it, or come back: there leases run out."""
        self.is_away = True
        parked: dict[str, list[Parked]] = {}
        for node in list(self._home.elsewhere):
            if self._membership.get(node) is None:
                continue
            for task in self._home.at(node):
                record = task.record
                has_lease = task.phase in (HomePhase.AWAY, HomePhase.COLLECTING) and record.node == node
                heard_ts = task.lease.heard_ts if task.lease is not None else 0.0
                if has_lease and heard_ts > record.parked_ts:
                    self._home.become(task, f"parked: {why}", parked_ts=heard_ts)
                    self._state.clear_timer(timers.Lease.of(task.uid))
                    parked.setdefault(node, []).append(Parked(task.task, task.uid, record.attempt, heard_ts))
        for node, parkings in parked.items():
            for first in range(0, len(parkings), RENEWALS_MAX):
                self._state.send(node, Park(tuple(parkings[first : first + RENEWALS_MAX])))

    def resume(self) -> None:
        """Awake again."""
        self.is_away = False

    def is_answered(self, task: HomeTask, src: str, renewal: Renewal) -> bool:
        """True if a renewal of the current attempt is answered; it may be what ends PARKED."""
        parked_ts = task.record.parked_ts
        if not parked_ts:
            return True
        if renewal.ts <= parked_ts:  # said before this home went away
            self._state.count(metrics.RENEWALS_BEFORE_PARKING)
            return False
        if renewal.deadline_ts > parked_ts:
            self._home.become(task, f"{src} has a deadline again", parked_ts=0.0)
        return True
