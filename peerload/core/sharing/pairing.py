"""Pairing: two nodes even out their loads and part [BF81].

A node asks one other, as the policy says, by chance. Who is paired, or waits for an answer, refuses; then the asker asks
another at once, ``PARTNERS_ASKED_MAX`` of them at most before it waits for its next turn. The richer of the two gives: it promises waiting tasks while the policy lets one more move, and offers them. The promised count as load of
the poorer at once, so the pair can part before they have come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.model import metrics, timers
from peerload.model.actions import Decided
from peerload.model.messages import PAIR_MOVES_MAX, PairReply, PairRequest, Unpair
from peerload.policy.validation import valid_answer, valid_partner

if TYPE_CHECKING:
    from peerload.core.membership.membership import Membership
    from peerload.core.sharing.information import Information
    from peerload.core.sharing.retry_rate import RetryRate
    from peerload.core.sharing.task_donor import TaskDonor
    from peerload.core.state import CoreState
    from peerload.core.work import Work
    from peerload.model.load import LoadReport


PARTNERS_ASKED_MAX = 8
"""Nodes asked in one turn, one after the other, until one of them pairs."""


class PairProtocol:
    """One per node; its timers are ``pair`` (time to ask) and ``paired`` (the other one has not spoken for too long)."""

    def __init__(
        self,
        state: CoreState,
        membership: Membership,
        information: Information,
        donor: TaskDonor,
        retry_rate: RetryRate,
    ) -> None:
        self._state = state
        self._membership = membership
        self._information = information
        self._donor = donor
        self._retry_rate = retry_rate
        self._partner = ""
        self._pairing = 0
        self._last = 0
        self._is_armed = False
        self._refused: list[str] = []
        """The nodes that have refused in this turn."""

    # -- asking --------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """After every event: the next time to ask is set."""
        rate = self._state.policies.pairing.rate
        if rate and not self._is_armed and self._membership.has_any():
            self._is_armed = True
            self._state.set_timer_in(self._retry_rate.pause_s(rate), timers.Pair())

    def ask(self) -> None:
        """Begin a turn: ask the node that the policy names."""
        self._is_armed = False
        if self._partner:
            return
        self._refused.clear()
        self._ask_next()

    def _ask_next(self) -> None:
        """Ask one of the nodes that have not refused in this turn."""
        if self._state.profile.drained or len(self._refused) >= PARTNERS_ASKED_MAX:
            return
        peers = [node for node in self._information.view().peers if node not in self._refused]
        view = self._information.view(peers)
        try:
            node = valid_partner(self._state.policies.pairing.partner(view, self._state.rng))
        except Exception:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
            self._state.count(metrics.POLICY_ERRORS)
            return
        if node is None or node not in view.peers:
            return
        self._last += 1
        self._pair_with(node, self._last, self._state.config.probe_timeout_s)
        self._state.count(metrics.PAIR_REQUESTS)
        self._state.send(node, PairRequest(self._last, self._information.report()))

    def reply_received(self, src: str, reply: PairReply) -> None:
        """The other one's word: refused, even, it gives, or this node does."""
        self._membership.report_received(src, reply.report)
        for uid in reply.promised:
            self._donor.expect(uid)
        if not self._is_paired_with(src, reply.pairing):
            return  # too late: the other one parts by itself
        self._part()
        if not reply.accepts:
            self._state.count(metrics.PAIR_REQUESTS_REFUSED)
            self._refused.append(src)
            self._ask_next()
        elif not reply.promised:
            chosen = self._choose(src, self._information.report(), reply.report)
            self._state.send(src, Unpair(reply.pairing, tuple(work.uid for work in chosen)))
            self._give(chosen, src)

    # -- being asked ---------------------------------------------------------------------------------------------------

    def request_received(self, src: str, request: PairRequest) -> None:
        """Pair, unless this node is paired already."""
        self._membership.report_received(src, request.report)
        own = self._information.report()
        if self._partner or self._state.profile.drained or not self._membership.is_usable(src):
            self._state.send(src, PairReply(request.pairing, accepts=False, report=own))
            return
        chosen = self._choose(src, own, request.report)
        if not chosen and self._moves(request.report, own):
            self._pair_with(src, request.pairing, self._state.config.inbound_s)
        promised = tuple(work.uid for work in chosen)
        self._state.send(src, PairReply(request.pairing, accepts=True, report=own, promised=promised))
        self._give(chosen, src)

    def unpair_received(self, src: str, message: Unpair) -> None:
        """The richer one has said what it gives."""
        for uid in message.promised:
            self._donor.expect(uid)
        if self._is_paired_with(src, message.pairing):
            self._part()

    def timed_out(self) -> None:
        """The other one has not spoken for too long."""
        if self._partner:
            self._state.count(metrics.PAIRS_UNANSWERED)
        self._partner = ""

    # -- inside --------------------------------------------------------------------------------------------------------

    def _pair_with(self, node: str, pairing: int, seconds: float) -> None:
        self._partner, self._pairing = node, pairing
        self._state.set_timer_in(seconds, timers.Paired())

    def _is_paired_with(self, node: str, pairing: int) -> bool:
        return (self._partner, self._pairing) == (node, pairing)

    def _part(self) -> None:
        self._partner = ""
        self._state.clear_timer(timers.Paired())

    def _choose(self, to: str, own: LoadReport, theirs: LoadReport) -> list[Work]:
        """The tasks that go there, while the policy lets one more move."""
        peer = self._membership.get(to)
        chosen: dict[bytes, Work] = {}
        while peer is not None and len(chosen) < PAIR_MOVES_MAX and self._moves(own, theirs):
            work = self._donor.choose(peer.profile, chosen)
            if work is None:
                break
            chosen[work.uid] = work
            own = msgspec.structs.replace(own, load_tasks=own.load_tasks - 1)
            theirs = msgspec.structs.replace(theirs, load_tasks=theirs.load_tasks + 1)
        return list(chosen.values())

    def _moves(self, richer: LoadReport, poorer: LoadReport) -> bool:
        try:
            return valid_answer(self._state.policies.pairing.moves(richer, poorer))
        except Exception:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
            self._state.count(metrics.POLICY_ERRORS)
            return False

    def _give(self, chosen: list[Work], to: str) -> None:
        policy, known = self._state.policies.names["location.pairing"], self._membership.last_report(to)
        inputs = ((to, known.report.load, 0.0),) if known is not None else ()
        for work in chosen:
            self._state.actions.append(Decided(work.task, policy, inputs, to, f"paired with {to}, which has less"))
            self._donor.give(work, to, f"paired with {to}")
