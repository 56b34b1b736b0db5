"""Eligibility of tasks of this home: those that wait for other tasks, or for a slot of their group, are offered to
nobody, start nowhere, stand before no others and do not look for a place.

A task passes once nothing is waited for any more (`dependencies.py`) and its group has a slot for it (`groups.py`): by
priority, then by arrival. It keeps its slot until it is over, held, or has failed and is to be tried again; so no more than
that many tasks of the group are ever leased, also while one of them is lost sight of.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from peerload.core.tasks.dependencies import DOOMED, LOST, OPEN, Dependencies
from peerload.core.tasks.groups import TaskGroups
from peerload.core.tasks.remote_status import RemoteStatusQueries
from peerload.core.work import HomePhase
from peerload.model import timers
from peerload.model.task import TaskState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peerload.core.membership.membership import Membership
    from peerload.core.state import CoreState
    from peerload.core.tasks.batched_requests import BatchedRequests
    from peerload.core.tasks.home import Home
    from peerload.core.work import HomeTask
    from peerload.model.events import GroupRequested
    from peerload.model.task import GroupSettings, TaskOutcome

PASSED_AT_A_TIME = 250
"""Tasks that pass, or are given up, before other events have their turn."""
SIGTERM = 15


class Eligibility:
    """One per node; its timer is ``gates``."""

    def __init__(self, state: CoreState, home: Home, membership: Membership, batches: BatchedRequests) -> None:
        self._state = state
        self._home = home
        self.dependencies = Dependencies(state, home, membership)
        self.remote_status = RemoteStatusQueries(state, home, membership, self.dependencies)
        self.groups = TaskGroups(state, home, batches)
        self._due: deque[HomeTask] = deque()
        """Tasks of whose gate something may have changed."""

    def restore(self, fates: Iterable[TaskOutcome], groups: Iterable[GroupSettings]) -> None:
        """After a restart, before the tasks are adopted."""
        self.dependencies.restore(fates)
        self.groups.restore(groups)

    def restored(self) -> None:
        """Go on after a restart, once all tasks have been adopted."""
        self.dependencies.restored()

    def adopt(self, task: HomeTask) -> None:
        """Take in a task of this home, new or from the store."""
        self.dependencies.adopt(task)
        self.groups.adopt(task)

    def left(self, task: HomeTask) -> None:
        """Forget a task that is over."""
        self.dependencies.left(task)
        self.groups.left(task)

    def is_awaited(self, array: str) -> bool:
        """True if other tasks, or other homes, are told when members of this array end."""
        return self.dependencies.is_awaited(array) or self.remote_status.is_any_watched(array)

    # -- the gate ------------------------------------------------------------------------------------------------------

    def admits(self, task: HomeTask) -> bool:
        """Let this task, which is in no queue, go on now if it may → whether it may; else it is GATED."""
        if not self._waits_for(task):
            if not task.terms.group or self.groups.admits(task):
                return True
        else:
            verdict, _ = self.dependencies.verdict(task.terms)
            if verdict in (DOOMED, LOST):
                self._due.append(task)
        task.enter(HomePhase.GATED)
        return False

    def _waits_for(self, task: HomeTask) -> bool:
        if not task.terms.awaits or task.record.is_freed:
            return False
        return self.dependencies.verdict(task.terms)[0] != OPEN

    def is_lost(self, task: HomeTask) -> bool:
        """True if the outcome of a task that it waits for can no longer be known."""
        return task.terms.awaits and self.dependencies.verdict(task.terms)[0] == LOST

    def prioritized(self, task: HomeTask) -> None:
        """Note that a task has another priority."""
        self.groups.moved(task)

    def settle(self) -> None:
        """Let eligible tasks pass and give up those that wait in vain, after every event."""
        left = PASSED_AT_A_TIME
        while left > 0:
            if self._due:
                self._look_at(self._due.popleft())
                left -= 1
            elif self.dependencies.news:
                self._due.extend(self.dependencies.news.popleft().tasks.values())
            elif (task := self.groups.next_that_passes()) is not None:
                self._passes(task)
                left -= 1
            else:
                return
        self._state.set_timer_in(0.0, timers.EligibilityDue())

    def _look_at(self, task: HomeTask) -> None:
        if task.phase is not HomePhase.GATED or self._home.tasks.get(task.uid) is not task:
            return
        verdict, why = (OPEN, "") if task.record.is_freed else self.dependencies.verdict(task.terms)
        if verdict == OPEN:
            self._passes(task)
        elif verdict == DOOMED:
            self._home.cancel(task, SIGTERM, force=False, reason=why)
        elif verdict == LOST:
            self._home.hold(task, why)

    def _passes(self, task: HomeTask) -> None:
        task.enter(HomePhase.WAITING)
        self._home.mediator.task_arrives(task)

    # -- for users -----------------------------------------------------------------------------------------------------

    def asked(self, event: GroupRequested) -> None:
        """Carry out a user's request about a group."""
        self.groups.asked(event)

    def reason(self, task: HomeTask) -> str:
        """The reason why a task is GATED, in one line; "" if it is not."""
        if task.phase is not HomePhase.GATED or task.record.state is not TaskState.QUEUED:
            return ""
        if self._waits_for(task):
            verdict, why = self.dependencies.verdict(task.terms)
            return why if verdict in (DOOMED, LOST) else self.dependencies.reason(task.terms)
        return self.groups.reason(task.terms.group)

    def opened_by(self, task: HomeTask) -> str:
        """The command that would let this task pass now; "" if there is none."""
        if task.phase is not HomePhase.GATED or self._waits_for(task):
            return ""
        return self.groups.opened_by(task)
