"""Traces of tasks: arrival, duration and home of each, from CSV with a header or from JSON lines.

    arrival,duration,cpus,gpus,node
    0.0,12.5,1,0,ws1

arrival and duration in seconds; cpus (1), gpus (0) and node (anywhere) may be missing. Other columns are ignored.

Public traces are Standard Workload Format [SWF], Google cluster 2019 [Google20], Alibaba GPU 2020 and 2023 [Alibaba22]. Lines
that cannot be a task are left out, counted by reason, and reported by number; no other line is dropped.
"""

from __future__ import annotations

import csv
import heapq
import io
import itertools
import json
import math
from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.model.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


TASKS_MAX = 1_000_000
NAME_CHARS_MAX = 128
TIME_S_MAX = 1e10
"""Maximum of an arrival, which may be a Unix time."""
DURATION_S_MAX = SPAN_S_MAX = 1e9
"""Maximum of a duration and of the time between the first and the last arrival: a simulation costs time even without events."""
CPUS_MAX, GPUS_MAX = 65_536, 1024

WHOLE = ("arrival", "duration")
"""Required columns of a trace of arrivals; a trace from which durations are drawn needs only the last one."""


class TaskTrace(msgspec.Struct, frozen=True):
    """Tasks in the order of arrival, the first at 0.0. homes: the index of the node's name in ``names``, -1 without
    a name."""

    source: str
    arrivals: array[float]
    durations: array[float]
    cpus: array[float]
    gpus: array[int]
    homes: array[int]
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Text about the lines that were left out, with reasons."""

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def span_s(self) -> float:
        """Duration of the arrivals: the n - 1 gaps between them, plus one average gap."""
        count = len(self.arrivals)
        return self.arrivals[-1] * count / (count - 1) if count > 1 else 0.0


class _Row(msgspec.Struct, frozen=True):
    arrival: float
    duration: float
    cpus: float
    gpus: int
    node: str


def read_trace(source: str, text: str, needed: tuple[str, ...] = WHOLE, *, tasks: int | None = None) -> TaskTrace:
    """The tasks in the text of a file called ``source``, sorted by arrival; ``tasks``: read only the first ones, of a
    trace of any length. Raises ConfigError with file, line, column and the allowed values."""
    read: Iterator[_Row] = (_row(f"{source}:{line}", fields, needed) for line, fields in _rows(source, text, needed))
    most = TASKS_MAX if tasks is None else min(tasks, TASKS_MAX)
    if tasks is None or tasks > TASKS_MAX:
        hint = "use a part of it" if needed != WHOLE else "only the first N of them:  --tasks N"
        read = _bounded(read, source, hint)
    names: dict[str, float] = {}
    return _sorted(source, heapq.nsmallest(most, _named(read, names), key=lambda row: row.arrival), names)


def read_public(source: str, text: str, kind: str, slots: int, gpus: int, *, tasks: int | None = None) -> TaskTrace:
    """The first ``tasks`` tasks in a public trace of this kind, sorted by arrival, without homes. Raises
    ConfigError if there are none."""
    public = PublicTrace(kind, source, text, slots, gpus)
    most = min(tasks or TASKS_MAX, TASKS_MAX)
    rows: Iterator[_Row] = (_Row(*row, node="") for row in public.rows())
    if tasks is None or tasks > TASKS_MAX:
        rows = _bounded(rows, source, "only the first N of them:  --tasks N")
    first = heapq.nsmallest(most, rows, key=lambda row: row.arrival)
    notes = public.notes()
    if not first:
        raise ConfigError("trace", f"{source} has no tasks", why="; ".join(notes), hint=PUBLIC_HINTS[kind])
    return msgspec.structs.replace(_sorted(source, first, {}), notes=tuple(notes))


def _sorted(source: str, rows: list[_Row], names: dict[str, float]) -> TaskTrace:
    if not rows:
        raise ConfigError("trace", f"{source} has no tasks", hint="a header and one line a task, as CSV or JSON lines")
    numbers = {name: number for number, name in enumerate(sorted(names, key=names.__getitem__))}
    start = rows[0].arrival
    if (span_s := rows[-1].arrival - start) > SPAN_S_MAX:
        raise ConfigError(
            "trace", f"{source} spans {span_s:g} s", why=f"at most {SPAN_S_MAX:g} s from first to last arrival"
        )
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
    """The rows unchanged. Raises ConfigError if there are too many."""
    for count, row in enumerate(rows):
        if count >= TASKS_MAX:
            raise ConfigError("trace", f"{source} has more than {TASKS_MAX:,} tasks", hint=hint)
        yield row


def _named(rows: Iterator[_Row], names: dict[str, float]) -> Iterator[_Row]:
    """The rows unchanged; ``names`` receives the first arrival at each node."""
    for row in rows:
        if row.node:
            names[row.node] = min(row.arrival, names.get(row.node, math.inf))
        yield row


def _rows(source: str, text: str, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, column → value) for each task."""
    if text.lstrip()[:1] == "{":
        yield from _json_rows(source, text)
        return
    header: list[str] | None = None
    for number, cells in _cells(source, text):
        if not any(cell.strip() for cell in cells):
            continue
        if header is None:
            header = [cell.strip().lower() for cell in cells]
            _check_header(source, header, needed)
            continue
        if len(cells) != len(header):
            raise ConfigError("trace", f"{source}:{number}: {len(cells)} columns", why=f"its header has {len(header)}")
        yield number, dict(zip(header, cells, strict=True))


def _cells(source: str, text: str) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of each row of a CSV. Raises ConfigError if the text is not CSV."""
    reader = csv.reader(io.StringIO(text))
    try:
        for cells in reader:
            yield reader.line_num, cells
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
            raise ConfigError(
                "trace", f"{source}:{line}: not a JSON object", why="each line is one, such as " + EXAMPLE
            )
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


PUBLIC_HINTS = {
    "swf": "18 fields a line, one line a job",
    "google": "a CSV with header, or JSON lines, of instance events",
    "alibaba": "a CSV of GPU tasks of 2020, or of pods of 2023 with header",
}
LINES_NAMED = 3
SWF_PARTS = ("2", "3", "4")
"""Status of a part of a job between two interruptions; the job has another line with its totals."""
ALIBABA_2020 = (
    "job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu", "plan_mem", "plan_gpu", "gpu_type",
)  # fmt: skip
"""Columns of `pai_task_table.csv`, which has no header."""
INSTANCES_MAX = 100_000
GOOGLE_ENDS = {"4": "EVICT", "5": "FAIL", "6": "FINISH", "7": "KILL", "8": "LOST"}
GOOGLE_BETWEEN = {"1": "QUEUE", "2": "ENABLE", "9": "UPDATE_PENDING", "10": "UPDATE_RUNNING"}
GOOGLE_TYPES = {"0": "SUBMIT", "3": "SCHEDULE", **GOOGLE_ENDS, **GOOGLE_BETWEEN}
GOOGLE_NEVER = 2**63 - 1
"""Timestamp of events after the end of the trace; events before its beginning have 0."""
Public = tuple[float, float, float, int]
"""Arrival and duration in s, cores, GPUs."""
Read = tuple[int, int, Public]
"""Number of a line, and the number of equal tasks that it represents."""


class _Left(Exception):
    """Reason why a line is left out."""


class PublicTrace:
    """Reader of one trace. ``left``: numbers of the lines left out, by reason. slots, gpus: of a node; tasks that need more are left
    out, since no task runs on several nodes."""

    def __init__(self, kind: str, source: str, text: str, slots: int, gpus: int) -> None:
        self._source, self._text = source, text
        self._slots, self._gpus = slots, gpus
        self._read = {"swf": self._swf, "google": self._google, "alibaba": self._alibaba}[kind]
        self.left: dict[str, list[int]] = {}

    def rows(self) -> Iterator[Public]:
        for line, count, task in self._read():
            _, _, cpus, gpus = task
            if cpus > self._slots or gpus > self._gpus:
                self._leave(line, "wider than a node")
            else:
                yield from itertools.repeat(task, count)

    def notes(self) -> list[str]:
        """Notes on lines left out, one for each reason."""
        return [
            f"{len(lines)} of the lines of {self._source} left out: {reason} (line"
            f" {', '.join(map(str, lines[:LINES_NAMED]))}{', …' if len(lines) > LINES_NAMED else ''})"
            for reason, lines in self.left.items()
        ]

    def _leave(self, line: int, reason: str) -> None:
        self.left.setdefault(reason, []).append(line)

    def _swf(self) -> Iterator[Read]:
        """18 fields a line: 2 submitted, 4 run time, 5 allocated processors, 8 requested ones, 11 status; -1: not known; `;` starts a
        comment."""
        for number, line in enumerate(self._text.splitlines(), 1):
            if not line.strip() or line.lstrip().startswith(";"):
                continue
            try:
                fields = line.split()
                if len(fields) < 18:  # noqa: PLR2004 -- of the format
                    raise _Left("fewer than 18 fields")  # noqa: TRY301 -- one place for all reasons
                if fields[10] in SWF_PARTS:
                    raise _Left("a part of a job that another line sums up")  # noqa: TRY301 -- as above
                arrival, duration, given, asked = (
                    _numeric(fields[place - 1], f"field {place}") for place in (2, 4, 5, 8)
                )
                yield number, 1, _checked(arrival, duration, max(given, 0) or max(asked, 0) or 1.0, 0)
            except _Left as left:
                self._leave(number, str(left))

    def _alibaba(self) -> Iterator[Read]:
        """2020: tasks of several instances; 2023: pods. cpu and gpu are in hundredths or thousandths."""
        for number, row in self._table(ALIBABA_2020, ("end_time", "deletion_time")):
            try:
                if "creation_time" in row:
                    arrival = _numeric(row["creation_time"], "creation_time")
                    if "scheduled_time" in row and row["scheduled_time"] in ("", None):
                        raise _Left("never scheduled")  # noqa: TRY301 -- one place for all reasons
                    begun = _numeric(row.get("scheduled_time", row["creation_time"]), "scheduled_time")
                    duration = _numeric(row.get("deletion_time"), "deletion_time") - begun
                    cpus, gpus = (
                        _numeric(row.get("cpu_milli"), "cpu_milli") / 1000,
                        _numeric(row.get("num_gpu"), "num_gpu"),
                    )
                    count = 1.0
                else:
                    arrival = _numeric(row.get("start_time"), "start_time")
                    duration = _numeric(row.get("end_time"), "end_time") - arrival
                    cpus = _numeric(row.get("plan_cpu") or "100", "plan_cpu") / 100
                    gpus = _numeric(row.get("plan_gpu") or "0", "plan_gpu") / 100
                    count = _numeric(row.get("inst_num") or "1", "inst_num")
                if not 1 <= count <= INSTANCES_MAX:
                    raise _Left("no number of instances")  # noqa: TRY301 -- one place for all reasons
                task = _checked(arrival, duration, cpus or 1.0, math.ceil(max(gpus, 0)))
            except _Left as left:
                self._leave(number, str(left))
                continue
            yield number, int(count), task

    def _google(self) -> Iterator[Read]:
        """Events of instances: submitted, scheduled, ended, in µs. Unfinished instances are left out."""
        begun: dict[tuple[str, str], dict[str, float]] = {}
        lines: dict[tuple[str, str], int] = {}
        for number, row in self._table((), ("collection_id",)):
            event = str(row.get("type", ""))
            event = GOOGLE_TYPES.get(event, event)
            if event in GOOGLE_BETWEEN.values():
                continue
            if event not in GOOGLE_TYPES.values():
                self._leave(number, "no known type of event")
                continue
            key = str(row.get("collection_id")), str(row.get("instance_index") or "0")
            try:
                at = _numeric(row.get("time"), "time")
                if not 0 < at < GOOGLE_NEVER:
                    raise _Left("outside of the time of the trace")  # noqa: TRY301 -- one place for all reasons
                if event in ("SUBMIT", "SCHEDULE"):
                    lines[key] = number
                    begun.setdefault(key, {})[event] = at / 1e6
                    continue
                known = begun.pop(key, {})
                if len(known) < 2:  # noqa: PLR2004 -- both
                    raise _Left("ended without being submitted and scheduled")  # noqa: TRY301 -- as above
                request = row.get("resource_request")
                cpus = request.get("cpus") if isinstance(request, dict) else row.get("resource_request.cpus")
                task = _checked(
                    known["SUBMIT"], at / 1e6 - known["SCHEDULE"], _numeric(cpus or "1", "resource_request.cpus"), 0
                )
            except _Left as left:
                self._leave(number, str(left))
                continue
            yield number, 1, task
        for key in begun:
            self._leave(lines[key], "not ended in the trace")

    def _table(self, default: tuple[str, ...], expected: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Lines of JSON, or of a CSV with a header (else ``default`` is used). Raises ConfigError if none of the ``expected``
        columns exists."""
        if self._text.lstrip()[:1] == "{":
            yield from self._json_lines()
            return
        header: list[str] = []
        for number, cells in _cells(self._source, self._text):
            if not header:
                first = [cell.strip().lower() for cell in cells]
                header = first if set(first) & set(expected) else list(default)
                if not header:
                    raise ConfigError("trace", f"{self._source}:1: no column {' or '.join(expected)}")
                if header == first:
                    continue
            if len(cells) == len(header):
                yield number, dict(zip(header, cells, strict=True))
            elif cells:
                self._leave(number, f"not {len(header)} columns")

    def _json_lines(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in enumerate(self._text.splitlines(), 1):
            try:
                fields = json.loads(line or "{}")
            except (ValueError, RecursionError):
                fields = None
            if isinstance(fields, dict):
                yield number, fields
            else:
                self._leave(number, "no JSON object")


def _numeric(value: object, column: str) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise _Left(f"no number in {column}")
    return number


def _checked(arrival: float, duration: float, cpus: float, gpus: int) -> Public:
    if arrival < 0:
        raise _Left("no time of arrival")
    if arrival > TIME_S_MAX:
        raise _Left(f"an arrival after {TIME_S_MAX:g} s")
    if duration <= 0:
        raise _Left("no run time")
    if duration > DURATION_S_MAX:
        raise _Left(f"a run time of more than {DURATION_S_MAX:g} s")
    if cpus <= 0:
        raise _Left("no cores")
    return arrival, duration, cpus, gpus
