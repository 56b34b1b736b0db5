# ruff: noqa: PTH110
# os.path, since pathlib would cost every command its quick start.
"""Hints about likely mistakes in a command: a line in quotes, a shell operator, a node that does not exist."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from peerload.cli.common.options import NODE_NAME_SAYS, is_node_name
from peerload.model.errors import NeverRunnable, UsageError
from peerload.model.text import printable
from peerload.text.format import say

if TYPE_CHECKING:
    from peerload.client.connection import Client

NAMED_MAX = 8
SHELL_MARKS = "|&;<>()$`*?~"
"""Characters that only a shell interprets."""
SHELL_OPERATORS = ("|", "||", "&&", ">", ">>", "2>", "2>&1")


def check_node_names(verb: str, names: list[str]) -> None:
    """Raise UsageError if one of them cannot be the name of a node."""
    for name in names:
        if not is_node_name(name):
            lower = name.lower()
            also = f"did you mean {lower} ?        " if is_node_name(lower) else ""
            raise UsageError(
                f"{verb}: {name!r} is not a valid node name: {NODE_NAME_SAYS}", hint=f"{also}there are:  peerload nodes"
            )


def say_if_quoted(words: list[str], verb: str) -> None:
    """Say on stderr that a line in quotes is one word, and that a word such as `|` is an argument: no shell reads it."""
    if len(words) == 1 and len(words[0].split()) > 1 and not os.path.exists(words[0]):
        shown = printable(words[0])
        needs_shell = any(mark in words[0] for mark in SHELL_MARKS)
        by_words = "" if needs_shell else f"without the quotes:  peerload {verb} {shown}        "
        say(
            f"{shown!r} is one word: it is taken for the name of a program",
            f"{by_words}as a line for a shell:  peerload {verb} sh -c {quoted(shown)}",
        )
    elif operators := [word for word in words[1:] if word in SHELL_OPERATORS]:
        shown = printable(" ".join(words))
        say(
            f"{operators[0]!r} is passed to {printable(words[0])} as an argument: no shell reads it",
            f"as a line for a shell:  peerload {verb} sh -c {quoted(shown)}",
        )


def quoted(line: str) -> str:
    """The line quoted as one word for a shell."""
    return "'" + line.replace("'", "'\\''") + "'"


def mended(error: NeverRunnable, client: Client, spec: dict[str, Any]) -> NeverRunnable:
    """The refusal of a task, improved if it named an unknown node."""
    wanted = spec["placement"].get("node")
    if not wanted:
        return error
    if spec["placement"].get("local") and wanted != client.call("info")["node"]:
        error.hint = f"--local keeps it here, -w {wanted} sends it there: leave one of them out"
        return error
    from difflib import get_close_matches

    names = [str(node["node"]) for node in client.call("nodes")["nodes"]]
    if wanted in names:
        return error
    near = get_close_matches(wanted, names, n=1)
    also = f"did you mean  -w {near[0]} ?        " if near else ""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    better = NeverRunnable(
        f"no node {wanted} is known here; nothing was submitted",
        why=f"there are {', '.join(names[:NAMED_MAX])}{more}",
        hint=f"{also}peerload nodes        to wait for it:  --wait-for-node",
    )
    better.code = error.code
    return better
