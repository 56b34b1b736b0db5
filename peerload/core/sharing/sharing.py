"""Load sharing of one node: composes its parts, acts on reports, and answers who asks everybody at once.

    information.py  what this node tells of its load, hints and views; whether it would take a task of another home
    sender.py       a home looks for a place for a task
    receiver.py     a node with room asks for work, gives its own to others, or pairs with another

Policies propose; these own the time-outs, the bounds, the migration limit and the rules for live systems
(docs/policies.md, "live rules"). Whatever a policy does wrong counts as "keep the task here".
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from peerload.core.sharing.information import Information, PeerHints, RemoteAdmission, task_view
from peerload.core.sharing.receiver import PairProtocol, Receiver, RetryRate, TaskDonor
from peerload.core.sharing.sender import Searches, Sender
from peerload.model import metrics, timers
from peerload.model.actions import Announce, Decided
from peerload.model.messages import UNASKED, Enough, Need, StateAnswer, StateRequest
from peerload.policy.api import Transfer, valid_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.core.handoff.executor import ExecutorHandoff
    from peerload.core.handoff.home import HomeHandoff
    from peerload.core.membership.membership import Membership
    from peerload.core.state import CoreState, Mediator
    from peerload.core.tasks.home import Home
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.core.work import RemoteTask
    from peerload.model.messages import Footprint
    from peerload.model.resources import LoadReport


class StateRequests:
    """Asks everybody at once who is useful to this node, and answers such requests. One per node; its timer is ``answer``.

    Only the useful answer, each after a random pause, until the asker says that it has enough. The information policy asks
    for load; a sender's search may ask for room for one task (its answers are that search's).
    """

    def __init__(
        self,
        state: CoreState,
        membership: Membership,
        information: Information,
        searches: Searches,
        admission: RemoteAdmission,
        receiver: Receiver,
    ) -> None:
        self._state = state
        self._membership = membership
        self._information = information
        self._searches = searches
        self._admission = admission
        self._receiver = receiver
        self._asked = 0
        self._answers_left = 0
        self._to_answer: dict[str, tuple[str, StateRequest]] = {}

    # -- asking --------------------------------------------------------------------------------------------------------

    def ask(self, report: LoadReport) -> None:
        """Ask everybody for their load; a request before this one is over."""
        self._asked = self._searches.next_id()
        self._answers_left = self._state.config.answers_enough
        self._state.count(metrics.REQUESTS_BROADCAST)
        self._state.actions.append(Announce(StateRequest(self._asked, report)))

    def answer_received(self, answer: StateAnswer) -> None:
        """A useful node has answered: there is enough once so many have, or this node needs no more."""
        if answer.request == UNASKED or answer.request != self._asked or not self._answers_left:
            return
        self._answers_left -= 1
        # More nodes like this one help: busy ones while there is room here, idle ones while there is none.
        helps = self._receiver.wants_more() if answer.report.gives else not self._information.shown().accepts
        if not self._answers_left or not helps:
            self._answers_left = 0
            self._state.actions.append(Announce(Enough(answer.request)))

    # -- being asked ---------------------------------------------------------------------------------------------------

    def request_received(self, src: str, request: StateRequest) -> None:
        """Answer after a pause, if this node is useful to the asker."""
        self._membership.report_received(src, request.report)
        if not self._membership.is_usable(src) or not self._is_useful(src, request):
            return
        if len(self._to_answer) >= self._state.config.answers_pending_max:
            self._state.count(metrics.REQUESTS_UNANSWERED)
            return
        key = f"{src} {request.request}"
        self._to_answer[key] = (src, request)
        pause_s = self._state.rng.random() * self._state.config.answer_backoff_s
        self._state.set_timer_in(pause_s, timers.AnswerDue(key))

    def answer(self, key: str) -> None:
        """The pause is over: answer if that is still true."""
        src, request = self._to_answer.pop(key, ("", None))
        if request is not None and self._is_useful(src, request):
            self._state.count(metrics.REQUESTS_ANSWERED)
            price_s = self._admission.price_s(request.expected_s)
            self._state.send(src, StateAnswer(request.request, self._information.report(), price_s))

    def enough_received(self, src: str, message: Enough) -> None:
        """No more answers, please."""
        key = f"{src} {message.request}"
        if self._to_answer.pop(key, None) is not None:
            self._state.clear_timer(timers.AnswerDue(key))

    def _is_useful(self, src: str, request: StateRequest) -> bool:
        if request.need is not None:
            return self._admission.would_accept(src, request.need)
        own = self._information.shown()
        return own.gives if request.report.accepts else own.accepts


class Attention(NamedTuple):
    """Reports, told to everybody, that a node may do something about, beside knowing them (`Sharing.heeds`): all; those of nodes with
    room; those of nodes with so many tasks per slot, beside the one that they may give; those of nodes that it has a hint of."""

    to_all: bool
    to_room: bool
    to_work_from: float
    to_nodes: tuple[str, ...]


class Sharing:
    """All of load sharing, for the rest of the core. One per node."""

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
        self._executor = executor
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
        self.donor = TaskDonor(state, queue, membership, home, executor, handoff.holders, self.sender)
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

    def guest_arrived(self, guest: RemoteTask) -> None:
        """A policy that places without asking applies its test here, too: the task may go on, until its limit."""
        if not self.sender.passes_on or not guest.may_move or not self.information.sends(uncounted=guest):
            return
        view = self.information.view(
            self._membership.eligible(Need(guest.spec.request, guest.spec.placement), guest.home), uncounted=guest
        )
        shown = task_view(guest, self._state)
        try:
            step = valid_step(self._state.policies.sender.locate(view, shown, (), self._state.rng))
        except Exception:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
            self._state.count(metrics.POLICY_ERRORS)
            return
        if isinstance(step, Transfer) and step.to in view.peers:
            self._state.count(metrics.TASKS_PASSED_ON)
            name = self._state.policies.names["location.sender"]
            self._state.actions.append(Decided(guest.task, name, (), step.to, f"{self._state.node} passes it on"))
            self._executor.give_back(guest, f"{self._state.node} passes it on", to=step.to)

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
        self._act_on(src, answer.report, asks=lambda node, _report: self.receiver.pull(first=node))
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
