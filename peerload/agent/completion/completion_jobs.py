"""Completion jobs: what home does after the end of a task. It writes the output files (`submit -o`), and notifies
the user (`--notify`).

A job is written with the end of its task, so that no crash loses it, and removed when it is done: it may run twice, and
runs at least once. A job that fails is tried again some times, and then abandoned; both are events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from peerload.agent.completion.saving import FILES_FAILED, JobNotDue
from peerload.agent.runtime import BackgroundTasks
from peerload.agent.store.maintenance import JobDone, JobPostponed, due_jobs, jobs_of, next_job_due_at
from peerload.agent.store.schema import SINGLE, order_of
from peerload.model.actions import PutEvent
from peerload.model.errors import PeerloadError, StoreError
from peerload.model.submit_options import CompletionJob

if TYPE_CHECKING:
    from peerload.agent.completion.notify_hook import NotifyHooks
    from peerload.agent.completion.saving import OutputSaver
    from peerload.agent.runtime import AgentInfo, RunState
    from peerload.agent.store.maintenance import DueJob, MaintenanceRow
    from peerload.agent.store.store import Store
    from peerload.agent.store.write_ahead import EventLog
    from peerload.model.task import TaskRecord

log = logging.getLogger("peerload.agent")

AT_A_TIME = {CompletionJob.FILES: 4, CompletionJob.NOTIFY: 4}
TRIES_MAX = 8
"""Number of tries before a job is abandoned: some minutes."""
PAUSE_S, PAUSE_S_MAX = 1.0, 60.0
"""The pause before the second try; it doubles, up to the other."""
ENDS_SOON_S = 0.5
"""A cancelled task whose process has not gone yet is looked at again after this: that is no try."""
IDLE_S_MAX = 3600.0
OUTCOMES_MAX = 4096
"""Bound on the tasks whose file outcome is kept in memory; that of others is read from their events, …"""
EVENTS_LOOKED_AT_MAX = 16
"""… at most this many of a task, from the last on."""


class CompletionJobs:
    """One per agent; from the loop's thread only."""

    def __init__(
        self, info: AgentInfo, store: Store, journal: EventLog, run: RunState, saving: OutputSaver, notices: NotifyHooks
    ) -> None:
        self._info = info
        self._store = store
        self._journal = journal
        self._background = BackgroundTasks(run)
        self._saving = saving
        self._notices = notices
        self._news = asyncio.Event()
        self._under_way: dict[int, CompletionJob] = {}
        self._tried = asyncio.Event()
        self._outcomes: dict[tuple[int, int], tuple[str, str]] = {}

    def wake(self) -> None:
        """Look for jobs now."""
        self._news.set()

    async def run(self) -> None:
        """Do what is due as it comes, until cancelled; what is under way then is done again by the next agent."""
        try:
            while True:
                self._news.clear()
                try:
                    pause_s = self._begin_due()
                except StoreError as error:
                    log.warning("cannot read pending completion jobs: error=%s", error)
                    pause_s = PAUSE_S_MAX
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._news.wait()
        finally:
            await self._background.close()

    def _begin_due(self) -> float:
        """Begin what there is room for → after how many seconds to look again."""
        store, now = self._store, time.time()
        busy = set(self._under_way)
        for kind, most in AT_A_TIME.items():
            room = most - sum(other is kind for other in self._under_way.values())
            for job in due_jobs(store, kind, now, room, busy) if room > 0 else ():
                self._begin(job)
        next_at = next_job_due_at(store)
        if next_at is None:
            return IDLE_S_MAX
        # One that is due and waits for room is begun when another is done, which wakes us.
        return min(next_at - now, IDLE_S_MAX) if next_at > now else PAUSE_S

    def _begin(self, job: DueJob) -> None:
        self._under_way[job.number] = job.kind
        self._background.start(self._carry_out(job))

    async def saved(self, record: TaskRecord) -> tuple[str, str]:
        """Outcome of writing the output files of an ended task: the state of the event, and why. Waits until that was tried.
        "": it wrote none."""
        counter, member = order_of(record.task)
        while True:
            self._tried.clear()
            job = jobs_of(self._store, counter, member)
            ours = [one for one in job if one.kind is CompletionJob.FILES and one.member == member]
            if not ours:
                return self._outcome(record.task, (counter, member))
            if ours[0].tries:
                return "postponed", ours[0].why
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_S):
                    await self._tried.wait()

    def _outcome(self, task: str, place: tuple[int, int]) -> tuple[str, str]:
        if place in self._outcomes:
            return self._outcomes[place]
        found = self._store.events(0, EVENTS_LOOKED_AT_MAX, newest=True, what=("chore",), tasks=(task,))
        return next(
            ((one.state, one.reason) for one in reversed(found) if _is_of_files(one.state, one.reason)), ("", "")
        )

    async def _carry_out(self, job: DueJob) -> None:
        try:
            await self._try(job)
        finally:
            del self._under_way[job.number]
            self._news.set()
            self._tried.set()

    async def _try(self, job: DueJob) -> None:
        runner = self._saving if job.kind is CompletionJob.FILES else self._notices
        try:
            state, reason = await runner.carry_out(job)
        except JobNotDue:
            await self._keep(JobPostponed(job.number, job.tries, time.time() + ENDS_SOON_S, job.why))
        except (OSError, PeerloadError) as error:
            why = str(error) or type(error).__name__
            await self._failed(job, (error.strerror or why) if isinstance(error, OSError) else why)
        else:
            if state:
                self._tell(job, state, reason)
            await self._keep(JobDone(job.number))

    async def _failed(self, job: DueJob, why: str) -> None:
        tries = job.tries + 1
        if tries >= TRIES_MAX:
            self._tell(job, "abandoned", f"{FAILURES[job.kind]}: {why} ({tries} tries)")
            await self._keep(JobDone(job.number))
            return
        pause_s = min(PAUSE_S * 2.0**job.tries, PAUSE_S_MAX)
        if not job.tries:
            self._tell(job, "postponed", f"{FAILURES[job.kind]}: {why}; it is tried again")
        await self._keep(JobPostponed(job.number, tries, time.time() + pause_s, why[:500]))

    def _tell(self, job: DueJob, state: str, reason: str) -> None:
        if _is_of_files(state, reason):
            self._outcomes[job.counter, job.member] = state, reason
            if len(self._outcomes) > OUTCOMES_MAX:
                del self._outcomes[next(iter(self._outcomes))]
        log.log(
            logging.WARNING if state in ("abandoned", "incomplete") else logging.INFO,
            "%s: %s %s",
            self._name(job),
            state,
            reason,
        )
        self._journal.note(PutEvent(time.time(), "chore", state, task=self._name(job), reason=reason))

    def _name(self, job: DueJob) -> str:
        return f"{self._info.config.node}/{job.counter}" + (f".{job.member}" if job.member != SINGLE else "")

    async def _keep(self, row: MaintenanceRow) -> None:
        """Durable when it returns."""
        kept = asyncio.Event()
        self._store.persist((row,), kept.set)
        await kept.wait()


def _is_of_files(state: str, reason: str) -> bool:
    return state in ("saved", "incomplete") or reason.startswith(FILES_FAILED)


FAILURES = {CompletionJob.FILES: FILES_FAILED, CompletionJob.NOTIFY: "its user could not be notified"}
