"""Statistics: quantiles, and 95 % intervals from replications or their batches."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

T_OF_FEW = {1: 12.7062, 2: 4.3027}
"""Values of Student's t for which the expansion is too inexact."""


CONTROLLED_MIN = 5
"""Batches for each control variate below which none is used."""
FOLDS, NOTHING_NEW = 5, 1e-9
"""Parts of a run for which the slopes follow from the rest; share of a control's variance that the others must leave."""
INDEPENDENT_MIN = 3.0
"""Independent batches below which a run is too short to tell an interval."""


class Sample(msgspec.Struct, frozen=True):
    """Metrics of one replication: each with its value over all measured tasks, and the values of its batches.

    tasks: played, the warm-up included; homes: for each home node the number of measured tasks and the sum of their
    response times; cut_off: measured tasks that had not begun at the end and count with their age; policy_errors:
    failures of policies since the start; at_migrations_max: tasks since the start that were placed as often as a
    task without a limit may be; executed_remotely: measured tasks that ran on another node than their home.
    """

    values: dict[str, float]
    batches: dict[str, list[float]]
    tasks: int
    cpu_s: float
    homes: list[tuple[int, float]] = []
    cut_off: int = 0
    policy_errors: int = 0
    at_migrations_max: int = 0
    executed_remotely: int = 0


class Interval(msgspec.Struct, frozen=True):
    """A mean and half the width of its 95 % interval (infinite if there is nothing to tell it from)."""

    value: float
    half: float


def student_t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by its expansion around the normal one (within 1 % from 3 on)."""
    if freedom in T_OF_FEW:
        return T_OF_FEW[freedom]
    normal = 1.959964
    first = (normal**3 + normal) / 4
    second = (5 * normal**5 + 16 * normal**3 + 3 * normal) / 96
    third = (3 * normal**7 + 19 * normal**5 + 17 * normal**3 - 15 * normal) / 384
    return normal + first / freedom + second / freedom**2 + third / freedom**3


def half_width(values: Sequence[float]) -> float:
    """Half the 95 % interval of the mean of independent values; infinite for fewer than two."""
    if len(values) < 2:  # noqa: PLR2004 -- one value has no spread
        return math.inf
    return student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def batch_half_width(runs: Sequence[Sequence[float]]) -> float:
    """Half the 95 % interval of the mean of the batches of some runs. Batches that follow one another are correlated: they
    count for as many independent ones as their lag-1 autocorrelation says, corrected for its bias in short runs.
    Infinite if that is fewer than INDEPENDENT_MIN."""
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


def controlled(runs: Sequence[Sequence[float]], controls: Sequence[Sequence[tuple[float, ...]]]) -> list[list[float]]:
    """Take out of the batches of runs what control variates of mean 0 explain (``controls``: their values in each batch). How
    much follows for each FOLDS-th of a run by least squares from all other batches, so that the mean stays unbiased; nothing
    if there are too few of these."""
    found = []
    for which, (run, errors) in enumerate(zip(runs, controls, strict=True)):
        adjusted: list[float] = []
        fold = max(-(-len(run) // FOLDS), 1)
        for start in range(0, len(run), fold):
            others = [
                (value, error)
                for other, (values, of_run) in enumerate(zip(runs, controls, strict=True))
                for place, (value, error) in enumerate(zip(values, of_run, strict=True))
                if other != which or not start <= place < start + fold
            ]
            slopes = _slopes(others) if others and len(others) >= CONTROLLED_MIN * len(errors[start]) else ()
            for value, error in zip(run[start : start + fold], errors[start : start + fold], strict=True):
                adjusted.append(value - sum(slope * one for slope, one in zip(slopes, error, strict=False)))
        found.append(adjusted)
    return found


def _slopes(pairs: Sequence[tuple[float, tuple[float, ...]]]) -> list[float]:
    """Coefficients of the least-squares fit of values by the tuples beside them; 0 for one that the others explain."""
    count = len(pairs[0][1])
    mean = fmean(value for value, _ in pairs)
    means = [fmean(errors[which] for _, errors in pairs) for which in range(count)]
    rows = [[0.0] * (count + 1) for _ in range(count)]
    for value, errors in pairs:
        off = [error - middle for error, middle in zip(errors, means, strict=True)] + [value - mean]
        for row, one in zip(rows, off, strict=False):
            for place, other in enumerate(off):
                row[place] += one * other
    sizes = [rows[which][which] for which in range(count)]
    for which in range(count):  # Gauss and Jordan
        pivot = rows[which][which]
        if pivot <= NOTHING_NEW * sizes[which]:
            rows[which] = [0.0] * (count + 1)
            continue
        rows[which] = [value / pivot for value in rows[which]]
        for other in range(count):
            if other != which and (factor := rows[other][which]):
                rows[other] = [value - factor * one for value, one in zip(rows[other], rows[which], strict=True)]
    return [row[count] for row in rows]


def intervals(samples: Sequence[Sample]) -> dict[str, Interval]:
    """metric → mean of the replications and its interval: from their spread, or from the spread of the batches if
    there is only one replication."""
    combined: dict[str, Interval] = {}
    for metric in dict.fromkeys(metric for sample in samples for metric in sample.values):
        values = [sample.values[metric] for sample in samples if metric in sample.values]
        batches = samples[0].batches.get(metric, [])
        half = half_width(values) if len(samples) > 1 else batch_half_width([batches])
        combined[metric] = Interval(fmean(values), half)
    return combined


def quantile(ordered: Sequence[float], share: float) -> float:
    """Quantile by linear interpolation between the two nearest values."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
