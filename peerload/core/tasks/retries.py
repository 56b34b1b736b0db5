"""What becomes of a task of this home whose attempt has failed and that was submitted with --retries: it is queued again, after
a pause that doubles each time, as often as that; then the failure is its result.

Any end but exit code 0 counts: a signal and the time limit, too; but not by a signal that its user has sent it (Ctrl-C ends a
`run --retries`), and one of which the input is not kept whole cannot be tried again: such an end is its result. How often it has failed is in its durable record, before the
node that said so is told that it was noted; the output of such an attempt is not kept. One that ran out of GPU memory is
tried again with more first (`memory_retries.py`), which does not count; nor does one that failed because a device of its node
did, which is a loss (`lost_attempts.py`), whether it was submitted with --retries or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.model.task import how_it_ended

if TYPE_CHECKING:
    from peerload.core.state import CoreState
    from peerload.core.tasks.home import Home
    from peerload.core.tasks.lost_attempts import LostAttempts
    from peerload.core.tasks.memory_retries import MemoryRetries
    from peerload.core.tasks.work import HomeTask
    from peerload.model.config import CoreConfig
    from peerload.model.task import Exit

DOUBLINGS_MAX = 30
SIGNAL_BASE = 128
"""What a program that was ended by a signal adds to its number, to tell so with its exit code."""
CUT = "it cannot be tried again, since its standard input is not kept whole"
MEANT = "it was signalled by its user, so it is not tried again"


class Retries:
    """One per node; it keeps nothing of its own."""

    def __init__(self, state: CoreState, home: Home, memory: MemoryRetries, lost_attempts: LostAttempts) -> None:
        self._state = state
        self._home = home
        self._memory = memory
        self._lost_attempts = lost_attempts

    def concerns(self, task: HomeTask, exit_: Exit) -> bool:
        """Whether it is a task that is tried again at all when it has ended so."""
        is_failure = exit_.exit_code != 0 and (task.terms.retries > 0 or bool(exit_.failed_device))
        return is_failure or self._memory.concerns(task, exit_)

    def again(self, task: HomeTask, exit_: Exit) -> str:
        """Queue it again, durably, if its current attempt ended so and it may be tried again: → "". Else why this is its
        result, in words (" " where there is nothing to say)."""
        if exit_.exit_code and task.record.input_is_cut and self.concerns(task, exit_):
            return CUT
        if exit_.exit_code and _was_meant(task, exit_):
            return MEANT if task.terms.retries else " "
        if exit_.failed_device:
            return self._lost_attempts.device_failed(task, exit_)
        why = self._memory.again(task, exit_)
        retries = task.terms.retries
        if not why or not retries or not exit_.exit_code:
            return why
        failures = task.record.failures + 1
        if failures > retries:
            return f"it was tried {failures} times"
        self._state.count("attempts that failed and were tried again")
        pause_s = failure_pause_s(self._state.config, failures)
        record = task.record
        self._home.mediator.task_kept_back(task)
        self._home.requeue(
            task,
            f"attempt {record.attempt} on {record.node} failed ({how_it_ended(exit_)}); again in {pause_s:g} s,"
            f" retry {failures} of {retries}",
            rests_s=pause_s,
            failures=failures,
        )
        return ""


def _was_meant(task: HomeTask, exit_: Exit) -> bool:
    """Whether its current attempt ended by a signal that a user has sent it."""
    attempt, signals = task.signalled
    return attempt == task.record.attempt and (exit_.signal or exit_.exit_code - SIGNAL_BASE) in signals


def failure_pause_s(config: CoreConfig, failures: int) -> float:
    """How long a task rests that has failed so often."""
    doublings = min(failures - 1, DOUBLINGS_MAX)
    return min(config.failure_backoff_s * 2.0**doublings, config.failure_backoff_s_max)
