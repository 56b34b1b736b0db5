"""Histogram of a quantity, as Prometheus has them: counts in fixed buckets, and the sum."""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """bounds: the upper bounds of the buckets, ascending; what exceeds the last is counted in one more."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, so often. From one thread only; another may read."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def told(self) -> dict[str, object]:
        """As the answer to `stats` has it: bounds, counts of each bucket (one more than bounds), sum."""
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}
