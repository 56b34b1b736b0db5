"""Lower convex envelope of a power curve: what one more task costs if more will follow.

The last step of a power curve is a poor guide: curves are S-shaped, so the first tasks on an idle node look dear and
the next ones cheap, and waking a node would be charged to one task. Along the envelope, which begins at the power of
the node while nothing runs (suspended, if it may sleep), each task pays its share of what the node will cost.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerload.model.resources import PowerCurve

    Steps = tuple[tuple[float, ...], tuple[float, ...]]

CURVES_KEPT_MAX = 4096
ROUNDING = 1e-9


@lru_cache(CURVES_KEPT_MAX)
def envelope(curve: PowerCurve, threads_max: int) -> Steps:
    """Envelope over work rate up to so many busy threads → where its segments begin, and the joules per unit of work
    along each."""
    points = [(0.0, curve.settled_watts(0))]
    for threads in range(1, max(min(threads_max, curve.threads), 1) + 1):
        point = curve.rate(threads), curve.watts_at(threads)
        if point[0] <= points[-1][0]:
            continue  # so many threads slow each other down that nothing is gained
        while len(points) > 1 and _slope(points[-2], points[-1]) >= _slope(points[-1], point):
            points.pop()
        points.append(point)
    slopes = tuple(_slope(one, other) for one, other in pairwise(points))
    return tuple(rate for rate, _ in points[:-1]), slopes


def slope_at(curve: PowerCurve, threads: float, threads_max: int) -> float:
    """Joules per unit of work of a task that joins so many busy threads."""
    begins, slopes = envelope(curve, threads_max)
    return slopes[bisect_right(begins, curve.rate(threads) + ROUNDING) - 1]


def _slope(one: tuple[float, float], other: tuple[float, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])
