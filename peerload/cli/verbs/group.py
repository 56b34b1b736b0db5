"""`peerload group`: groups of tasks, their slots, and whether they are paused."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from peerload.cli.common.command import group_name
from peerload.cli.common.options import Options
from peerload.client.connection import AgentConnection
from peerload.model.errors import UsageError
from peerload.model.text import printable
from peerload.text.format import counted, print_json, print_result, table

if TYPE_CHECKING:
    from argparse import Namespace

SLOTS_MAX = 1_000_000
VERBS = ("ls", "set", "pause", "resume", "rm")
HINT = "peerload group        peerload group set G --slots 2        peerload group pause|resume|rm G"


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "group",
        "Groups of tasks (--group G of run, submit and map). A group's slots bound how many of its tasks run at a time, anywhere\n"
        "in the cluster, of those submitted on this node. Tasks of a paused group do not start. Running tasks go on.\n\n"
        "  peerload group [ls]               all groups\n"
        "  peerload group set G --slots N    at most N at a time; none: any number\n"
        "  peerload group pause G            start none of it\n"
        "  peerload group resume G           go on\n"
        "  peerload group rm G               delete a group that has no unfinished tasks",
        usage="[ls | set G --slots N | pause G | resume G | rm G] [flags]",
    )
    reader.add_argument("what", nargs="?", default="ls", metavar="ls|set|pause|resume|rm")
    reader.add_argument("name", nargs="?", metavar="G")
    reader.flag("--slots N", help="with set: at most N tasks at a time; none: any number")
    flags = reader.read(words)
    request = _request(flags)
    with AgentConnection(flags.socket) as client:
        if request is None:
            _show(client.call("groups").get("groups", []), flags)
            return 0
        group = client.call("group", **request)["group"]
    print_result(group, f"{printable(_group_text(flags.what, group))}\n", as_json=flags.json)
    return 0


def _request(flags: Namespace) -> dict[str, Any] | None:
    """The fields of the request; None: list the groups. Raises UsageError."""
    if flags.what not in VERBS:
        raise UsageError(f"group: unknown action: {flags.what[:60]!r}", hint=HINT)
    if flags.what != "set" and flags.slots is not None:
        raise UsageError("group: --slots belongs to  group set G", hint=HINT)
    if flags.what == "ls":
        if flags.name is not None:
            raise UsageError(f"group: ls takes no name: {flags.name[:60]!r}", hint=HINT)
        return None
    if flags.name is None:
        raise UsageError(f"group {flags.what}: the name of the group is missing", hint=HINT)
    name = group_name(flags.name, "group")
    match flags.what:
        case "set":
            return {"name": name, "slots": _slots(flags.slots)}
        case "rm":
            return {"name": name, "removed": True}
        case _:
            return {"name": name, "paused": flags.what == "pause"}


def _slots(text: str | None) -> int:
    if text is None:
        raise UsageError("group set: --slots is missing", hint="--slots 4        any number:  --slots none")
    if text in ("none", "0"):
        return 0
    if not text.isascii() or not text.isdecimal() or int(text) > SLOTS_MAX:
        raise UsageError(
            f"group: --slots {text[:60]!r} is not a number from 1 to {SLOTS_MAX}", hint="any number:  --slots none"
        )
    return int(text)


def _show(groups: list[dict[str, Any]], flags: Namespace) -> None:
    if flags.json:
        print_json({"v": 1, "groups": groups})
    elif not groups:
        sys.stdout.write(
            "no groups.  Make one:  peerload group set G --slots 2        use it:  peerload submit --group G CMD\n"
        )
    else:
        rows = [
            [
                str(group["name"]),
                str(group["slots"] or "-"),
                "yes" if group["paused"] else "no",
                str(group["running"]),
                str(group["waiting"]),
                str(group["held"]),
            ]
            for group in groups
        ]
        headings = ["GROUP", "SLOTS", "PAUSED", "RUNNING", "WAITING", "HELD"]
        lines = table(headings, rows, right=("SLOTS", "RUNNING", "WAITING", "HELD"))
        sys.stdout.write("\n".join(lines) + "\n")


def _group_text(what: str, group: dict[str, Any]) -> str:
    name = group["name"]
    if what == "rm":
        return f"group {name}: deleted"
    slots = counted(group["slots"], "slot") if group["slots"] else "no limit"
    stands = "paused" if group["paused"] else "not paused"
    return f"group {name}: {slots}, {stands}; {group['running']} running, {group['waiting']} waiting"
