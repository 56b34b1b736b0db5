"""What home owes for tasks that have ended: the files with their output (`submit -o`), and a word to their user
(`--notify`).

What is owed was written with the task's end, so that no crash loses it, and is taken out when it is done: it may be done
twice, never not at all. What cannot be done is tried again a number of times, and given up then; each is an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from peerload.agent.background import BackgroundTasks
from peerload.agent.completion.saving import FILES_FAILED, JobPostponed
from peerload.agent.store import jobs
from peerload.agent.store.pruning import ChoreDone, ChorePostponed
from peerload.agent.store.rows import SINGLE, order_of
from peerload.model.actions import PutEvent
from peerload.model.errors import PeerloadError, StoreError
from peerload.model.submit_options import CompletionJob

if TYPE_CHECKING:
    from peerload.agent.completion.notify_hook import NotifyHooks
    from peerload.agent.completion.saving import OutputSaver
    from peerload.agent.node_info import NodeInfo
    from peerload.agent.run_state import RunState
    from peerload.agent.store.event_log import EventLog
    from peerload.agent.store.jobs import DueJob
    from peerload.agent.store.pruning import MaintenanceRow
    from peerload.agent.store.store import Store
    from peerload.model.task import TaskRecord

log = logging.getLogger("peerload.agent")

AT_A_TIME = {CompletionJob.FILES: 4, CompletionJob.NOTIFY: 4}
TRIES_MAX = 8
"""What cannot be done is given up after so many tries: some minutes."""
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
        self, info: NodeInfo, store: Store, journal: EventLog, run: RunState, saving: OutputSaver, notices: NotifyHooks
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
        """Something is owed."""
        self._news.set()

    async def run(self) -> None:
        """Do what is due as it comes, until cancelled; what is under way then is done again by the next agent."""
        try:
            while True:
                self._news.clear()
                try:
                    pause_s = self._begin_due()
                except StoreError as error:
                    log.warning("what is owed cannot be looked for: %s", error)
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
            for owed in jobs.due(store, kind, now, room, busy) if room > 0 else ():
                self._begin(owed)
        next_at = jobs.next_due_at(store)
        if next_at is None:
            return IDLE_S_MAX
        # One that is due and waits for room is begun when another is done, which wakes us.
        return min(next_at - now, IDLE_S_MAX) if next_at > now else PAUSE_S

    def _begin(self, owed: DueJob) -> None:
        self._under_way[owed.number] = owed.kind
        self._background.start(self._carry_out(owed))

    async def saved(self, record: TaskRecord) -> tuple[str, str]:
        """Outcome of writing the output files of an ended task: the state of the event, and why. Waits until that was tried.
        "": it wrote none."""
        counter, member = order_of(record.task)
        while True:
            self._tried.clear()
            owed = jobs.owed_for(self._store, counter, member)
            ours = [one for one in owed if one.kind is CompletionJob.FILES and one.member == member]
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

    async def _carry_out(self, owed: DueJob) -> None:
        try:
            await self._try(owed)
        finally:
            del self._under_way[owed.number]
            self._news.set()
            self._tried.set()

    async def _try(self, owed: DueJob) -> None:
        job = self._saving if owed.kind is CompletionJob.FILES else self._notices
        try:
            state, reason = await job.carry_out(owed)
        except JobPostponed:
            await self._keep(ChorePostponed(owed.number, owed.tries, time.time() + ENDS_SOON_S, owed.why))
        except (OSError, PeerloadError) as error:
            why = str(error) or type(error).__name__
            await self._failed(owed, (error.strerror or why) if isinstance(error, OSError) else why)
        else:
            if state:
                self._tell(owed, state, reason)
            await self._keep(ChoreDone(owed.number))

    async def _failed(self, owed: DueJob, why: str) -> None:
        tries = owed.tries + 1
        if tries >= TRIES_MAX:
            self._tell(owed, "abandoned", f"{FAILURES[owed.kind]}: {why} ({tries} tries)")
            await self._keep(ChoreDone(owed.number))
            return
        pause_s = min(PAUSE_S * 2.0**owed.tries, PAUSE_S_MAX)
        if not owed.tries:
            self._tell(owed, "postponed", f"{FAILURES[owed.kind]}: {why}; it is tried again")
        await self._keep(ChorePostponed(owed.number, tries, time.time() + pause_s, why[:500]))

    def _tell(self, owed: DueJob, state: str, reason: str) -> None:
        if _is_of_files(state, reason):
            self._outcomes[owed.counter, owed.member] = state, reason
            if len(self._outcomes) > OUTCOMES_MAX:
                del self._outcomes[next(iter(self._outcomes))]
        log.log(
            logging.WARNING if state in ("abandoned", "incomplete") else logging.INFO,
            "%s: %s %s",
            self._name(owed),
            state,
            reason,
        )
        self._journal.note(PutEvent(time.time(), "chore", state, task=self._name(owed), reason=reason))

    def _name(self, owed: DueJob) -> str:
        return f"{self._info.config.node}/{owed.counter}" + (f".{owed.member}" if owed.member != SINGLE else "")

    async def _keep(self, row: MaintenanceRow) -> None:
        """Durable when it returns."""
        kept = asyncio.Event()
        self._store.persist((row,), kept.set)
        await kept.wait()


def _is_of_files(state: str, reason: str) -> bool:
    return state in ("saved", "incomplete") or reason.startswith(FILES_FAILED)


FAILURES = {CompletionJob.FILES: FILES_FAILED, CompletionJob.NOTIFY: "its user could not be notified"}
