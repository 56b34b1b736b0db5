"""`peerload drain`: have this node take no more tasks."""

from __future__ import annotations

import sys

from peerload.cli.options import Options
from peerload.cli.text import counted, print_json
from peerload.client import Client


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "drain",
        "Have this node take no more tasks, also after a restart: what waits here for other nodes goes back to them, what\n"
        "waits of its own looks for a place elsewhere, what runs runs on.",
    )
    reader.flag("--reason", default="", metavar="TEXT", help="why, for those who ask")
    flags = reader.read(words)
    with Client(flags.socket) as client:
        reply = client.call("drain", reason=flags.reason)
    returned, running = int(reply.get("returned", 0)), int(reply.get("running", 0))
    if flags.json:
        print_json({"returned": returned, "running": running})
        return 0
    sys.stdout.write(
        f"drained: {counted(returned, 'task')} of other nodes went back, {counted(running, 'task')} still running here\n"
        "  back again:  peerload undrain\n"
    )
    return 0
