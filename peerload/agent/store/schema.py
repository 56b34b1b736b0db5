"""The tables of a node's database, and the statements of its hot path."""

from __future__ import annotations

from peerload.model.task import FenceKind, TaskState

VERSION = 2
"""Version of the schema, which the database keeps as its `user_version`."""

DATABASE = "peerload.db"
"""Name of the database file in the state directory."""

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
"""events: of a task of this home counter and member are set, of another home's task its id; of an array as a whole, that is of
its submission, member is SINGLE. doomed: attempts of which the rows are gone and the files may not be yet. chores: completion
jobs. fates: outcomes of tasks that others here wait for. groups: those that a user has set. making: arrays of which only some
members are kept so far. uid_key: of uniform arrays. owners: whose the submissions are, in system mode (`owner_key`); those that are not in it are the
agent's own."""

MIGRATIONS: dict[int, str] = {2: "ALTER TABLE submissions ADD COLUMN uid_key BLOB;"}
"""Scripts by version n: each makes a database of version n - 1 one of version n. No version is older than 1."""


def migration(number: int) -> str:
    """The script, all or nothing, that makes a database of version ``number`` - 1 one of version ``number``."""
    return f"BEGIN; {MIGRATIONS[number]} PRAGMA user_version = {number}; COMMIT;"


_UNFINISHED = ", ".join(f"'{state.value}'" for state in TaskState if not state.is_final)
WHOLE = "counter NOT IN (SELECT counter FROM making)"
"""A condition on a task: its submission was kept to the end."""
PUT_MAKING = "INSERT OR IGNORE INTO making VALUES (?)"
DROP_MAKING = "DELETE FROM making WHERE counter = ?"
MAKING = "SELECT counter FROM making ORDER BY counter"
PUT_ENVIRONMENT = "INSERT OR IGNORE INTO environments VALUES (?, ?)"
PUT_SUBMISSION = (
    "INSERT INTO submissions (counter, token, digest, spec, environment, members, submitted_at, terms, commands, uid_key)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
PUT_OWNER = "INSERT OR REPLACE INTO owners VALUES (?, ?)"
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
"""Of a uniform array; `UNTOUCHED` finds it again."""
UNTOUCHED = (
    "ended_at = 0 AND state = 'queued' AND attempt = 0 AND node = '' AND nonce = 0 AND machine_boot = '' AND lease_s = 0"
    " AND migrations = 0 AND started_at = 0 AND exit IS NULL AND more IS NULL"
)
"""A condition on a task: nothing has become of it since it was submitted."""
UNTOUCHED_WITH = f"{UNTOUCHED} AND submitted_at = ? AND reason = ?"
END_MEMBERS = (
    f"UPDATE tasks SET state = ?, ended_at = ?, reason = ? WHERE counter = ? AND member BETWEEN ? AND ?"  # noqa: S608 -- constants
    f" AND (member - ?) % ? = 0 AND {UNTOUCHED}"
)
UNIFORM = (
    "SELECT counter, uid_key FROM submissions WHERE uid_key IS NOT NULL AND counter NOT IN (SELECT counter FROM making)"
    " AND EXISTS (SELECT 1 FROM tasks t INDEXED BY unfinished WHERE t.ended_at = 0 AND t.state = 'queued'"
    " AND t.counter = submissions.counter) ORDER BY counter LIMIT ?"
)
"""Uniform arrays of which a member waits."""
FIRST_MEMBER = f"SELECT submitted_at, reason FROM tasks NOT INDEXED WHERE counter = ? AND {UNTOUCHED} LIMIT 1"  # noqa: S608 -- constants
MEMBERS = f"SELECT member, uid FROM tasks NOT INDEXED WHERE counter = ? AND {UNTOUCHED_WITH} ORDER BY member"  # noqa: S608 -- constants
PUT_EVENT = "INSERT INTO events (at, what, state, counter, member, task, attempt, node, reason) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
LAST_EVENT = "SELECT max(number) FROM events"
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
"""Never by age (the machine's date may be wrong): that a task which may run once only was started, and any of an attempt
that is still here."""
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
"""Finds an unfinished task among these. Without the hint, SQLite goes through all members of an array, here and
above."""
DATE = "SELECT value FROM meta WHERE key = 'date'"
KEEP_DATE = "INSERT OR REPLACE INTO meta VALUES ('date', ?)"
PUT_DRAIN = "INSERT OR REPLACE INTO meta VALUES ('drained', ?)"
DROP_DRAIN = "DELETE FROM meta WHERE key = 'drained'"
PAST_RUNS = (
    "SELECT t.counter, t.exit, s.spec, t.member, s.commands IS NOT NULL FROM tasks t JOIN submissions s ON s.counter = t.counter"
    " WHERE t.ended_at > 0 AND t.exit IS NOT NULL AND t.state IN ('done', 'failed') ORDER BY t.ended_at DESC LIMIT ?"
)

# Pages of ended tasks; `ended_at > 0` is what the index asks for.
ENDED_NEWEST = (
    "t.ended_at > 0 AND t.ended_at >= ? AND (t.ended_at, t.counter, t.member) < (?, ?, ?)"
    " ORDER BY t.ended_at DESC, t.counter DESC, t.member DESC LIMIT ?"
)
ENDED_OLDEST = (
    "t.ended_at > 0 AND t.ended_at >= ? AND (t.counter, t.member) > (?, ?) ORDER BY t.counter, t.member LIMIT ?"
)
ENDED_BEFORE_LAST = "t.ended_at > 0 AND t.ended_at >= ? ORDER BY t.counter DESC, t.member DESC LIMIT 1 OFFSET ?"

HIGHEST = "SELECT counter FROM {table} WHERE counter IS NOT NULL AND counter < ? ORDER BY counter DESC LIMIT 1"
"""The highest number of a submission in a table; what is no number comes after all numbers."""
KEEP_ID = "UPDATE meta SET value = ? WHERE key = 'store_id'"
KEEP_INCARNATION = "INSERT OR REPLACE INTO meta VALUES ('incarnation', ?)"
KEEP_COUNTER = "INSERT OR REPLACE INTO meta VALUES ('counter', ?)"
COUNT_ON = "INSERT INTO meta VALUES ('counter', ?) ON CONFLICT (key) DO UPDATE SET value = max(value, excluded.value)"
"""Sets the greatest number of a submission that was given; later ones are greater."""
KEEP_ATTEMPTS = "INSERT OR REPLACE INTO meta VALUES ('attempts_from', ?), ('attempts_up_to', ?)"
ATTEMPTS = "SELECT value FROM meta WHERE key IN ('attempts_from', 'attempts_up_to') ORDER BY key"
