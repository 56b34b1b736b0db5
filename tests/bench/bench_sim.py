"""How fast the simulator plays: tasks per second of processor time, beside the floor of the same run.

`python tests/bench/bench_sim.py --tasks 100000`; with `--big`, 10,000 nodes and 1,000,000 tasks under "adaptive" instead
(time and memory). The floor is the seam without decisions: as many events and messages a task, through a heap, a queue
and a `handle` that does nothing, so that a ratio says more than a figure on a busy machine. Exit code 1 if a target is
missed: 5,000 tasks a second under "threshold" at 1,000 nodes, or 15 minutes and 2 GiB.
"""

from __future__ import annotations

import heapq
import math
import random
import resource
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from peerload.model.actions import Send, SpawnTask
from peerload.model.events import MessageReceived, TaskEnded, TaskSubmitted
from peerload.model.messages import Ping
from peerload.model.task import SCRATCH, Exit, TaskSpec
from peerload.policy.registry import load_preset
from peerload.sim.queueing_model import QueueingModel, profiles_of
from tests.bench.support import arguments, report
from tests.workloads import poisson

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peerload.model.actions import Action
    from peerload.model.events import Event
    from peerload.sim.queueing_model import Arrival

CASES = (("threshold", 1000), ("adaptive", 20), ("adaptive", 1000))
LOAD = 0.9
TASKS, ROUNDS, SEED = 100_000, 3, 1
COUNTED_TASKS_PER_NODE = 20
"""Played once to learn how many events a task takes."""
TASKS_PER_CPU_S_MIN = 5000.0
BIG_POLICY, BIG_NODES, BIG_TASKS = "adaptive", 10_000, 1_000_000
BIG_CPU_S_MAX, BIG_RSS_BYTES_MAX = 900.0, 2 << 30


class Counted(QueueingModel):
    """Counts the events that its nodes handle."""

    events = 0

    def _handle(self, name: str, event: Event) -> None:
        self.events += 1
        super()._handle(name, event)


class Nothing:
    """A node that decides nothing: a task makes so many hops, and runs where it is then."""

    def __init__(self, name: str, hops: Iterator[int]) -> None:
        self.name = name
        self._hops = hops
        self._spec = TaskSpec((b"task",), SCRATCH)

    def handle(self, event: Event) -> list[Action]:
        """What a task goes through."""
        match event:
            case MessageReceived():
                return self._passed_on(event.message.sequence, event.src)  # type: ignore[union-attr]
            case TaskSubmitted():
                return self._passed_on(next(self._hops), self.name)
            case _:
                return []

    def _passed_on(self, hops: int, to: str) -> list[Action]:
        if hops:
            return [Send(to, Ping(hops - 1))]
        return [SpawnTask("key", "task", 1, self.name, self._spec)]


def play_nothing(nodes: int, tasks: int, hops_mean: float) -> float:
    """The floor → seconds of processor time."""
    hops = (math.floor((number + 1) * hops_mean) - math.floor(number * hops_mean) for number in range(tasks))
    world = {f"n{number}": Nothing(f"n{number}", hops) for number in range(1, nodes + 1)}
    comes = arrivals(nodes, tasks)
    began_s = time.process_time()
    heap: list[tuple[float, int, str, Event]] = []
    queue: deque[tuple[str, Event]] = deque()
    spec = TaskSpec((b"task",), SCRATCH)
    for number, arrival in enumerate(comes):
        heapq.heappush(heap, (arrival.at_s, 2 * number, arrival.node, TaskSubmitted(number, "", b"", spec)))
        while heap[0][0] <= arrival.at_s:
            at_s, _, name, event = heapq.heappop(heap)
            queue.append((name, event))
            while queue:
                name, event = queue.popleft()
                for action in world[name].handle(event):
                    if isinstance(action, Send):
                        queue.append((action.dst, MessageReceived(name, action.message)))
                    elif isinstance(action, SpawnTask):
                        ended = TaskEnded(action.key, Exit(0, started_at=at_s, ended_at=at_s + arrival.service_s))
                        heapq.heappush(heap, (at_s + arrival.service_s, 2 * number + 1, name, ended))
            if not heap:
                break
    return time.process_time() - began_s


def arrivals(nodes: int, tasks: int) -> Iterator[Arrival]:
    """The same tasks for both."""
    rng = random.Random(f"{SEED} workload")
    return poisson([f"n{number}" for number in range(1, nodes + 1)], LOAD * nodes, tasks, rng)


def play(policy: str, nodes: int, tasks: int, kind: type[QueueingModel] = QueueingModel) -> tuple[float, QueueingModel]:
    """One run → seconds of processor time without the making of the nodes, and the cluster as it is then."""
    policies = load_preset(policy, is_reference=True)
    cluster = kind(policies, profiles_of([1] * nodes), seed=SEED, ended=lambda _task: None)
    comes = arrivals(nodes, tasks)
    began_s = time.process_time()
    cluster.run(comes, tasks=tasks)
    return time.process_time() - began_s, cluster


def measure(policy: str, nodes: int, tasks: int, rounds: int) -> dict[str, float]:
    """Medians of runs in turn with the floor's."""
    few = min(tasks, COUNTED_TASKS_PER_NODE * nodes)
    counted = play(policy, nodes, few, Counted)[1]
    assert isinstance(counted, Counted)
    events = (counted.events - nodes) / few  # every node has one at its start
    real: list[float] = []
    floor: list[float] = []
    for _ in range(rounds):
        floor.append(tasks / play_nothing(nodes, tasks, events - 2.0))
        real.append(tasks / play(policy, nodes, tasks)[0])
    ratios = [slow / fast for slow, fast in zip(real, floor, strict=True)]
    return {
        "tasks_per_cpu_s": statistics.median(real),
        "floor_tasks_per_cpu_s": statistics.median(floor),
        "of_the_floor": statistics.median(ratios),
        "events_per_task": events,
    }


def big() -> tuple[list[str], dict[str, Any], int]:
    """The largest run that is promised, once."""
    began_s = time.process_time()
    cluster = play(BIG_POLICY, BIG_NODES, BIG_TASKS)[1]
    spent_s = time.process_time() - began_s
    rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    text = (
        f"{BIG_POLICY}, {BIG_NODES:,} nodes, {BIG_TASKS:,} tasks: {spent_s / 60:.1f} minutes of processor time,"
        f" {rss_bytes / 2**20:.0f} MiB at most, {cluster.messages / BIG_TASKS:.1f} messages a task"
    )
    code = int(spent_s > BIG_CPU_S_MAX or rss_bytes > BIG_RSS_BYTES_MAX)
    return [text], {"cpu_s": spent_s, "rss_bytes_max": rss_bytes}, code


def main() -> int:
    """Measure and print."""
    options = arguments(
        __doc__ or "",
        rounds=ROUNDS,
        tasks=(int, TASKS, "tasks of one run (default: %(default)s)"),
        big=(bool, False, f"{BIG_NODES:,} nodes and {BIG_TASKS:,} tasks instead"),
    )
    if options.big:
        text, figures, code = big()
        report(text, figures, as_json=options.json)
        return code
    text = [f"load {LOAD:g}, {options.tasks:,} tasks: tasks per second of processor time"]
    figures, code = {"tasks": options.tasks}, 0
    for policy, nodes in CASES:
        told = measure(policy, nodes, options.tasks, options.rounds)
        figures[f"{policy} {nodes}"] = told
        if policy == "threshold":
            code |= told["tasks_per_cpu_s"] < TASKS_PER_CPU_S_MIN
        text.append(
            f"  {policy + ',':10} {nodes:5,} nodes {told['tasks_per_cpu_s']:8,.0f}; the floor"
            f" {told['floor_tasks_per_cpu_s']:8,.0f} ({told['of_the_floor']:.0%} of it,"
            f" {told['events_per_task']:.1f} events a task)"
        )
    report(text, figures, as_json=options.json)
    return code


if __name__ == "__main__":
    sys.exit(main())
