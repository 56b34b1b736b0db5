"""The disk of one simulated machine: rows that are durable, and the rows on their way, of which a crash keeps a prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.model.actions import PutExecution, PutFloor, PutMembers, PutSubmission, PutTask
from peerload.model.task import ExecutionState, FenceKind, TaskState
from tests.chaos.engine.store import SimStore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peerload.model.actions import Row
    from peerload.model.task import TaskRecord

POINTS = ("D1", "D2", "D2+D3", "D3", "D4", "D5", "D6", "D7", "PARKED")
"""The durability points; D2+D3 is the one row of a task that starts at its home, PARKED what R12 says of a home that goes
away."""


class Disk(SimStore):
    """The rows of one database file. number: which file (a lost disk is followed by the next)."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def points(rows: Iterable[Row], node: str, disk: SimStore) -> list[str]:
    """The durability points that these rows of one turn are, given what is on this disk."""
    found: list[str] = []
    for row in rows:
        match row:
            case PutSubmission():
                found.append("D1")
            case PutMembers():
                found += ["D7"] if row.record.state is TaskState.CANCELLED else []
            case PutTask():
                found += _task_point(row.record, node, disk.tasks.get(row.record.task))
            case PutExecution():
                found.append("D3" if row.record.state is ExecutionState.START else "D4")
            case PutFloor():
                found += ["D6"] if row.kind is FenceKind.REFUSED else []
            case _:
                pass
    return found


def _task_point(record: TaskRecord, node: str, before: TaskRecord | None) -> list[str]:
    """``before``: what is on disk of it. A lease that was granted before, and grows, is confirmed or taken back, is none."""
    match record.state:
        case TaskState.LEASED:
            if before is None or before.attempt != record.attempt:
                return ["D2+D3" if record.node == node else "D2"]
            return ["PARKED"] if record.parked_ts and record.parked_ts != before.parked_ts else []
        case TaskState.DONE | TaskState.FAILED:
            return ["D5"]
        case TaskState.CANCELLED:
            return ["D7"]
        case _:
            return []
