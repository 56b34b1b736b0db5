"""`peerload logs`: the output of a task."""

from __future__ import annotations

from peerload.cli.command import say_away, say_unknown, say_waits
from peerload.cli.main import CANNOT
from peerload.cli.options import Options, whole
from peerload.cli.output import OutputWriter
from peerload.cli.tasks import instant_text
from peerload.cli.text import say
from peerload.client import Client

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TAIL_LINES_MAX = 1_000_000


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "logs",
        "The output of a task: its stdout on stdout, its stderr on stderr, byte for byte. On a terminal what could move or\n"
        "colour it is shown as \\x1b and the like; not with --raw.",
        json_says="one object for each piece of output",
    )
    reader.add_argument("task", metavar="ID")
    reader.switch("-f", "--follow", help="go on as more comes, until the task has ended")
    reader.switch("--err", help="only what it wrote to stderr")
    reader.flag("--tail", type=whole(0, TAIL_LINES_MAX), metavar="N", help="only the last N lines of each stream")
    reader.switch("--raw", help="byte for byte on a terminal, too")
    reader.at()
    flags = reader.read(words)
    streams = [2] if flags.err else [1, 2]
    with Client(flags.socket) as client:
        asked = {"task": flags.task, "follow": flags.follow, "streams": streams, "tail_lines": flags.tail}
        writer = OutputWriter(raw=flags.raw, is_whole=flags.tail is None, is_json=flags.json)
        for piece in client.stream("output", **asked, at=flags.at):
            if "unknown" in piece:
                say_unknown(piece["unknown"])
            elif "away" in piece:
                say_away(piece["away"])
            elif "waits" in piece:
                say_waits(piece["waits"])
            else:
                writer.write(piece)
        writer.close()
        if code := say_if_gone(client.last):
            return code
        if not flags.err:
            writer.end(client.last)
        return CANNOT if writer.missing_bytes else 0


def say_if_gone(end: dict[str, Any]) -> int:
    """What an output that is not there any more ends with: a word, and CANNOT; else 0."""
    if not end.get("output_gone_at"):
        return 0
    why = str(end.get("output_gone_why") or "")
    say(
        f"the output of {end.get('id')} was removed on {instant_text(end['output_gone_at'])} ({why})",
        f"the task itself:  peerload show {end.get('id')}",
    )
    return CANNOT
