"""How long the work of a node will still take, by three guesses at what is left of a running task ([BF81], [RM]).

All three count in seconds per slot, and take a waiting task for what its command took before (the mean of all commands
where it is new). A slot that foreign programs occupy counts as one such task. They differ in what they believe of a task
that has run for a while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.policy.remaining import remaining_s

if TYPE_CHECKING:
    from peerload.policy.api import LoadView


class Memoryless(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every task, running or not, has the same expected remaining time: the mean of the durations seen. Exact if
    durations are exponential; compares nodes as the number of tasks does, but in seconds.

    Good: right if durations are exponential, and needs next to no history.
    Bad: compares nodes just as ``tasks`` does.
    """

    in_seconds = True

    def load(self, view: LoadView) -> float:
        """n · mean / c."""
        return view.load_tasks * view.mean_s / max(view.slots, 1)


class PastRepeats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What has run for t will run for another t: right where a few tasks are very long. A waiting task has no past
    here; it would weigh nothing, and a long queue would look idle, so that it counts as its command is known.

    Good: where a few tasks are very long it keeps away from the nodes that hold them.
    Bad: a task that was just started weighs nothing.
    """

    in_seconds = True

    def load(self, view: LoadView) -> float:
        """(Σ time used by running tasks + expected durations of the others) / c."""
        running_s = sum(task.used_s for task in view.running)
        return (running_s + view.waiting_s + view.foreign_slots * view.mean_s) / max(view.slots, 1)


class Distribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The expected remaining time given the time used, E[X - t | X > t], over the last runs of the command. A task that
    has outlived all of them is believed to be of another kind: its past repeats.

    Good: the best guess where the same commands come again.
    Bad: as good as the history; a new command counts as the mean of all.
    """

    in_seconds = True

    def load(self, view: LoadView) -> float:
        """(Σ expected remaining time of running tasks + expected durations of the others) / c."""
        running_s = sum(remaining_s(task, view.mean_s) for task in view.running)
        return (running_s + view.waiting_s + view.foreign_slots * view.mean_s) / max(view.slots, 1)
