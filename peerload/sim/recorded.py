"""Traces of tasks: arrival, duration and home of each, from CSV with a header or from JSON lines.

    arrival,duration,cpus,gpus,node
    0.0,12.5,1,0,ws1

arrival and duration in seconds; cpus (1), gpus (0) and node (anywhere) may be missing. Other columns are ignored.
"""

from __future__ import annotations

import csv
import heapq
import io
import json
import math
from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.model.errors import ConfigError
from peerload.sim.public_traces import PublicTrace

if TYPE_CHECKING:
    from collections.abc import Iterator

TASKS_MAX = 1_000_000
NAME_CHARS_MAX = 128
TIME_S_MAX = 1e12
DURATION_S_MAX = 1e9
CPUS_MAX, GPUS_MAX = 65_536, 1024

WHOLE = ("arrival", "duration")
"""Columns that a trace of arrivals must have; a trace from which durations are drawn needs the last one only."""


class TaskTrace(msgspec.Struct, frozen=True):
    """Tasks in the order of arrival, the first at 0.0. homes: the place of the node's name in ``names``, -1 where none
    was given."""

    source: str
    arrivals: array[float]
    durations: array[float]
    cpus: array[float]
    gpus: array[int]
    homes: array[int]
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Which lines were left out, and why."""

    def __len__(self) -> int:
        """Number of tasks."""
        return len(self.arrivals)

    @property
    def span_s(self) -> float:
        """Time during which tasks arrived: the n - 1 pauses between them, and one more."""
        count = len(self.arrivals)
        return self.arrivals[-1] * count / (count - 1) if count > 1 else 0.0

    @property
    def work_s(self) -> float:
        """Total work in slot seconds."""
        return sum(duration * max(math.ceil(cpus), 1) for duration, cpus in zip(self.durations, self.cpus, strict=True))


class _Row(msgspec.Struct, frozen=True):
    arrival: float
    duration: float
    cpus: float
    gpus: int
    node: str


def read_trace(source: str, text: str, needed: tuple[str, ...] = WHOLE, *, tasks: int | None = None) -> TaskTrace:
    """The tasks in the text of a file called ``source``, sorted by arrival; ``tasks``: only so many, the first ones, of a
    trace as long as it may be. Raises ConfigError naming file, line, column and what is allowed there."""
    read: Iterator[_Row] = (_row(f"{source}:{line}", fields, needed) for line, fields in _rows(source, text, needed))
    most = TASKS_MAX if tasks is None else min(tasks, TASKS_MAX)
    if tasks is None or tasks > TASKS_MAX:
        hint = "use a part of it" if needed != WHOLE else "only the first N of them:  --tasks N"
        read = _bounded(read, source, hint)
    names: dict[str, float] = {}
    return _sorted(source, heapq.nsmallest(most, _named(read, names), key=lambda row: row.arrival), names)


def read_public(source: str, text: str, kind: str, slots: int, gpus: int, *, tasks: int | None = None) -> TaskTrace:
    """The tasks in a public trace of this kind, sorted by arrival: the first ``tasks`` of them; no home is known. Raises
    ConfigError if there are none."""
    public = PublicTrace(kind, source, text, slots, gpus)
    most = min(tasks or TASKS_MAX, TASKS_MAX)
    rows: Iterator[_Row] = (_Row(*row, node="") for row in public.rows())
    if tasks is None or tasks > TASKS_MAX:
        rows = _bounded(rows, source, "only the first N of them:  --tasks N")
    first = heapq.nsmallest(most, rows, key=lambda row: row.arrival)
    notes = public.notes()
    return msgspec.structs.replace(_sorted(source, first, {}, "; ".join(notes)), notes=tuple(notes))


def _sorted(source: str, rows: list[_Row], names: dict[str, float], why: str = "") -> TaskTrace:
    if not rows:
        raise ConfigError(
            "trace", f"{source} has no tasks", why=why, hint="a header and one line a task, as CSV or JSON lines"
        )
    numbers = {name: number for number, name in enumerate(sorted(names, key=names.__getitem__))}
    start = rows[0].arrival
    return TaskTrace(
        source,
        array("d", (row.arrival - start for row in rows)),
        array("d", (row.duration for row in rows)),
        array("d", (row.cpus for row in rows)),
        array("l", (row.gpus for row in rows)),
        array("l", (numbers.get(row.node, -1) for row in rows)),
        tuple(numbers),
    )


def _bounded(rows: Iterator[_Row], source: str, hint: str) -> Iterator[_Row]:
    """All of them. Raises ConfigError if they are too many."""
    for count, row in enumerate(rows):
        if count >= TASKS_MAX:
            raise ConfigError("trace", f"{source} has more than {TASKS_MAX:,} tasks", hint=hint)
        yield row


def _named(rows: Iterator[_Row], names: dict[str, float]) -> Iterator[_Row]:
    """All of them; ``names`` gets the first arrival at each node."""
    for row in rows:
        if row.node:
            names[row.node] = min(row.arrival, names.get(row.node, math.inf))
        yield row


def _rows(source: str, text: str, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, column → value) for each task."""
    if text.lstrip()[:1] == "{":
        yield from _json_rows(source, text)
        return
    reader = csv.reader(io.StringIO(text))
    header: list[str] | None = None
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = [cell.strip().lower() for cell in cells]
                _check_header(source, header, needed)
                continue
            if len(cells) != len(header):
                raise ConfigError(
                    "trace", f"{source}:{reader.line_num}: {len(cells)} columns", why=f"its header has {len(header)}"
                )
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise ConfigError("trace", f"{source}:{reader.line_num}: no CSV", why=str(error)) from None


def _check_header(source: str, header: list[str], needed: tuple[str, ...]) -> None:
    missing = [column for column in needed if column not in header]
    if missing:
        raise ConfigError(
            "trace",
            f"{source}:1: no column {' and no column '.join(missing)}",
            why="the first line of a CSV names the columns: arrival,duration,cpus,gpus,node",
        )


def _json_rows(source: str, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, words in enumerate(io.StringIO(text), 1):
        if not words.strip():
            continue
        try:
            fields = json.loads(words)
        except ValueError as error:
            raise ConfigError("trace", f"{source}:{line}: no JSON", why=str(error)) from None
        if not isinstance(fields, dict):
            raise ConfigError("trace", f"{source}:{line}: no JSON object", why="each line is one, such as " + EXAMPLE)
        yield line, fields


EXAMPLE = '{"arrival": 0.5, "duration": 12}'


def _row(where: str, fields: dict[str, Any], needed: tuple[str, ...]) -> _Row:
    arrival = _number(where, fields, "arrival", 0.0 if "arrival" not in needed else None, 0.0, TIME_S_MAX)
    duration = _number(where, fields, "duration", None, 0.0, DURATION_S_MAX)
    cpus = _number(where, fields, "cpus", 1.0, 0.0, CPUS_MAX)
    gpus = _number(where, fields, "gpus", 0.0, 0.0, GPUS_MAX)
    if not cpus:
        raise ConfigError("trace", f"{where}: cpus is 0", why=f"allowed: more than 0, at most {CPUS_MAX}")
    if gpus != int(gpus):
        raise ConfigError("trace", f"{where}: gpus is {gpus:g}", why=f"allowed: whole devices, 0 to {GPUS_MAX}")
    node = fields.get("node")
    name = "" if node is None else str(node).strip()
    if len(name) > NAME_CHARS_MAX:
        raise ConfigError("trace", f"{where}: node has {len(name)} characters", why=f"at most {NAME_CHARS_MAX}")
    return _Row(arrival, duration, cpus, int(gpus), name)


def _number(where: str, fields: dict[str, Any], column: str, default: float | None, low: float, high: float) -> float:
    value = fields.get(column)
    if value is None or (isinstance(value, str) and not value.strip()):
        if default is None:
            raise ConfigError("trace", f"{where}: {column} is missing", why=f"allowed: {low:g} to {high:g}")
        return default
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not low <= number <= high:
        raise ConfigError("trace", f"{where}: {column} is {value!r}", why=f"allowed: a number from {low:g} to {high:g}")
    return number
