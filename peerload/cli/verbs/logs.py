"""`peerload logs`: the output of a task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peerload.cli.common import selection
from peerload.cli.common.command import say_away, say_unknown, say_waits
from peerload.cli.common.errors import CANNOT, report
from peerload.cli.common.options import Options, whole
from peerload.cli.common.output import OutputWriter
from peerload.client.connection import Client
from peerload.model.errors import BadRequest
from peerload.text.format import say
from peerload.text.tasks import instant_text, is_mine, own_names

if TYPE_CHECKING:
    from argparse import Namespace

EVER_S = 1e9
TASKS_MAX = 1000
"""Bound of tasks whose outputs one command prints."""
TAIL_LINES_MAX = 1_000_000


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "logs",
        "Print the output of tasks: stdout on stdout, stderr on stderr, byte for byte. On a terminal control characters are shown\n"
        "as \\x1b and the like, unless --raw is given. The outputs of several tasks follow each other.",
        json_says="one object for each piece of output",
    )
    selection.add(reader)
    reader.switch("-f", "--follow", help="go on until the task has ended")
    reader.switch("--err", help="only its stderr")
    reader.flag("--tail", type=whole(0, TAIL_LINES_MAX), metavar="N", help="only the last N lines of each stream")
    reader.switch("--raw", help="do not escape control characters on a terminal")
    reader.at()
    flags = reader.read(words)
    chosen = selection.Selection(flags, "logs")
    with Client(flags.socket) as client:
        if not chosen.is_plain or len(chosen.words) > 1:
            return _print_several(client, chosen, flags)
        try:
            return _print_one(client, chosen.words[0], flags)
        except BadRequest as error:
            if error.code != BadRequest.code or flags.at:
                raise
            return _print_several(client, chosen, flags, refused=error)  # an array, perhaps


def _print_several(
    client: Client, chosen: selection.Selection, flags: Namespace, refused: BadRequest | None = None
) -> int:
    """Print the outputs of several tasks in the order of submission, each with a heading on stderr. ``refused``: the error for the only
    word as the id of one task; raised if it does not name several either."""
    asked = chosen.request_fields() | {"ended_within_s": EVER_S, "limit": TASKS_MAX}
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
        say(f"only the first {TASKS_MAX} of them", "fewer:  --state S  --name GLOB  or ranges of an array: 42.3-9")
        code = CANNOT
    return code


def _print_one(client: Client, task: str, flags: Namespace, *, names: bool = False) -> int:
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
