"""A simulated disk: what is durable after a crash is what `apply` was given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.model.actions import (
    DropExecution,
    DropFloors,
    PutDrain,
    PutEvent,
    PutExecution,
    PutFloor,
    PutSubmission,
    PutTask,
)
from peerload.model.events import AgentStarted, TaskRow
from peerload.model.task import execution_key

if TYPE_CHECKING:
    from peerload.model.actions import Row
    from peerload.model.events import Running, Submission
    from peerload.model.task import ExecutionRecord, Exit, FloorKind, TaskRecord


class Store:
    """The rows of one node."""

    def __init__(self) -> None:
        self.submissions: dict[int, Submission] = {}
        self.tasks: dict[str, TaskRecord] = {}
        self.executions: dict[str, ExecutionRecord] = {}
        self.floors: dict[bytes, tuple[int, FloorKind, str]] = {}
        self.drained: str | None = None

    def apply(self, row: Row) -> None:  # noqa: C901 -- one line a row
        """Keep one row."""
        match row:
            case PutTask():
                self.tasks[row.record.task] = row.record
            case PutSubmission():
                self.submissions[row.submission.counter] = row.submission
            case PutExecution():
                self.executions[execution_key(row.record.uid, row.record.attempt)] = row.record
            case DropExecution():
                self.executions.pop(execution_key(row.uid, row.attempt), None)
            case PutFloor():
                if row.floor >= self.floors.get(row.uid, (0, row.kind, ""))[0]:
                    self.floors[row.uid] = (row.floor, row.kind, row.home)
            case DropFloors():
                for uid in row.uids:
                    self.floors.pop(uid, None)
            case PutDrain():
                self.drained = row.reason
            case PutEvent():
                pass  # for people; nothing is read from it

    def started(self, running: Running, ended: dict[str, Exit]) -> AgentStarted:
        """What an agent that starts now is told."""
        rows = tuple(
            TaskRow(record, self.submissions[int(record.task.partition("/")[2].partition(".")[0])].spec)
            for record in self.tasks.values()
            if not record.state.is_final
        )
        tokens = tuple(
            (kept.token, kept.digest, name, len(kept.indices))
            for name, kept in ((f"{self._home()}/{counter}", kept) for counter, kept in self.submissions.items())
        )
        return AgentStarted(
            tasks=rows,
            executions=tuple(self.executions.values()),
            floors=tuple((uid, *floor) for uid, floor in self.floors.items()),
            tokens=tokens,
            counter=max(self.submissions, default=0),
            running=running,
            ended=tuple(ended.items()),
            drained=self.drained,
        )

    def _home(self) -> str:
        return next(iter(self.tasks), "").partition("/")[0]
