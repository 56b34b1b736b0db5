"""A home with 100,000 queued tasks: what submitting them, `ls`, a restart and cancelling them take, and how much memory.

`python tests/bench/bench_queue.py`. ``--growth`` measures 10,000, 100,000 and 1,000,000 and prints how each cost grows, as
docs/benchmarks.md has it; ``--plot FILE`` draws that. Two tasks run, the others wait behind them; the agent is killed with
SIGKILL and started again, as often as there are rounds. Processor time is the agent's alone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import statistics
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
    report,
    report_taken,
)

TASKS = 100_000
GROWTH = (10_000, 100_000, 1_000_000)
SPARE = 100
"""An array has so many fewer members: the queue takes a million tasks, and some are submitted one by one."""
ONE_MORE = 20
"""Tasks that are submitted one by one while the others wait."""
SLOTS = 2
UNANSWERED_MAX = 500
PATIENCE_S = 900.0
QUIET_S = 0.5
"""An agent has done what it was asked for when it takes less than a fiftieth of this in so long."""
GIVEN_BACK_S = 6.0
"""Memory is given back within so long."""
GROWING = (
    "submit, cpu s",
    "submit one more s",
    "submit one more, cpu s",
    "ls, the answer s",
    "ls, cpu s",
    "restart, cpu s",
    "cancel, cpu s",
    "memory MiB",
    "memory after a restart MiB",
    "memory when they have ended MiB",
    "a start of Python, cpu s",
)
"""What the table of growth has in it."""


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


def python_start_s() -> float:
    """Processor time of a bare start of Python: the median of 15."""
    taken = []
    for _ in range(15):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(taken)


def settled_cpu_s(pid: int) -> float:
    """Processor time of an agent so far, once it has done what it was asked for."""
    before = -1.0
    while (now := cpu_s([pid])) - before > QUIET_S / 50:
        before = now
        time.sleep(QUIET_S)
    return now


def measured(count: int, rounds: int, *, single: bool) -> dict[str, list[float]]:
    """What so many tasks that wait take, by name."""
    taken: dict[str, list[float]] = {"a start of Python, cpu s": [python_start_s()]}

    def take(name: str, value: float) -> None:
        taken.setdefault(name, []).append(value)

    with agents(1, slots=SLOTS, policy="adaptive") as started:
        (agent,) = started
        before_s, began_s = settled_cpu_s(agent.pid), time.perf_counter()
        task = submit_singly(agent.client, count) if single else agent.submit("sleep", "3600", array=count - SPARE)
        take("submit s", time.perf_counter() - began_s)
        take("submit, cpu s", settled_cpu_s(agent.pid) - before_s)
        one = task if single else f"{task}.{count - SPARE}"
        now, most = rss_mib(agent.pid)
        take("memory MiB", now)
        take("memory at most MiB", most)
        before_s = cpu_s([agent.pid])
        for _ in range(ONE_MORE):
            began_s = time.perf_counter()
            agent.submit("sleep", "3600")
            take("submit one more s", time.perf_counter() - began_s)
        take("submit one more, cpu s", (cpu_s([agent.pid]) - before_s) / ONE_MORE)
        info = agent.client.call("info")
        settings: dict[str, Any] = {"node": info["node"], "state": info["state"], "socket": info["socket"]}
        settings |= {"slots": SLOTS, "policy": "adaptive", "listen": info["listen"]}
        settings["config"] = str(Path(info["state"]).parent / "config.toml")
        for _ in range(rounds):
            take("ls s", ls_s(agent.socket))
            before_s = cpu_s([agent.pid])
            take("ls, the answer s", answer_s(agent.socket, "tasks", limit=200))
            take("ls, cpu s", cpu_s([agent.pid]) - before_s)
            take("show of one s", answer_s(agent.socket, "show", tasks=[one]))
            os.kill(agent.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(agent.pid, 0)
            began_s = time.perf_counter()
            agent.pid = int(agent_process.start(settings)["pid"])
            take("restart to an answer s", time.perf_counter() - began_s)
            answer_s(agent.socket, "tasks")
            take("restart to ls s", time.perf_counter() - began_s)
            take("restart, cpu s", settled_cpu_s(agent.pid))
            now, most = rss_mib(agent.pid)
            take("memory after a restart MiB", now)
            take("memory at most after a restart MiB", most)
        agent.client.close()
        agent.client = AgentConnection(agent.socket, timeout_s=PATIENCE_S)
        before_s, began_s = cpu_s([agent.pid]), time.perf_counter()
        agent.client.call("cancel", tasks=[task], force=True)
        take("cancel the last submission s", time.perf_counter() - began_s)
        take("cancel, cpu s", settled_cpu_s(agent.pid) - before_s)
        time.sleep(GIVEN_BACK_S)
        take("memory when they have ended MiB", rss_mib(agent.pid)[0])
    return taken


def growth_lines(figures: dict[int, dict[str, float]]) -> list[str]:
    """A table: a line a cost, a column a number of tasks, and by how much the cost grew with ten times the tasks."""
    sizes = list(figures)
    columns = [f"{size:,}" for size in sizes] + [f"growth to {size:,}" for size in sizes[1:]]
    lines = [f"| what | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for name in GROWING:
        values = [figures[size][name] for size in sizes]
        factors = [f"{after / before:.1f}" if before else "-" for before, after in itertools.pairwise(values)]
        shown = [f"{value:.0f}" if name.endswith("MiB") else f"{value:.3g}" for value in values]
        lines.append(f"| {name} | {' | '.join([*shown, *factors])} |")
    return lines


def plot(figures: dict[int, dict[str, float]], path: str) -> None:
    """Draw the costs over the number of tasks, both logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in GROWING:
        axes.plot(list(figures), [one[name] for one in figures.values()], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tasks that wait", ylabel="seconds, MiB")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path)


def main() -> int:
    """Measure and print."""
    options = arguments(
        __doc__ or "",
        tasks=(int, TASKS, "tasks that wait (default: %(default)s)"),
        single=(bool, False, "submitted one by one, each with a command of its own, instead of as an array"),
        growth=(bool, False, f"with {', '.join(f'{size:,}' for size in GROWTH)} tasks, each once"),
        plot=(str, "", "with --growth: draw it into this .svg, .png or .pdf file"),
    )
    if options.growth:
        figures = {}
        for size in GROWTH:
            taken = measured(size, 1, single=options.single)
            figures[size] = {name: statistics.median(values) for name, values in taken.items()}
        if options.plot:
            plot(figures, options.plot)
        report(growth_lines(figures), {str(size): one for size, one in figures.items()}, as_json=options.json)
        return 0
    taken = measured(options.tasks, options.rounds, single=options.single)
    head = f"{options.tasks:,} tasks at one home, {SLOTS} of them running; medians of {options.rounds} rounds"
    report_taken(head, {"tasks": options.tasks}, taken, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
