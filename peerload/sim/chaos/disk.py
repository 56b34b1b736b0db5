"""The disk of one simulated machine: rows that are durable, and the rows on their way, of which a crash keeps a prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.model.actions import PutExecution, PutFloor, PutSubmission, PutTask
from peerload.model.task import ExecutionState, TaskState
from peerload.sim.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peerload.model.actions import Row

POINTS = ("D1", "D2", "D2+D3", "D3", "D4", "D5", "D6", "D7", "PARKED")
"""The durability points; D2+D3 is the one row of a task that starts at its home, PARKED what R12 says of a home that goes
away."""


class Disk(Store):
    """The rows of one database file. number: which file (a lost disk is followed by the next); starts: how often an agent
    was started with it, which is the agent's incarnation."""

    def __init__(self, home: str, number: int) -> None:
        super().__init__()
        self.home = home
        self.number = number
        self.starts = 0

    def _home(self) -> str:
        return self.home


def points(rows: Iterable[Row], node: str) -> list[str]:
    """The durability points that these rows of one turn are."""
    found: list[str] = []
    started = False
    for row in rows:
        match row:
            case PutSubmission():
                found.append("D1")
            case PutTask():
                point = _task_point(row, node)
                if point:
                    found.append(point)
            case PutExecution():
                started = started or row.record.state is ExecutionState.START
                found.append("D3" if row.record.state is ExecutionState.START else "D4")
            case PutFloor():
                if not started:
                    found.append("D6")
            case _:
                pass
    return found


def _task_point(row: PutTask, node: str) -> str:
    match row.record.state:
        case TaskState.LEASED:
            if row.record.parked_ts:
                return "PARKED"
            return "D2+D3" if row.record.node == node else "D2"
        case TaskState.DONE | TaskState.FAILED:
            return "D5"
        case TaskState.CANCELLED:
            return "D7"
        case _:
            return ""
