"""Expected remaining time of a running task, from known durations."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerload.policy.api import RunningView


def remaining_s(task: RunningView, mean_s: float) -> float:
    """E[X - t | X > t]: expected remaining time of a task that has run for t. A task that has outlived all known
    runs takes as long again; ``mean_s`` if no run is known (memoryless)."""
    durations = task.durations
    if not durations:
        return mean_s
    used_s = task.used_s
    longer = durations[bisect_right(durations, used_s) :]
    return sum(longer) / len(longer) - used_s if longer else used_s
