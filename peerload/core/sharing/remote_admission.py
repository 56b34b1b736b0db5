"""Admission control for tasks of other homes: whether this node would take one now, and at which price.

The answer to a probe is advice: nothing is reserved. The same question is asked again when an offer comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.core.resources.admission import why_never
from peerload.model.messages import Need, ProbeReply, ProbeRequest
from peerload.model.task import task_home
from peerload.policy.api import ANY_LOAD
from peerload.policy.remaining import remaining_s

if TYPE_CHECKING:
    from peerload.core.membership.membership import Membership
    from peerload.core.resources.admission import Ledger
    from peerload.core.sharing.information import Information
    from peerload.core.sharing.peer_hints import PeerHints
    from peerload.core.state import CoreState
    from peerload.model.messages import Offer


class RemoteAdmission:
    """One per node."""

    def __init__(
        self, state: CoreState, ledger: Ledger, membership: Membership, information: Information, hints: PeerHints
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._membership = membership
        self._information = information
        self._hints = hints

    def probe_received(self, src: str, probe: ProbeRequest) -> None:
        """Answer a probe with advice: whether this node would accept the task now; nothing is reserved."""
        self._membership.report_received(src, probe.report)
        accepts = self.would_accept(src, probe.need)
        if not accepts:
            self._hints.refused_room(src)
        self._state.send(
            src, ProbeReply(probe.search, accepts, self._information.report(), self.price_s(probe.expected_s))
        )

    def price_s(self, expected_s: float) -> float:
        """The bid of this node: the expected completion of a task here, in seconds from now. expected_s: its duration on the
        reference machine; 0: no bid is wanted, and the price is 0.

        With a slot free it starts at once. Else it waits until the first of the running tasks ends, which is a c-th of
        their mean rest for c slots (exact for exponential durations), and until all c slots have done what waits. A slot
        that foreign programs occupy counts as a running task of the mean duration.
        """
        if not expected_s:
            return 0.0
        view = self._information.view()
        slots, mean_s = max(view.slots, 1), view.mean_s
        wait_s = 0.0
        if view.load_tasks >= slots:
            running_s = sum(remaining_s(task, mean_s) for task in view.running) + view.foreign_slots * mean_s
            wait_s = (running_s / slots + view.waiting_s) / slots
        return wait_s + expected_s / view.speed

    def accepts_offer(self, offer: Offer) -> bool:
        """True if this node accepts the task of an offer."""
        home, need = task_home(offer.task), Need(offer.spec.request, offer.spec.placement)
        return self.would_accept(home, need, offer.load_tasks_max)

    def would_accept(self, home: str, need: Need, load_tasks_max: int = -1) -> bool:
        """True if this node would take such a task of that home now; with n at most ``load_tasks_max`` whatever its thresholds
        say."""
        profile = self._state.profile
        if not self._state.takes_guests:
            return False
        if why_never(profile, need.request, need.placement, home):
            return False
        if need.request.takes_devices:
            is_little = need.request.gpus > 0 and self._ledger.gpu_tasks <= load_tasks_max < ANY_LOAD
            return is_little or self._ledger.fits_beside_all(need.request)
        if self._ledger.load_tasks <= load_tasks_max:
            return True
        if need.request.overcommit and profile.enforces_cores:
            return self._ledger.fits_beside_all(need.request)
        if not self._information.accepts():
            return False
        return self._information.thresholds().accept_below > 1.0 or self._ledger.fits_beside_all(need.request)
