"""`peerload retry`: queue what a task was to run once more, as a new task."""

from __future__ import annotations

import os
import sys

from peerload.cli import command
from peerload.cli.options import Options
from peerload.cli.text import print_json, printable
from peerload.client import Client

TOKEN_BYTES = 16


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "retry",
        "Queue what a task was to run once more, as a new task with an id of its own. It must have ended, or be unknown.\n"
        "Of an array those members that have not succeeded are queued.",
        json_says="one object a task",
    )
    reader.add_argument("task", nargs="+", metavar="ID")
    reader.switch("--all", help="of an array all members that have ended, also those that succeeded")
    flags = reader.read(words)
    with Client(flags.socket) as client:
        for task in flags.task:
            reply = client.call("retry", token=os.urandom(TOKEN_BYTES).hex(), task=task, all=flags.all)
            members = reply.get("members")
            if flags.json:
                print_json(
                    {"id": reply["id"], "retry_of": reply.get("retry_of")} | ({"members": members} if members else {})
                )
            else:
                sys.stdout.write(f"{printable(reply['id'])}\n")
                sys.stdout.flush()
            spec = {} if reply.get("directory_here") else client.call("show", tasks=[reply["id"]])["tasks"][0]
            command.warn_if_stranded(client, reply, spec)
    return 0
