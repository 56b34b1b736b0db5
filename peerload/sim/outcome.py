"""Results of all replications of one scenario: intervals, stability, fairness, and the bounds of queueing theory."""

from __future__ import annotations

import math
from itertools import chain, pairwise
from statistics import fmean, pstdev, stdev
from typing import TYPE_CHECKING

import msgspec

from peerload.model.text import printable
from peerload.sim.queueing_model import MIGRATIONS_MAX
from peerload.sim.replication import BATCHES, QUANTILES, WARM_UP_S, growth, quantile
from peerload.sim.scenario import TASKS_MOST, TASKS_USUAL, Scenario
from peerload.sim.service import ServiceTimes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from peerload.sim.replication import Sample

GREW_FACTOR, GREW_SHARE = 1.5, 0.002
"""A system is unstable, or far from steady state, if the unfinished tasks grow by this factor over the measured part,
in every batch, and by at least this share of the tasks that arrived meanwhile."""
SETTLED_AFTER, WITH_ROOM = 3.0, 1.5
"""First number: a single node that starts empty reaches its mean response of W mean service times after this many times W²
service times; nodes that share load do so sooner. A run with a shorter warm-up is repeated with that length times the second."""
MEASURED_FEW = 200
"""Minimum total number of measured tasks for a meaningful mean."""
GROWS_AGAIN = 4
"""Scenarios that seem unstable are repeated with this many times the tasks, up to this many times the usual number."""


# -- 95 % intervals from replications or their batches ------------------------------------------------------------

NORMAL = 1.959964
"""The 97.5 % quantile of the normal distribution."""
T_OF_FEW = {1: 12.7062, 2: 4.3027}
"""Exact values of Student's t for which the expansion is not accurate enough."""


INDEPENDENT_MIN = 3.0
"""Minimum number of independent batches for an interval."""
INDEPENDENT_TASKS_MIN, BEYOND_MIN = 40.0, 4.0
"""Minimum number of independent tasks, by theory, for the interval of one replication; and minimum number beyond a quantile for its
interval. Shorter runs underestimate their error: for M/M/1, only 85 % of the intervals contained the mean, and intervals of p99
almost never contained the quantile."""


class Interval(msgspec.Struct, frozen=True):
    """A mean and half the width of its 95 % interval (infinite if unknown)."""

    value: float
    half: float


def student_t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by expansion around the normal quantile (error below 1 % from 3 degrees of freedom on)."""
    if freedom in T_OF_FEW:
        return T_OF_FEW[freedom]
    first = (NORMAL**3 + NORMAL) / 4
    second = (5 * NORMAL**5 + 16 * NORMAL**3 + 3 * NORMAL) / 96
    third = (3 * NORMAL**7 + 19 * NORMAL**5 + 17 * NORMAL**3 - 15 * NORMAL) / 384
    return NORMAL + first / freedom + second / freedom**2 + third / freedom**3


def half_width(values: Sequence[float]) -> float:
    """Half the 95 % interval of the mean of independent values; infinite for fewer than two."""
    if len(values) < 2:  # noqa: PLR2004 -- one value has no spread
        return math.inf
    return student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def batch_half_width(runs: Sequence[Sequence[float]]) -> float:
    """Half the 95 % interval of the mean over the batches of some runs: the larger result of these batches and of batches twice as
    long, if there are enough of those. Infinite if the run is too short."""
    longer = [[fmean(pair) for pair in zip(run[::2], run[1::2], strict=False)] for run in runs]
    half, of_longer = _half_width_of_correlated(runs), _half_width_of_correlated(longer)
    return max(half, of_longer) if math.isfinite(of_longer) else half


def _half_width_of_correlated(runs: Sequence[Sequence[float]]) -> float:
    """Half the 95 % interval from correlated consecutive batches. The number of independent batches follows from their lag-1
    autocorrelation, corrected for its bias in short runs. Infinite if that number is below INDEPENDENT_MIN."""
    values = [value for run in runs for value in run]
    mean = fmean(values) if values else 0.0
    square = sum((value - mean) ** 2 for value in values)
    if len(values) > 1 and not square:
        return 0.0
    product = sum((value - mean) * (later - mean) for run in runs for value, later in pairwise(run))
    correlation = max(product / square + 2 / len(values), 0.0) if square else 1.0
    independent = len(values) * (1 - correlation) / (1 + correlation)
    if independent < INDEPENDENT_MIN:
        return math.inf
    return student_t(max(int(independent - 1), 1)) * stdev(values) / math.sqrt(independent)


def runs_interval(mean: float, runs: Sequence[Sequence[float]], independent: float = math.inf) -> Interval:
    """The mean of some runs, and half of its 95 % interval from their batches. It is the upper half on the log scale, to
    second order, since a run with too low a mean also has too low a spread. Infinite for fewer than INDEPENDENT_TASKS_MIN
    ``independent`` tasks."""
    half = batch_half_width(runs) if independent >= INDEPENDENT_TASKS_MIN else math.inf
    return Interval(mean, half * (1 + half / (2 * mean)) if mean > 0 else half)


def independent_tasks(tasks: int, load: float, mean_response: float) -> float:
    """Number of independent responses with the same information about the mean as ``tasks`` consecutive ones. In M/M/1, one per
    4 load / (1 - load)² tasks, the correlation time of the queue; fewer tasks if nodes share work, since the mean response (in mean
    service times) is then below that of M/M/1. Infinite without a theory: for a load outside of 0 … 1."""
    return tasks * (1 - load) / (4 * load * max(mean_response, 1.0)) if 0 < load < 1 else math.inf


def quantile_interval(runs: Sequence[Sequence[float]], share: float) -> Interval:
    """A quantile of the pooled values of some runs, and half of its 95 % interval from order statistics: the share of values
    beyond the quantile is a mean over batches, and the bounds of that share give two other quantiles. Infinite if too few
    independent values lie beyond it, since the quantiles of short runs are all too low."""
    ordered = sorted(chain.from_iterable(runs))
    value = quantile(ordered, share)
    beyond = []
    for run in runs:
        edges = [len(run) * batch // BATCHES for batch in range(BATCHES + 1)]
        parts = (run[edge:following] for edge, following in pairwise(edges) if edge < following)
        beyond.append([sum(one > value for one in part) / len(part) for part in parts])
    width = max(batch_half_width(beyond), NORMAL * math.sqrt(share * (1 - share) / len(ordered)))
    if width >= min(share, 1 - share):
        return Interval(value, math.inf)
    return Interval(value, max(quantile(ordered, share + width) - value, value - quantile(ordered, share - width)))


def has_few_beyond(independent: float, share: float) -> bool:
    """True if fewer than BEYOND_MIN of the independent tasks lie beyond a quantile."""
    return independent * min(share, 1 - share) < BEYOND_MIN


def intervals(samples: Sequence[Sample], independent: float = math.inf) -> dict[str, Interval]:
    """metric → mean over the replications and its interval: from all their batches if each replication is long enough, which is
    narrower, else from their spread; for a single replication, from its batches. Quantiles are of all replications pooled.
    independent: result of `independent_tasks` for all replications."""
    combined: dict[str, Interval] = {}
    is_long = INDEPENDENT_TASKS_MIN * len(samples) <= independent < math.inf
    for metric in dict.fromkeys(metric for sample in samples for metric in sample.values):
        if metric in QUANTILES and all(sample.responses for sample in samples):
            share = QUANTILES[metric]
            found = quantile_interval([sample.responses for sample in samples], share)
            combined[metric] = Interval(found.value, math.inf) if has_few_beyond(independent, share) else found
            continue
        values = [sample.values[metric] for sample in samples if metric in sample.values]
        mean, runs = fmean(values), [sample.batches.get(metric, []) for sample in samples]
        found = runs_interval(mean, runs, independent) if is_long or len(samples) == 1 else Interval(mean, math.inf)
        is_known = math.isfinite(found.half) or len(samples) == 1
        combined[metric] = found if is_known else Interval(mean, half_width(values))
    return combined


# -- outcome ------------------------------------------------------------


class Outcome(msgspec.Struct, frozen=True):
    """Result of a scenario. is_stable: None if unknown, for a trace or a run that was too short; warnings: caveats about the
    numbers; homes: the mean response of the tasks of each home node, None without tasks;
    executed_at_origin, executed_remotely: number of measured tasks of each class, in all replications; one_queue, no_sharing: mean
    responses from queueing theory, None without a formula."""

    metrics: dict[str, Interval]
    is_stable: bool | None
    warnings: list[str]
    homes: list[float | None]
    executed_at_origin: int
    executed_remotely: int
    one_queue: float | None
    no_sharing: float | None
    means: tuple[float, ...] = ()
    """Mean response of each replication. Replications with the same number have the same tasks for all policies."""

    @property
    def mean_response(self) -> Interval:
        return self.metrics["mean_response"]

    @property
    def spread(self) -> tuple[float, float]:
        """Spread of the means by home node: the largest over the smallest, and the coefficient of variation."""
        means = [mean for mean in self.homes if mean is not None]
        return max(means) / max(min(means), 1e-12), pstdev(means) / max(fmean(means), 1e-12)


def outcome(scenario: Scenario, samples: Sequence[Sample]) -> Outcome:
    """Combine the samples of all replications of a scenario."""
    metrics = intervals(samples, _independent(scenario, samples))
    is_stable, warnings = _stability(scenario, samples)
    one_queue, no_sharing = bounds(scenario, scenario.offered_load)
    if is_stable or (is_stable is None and scenario.trace is None):
        warnings += _too_short(scenario, metrics["mean_response"].value)
    if is_stable:
        warnings += _too_good(scenario, metrics["mean_response"], one_queue)
        warnings += _without_interval(scenario, metrics["mean_response"])
    warnings += _incomplete(samples, is_stable=is_stable, is_recorded=scenario.trace is not None)
    if scenario.unused_readings():
        warnings.append("the load policy uses GPU readings, but the nodes have no GPUs: the results do not reflect it")
    counted = [
        (sum(sample.homes[home][0] for sample in samples), sum(sample.homes[home][1] for sample in samples))
        for home in range(scenario.nodes)
    ]
    homes = [total / count if count else None for count, total in counted]
    means = tuple(sample.values["mean_response"] for sample in samples)
    remotely = sum(sample.executed_remotely for sample in samples)
    at_origin = sum(count for count, _ in counted) - remotely
    return Outcome(metrics, is_stable, warnings, homes, at_origin, remotely, one_queue, no_sharing, means)


def impossible(scenario: Scenario) -> str:
    """Reason why this scenario cannot be stable with any policy; "" if it can."""
    load = scenario.offered_load
    if load < 1:
        return ""
    if scenario.trace is not None:
        text = f"{load:.4g}" if math.isfinite(load) else "without bound"
        return f"load {text}: more work arrives than the slots can do in this time; the figures show how the backlog is worked off"
    return f"load {load:.4g}: the arriving work needs all slots, or more; no policy is stable at this load"


def _stability(scenario: Scenario, samples: Sequence[Sample]) -> tuple[bool | None, list[str]]:
    why = impossible(scenario)
    if scenario.trace is not None:
        names = len(scenario.trace.names)
        wraps = f"the trace names {names} nodes, and the scenario has {scenario.nodes}: several nodes of the trace share one"
        return None, [*([why] * bool(why)), *([wraps] * (names > scenario.nodes)), *scenario.trace.notes]
    factor, share = growth(samples)
    if factor < GREW_FACTOR or share < GREW_SHARE:
        return not why, [why] * bool(why)
    if not why and (lasted := scenario.tasks / _rate(scenario)) < WARM_UP_S:
        short = f"all tasks arrive within {lasted:.2g} mean service times, too short to tell whether this is stable"
        return None, [f"{short}: --tasks {_rounded_up(4 * WARM_UP_S * _rate(scenario))}"]
    grew = (
        f"unfinished tasks became {factor:.1f} times as many through the measured part, {share:.1%} of those that arrived:"
        " it is unstable, or far from settled, so the means depend on the length of the run"
    )
    return False, [*([why] * bool(why)), grew]


def _too_short(scenario: Scenario, mean_response_s: float) -> list[str]:
    warm_up = _warm_up_needed(scenario, mean_response_s)
    if scenario.warm_up >= warm_up:
        return []
    tasks = 4 * _rounded_up(warm_up)
    return [f"the warm-up of {scenario.warm_up} tasks is short for this mean, which may be too low: --tasks {tasks}"]


def _rounded_up(tasks: float) -> int:
    digits: int = 10 ** max(int(math.log10(tasks)) - 1, 0)
    return math.ceil(tasks / digits) * digits


def _too_good(scenario: Scenario, mean_response: Interval, one_queue: float | None) -> list[str]:
    """Warn of a mean below that of one queue for all slots, the optimum for policies that do not know durations."""
    if not _is_below(mean_response, one_queue):
        return []
    bound = f"the {one_queue:.4g} of one queue for all slots, a lower bound for policies that do not know how long tasks take"
    return [f"the whole interval is below {bound}: too few tasks; --tasks {GROWS_AGAIN * scenario.tasks}"]


def _without_interval(scenario: Scenario, mean_response: Interval) -> list[str]:
    if math.isfinite(mean_response.half):
        return []
    enough = f"--replications 4, or --tasks {GROWS_AGAIN * scenario.tasks}"
    return [f"one replication of {scenario.tasks} tasks is too short for an interval: {enough}"]


def _independent(scenario: Scenario, samples: Sequence[Sample]) -> float:
    """Number of independent measured tasks; infinite for a trace, which is not a sample of a longer one."""
    if scenario.trace is not None:
        return math.inf
    return independent_of(samples, scenario.offered_load, scenario.mean_service_s)


def independent_of(samples: Sequence[Sample], load: float, mean_service_s: float = 1.0) -> float:
    """Number of independent measured tasks of these replications."""
    measured = sum(count for sample in samples for count, _ in sample.homes)
    mean_s = fmean(sample.values["mean_response"] for sample in samples)
    return independent_tasks(measured, load, mean_s / mean_service_s)


def _is_below(mean_response: Interval, one_queue: float | None) -> bool:
    return one_queue is not None and mean_response.value + mean_response.half < one_queue


def _incomplete(samples: Sequence[Sample], *, is_stable: bool | None, is_recorded: bool) -> list[str]:
    """Warnings about data missing from the numbers; a trace of any length counts as complete."""
    found = []
    measured = sum(count for sample in samples for count, _ in sample.homes)
    if measured < MEASURED_FEW and not is_recorded:
        found.append(f"only {measured} measured tasks in all: the means are mostly chance")
    cut_off = sum(sample.cut_off for sample in samples)
    if cut_off and is_stable is not False:
        found.append(f"{cut_off} of {measured} measured tasks had not begun at the end and count with their age")
    errors = sum(sample.policy_errors for sample in samples)
    if errors:
        first = printable(next(filter(None, (sample.policy_failure for sample in samples)), ""))
        found.append(
            f"policy errors: {errors}; such an answer is ignored, and the task stays where it is; the first: {first}"
        )
    wandered = sum(sample.at_migrations_max for sample in samples)
    if wandered:
        found.append(
            f"{wandered} tasks moved {MIGRATIONS_MAX} times and then stayed, the most that a simulation allows where the"
            ' policy sets no limit; a limit:  [migration] policy = "controlled"'
        )
    return found


def _warm_up_needed(scenario: Scenario, mean_response_s: float) -> int:
    """Number of tasks that arrive until a system with this mean response is in steady state."""
    return math.ceil(SETTLED_AFTER * (mean_response_s / scenario.mean_service_s) ** 2 * _rate(scenario))


def _rate(scenario: Scenario) -> float:
    """Arrival rate, in tasks per mean service time."""
    return scenario.offered_load * scenario.capacity


def more(found: Outcome, precision: float, most: int) -> int:
    """The probable number of replications, at most ``most``, for an interval within this share of the mean."""
    mean = found.mean_response
    if found.is_stable is False or mean.half <= precision * mean.value:
        return len(found.means)
    factor = (mean.half / (precision * mean.value)) ** 2 if math.isfinite(mean.half) else 2.0
    return min(max(math.ceil(len(found.means) * min(factor, 8.0)), len(found.means) + 1), most)


def warned(found: Outcome, precision: float) -> Outcome:
    """The outcome, with a warning if its interval is wider than this share of the mean."""
    mean = found.mean_response
    if mean.half <= precision * mean.value:
        return found
    reached = (
        f"±{100 * mean.half / mean.value:.2g} % was reached" if math.isfinite(mean.half) else "there is no interval"
    )
    warning = f"a precision of ±{100 * precision:.2g} % was wanted, and {reached}"
    return msgspec.structs.replace(found, warnings=[*found.warnings, warning])


def paired(better: Sequence[float], than: Sequence[float]) -> Interval:
    """Share of the mean response by which the first is lower than the second, from pairs of replications with the same
    tasks, which cancels their common randomness (common random numbers)."""
    shares = [1 - one / other for one, other in zip(better, than, strict=False)]
    return Interval(fmean(shares), half_width(shares))


def longer(scenario: Scenario, found: Outcome) -> Scenario | None:
    """The scenario with more tasks, if there were too few for a steady state or to judge stability; None if there were enough,
    or if more would not help."""
    if scenario.trace is not None or scenario.offered_load >= 1:
        return None
    if found.is_stable and not _is_below(found.mean_response, found.one_queue):
        needed = _warm_up_needed(scenario, found.mean_response.value)
        warm_up = min(math.ceil(needed * WITH_ROOM), TASKS_MOST // 4) if scenario.warm_up < needed else 0
        tasks = 4 * warm_up
    else:
        again = scenario.tasks < GROWS_AGAIN * TASKS_USUAL
        tasks, warm_up = (GROWS_AGAIN * count if again else 0 for count in (scenario.tasks, scenario.warm_up))
    if warm_up <= scenario.warm_up:
        return None
    return msgspec.structs.replace(scenario, tasks=tasks, warm_up=warm_up)


def alike(found: Mapping[int, tuple[Scenario, Outcome]]) -> dict[int, Scenario]:
    """The stable scenarios of one command, by index, that are shorter than another with the same workload, each extended to the
    other's length, so that they can be paired. A scenario that would grow by more than GROWS_AGAIN times is left out."""
    longest: dict[tuple[object, ...], Scenario] = {}
    stable = {index: scenario for index, (scenario, outcome_) in found.items() if outcome_.is_stable}
    for scenario in sorted(stable.values(), key=lambda scenario: scenario.tasks):
        longest[_workload(scenario)] = scenario
    equal = {}
    for index, scenario in stable.items():
        other = longest[_workload(scenario)]
        if scenario.tasks < other.tasks <= GROWS_AGAIN * scenario.tasks:
            equal[index] = msgspec.structs.replace(scenario, tasks=other.tasks, warm_up=other.warm_up)
    return equal


def _workload(scenario: Scenario) -> tuple[object, ...]:
    """Key of a workload: all parameters that may differ within one command, except the number of tasks."""
    return scenario.load, scenario.nodes, scenario.slots, scenario.transfer_s, scenario.message_s


# -- bounds from queueing theory: nodes that share nothing, and one queue for all slots --------------------


def bounds(scenario: Scenario, load: float) -> tuple[float | None, float | None]:
    """Bounds of queueing theory → mean response of one queue with all slots, the optimum, and of nodes that
    share nothing. Each is None unless arrivals are Poisson, service is exponential and nodes are alike."""
    if (
        scenario.trace is not None
        or scenario.durations
        or scenario.modulation is not None
        or scenario.classes
        or scenario.speeds
        or scenario.service not in (None, ServiceTimes())
    ):
        return None, None
    one_queue = mmc_response(scenario.nodes * scenario.slots, load)
    alone = mmc_response(scenario.slots, load * scenario.nodes / (scenario.hot or scenario.nodes))
    return (one_queue if math.isfinite(one_queue) else None), (alone if math.isfinite(alone) else None)


def mmc_response(slots: int, load: float) -> float:
    """Mean response of M/M/c in mean service times (Erlang C); load: per slot. Infinite from load 1 on.

    A single node is M/M/c with its slots. All nodes with one common queue are M/M/c with all slots: the optimum for
    policies that do not know durations, if service is exponential and nodes are alike.
    """
    if load >= 1:
        return math.inf
    if load <= 0:
        return 1.0
    offered = slots * load
    blocked = 1.0
    for busy in range(1, slots + 1):  # Erlang B by recursion over the slots, since factorials would overflow
        blocked = offered * blocked / (busy + offered * blocked)
    waits = blocked / (1 - load * (1 - blocked))
    return 1 + waits / (slots * (1 - load))
