"""Client events: answers and task changes of the core, passed on to the clients that wait for them."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peerload.agent.runtime import now
from peerload.model.task import execution_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from peerload.agent.completion.saving import OutputSaver
    from peerload.agent.control.core_requests import CoreRequests, Decisions
    from peerload.agent.output.output import TaskOutputs
    from peerload.agent.requests.attach import AttachRequests
    from peerload.agent.requests.cancel_wait import CancelWaits
    from peerload.agent.views.metrics import TaskFigures
    from peerload.model.actions import Answer, AnswerPart, Decided, MembersCancelled, TaskChanged
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

    def __bool__(self) -> bool:
        return bool(self._watches)

    def is_watched(self, task: str) -> bool:
        """True if a client watches this task right now."""
        return task in self._watches


@dataclass(eq=False, repr=False)
class ClientEvents:
    """Passes answers and changes on to the clients that wait for them."""

    _core: CoreRequests
    _decisions: Decisions
    _watches: TaskWatches
    _attach: AttachRequests
    _cancel_waits: CancelWaits
    _saving: OutputSaver
    _output: TaskOutputs
    _figures: TaskFigures
    _also: Sequence[Callable[[TaskChanged], None]]
    """Others that learn of changes of tasks."""

    def answered(self, answer: Answer) -> None:
        """A request has its answer."""
        self._core.answered(answer)

    def answered_in_part(self, part: AnswerPart) -> None:
        """A part of the answer to a request has come."""
        self._core.answered_in_part(part)

    def changed(self, action: TaskChanged) -> None:
        """A task has a new durable record, or runs."""
        self._attach.changed(action)
        self._saving.changed(action)
        self._figures.changed(action)
        for call in self._also:
            call(action)
        record = action.record
        self._watches.changed(record, running=action.running)
        if record.state.is_final and record.exit is not None:
            key = execution_key(record.uid, record.attempt)
            self._output.ended(key, record.exit.stdout_bytes, record.exit.stderr_bytes)

    def members_cancelled(self, action: MembersCancelled) -> None:
        """Untouched members of an array were cancelled, of which nothing else is known here than who follows them."""
        if self._also or self._watches:
            for change in action.changes():
                self.changed(change)
        else:
            self._figures.cancelled(action.row.record, len(action.row.members))

    def attempt_gone(self, key: str) -> None:
        """No process of this attempt is left."""
        self._cancel_waits.attempt_gone(key)

    def restored(self) -> None:
        """The core has recovered its state after a start."""
        self._attach.restored()

    def decided(self, decision: Decided) -> None:
        """A decision was made."""
        self._decisions.add(decision, now().wall_s)
        self._figures.decided(decision)

    def waits(self, task: str, why: str) -> None:
        """A task has ended elsewhere, and its result cannot be fetched for now."""
        self._watches.delayed(task, why)
