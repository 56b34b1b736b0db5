"""A home with 100,000 waiting tasks: for how long nobody is answered while a verb changes all of them.

`python tests/bench/bench_stall.py`. While each verb is carried out, another client asks the agent who it is, again and again;
its longest wait for an answer is how long the agent's loop stood still. Two tasks run, the others wait behind them.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from peerload.client.connection import AgentConnection
from tests.bench.support import ANSWER_WITHIN_S, ENVIRONMENT, Meanwhile, agents, arguments, report_taken

TASKS = 100_000
SLOTS = 2
ASK_EVERY_S = 0.005


class Asker(Meanwhile):
    """Asks who the agent is; ``longest_s`` is its longest wait for an answer."""

    every_s = ASK_EVERY_S
    longest_s = 0.0

    def once(self, client: AgentConnection) -> None:
        began_s = time.perf_counter()
        client.call("info")
        self.longest_s = max(self.longest_s, time.perf_counter() - began_s)


def main() -> int:
    """Measure and print."""
    options = arguments(__doc__ or "", tasks=(int, TASKS, "tasks that wait (default: %(default)s)"))
    count: int = options.tasks
    taken: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        with agents(1, slots=SLOTS, policy="adaptive") as started:
            (agent,) = started

            def timed(name: str, verb: str, *, socket: str = agent.socket, **fields: object) -> dict[str, Any]:
                with AgentConnection(socket, timeout_s=ANSWER_WITHIN_S) as client, Asker(socket) as asker:
                    began_s = time.perf_counter()
                    answer = client.call(verb, **fields)
                    took_s = time.perf_counter() - began_s
                taken.setdefault(f"{name}, answered after s", []).append(took_s)
                taken.setdefault(f"{name}, longest stall s", []).append(asker.longest_s)
                return answer

            def token() -> str:
                return os.urandom(16).hex()

            spec = {"argv": [b"sleep", b"3600"], "directory": b"/tmp", "environment": ENVIRONMENT}
            task = timed("submit", "submit", token=token(), spec=spec, array=[(1, count, 1)])["id"]
            timed("hold", "hold", tasks=[task])
            timed("release", "release", tasks=[task])
            timed("cancel", "cancel", tasks=[task], force=True)
            again = timed("retry", "retry", token=token(), task=task)["id"]
            timed("cancel the repeated", "cancel", tasks=[again], force=True)
    head = f"{count:,} tasks at one home, {SLOTS} of them running; medians of {options.rounds} rounds"
    report_taken(head, {"tasks": count}, taken, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
