"""`peerload release`: let held tasks go on."""

from __future__ import annotations

import sys

from peerload.cli.options import Options
from peerload.cli.text import print_json, printable
from peerload.client import Client


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "release",
        "Let held tasks go on: those kept back by  peerload hold  or  submit --held,  and those held because nodes went\n"
        "away under them.",
    )
    reader.add_argument("task", nargs="+", metavar="ID")
    flags = reader.read(words)
    with Client(flags.socket) as client:
        reply = client.call("release", tasks=flags.task)
    released, not_held = reply.get("released", []), reply.get("not_held", [])
    if flags.json:
        print_json({"released": released, "not_held": not_held})
        return 0
    lines = [f"{printable(task)}  released\n" for task in released]
    lines += [f"{printable(task)}  is not held\n" for task in not_held]
    sys.stdout.write("".join(lines))
    return 0
