"""One replication whose length follows from the CPU time that there is, for the reference cases."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from peerload.sim.replication import WARM_UP_S, WARM_UP_SHARE, Replication, Setup, measure, warm_up_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.sim.statistics import Sample

PILOT_TASKS, PILOT_SHARE = 1000, 0.1
"""Pilot run that finds out how many tasks fit into the given time: this many tasks, and then this share of those
that seem to fit."""
TASKS_MIN = 4000
"""Least tasks of a replication whose length follows from the given time."""


def replicate(
    setup: Setup,
    seed: int,
    *,
    tasks: int,
    cpu_s: float = math.inf,
    clock: Callable[[], float],
) -> Sample:
    """Run one replication of at most ``tasks`` tasks, but at least TASKS_MIN; fewer if they would take more than
    ``cpu_s`` of the time that ``clock`` tells (s of CPU time)."""
    started_s = clock()
    player = Replication(setup, seed)
    ready_s = clock()
    player.play(PILOT_TASKS)
    if cpu_s < math.inf:
        left_s, most = started_s + cpu_s - ready_s, tasks

        def affordable() -> int:
            return min(most, int(left_s * player.last / max(clock() - ready_s, 1e-6)))

        player.play(max(int(affordable() * PILOT_SHARE) - player.last, 0))
        tasks = affordable()
    tasks = max(tasks, TASKS_MIN, int(player.last / WARM_UP_SHARE))
    warm_up = warm_up_of(tasks, sum(setup.rates))
    player.play(warm_up - player.last)
    sample = measure(player, tasks - warm_up, clock=clock, started_s=started_s)
    if warm_up < WARM_UP_S * sum(setup.rates):  # not settled: its batches say nothing of how exact it is
        sample.batches.clear()
    return sample
