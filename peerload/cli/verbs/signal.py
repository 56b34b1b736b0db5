"""`peerload signal`: send a signal to running tasks."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from peerload.cli.common import selection
from peerload.cli.common.errors import CANNOT
from peerload.cli.common.options import Options, signal_number
from peerload.client.connection import Client
from peerload.model.errors import UsageError
from peerload.model.text import printable
from peerload.text.format import print_json, say
from peerload.text.tasks import collapsed

if TYPE_CHECKING:
    from collections.abc import Sequence

RUNNING = ("running",)
SENT_MAX = 64
"""Bound of unanswered requests."""
TASKS_MAX = 100_000
"""Bound of tasks in one answer, from peerload.wire.control."""


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "signal",
        "Send a signal, such as USR1 or 12, to the processes of running tasks, wherever they run. If a task ends by it, that is its\n"
        "result; to stop a task:  peerload cancel.  Exit code 125 if a named task does not run.",
        usage="[flags] SIGNAL ID ...",
    )
    reader.add_argument("signal", nargs="?", metavar="SIGNAL")
    selection.add(reader, changes=True, has_state=False)
    flags = reader.read(words)
    number = _number(flags.signal)
    chosen_by = selection.Selection(flags, "signal")
    with Client(flags.socket) as client:
        chosen = chosen_by.references(client, RUNNING)
        if not chosen:
            return CANNOT
        running, others = _running(client, chosen, are_named=bool(chosen_by.words))
        refused = _sent(client, [str(task["id"]) for task in running], number)
    signalled = [str(task["id"]) for task in running if str(task["id"]) not in refused]
    unsure = {str(task["id"]): str(task["node"]) for task in running if task.get("unreachable_since")}
    if flags.json:
        print_json(
            {"signal": number, "signalled": signalled, "not_running": [*others, *refused], "unreachable": [*unsure]}
        )
    else:
        sys.stdout.write("".join(f"{line}  signalled\n" for line in collapsed(signalled)))
        sys.stdout.flush()
    for task, why in (others | refused).items():
        say(f"{printable(task)}: {printable(why)}", f"more:  peerload show {printable(task)}")
    for task, node in unsure.items():
        say(f"{task}: {node} does not answer; the signal may not have arrived", "peerload nodes")
    return CANNOT if others or refused or unsure else 0


def _number(word: str | None) -> int:
    """The number of the signal. Raises UsageError."""
    hint = "peerload signal USR1 42"
    if word is None:
        raise UsageError("signal: the signal is missing", hint=hint)
    try:
        return signal_number(word)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"signal: {error}", why="the signal comes before the tasks", hint=hint) from None


def _running(client: Client, refs: Sequence[str], *, are_named: bool) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The running tasks among these; and the named ones that do not run, each with its state. Raises NoSuchTask."""
    running: dict[str, dict[str, Any]] = {}
    others: dict[str, str] = {}
    for part in [[ref] for ref in refs] if are_named else selection.batches(refs):
        found = client.call("tasks", tasks=part, states=RUNNING, limit=TASKS_MAX)["tasks"]
        running |= {str(task["id"]): task for task in found}
        if are_named and not found:
            shown = client.call("show", tasks=part)["tasks"]
            state = f"it is {shown[0]['state']}" if len(shown) == 1 else f"none of its {len(shown)} members is running"
            others[part[0]] = f"{state} and gets no signal"
    return list(running.values()), others


def _sent(client: Client, tasks: Sequence[str], number: int) -> dict[str, str]:
    """Send the signal to each task → those that did not get it, with the reason."""
    refused: dict[str, str] = {}
    asked: dict[int, str] = {}
    left = list(reversed(tasks))
    while left or asked:
        if left and len(asked) < SENT_MAX:
            task = left.pop()
            asked[client.send("signal", task=task, signal=number)] = task
            continue
        request, kind, body = client.receive()
        named = asked.pop(request, None)
        if named is not None and kind == "error":
            refused[named] = str(body.get("what") or "refused")
    return refused
