"""Which rows count as a durability point, at which a crash is to fall."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from peerload.model.actions import DropExecution, PutExecution, PutFloor, PutTask, Row
from peerload.model.task import SCRATCH, ExecutionRecord, ExecutionState, FenceKind, TaskRecord, TaskSpec, TaskState
from tests.chaos.disk import Disk, points

UID = bytes(16)
GRANTED = TaskRecord("x/1", UID, TaskState.LEASED, 1.0, attempt=2, node="y", lease_s=60.0)
START = ExecutionRecord("h/1", UID, 2, "h", ExecutionState.START, TaskSpec((b"true",), SCRATCH), 7.0, 60.0)


def put(**changes: Any) -> PutTask:
    return PutTask(msgspec.structs.replace(GRANTED, **changes), 1.0, "")


def floor(kind: FenceKind) -> PutFloor:
    return PutFloor(UID, 2, 1.0, kind, "h")


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([put()], ["D2"]),
        ([put(node="x")], ["D2+D3"]),
        ([put(attempt=1, lease_s=120.0)], []),
        ([put(attempt=1, parked_ts=9.0)], ["PARKED"]),
        ([put(state=TaskState.QUEUED)], []),
        ([put(state=TaskState.CANCELLED)], ["D7"]),
        ([PutExecution(START), floor(FenceKind.STARTED)], ["D3"]),
        ([PutExecution(START), floor(FenceKind.STARTED_ONCE)], ["D3"]),
        ([floor(FenceKind.STARTED)], []),
        ([DropExecution(UID, 2), floor(FenceKind.REFUSED)], ["D6"]),
    ],
)
def test_a_point_is_what_is_written_for_the_first_time(rows: list[Row], found: list[str]) -> None:
    disk = Disk(1)
    disk.apply(put(attempt=1))
    assert points(rows, "x", disk) == found


def test_a_lease_that_is_parked_again_or_confirmed() -> None:
    disk = Disk(1)
    disk.apply(put(parked_ts=9.0))
    assert points([put(parked_ts=9.0, lease_s=120.0)], "x", disk) == []
    assert points([put()], "x", disk) == []
    assert points([put(parked_ts=11.0)], "x", disk) == ["PARKED"]
