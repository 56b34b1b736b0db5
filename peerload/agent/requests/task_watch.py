"""Clients that wait for changes of tasks."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peerload.model.task import TaskRecord


class TaskWatch:
    """Changes of some tasks: ``event`` is set at each, ``records`` has the newest record of each task, ``delayed`` why the
    results of some cannot be had for now."""

    __slots__ = ("delayed", "event", "records", "running", "tasks")

    def __init__(self) -> None:
        self.tasks: set[str] = set()
        self.event = asyncio.Event()
        self.records: dict[str, TaskRecord] = {}
        self.running: set[str] = set()
        self.delayed: dict[str, str] = {}

    def add_change(self, record: TaskRecord, *, running: bool) -> None:
        """A task has a new record, or runs."""
        self.records[record.task] = record
        if running:
            self.running.add(record.task)
        else:
            self.running.discard(record.task)
        self.event.set()

    def add_delay(self, task: str, why: str) -> None:
        """A task has ended, and its result cannot be had for now."""
        self.delayed[task] = why
        self.event.set()


class TaskWatches:
    """All watches of one agent, by task."""

    def __init__(self) -> None:
        self._watches: dict[str, set[TaskWatch]] = {}

    @contextlib.contextmanager
    def watch(self, *tasks: str) -> Iterator[TaskWatch]:
        """A watch of these tasks, until the end of the block."""
        watch = TaskWatch()
        self.add(watch, set(tasks))
        try:
            yield watch
        finally:
            for task in watch.tasks:
                if watches := self._watches.get(task):
                    watches.discard(watch)
                    if not watches:
                        del self._watches[task]

    def add(self, watch: TaskWatch, tasks: set[str]) -> None:
        """Let a watch have the changes of these tasks, too."""
        watch.tasks |= tasks
        for task in tasks:
            self._watches.setdefault(task, set()).add(watch)

    def changed(self, record: TaskRecord, *, running: bool) -> None:
        """A task has a new record, or runs."""
        for watch in list(self._watches.get(record.task, ())):
            watch.add_change(record, running=running)

    def delayed(self, task: str, why: str) -> None:
        """A task has ended elsewhere, and its result cannot be brought here for now."""
        for watch in list(self._watches.get(task, ())):
            watch.add_delay(task, why)

    def is_watched(self, task: str) -> bool:
        """True if a client watches this task right now."""
        return task in self._watches
