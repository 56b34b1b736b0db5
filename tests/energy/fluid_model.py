"""A second, central scheduler for energy cases, written from the case format alone: the yardstick of `peerload sim --energy`.

It places by the two rules that leave no choice (`spread`, `marginal`), moves work with the rates of the format, and adds up the
joules of each stretch between two events.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

Node = dict[str, Any]
EARLY = 1e-9


def threads_of(node: Node) -> int:
    return int(node.get("threads") or node["cores"])


def rate(node: Node, busy: float) -> float:
    """X(n) of the format."""
    cores, threads, all_core = node["cores"], threads_of(node), node.get("all_core", 1.0)
    if busy <= cores:
        return float(node.get("speed", 1.0) * busy * (1 - (1 - all_core) * busy / cores))
    gain = node.get("smt_gain", 1.0) - 1
    return float(node.get("speed", 1.0) * all_core * (cores + gain * (min(busy, threads) - cores)))


def watts(node: Node, busy: float) -> float:
    """P(n) of the format, awake."""
    points = node["watts"]
    at = rate(node, busy) / rate(node, threads_of(node)) * (len(points) - 1)
    step = min(int(at), len(points) - 2)
    return float(points[step] + (points[step + 1] - points[step]) * (at - step))


class Task:
    """One task: its place, and what is left of it."""

    def __init__(self, spec: dict[str, Any], at_s: float, work_s: float) -> None:
        self.at_s, self.cpus = at_s, spec.get("cpus", 1.0)
        self.host, self.kernels = work_s, spec.get("gpu_s", 0.0)
        self.length_s = self.host + self.kernels
        self.takes_gpu, self.share, self.gpu_j = "work_s" not in spec, spec.get("sm_share", 1.0), spec.get("gpu_j", 0.0)
        self.row: list[Any] = [None, None, None, None]
        self.power_w = self.pace = 0.0

    @property
    def on_core(self) -> bool:
        return self.host > 0 or not self.kernels


def tasks_of(case: dict[str, Any]) -> list[Task]:
    """All tasks of a case in their order."""
    found = []
    for spec in case["tasks"]:
        if "each" in spec:
            found += [Task({"work_s": 0, **spec}, at_s, work_s) for at_s, work_s in spec["each"]]
        else:
            work_s = spec["work_s"] if "work_s" in spec else spec.get("host_s", 0.0)
            found += [Task(spec, spec.get("at_s", 0.0), work_s) for _ in range(spec.get("count", 1))]
    return found


class Machine:
    """One node: what is on it, and since when it is idle."""

    def __init__(self, node: Node, run: dict[str, Any]) -> None:
        self.node, self.run = node, run
        slots = run.get("slots") or math.floor(threads_of(node) / run.get("guarantee", 1.0) + EARLY)
        self.slots = slots if node["cores"] else 0
        self.here: list[Task] = []
        self.idle_since = self.awake_at = 0.0

    def busy(self, *, awake: bool = False) -> float:
        return float(sum(task.cpus for task in self.here if not awake or task.on_core))

    def tasks_on(self, gpu: int) -> list[Task]:
        return [task for task in self.here if task.row[3] == gpu]

    def has_room(self, task: Task) -> bool:
        most = 1 if self.run.get("gpu_share", "exclusive") == "exclusive" else self.run["gpu_tasks_max"]
        has_gpu = any(len(self.tasks_on(gpu)) < most for gpu in range(self.node.get("gpus", 0)))
        fits = len(self.here) < self.slots and self.busy() + task.cpus <= self.slots + EARLY
        return fits and (has_gpu or not task.takes_gpu)

    def key(self, task: Task) -> float:
        if self.run["preset"] == "spread":
            return self.busy() / self.slots
        top = min(self.busy() + task.cpus, float(threads_of(self.node)))
        step_w = watts(self.node, top) - watts(self.node, top - task.cpus)
        return float(step_w * task.length_s / self.node.get("speed", 1.0))

    def asleep_from(self) -> float:
        can = self.run.get("sleep") and "off_w" in self.node and not self.here
        return float(self.idle_since + self.node["sleep_after_s"]) if can else math.inf

    def take(self, task: Task, now_s: float) -> None:
        if self.asleep_from() < now_s or (self.asleep_from() == now_s == 0):
            self.awake_at = now_s + self.node["wake_s"]
        task.row[0], task.row[2] = max(now_s, self.awake_at), self.node["name"]
        if task.takes_gpu:
            task.row[3] = min(range(self.node["gpus"]), key=lambda gpu: len(self.tasks_on(gpu)))
            pct = self.run.get("gpu_pct", 100) / 100 if self.run.get("gpu_share") == "mps" else 1.0
            task.kernels *= task.share / min(task.share, pct)
            task.share = min(task.share, pct)
            task.power_w = task.gpu_j / task.kernels
        self.here.append(task)

    def settle(self, now_s: float) -> None:
        """Rates from now on."""
        is_awake = now_s >= self.awake_at
        for task in self.here:
            if task.on_core:
                task.pace = rate(self.node, self.busy(awake=True)) / self.busy(awake=True)
            else:
                others = [one for one in self.tasks_on(task.row[3]) if not one.on_core]
                is_mps = self.run.get("gpu_share") == "mps"
                task.pace = 1 / max(1.0, sum(one.share for one in others) if is_mps else len(others))
            task.pace *= is_awake

    def next_s(self, now_s: float) -> float:
        ends = [now_s + (task.host if task.on_core else task.kernels) / task.pace for task in self.here if task.pace]
        other = self.awake_at if self.here and not ends else self.asleep_from()
        return min([*ends, other if other > now_s else math.inf])

    def power_w(self, now_s: float) -> float:
        gpus = self.node.get("gpus", 0) * self.node.get("gpu_static_w", 0.0)
        gpus += sum(task.power_w * task.pace for task in self.here if not task.on_core)
        if not self.node["cores"]:
            return float(gpus)
        if now_s >= self.asleep_from():
            return float(self.node["off_w"] + gpus)
        return float(watts(self.node, self.busy(awake=True) if now_s >= self.awake_at else 0.0) + gpus)

    def work(self, now_s: float, until_s: float) -> None:
        for task in list(self.here):
            left = "host" if task.on_core else "kernels"
            rest = getattr(task, left) - task.pace * (until_s - now_s)
            setattr(task, left, rest if rest > EARLY * task.pace or not task.pace else 0.0)
            if not task.host and not task.kernels:
                task.row[1] = until_s
                self.here.remove(task)
                self.idle_since = until_s


def play(case: dict[str, Any], run: dict[str, Any]) -> tuple[list[list[Any]], float]:
    """→ the schedule, and all joules."""
    tasks = tasks_of(case)
    machines = [Machine(node, run) for node in case["nodes"]]
    coming = sorted(tasks, key=lambda task: task.at_s)
    waiting: list[Task] = []
    joules = now_s = 0.0
    while any(task.row[1] is None for task in tasks):
        waiting += itertools.takewhile(lambda task: task.at_s <= now_s, coming)  # noqa: B023 -- it is used at once
        coming = [task for task in coming if task.at_s > now_s]
        while waiting and (fitting := [one for one in machines if one.has_room(waiting[0])]):
            min(fitting, key=lambda one: one.key(waiting[0])).take(waiting.pop(0), now_s)
        for machine in machines:
            machine.settle(now_s)
        next_s = min([one.next_s(now_s) for one in machines] + [task.at_s for task in coming[:1]])
        joules += sum(one.power_w(now_s) for one in machines) * (next_s - now_s)
        for machine in machines:
            machine.work(now_s, next_s)
        now_s = next_s
    return [task.row for task in tasks], joules


def drawn_case(dice: random.Random) -> dict[str, Any]:
    """A case of a few odd nodes and tasks, with a run of each rule."""
    has_gpus, cpus = dice.random() < 0.4, dice.choice([1, 1, 1, 2, 0.5])
    nodes: list[Node] = [{"name": "gate", "cores": 0}]
    for number in range(dice.randint(1, 4)):
        cores, idle_w = dice.randint(2, 8), dice.uniform(0, 100)
        node: Node = {"name": f"{9 - number}m", "cores": cores}
        node["watts"] = sorted(dice.uniform(idle_w, 300) for _ in range(dice.randint(2, 11)))
        node |= dice.choice([{}, {"threads": cores + 1, "smt_gain": 1.5}, {"threads": 2 * cores, "smt_gain": 1.2}])
        node |= dice.choice([{}, {"speed": 0.5}, {"speed": 3.3}]) | dice.choice([{}, {}, {"all_core": 0.6}])
        node |= {"off_w": dice.uniform(0, 9), "wake_s": dice.choice([0, 7, 30]), "sleep_after_s": dice.choice([0, 5])}
        nodes.append(node | ({"gpus": dice.randint(1, 3), "gpu_static_w": 33} if has_gpus else {}))
    tasks: list[dict[str, Any]] = []
    for _ in range(dice.randint(1, 4)):
        count = {"node": "gate", "count": dice.randint(1, 12), "at_s": dice.choice([0, 10, 55.5])}
        gpu = {"host_s": dice.choice([0, 5.5]), "gpu_s": 9, "sm_share": dice.choice([1, 0.4]), "gpu_j": 50}
        each = [[dice.uniform(0, 90), dice.uniform(1, 60)] for _ in range(dice.randint(1, 9))]
        some = {"node": "gate", "each": each, "cpus": cpus}
        one = {**count, "work_s": dice.choice([10, 33.3]), "cpus": cpus}
        tasks.append({**count, **gpu} if has_gpus else dice.choice([one, some]))
    shares = {
        "gpu_share": dice.choice(["exclusive", "time", "mps"]),
        "gpu_tasks_max": 3,
        "gpu_pct": dice.choice([25, 100]),
    }
    both = {"guarantee": dice.choice([1, 0.8]), "sleep": dice.random() < 0.5, **(shares if has_gpus else {})}
    runs = [{"name": preset, "preset": preset, **both} for preset in ("spread", "marginal")]
    return {"id": "drawn", "nodes": nodes, "tasks": tasks, "runs": runs}
