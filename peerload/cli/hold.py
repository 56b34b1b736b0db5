"""`peerload hold`: keep waiting tasks back."""

from __future__ import annotations

import sys

from peerload.cli.main import CANNOT
from peerload.cli.options import Options
from peerload.cli.tasks import ENDED
from peerload.cli.text import print_json, printable
from peerload.client import Client
from peerload.model.errors import BadRequest

LOOKED_AT_MAX = 100
"""Tasks of which it is said whether they have ended."""


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options("hold", "Keep waiting tasks back, until  peerload release.  What runs already runs on.")
    reader.add_argument("task", nargs="+", metavar="ID")
    flags = reader.read(words)
    with Client(flags.socket) as client:
        reply = client.call("hold", tasks=flags.task)
        held, already_held, not_waiting = (reply.get(key, []) for key in ("held", "already_held", "not_waiting"))
        states = {task: _state(client, task) for task in not_waiting[:LOOKED_AT_MAX]} if not flags.json else {}
    code = CANNOT if not_waiting and not held and not already_held else 0
    if flags.json:
        print_json({"held": held, "already_held": already_held, "not_waiting": not_waiting})
        return code
    lines = [f"{printable(task)}  held\n" for task in held]
    lines += [f"{printable(task)}  is held already\n" for task in already_held]
    for task in not_waiting:
        has_ended = states.get(task, "") in ENDED
        says = (
            "has ended; once more:  peerload retry"
            if has_ended
            else "does not wait; a task that runs:  peerload cancel"
        )
        lines.append(f"{printable(task)}  {says}\n")
    sys.stdout.write("".join(lines))
    return code


def _state(client: Client, task: str) -> str:
    try:
        return str(client.call("show", tasks=[task])["tasks"][0]["state"])
    except BadRequest:  # removed meanwhile
        return ""
