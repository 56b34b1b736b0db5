"""What energy costs: a sample of the power sensors with its accounts, and the plan for a fleet. CPU time, the least of several rounds.

.venv/bin/python tests/bench/bench_energy.py
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from peerload.energy.plan import Candidate, plan
from peerload.model.resources import PowerCurve
from tests.energy.test_accounting import SAMPLE_S, Machine

ROUNDS, SAMPLES, TASKS, NODES = 7, 100, 8, 300


def least_s(work: Callable[[], object]) -> float:
    """CPU seconds of the cheapest round."""
    taken = []
    for _ in range(ROUNDS):
        began_s = time.process_time()
        work()
        taken.append(time.process_time() - began_s)
    return min(taken)


def sensors(root: Path) -> None:
    """Two packages and a card, eight tasks, a sample each SAMPLE_S."""
    machine = Machine(root)
    for number in range(2):
        machine.tree.zone(f"intel-rapl:{number}", f"package-{number}", tdp_w=100.0)
    machine.tree.card(2, "i915", "0000:04:00.0", energy1_input=5)
    tasks = [f"t{number}" for number in range(TASKS)]
    for key in tasks:
        machine.runs(key)

    async def samples() -> None:
        for _ in range(SAMPLES):
            machine.passes(SAMPLE_S, **dict.fromkeys(tasks, 0.5))
            await machine.sample()

    each_s = least_s(lambda: asyncio.run(samples())) / SAMPLES
    sys.stdout.write(f"sample: {each_s * 1e3:.2f} ms, {each_s / SAMPLE_S:.3%} of a core\n")


def plans() -> None:
    """Nodes of different size and efficiency, with room for all."""
    dice, nodes = random.Random(1), []
    for number in range(NODES):
        cores = dice.choice([4, 8, 16, 48])
        peak_w = cores * dice.uniform(3, 12)
        watts = (0.3 * peak_w, *sorted(dice.uniform(0.3 * peak_w, peak_w) for _ in range(9)), peak_w)
        nodes.append(Candidate(f"n{number}", PowerCurve(watts, cores, cores), dice.randint(0, 2), cores - 2, cores))
    for tasks in (10, 300, 3000):
        taken_s = least_s(lambda tasks=tasks: plan(nodes, tasks, 100.0, 1.0))  # type: ignore[misc]
        sys.stdout.write(f"plan of {tasks} tasks on {NODES} nodes: {taken_s * 1e3:.2f} ms\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="pl-bench-energy-") as directory:
        sensors(Path(directory))
    plans()
