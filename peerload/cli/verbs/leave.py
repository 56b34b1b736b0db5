"""`peerload leave`, `forget` and `revoke`: take this node out of its cluster, drop one that is gone, shut one out."""

from __future__ import annotations

import sys

from peerload.cli.common.agent_process import await_end, watch
from peerload.cli.common.options import NODE_NAME_SAYS, Options, is_node_name
from peerload.client.connection import Client
from peerload.model.errors import AgentUnavailable, UsageError
from peerload.model.text import printable
from peerload.text.format import print_json, say


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "leave",
        "Take this node out of its cluster: the others are told, my agent stops and forgets the other nodes.\n"
        "Refused while it has tasks of others or unfinished ones of its own; the refusal says what would become of them.",
    )
    reader.switch("--force", help="leave anyway; running tasks go on")
    flags = reader.read(words)
    with Client(flags.socket) as client:
        info = client.call("info")
        process = watch(info.get("pid"))
        try:
            for what in client.call("leave", force=flags.force).get("left_behind", ()):
                say(what)
        except AgentUnavailable:
            if process is None:
                raise  # without its process nothing shows whether it stops
    if process is not None:
        await_end(process, f"the agent (pid {info['pid']})")
    if flags.json:
        print_json({"node": info.get("node"), "pid": info.get("pid")})
    else:
        node = printable(info.get("node", ""))
        sys.stdout.write(f"{node} has left; its agent stopped.  Join again:  peerload up --peer HOST:PORT\n")
    return 0


def forget(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "forget",
        "Declare that a node is gone for good: every node drops it from its list and stops looking for it.\n"
        "Only for a node that is dead or has left. Its tasks that must not run twice are given up, so be sure.",
    )
    reader.add_argument("node", metavar="NODE")
    flags = reader.read(words)
    if not is_node_name(flags.node):
        what = f"forget: {flags.node!r} is not a valid node name"
        raise UsageError(what, why=NODE_NAME_SAYS, hint="the nodes known here:  peerload nodes")
    with Client(flags.socket) as client:
        reply = client.call("forget", node=flags.node)
    if flags.json:
        print_json({"node": reply.get("node"), "was": reply.get("was")})
    else:
        was = f"it was {printable(reply['was'])}" if reply.get("was") else "only tasks on it were known here"
        sys.stdout.write(f"{printable(reply.get('node', ''))} is forgotten; {was}\n")
    return 0


def revoke(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "revoke",
        "Shut a node out: its certificate is revoked everywhere, its connections are closed, and the key that it knew is changed.\n"
        "For a machine that was lost or stolen. It can come back only by a new invitation.",
    )
    reader.add_argument("node", metavar="NODE")
    reader.switch("--force", help="even if no node of that name is known here")
    flags = reader.read(words)
    if not is_node_name(flags.node):
        what = f"revoke: {flags.node!r} is not a valid node name"
        raise UsageError(what, why=NODE_NAME_SAYS, hint="the nodes known here:  peerload nodes")
    with Client(flags.socket) as client:
        reply = client.call("revoke", node=flags.node, force=flags.force)
    if flags.json:
        print_json({key: reply.get(key) for key in ("node", "was", "told", "was_issuer")})
        return 0
    node, told = printable(str(reply.get("node"))), int(reply.get("told") or 0)
    sys.stdout.write(
        f"{node} is shut out; {told} other member{'' if told == 1 else 's'} told, the others learn it when they are back\n"
    )
    if reply.get("was_issuer"):
        say(
            f"{node} has the key of the cluster's CA: it can issue itself another certificate",
            "shut it out for good with a new cluster:  peerload cluster init DIR",
        )
    return 0
