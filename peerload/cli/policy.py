"""`peerload policy`: the policies there are and the preset in force."""

from __future__ import annotations

import sys

from peerload.cli.main import UsageError
from peerload.cli.options import Options
from peerload.cli.text import print_json, printable
from peerload.client import Client

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KNOWN_KEYS = ("policies", "presets", "in_force")


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "policy", "The policies there are, kind by kind, the presets, and the preset in force.", usage="[ls]"
    )
    reader.add_argument("what", nargs="?", default="ls", metavar="ls")
    flags = reader.read(words)
    if flags.what != "ls":
        raise UsageError(f"policy: no such word: {flags.what!r}", hint="there is:  peerload policy ls")
    with Client(flags.socket) as client:
        reply = client.call("policy")
    if flags.json:
        print_json({key: reply.get(key) for key in KNOWN_KEYS})
    else:
        sys.stdout.write("".join(f"{line}\n" for line in lines(reply)))
    return 0


def lines(reply: dict[str, Any]) -> list[str]:
    """The answer as text, whatever the agent tells about each name."""
    in_force = reply.get("in_force")
    drawn = ["in force", *_described(in_force), "", "presets", *_described(reply.get("presets"), _named(in_force))]
    return [*drawn, "", "policies", *_described(reply.get("policies"))]


def _named(value: object) -> str:
    return str(value.get("name") or value.get("preset") or "") if isinstance(value, dict) else str(value or "")


def _described(value: object, chosen: str = "") -> list[str]:
    """A name, a list of names, a map of kinds to names, or records with a name and a description."""
    if isinstance(value, dict):
        width = max((len(str(key)) for key in value), default=0)
        drawn = []
        for key, of_key in value.items():
            if isinstance(of_key, dict):
                drawn += [f"  {printable(key)}", *(f"  {line}" for line in _described(of_key))]
            else:
                drawn.append(f"  {printable(key).ljust(width)}  {_inline(of_key)}")
        return drawn
    if isinstance(value, (list, tuple)):
        return [_entry(item, chosen) for item in value] or ["  none"]
    return [f"  {_inline(value)}"]


def _entry(item: object, chosen: str) -> str:
    if isinstance(item, dict):
        more = " ".join(_inline(of_key) for key, of_key in item.items() if key != "name")
        return f"  {_mark(_named(item), chosen)}  {more}".rstrip()
    return f"  {_mark(str(item), chosen)}"


def _mark(name: str, chosen: str) -> str:
    return f"{printable(name)} *" if name == chosen else printable(name)


def _inline(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return "  ".join(map(printable, value))
    return "none" if value in (None, "") else printable(value)
