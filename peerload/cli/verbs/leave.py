"""`peerload leave`: take this node out of its cluster."""

from __future__ import annotations

import sys

from peerload.cli.common.agent_process import await_end, watch
from peerload.cli.common.options import Options
from peerload.client.connection import Client
from peerload.model.errors import AgentUnavailable
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
