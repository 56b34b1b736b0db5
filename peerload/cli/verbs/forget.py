"""`peerload forget`: a node is gone for good."""

from __future__ import annotations

import sys

from peerload.cli.common.options import NODE_NAME_SAYS, Options, is_node_name
from peerload.client.connection import Client
from peerload.model.errors import UsageError
from peerload.model.text import printable
from peerload.text.format import print_json


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "forget",
        "Say that a node is gone for good: every node drops it from its list and looks for it no more.\n"
        "Only for a node that is dead or has left. Its tasks that may not be run twice are given up; be sure.",
    )
    reader.add_argument("node", metavar="NODE")
    flags = reader.read(words)
    if not is_node_name(flags.node):
        what = f"forget: {flags.node!r} cannot be a node's name"
        raise UsageError(what, why=NODE_NAME_SAYS, hint="the nodes known here:  peerload nodes")
    with Client(flags.socket) as client:
        reply = client.call("forget", node=flags.node)
    if flags.json:
        print_json({"node": reply.get("node"), "was": reply.get("was")})
    else:
        was = f"it was {printable(reply['was'])}" if reply.get("was") else "only tasks at it were known here"
        sys.stdout.write(f"{printable(reply.get('node', ''))} is forgotten; {was}\n")
    return 0
