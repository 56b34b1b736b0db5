"""`peerload history`: tasks that have ended, also those that `ls` shows no more, and traces of them."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from peerload.cli.common.messages import CANNOT
from peerload.cli.common.options import Options, whole
from peerload.client.connection import AgentConnection
from peerload.model.errors import PeerloadError, UsageError
from peerload.text import tasks
from peerload.text.format import (
    counted,
    duration_text,
    number_text,
    print_json,
    say,
    shortened,
    size_text,
    table,
    terminal_columns,
)

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Iterator

HEADINGS = ("ID", "NAME", "STATE", "NODE", "ENDED", "WAITED", "RAN", "CPU", "MEMORY", "ENERGY", "EXIT")
RIGHT = ("WAITED", "RAN", "CPU", "MEMORY", "ENERGY", "GPUS", "GPU MEM", "FETCHED", "STAGED IN", "RETURNED")
GPU_HEADINGS = ("GPUS", "GPU MEM", "GPU")
"""Columns that are shown if any task requested GPUs: their number, the peak memory of one GPU, and the model."""
FILE_HEADINGS = ("FETCHED", "STAGED IN", "RETURNED")
"""Columns that are shown if files travelled with any task."""
LIMIT = 1000
"""Default bound of the list; an export has no bound."""
LIMIT_MAX = 1_000_000


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options("history", "List ended tasks whose home is here, the last one first.")
    reader.flag("--since T", help="ended since: 2h (ago), 2026-11-20, …T14:30", type=instant, default=0.0)
    reader.flag("--limit N", help=f"at most the newest N ({LIMIT}; exports: all)", type=whole(1, LIMIT_MAX))
    reader.switch("--cluster", help="the tasks of all nodes, not only of this one")
    reader.at()
    reader.switch("--all", help="tasks of all users")
    reader.flag("--export FILE", help="write a trace for `peerload sim`: .csv, .jsonl, or - (CSV on stdout)")
    flags = reader.read(words)
    if flags.cluster and flags.at:
        raise UsageError("history: --cluster is not for --at", hint="all nodes:  --cluster        one:  --at NODE")
    if flags.export is not None:
        return export(flags)
    with AgentConnection(flags.socket) as client:
        asked = {"since": flags.since, "limit": flags.limit or LIMIT}
        reply = client.call("history", **asked, at=flags.at, cluster=flags.cluster)
    own = tasks.own_names()
    shown = [task for task in reply["tasks"] if flags.all or tasks.is_mine(task, own)]
    hidden = len(reply["tasks"]) - len(shown)
    if flags.cluster:
        newest_first = sorted(shown, key=lambda task: -float(task.get("ended_at") or 0))
        shown = newest_first[: flags.limit or LIMIT]
        reply["truncated"] = bool(reply.get("truncated")) or len(shown) < len(newest_first)
    if flags.json:
        missing = {"missing": reply.get("missing")} if flags.cluster else {}
        print_json({"tasks": shown, "truncated": bool(reply.get("truncated")), **missing})
    else:
        _say_left_out(flags, reply, hidden)
        sys.stdout.write("".join(f"{line}\n" for line in _lines(shown)))
    return 0


def instant(text: str) -> float:
    """A Unix time from a duration before now (``90m``, ``2h``, ``7d``), or a day or time in local time."""
    import argparse
    from datetime import datetime

    from peerload.text.units import duration

    try:
        if "-" in text:
            return max(datetime.fromisoformat(text).timestamp(), 0.0)
        return max(time.time() - duration(text), 0.0)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or a day or moment: 2026-11-20, 2026-11-20T14:30") from None
    except (ValueError, OverflowError, OSError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time; such as 2h (ago), 2026-11-20 or 2026-11-20T14:30"
        ) from None


def _say_left_out(flags: Namespace, reply: dict[str, Any], hidden: int) -> None:
    if reply.get("truncated"):
        say(f"only the newest {flags.limit or LIMIT} tasks are shown", "more:  --limit N")
    tasks.say_missing(reply)
    if hidden:
        say(f"not shown: {counted(hidden, 'task')} of other users", "to see them:  peerload history --all")


def _lines(shown: list[dict[str, Any]]) -> list[str]:
    if not shown and sys.stdout.isatty():
        return ["no tasks have ended        unfinished ones:  peerload ls"]
    has_gpus, has_files = any(task.get("gpus") for task in shown), any(task.get("files") for task in shown)
    columns = terminal_columns()
    headings = (*HEADINGS, *(GPU_HEADINGS if has_gpus else ()), *(FILE_HEADINGS if has_files else ()))
    rows = [
        _row(task) + (_gpu_cells(task) if has_gpus else []) + (_file_cells(task) if has_files else []) for task in shown
    ]
    paint = {"STATE": tasks.STATE_COLOURS}
    return table(headings, rows, RIGHT, columns=columns, gives_way=("NAME", "NODE", "GPU"), paint=paint)


def _gpu_cells(task: dict[str, Any]) -> list[str]:
    usage = task.get("usage") or {}
    if not task.get("gpus"):
        return ["-", "-", "-"]
    return [
        number_text(task["gpus"]),
        size_text(usage.get("gpu_memory_bytes_max") or None),
        str(usage.get("gpu_model") or "-"),
    ]


def _file_cells(task: dict[str, Any]) -> list[str]:
    files = task.get("files")
    if not files:
        return ["-", "-", "-"]
    return [size_text(files["fetched_bytes"]), duration_text(files["staging_s"]), size_text(files["returned_bytes"])]


def _row(task: dict[str, Any]) -> list[str]:
    usage = task.get("usage") or {}
    ran = task.get("duration_s") is not None
    return [
        str(task.get("id", "")),
        shortened(str(task.get("name") or ""), tasks.NAME_WIDTH_MAX),
        str(task.get("state", "")),
        str(task.get("node") or "-"),
        tasks.instant_text(task.get("ended_at")),
        duration_text(task.get("waited_s")),
        duration_text(task.get("duration_s")),
        duration_text(usage.get("user_s", 0.0) + usage.get("system_s", 0.0)) if ran else "-",
        size_text(usage.get("memory_bytes_max")) if ran else "-",
        "-" if usage.get("joules") is None else f"{number_text(usage['joules'], 1)} J {usage.get('energy_quality')}",
        tasks.exit_text(task),
    ]


KEYS = ("submitted_at", "duration_s", "cpus", "gpus", "home")
"""The fields of a task that a trace needs."""
NUMBERS = ("submitted_at", "cpus", "gpus")
"""The numbers among them; a task that never ran has no duration."""
NUMBER_END = 1e12
NAME = re.compile(r"[a-z0-9-]{1,40}")
"""A valid name of a node."""
COLUMNS = ("arrival", "duration", "cpus", "gpus", "node")
DIGITS = 6
"""Microseconds."""


class Trace:
    """A trace of ended tasks for the simulator, one line for each task in the order of submission.

    Columns: ``arrival`` (seconds since the first submission in the trace), ``duration`` (seconds the process ran), ``cpus``, ``gpus``,
    ``node`` (the home node). Tasks that never ran are left out. With ``--cluster`` it has the tasks of all homes, in the order of
    submission by the clock of each home. ``written`` and ``left_out`` count tasks; ``missing``: nodes that did not answer.
    """

    def __init__(self, out: TextIO, *, as_csv: bool) -> None:
        self._out = out
        self._as_csv = as_csv
        self._first_at: float | None = None
        self._arrival = 0.0
        self.written = 0
        self.left_out = 0
        self.missing: list[dict[str, Any]] = []
        if as_csv:
            out.write(",".join(COLUMNS) + "\n")

    def add(self, task: dict[str, Any]) -> None:
        """Write an ended task that was submitted after the last one."""
        duration_s = task.get("duration_s")
        if not duration_s or not _is_number(duration_s):
            self.left_out += 1
            return
        if self._first_at is None:
            self._first_at = float(task["submitted_at"])
        # A wall clock may have been set back meanwhile; arrivals never go back.
        self._arrival = max(self._arrival, task["submitted_at"] - self._first_at)
        duration = max(round(float(duration_s), DIGITS), 10.0**-DIGITS)
        self._write([round(self._arrival, DIGITS), duration, float(task["cpus"]), int(task["gpus"]), str(task["home"])])
        self.written += 1

    def _write(self, values: list[Any]) -> None:
        if self._as_csv:  # none of them can hold a comma or a quote
            self._out.write(",".join(_plain(value) for value in values) + "\n")
        else:
            import json

            self._out.write(json.dumps(dict(zip(COLUMNS, values, strict=True))) + "\n")


def _plain(value: object) -> str:
    """A number without an exponent or needless zeros."""
    return f"{value:.{DIGITS}f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def export(flags: Namespace) -> int:
    """Write the trace that ``--export`` names; a file is written completely or not at all."""
    path: str = flags.export
    if path == "-":
        if flags.json:
            raise UsageError("history: --export - writes CSV", hint="for JSON lines:  --export FILE.jsonl")
        return _report(_copy(flags, sys.stdout, as_csv=True), "", flags)
    if not path.endswith((".csv", ".jsonl")):
        raise UsageError(f"history: {path!r} has no known ending", hint="the name of a trace ends in .csv or .jsonl")
    partial = f"{path}.{os.getpid()}.part"
    try:
        with open(partial, "x", encoding="utf-8") as out:  # noqa: PTH123 -- as client/connection.py: no pathlib on the way to a start
            trace = _copy(flags, out, as_csv=path.endswith(".csv"))
        os.replace(partial, path)  # noqa: PTH105
    except OSError as error:
        raise PeerloadError(f"{path} cannot be written", why=error.strerror or str(error)) from None
    finally:
        with contextlib.suppress(FileNotFoundError):  # renamed by now, or never made
            os.unlink(partial)  # noqa: PTH108
    return _report(trace, path, flags)


def _copy(flags: Namespace, out: TextIO, *, as_csv: bool) -> Trace:
    trace = Trace(out, as_csv=as_csv)
    with AgentConnection(flags.socket) as client:
        own = tasks.own_names()
        ended: Iterable[dict[str, Any]] = (
            task for task in _ended(client, flags) if flags.all or tasks.is_mine(task, own)
        )
        if flags.cluster:
            ended, trace.left_out = _in_order(ended, flags.limit)
        for task in ended:
            trace.add(task)
        trace.missing = client.last.get("missing") or []
    return trace


def _ended(client: AgentConnection, flags: Namespace) -> Iterator[dict[str, Any]]:
    """The ended tasks, page by page, so that only one page is in memory."""
    asked = {"since": flags.since, "limit": flags.limit, "oldest_first": True}
    for part in client.stream("history", **asked, at=flags.at, cluster=flags.cluster):
        yield from part.get("tasks", ())
    yield from client.last.get("tasks", ())


def _in_order(ended: Iterable[dict[str, Any]], limit: int | None) -> tuple[Iterable[dict[str, Any]], int]:
    """The newest ``limit`` tasks (None: all) of several homes in the order of submission, with the fields of a trace only; and the number
    of those left out because their home reports invalid fields."""
    kept, left_out = [], 0
    for task in ended:
        if (
            isinstance(task.get("home"), str)
            and NAME.fullmatch(task["home"])
            and all(map(_is_number, _of(task, NUMBERS)))
        ):
            kept.append(dict(zip(KEYS, _of(task, KEYS), strict=True)))
        else:
            left_out += 1
    kept.sort(key=lambda task: float(task["submitted_at"]))
    return iter(kept if limit is None else kept[-limit:]), left_out


def _of(task: dict[str, Any], keys: tuple[str, ...]) -> list[Any]:
    return [task.get(key) for key in keys]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < NUMBER_END


def _report(trace: Trace, path: str, flags: Namespace) -> int:
    code = CANNOT if trace.missing else 0
    if flags.json:
        missing = {"missing": trace.missing} if flags.cluster else {}
        print_json({"file": path, "tasks": trace.written, "left_out": trace.left_out, **missing})
        return code
    tasks.say_missing({"missing": trace.missing})
    left_out = f"; {trace.left_out} that never ran are left out" if trace.left_out else ""
    say(
        f"{counted(trace.written, 'task')} written{f' to {path}' if path else ''}{left_out}",
        f"replay them:  peerload sim --arrivals trace:{path}" if path else "",
    )
    return code
