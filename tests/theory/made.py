"""`python -m tests.theory.made > FILE`: sixty cases in the format of the reference cases, to see what a budget reaches.

They have no reference values: `python -m tests.theory.run --cases FILE --out OUT --budget-s 1800` plays them, and
`python -m tests.theory.made OUT` lists the figures that are too imprecise to be compared, and their share.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

FIGURES = (
    "mean_response",
    "p95",
    "p99",
    "transfers_per_task",
    "probes_per_task",
    "mean_response_executed_at_origin",
    "mean_response_executed_remotely",
)
WIDE, WIDE_TAIL = 0.05, 0.15
"""Half widths beyond these shares of the value are too imprecise: the second of p99, and where service times vary much."""
SENDERS: tuple[dict[str, Any], ...] = (
    {"sender": "none"},
    {"sender": "threshold", "T_send": 2, "T_accept": 2, "L": 3},
    {"sender": "shortest", "T_send": 2, "T_accept": 2, "L": 3},
    {"sender": "random", "T_send": 2, "T_accept": 2, "max_migrations": 1},
    {"sender": "jsqd", "L": 2},
    {"sender": "board-min", "T_send": 1, "T_accept": 1 << 30, "board_period": 1.0},
    {"sender": "none", "T_recv": 1, "T_give": 1, "L_recv": 3},
    {"sender": "none", "pair_rate": 0.5, "pair_diff": 2},
    {"sender": "threshold", "T_send": 1, "T_accept": 1, "L": 2, "T_recv": 1, "T_give": 1, "L_recv": 2},
    {"sender": "idle-first", "T_send": 1, "T_accept": 1, "L": 2, "delta": 2, "footprints": True},
)
NODES = (2, 5, 20, 50, 100)
LOADS = (0.7, 0.8, 0.9)
SERVICES: tuple[dict[str, Any], ...] = (
    {"service": "exp"},
    {"service": "exp"},
    {"service": "h2", "service_params": [4]},
    {"service": "det"},
)
CASES = 60


def cases() -> list[dict[str, Any]]:
    """Each policy six times, with sizes, loads and services in turn."""
    turns = zip(range(CASES), itertools.cycle(SENDERS), itertools.cycle(SERVICES), strict=False)
    return [
        {
            "id": f"M{number:02}-{sender['sender']}",
            "params": {
                "N": NODES[(number + number // 10) % len(NODES)],
                "c": 1,
                "rho": LOADS[number % 3],
                **sender,
                **service,
            },
        }
        for number, sender, service in turns
    ]


def main() -> int:
    """Write the cases, or judge what came of them."""
    if len(sys.argv) == 1:
        sys.stdout.write(json.dumps({"cases": cases()}, indent=1) + "\n")
        return 0
    results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    varies = {case["id"] for case in cases() if case["params"]["service"] == "h2"}
    figures = {
        (case, metric): (half, (WIDE_TAIL if metric == "p99" or case in varies else WIDE) * value)
        for case, found in results.items()
        for metric, (value, half) in found.items()
        if metric in FIGURES
    }
    wide = {name: half / limit if limit else math.inf for name, (half, limit) in figures.items() if half > limit}
    total = len(figures)
    lines = [f"{case} {metric}: {times:.1f} times too wide" for (case, metric), times in wide.items()]
    sys.stdout.write(
        "\n".join([*lines, f"{len(wide)} of {total} figures are imprecise ({len(wide) / total:.0%})"]) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
