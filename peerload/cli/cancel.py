"""`peerload cancel`: stop tasks."""

from __future__ import annotations

import sys

from peerload.cli.options import Options, signal_number
from peerload.cli.text import print_json, printable
from peerload.client import Client


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options("cancel", "Stop tasks: waiting ones never start, running ones get TERM and, 10 s later, KILL.")
    reader.add_argument("task", nargs="+", metavar="ID")
    reader.flag("--signal", type=signal_number, default=15, metavar="NAME", help="the first signal (default TERM)")
    reader.switch("--force", help="KILL at once")
    flags = reader.read(words)
    with Client(flags.socket) as client:
        reply = client.call("cancel", tasks=flags.task, signal=flags.signal, force=flags.force)
    cancelled, already = reply.get("cancelled", []), reply.get("already_ended", [])
    if flags.json:
        print_json({"cancelled": cancelled, "already_ended": already})
        return 0
    lines = [f"{printable(task)}  cancelled\n" for task in cancelled]
    lines += [f"{printable(task)}  had already ended\n" for task in already]
    sys.stdout.write("".join(lines))
    return 0
