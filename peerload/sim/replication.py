"""Replication: one simulated run. The warm-up is discarded, the rest is measured in batches."""

from __future__ import annotations

import bisect
import itertools
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec

from peerload.model import metrics
from peerload.model.config import CoreConfig
from peerload.policy.preset import PolicySet
from peerload.sim.queueing_model import IDEAL_CONFIG, Arrival, CompletedTask, Delays, QueueingModel, profiles_of
from peerload.sim.service import Draw, Modulation, TaskClass, draw_of

if TYPE_CHECKING:
    from peerload.sim.utilization import UtilizationMonitor

BATCHES, GROWTH_BATCHES = 20, 5
"""Batches of one replication, whose spread gives the interval; and the larger batches by which growth is judged."""
WARM_UP_SHARE, WARM_UP_SHARE_MAX, WARM_UP_S = 0.25, 0.5, 60.0
"""Length of the warm-up: a quarter of the tasks; more, up to half of them, if a quarter takes less than this many mean
service times (a thousand nodes that start empty need that long, for any number of tasks)."""
AFTER_SHARE = 1.0
"""Arrivals continue until all measured tasks have ended, but for at most this many times their number …"""
AFTER_TASKS, AFTER_FACTOR = 20_000, 1.5
"""… or this many tasks, while measured tasks wait and the queue does not grow: the number of unfinished tasks is at most this
factor times their mean during the measurement, or times the number of slots."""
STEPS = 100
"""Number of steps of a part of the run. Between steps, progress is reported and unfinished tasks are counted."""

CONTROL = "surplus_work"
"""Control variate, a metric with the known mean 0: the work that arrived, less the expected work for that time, per task. The part of
another metric that it explains is random and can be removed."""
QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
"""Metrics that are quantiles of the response time."""
PROBES = (metrics.SENDER_PROBES, metrics.RECEIVER_PROBES)
TRANSFERS = (metrics.TRANSFERS, metrics.TASKS_RETURNED)


class Sample(msgspec.Struct, frozen=True):
    """Metrics of one replication: each with its value over all measured tasks, and the values of its batches.

    tasks: number of simulated tasks, including the warm-up; homes: for each home node the number of measured tasks and the sum of
    their response times; cut_off: measured tasks that had not started at the end and count with their age; policy_errors:
    failures of policies since the start; policy_failure: the first of them; at_migrations_max: tasks since the start that were
    placed MIGRATIONS_MAX times; executed_remotely: measured tasks that ran on another node than their home; responses:
    response times of the measured tasks in the order of arrival.
    """

    values: dict[str, float]
    batches: dict[str, list[float]]
    tasks: int
    cpu_s: float
    homes: list[tuple[int, float]] = []
    cut_off: int = 0
    policy_errors: int = 0
    policy_failure: str = ""
    at_migrations_max: int = 0
    executed_remotely: int = 0
    responses: Sequence[float] = ()


class Setup(msgspec.Struct, frozen=True):
    """Everything that a run needs: policies, nodes, arrival rates, service times and delays.

    recorded: the arrivals themselves, in place of a Poisson stream; they name their nodes, and the rates
    only inform policies with a-priori knowledge; mean_slot_s: of a task, on a node of speed 1; modulation: of
    the rates over time; classes: a mix of tasks in place of ``service``.
    """

    policies: PolicySet
    slots: list[int]
    rates: list[float]
    service: Draw
    delays: Delays = Delays()
    speeds: tuple[float, ...] = ()
    gpus: int = 0
    config: CoreConfig = IDEAL_CONFIG
    recorded: Callable[[random.Random], Iterator[Arrival]] | None = None
    mean_slot_s: float = 1.0
    modulation: Modulation | None = None
    classes: tuple[TaskClass, ...] = ()

    def arrivals(self, rng: random.Random) -> Iterator[Arrival]:
        """Recorded arrivals, or an endless Poisson stream in which each task goes to a node with a probability
        proportional to the node's rate."""
        return self._poisson(rng) if self.recorded is None else self.recorded(rng)

    def _poisson(self, rng: random.Random) -> Iterator[Arrival]:
        ends = list(itertools.accumulate(self.rates))
        total, at_s = ends[-1], 0.0
        rate = self.modulation.rate(rng) if self.modulation is not None else None
        largest = self.modulation.largest if self.modulation is not None else 1.0
        shares = list(itertools.accumulate(one.share for one in self.classes))
        draws = [draw_of(one.service.name, one.service.parameters) for one in self.classes]
        names = [f"n{index}" for index in range(1, len(ends) + 1)]
        while True:
            at_s += rng.expovariate(total * largest)
            if rate is not None and rng.random() * largest >= rate(at_s):
                continue  # dropped by thinning
            home = names[min(bisect.bisect_right(ends, rng.random() * total), len(ends) - 1)]
            if not draws:
                yield Arrival(at_s, home, self.service(rng))
                continue
            which = min(bisect.bisect_right(shares, rng.random() * shares[-1]), len(shares) - 1)
            one = self.classes[which]
            yield Arrival(at_s, home, one.mean * draws[which](rng), one.cpus, one.gpus)


class Replication:
    """Simulated cluster that is run step by step. Results are in arrays by the number of the task (1, 2, …):
    response and wait (until its start), both in s; whether it ran on another node; the number of its home node."""

    def __init__(
        self,
        setup: Setup,
        seed: int,
        *,
        watch: UtilizationMonitor | None = None,
        passed: Callable[[int], object] = lambda _tasks: None,
    ) -> None:
        self.responses = array("d", [-1.0])
        self.waits = array("d", [-1.0])
        self.remote = bytearray(1)
        self.homes = array("l", [0])
        self.last = 0
        self.unfinished: list[int] = []
        """Numbers of unfinished tasks, counted at even steps of each part."""
        self.cluster = QueueingModel(
            setup.policies,
            profiles_of(setup.slots, setup.speeds, setup.gpus),
            seed=seed,
            ended=self._ended,
            delays=setup.delays,
            watch=watch,
            config=setup.config,
        )
        for node in self.cluster.nodes.values():
            if setup.rates and (inform := getattr(node.state.policies.sender, "inform", None)) is not None:
                works = zip(self.cluster.nodes, setup.rates, strict=False)
                transfer = setup.delays.transfer_s / (setup.mean_slot_s or 1.0)
                inform({name: rate * setup.mean_slot_s for name, rate in works}, transfer)
        self.watch = watch
        self._passed = passed
        self._numbers = {name: index for index, name in enumerate(self.cluster.nodes)}
        self.is_recorded = setup.recorded is not None
        self.cut_off = 0
        """Number of measured tasks that have not started at the end; they count with their age."""
        self._slots = sum(setup.slots)
        self._work_s, self._offered = 0.0, 0.0
        if setup.recorded is None and setup.modulation is None and not setup.classes:
            self._offered = sum(setup.rates) * setup.mean_slot_s
        self._arrivals = self._summed(setup.arrivals(random.Random(f"{seed} workload")))  # noqa: S311 -- a seeded simulation
        self._left = 0

    def _ended(self, task: CompletedTask) -> None:
        number = task.number
        self.responses[number] = task.response_s
        self.waits[number] = task.started_s - task.arrival.at_s
        self.remote[number] = task.node != task.home
        self.homes[number] = self._numbers[task.home]
        self._left -= number <= self.last

    def _summed(self, arrivals: Iterator[Arrival]) -> Iterator[Arrival]:
        for arrival in arrivals:
            self._work_s += arrival.service_s
            yield arrival

    def play(self, tasks: int) -> None:
        self._room_for(tasks)
        self._left += tasks
        self.last += tasks
        self.unfinished = []
        step = max(tasks // STEPS, 1)
        while tasks > 0:
            self.cluster.run(self._arrivals, tasks=min(step, tasks))
            tasks -= step
            self.unfinished.append(self.cluster.unfinished)
            self._passed(step)
        self.unfinished = self.unfinished or [self.cluster.unfinished]

    def _room_for(self, tasks: int) -> None:
        nothing = array("d", [-1.0]) * tasks
        self.responses.extend(nothing)
        self.waits.extend(nothing)
        self.remote.extend(bytes(tasks))
        self.homes.extend(array("l", [0]) * tasks)

    def finish(self, warm_up: int, unfinished: float) -> None:
        """Continue with unmeasured arrivals until the measured tasks have ended or certainly will. In an
        unstable system they may not: then tasks that have not started count with their age. warm_up: number of
        unmeasured first tasks; unfinished: mean number of unfinished tasks during the measurement."""
        if self.is_recorded:
            self.drain()
        else:
            self._follow(AFTER_FACTOR * max(unfinished, float(self._slots)))
        for task in list(self.cluster.running()):
            self._ended(task)
        for number, arrival in self.cluster.waiting():
            self.responses[number] = self.waits[number] = self.cluster.now_s - arrival.at_s
            self.homes[number] = self._numbers[arrival.node]
            self.cut_off += warm_up < number <= self.last
        measured = self.last
        for values in (self.responses, self.waits, self.remote, self.homes):
            del values[measured + 1 :]

    def _follow(self, unfinished_max: float) -> None:
        step = max(self.last // 50, 1)
        after = 0
        while self._left and (
            after + step <= self.last * AFTER_SHARE
            or (after < AFTER_TASKS and self.cluster.unfinished <= unfinished_max and self._is_any_waiting())
        ):
            self._room_for(step)
            self.cluster.run(self._arrivals, tasks=step)
            after += step

    def _is_any_waiting(self) -> bool:
        return any(number <= self.last for number, _ in self.cluster.waiting())

    def drain(self) -> None:
        """Continue without arrivals until every task has ended."""
        self.cluster.drain()

    @property
    def policy_failure(self) -> str:
        """First failure of a policy at any node; "" if there was none."""
        return next(filter(None, (node.state.policy_failure for node in self.cluster.nodes.values())), "")

    def counts(self) -> dict[str, float]:
        counts: dict[str, float] = {**self.cluster.counts(), "messages": self.cluster.messages}
        counts |= {"work": self._work_s, "offered": self._offered * self.cluster.now_s}
        if self.watch is not None:
            self.watch.count_until(self.cluster.now_s)
            counts["slots"] = self.watch.total
            counts["slots free"] = self.watch.free
            counts["slots idle while waiting"] = self.watch.idle_while_waiting
        return counts


def warm_up_of(tasks: int, rate: float) -> int:
    """Default length of the warm-up in tasks; rate: arrivals per mean service time."""
    return int(min(max(tasks * WARM_UP_SHARE, WARM_UP_S * rate), tasks * WARM_UP_SHARE_MAX))


def measure(
    player: Replication, tasks: int, *, clock: Callable[[], float], started_s: float, parts: int = BATCHES
) -> Sample:
    """Run this many more tasks in batches → their sample. Everything before counts as the warm-up. The last tasks
    of a recording are followed to their end, and that time is also measured."""
    edges = [player.last + tasks * batch // parts for batch in range(parts + 1)]
    counts = [player.counts()]
    unfinished = []
    for edge in edges[1:]:
        player.play(edge - player.last)
        unfinished.append(fmean(player.unfinished))
        if edge == edges[-1] and player.is_recorded:
            player.drain()
        counts.append(player.counts())
    player.finish(edges[0], fmean(unfinished))
    return _sample(player, counts, unfinished, edges, clock() - started_s)


def _sample(
    player: Replication, counts: list[dict[str, float]], unfinished: list[float], edges: list[int], cpu_s: float
) -> Sample:
    batches: dict[str, list[float]] = {"unfinished": unfinished}
    for index, (before, last) in enumerate(itertools.pairwise(edges)):
        if last == before:
            continue  # fewer tasks than batches
        for metric, value in _of_tasks(player, before + 1, last + 1).items():
            batches.setdefault(metric, []).append(value)
        for metric, value in _of_counts(counts[index], counts[index + 1], last - before).items():
            batches.setdefault(metric, []).append(value)
    first, last = edges[0], edges[-1]
    values = _of_tasks(player, first + 1, last + 1) | _of_counts(counts[0], counts[-1], last - first)
    values["unfinished"] = fmean(unfinished)
    tenth = max(last // 10, 1)
    values["first_tenth_mean_response"] = fmean(player.responses[1 : tenth + 1])
    values["last_tenth_mean_response"] = fmean(player.responses[-tenth:])
    homes = [(0, 0.0)] * len(player.cluster.nodes)
    for number in range(first + 1, last + 1):
        home = player.homes[number]
        homes[home] = (homes[home][0] + 1, homes[home][1] + player.responses[number])
    errors = int(counts[-1].get(metrics.POLICY_ERRORS, 0))
    return Sample(
        values,
        batches,
        last,
        cpu_s,
        homes,
        cut_off=player.cut_off,
        policy_errors=errors,
        policy_failure=player.policy_failure,
        at_migrations_max=player.cluster.at_migrations_max,
        executed_remotely=sum(player.remote[first + 1 : last + 1]),
        responses=player.responses[first + 1 : last + 1],
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Quantile by linear interpolation between the two nearest values."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _of_tasks(player: Replication, first: int, last: int) -> dict[str, float]:
    responses = player.responses[first:last]
    remote = player.remote[first:last]
    away = [response for response, is_remote in zip(responses, remote, strict=True) if is_remote]
    here = [response for response, is_remote in zip(responses, remote, strict=True) if not is_remote]
    ordered = sorted(responses)
    values = {
        "mean_response": fmean(responses),
        "mean_wait": fmean(player.waits[first:last]),
        **{metric: quantile(ordered, share) for metric, share in QUANTILES.items()},
        "remote_fraction": len(away) / len(responses),
    }
    if here:
        values["mean_response_executed_at_origin"] = fmean(here)
    if away:
        values["mean_response_executed_remotely"] = fmean(away)
    return values


def _of_counts(before: dict[str, float], after: dict[str, float], tasks: int) -> dict[str, float]:
    def grown(*names: str) -> float:
        return sum(after.get(name, 0) - before.get(name, 0) for name in names)

    values = {
        "transfers_per_task": grown(*TRANSFERS) / tasks,
        "probes_per_task": grown(*PROBES) / tasks,
        "sender_probes_per_task": grown(metrics.SENDER_PROBES) / tasks,
        "receiver_probes_per_task": grown(metrics.RECEIVER_PROBES) / tasks,
        "messages_per_task": grown("messages") / tasks,
        "announcements_per_task": grown(metrics.ANNOUNCEMENTS, metrics.REQUESTS_BROADCAST) / tasks,
    }
    if grown("offered") > 0:
        values[CONTROL] = (grown("work") - grown("offered")) / tasks
    if "slots" in after:
        slots = grown("slots")  # 0 if no time has passed
        values["idle_while_waiting"] = grown("slots idle while waiting") / slots if slots else 0.0
        values["utilization"] = 1 - grown("slots free") / slots if slots else 0.0
    return values


def growth(samples: Sequence[Sample]) -> tuple[float, float]:
    """Growth of the number of unfinished tasks over the measured part: last batch over first, and as a share of
    the tasks that arrived between the middles of both; 1.0 and 0.0 if it did not grow from each batch to the next."""
    each = BATCHES // GROWTH_BATCHES
    batches = [
        fmean(value for sample in samples for value in sample.batches["unfinished"][index * each : (index + 1) * each])
        for index in range(GROWTH_BATCHES)
    ]
    if any(later <= earlier for earlier, later in itertools.pairwise(batches)):
        return 1.0, 0.0
    arrived = (
        fmean(sum(count for count, _ in sample.homes) for sample in samples) * (GROWTH_BATCHES - 1) / GROWTH_BATCHES
    )
    return batches[-1] / max(batches[0], 1.0), (batches[-1] - batches[0]) / max(arrived, 1.0)
