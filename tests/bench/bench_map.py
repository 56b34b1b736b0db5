"""How long `peerload map` of 1,000 /bin/true takes beside the same array, and beside GNU parallel.

`python tests/bench/bench_map.py`; all of them alternate within each round. The array is submitted and waited for twice: by
a client that is connected already (the least it can take), and by `peerload submit` and `peerload wait`, as one would.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.support import TRUE, Agent, agents, arguments, gnu_parallel_s, median_text, report, summary

TASKS = 1000
SLOTS = 2


def cli_s(agent: Agent, *words: str) -> float:
    """Run a verb → wall s."""
    began_s = time.perf_counter()
    subprocess.run(
        [sys.executable, "-I", "-m", "peerload", *words],
        env={**os.environ, "PEERLOAD_SOCKET": agent.socket},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=True,
        cwd="/tmp",
    )
    return time.perf_counter() - began_s


def array_s(agent: Agent, count: int) -> float:
    """Submit an array and wait until all are recorded, over a connection that is there → wall s."""
    began_s = time.perf_counter()
    agent.wait(agent.submit(TRUE, array=count))
    return time.perf_counter() - began_s


def main() -> int:
    """Measure and print."""
    options = arguments(__doc__ or "", tasks=(int, TASKS, "tasks (default: %(default)s)"))
    count: int = options.tasks
    inputs = [str(number) for number in range(count)]
    took_s: dict[str, list[float]] = {name: [] for name in ("array", "array, cli", "map", "map of a line", "parallel")}
    with agents(1, slots=SLOTS) as (agent,):
        array_s(agent, min(count, 100))  # warm
        for _ in range(options.rounds):
            took_s["array"].append(array_s(agent, count))
            submitted_s = cli_s(agent, "submit", "--array", f"1-{count}", TRUE)
            took_s["array, cli"].append(submitted_s + cli_s(agent, "wait", "@"))
            took_s["map"].append(cli_s(agent, "map", TRUE, "{}", ":::", *inputs))
            took_s["map of a line"].append(cli_s(agent, "map", "true {}", ":::", *inputs))
            parallel_s = gnu_parallel_s(count)
            if parallel_s is not None:
                took_s["parallel"].append(parallel_s)
    text = [f"{count} times /bin/true on {SLOTS} slots, output captured, durable: seconds, of {options.rounds} rounds"]
    figures: dict[str, Any] = {"tasks": count}
    for name, values in took_s.items():
        if not values:
            text.append(f"  {name:14} not installed")
            continue
        shares = [mine / theirs for mine, theirs in zip(took_s["map"], values, strict=True)]
        ratio = "" if name == "map" else f"   map takes {statistics.median(shares):.2f} times as long"
        text.append(f"  {name:14} {median_text(values, '.2f'):28}{ratio}")
        figures[name] = summary(values) | {"map_ratio": statistics.median(shares)}
    report(text, figures, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
