"""Selectors: the tasks of this home that references, states, a node, a name, a group and tags select together.

States and nodes are columns; names, groups and tags lie packed in submissions, which are decoded one by one. So all of it runs
in a thread, on a connection of its own.
"""

from __future__ import annotations

import fnmatch
import re
from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING, Protocol

import msgspec

from peerload.agent.store.rows import SINGLE, Found, TaskSelection, apart, spans_text
from peerload.model.task import TaskState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from peerload.wire import control

REF_CHARS_MAX = 4000
"""A reference with more characters of ranges is made several."""


class Criteria(msgspec.Struct, frozen=True):
    """Selection criteria for tasks; a field at its default selects all. meant: the references given."""

    states: tuple[str, ...] = ()
    node: str = ""
    name: str = ""
    group: str = ""
    tags: tuple[str, ...] = ()
    meant: tuple[TaskSelection, ...] = ()

    @classmethod
    def of(cls, request: control.Tasks | control.Select, meant: Iterable[TaskSelection]) -> Criteria:
        """Those of a request. A task that is seen running is leased in the database."""
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
        """These columns of each task that a condition finds."""


class _Named(msgspec.Struct, frozen=True):
    """Of a TaskSpec only what names it."""

    argv: tuple[bytes, ...] = ()
    name: str = ""


class _Marked(msgspec.Struct, frozen=True):
    """Of Terms only what selects by them."""

    group: str = ""
    tags: tuple[str, ...] = ()


_named = msgspec.msgpack.Decoder(_Named)
_marked = msgspec.msgpack.Decoder(_Marked)


def is_wanted_by(criteria: Criteria, reader: SelectionReader) -> Callable[[object, object], bool]:
    """Whether a task (number of its submission, of its member) is one of those meant, in a submission that matches."""
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
    """What was found, before it is known which of the leased tasks run: members by submission, how many are in each state,
    and the leased ones as (number of the submission, of the member, uid, attempt)."""

    members: dict[int, list[int]]
    states: Counter[str]
    leased: list[tuple[int, int, bytes, int]]
    sizes: dict[int, int]


def selected(criteria: Criteria, reader: SelectionReader) -> Selected:
    """All that match."""
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
    rows = reader.each_row("SELECT counter, members FROM submissions")
    found.sizes = {counter: members for counter, members in rows if counter in wanted}
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
        names += [f"{node}/{counter}.{part}" for part in _parts(spans)]
    return names


def _parts(spans: list[tuple[int, int]]) -> Iterator[str]:
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
