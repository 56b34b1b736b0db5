"""`python -m tests.theory.run --cases FILE --out FILE --budget-s N`: play reference cases, write what came out.

FILE holds ``{"cases": [{"id", "params", …}, …]}``; the result is ``{id: {metric: [value, 95 % half width]}}``. The
budget is the time of the whole run; all processors work on it. Every case gets its share, and then those more whose
intervals are nearest to narrow enough, until they are. What the arrivals
explain of a mean is taken out, and what the same tasks would do in queues of which theory knows the mean (control variates). Cases that cannot be
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
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from peerload.sim.outcome import (
    NORMAL,
    Interval,
    batch_half_width,
    half_width,
    has_few_beyond,
    independent_of,
    runs_interval,
)
from peerload.sim.replication import CONTROL, QUANTILES, WARM_UP_S, Sample, quantile
from tests.theory.control_variates import NOTHING_NEW, controlled, slopes
from tests.theory.mapping import NotYet, Parameters, setup_of
from tests.theory.replicate import BATCHES, ERRORS, REFERENCES, replicate

SMALL_NODES_MAX = 100
SMALL_TASKS_MAX, SMALL_REPLICATIONS_MAX = 200_000, 10
LARGE_TASKS_MAX, LARGE_REPLICATIONS_MAX = 1_000_000, 5
"""At most so many tasks a replication, and so many replications."""
LARGE_WEIGHT = 3.0
"""A large case gets so many times the time of a small one: each of its tasks costs more, and it warms up slower."""
FIRST_SHARE = 0.5
"""Of the time for the first replication of every case; the rest goes where the intervals are widest."""
AIMS = {"mean_response": 0.02, "p95": 0.03, "p99": 0.08}
"""A case is done when the half widths of these are within such a share of the value."""
MORE, WIDE_MAX = 1.2, 30.0
"""More time than is probably lacking, since that is a guess; how much too wide an interval counts at most (it may be infinite)."""
GROWS = 1.5
"""Responses at the end are so many times those at the start where a system is not stable."""
REPLICATION_S_MIN = 3.0
"""With less time left no further replication is begun."""
PLAYED_SHARE = 0.8
"""Of the wall time of a replication, for the tasks that were asked for: its process starts before, its last tasks end after."""
METRICS_OF_THE_WHOLE = ("first_tenth_mean_response", "last_tenth_mean_response")


def combine(samples: list[Sample], load: float = 0.0) -> dict[str, list[float]]:
    """metric → [mean of the replications, half width of the 95 % interval from the spread of all batches], by the rules of
    the simulator. load: offered to a slot of speed 1; 0: no interval is refused for too few independent tasks."""
    combined: dict[str, list[float]] = {}
    independent = independent_of(samples, load)
    for metric in (name for name in samples[0].values if name not in (CONTROL, *ERRORS)):
        known = [sample for sample in samples if metric in sample.values]
        if metric in METRICS_OF_THE_WHOLE:
            values = [sample.values[metric] for sample in known]
            combined[metric] = [fmean(values), half_width(values)]
        elif metric in QUANTILES:
            found = _quantile(samples, QUANTILES[metric])
            combined[metric] = [found.value, math.inf if has_few_beyond(independent, QUANTILES[metric]) else found.half]
        else:
            shift, error, runs = _explained(
                known, [sample.batches.get(metric) or [sample.values[metric]] for sample in known]
            )
            value = fmean(sample.values[metric] for sample in known) + shift
            half = batch_half_width(runs)
            if half > NOTHING_NEW * value:  # else known queues explain all of it, however short the run
                half = math.hypot(runs_interval(value, runs, independent).half, error)
            combined[metric] = [value, half]
    combined["tasks"] = [float(sum(sample.tasks for sample in samples)), 0.0]
    combined["tasks_per_cpu_s"] = [combined["tasks"][0] / max(sum(sample.cpu_s for sample in samples), 1e-6), 0.0]
    return combined


def _quantile(samples: list[Sample], share: float) -> Interval:
    """A quantile of all responses, and half its interval: the share of responses beyond a value is a mean over batches, from which
    controls take chance out as from others, and the interval of that share leads to two other quantiles."""
    ordered = sorted(chain.from_iterable(sample.responses for sample in samples))
    value = quantile(ordered, share)
    beyond = []
    for sample in samples:
        run = sample.responses
        edges = [len(run) * batch // BATCHES for batch in range(BATCHES + 1)] if sample.batches else []
        beyond.append([sum(one > value for one in run[edge:to]) / (to - edge) for edge, to in pairwise(edges)])
    shift, error, runs = _explained(samples, beyond)
    width = math.hypot(batch_half_width(runs), error)
    middle = share + shift  # beyond the value lies more than it seems: the quantile is higher
    if width >= min(middle, 1 - middle):
        return Interval(value, math.inf)
    value = quantile(ordered, middle)
    return Interval(value, max(quantile(ordered, middle + width) - value, value - quantile(ordered, middle - width)))


def _explained(samples: list[Sample], batches: list[list[float]]) -> tuple[float, float, list[list[float]]]:
    """Take out of a metric's batches what control variates explain → by how much that changes the mean, half the interval of this
    change as far as means of the controls are estimates, and the batches, twice as long."""
    names = [name for name in (CONTROL, *REFERENCES) if all(name in sample.batches for sample in samples)]
    errors = [list(zip(*(sample.batches[name] for name in names), strict=True)) for sample in samples]
    if not names or any(len(run) != len(of_run) for run, of_run in zip(batches, errors, strict=True)):
        return 0.0, 0.0, [_merged(run) for run in batches]
    adjusted = controlled(batches, errors)
    shift = fmean(chain.from_iterable(adjusted)) - fmean(chain.from_iterable(batches))
    pairs = list(zip(chain.from_iterable(batches), chain.from_iterable(errors), strict=True))
    fit = dict(zip(names, slopes(pairs), strict=True)) if shift else {}
    variance = sum(
        (fit.get(name, 0.0) * sample.values.get(error, 0.0) / len(samples)) ** 2
        for sample in samples
        for name, error in zip(REFERENCES, ERRORS, strict=True)
    )
    return shift, NORMAL * math.sqrt(variance), [_merged(run) for run in adjusted]


def _merged(run: list[float]) -> list[float]:
    """Batches twice as long: the fit of what the queues explain needs many, their independence needs long ones."""
    return [fmean(run[place : place + 2]) for place in range(0, len(run), 2)]


def weight(parameters: Parameters) -> float:
    """A case's part of the time."""
    return LARGE_WEIGHT if int(parameters["N"]) > SMALL_NODES_MAX else 1.0


def limits(parameters: Parameters) -> tuple[int, int]:
    """→ tasks of a replication and replications, at most."""
    if int(parameters["N"]) <= SMALL_NODES_MAX:
        return SMALL_TASKS_MAX, SMALL_REPLICATIONS_MAX
    return LARGE_TASKS_MAX, LARGE_REPLICATIONS_MAX


def load_of(parameters: Parameters) -> float:
    """Load offered to a slot of speed 1."""
    setup = setup_of(parameters)
    speeds = setup.speeds or [1.0] * len(setup.slots)
    return sum(setup.rates) / sum(slots * speed for slots, speed in zip(setup.slots, speeds, strict=True))


def need(samples: list[Sample], under_way: int, load: float) -> float:
    """How many times too wide the widest interval is, and would be with those under way; not known before the first has
    ended. Of what grows for ever no mean will ever be narrow: one replication has shown it."""
    if not samples:
        return 0.0
    found = combine(samples, load)
    has_settled = any(sample.batches for sample in samples)
    if has_settled and found["last_tenth_mean_response"][0] >= GROWS * found["first_tenth_mean_response"][0]:
        return 0.0
    widest = max(found[metric][1] / (aim * found[metric][0]) for metric, aim in AIMS.items())
    return widest * math.sqrt(len(samples) / (len(samples) + under_way))


def service_names(parameters: Parameters) -> dict[str, Any]:
    """Name and parameters of a case's service times."""
    return {"service": str(parameters.get("service", "exp")), "parameters": parameters.get("service_params") or ()}


def _job(job: tuple[str, Parameters, int, int, float]) -> tuple[str, Sample]:
    case, parameters, seed, tasks, cpu_s = job
    setup, begun_s = setup_of(parameters), time.process_time()
    sample = replicate(
        setup, seed, tasks=tasks, cpu_s=cpu_s * PLAYED_SHARE, clock=time.monotonic, **service_names(parameters)
    )
    sample = msgspec.structs.replace(sample, cpu_s=time.process_time() - begun_s)
    return case, _with_looks(sample, setup.policies.sender)


def _with_looks(sample: Sample, placement: object) -> Sample:
    """A placement that draws from all nodes probes its own node, too, which no message shows."""
    probed = getattr(placement, "probed", 0)  # its class was made anew from its file
    if not probed:
        return sample
    share = 1 + getattr(placement, "looks", 0) / probed
    for metric in ("probes_per_task", "sender_probes_per_task"):
        sample.values[metric] *= share
        if metric in sample.batches:  # not of a run too short to settle
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
    run = _Run({case["id"]: case["params"] for case in playable}, budget_s, seed)
    run.play()
    return {
        case["id"]: combine(run.samples[case["id"]], load_of(case["params"]))
        for case in playable
        if run.samples[case["id"]]
    }


class _Run:
    """All replications of a run: first one of each case, the large ones first, then of whichever needs it most."""

    def __init__(self, cases: dict[str, Parameters], budget_s: float, seed: int) -> None:
        self.samples: dict[str, list[Sample]] = {case: [] for case in cases}
        self._cases = cases
        self._workers = min(os.cpu_count() or 1, 64)
        weights = sum(map(weight, cases.values()))
        self._first_s = budget_s * self._workers * FIRST_SHARE / max(weights, 1.0)
        self._until = time.monotonic() + budget_s
        self._seed = seed
        self._begun = dict.fromkeys(cases, 0)
        self._firsts = sorted(cases, key=lambda case: int(cases[case]["N"]))

    def _next(self) -> tuple[str, Parameters, int, int, float] | None:
        left_s = self._until - time.monotonic()
        if self._firsts:
            case = self._firsts.pop()
            cpu_s = min(self._first_s * weight(self._cases[case]), max(left_s, 0.0))
        else:
            open_ = [case for case in self._cases if self._begun[case] < limits(self._cases[case])[1]]
            lacking = {case: self._lacking_s(case) for case in open_}
            wanting = [case for case in open_ if lacking[case] > 0]
            case = min(wanting, key=lacking.__getitem__, default="")
            if not case or left_s < REPLICATION_S_MIN:
                return None
            cpu_s = min(left_s, max(lacking[case], self._settled_s(case), self._spent_s(case) / 2) * MORE)
        self._begun[case] += 1
        return case, self._cases[case], self._seed + self._begun[case] - 1, limits(self._cases[case])[0], cpu_s

    def _lacking_s(self, case: str) -> float:
        """Processor time that it probably takes until the intervals of a case are narrow enough: those that are nearest get theirs
        first, so that most cases have it in the end. 0: they are, or nothing is known yet."""
        samples = self.samples[case]
        wide = need(samples, self._begun[case] - len(samples), load_of(self._cases[case]))
        return max(min(wide, WIDE_MAX) ** 2 - 1, 0.0) * self._spent_s(case)

    def _spent_s(self, case: str) -> float:
        return sum(sample.cpu_s for sample in self.samples[case])

    def _settled_s(self, case: str) -> float:
        """Processor time of the shortest replication that settles."""
        samples = self.samples[case]
        rate = sum(setup_of(self._cases[case]).rates)
        each_s = self._spent_s(case) / max(sum(sample.tasks for sample in samples), 1)
        return 4 * WARM_UP_S * rate * each_s / PLAYED_SHARE

    def play(self) -> None:
        """As long as there is time and somebody needs it."""
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self._workers, mp_context=context, max_tasks_per_child=1) as pool:
            under_way: set[Future[tuple[str, Sample]]] = set()
            while True:
                while len(under_way) < self._workers and (job := self._next()) is not None:
                    under_way.add(pool.submit(_job, job))
                if not under_way:
                    return
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for future in done:
                    case, sample = future.result()
                    self.samples[case].append(sample)
                    sys.stderr.write(f"{case}: {sample.tasks} tasks in {sample.cpu_s:.1f} s\n")


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
