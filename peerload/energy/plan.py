"""Energy-aware placement: the lower convex envelope of a power curve, candidate nodes, the limit on a later finish, and a joint
plan for many tasks. Pure.

The cost of one more task is read from the envelope, since more tasks may follow. The last step of a power curve is a poor guide:
curves are S-shaped, so the first tasks on an idle node look expensive and the next ones cheap, and one task would pay for waking a
node. Along the envelope, which begins at the power of the node while nothing runs (suspended, if it may sleep), each
task pays its share of the future cost of the node.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from peerload.model.resources import LoadReport, TaskCost, estimated_curve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from peerload.model.resources import PowerCurve, Profile

    Steps = tuple[tuple[float, ...], tuple[float, ...]]


CURVES_KEPT_MAX = 4096
ROUNDING = 1e-9


@lru_cache(CURVES_KEPT_MAX)
def envelope(curve: PowerCurve, threads_max: int) -> Steps:
    """Envelope over work rate up to this many busy threads → busy threads at which its segments begin, and the joules per unit
    of work along each."""
    points, begins = [(0.0, curve.settled_watts(0))], [0.0]
    for threads in range(1, max(min(threads_max, curve.threads), 1) + 1):
        point = curve.rate(threads), curve.watts_at(threads)
        if point[0] <= points[-1][0]:
            continue  # more threads slow each other down without a gain in work
        while len(points) > 1 and _slope(points[-2], points[-1]) >= _slope(points[-1], point):
            points.pop()
            begins.pop()
        points.append(point)
        begins.append(float(threads))
    return tuple(begins[:-1]), tuple(_slope(one, other) for one, other in pairwise(points))


def slope_at(curve: PowerCurve, threads: float, threads_max: int) -> float:
    """Joules per unit of work of a task that joins this many busy threads."""
    begins, slopes = envelope(curve, threads_max)
    return slopes[bisect_right(begins, threads + ROUNDING) - 1]


def _slope(one: tuple[float, float], other: tuple[float, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


EXACT_STEPS_MAX = 24_000
"""Maximum steps of the exact plan; beyond this, the cheapest of several greedy plans is used."""
EVALUATIONS_MAX = 2000
"""Maximum number of costs computed to improve a greedy plan."""
STATES_MAX = 256
GAPS = (1 / 64, 1 / 16, 1 / 4, 1.0)
"""Fractions of the excess over the lower bound that are tried in turn."""
MARGINAL_STEPS_MAX = 300
GREEDY_NODES_MAX = 32
"""Maximum number of nodes for which the greedy plan along the envelope up to the load is also tried."""


class Candidate(NamedTuple):
    """Node that would accept a task. busy: busy threads; room: number of tasks that it would accept; threads_max: maximum
    threads that tasks may keep busy; wake_s: time until it can start one; cpus:
    cores available for tasks; price: of a kWh, None on all nodes if unknown on one; gpu_share: tasks per GPU,
    if the task requests GPUs."""

    node: str
    curve: PowerCurve
    busy: float
    room: int
    threads_max: int
    speed: float = 1.0
    wake_s: float = 0.0
    cpus: float = 1.0
    price: float | None = None
    gpu_share: float = 0.0

    @classmethod
    def of(cls, profile: Profile, told: LoadReport | None, busy: float, cpus: float, price: float | None) -> Candidate:
        """Candidate for a task that requests ``cpus``, with an estimated curve if the node reports none. told: its newest report,
        None for this node; busy: its busy cores; price: used if it reports none."""
        curve = profile.power or estimated_curve(round(profile.cpus))
        is_asleep = told is not None and told.is_asleep
        price = price if told is None or told.price is None else told.price
        top = curve.threads_under_cap(profile.cpus)
        room = max(int((top - busy) / cpus + ROUNDING), 1)
        wake_s = curve.wake_s if is_asleep else 0.0
        cores = max(profile.cpus, ROUNDING)
        return cls(profile.node, curve, busy, room, max(int(top), 1), profile.speed, wake_s, cores, price)

    @property
    def weight(self) -> float:
        """Price of a joule here, relative to the other nodes."""
        return 1.0 if self.price is None else self.price

    def finish_s(self, work_s: float, cpus: float) -> float:
        """Time until a task with this work would end here; with unknown work (0): one second of work on an awake node."""
        rate = self.speed * self.curve.thread_rate(self.busy + cpus)
        return work_s / rate + self.wake_s if work_s else 1.0 / rate

    def marginal_j(self, work_s: float, cpus: float) -> float:
        """Joules by the published rule: increase of the power times the duration; if all threads are busy, that of the last ones."""
        top = min(self.busy + cpus, float(self.curve.threads))
        return (self.curve.watts_at(top) - self.curve.watts_at(top - cpus)) * (work_s or 1.0) / self.speed

    def cost(self, work_s: float, cpus: float) -> float:
        """Joules, including those for waking, times their price."""
        return (self.joules(work_s, cpus) + self.wake_j) * self.weight

    @property
    def wake_j(self) -> float:
        """Joules until it is awake."""
        return self.curve.watts_at(0.0) * self.wake_s

    def told_cost(self, work_s: float, cpus: float) -> TaskCost:
        joules, quality = self.joules(work_s, cpus), self.curve.quality
        return TaskCost(self.node, joules, quality, self.price, self.wake_s, self.wake_j)

    def joules(self, work_s: float, cpus: float) -> float:
        """Joules of the task, along the envelope."""
        slope = slope_at(self.curve, self.busy, self.threads_max)
        return slope * cpus * (work_s or 1.0) / self.speed


def sleepers(
    asleep: Mapping[str, float], profile_of: Callable[[str], Profile | None], cpus: float, price: float | None
) -> list[Candidate]:
    """Sleeping nodes, each with the seconds until it is awake, at the price of the others."""
    told, found = LoadReport(is_asleep=True), [(profile_of(name), wake_s) for name, wake_s in asleep.items()]
    return [Candidate.of(one, told, 0.0, cpus, price)._replace(wake_s=wake_s) for one, wake_s in found if one]


def guarded(candidates: Sequence[Candidate], work_s: float, cpus: float, slack: float) -> list[Candidate]:
    """Candidates on which the task ends at most ``slack`` later than on the quickest one."""
    finish = [one.finish_s(work_s, cpus) for one in candidates]
    limit = min(finish, default=0.0) * (1.0 + slack) * (1.0 + ROUNDING)
    return [one for one, ends_s in zip(candidates, finish, strict=True) if ends_s <= limit]


def plan(candidates: Sequence[Candidate], tasks: int, work_s: float, cpus: float) -> list[int]:
    """Number of equal tasks for each candidate that minimizes the cluster's energy, within the candidates' room.
    Exact for small clusters, and mostly for larger ones; otherwise the cheapest of the greedy plans by marginal joules and
    by envelope."""
    tasks = min(tasks, sum(one.room for one in candidates))
    costs = [_costs(one, work_s, cpus) for one in candidates]
    if _exact_steps(candidates, tasks) <= EXACT_STEPS_MAX:
        return _exact(candidates, tasks, costs)
    plans = [_by_envelope(candidates, tasks, cpus, whole=True)]
    if len(candidates) <= GREEDY_NODES_MAX:
        plans.append(_by_envelope(candidates, tasks, cpus, whole=False))
    if tasks <= MARGINAL_STEPS_MAX:
        plans.append(_by_step(candidates, tasks, costs))
    best = min(plans, key=lambda counts: _total(costs, counts))
    if sum(min(one.room, tasks) for one in candidates) > EVALUATIONS_MAX:
        return best
    return _improved(candidates, tasks, costs, best)


def _total(costs: Sequence[Callable[[int], float]], counts: Sequence[int]) -> float:
    return sum(cost(count) for cost, count in zip(costs, counts, strict=True) if count)


def _costs(one: Candidate, work_s: float, cpus: float) -> Callable[[int], float]:
    """Function from a number of further tasks here to the cost: joules for them and for the running ones; for unknown work: watts."""
    curve, base_w, weight = one.curve, one.curve.settled_watts(0), one.weight

    def cost(busy: float) -> float:
        rate = curve.rate(busy)
        watts = curve.watts_doing(rate) - base_w
        return watts * work_s * busy / (rate * one.speed) if work_s else watts

    at_first = cost(one.busy) if one.busy else 0.0
    return lambda count: (cost(one.busy + count * cpus) - at_first) * weight if count else 0.0


def _exact_steps(candidates: Sequence[Candidate], tasks: int) -> int:
    steps, size = 0, 1
    for one in candidates:
        steps += size * (min(one.room, tasks) + 1)
        size = min(size + one.room, tasks + 1)
    return steps


def _exact(candidates: Sequence[Candidate], tasks: int, costs: Sequence[Callable[[int], float]]) -> list[int]:
    """Dynamic program over the candidates: best[t] is the least cost of t tasks on the candidates so far."""
    best, choices = [0.0], []
    for one, cost in zip(candidates, costs, strict=True):
        own = [cost(count) for count in range(min(one.room, tasks) + 1)]
        size = min(len(best) + len(own) - 1, tasks + 1)
        found, chosen = [float("inf")] * size, [0] * size
        for before, so_far in enumerate(best):
            for count, extra in enumerate(own[: size - before]):
                if so_far + extra < found[before + count]:
                    found[before + count], chosen[before + count] = so_far + extra, count
        best = found
        choices.append(chosen)
    counts: list[int] = []
    for chosen in reversed(choices):
        counts.append(chosen[tasks])
        tasks -= counts[-1]
    return counts[::-1]


def _improved(
    candidates: Sequence[Candidate], tasks: int, costs: Sequence[Callable[[int], float]], best: list[int]
) -> list[int]:
    """The cheapest plan, by Lagrangian relaxation. At the price per task for which the convex hulls of all costs sum up to ``tasks``,
    each node has a minimum cost, and a plan costs the sum of these minima and of each node's excess. So only counts with a smaller
    excess than that of the known plan are tried, with the STATES_MAX cheapest partial plans."""
    owns = [
        [cost(count) for count in range(min(one.room, tasks) + 1)] for one, cost in zip(candidates, costs, strict=True)
    ]
    price = _price_of_task(owns, tasks)
    above: list[list[float]] = []
    for own in owns:
        priced = [cost - price * count for count, cost in enumerate(own)]
        least = min(priced)
        above.append([cost - least for cost in priced])
    gap = sum(extra[count] for extra, count in zip(above, best, strict=True)) + ROUNDING
    found = (_cheapest_within(above, tasks, gap * share) for share in GAPS)
    return next(filter(None, found), best)


def _price_of_task(owns: Sequence[Sequence[float]], tasks: int) -> float:
    """Slope of the convex hulls' segment, cheapest first, that contains the last task."""
    segments = []
    for own in owns:
        hull = [0]
        for count in range(1, len(own)):
            while len(hull) > 1 and _between(own, hull[-2], hull[-1]) >= _between(own, hull[-1], count):
                hull.pop()
            hull.append(count)
        segments += [(_between(own, one, other), other - one) for one, other in pairwise(hull)]
    for slope, count in sorted(segments):
        tasks -= count
        if tasks <= 0:
            return slope
    return 0.0


def _between(own: Sequence[float], one: int, other: int) -> float:
    return (own[other] - own[one]) / (other - one)


def _cheapest_within(above: Sequence[Sequence[float]], tasks: int, within: float) -> list[int]:
    """The cheapest plan with at most this excess; [] if none is found."""
    allowed = [[(count, more) for count, more in enumerate(extra) if more <= within] for extra in above]
    order = sorted(range(len(above)), key=lambda number: len(allowed[number]))
    so_far, choices = {0: 0.0}, []
    for number in order[:-1]:
        found: dict[int, float] = {}
        chosen: dict[int, int] = {}
        for before, cost in so_far.items():
            for count, more in allowed[number]:
                total = before + count
                if cost + more <= within and total <= tasks and cost + more < found.get(total, math.inf):
                    found[total], chosen[total] = cost + more, count
        if len(found) > STATES_MAX:
            found = dict(sorted(found.items(), key=lambda one: one[1])[:STATES_MAX])
        so_far = found
        choices.append(chosen)
    last = dict(allowed[order[-1]])
    ends = [(cost + last.get(tasks - total, math.inf), total) for total, cost in so_far.items()]
    ends = [end for end in ends if end[0] <= within]
    if not ends:
        return []
    counts, (_, left) = [0] * len(above), min(ends)
    counts[order[-1]] = tasks - left
    for number, chosen in zip(reversed(order[:-1]), reversed(choices), strict=True):
        counts[number] = chosen[left]
        left -= chosen[left]
    return counts


def _by_step(candidates: Sequence[Candidate], tasks: int, costs: Sequence[Callable[[int], float]]) -> list[int]:
    """Greedy plan: each task goes to the node where it adds the least cost."""
    counts = [0] * len(candidates)
    following = [cost(1) for cost in costs]
    heap = [(extra, number) for number, extra in enumerate(following) if candidates[number].room]
    heapq.heapify(heap)
    for _ in range(tasks):
        _, number = heap[0]
        counts[number] += 1
        if counts[number] < candidates[number].room:
            before, following[number] = following[number], costs[number](counts[number] + 1)
            heapq.heapreplace(heap, (following[number] - before, number))
        else:
            heapq.heappop(heap)
    return counts


def _by_envelope(candidates: Sequence[Candidate], tasks: int, cpus: float, *, whole: bool) -> list[int]:
    """Greedy plan: repeatedly fill the node with the lowest joules per unit of work to the end of its envelope segment.
    ``whole``: the envelope of the curve up to the node's capacity, else up to the load of these tasks."""
    counts, left, envelopes = [0] * len(candidates), tasks, []
    for one in candidates:
        most = one.threads_max if whole else min(one.threads_max, max(int(one.busy + tasks * cpus), 1))
        envelopes.append(envelope(one.curve, most))

    def following(number: int) -> tuple[float, int, int]:
        """Joules of the next task on a node, the number of the node, and how many tasks have the same cost."""
        one, (begins, slopes) = candidates[number], envelopes[number]
        busy = one.busy + counts[number] * cpus
        segment = bisect_right(begins, busy + ROUNDING) - 1
        room = one.room - counts[number]
        if segment + 1 < len(begins):
            room = min(room, max(math.ceil((begins[segment + 1] - busy) / cpus - ROUNDING), 1))
        return slopes[segment] / one.speed * one.weight, number, room

    heap = [following(number) for number, one in enumerate(candidates) if one.room]
    heapq.heapify(heap)
    while left and heap:
        _, number, count = heap[0]
        counts[number] += min(count, left)
        left -= min(count, left)
        if counts[number] < candidates[number].room:
            heapq.heapreplace(heap, following(number))
        else:
            heapq.heappop(heap)
    return counts
