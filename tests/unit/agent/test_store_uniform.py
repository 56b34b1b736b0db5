"""Uniform arrays in the database: one row for many members on the way there, a row for each on disk, one object on the way back."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from peerload.agent.store import recovery
from peerload.model.actions import PutMaking, PutMembers, PutSubmission, PutTask
from peerload.model.events import TaskRow
from peerload.model.task import TaskRecord, TaskState, member_record
from tests.support import steps_of
from tests.unit.agent.test_store import NOW, Opened, put, steps, submission

KEY = b"1" * 16
KEYS = {1: KEY, 3: b"3" * 16}
MEMBERS = range(1, 41)


def members(some: range, state: TaskState = TaskState.QUEUED, *, counter: int = 1, **changes: Any) -> PutMembers:
    record = TaskRecord(f"ws1/{counter}", b"", state, NOW, reason="submitted", **changes)
    return PutMembers(record, KEYS[counter], some[0], some[-1], some.step, NOW, record.reason)


def uniform(some: range = MEMBERS, counter: int = 1) -> PutSubmission:
    kept = submission(counter, tuple(some)).submission
    return PutSubmission(msgspec.structs.replace(kept, uid_key=KEYS[counter]))


def touched(number: int, state: TaskState, **changes: Any) -> PutTask:
    untouched = member_record(members(MEMBERS).record, KEY, number)
    return PutTask(msgspec.structs.replace(untouched, state=state, **changes), NOW, f"became {state}")


def recovered(path: Path) -> tuple[set[TaskRow], list[range]]:
    """All that is unfinished, task by task; and which members came together."""
    with Opened(path) as opened:
        kept = opened.store.recover()
    together = [one for row in kept.members for one in row.rows()]
    assert len({*kept.tasks, *together}) == len(kept.tasks) + len(together)
    return {*kept.tasks, *together}, [row.members for row in kept.members]


def damage(path: Path, sql: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(sql)
        connection.commit()


def test_members_come_back_together_and_are_the_same_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "db"
    with Opened(path) as opened:
        opened.keep(PutMaking(1), members(range(1, 11)))
        opened.keep(members(range(11, 31)))
        opened.keep(uniform(), members(range(31, 41)), submission(2), put(2))
        opened.keep(uniform(range(5, 50, 5), 3), members(range(5, 50, 5), counter=3))
        opened.keep(touched(1, TaskState.LEASED, attempt=1, node="ws1"), touched(7, TaskState.HELD))
        opened.keep(touched(9, TaskState.DONE, attempt=1, ended_at=NOW), touched(20, TaskState.QUEUED, priority=3))
        opened.keep(members(range(30, 41), TaskState.CANCELLED, ended_at=NOW))
    found, together = recovered(path)
    assert together == [range(2, 7), range(8, 11, 2), range(11, 20), range(21, 30), range(5, 50, 5)]
    assert len(found) - sum(map(len, together)) == 4  # ws1/1.1, ws1/1.7, ws1/1.20, ws1/2
    monkeypatch.setattr(recovery, "UNIFORM_MAX", 0)
    assert recovered(path) == (found, [])


def test_what_is_told_of_them(tmp_path: Path) -> None:
    with Opened(tmp_path / "db") as opened:
        kept = opened.store
        opened.keep(PutMaking(1), members(range(1, 31)))
        assert not kept.has(1, None)
        opened.keep(uniform(), members(range(31, 41)), members(range(3, 8, 2), TaskState.CANCELLED, ended_at=NOW))
        assert kept.counts() == {"queued": 37}
        assert [(event.task, event.state) for event in kept.events(0, 100)] == [
            ("ws1/1", "queued"),
            *((f"ws1/1.{member}", "cancelled") for member in (3, 5, 7)),
        ]
        (gone,) = kept.records(1, 5)
        assert (gone.state, gone.ended_at, gone.uid) == (
            TaskState.CANCELLED,
            NOW,
            member_record(gone, KEY, 5).uid,
        )
        assert [state for _, state, *_ in steps(kept, "ws1/1.5")] == ["queued", "cancelled"]
        assert kept.records(1, 4)[0].state is TaskState.QUEUED


def test_a_cancelled_run_leaves_what_was_touched_between_as_it_is(tmp_path: Path) -> None:
    with Opened(tmp_path / "db") as opened:
        opened.keep(uniform(), members(MEMBERS), touched(4, TaskState.DONE, attempt=1, ended_at=NOW + 1))
        opened.keep(members(range(3, 6), TaskState.CANCELLED, ended_at=NOW))
        assert [record.state.value for record in opened.store.records(1, None)[2:5]] == [
            "cancelled",
            "done",
            "cancelled",
        ]


def test_an_array_that_was_cut_short_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with Opened(path) as opened:
        opened.keep(PutMaking(1), members(range(1, 31)))
    assert recovered(path) == (set(), [])
    with Opened(path) as opened:
        assert opened.store.recover().counter == 1


@pytest.mark.parametrize(
    ("sql", "damaged"),
    [
        ("UPDATE tasks SET uid = x'00' WHERE member = 5", ["ws1/1.5"]),
        ("UPDATE tasks SET uid = (SELECT uid FROM tasks WHERE member = 9) WHERE member = 5", ["ws1/1.5", "ws1/1.9"]),
        ("UPDATE tasks SET uid = (SELECT uid FROM tasks WHERE member = 5) WHERE member = 9", ["ws1/1.5", "ws1/1.9"]),
        ("UPDATE tasks SET reason = x'00' WHERE member = 5", ["ws1/1.5"]),
        ("UPDATE tasks SET more = x'00' WHERE member = 5", ["ws1/1.5"]),
        ("UPDATE tasks SET state = 'what' WHERE member = 5", []),
        ("UPDATE tasks SET ended_at = 'x' WHERE member = 5", ["ws1/1.5"]),
    ],
)
def test_a_damaged_member_is_named_and_the_others_are_served(tmp_path: Path, sql: str, damaged: list[str]) -> None:
    path = tmp_path / "db"
    with Opened(path) as opened:
        opened.keep(uniform(), members(MEMBERS))
    damage(path, sql)
    with Opened(path) as opened:
        opened.store.recover()
    assert [one.task for one in opened.store.damaged] == damaged or "state" in sql
    found, _ = recovered(path)
    names = {row.record.task for row in found}
    assert names == {f"ws1/1.{member}" for member in MEMBERS} - {*damaged, *(["ws1/1.5"] if "state" in sql else [])}


def test_a_key_that_cannot_be_read_makes_each_member_a_task(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with Opened(path) as opened:
        opened.keep(uniform(), members(MEMBERS))
    damage(path, "UPDATE submissions SET uid_key = 5")
    found, together = recovered(path)
    assert (len(found), together) == (len(MEMBERS), [])


@pytest.mark.parametrize("gathered", [False, True])
def test_what_ended_lately_is_found_without_a_look_at_what_waits(tmp_path: Path, *, gathered: bool) -> None:
    many = range(1, 4001)
    with Opened(tmp_path / "db") as opened:
        opened.keep(uniform(many), members(many), submission(2), put(2, TaskState.DONE, ended_at=NOW))
        reader, states = opened.store._reader, ("done", "cancelled", "failed")
        assert reader is not None
        assert steps_of(reader, lambda: opened.store.listed(NOW - 1, 200, states=states, gathered=gathered)) < len(many)
        found, _ = opened.store.listed(NOW - 1, 200, states=states, gathered=gathered)
        assert [row.first[:2] for row in found] == [(2, -1)]


def test_a_database_from_before_has_arrays_without_a_key(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with Opened(path) as opened:
        opened.keep(submission(2, (1, 2)), put(2, member=1), put(2, member=2))
    damage(path, "ALTER TABLE submissions DROP COLUMN uid_key")
    damage(path, "PRAGMA user_version = 1")
    with Opened(path) as opened:
        opened.keep(uniform(), members(MEMBERS))
    found, together = recovered(path)
    assert (len(found), together) == (2 + len(MEMBERS), [MEMBERS])
