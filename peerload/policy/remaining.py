"""How long a running task will still take, by the durations known."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerload.policy.api import RunningView


def remaining_s(task: RunningView, mean_s: float) -> float:
    """E[X - t | X > t]: the expected rest of a task that has run for t. One that has outlived all known runs takes as long
    again; ``mean_s`` where no run is known, as if it had no memory."""
    durations = task.durations
    if not durations:
        return mean_s
    used_s = task.used_s
    longer = durations[bisect_right(durations, used_s) :]
    return sum(longer) / len(longer) - used_s if longer else used_s
