"""The copy of the database before a change of its schema, and how to restore it.

The agent makes the copy itself, so that every way of installing it is covered. `deploy/install` restores it if the new
agent does not start: `python -m peerload.agent.store.backup DIRECTORY SCHEMA`.
"""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from peerload.agent.store.schema import DATABASE, KEEP_INCARNATION
from peerload.model.errors import StoreError
from peerload.security.private_files import sync

LOG_FILES = ("-wal", "-shm")


def copy_of(database: Path, version: int) -> Path:
    """The path of the copy of this database with the schema of this version."""
    return database.with_name(f"{database.name}.schema-{version}")


def back_up(connection: sqlite3.Connection, database: Path, version: int) -> Path:
    """Make a complete, durable copy of the database before its schema changes; remove older copies. Raises StoreError."""
    place = copy_of(database, version)
    new = place.with_name(f"{place.name}.new")
    try:
        new.unlink(missing_ok=True)
        with closing(sqlite3.connect(new, isolation_level=None)) as copy:
            connection.backup(copy)
        sync(new)
        new.replace(place)
        sync(database.parent)
        for older in _copies(database).values():
            if older != place:
                older.unlink()
    except (OSError, sqlite3.Error) as error:
        new.unlink(missing_ok=True)
        raise StoreError(
            f"the database {database} cannot be copied, which is done before its schema changes",
            why=str(error),
            hint=f"make room in {database.parent}, then start the agent again; nothing was changed",
        ) from None
    return place


def go_back(database: Path, version: int) -> Path | None:
    """Replace a newer database by the newest copy that a peerload of this schema can read → the path of the newer one;
    None if the database can be read as it is. The node's incarnation still grows. Raises StoreError."""
    if not database.exists():
        return None
    lock = os.open(database.parent / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"an agent uses {database.parent}", hint="systemctl stop peerload") from None
        with closing(sqlite3.connect(database, isolation_level=None)) as newer:
            found = newer.execute("PRAGMA user_version").fetchone()[0]
            incarnation = newer.execute("SELECT value FROM meta WHERE key = 'incarnation'").fetchone()
        if found <= version:
            return None
        readable = [number for number in _copies(database) if number <= version]
        if not readable:
            raise StoreError(f"there is no copy of {database} that a peerload of schema {version} can read")
        copy = copy_of(database, max(readable))
        if incarnation is not None:
            with closing(sqlite3.connect(copy, isolation_level=None)) as older:
                older.execute(KEEP_INCARNATION, incarnation)
        aside = database.with_name(f"{database.name}.set-aside-{found}")
        aside.unlink(missing_ok=True)
        os.link(database, aside)  # so a database exists under its name at any time
        for suffix in LOG_FILES:
            path = database.with_name(f"{database.name}{suffix}")
            if path.exists():
                path.replace(aside.with_name(f"{aside.name}{suffix}"))
        copy.replace(database)
        sync(database.parent)
        return aside
    finally:
        os.close(lock)


def _copies(database: Path) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for path in database.parent.glob(f"{database.name}.schema-*"):
        if number := re.fullmatch(r"\.schema-([0-9]+)", path.name.removeprefix(database.name)):
            found[int(number[1])] = path
    return found


def main(words: list[str]) -> int:
    """Restore the copy of the database that a peerload of this schema can read."""
    directory, version = words
    try:
        aside = go_back(Path(directory) / DATABASE, int(version))
    except (StoreError, OSError, sqlite3.Error) as error:
        sys.stderr.write(f"peerload: {error}\n")
        return 1
    if aside is not None:
        sys.stderr.write(
            f"peerload: the database is again the copy made before its schema changed; the newer one is {aside}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
