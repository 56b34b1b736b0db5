"""`peerload hold`, `release` and `prio`: keep waiting tasks from starting, let them start, change which goes first."""

from __future__ import annotations

import sys

from peerload.cli.common import selection
from peerload.cli.common.errors import CANNOT
from peerload.cli.common.options import Options, whole
from peerload.client.connection import Client
from peerload.model.errors import BadRequest
from peerload.text.format import print_json
from peerload.text.tasks import ENDED, collapsed

LOOKED_AT_MAX = 100
"""Tasks whose states are asked to explain why they cannot be held."""


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options("hold", "Keep waiting tasks from starting, until  peerload release.  Running tasks go on.")
    selection.add(reader, changes=True)
    flags = reader.read(words)
    chosen_by = selection.Selection(flags, "hold")
    with Client(flags.socket) as client:
        chosen = chosen_by.references(client, ("queued",))
        if chosen is None:
            return CANNOT
        reply = selection.changed(client, "hold", chosen)
        held, already_held, not_waiting = (reply.get(key, []) for key in ("held", "already_held", "not_waiting"))
        states = {task: _state(client, task) for task in not_waiting[:LOOKED_AT_MAX]} if not flags.json else {}
    code = CANNOT if not_waiting and not held and not already_held else 0
    if flags.json:
        print_json({"held": held, "already_held": already_held, "not_waiting": not_waiting})
        return code
    lines = [f"{line}  held\n" for line in collapsed(held)]
    lines += [f"{line}  was held already\n" for line in collapsed(already_held)]
    ended = [task for task in not_waiting if states.get(task) in ENDED]
    lines += [f"{line}  has ended; run it again:  peerload retry\n" for line in collapsed(ended)]
    others = [task for task in not_waiting if states.get(task) not in ENDED]
    lines += [f"{line}  is not waiting; stop a running task:  peerload cancel\n" for line in collapsed(others)]
    sys.stdout.write("".join(lines))
    return code


def _state(client: Client, task: str) -> str:
    try:
        return str(client.call("show", tasks=[task])["tasks"][0]["state"])
    except BadRequest:  # removed meanwhile
        return ""


def release(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "release",
        "Let held tasks start: those held by  peerload hold  or  submit --held,  and those held because several nodes that ran\n"
        "them were lost.",
    )
    selection.add(reader, changes=True)
    flags = reader.read(words)
    chosen_by = selection.Selection(flags, "release")
    with Client(flags.socket) as client:
        chosen = chosen_by.references(client, ("held",))
        if chosen is None:
            return CANNOT
        reply = selection.changed(client, "release", chosen)
    released, not_held = reply.get("released", []), reply.get("not_held", [])
    if flags.json:
        print_json({"released": released, "not_held": not_held})
        return 0
    lines = [f"{line}  released\n" for line in collapsed(released)]
    lines += [f"{line}  is not held\n" for line in collapsed(not_held)]
    sys.stdout.write("".join(lines))
    return 0


PRIORITY_MAX = 1_000_000


def prio(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "prio", "Change the priority of waiting tasks: greater numbers go first.", usage="[flags] N ID ..."
    )
    reader.add_argument("priority", type=whole(-PRIORITY_MAX, PRIORITY_MAX), metavar="N")
    selection.add(reader, changes=True)
    flags = reader.read(_with_number_first(words))
    chosen_by = selection.Selection(flags, "prio")
    with Client(flags.socket) as client:
        chosen = chosen_by.references(client, selection.UNFINISHED)
        if chosen is None:
            return CANNOT
        reply = selection.changed(client, "prio", chosen, priority=flags.priority)
    keys = ("changed", "passed_on", "elsewhere", "ended")
    changed, passed_on, elsewhere, ended = (reply.get(key, []) for key in keys)
    if flags.json:
        print_json({"priority": flags.priority} | {key: reply.get(key, []) for key in keys})
        return 0
    lines = [f"{line}  priority {flags.priority}\n" for line in collapsed(changed)]
    lines += [
        f"{line}  priority {flags.priority}; passed on to the node that has it queued\n"
        for line in collapsed(passed_on)
    ]
    lines += [
        f"{line}  has started: priority {flags.priority} counts only if it is queued again\n"
        for line in collapsed(elsewhere)
    ]
    lines += [f"{line}  has ended\n" for line in collapsed(ended)]
    sys.stdout.write("".join(lines))
    return 0


def _with_number_first(words: list[str]) -> list[str]:
    """``-5 3`` as ``-- -5 3``, so that a priority below 0 is not taken for a flag."""
    for index, word in enumerate(words):
        if word[:1] == "-" and word[1:].isdecimal():
            return [*words[:index], "--", *words[index:]]
    return words
