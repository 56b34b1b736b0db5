"""The same workload in the simulator: the submissions as they happened, processes as long as they lived, delays as
measured. Only chance is another, so it is played under many seeds."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, NamedTuple

from peerload.policy import registry
from peerload.sim.queueing_model import Arrival
from tests.chaos.engine.engine import Simulation, WorldOptions
from tests.chaos.engine.network import NetworkOptions

if TYPE_CHECKING:
    from tests.fidelity.live import Outcome

SEEDS = 30
ACQUAINTED_S = 5.0
"""So long the simulated agents are up before the first submission, as the real ones are."""


class Simulated(NamedTuple):
    """One value a seed, and of each task, in the order of the outcome's, one response (s) a seed."""

    mean_response_s: list[float]
    transfers: list[float]
    responses_s: list[list[float]]

    def spread(self, values: list[float]) -> float:
        """Standard deviation over mean: how much one run differs from another by chance alone."""
        return statistics.stdev(values) / statistics.fmean(values)


def simulate(policy: str, nodes: int, outcome: Outcome, seeds: int = SEEDS) -> Simulated:
    """What the simulator makes of what real agents were given."""
    delays = outcome.delays
    assert delays is not None
    order = sorted(range(len(outcome.ran)), key=lambda index: outcome.ran[index].submitted_s)
    arrivals = [
        Arrival(ACQUAINTED_S + ran.submitted_s, ran.home, ran.service_s) for ran in (outcome.ran[i] for i in order)
    ]
    network = NetworkOptions(delay_s=delays.message_min_s, jitter_s=delays.message_s - delays.message_min_s)
    policies = registry.load_preset(policy)
    found = Simulated([], [], [[] for _ in outcome.ran])
    for seed in range(seeds):
        world = WorldOptions(network, disk_s=delays.disk_s, notice_s=delays.end_s)
        simulation = Simulation(policies, nodes=nodes, slots=1, seed=seed, world=world)
        simulation.run(arrivals)
        responses = _responses_s(simulation, arrivals)
        for index, response_s in zip(order, responses, strict=True):
            found.responses_s[index].append(response_s)
        found.mean_response_s.append(statistics.fmean(responses))
        found.transfers.append(simulation.report().transfers / len(arrivals))
    return found


def _responses_s(simulation: Simulation, arrivals: list[Arrival]) -> list[float]:
    """From each arrival to the end of its process, in the order of the arrivals: a node numbers its tasks in it."""
    numbers: dict[str, int] = {}
    responses = []
    for arrival in arrivals:
        numbers[arrival.node] = numbers.get(arrival.node, 0) + 1
        record = simulation.hosts[arrival.node].store.tasks[f"{arrival.node}/{numbers[arrival.node]}"]
        responses.append(record.ended_at - record.submitted_at)
    return responses
