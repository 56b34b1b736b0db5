"""`peerload cancel`: stop tasks."""

from __future__ import annotations

import sys

from peerload.cli.options import Options, signal_number
from peerload.cli.text import counted, print_json, printable
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
    lines = [f"{line}  cancelled\n" for line in _told(cancelled)]
    lines += [f"{line}  had already ended\n" for line in _told(already)]
    sys.stdout.write("".join(lines))
    return 0


def _told(tasks: list[str]) -> list[str]:
    """The names of tasks; members of the same array as one line that tells how many."""
    members: dict[str, list[str]] = {}
    for task in tasks:
        members.setdefault(_array_of(task), []).append(task)
    return [
        printable(of[0]) if len(of) == 1 else f"{printable(array)}  {counted(len(of), 'task')}"
        for array, of in members.items()
    ]


def _array_of(task: str) -> str:
    """`ws1/42` for `ws1/42.7`, and for itself; the name of a node may have dots, too."""
    node, slash, number = task.rpartition("/")
    return node + slash + number.partition(".")[0]
