"""`peerload submit`: queue a command and print its id."""

from __future__ import annotations

import sys

from peerload.cli import command
from peerload.cli.main import UsageError
from peerload.cli.text import print_json, printable, shortened
from peerload.client import Client
from peerload.model.errors import PeerloadError

ARRAY_MEMBERS_MAX = 1_000_000
ARRAY_INDEX_MAX = 10**9
WHY_WIDTH_MAX = 120


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = command.command_options(
        "submit",
        "Queue a command; it runs wherever there is room. Prints its id (on a terminal, a line about it).",
        usage="[flags] COMMAND ...",
        epilog="The flags end at the first word that is none; the rest is the command.",
    )
    reader.flag("--array", metavar="1-100", help="one task for each number: 1-100, 0-9:3, 1,5,7 (PEERLOAD_ARRAY_INDEX)")
    reader.switch("--held", help="keep it back until  peerload release")
    flags, rest = reader.read_command(words)
    ranges = array_ranges(flags.array) if flags.array is not None else []
    spec, secret = command.specification(flags, rest, "submit")
    if flags.dry_run:
        return command.print_dry_run(spec, secret, flags, array=ranges)
    with Client(flags.socket) as client:
        reply = command.submit(client, spec, secret, ranges, held=flags.held, waits_for_node=flags.wait_for_node)
        members = reply.get("members")
        if flags.json:
            print_json({"id": reply["id"]} | ({"members": members} if members else {}))
        elif sys.stdout.isatty():
            task = printable(reply["id"])
            many = f"  {len(members)} tasks" if isinstance(members, list) else f"  {members} tasks" if members else ""
            waits = "" if flags.held or reply.get("placeable") else _why_it_waits(client, reply["id"], ranges)
            stands = f"waiting: {printable(waits)}" if waits else "held" if flags.held else "queued"
            hint = f"why:  peerload why {task}" if waits else f"follow it:  peerload logs -f {task}"
            sys.stdout.write(f"{task}{many}  {printable(shortened(spec['name']))}  {stands}      {hint}\n")
        else:
            sys.stdout.write(f"{printable(reply['id'])}\n")
        sys.stdout.flush()
        command.warn_if_stranded(client, reply, spec)
    return 0


def _why_it_waits(client: Client, task: str, ranges: list[tuple[int, int, int]]) -> str:
    """Why the task just submitted, or the first of the array, cannot start now, in one line; "" if it can, or nobody
    tells."""
    first = f"{task}.{ranges[0][0]}" if ranges else task
    try:
        return shortened(str(client.call("why", task=first).get("summary") or ""), WHY_WIDTH_MAX)
    except PeerloadError:  # an agent of an earlier version: it was submitted all the same
        return ""


def array_ranges(text: str) -> list[tuple[int, int, int]]:
    """``1-100``, ``0-9:3`` (step) and ``1,5,7``, as (first, last, step) with both ends included."""
    ranges = []
    for part in text.split(","):
        span, colon, step = part.partition(":")
        first, dash, last = span.partition("-")
        numbers = [first, last if dash else first, step if colon else "1"]
        if not all(number.isascii() and number.isdecimal() for number in numbers):
            raise UsageError(
                f"submit: --array {text!r} is no range", hint="such as:  --array 1-100  or  0-9:3  or  1,5,7"
            )
        low, high, stride = map(int, numbers)
        if high < low or stride < 1 or high > ARRAY_INDEX_MAX:
            raise UsageError(f"submit: --array {part!r}: not from small to great, or over {ARRAY_INDEX_MAX}")
        ranges.append((low, high, stride))
    if sum((high - low) // stride + 1 for low, high, stride in ranges) > ARRAY_MEMBERS_MAX:
        raise UsageError(f"submit: --array {text!r} has more than {ARRAY_MEMBERS_MAX} members")
    return ranges
