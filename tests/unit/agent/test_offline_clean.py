"""`clean` on a state directory that no agent works in: what it finds, and what it leaves alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from peerload.agent.offline_clean import OfflineCleaner, cleaned
from peerload.agent.output.spool import Spool
from peerload.agent.store.schema import DATABASE
from peerload.agent.store.store import Store
from peerload.model.errors import AgentUnavailable, BadRequest, NoSuchTask
from peerload.model.task import execution_key

if TYPE_CHECKING:
    from pathlib import Path

    from peerload.agent.store.maintenance import MaintenanceRow

ASKED = {"tasks": [], "older_s": 0.0, "keep": 0, "states": [], "outputs_only": False, "dry_run": False}


def uid(counter: int, member: int) -> bytes:
    return bytes([counter, member + 1]) * 8


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Tasks 1 (done), 2 (failed), 3.1 (done) and 3.2 (queued), of node n, each ended one with an output."""
    store = Store(tmp_path / DATABASE, "n")
    store.open()
    assert store._writer is not None
    rows = [(1, -1, "done", 10.0), (2, -1, "failed", 20.0), (3, 1, "done", 30.0), (3, 2, "queued", 0.0)]
    columns = [row[1] for row in store._writer.execute("PRAGMA table_info(tasks)")]
    spool = Spool(tmp_path)
    for counter, member, word, ended_at in rows:
        has: dict[str, Any] = {
            "counter": counter,
            "member": member,
            "uid": uid(counter, member),
            "state": word,
            "attempt": 1,
            "ended_at": ended_at,
            "output_bytes": 4096 if ended_at else 0,
            "exit": None,
            "more": None,
        }
        text = {"node", "machine_boot", "reason", "task", "output_gone_why"}
        values = [has.get(column, "" if column in text else 0) for column in columns]
        store._writer.execute(f"INSERT INTO tasks VALUES ({', '.join('?' * len(columns))})", values)
        if ended_at:
            spool.keep(execution_key(uid(counter, member), 1), b"said", b"")
    store.close()
    return tmp_path


def outputs(state: Path) -> int:
    return len(list((state / "spool").iterdir()))


def left(state: Path) -> list[tuple[int, int]]:
    alone = OfflineCleaner(state / DATABASE)
    try:
        return [(row[0], row[1]) for row in alone._reader.execute("SELECT counter, member FROM tasks ORDER BY 1, 2")]
    finally:
        alone.close()


def test_what_has_ended_goes_with_its_output_but_no_part_of_an_array_that_has_not(state: Path) -> None:
    assert cleaned(state, {**ASKED, "dry_run": True}) == {
        "tasks": ["n/1", "n/2"],
        "removed": 2,
        "outputs": 2,
        "output_bytes": 8192,
        "in_use": 0,
    }
    assert len(left(state)) == 4
    before = outputs(state)
    assert cleaned(state, {**ASKED, "states": ["failed"]}) is not None
    assert left(state) == [(1, -1), (3, 1), (3, 2)]
    assert cleaned(state, {**ASKED, "tasks": ["1"], "outputs_only": True}) is not None
    assert left(state) == [(1, -1), (3, 1), (3, 2)]
    assert outputs(state) < before
    assert cleaned(state, {**ASKED, "tasks": ["n/1"]}) is not None
    assert left(state) == [(3, 1), (3, 2)]


@pytest.mark.parametrize(
    ("name", "error"), [("3", BadRequest), ("7", NoSuchTask), ("m/1", BadRequest), ("x", BadRequest)]
)
def test_a_name_that_is_no_ended_task_is_refused(state: Path, name: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        cleaned(state, {**ASKED, "tasks": [name]})


def test_where_there_is_no_room_for_the_rows_the_files_go_first(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, before = OfflineCleaner.keep, outputs(state)

    def is_full_until_a_file_has_gone(alone: OfflineCleaner, upkeep: MaintenanceRow) -> bool:
        return outputs(state) < before and keep(alone, upkeep)

    monkeypatch.setattr(OfflineCleaner, "keep", is_full_until_a_file_has_gone)
    assert cleaned(state, ASKED) is not None
    monkeypatch.undo()
    assert left(state) == [(3, 1), (3, 2)]


def test_a_state_directory_that_was_put_back_without_its_lock_is_cleaned(state: Path) -> None:
    (state / "lock").unlink()
    assert cleaned(state, ASKED) is not None
    assert left(state) == [(3, 1), (3, 2)]


def test_nothing_is_touched_where_an_agent_works_or_there_was_none(state: Path, tmp_path: Path) -> None:
    store = Store(state / DATABASE, "n")
    store.open()
    try:
        with pytest.raises(AgentUnavailable):
            cleaned(state, ASKED)
    finally:
        store.close()
    assert cleaned(tmp_path / "none", ASKED) is None
