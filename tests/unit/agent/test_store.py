"""The store: what it acknowledged is there afterwards, whatever happens to its process."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from peerload.agent.store import reader, store
from peerload.agent.store import schema as store_rows
from peerload.agent.store.disk_space import DiskReserve
from peerload.agent.store.maintenance import MaintenanceRow
from peerload.agent.store.store import Store
from peerload.model.actions import (
    DropExecution,
    PutEvent,
    PutExecution,
    PutFloor,
    PutMaking,
    PutRun,
    PutSubmission,
    PutTask,
    PutUsage,
    Row,
)
from peerload.model.errors import StoreError
from peerload.model.events import Submission, TaskFound
from peerload.model.task import (
    ExecutionRecord,
    ExecutionState,
    Exit,
    FenceKind,
    Grant,
    TaskRecord,
    TaskSpec,
    TaskState,
    Usage,
)
from tests.each import each
from tests.support import PATIENCE_S, wait_until
from tests.wording import Says

NOW = 4e9  # far enough ahead for every retention
FULL = 2
"""What SQLite calls the setting by which each commit is synced, also one that goes to the log."""
SPEC = TaskSpec(argv=(b"true",), directory=b"/", environment=b"\x81\xc4\x01A\xc4\x01\xff")


def uid(number: int) -> bytes:
    return number.to_bytes(16, "big")


def submission(counter: int, indices: tuple[int, ...] = ()) -> PutSubmission:
    return PutSubmission(Submission(counter, f"token-{counter}", b"d" * 32, SPEC, indices, NOW))


def record(counter: int, state: TaskState = TaskState.QUEUED, member: int | None = None, **more: object) -> TaskRecord:
    task = f"ws1/{counter}" + ("" if member is None else f".{member}")
    return TaskRecord(task=task, uid=uid(counter * 1000 + (member or 0)), state=state, submitted_at=NOW, **more)  # type: ignore[arg-type]


def put(counter: int, state: TaskState = TaskState.QUEUED, member: int | None = None, **more: object) -> PutTask:
    return PutTask(record(counter, state, member, **more), NOW, f"became {state}")


class Opened:
    """A store with its writer, on threads as the daemon has it."""

    def __init__(self, path: Path, reserve: DiskReserve | None = None) -> None:
        self.store = Store(path, "ws1", reserve)
        self.store.open()
        self.errors: list[Exception] = []
        self.batches: list[int] = []
        self.store.start_writer(self)

    def failed(self, error: Exception) -> None:
        self.errors.append(error)

    def committed(self, done: list[Callable[[], None]]) -> None:
        self.batches.append(len(done))
        for call in done:
            call()

    def keep(self, *rows: Row | MaintenanceRow) -> None:
        durable = threading.Event()
        self.store.persist(rows, durable.set)
        assert durable.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()


def test_that_a_task_was_started_is_forgotten_by_age_only_where_that_does_no_harm(tmp_path: Path) -> None:
    path, guest = tmp_path / "db", ExecutionRecord("ws2/5", uid(4), 2, "ws2", ExecutionState.START, SPEC, 1.5, 60.0)
    with Opened(path) as opened:
        kinds = (FenceKind.STARTED, FenceKind.REFUSED, FenceKind.STARTED_ONCE, FenceKind.STARTED)
        opened.keep(*(PutFloor(uid(number), 2, 1.0, kind) for number, kind in enumerate(kinds, start=1)))
        opened.keep(PutExecution(guest), PutFloor(uid(5), 2, NOW, FenceKind.REFUSED))
    with Opened(path) as opened:
        assert opened.store.recover().floors == (
            (uid(3), 2, FenceKind.STARTED_ONCE, ""),  # or a task that may run once only is started again
            (uid(4), 2, FenceKind.STARTED, ""),  # its attempt is still here
            (uid(5), 2, FenceKind.REFUSED, ""),
        )


def test_a_run_comes_back_as_a_later_one_than_it_came_to_count_as(tmp_path: Path) -> None:
    with Opened(tmp_path / "db") as opened:
        assert opened.store.next_incarnation() == 1
        opened.keep(PutRun(7, "another id"))
        opened.keep(submission(1), put(1))
    with Opened(tmp_path / "db") as opened:
        assert (opened.store.next_incarnation(), opened.store.store_id) == (8, "another id")
        assert opened.store.lost is None


def test_an_array_that_is_kept_in_parts_is_there_with_its_last_part(tmp_path: Path) -> None:
    with Opened(tmp_path / "db") as opened:
        kept = opened.store
        opened.keep(PutMaking(1), put(1, member=1), put(1, member=2))
        opened.keep(put(1, member=3))
        assert not kept.has(1, None)
        assert not kept.records(1, None)
        assert (kept.counts(), kept.last_counter(), kept.submission_of("token-1")) == ({}, None, None)
        leased = put(1, TaskState.LEASED, 1, attempt=1, node="ws2")
        opened.keep(submission(1, (1, 2, 3, 4)), put(1, member=4), leased)
        assert [found.task for found in kept.records(1, None)] == [f"ws1/1.{member}" for member in (1, 2, 3, 4)]
        assert kept.counts() == {"queued": 3, "leased": 1}
        assert [(event.task, event.state) for event in kept.events(0, 100)] == [
            ("ws1/1", "queued"),
            ("ws1/1.1", "leased"),
        ]


def test_an_array_that_was_cut_short_is_dropped_and_its_number_is_not_given_again(tmp_path: Path) -> None:
    with Opened(tmp_path / "db") as opened:
        opened.keep(submission(1), put(1))
        opened.keep(PutMaking(2), put(2, member=1), put(2, member=2))
    for _ in range(2):
        with Opened(tmp_path / "db") as opened:
            kept = opened.store.recover()
            assert [row.record.task for row in kept.tasks] == ["ws1/1"]
            assert not opened.store.damaged
            assert kept.counter == 2
            assert opened.store.rows("SELECT count(*) FROM tasks") == [(1,)]


def test_everything_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "db"
    exit_ = Exit(exit_code=3, reason="x", stdout_bytes=7)
    guest = ExecutionRecord("ws2/5", uid(9), 2, "ws2", ExecutionState.START, SPEC, 1.5, 60.0)
    with Opened(path) as opened:
        store_id = opened.store.store_id
        opened.keep(submission(1), put(1))
        opened.keep(submission(2, (4, 5)), put(2, member=4), put(2, member=5))
        opened.keep(put(1, TaskState.LEASED, attempt=1, node="ws2", nonce=1 << 62, machine_boot="b", lease_s=60.0))
        opened.keep(put(2, TaskState.DONE, 4, attempt=1, ended_at=NOW, started_at=NOW - 1, exit=exit_))
        opened.keep(PutExecution(guest), PutFloor(uid(9), 2, NOW, home="ws2"), PutFloor(uid(9), 1, NOW))
        opened.keep(PutExecution(ExecutionRecord("ws2/6", uid(8), 1, "ws2", ExecutionState.START, SPEC, 1.5, 60.0)))
        opened.keep(DropExecution(uid(8), 1))
    with Opened(path) as opened:
        assert opened.store.store_id == store_id
        kept = opened.store.recover()
        assert [row.record.task for row in kept.tasks] == ["ws1/1", "ws1/2.5"]
        assert kept.tasks[0].record == record(
            1, TaskState.LEASED, attempt=1, node="ws2", nonce=1 << 62, machine_boot="b", lease_s=60.0
        )
        assert {row.spec for row in kept.tasks} == {SPEC}
        assert kept.executions == (guest,)
        assert kept.floors == ((uid(9), 2, FenceKind.STARTED, "ws2"),), "a floor never sinks"
        assert opened.store.submission_of("token-1") == (b"d" * 32, "ws1/1", 0)
        assert opened.store.submission_of("token-2") == (b"d" * 32, "ws1/2", 2)
        assert (kept.counter, opened.store.last_counter()) == (2, 2)
        assert opened.store.records(2, 4)[0].exit == exit_
        assert [r.task for r in opened.store.records(2, None)] == ["ws1/2.4", "ws1/2.5"]
        assert opened.store.records(3, None) == []
        assert steps(opened.store, "ws1/1") == [
            (NOW, "queued", "became queued", 0, ""),
            (NOW, "leased", "became leased", 1, "ws2"),
        ]
        assert [state for _, state, *_ in steps(opened.store, "ws1/2.4")] == ["queued", "done"]


def test_every_field_of_a_record_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "db"
    whole = record(
        1,
        TaskState.LEASED,
        attempt=3,
        node="ws2",
        store="s",
        parked_ts=4.0,
        losses=1,
        lost_on=("ws3",),
        retry_of="ws1/0",
        grants=(Grant(3, "ws2"),),
        devices=("nvidia:GPU-0",),
        gpu_mem_bytes=36 << 30,
        gpu_alone=True,
        memory_retries=2,
    )
    with Opened(path) as opened:
        opened.keep(submission(1), PutTask(whole, NOW, "leased"))
    with Opened(path) as opened:
        assert [row.record for row in opened.store.recover().tasks] == [whole]


def test_what_a_cancelled_task_has_used_is_kept_once_and_changes_nothing_else(tmp_path: Path) -> None:
    first, later = Usage(user_s=3.0, joules=40.0), Usage(user_s=9.0)
    cancelled: dict[str, Any] = {"attempt": 2, "node": "ws2", "ended_at": NOW, "lost_on": ("ws3",)}
    done: dict[str, Any] = {"attempt": 2, "node": "ws2", "ended_at": NOW, "exit": Exit(0, usage=Usage(user_s=1.0))}
    with Opened(tmp_path / "db") as opened:
        for counter in range(1, 5):
            opened.keep(submission(counter), put(counter))
        opened.keep(
            put(1, TaskState.CANCELLED, **cancelled),
            PutUsage("ws1/1", uid(1000), 2, "ws3", later),  # it was not there
            PutUsage("ws1/1", uid(1000), 1, "ws2", later),  # it has had another attempt
            PutUsage("ws1/1", uid(1000), 2, "ws2", first),
        )
        opened.keep(put(2, TaskState.CANCELLED, **cancelled), put(3, TaskState.DONE, **done))
        opened.keep(
            PutUsage("ws1/1", uid(1000), 2, "ws2", later),
            PutUsage("", uid(2000), 2, "ws2", first),
            PutUsage("", uid(3000), 2, "ws2", later),
            PutUsage("", uid(9000), 2, "ws2", later),
            PutUsage("ws1/4", uid(4000), 0, "", later),
        )
    with Opened(tmp_path / "db") as opened:
        one, two, three, four = (opened.store.records(counter, None)[0] for counter in range(1, 5))
    assert one == record(1, TaskState.CANCELLED, usage=first, **cancelled)
    assert two == record(2, TaskState.CANCELLED, usage=first, **cancelled)
    assert three == record(3, TaskState.DONE, **done)
    assert four == record(4)


def test_a_list_has_what_is_unfinished_and_what_ended_lately(tmp_path: Path) -> None:
    with Opened(tmp_path / "db") as opened:
        for counter in range(1, 7):
            ended = counter % 2 == 0
            state = TaskState.DONE if ended else TaskState.QUEUED
            opened.keep(submission(counter), put(counter, state, ended_at=NOW + counter if ended else 0.0))
        assert listed(opened.store, ended_after=NOW + 3, limit=10) == (
            ["ws1/1", "ws1/3", "ws1/4", "ws1/5", "ws1/6"],
            False,
        )
        assert opened.store.counts() == {"queued": 3}


def listed(store: Store, **asked: Any) -> tuple[list[str], bool]:
    listing = store.list_tasks(**asked)
    return [record.task for record, _ in listing.rows], listing.truncated


def test_a_list_that_is_too_long_keeps_what_runs_who_is_next_and_who_ended_last(tmp_path: Path) -> None:
    with Opened(tmp_path / "db") as opened:
        opened.keep(submission(1, tuple(range(9))))
        states = [TaskState.DONE] * 3 + [TaskState.LEASED] * 2 + [TaskState.QUEUED] * 3 + [TaskState.HELD]
        for member, state in enumerate(states):
            ended_at = NOW + member if state.is_final else 0.0
            opened.keep(put(1, state, member, ended_at=ended_at, node="ws2" if state is TaskState.LEASED else ""))
        store = opened.store

        def members(limit: int, **asked: Any) -> str:
            names, truncated = listed(store, ended_after=0.0, limit=limit, **asked)
            return "".join(name.partition(".")[2] for name in names) + ("…" if truncated else "")

        assert members(9) == "012345678"
        assert members(8) == "01234567…"  # two that a node has, three that wait, three that ended; not the held one
        assert members(7) == "1234567…"
        assert members(5) == "23456…"
        assert members(4) == "2345…"
        assert members(3) == "345…"
        assert members(2) == "34…"
        assert members(1) == "3…"
        assert members(2, states=("queued",)) == "56…"
        assert members(3, states=("queued",)) == "567"
        assert members(2, states=("done",)) == "12…"
        assert members(4, states=("done", "held")) == "0128"
        assert members(9, node="ws2") == "34"
        assert store.counts() == {"leased": 2, "queued": 3, "held": 1}


def steps(store: Store, task: str) -> list[tuple[float, str, str, int, str]]:
    return [(step.at, step.state, step.reason, step.attempt, step.node) for step in store.history(task)]


def test_an_array_is_submitted_in_one_event_and_each_change_is_another(tmp_path: Path) -> None:
    with Opened(tmp_path / "db") as opened:
        members = [put(1, member=member) for member in range(1000)]
        opened.keep(submission(1, tuple(range(1000))), *members, put(1, TaskState.LEASED, 7, attempt=1, node="ws1"))
        opened.keep(PutEvent(NOW + 1, "task", "running", "ws1/1.7", 1, "ws1", "started here"))
        opened.keep(
            PutEvent(NOW + 2, "attempt", "started", "ws2/5", 3, "ws2"), PutEvent(NOW + 3, "node", "dead", node="ws3")
        )
        store = opened.store
        assert [(event.task, event.state) for event in store.events(0, 10)] == [
            ("ws1/1", "queued"),
            ("ws1/1.7", "leased"),
            ("ws1/1.7", "running"),
            ("ws2/5", "started"),
            ("", "dead"),
        ]
        assert store.events(0, 1)[0].reason == "became queued: 1000 tasks"
        assert [state for _, state, *_ in steps(store, "ws1/1.7")] == ["queued", "leased", "running"]
        assert [state for _, state, *_ in steps(store, "ws1/1.8")] == ["queued"]

        def told(**asked: Any) -> list[int]:
            return [event.number for event in store.events(asked.pop("after", 0), asked.pop("limit", 10), **asked)]

        assert told(newest=True, limit=2) == [4, 5]
        assert told(after=3) == [4, 5]
        assert told(tasks=["ws1/1.8"]) == [1]
        assert told(tasks=["ws1/1", "ws2/5"]) == [1, 2, 3, 4]
        assert told(what=["node", "attempt"]) == [4, 5]
        assert store.last_event() == 5


def test_events_are_bounded_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "EVENTS_KEPT_MAX", 50)
    monkeypatch.setattr(store, "PRUNE_EVERY", 10)
    with Opened(tmp_path / "db") as opened:
        for number in range(500):
            opened.keep(PutEvent(NOW + number, "node", "alive", node="ws3"))
        kept = opened.store.events(0, 1000)
        assert 50 <= len(kept) <= 60
        assert kept[-1].number == 500


def test_what_has_failed_and_whether_all_is_over_are_read_together(tmp_path: Path) -> None:
    with Opened(tmp_path / "db") as kept:
        kept.keep(submission(1, (1, 2)), put(1, member=1), put(1, member=2), submission(2), put(2))
        kept.keep(put(1, TaskState.FAILED, 2, ended_at=5.0, reason="exit code 3"))
        failed = "ws1/1.2 failed (exit code 3)"
        assert kept.store.found("ws1/1") == TaskFound("ws1/1", is_known=True, failed=failed)
        assert kept.store.found("ws1/1.1") == TaskFound("ws1/1.1", is_known=True)
        assert kept.store.found("ws1/1.2").is_over
        kept.keep(put(1, TaskState.DONE, 1, ended_at=6.0))
        assert kept.store.found("ws1/1") == TaskFound("ws1/1", is_known=True, failed=failed, is_over=True)
        assert kept.store.found("ws1/2") == TaskFound("ws1/2", is_known=True)
        assert kept.store.found("ws1/3") == TaskFound("ws1/3", is_known=False)


def test_who_was_granted_an_attempt_is_durable(tmp_path: Path) -> None:
    grants = (Grant(1, "ws2"), Grant(3, "ws3"))
    with Opened(tmp_path / "peerload.db") as opened:
        opened.keep(submission(1), put(1, TaskState.LEASED, attempt=3, node="ws3", grants=grants))
    with Opened(tmp_path / "peerload.db") as opened:
        assert opened.store.recover().tasks[0].record.grants == grants


def test_the_last_ends_are_there_to_learn_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(counter: int, state: TaskState, at: float, **more: Any) -> PutTask:
        return put(counter, state, attempt=1, ended_at=at, started_at=at - counter, **more)

    def exit_of(counter: int, at: float) -> Exit:
        return Exit(0, started_at=at - counter, ended_at=at)

    with Opened(tmp_path / "db") as opened:
        opened.keep(*(submission(counter) for counter in range(1, 7)))
        opened.keep(put(1), ended(2, TaskState.FAILED, NOW + 9, exit=exit_of(2, NOW + 9)))
        opened.keep(ended(3, TaskState.DONE, NOW + 7, exit=exit_of(3, NOW + 7)), ended(4, TaskState.FAILED, NOW + 8))
        opened.keep(ended(5, TaskState.CANCELLED, NOW + 8, exit=exit_of(5, NOW + 8)))
        opened.keep(ended(6, TaskState.DONE, NOW + 5, exit=exit_of(6, NOW + 5)))
        kept = opened.store.recover().past
        assert [run.exit for run in kept] == [exit_of(6, NOW + 5), exit_of(3, NOW + 7), exit_of(2, NOW + 9)]
        assert {(run.spec.argv, run.spec.directory) for run in kept} == {(SPEC.argv, SPEC.directory)}
        monkeypatch.setattr(reader, "PAST_RUNS_MAX", 2)
        assert len(opened.store.recover().past) == 2


def test_an_end_that_cannot_be_read_teaches_nothing(tmp_path: Path) -> None:
    exit_ = Exit(0, started_at=NOW - 1, ended_at=NOW)
    with Opened(tmp_path / "db") as opened:
        opened.keep(submission(1), submission(2))
        opened.keep(*(put(counter, TaskState.DONE, ended_at=NOW + counter, exit=exit_) for counter in (1, 2)))
        assert opened.store._writer is not None
        opened.store._writer.execute("UPDATE tasks SET exit = x'c1' WHERE counter = 1")
        assert [run.exit for run in opened.store.recover().past] == [exit_]


def paged(store: Store, limit: int, *, oldest_first: bool = False, since: float = 0.0) -> list[str]:
    names: list[str] = []
    page = store.ended(since, None, limit, oldest_first=oldest_first)
    while page.last is not None:
        assert len(page.rows) <= limit
        names += [record.task for record, _ in page.rows]
        page = store.ended(since, page.last, limit, oldest_first=oldest_first)
    return names


@each("limit", [1, 2, 3, 100])
def test_ended_tasks_come_in_pages_none_twice_and_none_left_out(tmp_path: Path, limit: int) -> None:
    with Opened(tmp_path / "db") as opened:
        opened.keep(submission(1), put(1, TaskState.DONE, ended_at=NOW + 9))
        opened.keep(submission(2, (0, 1, 2)), *(put(2, TaskState.DONE, member, ended_at=NOW + 5) for member in (0, 1)))
        opened.keep(put(2, member=2), submission(3), put(3), submission(4), put(4, TaskState.FAILED, ended_at=NOW + 5))
        assert paged(opened.store, limit) == ["ws1/1", "ws1/4", "ws1/2.1", "ws1/2.0"]
        assert paged(opened.store, limit, oldest_first=True) == ["ws1/1", "ws1/2.0", "ws1/2.1", "ws1/4"]
        assert paged(opened.store, limit, since=NOW + 5.5) == ["ws1/1"]
        before = opened.store.before_the_last(0.0, 2)
        assert before == (NOW + 5, 2, 0)
        assert opened.store.before_the_last(0.0, 4) is None


def test_what_waits_is_committed_together_and_told_in_order(tmp_path: Path) -> None:
    with Opened(tmp_path / "db") as opened:
        told: list[int] = []
        may_go_on = threading.Event()

        def wait() -> None:
            assert may_go_on.wait(PATIENCE_S)

        opened.store.persist([submission(1001), put(1001)], wait)
        for counter in range(1, 1001):
            opened.store.persist([submission(counter), put(counter)], lambda counter=counter: told.append(counter))  # type: ignore[misc]
        may_go_on.set()
        wait_until(lambda: len(told) == 1000)
        assert told == list(range(1, 1001))
        assert len(opened.batches) <= 2, "all that had come meanwhile is one transaction"
        assert len(opened.store.recover().tasks) == 1001


def test_every_start_has_a_greater_incarnation(tmp_path: Path) -> None:
    seen = []
    for _ in range(3):
        with Opened(tmp_path / "db") as opened:
            seen.append(opened.store.next_incarnation())
    assert seen == [1, 2, 3]


def test_a_commit_is_on_the_disk_when_it_returns(tmp_path: Path) -> None:
    with Opened(tmp_path / "db") as opened:
        writer = opened.store._writer
        assert writer is not None
        assert writer.execute("PRAGMA synchronous").fetchone() == (FULL,)
        assert writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_one_agent_a_directory(tmp_path: Path) -> None:
    with Opened(tmp_path / "db"), pytest.raises(StoreError, match=rf"another agent \(pid {os.getpid()}\)"):
        Store(tmp_path / "db", "ws1").open()
    with Opened(tmp_path / "db"):
        pass


def test_another_name_does_not_rename_the_tasks_of_a_node(tmp_path: Path) -> None:
    with Opened(tmp_path / "db"):
        pass
    with pytest.raises(StoreError, match="ws1") as caught:
        Store(tmp_path / "db", "ws2").open()
    assert "--node ws1" in caught.value.hint
    with Opened(tmp_path / "db"):
        pass


def test_a_token_is_found_again_however_many_came_after_it(tmp_path: Path) -> None:
    with Opened(tmp_path / "db") as opened:
        opened.keep(submission(1), put(1))
        opened.keep(submission(2, (1, 2)), put(2, member=1), put(2, member=2))
        assert opened.store.submission_of("token-1") == (b"d" * 32, "ws1/1", 0)
        assert opened.store.submission_of("token-2") == (b"d" * 32, "ws1/2", 2)
        assert opened.store.submission_of("token-3") is None


def test_a_newer_schema_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with Opened(path):
        pass
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match="newer"):
        Store(path, "ws1").open()
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match=Says.CANNOT_BE_USED()):
        Store(path, "ws1").open()


def test_a_row_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with Opened(path) as opened:
        opened.keep(submission(1), put(1))
    connection = sqlite3.connect(path)
    connection.execute("UPDATE submissions SET spec = x'c1'")
    connection.commit()
    connection.close()
    with Opened(path) as opened:
        opened.store.recover()
        assert [(damage.task, "submission 1 " in damage.why) for damage in opened.store.damaged] == [("ws1/1", True)]
        with pytest.raises(StoreError, match="ws1/1 is damaged"):
            opened.store.records(1, None)


def test_a_task_that_has_not_ended_is_read_however_sqlite_tells_when_it_did() -> None:
    row = (1, -1, b"u" * 16, "queued", 0, "", 0, "", 0.0, 0, 1.0, 0.0, 0.0, None, "", None)
    told = (*row[: store_rows.ENDED_AT], 0, *row[store_rows.ENDED_AT + 1 :])
    assert store_rows.decoded_record(told, "n1") == store_rows.decoded_record(row, "n1")
    with pytest.raises(StoreError, match="damaged"):
        store_rows.decoded_record((*row[: store_rows.ENDED_AT], 1, *row[store_rows.ENDED_AT + 1 :]), "n1")


def test_a_failed_write_is_final(tmp_path: Path) -> None:
    with Opened(tmp_path / "db") as opened:
        told: list[str] = []
        opened.keep(submission(1), put(1))
        opened.store.persist([submission(1)], lambda: told.append("the same counter twice"))
        wait_until(lambda: opened.errors)
        opened.store.persist([submission(2), put(2)], lambda: told.append("after the failure"))
    assert isinstance(opened.errors[0], StoreError)
    assert len(opened.errors) == 1
    assert told == []
    with Opened(tmp_path / "db") as opened:
        assert [row.record.task for row in opened.store.recover().tasks] == ["ws1/1"]


WRITER = """
import sys
import threading
from pathlib import Path
sys.path[:0] = {path!r}
from tests.unit.agent.test_store import Opened, put, submission
opened = Opened(Path({database!r}))
room = threading.Semaphore(100)


def acknowledge(counter):
    print(counter, flush=True)
    room.release()


for counter in range(1, 1_000_000):
    room.acquire()
    opened.store.persist([submission(counter), put(counter)], lambda counter=counter: acknowledge(counter))
"""


def test_kill_9_in_the_middle_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "db"
    root = str(Path(__file__).resolve().parents[3])
    code = WRITER.format(path=[root], database=str(path))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as acknowledged:
        last = 0
        for line in acknowledged:
            last = int(line)
            if last == 1000:
                process.send_signal(signal.SIGKILL)  # what it said before it died is read to the end
    process.wait()
    assert last >= 1000
    with Opened(path) as opened:
        kept = opened.store.recover()
    numbers = [int(row.record.task.partition("/")[2]) for row in kept.tasks]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= last
