"""`peerload why`: why a task waits, with a reason for every node; or why it went where it went."""

from __future__ import annotations

import sys
import time

from peerload.cli.common.options import Options
from peerload.client.connection import Client
from peerload.text.format import print_json
from peerload.text.why import described


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "why",
        "Explain why a task waits: for every known node whether it could ever run it, whether it has room now, and the reason;\n"
        "how old these facts are; and the smallest change that would let it start now. For a task that has started: where it\n"
        "went and why. For an array: how many members wait for what, and all this for the next one to start.",
    )
    reader.add_argument("task", metavar="ID")
    flags = reader.read(words)
    with Client(flags.socket) as client:
        told = client.call("why", task=flags.task)
    if flags.json:
        print_json(told)
    else:
        sys.stdout.write("".join(f"{line}\n" for line in described(told, time.time())))
    return 0
