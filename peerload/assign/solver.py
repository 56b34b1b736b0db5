"""Solver of the assignment problem: a minimum cut for two nodes [Stone77], branch and bound for few tasks, otherwise
Lo's heuristic [Lo88], with a lower bound that limits its distance from the optimum.

Each cut divides a network with a task at each vertex: the tasks on the source's side are assigned to one node.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from peerload.model.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from peerload.assign.program import Limit, Program, ProgramTask

EXACT_TASKS_MAX, EXACT_NODES_MAX = 12, 5
"""Programs up to this size are solved exactly, whatever their limits."""
BOUND_STEPS, BOUND_STEPS_MIN, BOUND_WORK = 40, 3, 60_000_000
"""Steps of the subgradient method that raises the lower bound; fewer for large programs: the last one over nodes · tasks · edges."""
EPSILON = 1e-9
Places = tuple[int, ...]


class Assignment(NamedTuple):
    """Assignment. places: the node of each task; bound: no assignment costs less; method: how it was found."""

    places: Places
    execution: float
    communication: float
    bound: float
    method: str

    @property
    def total(self) -> float:
        return self.execution + self.communication

    @property
    def gap(self) -> float | None:
        """Upper limit of the excess over the optimum, as a share of the bound; None if the bound is 0 and so says nothing."""
        if self.total <= self.bound:
            return 0.0
        return (self.total - self.bound) / self.bound if self.bound > EPSILON else None


def solve(program: Program) -> Assignment:
    """The assignment of least cost, or for a large program a good one. Raises ConfigError if none satisfies the limits."""
    if not program.is_limited and len(program.nodes) == 1:
        return _found(program, (0,) * len(program.tasks), "the only node", is_exact=True)
    if len(program.nodes) == 2:  # noqa: PLR2004 -- Stone's case
        places = _two_nodes(program)
        if program.fits(places):
            return _found(program, places, "minimum cut", is_exact=True)
    start = _heuristic(program)
    if len(program.tasks) <= EXACT_TASKS_MAX and len(program.nodes) <= EXACT_NODES_MAX:
        best = _Branches(program, start).best()
        if best is None:
            raise _infeasible(program, "no assignment fits the limits")
        return _found(program, best, "branch and bound", is_exact=True)
    if start is None:
        raise _infeasible(program, "no assignment was found that fits the limits")
    return _found(program, start, "heuristic", is_exact=False)


def serial(program: Program) -> Assignment | None:
    """The tasks in order, in equal parts for one node after another; None if that exceeds a limit."""
    count, nodes = len(program.tasks), len(program.nodes)
    places = tuple(place * nodes // count if count > nodes else place for place in range(count))
    return _found(program, places, "serial", is_exact=False, bound=0.0) if program.fits(places) else None


def _found(program: Program, places: Places, method: str, *, is_exact: bool, bound: float | None = None) -> Assignment:
    execution, communication = program.cost(places)
    total = execution + communication
    if bound is None:
        bound = total if is_exact else min(lower_bound(program, total), total)
    return Assignment(places, execution, communication, bound, method)


def _infeasible(program: Program, what: str) -> ConfigError:
    need = sum(task.mem_bytes for task in program.tasks)
    have = sum(limit.mem_bytes for limit in program.limits)
    counts = sum(limit.tasks for limit in program.limits)
    why = f"{len(program.tasks)} tasks need {need / 2**30:.3g} GiB"
    why += f"; the nodes take {counts:g} tasks" * math.isfinite(
        counts
    ) + f" and have {have / 2**30:.3g} GiB" * math.isfinite(have)
    for task in program.tasks:
        may = [node for node, cost in enumerate(task.costs) if math.isfinite(cost)]
        if all(task.mem_bytes > program.limits[node].mem_bytes or program.limits[node].tasks < 1 for node in may):
            why = f"{task.name} fits on none of the nodes that can run it: {', '.join(program.nodes[node] for node in may)}"
    return ConfigError("limits", what, why=why, hint="raise a limit, or let tasks run on more nodes")


# -- minimum cuts --------------------------------------------------------------------------------------------------------


def cut(inside: Sequence[float], outside: Sequence[float], apart: Mapping[tuple[int, int], float]) -> set[int]:
    """The set of vertices that minimizes the sum of ``inside`` over its vertices, ``outside`` over the others, and ``apart`` over
    the pairs that it divides. Found by maximum flow (shortest augmenting paths); of several such sets the smallest."""
    count = len(inside)
    source, sink = count, count + 1
    finite = sum(value for row in (inside, outside, apart.values()) for value in row if math.isfinite(value)) + 1
    rest: list[dict[int, float]] = [{} for _ in range(count + 2)]
    for vertex in range(count):
        rest[source][vertex], rest[vertex][source] = min(outside[vertex], finite), 0.0
        rest[vertex][sink], rest[sink][vertex] = min(inside[vertex], finite), 0.0
    for (one, other), cost in apart.items():
        rest[one][other] = rest[other][one] = cost
    while True:
        before = {source: source}
        queue = deque((source,))
        while queue and sink not in before:
            vertex = queue.popleft()
            for following, room in rest[vertex].items():
                if room > EPSILON and following not in before:
                    before[following] = vertex
                    queue.append(following)
        if sink not in before:
            return set(before) - {source}
        path = [sink]
        while path[-1] != source:
            path.append(before[path[-1]])
        edges = list(zip(path[1:], path, strict=False))
        flow = min(rest[one][other] for one, other in edges)
        for one, other in edges:
            rest[one][other] -= flow
            rest[other][one] += flow


def _two_nodes(program: Program) -> Places:
    first = cut([task.costs[0] for task in program.tasks], [task.costs[1] for task in program.tasks], program.apart)
    return tuple(0 if place in first else 1 for place in range(len(program.tasks)))


def lower_bound(program: Program, total: float) -> float:
    """Lower bound on the cost of all assignments, by Lagrangian relaxation. Each node chooses its tasks by a separate cut, in which
    each divided pair counts half. Each task has a price; any prices give a bound. Prices are raised for tasks
    that no node chooses, and lowered for tasks that several nodes choose, by a share of the gap between the bound and
    ``total``, the cost of some assignment (Polyak's steps). A task also pays for its part of each limit of its node. That rate is
    raised if the node chooses more than its limit, and lowered, to no less than 0, if it chooses less."""
    costs = [
        [cost if _may_run(task, limit) else math.inf for cost, limit in zip(task.costs, program.limits, strict=True)]
        for task in program.tasks
    ]
    prices = [min(row) for row in costs]
    limits = [(node, parts, 0.0) for node in range(len(program.nodes)) for parts in _parts(program, node)]
    halves = {pair: cost / 2 for pair, cost in program.apart.items()}
    best, share = sum(prices), 1.0
    work = len(program.nodes) * len(prices) * (len(prices) + len(halves))
    for _ in range(min(BOUND_STEPS * (1 + bool(limits)), max(BOUND_WORK // work, BOUND_STEPS_MIN))):
        value, chosen = sum(prices) - sum(rate for _, _, rate in limits), list[set[int]]()
        for node in range(len(program.nodes)):
            worth = [row[node] - price for row, price in zip(costs, prices, strict=True)]
            for parts, rate in ((parts, rate) for where, parts, rate in limits if where == node and rate):
                worth = [one + rate * part for one, part in zip(worth, parts, strict=True)]
            taken = cut([max(one, 0.0) for one in worth], [max(-one, 0.0) for one in worth], halves)
            value += sum(worth[task] for task in taken)
            value += sum(cost for (one, other), cost in halves.items() if (one in taken) != (other in taken))
            chosen.append(taken)
        missing = [1 - sum(task in taken for taken in chosen) for task in range(len(prices))]
        over = [sum(parts[task] for task in chosen[node]) - 1 for node, parts, _ in limits]
        over = [0.0 if one < 0 and not rate else one for one, (_, _, rate) in zip(over, limits, strict=True)]
        off = sum(one**2 for one in (*missing, *over))
        share = share if value > best else share * 0.8
        best = max(best, value)
        if not off or best >= total - EPSILON:
            break
        step = share * (total - value) / off
        prices = [price + step * one for price, one in zip(prices, missing, strict=True)]
        limits = [
            (node, parts, max(rate + step * one, 0.0)) for (node, parts, rate), one in zip(limits, over, strict=True)
        ]
    return best


def _may_run(task: ProgramTask, limit: Limit) -> bool:
    return limit.tasks >= 1 and task.mem_bytes <= limit.mem_bytes


def _parts(program: Program, node: int) -> Iterator[list[float]]:
    """For each limit of a node that all tasks together exceed, each task's part of the limit."""
    limit = program.limits[node]
    for most, needs in (
        (math.floor(limit.tasks) if math.isfinite(limit.tasks) else math.inf, [1.0] * len(program.tasks)),
        (limit.mem_bytes, [float(task.mem_bytes) for task in program.tasks]),
    ):
        if 0 < most < sum(needs):
            yield [need / most for need in needs]


# -- the heuristic -------------------------------------------------------------------------------------------------------


def _heuristic(program: Program) -> Places | None:
    """Lo's heuristic [Lo88]: grab, greedy, improvement. Grab (without limits): a task that prefers a node even if all other tasks
    are at their cheapest node elsewhere is on that node in an optimal assignment too; a cut finds these. Greedy: each other task,
    most communication first, goes to the cheapest node so far. Improvement: single moves and exchanges while they help."""
    grabbed: dict[int, int] = {}
    for node in range(len(program.nodes)):
        inside = [task.costs[node] for task in program.tasks]
        outside = [
            min((cost for other, cost in enumerate(task.costs) if other != node), default=math.inf)
            for task in program.tasks
        ]
        for task in cut(inside, outside, program.apart):
            grabbed.setdefault(task, node)
    starts = [grabbed, {}] + [dict.fromkeys(range(len(program.tasks)), node) for node in range(len(program.nodes))]
    found = [improved for start in starts if (improved := _Improvement(program, start).places()) is not None]
    return min(found, key=lambda places: (sum(program.cost(places)), places), default=None)


class _Improvement:
    """Completion of a partial assignment within the limits."""

    def __init__(self, program: Program, start: Mapping[int, int]) -> None:
        self._program = program
        self._links: list[list[tuple[int, float]]] = [[] for _ in program.tasks]
        for (one, other), cost in program.apart.items():
            self._links[one].append((other, cost))
            self._links[other].append((one, cost))
        self._place: list[int] = [-1] * len(program.tasks)
        self._mem = [limit.mem_bytes for limit in program.limits]
        self._room = [limit.tasks for limit in program.limits]
        weights = [sum(cost for _, cost in links) for links in self._links]
        order = sorted(
            range(len(program.tasks)), key=lambda task: (-program.tasks[task].mem_bytes, -weights[task], task)
        )
        self._complete = True
        for task in sorted(start, key=order.index):
            if self._fits(task, start[task]):
                self._move(task, start[task])
        for task in order:
            if self._place[task] < 0:
                nodes = [node for node in range(len(program.nodes)) if self._fits(task, node)]
                if not nodes:
                    self._complete = False
                    return
                self._move(task, min(nodes, key=lambda node: self._cost(task, node)))

    def _fits(self, task: int, node: int) -> bool:
        wanted = self._program.tasks[task]
        return math.isfinite(wanted.costs[node]) and self._room[node] >= 1 and self._mem[node] >= wanted.mem_bytes

    def _cost(self, task: int, node: int) -> float:
        """Cost of a task at a node, given the tasks that have a place."""
        apart = sum(cost for other, cost in self._links[task] if self._place[other] not in (-1, node))
        return self._program.tasks[task].costs[node] + apart

    def _move(self, task: int, node: int) -> None:
        for place, sign in ((self._place[task], 1), (node, -1)):
            if place >= 0:
                self._room[place] += sign
                self._mem[place] += sign * self._program.tasks[task].mem_bytes
        self._place[task] = node

    def places(self) -> Places | None:
        """Places after all improving moves and exchanges; None if not all tasks have a place."""
        if not self._complete:
            return None
        while self._moves() or self._exchanges():
            pass
        return tuple(self._place)

    def _moves(self) -> bool:
        helps = False
        for task, here in enumerate(self._place):
            nodes = [node for node in range(len(self._room)) if node != here and self._fits(task, node)]
            best = min(nodes, key=lambda node: self._cost(task, node), default=here)
            if self._cost(task, best) < self._cost(task, here) - EPSILON:
                self._move(task, best)
                helps = True
        return helps

    def _exchanges(self) -> bool:
        if not self._program.is_limited:
            return False
        for one, other in (
            (a, b) for a in range(len(self._place)) for b in range(a) if self._place[a] != self._place[b]
        ):
            here, there = self._place[one], self._place[other]
            before = sum(self._program.cost(self._place))
            self._move(one, -1)
            if self._fits(other, here):
                self._move(other, here)
                if self._fits(one, there):
                    self._move(one, there)
                    if sum(self._program.cost(self._place)) < before - EPSILON:
                        return True
                    self._move(one, -1)
                self._move(other, there)
            self._move(one, here)
        return False


# -- branch and bound ----------------------------------------------------------------------------------------------------


class _Branches:
    """Branch and bound, depth first, the task with the most communication first. A branch is pruned if the cost so far plus the
    minimum cost of each remaining task is not below the best total."""

    def __init__(self, program: Program, start: Places | None) -> None:
        self._program = program
        count = len(program.tasks)
        self._apart = [[0.0] * count for _ in range(count)]
        for (one, other), cost in program.apart.items():
            self._apart[one][other] = self._apart[other][one] = cost
        self._order = self._ordered()
        self._best = start
        self._least = sum(program.cost(start)) if start is not None else math.inf
        self._place = [-1] * count

    def _ordered(self) -> list[int]:
        """The tasks in order, each chosen for the most communication with the tasks before it."""
        left, order = set(range(len(self._apart))), list[int]()
        while left:
            ties = {task: sum(self._apart[task][other] for other in order) for task in left}
            order.append(max(left, key=lambda task: (ties[task], sum(self._apart[task]), -task)))
            left.remove(order[-1])
        return order

    def best(self) -> Places | None:
        """The optimum; None if no assignment satisfies the limits."""
        costs = [list(task.costs) for task in self._program.tasks]
        limits = self._program.limits
        self._branch(0, 0.0, costs, [limit.mem_bytes for limit in limits], [limit.tasks for limit in limits])
        return self._best

    def _branch(self, depth: int, cost: float, costs: list[list[float]], mem: list[float], room: list[float]) -> None:
        """Explore one branch. costs: of each task at each node, given the assigned tasks."""
        if depth == len(self._order):
            self._least, self._best = cost, tuple(self._place)
            return
        task = self._order[depth]
        need, links = self._program.tasks[task].mem_bytes, self._apart[task]
        later = self._order[depth + 1 :]
        for node in sorted(range(len(room)), key=costs[task].__getitem__):
            if room[node] < 1 or mem[node] < need:
                continue
            sum_ = cost + costs[task][node]
            after = costs.copy()
            for other in later:
                if links[other]:
                    after[other] = [value + links[other] for value in costs[other]]
                    after[other][node] -= links[other]
                sum_ += min(after[other])
            if sum_ >= self._least - EPSILON:
                continue
            self._place[task] = node
            room[node] -= 1
            mem[node] -= need
            self._branch(depth + 1, cost + costs[task][node], after, mem, room)
            room[node] += 1
            mem[node] += need
        self._place[task] = -1
