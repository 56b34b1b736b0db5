"""Drain of a node: tasks of others go home unstarted, its own look for a place elsewhere, running ones run on.

It is durable, and a fact of the node's profile, so that peers know and say why. How its own waiting tasks leave is
`leaving.py`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.model.actions import Answer, PutDrain
from peerload.model.errors import BadRequest, SlowDown

if TYPE_CHECKING:
    from peerload.core.coordination.leaving import TaskEvacuation
    from peerload.core.handoff.executor import ExecutorHandoff
    from peerload.core.membership.own_profile import OwnProfile
    from peerload.core.resources.admission import Ledger
    from peerload.core.sharing.information import Information
    from peerload.core.state import CoreState

AWAITING_MAX = 1000
"""Requests that wait until the node is empty."""


class NodeDrain:
    """One per node."""

    def __init__(
        self,
        state: CoreState,
        ledger: Ledger,
        executor: ExecutorHandoff,
        own_profile: OwnProfile,
        information: Information,
        evacuation: TaskEvacuation,
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._executor = executor
        self._own_profile = own_profile
        self._information = information
        self._evacuation = evacuation
        self._awaiting: dict[int, None] = {}

    def restore(self, reason: str) -> None:
        """As it was before the agent's start."""
        self._set(is_on=True, reason=reason)

    def begin(self, reason: str) -> tuple[int, int]:
        """→ how many tasks of others went back, and how many run on."""
        profile = self._state.profile
        is_news = not profile.drained or profile.drain_reason != reason
        if is_news:
            self._state.note("agent", "draining", reason=reason)
            self._state.persist(PutDrain(reason))
            self._set(is_on=True, reason=reason)
        said = f"{self._state.node} is drained" + (f": {reason}" if reason else "")
        returned = self._executor.give_all_back(said)
        if is_news:
            self._information.announce()
        return returned, len(self._ledger.running)

    def await_empty(self, request: int) -> None:
        """Answered when nothing runs here, and nothing of others is here any more. `settle` looks."""
        if not self._state.profile.drained:
            self._refuse(request)
        elif len(self._awaiting) >= AWAITING_MAX:
            error = SlowDown("too many wait for this node to be empty", why=f"at most {AWAITING_MAX} may")
            self._state.actions.append(Answer(request, error=error))
        else:
            self._awaiting[request] = None

    def await_no_more(self, request: int) -> None:
        """Forget a request whose client is gone."""
        self._awaiting.pop(request, None)

    def _refuse(self, request: int) -> None:
        error = BadRequest(f"{self._state.node} is not drained", hint="peerload drain --wait")
        self._state.actions.append(Answer(request, error=error))

    def end(self) -> None:
        """End the drain: tasks are taken, and start here, again."""
        if not self._state.profile.drained:
            return
        for request in self._awaiting:
            self._refuse(request)
        self._awaiting.clear()
        self._state.note("agent", "undrained")
        self._state.persist(PutDrain(None))
        self._set(is_on=False, reason="")
        self._evacuation.over()
        self._information.announce()

    def settle(self) -> None:
        """After every event while it is on: who waits until the node is empty may have an answer."""
        if self._awaiting and not self._ledger.running and not self._executor.guests:
            self._state.actions.extend(Answer(request) for request in self._awaiting)
            self._awaiting.clear()

    def _set(self, *, is_on: bool, reason: str) -> None:
        self._own_profile.change(drained=is_on, drain_reason=reason)
