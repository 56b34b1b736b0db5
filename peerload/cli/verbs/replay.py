"""`peerload replay`: does an agent's recording come out the same again?"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

from peerload import __version__
from peerload.cli.common.options import Options
from peerload.cli.common.replay_nodes import Replay, replays, shown
from peerload.model.errors import BadMessage, PeerloadError
from peerload.model.text import printable
from peerload.text.format import print_json, say
from peerload.wire import recording

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DIFFERS = 1
"""Exit code: something was decided otherwise."""


def main(words: list[str]) -> int:
    """Run the verb: 0 if every action was decided again, 1 if not."""
    reader = Options(
        "replay",
        "Decide again what an agent decided that ran with --record, and compare every action, byte for byte.",
        usage="[--events] FILE",
        json_says="print JSON, one object for each start of the agent",
    )
    reader.add_argument("file", metavar="FILE")
    reader.switch("--events", help="print every event with its actions, one JSON object a line, and compare nothing")
    flags = reader.read(words)
    try:
        with _mapped(flags.file) as data, memoryview(data) as view:
            return _print_events(view) if flags.events else _compare(view, as_json=flags.json)
    except BadMessage as error:
        raise PeerloadError(f"{flags.file}: {error}", hint="one is written by:  peerload agent --record FILE") from None


def _mapped(path: str) -> mmap.mmap:
    """The file's bytes, without reading them all. Raises PeerloadError."""
    try:
        with Path(path).open("rb") as file:
            if file.seek(0, 2):
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise PeerloadError(
            f"{path} cannot be read",
            why=getattr(error, "strerror", None) or str(error),
            hint="record one:  peerload up --record FILE",
        ) from None
    raise BadMessage("not a recording", why="it is empty")


def _print_events(view: memoryview) -> int:
    start = number = 0
    for entry in recording.entries(view):
        if isinstance(entry, recording.Started):
            start, number = start + 1, 0
        elif isinstance(entry, recording.Handled):
            number += 1
            told: dict[str, Any] = {
                "start": start,
                "number": number,
                "at": entry.now.wall_s,
                "boot_s": entry.now.boot_s,
            }
            told["event"] = shown(recording.plain(entry.event))
            told["actions"] = shown(recording.plain(entry.actions))
            print_json(told | {"failure": entry.failure or None})
    return 0


def _compare(view: memoryview, *, as_json: bool) -> int:
    code = 0
    count = 0
    for replay in replays(recording.entries(view)):
        count += 1
        code = DIFFERS if replay.difference is not None else code
        if as_json:
            print_json(_told(replay))
        else:
            sys.stdout.write("".join(f"{line}\n" for line in _lines(count, replay)))
    if not count:
        say("nothing is recorded yet")
    return code


def _told(replay: Replay) -> dict[str, Any]:
    started = replay.started
    return {
        "node": started.identity.node,
        "incarnation": started.identity.incarnation,
        "policy": started.preset,
        "version": started.version,
        "events": replay.seen,
        "events_agreed": replay.events,
        "actions_agreed": replay.actions,
        "ended": replay.ended,
        "difference": replay.difference,
    }


def _lines(number: int, replay: Replay) -> list[str]:
    started, difference = replay.started, replay.difference
    lines = [
        f"start {number}: node {started.identity.node}, preset {started.preset}, {replay.seen} events; {replay.ended}",
        f"  {replay.events} events with {replay.actions} actions decided again, byte for byte",
    ]
    if difference is not None:
        lines += [
            f"  DIFFERENT at event {difference['event_number']}, action {difference['action_number']}:",
            f"    event     {difference['event']}",
            f"    recorded  {difference['recorded']}",
            f"    replayed  {difference['replayed']}",
        ]
        if started.version != __version__:
            lines.append(f"  recorded by peerload {started.version}; this is {__version__}")
    return [printable(line) for line in lines]
