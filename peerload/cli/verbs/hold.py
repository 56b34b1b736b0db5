"""`peerload hold`: keep waiting tasks back."""

from __future__ import annotations

import sys

from peerload.cli.common import selection
from peerload.cli.common.errors import CANNOT
from peerload.cli.common.options import Options
from peerload.client.connection import Client
from peerload.model.errors import BadRequest
from peerload.text.format import print_json
from peerload.text.tasks import ENDED, collapsed

LOOKED_AT_MAX = 100
"""Tasks of which it is said whether they have ended."""


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options("hold", "Keep waiting tasks back, until  peerload release.  What runs already runs on.")
    selection.add(reader, changes=True)
    flags = reader.read(words)
    chosen_by = selection.Selection(flags, "hold")
    with Client(flags.socket) as client:
        chosen = chosen_by.chosen(client, ("queued",))
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
    lines += [f"{line}  is held already\n" for line in collapsed(already_held)]
    ended = [task for task in not_waiting if states.get(task) in ENDED]
    lines += [f"{line}  has ended; once more:  peerload retry\n" for line in collapsed(ended)]
    others = [task for task in not_waiting if states.get(task) not in ENDED]
    lines += [f"{line}  does not wait; a task that runs:  peerload cancel\n" for line in collapsed(others)]
    sys.stdout.write("".join(lines))
    return code


def _state(client: Client, task: str) -> str:
    try:
        return str(client.call("show", tasks=[task])["tasks"][0]["state"])
    except BadRequest:  # removed meanwhile
        return ""
