"""Runs the replications of scenarios, side by side in processes of their own, and tells how far they are."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Self

from peerload.model.errors import PeerloadError
from peerload.sim.scenario import play

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.sharedctypes import Synchronized
    from types import FrameType

    from peerload.sim.scenario import Scenario
    from peerload.sim.statistics import Sample

    Job = tuple[int, int, int]
    """Which scenario, the seed, which replication."""
    Done = tuple[int, int, Sample | None, tuple[str, str]]
    """Which scenario, which replication, its sample, or what went wrong and the hint."""

LOOK_S = 0.2
"""How often progress is looked at."""
BAR_WIDTH = 30

_worker: tuple[Sequence[Scenario], Callable[[int], object]] = ((), int)
"""What a worker was started with: a process of a pool has nowhere else to keep that."""


def run(scenarios: Sequence[Scenario], replications: int, seed: int, workers: int) -> list[list[Sample]]:
    """For each scenario the samples of its replications, which do not depend on the number of workers. Ctrl-C and
    SIGTERM end the workers and raise KeyboardInterrupt; what goes wrong in one is raised here."""
    jobs = [(index, seed, number) for index in range(len(scenarios)) for number in range(replications)]
    jobs.sort(key=lambda job: -_cost(scenarios[job[0]]))  # the long ones first, so that nobody is idle at the end
    found: list[list[Sample | None]] = [[None] * replications for _ in scenarios]
    total = replications * sum(scenario.tasks for scenario in scenarios)
    with _interruptible(), Progress(total) as progress:
        for index, number, sample, (what, hint) in _done(scenarios, jobs, min(workers, len(jobs)), progress):
            if sample is None:
                raise PeerloadError(what, hint=hint)
            found[index][number] = sample
    return [[sample for sample in samples if sample is not None] for samples in found]


def _cost(scenario: Scenario) -> float:
    return scenario.tasks * (1 + (scenario.load or 1.0))  # the fuller, the more probes


def _done(scenarios: Sequence[Scenario], jobs: list[Job], workers: int, progress: Progress) -> Iterator[Done]:
    if workers == 1:
        _begin(scenarios, progress.add)
        yield from map(_job, jobs)
        return
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q")
    with _deaf_children():
        pool = context.Pool(workers, _begin_worker, (scenarios, counter))
    with pool:  # ends the workers, whatever happens
        results = pool.imap_unordered(_job, jobs)
        left = len(jobs)
        while left:
            try:
                done = results.next(timeout=LOOK_S)
            except multiprocessing.TimeoutError:
                progress.reach(counter.value)
                continue
            left -= 1
            yield done


def _begin_worker(scenarios: Sequence[Scenario], counter: Synchronized[int]) -> None:
    def passed(tasks: int) -> None:
        with counter.get_lock():
            counter.value += tasks

    _begin(scenarios, passed)


def _begin(scenarios: Sequence[Scenario], passed: Callable[[int], object]) -> None:
    global _worker  # noqa: PLW0603 -- see there
    _worker = scenarios, passed


def _job(job: Job) -> Done:
    index, seed, number = job
    all_scenarios, passed = _worker
    try:
        return index, number, play(all_scenarios[index], seed, number, clock=time.process_time, passed=passed), ("", "")
    except PeerloadError as error:  # as words: not every error survives the way between processes
        return index, number, None, (str(error), error.hint)


@contextlib.contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes started here do not hear Ctrl-C: their parent ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends what Ctrl-C ends."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class Progress:
    """A bar on stderr, if that is a terminal: how many of so many tasks have come, and how long the rest may take."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._so_far = 0
        self._shown_s = 0.0
        self._started_s = time.monotonic()
        self._is_shown = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def __enter__(self) -> Self:
        """Nothing is drawn before there is something to tell."""
        return self

    def __exit__(self, *_raised: object) -> None:
        """The line is left clean."""
        if self._is_shown and self._shown_s:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def add(self, tasks: int) -> None:
        """So many more."""
        self.reach(self._so_far + tasks)

    def reach(self, tasks: int) -> None:
        """So many in all."""
        self._so_far = tasks
        now_s = time.monotonic()
        if not self._is_shown or now_s - self._shown_s < LOOK_S:
            return
        self._shown_s = now_s
        share = min(self._so_far / self._total, 1.0)
        passed_s = now_s - self._started_s
        left = f"{passed_s / share - passed_s:.0f} s left" if share > 0.01 else ""  # noqa: PLR2004 -- a guess needs a base
        bar = ("#" * round(BAR_WIDTH * share)).ljust(BAR_WIDTH, ".")
        sys.stderr.write(f"\r\x1b[K{bar} {share:4.0%}  {self._so_far:,} of {self._total:,} tasks  {left}")
        sys.stderr.flush()
