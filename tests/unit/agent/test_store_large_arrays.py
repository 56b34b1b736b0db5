"""What is asked of the database about an array costs the same however many of its members have ended."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from peerload.agent.store.maintenance import put_jobs
from peerload.agent.store.reader import Criteria
from peerload.model.actions import PutChores, PutSubmission
from peerload.model.task import NO_TERMS, CompletionJob, SubmitOptions, TaskState
from tests.support import steps_of
from tests.unit.agent.test_store import Opened, put, submission

MEMBERS = 2_000
STEPS_MAX = 1_000
"""Of SQLite's machine; a look at each member takes many times as many."""


@pytest.fixture(name="opened")
def fixture_opened(tmp_path: Path) -> Iterator[Opened]:
    """Array 1: all have ended but the last; array 2: all have; array 3: all have, the last has failed."""
    with Opened(tmp_path / "db") as opened:
        for counter, last in enumerate((TaskState.QUEUED, TaskState.DONE, TaskState.FAILED), start=1):
            numbers = tuple(range(1, MEMBERS + 1))
            states = [*[TaskState.DONE] * (MEMBERS - 1), last]
            opened.keep(
                submission(counter, numbers),
                *(
                    put(counter, state, number, ended_at=0.0 if state is TaskState.QUEUED else float(number))
                    for number, state in zip(numbers, states, strict=True)
                ),
            )
        yield opened


@pytest.mark.parametrize(("array", "notices"), [(1, 0), (2, 1)])
def test_whether_a_notice_is_owed(opened: Opened, tmp_path: Path, array: int, notices: int) -> None:
    del opened
    with contextlib.closing(sqlite3.connect(tmp_path / "db")) as connection:
        row = PutChores(f"ws1/{array}.1", (CompletionJob.NOTIFY,))
        assert steps_of(connection, lambda: put_jobs(connection, row, (array, 1))) < STEPS_MAX
        assert connection.execute("SELECT count(*) FROM chores").fetchone() == (notices,)


@pytest.mark.parametrize("array", [1, 2, 3])
def test_whether_any_has_failed(opened: Opened, array: int) -> None:
    reader = opened.store._reader
    assert reader is not None
    assert steps_of(reader, lambda: opened.store.found(f"ws1/{array}")) < STEPS_MAX
    found = opened.store.found(f"ws1/{array}")
    assert found.is_known
    assert found.is_over == (array != 1)
    assert bool(found.failed) == (array == 3)
    assert opened.store.found("ws1/3.1").failed == ""
    assert f"ws1/3.{MEMBERS}" in opened.store.found(f"ws1/3.{MEMBERS}").failed
    assert not opened.store.found("ws1/4").is_known


def test_the_terms_of_all_that_is_unfinished_are_read_in_one_query_and_equal_ones_are_one(tmp_path: Path) -> None:
    count = 200
    with Opened(tmp_path / "db") as opened:
        for counter in range(1, count + 1):
            given = SubmitOptions(group=f"g{counter % 2}") if counter % 4 else NO_TERMS
            row = msgspec.structs.replace(submission(counter).submission, terms=given)
            opened.keep(PutSubmission(row), put(counter))
        queries: list[str] = []
        reader = opened.store._reader
        assert reader is not None
        reader.set_trace_callback(queries.append)
        tasks = opened.store.recover().tasks
        reader.set_trace_callback(None)
        assert len(queries) < count
        assert [row.terms.group for row in tasks[:5]] == ["g1", "g0", "g1", "", "g1"]
        assert len({id(row.terms) for row in tasks}) == 3


def test_a_long_list_is_looked_for_in_another_thread_and_is_the_same(opened: Opened) -> None:
    store = opened.store
    reader = store._reader
    assert reader is not None
    with ThreadPoolExecutor(1) as thread:

        def beside(limit: int) -> object:
            return thread.submit(store.listed_in_thread, store.path, 0.0, limit, Criteria()).result()

        for limit in (1, 100, 10 * MEMBERS):
            assert steps_of(reader, lambda limit=limit: beside(limit)) == 0  # type: ignore[misc]
            assert beside(limit) == store.listed(0.0, limit)
