"""No node idle while a task waits elsewhere: how much of the nodes' time is lost to that, for every preset.

`python tests/bench/bench_idle_while_waiting.py`; six real agents with one slot each and Mosquitto, 300 tasks of 50 to
800 ms that arrive at two of them in bursts. A node's time counts as lost while it runs nothing and a task of another
node waits, anywhere between its submission and the start of its process; from the first submission to the last end.
Exit code 1 if `adaptive` loses 3 % or more.
"""

from __future__ import annotations

import random
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from peerload.policy import registry
from tests.bench.support import arguments, flush_us, median_text, report, summary
from tests.fidelity.live import Job, play
from tests.fidelity.measures import idle_while_waiting

NODES = 6
TASKS = 300
BURST_MEAN = 12
LOAD = 0.8
LENGTH_S = (0.05, 0.8)
HOT = ("n1", "n2")
ROUNDS = 1
"""Every preset takes most of a minute."""
LOST_MAX = {"adaptive": 0.03}


def bursts(tasks: int, seed: int) -> list[Job]:
    """Bursts of 1 to twice BURST_MEAN less one tasks, at one of the two nodes in turn; the mean load of all nodes is LOAD."""
    rng = random.Random(seed)
    mean_s = statistics.fmean(LENGTH_S)
    jobs: list[Job] = []
    at_s = 0.2
    while len(jobs) < tasks:
        size = min(rng.randint(1, 2 * BURST_MEAN - 1), tasks - len(jobs))
        node = rng.choice(HOT)
        jobs += [Job(at_s, node, rng.uniform(*LENGTH_S)) for _ in range(size)]
        at_s += rng.expovariate(NODES * LOAD / (mean_s * BURST_MEAN))
    return jobs


def _is_live(name: str) -> bool:
    """True unless only the simulator can play this preset."""
    return not registry.build_preset(*registry.preset_source(name).tables()).is_central


def one_preset(name: str, tasks: int, rounds: int) -> dict[str, list[float]]:
    """All rounds of one preset, each with bursts of its own."""
    told: dict[str, list[float]] = {"idle_while_waiting": [], "mean_response_s": [], "makespan_s": [], "transfers": []}
    for seed in range(1, rounds + 1):
        outcome = play(name, NODES, bursts(tasks, seed), record=False)
        told["idle_while_waiting"].append(idle_while_waiting(outcome.ran, NODES))
        told["mean_response_s"].append(outcome.mean_response_s)
        ended_s = max(ran.ended_s for ran in outcome.ran)
        told["makespan_s"].append(ended_s - min(ran.submitted_s for ran in outcome.ran))
        told["transfers"].append(outcome.transfers)
    return told


def lines(name: str, told: dict[str, list[float]]) -> str:
    """One row of the table."""
    lost = [share * 100 for share in told["idle_while_waiting"]]
    cells = (median_text(told["mean_response_s"], ".2f"), median_text(told["makespan_s"], ".1f"))
    return f"  {name:20} {cells[0]:22} {cells[1]:22} {statistics.median(told['transfers']):9.2f}  {median_text(lost, '.1f')}"


def main() -> int:
    """Measure and print."""
    options = arguments(
        __doc__ or "",
        rounds=ROUNDS,
        tasks=(int, TASKS, "how many (default: %(default)s)"),
        preset=(str, "", "this one only"),
    )
    chosen = (options.preset,) if options.preset else tuple(filter(_is_live, registry.presets()))
    flushed_s = flush_us() / 1e6
    text = [
        f"{options.tasks} tasks of {LENGTH_S[0] * 1000:g} to {LENGTH_S[1] * 1000:g} ms in bursts at 2 of {NODES} nodes"
    ]
    text += [
        f"  medians of {options.rounds}; one flush of the disk takes {flushed_s * 1000:.2g} ms, and every start waits for one",
        f"  {'preset':20} {'mean response, s':22} {'makespan, s':22} transfers  idle while waiting, %",
    ]
    figures: dict[str, Any] = {"tasks": options.tasks, "flush_s": flushed_s, "presets": {}}
    code = 0
    for name in chosen:
        told = one_preset(name, options.tasks, options.rounds)
        text.append(lines(name, told))
        figures["presets"][name] = {kind: summary(values) for kind, values in told.items()}
        code |= statistics.median(told["idle_while_waiting"]) >= LOST_MAX.get(name, 2.0)
    report(text, figures, as_json=options.json)
    return code


if __name__ == "__main__":
    sys.exit(main())
