"""One replication whose length follows from the CPU time that there is, for the reference cases."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from array import array
from statistics import fmean
from typing import TYPE_CHECKING

from peerload.sim.outcome import mmc_response
from peerload.sim.replication import (
    CONTROL,
    WARM_UP_S,
    WARM_UP_SHARE,
    Replication,
    Setup,
    measure,
    quantile,
    warm_up_of,
)
from tests.theory.control_variates import controlled

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from peerload.sim.queueing_model import Arrival
    from peerload.sim.replication import Sample

BATCHES = 40
"""More than of a simulation for people: what known queues explain is estimated from them."""
QUEUES = ("one_queue", "no_sharing", "asks_two")
"""Queueing systems that are fed with the tasks of a replication, and simple enough to be a hundred times faster: one queue for all
slots; nodes that share nothing; nodes that, when all their slots are taken and one task waits, ask two others drawn by chance."""
LEVELS = (0.5, 0.95, 0.99)
"""Quantiles of a queue's responses: how many responses lie beyond each is a control variate, too."""
CONTROLS = tuple(f"{queue}.{what}" for queue in QUEUES for what in ("mean", *map(str, LEVELS)))
"""Control variates: metrics of these queues less their means, of which theory knows some, and a longer run of the queues the rest."""
ALONE = " alone"
"""Suffix of the batches of that run, less their mean: they tell how exact it is."""
LONGER, LONGER_SHARE = 20, 0.2
"""The queues alone run for so many times the tasks of a replication; from LONGER_MIN times on for no more than this share of the given
time."""
LONGER_MIN, LONGER_BATCHES = 4, 120
"""LONGER_BATCHES is their number in the longest run."""
ALONE_SETTLES = 1 / 6
"""Warm-up of that run: so many times its batches."""
LOAD_MAX = 0.97
"""A queue with more load settles too slowly for a control."""
PILOT_TASKS, PILOT_SHARE = 1000, 0.1
"""Pilot run that finds out how many tasks fit into the given time: this many tasks, and then this share of those
that seem to fit."""
TASKS_MIN = 4000
"""Least tasks of a replication whose length follows from the given time."""


class Companions:
    """Some of the QUEUES of a setup, fed with its tasks. responses: by queue, those of all tasks so far; loads: by queue, the largest
    that one of its slots has to bear."""

    def __init__(self, setup: Setup, seed: int, queues: Iterable[str] = QUEUES) -> None:
        names = [f"n{number}" for number in range(1, len(setup.slots) + 1)]
        speeds = setup.speeds or (1.0,) * len(names)
        self._speeds = dict(zip(names, speeds, strict=True))
        self._slots = dict(zip(names, setup.slots, strict=True))
        capacity = [slots * speed for slots, speed in zip(setup.slots, speeds, strict=True)]
        each = max(rate / one for rate, one in zip(setup.rates, capacity, strict=True)) * setup.mean_slot_s
        together = sum(setup.rates) * setup.mean_slot_s / sum(capacity)
        self.loads = {"one_queue": together, "no_sharing": each, "asks_two": each}
        self.responses = {name: array("d") for name in queues}
        self._rng = random.Random(f"{seed} asks two")

    def seen(self, arrivals: Iterator[Arrival]) -> Iterator[Arrival]:
        """Pass these tasks on, after they came to the queues."""
        feeds = [getattr(self, f"_{name}")(responses) for name, responses in self.responses.items()]
        for feed in feeds:
            next(feed)
        for arrival in arrivals:
            for feed in feeds:
                feed.send(arrival)
            yield arrival

    def _one_queue(self, responses: array[float]) -> Generator[None, Arrival, None]:
        """All slots, the first that is free first."""
        free = [(0.0, speed) for node, speed in self._speeds.items() for _ in range(self._slots[node])]
        while True:
            arrival = yield
            free_s, speed = free[0]
            ends_s = max(arrival.at_s, free_s) + arrival.service_s / speed
            heapq.heapreplace(free, (ends_s, speed))
            responses.append(ends_s - arrival.at_s)

    def _no_sharing(self, responses: array[float]) -> Generator[None, Arrival, None]:
        """Each task at its home."""
        free = {node: [0.0] * slots for node, slots in self._slots.items()}
        speeds = self._speeds
        while True:
            arrival = yield
            of_node = free[arrival.node]
            ends_s = max(arrival.at_s, of_node[0]) + arrival.service_s / speeds[arrival.node]
            heapq.heapreplace(of_node, ends_s)
            responses.append(ends_s - arrival.at_s)

    def _asks_two(self, responses: array[float]) -> Generator[None, Arrival, None]:
        """Each task at its home, unless a task waits there and at one of two others none."""
        free = {node: [0.0] * slots for node, slots in self._slots.items()}
        names, speeds, full, draw = list(free), self._speeds, self._slots, self._rng.random
        tasks, ends = dict.fromkeys(free, 0), list[tuple[float, str]]()
        while True:
            arrival = yield
            at_s, node = arrival.at_s, arrival.node
            while ends and ends[0][0] <= at_s:
                tasks[heapq.heappop(ends)[1]] -= 1
            if tasks[node] > full[node]:
                for _ in range(2):
                    other = names[int(draw() * len(names))]
                    if tasks[other] <= full[other]:
                        node = other
                        break
            of_node = free[node]
            ends_s = max(at_s, of_node[0]) + arrival.service_s / speeds[node]
            heapq.heapreplace(of_node, ends_s)
            tasks[node] += 1
            heapq.heappush(ends, (ends_s, node))
            responses.append(ends_s - at_s)


def mmc_beyond(slots: int, load: float, at: float) -> float:
    """Share of the responses of M/M/c that are longer than ``at`` mean service times."""
    spare = slots * (1 - load)
    waits = (mmc_response(slots, load) - 1) * spare
    both = (1 + at) * math.exp(-at)  # of those that wait: their wait is exponential, too
    if abs(spare - 1) > 1e-6:
        both = (spare * math.exp(-at) - math.exp(-spare * at)) / (spare - 1)
    return (1 - waits) * math.exp(-at) + waits * both


def known(setup: Setup, service: str, parameters: Sequence[float], levels: dict[str, list[float]]) -> dict[str, float]:
    """Means of CONTROLS that theory knows. service, parameters: the distribution of the service times; levels: by queue."""
    slots, nodes, work = setup.slots[0], len(setup.slots), sum(setup.rates)
    is_plain = len(set(setup.slots)) == 1 and set(setup.speeds) <= {1.0}
    if not is_plain or setup.recorded or setup.modulation or setup.classes or not service:
        return {}
    found: dict[str, float] = {}
    alike: dict[str, list[tuple[float, int, float]]] = {"one_queue": [(1.0, nodes * slots, work / (nodes * slots))]}
    alike["no_sharing"] = [(rate / work, slots, rate / slots) for rate in setup.rates if rate]
    if service == "exp":
        for name, queues in alike.items():
            if name in levels:
                found[f"{name}.mean"] = sum(share * mmc_response(count, load) for share, count, load in queues)
                for level, at in zip(LEVELS, levels[name], strict=True):
                    found[f"{name}.{level}"] = sum(share * mmc_beyond(count, load, at) for share, count, load in queues)
    variation = {"det": 0.0, "h2": sum(parameters), "lognormal": sum(parameters)}.get(service)
    if variation is not None and slots == 1 and "no_sharing" in levels:  # Pollaczek and Khinchine
        found["no_sharing.mean"] = sum(
            share * (1 + (mmc_response(1, load) - 1) * (1 + variation) / 2) for share, _, load in alike["no_sharing"]
        )
    return found


def _batch(responses: array[float], levels: Sequence[float]) -> list[float]:
    """Mean, and share beyond each level."""
    return [fmean(responses), *(sum(one > level for one in responses) / len(responses) for level in levels)]


def alone(
    setup: Setup, seed: int, tasks: int, levels: dict[str, list[float]], is_over: Callable[[], bool]
) -> dict[str, list[float]]:
    """Batches of the CONTROLS and of CONTROL while the queues run alone, with other tasks of the same kind, until so many have come, or
    ``is_over`` and LONGER_MIN / LONGER of them have."""
    queues = Companions(setup, seed, levels)
    arrivals = queues.seen(setup.arrivals(random.Random(f"{seed} alone")))
    each, rate, at_s = max(tasks // LONGER_BATCHES, 1), sum(setup.rates) * setup.mean_slot_s, 0.0
    found: dict[str, list[float]] = {}
    for batch in range(-int(LONGER_BATCHES * ALONE_SETTLES), LONGER_BATCHES):
        began_s, work_s = at_s, 0.0
        for arrival in itertools.islice(arrivals, each):
            at_s = arrival.at_s
            work_s += arrival.service_s
        if batch >= 0:
            found.setdefault(CONTROL, []).append((work_s - rate * (at_s - began_s)) / each)
        for name, responses in queues.responses.items():
            if batch >= 0:
                for what, value in zip(("mean", *LEVELS), _batch(responses, levels[name]), strict=True):
                    found.setdefault(f"{name}.{what}", []).append(value)
            del responses[:]
        if batch * LONGER >= LONGER_BATCHES * LONGER_MIN and is_over():
            break
    return found


def controls(
    setup: Setup,
    seed: int,
    queues: Companions,
    edges: Sequence[int],
    names: tuple[str, Sequence[float]],
    is_over: Callable[[], bool],
) -> dict[str, list[float]]:
    """Batches of the CONTROLS between these numbers of tasks, less their means, and those of the queues alone. names: the distribution
    of the service times."""
    levels: dict[str, list[float]] = {}
    stable = {name: responses for name, responses in queues.responses.items() if queues.loads[name] < LOAD_MAX}
    for name, responses in stable.items():
        ordered = sorted(responses[edges[0] : edges[-1]])
        levels[name] = [quantile(ordered, level) for level in LEVELS]
    means = known(setup, *names, levels)
    longer = alone(setup, seed, LONGER * (edges[-1] - edges[0]), levels, is_over)
    certain = {name: [[value - mean for value in longer[name]]] for name, mean in ({CONTROL: 0.0} | means).items()}
    found: dict[str, list[float]] = {}
    for name, responses in stable.items():
        parts = [_batch(responses[edge:following], levels[name]) for edge, following in itertools.pairwise(edges)]
        for what, values in zip(("mean", *LEVELS), zip(*parts, strict=True), strict=True):
            control = f"{name}.{what}"
            if control not in means:
                (estimates,) = controlled([longer[control]], certain).runs
                means[control] = fmean(estimates)
                found[control + ALONE] = [value - means[control] for value in estimates]
            found[control] = [value - means[control] for value in values]
    return found


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
    queues = Companions(setup, seed)
    player._arrivals = queues.seen(player._arrivals)
    alone_s = cpu_s * LONGER_SHARE if cpu_s < math.inf else 0.0
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
    begun_s = clock()
    edges = [first + (tasks - warm_up) * batch // BATCHES for batch in range(BATCHES + 1)]
    is_over = lambda: clock() - begun_s >= alone_s  # noqa: E731
    sample.batches.update(controls(setup, seed, queues, edges, (service, parameters), is_over))
    if warm_up < int(WARM_UP_S * sum(setup.rates)):  # not settled: its batches say nothing of how exact it is
        sample.batches.clear()
    return sample
