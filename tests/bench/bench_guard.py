"""Guard against getting slower: counts and processor time of a task, a remote task, a submission of 10,000 and an idle agent.

`python tests/bench/bench_guard.py` compares with guard.json beside it and exits with 1 if a count is more than its tolerance
above the recorded one; ``--record`` writes the file. Elapsed time is not measured. Counts are of the agent and its launcher, all
threads, and are the same on a busy machine: system calls, syncs, bytes written, bytecodes, memory. Figures that the neighbours
change are shown, and warn: processor time, although it is divided by that of a `posix_spawn` loop in between, and sleeps.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.support import TRUE, Agent, agents, arguments, bare_loop_s, cpu_s, report, switches, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RECORD = Path(__file__).with_name("guard.json")
TOLERANCE = 0.10
SERIAL, BATCH, REMOTE, QUEUED = 40, 300, 100, 10_000
SPAWNS = 300
IDLE_S = 30.0
SETTLE_S = 5.0
APART_S = 0.06
PATIENCE_S = 60.0
SYNCS = ("fsync", "fdatasync")
WARN_ONLY = ("cpu", "sleeps", "wake-ups")
"""Words in the names of figures that do not decide."""

pause = threading.Event()


class Figures:
    """Values of all rounds, by name."""

    def __init__(self) -> None:
        self.taken: defaultdict[str, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def cpu(self, name: str, count: int, pids: Sequence[int]) -> Iterator[None]:
        """Processor time for each of ``count``, over that of a spawned process; before and after which the machine is asked."""
        floor_s, began_s = _floor_s(), cpu_s(pids)
        yield
        spent_s = cpu_s(pids) - began_s
        self.taken[f"{name}: cpu over a spawn's"].append(spent_s / count / ((floor_s + _floor_s()) / 2))

    @contextlib.contextmanager
    def counts(self, name: str, count: int, pids: Sequence[int]) -> Iterator[None]:
        """Bytes written and sleeps for each of ``count``."""
        slept, wrote = switches(pids), _written(pids)
        yield
        self.taken[f"{name}: bytes written"].append((_written(pids) - wrote) / count)
        self.taken[f"{name}: sleeps"].append((switches(pids) - slept) / count)

    @contextlib.contextmanager
    def calls(self, name: str, count: int, pids: Sequence[int]) -> Iterator[None]:
        """System calls and syncs for each of ``count``; tracing makes everything else dearer."""
        with _traced(pids) as calls:
            yield
        if calls is not None:
            self.taken[f"{name}: system calls"].append(sum(calls.values()) / count)
            self.taken[f"{name}: syncs"].append(sum(calls.get(call, 0) for call in SYNCS) / count)


def one_by_one(agent: Agent) -> None:
    """Tasks that are submitted when the one before has ended: each has commits of its own."""
    for _ in range(SERIAL):
        agent.wait(agent.submit(TRUE))


def _floor_s() -> float:
    """Processor time of one /bin/true, its parent's with it."""
    before = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    bare_loop_s(SPAWNS)
    after = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    spent = (now.ru_utime + now.ru_stime - was.ru_utime - was.ru_stime for now, was in zip(after, before, strict=True))
    return sum(spent) / SPAWNS


def _written(pids: Sequence[int]) -> int:
    texts = (Path(f"/proc/{pid}/io").read_text() for pid in pids)
    return sum(int(text.partition("wchar: ")[2].split()[0]) for text in texts)


def _anonymous_bytes(pids: Sequence[int]) -> int:
    """Memory that no file backs: how much of the libraries counts depends on who else has them mapped."""
    texts = (Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids)
    return sum(int(text.partition("Pss_Anon:")[2].split()[0]) << 10 for text in texts)


@contextlib.contextmanager
def _traced(pids: Sequence[int]) -> Iterator[dict[str, int] | None]:
    """Counts the system calls of these processes, by name; None without strace."""
    program = shutil.which("strace")
    if program is None:
        yield None
        return
    calls: dict[str, int] = {}
    with tempfile.NamedTemporaryFile("r") as told:
        words = [program, "-f", "-c", "-U", "calls,name", "-o", told.name]
        for pid in pids:
            words += ["-p", str(pid)]
        with subprocess.Popen(words, stderr=subprocess.PIPE) as tracer:
            assert tracer.stderr is not None
            for _ in pids:
                tracer.stderr.readline()  # "Process 1 attached with 3 threads"
            yield calls
            tracer.terminate()
            tracer.stderr.read()
        for count, name in re.findall(r"^ *(\d+) +(\w+)$", told.read(), re.MULTILINE):
            if name != "total":
                calls[name] = int(count)


def idle_agent(figures: Figures) -> None:
    """An agent alone, to which nothing happens."""
    with agents(1) as (agent,):
        pause.wait(SETTLE_S)
        spent_s, slept = cpu_s(agent.pids), switches(agent.pids)
        pause.wait(IDLE_S)
        figures.taken["idle: cpu, in 1000ths"].append((cpu_s(agent.pids) - spent_s) / IDLE_S * 1000)
        figures.taken["idle: wake-ups a second"].append((switches(agent.pids) - slept) / IDLE_S)


def one_agent(figures: Figures) -> None:
    """Tasks one after another, a batch, a submission of many."""
    with agents(1) as (agent,):
        pause.wait(SETTLE_S)
        figures.taken["idle: PSS in MiB, without files"].append(_anonymous_bytes(agent.pids) / 2**20)
        agent.wait(agent.submit(TRUE))
        with figures.counts("a task", SERIAL, agent.pids):
            one_by_one(agent)
        with figures.calls("a task", SERIAL, agent.pids):
            one_by_one(agent)
        with figures.cpu("a task", BATCH, agent.pids):
            agent.wait(agent.submit(TRUE, array=BATCH))
        for _ in range(agent.slots):
            agent.submit("/bin/sleep", "600")
        with figures.cpu("10,000 queued", 1, agent.pids), figures.counts("10,000 queued", 1, agent.pids):
            agent.submit(TRUE, array=QUEUED)
        with figures.calls("10,000 queued", 1, agent.pids):
            agent.submit(TRUE, array=QUEUED)


def counted_agent(figures: Figures) -> None:
    """Bytecodes of tasks one after another, so far apart that each is started as after a pause."""
    with tempfile.TemporaryDirectory(prefix="pl-bench-") as name:
        directory = Path(name)
        program = [sys.executable, str(Path(__file__).with_name("counted_agent.py")), name]
        with agents(1, program=program) as (agent,):
            agent.wait(agent.submit(TRUE))
            for ending in ("on", "count"):
                for pid in agent.pids:
                    os.kill(pid, signal.SIGUSR2)
                    wait_until((directory / f"{pid}.{ending}").exists, PATIENCE_S)
                for _ in range(SERIAL if ending == "on" else 0):
                    agent.wait(agent.submit(TRUE))
                    pause.wait(APART_S)
            for pid, what in zip(agent.pids, ("agent", "launcher"), strict=True):
                executed = int((directory / f"{pid}.count").read_text())
                figures.taken[f"a task: bytecodes of the {what}"].append(executed / SERIAL)


def two_agents(figures: Figures) -> None:
    """Tasks of a home whose slots are taken, which another node runs."""
    with agents(2, mqtt=True) as (home, other):
        for _ in range(home.slots):
            home.submit("/bin/sleep", "600")
        home.wait(home.submit(TRUE))
        pids = (*home.pids, *other.pids)
        with figures.counts("a remote task", SERIAL, pids):
            one_by_one(home)
        with figures.calls("a remote task", SERIAL, pids):
            one_by_one(home)
        with figures.cpu("a remote task", REMOTE, pids):
            home.wait(home.submit(TRUE, array=REMOTE))


def main() -> int:
    """Measure, compare, print."""
    options = arguments(__doc__ or "", rounds=3, record=(bool, False, "write guard.json"))
    figures = Figures()
    idle_agent(figures)
    for _ in range(options.rounds):
        one_agent(figures)
        two_agents(figures)
        counted_agent(figures)
    medians = {name: statistics.median(values) for name, values in figures.taken.items()}
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if options.record:
        limits = {name: recorded.get(name, {}).get("tolerance", TOLERANCE) for name in medians}
        fresh = {name: {"value": round(value, 3), "tolerance": limits[name]} for name, value in medians.items()}
        RECORD.write_text(json.dumps(fresh, indent=1) + "\n")
        recorded = fresh
    slower, text = [], [f"medians of {options.rounds} rounds, against {RECORD.name}"]
    for name, known in recorded.items():
        if name not in medians:
            text.append(f"  {name:32} skipped: strace is not installed")
            continue
        values, at_most = figures.taken[name], known["value"] * (1 + known["tolerance"])
        is_more = medians[name] > at_most
        decides = not any(word in name for word in WARN_ONLY)
        slower += [name] * (is_more and decides)
        text.append(
            f"  {name:32} {medians[name]:10.2f} [{min(values):.2f}..{max(values):.2f}], recorded {known['value']:.2f}"
            f" + {known['tolerance']:.0%}{is_more * ('   SLOWER' if decides else '   more, which does not decide')}"
        )
    report(text, {"slower": slower, "figures": medians}, as_json=options.json)
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
