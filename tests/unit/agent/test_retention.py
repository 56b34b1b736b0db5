"""Which ended tasks and outputs go where there are too many, and what is said of it."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peerload.agent.completion import retention as retention_module
from peerload.agent.completion.retention import DATE_KEPT_EVERY_S, Retention, TaskRemover
from peerload.agent.runtime import RunState
from peerload.agent.store import schema
from peerload.agent.store.maintenance import MaintenanceRow, RemovalCriteria, RemovalSearch, RemoveTasks
from peerload.agent.store.store import DateAnchor, TrustedDate
from peerload.model.actions import Row
from peerload.model.errors import StoreError
from peerload.model.task import SINGLE, Exit, TaskState, execution_key
from tests.each import each
from tests.support import PATIENCE_S, wait_until
from tests.unit.agent.test_store import Opened, put, submission, uid

DAY_S = 86_400.0
KEPT: dict[str, Any] = {
    "ended_kept_s": 30 * DAY_S,
    "ended_tasks_max": 1000,
    "ended_output_bytes_max": 1 << 30,
    "ended_submissions_kept": 10,
}


def retention_of(
    opened: Opened, said: list[str] | None = None, cut_at: list[float] | None = None, **config: object
) -> Retention:
    """The retention of an agent that has this store and nothing else; what it says of removals goes to ``said``,
    the date by which it cuts outputs to ``cut_at``."""

    async def keep(*rows: Row | MaintenanceRow) -> None:
        opened.keep(*rows)

    def record(_what: str, _state: str, *, reason: str) -> None:
        if said is not None:
            said.append(reason)

    async def cut_old(now_s: float) -> None:
        if cut_at is not None:
            cut_at.append(now_s)

    parts: Any = SimpleNamespace(
        config=SimpleNamespace(node="ws1", **(KEPT | config)),
        disk=SimpleNamespace(state="ok"),
        store=SimpleNamespace(is_stalled=False, date=opened.store.date, keep=keep),
        journal=SimpleNamespace(record=record),
        node=SimpleNamespace(
            state=SimpleNamespace(node="ws1"),
            home=SimpleNamespace(arrays={}, tasks={}),
            eligibility=SimpleNamespace(remote_status=SimpleNamespace(is_watched=lambda _name: False)),
        ),
        watches=SimpleNamespace(is_watched=lambda _name: False),
        output=SimpleNamespace(is_busy=lambda _key: False, cut_old=cut_old),
        spool=SimpleNamespace(drop=lambda _key: None),
    )
    store = parts.store
    store.path = opened.store.path
    remover = TaskRemover(store, parts.spool, parts.node, parts.output, parts.watches, RunState())
    made = Retention(parts, store, parts.disk, remover, parts.output, parts.journal)
    made.parts = parts  # type: ignore[attr-defined]
    return made


def left(opened: Opened) -> list[tuple[int, int]]:
    """(submission, member) of the tasks that are left."""
    return sorted(opened.store.rows("SELECT counter, member FROM tasks"))


def with_output(opened: Opened) -> list[tuple[int, int]]:
    """The same of those whose output is left."""
    return sorted(opened.store.rows("SELECT counter, member FROM tasks WHERE output_bytes > 0"))


def _end(opened: Opened, counter: int, ended_at: float, members: int = 0, size_bytes: int = 0) -> None:
    """A submission of which everything has ended, a second apart from ``ended_at`` on."""
    indices = tuple(range(1, members + 1))
    rows: list[Row] = [submission(counter, indices)]
    for number, member in enumerate(indices or (None,)):
        exit_ = Exit(0, stdout_bytes=size_bytes)
        rows.append(put(counter, TaskState.DONE, member, ended_at=ended_at + number, attempt=1, exit=exit_))
    opened.keep(*rows)


def test_where_nothing_is_beyond_a_limit_the_database_is_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Opened(tmp_path / "db") as opened:
        _end(opened, 1, time.time() - DAY_S, members=5, size_bytes=10)
        retention = retention_of(opened)
        opens: list[Path] = []

        class Search(RemovalSearch):
            def __init__(self, path: Path) -> None:
                opens.append(path)
                super().__init__(path)

        monkeypatch.setattr(retention_module, "RemovalSearch", Search)
        asyncio.run(retention.enforce())
        assert opens == [tmp_path / "db"]
        assert len(left(opened)) == 5


def test_a_large_array_does_not_push_out_what_others_have(tmp_path: Path) -> None:
    said: list[str] = []
    now = time.time()
    with Opened(tmp_path / "db") as opened:
        for counter in range(1, 9):
            _end(opened, counter, now - 5 * DAY_S + counter)
        _end(opened, 9, now - 100, members=40)
        retention = retention_of(opened, said, ended_tasks_max=30, ended_submissions_kept=10)
        asyncio.run(retention.enforce())
        kept = left(opened)
        assert kept[:8] == [(counter, SINGLE) for counter in range(1, 9)]
        assert kept[8:] == [(9, member) for member in range(19, 41)]  # its oldest members have gone
        assert retention.early == 18
        (reason,) = said
        assert "18 ended tasks" in reason
        assert "ws1/9 (18)" in reason


def test_the_largest_give_first_and_down_to_the_same_size(tmp_path: Path) -> None:
    now = time.time()
    with Opened(tmp_path / "db") as opened:
        _end(opened, 1, now - 3 * DAY_S, members=8)
        _end(opened, 2, now - 2 * DAY_S, members=40)
        _end(opened, 3, now - 1 * DAY_S, members=30)
        _end(opened, 4, now - 9 * DAY_S)
        asyncio.run(retention_of(opened, ended_tasks_max=29, ended_submissions_kept=10).enforce())
        assert left(opened) == [
            *((1, member) for member in range(1, 9)),
            *((2, member) for member in range(31, 41)),
            *((3, member) for member in range(21, 31)),
            (4, SINGLE),
        ]


def test_where_nobody_has_more_than_a_share_the_oldest_go(tmp_path: Path) -> None:
    now = time.time()
    said: list[str] = []
    with Opened(tmp_path / "db") as opened:
        for counter in range(1, 8):
            _end(opened, counter, now - 5 * DAY_S + counter)
        asyncio.run(retention_of(opened, said, ended_tasks_max=4).enforce())
        assert left(opened) == [(counter, SINGLE) for counter in range(4, 8)]
        assert len(said) == 1


def test_outputs_are_shared_in_the_same_way_and_the_tasks_stay(tmp_path: Path) -> None:
    said: list[str] = []
    now = time.time()
    with Opened(tmp_path / "db") as opened:
        for counter in range(1, 5):
            _end(opened, counter, now - 5 * DAY_S + counter, size_bytes=4096)
        _end(opened, 5, now - 100, members=10, size_bytes=4096)
        retention = retention_of(opened, said, ended_output_bytes_max=12 * 4096, ended_submissions_kept=6)
        asyncio.run(retention.enforce())
        assert len(left(opened)) == 14
        kept = [*((counter, SINGLE) for counter in range(1, 5)), *((5, member) for member in range(3, 11))]
        assert with_output(opened) == kept
        assert " 2 " in said[0]
        assert retention.early == 2


@each("why", ["followed", "watched", "busy", "not over"])
def test_what_is_in_use_stays_until_it_is_not(tmp_path: Path, why: str) -> None:
    """Of two tasks that are old enough to go, the first is in use."""
    now = time.time()
    with Opened(tmp_path / "db") as opened:
        _end(opened, 1, now - 40 * DAY_S)
        _end(opened, 2, now - 40 * DAY_S)
        retention = retention_of(opened)
        parts: Any = retention.parts  # type: ignore[attr-defined]
        used: set[object] = {"ws1/1", uid(1000), execution_key(uid(1000), 1)}
        if why == "followed":
            parts.watches.is_watched = used.__contains__
        elif why == "watched":
            parts.node.eligibility.remote_status.is_watched = used.__contains__
        elif why == "busy":
            parts.output.is_busy = used.__contains__
        else:
            parts.node.home.tasks = dict.fromkeys(used)
        asyncio.run(retention.enforce())
        assert left(opened) == [(1, SINGLE)]
        used.clear()
        parts.node.home.tasks = {}
        asyncio.run(retention.enforce())
        assert left(opened) == []


def test_a_database_that_cannot_be_searched_fails_a_request_and_not_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def damaged(_path: Path) -> None:
        raise sqlite3.DatabaseError("database disk image is malformed")

    monkeypatch.setattr("peerload.agent.completion.retention.RemovalSearch", damaged)
    with Opened(tmp_path / "db") as opened:
        retention = retention_of(opened, retention_every_s=PATIENCE_S)
        with pytest.raises(StoreError):
            asyncio.run(retention._remover.remove(RemovalCriteria()))

        async def goes_on() -> None:
            run = asyncio.create_task(retention.run())
            await asyncio.to_thread(wait_until, lambda: caplog.records or run.done(), what="it to fail")
            assert not run.done()  # it waits for its next time
            run.cancel()

        asyncio.run(goes_on())


def test_files_of_a_removal_that_was_interrupted_are_removed_later(tmp_path: Path) -> None:
    dropped: list[str] = []
    with Opened(tmp_path / "db") as opened:
        _end(opened, 1, time.time() - 10)
        retention = retention_of(opened)
        parts: Any = retention.parts  # type: ignore[attr-defined]
        parts.spool.drop = dropped.append
        removable = RemovalSearch(opened.store.path)
        opened.keep(RemoveTasks(tuple(removable.page(RemovalCriteria(), (), None, 100))))
        asyncio.run(retention.enforce())
        assert dropped == [execution_key(uid(1000), 1)]
        assert removable.doomed(9) == []
        removable.close()


def test_the_trusted_date_is_kept_now_and_then_and_at_once_where_that_of_the_machine_is_doubted(tmp_path: Path) -> None:
    """What is kept is what the next start of the agent goes by."""
    passed_s, ahead_s = 0.0, 0.0
    with Opened(tmp_path / "db") as opened:
        retention = retention_of(opened)
        parts: Any = retention.parts  # type: ignore[attr-defined]
        began = time.time()
        date = TrustedDate(boot_id="b", clocks=lambda: (passed_s, began + passed_s + ahead_s))
        parts.store.date, retention._date_kept = date, date.anchor

        def kept() -> str:
            """What is in the database after another look."""
            asyncio.run(retention.enforce())
            ((value,),) = opened.store.rows(schema.DATE)
            return str(value)

        before = kept()
        passed_s = DATE_KEPT_EVERY_S - 1
        assert kept() == before
        passed_s = DATE_KEPT_EVERY_S
        first = kept()
        assert first == DateAnchor("b", passed_s, began + passed_s).packed() != before
        passed_s += 60.0
        assert kept() == first
        ahead_s = 40 * DAY_S
        doubted = kept()
        assert doubted == DateAnchor("b", passed_s, began + passed_s, 0.0).packed()
        passed_s += 60.0
        assert kept() == doubted
        ahead_s = 0.0
        assert kept() == DateAnchor("b", passed_s, began + passed_s).packed()
