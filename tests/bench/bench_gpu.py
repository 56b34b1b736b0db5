"""What GPUs cost and how soon a free one is at work again, on a stand-in for NVIDIA's library with eight cards.

`python tests/bench/bench_gpu.py --tasks 200 --seconds 60`: from the end of a task to the start of the next on the same GPU,
and what agent and launcher cost while nothing asks for a GPU. Exit code 1 if p99 is over 200 ms, or the agent costs more
than 1 % of a processor.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.bench_idle import watch
from tests.bench.support import ENVIRONMENT, Agent, agents, arguments, report
from tests.fakes.nvml import GIB, Machine, environment

CARDS = 8
TASKS = 200
SECONDS = 60.0
RUN_S = 0.05
P99_S_MAX = 0.2
CPU_SHARE_MAX = 0.01
ENDS_WITHIN_S = 300.0
USE = 'echo "$CUDA_VISIBLE_DEVICES 1073741824 50" > "$1/$$.new"; mv "$1/$$.new" "$1/$$"; sleep "$2"; rm "$1/$$"'
"""What a task does: it is seen on its card, for so long."""


def machine(directory: Path) -> Path:
    """Eight cards, and a directory in which tasks say that they are on one; it is returned."""
    on = directory / "on"
    on.mkdir()
    cards = Machine(directory / "machine")
    for number in range(CARDS):
        cards.gpu(number, uuid=f"GPU-bench-{os.getpid()}-{number}", total=24 * GIB, power=20_000)
    cards.say(f"procs {on}")
    os.environ |= environment(cards.path)
    return on


def gaps_s(agent: Agent, on: Path, count: int) -> list[float]:
    """From the end of each task to the start of the next, all of them on GPU 0 for themselves."""
    request = {"gpus": 1, "gpu_prefer": ["0"], "gpu_wait": "queue", "gpu_share": "exclusive", "cpus": 0.1}
    ids = []
    for _ in range(count):
        argv = [b"sh", b"-c", USE.encode(), b"sh", os.fsencode(on), str(RUN_S).encode()]
        spec = {"argv": argv, "directory": b"/", "environment": ENVIRONMENT, "request": request}
        ids.append(agent.client.call("submit", token=os.urandom(16).hex(), spec=spec)["id"])
    if agent.client.call("wait", tasks=ids, timeout_s=ENDS_WITHIN_S)["timed_out"]:
        raise SystemExit("the tasks have not ended")
    shown: list[dict[str, Any]] = []
    for first in range(0, count, 100):
        shown += agent.client.call("show", tasks=ids[first : first + 100])["tasks"]
    failed = [task for task in shown if task["exit_code"]]
    if failed:
        raise SystemExit(f"a task failed: {failed[0]}")
    runs = sorted((task["started_at"], task["ended_at"]) for task in shown)
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(runs)]
    if min(gaps) < 0:
        raise SystemExit("two tasks had one GPU at a time")
    return sorted(gaps)


def main() -> int:
    """Measure and print."""
    options = arguments(
        __doc__ or "",
        tasks=(int, TASKS, "one after the other on one GPU (default: %(default)s)"),
        seconds=(float, SECONDS, "how long to watch an idle agent (default: %(default)s)"),
    )
    with tempfile.TemporaryDirectory(prefix="pl-bench-gpu-", dir="/tmp") as name:
        on = machine(Path(name))
        with agents(1, slots=4) as (agent,):
            idle = watch(agent.pids, options.seconds)
            gaps = gaps_s(agent, on, options.tasks)
    p50_s, p99_s = gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)]
    figures: dict[str, Any] = {"idle": idle, "gaps": len(gaps), "p50_s": p50_s, "p99_s": p99_s}
    cost = f"{idle['cpu_share']:.3%} of a processor ({idle['cpu_share_launcher']:.3%} of it the launcher)"
    times = f"p50 {p50_s * 1e3:.1f} ms, p99 {p99_s * 1e3:.1f} ms, most {gaps[-1] * 1e3:.1f} ms"
    text = [
        f"idle for {options.seconds:g} s with {CARDS} GPUs: {cost}, {idle['pss_bytes'] / 2**20:.1f} MiB PSS",
        f"from one task's end to the next one's start on a GPU, {len(gaps)} times: {times}",
    ]
    report(text, figures, as_json=options.json)
    return int(p99_s > P99_S_MAX or idle["cpu_share"] > CPU_SHARE_MAX)


if __name__ == "__main__":
    sys.exit(main())
