"""Replications of scenarios, run in parallel in worker processes, and their progress."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
import traceback
from itertools import takewhile
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING

from peerload.cli.common.output import Bar
from peerload.model.errors import PeerloadError
from peerload.sim.scenario import play

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from types import FrameType

    from peerload.sim.replication import Sample
    from peerload.sim.scenario import Scenario

    Job = tuple[int, int, int]
    """Number of the scenario, seed, and number of the replication."""
    Done = tuple[int, int, Sample]
    """Number of the scenario, number of the replication, and its sample."""

END_S = 10.0
"""Time that a worker may take to end after it closed its connection."""
LINES_EVERY_S = 30.0
"""Time between two lines of progress where stderr is not a terminal."""


class Progress:
    """Progress of all simulations of a command on stderr: a bar on a terminal, else an occasional line in a long run."""

    def __init__(self) -> None:
        self._bar = Bar(lines_every_s=LINES_EVERY_S)
        self._passed = self._total = 0

    def expect(self, tasks: int) -> None:
        self._total += tasks

    def add(self, tasks: int) -> None:
        self._passed += tasks
        self._bar.show(self._passed, 0, self._total)

    def clear(self) -> None:
        """Erase the bar on a terminal."""
        self._bar.clear()


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in `run`. samples: for each scenario, its first replications up to the first incomplete one."""

    def __init__(self, samples: list[list[Sample]]) -> None:
        super().__init__()
        self.samples = samples


def run(
    scenarios: Sequence[Scenario],
    replications: int,
    seed: int,
    workers: int,
    first: int = 0,
    progress: Progress | None = None,
    finished: Callable[[int, list[Sample]], None] = lambda _index, _samples: None,
) -> list[list[Sample]]:
    """Run all scenarios → the samples of this many replications of each, from number ``first`` on, which do not depend on
    the number of workers. ``finished`` is called with the index and the samples of each scenario as soon as it has all of them.
    Ctrl-C ends the workers and raises Interrupted; an error in a worker is raised here."""
    progress = progress or Progress()
    jobs = [(index, seed, number) for index in range(len(scenarios)) for number in range(first, first + replications)]
    jobs.sort(key=lambda job: -_cost(scenarios[job[0]]))  # the long ones first, so that no worker is idle at the end
    found: list[list[Sample | None]] = [[None] * replications for _ in scenarios]
    progress.expect(replications * sum(scenario.tasks for scenario in scenarios))

    try:
        for index, number, sample in _done(scenarios, jobs, min(workers, len(jobs)), progress.add):
            found[index][number - first] = sample
            if None not in found[index]:
                finished(index, _complete(found[index]))
    except KeyboardInterrupt:
        raise Interrupted([_complete(samples) for samples in found]) from None
    finally:
        progress.clear()
    return [_complete(samples) for samples in found]


def _complete(samples: Sequence[Sample | None]) -> list[Sample]:
    """The samples before the first missing one, so that the samples of compared scenarios stay paired."""
    return [sample for sample in takewhile(lambda sample: sample is not None, samples) if sample is not None]


def _cost(scenario: Scenario) -> float:
    return scenario.tasks * (1 + (scenario.load or 1.0))  # the higher the load, the more probes


def _done(scenarios: Sequence[Scenario], jobs: list[Job], workers: int, add: Callable[[int], object]) -> Iterator[Done]:
    if workers == 1:
        yield from (_play(scenarios, job, add) for job in jobs)
        return
    left = iter(jobs)
    as_bytes = bytes(ForkingPickler.dumps(scenarios))  # once for all workers: a trace may be long
    with _workers(workers) as processes:
        for connection, process in processes.items():
            with _watched(process):
                connection.send_bytes(as_bytes)
                connection.send(next(left))
        busy = dict(processes)
        while busy:
            ready = wait(list(busy))
            for connection, process in [(one, of) for one, of in busy.items() if one in ready]:
                with _watched(process):
                    said: int | Done | Exception = connection.recv()
                if isinstance(said, int):
                    add(said)
                    continue
                if isinstance(said, Exception):
                    raise said
                job = next(left, None)
                if job is None:
                    del busy[connection]
                    connection.close()  # the worker ends, which frees its memory for the others
                else:
                    with _watched(process):
                        connection.send(job)
                yield said


@contextlib.contextmanager
def _workers(number: int) -> Iterator[dict[Connection, BaseProcess]]:
    """Start worker processes → the connections to them. They share nothing, not even a lock, so that the death of
    one does not block the others. They are always ended on exit."""
    context = multiprocessing.get_context("spawn")
    started: dict[Connection, BaseProcess] = {}
    try:
        with _ignoring_interrupts():
            for _ in range(number):
                ours, theirs = context.Pipe()
                with theirs:  # close the worker's end in this process, so that the worker's death is detected
                    process: BaseProcess = context.Process(target=_work, args=(theirs,), daemon=True)
                    process.start()
                started[ours] = process
        yield started
    finally:
        for process in started.values():
            process.kill()
        for connection, process in started.items():
            process.join()
            connection.close()


@contextlib.contextmanager
def _watched(process: BaseProcess) -> Iterator[None]:
    """Raise an error that names the cause if the worker is dead."""
    try:
        yield
    except (EOFError, OSError):
        process.join(END_S)
        raise _death(process.exitcode) from None


def _death(code: int | None) -> PeerloadError:
    who, hint = "a simulation process", "for a traceback:  peerload --debug sim --workers 1 …"
    if code is None:
        return PeerloadError(f"{who} stopped answering", hint=hint)
    if code >= 0:
        return PeerloadError(f"{who} ended by itself ({code})", hint=hint)
    if code != -signal.SIGKILL:
        return PeerloadError(f"{who} was killed (signal {-code})", hint=hint)
    return PeerloadError(
        f"{who} was killed (signal {-code}); is there enough memory?", hint="fewer --workers or --tasks"
    )


def _work(connection: Connection) -> None:
    """Main function of a worker: receives the scenarios, then jobs one at a time; sends progress and the
    result of each job."""
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has ended
        scenarios: Sequence[Scenario] = connection.recv()
        while True:
            job: Job = connection.recv()
            try:
                connection.send(_play(scenarios, job, connection.send))
            except PeerloadError as error:  # as text: not every error can be pickled
                connection.send(PeerloadError(str(error), hint=error.hint))
            except Exception as error:  # noqa: BLE001 -- raised again in the parent
                error.add_note(traceback.format_exc())
                connection.send(error)


def _play(scenarios: Sequence[Scenario], job: Job, passed: Callable[[int], object]) -> Done:
    index, seed, number = job
    return index, number, play(scenarios[index], seed, number, clock=time.process_time, passed=passed)


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Processes started in this context ignore Ctrl-C: their parent ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Context in which SIGTERM raises KeyboardInterrupt, like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
