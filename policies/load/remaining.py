"""Remaining time of the work of a node, by three estimates of the remaining time of a running task ([BF81], [RM]).

All three are in seconds per slot. A waiting task counts with the past duration of its command (for a new command, the
mean of all commands). A slot that foreign programs occupy counts as one such task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.policy.api import remaining_s

if TYPE_CHECKING:
    from peerload.policy.api import LoadView


class Memoryless(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every task, running or not, has the same expected remaining time: the mean of past durations. Exact if
    durations are exponential; ranks nodes like the number of tasks, but in seconds.

    Good: exact if durations are exponential, and needs almost no history.
    Bad: ranks nodes in the same order as ``tasks``.
    """

    in_seconds = True

    def load(self, view: LoadView) -> float:
        """n · mean / c."""
        return view.load_tasks * view.mean_s / max(view.slots, 1)


class PastRepeats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A task that has run for t is expected to run for another t: accurate if a few tasks are very long. A waiting task
    counts with the expected duration of its command, since otherwise a long queue would look idle.

    Good: avoids nodes that run very long tasks, if there are a few of these.
    Bad: a task that was just started counts as nothing.
    """

    in_seconds = True

    def load(self, view: LoadView) -> float:
        """(Σ time used by running tasks + expected durations of the others) / c."""
        running_s = sum(task.used_s for task in view.running)
        return (running_s + view.waiting_s + view.foreign_slots * view.mean_s) / max(view.slots, 1)


class Distribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Expected remaining time given the time used, E[X - t | X > t], over the last runs of the command. A task that
    has run longer than all of these counts as in ``past-repeats``.

    Good: the best estimate if the same commands are run repeatedly.
    Bad: only as good as the history; a new command counts as the mean of all.
    """

    in_seconds = True

    def load(self, view: LoadView) -> float:
        """(Σ expected remaining time of running tasks + expected durations of the others) / c."""
        running_s = sum(remaining_s(task, view.mean_s) for task in view.running)
        return (running_s + view.waiting_s + view.foreign_slots * view.mean_s) / max(view.slots, 1)
