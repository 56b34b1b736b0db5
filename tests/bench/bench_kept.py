"""A home with 100,000 ended tasks: what it costs others when most of them are removed, and when an array of so many is read.

`python tests/bench/bench_kept.py`. While each is done, one client asks the agent who it is and another submits, again and
again: the longest wait for an answer, and how long a submit takes, beside an agent that has nothing else to do.
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from peerload.client.connection import AgentConnection
from tests.bench.bench_stall import Asker
from tests.bench.ended import fill
from tests.bench.support import (
    ANSWER_WITHIN_S,
    ENVIRONMENT,
    Meanwhile,
    agents,
    arguments,
    percentile,
    report_taken,
    wait_until,
)

TASKS = 100_000
LEFT = 10_000
SUBMIT_EVERY_S = 0.02
IDLE_S = 3.0
REMOVED_WITHIN_S = 600.0


class Submitter(Meanwhile):
    """Submits a held task; ``taken_s``: until each was durable and answered."""

    every_s = SUBMIT_EVERY_S

    def __init__(self, socket: str) -> None:
        super().__init__(socket)
        self.taken_s: list[float] = []

    def once(self, client: AgentConnection) -> None:
        spec = {"argv": [b"true"], "directory": b"/tmp", "environment": ENVIRONMENT}
        began_s = time.perf_counter()
        client.call("submit", token=os.urandom(16).hex(), spec=spec, held=True)
        self.taken_s.append(time.perf_counter() - began_s)


def _is_done(client: AgentConnection) -> bool:
    """Whether the retention has told of what it has removed."""
    return bool(client.call("events", what=["store"], limit=1)["events"])


def _elsewhere(socket: str, verb: str, fields: dict[str, Any]) -> None:
    """Ask from another process: reading a large answer would hold up the one that measures."""
    code = f"from peerload.client.connection import AgentConnection; AgentConnection({socket!r}, timeout_s={ANSWER_WITHIN_S}).call({verb!r}, **{fields!r})"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def main() -> int:
    """Measure and print."""
    options = arguments(__doc__ or "", rounds=1, tasks=(int, TASKS, "tasks that have ended (default: %(default)s)"))
    count: int = options.tasks
    taken: dict[str, list[float]] = {}

    def add(name: str, seconds: float) -> None:
        taken.setdefault(f"{name} s", []).append(seconds)

    def watched(name: str, socket: str, work: Any, *, submits: bool = True) -> None:
        began_s = time.perf_counter()
        with Asker(socket) as asker:
            if submits:
                with Submitter(socket) as submitter:
                    work()
                add(f"{name}: a submit", statistics.median(submitter.taken_s))
                add(f"{name}: a submit, 99th percentile", percentile(submitter.taken_s, 0.99))
            else:
                work()
        add(f"{name}: all of it", time.perf_counter() - began_s)
        add(f"{name}: longest stall", asker.longest_s)

    for _ in range(options.rounds):
        os.environ["PEERLOAD_RETENTION_EVERY_S"] = "86400"
        with agents(1, policy="adaptive", prepare=lambda state, node: fill(state, node, count)) as (agent,):
            watched("idle", agent.socket, lambda: time.sleep(IDLE_S))
            watched("clean --keep", agent.socket, lambda: agent.client.call("clean", keep=count - LEFT))
        os.environ |= {"PEERLOAD_RETENTION_EVERY_S": "1", "PEERLOAD_ENDED_TASKS_MAX": str(LEFT)}
        with agents(1, policy="adaptive", prepare=lambda state, node: fill(state, node, count)) as (agent,):
            client = agent.client
            watched(
                "retention",
                agent.socket,
                lambda client=client: wait_until(lambda: _is_done(client), REMOVED_WITHIN_S),
            )
        del os.environ["PEERLOAD_ENDED_TASKS_MAX"]
        os.environ["PEERLOAD_RETENTION_EVERY_S"] = "86400"

        def prepare(state: Path, node: str) -> None:
            fill(state, node, count, in_one_array=True)

        with agents(1, policy="adaptive", prepare=prepare) as (agent,):
            for verb, fields in (("wait", {"tasks": ["1"]}), ("show", {"tasks": ["1"]}), ("tasks", {"limit": count})):
                call = functools.partial(_elsewhere, agent.socket, verb, fields)
                watched(f"{verb} of an array", agent.socket, call, submits=False)
    head = f"{count:,} ended tasks at one home, of which {LEFT:,} stay (clean: go); medians of {options.rounds} rounds"
    report_taken(head, {"tasks": count}, taken, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
