"""The 95 % interval of one run holds, and a run that is too short says so."""

import math
import random
from statistics import fmean

from peerload.sim.statistics import batch_half_width, half_width

LOAD, TASKS, WARM_UP, RUNS, BATCHES = 0.5, 2000, 500, 200, 10


def responses(seed: int) -> list[float]:
    """Response times of an M/M/1 queue by Lindley's recursion, after the warm-up."""
    rng = random.Random(seed)
    wait_s, found = 0.0, []
    for _ in range(TASKS):
        response_s = wait_s - math.log(1 - rng.random())
        found.append(response_s)
        wait_s = max(response_s + math.log(1 - rng.random()) / LOAD, 0.0)
    return found[WARM_UP:]


def test_the_intervals_of_200_short_runs_contain_the_mean_of_m_m_1() -> None:
    mean_s, held, judged = 1 / (1 - LOAD), 0, 0
    for run in range(RUNS):
        found = responses(7 * run + 1)
        each = len(found) // BATCHES
        half = batch_half_width([[fmean(found[at : at + each]) for at in range(0, len(found), each)]])
        judged += half < math.inf
        held += abs(fmean(found) - mean_s) <= half < math.inf
    assert judged >= 0.9 * RUNS
    assert held >= 0.93 * judged


def test_batches_that_drift_tell_no_interval() -> None:
    drifting = [1.0, 1.1, 1.3, 1.4, 1.6, 1.8, 1.9, 2.1, 2.2, 2.4]
    assert half_width(drifting) < 0.4
    assert batch_half_width([drifting]) == math.inf
    assert batch_half_width([[3.0] * 10]) == 0.0
    assert batch_half_width([[3.0]]) == batch_half_width([]) == math.inf
