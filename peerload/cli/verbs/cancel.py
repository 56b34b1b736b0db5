"""`peerload cancel`: stop tasks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from peerload.cli.common import selection
from peerload.cli.common.errors import CANNOT, TIMED_OUT
from peerload.cli.common.options import Options, signal_number
from peerload.client.connection import Client
from peerload.model.errors import UsageError
from peerload.text.format import counted, print_json, say
from peerload.text.tasks import collapsed
from peerload.text.units import duration

if TYPE_CHECKING:
    from argparse import Namespace


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "cancel",
        "Stop tasks: waiting ones never start, running ones get TERM and, 10 s later, KILL.\n"
        "With --wait the exit code is 124 if the timeout ended before all processes were gone.",
    )
    selection.add(reader, changes=True)
    reader.flag("--signal", type=signal_number, default=15, metavar="NAME", help="the first signal (default TERM)")
    reader.switch("--force", help="KILL at once")
    reader.switch(
        "--remote",
        help="tasks of other homes on this node: waiting ones go back to their homes, running ones are stopped",
    )
    reader.switch("--wait", help="return when their processes are gone, wherever they ran")
    reader.flag("--timeout", type=duration, metavar="30s", help="with --wait: no longer than this")
    flags = reader.read(words)
    if flags.timeout is not None and not flags.wait:
        raise UsageError("cancel: --timeout is for --wait", hint="peerload cancel --wait --timeout 30s ID")
    if flags.remote and flags.wait:
        raise UsageError("cancel: --remote does not wait", hint="what is still here:  peerload ls --remote")
    chosen_by = selection.Selection(flags, "cancel")
    if flags.remote and not chosen_by.is_plain:
        raise UsageError("cancel: --remote takes the ids of tasks alone", hint="which there are:  peerload ls --remote")
    asked = {"signal": flags.signal, "force": flags.force}
    with Client(flags.socket) as client:
        chosen = chosen_by.references(client, selection.UNFINISHED)
        if chosen is None:
            return CANNOT
        if flags.wait:
            return _wait(client, flags, chosen, asked)
        if flags.remote:
            reply = client.call("cancel_remote", guests=chosen, **asked)
        else:
            reply = selection.changed(client, "cancel", chosen, **asked)
    cancelled, already = reply.get("cancelled", []), reply.get("already_ended", [])
    if flags.json:
        print_json({"cancelled": cancelled, "already_ended": already})
    else:
        _show(cancelled, already)
    return 0


def _wait(client: Client, flags: Namespace, chosen: list[str], asked: dict[str, Any]) -> int:
    return max([_wait_for(client, flags, part, asked) for part in selection.batches(chosen)], default=0)


def _wait_for(client: Client, flags: Namespace, refs: list[str], asked: dict[str, Any]) -> int:
    cancelled: list[str] = []
    already: list[str] = []
    is_shown = flags.json
    for part in client.stream("cancel", tasks=refs, wait=True, timeout_s=flags.timeout, **asked):
        cancelled += part.get("cancelled", ())
        already += part.get("already_ended", ())
        if part.get("waits_for") and not is_shown:
            _show(cancelled, already)
            is_shown = True
        for node in part.get("waits_for", ()):
            _say_waiting(node)
    if not is_shown:
        _show(cancelled, already)
    left = client.last.get("left", [])
    if flags.json:
        print_json({"cancelled": cancelled, "already_ended": already, "left": left})
    if not client.last.get("timed_out"):
        return 0
    say(
        f"cancelled, but not gone within {flags.timeout:g} s: {', '.join(map(str, left))}",
        "they are still being ended; see on their nodes",
    )
    return TIMED_OUT


def _say_waiting(waits_for: dict[str, Any]) -> None:
    """Say which node has not confirmed that the processes are gone."""
    node, state = waits_for.get("node"), waits_for.get("state")
    what = (
        f"cancelled; waiting for the processes of {counted(int(waits_for.get('tasks') or 0), 'task')} at {node} to end"
    )
    if state in ("alive", None):
        say(what)
    else:
        say(
            f"{what}, which is {state}",
            f"they end when it is reachable again; if it is gone for good:  peerload forget {node}",
        )


def _show(cancelled: list[str], already: list[str]) -> None:
    lines = [f"{line}  cancelled\n" for line in collapsed(cancelled)]
    lines += [f"{line}  had already ended\n" for line in collapsed(already)]
    sys.stdout.write("".join(lines))
    sys.stdout.flush()
