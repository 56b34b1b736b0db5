"""How long `ls` and `history` take at a home with 10,000 tasks that ended within the last day, from the prompt to the end.

`python tests/bench/bench_ls.py`. Each is a process of its own, as a shell starts it; beside it how long a bare Python takes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.ended import fill  # noqa: E402 -- the checkout comes first
from tests.bench.support import agents, arguments, report_taken  # noqa: E402 -- as above

TASKS = 10_000
LIMIT_S = 0.3
START = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from peerload.cli.main import main; sys.exit(main())"
VERBS = {
    "ls": ("ls",),
    "ls --json": ("ls", "--json"),
    "ls, all 10,000": ("ls", "--limit", "100000"),
    "history": ("history",),
    "history, all 10,000": ("history", "--limit", "100000"),
}


def main() -> int:
    """Measure and print; 1 if `ls` takes longer than LIMIT_S."""
    options = arguments(__doc__ or "", rounds=9, tasks=(int, TASKS, "tasks that have ended (default: %(default)s)"))
    taken: dict[str, list[float]] = {}
    with agents(1, policy="adaptive", prepare=lambda state, node: fill(state, node, options.tasks)) as started:
        variables = {**os.environ, "PEERLOAD_SOCKET": started[0].socket}

        def timed(name: str, *words: str) -> None:
            began_s = time.perf_counter()
            subprocess.run(
                [sys.executable, "-I", "-c", *words], env=variables, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, check=True,
            )  # fmt: skip
            taken.setdefault(f"{name} s", []).append(time.perf_counter() - began_s)

        for _ in range(options.rounds):
            timed("bare python", "pass")
            for name, words in VERBS.items():
                timed(name, START, *words)
    head = f"{options.tasks:,} ended tasks at one home; medians of {options.rounds} rounds"
    report_taken(head, {"tasks": options.tasks}, taken, as_json=options.json)
    return int(sorted(taken["ls s"])[options.rounds // 2] > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
