"""Static splits of Poisson streams among M/M/1 nodes: proportional, optimal, in Nash equilibrium, and by bargaining.

Each function takes the service rates of the nodes, the arrival rates (each node is also a home) and the time of a
transfer, and returns a row of shares for each home. The sum of arrivals must be below that of services; otherwise, and
at homes without arrivals, the split is proportional.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

Rates = tuple[float, ...]
Rows = tuple[Rates, ...]

ROUNDS_MAX = 300
"""Limit on rounds of best replies, after which the equilibrium counts as found."""
EXACT = 1e-9
BISECTIONS = 200


def proportional(services: Rates, arrivals: Rates, transfer: float = 0.0) -> Rows:
    """Shares in proportion to the service rates."""
    del transfer
    row = tuple(service / sum(services) for service in services)
    return (row,) * len(arrivals)


@functools.lru_cache(maxsize=8)
def optimal(services: Rates, arrivals: Rates, transfer: float = 0.0) -> Rows:
    """Least mean response time [TT85]: the marginal delay d/dx x/(μ - x) = μ/(μ - x)² is equal at all nodes that
    receive, and larger by ``transfer`` at all that send."""
    if not 0 < sum(arrivals) < sum(services):
        return proportional(services, arrivals)

    def flow_at(service: float, marginal: float) -> float:
        return max(service - math.sqrt(service / marginal), 0.0)

    def flows(alpha: float) -> list[float]:
        """Work done at each node: a sink gets more than its arrivals, a source keeps less, others keep theirs."""
        return [
            min(max(arrival, flow_at(service, alpha)), flow_at(service, alpha + transfer))
            for service, arrival in zip(services, arrivals, strict=True)
        ]

    low, high = 0.0, 1.0
    while sum(flows(high)) < sum(arrivals):
        high *= 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(flows(middle)) < sum(arrivals) else (low, middle)
    done = flows(high)
    gains = [max(flow - arrival, 0.0) for flow, arrival in zip(done, arrivals, strict=True)]
    rows = []
    for home, arrival in enumerate(arrivals):
        stays = min(done[home] / arrival, 1.0) if arrival else 1.0
        away = (1 - stays) / sum(gains) if sum(gains) else 0.0
        rows.append(tuple(stays if node == home else gain * away for node, gain in enumerate(gains)))
    return tuple(rows)


@functools.lru_cache(maxsize=8)
def nash(services: Rates, arrivals: Rates, transfer: float = 0.0) -> Rows:
    """Nash equilibrium [GC05]: homes give their best reply in turn until no flow changes. A home sees of each node the
    capacity that the others leave free. ``transfer`` does not count."""
    del transfer
    if not 0 < sum(arrivals) < sum(services):
        return proportional(services, arrivals)
    rows = [[arrival * share for share in proportional(services, (0.0,))[0]] for arrival in arrivals]
    left = [service - sum(column) for service, column in zip(services, zip(*rows, strict=True), strict=True)]
    for _ in range(ROUNDS_MAX):
        change = 0.0
        for home, arrival in enumerate(arrivals):
            free = [rest + own for rest, own in zip(left, rows[home], strict=True)]
            reply = best_reply(free, arrival)
            change += sum(abs(new - old) for new, old in zip(reply, rows[home], strict=True))
            rows[home], left = reply, [rest - own for rest, own in zip(free, reply, strict=True)]
        if change < EXACT * sum(arrivals):
            break
    shares = proportional(services, (0.0,))[0]
    return tuple(
        tuple(flow / arrival for flow in row) if arrival else shares
        for row, arrival in zip(rows, arrivals, strict=True)
    )


def best_reply(free: list[float], arrival: float) -> list[float]:
    """Flows of one home that minimize its own mean response, given the free capacity a of each node: x = a - c √a on
    the nodes with √a > c, the fastest."""
    used = sorted(range(len(free)), key=lambda node: -free[node])
    while True:
        level = (sum(free[node] for node in used) - arrival) / sum(math.sqrt(free[node]) for node in used)
        if math.sqrt(free[used[-1]]) > level or len(used) == 1:
            break
        used.pop()
    flows = [0.0] * len(free)
    for node in used:
        flows[node] = free[node] - level * math.sqrt(free[node])
    return flows


def bargaining(services: Rates, arrivals: Rates, transfer: float = 0.0) -> Rows:
    """Nash bargaining solution of the nodes as players [GCL02]: it maximizes the product of the free capacities μ - x,
    so that these and the mean responses are equal on all nodes in use. ``transfer`` does not count."""
    del transfer
    work = sum(arrivals)
    if not 0 < work < sum(services):
        return proportional(services, arrivals)
    used = sorted(range(len(services)), key=lambda node: -services[node])
    while services[used[-1]] <= (level := (sum(services[node] for node in used) - work) / len(used)):
        used.pop()
    row = tuple((service - level) / work if node in used else 0.0 for node, service in enumerate(services))
    return (row,) * len(arrivals)


SHARES: dict[str, Callable[[Rates, Rates, float], Rows]] = {
    "proportional": proportional,
    "optimal": optimal,
    "nash": nash,
    "bargaining": bargaining,
}
