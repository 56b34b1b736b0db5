"""What a node remembers: SQLite, WAL, every commit synced, one writer thread; all that reads and writes it in one file.

The writer takes all rows that came while it was committing and makes them durable in one transaction (no timer), so
that the price of a sync is shared by as many tasks as came in that time. A write that fails is final: `on_error` is
called once and nothing is written any more; the agent stops rather than go on with what was not kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import queue
import secrets
import sqlite3
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.agent import store_schema as schema
from peerload.model.actions import DropExecution, DropFloors, PutDrain, PutExecution, PutFloor, PutSubmission, PutTask
from peerload.model.errors import StoreError
from peerload.model.events import PastRun, TaskRow
from peerload.model.task import ExecutionRecord, Exit, FloorKind, TaskRecord, TaskSpec, TaskState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from peerload.model.actions import Row

BATCHES_WAITING_MAX = 100_000
"""Batches of rows on their way to the disk; more means that the disk has stopped, and so does the agent."""
KEPT_S = 7 * 86_400.0
"""Tokens and floors are remembered for so long."""
PAST_RUNS_MAX = 2000
"""Ended tasks from which an agent learns again when it starts."""
MEMORY_PAGES_KIB = 2048
SINGLE = -1
"""The member number of a task that is not in an array."""

_encode = msgspec.msgpack.Encoder().encode
_spec = msgspec.msgpack.Decoder(TaskSpec)
_exit = msgspec.msgpack.Decoder(Exit)
_execution = msgspec.msgpack.Decoder(ExecutionRecord)
_COLUMNS = (
    "t.counter, t.member, t.uid, t.state, t.attempt, t.node, t.nonce, t.machine_boot, t.lease_s, t.migrations,"
    " t.submitted_at, t.started_at, t.ended_at, t.exit, t.reason, t.more"
)


class Recovered(msgspec.Struct, frozen=True):
    """What was durable when the agent started; the fields are those of `AgentStarted`."""

    tasks: tuple[TaskRow, ...]
    executions: tuple[ExecutionRecord, ...]
    floors: tuple[tuple[bytes, int, FloorKind], ...]
    tokens: tuple[tuple[str, bytes, str, int], ...]
    counter: int
    past: tuple[PastRun, ...] = ()
    drained: str | None = None


class _More(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a task's record rarely has: in one column of its own, empty for most."""

    store: str = ""
    parked_ts: float = 0.0
    losses: int = 0
    lost_on: tuple[str, ...] = ()
    last_node: str = ""
    retry_of: str = ""


_NO_MORE = _More()
_more = msgspec.msgpack.Decoder(_More)


class Store:
    """One database of one node. `open`, then `start_writer`; reads are for the agent's own thread."""

    def __init__(self, path: Path, node: str) -> None:
        self._path = path
        self._node = node
        self._lock: int | None = None
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._thread: threading.Thread | None = None
        self._queue: queue.SimpleQueue[tuple[Sequence[Row], Callable[[], None]] | None] = queue.SimpleQueue()
        self._failed = False
        self.store_id = ""

    # -- opening -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open or make the database. Raises StoreError: another agent has it, it is damaged, or it is newer than we."""
        self._take_lock()
        try:
            is_new = not self._path.exists()
            old_umask = os.umask(0o077)
            try:
                self._writer = self._connect()
            finally:
                os.umask(old_umask)
            self._prepare(self._writer)
            if is_new:
                _sync_directory(self._path.parent)
            self._reader = self._connect()
            identity = self._reader.execute("SELECT value FROM meta WHERE key = 'store_id'").fetchone()
            if identity is None:
                raise sqlite3.DatabaseError("it has no id")
            self._keep_node()
            self.store_id = str(identity[0])
            old = time.time() - KEPT_S
            with self._writer:
                self._writer.execute("DELETE FROM floors WHERE at < ?", (old,))
        except sqlite3.Error as error:
            self.close()
            raise StoreError(
                f"the database {self._path} cannot be used",
                why=str(error),
                hint=f"keep it for inspection and start afresh:  mv {self._path} {self._path}.broken",
            ) from None
        except StoreError:
            self.close()
            raise

    def _take_lock(self) -> None:
        path = self._path.parent / "lock"
        try:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"{path} cannot be opened", why=str(error.strerror)) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._lock, 20).decode("ascii", "replace").strip() or "?"
            os.close(self._lock)
            self._lock = None
            raise StoreError(
                f"another agent (pid {holder}) uses {self._path.parent}",
                hint="another node on this machine: --state DIR",
            ) from None
        os.ftruncate(self._lock, 0)
        os.write(self._lock, b"%d\n" % os.getpid())

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=10.0)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA cache_size = -{MEMORY_PAGES_KIB}")
        connection.execute("PRAGMA wal_autocheckpoint = 2000")
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > schema.VERSION:
            raise StoreError(
                f"the database {self._path} was written by a newer peerload",
                why=f"its schema is {version}, this one knows {schema.VERSION}",
                hint="install that version again, or name another directory:  --state DIR",
            )
        if version == 0:
            made = f"INSERT INTO meta VALUES ('store_id', '{secrets.token_hex(8)}')"  # noqa: S608 -- hex digits of our own
            connection.executescript(f"BEGIN; {schema.SCHEMA} PRAGMA user_version = {schema.VERSION}; {made}; COMMIT;")
        for number in range(version + 1, schema.VERSION + 1) if version else ():
            step = f"BEGIN; {schema.MIGRATIONS[number]} PRAGMA user_version = {number}; COMMIT;"
            connection.executescript(step)

    def _keep_node(self) -> None:
        """The ids of the tasks here begin with the node's name: another one on the same database would rename them."""
        assert self._writer is not None
        with self._writer:
            self._writer.execute("INSERT OR IGNORE INTO meta VALUES ('node', ?)", (self._node,))
        name = self._writer.execute("SELECT value FROM meta WHERE key = 'node'").fetchone()[0]
        if name != self._node:
            raise StoreError(
                f"the tasks in {self._path.parent} are those of node {name}, not of {self._node}",
                hint=f"go on as that node:  --node {name}        a new node:  --state DIR",
            )

    def next_incarnation(self) -> int:
        """A number that grows with every start, durable before it is returned."""
        assert self._writer is not None
        try:
            rows = self._writer.execute(
                "INSERT INTO meta VALUES ('incarnation', 1) ON CONFLICT (key) DO UPDATE SET value = value + 1"
                " RETURNING value"
            ).fetchall()  # to the end: the statement commits there
        except sqlite3.Error as error:
            raise StoreError("the database cannot be written", why=str(error)) from None
        return int(rows[0][0])

    def close(self) -> None:
        """Commit what waits, close, let go of the lock."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        for connection in (self._reader, self._writer):
            if connection is not None:
                connection.close()
        self._reader = self._writer = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- writing -------------------------------------------------------------------------------------------------------

    def start_writer(
        self, notify: Callable[[list[Callable[[], None]]], None], on_error: Callable[[Exception], None]
    ) -> None:
        """Start the writer thread. ``notify(done)`` and ``on_error`` are called from it."""
        self._thread = threading.Thread(target=self._write, args=(notify, on_error), name="store", daemon=True)
        self._thread.start()

    def persist(self, rows: Sequence[Row], done: Callable[[], None]) -> None:
        """Make rows durable, all or none; ``done`` comes back through ``notify`` afterwards, in order."""
        if self._queue.qsize() > BATCHES_WAITING_MAX:
            raise StoreError("the disk does not keep up", why=f"{BATCHES_WAITING_MAX} commits are waiting")
        self._queue.put((rows, done))

    def _write(self, notify: Callable[[list[Callable[[], None]]], None], on_error: Callable[[Exception], None]) -> None:
        stopping = False
        while not stopping:
            waiting = [self._queue.get()]
            while not self._queue.empty():
                waiting.append(self._queue.get())
            stopping = None in waiting
            batches = [batch for batch in waiting if batch is not None]
            if not batches or self._failed:
                continue
            try:
                self._commit([row for rows, _ in batches for row in rows])
            except Exception as error:  # noqa: BLE001 -- whatever it was, these rows are not kept and the agent must know
                self._failed = True
                on_error(StoreError("a commit failed", why=str(error)))
                continue
            notify([done for _, done in batches])

    def _commit(self, rows: list[Row]) -> None:
        assert self._writer is not None
        writer = self._writer
        writer.execute("BEGIN IMMEDIATE")
        try:
            # Rows of one task must be applied in order; different kinds touch different tables.
            tasks = [row for row in rows if type(row) is PutTask]
            for row in rows:
                if type(row) is not PutTask:
                    self._apply(writer, row)
            if tasks:
                newest = {row.record.uid: row for row in tasks}
                writer.executemany(schema.PUT_TASK, [_task_values(row.record) for row in newest.values()])
                writer.executemany(schema.PUT_HISTORY, [_history_values(row) for row in tasks])
            writer.execute("COMMIT")
        except BaseException:
            if writer.in_transaction:
                writer.execute("ROLLBACK")
            raise

    def _apply(self, writer: sqlite3.Connection, row: Row) -> None:
        match row:
            case PutFloor():
                writer.execute(schema.PUT_FLOOR, (row.uid, row.floor, row.at, int(row.kind)))
            case DropFloors():
                writer.executemany(schema.DROP_FLOOR, [(uid,) for uid in row.uids])
            case PutDrain():
                if row.reason is None:
                    writer.execute(schema.DROP_DRAIN)
                else:
                    writer.execute(schema.PUT_DRAIN, (row.reason,))
            case PutExecution():
                record = row.record
                writer.execute(schema.PUT_EXECUTION, (record.uid, record.attempt, _encode(record)))
            case DropExecution():
                writer.execute(schema.DROP_EXECUTION, (row.uid, row.attempt))
            case PutSubmission():
                kept = row.submission
                digest = hashlib.sha256(kept.spec.environment).digest()
                spec = _encode(msgspec.structs.replace(kept.spec, environment=b""))
                writer.execute(schema.PUT_ENVIRONMENT, (digest, kept.spec.environment))
                writer.execute(
                    schema.PUT_SUBMISSION,
                    (kept.counter, kept.token, kept.digest, spec, digest, len(kept.indices), kept.submitted_at),
                )
            case PutTask():
                raise AssertionError("applied apart")

    # -- reading -------------------------------------------------------------------------------------------------------

    def recover(self) -> Recovered:
        """Everything unfinished. Raises StoreError naming a row that cannot be read."""
        tasks = [
            TaskRow(record, spec)
            for record, spec in self._rows("t.ended_at = 0 ORDER BY t.counter, t.member", ())
            if not record.state.is_final
        ]
        executions = []
        for uid, attempt, raw in self._execute("SELECT uid, attempt, record FROM executions ORDER BY uid, attempt"):
            executions.append(_decoded(_execution, raw, f"execution {uid.hex()}-{attempt}"))
        tokens = [
            (token, digest, f"{self._node}/{counter}", members)
            for token, digest, counter, members in self._execute(
                "SELECT token, digest, counter, members FROM submissions WHERE submitted_at > ? ORDER BY counter",
                (time.time() - KEPT_S,),
            )
        ]
        floors = [
            (uid, floor, _floor_kind(kind))
            for uid, floor, kind in self._execute("SELECT uid, floor, kind FROM floors ORDER BY at, uid")
        ]
        drained = self._execute("SELECT value FROM meta WHERE key = 'drained'")
        return Recovered(
            tuple(tasks),
            tuple(executions),
            tuple(floors),
            tuple(tokens),
            self.last_counter() or 0,
            self.past_runs(),
            drained[0][0] if drained else None,
        )

    def past_runs(self) -> tuple[PastRun, ...]:
        """The tasks that ended last and told how, the oldest first; one that cannot be read teaches nothing."""
        specs: dict[int, TaskSpec] = {}
        runs = []
        for counter, exit_, spec in self._execute(schema.PAST_RUNS, (PAST_RUNS_MAX,)):
            with contextlib.suppress(StoreError):
                if counter not in specs:
                    specs[counter] = _decoded(_spec, spec, f"submission {counter}")
                runs.append(PastRun(specs[counter], _decoded(_exit, exit_, f"the exit of {counter}")))
        return tuple(reversed(runs))

    def last_counter(self) -> int | None:
        """The number of the last submission, None if there is none."""
        return self._execute("SELECT max(counter) FROM submissions")[0][0]  # type: ignore[no-any-return]

    def submission_of(self, token: str) -> tuple[bytes, str, int] | None:
        """(digest, id, members; 0 = a single task) of the newest submission with this token, if it is remembered."""
        rows = self._execute(
            "SELECT digest, counter, members FROM submissions WHERE token = ? AND submitted_at > ?"
            " ORDER BY counter DESC LIMIT 1",
            (token, time.time() - KEPT_S),
        )
        return (rows[0][0], f"{self._node}/{rows[0][1]}", rows[0][2]) if rows else None

    def task_rows(self, counter: int, index: int | None) -> list[tuple[TaskRecord, TaskSpec]]:
        """One task, or all members of an array (index None), with what is to be run; empty if there is none."""
        return self._rows(*_where(counter, index))

    def records(self, counter: int, index: int | None) -> list[TaskRecord]:
        """The same, the records alone."""
        where, values = _where(counter, index)
        return [self._record(row) for row in self._execute(f"SELECT {_COLUMNS} FROM tasks t WHERE {where}", values)]  # noqa: S608 -- constants

    def list_tasks(self, ended_after: float, limit: int) -> tuple[list[tuple[TaskRecord, TaskSpec]], bool]:
        """Unfinished tasks and those that ended after that moment (Unix s), oldest first; the newest ``limit`` of them,
        and whether there were more."""
        unfinished = self._rows("t.ended_at = 0 ORDER BY t.counter DESC, t.member DESC LIMIT ?", (limit + 1,))
        ended = self._rows("t.ended_at > ? ORDER BY t.ended_at DESC LIMIT ?", (max(ended_after, 0.0), limit + 1))
        rows = sorted(unfinished + ended, key=lambda row: _order(row[0].task))
        return rows[-limit:], len(rows) > limit

    def ended(
        self, since: float, after: TaskRecord | None, limit: int, *, oldest_first: bool
    ) -> list[tuple[TaskRecord, TaskSpec]]:
        """One page of the tasks that ended at ``since`` (Unix s) or later: those that follow ``after`` (None: the first).
        The last ended first; or, with ``oldest_first``, in the order they were submitted in."""
        if oldest_first:
            place: tuple[object, ...] = _order(after.task) if after is not None else (-1, SINGLE)
        else:
            place = (after.ended_at, *_order(after.task)) if after is not None else (float("inf"), 0, 0)
        return self._rows(schema.ENDED_OLDEST if oldest_first else schema.ENDED_NEWEST, (since, *place, limit))

    def before_the_last(self, since: float, number: int) -> TaskRecord | None:
        """The ended task that ``number`` more were submitted after, of those that ended at ``since`` or later; None if
        there are no more than these."""
        rows = self._execute(f"SELECT {_COLUMNS} FROM tasks t WHERE {schema.ENDED_BEFORE_LAST}", (since, number))  # noqa: S608 -- constants
        return self._record(rows[0]) if rows else None

    def history(self, task: str) -> list[tuple[float, str, str, int, str]]:
        """(at, state, reason, attempt, node) of a task, in order."""
        counter, member = _order(task)
        return self._execute(
            "SELECT at, state, reason, attempt, node FROM history WHERE counter = ? AND member = ? ORDER BY rowid",
            (counter, member),
        )

    def _execute(self, sql: str, values: tuple[object, ...] = ()) -> list[Any]:
        assert self._reader is not None
        try:
            return self._reader.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError("the database cannot be read", why=str(error)) from None

    def _rows(self, where: str, values: tuple[object, ...]) -> list[tuple[TaskRecord, TaskSpec]]:
        found = self._execute(f"SELECT {_COLUMNS} FROM tasks t WHERE {where}", values)  # noqa: S608 -- constants
        specs: dict[int, TaskSpec] = {}
        environments: dict[bytes, bytes] = {}  # one copy of each, however many tasks share it
        for row in found:
            if row[0] not in specs:
                specs[row[0]] = self._spec_of(row[0], environments)
        return [(self._record(row), specs[row[0]]) for row in found]

    def _spec_of(self, counter: int, environments: dict[bytes, bytes]) -> TaskSpec:
        rows = self._execute("SELECT spec, environment FROM submissions WHERE counter = ?", (counter,))
        if not rows:
            raise StoreError(f"submission {counter} is missing from the database")
        packed, digest = rows[0]
        if digest not in environments:
            found = self._execute("SELECT environment FROM environments WHERE digest = ?", (digest,))
            if not found:
                raise StoreError(f"the environment of submission {counter} is missing from the database")
            environments[digest] = found[0][0]
        spec: TaskSpec = _decoded(_spec, packed, f"submission {counter}")
        return msgspec.structs.replace(spec, environment=environments[digest])

    def _record(self, row: tuple[Any, ...]) -> TaskRecord:
        name = f"{self._node}/{row[0]}" + (f".{row[1]}" if row[1] != SINGLE else "")
        exit_ = None if row[13] is None else _decoded(_exit, row[13], f"the exit of {name}")
        try:
            state = TaskState(row[3])
        except ValueError:
            raise StoreError(f"{name} has no state that is known", why=repr(row[3])) from None
        attempt, node, nonce, machine_boot, lease_s, migrations, submitted_at, started_at, ended_at = row[4:13]
        more = _NO_MORE if row[15] is None else _decoded(_more, row[15], f"the record of {name}")
        return TaskRecord(
            task=name,
            uid=row[2],
            state=state,
            submitted_at=submitted_at,
            attempt=attempt,
            node=node,
            nonce=nonce,
            machine_boot=machine_boot,
            lease_s=lease_s,
            migrations=migrations,
            started_at=started_at,
            ended_at=ended_at,
            exit=exit_,
            reason=row[14],
            store=more.store,
            parked_ts=more.parked_ts,
            losses=more.losses,
            lost_on=more.lost_on,
            last_node=more.last_node,
            retry_of=more.retry_of,
        )


def _floor_kind(kind: int) -> FloorKind:
    """What cannot be read counts as what promises most."""
    return FloorKind(kind) if kind in tuple(FloorKind) else FloorKind.STARTED_ONCE


def _where(counter: int, index: int | None) -> tuple[str, tuple[object, ...]]:
    if index is None:
        return "t.counter = ? ORDER BY t.member", (counter,)
    return "t.counter = ? AND t.member = ?", (counter, index)


def _order(task: str) -> tuple[int, int]:
    counter, dot, member = task.partition("/")[2].partition(".")
    return int(counter), int(member) if dot else SINGLE


def _task_values(record: TaskRecord) -> tuple[object, ...]:
    counter, member = _order(record.task)
    more = _More(record.store, record.parked_ts, record.losses, record.lost_on, record.last_node, record.retry_of)
    return (
        counter,
        member,
        record.uid,
        record.state.value,
        record.attempt,
        record.node,
        record.nonce,
        record.machine_boot,
        record.lease_s,
        record.migrations,
        record.submitted_at,
        record.started_at,
        record.ended_at,
        None if record.exit is None else _encode(record.exit),
        record.reason,
        None if more == _NO_MORE else _encode(more),
    )


def _history_values(row: PutTask) -> tuple[object, ...]:
    record = row.record
    return (*_order(record.task), row.at, record.state.value, row.reason, record.attempt, record.node)


def _decoded(decoder: msgspec.msgpack.Decoder[Any], raw: bytes, what: str) -> Any:  # noqa: ANN401 -- the decoder's type
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"{what} cannot be read from the database", why=str(error)) from None


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
