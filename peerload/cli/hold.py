"""`peerload hold`: keep waiting tasks back."""

from __future__ import annotations

import sys

from peerload.cli.options import Options
from peerload.cli.text import print_json, printable
from peerload.client import Client


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options("hold", "Keep waiting tasks back, until  peerload release.  What runs already runs on.")
    reader.add_argument("task", nargs="+", metavar="ID")
    flags = reader.read(words)
    with Client(flags.socket) as client:
        reply = client.call("hold", tasks=flags.task)
    held, already_held, not_waiting = (reply.get(key, []) for key in ("held", "already_held", "not_waiting"))
    if flags.json:
        print_json({"held": held, "already_held": already_held, "not_waiting": not_waiting})
        return 0
    lines = [f"{printable(task)}  held\n" for task in held]
    lines += [f"{printable(task)}  is held already\n" for task in already_held]
    lines += [f"{printable(task)}  does not wait; a task that runs:  peerload cancel\n" for task in not_waiting]
    sys.stdout.write("".join(lines))
    return 0
