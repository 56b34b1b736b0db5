"""`peerload undrain`: have this node take tasks again."""

from __future__ import annotations

import sys

from peerload.cli.common.options import Options, node_name
from peerload.client.connection import Client
from peerload.text.format import print_json


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options("undrain", "Have this or another node take tasks again, after  peerload drain.")
    reader.add_argument("node", nargs="?", type=node_name, default="", metavar="NODE", help="default: this one")
    flags = reader.read(words)
    with Client(flags.socket) as client:
        was_drained = bool(client.call("undrain", at=flags.node).get("was_drained", True))
    if flags.json:
        print_json({"was_drained": was_drained})
    else:
        node = flags.node or "this node"
        sys.stdout.write(f"{node} takes tasks again\n" if was_drained else f"{node} was not drained\n")
    return 0
