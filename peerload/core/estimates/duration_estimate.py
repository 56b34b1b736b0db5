"""Durations of the last runs of one command, and the estimate for the next."""

from __future__ import annotations

import math
from array import array

NEARLY_ALL = 0.9
NEWEST_SHARE = 0.3
"""Of the average of the logarithms of durations so much is the newest run's."""
DEVIATION_MIN = 0.25
"""Runs are taken to differ by at least this factor's logarithm (a quarter), however alike the last ones were."""
DEVIATIONS = 1.28
"""Nine of ten lie below the mean and so many standard deviations, where logarithms are distributed normally."""


class PastDurations:
    """The durations of the last runs of one command, at most ``kept_max``. What they sum up to is kept, and how they are
    in order, since both are asked for more often than they change."""

    __slots__ = ("_ascending", "_durations", "_kept_max", "_mean_log", "_oldest", "_sum_s", "_variance_log")

    def __init__(self, kept_max: int) -> None:
        self._durations = array("d")
        self._ascending: tuple[float, tuple[float, ...]] | None = None
        self._kept_max = kept_max
        self._oldest = 0
        self._sum_s = 0.0
        self._mean_log = 0.0
        self._variance_log = 0.0

    def __len__(self) -> int:
        return len(self._durations)

    def add(self, duration_s: float) -> None:
        """One more, > 0; the oldest goes if there are too many."""
        durations, oldest = self._durations, self._oldest
        self._follow(math.log(duration_s), is_first=not durations)
        self._ascending = None
        if len(durations) < self._kept_max:
            durations.append(duration_s)
            self._sum_s += duration_s
            return
        self._sum_s += duration_s - durations[oldest]
        durations[oldest] = duration_s
        self._oldest = (oldest + 1) % self._kept_max
        if not self._oldest:  # once a round, so that the errors of many sums do not pile up
            self._sum_s = math.fsum(durations)

    @property
    def mean_s(self) -> float:
        """Their mean. There must be one."""
        return self._sum_s / len(self._durations)

    def _follow(self, log_s: float, *, is_first: bool) -> None:
        """The averages that forget."""
        if is_first:
            self._mean_log = log_s
            return
        off = log_s - self._mean_log
        self._mean_log += NEWEST_SHARE * off
        self._variance_log = (1.0 - NEWEST_SHARE) * (self._variance_log + NEWEST_SHARE * off * off)

    def nearly_all_s(self, speed: float) -> float:
        """The duration that nine of ten of the next runs will not exceed on a node of this speed: that of nine of ten of these, or,
        if that is more, what their weighted average makes of it, which follows when runs become longer. There must be one."""
        ascending = self.ascending(speed)
        seen_s = ascending[min(int(NEARLY_ALL * len(ascending)), len(ascending) - 1)]
        deviation = max(math.sqrt(self._variance_log), DEVIATION_MIN)
        return max(seen_s, math.exp(self._mean_log + DEVIATIONS * deviation) / speed)

    def ascending(self, speed: float) -> tuple[float, ...]:
        """Their durations on a node of this speed, in order."""
        if self._ascending is None or self._ascending[0] != speed:
            self._ascending = speed, tuple(sorted(seen_s / speed for seen_s in self._durations))
        return self._ascending[1]
