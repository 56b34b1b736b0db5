"""`peerload replay`: decide the events of an agent's recording again, and compare the actions byte for byte."""

from __future__ import annotations

import mmap
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerload import __version__
from peerload.cli.common.options import Options
from peerload.core.node import Node
from peerload.model.errors import BadMessage, PeerloadError
from peerload.model.text import printable
from peerload.policy import registry
from peerload.text.format import print_json, print_result, say
from peerload.wire import recording

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DIFFERS = 1
"""Exit code: a decision differs from the recording."""


def main(words: list[str]) -> int:
    """Run the verb → 0 if all actions are the same as recorded, 1 if not."""
    reader = Options(
        "replay",
        "Repeat the decisions of an agent that ran with --record, and compare every action, byte for byte.",
        usage="[--events] FILE",
        json_says="print JSON, one object for each start of the agent",
    )
    reader.add_argument("file", metavar="FILE")
    reader.switch("--events", help="print every event with its actions, one JSON object a line, without comparing")
    flags = reader.read(words)
    try:
        with _mapped(flags.file) as data, memoryview(data) as view:
            return _print_events(view) if flags.events else _compare(view, as_json=flags.json)
    except BadMessage as error:
        raise PeerloadError(f"{flags.file}: {error}", hint="one is written by:  peerload agent --record FILE") from None


def _mapped(path: str) -> mmap.mmap:
    """The file mapped into memory. Raises PeerloadError."""
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
        print_result(_to_json(replay), _lines(count, replay), as_json=as_json)
    if not count:
        say("nothing is recorded yet")
    return code


def _to_json(replay: Replay) -> dict[str, Any]:
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


UIDS = ("uid", "digest")
BROKEN_OFF = "incomplete: the agent was killed, or still runs"


class Replay:
    """Replay of one start of an agent. events, actions: how many have the same result; ended: why the recording of this start ends;
    difference: the first difference, after which nothing is compared, or None."""

    def __init__(self, started: recording.Started) -> None:
        self.started = started
        self.events = 0
        self.actions = 0
        self.seen = 0
        self.ended = BROKEN_OFF
        self.difference: dict[str, Any] | None = None
        self._node: Node | None = None

    def follow(self, handled: recording.Handled) -> None:
        """Handle one event again. Raises ConfigError if the node's policies no longer exist, BadMessage for a malformed event."""
        self.seen += 1
        if self.difference is not None:
            return
        if self._node is None:
            self._node = _made(self.started)
        event = recording.decode_event(handled.event)
        failure = ""
        raw = b""
        try:
            raw = recording.encode_actions(self._node.handle(handled.now, event))
        except Exception as error:  # noqa: BLE001 -- a recorded exception is expected again, a new one is shown
            failure, raw = repr(error), recording.encode_actions(())
        if raw == bytes(handled.actions) and failure == handled.failure:
            self.events += 1
            self.actions += len(recording.plain(raw))
            return
        self.difference = {
            "event_number": self.seen,
            "at": handled.now.wall_s,
            "event": shown(recording.plain(handled.event)),
            **_first_difference(recording.plain(handled.actions), recording.plain(raw), handled.failure, failure),
        }


def replays(entries: Iterable[recording.Entry]) -> Iterator[Replay]:
    """Yield the replay of each start in a recording. Raises the errors of `Replay.follow`, and BadMessage for a damaged file."""
    replay: Replay | None = None
    for entry in entries:
        match entry:
            case recording.Started():
                if replay is not None:
                    yield replay
                replay = Replay(entry)
            case recording.Handled() if replay is not None:
                replay.follow(entry)
            case recording.RecordingEnd() if replay is not None:
                replay.ended = entry.reason
    if replay is not None:
        yield replay


def _made(started: recording.Started) -> Node:
    preset = registry.PresetSource(started.preset, started.preset_text, base=started.preset_directory)
    policies = registry.build_preset(*preset.tables())
    chance = random.Random(int(started.seed, 16))  # noqa: S311 -- the seed of the agent
    return Node(started.config, policies, started.identity, started.profile, chance)


def _first_difference(was: list[Any], now: list[Any], was_failure: str, failure: str) -> dict[str, Any]:
    """The first action that differs (2 and 2.0 do): its number, the recorded action, and the new one; None where one is missing."""
    pairs = enumerate(zip(map(recording.encode_plain, was), map(recording.encode_plain, now), strict=False))
    number = next((index for index, (old, new) in pairs if old != new), min(len(was), len(now)))
    return {
        "action_number": number + 1,
        "recorded": was_failure or (shown(was[number]) if number < len(was) else None),
        "replayed": failure or (shown(now[number]) if number < len(now) else None),
    }


def shown(value: Any, key: str = "") -> Any:  # noqa: ANN401 -- any part of a recording
    """A part of a recording for people: bytes as text, identifiers in hexadecimal, and only the size of a task's environment, which may
    contain secrets."""
    if isinstance(value, dict):
        return {name: shown(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [shown(inner, key) for inner in value]
    if not isinstance(value, bytes):
        return value
    if key == "environment":
        return f"{len(value)} bytes"
    return value.hex() if key in UIDS else value.decode("utf-8", "backslashreplace")
