"""`peerload drain`: have this node take no more tasks."""

from __future__ import annotations

import sys

from peerload.cli.main import UsageError
from peerload.cli.options import Options, duration
from peerload.cli.text import counted, print_json, say
from peerload.client import Client

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TIMED_OUT = 124


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "drain",
        "Have this node take no more tasks, also after a restart: what waits here for other nodes goes back to them, what\n"
        "waits of its own looks for a place elsewhere, what runs runs on.",
    )
    reader.flag("--reason", default="", metavar="TEXT", help="why, for those who ask")
    reader.switch(
        "--wait", help="return when nothing runs here any more, and other nodes have the results of their tasks"
    )
    reader.flag("--timeout", type=duration, metavar="30s", help="with --wait: no longer than this; exit code 124 then")
    flags = reader.read(words)
    if flags.timeout is not None and not flags.wait:
        raise UsageError("drain: --timeout is for --wait", hint="peerload drain --wait --timeout 30s")
    with Client(flags.socket) as client:
        if not flags.wait:
            _show(client.call("drain", reason=flags.reason), as_json=flags.json)
            return 0
        for part in client.stream("drain", reason=flags.reason, wait=True, timeout_s=flags.timeout):
            _show(part, as_json=flags.json)
        timed_out = bool(client.last.get("timed_out"))
    if timed_out:
        say(f"not empty within {flags.timeout:g} s", "it stays drained; what runs here:  peerload top --once")
        return TIMED_OUT
    if not flags.json:
        sys.stdout.write("nothing runs here any more\n")
    return 0


def _show(reply: dict[str, Any], *, as_json: bool) -> None:
    returned, running = int(reply.get("returned", 0)), int(reply.get("running", 0))
    if as_json:
        print_json({"returned": returned, "running": running})
        return
    sys.stdout.write(
        f"drained: {counted(returned, 'task')} of other nodes went back, {counted(running, 'task')} still running here\n"
        "  back again:  peerload undrain\n"
    )
    sys.stdout.flush()
