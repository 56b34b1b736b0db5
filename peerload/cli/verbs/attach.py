r"""`peerload attach`: follow a running task as `run` does.

Its input comes from here if it has a terminal, or reads standard input that nobody else sends. It goes on when this command ends.
"""

from __future__ import annotations

from typing import Any

from peerload.cli.common.options import Options, whole
from peerload.cli.common.output import OutputWriter
from peerload.cli.common.standard_input import StdinReader, takes_input
from peerload.cli.common.task_session import Detached, TaskSession, is_ours, report_end, report_missing, say_detached
from peerload.client.connection import Client
from peerload.model.errors import BadRequest, NoSuchTask
from peerload.text.format import print_json

TAIL_LINES = 10
"""Lines of earlier output that are shown, as with `tail -f`."""


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "attach",
        "Follow a task: its live output, and its input if nobody else sends that; wait as run does, with its exit code.\n"
        "Ctrl-C goes to the task, Ctrl-\\ detaches from it.",
        usage="[--tail N] [--raw] ID",
    )
    reader.add_argument("task", metavar="ID")
    reader.flag(
        "--tail",
        type=whole(0, 1_000_000),
        default=TAIL_LINES,
        metavar="N",
        help=f"begin with its last N lines (default {TAIL_LINES})",
    )
    reader.switch("--raw", help="do not escape control characters, though the task is another user's")
    flags = reader.read(words)
    with Client(flags.socket) as client:
        (shown,) = _single(client, flags.task)
        task = str(shown["id"])
        is_raw = flags.raw or is_ours(shown, client.call("info"))
        has_terminal = bool(shown.get("terminal")) and is_raw
        stdin = _input(client, task) if takes_input() else None
        tail = None if has_terminal else flags.tail
        writer = OutputWriter(raw=is_raw, is_whole=tail is None, is_json=flags.json)
        following = TaskSession(client, writer.write, stdin=stdin, has_terminal=has_terminal, tail_lines=tail)
        with following:
            try:
                ended = following.follow(task)
            except Detached:
                return say_detached(task)
            finally:
                writer.close()
    if flags.json:
        keys = ("id", "state", "exit_code", "signal", "node", "reason", "out_of")
        print_json({key: ended.get(key) for key in keys})
    writer.end(ended)
    code = report_end(ended, interrupted=following.interrupts > 0)
    return report_missing(ended, code, writer.missing_bytes)


def _single(client: Client, name: str) -> list[dict[str, Any]]:
    """The one task of this name. Raises BadRequest for an array."""
    shown: list[dict[str, Any]] = client.call("show", tasks=[name])["tasks"]
    if len(shown) > 1:
        raise BadRequest(
            f"{name} is an array", why="name one of its members", hint=f"such as  peerload attach {shown[0]['id']}"
        )
    return shown


def _input(client: Client, task: str) -> StdinReader | None:
    """Our stdin for the task, if it takes input that nobody else sends."""
    try:
        reply = client.call("input", task=task)
    except NoSuchTask:
        raise
    except BadRequest:
        return None
    if reply.get("ended") or not reply.get("wanted", True):
        return None
    stdin = StdinReader()
    stdin.at = int(reply.get("offset") or 0)
    return stdin
