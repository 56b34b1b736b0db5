"""Groups, tasks that wait for others, and tasks that are tried again, each with one rule left out in the core."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from peerload.core.handoff.home import HomeHandoff
from peerload.core.membership.peers import PeerState
from peerload.core.tasks.dependencies import Dependencies
from peerload.core.tasks.eligibility import TaskGroup, TaskGroups
from peerload.core.tasks.retries import Retries
from peerload.core.work import HomeTask
from peerload.model.messages import Result
from peerload.model.task import Exit, TaskOutcome


def slots_not_restored(patch: pytest.MonkeyPatch) -> None:
    """A home that was restarted does not know that the tasks which others have take slots."""
    adopt = TaskGroups.adopt

    def forgotten(self: TaskGroups, task: HomeTask) -> None:
        adopt(self, task)
        group = self._of(task)
        if group is not None:
            group.taken.pop(task.uid, None)

    patch.setattr(TaskGroups, "adopt", forgotten)


def pause_lets_go(patch: pytest.MonkeyPatch) -> None:
    """What was let through before its group was paused is started."""

    def nothing(self: TaskGroups, group: TaskGroup) -> Iterator[None]:
        del self, group
        return iter(())

    patch.setattr(TaskGroups, "_take_back", nothing)


def slot_not_passed_on(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks who is next when a slot is free again."""

    def released(self: TaskGroups, task: HomeTask) -> None:
        group = self._of(task)
        if group is not None:
            group.waiting.pop(task.uid, None)
            group.taken.pop(task.uid, None)

    patch.setattr(TaskGroups, "release", released)
    home_gates = TaskGroups.left

    def left(self: TaskGroups, task: HomeTask) -> None:
        home_gates(self, task)
        self._changed.clear()

    patch.setattr(TaskGroups, "left", left)


def dead_home_is_over(patch: pytest.MonkeyPatch) -> None:
    """A task whose home is called dead counts as ended."""
    ask = Dependencies.ask

    def ask_or_assume(self: Dependencies, home: str) -> None:
        peer = self._membership.get(home)
        if peer is not None and peer.state is PeerState.DEAD:
            for name in list(self._elsewhere.get(home, ())):
                self._outcome_received(self._awaited[name], TaskOutcome(name, is_over=True))
        ask(self, home)

    patch.setattr(Dependencies, "ask", ask_or_assume)


def end_is_success(patch: pytest.MonkeyPatch) -> None:
    """That a task has ended is taken for success."""
    told = Dependencies._fate

    def fine(self: Dependencies, name: str) -> TaskOutcome:
        return msgspec.structs.replace(told(self, name), failed="")

    patch.setattr(Dependencies, "_fate", fine)


def retry_not_durable(patch: pytest.MonkeyPatch) -> None:
    """The executor is told that its failure was noted, which is not written down."""
    again = Retries.again

    def unwritten(self: Retries, task: HomeTask, exit_: Exit) -> str:
        record, actions = task.record, self._state.actions
        before = len(actions)
        why = again(self, task, exit_)
        if not why and record.node != self._state.node:
            del actions[before:]
            task.record = msgspec.structs.replace(task.record, failures=record.failures)
        return why

    patch.setattr(Retries, "again", unwritten)


def retry_first_result(patch: pytest.MonkeyPatch) -> None:
    """That an attempt which was given up, or done with, has failed is taken for the task's result."""
    why_over = HomeHandoff._why_over

    def of_current(self: HomeHandoff, task: HomeTask, message: Result) -> str | None:
        return why_over(self, task, message) if message.attempt == task.record.attempt else ""

    patch.setattr(HomeHandoff, "_why_over", of_current)
