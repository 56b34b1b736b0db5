"""`peerload events`: the events of a node, past and live."""

from __future__ import annotations

import sys
from typing import Any

from peerload.cli.common.options import Options, whole
from peerload.client.connection import Client
from peerload.model.errors import UsageError
from peerload.model.text import printable
from peerload.text import tasks
from peerload.text.format import json_line

WHAT = ("task", "attempt", "node", "agent", "join", "cluster", "launcher", "disk", "gpu", "chore", "store", "security")
EVENTS_MAX = 100_000


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "events",
        "List what happened on this node, to its tasks and to tasks of other homes that it runs: every change with its reason\n"
        "and time, oldest first.",
        json_says="one object an event",
    )
    reader.add_argument("task", nargs="*", metavar="ID", help="only of these tasks (of an array: of all its members)")
    reader.switch("-f", "--follow", help="go on with new events until Ctrl-C")
    reader.flag("--limit", type=whole(0, EVENTS_MAX), default=50, metavar="N", help="begin with the newest N (50)")
    reader.flag("--what", action="append", default=[], metavar="KIND", help=f"only of this kind: {' '.join(WHAT)}")
    reader.at()
    flags = reader.read(words)
    what = [name for value in flags.what for name in value.split(",") if name]
    for name in what:
        if name not in WHAT:
            raise UsageError(f"events: no such kind: {name!r}", hint=f"there are:  {' '.join(WHAT)}")
    with Client(flags.socket) as client:
        asked = {"limit": flags.limit, "follow": flags.follow, "tasks": flags.task, "what": what}
        for part in client.stream("events", **asked, at=flags.at):
            for event in part["events"]:
                sys.stdout.write(json_line(event) if flags.json else line(event))
            sys.stdout.flush()
    return 0


def line(event: dict[str, Any]) -> str:
    """One event as a line of text: time, subject, new state, reason."""
    who = event.get("task") or event.get("node") if event.get("what") != "agent" else "agent"
    if event.get("what") == "security":
        who = f"security: {who or 'somebody'}"
    attempt = f" attempt {event['attempt']}" if event.get("attempt") else ""
    where = f" on {event['node']}" if event.get("task") and event.get("node") and event["what"] == "task" else ""
    home = " (a guest)" if event.get("what") == "attempt" else ""
    subject = printable(who or event.get("what") or "")
    said = f"{printable(event.get('state') or '')}{attempt}{printable(where)}{home}"
    why = f": {printable(event['reason'])}" if event.get("reason") else ""
    return f"{tasks.instant_text(event.get('at'))}  {subject}  {said}{why}\n"
