"""`python -m tests.theory.run --cases FILE --out FILE --budget-s N`: play reference cases, write what came out.

FILE holds ``{"cases": [{"id", "params", …}, …]}``; the result is ``{id: {metric: [value, 95 % half width]}}``. The
budget is the time of the whole run; all processors work on it, and the cases share it. Cases that cannot be
played yet are named, with the reason, and left out.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from peerload.sim.player import replicate
from peerload.sim.statistics import Sample, half_width
from tests.theory.mapping import NotYet, Parameters, setup_of

SMALL_NODES_MAX = 100
SMALL_TASKS_MAX, SMALL_REPLICATIONS = 200_000, (2, 10)
LARGE_TASKS_MAX, LARGE_REPLICATIONS = 1_000_000, (1, 5)
"""At most so many tasks a replication, and the fewest and the most replications."""
LARGE_WEIGHT = 3.0
"""A large case gets so many times the time of a small one: each of its tasks costs more, and it warms up slower."""
RATE_GUESS = 3000.0
"""Tasks a second of CPU, to choose the number of replications; each finds its true rate by itself."""
METRICS_OF_THE_WHOLE = ("first_tenth_mean_response", "last_tenth_mean_response")


def combine(samples: list[Sample]) -> dict[str, list[float]]:
    """metric → [mean of the replications, half width of the 95 % interval from the spread of all batches]."""
    combined: dict[str, list[float]] = {}
    for metric in samples[0].values:
        value = fmean(sample.values[metric] for sample in samples if metric in sample.values)
        spread = [batch for sample in samples for batch in sample.batches.get(metric, ())]
        if metric in METRICS_OF_THE_WHOLE:
            spread = [sample.values[metric] for sample in samples]
        combined[metric] = [value, half_width(spread)]
    combined["tasks"] = [float(sum(sample.tasks for sample in samples)), 0.0]
    combined["tasks_per_cpu_s"] = [combined["tasks"][0] / max(sum(sample.cpu_s for sample in samples), 1e-6), 0.0]
    return combined


def weight(parameters: Parameters) -> float:
    """A case's part of the time."""
    return LARGE_WEIGHT if int(parameters["N"]) > SMALL_NODES_MAX else 1.0


def plan(parameters: Parameters, cpu_s: float) -> tuple[int, int]:
    """→ replications, tasks of each at most."""
    small = int(parameters["N"]) <= SMALL_NODES_MAX
    tasks = SMALL_TASKS_MAX if small else LARGE_TASKS_MAX
    fewest, most = SMALL_REPLICATIONS if small else LARGE_REPLICATIONS
    return min(max(math.ceil(cpu_s * RATE_GUESS / tasks), fewest), most), tasks


def _job(job: tuple[str, Parameters, int, int, float]) -> tuple[str, Sample]:
    case, parameters, seed, tasks, cpu_s = job
    setup = setup_of(parameters)
    sample = replicate(setup, seed, tasks=tasks, cpu_s=cpu_s, clock=time.process_time)
    return case, _with_looks(sample, setup.policies.sender)


def _with_looks(sample: Sample, placement: object) -> Sample:
    """A placement that draws from all nodes probes its own node, too, which no message shows."""
    probed = getattr(placement, "probed", 0)  # its class was made anew from its file
    if not probed:
        return sample
    share = 1 + getattr(placement, "looks", 0) / probed
    for metric in ("probes_per_task", "sender_probes_per_task"):
        sample.values[metric] *= share
        sample.batches[metric] = [value * share for value in sample.batches[metric]]
    return sample


def play(cases: list[dict[str, Any]], budget_s: float, seed: int) -> dict[str, dict[str, list[float]]]:
    """Every case that can be played."""
    playable = []
    for case in cases:
        try:
            setup_of(case["params"])
            playable.append(case)
        except NotYet as reason:
            sys.stderr.write(f"not yet: {case['id']}: {reason}\n")
    workers = min(os.cpu_count() or 1, 64)
    share_s = budget_s * workers / max(sum(weight(case["params"]) for case in playable), 1.0)
    jobs = []
    for case in playable:
        cpu_s = share_s * weight(case["params"])
        replications, tasks = plan(case["params"], cpu_s)
        each_s = cpu_s / replications
        jobs += [(case["id"], case["params"], seed + number, tasks, each_s) for number in range(replications)]
    jobs.sort(key=lambda job: -int(job[1]["N"]))  # the long ones first, so that no processor is idle at the end
    samples: dict[str, list[Sample]] = {}
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=1) as pool:
        for case_id, sample in pool.imap_unordered(_job, jobs):
            samples.setdefault(case_id, []).append(sample)
            sys.stderr.write(f"{case_id}: {sample.tasks} tasks in {sample.cpu_s:.1f} s\n")
    return {case["id"]: combine(samples[case["id"]]) for case in playable}


def main(words: list[str] | None = None) -> int:
    """Read, play, write."""
    reader = argparse.ArgumentParser(prog="python -m tests.theory.run", description=__doc__)
    reader.add_argument("--cases", default=str(Path(__file__).with_name("cases.json")))
    reader.add_argument("--out", required=True)
    reader.add_argument("--budget-s", type=float, default=600.0)
    reader.add_argument("--seed", type=int, default=1)
    reader.add_argument("--only", default="", help="ids, separated by commas")
    flags = reader.parse_args(words)
    cases = json.loads(Path(flags.cases).read_text(encoding="utf-8"))["cases"]
    only = set(filter(None, flags.only.split(",")))
    results = play([case for case in cases if not only or case["id"] in only], flags.budget_s, flags.seed)
    Path(flags.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
