"""Rows of a node's database: encoding and decoding of tasks, submissions and events. No SQL here.

A row is decoded where it is asked for, and never trusted: a value of the wrong type is a StoreError that names it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from sys import intern
from typing import Any

import msgspec

from peerload.model.errors import StoreError
from peerload.model.task import ExecutionRecord, Exit, Grant, SubmitOptions, TaskRecord, TaskSpec, TaskState

KEPT_S = 7 * 86_400.0
"""Tokens and floors are remembered for so long."""
SINGLE = -1
"""The member number of a task that is not in an array."""
MEMBER_MAX = 1 << 62
"""A number greater than that of any member."""

_spec = msgspec.msgpack.Decoder(TaskSpec)
_terms = msgspec.msgpack.Decoder(SubmitOptions)
_exit = msgspec.msgpack.Decoder(Exit)
_execution = msgspec.msgpack.Decoder(ExecutionRecord)
encode = msgspec.msgpack.Encoder().encode
"""A value as it lies in the database."""
COLUMNS = (
    "t.counter, t.member, t.uid, t.state, t.attempt, t.node, t.nonce, t.machine_boot, t.lease_s, t.migrations,"
    " t.submitted_at, t.started_at, t.ended_at, t.exit, t.reason, t.more"
)


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


_more = msgspec.msgpack.Decoder(ExtraColumns)
_extra_of = operator.attrgetter(*ExtraColumns.__struct_fields__)
NO_MORE = _extra_of(ExtraColumns())
Each = tuple[tuple[bytes, ...], ...]
_each = msgspec.msgpack.Decoder(Each)


class RecordedEvent(msgspec.Struct, frozen=True, gc=False):
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
"""The types of the columns up to ended_at."""
ENDED_AT = 12
"""Index of ended_at. An unfinished task has 0.0 there. Newer SQLite (3.46, not 3.40) returns it as the index
`unfinished` has it: 0."""
_EVENT_TYPES = (int, float, str, str, int, str, str)
Found = tuple[Any, ...]
"""A row of tasks with the columns of COLUMNS."""


_STATES = {state.value: state for state in TaskState}


class Damage(msgspec.Struct, frozen=True, gc=False):
    """A task whose row cannot be read, and why."""

    task: str
    why: str


BEFORE_FIRST = SINGLE - 1
"""A number less than that of any member."""
Place = tuple[float, int, int]
"""The place of an ended task in order: its end (Unix s), the number of its submission, of its member."""


class TaskPage(msgspec.Struct, frozen=True):
    """Tasks as a list shows them. last: the place of the last row read, readable or not; None if there was none."""

    rows: Sequence[tuple[TaskRecord, TaskSpec]] = ()
    damaged: Sequence[Damage] = ()
    truncated: bool = False
    last: Place | None = None


class TaskSelection(msgspec.Struct, frozen=True, gc=False):
    """The tasks of one submission that a reference names. spans: the first and the last member of each range; () = all of
    the submission."""

    counter: int
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The spans; of the whole submission one that has all its members, and a single task, in it."""
        return self.spans or ((SINGLE, MEMBER_MAX),)

    @property
    def is_range(self) -> bool:
        """True if it names several members, but not the whole array."""
        return len(self.spans) > 1 or any(first != last for first, last in self.spans)


def spans_text(spans: Sequence[tuple[int, int]]) -> str:
    """Ranges of members as a reference has them: `3-9,12`."""
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)


def apart(spans: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Spans (number of the submission, first member, last member) in order, each member in one of them only."""
    merged: list[tuple[int, int, int]] = []
    for counter, first, last in sorted(spans):
        if merged and merged[-1][0] == counter and first <= merged[-1][2] + 1:
            merged[-1] = (counter, merged[-1][1], max(last, merged[-1][2]))
        else:
            merged.append((counter, first, last))
    return merged


def task_name(node: str, counter: object, member: object) -> str:
    """The id of a task of this home, as its row has it."""
    return f"{node}/{counter}" + (f".{member}" if member != SINGLE else "")


def decoded_record(row: Found, home: str) -> TaskRecord:
    """The record of a task of this home from its row. Raises StoreError naming what of it cannot be read."""
    name = task_name(home, row[0], row[1])
    exit_ = None if row[13] is None else decoded_exit(row[13], name)
    state = _STATES.get(row[3]) if isinstance(row[3], str) else None
    if state is None:
        raise StoreError(f"{name} has no state that is known", why=repr(row[3]))
    if type(row[ENDED_AT]) is int and row[ENDED_AT] == 0:
        row = (*row[:ENDED_AT], 0.0, *row[ENDED_AT + 1 :])
    if tuple(map(type, row[: len(_TYPES)])) != _TYPES or type(row[14]) is not str:
        raise StoreError(f"{name} is damaged", why="a column has a value of the wrong kind")
    # There may be a million: what most of them have in common is one object. The zero of SQLite is a new one each time.
    attempt, node, nonce, machine_boot, lease_s, migrations, submitted_at, started_at, ended_at = row[4:13]
    first = (name, row[2], state, submitted_at, attempt, intern(node), nonce, intern(machine_boot), lease_s or 0.0)
    rest = (migrations, started_at or 0.0, ended_at or 0.0, exit_, intern(row[14]))
    if row[15] is None:  # as with most
        return TaskRecord(*first, *rest)
    more = _decoded(_more, row[15], f"the record of {name}")
    return TaskRecord(*first, *rest, **msgspec.structs.asdict(more))


def task_values(record: TaskRecord, kept_bytes: int) -> tuple[object, ...]:
    """A record as the row that `decoded_record` reads again. kept_bytes: how much of its output is kept."""
    counter, member = order_of(record.task)
    more = _extra_of(record)
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


def place_of(found: Found) -> Place:
    """The place of a task among those that ended."""
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


def order_of(task: str) -> tuple[int, int]:
    """The number of a task's submission, and of its member (SINGLE if it is in no array)."""
    counter, dot, member = task.partition("/")[2].partition(".")
    return int(counter), int(member) if dot else SINGLE


def is_id(name: str) -> bool:
    """True if this is the id of a task; the name of a damaged row may be anything."""
    counter, dot, member = name.partition("/")[2].partition(".")
    return counter.isdecimal() and (not dot or member.isdecimal())


def decoded_spec(raw: object, counter: object) -> TaskSpec:
    """The spec that the tasks of a submission share, without the environment. Raises StoreError."""
    spec: TaskSpec = _decoded(_spec, raw, f"submission {counter}")
    return spec


def decoded_each(raw: object, counter: object) -> Each:
    """The commands of the members of an array. Raises StoreError."""
    each: Each = _decoded(_each, raw, f"the commands of submission {counter}")
    return each


def decoded_exit(raw: object, name: object) -> Exit:
    """The exit of a task. Raises StoreError."""
    exit_: Exit = _decoded(_exit, raw, f"the exit of {name}")
    return exit_


def decoded_event(row: Found, home: str) -> RecordedEvent:
    """An event from its row. Raises StoreError naming it if it cannot be read."""
    number, at, what, state, counter, member, task, attempt, node, reason = row
    if tuple(map(type, (number, at, what, state, attempt, node, reason))) != _EVENT_TYPES:
        raise StoreError(f"event {number} cannot be read from the database", why=f"{row!r}"[:200])
    if counter is not None:
        task = task_name(home, counter, member)
    return RecordedEvent(number, at, what, state, task or "", attempt, node, reason)


def decoded_execution(raw: object, what: str) -> ExecutionRecord:
    """An attempt of another home as it was kept. Raises StoreError naming ``what`` cannot be read."""
    record: ExecutionRecord = _decoded(_execution, raw, what)
    return record


def decoded_terms(raw: object, counter: int) -> SubmitOptions:
    """The terms of a submission as they were kept. Raises StoreError if they cannot be read."""
    terms: SubmitOptions = _decoded(_terms, raw, f"the terms of submission {counter}")
    return terms


def _decoded(decoder: msgspec.msgpack.Decoder[Any], raw: object, what: str) -> Any:  # noqa: ANN401 -- the decoder's type
    if not isinstance(raw, bytes):
        raise StoreError(f"{what} cannot be read from the database", why=f"{type(raw).__name__} where bytes should be")
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"{what} cannot be read from the database", why=str(error)) from None
