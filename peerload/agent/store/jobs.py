"""Completion jobs in the database: written in the transaction of a task's end, so that no crash loses them, and
removed when they are done."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.agent.store import schema
from peerload.agent.store.rows import MEMBER_MAX, SINGLE
from peerload.model.task import CompletionJob

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection

    from peerload.agent.store.reader import StoreReader
    from peerload.model.actions import PutChores

DUE_S_MAX = 3600.0
"""Longest postponement: a job that is due later was postponed while the machine's date was ahead."""

_PUT = "INSERT OR IGNORE INTO chores (kind, counter, member, due_at) VALUES (?, ?, ?, 0)"
_COLUMNS = "number, kind, counter, member, due_at, tries, why"


class DueJob(msgspec.Struct, frozen=True, gc=False):
    """One chore. due_at: Unix s, 0 = at once; tries: how often it could not be done, and why the last time. member: SINGLE
    for a job of an array as a whole."""

    number: int
    kind: CompletionJob
    counter: int
    member: int
    due_at: float
    tries: int
    why: str


def put_jobs(writer: sqlite3.Connection, row: PutChores, place: tuple[int, int]) -> None:
    """Insert jobs within the transaction that has the task's end. An array has one notification, inserted with the
    end of its last task."""
    counter, member = place
    for chore in row.chores:
        if chore is CompletionJob.FILES:
            writer.execute(_PUT, (chore.value, counter, member))
        elif not _is_unfinished(writer, counter):
            writer.execute(_PUT, (chore.value, counter, SINGLE))


def _is_unfinished(writer: sqlite3.Connection, counter: int) -> bool:
    return writer.execute(schema.UNFINISHED_OF, (counter, SINGLE, MEMBER_MAX)).fetchone() is not None


def due(store: StoreReader, kind: CompletionJob, now: float, limit: int, besides: Collection[int]) -> list[DueJob]:
    """The first of a kind that are due, besides those (numbers); for the loop's own thread."""
    rows = store.rows(
        f"SELECT {_COLUMNS} FROM chores WHERE kind = ? AND NOT due_at BETWEEN ? AND ? ORDER BY due_at, number LIMIT ?",  # noqa: S608 -- constants
        (kind.value, math.nextafter(now, math.inf), now + DUE_S_MAX, limit + len(besides)),
    )
    return [job for job in map(_job_of, rows) if job.number not in besides][:limit]


def next_due_at(store: StoreReader) -> float | None:
    """The time at which the next postponed job is due (Unix s); None if none was postponed."""
    rows = store.rows("SELECT min(due_at) FROM chores WHERE due_at > 0")
    return rows[0][0] if rows and isinstance(rows[0][0], float) else None


def jobs_of(store: StoreReader, counter: int, member: int) -> list[DueJob]:
    """The jobs of a task that are still to be done."""
    rows = store.rows(
        f"SELECT {_COLUMNS} FROM chores WHERE counter = ? AND member IN (?, ?) ORDER BY number",  # noqa: S608 -- constants
        (counter, SINGLE, member),
    )
    return [_job_of(row) for row in rows]


def pending_notifications(store: StoreReader) -> set[tuple[int, int]]:
    """The number of each pending notification, and how often it has failed."""
    rows = store.rows("SELECT number, tries FROM chores WHERE kind = ?", (CompletionJob.NOTIFY.value,))
    return {(row[0], row[1]) for row in rows}


def _job_of(row: tuple[Any, ...]) -> DueJob:
    return DueJob(row[0], CompletionJob(row[1]), *row[2:])
