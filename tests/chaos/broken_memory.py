"""The protocol with one rule left out of what becomes of an attempt that ran out of GPU memory."""

from __future__ import annotations

import pytest

from peerload.core.handoff.home import HomeHandoff
from peerload.core.tasks.retries import Retries
from peerload.core.work import HomeTask
from peerload.model import actions
from peerload.model.messages import Result
from peerload.model.task import Exit


def memory_not_durable(patch: pytest.MonkeyPatch) -> None:
    """It is queued again in memory alone before that is acknowledged."""
    again = Retries._with_more_memory

    def unwritten(self: Retries, task: HomeTask, exit_: Exit) -> str:
        done = self._state.actions
        before = len(done)
        why = again(self, task, exit_)
        done[before:] = [action for action in done[before:] if not isinstance(action, actions.Persist)]
        return why

    patch.setattr(Retries, "_with_more_memory", unwritten)


def memory_first_result(patch: pytest.MonkeyPatch) -> None:
    """That an attempt that was given up, or done with, ran out of memory is taken for the task's result."""
    why_over = HomeHandoff._why_over

    def of_current(self: HomeHandoff, task: HomeTask, message: Result) -> str | None:
        return why_over(self, task, message) if message.attempt == task.record.attempt else ""

    patch.setattr(HomeHandoff, "_why_over", of_current)
