"""How many /bin/true a second one agent with 2 slots records, beside a bare spawn loop and GNU parallel.

`python tests/bench/bench_throughput.py`; the three alternate within each round, so that a noisy moment hits all alike.
``--profile FILE`` records where the agent's time goes with py-spy, if that is installed.
"""

from __future__ import annotations

import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.support import (
    Agent,
    agents,
    arguments,
    bare_loop_s,
    cpu_s,
    flush_us,
    gnu_parallel_s,
    median_text,
    report,
    summary,
)

TASKS = 1000
SLOTS = 2
PROFILER_READY_S = 2.0
"""py-spy does not say when it has begun; what it misses of the batch matters little."""


def batch(agent: Agent, count: int) -> tuple[float, float, float]:
    """Submit an array and wait until all are recorded → wall s, and cpu s of agent and launcher."""
    before = [cpu_s([pid]) for pid in agent.pids]
    began_s = time.perf_counter()
    agent.wait(agent.submit("/bin/true", array=count))
    took_s = time.perf_counter() - began_s
    spent = [cpu_s([pid]) - earlier for pid, earlier in zip(agent.pids, before, strict=True)]
    return took_s, spent[0], spent[1]


def profile(agent: Agent, count: int, path: str) -> None:
    """One more batch, with py-spy watching the agent; raw stacks go to ``path``, the launcher's beside it."""
    program = shutil.which("py-spy")
    if program is None:
        raise SystemExit("py-spy is not installed: pip install py-spy")
    watching = [
        subprocess.Popen(
            [program, "record", "-p", str(pid), "-r", "500", "-f", "raw", "-o", path + end],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for pid, end in zip(agent.pids, ("", ".launcher"), strict=True)
    ]
    threading.Event().wait(PROFILER_READY_S)
    batch(agent, count)
    for process in watching:
        process.send_signal(signal.SIGINT)
        process.wait()


def main() -> int:
    """Measure and print."""
    options = arguments(
        __doc__ or "",
        tasks=(int, TASKS, "tasks in a batch (default: %(default)s)"),
        profile=(str, "", "also record where the agent's time goes, into this file"),
    )
    count: int = options.tasks
    rates: dict[str, list[float]] = {"bare": [], "parallel": [], "peerload": []}
    cpu_ms: dict[str, list[float]] = {"agent": [], "launcher": [], "both": []}
    with agents(1, slots=SLOTS) as (agent,):
        batch(agent, min(count, 100))  # warm
        for _ in range(options.rounds):
            rates["bare"].append(count / bare_loop_s(count))
            parallel_s = gnu_parallel_s(count)
            if parallel_s is not None:
                rates["parallel"].append(count / parallel_s)
            took_s, agent_s, launcher_s = batch(agent, count)
            rates["peerload"].append(count / took_s)
            for name, spent_s in (("agent", agent_s), ("launcher", launcher_s), ("both", agent_s + launcher_s)):
                cpu_ms[name].append(spent_s / count * 1000)
        if options.profile:
            profile(agent, count, options.profile)
    disk_us = flush_us()
    text = [
        f"{count} times /bin/true on {SLOTS} slots, output captured, durable: tasks a second, of {options.rounds} rounds"
    ]
    figures: dict[str, Any] = {"tasks": count, "flush_us": disk_us}
    for name, values in rates.items():
        if not values:
            text.append(f"  {name:10} not installed")
            continue
        shares = [mine / theirs for mine, theirs in zip(rates["peerload"], values, strict=True)]
        ratio = "" if name == "peerload" else f"   peerload is {statistics.median(shares):.2f} times as fast"
        text.append(f"  {name:10} {median_text(values):28}{ratio}")
        figures[name] = summary(values) | {"peerload_ratio": statistics.median(shares)}
    for name, values in cpu_ms.items():
        text.append(f"  cpu of {name:9} {median_text(values, '.2f')} ms a task")
        figures[f"cpu_ms_{name}"] = summary(values)
    text.append(f"  a disk flush takes {disk_us:,.0f} us")
    report(text, figures, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
