"""Control variates: quantities whose mean is known, which take out of a simulated mean the chance that they explain.

Lavenberg and Welch 1981, A perspective on the use of control variables to increase the efficiency of Monte Carlo simulations.
"""

from __future__ import annotations

from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CHOSEN_MAX, BATCHES_EACH = 5, 8
"""Most controls of one metric, and batches for each of them below which fewer are chosen."""
GAIN = 0.9
"""A further control is chosen if it leaves no more than this share of the variance."""
FOLDS, NOTHING_NEW = 5, 1e-9
"""Parts of each run for which the slopes follow from the others; share of a control's variance that the others must leave."""


class Controlled(msgspec.Struct, frozen=True):
    """Batches of runs less what the chosen controls explain, and the mean slopes of these controls."""

    runs: list[list[float]]
    slopes: dict[str, float]


Products = list[list[float]]
"""Sums of the products of each two columns of some batches; the first column is 1, the second the value, each other a control."""


def controlled(runs: Sequence[Sequence[float]], controls: Mapping[str, Sequence[Sequence[float]]]) -> Controlled:
    """Take out of the batches of runs what control variates of mean 0 explain (``controls``: by name their values in each batch).

    For each FOLDS-th of the runs, which controls are used and their slopes follow from the other batches: so the mean stays unbiased,
    and what looks explained by chance does not count."""
    names = list(controls)
    middle = fmean(chain.from_iterable(runs))  # taken off, since sums of squares of what is far from 0 are inexact
    rows = [
        [[1.0, value - middle, *(controls[name][which][place] for name in names)] for place, value in enumerate(run)]
        for which, run in enumerate(runs)
    ]
    folds = [
        _products([row for of_run in rows for row in _part(of_run, fold)], 2 + len(names)) for fold in range(FOLDS)
    ]
    total = _sum(folds)
    fits = [_fit([other for other in folds if other is not fold], _less(total, fold)) for fold in folds]
    adjusted = [
        [
            middle + row[1] - sum(slope * row[one] for one, slope in fits[fold].items())
            for fold in range(FOLDS)
            for row in _part(of_run, fold)
        ]
        for of_run in rows
    ]
    chosen = sorted(set(chain.from_iterable(fits)))
    weights = [fold[0][0] / total[0][0] for fold in folds]
    slopes = {
        names[one - 2]: sum(weight * fit.get(one, 0.0) for weight, fit in zip(weights, fits, strict=True))
        for one in chosen
    }
    return Controlled(adjusted, slopes)


def _part(rows: list[list[float]], fold: int) -> list[list[float]]:
    return rows[len(rows) * fold // FOLDS : len(rows) * (fold + 1) // FOLDS]


def _fit(folds: Sequence[Products], total: Products) -> dict[int, float]:
    """Columns of the controls to be used, and their slopes. One is chosen after the other, each time the one that leaves the least
    variance of each fold with the slopes of the others, and none that explains too little."""
    others = [_less(total, fold) for fold in folds]
    chosen: list[int] = []
    left = of_all = _left(folds, chosen, [[]] * len(folds))
    for _ in range(min(CHOSEN_MAX, int(total[0][0]) // BATCHES_EACH)):
        tried = []
        for one in range(2, len(total)):
            if one not in chosen:
                columns = [*chosen, one]
                tried.append((_left(folds, columns, [_slopes(other, columns) for other in others]), one))
        best, one = min(tried, default=(left, 0))
        if best > GAIN * left or left <= NOTHING_NEW * of_all:
            break
        left = best
        chosen.append(one)
    return dict(zip(chosen, _slopes(total, chosen), strict=True))


def _products(rows: Sequence[Sequence[float]], width: int) -> Products:
    columns = list(zip(*rows, strict=True)) if rows else [()] * width
    found = [[0.0] * width for _ in range(width)]
    for one, column in enumerate(columns):
        for other in range(one + 1):
            found[one][other] = found[other][one] = sum(map(float.__mul__, column, columns[other]))
    return found


def _sum(parts: Sequence[Products]) -> Products:
    return [[sum(cells) for cells in zip(*lines, strict=True)] for lines in zip(*parts, strict=True)]


def _less(total: Products, part: Products) -> Products:
    return [[one - other for one, other in zip(*lines, strict=True)] for lines in zip(total, part, strict=True)]


def _left(folds: Sequence[Products], chosen: Sequence[int], fits: Sequence[Sequence[float]]) -> float:
    """Sum of the squares of the adjusted values around their mean."""
    squares = total = count = 0.0
    for fold, fit in zip(folds, fits, strict=True):
        terms = [(1, 1.0), *((one, -slope) for one, slope in zip(chosen, fit, strict=True))]
        squares += sum(factor * other * fold[one][two] for one, factor in terms for two, other in terms)
        total += sum(factor * fold[0][one] for one, factor in terms)
        count += fold[0][0]
    return squares - total * total / count if count else 0.0


def _slopes(products: Products, chosen: Sequence[int]) -> list[float]:
    """Coefficients of the least-squares fit of the values by the chosen columns; 0 for one that the others explain."""
    count, sums = products[0][0], products[0]
    rows = [
        [products[one][other] - sums[one] * sums[other] / count for other in [*chosen, 1]]
        if count
        else [0.0] * (1 + len(chosen))
        for one in chosen
    ]
    sizes = [row[which] for which, row in enumerate(rows)]
    for which in range(len(chosen)):  # Gauss and Jordan
        pivot = rows[which][which]
        if pivot <= NOTHING_NEW * sizes[which]:
            rows[which] = [0.0] * len(rows[which])
            continue
        rows[which] = [value / pivot for value in rows[which]]
        for other in range(len(chosen)):
            if other != which and (factor := rows[other][which]):
                rows[other] = [value - factor * one for value, one in zip(rows[other], rows[which], strict=True)]
    return [row[-1] for row in rows]
