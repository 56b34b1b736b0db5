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

from peerload.agent.completion import output_files
from peerload.agent.completion.notify_hook import NotifyHooks
from peerload.agent.store import jobs
from peerload.agent.store.pruning import ChoreDone, ChorePostponed
from peerload.agent.store.rows import SINGLE, order_of
from peerload.model.actions import PutEvent
from peerload.model.errors import PeerloadError, StoreError
from peerload.model.submit_options import CompletionJob
from peerload.model.task import execution_key

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from peerload.agent.parts import Parts
    from peerload.agent.store.jobs import DueJob
    from peerload.agent.store.pruning import MaintenanceRow
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


class JobFailed(Exception):
    """A chore could not be done, for this reason."""


class JobPostponed(Exception):
    """It is not time yet."""


class CompletionJobs:
    """One per agent; from the loop's thread only."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._news = asyncio.Event()
        self._under_way: dict[int, asyncio.Task[None]] = {}
        self._kinds: dict[int, CompletionJob] = {}
        self._tried = asyncio.Event()
        self._outcomes: dict[tuple[int, int], tuple[str, str]] = {}
        self.notices = NotifyHooks(parts)

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
            work = list(self._under_way.values())
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    def _begin_due(self) -> float:
        """Begin what there is room for → after how many seconds to look again."""
        store, now = self._parts.store, time.time()
        busy = set(self._under_way)
        for kind, most in AT_A_TIME.items():
            room = most - sum(self._kinds[number] is kind for number in busy)
            for owed in jobs.due(store, kind, now, room, busy) if room > 0 else ():
                self._begin(owed)
        next_at = jobs.next_due_at(store)
        if next_at is None:
            return IDLE_S_MAX
        # One that is due and waits for room is begun when another is done, which wakes us.
        return min(next_at - now, IDLE_S_MAX) if next_at > now else PAUSE_S

    def _begin(self, owed: DueJob) -> None:
        work = self._files(owed) if owed.kind is CompletionJob.FILES else self._notify(owed)
        self._kinds[owed.number] = owed.kind
        task = asyncio.get_running_loop().create_task(self._carry_out(owed, work))
        self._under_way[owed.number] = task
        task.add_done_callback(lambda task: self._done(owed.number, task))

    def _done(self, number: int, task: asyncio.Task[None]) -> None:
        del self._under_way[number]
        del self._kinds[number]
        self._news.set()
        self._tried.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a bug", exc_info=error)
            self._parts.run.fail(f"a bug: {error!r}")

    async def saved(self, record: TaskRecord) -> tuple[str, str]:
        """Outcome of writing the output files of an ended task: the state of the event, and why. Waits until that was tried.
        "": it wrote none."""
        counter, member = order_of(record.task)
        while True:
            self._tried.clear()
            owed = jobs.owed_for(self._parts.store, counter, member)
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
        found = self._parts.store.events(0, EVENTS_LOOKED_AT_MAX, newest=True, what=("chore",), tasks=(task,))
        return next(
            ((one.state, one.reason) for one in reversed(found) if _is_of_files(one.state, one.reason)), ("", "")
        )

    async def _carry_out(self, owed: DueJob, work: Coroutine[Any, Any, tuple[str, str]]) -> None:
        try:
            state, reason = await work
        except JobPostponed:
            await self._keep(ChorePostponed(owed.number, owed.tries, time.time() + ENDS_SOON_S, owed.why))
        except (JobFailed, OSError, PeerloadError) as error:
            why = str(error) or type(error).__name__
            await self._failed(owed, (error.strerror or why) if isinstance(error, OSError) else why)
        else:
            if state:
                self._tell(owed, state, reason)
            await self._keep(ChoreDone(owed.number))

    async def _failed(self, owed: DueJob, why: str) -> None:
        tries = owed.tries + 1
        if tries >= TRIES_MAX:
            self._tell(owed, "abandoned", f"{_WHAT[owed.kind]}: {why} ({tries} tries)")
            await self._keep(ChoreDone(owed.number))
            return
        pause_s = min(PAUSE_S * 2.0**owed.tries, PAUSE_S_MAX)
        if not owed.tries:
            self._tell(owed, "postponed", f"{_WHAT[owed.kind]}: {why}; it is tried again")
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
        self._parts.journal.note(PutEvent(time.time(), "chore", state, task=self._name(owed), reason=reason))

    def _name(self, owed: DueJob) -> str:
        return f"{self._parts.config.node}/{owed.counter}" + (f".{owed.member}" if owed.member != SINGLE else "")

    async def _keep(self, row: MaintenanceRow) -> None:
        """Durable when it returns."""
        kept = asyncio.Event()
        self._parts.store.persist((row,), kept.set)
        await kept.wait()

    # -- what is owed --------------------------------------------------------------------------------------------------

    async def _files(self, owed: DueJob) -> tuple[str, str]:
        """Write the files of one task → what is to be told of it."""
        parts, place = self._parts, (owed.counter, owed.member)
        records = parts.store.page(owed.counter, owed.member - 1, owed.member, 1)
        if not records:
            return "abandoned", f"{_WHAT[owed.kind]}: its row is gone"
        (record,) = records
        if record.uid in parts.node.home.tasks:
            raise JobPostponed
        if not record.attempt:  # it never ran: nothing was written, and nothing of what is there is lost
            return "", ""
        key = execution_key(record.uid, record.attempt)
        spec = parts.store.spec(owed.counter)
        terms = parts.store.terms(owed.counter)
        files = output_files.targets(terms, record, spec, place)
        names = ", ".join(path.decode("utf-8", "backslashreplace") for path in files)
        try:
            missing_bytes = await parts.saving.finish(record, spec, terms)
        except OSError as error:
            raise JobFailed(f"{names}: {error.strerror or error}") from None
        except PeerloadError as error:
            raise JobFailed(f"{names}: {error}") from None
        parts.saving.forget(key)
        await parts.output.cut(key)
        if missing_bytes:
            return "incomplete", f"{missing_bytes} bytes of its output are missing in {names}"
        return "saved", f"its output is in {names}"

    async def _notify(self, owed: DueJob) -> tuple[str, str]:
        return await self.notices.give(owed)


def _is_of_files(state: str, reason: str) -> bool:
    return state in ("saved", "incomplete") or reason.startswith(_WHAT[CompletionJob.FILES])


_WHAT = {CompletionJob.FILES: "its output could not be saved", CompletionJob.NOTIFY: "its user could not be notified"}
