"""Carrying out actions: what is remembered of peers meanwhile has an end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from peerload.agent import perform
from peerload.agent.perform import Performer
from peerload.model import actions
from peerload.model.messages import Envelope, Footprint

ADVICE = Footprint(has_room=True)


class Made:
    """A performer, and by which way its advice leaves."""

    def __init__(self) -> None:
        self.ways: list[tuple[str, str]] = []
        bus = SimpleNamespace(send=lambda dst, _boot, _message: self._note(dst, "bus"))
        links = SimpleNamespace(send=lambda dst, _message: self._note(dst, "link"), forget=lambda _node: None)
        parts: Any = SimpleNamespace(bus=bus, links=links, counters={"advice over the peer link": 0})
        parts.config = SimpleNamespace(node="x")
        parts.release = SimpleNamespace(outward=lambda do: do())
        self.performer = Performer(parts)

    def _note(self, dst: str, way: str) -> bool:
        self.ways.append((dst, way))
        return True

    def hears(self, node: str) -> None:
        self.performer.heard_on_bus(Envelope(1, "c", node, f"{node}-boot", 1, ADVICE))

    def way_to(self, node: str) -> str:
        self.performer.perform([actions.Send(node, ADVICE)])
        return self.ways.pop()[1]


def test_that_a_peer_is_on_mqtt_is_remembered_of_the_last_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perform, "ON_BUS_MAX", 2)
    made = Made()
    for node in ("y", "z", "y", "a"):
        made.hears(node)
    assert [made.way_to(node) for node in ("y", "z", "a")] == ["bus", "link", "bus"]


def test_a_peer_that_is_forgotten_is_forgotten_there_too() -> None:
    made = Made()
    made.hears("y")
    made.performer.perform([actions.ForgetPeer("y")])
    assert made.way_to("y") == "link"
