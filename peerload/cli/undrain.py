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
        client.call("undrain")
    if flags.json:
        print_json({})
    else:
        sys.stdout.write("this node takes tasks again\n")
    return 0
