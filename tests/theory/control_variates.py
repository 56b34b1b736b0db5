"""Control variates: quantities whose mean is known to be 0, which take out of a simulated mean the chance that they explain.

Lavenberg and Welch 1981, A perspective on the use of control variables to increase the efficiency of Monte Carlo simulations.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTROLLED_MIN = 5
"""Batches for each control variate below which none is used."""
FOLDS, NOTHING_NEW = 5, 1e-9
"""Parts of a run for which the slopes follow from the rest; share of a control's variance that the others must leave."""


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
            fit = slopes(others) if others and len(others) >= CONTROLLED_MIN * len(errors[start]) else ()
            for value, error in zip(run[start : start + fold], errors[start : start + fold], strict=True):
                adjusted.append(value - sum(slope * one for slope, one in zip(fit, error, strict=False)))
        found.append(adjusted)
    return found


def slopes(pairs: Sequence[tuple[float, tuple[float, ...]]]) -> list[float]:
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
