"""Lists in rows: members of an array that wait, are held, are done or were cancelled count as one row of their state.

So that an array of a million leaves room for others in a list of 200, and is counted by the database instead of its reader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.agent.store.rows import COLUMNS, ENDED_AT, Found
from peerload.agent.store.submissions import marks
from peerload.model.task import TaskState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peerload.agent.store.selector import SelectionReader

TOGETHER = (TaskState.HELD, TaskState.QUEUED, TaskState.DONE, TaskState.CANCELLED)
"""The members of an array in one of these states are one row; each other task has its own."""
SPANS_TOLD_MAX = 4
FIRSTS_AT_A_TIME = 250
_GROUPS = (
    "t.counter, t.state, count(*), min(t.member), max(t.member), count(DISTINCT nullif(t.node, '')), max(t.node),"
    " min(nullif(t.started_at, 0)), max(t.ended_at), count(DISTINCT t.reason)"
)


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
        """By which lists are in order."""
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
    groups = reader.each_found(
        _GROUPS,
        f"{where} AND t.state IN ({marks(together)}) GROUP BY t.counter, t.state ORDER BY {order} LIMIT ?",
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
    """For an order that a damaged row does not upset."""
    return float(value) if isinstance(value, (int, float)) else 0.0
