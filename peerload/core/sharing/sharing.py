"""Drives the policies. Its parts, each a file of its own:

    information.py         what this node tells of its load: report, thresholds, load region, announcements
    remote_admission.py    whether this node would take a task of another home, and at which price
    sender.py              a home looks for a place for a task
    receiver.py            a node with room asks for work, and gives its own to others
    pairing.py             two nodes even out their loads
    search.py              what the searches of sender and receiver have in common
    peer_hints.py          whom they may ask first
    task_donor.py          which waiting task goes, and how; what was promised to this node
    requests.py            asking everybody at once, and who answers
    retry_rate.py          how often something is done again

Policies propose; these own the time-outs, the bounds, the migration limit and the rules for live systems
(docs/policies.md, "live rules"). Whatever a policy does wrong counts as "keep the task here".
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from peerload.core.sharing.information import Information
from peerload.core.sharing.pairing import PairProtocol
from peerload.core.sharing.peer_hints import PeerHints
from peerload.core.sharing.receiver import Receiver
from peerload.core.sharing.remote_admission import RemoteAdmission
from peerload.core.sharing.requests import StateRequests
from peerload.core.sharing.retry_rate import RetryRate
from peerload.core.sharing.search import Searches
from peerload.core.sharing.sender import Sender
from peerload.core.sharing.task_donor import TaskDonor
from peerload.model import metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.core.handoff.executor import ExecutorHandoff
    from peerload.core.handoff.home import HomeHandoff
    from peerload.core.mediator import Mediator
    from peerload.core.membership.membership import Membership
    from peerload.core.state import CoreState
    from peerload.core.tasks.home import Home
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.model.load import LoadReport
    from peerload.model.messages import Footprint, StateAnswer


class Attention(NamedTuple):
    """Reports, told to everybody, that a node may do something about, beside knowing them (`Sharing.heeds`): all; those of nodes with
    room; those of nodes with so many tasks per slot, beside the one that they may give; those of nodes that it has a hint of."""

    to_all: bool
    to_room: bool
    to_work_from: float
    to_nodes: tuple[str, ...]


class Sharing:
    """One per node."""

    def __init__(
        self,
        state: CoreState,
        queue: WaitingQueue,
        membership: Membership,
        home: Home,
        handoff: HomeHandoff,
        executor: ExecutorHandoff,
        mediator: Mediator,
    ) -> None:
        self._state = state
        self._membership = membership
        by_refusal = state.policies.information.reports_guide_probing
        self._hints = hints = PeerHints(is_on=state.policies.memory, by_refusal=by_refusal)
        self._searches = searches = Searches(state, hints)
        self._has_receiver = state.policies.names["location.receiver"] != "none"
        transfer, load, sender = state.policies.transfer, state.policies.load, state.policies.sender
        is_steady = getattr(transfer, "steady", False) and getattr(load, "steady", False)
        self._heeds_all = not is_steady or hasattr(sender, "announced")
        self._places_all = bool(getattr(sender, "places_all", False))
        self._stranded = home.stranded
        self._ledger = queue.ledger
        retry_rate = RetryRate(state)
        self.information = information = Information(state, queue, membership, hints, home.stranded, mediator)
        self.admission = RemoteAdmission(state, queue.ledger, membership, information, hints)
        self.sender = Sender(state, queue, membership, home, handoff, information, searches)
        self.donor = TaskDonor(state, queue, membership, home, executor, handoff.holders, information, self.sender)
        self.receiver = Receiver(state, queue.ledger, membership, information, searches, self.donor, retry_rate)
        self.pairing = PairProtocol(state, membership, information, self.donor, retry_rate)
        self.requests = StateRequests(state, membership, information, searches, self.admission, self.receiver)
        rates = {
            self.receiver.settle: state.policies.receiver.retry_rate,
            self.pairing.settle: state.policies.pairing.rate,
        }
        self._paced = tuple(settle for settle, rate in rates.items() if rate)

    def report(self) -> LoadReport:
        """The load report of this node now, within an event."""
        return self.information.report()

    def shown(self) -> LoadReport:
        """The load report as of the last event, for drivers and people; changes nothing. A driver that sends it to others
        reports that with LoadTold."""
        return self.information.shown()

    def settle(self) -> None:
        """Start searches whose turn has come, and notice a change of the load region, after every event."""
        self.sender.take_turns()
        for settle in self._paced:
            settle()
        self.information.settle()

    def completed(self) -> None:
        """Ask for another task, if wanted: one has ended here, and the next one has been started."""
        if self._has_receiver:
            self.receiver.pull()

    def probe_timed_out(self, search_id: int) -> None:
        """A search has waited long enough: it goes on with the answers it has."""
        search = self._searches.timed_out(search_id)
        if search is None:
            return
        if search.task is None:
            self.receiver.step(search)
        else:
            self.sender.timed_out(search, search.task)

    def footprint_received(self, src: str, footprint: Footprint) -> None:
        """A search of that node was in vain, here and elsewhere."""
        if footprint.has_room:
            self._hints.is_idle(src)
        else:
            self._hints.is_busy(src)

    def report_received(self, src: str, report: LoadReport) -> None:
        """A peer's load: kept, and acted upon."""
        if self._membership.report_received(src, report):
            self.report_met(src, report)

    def report_met(self, src: str, report: LoadReport) -> None:
        """A new report, which others have heard, too."""
        self._announced(src, report, to_all=True)
        self._act_on(src, report, asks=self.receiver.answer)

    def attention(self) -> Attention:
        """The reports that this node may heed, as of the last event."""
        wants_from = self.receiver.wants_from() if self._has_receiver else math.inf
        heeds_all = self._heeds_all or self._hints.leaves_footprints
        return Attention(heeds_all, self._looks_for_room(), wants_from, tuple(self._hints.busy))

    def _looks_for_room(self) -> bool:
        return bool(self._stranded or self._ledger.waits_for_devices or (self._places_all and self._ledger.waiting))

    def heeds(self, src: str, report: LoadReport) -> bool:
        """True if this node does anything about a report that is told to everybody, beside knowing it: asks for work, offers
        a task, or changes its hints, its thresholds or its load index."""
        if self._heeds_all:
            return True
        if (report.accepts or report.gpus) and self._looks_for_room():
            return True
        if report.has_work:
            if report.is_overloaded and self._hints.leaves_footprints:
                return True
            return self._has_receiver and self.receiver.answers(src, report)
        return src in self._hints.busy

    def answer_received(self, src: str, answer: StateAnswer) -> None:
        """A useful node: for a search, or for whoever has room here. Its report was told to this node alone."""
        self._membership.report_received(src, answer.report)
        if self.sender.answer_received(src, answer):
            return
        self._announced(src, answer.report, to_all=False)
        self._act_on(src, answer.report, asks=self.receiver.ask_first)
        self.requests.answer_received(answer)

    def _announced(self, src: str, report: LoadReport, *, to_all: bool) -> None:
        """The sender policy hears of it, if it wants to."""
        hook = getattr(self._state.policies.sender, "announced", None)
        if hook is None:
            return
        try:
            hook(src, report, to_all=to_all)
        except Exception:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
            self._state.count(metrics.POLICY_ERRORS)

    def _act_on(self, src: str, report: LoadReport, asks: Callable[[str, LoadReport], None]) -> None:
        """Act on a report: its node may have work for this one, or room for a stranded task."""
        if not self._state.policies.information.reports_guide_probing:
            if report.is_overloaded:
                self._hints.is_busy(src)
        elif not report.has_work:
            self._hints.take_busy(src)
        if report.has_work and self._has_receiver:
            asks(src, report)
        if report.accepts or report.gpus:
            self.sender.room_at(src, report)
