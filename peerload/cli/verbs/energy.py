"""`peerload energy`: joules of a node, of tasks or of users."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

from peerload.cli.common.options import Options, node_name
from peerload.cli.verbs.history import LIMIT_MAX, instant
from peerload.client.connection import AgentConnection
from peerload.model.errors import PeerloadError, UsageError
from peerload.text import tasks
from peerload.text.format import duration_text, number_text, print_json, say, table

if TYPE_CHECKING:
    from collections.abc import Iterable

HEADINGS = ("JOULES", "WH", "TASKS", "OTHERS", "IDLE", "UNKNOWN", "QUALITY", "SCOPE", "SOURCE")
QUALITIES = ("measured", "derived", "estimated")
WH_J = 3600.0
DIGITS_MAX = 9
DAY_S = 86_400.0


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "energy",
        "Print the joules of this node: of tasks, of other programs, and of idling. With --task or --user those of ended tasks\n"
        "whose home is here, wherever they ran, beyond what the machines would have drawn anyway.",
        json_says="print JSON, one object a row",
    )
    reader.flag(
        "--node NODE", type=node_name, nargs="?", const=None, default="", help="of that node; without NODE: of each"
    )
    reader.switch("--task", help="one row for each task")
    reader.switch("--user", help="one row for each user")
    reader.flag("--since T", help="since then: 2h (ago; default 1d), 2026-11-20, …T14:30", type=instant)
    flags = reader.read(words)
    if flags.task and flags.user:
        raise UsageError("energy: --task is not for --user", hint="one of them at a time")
    since = time.time() - DAY_S if flags.since is None else flags.since
    with AgentConnection(flags.socket) as client:
        if flags.task or flags.user:
            where = {"cluster": True} if flags.node is None else {"at": flags.node}
            told = client.call("history", since=since, limit=LIMIT_MAX, oldest_first=True, **where)
            tasks.say_missing(told)
            rows = by_user(told["tasks"], since) if flags.user else [of_task(task) for task in told["tasks"]]
        else:
            rows = of_nodes(client, flags.node, since)
    if flags.json:
        for row in rows:
            print_json(row)
        return 0
    first = "task" if flags.task else "user" if flags.user else "node"
    cells = [[str(row[first]), *_cells(row)] for row in rows]
    lines = table((first.upper(), *HEADINGS), cells, HEADINGS[:6])
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def of_nodes(client: AgentConnection, node: str | None, since: float) -> list[dict[str, Any]]:
    """The row of a node, or (None) of each that is alive and answers."""
    if node is not None:
        return [client.call("energy", at=node, since=since)]
    rows = []
    for one in client.call("nodes")["nodes"]:
        if one["state"] != "alive":
            continue
        try:
            rows.append(client.call("energy", at="" if one["self"] else one["node"], since=since))
        except PeerloadError as error:
            say(f"{one['node']} is left out: {error}")
    return rows


def of_task(task: dict[str, Any]) -> dict[str, Any]:
    """The row of an ended task."""
    usage = task.get("usage") or {}
    joules = usage.get("joules")
    return {
        "node": task.get("node"),
        "since": task.get("started_at"),
        "until": task.get("ended_at"),
        "joules": joules,
        "wh": None if joules is None else joules / WH_J,
        "tasks_joules": joules,
        "other_joules": 0.0,
        "idle_joules": 0.0,
        "gap_s": None,
        "quality": usage.get("energy_quality"),
        "scope": usage.get("energy_scope"),
        "source": None,
        "task": task.get("id"),
        "user": task.get("user"),
    }


def by_user(ended: Iterable[dict[str, Any]], since: float) -> list[dict[str, Any]]:
    """A row for each user: the sum of what is known of the tasks, with the worst quality of any."""
    found: dict[str, dict[str, Any]] = {}
    for task in ended:
        row = of_task(task)
        if row["joules"] is None:
            continue
        row |= {"since": since, "until": time.time(), "task": None}
        total = found.setdefault(str(row["user"]), row)
        if total is row:
            continue
        for key in ("joules", "wh", "tasks_joules"):
            total[key] += row[key]
        total["node"] = total["node"] if total["node"] == row["node"] else None
        total["quality"] = max(total["quality"], row["quality"], key=QUALITIES.index)
        total["scope"] = "+".join(dict.fromkeys(f"{total['scope']}+{row['scope']}".split("+")))
    return list(found.values())


def _number(value: float | None, digits: int) -> str:
    """A number with so many digits, or as many as show two that count."""
    if value:
        digits = min(max(digits, 1 - math.floor(math.log10(abs(value)))), DIGITS_MAX)
    return number_text(value, digits)


def _cells(row: dict[str, Any]) -> list[str]:
    parts = ("joules", "wh", "tasks_joules", "other_joules", "idle_joules")
    numbers = [_number(row[key], 3 if key == "wh" else 1) for key in parts]
    gap = "-" if row["gap_s"] is None else duration_text(row["gap_s"])
    return [*numbers, gap, *(str(row[key] or "-") for key in ("quality", "scope", "source"))]
