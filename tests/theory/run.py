"""`python -m tests.theory.run --cases FILE --out FILE --budget-s N`: play reference cases, write what came out.

FILE holds ``{"cases": [{"id", "params", …}, …]}``; the result is ``{id: {metric: [value, 95 % half width]}}``. The
budget is the time of the whole run; all processors work on it. Every case gets its share, and then those more whose
intervals are nearest to narrow enough, until they are. Of each figure, what the arrivals and simple queues with the same tasks
explain is taken out (control variates). Cases that cannot be played yet are named, with the reason, and left out.
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
    BEYOND_MIN,
    INDEPENDENT_TASKS_MIN,
    Interval,
    batch_half_width,
    half_width,
    has_few_beyond,
    independent_of,
    runs_interval,
)
from peerload.sim.replication import CONTROL, QUANTILES, WARM_UP_S, Sample, quantile
from tests.theory.control_variates import NOTHING_NEW, controlled
from tests.theory.mapping import NotYet, Parameters, setup_of
from tests.theory.replicate import ALONE, BATCHES, CONTROLS, replicate

SMALL_NODES_MAX = 100
SMALL_TASKS_MAX, SMALL_REPLICATIONS_MAX = 200_000, 10
LARGE_TASKS_MAX, LARGE_REPLICATIONS_MAX = 1_000_000, 5
"""At most so many tasks a replication, and so many replications."""
LARGE_WEIGHT = 3.0
"""A large case gets so many times the time of a small one: each of its tasks costs more, and it warms up slower."""
FIRST_SHARE = 0.5
"""Of the time for the first replication of every case; the rest goes where the intervals are widest."""
AIMS = {
    "mean_response": 0.02,
    "p95": 0.03,
    "p99": 0.08,
    "transfers_per_task": 0.04,
    "probes_per_task": 0.04,
    "mean_response_executed_at_origin": 0.04,
    "mean_response_executed_remotely": 0.04,
}
"""A case is done when the half widths of these are within such a share of the value."""
MORE, WIDE_MAX = 1.2, 30.0
"""More time than is probably lacking, since that is a guess; how much too wide an interval counts at most (it may be infinite)."""
ROOM = 1.1
"""More tasks than it takes for an interval: how many are independent is an estimate."""
GROWS = 3.0
"""Responses at the end are so many times those at the start where a system is not stable; chance makes 1.5 times of it where a queue
forgets slowly."""
REPLICATION_S_MIN = 3.0
"""With less time left no further replication is begun."""
PLAYED_SHARE = 0.8
"""Of the wall time of a replication, for the tasks that were asked for: its process starts before, its last tasks end after."""
LONG, LONGER_MAX = 2, 2.0
"""Batches are merged by so many; a run with control variates counts at most as one so many times as long."""
QUANTILE_STEPS = 3
"""Steps in which a quantile is found."""
METRICS_OF_THE_WHOLE = ("first_tenth_mean_response", "last_tenth_mean_response")


def combine(samples: list[Sample], load: float = 0.0) -> dict[str, list[float]]:
    """metric → [mean of the replications, half width of the 95 % interval from the spread of all batches], by the rules of
    the simulator. load: offered to a slot of speed 1; 0: no interval is refused for too few independent tasks."""
    combined: dict[str, list[float]] = {}
    everything, samples = (
        samples,
        [sample for sample in samples if sample.batches] or samples,
    )  # those that settled, if any
    independent = independent_of(samples, load)
    for metric in (name for name in samples[0].values if name != CONTROL):
        known = [sample for sample in samples if metric in sample.values]
        if metric in METRICS_OF_THE_WHOLE:
            values = [sample.values[metric] for sample in known]
            combined[metric] = [fmean(values), half_width(values)]
        elif metric in QUANTILES:
            found = _quantile(samples, QUANTILES[metric], independent)
            combined[metric] = [found.value, found.half]
        else:
            mean = _mean(known, [sample.batches.get(metric) or [sample.values[metric]] for sample in known])
            value = fmean(sample.values[metric] for sample in known) + mean.shift
            half = batch_half_width(mean.runs)
            if half > NOTHING_NEW * value:  # else known queues explain all of it, however short the run
                half = math.hypot(runs_interval(value, mean.runs, independent * mean.longer).half, mean.error)
            combined[metric] = [value, half]
    combined["tasks"] = [float(sum(sample.tasks for sample in everything)), 0.0]
    combined["tasks_per_cpu_s"] = [combined["tasks"][0] / max(sum(sample.cpu_s for sample in everything), 1e-6), 0.0]
    return combined


def _quantile(samples: list[Sample], share: float, independent: float) -> Interval:
    """A quantile of all responses, and half its interval: the share of responses beyond a value is a mean over batches, from which
    controls take chance out as from others, and the interval of that share leads to two other quantiles. The value is that beyond which
    just enough lies when chance is taken out."""
    ordered = sorted(chain.from_iterable(sample.responses for sample in samples))
    place, width = share, math.inf
    for _ in range(QUANTILE_STEPS):
        value = quantile(ordered, place)
        mean = _mean(samples, [_beyond(sample, value) for sample in samples])
        width = math.hypot(batch_half_width(mean.runs), mean.error)
        step = fmean(chain.from_iterable(mean.runs)) - (1 - share) if mean.runs[0] else 0.0
        if width >= min(place, 1 - place) or not 0 < place + step < 1:
            return Interval(quantile(ordered, share), math.inf)
        place += step
    low, high = quantile(ordered, max(place - width, 0.0)), quantile(ordered, min(place + width, 1.0))
    value = quantile(ordered, place)
    is_short = has_few_beyond(independent, share) or place + width >= 1
    return Interval(value, math.inf if is_short else max(high - value, value - low))


def _beyond(sample: Sample, value: float) -> list[float]:
    """Share of the responses beyond this value in each batch."""
    run = sample.responses
    edges = [len(run) * batch // BATCHES for batch in range(BATCHES + 1)] if sample.batches else []
    return [sum(one > value for one in run[edge:to]) / (to - edge) for edge, to in pairwise(edges)]


class _Mean(msgspec.Struct, frozen=True):
    """What control variates leave of a metric: its batches, LONG times as long; by how much its mean changes; half the interval of
    this change as far as means of the controls are estimates; the factor by which a run would be longer that is as exact without them."""

    runs: list[list[float]]
    shift: float = 0.0
    error: float = 0.0
    longer: float = 1.0


def _mean(samples: list[Sample], batches: list[list[float]]) -> _Mean:
    """Take out of a metric's batches what control variates explain."""
    plain = _Mean([_merged(run) for run in batches])
    names = [name for name in (CONTROL, *CONTROLS) if all(name in sample.batches for sample in samples)]
    by_name = {name: [sample.batches[name] for sample in samples] for name in names}
    if not names or any(
        len(run) != len(other) for runs in by_name.values() for run, other in zip(batches, runs, strict=True)
    ):
        return plain
    found = controlled(batches, by_name)
    if not found.slopes:
        return plain
    runs = [_merged(run) for run in found.runs]
    errors = []
    for sample in samples:
        estimated = [(slope, sample.batches.get(name + ALONE, ())) for name, slope in found.slopes.items()]
        parts = [[slope * value for value in values] for slope, values in estimated if values]
        errors.append(batch_half_width([[sum(values) for values in zip(*parts, strict=True)]]) if parts else 0.0)
    error = math.hypot(*errors) / len(samples)
    half, whole = batch_half_width(plain.runs), math.hypot(batch_half_width(runs), error)
    if whole >= half:
        return plain
    shift = fmean(chain.from_iterable(found.runs)) - fmean(chain.from_iterable(batches))
    longer = min((half / whole) ** 2, LONGER_MAX) if whole and half < math.inf else LONGER_MAX
    return _Mean(runs, shift, error, longer)


def _merged(run: list[float]) -> list[float]:
    """Batches LONG times as long: the fit of what the queues explain needs many, their independence needs long ones."""
    return [fmean(run[place : place + LONG]) for place in range(0, len(run), LONG)]


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


def need(samples: list[Sample], load: float) -> float:
    """How many times too wide the widest interval is. Of what grows for ever no mean will ever be narrow: one replication has shown
    it."""
    found = combine(samples, load)
    has_settled = any(sample.batches for sample in samples)
    if has_settled and found["last_tenth_mean_response"][0] >= GROWS * found["first_tenth_mean_response"][0]:
        return 0.0
    independent = independent_of(samples, load)
    wide = [0.0]
    for metric, aim in AIMS.items():
        value, half = found.get(metric, (0.0, 0.0))
        if math.isfinite(half):
            wide.append(half / (aim * value) if value > 0 else 0.0)
            continue
        least = BEYOND_MIN / (1 - QUANTILES[metric]) if metric in QUANTILES else INDEPENDENT_TASKS_MIN
        is_short = least > independent
        wide.append(ROOM * math.sqrt(least / independent) if is_short else WIDE_MAX)
    return max(wide)


def service_names(parameters: Parameters) -> dict[str, Any]:
    """Name and parameters of a case's service times."""
    return {"service": str(parameters.get("service", "exp")), "parameters": parameters.get("service_params") or ()}


def _job(job: tuple[str, Parameters, int, int, float]) -> tuple[str, Sample, float]:
    """→ the case, its sample, and the time that it took."""
    case, parameters, seed, tasks, cpu_s = job
    setup, begun_s, begun_at = setup_of(parameters), time.process_time(), time.monotonic()
    sample = replicate(
        setup, seed, tasks=tasks, cpu_s=cpu_s * PLAYED_SHARE, clock=time.monotonic, **service_names(parameters)
    )
    sample = msgspec.structs.replace(sample, cpu_s=time.process_time() - begun_s)
    return case, _with_looks(sample, setup.policies.sender), time.monotonic() - begun_at


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
        self._needs = dict.fromkeys(cases, 0.0)
        self._spent_s = dict.fromkeys(cases, 0.0)
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
            cpu_s = min(left_s, max(lacking[case], self._settled_s(case), self._spent_s[case] / 2) * MORE)
        self._begun[case] += 1
        return case, self._cases[case], self._seed + self._begun[case] - 1, limits(self._cases[case])[0], cpu_s

    def _lacking_s(self, case: str) -> float:
        """Time of a processor that it probably takes until the intervals of a case are narrow enough: those that are nearest get theirs
        first, so that most cases have it in the end. 0: they are, or nothing is known yet."""
        count = len(self.samples[case])
        if count and not any(sample.batches for sample in self.samples[case]):
            return self._settled_s(case)
        wide = self._needs[case] * math.sqrt(count / max(self._begun[case], 1))  # less by those under way
        return max(min(wide, WIDE_MAX) ** 2 - 1, 0.0) * self._spent_s[case]

    def _settled_s(self, case: str) -> float:
        """Time of the shortest replication that settles."""
        samples = self.samples[case]
        rate = sum(setup_of(self._cases[case]).rates)
        each_s = self._spent_s[case] / max(sum(sample.tasks for sample in samples), 1)
        return 4 * WARM_UP_S * rate * each_s / PLAYED_SHARE

    def add(self, case: str, sample: Sample, took_s: float) -> None:
        """Keep a replication, and find out what its case lacks now."""
        self.samples[case].append(sample)
        self._spent_s[case] += took_s
        self._needs[case] = need(self.samples[case], load_of(self._cases[case]))

    def play(self) -> None:
        """As long as there is time and somebody needs it."""
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self._workers, mp_context=context, max_tasks_per_child=1) as pool:
            under_way: set[Future[tuple[str, Sample, float]]] = set()
            while True:
                while len(under_way) < self._workers and (job := self._next()) is not None:
                    under_way.add(pool.submit(_job, job))
                if not under_way:
                    return
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for future in done:
                    case, sample, took_s = future.result()
                    self.add(case, sample, took_s)
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
