"""`peerload revoke NODE`: shut a node out of the cluster."""

from __future__ import annotations

import sys

from peerload.cli.common.options import NODE_NAME_SAYS, Options, is_node_name
from peerload.client.connection import Client
from peerload.model.errors import UsageError
from peerload.model.text import printable
from peerload.text.format import print_json, say


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "revoke",
        "Shut a node out: its certificate counts nowhere any more, its links are cut, and the key that it knew is changed.\n"
        "For a machine that was lost or stolen. It can come back by a new invitation alone.",
    )
    reader.add_argument("node", metavar="NODE")
    reader.switch("--force", help="although no node of that name is known here")
    flags = reader.read(words)
    if not is_node_name(flags.node):
        what = f"revoke: {flags.node!r} cannot be a node's name"
        raise UsageError(what, why=NODE_NAME_SAYS, hint="the nodes known here:  peerload nodes")
    with Client(flags.socket) as client:
        reply = client.call("revoke", node=flags.node, force=flags.force)
    if flags.json:
        print_json({key: reply.get(key) for key in ("node", "was", "told", "was_issuer")})
        return 0
    node, told = printable(str(reply.get("node"))), int(reply.get("told") or 0)
    sys.stdout.write(
        f"{node} is shut out; {told} other member{'' if told == 1 else 's'} told, the rest hear of it when they are back\n"
    )
    if reply.get("was_issuer"):
        say(
            f"{node} has the key of the cluster's CA: with it, it can make itself another certificate",
            "shut it out for good with a new cluster:  peerload cluster init DIR",
        )
    return 0
