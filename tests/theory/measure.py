"""One replication of a case: played, the warm-up thrown away, the rest measured in batches."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from statistics import fmean

import msgspec

from peerload.sim.ideal import Finished, IdealCluster
from tests.theory.mapping import Setup

BATCHES = 5
"""Batches of one replication; their spread gives the interval."""
WARM_UP_SHARE, WARM_UP_SHARE_MAX, WARM_UP_S = 0.25, 0.5, 60.0
"""What is thrown away: a quarter of the tasks; more, up to half of them, where a quarter is less than so many mean
service times (a thousand nodes that begin empty need that long, however many tasks it takes)."""
PILOT_TASKS, PILOT_SHARE = 1000, 0.1
"""Played to learn how many tasks fit into the time there is: these, and then this share of those that seem to fit."""
TASKS_MIN = 4000
AFTER_SHARE = 1.0
"""Arrivals go on until all measured tasks have ended, but for no more than this many times their number."""

PROBES = ("sender probes", "receiver probes")
TRANSFERS = ("transfers", "tasks taken home")


class Sample(msgspec.Struct, frozen=True):
    """What one replication says of each metric: its value over all measured tasks, and the values of its batches."""

    values: dict[str, float]
    batches: dict[str, list[float]]
    tasks: int
    cpu_s: float


class Player:
    """A cluster that is played step by step. Results lie in arrays by the number of the task (1, 2, …)."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.responses: list[float] = [-1.0]
        self.remote: list[bool] = [False]
        self.last = 0
        self.cluster = IdealCluster(
            setup.policies, slots=setup.slots, seed=seed, ended=self._ended, transfer_s=setup.transfer_s
        )
        self._arrivals = setup.arrivals(random.Random(f"{seed} workload"))
        self._left = 0

    def _ended(self, task: Finished) -> None:
        self.responses[task.number] = task.response_s
        self.remote[task.number] = task.node != task.home
        self._left -= task.number <= self.last

    def play(self, tasks: int) -> None:
        """So many more arrivals."""
        self.responses.extend([-1.0] * tasks)
        self.remote.extend([False] * tasks)
        self._left += tasks
        self.last += tasks
        self.cluster.run(self._arrivals, tasks=tasks)

    def finish(self) -> None:
        """Go on with arrivals that are not measured until the measured ones have ended. In an unstable system they do
        not: then a task counts with its age."""
        measured = self.last
        step = max(measured // 50, 1)
        for _ in range(int(measured * AFTER_SHARE / step)):
            if not self._left:
                break
            self.responses.extend([-1.0] * step)
            self.remote.extend([False] * step)
            self.cluster.run(self._arrivals, tasks=step)
        for number, arrival in self.cluster.waiting():
            self.responses[number] = self.cluster.now_s - arrival.at_s
        del self.responses[measured + 1 :], self.remote[measured + 1 :]


def replicate(
    setup: Setup, seed: int, *, tasks: int, cpu_s: float = math.inf, clock: Callable[[], float] = time.process_time
) -> Sample:
    """At most ``tasks`` tasks; fewer if they would take more than this much CPU time, but at least TASKS_MIN."""
    started_s = clock()
    player = Player(setup, seed)
    ready_s = clock()
    player.play(PILOT_TASKS)
    if cpu_s < math.inf:
        left_s, most = started_s + cpu_s - ready_s, tasks

        def affordable() -> int:
            return min(most, int(left_s * player.last / max(clock() - ready_s, 1e-6)))

        player.play(max(int(affordable() * PILOT_SHARE) - player.last, 0))
        tasks = affordable()
    tasks = max(tasks, TASKS_MIN, int(player.last / WARM_UP_SHARE))
    warm_up = int(min(max(tasks * WARM_UP_SHARE, WARM_UP_S * sum(setup.rates)), tasks * WARM_UP_SHARE_MAX))
    player.play(warm_up - player.last)
    size = (tasks - warm_up) // BATCHES
    counts = [player.cluster.counts()]
    for _ in range(BATCHES):
        player.play(size)
        counts.append(player.cluster.counts())
    player.finish()
    return _sample(player, counts, warm_up, size, clock() - started_s)


def _sample(player: Player, counts: list[dict[str, int]], warm_up: int, size: int, cpu_s: float) -> Sample:
    batches: dict[str, list[float]] = {}
    for index in range(BATCHES):
        first = warm_up + 1 + index * size
        for metric, value in _of_tasks(player, first, first + size).items():
            batches.setdefault(metric, []).append(value)
        for metric, value in _of_counts(counts[index], counts[index + 1], size).items():
            batches.setdefault(metric, []).append(value)
    values = _of_tasks(player, warm_up + 1, player.last + 1) | _of_counts(counts[0], counts[-1], BATCHES * size)
    tenth = player.last // 10
    values["first_tenth_mean_response"] = fmean(player.responses[1 : tenth + 1])
    values["last_tenth_mean_response"] = fmean(player.responses[-tenth:])
    return Sample(values, batches, player.last, cpu_s)


def _of_tasks(player: Player, first: int, last: int) -> dict[str, float]:
    responses = player.responses[first:last]
    remote = player.remote[first:last]
    away = [response for response, is_remote in zip(responses, remote, strict=True) if is_remote]
    here = [response for response, is_remote in zip(responses, remote, strict=True) if not is_remote]
    ordered = sorted(responses)
    values = {
        "mean_response": fmean(responses),
        "p50": quantile(ordered, 0.50),
        "p95": quantile(ordered, 0.95),
        "p99": quantile(ordered, 0.99),
        "remote_fraction": len(away) / len(responses),
    }
    if here:
        values["mean_response_executed_at_origin"] = fmean(here)
    if away:
        values["mean_response_executed_remotely"] = fmean(away)
    return values


def _of_counts(before: dict[str, int], after: dict[str, int], tasks: int) -> dict[str, float]:
    def each(*names: str) -> float:
        return sum(after.get(name, 0) - before.get(name, 0) for name in names) / tasks

    return {
        "transfers_per_task": each(*TRANSFERS),
        "probes_per_task": each(*PROBES),
        "sender_probes_per_task": each("sender probes"),
        "receiver_probes_per_task": each("receiver probes"),
    }


def quantile(ordered: list[float], share: float) -> float:
    """By linear interpolation between the two nearest."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
