"""`peerload clean` without a running agent: ended tasks are removed directly from the state directory.

An agent cannot start on a disk that is completely full. So nothing here needs free space to begin with: the database is
opened for this process alone, without a file for its shared memory; and if there is no space for the rows that record the
removal, the files are removed first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from typing import TYPE_CHECKING, Any

from peerload.agent.control.task_ids import REF
from peerload.agent.output.spool import Spool
from peerload.agent.store import schema
from peerload.agent.store.disk_space import is_full
from peerload.agent.store.maintenance import (
    FINAL,
    FilesRemoved,
    RemovalCriteria,
    RemovalSearch,
    RemoveOutputs,
    RemoveTasks,
    apply,
    keys_of,
)
from peerload.agent.store.schema import DATABASE, MEMBER_MAX
from peerload.model.errors import AgentUnavailable, BadRequest, NoSuchTask, StoreError
from peerload.model.task import SINGLE, task_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from peerload.agent.store.maintenance import EndedTask, MaintenanceRow

AT_A_TIME = 100
"""Tasks removed in one commit."""
REASON = "peerload clean"


def cleaned(state: Path, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """Carry out a request `clean` without an agent → its answer, with all names in it; None if this user has no
    database. Raises AgentUnavailable if an agent runs there, StoreError if the database cannot be used,
    BadRequest, NoSuchTask."""
    path = state / DATABASE
    try:
        if path.stat().st_uid != os.geteuid():  # its agent could not use files that we write there
            return None
    except OSError:
        return None
    with _locked(state):
        try:
            return _cleaned(state, path, asked)
        except sqlite3.Error as error:
            raise StoreError(f"the database {path} cannot be used", why=str(error)) from None


@contextlib.contextmanager
def _locked(state: Path) -> Iterator[None]:
    """Keep agents from starting in this state directory."""
    lock = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        hint = "ask that one:  peerload clean --socket PATH"
        raise AgentUnavailable(f"an agent works in {state}, and listens at another socket", hint=hint) from None
    finally:
        os.close(lock)


def _cleaned(state: Path, path: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    outputs_only, is_tried = bool(asked["outputs_only"]), bool(asked["dry_run"])
    gone: dict[str, Any] = {"tasks": [], "removed": 0, "outputs": 0, "output_bytes": 0, "in_use": 0}
    with contextlib.closing(OfflineCleaner(path)) as database:
        wanted = RemovalCriteria(
            before=time.time() - asked["older_s"] if asked["older_s"] else float("inf"),
            states=tuple(asked["states"]),
            keep=asked["keep"],
            named=tuple(_span(*database.ended_task(ref)) for ref in asked["tasks"]),
            with_output=outputs_only,
        )
        spool, kept = Spool(state), database.unfinished()
        bounded, after = database.bounded(wanted), None
        while bounded is not None and (page := database.page(bounded, kept, after, AT_A_TIME)):
            after = page[-1]
            if not is_tried:
                _remove(database, spool, page, outputs_only=outputs_only)
            gone["removed"] += len(page)
            gone["outputs"] += sum(task.output_bytes > 0 for task in page)
            gone["output_bytes"] += sum(task.output_bytes for task in page)
            gone["tasks"] += [task_name(database.node, task.counter, task.member) for task in page]
    return gone


def _span(counter: int, member: int | None) -> tuple[int, int, int]:
    """The members that a reference names: one, or all members of a submission."""
    return (counter, SINGLE, MEMBER_MAX) if member is None else (counter, member, member)


def _remove(database: OfflineCleaner, spool: Spool, page: list[EndedTask], *, outputs_only: bool) -> None:
    """Remove the rows, then the files, as an agent does; in the reverse order if the disk has no space for the
    rows."""
    keys = tuple(key for task in page for key in keys_of(task))
    rows = RemoveOutputs(tuple(page), time.time(), REASON) if outputs_only else RemoveTasks(tuple(page))
    is_kept = database.keep(rows)
    for key in keys:
        spool.drop(key)
    if not is_kept and not database.keep(rows):
        raise StoreError(
            "the disk is full: the removal cannot be recorded",
            why=f"the outputs of {len(page)} tasks are removed, but their tasks are still listed",
            hint="free some space by other means, then run this again",
        )
    database.keep(FilesRemoved(keys))


class OfflineCleaner(RemovalSearch):
    """The database, opened for this process alone. Raises sqlite3.Error, StoreError."""

    def __init__(self, path: Path) -> None:
        self._directory = path.parent
        self._reader = sqlite3.connect(path, isolation_level=None)
        try:
            self.node = self._take_over(path)
        except (sqlite3.Error, StoreError):
            self.close()
            raise

    def _take_over(self, path: Path) -> str:
        """Lock the database, and check that it has this version → the name of its node."""
        self._reader.execute("PRAGMA locking_mode = EXCLUSIVE")  # before any read, so that it needs no shared memory
        if self._reader.execute("PRAGMA user_version").fetchone()[0] != schema.VERSION:
            raise StoreError(
                f"the database {path} is of another version of peerload", hint="start its agent:  peerload up"
            )
        self._reader.execute("PRAGMA synchronous = FULL")
        return str(self._reader.execute("SELECT value FROM meta WHERE key = 'node'").fetchone()[0])

    def unfinished(self) -> tuple[int, ...]:
        """Submissions with tasks that have not ended."""
        states = ", ".join("?" * len(FINAL))
        found = self._reader.execute(f"SELECT DISTINCT counter FROM tasks WHERE state NOT IN ({states})", FINAL)  # noqa: S608 -- placeholders
        return tuple(int(row[0]) for row in found)

    def ended_task(self, ref: str) -> tuple[int, int | None]:
        """The ended task or array that a user names. Raises BadRequest, NoSuchTask."""
        parsed = REF.fullmatch(ref.replace("@", str(self._last()), 1) if ref.startswith("@") else ref)
        members = "" if parsed is None else parsed["members"] or ""
        if parsed is None or parsed["home"] not in (None, self.node) or not (members or "0").isdigit():
            raise BadRequest(
                f"{ref!r} is not a task of {self.node}", why=f"ids look like 42, 42.7, {self.node}/42 or @"
            )
        counter, member = int(parsed["counter"]), int(members) if members else None
        found = self._reader.execute(
            "SELECT count(*), coalesce(sum(ended_at = 0), 0) FROM tasks WHERE counter = ? AND ? IN (member, -2)",
            (counter, -2 if member is None else member),
        ).fetchone()
        if not found[0]:
            raise NoSuchTask(f"no task {ref} here")
        if found[1]:
            raise BadRequest(f"{ref} has not ended", why="only an agent can end tasks", hint="peerload up")
        return counter, member

    def _last(self) -> int:
        return int(self._reader.execute("SELECT coalesce(max(counter), 0) FROM submissions").fetchone()[0])

    def keep(self, upkeep: MaintenanceRow) -> bool:
        """Commit these rows. → False if the disk has no space for them."""
        self._reader.execute("BEGIN IMMEDIATE")
        try:
            apply(self._reader, upkeep, remembered_from=0.0)  # only an agent forgets tokens
            self._reader.execute("COMMIT")
        except sqlite3.Error as error:
            if self._reader.in_transaction:
                self._reader.execute("ROLLBACK")
            if is_full(error, self._directory):
                return False
            raise
        return True
