"""The same work by peerload and by the tools that one would use instead: task-spooler, GNU parallel, HyperQueue, Dask, Ray, Celery, jobd.

`python tests/bench/bench_peers.py`; all alternate within each round. It sets the tools up in a temporary directory (``--tools DIR``
keeps it for the next time) from the package indices of this machine, and prints why one is skipped; so is one that does not answer
in time. ``--minutes``: no round begins after so long, so that it ends soon after on a busy machine, too. Two parts: a batch of /bin/true
on 2 slots, and sleeping tasks that are placed on WORKERS workers of 2 slots each, as a burst and as a stream of arrivals.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.support import TRUE, Agent, agents, arguments, bare_loop_s, percentile, report, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DRIVERS = Path(__file__).with_name("peer_drivers.py")
WHEELS = {
    "HyperQueue": ["hyperqueue"],
    "Dask": ["dask", "distributed"],
    "Ray": ["ray"],
    "Celery, redis": ["celery", "redis"],
    "jobd": ["jobd"],
}
PACKAGES = (
    "task-spooler",
    "parallel",
    "redis-server",
    "redis-tools",
    "libjemalloc2",
    "liblua5.1-0",
    "liblzf1",
    "libhiredis0.14",
)
PACKAGES_OF_LUA = ("lua-cjson", "lua-bitop")
TASKS, SLOTS, WORKERS = 1000, 2, 3
SLOW = {"jobd": 40}
"""Tasks in a batch of a tool that would take minutes over TASKS."""
PLACES = ("Dask", "HyperQueue")
"""Tools with workers of their own, whose placement is compared."""
TASK_S = 0.2
BURST, STREAM_S, LOAD = 60, 15.0, 0.7
ALONE, ALONE_PAUSE_S = 40, 0.05
PATIENCE_S = 120.0
INSTALL_S = 150.0
MINUTES = 6
STAMP_C = r"""
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
static long long now(void) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    return (long long)at.tv_sec * 1000000000LL + at.tv_nsec;
}
int main(int count, char **words) {
    char line[99];
    long long began = now();
    usleep((useconds_t)(atof(words[3]) * 1e6));
    int size = snprintf(line, sizeof line, "%s %lld %lld\n", words[2], began, now());
    return count != 4 || write(open(words[1], O_WRONLY | O_CREAT | O_APPEND, 0600), line, size) != size;
}
"""


class Tool:
    """A tool that runs, by its driver."""

    def __init__(self, name: str, tools: Path, workers: int) -> None:
        self.name = name
        self._directory = tempfile.TemporaryDirectory(prefix="pl-peer-")
        path = f"{tools}/venv/bin:{tools}/root/usr/bin:{os.environ['PATH']}"
        variables = {
            **os.environ,
            "PATH": path,
            "LD_LIBRARY_PATH": f"{tools}/root/usr/lib/x86_64-linux-gnu",
            "HOME": self._directory.name,
        }
        python = tools / "venv" / "bin" / "python"
        self._log = Path(self._directory.name) / "driver.log"
        self._process = subprocess.Popen(
            [python, DRIVERS, name, self._directory.name, str(workers), str(SLOTS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("wb"),
            env=variables,
            text=True,
        )
        try:
            self.pids = self._answer()
        except ValueError:
            self.close()
            raise

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        came, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        line = self._process.stdout.readline() if came else ""
        if not came:
            self._process.terminate()
            raise ValueError(f"no answer within {PATIENCE_S:g} s")
        if not line:
            raise ValueError((self._log.read_text(errors="replace").strip().splitlines() or ["it ended"])[-1][:200])
        return json.loads(line)

    def _ask(self, request: str) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def batch(self, count: int) -> None:
        """Run /bin/true so often."""
        self._ask(f"batch {count}")

    def submit(self, argvs: Sequence[Sequence[str]]) -> int:
        """Hand these tasks over, one after the other → when that began, in ns since 1970, by the driver's reading."""
        return self._ask(f"submit {json.dumps(argvs)}")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        with contextlib.suppress(OSError):
            self._directory.cleanup()


class Peerload:
    """Agents of this checkout, the first of which gets all tasks."""

    name = "peerload"

    def __init__(self, nodes: Sequence[Agent]) -> None:
        self._agent = nodes[0]
        self.pids = [pid for node in nodes for pid in node.pids]

    def batch(self, count: int) -> None:
        """See `Tool`."""
        self._agent.wait(self._agent.submit(TRUE, array=count))

    def submit(self, argvs: Sequence[Sequence[str]]) -> int:
        """See `Tool`."""
        began_ns = time.time_ns()
        for argv in argvs:
            self._agent.submit(*argv)
        return began_ns


def set_up(tools: Path) -> dict[str, str]:
    """Make an environment for the drivers → why a tool is skipped, by name."""
    skipped: dict[str, str] = {}
    tools.mkdir(parents=True, exist_ok=True)
    if not (tools / "venv").exists():
        subprocess.run([sys.executable, "-m", "venv", tools / "venv"], check=True)
        debs = tools / "debs"
        debs.mkdir()
        for package in (*PACKAGES, *PACKAGES_OF_LUA):
            subprocess.run(["apt-get", "download", package], cwd=debs, capture_output=True, check=False)
        for deb in debs.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", deb, tools / "root"], check=True)
    pip = [str(tools / "venv" / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for name, wheels in WHEELS.items():
        try:
            done = subprocess.run([*pip, *wheels], capture_output=True, text=True, check=False, timeout=INSTALL_S)
        except subprocess.TimeoutExpired:
            skipped[name] = f"not installed within {INSTALL_S:g} s"
            continue
        if done.returncode:
            skipped[name] = (done.stderr.strip().splitlines() or ["pip failed"])[-1][:200]
    programs = {"task-spooler": "tsp", "GNU parallel": "parallel", "Celery, redis": "redis-server"}
    for name, program in programs.items():
        if not (tools / "root" / "usr" / "bin" / program).exists():
            skipped[name] = f"apt has no {program} here"
    return skipped


@contextlib.contextmanager
def running(names: Sequence[str], tools: Path, workers: int, skipped: dict[str, str]) -> Iterator[list[Tool]]:
    """These tools; what cannot be started goes to ``skipped``."""
    with contextlib.ExitStack() as stack:
        started: list[Tool] = []
        for name in names:
            try:
                started.append(Tool(name, tools, workers))
            except ValueError as error:
                skipped[name] = str(error)
            else:
                stack.callback(started[-1].close)
        yield started


def tree_cpu_s(pids: Sequence[int]) -> float:
    """Processor time of these processes and all below them, with what has ended there."""
    of: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
            of[int(entry.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    below = {*pids}
    while more := {pid for pid, (parent, _) in of.items() if parent in below} - below:
        below |= more
    return sum(of[pid][1] for pid in below if pid in of) / os.sysconf("SC_CLK_TCK")


def batches(
    tools: Path, skipped: dict[str, str], rounds: int, count: int, until_s: float
) -> dict[str, dict[str, float]]:
    """Rate over the floor, and processor time over the floor's, of each tool."""
    taken: dict[str, list[tuple[float, float, float]]] = {}
    names = ["task-spooler", "GNU parallel", *WHEELS]
    with (
        agents(1, slots=SLOTS) as nodes,
        running([one for one in names if one not in skipped], tools, 1, skipped) as started,
    ):
        everybody: list[Tool | Peerload] = [Peerload(nodes), *started]
        for number, tool in itertools.product(range(rounds + 1), everybody):
            if tool.name in skipped or (number > 1 and time.monotonic() > until_s):
                continue
            tasks = min(SLOW.get(tool.name, count), count)
            spawned_s, before_s = bare_loop_s(200), tree_cpu_s(tool.pids)
            began_s = time.perf_counter()
            try:
                tool.batch(tasks if number else tasks // 5)
            except ValueError as error:
                skipped[tool.name] = str(error)
                continue
            took_s, spent_s = time.perf_counter() - began_s, tree_cpu_s(tool.pids) - before_s
            spawned_s = (spawned_s + bare_loop_s(200)) / 2 / 200
            if number:  # the first is to warm up
                taken.setdefault(tool.name, []).append(
                    (tasks / took_s, spawned_s * tasks / took_s, 1000 * spent_s / tasks)
                )
    return {
        name: dict(zip(("rate", "of_floor", "cpu_ms"), map(statistics.median, zip(*rows, strict=True)), strict=True))
        for name, rows in taken.items()
    }


def arrivals(burst: bool, workers: int) -> list[tuple[float, float]]:
    """When each task comes, and how long it takes."""
    chance = random.Random(1)
    if burst:
        return [(0.0, TASK_S)] * BURST
    found, at_s = [], 0.0
    while (at_s := at_s + chance.expovariate(LOAD * workers * SLOTS / TASK_S)) < STREAM_S:
        found.append((at_s, min(chance.expovariate(1 / TASK_S), 10 * TASK_S)))
    return found


def placed(tool: Tool | Peerload, stamp: str, tasks: Sequence[tuple[float, float]], workers: int) -> dict[str, float]:
    """Have one tool run these tasks → makespan over the ideal, response, and slots that stood idle while work waited."""
    with tempfile.TemporaryDirectory(prefix="pl-bench-") as name:
        stamps, came_ns, pause = Path(name) / "stamps", [], threading.Event()
        began_ns = time.time_ns()
        for index, (at_s, takes_s) in enumerate(tasks):
            pause.wait(max(began_ns / 1e9 + at_s - time.time(), 0.0))
            came_ns.append(time.time_ns())
            if at_s:
                tool.submit([[stamp, str(stamps), str(index), f"{takes_s:.3f}"]])
        if not tasks[0][0]:
            tool.submit(
                [[stamp, str(stamps), str(index), f"{takes_s:.3f}"] for index, (_, takes_s) in enumerate(tasks)]
            )
        wait_until(lambda: stamps.exists() and stamps.read_bytes().count(b"\n") >= len(tasks), PATIENCE_S)
        rows = [tuple(map(int, line.split())) for line in stamps.read_text().splitlines()]
    responses = sorted((ended - came_ns[index]) / 1e9 for index, _, ended in rows)
    steps = sorted(
        [(came, 1, 0) for came in came_ns]
        + [(began, -1, 1) for _, began, _ in rows]
        + [(ended, 0, -1) for _, _, ended in rows]
    )
    waiting = busy = 0
    idle_s = 0.0
    for (at, more_waiting, more_busy), (until, _, _) in itertools.pairwise(steps):
        waiting, busy = waiting + more_waiting, busy + more_busy
        idle_s += min(max(waiting, 0), max(workers * SLOTS - busy, 0)) * (until - at) / 1e9
    work_s = sum(takes_s for _, takes_s in tasks)
    ideal_s = max(work_s / (workers * SLOTS), tasks[-1][0] + tasks[-1][1])
    return {
        "makespan_over_ideal": (max(ended for _, _, ended in rows) - began_ns) / 1e9 / ideal_s,
        "response_mean_s": statistics.mean(responses),
        "response_p99_s": percentile(responses, 0.99),
        "idle_while_waiting": idle_s / work_s,
    }


def starts(tools: Sequence[Tool | Peerload], stamp: str) -> dict[str, list[float]]:
    """From the submission of one task by a connected client to the start of its program, in s: ALONE of each tool, in turn."""
    found: dict[str, list[float]] = {}
    pause = threading.Event()
    with tempfile.TemporaryDirectory(prefix="pl-bench-") as name:
        for number, (index, tool) in itertools.product(range(ALONE), enumerate(tools)):
            stamps = Path(name) / f"{number}-{index}"
            submitted_ns = tool.submit([[stamp, str(stamps), "0", "0"]])
            wait_until(lambda stamps=stamps: stamps.exists() and stamps.read_bytes().endswith(b"\n"), PATIENCE_S)
            found.setdefault(tool.name, []).append((int(stamps.read_text().split()[1]) - submitted_ns) / 1e9)
            pause.wait(ALONE_PAUSE_S)
    return found


def placement(
    tools: Path, skipped: dict[str, str], rounds: int, workers: int, until_s: float
) -> tuple[dict[str, dict[str, float]], dict[str, list[float]]]:
    """Medians of `placed`, for a burst and a stream, and `starts`, of peerload and the tools with workers."""
    taken: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="pl-bench-") as name:
        subprocess.run(["cc", "-O1", "-x", "c", "-o", f"{name}/stamp", "-"], input=STAMP_C.encode(), check=True)
        names = [one for one in PLACES if one not in skipped]
        with agents(workers, slots=SLOTS, mqtt=True) as nodes, running(names, tools, workers, skipped) as started:
            everybody: list[Tool | Peerload] = [Peerload(nodes), *started]
            for tool in everybody:
                tool.batch(4 * workers)
            alone = starts(everybody, f"{name}/stamp")
            for number, kind, tool in itertools.product(range(rounds), ("burst", "stream"), everybody):
                if number and time.monotonic() > until_s:
                    break
                row = placed(tool, f"{name}/stamp", arrivals(kind == "burst", workers), workers)
                taken.setdefault(f"{kind}, {tool.name}", []).append(row)
    medians = {
        what: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for what, rows in taken.items()
    }
    return medians, alone


def main() -> int:
    """Set up, measure, print."""
    options = arguments(
        __doc__ or "",
        rounds=3,
        tasks=(int, TASKS, "tasks in a batch (default: %(default)s)"),
        workers=(int, WORKERS, "workers of the placement (default: %(default)s)"),
        minutes=(float, MINUTES, "no round begins after so many (default: %(default)s)"),
        tools=(str, "", "keep the tools in this directory, and use what is there"),
    )
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pl-peers-") as made:
        tools = Path(options.tools or made).resolve()
        skipped = set_up(tools)
        rates = batches(tools, skipped, options.rounds, options.tasks, began_s + 30 * options.minutes)
        places, alone = placement(tools, skipped, options.rounds, options.workers, began_s + 60 * options.minutes)
    text = [
        f"{options.tasks} x /bin/true, {SLOTS} slots, medians of {options.rounds}; CPU with the tasks' own",
        f"  {'':14} {'tasks/s':>8} {'of floor':>9} {'peerload is':>12} {'CPU ms/task':>12}",
    ]
    for name, row in rates.items():
        times = rates["peerload"]["of_floor"] / row["of_floor"]
        text.append(f"  {name:14} {row['rate']:8.1f} {row['of_floor']:9.3f} {times:10.2f} x {row['cpu_ms']:12.2f}")
    text.append(
        f"placement on {options.workers} workers of {SLOTS} slots: a burst of {BURST}, a stream at {LOAD:.0%} load"
    )
    text.append(f"  {'':20} {'makespan/ideal':>14} {'mean s':>7} {'p99 s':>7} {'idle while work waits':>22}")
    for name, row in places.items():
        makespan, mean_s, p99_s, idle = row.values()
        text.append(f"  {name:20} {makespan:14.3f} {mean_s:7.3f} {p99_s:7.3f} {idle:21.1%}")
    text.append(f"from a connected client's submission to the start, {ALONE} tasks one at a time, in turn")
    text.append(f"  {'':20} {'p50 ms':>7} {'p95 ms':>7} {'peerload is':>12}")
    for name, taken_s in alone.items():
        middle_s = percentile(taken_s, 0.5)
        ratio = percentile(alone["peerload"], 0.5) / middle_s
        text.append(f"  {name:20} {1000 * middle_s:7.2f} {1000 * percentile(taken_s, 0.95):7.2f} {ratio:10.2f} x")
    text += [f"skipped: {name}: {why}" for name, why in skipped.items()]
    report(text, {"batches": rates, "placement": places, "starts": alone, "skipped": skipped}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
