"""`peerload submit`: queue a command and print its id."""

from __future__ import annotations

import sys

from peerload.cli.common import command
from peerload.client.connection import RECONNECT_S_MAX, AgentConnection
from peerload.model.errors import PeerloadError, UsageError
from peerload.model.text import printable
from peerload.text.format import counted, print_json, say, shortened
from peerload.text.units import invalid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

ARRAY_MEMBERS_MAX = 1_000_000
ARRAY_INDEX_MAX = 10**9
WHY_WIDTH_MAX = 120


def main(words: list[str]) -> int:
    reader = command.command_options(
        "submit",
        "Queue a command; it runs wherever there is room. Prints its id (on a terminal, a line about it).",
        usage="[flags] COMMAND ...",
        epilog="The flags end at the first word that is not a flag; the rest is the command.",
    )
    reader.flag("--array 1-100", help="one task for each number: 1-100, 0-9:3, 1,5,7 (PEERLOAD_ARRAY_INDEX)")
    reader.flag("--each-line FILE", help="one task for each line, which is {} in the command (- is stdin)")
    reader.flag(
        "--param K=V,… …",
        help="one task for each value, which is {K} in the command: a=1,2 or a=1-5; several: each combination (repeatable)",
    )
    reader.flag(
        "--param-file FILE …",
        help="the same from a CSV file: names in the first line, a combination in each other (- is stdin)",
    )
    reader.switch("--held", help="do not start it before  peerload release")
    reader.flag(
        "--token WORD",
        help="queue it only once, however often this is typed: the same word means the same task for 7 days",
        type=token,
    )
    flags, rest = reader.read_command(words)
    stands, hint = "nothing was submitted", ""
    try:
        ranges = array_ranges(flags.array) if flags.array is not None else []
        spec, secret = command.specification(flags, rest, "submit")
        each = _each(flags, spec)
        terms = command.terms(flags, "submit")
        found = command.prepare_files(flags, spec, terms)
        if flags.dry_run:
            shown = {"each": _shown(each)} if each else {}
            return command.print_dry_run(
                spec, secret, flags, array=ranges, **shown, **(command.described_files(found, spec) | terms)
            )
        with AgentConnection(flags.socket, room_s=RECONNECT_S_MAX) as client:
            command.say_left_out(secret)
            command.send_files(client, spec, terms, found)
            given = flags.token or command.new_token()
            stands, hint = command.NOT_KNOWN, command.repeat_hint(given)
            reply = command.submit(
                client,
                spec,
                terms,
                token=given,
                array=ranges,
                held=flags.held,
                wait_for_node=flags.wait_for_node,
                each=each,
            )
            stands, hint = f"{reply['id']} was submitted", f"to stop it:  peerload cancel {reply['id']}"
            try:
                _print_id(client, reply, spec, ranges, flags, is_each=bool(each))
            except OSError as error:
                if not isinstance(error, BrokenPipeError):
                    say(stands)  # the user needs its id
                raise
            command.warn_if_stranded(client, reply, spec)
    except KeyboardInterrupt:
        say(f"interrupted: {stands}", hint)
        raise
    return 0


def token(text: str) -> str:
    """A token that identifies one submission."""
    if (
        not command.TOKEN_LENGTH_MIN <= len(text) <= command.TOKEN_LENGTH_MAX
        or not text.isascii()
        or not text.isprintable()
    ):
        raise invalid(
            f"{text[:80]!r} is not a word of {command.TOKEN_LENGTH_MIN} to {command.TOKEN_LENGTH_MAX} printable ASCII characters"
        )
    return text


def _print_id(
    client: AgentConnection,
    reply: dict[str, Any],
    spec: dict[str, Any],
    ranges: list[tuple[int, int, int]],
    flags: Namespace,
    *,
    is_each: bool,
) -> None:
    members = reply.get("members")
    if flags.json:
        print_json({"id": reply["id"]} | ({"members": members} if members else {}))
    elif sys.stdout.isatty():
        task = printable(reply["id"])
        number = len(members) if isinstance(members, list) else members
        many = f"  {counted(number, 'task')}" if number else ""
        waits = (
            ""
            if flags.held or reply.get("placeable")
            else _why_it_waits(client, reply["id"], [(1, 1, 1)] if is_each else ranges)
        )
        stands = f"waiting: {printable(waits)}" if waits else "held" if flags.held else "queued"
        hint = f"why:  peerload why {task}" if waits else f"follow it:  peerload logs -f {task}"
        sys.stdout.write(f"{task}{many}  {printable(shortened(spec['name']))}  {stands}      {hint}\n")
    else:
        sys.stdout.write(f"{reply['id']}\n")
    sys.stdout.flush()


def _each(flags: Namespace, spec: dict[str, Any]) -> list[list[bytes]]:
    """The command line of each member; [] if they are the same."""
    if flags.param or flags.param_file:
        from peerload.cli.map.template import commands_of_parameters

        return commands_of_parameters(flags, spec)
    if flags.each_line is not None:
        from peerload.cli.map.template import commands_of_lines

        return commands_of_lines(flags, spec)
    return []


def _shown(each: list[list[bytes]]) -> list[str]:
    from peerload.cli.map.template import shown

    return [printable(shown(argv)) for argv in each]


def _why_it_waits(client: AgentConnection, task: str, ranges: list[tuple[int, int, int]]) -> str:
    """The reason in one line why the task just submitted, or the first member of the array, cannot start now; "" if it can."""
    first = f"{task}.{ranges[0][0]}" if ranges else task
    try:
        return shortened(str(client.call("why", task=first).get("summary") or ""), WHY_WIDTH_MAX)
    except PeerloadError:  # the task is submitted anyway
        return ""


def array_ranges(text: str) -> list[tuple[int, int, int]]:
    """The ranges (first, last, step) of ``1-100``, ``0-9:3`` and ``1,5,7``, with both ends included. Raises UsageError."""
    ranges = []
    for part in text.split(","):
        span, colon, step = part.partition(":")
        first, dash, last = span.partition("-")
        numbers = [first, last if dash else first, step if colon else "1"]
        if not all(number.isascii() and number.isdecimal() for number in numbers):
            raise UsageError(
                f"submit: --array {text!r} is not a range", hint="such as:  --array 1-100  or  0-9:3  or  1,5,7"
            )
        low, high, stride = map(int, numbers)
        if high < low or stride < 1 or high > ARRAY_INDEX_MAX:
            what = f"the end is over {ARRAY_INDEX_MAX}" if high >= low else "the start is greater than the end"
            what = what if stride else "the step is 0"
            raise UsageError(f"submit: --array {part!r}: {what}", hint="such as:  --array 1-100")
        ranges.append((low, high, stride))
    if sum((high - low) // stride + 1 for low, high, stride in ranges) > ARRAY_MEMBERS_MAX:
        raise UsageError(
            f"submit: --array {text!r} has more than {ARRAY_MEMBERS_MAX} members",
            hint=f"in parts:  --array 1-{ARRAY_MEMBERS_MAX}        and one more for the rest",
        )
    return ranges
