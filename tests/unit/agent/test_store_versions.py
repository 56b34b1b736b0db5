"""Databases that older versions made are taken over, with all that is in them."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec

from peerload.model.actions import PutFloor
from peerload.model.task import Exit, FenceKind, TaskState, Usage
from tests.each import each
from tests.unit.agent.test_store import NOW, Opened, put, steps, submission, uid

OF_THE_SECOND_SCHEMA = """
BEGIN;
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE environments (digest BLOB PRIMARY KEY, environment BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE submissions (
    counter INTEGER PRIMARY KEY, token TEXT NOT NULL, digest BLOB NOT NULL, spec BLOB NOT NULL,
    environment BLOB NOT NULL, members INTEGER NOT NULL, submitted_at REAL NOT NULL);
CREATE INDEX submission_by_token ON submissions (token);
CREATE TABLE tasks (
    counter INTEGER NOT NULL, member INTEGER NOT NULL, uid BLOB NOT NULL, state TEXT NOT NULL, attempt INTEGER NOT NULL,
    node TEXT NOT NULL, nonce INTEGER NOT NULL, machine_boot TEXT NOT NULL, lease_s REAL NOT NULL,
    migrations INTEGER NOT NULL, submitted_at REAL NOT NULL, started_at REAL NOT NULL, ended_at REAL NOT NULL,
    exit BLOB, reason TEXT NOT NULL, more BLOB, PRIMARY KEY (counter, member)) WITHOUT ROWID;
CREATE INDEX unfinished ON tasks (state, counter, member) WHERE ended_at = 0;
CREATE INDEX ended ON tasks (ended_at) WHERE ended_at > 0;
CREATE TABLE executions (
    uid BLOB NOT NULL, attempt INTEGER NOT NULL, record BLOB NOT NULL, PRIMARY KEY (uid, attempt)) WITHOUT ROWID;
CREATE TABLE floors (
    uid BLOB PRIMARY KEY, floor INTEGER NOT NULL, at REAL NOT NULL, kind INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE events (
    number INTEGER PRIMARY KEY, at REAL NOT NULL, what TEXT NOT NULL, state TEXT NOT NULL, counter INTEGER,
    member INTEGER, task TEXT, attempt INTEGER NOT NULL, node TEXT NOT NULL, reason TEXT NOT NULL);
CREATE INDEX event_of ON events (counter, member) WHERE counter IS NOT NULL;
PRAGMA user_version = 2;
INSERT INTO meta VALUES ('store_id', '00112233');
COMMIT;
"""
"""As databases of version 2 were made at first; later ones had floors.home, too."""


def test_a_database_of_the_first_schema_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with Opened(path) as opened:
        opened.keep(submission(1), put(1), submission(2), put(2, TaskState.DONE, ended_at=NOW))
        before = steps(opened.store, "ws1/1"), opened.store.recover()
    with sqlite3.connect(path) as old:
        old.executescript(
            "CREATE TABLE history (counter INTEGER NOT NULL, member INTEGER NOT NULL, at REAL NOT NULL, state TEXT NOT NULL,"
            " reason TEXT NOT NULL, attempt INTEGER NOT NULL, node TEXT NOT NULL);"
            "CREATE INDEX history_of ON history (counter, member);"
            "INSERT INTO history SELECT counter, member, at, state, reason, attempt, node FROM events ORDER BY number;"
            "DROP TABLE events; DROP INDEX unfinished;"
            "CREATE INDEX unfinished ON tasks (counter, member) WHERE ended_at = 0;"
            "ALTER TABLE tasks DROP COLUMN more; ALTER TABLE floors DROP COLUMN kind;"
            "ALTER TABLE floors DROP COLUMN home; ALTER TABLE submissions DROP COLUMN terms; PRAGMA user_version = 1;"
        )
    old.close()
    with Opened(path) as opened:
        assert (steps(opened.store, "ws1/1"), opened.store.recover()) == before


def _packed(**fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


@each("more", ["", "ALTER TABLE floors ADD COLUMN home TEXT NOT NULL DEFAULT '';"])
def test_a_database_of_the_second_schema_is_taken_over(tmp_path: Path, more: str) -> None:
    path, ended = tmp_path / "db", _packed(exit_code=0, usage={"user_s": 1.5, "memory_bytes_max": 4096})
    spec = {"argv": [b"true"], "directory": b"/"}
    execution = _packed(
        task="ws2/7", uid=uid(3), attempt=1, home="ws2", state="start", ts=2.0, lease_s=60.0, exit=None,
        spec={**spec, "environment": b"\x80"},
    )  # fmt: skip
    with sqlite3.connect(path) as old:
        old.executescript(OF_THE_SECOND_SCHEMA + more)
        row = "INSERT INTO tasks VALUES (?, -1, ?, ?, 1, 'ws1', 0, '', 60.0, 0, 1.0, 0.0, ?, ?, '', ?)"
        for counter, state, end, how, rest in (
            (1, "queued", 0.0, None, _packed(losses=1)),
            (2, "done", NOW, ended, None),
        ):
            submitted = (counter, f"token-{counter}", b"d" * 32, _packed(**spec), b"e", NOW)
            old.execute("INSERT INTO submissions VALUES (?, ?, ?, ?, ?, 0, ?)", submitted)
            old.execute(row, (counter, uid(counter), state, end, how, rest))
        old.execute("INSERT INTO environments VALUES (?, ?)", (b"e", b"\x80"))
        old.execute("INSERT INTO executions VALUES (?, 1, ?)", (uid(3), execution))
        old.execute("INSERT INTO floors (uid, floor, at, kind) VALUES (?, 2, ?, 0)", (uid(3), NOW))
        if more:
            old.execute("UPDATE floors SET home = 'ws2'")
    old.close()
    with Opened(path) as opened:
        recovered = opened.store.recover()
        assert [(row.record.task, row.record.losses, row.record.devices) for row in recovered.tasks] == [
            ("ws1/1", 1, ())
        ]
        assert [(found.task, found.devices) for found in recovered.executions] == [("ws2/7", ())]
        assert recovered.floors == ((uid(3), 2, FenceKind.STARTED, "ws2" if more else ""),)
        (done,) = opened.store.records(2, None)
        assert done.exit == Exit(0, usage=Usage(1.5, memory_bytes_max=4096))
        opened.keep(PutFloor(uid(4), 1, NOW, FenceKind.REFUSED, "ws3"))
    with Opened(path) as opened:
        assert opened.store.recover().floors[-1] == (uid(4), 1, FenceKind.REFUSED, "ws3")


def test_what_outputs_take_is_known_of_tasks_that_ended_before(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with sqlite3.connect(path) as old:
        old.executescript(OF_THE_SECOND_SCHEMA)
        exits = (
            None,
            b"no exit",
            _packed(exit_code=0, stdout_bytes=1, stderr_bytes=4097),
            _packed(exit_code=0, stdout_bytes=1 << 40),
        )
        for counter, how in enumerate(exits, start=1):
            row = "INSERT INTO tasks VALUES (?, -1, ?, 'done', 1, 'ws1', 0, '', 60.0, 0, 1.0, 1.0, ?, ?, '', NULL)"
            old.execute(row, (counter, uid(counter), NOW, how))
    old.close()
    with Opened(path) as opened:
        rows = opened.store.rows("SELECT output_bytes FROM tasks ORDER BY counter")
        assert rows == [(0,), (0,), (3 * 4096,), (16 << 20,)]
