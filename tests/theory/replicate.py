"""One replication whose length follows from the CPU time that there is, for the reference cases."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from array import array
from statistics import fmean
from typing import TYPE_CHECKING

from peerload.sim.outcome import NORMAL, batch_half_width, mmc_response
from peerload.sim.replication import (
    WARM_UP_S,
    WARM_UP_SHARE,
    Replication,
    Setup,
    measure,
    warm_up_of,
)
from tests.theory.control_variates import controlled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from peerload.sim.queueing_model import Arrival
    from peerload.sim.replication import Sample

BATCHES = 40
"""More than of a simulation for people: what known queues explain is estimated from them."""
REFERENCES = ("surplus_one_queue", "surplus_no_sharing")
"""Metrics whose mean is known to be 0: mean response of the same tasks in one queue for all slots, and with no sharing, less
what theory says of it, or a far longer run of that queue alone (control variates)."""
ERRORS = tuple(f"{name}_error" for name in REFERENCES)
"""Standard errors of these means: 0 where theory knows them."""
LONGER, LONGER_SHARE = 20, 0.25
"""The queue alone runs for so many times the tasks of a replication, but for no more than this share of the given time."""
PILOT_TASKS, PILOT_SHARE = 1000, 0.1
"""Pilot run that finds out how many tasks fit into the given time: this many tasks, and then this share of those
that seem to fit."""
TASKS_MIN = 4000
"""Least tasks of a replication whose length follows from the given time."""


class References:
    """Simple queues, fed with the tasks of a replication: their responses by number. known: their means, as far as theory knows
    them; `estimate` adds that of one queue for all slots."""

    def __init__(self, setup: Setup, service: str, parameters: Sequence[float]) -> None:
        variation = {"exp": 1.0, "det": 0.0, "h2": sum(parameters), "lognormal": sum(parameters)}.get(service)
        nodes, slots, work = len(setup.slots), setup.slots[0], sum(setup.rates)
        """The squared coefficient of variation of the service times, if known."""
        is_plain = len(set(setup.slots)) == 1 and set(setup.speeds) <= {1.0}
        is_plain = is_plain and not (setup.recorded or setup.modulation or setup.classes)
        self.known: dict[str, float] = {}
        self.errors: dict[str, float] = {}
        self.is_estimated = is_plain and bool(service) and service != "exp" and work < nodes * slots
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

    def estimate(self, setup: Setup, seed: int, tasks: int, is_over: Callable[[], bool]) -> None:
        """Find the mean of one queue for all slots by running it alone, with other tasks of the same kind, until so many have come,
        or ``is_over`` and BATCHES batches of them have."""
        rng = random.Random(f"{seed} one queue")
        free_s, now_s, rate, each = [0.0] * len(self._one), 0.0, sum(setup.rates), tasks // (4 * BATCHES)
        means, surplus_work = [], []
        for batch in range(-BATCHES // 4, 4 * BATCHES):
            began_s, work_s, total_s = now_s, 0.0, 0.0
            for _ in range(each):
                now_s += rng.expovariate(rate)
                service_s = setup.service(rng)
                ends_s = max(now_s, free_s[0]) + service_s
                heapq.heapreplace(free_s, ends_s)
                work_s += service_s
                total_s += ends_s - now_s
            if batch >= 0:
                means.append(total_s / each)
                surplus_work.append((work_s / each - rate * (now_s - began_s) / each,))
            if batch >= BATCHES and is_over():
                break
        adjusted = controlled([means], [surplus_work])
        half = batch_half_width(adjusted)
        if half < math.inf:
            name, error = REFERENCES[0], ERRORS[0]
            self.known[name], self.errors[error] = fmean(adjusted[0]), half / NORMAL

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
    if references.known or references.is_estimated:
        player._arrivals = references.seen(player._arrivals)
    alone_s = cpu_s * LONGER_SHARE if references.is_estimated else 0.0
    ready_s = clock()
    player.play(PILOT_TASKS)
    if cpu_s < math.inf:
        left_s, most = started_s + cpu_s - alone_s - ready_s, tasks

        def affordable() -> int:
            return min(most, int(left_s * player.last / max(clock() - ready_s, 1e-6)))

        player.play(max(int(affordable() * PILOT_SHARE) - player.last, 0))
        tasks = affordable()
    tasks = max(tasks, TASKS_MIN, int(player.last / WARM_UP_SHARE))
    warm_up = warm_up_of(tasks, sum(setup.rates))
    player.play(warm_up - player.last)
    first = player.last
    sample = measure(player, tasks - warm_up, clock=clock, started_s=started_s, parts=BATCHES)
    if references.is_estimated:
        begun_s = clock()
        references.estimate(setup, seed, LONGER * tasks, lambda: clock() - begun_s >= alone_s)
        sample.values.update(references.errors)
    edges = [first + 1 + (tasks - warm_up) * batch // BATCHES for batch in range(BATCHES + 1)]
    for edge, following in itertools.pairwise(edges):
        for name, surplus in references.surpluses(edge, following).items():
            sample.batches.setdefault(name, []).append(surplus)
    if warm_up < WARM_UP_S * sum(setup.rates):  # not settled: its batches say nothing of how exact it is
        sample.batches.clear()
    return sample
