"""`peerload prio`: change the priority of tasks."""

from __future__ import annotations

import sys

from peerload.cli import options
from peerload.cli.text import print_json, printable
from peerload.client import Client

PRIORITY_MAX = 1_000_000


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = options.Options(
        "prio", "Change the priority of waiting tasks: the greater goes first.", usage="[flags] N ID ..."
    )
    reader.add_argument("priority", type=options.whole(-PRIORITY_MAX, PRIORITY_MAX), metavar="N")
    reader.add_argument("task", nargs="+", metavar="ID")
    flags = reader.read(_with_number_first(words))
    with Client(flags.socket) as client:
        reply = client.call("prio", tasks=flags.task, priority=flags.priority)
    keys = ("changed", "passed_on", "elsewhere", "ended")
    changed, passed_on, elsewhere, ended = (reply.get(key, []) for key in keys)
    if flags.json:
        print_json({"priority": flags.priority} | {key: reply.get(key, []) for key in keys})
        return 0
    lines = [f"{printable(task)}  priority {flags.priority}\n" for task in changed]
    lines += [
        f"{printable(task)}  priority {flags.priority}; the node that has it queued is told\n" for task in passed_on
    ]
    lines += [
        f"{printable(task)}  is started already: priority {flags.priority} counts only if it is queued again\n"
        for task in elsewhere
    ]
    lines += [f"{printable(task)}  has ended\n" for task in ended]
    sys.stdout.write("".join(lines))
    return 0


def _with_number_first(words: list[str]) -> list[str]:
    """``-5 3`` as ``-- -5 3``, lest a priority below 0 be taken for a flag."""
    for index, word in enumerate(words):
        if word[:1] == "-" and word[1:].isdecimal():
            return [*words[:index], "--", *words[index:]]
    return words
