"""Clients that submit, and never give up: the same token again until it is acknowledged, whatever happens to agents.

Some hang up before they have read their answer, some cancel what they have submitted. What was acknowledged is kept,
for the verdict.
"""

from __future__ import annotations

import collections
import random
import secrets
import threading
from typing import TYPE_CHECKING, NamedTuple

from peerload.client.connection import AgentConnection, accepted
from peerload.model.errors import AgentUnavailable, BadRequest
from tests.chaos_real.machine import spec
from tests.chaos_real.verdict import Asked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from tests.chaos_real.ledger import Ledger
    from tests.chaos_real.machine import Machine

ANSWER_S_MAX = 4.0
PAUSE_S = 0.1
NOT_NOW = frozenset({"slow-down", "disk-full", "never-runnable"})
"""Refusals that are over when the faults are: the last where no other node is known yet."""
HANG_UP_CHANCE = 0.1
ELSEWHERE_CHANCE = 0.4
CANCEL_CHANCE = 0.01
DETACHED_CHANCE = 0.03
_LENGTHS: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = (
    ((5, 80), (10, 60)),
    ((300, 1500), (2, 12)),
    ((3000, 20_000), (1, 4)),
)
"""Short, longer and long jobs: how long in milliseconds, how many tasks in one."""


class Job(NamedTuple):
    """One submit, under its token."""

    token: str
    members: int
    milliseconds: int
    guarantee: str
    detached: bool
    is_to_be_cancelled: bool
    runs_elsewhere: bool
    """Anywhere but at its home."""


class Work:
    """All jobs of a campaign, and what became of them. Every method may be called from any thread. ``drawn_max``: so many
    tasks may have been drawn by now, not counting bursts."""

    def __init__(
        self, program: Path, ledger: Ledger, tasks: int, seed: int, guarantees: Sequence[str], long_percent: int
    ) -> None:
        self.ledger = ledger
        self.tasks = tasks
        self.drawn_max = 0
        self.clients_gone = 0
        self._program = program
        self._often = (100 - 2 * long_percent, long_percent, long_percent)
        self._guarantees = guarantees
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._drawn = 0
        self._asked: dict[str, Asked] = {}
        self._tokens: dict[str, str] = {}

    def draw(self) -> Job | None:
        """The next job; None when as many tasks have been drawn as may be by now."""
        with self._lock:
            if self._drawn >= min(self.drawn_max, self.tasks):
                return None
            chance = self._chance
            lengths, counts = chance.choices(_LENGTHS, self._often)[0]
            job = Job(
                token=secrets.token_hex(16),
                members=min(chance.randint(*counts), self.tasks - self._drawn),
                milliseconds=chance.randint(*lengths),
                guarantee=chance.choices(self._guarantees, [90, *[5] * (len(self._guarantees) - 1)])[0],
                detached=chance.random() < DETACHED_CHANCE,
                is_to_be_cancelled=chance.random() < CANCEL_CHANCE,
                runs_elsewhere=chance.random() < ELSEWHERE_CHANCE,
            )
            self._drawn += job.members
            return job

    def single(self) -> Job | None:
        """A job of one short task; None when all tasks have been drawn."""
        with self._lock:
            if self._drawn >= self.tasks:
                return None
            self._drawn += 1
            return Job(secrets.token_hex(16), 1, 20, "at-least-once", False, False, False)

    def request(self, job: Job, home: str) -> dict[str, object]:
        """The fields of a job's submit at that node."""
        words = [str(self._program), str(self.ledger.path), str(job.milliseconds), "0"]
        fields: dict[str, object] = {} if job.guarantee == "at-least-once" else {"guarantee": job.guarantee}
        if job.runs_elsewhere:
            fields["placement"] = {"exclude": [home]}
        return {
            "token": job.token,
            "spec": spec([*words, "detached"] if job.detached else words, **fields),
            "array": [[1, job.members, 1]] if job.members > 1 else [],
        }

    def acknowledged(self, job: Job, task: str) -> None:
        """Keep what an agent has acknowledged."""
        names = [f"{task}.{member}" for member in range(1, job.members + 1)] if job.members > 1 else [task]
        with self._lock:
            for name in names:
                is_new = self._tokens.setdefault(name, job.token) == job.token
                self._asked[name] = Asked(
                    name, job.guarantee, is_reused=not is_new, may_be_cancelled=job.is_to_be_cancelled
                )

    def cancelled(self, tasks: Iterable[str]) -> None:
        """Keep what cancels an agent has acknowledged."""
        with self._lock:
            for task in tasks:
                self._asked[task] = self._asked[task]._replace(is_cancelled=True)

    @property
    def asked(self) -> list[Asked]:
        """Every task that was acknowledged so far."""
        with self._lock:
            return list(self._asked.values())

    @property
    def progress(self) -> float:
        """The share of the tasks that was drawn."""
        return self._drawn / self.tasks

    @property
    def is_all_drawn(self) -> bool:
        """Whether nothing is left to be submitted for the first time."""
        return self._drawn >= self.tasks

    @property
    def waiting(self) -> int:
        """About so many acknowledged tasks have not come to an end yet."""
        return len(self._asked) - len(self.ledger.stopped)


class Submitter:
    """The clients at one machine, one at a time. While ``held`` is set nothing new is submitted there."""

    def __init__(self, machine: Machine, work: Work, seed: int) -> None:
        self.machine = machine
        self.over = threading.Event()
        self.held = threading.Event()
        self._work = work
        self._chance = random.Random(f"{seed} {machine.node}")
        self._jobs: collections.deque[Job] = collections.deque()
        self._thread = threading.Thread(target=self._run, name=f"clients of {machine.node}")
        self._is_abandoned = False
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def abandon(self) -> None:
        """Let go of everything."""
        self.over.set()
        self._is_abandoned = True
        self._thread.join()

    def end(self) -> None:
        """Return when all that was drawn is acknowledged."""
        self.over.set()
        self.held.clear()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        pause = threading.Event()
        try:
            while not self._is_abandoned and (self._jobs or not self.over.is_set()):
                if not self._jobs and not self.held.is_set() and (job := self._work.draw()) is not None:
                    self._jobs.append(job)
                if not self._jobs or not self._submit(self._jobs[0]):
                    pause.wait(PAUSE_S)
        except BaseException as error:  # noqa: BLE001 -- raised again by `end`
            self.failure = error

    def _submit(self, job: Job) -> bool:
        """One try; whether it was acknowledged."""
        request = self._work.request(job, self.machine.node)
        try:
            with AgentConnection(self.machine.socket, timeout_s=ANSWER_S_MAX) as client:
                if self._chance.random() < HANG_UP_CHANCE:
                    client.send("submit", **request)
                    self._work.clients_gone += 1
                    return False
                task = client.call("submit", **request)["id"]
                self._jobs.popleft()
                self._work.acknowledged(job, task)
                if job.is_to_be_cancelled:
                    self._work.cancelled(client.call("cancel", tasks=[task])["cancelled"])
        except AgentUnavailable:
            return False
        except BadRequest as error:
            if error.code in NOT_NOW:
                return False
            raise
        return True

    def burst(self, count: int) -> Iterator[int]:
        """Submit so many single tasks over one connection and yield how many are acknowledged, after each; what is not
        when the agent goes away (or nobody asks on) is submitted again later."""
        jobs = [job for job in (self._work.single() for _ in range(count)) if job is not None]
        sent: dict[int, Job] = {}
        done = 0
        try:
            with AgentConnection(self.machine.socket, timeout_s=ANSWER_S_MAX) as client:
                while jobs:
                    sent[client.send("submit", **self._work.request(jobs[-1], self.machine.node))] = jobs[-1]
                    jobs.pop()
                while sent:
                    number, kind, body = client.receive()
                    if (job := sent.get(number)) is not None:
                        self._work.acknowledged(job, accepted(kind, body)["id"])
                        del sent[number]
                        done += 1
                        yield done
        except AgentUnavailable:
            return
        finally:
            self._jobs.extend([*jobs, *sent.values()])
