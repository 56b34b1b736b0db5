"""`peerload ls`: my tasks."""

from __future__ import annotations

import gc
import sys
import time
from typing import TYPE_CHECKING, Any

from peerload.cli.common import selection
from peerload.cli.common.options import Options, whole
from peerload.cli.common.redraw import redrawn
from peerload.client.connection import Client
from peerload.model.errors import UsageError
from peerload.text import tasks
from peerload.text.format import counted, print_json, say, terminal_columns
from peerload.text.tasks import as_row, number_of

if TYPE_CHECKING:
    from argparse import Namespace

    from peerload.cli.common.selection import Selection

EVER_S = 1e9
"""Named tasks are listed whenever they ended."""


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "ls", "List my tasks whose home is here: unfinished ones and those that ended in the last 24 hours."
    )
    selection.add(reader)
    reader.switch("--cluster", help="the tasks of all nodes, not only of this one")
    reader.switch("--remote", help="the tasks of other homes on this node, even if their homes are unreachable")
    reader.at()
    reader.switch("--all", help="tasks of all users")
    reader.switch("--members", help="all members of arrays one by one")
    reader.switch("-w", "--watch", help="draw it again each second, until q or Ctrl-C")
    reader.flag("--limit", type=whole(1, 100_000), default=200, metavar="N", help="at most so many (200)")
    flags = reader.read(words)
    chosen = selection.Selection(flags, "ls", needed=False)
    if flags.remote and (flags.cluster or chosen.words or chosen.is_narrowed):
        raise UsageError(
            "ls: --remote can only be combined with --at, --all, --limit, --watch and --json", hint="peerload ls --help"
        )
    if flags.cluster and chosen.words:
        raise UsageError(f"ls: --cluster asks all nodes, and {chosen.words[0]} is of one", hint="omit --cluster")
    if flags.cluster and flags.at:
        raise UsageError("ls: --cluster asks all nodes, --at one", hint=f"peerload ls --at {flags.at}")
    with Client(flags.socket) as client:
        if flags.watch and not flags.json:
            return redrawn(lambda: lines(client, flags, chosen))
        gc.disable()  # it is looked for all the longer the more tasks there are, and found at our end
        if flags.json:
            reply = listed(client, flags, chosen)
            keys = ("tasks", "truncated", "unfinished", "damaged", *(("missing",) if flags.cluster else ()))
            print_json({key: reply.get(key) for key in (keys[:2] if flags.remote else keys)})
            return 0
        sys.stdout.write("".join(f"{line}\n" for line in lines(client, flags, chosen)))
    return 0


def listed(client: Client, flags: Namespace, chosen: Selection) -> dict[str, Any]:
    """The reply of the agent without the tasks of other users, unless --all is given; ``hidden`` counts them."""
    if flags.remote:
        reply = client.call("remote", limit=flags.limit, at=flags.at)
        return {**reply, "hidden": 0}
    asked = chosen.request_fields() | {"limit": flags.limit}
    asked |= {} if flags.members or flags.json else {"gathered": True}
    asked |= {"ended_within_s": EVER_S} if chosen.words else {}
    reply = client.call("tasks", **asked, at=flags.at, cluster=flags.cluster)
    own = tasks.own_names()
    shown = [task for task in reply["tasks"] if flags.all or tasks.is_mine(task, own)]
    other = [task for task in reply["tasks"] if not flags.all and not tasks.is_mine(task, own)]
    hidden = sum(map(number_of, other))
    if flags.cluster:
        shown = tasks.together(shown, flags.limit)
    truncated = bool(reply.get("truncated")) or len(shown) + len(other) < len(reply["tasks"])
    return {**reply, "tasks": shown, "hidden": hidden, "truncated": truncated}


def lines(client: Client, flags: Namespace, chosen: Selection) -> list[str]:
    """The table as lines; messages about what it leaves out go to stderr."""
    reply = listed(client, flags, chosen)
    if not flags.watch:
        if reply.get("truncated"):
            say(
                f"no more than {counted(len(reply['tasks']), 'row')} shown{_unfinished(reply)}",
                "more:  --limit N  or  --state S",
            )
        tasks.say_missing(reply)
        for task in reply.get("damaged", ()):
            say(f"{task['id']} is damaged: it cannot be read", task["why"])
        if reply["hidden"]:
            say(f"not shown: {counted(reply['hidden'], 'task')} of other users", "to see them:  peerload ls --all")
    now = time.time()
    if not reply["tasks"] and sys.stdout.isatty():
        return [_none(flags, chosen)]
    return tasks.listed_table(list(map(as_row, reply["tasks"])), now, terminal_columns())


def _none(flags: Namespace, chosen: Selection) -> str:
    """A line instead of an empty table, with what to type."""
    if flags.remote:
        return "no task of another home is on this node        my own tasks:  peerload ls"
    if chosen.words or chosen.is_narrowed:
        return "no such tasks        all of mine:  peerload ls        those that ended:  peerload history"
    return "no tasks        queue one:  peerload submit sleep 5        those that ended long ago:  peerload history"


def _unfinished(reply: dict[str, Any]) -> str:
    counts = [f"{number} {state}" for state, number in sorted((reply.get("unfinished") or {}).items()) if number]
    return f" (unfinished: {', '.join(counts)})" if counts else ""
