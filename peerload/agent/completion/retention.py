"""Retention: the removal of ended tasks and their outputs, by age, number and size, or on request of a user.

Where there are too many, submissions with more than their share lose tasks first. Fairness is between submissions, not between
single tasks.

The removal is done in parts, so that it delays no other work: a thread finds the tasks, their rows are removed in a separate
commit, and their files after that. The date is the trusted one (`TrustedDate`). These are never removed: unfinished tasks,
members of an array that is unfinished as a whole, tasks whose outcome another home waits for, tasks with a pending completion
job, and tasks that a client follows. If a home did not get an outcome, and asks again only after the removal, the task is
unknown: the home holds the tasks that wait for it, with that as the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from peerload.agent.runtime import coalesced_s
from peerload.agent.store.maintenance import (
    PRUNED_MAX,
    EndedTask,
    FilesRemoved,
    KeepDate,
    Prune,
    RemovalCriteria,
    RemovalSearch,
    RemoveOutputs,
    RemoveTasks,
    keys_of,
)
from peerload.agent.store.schema import KEPT_S
from peerload.model.errors import StoreError
from peerload.model.task import task_name
from peerload.text.format import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from peerload.agent.output.output import TaskOutputs
    from peerload.agent.output.spool import Spool
    from peerload.agent.runtime import AgentInfo, RunState, TaskWatches
    from peerload.agent.store.disk_space import DiskSpace
    from peerload.agent.store.maintenance import MaintenanceRow
    from peerload.agent.store.store import Store
    from peerload.agent.store.write_ahead import EventLog
    from peerload.core.node import Node

log = logging.getLogger("peerload.agent")

AT_A_TIME = 100
"""Maximum number of tasks removed in one commit, which takes some milliseconds of the writer's time."""
PAUSE_S = 0.02
"""Pause after each commit, in s, in which the writer serves other work."""
DATE_KEPT_EVERY_S = 900.0
"""Minimum interval between two writes of the trusted date."""
EARLY_S = 86_400.0
"""A task removed for lack of room within this time after its end is reported as unusual."""
SUBMISSIONS_NAMED_MAX = 3
"""Maximum number of submissions that a report of a removal names."""
REASON = "retention"

Found = TypeVar("Found")


class Removed:
    """Totals of a removal. ``in_use``: tasks that stayed because they are in use; ``names``: names of tasks removed since
    the last progress report; ``of``: the number for each submission; ``early``: tasks that had ended within EARLY_S."""

    def __init__(self) -> None:
        self.tasks = 0
        self.outputs = 0
        self.output_bytes = 0
        self.in_use = 0
        self.names: list[str] = []
        self.of: Counter[int] = Counter()
        self.early = 0

    def add(self, tasks: Sequence[EndedTask], names: Sequence[str], early_from: float) -> None:
        """Add removed tasks. early_from: tasks that ended after this time (Unix s) count as ``early``."""
        self.of.update(task.counter for task in tasks)
        self.early += sum(task.ended_at > early_from for task in tasks)
        self.tasks += len(tasks)
        self.outputs += sum(task.output_bytes > 0 for task in tasks)
        self.output_bytes += sum(task.output_bytes for task in tasks)
        self.names += names


@dataclass(eq=False, repr=False)
class TaskRemover:
    """Removes ended tasks of one agent, or their outputs alone; call it only from the loop's thread."""

    _store: Store
    _spool: Spool
    _node: Node
    _output: TaskOutputs
    _watches: TaskWatches
    _run: RunState

    async def remove(
        self,
        wanted: RemovalCriteria,
        *,
        outputs_only: bool = False,
        why: str = REASON,
        enough: int | None = None,
        surplus: dict[int, int] | None = None,
        is_tried: bool = False,
        report_progress: Callable[[Removed], Any] | None = None,
    ) -> Removed:
        """Remove the wanted tasks, or only their outputs; stop when ``enough`` tasks, or bytes of output, are removed. Remove at
        most its ``surplus`` of each submission, if that is given. With ``is_tried``, only count them. ``report_progress`` is
        called after each part."""
        removed = Removed()
        now = self._store.date.now()
        after: EndedTask | None = None
        bounded = await self.search(lambda removable: removable.bounded(wanted))
        if bounded is None:
            return removed
        while enough is None or (left := enough - (removed.output_bytes if outputs_only else removed.tasks)) > 0:
            page = await self._page(bounded, after)
            if not page:
                break
            after = page[-1]
            free = [task for task in page if not self._is_in_use(task)]
            removed.in_use += len(page) - len(free)
            if enough is not None:
                free = _up_to(free, left, surplus, outputs_only=outputs_only)
            if free and not is_tried:
                await self._remove(free, outputs_only=outputs_only, why=why)
            removed.add(free, [self._name(task) for task in free] if report_progress is not None else (), now - EARLY_S)
            if report_progress is not None:
                await report_progress(removed)
            await asyncio.sleep(0 if is_tried else PAUSE_S)
        return removed

    async def _page(self, wanted: RemovalCriteria, after: EndedTask | None) -> list[EndedTask]:
        kept = tuple(int(array.rpartition("/")[2]) for array in self._node.home.arrays)  # they have not ended
        return await self.search(lambda removable: removable.page(wanted, kept, after, AT_A_TIME))

    async def _remove(self, tasks: list[EndedTask], *, outputs_only: bool, why: str) -> None:
        """Remove the rows, then the files, then the names of these tasks."""
        removed = tuple(tasks)
        await self.keep(RemoveOutputs(removed, time.time(), why) if outputs_only else RemoveTasks(removed))
        keys = [key for task in tasks for key in keys_of(task)]
        await self._drop_files(keys)

    async def _drop_files(self, keys: Sequence[str]) -> None:
        if keys:
            await asyncio.to_thread(self._drop, keys)
            await self.keep(FilesRemoved(tuple(keys)))

    def _drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._spool.drop(key)

    async def finish_files(self) -> None:
        """Remove the files that an earlier agent, or an interrupted request, has not removed yet."""
        while keys := await self.search(lambda removable: removable.doomed(AT_A_TIME)):
            await self._drop_files(keys)
            await asyncio.sleep(PAUSE_S)

    def _is_in_use(self, task: EndedTask) -> bool:
        """True if a client follows the task or waits for its end, or its process still exists."""
        name = self._name(task)
        if (
            task.uid in self._node.home.tasks
            or self._watches.is_watched(name)
            or self._node.eligibility.remote_status.is_watched(name)
        ):
            return True
        return any(self._output.is_busy(key) for key in keys_of(task))

    def _name(self, task: EndedTask) -> str:
        return task_name(self._node.state.node, task.counter, task.member)

    async def search(self, ask: Callable[[RemovalSearch], Found]) -> Found:
        """Query the database, in a thread. Raises StoreError."""

        def in_thread() -> Found:
            try:
                with contextlib.closing(RemovalSearch(self._store.path)) as removable:
                    return ask(removable)
            except sqlite3.Error as error:
                raise StoreError("the database cannot be searched for ended tasks", why=str(error)) from None

        return await asyncio.to_thread(in_thread)

    async def keep(self, *rows: MaintenanceRow) -> None:
        """Pass these rows to the writer, and wait until they are durable."""
        try:
            await self._store.keep(*rows)
        except StoreError as error:
            self._run.fail(f"the store failed: {error}")
            raise


class Retention:
    """Removal of ended tasks by age and number, one object per agent; used only from the loop's thread."""

    def __init__(
        self,
        info: AgentInfo,
        store: Store,
        disk: DiskSpace,
        remover: TaskRemover,
        output: TaskOutputs,
        journal: EventLog,
    ) -> None:
        self._info = info
        self._store = store
        self._disk = disk
        self._remover = remover
        self._output = output
        self._journal = journal
        self._date_kept = store.date.anchor
        self.early = 0
        """Number of tasks or outputs removed for lack of room within EARLY_S of their end; the last time of this, and its reason."""
        self.early_at, self.early_why = 0.0, ""

    async def run(self) -> None:
        """Enforce the limits every ``retention_every_s``, until cancelled. The first time comes after an interval, since a
        machine's date may be wrong when it starts."""
        work = self._remover.finish_files
        while True:
            try:
                await work()
            except (StoreError, OSError) as error:
                log.warning("retention failed: error=%s", error)
            else:
                work = self.enforce
            await asyncio.sleep(coalesced_s(self._info.config.retention_every_s))

    async def enforce(self) -> None:
        """Remove ended tasks that are too old or too many. Does nothing while the disk has no room to record the removal."""
        if self._disk.state == "full" or self._store.is_stalled:
            return
        config = self._info.config
        oldest = self._store.date.now() - config.ended_kept_s
        remembered = self._store.date.now() - KEPT_S
        limits = config.ended_tasks_max, config.ended_output_bytes_max
        if await self._remover.search(lambda removable: removable.exceeds(oldest, remembered, *limits)):
            await self._remove_excess(oldest)
        await self._output.cut_old(self._store.date.now())
        await self._keep_date()

    async def _remove_excess(self, oldest: float) -> None:
        """Remove tasks that are older, or beyond a limit. Each step opens the database, so `enforce` first checks the need."""
        await self._remover.finish_files()  # the files of an interrupted `clean`
        config = self._info.config
        removed = await self._remover.remove(RemovalCriteria(before=oldest))
        self._report_removal(removed, f"they ended more than {config.ended_kept_s / 86_400:g} days ago")
        await self._enforce_number()
        await self._enforce_size()
        await self._prune(oldest)

    async def _enforce_number(self) -> None:
        most = self._info.config.ended_tasks_max
        excess = await self._remover.search(lambda removable: removable.ended()) - most
        if excess <= 0:
            return
        why = f"more than {most} ended tasks were kept"
        removed = await self._trim(excess, most, outputs_only=False)
        self._report_removal(removed, f"{why}, and of these submissions more than others have")
        if removed.tasks < excess:
            self._report_removal(await self._remover.remove(RemovalCriteria(keep=most)), why)

    async def _enforce_size(self) -> None:
        most = self._info.config.ended_output_bytes_max
        excess = await self._remover.search(lambda removable: removable.output_bytes()) - most
        if excess <= 0:
            return
        why = f"the outputs of ended tasks took more than {most} bytes"
        removed = await self._trim(excess, most, outputs_only=True)
        self._report_removal(removed, f"{why}, those of these submissions more than others", outputs_only=True)
        if removed.output_bytes < excess:
            left = excess - removed.output_bytes
            removed = await self._remover.remove(RemovalCriteria(with_output=True), outputs_only=True, enough=left)
            self._report_removal(removed, why, outputs_only=True)

    async def _trim(self, excess: int, most: int, *, outputs_only: bool) -> Removed:
        """Remove the oldest tasks of the largest submissions, each down to the level at which all fit (max-min fairness), and none
        below its share. Fairness is between submissions: one large array does not displace the tasks of others."""
        share = max(most // self._info.config.ended_submissions_kept, 1)
        large = await self._remover.search(lambda removable: removable.beyond_share(share, of_output=outputs_only))
        level = max(fair_level(large.values(), excess), share)
        surplus = {counter: has - level for counter, has in large.items() if has > level}
        if not surplus:
            return Removed()
        wanted = RemovalCriteria(of=tuple(surplus), with_output=outputs_only)
        return await self._remover.remove(wanted, outputs_only=outputs_only, enough=excess, surplus=surplus)

    async def _keep_date(self) -> None:
        anchor, kept = self._store.date.anchor, self._date_kept
        if anchor.wall_s - kept.wall_s >= DATE_KEPT_EVERY_S or (anchor.ahead_s < 0.0) != (kept.ahead_s < 0.0):
            await self._remover.keep(KeepDate(anchor.packed()))
            self._date_kept = anchor

    def _report_removal(self, removed: Removed, why: str, *, outputs_only: bool = False) -> None:
        """Record the removal. The removal of tasks soon after their end is unusual: `doctor` reports it, too."""
        if not removed.tasks:
            return
        of = ", ".join(
            f"{self._info.config.node}/{counter} ({count})"
            for counter, count in removed.of.most_common(SUBMISSIONS_NAMED_MAX)
        )
        what = (
            f"the outputs of {counted(removed.tasks, 'ended task')}, {removed.output_bytes} bytes"
            if outputs_only
            else f"{counted(removed.tasks, 'ended task')} with {removed.output_bytes} bytes of output"
        )
        what += f", of {of}" + (
            f" and {len(removed.of) - SUBMISSIONS_NAMED_MAX} other submissions"
            if len(removed.of) > SUBMISSIONS_NAMED_MAX
            else ""
        )
        if removed.early:
            what += f"; {removed.early} of them had ended within a day"
            self.early += removed.early
            self.early_at, self.early_why = time.time(), why
        log.log(logging.WARNING if removed.early else logging.INFO, "ended tasks removed: what=%s reason=%s", what, why)
        self._journal.record("store", "removed", reason=f"{what}: {why}")

    async def _prune(self, oldest: float) -> None:
        """Remove old events, and submissions without tasks; their tokens are remembered for a while."""
        remembered = self._store.date.now() - KEPT_S
        while True:
            empty = await self._remover.search(lambda removable: removable.empty_submissions(remembered, PRUNED_MAX))
            if not empty and not await self._remover.search(lambda removable: removable.has_events_before(oldest)):
                return
            await self._remover.keep(Prune(oldest, empty))
            await asyncio.sleep(PAUSE_S)


def fair_level(sizes: Iterable[int], excess: int) -> int:
    """The highest level such that cutting all larger ``sizes`` down to it removes ``excess``; smaller ones are not cut."""
    down = sorted(sizes, reverse=True)
    above = 0
    for number, size in enumerate(down, start=1):
        above += size
        following = down[number] if number < len(down) else 0
        if above - number * following >= excess:
            return (above - excess) // number
    return 0


def _up_to(
    tasks: list[EndedTask], enough: int, surplus: dict[int, int] | None, *, outputs_only: bool
) -> list[EndedTask]:
    """The first of these tasks that make up ``enough`` tasks or bytes of output; reduces ``surplus`` by them."""
    taken: list[EndedTask] = []
    for task in tasks:
        size = task.output_bytes if outputs_only else 1
        if enough <= 0:
            break
        if surplus is not None:
            if surplus.get(task.counter, 0) <= 0:
                continue
            surplus[task.counter] -= size
        taken.append(task)
        enough -= size
    return taken
