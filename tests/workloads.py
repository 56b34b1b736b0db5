"""Synthetic workloads for tests: arrivals and service times, drawn from a generator of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.sim.queueing_model import Arrival

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence


def burst(node: str, tasks: int, service_s: float, at_s: float = 1.0) -> Iterator[Arrival]:
    """Equal tasks that all arrive at one node at once."""
    for _ in range(tasks):
        yield Arrival(at_s, node, service_s)


def poisson(
    nodes: Sequence[str],
    rate: float,
    tasks: int,
    rng: random.Random,
    mean_service_s: float = 1.0,
    *,
    deterministic: bool = False,
) -> Iterator[Arrival]:
    """Poisson arrivals at ``rate`` per second in all, spread evenly over the nodes; service exponential or
    deterministic."""
    at_s = 1.0
    for _ in range(tasks):
        at_s += rng.expovariate(rate)
        service_s = mean_service_s if deterministic else rng.expovariate(1.0 / mean_service_s)
        yield Arrival(at_s, nodes[rng.randrange(len(nodes))], service_s)
