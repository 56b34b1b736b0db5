"""`submit --each-line FILE`: a member of an array for each line."""

from __future__ import annotations

from peerload.cli.map.inputs import LineReader
from peerload.cli.map.template import CommandTemplate
from peerload.model.errors import BadRequest, UsageError
from peerload.text.format import printable, size_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Iterator
    from typing import Any

LINES_MAX = 100_000
COMMANDS_BYTES_MAX = 3 << 20
"""What an array's commands may have in all: they go in one frame, with the rest of the request."""
WORD_BYTES = 5
"""What each word takes besides its own bytes."""


def commands(flags: Namespace, spec: dict[str, Any]) -> list[list[bytes]]:
    """The command line of each member. Raises UsageError for a file that cannot be read or has no lines, BadRequest for
    too many."""
    if flags.array is not None:
        raise UsageError("submit: --array and --each-line contradict each other", hint="the lines are the members")
    name = printable(flags.each_line)
    is_shell = flags.shell is not None
    template = CommandTemplate(spec["argv"][-1:] if is_shell else spec["argv"], is_shell=is_shell, verb="submit")
    found = gathered(template, ((line,) for line in _lines(flags.each_line)), name)
    if not found:
        raise UsageError(f"submit: {name} has no lines", hint="a task is made for each line")
    return found


def _lines(file: str) -> Iterator[bytes]:
    lines = LineReader(file, verb="submit")
    while not lines.ended:
        lines.read()
        yield from lines.ahead
        lines.ahead.clear()


def gathered(template: CommandTemplate, rows: Iterable[tuple[bytes, ...]], name: str) -> list[list[bytes]]:
    """The command line for each row of values. Raises BadRequest for too many, and for what no command can have. name: where
    they come from."""
    found: list[list[bytes]] = []
    size = 0
    for row in rows:
        if any(b"\0" in value for value in row):
            raise BadRequest(
                f"line {len(found) + 1} of {name} has a NUL byte in it", why="no word of a command can have one"
            )
        found.append(template.argv(len(found) + 1, row))
        size += sum(len(word) + WORD_BYTES for word in found[-1])
        if len(found) > LINES_MAX or size > COMMANDS_BYTES_MAX:
            raise BadRequest(
                f"{name} has too many lines for one array"
                if name != "--param"
                else "there are too many combinations for one array",
                why=f"at most {LINES_MAX} of {size_text(COMMANDS_BYTES_MAX)} in all, with the command",
                hint="any number, at the pace of the work:  peerload map 'COMMAND {}' :::: FILE",
            )
    return found
