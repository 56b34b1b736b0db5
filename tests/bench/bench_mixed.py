"""CPU and GPU tasks of many sizes on six nodes with sixteen GPUs, in the simulator: `adaptive` as shipped, held against a
FIFO per node that shares nothing, and against a central first-fit that knows all.

`python tests/bench/bench_mixed.py`. The trace is `tests/gpu/mixed.py`'s, the other schedulers are `tests/gpu/schedulers.py`'s;
each round is another trace. Times are of the tasks, not of this machine. Exit code 1 if `adaptive` waits longer in the mean
than the FIFO, or twice as long as the central one.
"""

from __future__ import annotations

import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.support import arguments, report, summary
from tests.gpu.mixed import LOAD, TASKS, mixed
from tests.gpu.rack import Outcome
from tests.gpu.schedulers import by_agents, central_first_fit, fifo_per_node

FIFO, ALONE, ADAPTIVE, CENTRAL = "FIFO per node", "`none`", "`adaptive`", "central first-fit"
NAMES = (FIFO, ALONE, ADAPTIVE, CENTRAL)
WAIT_OVER_CENTRAL_MAX = 2.0
FIGURES = ("makespan_s", "mean_wait_s", "p95_wait_s", "mean_wait_gpu_s", "mean_wait_cpu_s", "idle_while_waiting")


def one_round(tasks: int, load: float, seed: int) -> dict[str, Outcome]:
    """All of them on one trace."""
    trace = mixed(tasks, seed, load)
    return {
        FIFO: fifo_per_node(trace),
        ALONE: by_agents("none", trace, seed),
        ADAPTIVE: by_agents("adaptive", trace, seed),
        CENTRAL: central_first_fit(trace),
    }


def table(rounds: list[dict[str, Outcome]]) -> list[str]:
    """Medians over the rounds; in brackets the median of the ratios to the central scheduler."""
    lines = [
        "| scheduler | makespan, min | mean wait, s | p95 wait, s | GPU tasks, s | CPU tasks, s | idle while waiting | moved |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in NAMES:
        cells = [
            _cell(rounds, name, "makespan_s", 60.0),
            _cell(rounds, name, "mean_wait_s"),
            _cell(rounds, name, "p95_wait_s"),
            f"{_median(rounds, name, 'mean_wait_gpu_s'):,.0f}",
            f"{_median(rounds, name, 'mean_wait_cpu_s'):,.0f}",
            f"{_median(rounds, name, 'idle_while_waiting'):.1%}",
            f"{_median(rounds, name, 'transfers') / rounds[0][name].tasks:.0%}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _median(rounds: list[dict[str, Outcome]], name: str, figure: str) -> float:
    return float(statistics.median(getattr(one[name], figure) for one in rounds))


def _cell(rounds: list[dict[str, Outcome]], name: str, figure: str, unit: float = 1.0) -> str:
    return f"{_median(rounds, name, figure) / unit:,.0f} ({ratio(rounds, name, CENTRAL, figure):.2f})"


def ratio(rounds: list[dict[str, Outcome]], name: str, to: str, figure: str) -> float:
    """Median over the rounds."""
    ratios = [getattr(one[name], figure) / max(getattr(one[to], figure), 1e-9) for one in rounds]
    return float(statistics.median(ratios))


def main() -> int:
    """Play and print."""
    options = arguments(
        __doc__ or "",
        tasks=(int, TASKS, "of each round (default: %(default)s)"),
        load=(float, LOAD, "work that comes, of all GPUs with one task each (default: %(default)s)"),
        jobs=(int, 2, "processes (default: %(default)s)"),
    )
    with ProcessPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(one_round, options.tasks, options.load, seed) for seed in range(1, options.rounds + 1)]
        rounds = [future.result() for future in futures]
    figures: dict[str, Any] = {
        name: {figure: summary([getattr(one[name], figure) for one in rounds]) for figure in FIGURES} for name in NAMES
    }
    over_fifo, over_central = (ratio(rounds, ADAPTIVE, other, "mean_wait_s") for other in (FIFO, CENTRAL))
    text = [
        f"{options.rounds} traces of {options.tasks} tasks at load {options.load:g}; in brackets: times central first-fit",
        "",
        *table(rounds),
        "",
        f"adaptive waits {over_fifo:.2f} times as long as FIFO per node, {over_central:.2f} times as long as central first-fit",
    ]
    report(text, figures, as_json=options.json)
    return 0 if over_fifo <= 1 and over_central <= WAIT_OVER_CENTRAL_MAX else 1


if __name__ == "__main__":
    sys.exit(main())
