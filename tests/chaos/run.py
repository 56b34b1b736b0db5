"""`python -m tests.chaos.run`: what `make chaos` runs. SEEDS=N runs seeds 1 to N; SEED=n one of them, with TRACE=1 line by line."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

from tests.chaos.campaign import PRESETS, Options, run, run_all, total
from tests.chaos.cluster import Outcome
from tests.chaos.draw import draw
from tests.chaos.required import too_rare


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def commit() -> str:
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() or "unknown"


def say_broken(outcome: Outcome, flags: argparse.Namespace) -> None:
    size = f"NODES={flags.nodes} MINUTES={flags.minutes:g}"
    say(f"seed {outcome.seed}, commit {commit()}: {outcome.broken}")
    if outcome.story:
        say(f"    {outcome.story}")
    say(f"    again: make chaos SEED={outcome.seed} {size} TRACE=1")


def main(words: list[str] | None = None) -> int:
    reader = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__)
    reader.add_argument("--seeds", type=int, default=60)
    reader.add_argument("--first", type=int, default=1, help="the first of them")
    reader.add_argument("--seed", type=int, default=0, help="this one alone")
    reader.add_argument("--nodes", default="3-7")
    reader.add_argument("--minutes", type=float, default=5.0, help="virtual minutes of faults")
    reader.add_argument("--jobs", type=int, default=2)
    reader.add_argument("--trace", action="store_true", help="every event and action")
    reader.add_argument("--hash", action="store_true", help="the hash of its trace")
    reader.add_argument("--plan", action="store_true", help="print the plan of the seed, and run nothing")
    reader.add_argument("--gauges", action="store_true", help="print every gauge")
    flags = reader.parse_args(words)
    low, _, high = flags.nodes.partition("-")
    options = Options(int(low), int(high or low), flags.minutes)
    if flags.plan:
        say(
            draw(
                flags.seed or flags.first,
                PRESETS,
                nodes_min=options.nodes_min,
                nodes_max=options.nodes_max,
                minutes=options.minutes,
            ).text()
        )
        return 0
    if flags.seed:
        outcome = run(flags.seed, options, say if flags.trace else None, traced=flags.hash)
        outcomes = [outcome]
        if outcome.broken:
            say_broken(outcome, flags)
        else:
            say(
                f"seed {outcome.seed}: nothing broken; {outcome.tasks} tasks, {outcome.steps} steps, at rest {outcome.rest_s:.1f} s after healing, trace {outcome.trace_hash}"
            )
    else:
        outcomes = []
        started_s = time.monotonic()
        for outcome in run_all(range(flags.first, flags.first + flags.seeds), options, flags.jobs):
            outcomes.append(outcome)
            if outcome.broken:
                say_broken(outcome, flags)
        broken = sum(bool(outcome.broken) for outcome in outcomes)
        wall_s = time.monotonic() - started_s
        cpu_s = sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        say(
            f"{len(outcomes)} seeds, {sum(outcome.tasks for outcome in outcomes)} tasks,"
            f" {sum(outcome.steps for outcome in outcomes)} steps, {broken} violations, {wall_s:.1f} s ({cpu_s:.1f} s of processor time), commit {commit()}"
        )
        for line in too_rare(total(outcomes), flags.seeds):
            say(f"  too rare: {line}")
    if flags.gauges:
        for name, count in sorted(total(outcomes).items()):
            say(f"  {count:8d}  {name}")
    return 1 if any(outcome.broken for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
