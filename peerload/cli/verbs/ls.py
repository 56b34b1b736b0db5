"""`peerload ls`, `logs`, `why` and `events`: tasks, their output, why they wait, and what happened."""

from __future__ import annotations

import gc
import sys
import time
from typing import TYPE_CHECKING, Any

from peerload.cli.common import selection
from peerload.cli.common.messages import CANNOT, report, say_away, say_unknown, say_waits
from peerload.cli.common.options import Options, whole
from peerload.cli.common.output import OutputWriter, redrawn
from peerload.client.connection import AgentConnection
from peerload.model.errors import BadRequest, UsageError
from peerload.model.text import printable
from peerload.text import tasks
from peerload.text.format import counted, json_line, print_json, print_result, say, terminal_columns
from peerload.text.tasks import as_row, instant_text, is_mine, number_of, own_names, why_lines

if TYPE_CHECKING:
    from argparse import Namespace

    from peerload.cli.common.selection import Selection


EVER_S = 1e9
"""Named tasks are listed whenever they ended."""


def ls(words: list[str]) -> int:
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
    reader.switch("-w, --watch", help="draw it again each second, until q or Ctrl-C")
    reader.flag("--limit N", help="at most so many (200)", type=whole(1, 100_000), default=200)
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
    with AgentConnection(flags.socket) as client:
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


def listed(client: AgentConnection, flags: Namespace, chosen: Selection) -> dict[str, Any]:
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


def lines(client: AgentConnection, flags: Namespace, chosen: Selection) -> list[str]:
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


OUTPUTS_MAX = 1000
"""Bound of tasks whose outputs one command prints."""
TAIL_LINES_MAX = 1_000_000


def logs(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "logs",
        "Print the output of tasks: stdout on stdout, stderr on stderr, byte for byte. On a terminal control characters are shown\n"
        "as \\x1b and the like, unless --raw is given. The outputs of several tasks follow each other.",
        json_says="one object for each piece of output",
    )
    selection.add(reader)
    reader.switch("-f, --follow", help="go on until the task has ended")
    reader.switch("--err", help="only its stderr")
    reader.flag("--tail N", help="only the last N lines of each stream", type=whole(0, TAIL_LINES_MAX))
    reader.switch("--raw", help="do not escape control characters on a terminal")
    reader.at()
    flags = reader.read(words)
    chosen = selection.Selection(flags, "logs")
    with AgentConnection(flags.socket) as client:
        if not chosen.is_plain or len(chosen.words) > 1:
            return _print_several(client, chosen, flags)
        try:
            return _print_one(client, chosen.words[0], flags)
        except BadRequest as error:
            if error.code != BadRequest.code or flags.at:
                raise
            return _print_several(client, chosen, flags, refused=error)  # an array, perhaps


def _print_several(
    client: AgentConnection, chosen: selection.Selection, flags: Namespace, refused: BadRequest | None = None
) -> int:
    """Print the outputs of several tasks in the order of submission, each with a heading on stderr. ``refused``: the error for the only
    word as the id of one task; raised if it does not name several either."""
    asked = chosen.request_fields() | {"ended_within_s": EVER_S, "limit": OUTPUTS_MAX}
    reply = client.call("tasks", **asked, at=flags.at)
    own = own_names()
    tasks = [str(task["id"]) for task in reply["tasks"] if chosen.words or is_mine(task, own)]
    if refused is not None and len(tasks) < 2:  # noqa: PLR2004 -- more than one
        raise refused
    if not tasks:
        selection.say_none()
    code = 0
    for task in tasks:
        if not flags.json:
            say(f"output of {task}")
        try:
            code = _print_one(client, task, flags, names=True) or code
        except BadRequest as error:  # removed meanwhile
            report(error)
            code = CANNOT
    if reply.get("truncated"):
        say(f"only the first {OUTPUTS_MAX} of them", "fewer:  --state S  --name GLOB  or ranges of an array: 42.3-9")
        code = CANNOT
    return code


def _print_one(client: AgentConnection, task: str, flags: Namespace, *, names: bool = False) -> int:
    streams = [2] if flags.err else [1, 2]
    asked = {"task": task, "follow": flags.follow, "streams": streams, "tail_lines": flags.tail}
    writer = OutputWriter(raw=flags.raw, is_whole=flags.tail is None, is_json=flags.json)
    for piece in client.stream("output", **asked, at=flags.at):
        if "unknown" in piece:
            say_unknown(piece["unknown"])
        elif "away" in piece:
            say_away(piece["away"])
        elif "waits" in piece:
            say_waits(piece["waits"])
        else:
            writer.write(({"id": task} if names else {}) | piece)
    writer.close()
    if code := say_if_gone(client.last):
        return code
    if not flags.err:
        writer.end(client.last)
    return CANNOT if writer.missing_bytes else 0


def say_if_gone(end: dict[str, Any]) -> int:
    """Say that an output was removed → CANNOT; 0 if it was not."""
    if not end.get("output_gone_at"):
        return 0
    why = str(end.get("output_gone_why") or "")
    say(
        f"the output of {end.get('id')} was removed on {instant_text(end['output_gone_at'])} ({why})",
        f"the task itself:  peerload show {end.get('id')}",
    )
    return CANNOT


def why(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "why",
        "Explain why a task waits: for every known node whether it could ever run it, whether it has room now, and the reason;\n"
        "how old these facts are; and the smallest change that would let it start now. For a task that has started: where it\n"
        "went and why. For an array: how many members wait for what, and all this for the next one to start.",
    )
    reader.add_argument("task", metavar="ID")
    flags = reader.read(words)
    with AgentConnection(flags.socket) as client:
        told = client.call("why", task=flags.task)
    print_result(told, "".join(f"{line}\n" for line in why_lines(told, time.time())), as_json=flags.json)
    return 0


WHAT = (
    "task",
    "attempt",
    "node",
    "agent",
    "join",
    "cluster",
    "launcher",
    "disk",
    "energy",
    "gpu",
    "files",
    "environment",
    "chore",
    "hook",
    "web",
    "store",
    "security",
)
EVENTS_MAX = 100_000


def events(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "events",
        "List what happened on this node, to its tasks and to tasks of other homes that it runs: every change with its reason\n"
        "and time, oldest first.",
        json_says="one object an event",
    )
    reader.add_argument("task", nargs="*", metavar="ID", help="only of these tasks (of an array: of all its members)")
    reader.switch("-f, --follow", help="go on with new events until Ctrl-C")
    reader.flag("--limit N", help="begin with the newest N (50)", type=whole(0, EVENTS_MAX), default=50)
    reader.flag("--what KIND …", help=f"only of this kind: {' '.join(WHAT)}")
    reader.at()
    flags = reader.read(words)
    what = [name for value in flags.what for name in value.split(",") if name]
    for name in what:
        if name not in WHAT:
            raise UsageError(f"events: no such kind: {name!r}", hint=f"there are:  {' '.join(WHAT)}")
    with AgentConnection(flags.socket) as client:
        asked = {"limit": flags.limit, "follow": flags.follow, "tasks": flags.task, "what": what}
        for part in client.stream("events", **asked, at=flags.at):
            for event in part["events"]:
                sys.stdout.write(json_line(event) if flags.json else event_line(event))
            sys.stdout.flush()
    return 0


def event_line(event: dict[str, Any]) -> str:
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
