"""One replication whose length follows from the CPU time that there is, for the reference cases."""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from statistics import fmean
from typing import TYPE_CHECKING

from peerload.sim.outcome import mmc_response
from peerload.sim.replication import (
    QUANTILES,
    WARM_UP_S,
    WARM_UP_SHARE,
    Replication,
    Setup,
    measure,
    quantile,
    warm_up_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from peerload.sim.queueing_model import Arrival
    from peerload.sim.replication import Sample

BATCHES = 20
"""More than of a simulation for people: what known queues explain is estimated from them."""
QUANTILES_OF = 2
"""Batches that are one for a quantile. Quantiles are taken of batches twice as long: the few largest of a short batch say little of the tail, and the spread of such
p99 is too small (of 200 runs of M/M/1 with 16,000 tasks at load 0.8, 72 % of the intervals held, and with longer batches 81 %)."""
REFERENCES = ("surplus_one_queue", "surplus_no_sharing")
"""Metrics whose mean is known to be 0: mean response of the same tasks in one queue for all slots, and with no sharing, less
what theory says of it (control variates)."""
PILOT_TASKS, PILOT_SHARE = 1000, 0.1
"""Pilot run that finds out how many tasks fit into the given time: this many tasks, and then this share of those
that seem to fit."""
TASKS_MIN = 4000
"""Least tasks of a replication whose length follows from the given time."""


class References:
    """Queues of which theory knows the mean, fed with the tasks of a replication: their responses by number. known: the
    means; empty where they are not known. variation: the squared coefficient of variation of the service times, if known."""

    def __init__(self, setup: Setup, service: str, parameters: Sequence[float]) -> None:
        variation = {"exp": 1.0, "det": 0.0, "h2": sum(parameters), "lognormal": sum(parameters)}.get(service)
        nodes, slots, work = len(setup.slots), setup.slots[0], sum(setup.rates)
        is_plain = len(set(setup.slots)) == 1 and set(setup.speeds) <= {1.0} and variation is not None
        is_plain = is_plain and not (setup.recorded or setup.modulation or setup.classes)
        self.known: dict[str, float] = {}
        self.responses = {name: array("d", [0.0]) for name in REFERENCES}
        self._one = [0.0] * (nodes * slots)
        self._each = {f"n{number}": [0.0] * slots for number in range(1, nodes + 1)}
        if is_plain and variation == 1.0 and work < nodes * slots and service == "exp":
            self.known[REFERENCES[0]] = mmc_response(nodes * slots, work / (nodes * slots))
        if is_plain and variation is not None and max(setup.rates) < slots and (slots == 1 or service == "exp"):
            self.known[REFERENCES[1]] = sum(
                rate / work * (1 + (mmc_response(slots, rate / slots) - 1) * ((1 + variation) / 2 if slots == 1 else 1))
                for rate in setup.rates
            )

    def seen(self, arrivals: Iterator[Arrival]) -> Iterator[Arrival]:
        for arrival in arrivals:
            for responses, free_s in zip(self.responses.values(), (self._one, self._each[arrival.node]), strict=True):
                ends_s = max(arrival.at_s, free_s[0]) + arrival.service_s
                heapq.heapreplace(free_s, ends_s)
                responses.append(ends_s - arrival.at_s)
            yield arrival

    def surpluses(self, first: int, last: int) -> dict[str, float]:
        """Of the tasks with these numbers."""
        return {name: fmean(self.responses[name][first:last]) - known for name, known in self.known.items()}


def replicate(
    setup: Setup,
    seed: int,
    *,
    tasks: int,
    cpu_s: float = math.inf,
    service: str = "",
    parameters: Sequence[float] = (),
    clock: Callable[[], float],
) -> Sample:
    """Run one replication of at most ``tasks`` tasks, but at least TASKS_MIN; fewer if they would take more than
    ``cpu_s`` of the time that ``clock`` tells (s of CPU time). service, parameters: the name of the distribution of service times,
    for queues of which theory knows the mean."""
    started_s = clock()
    player = Replication(setup, seed)
    references = References(setup, service, parameters)
    if references.known:
        player._arrivals = references.seen(player._arrivals)
    ready_s = clock()
    player.play(PILOT_TASKS)
    if cpu_s < math.inf:
        left_s, most = started_s + cpu_s - ready_s, tasks

        def affordable() -> int:
            return min(most, int(left_s * player.last / max(clock() - ready_s, 1e-6)))

        player.play(max(int(affordable() * PILOT_SHARE) - player.last, 0))
        tasks = affordable()
    tasks = max(tasks, TASKS_MIN, int(player.last / WARM_UP_SHARE))
    warm_up = warm_up_of(tasks, sum(setup.rates))
    player.play(warm_up - player.last)
    first = player.last
    sample = measure(player, tasks - warm_up, clock=clock, started_s=started_s, parts=BATCHES)
    edges = [first + 1 + (tasks - warm_up) * batch // BATCHES for batch in range(BATCHES + 1)]
    for metric, share in QUANTILES.items():
        parts = (
            sorted(player.responses[edge:following]) for edge, following in itertools.pairwise(edges[::QUANTILES_OF])
        )
        sample.batches[metric] = [quantile(part, share) for part in parts]
    for edge, following in itertools.pairwise(edges):
        for name, surplus in references.surpluses(edge, following).items():
            sample.batches.setdefault(name, []).append(surplus)
    if warm_up < WARM_UP_S * sum(setup.rates):  # not settled: its batches say nothing of how exact it is
        sample.batches.clear()
    return sample
