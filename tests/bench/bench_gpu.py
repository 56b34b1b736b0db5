"""GPUs that are not there: how soon a free one has its next task, what eight of them cost an idle agent, how long one
decision about 512 takes, and the end of a task while thousands wait.

`python tests/bench/bench_gpu.py`. Exit code 1 if p99 of free → started is over 200 ms, an idle agent takes more than 1 % of
a processor, or a placement takes more than 1 ms.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import itertools

from peerload.core.resources.admission import has_room, seen_by
from peerload.model.resources import DeviceLoad, DeviceMode, LoadReport, ResourceRequest
from tests.bench.support import arguments, cpu_s, pss_bytes, report
from tests.gpu.cards import Cards
from tests.gpu.walk import Walk
from tests.integration.cluster import Cluster

TASKS = 200
SECONDS = 30.0
SETTLE_S = 5.0
NODES, GPUS = 64, 8
ROUNDS = 200
WAITING = 20_000
START_S_MAX, CPU_SHARE_MAX, PLACE_S_MAX = 0.2, 0.01, 0.001


def starts(tasks: int) -> dict[str, float]:
    """One card, tasks in a line: from the end of one process to the start of the next."""
    with Cluster() as cluster:
        cards = Cards(cluster.directory, count=1)
        cluster.environment |= cards.environment
        agent = cluster.agent(slots=8)
        array = agent.submit("true", array=[(1, tasks, 1)], request={"gpus": 1})
        agent.wait(array, timeout_s=300)
        times = sorted(
            (task["started_at"], task["ended_at"])
            for first in range(1, tasks + 1, 100)
            for task in agent.call("show", tasks=[f"{array}.{n}" for n in range(first, min(first + 100, tasks + 1))])[
                "tasks"
            ]
        )
    gaps = sorted(start - end for (_, end), (start, _) in itertools.pairwise(times))
    return {
        "p50_s": statistics.median(gaps),
        "p99_s": gaps[int(0.99 * len(gaps))],
        "overlaps": sum(gap < 0 for gap in gaps),
    }


def idle(seconds: float) -> dict[str, float]:
    """An agent with eight cards, and nothing to do."""
    with Cluster() as cluster:
        cards = Cards(cluster.directory, count=GPUS)
        cluster.environment |= cards.environment
        agent = cluster.agent(slots=8)
        pause = threading.Event()
        pause.wait(SETTLE_S)
        spent, began_s = cpu_s([agent.pid]), time.perf_counter()
        pause.wait(seconds)
        share = (cpu_s([agent.pid]) - spent) / (time.perf_counter() - began_s)
        return {"cpu_share": share, "pss_bytes": float(pss_bytes((agent.pid, agent.launcher_pid)))}


def placement() -> dict[str, float]:
    """Which of 64 nodes with 8 cards each has room, and is the least loaded, by what they have told. Processor time."""
    cards = tuple(DeviceLoad(number, DeviceMode.TIME, free_mib=4096, free_slots=3) for number in range(GPUS))
    reports = [
        LoadReport(gpus=GPUS, gpu_tasks=number % 9, gpu_load=number % 9 / GPUS, devices=cards)
        for number in range(NODES)
    ]
    request = ResourceRequest(gpus=2, gpu_mem_bytes=2 << 30)
    times = []
    for _ in range(ROUNDS):
        began_s = time.process_time()
        fitting = [seen_by(request, one) for one in reports if has_room(request, one)]
        min(fitting, key=lambda one: one.load)
        times.append(time.process_time() - began_s)
    times.sort()
    return {"p50_s": statistics.median(times), "p99_s": times[int(0.99 * len(times))]}


def line(tasks: int) -> dict[str, dict[str, float]]:
    """What the end of a task costs a node of eight cards where so many others wait for one: that all ask for something
    else; and that ask for the same, and have waited so long that nobody may overtake them. Processor time."""
    return {name: _line(tasks, is_overdue=is_overdue) for name, is_overdue in (("different", False), ("overdue", True))}


def _line(tasks: int, *, is_overdue: bool) -> dict[str, float]:
    walk = Walk(count=GPUS, checks=False)
    for number in range(tasks):
        more = 0 if is_overdue else number * 4096
        walk.submit(ResourceRequest(gpus=1 if is_overdue else 1 + number % 3 // 2, gpu_mem_bytes=(4 << 30) + more))
    walk.now_s += 2 * walk.config.gpu.starve_after_s if is_overdue else 0.0
    times = []
    for _ in range(ROUNDS):
        walk.now_s += 1.0
        began_s = time.process_time()
        walk.end(0)
        times.append(time.process_time() - began_s)
    times.sort()
    return {"p50_s": statistics.median(times), "p99_s": times[int(0.99 * len(times))]}


def _ms(figure: dict[str, float]) -> str:
    return f"{figure['p50_s'] * 1e3:.2f} ms (p50), {figure['p99_s'] * 1e3:.2f} ms (p99)"


def main() -> int:
    """Measure and print."""
    options = arguments(
        __doc__ or "",
        tasks=(int, TASKS, "tasks in a line (default: %(default)s)"),
        seconds=(float, SECONDS, "how long to watch (default: %(default)s)"),
        waiting=(int, WAITING, "tasks in the line for GPUs (default: %(default)s)"),
    )
    figures: dict[str, Any] = {
        "starts": starts(options.tasks),
        "idle": idle(options.seconds),
        "placement": placement(),
        "line": line(options.waiting),
    }
    told = figures["starts"]
    text = [
        (
            f"GPU free → next process started: {told['p50_s'] * 1e3:.0f} ms (p50), {told['p99_s'] * 1e3:.0f} ms (p99) of"
            f" {options.tasks}, {told['overlaps']} overlaps"
        ),
        (
            f"idle with {GPUS} GPUs: {figures['idle']['cpu_share']:.2%} of a processor,"
            f" {figures['idle']['pss_bytes'] / 2**20:.1f} MiB PSS with the launcher"
        ),
        f"placement over {NODES} nodes of {GPUS} GPUs: {_ms(figures['placement'])} of a processor",
        *(
            f"a task ends while {options.waiting} wait for a GPU ({name}): {_ms(one)} of a processor"
            for name, one in figures["line"].items()
        ),
    ]
    report(text, figures, as_json=options.json)
    is_good = (
        told["p99_s"] <= START_S_MAX
        and not told["overlaps"]
        and figures["idle"]["cpu_share"] <= CPU_SHARE_MAX
        and figures["placement"]["p50_s"] <= PLACE_S_MAX
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
