"""A recording holds what was put in, may break off anywhere, and no bytes make reading it fail otherwise than it says."""

from __future__ import annotations

import random

import pytest

from peerload.core.node import Node
from peerload.model import actions, errors, events, timers
from peerload.model.config import CoreConfig
from peerload.model.errors import BadMessage
from peerload.model.events import Instant
from peerload.model.resources import Profile
from peerload.model.task import SCRATCH, TaskSpec
from peerload.policy import registry
from peerload.wire import recording
from tests.core.given import identity
from tests.wording import Says

NAME = "adaptive"


def begun() -> recording.Started:
    preset = registry.preset_source(NAME)
    return recording.Started(
        version="1",
        config=CoreConfig(),
        preset=preset.name,
        preset_text=preset.text,
        preset_directory="/",
        identity=identity("x"),
        profile=Profile("x", 1, 1.0, slots_fixed=True),
        seed="7",
    )


def lived(node: Node) -> bytes:
    """The recording of a short life."""
    told = recording.MAGIC + recording.encode(begun())
    spec = TaskSpec((b"true", b"\xff"), SCRATCH)
    life: list[events.Event] = [
        events.AgentStarted(),
        events.TaskSubmitted(1, "a", b"d", spec),
        events.TaskSubmitted(2, "a", b"another", spec),
        events.TimerExpired(timers.RenewalDue()),
        events.LoadSampled(0.5, 0.25, 1000),
        events.CancelRequested(3, ("x/1",)),
        events.AgentStopping(),
    ]
    for number, event in enumerate(life):
        now = Instant(10.0 + number, 1000.0 + number)
        told += recording.encode_handled(now, event, node.handle(now, event))
    return told + recording.encode(recording.RecordingEnd("the agent stopped"))


@pytest.fixture
def told() -> bytes:
    started = begun()
    policies = registry.load_preset(NAME)
    return lived(Node(started.config, policies, started.identity, started.profile, random.Random(7)))


def test_what_was_put_in_comes_out(told: bytes) -> None:
    first, *handled, last = recording.entries(memoryview(told))
    assert first == begun()
    assert last == recording.RecordingEnd("the agent stopped")
    kinds = [type(recording.decode_event(entry.event)) for entry in handled if isinstance(entry, recording.Handled)]
    assert kinds[:2] == [events.AgentStarted, events.TaskSubmitted]
    assert recording.whole_bytes(memoryview(told)) == len(told)


def test_every_event_has_a_name_of_its_own() -> None:
    kinds = events.Event.__args__
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds)


def test_an_error_is_told_in_full() -> None:
    error = errors.NeverRunnable("what", why="why", hint="hint")
    (plain,) = recording.plain(recording.encode_actions([actions.Answer(1, error=error)]))
    assert plain["error"] == {"error": "NeverRunnable", "what": "what", "why": "why", "hint": "hint"}


def test_it_may_break_off_anywhere(told: bytes) -> None:
    whole = list(recording.entries(memoryview(told)))
    for length in range(len(recording.MAGIC), len(told)):
        part = list(recording.entries(memoryview(told)[:length]))
        assert part == whole[: len(part)]
        assert recording.whole_bytes(memoryview(told)[:length]) <= length


@pytest.mark.parametrize("data", [b"", b"peerload", b"#!/bin/sh\necho no recording at all\n", b"\0" * 100])
def test_something_else_is_refused(data: bytes) -> None:
    with pytest.raises(BadMessage, match=Says.NOT_A_RECORDING()):
        list(recording.entries(memoryview(data)))


def test_another_version_is_refused(told: bytes) -> None:
    with pytest.raises(BadMessage, match="another version"):
        list(recording.entries(memoryview(told.replace(b"recording 1", b"recording 2", 1))))


def test_no_bytes_make_reading_fail_otherwise(told: bytes) -> None:
    rng = random.Random(1)
    for _ in range(2000):
        damaged = bytearray(told)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(recording.MAGIC), len(damaged))] = rng.randrange(256)
        try:
            for entry in recording.entries(memoryview(damaged)):
                if isinstance(entry, recording.Handled):
                    recording.decode_event(entry.event)
                    recording.plain(entry.actions)
        except BadMessage:
            continue
