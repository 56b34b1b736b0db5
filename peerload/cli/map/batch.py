"""The tasks of `map`, as they are submitted: some at a time."""

from __future__ import annotations

import os

from peerload.cli.common import command
from peerload.cli.map.inputs import BadInput
from peerload.model.text import printable
from peerload.text.format import shortened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ARGV_BYTES_MAX = 1 << 20
"""As peerload.model.task has it."""
COMMAND_WIDTH_MAX = 100
WORD_BYTES = 5
"""What each word takes besides its own bytes."""


class MapTask:
    """One that was submitted and has not ended."""

    __slots__ = ("argv", "number", "values")

    def __init__(self, number: int, values: tuple[bytes, ...], argv: list[bytes]) -> None:
        self.number = number
        self.values = values
        self.argv = argv


class MapBatch:
    """Tasks that were submitted together, by member number. ``id``: "" until the agent has said it."""

    __slots__ = ("argv", "id", "left", "token")

    def __init__(self, tasks: list[MapTask]) -> None:
        self.token = os.urandom(16).hex()
        self.left = dict(enumerate(tasks, start=1))
        self.argv = [task.argv for task in tasks]
        self.id = ""


def sound_size(number: int, argv: list[bytes]) -> int:
    """Bytes of the command line of a task. Raises BadInput for what no process can be given."""
    size = sum(len(word) + WORD_BYTES for word in argv)
    if size > ARGV_BYTES_MAX:
        raise BadInput(
            f"map: the command of task {number} is too large",
            why=f"{size} bytes; at most {ARGV_BYTES_MAX} can travel",
            hint="put what is large into a file and have the command read it",
        )
    if any(b"\0" in word for word in argv):
        raise BadInput(
            f"map: input {number} has a NUL byte in it",
            why="no word of a command can have one",
            hint="inputs that end with NUL instead of a line break:  -0",
        )
    return size


def failure_text(body: dict[str, Any], line: bytes) -> str:
    """One line about a failed task."""
    signal_ = body.get("signal")
    how = f"signal {signal_}" if signal_ else f"exit {command.exit_code_of(body)}"
    if (body.get("exit_code") is None and not signal_) or body.get("out_of"):
        how = f"{how} ({body.get('reason') or body.get('state')})"
    where = f"on {body['node']}" if body.get("node") else ""
    said = ": ".join(filter(None, (where, str(body.get("error_line") or ""))))
    command_line = shortened(printable(line), COMMAND_WIDTH_MAX)
    return f"{printable(body.get('id', ''))}  {printable(how)}  {command_line}" + (
        f"  ({printable(said)})" if said else ""
    )
