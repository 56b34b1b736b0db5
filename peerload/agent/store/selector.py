"""Selectors: the tasks of this home that references, states, a node, a name, a group and tags select; and their lists in rows.

States and nodes are columns; names, groups and tags lie packed in submissions, which are decoded one by one. So all of it runs
in a thread, on a connection of its own. In a list the members of an array that wait, are held, are done or were cancelled count
as one row of their state, so that an array of a million leaves room for others in a list of 200.
"""

from __future__ import annotations

import fnmatch
import re
from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from peerload.agent.store.rows import (
    COLUMNS,
    ENDED_AT,
    SINGLE,
    Each,
    Found,
    TaskSelection,
    apart,
    decoded_each,
    decoded_spec,
    spans_text,
    spec_of_member,
)
from peerload.model.errors import StoreError
from peerload.model.task import TaskState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from peerload.model.task import TaskSpec
    from peerload.wire import control

REF_CHARS_MAX = 4000
"""A reference with more characters of ranges is made several."""
SUBMISSIONS_AT_A_TIME = 500
"""Submissions asked for in one query."""
TOGETHER = (TaskState.HELD, TaskState.QUEUED, TaskState.DONE, TaskState.CANCELLED)
"""The members of an array in one of these states are one row; each other task has its own."""
SPANS_TOLD_MAX = 4
FIRSTS_AT_A_TIME = 250
_GROUPS = (
    "t.counter, t.state, count(*), min(t.member), max(t.member), count(DISTINCT nullif(t.node, '')), max(t.node),"
    " min(nullif(t.started_at, 0)), max(t.ended_at), count(DISTINCT t.reason)"
)


class Criteria(msgspec.Struct, frozen=True):
    """Selection criteria for tasks; a field at its default selects all. meant: the references given."""

    states: tuple[str, ...] = ()
    node: str = ""
    name: str = ""
    group: str = ""
    tags: tuple[str, ...] = ()
    meant: tuple[TaskSelection, ...] = ()

    @classmethod
    def of(cls, request: control.TasksRequest | control.Select, meant: Iterable[TaskSelection]) -> Criteria:
        """The criteria of a request. A task that is shown as running is leased in the database."""
        states = tuple(dict.fromkeys("leased" if state == "running" else state for state in request.states))
        return cls(states, request.node, request.name, request.group, request.tags, tuple(meant))

    @property
    def needs_submissions(self) -> bool:
        """True if submissions have to be decoded to apply it."""
        return bool(self.name or self.group or self.tags)

    @property
    def is_of_columns(self) -> bool:
        """True if the columns of a task alone decide."""
        return not self.needs_submissions and not self.meant


class SelectionReader(Protocol):
    """A database, narrowed to what is meant (`StoreReader.beside`)."""

    def each_row(self, sql: str, values: tuple[object, ...] = (), /) -> Iterator[Found]:
        """Rows that a query finds."""

    def each_found(self, columns: str, where: str, values: tuple[object, ...], /) -> Iterator[Found]:
        """Yield these columns of each task that a condition finds."""


class _Named(msgspec.Struct, frozen=True):
    """The fields of a TaskSpec that name it."""

    argv: tuple[bytes, ...] = ()
    name: str = ""


class _Marked(msgspec.Struct, frozen=True):
    """The fields of SubmitOptions that select by them."""

    group: str = ""
    tags: tuple[str, ...] = ()


_named = msgspec.msgpack.Decoder(_Named)
_marked = msgspec.msgpack.Decoder(_Marked)


def is_wanted_by(criteria: Criteria, reader: SelectionReader) -> Callable[[object, object], bool]:
    """A function that decides whether a task (number of its submission, of its member) matches."""
    spans: dict[object, tuple[list[int], list[int]]] = {}
    for counter, first, last in apart((meant.counter, *span) for meant in criteria.meant for span in meant.ranges):
        starts, ends = spans.setdefault(counter, ([], []))
        starts.append(first)
        ends.append(last)
    submissions = set(_submissions(criteria, reader)) if criteria.needs_submissions else None

    def is_wanted(counter: object, member: object) -> bool:
        if submissions is not None and counter not in submissions:
            return False
        if not criteria.meant:
            return True
        starts, ends = spans.get(counter, ([], []))
        at = bisect_right(starts, member) - 1 if isinstance(member, int) else -1
        return at >= 0 and isinstance(member, int) and member <= ends[at]

    return is_wanted


def _submissions(criteria: Criteria, reader: SelectionReader) -> Iterator[int]:
    """The numbers of the submissions whose name, group and tags match; one that cannot be read matches nothing."""
    is_like = re.compile(fnmatch.translate(criteria.name)).match if criteria.name else None
    for counter, spec, terms in reader.each_row("SELECT counter, spec, terms FROM submissions"):
        try:
            if is_like is not None:
                named = _named.decode(spec)
                name = named.name or named.argv[0].decode("utf-8", "backslashreplace").rpartition("/")[2]
                if not is_like(name):
                    continue
            marked = _Marked() if terms is None else _marked.decode(terms)
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError, IndexError):
            continue
        if criteria.group and marked.group != criteria.group:
            continue
        if all(_has_tag(marked.tags, tag) for tag in criteria.tags):
            yield counter


def _has_tag(tags: tuple[str, ...], wanted: str) -> bool:
    return any(wanted in (tag, tag.partition("=")[0]) for tag in tags)


class Selected(msgspec.Struct):
    """Tasks that match, before it is known which of the leased ones run: members by submission, the number in each
    state, and the leased ones as (number of the submission, of the member, uid, attempt)."""

    members: dict[int, list[int]]
    states: Counter[str]
    leased: list[tuple[int, int, bytes, int]]
    sizes: dict[int, int]


def selected(criteria: Criteria, reader: SelectionReader) -> Selected:
    """Find all tasks that match."""
    found = Selected({}, Counter(), [], {})
    where: list[str] = ["1"]
    values: list[object] = []
    if criteria.states:
        where.append(f"t.state IN ({', '.join('?' * len(criteria.states))})")
        values += criteria.states
        if not any(state.is_final for state in TaskState if state.value in criteria.states):
            where.append("t.ended_at = 0")
    if criteria.node:
        where.append("t.node = ?")
        values.append(criteria.node)
    for counter, member, state, uid, attempt in reader.each_found(
        "t.counter, t.member, t.state, t.uid, t.attempt", " AND ".join(where), tuple(values)
    ):
        if not isinstance(counter, int) or not isinstance(member, int):
            continue  # a damaged row
        if state == TaskState.LEASED.value:
            found.leased.append((counter, member, uid, attempt))
        else:
            found.members.setdefault(counter, []).append(member)
            found.states[state] += 1
    wanted = {*found.members, *(counter for counter, *_ in found.leased)}
    sizes = reader.each_row("SELECT counter, members FROM submissions")
    found.sizes = {counter: members for counter, members in sizes if counter in wanted}
    return found


def references(node: str, members: dict[int, list[int]], sizes: dict[int, int]) -> list[str]:
    """Names of exactly these tasks: an array's id where all its members are among them, else ranges."""
    names: list[str] = []
    for counter in sorted(members):
        chosen = members[counter]
        if chosen == [SINGLE] or len(chosen) == sizes.get(counter):
            names.append(f"{node}/{counter}")
            continue
        spans = [(first, last) for _, first, last in apart((0, member, member) for member in chosen)]
        names += [f"{node}/{counter}.{part}" for part in _references(spans)]
    return names


def _references(spans: list[tuple[int, int]]) -> Iterator[str]:
    """The spans as text, so many at a time as fit into a reference."""
    text = ""
    for span in spans:
        more = spans_text((span,))
        if text and len(text) + 1 + len(more) > REF_CHARS_MAX:
            yield text
            text = more
        else:
            text = f"{text},{more}" if text else more
    if text:
        yield text


# -- lists in rows ------------------------------------------------------------------------------------------------------


class ArrayRow(msgspec.Struct, frozen=True):
    """The first of the members of one array in one state, and what they have together. spans: at most SPANS_TOLD_MAX of their
    ranges; nodes: on how many they are or were; started_at: of the first that was, 0.0 = none; has_reason: it is that of all."""

    first: Found
    spans: tuple[tuple[int, int], ...] = ()
    count: int = 1
    nodes: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    has_reason: bool = True

    @property
    def place(self) -> tuple[float, float]:
        """The place of the row in a list."""
        return _number(self.first[0]), _number(self.first[1])


def rows(
    reader: SelectionReader,
    where: str,
    values: tuple[object, ...],
    states: Sequence[TaskState],
    limit: int,
    *,
    newest: bool = False,
    gathered: bool = False,
) -> list[ArrayRow]:
    """The first ``limit`` rows of tasks in these states: by their numbers, or those first that ended last. gathered: members of
    arrays as above; else each task is a row."""
    together = [state for state in states if gathered and state in TOGETHER]
    single = [state for state in states if state not in together]
    order = "t.ended_at DESC" if newest else "t.counter, t.member"
    found = reader.each_found(
        COLUMNS, f"{where} AND t.state IN ({marks(single)}) ORDER BY {order} LIMIT ?", (*values, *single, limit)
    )
    made = [ArrayRow(row, ended_at=_number(row[ENDED_AT])) for row in found] if single else []
    order = "max(t.ended_at) DESC" if newest else "t.counter"
    by = (
        "+t.counter" if newest else "t.counter"
    )  # with the sign, those are looked at that ended lately, not all there are
    groups = reader.each_found(
        _GROUPS,
        f"{where} AND t.state IN ({marks(together)}) GROUP BY {by}, t.state ORDER BY {order} LIMIT ?",
        (*values, *together, limit),
    )
    if together:
        made += _made(reader, where, values, list(groups))
    made.sort(key=(lambda row: -row.ended_at) if newest else (lambda row: row.place))
    return made[:limit]


def _made(reader: SelectionReader, where: str, values: tuple[object, ...], groups: list[Found]) -> list[ArrayRow]:
    """The groups with the first member of each."""
    made: list[ArrayRow] = []
    for at in range(0, len(groups), FIRSTS_AT_A_TIME):
        some = groups[at : at + FIRSTS_AT_A_TIME]
        places = [(group[0], group[3]) for group in some]
        marked = ", ".join(["(?, ?)"] * len(places))
        found = reader.each_found(
            COLUMNS,
            f"(t.counter, t.member) IN (VALUES {marked})",
            tuple(value for place in places for value in place),
        )
        firsts = {(row[0], row[1]): row for row in found}
        for group in some:
            counter, state, count, first, last, nodes, _, started_at, ended_at, reasons = group
            if (counter, first) in firsts:
                spans = _spans(reader, where, values, counter, state, first, last, count)
                told = firsts[counter, first]
                made.append(ArrayRow(told, spans, count, nodes, _number(started_at), _number(ended_at), reasons == 1))
    return made


def _spans(
    reader: SelectionReader,
    where: str,
    values: tuple[object, ...],
    counter: int,
    state: str,
    first: object,
    last: object,
    count: int,
) -> tuple[tuple[int, int], ...]:
    if isinstance(first, int) and isinstance(last, int) and last - first + 1 == count:
        return ((first, last),)
    spans: list[tuple[int, int]] = []
    members = reader.each_found(
        "t.member", f"{where} AND t.counter = ? AND t.state = ? ORDER BY t.member", (*values, counter, state)
    )
    for (member,) in members:
        if spans and member == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], member)
        elif len(spans) == SPANS_TOLD_MAX:
            break
        else:
            spans.append((member, member))
    return tuple(spans)


def _number(value: object) -> float:
    """A number to sort by, also for a damaged row."""
    return float(value) if isinstance(value, (int, float)) else 0.0


# -- submissions -------------------------------------------------------------------------------------------------------


class SubmissionRows:
    """The submissions of a list of tasks, read together; what many have in common is decoded, and in memory, once."""

    def __init__(self, query: Callable[[str, tuple[object, ...]], list[Any]], counters: set[object]) -> None:
        """query: what an SQL statement with these values finds; counters: which submissions."""
        self._query = query
        self._rows: dict[object, tuple[Any, ...]] = {}
        self._specs: dict[tuple[object, object], TaskSpec] = {}
        self._each: dict[object, Each] = {}
        self._environments: dict[object, bytes] = {}
        wanted = list(counters)
        for first in range(0, len(wanted), SUBMISSIONS_AT_A_TIME):
            some = wanted[first : first + SUBMISSIONS_AT_A_TIME]
            sql = f"SELECT counter, spec, environment, commands FROM submissions WHERE counter IN ({marks(some)})"  # noqa: S608 -- constants
            self._rows.update((row[0], row[1:]) for row in query(sql, tuple(some)))

    def spec_of(self, counter: object, member: object, node: str) -> TaskSpec:
        """The spec of one task. Raises StoreError."""
        spec = self.shared_spec(counter)
        commands = self._rows[counter][2]
        if commands is None:
            return spec
        if counter not in self._each:
            self._each[counter] = decoded_each(commands, counter)
        return spec_of_member(spec, self._each[counter], member, f"{node}/{counter}.{member}")

    def shared_spec(self, counter: object) -> TaskSpec:
        """The spec that all tasks of a submission share. Raises StoreError."""
        found = self._rows.get(counter)
        if found is None:
            raise StoreError(f"submission {counter} is missing from the database")
        packed, digest, _ = found
        spec = self._specs.get((packed, digest))
        if spec is None:
            spec = msgspec.structs.replace(
                decoded_spec(packed, counter), environment=self._environment(digest, counter)
            )
            self._specs[packed, digest] = spec
        return spec

    def _environment(self, digest: object, counter: object) -> bytes:
        if digest not in self._environments:
            found = self._query("SELECT environment FROM environments WHERE digest = ?", (digest,))
            if not found:
                raise StoreError(f"the environment of submission {counter} is missing from the database")
            if not isinstance(found[0][0], bytes):
                raise StoreError(f"the environment of submission {counter} cannot be read from the database")
            self._environments[digest] = found[0][0]
        return self._environments[digest]


def marks(values: Sequence[object]) -> str:
    """A place in a statement for each value."""
    return ", ".join("?" * len(values))
