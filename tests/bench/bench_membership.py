"""How good the failure detector is, beside a plain SWIM and memberlist's algorithm with its defaults, on equal faults.

`python tests/bench/bench_membership.py` plays 2,000 crashes among 10 nodes, 500 among 50, 3,000 node-hours of pauses and
loss, and a restart of 50 nodes at once, all in virtual time and from seeds (`--seed`); `--quick` a tenth of it. Work is
spread over all processors. Exit code 1 if the detector of this project misses a target.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.support import arguments, percentile, report
from tests.membership import measures
from tests.membership.arena import Faults

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OURS = "peerload"
CRASHES = ((10, 2000, 4.0, 6.0), (50, 500, 6.0, 8.0))
"""Nodes, crashes, largest p50 and p99 in s."""
PARTS = 10
"""Each measurement is played in so many runs, each from a seed of its own."""
NODES = 16
NODE_HOURS = 3000.0
FALSE_DEATHS_MAX = 1.0
"""Per 1,000 node-hours, under the harsh faults; none under the mild ones."""
IDLE_NODES, IDLE_S = (10, 50), 300.0
RESTARTED, AGREE_S_MAX, RESTARTS = 50, 30.0, 10

Job = tuple["Callable[..., Any]", tuple[Any, ...]]


def play(job: Job) -> Any:
    """One run, in a process of its own."""
    function, given = job
    return function(*given)


def crashes(pool: Any, kind: str, nodes: int, most: int, seed: int) -> tuple[float, float, float, int]:
    """p50 and p99 until all knew, p50 until the first suspicion, others called dead."""
    jobs = [(measures.crashes, (kind, nodes, most // PARTS, seed + part)) for part in range(PARTS)]
    told = pool.map(play, jobs, 1)
    took_s = [value for one in told for value in one.detection_s]
    first_s = [value for one in told for value in one.suspected_s]
    wrong = sum(one.wrong for one in told)
    return statistics.median(took_s), percentile(took_s, 0.99), statistics.median(first_s), wrong


def falsehoods(pool: Any, kind: str, node_hours: float, seed: int, faults: Faults) -> dict[str, float]:
    """False deaths per 1,000 node-hours of healthy nodes, and what was sent."""
    healthy = NODES - round(faults.pausing * NODES)
    hours = node_hours / healthy / PARTS / 2
    jobs = [(measures.falsehoods, (kind, NODES, hours, seed + part, faults)) for part in range(2 * PARTS)]
    told = pool.map(play, jobs, 1)
    hours_in_all = sum(one.node_hours for one in told)
    return {
        "node_hours": hours_in_all,
        "deaths": sum(one.deaths for one in told),
        "views": sum(one.views for one in told),
        "suspicions": sum(one.suspected for one in told),
        "deaths_of_pausing": sum(one.deaths_of_pausing for one in told),
        "per_1000_h": 1000.0 * sum(one.deaths for one in told) / hours_in_all,
        "datagrams_s": statistics.mean(one.cost.datagrams for one in told),
        "bytes_s": statistics.mean(one.cost.bytes + one.cost.stream_bytes for one in told),
    }


def measure(pool: Any, kind: str, scale: float, node_hours: float, seed: int) -> tuple[list[str], dict[str, Any], bool]:
    """All of one kind → lines, figures, whether every target is met."""
    text, figures, good = [f"{kind}:"], {}, True
    for nodes, most, p50_max_s, p99_max_s in CRASHES:
        p50_s, p99_s, first_s, wrong = crashes(pool, kind, nodes, max(PARTS, round(most * scale)), seed)
        good = good and p50_s <= p50_max_s and p99_s <= p99_max_s
        figures[f"crash of {nodes}"] = {"p50_s": p50_s, "p99_s": p99_s, "first_s": first_s, "wrong": wrong}
        text.append(
            f"  crash known to all, n = {nodes}: p50 {p50_s:.1f} s, p99 {p99_s:.1f} s (suspected after {first_s:.1f})"
        )
    for name, faults in (("harsh", measures.HARSH), ("mild", measures.MILD)):
        told = falsehoods(pool, kind, node_hours * scale, seed, faults)
        good = good and told["per_1000_h"] <= (FALSE_DEATHS_MAX if faults.pausing else 0.0)
        figures[name] = told
        text.append(
            f"  {faults.loss:.0%} loss, {faults.pausing:.0%} pausing: {told['deaths']:.0f} false deaths in"
            f" {told['node_hours']:,.0f} node-hours ({told['per_1000_h']:.1f} per 1,000), {told['suspicions']:,.0f} suspected,"
            f" {told['datagrams_s']:.1f} datagrams and {told['bytes_s']:,.0f} bytes/s a node"
        )
    for nodes in IDLE_NODES:
        cost = measures.idle(kind, nodes, IDLE_S, seed)
        figures[f"idle {nodes}"] = {"datagrams_s": cost.datagrams, "bytes_s": cost.bytes + cost.stream_bytes}
        text.append(
            f"  idle, n = {nodes}: {cost.datagrams:.2f} datagrams/s a node, {cost.bytes + cost.stream_bytes:,.0f} bytes/s"
        )
    jobs = [(measures.restarted_at_once, (kind, RESTARTED, seed + part)) for part in range(RESTARTS)]
    took_s = pool.map(play, jobs, 1)
    good = good and max(took_s) <= AGREE_S_MAX
    figures["restart"] = {"median_s": statistics.median(took_s), "max_s": max(took_s)}
    text.append(
        f"  {RESTARTED} restarted at once: all agree after {statistics.median(took_s):.1f} s (worst {max(took_s):.1f})"
    )
    return text, figures, good


def main() -> int:
    """Measure and print."""
    options = arguments(
        __doc__ or "",
        quick=(bool, False, "a tenth of it"),
        hours=(float, NODE_HOURS, "node-hours of pauses and loss, before --quick (default: %(default)s)"),
        seed=(int, 1, "the first seed (default: %(default)s)"),
        kind=(str, "", "only this one of " + ", ".join(measures.KINDS)),
    )
    scale = 0.1 if options.quick else 1.0
    kinds: Sequence[str] = [options.kind] if options.kind else list(measures.KINDS)
    text: list[str] = []
    figures: dict[str, Any] = {"scale": scale, "seed": options.seed}
    code = 0
    with multiprocessing.get_context("spawn").Pool() as pool:
        for kind in kinds:
            began_s = time.perf_counter()
            lines, told, good = measure(pool, kind, scale, options.hours, options.seed)
            text += [*lines, f"  ({time.perf_counter() - began_s:,.0f} s)"]
            figures[kind] = told
            code |= kind == OURS and not good
    report(text, figures, as_json=options.json)
    return code


if __name__ == "__main__":
    sys.exit(main())
