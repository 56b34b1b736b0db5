"""`peerload undrain`: have this node take tasks again."""

from __future__ import annotations

import sys

from peerload.cli.options import Options
from peerload.cli.text import print_json
from peerload.client import Client


def main(words: list[str]) -> int:
    """Run the verb."""
    flags = Options("undrain", "Have this node take tasks again, after  peerload drain.").read(words)
    with Client(flags.socket) as client:
        was_drained = bool(client.call("undrain").get("was_drained", True))
    if flags.json:
        print_json({"was_drained": was_drained})
    else:
        sys.stdout.write("this node takes tasks again\n" if was_drained else "this node was not drained\n")
    return 0
