"""What is read from a node's database. Nothing here writes.

A row that cannot be read (a disk that lies, a hand that slipped) is named where it is asked for, and never hides the
others from a list.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from peerload.agent import store_schema as schema
from peerload.model.errors import StoreError
from peerload.model.events import PastRun
from peerload.model.task import ExecutionRecord, Exit, Grant, TaskRecord, TaskSpec, TaskState

KEPT_S = 7 * 86_400.0
"""Tokens and floors are remembered for so long."""
PAST_RUNS_MAX = 2000
"""Ended tasks from which an agent learns again when it starts."""
SINGLE = -1
"""The member number of a task that is not in an array."""

_spec = msgspec.msgpack.Decoder(TaskSpec)
_exit = msgspec.msgpack.Decoder(Exit)
_execution = msgspec.msgpack.Decoder(ExecutionRecord)
_COLUMNS = (
    "t.counter, t.member, t.uid, t.state, t.attempt, t.node, t.nonce, t.machine_boot, t.lease_s, t.migrations,"
    " t.submitted_at, t.started_at, t.ended_at, t.exit, t.reason, t.more"
)


class More(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a task's record rarely has: in one column of its own, empty for most."""

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


NO_MORE = More()
_more = msgspec.msgpack.Decoder(More)


class Happened(msgspec.Struct, frozen=True, gc=False):
    """An event as it was kept, with its number: they grow with time."""

    number: int
    at: float
    what: str
    state: str
    task: str
    attempt: int
    node: str
    reason: str


_TYPES = (int, int, bytes, str, int, str, int, str, float, int, float, float, float)
"""What those up to ended_at hold."""
_EVENT_TYPES = (int, float, str, str, int, str, str)
_Found = tuple[Any, ...]
"""A row of tasks with the columns of _COLUMNS."""


class Damage(msgspec.Struct, frozen=True, gc=False):
    """A task whose row cannot be read, and why."""

    task: str
    why: str


BEFORE_FIRST = SINGLE - 1
"""Less than the number of any member."""
Place = tuple[float, int, int]
"""Where an ended task stands: when it ended (Unix s), the number of its submission, of its member."""


class Listing(msgspec.Struct, frozen=True):
    """Tasks as a list shows them. last: the place of the last row read, readable or not; None if there was none."""

    rows: Sequence[tuple[TaskRecord, TaskSpec]] = ()
    damaged: Sequence[Damage] = ()
    truncated: bool = False
    last: Place | None = None


class StoreReader:
    """The reading half of `Store`; for the agent's own thread alone."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._reader: sqlite3.Connection | None = None
        self._damaged: dict[str, Damage] = {}
        """By id, unfinished tasks that could not be read when the agent started: nobody serves them."""

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
        highest = self._execute("SELECT max(counter) FROM submissions")[0][0]
        if highest is not None and not isinstance(highest, int):
            raise StoreError("the number of a submission cannot be read from the database", why=repr(highest)[:100])
        return highest

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

    def has(self, counter: int, index: int | None) -> bool:
        """Whether there is such a task, or such an array."""
        where, values = _where(counter, index)
        return bool(self._execute(f"SELECT 1 FROM tasks t WHERE {where} LIMIT 1", values))  # noqa: S608 -- constants

    def records(self, counter: int, index: int | None) -> list[TaskRecord]:
        """The same, the records alone."""
        where, values = _where(counter, index)
        found = self._found(where, values)
        for row in found:
            if (name := self._name(row[0], row[1])) in self._damaged:
                raise self._unreadable(self._damaged[name])
        return [self._record(row) for row in found]

    def spec(self, counter: int) -> TaskSpec:
        """What the tasks of a submission are to run."""
        return self._spec_of(counter, {})

    def page(self, counter: int, index: int | None, after: int, limit: int) -> list[TaskRecord]:
        """The first records of a task or an array whose member's number is greater than ``after``; the first page is
        after BEFORE_FIRST, the next after the member that was last."""
        values: tuple[object, ...] = (counter, after, limit)
        where = "t.counter = ? AND t.member > ?"
        if index is not None:
            where, values = f"{where} AND t.member = ?", (counter, after, index, limit)
        found = self._found(f"{where} ORDER BY t.member LIMIT ?", values)
        for row in found:
            if (name := self._name(row[0], row[1])) in self._damaged:
                raise self._unreadable(self._damaged[name])
        return [self._record(row) for row in found]

    def counts(self) -> dict[str, int]:
        """How many unfinished tasks there are in each state that any is in."""
        counts = self._execute("SELECT state, count(*) FROM tasks WHERE ended_at = 0 GROUP BY state")
        return {state: number for state, number in counts if state in tuple(TaskState)}

    def list_tasks(self, ended_after: float, limit: int, *, states: Sequence[str] = (), node: str = "") -> Listing:
        """Unfinished tasks and those that ended after that moment (Unix s), oldest first, and whether there were more.

        Of more than ``limit`` those that a node has come first, then as many of those that wait (who is next) as of
        those that ended (who was last). ``states`` (none: all) and ``node`` ("": any) narrow it; what cannot be read is
        left out by them."""
        wanted = [state for state in TaskState if not states or state in states]
        on_node, values = (" AND t.node = ?", (node,)) if node else ("", ())
        placed = [state for state in wanted if not state.is_final and state is not TaskState.QUEUED]
        final = [state for state in wanted if state.is_final]
        busy = self._found(
            f"t.ended_at = 0 AND t.state IN ({_marks(placed)}){on_node} ORDER BY t.counter, t.member LIMIT ?",
            (*placed, *values, limit + 1),
        )
        waiting: list[_Found] = []
        if TaskState.QUEUED in wanted and not node:
            waiting = self._found(
                "t.ended_at = 0 AND t.state = 'queued' ORDER BY t.counter, t.member LIMIT ?", (limit + 1,)
            )
        ended = self._found(
            f"t.ended_at > ? AND t.state IN ({_marks(final)}){on_node} ORDER BY t.ended_at DESC LIMIT ?",
            (max(ended_after, 0.0), *final, *values, limit + 1),
        )
        truncated = len(busy) + len(waiting) + len(ended) > limit
        left = max(limit - len(busy), 0)
        waiting = waiting[: max(left - len(ended), -(-left // 2))]
        kept = busy[:limit] + waiting + ended[: left - len(waiting)]
        rows, damaged = self._readable(sorted(kept, key=lambda row: (_number(row[0]), _number(row[1]))))
        if not states and not node:
            named = {damage.task for damage in damaged}
            damaged += [damage for damage in self._damaged.values() if damage.task not in named][:limit]
        return Listing(rows, damaged, truncated)

    def ended(self, since: float, after: Place | None, limit: int, *, oldest_first: bool) -> Listing:
        """One page of the tasks that ended at ``since`` (Unix s) or later: those that follow ``after`` (None: the first).
        The last ended first; or, with ``oldest_first``, in the order they were submitted in."""
        if oldest_first:
            place: tuple[object, ...] = after[1:] if after is not None else (-1, SINGLE)
        else:
            place = after if after is not None else (float("inf"), 0, 0)
        found = self._found(schema.ENDED_OLDEST if oldest_first else schema.ENDED_NEWEST, (since, *place, limit))
        return Listing(*self._readable(found), last=_place(found[-1]) if found else None)

    def before_the_last(self, since: float, number: int) -> Place | None:
        """The place of the ended task that ``number`` more were submitted after, of those that ended at ``since`` or
        later; None if there are no more than these."""
        found = self._found(schema.ENDED_BEFORE_LAST, (since, number))
        return _place(found[0]) if found else None

    # -- events --------------------------------------------------------------------------------------------------------

    def history(self, task: str) -> list[Happened]:
        """What happened to a task of this home, in order; the submission of an array counts for all its members."""
        counter, member = order_of(task)
        rows = self._execute(
            f"SELECT {schema.EVENT_COLUMNS} FROM events WHERE counter = ? AND member IN (?, ?) ORDER BY number",  # noqa: S608 -- constants
            (counter, SINGLE, member),
        )
        return [self._happened(row) for row in rows]

    def last_event(self) -> int:
        """The number of the newest event, 0 if there is none."""
        return int(self._execute("SELECT max(number) FROM events")[0][0] or 0)

    def events(
        self, after: int, limit: int, *, newest: bool = False, what: Sequence[str] = (), tasks: Sequence[str] = ()
    ) -> list[Happened]:
        """Events with greater numbers than ``after``, in order: the first ``limit``, or the ``newest``. ``what`` (none:
        all kinds) narrows it; so do ``tasks``: ids, that of an array for all its members."""
        where = ["number > ?"]
        values: list[object] = [after]
        if what:
            where.append(f"what IN ({_marks(what)})")
            values += what
        if tasks:
            each = [self._about(task) for task in tasks]
            where.append(f"({' OR '.join(text for text, _ in each)})")
            values += [value for _, more in each for value in more]
        order = "DESC" if newest else "ASC"
        rows = self._execute(
            f"SELECT {schema.EVENT_COLUMNS} FROM events WHERE {' AND '.join(where)} ORDER BY number {order} LIMIT ?",  # noqa: S608 -- constants
            (*values, limit),
        )
        return [self._happened(row) for row in (reversed(rows) if newest else rows)]

    def _about(self, task: str) -> tuple[str, tuple[object, ...]]:
        counter, member = order_of(task)
        if task.partition("/")[0] != self._node:
            return "task = ?", (task,)
        if member == SINGLE:
            return "counter = ?", (counter,)
        return "(counter = ? AND member IN (?, ?))", (counter, SINGLE, member)

    def _happened(self, row: tuple[Any, ...]) -> Happened:
        number, at, what, state, counter, member, task, attempt, node, reason = row
        if tuple(map(type, (number, at, what, state, attempt, node, reason))) != _EVENT_TYPES:
            raise StoreError(f"event {number} cannot be read from the database", why=f"{row!r}"[:200])
        if counter is not None:
            task = self._name(counter, member)
        return Happened(number, at, what, state, task or "", attempt, node, reason)

    def _execute(self, sql: str, values: tuple[object, ...] = ()) -> list[Any]:
        assert self._reader is not None
        try:
            return self._reader.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError("the database cannot be read", why=str(error)) from None

    def _found(self, where: str, values: tuple[object, ...]) -> list[_Found]:
        return self._execute(f"SELECT {_COLUMNS} FROM tasks t WHERE {where}", values)  # noqa: S608 -- constants

    def _rows(self, where: str, values: tuple[object, ...]) -> list[tuple[TaskRecord, TaskSpec]]:
        """All of them; raises StoreError naming the first that cannot be read."""
        rows, damaged = self._readable(self._found(where, values))
        if damaged:
            raise self._unreadable(damaged[0])
        return rows

    def _unreadable(self, damage: Damage) -> StoreError:
        """What is said to whoever asks for it."""
        unserved = damage.task in self._damaged
        return StoreError(
            f"{damage.task} is damaged: it cannot be read from the database",
            why=damage.why,
            hint="it stays as it is, and nothing runs it; what happened to it:  peerload events "
            f"{damage.task}        submit it again, or, with the agent stopped, repair its row in peerload.db"
            if unserved
            else f"what happened to it:  peerload events {damage.task}",
        )

    def _readable(self, found: Sequence[_Found]) -> tuple[list[tuple[TaskRecord, TaskSpec]], list[Damage]]:
        """Those that can be read, and the others by name."""
        specs: dict[int, TaskSpec] = {}
        environments: dict[bytes, bytes] = {}  # one copy of each, however many tasks share it
        rows: list[tuple[TaskRecord, TaskSpec]] = []
        damaged: list[Damage] = []
        for row in found:
            if self._damaged and (name := self._name(row[0], row[1])) in self._damaged:
                damaged.append(self._damaged[name])
                continue
            try:
                if row[0] not in specs:
                    specs[row[0]] = self._spec_of(row[0], environments)
                rows.append((self._record(row), specs[row[0]]))
            except StoreError as error:
                damaged.append(Damage(self._name(row[0], row[1]), str(error)))
        return rows, damaged

    def _name(self, counter: object, member: object) -> str:
        return f"{self._node}/{counter}" + (f".{member}" if member != SINGLE else "")

    def _spec_of(self, counter: int, environments: dict[bytes, bytes]) -> TaskSpec:
        rows = self._execute("SELECT spec, environment FROM submissions WHERE counter = ?", (counter,))
        if not rows:
            raise StoreError(f"submission {counter} is missing from the database")
        packed, digest = rows[0]
        if digest not in environments:
            found = self._execute("SELECT environment FROM environments WHERE digest = ?", (digest,))
            if not found:
                raise StoreError(f"the environment of submission {counter} is missing from the database")
            if not isinstance(found[0][0], bytes):
                raise StoreError(f"the environment of submission {counter} cannot be read from the database")
            environments[digest] = found[0][0]
        spec: TaskSpec = _decoded(_spec, packed, f"submission {counter}")
        return msgspec.structs.replace(spec, environment=environments[digest])

    def _record(self, row: tuple[Any, ...]) -> TaskRecord:
        name = self._name(row[0], row[1])
        exit_ = None if row[13] is None else _decoded(_exit, row[13], f"the exit of {name}")
        try:
            state = TaskState(row[3])
        except ValueError:
            raise StoreError(f"{name} has no state that is known", why=repr(row[3])) from None
        attempt, node, nonce, machine_boot, lease_s, migrations, submitted_at, started_at, ended_at = row[4:13]
        if tuple(map(type, row[: len(_TYPES)])) != _TYPES or not isinstance(row[14], str):
            raise StoreError(f"{name} is damaged", why="a column has a value of the wrong kind")
        more = NO_MORE if row[15] is None else _decoded(_more, row[15], f"the record of {name}")
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
            grants=more.grants,
            devices=more.devices,
            gpu_mem_bytes=more.gpu_mem_bytes,
            gpu_alone=more.gpu_alone,
            memory_retries=more.memory_retries,
        )


def _number(value: object) -> int:
    """For an order that a damaged row does not upset."""
    return value if isinstance(value, int) else 0


def _place(found: _Found) -> Place:
    return found[12], found[0], found[1]


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _where(counter: int, index: int | None) -> tuple[str, tuple[object, ...]]:
    if index is None:
        return "t.counter = ? ORDER BY t.member", (counter,)
    return "t.counter = ? AND t.member = ?", (counter, index)


def order_of(task: str) -> tuple[int, int]:
    """The number of a task's submission, and of its member (SINGLE if it is in no array)."""
    counter, dot, member = task.partition("/")[2].partition(".")
    return int(counter), int(member) if dot else SINGLE


def is_id(name: str) -> bool:
    """Whether this is the id of a task; that of a damaged row may be anything."""
    counter, dot, member = name.partition("/")[2].partition(".")
    return counter.isdecimal() and (not dot or member.isdecimal())


def decoded_execution(raw: object, what: str) -> ExecutionRecord:
    """An attempt of another home as it was kept. Raises StoreError naming ``what`` cannot be read."""
    record: ExecutionRecord = _decoded(_execution, raw, what)
    return record


def _decoded(decoder: msgspec.msgpack.Decoder[Any], raw: object, what: str) -> Any:  # noqa: ANN401 -- the decoder's type
    if not isinstance(raw, bytes):
        raise StoreError(f"{what} cannot be read from the database", why=f"{type(raw).__name__} where bytes should be")
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"{what} cannot be read from the database", why=str(error)) from None
