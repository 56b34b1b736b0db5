"""A simulated disk: what is durable after a crash is what `apply` was given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.model.actions import (
    DropExecution,
    DropFates,
    DropFloors,
    DropGroup,
    PutChores,
    PutDrain,
    PutEvent,
    PutExecution,
    PutFate,
    PutFloor,
    PutGroup,
    PutMaking,
    PutMembers,
    PutRun,
    PutSubmission,
    PutTask,
    PutUsage,
)
from peerload.model.events import AgentStarted, MembersRow, TaskFound, TaskRow
from peerload.model.task import TaskRecord, TaskState, execution_key, failure_text, member_of, member_record

if TYPE_CHECKING:
    from peerload.model.actions import Row
    from peerload.model.events import Running, Submission
    from peerload.model.task import ExecutionRecord, Exit, FenceKind, GroupSettings, TaskOutcome


class SimStore:
    """The rows of one node. starts: how often an agent was started with it, which is the agent's incarnation."""

    def __init__(self) -> None:
        self.starts = 0
        self.making: set[int] = set()
        self.submissions: dict[int, Submission] = {}
        self.tasks: dict[str, TaskRecord] = {}
        self.executions: dict[str, ExecutionRecord] = {}
        self.floors: dict[bytes, tuple[int, FenceKind, str]] = {}
        self.drained: str | None = None
        self.fates: dict[str, TaskOutcome] = {}
        self.groups: dict[str, GroupSettings] = {}

    def apply(self, row: Row) -> None:  # noqa: C901 PLR0912 -- one line a row
        """Keep one row."""
        match row:
            case PutTask():
                self.tasks[row.record.task] = row.record
            case PutMembers():
                for one in row.rows():
                    self.apply(one)
            case PutUsage():
                for record in self.tasks.values():
                    is_it = (record.uid, record.attempt, record.node) == (row.uid, row.attempt, row.node)
                    if is_it and record.state is TaskState.CANCELLED and record.usage is None:
                        self.tasks[record.task] = msgspec.structs.replace(record, usage=row.usage)
            case PutRun():
                self.starts = max(self.starts, row.incarnation)
            case PutMaking():
                self.making.add(row.counter)
            case PutSubmission():
                self.making.discard(row.submission.counter)
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
            case PutFate():
                self.fates[row.fate.task] = row.fate
            case DropFates():
                for task in row.tasks:
                    self.fates.pop(task, None)
            case PutGroup():
                self.groups[row.group.name] = row.group
            case DropGroup():
                self.groups.pop(row.name, None)
            case PutEvent() | PutChores():
                pass  # for people, and for the agent itself: no node reads anything from it

    def started(self, running: Running, ended: dict[str, Exit]) -> AgentStarted:
        """The first event of an agent that starts now. Members of arrays that were cut short are dropped."""
        for name in [name for name in self.tasks if _counter(name) in self.making]:
            del self.tasks[name]
        rows: list[TaskRow] = []
        members: list[MembersRow] = []
        last: MembersRow | None = None
        for record in self.tasks.values():
            if not record.state.is_final:
                kept = self._submission_of(record.task)
                row = TaskRow(record, kept.spec_of(member_of(record.task)), terms=kept.terms)
                before, last = last, _untouched(row, kept, last)
                if last is None:
                    rows.append(row)
                elif before is not None and (before.record, before.first) == (last.record, last.first):
                    members[-1] = last
                else:
                    members.append(last)
        return AgentStarted(
            tasks=tuple(rows),
            members=tuple(members),
            executions=tuple(self.executions.values()),
            floors=tuple((uid, *floor) for uid, floor in self.floors.items()),
            counter=max((*self.submissions, *self.making), default=0),
            running=running,
            ended=tuple(ended.items()),
            drained=self.drained,
            fates=tuple(self.fates.values()),
            groups=tuple(self.groups.values()),
        )

    def found(self, task: str) -> TaskFound:
        """The durable records of a task or an array."""
        records = [record for name, record in self.tasks.items() if task == name or task == name.rpartition(".")[0]]
        over = [record for record in records if record.state in (TaskState.FAILED, TaskState.CANCELLED)]
        words = [
            failure_text(record.task, is_cancelled=record.state is TaskState.CANCELLED, reason=record.reason)
            for record in over
        ]
        is_over = bool(records) and all(record.state.is_final for record in records)
        return TaskFound(task, is_known=bool(records), failed=words[0] if words else "", is_over=is_over)

    def _submission_of(self, task: str) -> Submission:
        return self.submissions[_counter(task)]

    def submission_of(self, token: str, home: str) -> tuple[bytes, str, int] | None:
        """(digest, id, members; 0 = a single task) of the submission with this token, if there is one."""
        found = (
            (kept.digest, f"{home}/{counter}", len(kept.indices))
            for counter, kept in self.submissions.items()
            if kept.token == token
        )
        return next(found, None)


def _untouched(row: TaskRow, kept: Submission, last: MembersRow | None) -> MembersRow | None:
    """A task as an untouched member of a uniform array, alone or behind the last ones that were found; None if it is none."""
    record, member = row.record, member_of(row.record.task)
    array = record.task.rpartition(".")[0]
    alike = TaskRecord(array, b"", TaskState.QUEUED, record.submitted_at, reason=record.reason)
    if not kept.uid_key or record != member_record(alike, kept.uid_key, member):
        return None
    if last is not None and last.record == alike and (last.first == last.last or last.last + last.step == member):
        return msgspec.structs.replace(last, last=member, step=member - last.last)
    return MembersRow(alike, kept.uid_key, member, member, 1, row.spec, terms=row.terms)


def _counter(task: str) -> int:
    return int(task.partition("/")[2].partition(".")[0])
