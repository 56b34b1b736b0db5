"""`peerload ls`: my tasks."""

from __future__ import annotations

import sys
import time

from peerload.cli import tasks
from peerload.cli.main import UsageError
from peerload.cli.options import Options, whole
from peerload.cli.redraw import redrawn
from peerload.cli.text import print_json, say, table
from peerload.client import Client

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

STATES = ("held", "queued", "leased", "running", "done", "failed", "cancelled", "unknown")
HEADINGS = ("ID", "NAME", "STATE", "NODE", "TIME", "EXIT", "REASON")


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options("ls", "My tasks whose home is here: unfinished ones and those that ended in the last 24 hours.")
    reader.flag("--state", action="append", default=[], metavar="S", help=f"only in this state: {' '.join(STATES)}")
    reader.flag("--node", default="", metavar="NAME", help="only those on this node")
    reader.switch("--all", help="tasks of all users")
    reader.switch("--watch", help="draw it again each second, until Ctrl-C")
    reader.flag("--limit", type=whole(1, 100_000), default=200, metavar="N", help="at most so many (200)")
    flags = reader.read(words)
    states = [name for value in flags.state for name in value.split(",") if name]
    for name in states:
        if name not in STATES:
            raise UsageError(f"ls: no such state: {name!r}", hint=f"there are:  {' '.join(STATES)}")
    with Client(flags.socket) as client:
        if flags.watch and not flags.json:
            return redrawn(lambda: lines(client, flags, states))
        if flags.json:
            reply = listed(client, flags, states)
            print_json({key: reply.get(key) for key in ("tasks", "truncated", "unfinished", "damaged")})
            return 0
        sys.stdout.write("".join(f"{line}\n" for line in lines(client, flags, states)))
    return 0


def listed(client: Client, flags: Namespace, states: list[str]) -> dict[str, Any]:
    """The agent's answer, less other users' tasks unless they are asked for; ``hidden`` counts those."""
    reply = client.call("tasks", states=states, node=flags.node, limit=flags.limit)
    shown = [task for task in reply["tasks"] if flags.all or tasks.is_mine(task)]
    return {**reply, "tasks": shown, "hidden": len(reply["tasks"]) - len(shown)}


def lines(client: Client, flags: Namespace, states: list[str]) -> list[str]:
    """The table as text; talk about what it leaves out goes to stderr."""
    reply = listed(client, flags, states)
    if not flags.watch:
        if reply.get("truncated"):
            say(f"only {len(reply['tasks'])} tasks are shown{_unfinished(reply)}", "more:  --limit N  or  --state S")
        for task in reply.get("damaged", ()):
            say(f"{task['id']} is damaged: it cannot be read", task["why"])
        if reply["hidden"]:
            say(f"{reply['hidden']} tasks of other users are not shown", "to see them:  peerload ls --all")
    now = time.time()
    if not reply["tasks"]:
        return ["no tasks"] if sys.stdout.isatty() else table(HEADINGS, [])
    return table(HEADINGS, [tasks.row(task, now) for task in reply["tasks"]], right=("TIME",))


def _unfinished(reply: dict[str, Any]) -> str:
    counts = [f"{number} {state}" for state, number in sorted((reply.get("unfinished") or {}).items()) if number]
    return f" (unfinished: {', '.join(counts)})" if counts else ""
