"""`peerload prio`: change the priority of tasks."""

from __future__ import annotations

import sys

from peerload.cli.common import options, selection
from peerload.cli.common.errors import CANNOT
from peerload.client.connection import Client
from peerload.text.format import print_json
from peerload.text.tasks import collapsed

PRIORITY_MAX = 1_000_000


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = options.Options(
        "prio", "Change the priority of waiting tasks: the greater goes first.", usage="[flags] N ID ..."
    )
    reader.add_argument("priority", type=options.whole(-PRIORITY_MAX, PRIORITY_MAX), metavar="N")
    selection.add(reader, changes=True)
    flags = reader.read(_with_number_first(words))
    chosen_by = selection.Selection(flags, "prio")
    with Client(flags.socket) as client:
        chosen = chosen_by.chosen(client, selection.UNFINISHED)
        if chosen is None:
            return CANNOT
        reply = selection.changed(client, "prio", chosen, priority=flags.priority)
    keys = ("changed", "passed_on", "elsewhere", "ended")
    changed, passed_on, elsewhere, ended = (reply.get(key, []) for key in keys)
    if flags.json:
        print_json({"priority": flags.priority} | {key: reply.get(key, []) for key in keys})
        return 0
    lines = [f"{line}  priority {flags.priority}\n" for line in collapsed(changed)]
    lines += [
        f"{line}  priority {flags.priority}; the node that has it queued is told\n" for line in collapsed(passed_on)
    ]
    lines += [
        f"{line}  is started already: priority {flags.priority} counts only if it is queued again\n"
        for line in collapsed(elsewhere)
    ]
    lines += [f"{line}  has ended\n" for line in collapsed(ended)]
    sys.stdout.write("".join(lines))
    return 0


def _with_number_first(words: list[str]) -> list[str]:
    """``-5 3`` as ``-- -5 3``, lest a priority below 0 be taken for a flag."""
    for index, word in enumerate(words):
        if word[:1] == "-" and word[1:].isdecimal():
            return [*words[:index], "--", *words[index:]]
    return words
