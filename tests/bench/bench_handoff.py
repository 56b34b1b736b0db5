"""How many tasks a second one node hands to another, over the peer link: /bin/true submitted here, run there.

`python tests/bench/bench_handoff.py`: two agents, the one that runs them with 2 slots; their results come home. Of the
processor time, that of both agents and launchers is told, which includes the links' encryption.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.support import ENVIRONMENT, TRUE, Agent, agents, arguments, cpu_s, median_text, report, summary

TASKS = 1000
SLOTS = 2


def one_round(home: Agent, other: Agent, count: int) -> tuple[float, float]:
    """→ tasks a second, and ms of processor time a task."""
    pids = [*home.pids, *other.pids]
    spent_s, began_s = cpu_s(pids), time.perf_counter()
    spec: dict[str, Any] = {"argv": [TRUE.encode()], "directory": b"/tmp", "environment": ENVIRONMENT}
    spec["placement"] = {"node": other.node}
    reply = home.client.call("submit", token=os.urandom(16).hex(), spec=spec, array=[(1, count, 1)])
    home.wait(str(reply["id"]))
    took_s = time.perf_counter() - began_s
    return count / took_s, (cpu_s(pids) - spent_s) / count * 1000


def main() -> int:
    """Measure and print."""
    options = arguments(__doc__ or "", tasks=(int, TASKS, "tasks in a batch (default: %(default)s)"))
    with agents(2, slots=SLOTS, mqtt=True) as (home, other):
        one_round(home, other, 100)
        rounds = [one_round(home, other, options.tasks) for _ in range(options.rounds)]
    rates, costs = [rate for rate, _ in rounds], [cost for _, cost in rounds]
    text = [
        f"{options.tasks} x {TRUE} handed to another node with {SLOTS} slots; medians of {options.rounds}",
        f"  {median_text(rates, '.0f')} tasks a second, {median_text(costs, '.2f')} ms of processor time a task",
    ]
    report(text, {"rate": summary(rates), "cpu_ms": summary(costs)}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
