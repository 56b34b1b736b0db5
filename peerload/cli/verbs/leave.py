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
        "Take this node out of its cluster: the others are told, my agent stops and forgets whom it knew.\n"
        "Refused while it has tasks of others or unfinished ones of its own; what would become of them is said.",
    )
    reader.switch("--force", help="leave all the same; what runs is not disturbed")
    flags = reader.read(words)
    with Client(flags.socket) as client:
        info = client.call("info")
        process = watch(info.get("pid"))
        try:
            for what in client.call("leave", force=flags.force).get("left_behind", ()):
                say(what)
        except AgentUnavailable:
            if process is None:
                raise  # nothing can tell whether it stops; else the wait below does
    if process is not None:
        await_end(process, f"the agent (pid {info['pid']})")
    if flags.json:
        print_json({"node": info.get("node"), "pid": info.get("pid")})
    else:
        node = printable(info.get("node", ""))
        sys.stdout.write(f"{node} has left; its agent stopped.  Back again:  peerload up --peer HOST:PORT\n")
    return 0


def forget(words: list[str]) -> int:
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


def revoke(words: list[str]) -> int:
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
