"""The tables of a node's database, the statements of its hot path, and its rows: their encoding and decoding.

A row is decoded when it is requested, and never trusted: a value of the wrong type is a StoreError that names it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from sys import intern
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from peerload.model.errors import StoreError
from peerload.model.task import (
    SINGLE,
    ExecutionRecord,
    Exit,
    FenceKind,
    Grant,
    SubmitOptions,
    TaskRecord,
    TaskSpec,
    TaskState,
    Usage,
    order_of,
    task_name,
)

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 2
"""Version of the schema, which the database keeps as its `user_version`."""

DATABASE = "peerload.db"
"""Name of the database file in the state directory."""


def state_gone(directory: Path, hint: str = "") -> StoreError:
    """The error for a removed state directory: its data is lost, and nothing more can be stored."""
    return StoreError(
        f"the state directory {directory} is gone",
        why="it was removed, with all data about the tasks of this node; the agent stops",
        hint=f"{hint}a new agent:  peerload up",
    )


SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE environments (digest BLOB PRIMARY KEY, environment BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE submissions (
    counter INTEGER PRIMARY KEY, token TEXT NOT NULL, digest BLOB NOT NULL, spec BLOB NOT NULL,
    environment BLOB NOT NULL, members INTEGER NOT NULL, submitted_at REAL NOT NULL, terms BLOB, commands BLOB,
    uid_key BLOB);
CREATE INDEX submission_by_token ON submissions (token);
CREATE TABLE tasks (
    counter INTEGER NOT NULL, member INTEGER NOT NULL, uid BLOB NOT NULL, state TEXT NOT NULL, attempt INTEGER NOT NULL,
    node TEXT NOT NULL, nonce INTEGER NOT NULL, machine_boot TEXT NOT NULL, lease_s REAL NOT NULL,
    migrations INTEGER NOT NULL, submitted_at REAL NOT NULL, started_at REAL NOT NULL, ended_at REAL NOT NULL,
    exit BLOB, reason TEXT NOT NULL, more BLOB, output_bytes INTEGER NOT NULL DEFAULT 0,
    output_gone_at REAL NOT NULL DEFAULT 0, output_gone_why TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (counter, member)) WITHOUT ROWID;
CREATE INDEX unfinished ON tasks (state, counter, member) WHERE ended_at = 0;
CREATE INDEX ended ON tasks (ended_at) WHERE ended_at > 0;
CREATE TABLE executions (
    uid BLOB NOT NULL, attempt INTEGER NOT NULL, record BLOB NOT NULL, PRIMARY KEY (uid, attempt)) WITHOUT ROWID;
CREATE TABLE floors (
    uid BLOB PRIMARY KEY, floor INTEGER NOT NULL, at REAL NOT NULL, kind INTEGER NOT NULL,
    home TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE events (
    number INTEGER PRIMARY KEY, at REAL NOT NULL, what TEXT NOT NULL, state TEXT NOT NULL, counter INTEGER,
    member INTEGER, task TEXT, attempt INTEGER NOT NULL, node TEXT NOT NULL, reason TEXT NOT NULL);
CREATE INDEX event_of ON events (counter, member) WHERE counter IS NOT NULL;
CREATE INDEX outputs ON tasks (ended_at, counter, member, output_bytes) WHERE output_bytes > 0;
CREATE INDEX failures ON tasks (counter, member) WHERE ended_at > 0 AND state IN ('failed', 'cancelled');
CREATE INDEX submission_by_environment ON submissions (environment);
CREATE TABLE doomed (key TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE chores (
    number INTEGER PRIMARY KEY, kind TEXT NOT NULL, counter INTEGER NOT NULL, member INTEGER NOT NULL,
    due_at REAL NOT NULL, tries INTEGER NOT NULL DEFAULT 0, why TEXT NOT NULL DEFAULT '');
CREATE UNIQUE INDEX chore_of ON chores (counter, member, kind);
CREATE INDEX chore_due ON chores (kind, due_at, number);
CREATE TABLE fates (
    task TEXT PRIMARY KEY, is_over INTEGER NOT NULL, failed TEXT NOT NULL, lost TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (name TEXT PRIMARY KEY, slots INTEGER NOT NULL, is_paused INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE making (counter INTEGER PRIMARY KEY);
CREATE TABLE owners (counter INTEGER PRIMARY KEY, who TEXT NOT NULL);
CREATE INDEX owner_of ON owners (who, counter);
"""
"""events: for a task of this home, counter and member are set; for a task of another home, its id. For an array as a whole, that
is its submission, member is SINGLE. doomed: attempts whose rows are removed, but maybe not yet their files. chores: completion
jobs. fates: outcomes of tasks that tasks here wait for. groups: set by users. making: arrays of which only some members are
stored so far. uid_key: of uniform arrays. owners: of submissions, in system mode (`owner_key`); others are the agent's own.
agent's own."""

MIGRATIONS: dict[int, str] = {2: "ALTER TABLE submissions ADD COLUMN uid_key BLOB;"}
"""Scripts by version n: each upgrades a database of version n - 1 to version n. Version 1 is the oldest."""
_UNFINISHED = ", ".join(f"'{state.value}'" for state in TaskState if not state.is_final)
WHOLE = "counter NOT IN (SELECT counter FROM making)"
"""A condition on a task: its submission was stored completely."""
PUT_MAKING = "INSERT OR IGNORE INTO making VALUES (?)"
DROP_MAKING = "DELETE FROM making WHERE counter = ?"
MAKING = "SELECT counter FROM making ORDER BY counter"
PUT_ENVIRONMENT = "INSERT OR IGNORE INTO environments VALUES (?, ?)"
PUT_SUBMISSION = (
    "INSERT INTO submissions (counter, token, digest, spec, environment, members, submitted_at, terms, commands, uid_key)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
PUT_OWNER = "INSERT OR REPLACE INTO owners VALUES (?, ?)"
SUBMISSION_OF = "SELECT digest, counter, members FROM submissions WHERE token = ? AND submitted_at > ? ORDER BY counter DESC LIMIT 1"
OWNERS_OF = "SELECT counter, who FROM owners WHERE counter IN ({marks})"
LAST_OF = "SELECT max(counter) FROM owners WHERE who = ?"
UNFINISHED_OF_OWNER = "SELECT count(*) FROM owners o CROSS JOIN tasks t ON t.counter = o.counter WHERE o.who BETWEEN ? AND ? AND t.ended_at = 0"
OUTPUT_BYTES_OF_OWNER = (
    "SELECT sum(t.output_bytes) FROM owners o CROSS JOIN tasks t ON t.counter = o.counter WHERE o.who BETWEEN ? AND ?"
)
PUT_TASK = (
    "INSERT OR REPLACE INTO tasks (counter, member, uid, state, attempt, node, nonce, machine_boot, lease_s, migrations,"
    " submitted_at, started_at, ended_at, exit, reason, more, output_bytes)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
PUT_NEW_MEMBER = (
    "INSERT OR REPLACE INTO tasks (counter, member, uid, state, attempt, node, nonce, machine_boot, lease_s, migrations,"
    " submitted_at, started_at, ended_at, exit, reason, more, output_bytes)"
    " VALUES (?, ?, ?, 'queued', 0, '', 0, '', 0.0, 0, ?, 0.0, 0.0, NULL, ?, NULL, 0)"
)
"""Insert a member of a uniform array; `UNTOUCHED` matches it."""
UNTOUCHED = (
    "ended_at = 0 AND state = 'queued' AND attempt = 0 AND node = '' AND nonce = 0 AND machine_boot = '' AND lease_s = 0"
    " AND migrations = 0 AND started_at = 0 AND exit IS NULL AND more IS NULL"
)
"""A condition on a task: unchanged since its submission."""
UNTOUCHED_WITH = f"{UNTOUCHED} AND submitted_at = ? AND reason = ?"
END_MEMBERS = (
    f"UPDATE tasks SET state = ?, ended_at = ?, reason = ? WHERE counter = ? AND member BETWEEN ? AND ?"  # noqa: S608 -- constants
    f" AND (member - ?) % ? = 0 AND {UNTOUCHED}"
)
CANCELLED = "SELECT more FROM tasks WHERE counter = ? AND member = ? AND state = 'cancelled' AND uid = ? AND attempt = ? AND node = ?"
CANCELLED_WITH = (
    "SELECT uid, counter, member FROM tasks INDEXED BY failures WHERE ended_at > 0 AND state IN ('failed', 'cancelled')"
    " AND hex(uid) IN (SELECT value FROM json_each(?))"
)
"""Select the cancelled tasks with these uids. It reads all failed and cancelled tasks."""
PUT_MORE = "UPDATE tasks SET more = ? WHERE counter = ? AND member = ?"
UNIFORM = (
    "SELECT counter, uid_key FROM submissions WHERE uid_key IS NOT NULL AND counter NOT IN (SELECT counter FROM making)"
    " AND EXISTS (SELECT 1 FROM tasks t INDEXED BY unfinished WHERE t.ended_at = 0 AND t.state = 'queued'"
    " AND t.counter = submissions.counter) ORDER BY counter LIMIT ?"
)
"""Uniform arrays with a waiting member."""
FIRST_MEMBER = f"SELECT submitted_at, reason FROM tasks NOT INDEXED WHERE counter = ? AND {UNTOUCHED} LIMIT 1"  # noqa: S608 -- constants
MEMBERS = f"SELECT member, uid FROM tasks NOT INDEXED WHERE counter = ? AND {UNTOUCHED_WITH} ORDER BY member"  # noqa: S608 -- constants
EVENTS_AT_ONCE = 16
"""Number of events in one statement: each statement makes the writer thread wait for the interpreter."""
LAST_EVENT = "SELECT max(number) FROM events"


@functools.lru_cache(EVENTS_AT_ONCE)
def put_events(count: int) -> str:
    """The statement that inserts ``count`` events."""
    columns = EVENT_COLUMNS.removeprefix("number, ")
    rows = ", ".join(["(?, ?, ?, ?, ?, ?, ?, ?, ?)"] * count)
    return f"INSERT INTO events ({columns}) VALUES {rows}"  # noqa: S608 -- constants


PUT_LOSS = (
    "INSERT INTO events (number, at, what, state, attempt, node, reason) VALUES (?, ?, 'store', 'lost', 0, '', ?)"
)
PRUNE_EVENTS = (
    "DELETE FROM events WHERE number <= (SELECT max(number) FROM events) - ?"
    " AND number < (SELECT min(number) FROM events) + ?"
)
EVENT_COLUMNS = "number, at, what, state, counter, member, task, attempt, node, reason"
PUT_EXECUTION = "INSERT OR REPLACE INTO executions VALUES (?, ?, ?)"
DROP_EXECUTION = "DELETE FROM executions WHERE uid = ? AND attempt = ?"
PUT_FLOOR = (
    "INSERT INTO floors VALUES (?, ?, ?, ?, ?) ON CONFLICT (uid) DO UPDATE SET floor = excluded.floor,"
    " at = excluded.at, kind = excluded.kind, home = excluded.home WHERE excluded.floor >= floor"
)
DROP_FLOOR = "DELETE FROM floors WHERE uid = ?"
DROP_OLD_FLOORS = (
    f"DELETE FROM floors WHERE at < ? AND kind IN ({FenceKind.STARTED:d}, {FenceKind.REFUSED:d})"  # noqa: S608 -- constants
    " AND uid NOT IN (SELECT uid FROM executions)"
)
"""Never drops by age (the machine's date may be wrong) that a once-only task was started, nor a floor of an attempt that
is still here."""
PUT_FATE = "INSERT OR REPLACE INTO fates VALUES (?, ?, ?, ?)"
DROP_FATE = "DELETE FROM fates WHERE task = ?"
PUT_GROUP = "INSERT OR REPLACE INTO groups VALUES (?, ?, ?)"
DROP_GROUP = "DELETE FROM groups WHERE name = ?"
FAILED_OF = (
    "SELECT member, state, reason FROM tasks INDEXED BY failures WHERE counter = ? AND member BETWEEN ? AND ? AND ended_at > 0"
    " AND state IN ('failed', 'cancelled') ORDER BY member LIMIT 1"
)
UNFINISHED_OF = (
    "SELECT 1 FROM tasks INDEXED BY unfinished WHERE ended_at = 0"  # noqa: S608 -- constants
    f" AND state IN ({_UNFINISHED}) AND counter = ? AND member BETWEEN ? AND ? LIMIT 1"
)
"""Finds an unfinished task among these. Without the hint, here and above, SQLite reads all members of an
array."""
DATE = "SELECT value FROM meta WHERE key = 'date'"
KEEP_DATE = "INSERT OR REPLACE INTO meta VALUES ('date', ?)"
PUT_DRAIN = "INSERT OR REPLACE INTO meta VALUES ('drained', ?)"
DROP_DRAIN = "DELETE FROM meta WHERE key = 'drained'"
PAST_RUNS = (
    "SELECT t.counter, t.exit, s.spec, t.member, s.commands IS NOT NULL FROM tasks t JOIN submissions s ON s.counter = t.counter"
    " WHERE t.ended_at > 0 AND t.exit IS NOT NULL AND t.state IN ('done', 'failed') ORDER BY t.ended_at DESC LIMIT ?"
)
# Pages of ended tasks; `ended_at > 0` selects the index.
ENDED_NEWEST = (
    "t.ended_at > 0 AND t.ended_at >= ? AND (t.ended_at, t.counter, t.member) < (?, ?, ?)"
    " ORDER BY t.ended_at DESC, t.counter DESC, t.member DESC LIMIT ?"
)
ENDED_OLDEST = (
    "t.ended_at > 0 AND t.ended_at >= ? AND (t.counter, t.member) > (?, ?) ORDER BY t.counter, t.member LIMIT ?"
)
ENDED_BEFORE_LAST = "t.ended_at > 0 AND t.ended_at >= ? ORDER BY t.counter DESC, t.member DESC LIMIT 1 OFFSET ?"
HIGHEST = "SELECT counter FROM {table} WHERE counter IS NOT NULL AND counter < ? ORDER BY counter DESC LIMIT 1"
"""The highest number of a submission in a table; values that are no numbers sort after all numbers."""
KEEP_ID = "UPDATE meta SET value = ? WHERE key = 'store_id'"
COUNT_INCARNATION = (
    "INSERT INTO meta VALUES ('incarnation', 1) ON CONFLICT (key) DO UPDATE SET value = value + 1 RETURNING value"
)
KEEP_INCARNATION = "INSERT OR REPLACE INTO meta VALUES ('incarnation', ?)"
KEEP_COUNTER = "INSERT OR REPLACE INTO meta VALUES ('counter', ?)"
COUNT_ON = "INSERT INTO meta VALUES ('counter', ?) ON CONFLICT (key) DO UPDATE SET value = max(value, excluded.value)"
"""Sets the greatest number that was assigned to a submission; later ones are greater."""
KEEP_ATTEMPTS = "INSERT OR REPLACE INTO meta VALUES ('attempts_from', ?), ('attempts_up_to', ?)"
ATTEMPTS = "SELECT value FROM meta WHERE key IN ('attempts_from', 'attempts_up_to') ORDER BY key"
KEPT_S = 7 * 86_400.0
"""Time for which tokens and floors are remembered."""
MEMBER_MAX = 1 << 62
"""A number greater than that of any member."""
COLUMNS = (
    "t.counter, t.member, t.uid, t.state, t.attempt, t.node, t.nonce, t.machine_boot, t.lease_s, t.migrations,"
    " t.submitted_at, t.started_at, t.ended_at, t.exit, t.reason, t.more"
)
_TYPES = (int, int, bytes, str, int, str, int, str, float, int, float, float, float)
"""The types of the columns up to ended_at."""
ENDED_AT = 12
"""Index of ended_at, which is 0.0 for an unfinished task. SQLite 3.46 (but not 3.40) returns the 0 of the index
`unfinished` instead."""
_EVENT_TYPES = (int, float, str, str, int, str, str)
_STATES = {state.value: state for state in TaskState}
BEFORE_FIRST = SINGLE - 1
"""A number less than that of any member."""


def migration(number: int) -> str:
    """The script that upgrades a database of version ``number`` - 1 to version ``number`` in one transaction."""
    return f"BEGIN; {MIGRATIONS[number]} PRAGMA user_version = {number}; COMMIT;"


# -- rows --------------------------------------------------------------------------------------------------------------


Value = TypeVar("Value")

_spec = msgspec.msgpack.Decoder(TaskSpec)
_terms = msgspec.msgpack.Decoder(SubmitOptions)
_exit = msgspec.msgpack.Decoder(Exit)
_execution = msgspec.msgpack.Decoder(ExecutionRecord)
encode = msgspec.msgpack.Encoder().encode
"""A value as stored in the database."""


class ExtraColumns(msgspec.Struct, frozen=True, omit_defaults=True):
    """The rare fields of a task's record: packed in one column, which is empty for most tasks."""

    store: str = ""
    parked_ts: float = 0.0
    losses: int = 0
    lost_on: tuple[str, ...] = ()
    last_node: str = ""
    retry_of: str = ""
    grants: tuple[Grant, ...] = ()
    devices: tuple[str, ...] = ()
    gpu_mem_bytes: int = 0
    gpu_alone: bool = False
    memory_retries: int = 0
    attended: bool = False
    input: str = ""
    input_is_cut: bool = False
    failures: int = 0
    priority: int | None = None
    is_freed: bool = False
    input_came: bool = False
    usage: Usage | None = None


_more = msgspec.msgpack.Decoder(ExtraColumns)
extra_of = operator.attrgetter(*ExtraColumns.__struct_fields__)
NO_MORE = extra_of(ExtraColumns())
Each = tuple[tuple[bytes, ...], ...]
_each = msgspec.msgpack.Decoder(Each)


class RecordedEvent(msgspec.Struct, frozen=True, gc=False):
    """A stored event with its number; numbers grow with time."""

    number: int
    at: float
    what: str
    state: str
    task: str
    attempt: int
    node: str
    reason: str


Found = tuple[Any, ...]
"""A row of tasks with the columns of COLUMNS."""


class Damage(msgspec.Struct, frozen=True, gc=False):
    """A task whose row cannot be read, and the reason."""

    task: str
    why: str


Place = tuple[float, int, int]
"""The place of an ended task in the order: its end (Unix s), the number of its submission, of its member."""


class TaskPage(msgspec.Struct, frozen=True):
    """A page of a list of tasks. last: the place of the last row, readable or not; None if there was none."""

    rows: Sequence[tuple[TaskRecord, TaskSpec]] = ()
    damaged: Sequence[Damage] = ()
    truncated: bool = False
    last: Place | None = None


class TaskSelection(msgspec.Struct, frozen=True, gc=False):
    """The tasks of one submission that a reference names. spans: the first and the last member of each range; () = the
    whole submission."""

    counter: int
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The spans; for a whole submission, one that contains all its members, and also a single task."""
        return self.spans or ((SINGLE, MEMBER_MAX),)

    @property
    def is_range(self) -> bool:
        """True if it names several members, but not the whole array."""
        return len(self.spans) > 1 or any(first != last for first, last in self.spans)


def spans_text(spans: Sequence[tuple[int, int]]) -> str:
    """Ranges of members in the form of a reference: `3-9,12`."""
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)


def apart(spans: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Spans (number of the submission, first member, last member) in order and without overlap."""
    merged: list[tuple[int, int, int]] = []
    for counter, first, last in sorted(spans):
        if merged and merged[-1][0] == counter and first <= merged[-1][2] + 1:
            merged[-1] = (counter, merged[-1][1], max(last, merged[-1][2]))
        else:
            merged.append((counter, first, last))
    return merged


def decoded_record(row: Found, home: str) -> TaskRecord:
    """The record of a task of this home from its row. Raises StoreError, which names the unreadable part."""
    name = task_name(home, row[0], row[1])
    exit_ = None if row[13] is None else decoded_exit(row[13], name)
    state = _STATES.get(row[3]) if isinstance(row[3], str) else None
    if state is None:
        raise StoreError(f"{name} has an unknown state", why=repr(row[3]))
    if type(row[ENDED_AT]) is int and row[ENDED_AT] == 0:
        row = (*row[:ENDED_AT], 0.0, *row[ENDED_AT + 1 :])
    if tuple(map(type, row[: len(_TYPES)])) != _TYPES or type(row[14]) is not str:
        raise StoreError(f"{name} is damaged", why="a column has a value of the wrong kind")
    # There may be a million records, so common values share one object. SQLite returns a new zero each time.
    attempt, node, nonce, machine_boot, lease_s, migrations, submitted_at, started_at, ended_at = row[4:13]
    first = (name, row[2], state, submitted_at, attempt, intern(node), nonce, intern(machine_boot), lease_s or 0.0)
    rest = (migrations, started_at or 0.0, ended_at or 0.0, exit_, intern(row[14]))
    if row[15] is None:  # most records
        return TaskRecord(*first, *rest)
    more = _decoded(_more, row[15], f"the record of {name}")
    return TaskRecord(*first, *rest, **msgspec.structs.asdict(more))


def place_of(found: Found) -> Place:
    """The place of a task among the ended ones."""
    return found[12], found[0], found[1]


def member_spec(spec: TaskSpec, each: Each, task: str) -> TaskSpec:
    """The spec of one task. Raises StoreError if its array has no such member."""
    return spec_of_member(spec, each, order_of(task)[1], task) if each else spec


def spec_of_member(spec: TaskSpec, each: Each, member: object, name: str) -> TaskSpec:
    """The spec of one task, by its number in its array. Raises StoreError if its array has no such member."""
    if not each:
        return spec
    if not isinstance(member, int) or not 1 <= member <= len(each):
        raise StoreError(f"{name} cannot be read from the database", why=f"its array has {len(each)} commands")
    return msgspec.structs.replace(spec, argv=each[member - 1])


def decoded_spec(raw: object, counter: object) -> TaskSpec:
    """The spec that the tasks of a submission share, without the environment. Raises StoreError."""
    return _decoded(_spec, raw, f"submission {counter}")


def decoded_each(raw: object, counter: object) -> Each:
    return _decoded(_each, raw, f"the commands of submission {counter}")


def more_with_usage(raw: object, usage: Usage, name: object) -> bytes | None:
    """Rare fields of a task, with its resource usage; None if they already contain it. Raises StoreError."""
    more = ExtraColumns() if raw is None else _decoded(_more, raw, f"the record of {name}")
    return None if more.usage is not None else encode(msgspec.structs.replace(more, usage=usage))


def decoded_exit(raw: object, name: object) -> Exit:
    return _decoded(_exit, raw, f"the exit of {name}")


def decoded_event(row: Found, home: str) -> RecordedEvent:
    """An event from its row. Raises StoreError, which names it, if it cannot be read."""
    number, at, what, state, counter, member, task, attempt, node, reason = row
    if tuple(map(type, (number, at, what, state, attempt, node, reason))) != _EVENT_TYPES:
        raise StoreError(f"event {number} cannot be read from the database", why=f"{row!r}"[:200])
    if counter is not None:
        task = task_name(home, counter, member)
    return RecordedEvent(number, at, what, state, task or "", attempt, node, reason)


def decoded_execution(raw: object, what: str) -> ExecutionRecord:
    """A stored attempt of another home. Raises StoreError, which names ``what``, if it cannot be read."""
    return _decoded(_execution, raw, what)


def decoded_terms(raw: object, counter: int) -> SubmitOptions:
    """The stored terms of a submission. Raises StoreError if they cannot be read."""
    return _decoded(_terms, raw, f"the terms of submission {counter}")


def _decoded(decoder: msgspec.msgpack.Decoder[Value], raw: object, what: str) -> Value:
    if not isinstance(raw, bytes):
        raise StoreError(f"{what} cannot be read from the database", why=f"{type(raw).__name__} where bytes should be")
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"{what} cannot be read from the database", why=str(error)) from None
