"""The store of a node: SQLite in WAL mode, every commit synced, one writer thread. `reader.py` has the reads,
`recovery.py` the reads at the start of an agent.

The writer commits all rows that arrived during its last commit in one transaction (group commit, without a timer), so that
they share the cost of one sync. A transaction that finds the disk full is rolled back and retried with space from
the reserve, or when there is space: nothing was reported yet. Any other failure is final, in particular a failed sync (a
later one may succeed although the kernel has dropped the data): `WriterOwner.failed` is called once, nothing more is written,
and the agent stops.

SQLite silently drops the end of a damaged write-ahead log, and with it commits that were reported to users and peers. So a
file beside the database has its high-water mark, which shows at the next start whether commits were lost."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import queue
import secrets
import sqlite3
import threading
import time
import zlib
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from peerload.agent.runtime import Histogram, call_in_loop
from peerload.agent.store import schema
from peerload.agent.store.backup import back_up
from peerload.agent.store.disk_space import is_full
from peerload.agent.store.maintenance import OUTPUT_BYTES_MAX, MaintenanceRow, output_bytes, put_jobs
from peerload.agent.store.maintenance import apply as apply_upkeep
from peerload.agent.store.recovery import StoreRecovery
from peerload.agent.store.schema import KEPT_S, NO_MORE, ExtraColumns, encode, extra_of
from peerload.model import actions
from peerload.model.errors import StoreError
from peerload.model.task import ATTEMPT_MAX, NO_TERMS, SINGLE, TaskState, member_uid, order_of, owner_key, submission_of
from peerload.security.private_files import machine_boot_id, sync

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from peerload.agent.runtime import RunState
    from peerload.agent.store.disk_space import DiskReserve
    from peerload.model.events import AgentStarted
    from peerload.model.task import TaskRecord


log = logging.getLogger("peerload.agent")

FILE = "high-water"
LINE_BYTES = 128
"""Size of the file: one write, within one sector."""
GAP = 100_000
"""Numbers of submissions that are skipped after a loss: more than a node assigns within the maximum age of a mark."""
ATTEMPTS_GAP = 1_000
"""Numbers of attempts of one task that are skipped after a loss."""
SLACK_S = 3600.0
"""Maximum jump ahead of the date that is trusted immediately."""
LASTED_S = 86_400.0
"""Time after which a larger jump is trusted; the time while the machine is off does not count."""
NOT_AHEAD = -1.0
BATCHES_WAITING_MAX = 100_000
"""Maximum number of batches of rows that wait for the disk; with more, the disk must be stuck, and the agent stops."""
EVENTS_KEPT_MAX = 2_000_000
"""Maximum number of events; beyond it, the oldest are removed."""
PRUNE_EVERY = 10_000
"""Number of new events after which old ones are removed, at most twice as many at a time."""
COMMIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
FULL_RETRY_S = 0.5
"""Interval of retries on a full disk without a reserve."""
NOTES_ASIDE_MAX = 1000
"""Maximum number of events kept for a later commit while the disk is full; beyond it, the oldest are dropped."""
MEMORY_PAGES_KIB = 2048
APPLIED_APART = frozenset((actions.PutTask, actions.PutUsage, actions.PutEvent, actions.PutChores))


# -- the high-water mark -----------------------------------------------------------------------------------------------


class HighWaterMark(msgspec.Struct, frozen=True):
    """High-water mark of a database: the last submission, the last event, and the time (Unix s)."""

    store: str
    counter: int
    event: int
    at: float


class LostCommits(msgspec.Struct, frozen=True):
    """Loss of a database: ``had`` is the high-water mark, ``has`` is the current content."""

    had: HighWaterMark
    has: HighWaterMark

    def message(self, node: str) -> str:
        """Description of the loss for users."""
        first, last = self.has.counter + 1, self.had.counter
        missing = f"{node}/{first}" if first == last else f"{node}/{first} to {node}/{last}"
        submissions = f"{missing} were acknowledged and are missing" if first <= last else "no submission is missing"
        events = max(self.had.event - self.has.event, 0)
        return (
            f"the database has lost its last commits (a damaged or restored file): {submissions}; the last {events} events"
            f" are missing, so that ended tasks may be shown as unfinished; new ids begin at {node}/{last + GAP + 1};"
            " a queued task that may run only once is held, others wait until all their leases must have ended"
        )


class HighWaterFile:
    """File of the high-water mark, written after each commit, before the commit is reported, and never synced: it is exact after a
    crash of the agent, and up to half a minute old after a power cut. It is never ahead of a sound database.

    A mark that cannot be read or written counts as absent: the database itself decides.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._fd: int | None = None

    def read(self) -> HighWaterMark | None:
        """The mark; None if there is no readable one."""
        try:
            text, _, digest = self._path.read_text(encoding="ascii").rstrip().rpartition(" ")
            store, counter, event, at = text.split(" ")
            if f"{zlib.crc32(text.encode('ascii')):08x}" != digest:
                return None
            return HighWaterMark(store, int(counter), int(event), float(at))
        except (OSError, ValueError):
            return None

    def write(self, mark: HighWaterMark) -> None:
        """Replace the mark, without a sync."""
        text = f"{mark.store} {mark.counter} {mark.event} {mark.at:.3f}"
        line = f"{text} {zlib.crc32(text.encode('ascii')):08x}".ljust(LINE_BYTES - 1) + "\n"
        with contextlib.suppress(OSError):
            if self._fd is None:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.pwrite(self._fd, line.encode("ascii"), 0)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


# -- the date ----------------------------------------------------------------------------------------------------------


class DateAnchor(NamedTuple):
    """``wall_s`` is the trusted date when the boot clock of that boot was ``boot_s``; ``ahead_s``: time for which the machine's
    date has been ahead of the trusted one, NOT_AHEAD if it is not."""

    boot_id: str
    boot_s: float
    wall_s: float
    ahead_s: float = NOT_AHEAD

    def packed(self) -> str:
        return f"{self.boot_id} {self.boot_s:.3f} {self.wall_s:.3f} {self.ahead_s:.3f}"


def anchor_of(packed: object) -> DateAnchor | None:
    """An anchor as stored in the database; None if there is no readable one."""
    try:
        boot_id, boot_s, wall_s, ahead_s = str(packed).split(" ")
        return DateAnchor(boot_id, float(boot_s), float(wall_s), float(ahead_s))
    except ValueError:
        return None


class TrustedDate:
    """Trusted date, which decides about removals. A jump ahead counts only when it has lasted a day.

    Data removed because of a wrong date is lost, so the date is compared with the boot clock. Within one boot of the machine, the
    boot clock shows how much time has passed. Across a reboot this is unknown, so that a machine that was off for a weekend
    removes nothing for a day. A jump back counts immediately, since it removes nothing.

    anchor: the state to store. ``clocks()`` → (boot clock, Unix time), in seconds.
    """

    def __init__(
        self,
        anchor: DateAnchor | None = None,
        *,
        boot_id: str = "",
        clocks: Callable[[], tuple[float, float]] = lambda: (time.clock_gettime(time.CLOCK_BOOTTIME), time.time()),
    ) -> None:
        """anchor: stored by an earlier agent; without one, the machine's date is trusted."""
        self._clocks = clocks
        self._boot_id = boot_id or machine_boot_id()
        self.anchor = anchor or DateAnchor(self._boot_id, *clocks())

    def now(self) -> float:
        """The trusted date, Unix s."""
        boot_s, wall_s = self._clocks()
        known = self.anchor
        passed_s = max(boot_s - known.boot_s, 0.0) if known.boot_id == self._boot_id else 0.0
        expected_s = known.wall_s + passed_s
        if wall_s <= expected_s + SLACK_S:
            self.anchor = DateAnchor(self._boot_id, boot_s, wall_s)
        else:
            ahead_s = 0.0 if known.ahead_s == NOT_AHEAD else known.ahead_s + passed_s
            is_believed = ahead_s >= LASTED_S
            self.anchor = DateAnchor(
                self._boot_id, boot_s, wall_s if is_believed else expected_s, NOT_AHEAD if is_believed else ahead_s
            )
        return self.anchor.wall_s


# -- the store ---------------------------------------------------------------------------------------------------------


class WriterOwner(Protocol):
    """Receiver of the outcome of commits, called from the writer's thread."""

    def committed(self, done: list[Callable[[], None]], /) -> None:
        """Rows are durable: call these functions, in order."""

    def failed(self, error: StoreError, /) -> None:
        """A commit has failed, and no more rows are stored."""


class LoopOwner:
    """The `WriterOwner` of an agent: calls run in the loop's thread, and a failed commit stops the agent."""

    def __init__(self, loop: asyncio.AbstractEventLoop, run: RunState) -> None:
        self._loop = loop
        self._run = run

    def committed(self, done: list[Callable[[], None]], /) -> None:
        call_in_loop(self._loop, done)

    def failed(self, error: StoreError, /) -> None:
        call_in_loop(self._loop, [functools.partial(self._run.fail, f"the store failed: {error}")])


class Store(StoreRecovery):
    """Database of one node. Call `open`, then `start_writer`; reads are for the agent's own thread."""

    def __init__(
        self, path: Path, node: str, reserve: DiskReserve | None = None, *, output_bytes_max: int = OUTPUT_BYTES_MAX
    ) -> None:
        """output_bytes_max: maximum number of bytes that are kept of one stream of a task."""
        super().__init__(node)
        self._path = path
        self._output_bytes_max = output_bytes_max
        self._reserve = reserve
        self._lock: int | None = None
        self._writer: sqlite3.Connection | None = None
        self.commits = Histogram(COMMIT_SECONDS)
        """Durations of commits, written by the writer's thread."""
        self._thread: threading.Thread | None = None
        self._queue: queue.SimpleQueue[tuple[Sequence[actions.Row | MaintenanceRow], Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._failed = False
        self._owner: WriterOwner
        self._closing = threading.Event()
        self._new_events = 0
        self._making: set[int] = set()
        self._aside: list[actions.Row | MaintenanceRow] = []
        self._high_water = HighWaterFile(path.parent)
        self._counter_reached = self._event_reached = 0
        self.found_mark: HighWaterMark | None = None
        """High-water mark found when the database was opened."""
        self.lost: LostCommits | None = None
        """Loss found when the database was opened; None if nothing is missing."""
        self.date: TrustedDate
        """The trusted date, which decides when tokens are forgotten; set when the database is opened."""
        self.store_id = ""
        self.is_new = False
        """True if there was no database before, or an empty one."""
        self.is_stalled = False
        """True while the writer waits for space on a full disk: reads show the durable state before that."""

    @property
    def node(self) -> str:
        return self._node

    @property
    def path(self) -> Path:
        return self._path

    # -- opening -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open or make the database. Raises StoreError if another agent has it, it is damaged, or it has a newer schema."""
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
                sync(self._path.parent)
            self._reader = self._connect()
            identity = self._reader.execute("SELECT value FROM meta WHERE key = 'store_id'").fetchone()
            if identity is None:
                raise sqlite3.DatabaseError("it has no id")
            self._keep_node()
            self._drop_partial()
            self.store_id = str(identity[0])
            self._look_for_loss()
            self._take_up_date()
            with self._writer:
                self._writer.execute(schema.DROP_OLD_FLOORS, (self.date.now() - KEPT_S,))
        except sqlite3.Error as error:
            self.close()
            hint = self._how_to_set_aside()
            if is_full(error, self._path.parent):
                hint = "its disk is full; make room, then start the agent again:  peerload clean --outputs --older 1d"
            raise StoreError(f"the database {self._path} cannot be used", why=str(error), hint=hint) from None
        except StoreError:
            self.close()
            raise

    def recover(self) -> AgentStarted:
        try:
            return super().recover()
        except StoreError as error:
            why, hint = error.why, self._how_to_set_aside()
            raise StoreError(f"the database {self._path} cannot be used", why=why, hint=hint) from None

    def _drop_partial(self) -> None:
        """Drop the members of arrays whose submission was interrupted: they were never acknowledged. Their numbers are not
        reused."""
        assert self._writer is not None
        for (counter,) in self._writer.execute(schema.MAKING).fetchall():
            with self._writer:
                self._writer.execute("BEGIN IMMEDIATE")
                self._writer.execute(schema.COUNT_ON, (counter,))
                self._writer.execute("DELETE FROM tasks WHERE counter = ?", (counter,))
                self._writer.execute(schema.DROP_MAKING, (counter,))

    def _look_for_loss(self) -> None:
        """Compare the database with its high-water mark. If it has lost commits, it gets a new store id, since it does not know all
        promises that it has made (rule R6), and reuses no number of a submission or an attempt. The
        mark may have an id from before an earlier loss."""
        assert self._writer is not None
        assert self._reader is not None
        self._counter_reached = self._counter()
        self._event_reached = self._reader.execute(schema.LAST_EVENT).fetchone()[0] or 0
        found = self.found_mark = self._high_water.read()
        has = self._mark()
        if found is not None and not self.is_new and (found.counter > has.counter or found.event > has.event):
            self.lost = LostCommits(found, has)
            self.store_id = secrets.token_hex(8)
            self._event_reached = max(found.event, has.event) + 1
            self._counter_reached = max(found.counter, has.counter) + GAP
            words = self.lost.message(self._node)
            self._writer.execute("BEGIN IMMEDIATE")
            self._writer.execute(schema.KEEP_ID, (self.store_id,))
            self._writer.execute(schema.KEEP_COUNTER, (self._counter_reached,))
            # Each granted attempt is an event, so that no attempt has a greater number than the events.
            attempts_from = min(self._event_reached + ATTEMPTS_GAP, ATTEMPT_MAX // 2)
            self._writer.execute(schema.KEEP_ATTEMPTS, (attempts_from, self._counter_reached))
            self._writer.execute(schema.PUT_LOSS, (self._event_reached, time.time(), words))
            self._writer.execute("COMMIT")
        self._high_water.write(self._mark())

    def _take_up_date(self) -> None:
        assert self._writer is not None
        kept = self._writer.execute(schema.DATE).fetchone()
        self.date = TrustedDate(anchor_of(kept[0]) if kept is not None else None)
        self.date.now()
        self._writer.execute(schema.KEEP_DATE, (self.date.anchor.packed(),))

    def _mark(self) -> HighWaterMark:
        return HighWaterMark(self.store_id, self._counter_reached, self._event_reached, time.time())

    def _how_to_set_aside(self) -> str:
        """A hint to move the database away: all of its files, since the last rows may be only in the -wal file."""
        there = [path for suffix in ("", "-wal", "-shm") if (path := f"{self._path}{suffix}") and os.path.exists(path)]  # noqa: PTH110 -- a name, not a Path
        aside = f"{self._path}.broken"
        return (
            f"keep it for inspection, all of its files together (acknowledged tasks may be only in the -wal file), "
            f"and start afresh:  mkdir {aside} && mv {' '.join(there) or self._path} {aside}/"
        )

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
        except OSError as error:
            os.close(self._lock)
            self._lock = None
            hint = "name a directory on a local disk:  --state DIR"
            raise StoreError(f"{path} cannot be locked", why=str(error.strerror), hint=hint) from None
        with contextlib.suppress(OSError):  # on a full disk, the lock names no holder
            os.ftruncate(self._lock, 0)
            os.write(self._lock, b"%d\n" % os.getpid())

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=10.0)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA cache_size = -{MEMORY_PAGES_KIB}")
            connection.execute("PRAGMA wal_autocheckpoint = 2000")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > schema.VERSION:
            raise StoreError(
                f"the database {self._path} was written by another version of peerload",
                why=f"its schema is {version}, this one knows {schema.VERSION}",
                hint="install that version again, or name another directory:  --state DIR",
            )
        if version == 0:
            self.is_new = True
            made = f"INSERT INTO meta VALUES ('store_id', '{secrets.token_hex(8)}')"  # noqa: S608 -- hex digits of our own
            connection.executescript(f"BEGIN; {schema.SCHEMA} PRAGMA user_version = {schema.VERSION}; {made}; COMMIT;")
            return
        if version < schema.VERSION:
            back_up(connection, self._path, version)
        for number in range(version + 1, schema.VERSION + 1):
            connection.executescript(schema.migration(number))

    def _keep_node(self) -> None:
        """Check that the database belongs to a node of this name, since task ids begin with it. Raises StoreError."""
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
        return int(self._write_now(schema.COUNT_INCARNATION)[0][0])

    def take_new_id(self) -> None:
        """Give the database a new id, since promises to peers may be missing from it; durable on return."""
        store_id = secrets.token_hex(8)
        self._write_now(schema.KEEP_ID, store_id)
        self.store_id = store_id
        self._high_water.write(self._mark())

    def count_on_from(self, counter: int) -> None:
        """The next submission gets a greater number than this one; durable before it returns."""
        self._write_now(schema.KEEP_COUNTER, counter)
        self._counter_reached = max(self._counter_reached, counter)
        self._high_water.write(self._mark())

    def _write_now(self, sql: str, *values: object) -> list[Any]:
        assert self._writer is not None
        try:
            return self._writer.execute(sql, values).fetchall()  # fetch all rows: the statement commits at its end
        except sqlite3.Error as error:
            raise StoreError("the database cannot be written", why=str(error)) from None

    def close(self) -> None:
        """Commit the waiting rows, close the database and release the lock."""
        if self._thread is not None:
            self._closing.set()
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        for connection in (self._reader, self._writer):
            if connection is not None:
                connection.close()
        self._reader = self._writer = None
        self._high_water.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def submission_of(self, token: str) -> tuple[bytes, str, int] | None:
        """(digest, id, members; 0 = a single task) of the newest submission with this token, if it is remembered."""
        rows = self.rows(schema.SUBMISSION_OF, (token, self.date.now() - KEPT_S))
        return (rows[0][0], f"{self._node}/{rows[0][1]}", rows[0][2]) if rows else None

    # -- writing -------------------------------------------------------------------------------------------------------

    def start_writer(self, owner: WriterOwner) -> None:
        self._owner = owner
        self._start_thread()

    def _start_thread(self) -> bool:
        """Start the writer thread → True if it runs. Without a thread (the limit of processes is reached), the caller of
        `persist` writes, and waits for the disk."""
        if self._thread is None:
            thread = threading.Thread(target=self._write, name="store", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("cannot start the writer thread of the store: error=%s", error)
                return False
            self._thread = thread
        return True

    def persist(self, rows: Sequence[actions.Row | MaintenanceRow], done: Callable[[], None]) -> None:
        """Make rows durable, all or none; ``done`` goes to `WriterOwner.committed` afterwards, in order."""
        if self._queue.qsize() > BATCHES_WAITING_MAX:
            raise StoreError("the disk does not keep up", why=f"{BATCHES_WAITING_MAX} commits are waiting")
        self._queue.put((rows, done))
        if not self._start_thread():
            self._write_waiting()

    async def keep(self, *rows: MaintenanceRow) -> None:
        """Make rows durable, and wait until they are. Raises StoreError."""
        durable = asyncio.Event()
        self.persist(rows, durable.set)
        await durable.wait()

    def _write(self) -> None:
        while self._write_waiting():
            pass

    def _write_waiting(self) -> bool:
        """Commit all waiting rows; if there are none, wait for the first. → False when the store is closed."""
        waiting = [self._queue.get()]
        while not self._queue.empty():
            waiting.append(self._queue.get())
        batches = [batch for batch in waiting if batch is not None]
        if batches and not self._failed:
            try:
                self._commit_with_room([row for rows, _ in batches for row in rows])
            except Exception as error:  # noqa: BLE001 -- whatever it was, these rows are not kept and the agent must know
                self._failed = True
                self._owner.failed(StoreError("a commit failed", why=str(error)))
            else:
                self._high_water.write(self._mark())
                self._owner.committed([done for _, done in batches])
        return None not in waiting

    def _commit_with_room(self, rows: list[actions.Row | MaintenanceRow]) -> None:
        """Commit; on a full disk take space from the reserve, or wait for some. Events alone do not wait: they are put aside for
        a later commit that has space for them, too. Raises the error of the database if it has another cause, or if the store is
        being closed and there is still no space."""
        aside = self._aside
        while True:
            try:
                self._commit([*aside, *rows])
            except sqlite3.Error as error:
                if not is_full(error, self._path.parent):
                    raise
                if self._reserve is not None and self._reserve.give():
                    continue
                if all(type(row) is actions.PutEvent for row in rows):
                    self._aside = [*aside, *rows][-NOTES_ASIDE_MAX:]
                    return
                if aside:  # the rows alone may need less space
                    aside = []
                    continue
                self.is_stalled = True
                if self._closing.wait(FULL_RETRY_S):
                    raise StoreError("the disk is full", why="no space was freed before the agent stopped") from None
            else:
                self.is_stalled = False
                if aside:
                    self._aside = []
                return

    def _commit(self, rows: list[actions.Row | MaintenanceRow]) -> None:
        assert self._writer is not None
        writer, began_s = self._writer, time.monotonic()
        writer.execute("BEGIN IMMEDIATE")
        try:
            # Rows of one task must be applied in order; different kinds touch different tables.
            tasks = [row for row in rows if type(row) is actions.PutTask]
            for row in rows:
                if type(row) not in APPLIED_APART and not isinstance(row, MaintenanceRow):
                    self._apply(writer, row)
            if tasks:
                newest = {row.record.uid: row for row in tasks}
                writer.executemany(schema.PUT_TASK, [self._task_values(row.record) for row in newest.values()])
            for row in rows:
                if isinstance(row, MaintenanceRow):
                    apply_upkeep(writer, row, self.date.now() - KEPT_S)
                elif type(row) is actions.PutChores:
                    put_jobs(writer, row, order_of(row.task))
            _put_usages(writer, [row for row in rows if type(row) is actions.PutUsage])
            events = self._events(rows)
            last_event = self._event_reached
            for first in range(0, len(events), schema.EVENTS_AT_ONCE):
                some = events[first : first + schema.EVENTS_AT_ONCE]
                put = writer.execute(schema.put_events(len(some)), list(chain.from_iterable(some)))
                last_event = put.lastrowid or last_event
            self._prune(writer, len(events))
            writer.execute("COMMIT")
            self.commits.observe(time.monotonic() - began_s)
            self._event_reached = last_event
            self.store_id = next((row.store for row in reversed(rows) if type(row) is actions.PutRun), self.store_id)
            self._making |= {row.counter for row in rows if type(row) is actions.PutMaking}
            self._making -= {row.submission.counter for row in rows if type(row) is actions.PutSubmission}
            self._counter_reached = max(
                (row.submission.counter for row in rows if type(row) is actions.PutSubmission),
                default=self._counter_reached,
            )
        except BaseException:
            if writer.in_transaction:
                writer.execute("ROLLBACK")
            raise

    def _events(self, rows: list[actions.Row | MaintenanceRow]) -> list[tuple[object, ...]]:
        """The events of these rows, in order. The submission of an array is one event, reported with its last
        members."""
        arrays = {
            row.submission.counter: len(row.submission.indices)
            for row in rows
            if type(row) is actions.PutSubmission and row.submission.indices
        }
        making = {*self._making, *arrays, *(row.counter for row in rows if type(row) is actions.PutMaking)}
        events: list[tuple[object, ...]] = []
        told: set[int] = set()
        for row in rows:
            if type(row) is actions.PutTask:
                record = row.record
                counter, member = order_of(record.task)
                state, reason = record.state.value, row.reason
                if counter in making and _is_new(row):
                    if counter in told or counter not in arrays:
                        continue
                    told.add(counter)
                    member, reason = SINGLE, f"{reason}: {arrays[counter]} task{'s' * (arrays[counter] != 1)}"
                events.append((row.at, "task", state, counter, member, None, record.attempt, record.node, reason))
            elif type(row) is actions.PutMembers:
                record, counter = row.record, submission_of(row.record.task)
                if record.state.is_final:
                    events += [
                        (row.at, "task", record.state.value, counter, member, None, 0, "", row.reason)
                        for member in row.members
                    ]
                elif counter in arrays and counter not in told:
                    told.add(counter)
                    words = f"{row.reason}: {arrays[counter]} tasks"
                    events.append((row.at, "task", record.state.value, counter, SINGLE, None, 0, "", words))
            elif type(row) is actions.PutEvent:
                is_own = row.task.startswith(f"{self._node}/")
                place = order_of(row.task) if is_own else (None, None)
                task = None if is_own else row.task or None
                events.append((row.at, row.what, row.state, *place, task, row.attempt, row.node, row.reason))
        return events

    def _prune(self, writer: sqlite3.Connection, new: int) -> None:
        self._new_events += new
        if self._new_events >= PRUNE_EVERY:
            self._new_events = 0
            writer.execute(schema.PRUNE_EVENTS, (EVENTS_KEPT_MAX, new + 2 * PRUNE_EVERY))

    def _task_values(self, record: TaskRecord) -> tuple[object, ...]:
        exit_ = record.exit
        return _values_of(record, 0 if exit_ is None else output_bytes(exit_, self._output_bytes_max))

    def _apply(self, writer: sqlite3.Connection, row: actions.Row) -> None:  # noqa: C901 PLR0912 -- one line a row
        match row:
            case actions.PutFloor():
                writer.execute(schema.PUT_FLOOR, (row.uid, row.floor, row.at, int(row.kind), row.home))
            case actions.DropFloors():
                writer.executemany(schema.DROP_FLOOR, [(uid,) for uid in row.uids])
            case actions.PutDrain():
                if row.reason is None:
                    writer.execute(schema.DROP_DRAIN)
                else:
                    writer.execute(schema.PUT_DRAIN, (row.reason,))
            case actions.PutExecution():
                record = row.record
                writer.execute(schema.PUT_EXECUTION, (record.uid, record.attempt, encode(record)))
            case actions.PutFate():
                fate = row.fate
                writer.execute(schema.PUT_FATE, (fate.task, int(fate.is_over), fate.failed, fate.lost))
            case actions.DropFates():
                writer.executemany(schema.DROP_FATE, [(task,) for task in row.tasks])
            case actions.PutGroup():
                group = row.group
                writer.execute(schema.PUT_GROUP, (group.name, group.slots, int(group.is_paused)))
            case actions.DropGroup():
                writer.execute(schema.DROP_GROUP, (row.name,))
            case actions.DropExecution():
                writer.execute(schema.DROP_EXECUTION, (row.uid, row.attempt))
            case actions.PutRun():
                writer.execute(schema.KEEP_INCARNATION, (row.incarnation,))
                writer.execute(schema.KEEP_ID, (row.store,))
            case actions.PutMaking():
                writer.execute(schema.PUT_MAKING, (row.counter,))
            case actions.PutMembers():
                _put_members(writer, row)
            case actions.PutSubmission():
                kept = row.submission
                writer.execute(schema.DROP_MAKING, (kept.counter,))
                digest = hashlib.sha256(kept.spec.environment).digest()
                spec = encode(msgspec.structs.replace(kept.spec, environment=b""))
                terms = None if kept.terms == NO_TERMS else encode(kept.terms)
                writer.execute(schema.PUT_ENVIRONMENT, (digest, kept.spec.environment))
                writer.execute(
                    schema.PUT_SUBMISSION,
                    (
                        kept.counter,
                        kept.token,
                        kept.digest,
                        spec,
                        digest,
                        len(kept.indices),
                        kept.submitted_at,
                        terms,
                        encode(kept.each) if kept.each else None,
                        kept.uid_key or None,
                    ),
                )
                if who := owner_key(kept.terms.owner, kept.spec.user):
                    writer.execute(schema.PUT_OWNER, (kept.counter, who))
            case actions.PutTask() | actions.PutUsage() | actions.PutEvent() | actions.PutChores():
                raise AssertionError("applied apart")


def _put_members(writer: sqlite3.Connection, row: actions.PutMembers) -> None:
    """Write new members of a uniform array, or the end of untouched ones."""
    record, key, counter = row.record, row.key, submission_of(row.record.task)
    if record.state is TaskState.QUEUED:
        new = ((counter, one, member_uid(key, one), record.submitted_at, row.reason) for one in row.members)
        writer.executemany(schema.PUT_NEW_MEMBER, new)
    else:
        ends = record.state.value, record.ended_at, record.reason
        writer.execute(schema.END_MEMBERS, (*ends, counter, row.first, row.last, row.first, row.step))


def _put_usages(writer: sqlite3.Connection, rows: list[actions.PutUsage]) -> None:
    """Store the usage of cancelled tasks that have none yet. An unreadable record stays unchanged."""
    places: dict[bytes, tuple[int, int]] = {row.uid: order_of(row.task) for row in rows if row.task}
    if nameless := [row.uid.hex().upper() for row in rows if not row.task]:
        for uid, counter, member in writer.execute(schema.CANCELLED_WITH, (json.dumps(nameless),)):
            places[uid] = counter, member
    for row in rows:
        place = places.get(row.uid, (0, 0))  # a place that no task has
        found = writer.execute(schema.CANCELLED, (*place, row.uid, row.attempt, row.node)).fetchone()
        with contextlib.suppress(StoreError):
            if found is not None and (more := schema.more_with_usage(found[0], row.usage, row.task)):
                writer.execute(schema.PUT_MORE, (more, *place))


def _is_new(row: actions.PutTask) -> bool:
    record = row.record
    return record.state in (TaskState.QUEUED, TaskState.HELD) and not record.attempt and row.at == record.submitted_at


def _values_of(record: TaskRecord, kept_bytes: int) -> tuple[object, ...]:
    """The row of a record, which `decoded_record` can read. kept_bytes: number of bytes of its output that are kept."""
    counter, member = order_of(record.task)
    more = extra_of(record)
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
        None if record.exit is None else encode(record.exit),
        record.reason,
        None if more == NO_MORE else encode(ExtraColumns(*more)),
        kept_bytes,
    )
