"""Price of energy, or its carbon, over time: piecewise constant. Pure."""

from __future__ import annotations

from bisect import bisect_right
from math import isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    Price = Sequence[tuple[float, float]]
    """(from when in s, value), ascending; the first value holds before, too, the last one for ever. An infinite value:
    nothing is known of that time, which no task is put off to."""


def integral(price: Price, start_s: float, end_s: float) -> float:
    """Sum of value times seconds."""
    total = 0.0
    number = max(bisect_right(price, start_s, key=lambda one: one[0]) - 1, 0)
    while start_s < end_s:
        until_s = price[number + 1][0] if number + 1 < len(price) else end_s
        total += price[number][1] * (min(until_s, end_s) - start_s)
        start_s, number = min(until_s, end_s), number + 1
    return total


def price_at(price: Price, at_s: float) -> float | None:
    """Value at that time; None where nothing is known of it."""
    if not price:
        return None
    value = price[max(bisect_right(price, at_s, key=lambda one: one[0]) - 1, 0)][1]
    return value if isfinite(value) else None


def cheapest_start(price: Price, earliest_s: float, latest_s: float, duration_s: float) -> float:
    """The start that makes so many seconds cheapest, of equal ones the first. It lies where the window begins or ends at a
    change of the price, or at a bound."""
    starts = {earliest_s, latest_s}
    starts.update(at_s for change_s, _ in price for at_s in (change_s, change_s - duration_s))
    allowed = sorted(at_s for at_s in starts if earliest_s <= at_s <= latest_s)
    return min(allowed, key=lambda at_s: integral(price, at_s, at_s + max(duration_s, 1.0)), default=earliest_s)
