"""`peerload forget`: a node is gone for good."""

from __future__ import annotations

import sys

from peerload.cli.options import Options
from peerload.cli.text import print_json, printable
from peerload.client import Client


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "forget",
        "Say that a node is gone for good: every node drops it from its list and looks for it no more.\n"
        "Only for a node that is dead or has left. Its tasks that may not be run twice are given up; be sure.",
    )
    reader.add_argument("node", metavar="NODE")
    flags = reader.read(words)
    with Client(flags.socket) as client:
        reply = client.call("forget", node=flags.node)
    if flags.json:
        print_json({"node": reply.get("node"), "was": reply.get("was")})
    else:
        sys.stdout.write(f"{printable(reply.get('node', ''))} is forgotten; it was {printable(reply.get('was', ''))}\n")
    return 0
