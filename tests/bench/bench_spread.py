"""How close to the ideal a burst spreads: 120 x `sleep 0.2` submitted to one of three agents with 2 slots each.

`python tests/bench/bench_spread.py`; Mosquitto (or amqtt) carries the advice. The ideal is 4.0 s: all six slots busy
from the first moment to the last. Exit code 1 if adaptive or symmetric takes more than 1.15 times as long.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.support import Agent, agents, arguments, median_text, report, summary

PRESETS = ("adaptive", "symmetric", "threshold", "shortest", "receiver")
TASKS = 120
SLEEP_S = 0.2
NODES = 3
SLOTS = 2
RATIO_MAX = {"adaptive": 1.15, "symmetric": 1.15}
COUNTED = {
    "migrations": ("transfers_total",),
    "declined": ("offers_declined_total",),
    "probes": ("sender_probes_total", "receiver_probes_total"),
    "mqtt": ("mqtt published",),
    "link": ("peer_messages_sent_total",),
}
"""What is told for each preset, and which of the agents' counters it is the sum of."""


def one_round(cluster: list[Agent], count: int) -> tuple[float, dict[str, int], Counter[str]]:
    """One burst → its makespan in s, tasks run per node, and how far the counters went up."""
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    for agent in cluster:
        before.update(agent.counters())
    home = cluster[0]
    began_s = time.perf_counter()
    task = home.submit("sleep", str(SLEEP_S), array=count)
    home.wait(task)
    took_s = time.perf_counter() - began_s
    for agent in cluster:
        after.update(agent.counters())
    ran = Counter(str(one["node"]) for one in home.client.call("show", tasks=[task])["tasks"])
    after.subtract(before)
    return took_s, {agent.node: ran[agent.node] for agent in cluster}, after


def preset(name: str, count: int, rounds: int) -> dict[str, Any]:
    """All rounds of one preset."""
    took: list[float] = []
    ran: list[dict[str, int]] = []
    counted: dict[str, list[int]] = {kind: [] for kind in COUNTED}
    with agents(NODES, slots=SLOTS, policy=name, mqtt=True) as cluster:
        for _ in range(rounds):
            took_s, where, counters = one_round(cluster, count)
            took.append(took_s)
            ran.append(where)
            for kind, names in COUNTED.items():
                counted[kind].append(sum(counters[one] for one in names))
    return {
        "makespan_s": took,
        "tasks": [statistics.median(one[node] for one in ran) for node in ran[0]],
        **{kind: statistics.median(values) for kind, values in counted.items()},
    }


def main() -> int:
    """Measure and print."""
    options = arguments(
        __doc__ or "",
        tasks=(int, TASKS, "how many (default: %(default)s)"),
        preset=(str, "", "this one only"),
    )
    count: int = options.tasks
    ideal_s = count * SLEEP_S / (NODES * SLOTS)
    text = [
        f"{count} x sleep {SLEEP_S} to one of {NODES} nodes with {SLOTS} slots; ideal {ideal_s:.2f} s; medians of {options.rounds}"
    ]
    text.append(f"  {'preset':10} {'makespan, s':20} {'x ideal':>7}  {'tasks a node':14} {'  '.join(COUNTED)}")
    figures: dict[str, Any] = {"tasks": count, "ideal_s": ideal_s, "presets": {}}
    code = 0
    for name in (options.preset,) if options.preset else PRESETS:
        told = preset(name, count, options.rounds)
        ratio = statistics.median(told["makespan_s"]) / ideal_s
        code |= ratio > RATIO_MAX.get(name, ratio)
        counted = "  ".join(f"{told[kind]:{len(kind)}.0f}" for kind in COUNTED)
        where = " / ".join(f"{tasks:.0f}" for tasks in told["tasks"])
        text.append(f"  {name:10} {median_text(told['makespan_s'], '.2f'):20} {ratio:7.2f}  {where:14} {counted}")
        figures["presets"][name] = told | {"makespan_s": summary(told["makespan_s"]), "ratio": ratio}
    report(text, figures, as_json=options.json)
    return code


if __name__ == "__main__":
    sys.exit(main())
