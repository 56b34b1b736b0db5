"""`peerload history`: tasks that have ended, also those that `ls` shows no more, and traces of them."""

from __future__ import annotations

import sys
import time

from peerload.cli.common.options import Options, whole
from peerload.client.connection import Client
from peerload.model.errors import UsageError
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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

HEADINGS = ("ID", "NAME", "STATE", "NODE", "ENDED", "WAITED", "RAN", "CPU", "MEMORY", "EXIT")
RIGHT = ("WAITED", "RAN", "CPU", "MEMORY", "GPUS", "GPU MEM")
GPU_HEADINGS = ("GPUS", "GPU MEM", "GPU")
"""Only where any of the tasks has asked for GPUs: how many, the most memory of any one of them, and their model."""
LIMIT = 1000
"""How many are listed unless the user says otherwise; an export has all."""
LIMIT_MAX = 1_000_000


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options("history", "Tasks whose home is here and that have ended, the last first.")
    reader.flag("--since", type=instant, default=0.0, metavar="T", help="ended since: 2h (ago), 2026-11-20, …T14:30")
    reader.flag("--limit", type=whole(1, LIMIT_MAX), metavar="N", help=f"at most the newest N ({LIMIT}; exports: all)")
    reader.switch("--cluster", help="the tasks of all nodes, not those of this one alone")
    reader.at()
    reader.switch("--all", help="tasks of all users")
    reader.flag("--export", metavar="FILE", help="write a trace for `peerload sim`: .csv, .jsonl, or - (CSV, here)")
    flags = reader.read(words)
    if flags.cluster and flags.at:
        raise UsageError("history: --cluster is not for --at", hint="all nodes:  --cluster        one:  --at NODE")
    if flags.export is not None:
        from peerload.cli.common.history_export import export

        return export(flags)
    with Client(flags.socket) as client:
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
        _talk(flags, reply, hidden)
        sys.stdout.write("".join(f"{line}\n" for line in _lines(shown)))
    return 0


def instant(text: str) -> float:
    """A Unix time: so long ago (``90m``, ``2h``, ``7d``), or a day or moment of this machine's local time."""
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
            f"{text!r} is no moment; such as 2h (ago), 2026-11-20 or 2026-11-20T14:30"
        ) from None


def _talk(flags: Namespace, reply: dict[str, Any], hidden: int) -> None:
    if reply.get("truncated"):
        say(f"only the newest {flags.limit or LIMIT} tasks are shown", "more:  --limit N")
    tasks.say_missing(reply)
    if hidden:
        say(f"not shown: {counted(hidden, 'task')} of other users", "to see them:  peerload history --all")


def _lines(shown: list[dict[str, Any]]) -> list[str]:
    if not shown and sys.stdout.isatty():
        return ["no tasks have ended        those that wait or run:  peerload ls"]
    has_gpus, columns = any(task.get("gpus") for task in shown), terminal_columns()
    headings = (*HEADINGS, *GPU_HEADINGS) if has_gpus else HEADINGS
    rows = [_row(task) + (_gpu_cells(task) if has_gpus else []) for task in shown]
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
        tasks.exit_text(task),
    ]
