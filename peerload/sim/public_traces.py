"""Public traces: Standard Workload Format [SWF], Google cluster 2019 [Google20], Alibaba GPU 2020 and 2023 [Alibaba22].

A line that cannot be a task is left out, counted by reason, and named by its number; nothing else is lost.
"""

from __future__ import annotations

import csv
import io
import json
import math
from typing import TYPE_CHECKING, Any

from peerload.model.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

LINES_NAMED = 3
ALIBABA_2020 = (
    "job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu", "plan_mem", "plan_gpu", "gpu_type",
)  # fmt: skip
"""Columns of `pai_task_table.csv`, which has no header."""
INSTANCES_MAX = 100_000
GOOGLE_ENDS = {"4": "EVICT", "5": "FAIL", "6": "FINISH", "7": "KILL", "8": "LOST"}
GOOGLE_TYPES = {"0": "SUBMIT", "3": "SCHEDULE", **GOOGLE_ENDS}
GOOGLE_NEVER = 2**63 - 1
"""Time of what happened after the end of the trace; 0 is that of what happened before its beginning."""
Public = tuple[float, float, float, int]
"""Arrival and duration in s, cores, GPUs."""


class _Left(Exception):
    """Reason why a line is left out."""


class PublicTrace:
    """Reader of one trace. ``left``: numbers of the lines left out, by reason. slots, gpus: of a node; wider tasks are left
    out, since no task runs on several nodes."""

    def __init__(self, kind: str, source: str, text: str, slots: int, gpus: int) -> None:
        self._source, self._text = source, text
        self._slots, self._gpus = slots, gpus
        self._read = {"swf": self._swf, "google": self._google, "alibaba": self._alibaba}[kind]
        self.left: dict[str, list[int]] = {}

    def rows(self) -> Iterator[Public]:
        """Its tasks."""
        for line, (arrival, duration, cpus, gpus) in self._read():
            if cpus > self._slots or gpus > self._gpus:
                self._leave(line, "wider than a node")
            else:
                yield arrival, duration, cpus, gpus

    def notes(self) -> list[str]:
        """One for each reason."""
        return [
            f"{len(lines)} of the lines of {self._source} left out: {reason} (line"
            f" {', '.join(map(str, lines[:LINES_NAMED]))}{', …' if len(lines) > LINES_NAMED else ''})"
            for reason, lines in self.left.items()
        ]

    def _leave(self, line: int, reason: str) -> None:
        self.left.setdefault(reason, []).append(line)

    def _swf(self) -> Iterator[tuple[int, Public]]:
        """18 fields a line: 2 submitted, 4 run time, 5 processors given, 8 asked for; -1: not known; `;` begins a comment."""
        for number, line in enumerate(self._text.splitlines(), 1):
            if not line.strip() or line.lstrip().startswith(";"):
                continue
            try:
                fields = line.split()
                if len(fields) < 18:  # noqa: PLR2004 -- of the format
                    raise _Left("fewer than 18 fields")  # noqa: TRY301 -- one place for all reasons
                arrival, duration, given, asked = (
                    _number(fields[place - 1], f"field {place}") for place in (2, 4, 5, 8)
                )
                yield number, _checked(arrival, duration, max(given, 0) or max(asked, 0) or 1.0, 0)
            except _Left as left:
                self._leave(number, str(left))

    def _alibaba(self) -> Iterator[tuple[int, Public]]:
        """2020: tasks of several instances; 2023: pods. cpu and gpu are in hundredths or thousandths."""
        for number, row in self._table(ALIBABA_2020, ("end_time", "deletion_time")):
            try:
                if "creation_time" in row:
                    arrival = _number(row["creation_time"], "creation_time")
                    begun = _number(row.get("scheduled_time") or row["creation_time"], "scheduled_time")
                    duration = _number(row.get("deletion_time"), "deletion_time") - begun
                    cpus, gpus = (
                        _number(row.get("cpu_milli"), "cpu_milli") / 1000,
                        _number(row.get("num_gpu"), "num_gpu"),
                    )
                    count = 1.0
                else:
                    arrival = _number(row.get("start_time"), "start_time")
                    duration = _number(row.get("end_time"), "end_time") - arrival
                    cpus = _number(row.get("plan_cpu") or "100", "plan_cpu") / 100
                    gpus = _number(row.get("plan_gpu") or "0", "plan_gpu") / 100
                    count = _number(row.get("inst_num") or "1", "inst_num")
                if not 1 <= count <= INSTANCES_MAX:
                    raise _Left("no number of instances")  # noqa: TRY301 -- one place for all reasons
                task = _checked(arrival, duration, cpus or 1.0, math.ceil(max(gpus, 0)))
            except _Left as left:
                self._leave(number, str(left))
                continue
            for _ in range(int(count)):
                yield number, task

    def _google(self) -> Iterator[tuple[int, Public]]:
        """Events of instances: submitted, scheduled, ended, in µs. What has not ended is left out."""
        begun: dict[tuple[str, str], dict[str, float]] = {}
        lines: dict[tuple[str, str], int] = {}
        for number, row in self._table((), ("collection_id",)):
            event = str(row.get("type", ""))
            event = GOOGLE_TYPES.get(event, event)
            if event not in GOOGLE_TYPES.values():
                continue
            key = str(row.get("collection_id")), str(row.get("instance_index") or "0")
            try:
                at = _number(row.get("time"), "time")
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
                    known["SUBMIT"], at / 1e6 - known["SCHEDULE"], _number(cpus or "1", "resource_request.cpus"), 0
                )
            except _Left as left:
                self._leave(number, str(left))
                continue
            yield number, task
        for key in begun:
            self._leave(lines[key], "not ended in the trace")

    def _table(self, default: tuple[str, ...], expected: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Lines of a CSV with a header, or with the ``default`` one, or of JSON. Raises ConfigError if none of the ``expected``
        columns is there."""
        if self._text.lstrip()[:1] == "{":
            yield from self._json_lines()
            return
        reader = csv.reader(io.StringIO(self._text))
        header: list[str] = []
        for cells in reader:
            if not header:
                first = [cell.strip().lower() for cell in cells]
                header = first if set(first) & set(expected) else list(default)
                if not header:
                    raise ConfigError("trace", f"{self._source}:1: no column {' or '.join(expected)}")
                if header == first:
                    continue
            if len(cells) == len(header):
                yield reader.line_num, dict(zip(header, cells, strict=True))
            elif cells:
                self._leave(reader.line_num, f"not {len(header)} columns")

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


def _number(value: object, column: str) -> float:
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
    if duration <= 0:
        raise _Left("no run time")
    if cpus <= 0:
        raise _Left("no cores")
    return arrival, duration, cpus, gpus
