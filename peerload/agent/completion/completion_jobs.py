"""Completion jobs: work at home after the end of a task. A job writes the output files (`submit -o`), or notifies
the user (`--notify`).

A job is committed together with the end of its task, so that no crash loses it, and removed when it is done. So it runs at least
once, and possibly twice. A failed job is tried again several times, and then abandoned; both are events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from peerload.agent.accounts import mount_point, output_patterns, output_targets
from peerload.agent.output.spool import STREAMS, remove
from peerload.agent.runtime import BackgroundTasks
from peerload.agent.store.disk_space import NO_ROOM
from peerload.agent.store.maintenance import DUE_S_MAX, JobDone, JobPostponed, due_jobs, jobs_of, next_job_due_at
from peerload.launcher.system.write_as_user import FileChanged
from peerload.model.actions import PutEvent
from peerload.model.bounded import BoundedDict
from peerload.model.errors import PeerloadError, StoreError
from peerload.model.task import CompletionJob, TaskState, execution_key, order_of, task_name

if TYPE_CHECKING:
    from peerload.agent.accounts import Segment, UserServices
    from peerload.agent.completion.hooks import NotifyHooks
    from peerload.agent.output.output import TaskOutputs
    from peerload.agent.output.spool import Spool
    from peerload.agent.runtime import AgentInfo, RunState
    from peerload.agent.store.maintenance import DueJob
    from peerload.agent.store.reader import StoreReader
    from peerload.agent.store.store import Store
    from peerload.agent.store.write_ahead import EventLog
    from peerload.core.node import Node
    from peerload.core.work import HomeTask
    from peerload.model.actions import TaskChanged
    from peerload.model.task import SubmitOptions, TaskRecord, TaskSpec


log = logging.getLogger("peerload.agent")

AT_A_TIME = {CompletionJob.FILES: 4, CompletionJob.NOTIFY: 4}
TRIES_MAX = 8
"""Number of tries, over some minutes, before a job is abandoned. A job that needs disk space is tried without limit."""
FULL = tuple(map(os.strerror, NO_ROOM))
"""Texts of the errors of a full disk; the launcher reports them as text."""
PAUSE_S, PAUSE_S_MAX = 1.0, DUE_S_MAX
"""The pause before the second try, and the maximum to which it doubles."""
ENDS_SOON_S = 0.5
"""Delay before a job is checked again whose cancelled task still has a process; this does not count as a try."""
IDLE_S_MAX = 3600.0
OUTCOMES_MAX = 4096
"""Maximum number of tasks whose file outcome is kept in memory; the outcome of others is read from their events."""
EVENTS_LOOKED_AT_MAX = 16
"""Maximum number of last events of a task that are read for its file outcome."""
FILES_FAILED = "its output could not be saved"
FAILURES = {CompletionJob.FILES: FILES_FAILED, CompletionJob.NOTIFY: "its user could not be notified"}
LIVE_MAX = 128
"""Maximum number of tasks whose files grow while they run; the files of others are written at their end. Each task that
runs elsewhere takes one of the streams (`STREAMS_MAX`), which results need, too."""
WRITES_AT_A_TIME = 4
START_AFTER_S = 0.1
"""Minimum run time of a task before copying starts; for shorter ones, the completion job writes the files."""
EVERY_S, SYSTEM_EVERY_S = 0.1, 1.0
"""Shortest interval between two writes to a file; in system mode each write takes a process."""
STEP_BYTES_MAX = 32 << 20
"""Maximum number of bytes that one step copies."""
STEP_S_MAX = 30.0
"""Maximum time for which a file blocks its task."""
LOOK_AGAIN_S = 5.0
"""Delay before reconnecting to the node that runs the task."""
SAVED_MAX = 1024
"""Maximum number of attempts whose progress is kept in memory; the progress of others is read from disk."""
RETRY_S, RETRY_S_MAX = 1.0, 60.0
"""Pause after a failure while the task runs, and the maximum to which it doubles."""


class CompletionJobs:
    """Completion jobs of ended tasks, one object per agent; used only from the loop's thread."""

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
        self._outcomes: BoundedDict[tuple[int, int], tuple[str, str]] = BoundedDict(OUTCOMES_MAX)

    def wake(self) -> None:
        self._news.set()

    async def run(self) -> None:
        """Carry out jobs when they are due, until cancelled; the next agent repeats the interrupted ones."""
        try:
            while True:
                self._news.clear()
                try:
                    pause_s = self._begin_due()
                except StoreError as error:
                    log.warning("cannot read pending completion jobs: error=%s", error)
                    pause_s = PAUSE_S_MAX
                await _wait(self._news, pause_s)
        finally:
            await self._background.close()

    def _begin_due(self) -> float:
        """Begin as many jobs as may run at a time → the seconds until the next check."""
        store, now = self._store, time.time()
        busy = set(self._under_way)
        for kind, most in AT_A_TIME.items():
            room = most - sum(other is kind for other in self._under_way.values())
            for job in due_jobs(store, kind, now, room, busy) if room > 0 else ():
                self._begin(job)
        next_at = next_job_due_at(store)
        if next_at is None:
            return IDLE_S_MAX
        # A due job that has to wait for others begins when one of them ends, which wakes `run`.
        return min(next_at - now, IDLE_S_MAX) if next_at > now else PAUSE_S

    def _begin(self, job: DueJob) -> None:
        self._under_way[job.number] = job.kind
        self._background.start(self._carry_out(job))

    async def saved(self, record: TaskRecord) -> tuple[str, str]:
        """Outcome of writing the output files of an ended task: state and reason of the event, "" if it has none. Waits until
        this was tried."""
        counter, member = order_of(record.task)
        while True:
            self._tried.clear()
            job = jobs_of(self._store, counter, member)
            ours = [one for one in job if one.kind is CompletionJob.FILES and one.member == member]
            if not ours:
                return self._outcome(record.task, (counter, member))
            if ours[0].tries:
                return "postponed", ours[0].why
            await _wait(self._tried, PAUSE_S)

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
            await self._store.keep(JobPostponed(job.number, job.tries, time.time() + ENDS_SOON_S, job.why))
        except (OSError, PeerloadError) as error:
            why = str(error) or type(error).__name__
            await self._failed(job, (error.strerror or why) if isinstance(error, OSError) else why)
        else:
            if state:
                self._report(job, state, reason)
            await self._store.keep(JobDone(job.number))

    async def _failed(self, job: DueJob, why: str) -> None:
        tries = job.tries + 1
        if any(full in why for full in FULL):
            tries = min(tries, TRIES_MAX - 1)
        if tries >= TRIES_MAX:
            self._report(job, "abandoned", f"{FAILURES[job.kind]}: {why} ({tries} tries)")
            await self._store.keep(JobDone(job.number))
            return
        pause_s = min(PAUSE_S * 2.0**job.tries, PAUSE_S_MAX)
        if not job.tries:
            self._report(job, "postponed", f"{FAILURES[job.kind]}: {why}; it is tried again")
        await self._store.keep(JobPostponed(job.number, tries, time.time() + pause_s, why[:500]))

    def _report(self, job: DueJob, state: str, reason: str) -> None:
        if _is_of_files(state, reason):
            self._outcomes[job.counter, job.member] = state, reason
        log.log(
            logging.WARNING if state in ("abandoned", "incomplete") else logging.INFO,
            "completion job: task=%s state=%s reason=%s",
            self._name(job),
            state,
            reason,
        )
        self._journal.note(PutEvent(time.time(), "chore", state, task=self._name(job), reason=reason))

    def _name(self, job: DueJob) -> str:
        return task_name(self._info.config.node, job.counter, job.member)


def _is_of_files(state: str, reason: str) -> bool:
    return state in ("saved", "incomplete") or reason.startswith(FILES_FAILED)


class JobNotDue(Exception):
    """The core still has the task of this job, since it may have a process: the job is not due."""


# -- output files ------------------------------------------------------------------------------------------------------


class SaveProgress(msgspec.Struct):
    """Progress of the files of one attempt. boot: id of the machine's boot; data written in an earlier boot may not be
    on disk. read: bytes of each stream that were copied or found missing; at: the size of each file; missing:
    the bytes that were cut out."""

    boot: str
    read: list[int]
    at: dict[bytes, int]
    missing: int = 0


class SavedOutput:
    """The files of one attempt. work: the running or last copying. It continues without a waiter, since two copies at a
    time would interfere."""

    def __init__(
        self, key: str, spec: TaskSpec, terms: SubmitOptions, files: dict[bytes, list[int]], progress: SaveProgress
    ) -> None:
        self.key = key
        self.spec = spec
        self.terms = terms
        self.files = files
        self.progress = progress
        self.mounts = {path: mount_point(path) for path in files}
        self.work: asyncio.Task[bool] | None = None
        self.begun = {path for path, size in progress.at.items() if size}
        """Paths of the files that exist."""


class _Live:
    """An attempt whose files grow while it runs. grown: there is more output; over: it has stopped running."""

    def __init__(self, task: HomeTask, attempt: int) -> None:
        self.task = task
        self.attempt = attempt
        self.grown = asyncio.Event()
        self.over = asyncio.Event()
        self.work: asyncio.Task[None] | None = None


class OutputSaver:
    """Saves output into the files of users (`submit -o FILE -e FILE`), while the tasks run; from the loop's thread only.

    Home copies the whole output piece by piece from its spool into the file, as that user (`accounts.py`). If the task runs
    elsewhere, its output is copied here as it is written. A task waits for its file as it waits for a reader
    (`output/output.py`), so that output is not cut out before it was copied. After the end of the task, its completion job copies
    the rest, and finds out what is missing. A file that cannot be written does not block its task: it is tried again while the
    task runs, and after its end.

    The progress of each file is stored beside the output (STATE/spool/KEY.saved), and the next agent continues from there. Each
    piece is written at its offset in the file, so that it may be written twice.
    """

    def __init__(
        self,
        info: AgentInfo,
        node: Node,
        store: StoreReader,
        spool: Spool,
        output: TaskOutputs,
        users: UserServices,
        run: RunState,
    ) -> None:
        self._info = info
        self._node = node
        self._store = store
        self._spool = spool
        self._output = output
        self._users = users
        self._background = BackgroundTasks(run)
        self._boot = info.identity.machine_boot
        self._saved: BoundedDict[str, SavedOutput] = BoundedDict(SAVED_MAX)  # the progress of other attempts is on disk
        self.live: dict[str, _Live] = {}
        """Attempts whose files grow now; while there are any, `changed` has to be called for every change."""
        self._writes: defaultdict[bytes, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(WRITES_AT_A_TIME))
        """Limit of concurrent writes for each mount point, so that a dead one blocks no other."""

    # -- while the task runs -------------------------------------------------------------------------------------------

    def changed(self, action: TaskChanged) -> None:
        """Process a change of a task of this home: a new record, or its start."""
        record = action.record
        live = self.live.get(execution_key(record.uid, record.attempt))
        if live is not None:
            self._look(live)
        elif action.running:
            task = self._node.home.tasks.get(record.uid)
            if task is not None and output_patterns(task.terms):
                self._begin(task)

    def _look(self, live: _Live) -> None:
        if not self._runs(live):
            live.over.set()
            live.grown.set()

    def _runs(self, live: _Live) -> bool:
        task, record = live.task, live.task.record
        is_current = record.state is TaskState.LEASED and record.attempt == live.attempt and task.collection is None
        return is_current and self._node.home.tasks.get(task.uid) is task

    def _begin(self, task: HomeTask) -> None:
        key = task.key
        if len(self.live) >= LIVE_MAX:
            return
        live = self.live[key] = _Live(task, task.record.attempt)
        live.work = self._background.start(self._follow(live, key))

    async def _follow(self, live: _Live, key: str) -> None:
        """Copy the output of a running task until it ends."""
        pause_s = RETRY_S
        try:
            while self._runs(live):
                try:
                    await self._follow_paced(live, key)
                except (OSError, PeerloadError) as error:
                    log.info("cannot save output while the task runs: task=%s error=%s", live.task.task, error)
                    await _wait(live.over, pause_s)
                    pause_s = min(pause_s * 2, RETRY_S_MAX)
        finally:
            del self.live[key]

    async def _follow_paced(self, live: _Live, key: str) -> None:
        """Copy as `_follow` does, while the task waits for its files. Raises OSError, PeerloadError when it no longer
        waits."""
        task, record, output = live.task, live.task.record, self._output
        is_here = record.node == self._info.config.node
        known = self._saved.get(key)
        read = known.progress.read if known is not None else [0, 0]
        async with output.backpressure.reader(key, *read, runs_here=is_here, is_awaited=True) as reader:
            await _wait(live.over, START_AFTER_S)
            if not self._runs(live):
                return
            saved = await self._of(key, record, task.spec, task.terms)
            with self._spool.watched(key, live.grown.set):
                while self._runs(live):
                    live.grown.clear()
                    self._look(live)
                    if not is_here:
                        output.mirror(record.node, record.task, record.uid, record.attempt, key, paced=True)
                    has_more = await self._step(saved, within_s=STEP_S_MAX)
                    reader.read = list(saved.progress.read)
                    output.backpressure.moved(key)
                    if not has_more:
                        await _wait(live.grown, LOOK_AGAIN_S)
                        await _wait(live.over, SYSTEM_EVERY_S if self._users.is_system else EVERY_S)

    # -- when it has ended ---------------------------------------------------------------------------------------------

    async def carry_out(self, job: DueJob) -> tuple[str, str]:
        """Write the files of one ended task → the state and the reason of its event. Raises PeerloadError,
        JobNotDue."""
        records = self._store.page(job.counter, job.member - 1, job.member, 1)
        if not records:
            return "abandoned", f"{FILES_FAILED}: its row is gone"
        (record,) = records
        if record.uid in self._node.home.tasks:
            raise JobNotDue
        if not record.attempt:  # it never ran: existing files stay unchanged
            return "", ""
        spec, terms = self._store.spec(job.counter), self._store.terms(job.counter)
        files = output_targets(terms, record, spec, (job.counter, job.member))
        names = ", ".join(path.decode("utf-8", "backslashreplace") for path in files)
        try:
            missing_bytes = await self._finish(record, spec, terms)
        except OSError as error:
            raise PeerloadError(f"{names}: {error.strerror or error}") from None
        except PeerloadError as error:
            raise PeerloadError(f"{names}: {error}") from None
        key = execution_key(record.uid, record.attempt)
        self._saved.pop(key, None)
        remove(self._spool.saved_path(key))
        await self._output.cut(key)
        if missing_bytes:
            return "incomplete", f"{missing_bytes} bytes of its output are missing in {names}"
        return "saved", f"its output is in {names}"

    async def _finish(self, record: TaskRecord, spec: TaskSpec, terms: SubmitOptions) -> int:
        """Copy the rest of the available output of an ended task, and sync the files → the number of missing
        bytes. Raises OSError, PeerloadError."""
        key, exit_ = execution_key(record.uid, record.attempt), record.exit
        live = self.live.get(key)
        if live is not None and live.work is not None:
            self._look(live)
            await asyncio.wait({live.work})
        saved = await self._of(key, record, spec, terms)
        sizes = (exit_.stdout_bytes, exit_.stderr_bytes) if exit_ is not None else self._spool.sizes(key)
        while await self._step(saved, sizes):
            pass
        wanted = {stream for streams in saved.files.values() for stream in streams}
        short = sum(max(sizes[stream - 1] - saved.progress.read[stream - 1], 0) for stream in wanted)
        lost = exit_.missing_bytes if exit_ is not None else 0
        return saved.progress.missing + short + lost

    async def close(self) -> None:
        """Stop copying; the next agent continues."""
        await self._background.close()
        work = [saved.work for saved in self._saved.values() if saved.work is not None]
        for one in work:
            one.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    # -- copying -------------------------------------------------------------------------------------------------------

    async def _of(self, key: str, record: TaskRecord, spec: TaskSpec, terms: SubmitOptions) -> SavedOutput:
        if key not in self._saved:
            files = output_targets(terms, record, spec, order_of(record.task))
            noted = await asyncio.to_thread(self._noted, key)
            if noted is None or noted.at.keys() != files.keys():
                noted = SaveProgress(self._boot, [0, 0], dict.fromkeys(files, 0))
            self._saved.setdefault(key, SavedOutput(key, spec, terms, files, noted))
        return self._saved[key]

    def _noted(self, key: str) -> SaveProgress | None:
        """The progress that an earlier agent has stored; None if there is none, or it is from an earlier boot of the
        machine."""
        try:
            noted = msgspec.msgpack.decode(self._spool.saved_path(key).read_bytes(), type=SaveProgress)
        except (OSError, msgspec.MsgspecError):
            return None
        return noted if noted.boot == self._boot and len(noted.read) == len(STREAMS) else None

    async def _step(
        self, saved: SavedOutput, sizes: tuple[int, int] | None = None, *, within_s: float | None = None
    ) -> bool:
        """Copy one part, up to ``sizes``; if given, the files are synced when no more is left → True if there may be
        more. Raises TimeoutError after ``within_s``; the copying continues."""
        while saved.work is not None and not saved.work.done():
            if not (await asyncio.wait({saved.work}, timeout=within_s))[0]:
                raise TimeoutError(f"the last part was not written within {within_s:g} s")
        saved.work = asyncio.get_running_loop().create_task(self._copy(saved, sizes))
        if not (await asyncio.wait({saved.work}, timeout=within_s))[0]:
            raise TimeoutError(f"nothing was written within {within_s:g} s")
        return saved.work.result()

    async def _copy(self, saved: SavedOutput, sizes: tuple[int, int] | None) -> bool:
        before = list(saved.progress.read)
        for path, streams in saved.files.items():
            try:
                await self._append(saved, path, streams, sizes)
            except FileChanged:  # the file was emptied or removed: start again with the output that is still kept
                saved.progress.at[path] = saved.progress.missing = 0
                for stream in streams:
                    saved.progress.read[stream - 1] = 0
                await self._append(saved, path, streams, sizes)
        has_more = saved.progress.read != before
        if has_more and sizes is None:
            raw = msgspec.msgpack.encode(saved.progress)
            await asyncio.to_thread(self._spool.saved_path(saved.key).write_bytes, raw)
        return has_more

    async def _append(self, saved: SavedOutput, path: bytes, streams: list[int], sizes: tuple[int, int] | None) -> None:
        progress, spool = saved.progress, self._spool
        segments: list[Segment] = []
        read, missing = list(progress.read), 0
        for stream in streams:
            first, size = progress.read[stream - 1], None if sizes is None else sizes[stream - 1]
            part = await asyncio.to_thread(spool.data_ranges, saved.key, stream, first, size, STEP_BYTES_MAX)
            segments += [(spool.path(saved.key, stream), *one) for one in part.ranges]
            read[stream - 1] = part.end
            missing += part.missing_bytes
        ends = sizes is not None and read == progress.read
        if segments or ends or path not in saved.begun:
            async with self._writes[saved.mounts[path]]:
                await self._users.append(saved.spec, saved.terms, path, segments, progress.at[path], ends=ends)
            saved.begun.add(path)
        progress.at[path] += sum(end - first for _, first, end in segments)
        progress.read = read
        progress.missing += missing


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
