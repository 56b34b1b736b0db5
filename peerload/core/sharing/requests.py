"""Asking everybody at once: who is useful to this node? Only the useful answer, each after a random pause, until the
asker says that it has enough.

The information policy asks for load; a sender's search may ask for room for one task (its answers are that search's).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.model import metrics, timers
from peerload.model.actions import Announce
from peerload.model.messages import UNASKED, Enough, StateAnswer, StateRequest

if TYPE_CHECKING:
    from peerload.core.membership.membership import Membership
    from peerload.core.sharing.information import Information
    from peerload.core.sharing.receiver import Receiver
    from peerload.core.sharing.remote_admission import RemoteAdmission
    from peerload.core.sharing.search import Searches
    from peerload.core.state import CoreState
    from peerload.model.load import LoadReport


class StateRequests:
    """One per node; its timer is ``answer``."""

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
        if not self._answers_left or not self._is_still_useful(answer.report):
            self._answers_left = 0
            self._state.actions.append(Announce(Enough(answer.request)))

    def _is_still_useful(self, report: LoadReport) -> bool:
        """True if more nodes like this one would help: busy ones while there is room here, idle ones while there is
        none."""
        return self._receiver.wants_more() if report.gives else not self._information.shown().accepts

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
