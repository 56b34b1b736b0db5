"""`peerload exec ID CMD`: run a command inside a running task."""

from __future__ import annotations

import os

from peerload.cli import command
from peerload.cli.main import CANNOT, UsageError
from peerload.cli.options import Options
from peerload.cli.output import OutputWriter
from peerload.cli.text import print_json, printable, say
from peerload.client import Client
from peerload.model.errors import BadRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SHELLS = ("sh", "bash", "dash", "zsh", "fish")


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "exec",
        "Run a command inside a running task, on its node: in its working directory, with its environment, in its cgroup.\n"
        "It reads nothing, takes no slot, and ends with this command, or with the task.",
        usage="[flags] ID COMMAND ...",
    )
    flags, (task, *argv) = _split(reader, words)
    with Client(flags.socket) as client:
        node = _node_of(client, task)
        writer = OutputWriter()
        write = print_json if flags.json else writer.write
        for piece in client.stream("exec", at=node, task=task, argv=[os.fsencode(word) for word in argv]):
            if piece.get("data"):
                write(piece)
        ended = client.last
    if flags.json:
        print_json({key: ended.get(key) for key in ("exit_code", "signal", "reason")})
    code = command.exit_code_of(ended)
    if ended.get("reason"):
        say(f"{printable(argv[0])}: {printable(ended['reason'])}")
    if code == 0 and writer.missing_bytes:
        say(f"exit code {CANNOT}: it succeeded, and not all of its output came through")
        return CANNOT
    return code


def _split(reader: Options, words: list[str]) -> tuple[Any, list[str]]:
    """The flags, and the id with the command."""
    flags, rest = reader.read_command(words)
    if len(rest) > 1 and rest[1] == "--":
        rest = [rest[0], *rest[2:]]
    if len(rest) < len(("ID", "COMMAND")):
        raise UsageError("exec: an ID and a command are wanted", hint="peerload exec 42 ps x")
    if len(rest) == len(("ID", "SHELL")) and os.path.basename(rest[1]) in SHELLS:  # noqa: PTH119 -- a quick start
        hint = f"peerload exec {printable(rest[0])} {printable(rest[1])} -c 'COMMAND'        a shell on a node:  peerload sh NODE"
        raise UsageError(f"exec: {rest[1]} would read commands from standard input, which is empty", hint=hint)
    return flags, rest


def _node_of(client: Client, task: str) -> str:
    """The node where this task runs. Raises BadRequest if it does not."""
    shown = client.call("show", tasks=[task])["tasks"]
    if len(shown) > 1:
        raise BadRequest(
            f"{task} has {len(shown)} members", hint=f"name one of them:  peerload exec {shown[0]['id']} …"
        )
    state, node = shown[0].get("state"), shown[0].get("node")
    if state != "running" or not node:
        raise BadRequest(f"{task} is {state}: a command goes inside of a task that runs", hint=f"peerload show {task}")
    return str(node)
