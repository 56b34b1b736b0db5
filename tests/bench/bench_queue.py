"""A home with 100,000 queued tasks: how long `ls` takes, how long a restart takes, how much memory the agent has.

`python tests/bench/bench_queue.py`; ``--tasks 1000000`` for a million. Two tasks run, the others wait behind them; the agent
is killed with SIGKILL and started again, as often as there are rounds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from peerload.cli.common import agent_process
from peerload.client.connection import AgentConnection
from tests.bench.support import (
    ANSWER_WITHIN_S,
    ENVIRONMENT,
    agents,
    arguments,
    cpu_s,
    report_taken,
)

TASKS = 100_000
SLOTS = 2
UNANSWERED_MAX = 500
ANSWER_GOAL_S = 0.2
RESTART_GOAL_S = 5.0
RSS_GOAL_MIB = 300


def rss_mib(pid: int) -> tuple[float, float]:
    """The resident memory of a process: now, and the most it has had."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(("VmRSS", "VmHWM")):
            name, value, _ = line.split()
            found[name] = int(value) / 1024
    return found["VmRSS:"], found["VmHWM:"]


def ls_s(socket: str) -> float:
    """`peerload ls` as a user types it, to the last line."""
    began_s = time.perf_counter()
    subprocess.run(
        [sys.executable, "-I", "-m", "peerload", "ls", "--socket", socket], stdout=subprocess.DEVNULL, check=True
    )
    return time.perf_counter() - began_s


def answer_s(socket: str, verb: str, **fields: object) -> float:
    """One request on a connection of its own."""
    began_s = time.perf_counter()
    with AgentConnection(socket, timeout_s=ANSWER_WITHIN_S) as client:
        client.call(verb, **fields)
    return time.perf_counter() - began_s


def submit_singly(client: AgentConnection, count: int) -> str:
    """So many submissions, UNANSWERED_MAX of them on their way at a time → the last id."""
    task = ""
    for first in range(0, count, UNANSWERED_MAX):
        numbers = range(first, min(first + UNANSWERED_MAX, count))
        for number in numbers:
            spec = {"argv": [b"sleep", b"%d" % (3600 + number)], "directory": b"/tmp", "environment": ENVIRONMENT}
            client.send("submit", token=os.urandom(16).hex(), spec=spec, array=[])
        for _ in numbers:
            task = max(task, str(client.receive()[2]["id"]), key=lambda name: int(name.partition("/")[2] or 0))
    return task


def main() -> int:
    """Measure and print."""
    options = arguments(
        __doc__ or "",
        tasks=(int, TASKS, "tasks that wait (default: %(default)s)"),
        single=(bool, False, "submitted one by one, each with a command of its own, instead of as an array"),
    )
    count: int = options.tasks
    taken: dict[str, list[float]] = {}
    with agents(1, slots=SLOTS, policy="adaptive") as started:
        (agent,) = started
        began_s = time.perf_counter()
        task = submit_singly(agent.client, count) if options.single else agent.submit("sleep", "3600", array=count)
        one = task if options.single else f"{task}.{count}"
        taken["submit s"] = [time.perf_counter() - began_s]
        info = agent.client.call("info")
        now, most = rss_mib(agent.pid)
        taken["memory MiB"], taken["memory at most MiB"] = [now], [most]
        settings: dict[str, Any] = {"node": info["node"], "state": info["state"], "socket": info["socket"]}
        settings |= {"slots": SLOTS, "policy": "adaptive", "listen": info["listen"]}
        settings["config"] = str(Path(info["state"]).parent / "config.toml")
        for _ in range(options.rounds):
            taken.setdefault("ls s", []).append(ls_s(agent.socket))
            before_s = cpu_s([agent.pid])
            taken.setdefault("ls, the answer s", []).append(answer_s(agent.socket, "tasks", limit=200))
            taken.setdefault("ls, cpu of the agent s", []).append(cpu_s([agent.pid]) - before_s)
            taken.setdefault("show of one s", []).append(answer_s(agent.socket, "show", tasks=[one]))
            os.kill(agent.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(agent.pid, 0)
            began_s = time.perf_counter()
            agent.pid = int(agent_process.start(settings)["pid"])
            taken.setdefault("restart to an answer s", []).append(time.perf_counter() - began_s)
            taken.setdefault("restart, cpu of the agent s", []).append(cpu_s([agent.pid]))
            answer_s(agent.socket, "tasks")
            taken.setdefault("restart to ls s", []).append(time.perf_counter() - began_s)
            now, most = rss_mib(agent.pid)
            taken.setdefault("memory after a restart MiB", []).append(now)
            taken.setdefault("memory at most after a restart MiB", []).append(most)
        began_s = time.perf_counter()
        agent.client.close()
        agent.client = AgentConnection(agent.socket, timeout_s=ANSWER_WITHIN_S)
        agent.client.call("cancel", tasks=[task], force=True)
        taken["cancel the last submission s"] = [time.perf_counter() - began_s]
    head = f"{count:,} tasks at one home, {SLOTS} of them running; medians of {options.rounds} rounds"
    report_taken(head, {"tasks": count}, taken, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
