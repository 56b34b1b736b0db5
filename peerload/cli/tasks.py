"""How a task is shown: the cells of its row, what state it is in, when and how it ended."""

from __future__ import annotations

import os
import time

from peerload.cli.text import duration_text, printable, shortened, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ENDED = ("done", "failed", "cancelled")
REASON_WIDTH_MAX = 60
NAME_WIDTH_MAX = 32


def elapsed_s(task: dict[str, Any], now: float) -> float | None:
    """Seconds it ran, or has been running; for one that has not started, seconds since it was submitted."""
    start = task.get("started_at") or task.get("submitted_at")
    if not start:
        return None
    return float((task.get("ended_at") or now) - start)


def exit_text(task: dict[str, Any]) -> str:
    """``0``, ``3``, ``9 KILL`` …; a dash for one that has not ended."""
    if task.get("signal"):
        return f"signal {task['signal']}"
    code = task.get("exit_code")
    return "-" if code is None else str(code)


def row(task: dict[str, Any], now: float) -> list[str]:
    """The cells of `ls`: id, name, state, node, time, exit, reason."""
    return [
        str(task.get("id", "")),
        shortened(str(task.get("name") or ""), NAME_WIDTH_MAX),
        str(task.get("state", "")),
        str(task.get("node") or "-"),
        duration_text(elapsed_s(task, now)),
        exit_text(task),
        shortened(str(task.get("reason") or ""), REASON_WIDTH_MAX),
    ]


def instant_text(at: object) -> str:
    """A Unix time in this machine's local time; a dash if there is none."""
    if not isinstance(at, (int, float)) or not at:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def steps_table(steps: list[dict[str, Any]]) -> list[str]:
    """The states that a task went through, as lines."""
    rows = [
        (instant_text(step.get("at")), step.get("state", ""), step.get("node") or "-", step.get("reason") or "")
        for step in steps
    ]
    return table(("AT", "STATE", "NODE", "REASON"), rows)


def command_text(argv: object) -> str:
    """An argv as it could be typed, harmless to a terminal."""
    import shlex

    return printable(shlex.join(map(str, argv))) if isinstance(argv, list) else "-"


def is_mine(task: dict[str, Any]) -> bool:
    """Whether the task's user is the one asking; a task without a user is everybody's."""
    user = task.get("user")
    if user in (None, ""):
        return True
    import pwd

    own = os.getuid()
    try:
        name = pwd.getpwuid(own).pw_name
    except KeyError:
        name = ""
    return str(user) in (name, str(own))
