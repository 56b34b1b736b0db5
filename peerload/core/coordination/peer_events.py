"""Peers that introduce themselves, come back or tell of their load: what membership takes note of, the others act upon."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerload.core.handoff.executor import ExecutorHandoff
    from peerload.core.handoff.home import HomeHandoff
    from peerload.core.membership.membership import Membership
    from peerload.core.sharing.sharing import Sharing
    from peerload.model.events import PeerMet
    from peerload.model.gossip import Load


class PeerEvents:
    """One per node."""

    def __init__(
        self, membership: Membership, handoff: HomeHandoff, executor: ExecutorHandoff, sharing: Sharing
    ) -> None:
        self._membership = membership
        self._handoff = handoff
        self._executor = executor
        self._sharing = sharing

    def met(self, event: PeerMet, *, told_by_itself: bool) -> None:
        """``told_by_itself``: over its own link, just now; what came by way of a broker is no proof of anything."""
        node = event.identity.node
        is_new = self._membership.meet(
            event.identity,
            event.profile,
            event.report if not event.retained else None,  # how old it is, nobody knows
            refutation=event.refutation,
            in_person=told_by_itself,
        )
        peer = self._membership.get(node)
        if told_by_itself and peer is not None and peer.identity == event.identity:  # not a late word
            self._handoff.leases.machine_changed(event.identity)
        if is_new:
            self._is_back(node)
        for identity in event.known:
            self._membership.gossip.anti_entropy.learn(identity)
        newest = self._membership.last_report(node)
        if newest is not None and newest.report is event.report:
            self._sharing.report_met(node, event.report)

    def gossiped(self) -> None:
        """Gossip has changed what is believed of peers."""
        for node in self._membership.back():
            self._is_back(node)

    def load_gossiped(self, load: Load, src: str) -> bool:
        """A load that came by gossip: kept, and acted upon → whether it is news."""
        report = load.report()
        is_news = self._membership.report_received(load.node, report, load.age_s, by_itself=src == load.node)
        if is_news:
            self._sharing.report_met(load.node, report)
        return is_news

    def _is_back(self, node: str) -> None:
        """A peer is there anew, or again: what is between us is settled at once."""
        self._handoff.leases.peer_is_back(node)
        self._executor.home_is_back(node)
        self._sharing.sender.peer_met()
