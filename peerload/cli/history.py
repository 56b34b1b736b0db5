"""`peerload history`: tasks that have ended, also those that `ls` shows no more, and traces of them."""

from __future__ import annotations

import sys
import time

from peerload.cli import tasks
from peerload.cli.options import Options, whole
from peerload.cli.text import duration_text, print_json, say, shortened, size_text, table
from peerload.client import Client

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

HEADINGS = ("ID", "NAME", "STATE", "NODE", "ENDED", "WAITED", "RAN", "CPU", "MEMORY", "EXIT")
RIGHT = ("WAITED", "RAN", "CPU", "MEMORY")
LIMIT = 1000
"""How many are listed unless the user says otherwise; an export has all."""
LIMIT_MAX = 1_000_000


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options("history", "Tasks whose home is here and that have ended, the last first.")
    reader.flag("--since", type=instant, default=0.0, metavar="T", help="ended since: 2h (ago), 2026-11-20, …T14:30")
    reader.flag("--limit", type=whole(1, LIMIT_MAX), metavar="N", help=f"at most the newest N ({LIMIT}; exports: all)")
    reader.switch("--all", help="tasks of all users")
    reader.flag("--export", metavar="FILE", help="write a trace for `peerload sim`: .csv, .jsonl, or - (CSV, here)")
    flags = reader.read(words)
    if flags.export is not None:
        from peerload.cli.history_export import export

        return export(flags)
    with Client(flags.socket) as client:
        reply = client.call("history", since=flags.since, limit=flags.limit or LIMIT)
    shown = [task for task in reply["tasks"] if flags.all or tasks.is_mine(task)]
    if flags.json:
        print_json({"tasks": shown, "truncated": bool(reply.get("truncated"))})
    else:
        _talk(flags, reply, len(reply["tasks"]) - len(shown))
        sys.stdout.write("".join(f"{line}\n" for line in _lines(shown)))
    return 0


def instant(text: str) -> float:
    """A Unix time: so long ago (``90m``, ``2h``, ``7d``), or a day or moment of this machine's local time."""
    import argparse
    from datetime import datetime

    from peerload.cli.options import duration

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
    if hidden:
        say(f"{hidden} tasks of other users are not shown", "to see them:  peerload history --all")


def _lines(shown: list[dict[str, Any]]) -> list[str]:
    if not shown and sys.stdout.isatty():
        return ["no tasks have ended"]
    return table(HEADINGS, [_row(task) for task in shown], RIGHT)


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
