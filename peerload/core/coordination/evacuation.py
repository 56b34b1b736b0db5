"""Evacuation: tasks leave this node while it starts none, because it is drained or lacks a resource
(`ResourceShortage`).

Tasks of other homes return home unstarted, running ones run on, and own waiting tasks look for a place elsewhere: a few
at a time, while the others wait for their turn. Tasks that may run nowhere else wait until this node starts tasks
again. A drain is durable and part of the node's profile, so that peers can report the reason.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from peerload.core.work import HomeTask
from peerload.model.actions import Answer, PutDrain
from peerload.model.errors import BadRequest, SlowDown

if TYPE_CHECKING:
    from peerload.core.handoff.executor import ExecutorHandoff
    from peerload.core.membership.membership import Membership, OwnProfile
    from peerload.core.resources.admission import Ledger
    from peerload.core.sharing.information import Information
    from peerload.core.sharing.sender import Sender
    from peerload.core.state import CoreState
    from peerload.core.tasks.home import Home
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.core.work import Work

LEAVING_MAX = 64
"""Own tasks that look for a place at a time."""
LOOKED_AT_MAX = 256
"""Candidates that are checked after each event, for some that may leave now."""


class TaskEvacuation:
    """Evacuation of this home's waiting tasks. One per node."""

    def __init__(
        self, state: CoreState, queue: WaitingQueue, membership: Membership, home: Home, sender: Sender
    ) -> None:
        self._state = state
        self._queue = queue
        self._membership = membership
        self._home = home
        self._sender = sender
        self._leaving: dict[bytes, HomeTask] = {}
        self._candidates: deque[tuple[int, HomeTask]] = deque()  # with `Work.order`: a task that returned has a new one
        self._newest = 0

    def settle(self, reason: str) -> None:
        """Let the next own tasks look for a place elsewhere; called after every event while nothing is started here."""
        if not self._membership.has_any():
            return
        stranded = self._home.stranded
        for uid in [uid for uid in self._leaving if uid not in stranded]:
            del self._leaving[uid]  # it has found a place, or is over
        room = LEAVING_MAX - len(self._leaving)
        if room <= 0:
            return
        self._look_for_new()
        for _ in range(min(LOOKED_AT_MAX, len(self._candidates))):
            if not room:
                break
            order, task = self._candidates.popleft()
            if not task.is_queued or task.order != order:
                continue
            if task.withheld or task.search is not None:
                self._candidates.append((order, task))  # tried again when its offer or search has ended
                continue
            room -= 1
            self._leaving[task.uid] = task
            self._queue.remove(task)
            self._sender.strand(task, reason)

    def over(self) -> None:
        """End the evacuation: tasks that have found no place return to the queue."""
        leaving, self._leaving = self._leaving, {}
        self._candidates.clear()
        self._newest = 0
        for uid, task in leaving.items():
            if uid in self._home.stranded:
                self._home.take_out(task)
                self._home.mediator.task_arrives(task)

    def _look_for_new(self) -> None:
        """Add the movable tasks that arrived since the last call to the candidates, higher priorities first. The first
        call adds all waiting tasks."""
        new = [work for work in self._queue.since(self._newest) if isinstance(work, HomeTask) and self._may_leave(work)]
        self._candidates.extend((task.order, task) for task in sorted(new, key=_rank))
        self._newest = max(self._newest, self._queue.newest)

    def _may_leave(self, task: HomeTask) -> bool:
        placement = task.spec.placement
        return not placement.local and placement.node != self._state.node


def _rank(work: Work) -> tuple[int, int]:
    return -work.spec.priority, work.order


AWAITING_MAX = 1000
"""Bound on requests that wait until the node is empty."""


@dataclass(eq=False, repr=False)
class NodeDrain:
    """The drain of this node, and the requests that wait until it is empty. One per node."""

    _state: CoreState
    _ledger: Ledger
    _executor: ExecutorHandoff
    _own_profile: OwnProfile
    _information: Information
    _evacuation: TaskEvacuation
    _awaiting: dict[int, None] = field(default_factory=dict, init=False)

    def restore(self, reason: str) -> None:
        self._set(is_on=True, reason=reason)

    def begin(self, reason: str) -> tuple[int, int]:
        """Drain this node → the numbers of remote tasks that were given back and that run on."""
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
        """Answer a request when nothing runs here and no remote task is left; `settle` checks for it."""
        if not self._state.profile.drained:
            self._refuse(request)
        elif len(self._awaiting) >= AWAITING_MAX:
            error = SlowDown("too many requests wait for this node to be empty", why=f"the limit is {AWAITING_MAX}")
            self._state.actions.append(Answer(request, error=error))
        else:
            self._awaiting[request] = None

    def await_no_more(self, request: int) -> None:
        """Forget a request whose client has disconnected."""
        self._awaiting.pop(request, None)

    def _refuse(self, request: int) -> None:
        error = BadRequest(f"{self._state.node} is not drained", hint="peerload drain --wait")
        self._state.actions.append(Answer(request, error=error))

    def end(self) -> None:
        """End the drain: tasks are accepted, and start here, again."""
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
        """Answer requests that wait until the node is empty, if it is; called after every event of an evacuation."""
        if self._awaiting and not self._ledger.running and not self._executor.remote_tasks:
            self._state.actions.extend(Answer(request) for request in self._awaiting)
            self._awaiting.clear()

    def _set(self, *, is_on: bool, reason: str) -> None:
        self._own_profile.change(drained=is_on, drain_reason=reason)
