"""What may be removed of a database, and what goes with it."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from peerload.agent.store.maintenance import (
    EndedTask,
    FilesRemoved,
    Prune,
    RemovalCriteria,
    RemovalSearch,
    RemoveOutputs,
    RemoveTasks,
    keys_of,
)
from peerload.agent.store.schema import MEMBER_MAX
from peerload.model.actions import PutChores, PutSubmission
from peerload.model.events import Submission
from peerload.model.task import SINGLE, CompletionJob, Exit, TaskState
from tests.support import steps_of
from tests.unit.agent.test_store import SPEC, Opened, put, submission, uid

ALL = (SINGLE, MEMBER_MAX)

OLD = time.time() - 30 * 86_400.0


def old_submission(counter: int, indices: tuple[int, ...] = ()) -> PutSubmission:
    return PutSubmission(Submission(counter, f"token-{counter}", b"d" * 32, SPEC, indices, OLD))


@pytest.fixture(name="opened")
def fixture_opened(tmp_path: Path) -> Iterator[Opened]:
    """1 … 4 have ended, in that order; 5 has not; of array 6 one member has."""
    with Opened(tmp_path / "db") as opened:
        for counter, state in enumerate(
            (TaskState.DONE, TaskState.FAILED, TaskState.DONE, TaskState.CANCELLED), start=1
        ):
            exit_ = Exit(0, stdout_bytes=5000 * (counter == 2))
            opened.keep(old_submission(counter), put(counter, state, attempt=2, ended_at=100.0 + counter, exit=exit_))
        opened.keep(old_submission(5), put(5))
        opened.keep(old_submission(6, (1, 2)), put(6, TaskState.DONE, 1, ended_at=50.0), put(6, member=2))
        yield opened


@pytest.fixture(name="removable")
def fixture_removable(opened: Opened, tmp_path: Path) -> Iterator[RemovalSearch]:
    del opened
    with contextlib.closing(RemovalSearch(tmp_path / "db")) as removable:
        yield removable


def found(
    removable: RemovalSearch, wanted: RemovalCriteria, kept: tuple[int, ...] = (6,), limit: int = 100
) -> list[tuple[int, int]]:
    bounded = removable.bounded(wanted)
    return [(task.counter, task.member) for task in removable.page(bounded, kept, None, limit)] if bounded else []


def test_each_condition_narrows_it(removable: RemovalSearch) -> None:
    assert found(removable, RemovalCriteria()) == [(1, -1), (2, -1), (3, -1), (4, -1)]
    assert found(removable, RemovalCriteria(), ()) == [(6, 1), (1, -1), (2, -1), (3, -1), (4, -1)]
    assert found(removable, RemovalCriteria(before=103.0)) == [(1, -1), (2, -1)]
    assert found(removable, RemovalCriteria(keep=3), ()) == [(6, 1), (1, -1)]
    assert found(removable, RemovalCriteria(keep=5), ()) == []
    assert found(removable, RemovalCriteria(states=("failed", "cancelled"))) == [(2, -1), (4, -1)]
    assert found(removable, RemovalCriteria(states=("done",), keep=1)) == [(1, -1)]
    assert found(removable, RemovalCriteria(states=("queued",))) == []
    assert found(removable, RemovalCriteria(with_output=True)) == [(2, -1)]
    assert found(removable, RemovalCriteria(named=((3, *ALL), (1, *ALL)))) == [(1, -1), (3, -1)]
    assert found(removable, RemovalCriteria(named=((6, 1, 1), (5, *ALL))), ()) == [(6, 1)]
    assert found(removable, RemovalCriteria(named=((6, 1, 1), (6, *ALL), (6, *ALL), (6, 2, 2))), ()) == [(6, 1)]
    assert (removable.ended(), removable.output_bytes()) == (5, 8192)


@pytest.mark.parametrize(
    "wanted", [RemovalCriteria(), RemovalCriteria(named=tuple((counter, *ALL) for counter in range(1, 7)))]
)
def test_pages_join_without_a_gap(removable: RemovalSearch, wanted: RemovalCriteria) -> None:
    seen: list[tuple[int, int]] = []
    after: EndedTask | None = None
    while page := removable.page(wanted, (), after, 2):
        seen += [(task.counter, task.member) for task in page]
        after = page[-1]
    assert sorted(seen) == [(1, -1), (2, -1), (3, -1), (4, -1), (6, 1)]
    assert len(seen) == len(set(seen))


def test_with_the_last_task_goes_all_that_only_it_needed(opened: Opened, removable: RemovalSearch) -> None:
    opened.keep(RemoveTasks(tuple(removable.page(RemovalCriteria(), (), None, 100))))
    tables = {
        table: opened.store.rows(f"SELECT count(*) FROM {table}")[0][0]
        for table in ("tasks", "submissions", "environments", "doomed")
    }
    assert tables == {"tasks": 2, "submissions": 2, "environments": 1, "doomed": 4 * 2}
    assert {row[0] for row in opened.store.rows("SELECT DISTINCT counter FROM events")} == {5, 6}
    assert opened.store.last_counter() == 6
    assert opened.store.was_removed(4)
    keys = tuple(removable.doomed(100))
    assert f"{uid(1000).hex()}-2" in keys
    opened.keep(FilesRemoved(keys))
    assert removable.doomed(100) == []


def test_the_environment_goes_with_the_last_submission_that_has_it_and_its_number_is_never_given_again(
    opened: Opened, removable: RemovalSearch
) -> None:
    opened.keep(put(5, TaskState.DONE, ended_at=500.0), put(6, TaskState.DONE, 2, ended_at=501.0))
    opened.keep(RemoveTasks(tuple(removable.page(RemovalCriteria(), (), None, 100))))
    for table, left in (("tasks", 0), ("submissions", 0), ("environments", 0), ("events", 1)):  # the last event stays
        assert opened.store.rows(f"SELECT count(*) FROM {table}") == [(left,)]
    assert opened.store.recover().counter == 6


def test_a_token_is_remembered_although_its_task_is_gone(opened: Opened, removable: RemovalSearch) -> None:
    new = PutSubmission(msgspec.structs.replace(submission(7).submission, submitted_at=time.time() - 5))
    opened.keep(new, put(7, TaskState.DONE, ended_at=900.0))
    opened.keep(RemoveTasks(tuple(removable.page(RemovalCriteria(named=((7, *ALL),)), (), None, 9))))
    assert opened.store.submission_of("token-7") == (b"d" * 32, "ws1/7", 0)
    assert removable.empty_submissions(time.time() - 60, 10) == ()
    assert removable.empty_submissions(time.time() + 60, 10) == (7,)
    opened.keep(Prune(0.0, (7,)))
    assert opened.store.submission_of("token-7") is not None  # it is too young
    assert removable.has_events_before(5e9)
    opened.keep(Prune(5e9, ()))
    assert not removable.has_events_before(5e9)


def test_outputs_alone_go_once(opened: Opened, removable: RemovalSearch) -> None:
    opened.keep(RemoveOutputs(tuple(removable.page(RemovalCriteria(with_output=True), (), None, 9)), 77.0, "why"))
    assert opened.store.output_gone("ws1/2") == (77.0, "why")
    assert opened.store.output_gone("ws1/1") is None
    assert found(removable, RemovalCriteria(with_output=True)) == []
    assert opened.store.records(2, None)[0].exit == Exit(0, stdout_bytes=5000)
    assert sorted(removable.doomed(9)) == [f"{uid(2000).hex()}-1", f"{uid(2000).hex()}-2"]


def test_what_something_is_owed_for_stays(opened: Opened, removable: RemovalSearch) -> None:
    opened.keep(
        PutChores("ws1/1", (CompletionJob.FILES, CompletionJob.NOTIFY)),
        PutChores("ws1/6.1", (CompletionJob.FILES, CompletionJob.NOTIFY)),
    )
    assert opened.store.rows("SELECT kind, counter, member FROM chores ORDER BY number") == [
        ("files", 1, -1), ("notify", 1, -1), ("files", 6, 1),
    ]  # fmt: skip
    assert found(removable, RemovalCriteria(), ()) == [(2, -1), (3, -1), (4, -1)]
    opened.keep(put(6, TaskState.DONE, 2, ended_at=501.0), PutChores("ws1/6.2", (CompletionJob.NOTIFY,)))
    assert opened.store.rows("SELECT kind, member FROM chores WHERE counter = 6 ORDER BY number") == [
        ("files", 1), ("notify", -1),
    ]  # fmt: skip


def test_a_damaged_row_is_no_obstacle(opened: Opened, removable: RemovalSearch, tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "db")) as damaged, damaged:
        damaged.execute("UPDATE tasks SET uid = 7, attempt = 'x', exit = 'y' WHERE counter = 1")
        damaged.execute("UPDATE tasks SET ended_at = 'z' WHERE counter = 2")
    assert found(removable, RemovalCriteria()) == [(1, -1), (3, -1), (4, -1)]
    (first, *_) = removable.page(RemovalCriteria(), (6,), None, 1)
    assert keys_of(first) == []
    tried = keys_of(msgspec.structs.replace(first, uid=b"u" * 16, attempt=1_040))
    assert [key.rpartition("-")[2] for key in tried] == [str(n) for n in (*range(1, 17), *range(1_025, 1_041))]
    opened.keep(RemoveTasks((first,)))
    assert not opened.store.has(1, None)


def test_a_page_costs_the_same_wherever_it_begins(tmp_path: Path) -> None:
    count = 1_000
    with Opened(tmp_path / "many") as opened:
        numbers = tuple(range(1, count + 1))
        opened.keep(
            submission(1, numbers), *(put(1, TaskState.DONE, number, ended_at=float(number)) for number in numbers)
        )
        with contextlib.closing(RemovalSearch(tmp_path / "many")) as removable:
            reader = removable._reader
            last = removable.page(RemovalCriteria(), (), None, count)[-3]
            first_steps = steps_of(reader, lambda: removable.page(RemovalCriteria(), (), None, 2))
            last_steps = steps_of(reader, lambda: removable.page(RemovalCriteria(), (), last, 2))
            assert last_steps < 2 * first_steps
