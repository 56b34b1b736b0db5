"""Maintenance of a node's database: rows that the agent itself writes, besides those that the core decides on.

Pruning removes ended tasks, or only their outputs, and all data that only they needed. The rows are removed first. The same
transaction stores the names of their output files as *doomed*; the files are removed after that, and then the names.
So a crash in between leaves neither a task whose output is missing, nor a file that no row refers to.

Completion jobs are written in the transaction of a task's end, so that no crash loses them, and removed when they are done."""

from __future__ import annotations

import json
import math
import sqlite3
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.agent.store import schema
from peerload.agent.store.schema import MEMBER_MAX, apart
from peerload.model.task import SINGLE, CompletionJob, Exit, TaskState, execution_key

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from peerload.agent.store.reader import StoreReader
    from peerload.model.actions import PutChores


OUTPUT_BYTES_MAX = 16 << 20
"""Default limit of the bytes that are kept of one stream."""
BLOCK_BYTES = 4096
"""Files occupy whole blocks."""
ATTEMPTS_SWEPT_MAX = 16
"""Number of first and of last attempts of a task whose files are removed with it."""
BEYOND_SHARE_MAX = 1000
"""Maximum number of submissions over their share that are handled at a time."""
PRUNED_MAX = 200
"""Maximum number of old events and submissions that one transaction removes."""
FINAL = tuple(state.value for state in TaskState if state.is_final)

_FINAL = ", ".join(f"'{state}'" for state in FINAL)
_COLUMNS = "t.counter, t.member, t.uid, t.attempt, t.ended_at, t.output_bytes"
_FREE = (
    f"t.state IN ({_FINAL}) AND t.counter NOT IN (SELECT value FROM json_each(:kept))"  # noqa: S608 -- constants
    " AND NOT EXISTS (SELECT 1 FROM chores c WHERE c.counter = t.counter AND c.member IN (t.member, -1))"
)
"""A condition on removable tasks: ended, and without a pending completion job."""
_NOT_LAST = "number < (SELECT max(number) FROM events)"
"""The last event is kept: followers rely on growing numbers, and the next number is derived from the last."""
_DROP_EVENTS = f"DELETE FROM events WHERE counter = ? AND member = ? AND {_NOT_LAST}"  # noqa: S608 -- constants
_DOOM = "INSERT OR IGNORE INTO doomed VALUES (?)"
_FIRST = (0.0, -1, SINGLE - 1)
_LAST = (float("inf"), 1 << 62, 1 << 62)
DUE_S_MAX = 60.0
"""Maximum postponement: a job with a later due date was postponed while the wall clock was ahead."""
_PUT_JOB = "INSERT OR IGNORE INTO chores (kind, counter, member, due_at) VALUES (?, ?, ?, 0)"
_JOB_COLUMNS = "number, kind, counter, member, due_at, tries, why"


class MaintenanceRow(msgspec.Struct, frozen=True):
    """Base of rows that come from the agent itself, not from decisions of the core."""


class EndedTask(msgspec.Struct, frozen=True, gc=False):
    """The fields of an ended task that its removal needs: its place and the size of its output."""

    counter: int
    member: int
    uid: object
    attempt: object
    ended_at: float
    output_bytes: int


class RemoveTasks(MaintenanceRow, frozen=True):
    """Remove these ended tasks, their events and outputs; the last task of a submission also removes the submission."""

    tasks: tuple[EndedTask, ...]


class RemoveOutputs(MaintenanceRow, frozen=True):
    """Remove only the outputs of these ended tasks; ``at`` (Unix s) and ``why`` are reported to clients that ask for them."""

    tasks: tuple[EndedTask, ...]
    at: float
    why: str


class FilesRemoved(MaintenanceRow, frozen=True):
    """The files of these doomed attempts are gone."""

    keys: tuple[str, ...]


class Prune(MaintenanceRow, frozen=True):
    """Remove the oldest events from before this time (Unix s), PRUNED_MAX at most; and these submissions, which have no
    tasks left."""

    before: float
    submissions: tuple[int, ...]


class KeepDate(MaintenanceRow, frozen=True):
    """The current trusted date, packed."""

    anchor: str


class CommitProbe(MaintenanceRow, frozen=True):
    """A commit without a change, which shows that the database can be written. ``at`` (Unix s): the time of the check."""

    at: float


class JobDone(MaintenanceRow, frozen=True):
    """A completion job is done."""

    number: int


class JobPostponed(MaintenanceRow, frozen=True):
    """A completion job failed, and is due again at ``due_at`` (Unix s)."""

    number: int
    tries: int
    due_at: float
    why: str


def output_bytes(exit_: Exit, stream_bytes_max: int) -> int:
    """Maximum disk use of the output of an ended task; the part that was cut out of its middle does not count."""
    sizes = (min(size, stream_bytes_max) for size in (exit_.stdout_bytes, exit_.stderr_bytes))
    return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes)


# -- writes ------------------------------------------------------------------------------------------------------------


def apply(writer: sqlite3.Connection, upkeep: MaintenanceRow, remembered_from: float) -> None:
    """Apply a row within the writer's transaction. remembered_from: tokens of submissions from before this time
    (Unix s) may be forgotten."""
    if isinstance(upkeep, RemoveTasks):
        _remove_tasks(writer, upkeep.tasks, remembered_from)
    elif isinstance(upkeep, RemoveOutputs):
        _remove_outputs(writer, upkeep)
    elif isinstance(upkeep, FilesRemoved):
        writer.executemany("DELETE FROM doomed WHERE key = ?", [(key,) for key in upkeep.keys])
    elif isinstance(upkeep, KeepDate):
        writer.execute(schema.KEEP_DATE, (upkeep.anchor,))
    elif isinstance(upkeep, CommitProbe):
        writer.execute("INSERT OR REPLACE INTO meta VALUES ('checked_at', ?)", (upkeep.at,))
    elif isinstance(upkeep, JobDone):
        writer.execute("DELETE FROM chores WHERE number = ?", (upkeep.number,))
    elif isinstance(upkeep, JobPostponed):
        writer.execute(
            "UPDATE chores SET tries = ?, due_at = ?, why = ? WHERE number = ?",
            (upkeep.tries, upkeep.due_at, upkeep.why, upkeep.number),
        )
    elif isinstance(upkeep, Prune):
        writer.execute(
            f"DELETE FROM events WHERE number IN (SELECT number FROM events ORDER BY number LIMIT ?) AND at < ? AND {_NOT_LAST}",  # noqa: S608 -- constants
            (PRUNED_MAX, upkeep.before),
        )
        for counter in upkeep.submissions:
            _remove_submission(writer, counter, remembered_from)


def _remove_tasks(writer: sqlite3.Connection, tasks: tuple[EndedTask, ...], remembered_from: float) -> None:
    for task in tasks:
        place = (task.counter, task.member)
        gone = writer.execute(
            f"DELETE FROM tasks WHERE counter = ? AND member = ? AND ended_at > 0 AND state IN ({_FINAL})",  # noqa: S608 -- constants
            place,
        )
        if gone.rowcount:
            writer.executemany(_DOOM, [(key,) for key in keys_of(task)])
            writer.execute(_DROP_EVENTS, place)
    counters = sorted({task.counter for task in tasks})
    if counters:
        writer.execute(
            "INSERT INTO meta VALUES ('removed', ?) ON CONFLICT (key) DO UPDATE SET value = max(value, excluded.value)",
            (counters[-1],),
        )
    for counter in counters:
        _remove_submission(writer, counter, remembered_from)


def _remove_submission(writer: sqlite3.Connection, counter: int, remembered_from: float) -> None:
    """Remove a submission that has no task left, and whose token may be forgotten."""
    found = writer.execute(
        "SELECT environment FROM submissions s WHERE counter = ? AND submitted_at < ?"
        " AND NOT EXISTS (SELECT 1 FROM tasks t WHERE t.counter = s.counter)",
        (counter, remembered_from),
    ).fetchone()
    if found is None:
        return
    writer.execute("DELETE FROM submissions WHERE counter = ?", (counter,))
    writer.execute("DELETE FROM owners WHERE counter = ?", (counter,))
    writer.execute(_DROP_EVENTS, (counter, SINGLE))
    writer.execute(
        "DELETE FROM environments WHERE digest = ?1 AND NOT EXISTS (SELECT 1 FROM submissions WHERE environment = ?1)",
        found,
    )


def _remove_outputs(writer: sqlite3.Connection, upkeep: RemoveOutputs) -> None:
    for task in upkeep.tasks:
        gone = writer.execute(
            "UPDATE tasks SET output_bytes = 0, output_gone_at = ?, output_gone_why = ?"  # noqa: S608 -- constants
            f" WHERE counter = ? AND member = ? AND ended_at > 0 AND state IN ({_FINAL})",
            (upkeep.at, upkeep.why, task.counter, task.member),
        )
        if gone.rowcount:
            writer.executemany(_DOOM, [(key,) for key in keys_of(task)])


def keys_of(task: EndedTask) -> list[str]:
    """The keys of its attempts in the spool, the first and the last ATTEMPTS_SWEPT_MAX of them: after a loss of commits, the
    numbers in between were never used."""
    if not isinstance(task.uid, bytes) or not isinstance(task.attempt, int):
        return []
    attempts = range(1, task.attempt + 1)
    swept = dict.fromkeys((*attempts[:ATTEMPTS_SWEPT_MAX], *attempts[-ATTEMPTS_SWEPT_MAX:]))
    return [execution_key(task.uid, attempt) for attempt in swept]


# -- searches ----------------------------------------------------------------------------------------------------------


class RemovalCriteria(msgspec.Struct, frozen=True):
    """Criteria of ended tasks to remove: tasks that ended before a time (Unix s), in one of these states (none:
    any), and not among the last ``keep``; ``named``: only these, as (number of the submission, first member,
    last member)."""

    before: float = float("inf")
    states: tuple[str, ...] = ()
    keep: int = 0
    named: tuple[tuple[int, int, int], ...] = ()
    until: tuple[float, int, int] | None = None
    """The place of the newest removable task, found by `RemovalSearch.bounded`; None: no limit."""
    with_output: bool = False
    """True: only tasks that still have output."""
    who: str = ""
    """Only tasks of this owner (`owner_key`); "": any owner."""
    of: tuple[int, ...] | None = None
    """Only tasks of these submissions; None: any submission."""


class RemovalSearch:
    """Search for removable tasks and outputs, through its own connection; for one thread at a time, but not the loop's
    thread."""

    def __init__(self, path: Path) -> None:
        self._reader = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
        self._reader.execute("PRAGMA query_only = 1")

    def close(self) -> None:
        self._reader.close()

    def page(
        self, wanted: RemovalCriteria, kept: tuple[int, ...], after: EndedTask | None, limit: int
    ) -> list[EndedTask]:
        """The oldest wanted tasks that follow ``after`` (None: from the first), at most ``limit``, without those of the
        submissions ``kept``. Named tasks come in the order of their members."""
        if wanted.named:
            return self._named(wanted, kept, after, limit)
        newest = wanted.until or _LAST
        place = _FIRST if after is None else (after.ended_at, after.counter, after.member)
        # SQLite searches by the first bound, so that each page begins at the end of the last one
        return self._found(
            "t.ended_at >= :ended_at AND t.ended_at > 0 AND t.ended_at < :before AND (t.ended_at, t.counter, t.member) > (:ended_at, :counter, :member)"
            f" AND (t.ended_at, t.counter, t.member) <= (:last_at, :last_counter, :last_member){self._narrowed(wanted)}"
            " ORDER BY t.ended_at, t.counter, t.member LIMIT :limit",
            kept,
            before=wanted.before,
            who=wanted.who,
            limit=limit,
            **dict(zip(("ended_at", "counter", "member"), place, strict=True)),
            **dict(zip(("last_at", "last_counter", "last_member"), newest, strict=True)),
        )

    def bounded(self, wanted: RemovalCriteria) -> RemovalCriteria | None:
        """The criteria without the currently newest ``keep`` tasks; None if nothing is left to remove."""
        if not wanted.keep:
            return wanted
        found = self._reader.execute(
            "SELECT t.ended_at, t.counter, t.member FROM tasks t WHERE t.ended_at > 0"  # noqa: S608 -- constants
            f"{self._narrowed(wanted)} ORDER BY t.ended_at DESC, t.counter DESC, t.member DESC LIMIT 1 OFFSET :keep",
            {"keep": wanted.keep, "who": wanted.who},
        ).fetchone()
        return None if found is None else msgspec.structs.replace(wanted, until=(found[0], found[1], found[2]))

    def _named(
        self, wanted: RemovalCriteria, kept: tuple[int, ...], after: EndedTask | None, limit: int
    ) -> list[EndedTask]:
        found: list[EndedTask] = []
        for counter, first, last in apart(wanted.named):
            start = first
            if after is not None:
                if (counter, last) <= (after.counter, after.member):
                    continue
                if counter == after.counter:
                    start = max(first, after.member + 1)
            found += self._found(
                "t.counter = :counter AND t.member BETWEEN :first AND :last AND t.ended_at > 0 AND t.ended_at < :before"
                f"{self._narrowed(wanted)} ORDER BY t.member LIMIT :limit",
                kept,
                counter=counter,
                first=start,
                last=last,
                before=wanted.before,
                who=wanted.who,
                limit=limit - len(found),
            )
            if len(found) >= limit:
                break
        return found

    def _narrowed(self, wanted: RemovalCriteria) -> str:
        """The rest of the condition. Only known states are used."""
        states = [state for state in wanted.states if state in FINAL]
        narrowed = f" AND t.state IN ({', '.join(map(repr, states))})" if wanted.states else ""
        if wanted.who:
            narrowed += " AND t.counter IN (SELECT counter FROM owners WHERE who = :who)"
        if wanted.of is not None:
            narrowed += f" AND t.counter IN ({', '.join(map(str, wanted.of))})"
        return narrowed + (" AND t.output_bytes > 0" if wanted.with_output else "")

    def _found(self, where: str, kept: tuple[int, ...], **values: object) -> list[EndedTask]:
        rows = self._reader.execute(
            f"SELECT {_COLUMNS} FROM tasks t WHERE {_FREE} AND {where}",  # noqa: S608 -- constants
            {"kept": json.dumps(kept), **values},
        )
        return [_ended(row) for row in rows if isinstance(row[0], int) and isinstance(row[1], int)]

    def exceeds(self, before: float, remembered: float, tasks_max: int, output_bytes_max: int) -> bool:
        """True if there is a task or event from before the time ``before``, a submission without tasks from before
        ``remembered``, more ended tasks or bytes of output than these limits, or a doomed file."""
        return (
            bool(self.doomed(1) or self.page(RemovalCriteria(before=before), (), None, 1))
            or self.ended() > tasks_max
            or self.output_bytes() > output_bytes_max
            or bool(self.empty_submissions(remembered, 1))
            or self.has_events_before(before)
        )

    def ended(self) -> int:
        return int(self._reader.execute("SELECT count(*) FROM tasks WHERE ended_at > 0").fetchone()[0])

    def output_bytes(self) -> int:
        """Maximum disk use of the outputs of ended tasks."""
        total = self._reader.execute("SELECT sum(output_bytes) FROM tasks WHERE output_bytes > 0").fetchone()[0]
        return int(total or 0)

    def beyond_share(self, share: int, *, of_output: bool) -> dict[int, int]:
        """The BEYOND_SHARE_MAX largest submissions with more than ``share`` ended tasks, or bytes of output → how many each
        has."""
        measure = "sum(output_bytes)" if of_output else "count(*)"
        where = "output_bytes > 0" if of_output else "ended_at > 0"
        rows = self._reader.execute(
            f"SELECT counter, {measure} AS has FROM tasks WHERE {where} GROUP BY counter HAVING has > ?"  # noqa: S608 -- constants
            " ORDER BY has DESC LIMIT ?",
            (share, BEYOND_SHARE_MAX),
        )
        return {counter: has for counter, has in rows if isinstance(counter, int)}

    def doomed(self, limit: int) -> list[str]:
        """Attempts whose files are to be removed."""
        return [str(row[0]) for row in self._reader.execute("SELECT key FROM doomed LIMIT ?", (limit,))]

    def empty_submissions(self, before: float, limit: int) -> tuple[int, ...]:
        """Submissions without tasks from before this time."""
        rows = self._reader.execute(
            "SELECT counter FROM submissions s WHERE submitted_at < ?"
            " AND NOT EXISTS (SELECT 1 FROM tasks t WHERE t.counter = s.counter) LIMIT ?",
            (before, limit),
        )
        return tuple(int(row[0]) for row in rows)

    def has_events_before(self, before: float) -> bool:
        """True if the oldest event is from before this time."""
        found = self._reader.execute(f"SELECT at FROM events WHERE {_NOT_LAST} ORDER BY number LIMIT 1").fetchone()  # noqa: S608 -- constants
        return found is not None and isinstance(found[0], float) and found[0] < before


def _ended(row: tuple[Any, ...]) -> EndedTask:
    size = row[5] if isinstance(row[5], int) else 0
    return EndedTask(row[0], row[1], row[2], row[3], row[4], size)


# -- completion jobs ---------------------------------------------------------------------------------------------------


class DueJob(msgspec.Struct, frozen=True, gc=False):
    """A completion job. due_at: Unix s, 0 = immediately; tries: number of failed tries; why: error of the last one. member:
    SINGLE for a job of an array as a whole."""

    number: int
    kind: CompletionJob
    counter: int
    member: int
    due_at: float
    tries: int
    why: str


def put_jobs(writer: sqlite3.Connection, row: PutChores, place: tuple[int, int]) -> None:
    """Insert jobs in the transaction that ends the task. An array has one notification, inserted with the end of its
    last task."""
    counter, member = place
    for chore in row.chores:
        if chore is CompletionJob.FILES:
            writer.execute(_PUT_JOB, (chore.value, counter, member))
        elif not _is_unfinished(writer, counter):
            writer.execute(_PUT_JOB, (chore.value, counter, SINGLE))


def _is_unfinished(writer: sqlite3.Connection, counter: int) -> bool:
    return writer.execute(schema.UNFINISHED_OF, (counter, SINGLE, MEMBER_MAX)).fetchone() is not None


def due_jobs(store: StoreReader, kind: CompletionJob, now: float, limit: int, besides: Collection[int]) -> list[DueJob]:
    """The first due jobs of a kind, except for the numbers ``besides``; for the loop's thread."""
    rows = store.rows(
        f"SELECT {_JOB_COLUMNS} FROM chores WHERE kind = ? AND NOT due_at BETWEEN ? AND ? ORDER BY due_at, number LIMIT ?",  # noqa: S608 -- constants
        (kind.value, math.nextafter(now, math.inf), now + DUE_S_MAX, limit + len(besides)),
    )
    return [job for job in map(_job_of, rows) if job.number not in besides][:limit]


def next_job_due_at(store: StoreReader) -> float | None:
    """The time at which the next postponed job is due (Unix s); None if none was postponed."""
    rows = store.rows("SELECT min(due_at) FROM chores WHERE due_at > 0")
    return rows[0][0] if rows and isinstance(rows[0][0], float) else None


def jobs_of(store: StoreReader, counter: int, member: int) -> list[DueJob]:
    """The pending jobs of a task."""
    rows = store.rows(
        f"SELECT {_JOB_COLUMNS} FROM chores WHERE counter = ? AND member IN (?, ?) ORDER BY number",  # noqa: S608 -- constants
        (counter, SINGLE, member),
    )
    return [_job_of(row) for row in rows]


def pending_notifications(store: StoreReader) -> set[tuple[int, int]]:
    """The submission of each pending notification, and its number of failed tries."""
    rows = store.rows("SELECT counter, tries FROM chores WHERE kind = ?", (CompletionJob.NOTIFY.value,))
    return {(row[0], row[1]) for row in rows}


def _job_of(row: tuple[Any, ...]) -> DueJob:
    return DueJob(row[0], CompletionJob(row[1]), *row[2:])
