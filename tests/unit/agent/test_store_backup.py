"""The copy of the database that is made before its schema changes."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from peerload.agent.store import schema
from peerload.agent.store.backup import copy_of, go_back
from peerload.model.errors import StoreError
from tests.unit.agent.test_store import Opened, put, steps, submission
from tests.wording import Says

if TYPE_CHECKING:
    from pathlib import Path

OLD = schema.VERSION
NEW = OLD + 1


def upgrade(monkeypatch: pytest.MonkeyPatch, step: str = "CREATE TABLE later (x);") -> None:
    """Be a peerload with one more step of the schema."""
    monkeypatch.setattr(schema, "VERSION", NEW)
    monkeypatch.setitem(schema.MIGRATIONS, NEW, step)


def schema_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        return int(database.execute("PRAGMA user_version").fetchone()[0])


def test_a_schema_step_can_be_gone_back_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "db"
    with Opened(path) as opened:
        opened.keep(submission(1), put(1))
        before = steps(opened.store, "ws1/1"), opened.store.recover()
        store_id = opened.store.store_id
        opened.store.next_incarnation()
    assert go_back(path, OLD) is None
    with monkeypatch.context() as patched:
        upgrade(patched, "UPDATE events SET reason = 'another';")
        with Opened(path) as opened:
            assert steps(opened.store, "ws1/1") != before[0]
            assert opened.store.next_incarnation() == 2
    assert (schema_of(path), schema_of(copy_of(path, OLD))) == (NEW, OLD)
    with pytest.raises(StoreError, match=f"its schema is {NEW}"):
        Opened(path)
    aside = go_back(path, OLD)
    assert aside is not None
    assert (schema_of(path), schema_of(aside)) == (OLD, NEW)
    with Opened(path) as opened:
        assert (steps(opened.store, "ws1/1"), opened.store.recover()) == before
        assert opened.store.store_id == store_id
        assert opened.store.next_incarnation() == 3, "peers have met the second"


def test_what_the_newer_one_acknowledged_is_known_to_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "db"
    with Opened(path) as opened:
        opened.keep(submission(1), put(1))
        store_id = opened.store.store_id
    with monkeypatch.context() as patched:
        upgrade(patched)
        with Opened(path) as opened:
            opened.keep(submission(2), put(2))
    assert go_back(path, OLD) is not None
    with Opened(path) as opened:
        assert opened.store.lost is not None
        assert opened.store.store_id != store_id


def test_no_schema_step_without_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "db"
    with Opened(path):
        pass
    copy_of(path, OLD).mkdir()  # in the way
    upgrade(monkeypatch)
    with pytest.raises(StoreError, match=Says.CANNOT_BE_COPIED()):
        Opened(path)
    assert schema_of(path) == OLD


def test_only_the_newest_copy_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "db"
    with Opened(path):
        pass
    copy_of(path, OLD - 1).touch()
    upgrade(monkeypatch)
    with Opened(path):
        pass
    assert sorted(tmp_path.glob("db.schema-*")) == [copy_of(path, OLD)]


def test_nothing_to_go_back_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "db"
    assert go_back(path, OLD) is None
    with monkeypatch.context() as patched:
        upgrade(patched)
        with Opened(path), pytest.raises(StoreError, match=Says.IN_USE()):
            go_back(path, OLD)
    with pytest.raises(StoreError, match="no copy"):
        go_back(path, OLD)
    assert schema_of(path) == NEW
