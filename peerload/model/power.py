"""Power of a node: its power curve over load, with where the figures come from."""

from __future__ import annotations

import enum
import math
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

POINTS_MAX = 33
"""Points of a curve that are told to other nodes."""
SPEC_SHAPE = (0.219, 0.343, 0.394, 0.446, 0.5, 0.553, 0.617, 0.689, 0.778, 0.889, 1.0)
"""Power at 0, 10 … 100 % load over power at full load: medians of 155 SPECpower results since 2019."""
WATTS_PER_THREAD = 4.0
"""Taken for a busy thread where nothing is known of a processor."""

Watts = Annotated[float, Meta(ge=0.0, le=1e6)]


class Quality(enum.StrEnum):
    """Origin of watts and joules, the best first: read from a sensor, computed from readings, or from a model alone."""

    MEASURED = "measured"
    DERIVED = "derived"
    ESTIMATED = "estimated"

    @staticmethod
    def worst(qualities: tuple[Quality, ...]) -> Quality:
        """Quality of a sum: that of its worst part; of nothing: estimated."""
        return max(qualities, key=tuple(Quality).index, default=Quality.ESTIMATED)


class TaskCost(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Joules that a task would take on a node as its power curve has it; of a task of unknown duration, for one second of
    work. price: of a kWh there now, None = not known; wake_s: time that the node takes to wake; wake_joules: what it draws meanwhile,
    not counted in joules."""

    node: str
    joules: float
    quality: Quality = Quality.ESTIMATED
    price: float | None = None
    wake_s: float = 0.0
    wake_joules: float = 0.0


class PowerCurve(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Power of a node by its work rate u (0 … 1, of that with all threads busy), linear between equally spaced points.

    smt_gain: work rate of a core with all its threads busy over that with one; all_core: work rate of a core while all
    are busy over that of one core alone; off_w, wake_s: power while suspended, and how long it takes to resume; may_sleep:
    it is suspended when idle; cap_w: tasks are never placed so that it takes more than this, 0 = no such bound.
    """

    watts: Annotated[tuple[Watts, ...], Meta(min_length=2, max_length=POINTS_MAX)]
    cores: Annotated[int, Meta(ge=1, le=65536)]
    threads: Annotated[int, Meta(ge=1, le=65536)]
    smt_gain: Annotated[float, Meta(ge=1.0, le=16.0)] = 1.0
    all_core: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    off_w: Watts = 0.0
    wake_s: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0
    may_sleep: bool = False
    cap_w: Watts = 0.0
    quality: Quality = Quality.ESTIMATED

    def __post_init__(self) -> None:
        """ValueError, where it is decoded a ValidationError, for a curve that falls."""
        if not all(math.isfinite(value) for value in self.watts):
            raise ValueError("a power curve has a point that is no number")
        if any(after < before for before, after in pairwise(self.watts)):
            raise ValueError("a power curve falls: more load never takes less power")

    def rate(self, threads: float) -> float:
        """Work rate with so many threads busy, in cores of a node that does one thing."""
        busy = min(threads, float(self.threads))
        if busy <= self.cores:
            return busy * (1.0 - (1.0 - self.all_core) * busy / self.cores)
        return self.all_core * (self.cores + (self.smt_gain - 1.0) * (busy - self.cores))

    def thread_rate(self, threads: float) -> float:
        """Work rate of each of so many busy threads."""
        return self.rate(threads) / threads if threads > 0 else self.rate(1.0)

    def watts_at(self, threads: float) -> float:
        """Power of the node while it is awake, with so many threads busy."""
        last = len(self.watts) - 1
        at = min(self.rate(max(threads, 0.0)) / self.rate(self.threads), 1.0) * last
        step = min(int(at), last - 1)
        return self.watts[step] + (self.watts[step + 1] - self.watts[step]) * (at - step)

    def settled_watts(self, threads: float) -> float:
        """Watts with so many busy threads; an idle node that may sleep draws its power of sleep."""
        return self.off_w if self.may_sleep and threads <= 0 else self.watts_at(threads)

    def exceeds_cap(self, threads: float) -> bool:
        """True if so many busy threads take more than tasks may have the node take."""
        return bool(self.cap_w) and self.watts_at(threads) > self.cap_w

    def threads_under_cap(self, threads_max: float) -> float:
        """Most threads that tasks may keep busy, of at most so many."""
        if not self.exceeds_cap(threads_max):
            return threads_max
        counts = range(min(int(threads_max), self.threads), -1, -1)
        return float(next((count for count in counts if not self.exceeds_cap(count)), 0))

    def limited_as(self, other: PowerCurve | None) -> PowerCurve:
        """A copy with the fields about sleep of another curve of this node; they are not measured."""
        if other is None:
            return self
        limits = {name: getattr(other, name) for name in ("off_w", "wake_s", "may_sleep")}
        return msgspec.structs.replace(self, **limits)

    def told(self, points: int = POINTS_MAX) -> tuple[float, ...]:
        """Points for other nodes, at most so many."""
        return resampled(self.watts, points) if len(self.watts) > points else self.watts


def resampled(watts: tuple[float, ...], points: int) -> tuple[float, ...]:
    """Resample a curve to so many points."""
    last, found = len(watts) - 1, []
    for number in range(points):
        at = number / (points - 1) * last
        step = min(int(at), last - 1)
        found.append(watts[step] + (watts[step + 1] - watts[step]) * (at - step))
    return tuple(found)


def estimated_curve(threads: int, cores: int = 0, peak_w: float = 0.0) -> PowerCurve:
    """SPECpower-shaped guess for a node of which nothing is measured. peak_w: at full load, 0 = not known."""
    threads = max(threads, 1)
    peak_w = peak_w or WATTS_PER_THREAD * threads / (1.0 - SPEC_SHAPE[0])
    return PowerCurve(tuple(share * peak_w for share in SPEC_SHAPE), min(cores or threads, threads), threads)
