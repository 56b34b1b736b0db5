"""Evacuation: own waiting tasks look for a place elsewhere while this node starts nothing, since it is drained or short of something.

A few at a time look; the others wait for their turn, and those that may run nowhere else until this node starts tasks
again.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from peerload.core.work import HomeTask

if TYPE_CHECKING:
    from peerload.core.membership.membership import Membership
    from peerload.core.sharing.sender import Sender
    from peerload.core.state import CoreState
    from peerload.core.tasks.home import Home
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.core.work import Work

LEAVING_MAX = 64
"""Own tasks that look for a place at a time."""
LOOKED_AT_MAX = 256
"""Waiting tasks that may leave that are looked at for some that can now, after each event."""


class TaskEvacuation:
    """One per node."""

    def __init__(
        self, state: CoreState, queue: WaitingQueue, membership: Membership, home: Home, sender: Sender
    ) -> None:
        self._state = state
        self._queue = queue
        self._membership = membership
        self._home = home
        self._sender = sender
        self._leaving: dict[bytes, HomeTask] = {}
        self._candidates: deque[tuple[int, HomeTask]] = deque()  # by `Work.order`: one that came back is another
        self._newest = 0

    def settle(self, reason: str) -> None:
        """Have the next own tasks look for a place elsewhere, after every event while nothing is started here."""
        if not self._membership.has_any():
            return
        stranded = self._home.stranded
        for uid in [uid for uid in self._leaving if uid not in stranded]:
            del self._leaving[uid]  # it has found one, or is over
        room = LEAVING_MAX - len(self._leaving)
        if room <= 0:
            return
        self._look_for_new()
        for _ in range(min(LOOKED_AT_MAX, len(self._candidates))):
            if not room:
                break
            order, task = self._candidates.popleft()
            if task.uid not in self._queue or task.order != order:
                continue
            if task.withheld or task.search is not None:
                self._candidates.append((order, task))  # once that is over
                continue
            room -= 1
            self._leaving[task.uid] = task
            self._queue.remove(task)
            self._sender.strand(task, reason)

    def over(self) -> None:
        """End the evacuation: tasks that have found no place come back."""
        leaving, self._leaving = self._leaving, {}
        self._candidates.clear()
        self._newest = 0
        for uid, task in leaving.items():
            if uid in self._home.stranded:
                self._home.take_out(task)
                self._home.mediator.task_arrives(task)

    def _look_for_new(self) -> None:
        """Of what has come since the last look, all that may leave: the higher priority first. The first look is at all
        that waits."""
        new = [work for work in self._queue.since(self._newest) if isinstance(work, HomeTask) and self._may_leave(work)]
        self._candidates.extend((task.order, task) for task in sorted(new, key=_rank))
        self._newest = max(self._newest, self._queue.newest)

    def _may_leave(self, task: HomeTask) -> bool:
        placement = task.spec.placement
        return not placement.local and placement.node != self._state.node


def _rank(work: Work) -> tuple[int, int]:
    return -work.spec.priority, work.order
