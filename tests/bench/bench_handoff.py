"""The rate of short tasks that run on other nodes, beside the rate of the same tasks at an agent alone.

`python tests/bench/bench_handoff.py`: /bin/true, submitted at a home whose slots are taken and run by two other agents with 2 slots
each; results come home. The two alternate. All agents share this machine's processors, so the ratio of the rates is that of the
processor time of a task: home, other agents, launchers and the task itself.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.support import Agent, agents, arguments, cpu_s, load_text, median_text, report, summary, wait_until

TASKS = 2000
SLOTS = 2
TAKEN_WITHIN_S = 30.0


def batch(agents_used: list[Agent], count: int) -> tuple[float, float]:
    """Submit an array at the first of these agents → tasks a second, and ms of processor time of all of them a task."""
    pids = [pid for agent in agents_used for pid in agent.pids]
    spent_s, began_s = cpu_s(pids), time.perf_counter()
    agents_used[0].wait(agents_used[0].submit("/bin/true", array=count))
    took_s = time.perf_counter() - began_s
    return count / took_s, (cpu_s(pids) - spent_s) / count * 1000


def take_slots(home: Agent) -> None:
    """Fill the slots of this agent with tasks that last as long as it does."""
    home.submit("sleep", "3600", array=SLOTS)
    wait_until(lambda: len(home.client.call("tasks", states=["running"])["tasks"]) == SLOTS, TAKEN_WITHIN_S)


def main() -> int:
    """Measure and print."""
    options = arguments(__doc__ or "", tasks=(int, TASKS, "tasks in a batch (default: %(default)s)"))
    with agents(1, slots=SLOTS) as alone, agents(3, slots=SLOTS, mqtt=True) as cluster:
        take_slots(cluster[0])
        for used in (alone, cluster):
            batch(used, 200)
        rounds = [(batch(alone, options.tasks), batch(cluster, options.tasks)) for _ in range(options.rounds)]
    here, there = ([one[place][0] for one in rounds] for place in (0, 1))
    cpu_here, cpu_there = ([one[place][1] for one in rounds] for place in (0, 1))
    ratios = [remote / local for remote, local in zip(there, here, strict=True)]
    text = [
        f"{options.tasks} x /bin/true, medians of {options.rounds} rounds, {load_text()}",
        f"  at an agent alone    {median_text(here)} tasks a second, {median_text(cpu_here, '.2f')} ms of processor time a task",
        f"  on two other agents  {median_text(there)} tasks a second, {median_text(cpu_there, '.2f')} ms",
        f"  ratio of the rates   {median_text(ratios, '.2f')}",
    ]
    figures = {"alone": here, "others": there, "alone_cpu_ms": cpu_here, "others_cpu_ms": cpu_there, "ratio": ratios}
    report(text, {name: summary(values) for name, values in figures.items()}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
