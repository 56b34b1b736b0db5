"""Decides a recording again: the same node, the same events, and are the same actions decided, byte for byte?"""

from __future__ import annotations

import random

from peerload.core.node import Node
from peerload.policy import registry
from peerload.wire import recording

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

UIDS = ("uid", "digest")
BROKEN_OFF = "it breaks off: the agent was killed, or still runs"


class Replay:
    """One start of an agent. events, actions: how many were decided alike; ended: why nothing follows; difference:
    the first one, after which nothing of this start is compared, or None."""

    def __init__(self, started: recording.Started) -> None:
        self.started = started
        self.events = 0
        self.actions = 0
        self.seen = 0
        self.ended = BROKEN_OFF
        self.difference: dict[str, Any] | None = None
        self._node: Node | None = None

    def follow(self, handled: recording.Handled) -> None:
        """Decide on one event again. Raises ConfigError if the node's policies are not to be had any more, BadMessage
        for an event that nobody recorded."""
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
        except Exception as error:  # noqa: BLE001 -- a recorded bug is to happen again, a new one to be shown
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
    """Each start in a recording, when it is through. Raises as `Replay.follow`, and BadMessage for a damaged file."""
    replay: Replay | None = None
    for entry in entries:
        match entry:
            case recording.Started():
                if replay is not None:
                    yield replay
                replay = Replay(entry)
            case recording.Handled() if replay is not None:
                replay.follow(entry)
            case recording.Ended() if replay is not None:
                replay.ended = entry.reason
    if replay is not None:
        yield replay


def _made(started: recording.Started) -> Node:
    preset = registry.PresetSource(started.preset, started.preset_text, base=started.preset_directory)
    policies = registry.build_preset(*preset.tables())
    chance = random.Random(int(started.seed, 16))  # noqa: S311 -- the chance that the agent had
    return Node(started.config, policies, started.identity, started.profile, chance)


def _first_difference(was: list[Any], now: list[Any], was_failure: str, failure: str) -> dict[str, Any]:
    """The first action that is not the same (2 and 2.0 are not): its number, as it was and as it is now; None where
    there is none."""
    pairs = enumerate(zip(map(recording.encode_plain, was), map(recording.encode_plain, now), strict=False))
    number = next((index for index, (old, new) in pairs if old != new), min(len(was), len(now)))
    return {
        "action_number": number + 1,
        "recorded": was_failure or (shown(was[number]) if number < len(was) else None),
        "replayed": failure or (shown(now[number]) if number < len(now) else None),
    }


def shown(value: Any, key: str = "") -> Any:  # noqa: ANN401 -- any part of a recording
    """A part of a recording for people: bytes as text where they are text, identifiers in hexadecimal, and of a task's
    environment, which may hold secrets, its size alone."""
    if isinstance(value, dict):
        return {name: shown(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [shown(inner, key) for inner in value]
    if not isinstance(value, bytes):
        return value
    if key == "environment":
        return f"{len(value)} bytes"
    return value.hex() if key in UIDS else value.decode("utf-8", "backslashreplace")
