"""Requests about 990,000 tasks (the queue takes a million) beside everyday work: how long others wait, whether leases are renewed in time, and memory.

`python tests/bench/bench_bulk.py`; ``--tasks 100000`` for fewer. One client submits an array to the home and cancels all of
it; another submits single tasks all the while. A second node runs tasks of that home with leases of 2 to 16 s: one whose
renewal comes later than three quarters of its lease is frozen, so those that were frozen bound the worst delay.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from peerload.client.connection import AgentConnection
from tests.bench.bench_queue import rss_mib
from tests.bench.support import ENVIRONMENT, Meanwhile, agents, arguments, report_taken, wait_until

TASKS = 990_000
LEASES_S = (2.0, 4.0, 8.0, 16.0)
PATIENCE_S = 900.0
SETTLED_S = 10.0
"""Memory is looked at so long after the last task has ended."""
WHILE = ("idle", "submit", "queued", "cancel", "ended")
"""The phases that are told apart."""


class Submitter(Meanwhile):
    """Submits single held tasks on a connection of its own; how long each took, by phase."""

    every_s = 0.1

    def __init__(self, socket: str) -> None:
        super().__init__(socket)
        self.phase = "idle"
        self.took_s: dict[str, list[float]] = {}
        self.tasks: list[str] = []

    def once(self, client: AgentConnection) -> None:
        """Submit one; it counts for the phase in which it began."""
        phase, began_s = self.phase, time.perf_counter()
        spec = {"argv": [b"true"], "directory": b"/tmp", "environment": ENVIRONMENT}
        self.tasks.append(client.call("submit", token=os.urandom(16).hex(), spec=spec, held=True, array=[])["id"])
        self.took_s.setdefault(phase, []).append(time.perf_counter() - began_s)


def attempts(client: AgentConnection, state: str) -> list[str]:
    """The tasks of other homes that have come into this state on this node."""
    events: list[dict[str, Any]] = client.call("events", what=["attempt"], limit=1000)["events"]
    return [str(event["task"]) for event in events if event["state"] == state]


def main() -> int:
    """Measure and print."""
    options = arguments(__doc__ or "", rounds=1, tasks=(int, TASKS, "members of the array (default: %(default)s)"))
    count: int = options.tasks
    taken: dict[str, list[float]] = {}
    with agents(2, slots=len(LEASES_S), mqtt=True) as (home, other):
        bulk = AgentConnection(home.socket, timeout_s=PATIENCE_S)
        leased: dict[str, float] = {}
        for lease_s in LEASES_S:
            spec = {"argv": [b"sleep", b"36000"], "directory": b"/tmp", "environment": ENVIRONMENT, "lease_s": lease_s}
            reply = bulk.call("submit", token=os.urandom(16).hex(), spec={**spec, "placement": {"node": other.node}})
            leased[reply["id"]] = lease_s
        wait_until(lambda: len(attempts(other.client, "running")) == len(LEASES_S), PATIENCE_S)
        for _ in range(options.rounds):
            with Submitter(home.socket) as single:
                time.sleep(SETTLED_S)
                taken.setdefault("memory at first MiB", []).append(rss_mib(home.pid)[0])
                single.phase = "submit"
                spec = {"argv": [b"sleep", b"36000"], "directory": b"/tmp", "environment": ENVIRONMENT}
                spec["placement"] = {"local": True}
                began_s = time.perf_counter()
                task = bulk.call("submit", token=os.urandom(16).hex(), spec=spec, array=[(1, count, 1)])["id"]
                taken.setdefault("submit s", []).append(time.perf_counter() - began_s)
                single.phase = "queued"
                time.sleep(SETTLED_S)
                taken.setdefault("memory queued MiB", []).append(rss_mib(home.pid)[0])
                single.phase = "cancel"
                began_s = time.perf_counter()
                bulk.call("cancel", tasks=[task], force=True)
                taken.setdefault("cancel s", []).append(time.perf_counter() - began_s)
                single.phase = "ended"
                time.sleep(SETTLED_S)
            taken.setdefault("memory when the array has ended MiB", []).append(rss_mib(home.pid)[0])
            bulk.call("cancel", tasks=single.tasks)
            time.sleep(SETTLED_S)
            now, most = rss_mib(home.pid)
            taken.setdefault("memory when all have ended MiB", []).append(now)
            taken.setdefault("memory at most MiB", []).append(most)
            for phase in WHILE:
                taken.setdefault(f"one more, at worst, {phase} s", []).append(max(single.took_s.get(phase, [0.0])))
        late = sorted({leased[name] for name in attempts(other.client, "frozen") if name in leased})
        taken["longest lease that ran out, lease s"] = [max(late, default=0.0)]
        bulk.close()
    head = f"an array of {count:,} tasks submitted and cancelled, beside single submissions and leases of 2 to 16 s"
    report_taken(head, {"tasks": count}, taken, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
