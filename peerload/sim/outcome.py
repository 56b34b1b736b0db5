"""What the replications of one scenario say together: intervals, stability, fairness, and the bounds of theory."""

from __future__ import annotations

import math
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

import msgspec

from peerload.sim.bounds import mmc_response
from peerload.sim.player import growth
from peerload.sim.service import Service
from peerload.sim.statistics import Interval, Sample, intervals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peerload.sim.scenario import Scenario

GREW_FACTOR, GREW_SHARE = 1.5, 0.002
"""Unfinished tasks that become this many times more through the measured part, batch after batch, and at least this
share of all that arrived meanwhile, are no chance: the system is unstable, or far from settled."""
SETTLED_AFTER = 1.0
"""A node on its own that begins empty is near its mean response of W mean service times after this times W² of them."""


class Outcome(msgspec.Struct, frozen=True):
    """is_stable: None where it cannot be judged, since a trace comes to an end; warnings: what a reader of the numbers
    must know; homes: the mean response of the tasks of each home node, None where there were none; one_queue, no_sharing:
    mean responses from queueing theory, None where it has no formula for this."""

    metrics: dict[str, Interval]
    is_stable: bool | None
    warnings: list[str]
    homes: list[float | None]
    one_queue: float | None
    no_sharing: float | None

    @property
    def mean_response(self) -> Interval:
        """In simulated seconds."""
        return self.metrics["mean_response"]

    @property
    def spread(self) -> tuple[float, float]:
        """Of the means by home node: the largest over the smallest, and the coefficient of variation."""
        means = [mean for mean in self.homes if mean is not None]
        return max(means) / max(min(means), 1e-12), pstdev(means) / max(fmean(means), 1e-12)


def outcome(scenario: Scenario, samples: Sequence[Sample]) -> Outcome:
    """Of all replications of a scenario."""
    metrics = intervals(samples)
    is_stable, warnings = _stability(scenario, samples)
    if is_stable:
        warnings += _too_short(scenario, metrics["mean_response"].value)
    one_queue, no_sharing = bounds(scenario, scenario.offered_load)
    counted = [
        (sum(sample.homes[home][0] for sample in samples), sum(sample.homes[home][1] for sample in samples))
        for home in range(scenario.nodes)
    ]
    homes = [total / count if count else None for count, total in counted]
    return Outcome(metrics, is_stable, warnings, homes, one_queue, no_sharing)


def impossible(scenario: Scenario) -> str:
    """Why this cannot be stable whatever the policy does, "" if it can."""
    load = scenario.offered_load
    if load < 1:
        return ""
    if scenario.trace is not None:
        return f"load {load:.4g}: more work comes than the slots can do meanwhile; this is how they work it off"
    return f"load {load:.4g}: as much work comes as all slots together can do, or more; no policy is stable there"


def _stability(scenario: Scenario, samples: Sequence[Sample]) -> tuple[bool | None, list[str]]:
    why = impossible(scenario)
    if scenario.trace is not None:
        return None, [why] * bool(why)
    factor, share = growth(samples)
    if factor < GREW_FACTOR or share < GREW_SHARE:
        return not why, [why] * bool(why)
    grew = (
        f"unfinished tasks became {factor:.1f} times as many through the measured part, {share:.1%} of those that arrived:"
        " it is unstable, or far from settled, and the means only say how long the run was"
    )
    return False, [*([why] * bool(why)), grew]


def _too_short(scenario: Scenario, mean_response_s: float) -> list[str]:
    """Whether the warm-up is too short for what was measured after it."""
    per_task_s = scenario.mean_service_s / (scenario.offered_load * scenario.capacity)
    needed = SETTLED_AFTER * (mean_response_s / scenario.mean_service_s) ** 2 * scenario.mean_service_s / per_task_s
    if scenario.warm_up >= needed:
        return []
    digits = 10 ** max(int(math.log10(needed)) - 1, 0)
    tasks = 4 * math.ceil(needed / digits) * digits
    return [f"the warm-up of {scenario.warm_up} tasks is short for such a mean, which may be too low: --tasks {tasks}"]


def bounds(scenario: Scenario, load: float) -> tuple[float | None, float | None]:
    """→ the mean response of one queue with all slots, which nobody beats, and of nodes that share nothing: where
    arrivals are Poisson, service is exponential and nodes are alike; None where they are not."""
    if scenario.trace is not None or scenario.durations or scenario.speeds or scenario.service not in (None, Service()):
        return None, None
    one_queue = mmc_response(scenario.nodes * scenario.slots, load)
    alone = mmc_response(scenario.slots, load * scenario.nodes / (scenario.hot or scenario.nodes))
    return (one_queue if math.isfinite(one_queue) else None), (alone if math.isfinite(alone) else None)
