"""How long ended tasks and their outputs are kept, and their removal: by age, number and size, or because a user says so.

A part at a time, so that nobody waits for it: what may go is looked for in a thread, its rows go in a commit of their
own, its files after that. The date is the trusted one (`trusted_date.py`). Never removed are tasks that have not ended, members of an array that has not ended as a
whole, what another home waits for and was not told of yet, what something is still owed for (`chores.py`) and what a
client follows right now. A home that the telling did not reach, and that asks again only after the removal, hears that
nobody knows the task any more: what waits for it there is held, with that as the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from typing import TYPE_CHECKING, Any, TypeVar

from peerload.agent.store_removal import (
    PRUNED_MAX,
    Ended,
    FilesRemoved,
    KeepDate,
    Prune,
    Removable,
    RemoveOutputs,
    RemoveTasks,
    Wanted,
    keys_of,
)
from peerload.agent.store_rows import KEPT_S, SINGLE
from peerload.model.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from peerload.agent.parts import Parts
    from peerload.agent.store_removal import Upkeep

log = logging.getLogger("peerload.agent")

AT_A_TIME = 100
"""Tasks removed in one commit: some milliseconds of the writer's time."""
PAUSE_S = 0.02
"""After each commit others have the writer for so long at least."""
DATE_KEPT_EVERY_S = 900.0
"""The trusted date is written down this often at most."""
REASON = "retention"

Found = TypeVar("Found")


class Removed:
    """What has gone: so many tasks, outputs and bytes of output; ``in_use``: how many did not go since they are in use;
    ``names``: of those that went, since somebody last looked."""

    def __init__(self) -> None:
        self.tasks = 0
        self.outputs = 0
        self.output_bytes = 0
        self.in_use = 0
        self.names: list[str] = []

    def add(self, tasks: Sequence[Ended], names: Sequence[str]) -> None:
        """These, too."""
        self.tasks += len(tasks)
        self.outputs += sum(task.output_bytes > 0 for task in tasks)
        self.output_bytes += sum(task.output_bytes for task in tasks)
        self.names += names


class Retention:
    """One per agent; from the loop's thread only."""

    def __init__(self, parts: Parts, database: Path) -> None:
        self._parts = parts
        self._database = database
        self._date_kept = parts.store.date.anchor

    async def run(self) -> None:
        """Look every ``retention_every_s``, until cancelled. Not at once: a machine's date may be wrong when it starts."""
        work = self._finish_files
        while True:
            try:
                await work()
            except (sqlite3.Error, OSError) as error:
                log.warning("what may be removed cannot be looked for, or not be removed: %s", error)
            else:
                work = self.enforce
            await asyncio.sleep(self._parts.config.retention_every_s)

    async def enforce(self) -> None:
        """Remove what has been kept for long enough, or is too much; nothing while the disk has no room for saying so."""
        parts = self._parts
        if parts.disk.state == "full" or parts.store.is_stalled:
            return
        config = parts.config
        oldest = parts.store.date.now() - config.ended_kept_s
        gone = await self.remove(Wanted(before=oldest))
        self._tell(gone, f"they ended more than {config.ended_kept_s / 86_400:g} days ago")
        if await self._look(lambda removable: removable.ended()) > config.ended_tasks_max:
            gone = await self.remove(Wanted(keep=config.ended_tasks_max))
            self._tell(gone, f"more than {config.ended_tasks_max} ended tasks were kept")
        excess = await self._look(lambda removable: removable.output_bytes()) - config.ended_output_bytes_max
        if excess > 0:
            gone = await self.remove(Wanted(with_output=True), outputs_only=True, enough_bytes=excess)
            self._tell(gone, f"the outputs of ended tasks took more than {config.ended_output_bytes_max} bytes")
        await self._prune(oldest)
        await self._keep_date()

    async def _keep_date(self) -> None:
        anchor, kept = self._parts.store.date.anchor, self._date_kept
        if anchor.wall_s - kept.wall_s >= DATE_KEPT_EVERY_S or (anchor.ahead_s < 0.0) != (kept.ahead_s < 0.0):
            await self._kept(KeepDate(anchor.packed()))
            self._date_kept = anchor

    def _tell(self, gone: Removed, why: str) -> None:
        if gone.tasks:
            what = f"{gone.tasks} ended tasks with {gone.output_bytes} bytes of output"
            log.info("removed: %s, since %s", what, why)
            self._parts.journal.happened("store", "removed", reason=f"{what}: {why}")

    async def remove(
        self,
        wanted: Wanted,
        *,
        outputs_only: bool = False,
        why: str = REASON,
        enough_bytes: int | None = None,
        is_tried: bool = False,
        told: Callable[[Removed], Any] | None = None,
    ) -> Removed:
        """Remove those wanted, or their outputs alone; until ``enough_bytes`` of output have gone. With ``is_tried`` only
        count them. ``told`` is called after each part."""
        removed = Removed()
        after: Ended | None = None
        bounded = await self._look(lambda removable: removable.bounded(wanted))
        if bounded is None:
            return removed
        while enough_bytes is None or removed.output_bytes < enough_bytes:
            page = await self._page(bounded, after)
            if not page:
                break
            after = page[-1]
            free = [task for task in page if not self._is_in_use(task)]
            removed.in_use += len(page) - len(free)
            if enough_bytes is not None:
                free = _up_to(free, enough_bytes - removed.output_bytes)
            if free and not is_tried:
                await self._remove(free, outputs_only=outputs_only, why=why)
            removed.add(free, [self._name(task) for task in free])
            if told is not None:
                await told(removed)
            await asyncio.sleep(0 if is_tried else PAUSE_S)
        return removed

    async def _page(self, wanted: Wanted, after: Ended | None) -> list[Ended]:
        kept = tuple(int(array.rpartition("/")[2]) for array in self._parts.node.home.arrays)  # they have not ended
        return await self._look(lambda removable: removable.page(wanted, kept, after, AT_A_TIME))

    async def _remove(self, tasks: list[Ended], *, outputs_only: bool, why: str) -> None:
        """The rows, then the files, then the names of these."""
        gone = tuple(tasks)
        await self._kept(RemoveOutputs(gone, time.time(), why) if outputs_only else RemoveTasks(gone))
        keys = [key for task in tasks for key in keys_of(task)]
        await self._drop_files(keys)

    async def _drop_files(self, keys: Sequence[str]) -> None:
        if keys:
            await asyncio.to_thread(self._drop, keys)
            await self._kept(FilesRemoved(tuple(keys)))

    def _drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._parts.spool.drop(key)

    async def _finish_files(self) -> None:
        """The files that an agent before this one had no time to remove."""
        while keys := await self._look(lambda removable: removable.doomed(AT_A_TIME)):
            await self._drop_files(keys)
            await asyncio.sleep(PAUSE_S)

    async def _prune(self, oldest: float) -> None:
        """Old events, and submissions of which nothing is left: their tokens are remembered for a while."""
        remembered = self._parts.store.date.now() - KEPT_S
        while True:
            empty = await self._look(lambda removable: removable.empty_submissions(remembered, PRUNED_MAX))
            if not empty and not await self._look(lambda removable: removable.has_events_before(oldest)):
                return
            await self._kept(Prune(oldest, empty))
            await asyncio.sleep(PAUSE_S)

    # -- what may go ---------------------------------------------------------------------------------------------------

    def _is_in_use(self, task: Ended) -> bool:
        """Whether somebody follows it right now or is to be told of its end, or its process is not gone yet."""
        parts, name = self._parts, self._name(task)
        if (
            task.uid in parts.node.home.tasks
            or parts.clients.follows(name)
            or parts.node.gates.inquiries.is_watched(name)
        ):
            return True
        return any(parts.output.is_busy(key) for key in keys_of(task))

    def _name(self, task: Ended) -> str:
        return f"{self._parts.config.node}/{task.counter}" + (f".{task.member}" if task.member != SINGLE else "")

    # -- the database --------------------------------------------------------------------------------------------------

    async def _look(self, ask: Callable[[Removable], Found]) -> Found:
        """Ask the database, in a thread."""
        return await asyncio.to_thread(self._ask, ask)

    def _ask(self, ask: Callable[[Removable], Found]) -> Found:
        with contextlib.closing(Removable(self._database)) as removable:
            return ask(removable)

    async def _kept(self, *rows: Upkeep) -> None:
        """Have the writer do it, and wait until it is durable."""
        durable = asyncio.Event()
        try:
            self._parts.store.persist(rows, durable.set)
        except StoreError as error:
            self._parts.fail(f"the store failed: {error}")
            raise
        await durable.wait()


def _up_to(tasks: list[Ended], size_bytes: int) -> list[Ended]:
    """The first of these that have so much output together."""
    taken: list[Ended] = []
    for task in tasks:
        if size_bytes <= 0:
            break
        taken.append(task)
        size_bytes -= task.output_bytes
    return taken
