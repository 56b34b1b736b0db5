"""Which way a message goes, and what is kept of those that speak over MQTT."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from peerload.agent.mqtt_inbox import SOURCES_MAX
from peerload.agent.perform import Performer
from peerload.model import actions
from peerload.model.load import LoadReport
from peerload.model.messages import Envelope, Message, ProbeReply

ADVICE = ProbeReply(1, accepts=True, report=LoadReport())


class Ways:
    """What was sent, and which way."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []
        parts = SimpleNamespace(
            bus=SimpleNamespace(send=self._bus),
            links=SimpleNamespace(
                send=lambda dst, _message: self.sent.append(("link", dst)), forget=lambda _node: None
            ),
            release=SimpleNamespace(outward=lambda do: do()),
            config=SimpleNamespace(node="x"),
            counters=Counter(),
        )
        self.performer = Performer(cast("Any", parts))

    def _bus(self, dst: str, _boot: str, _message: Message) -> bool:
        self.sent.append(("bus", dst))
        return True

    def heard(self, node: str) -> None:
        self.performer.heard_on_bus(Envelope(1, "default", node, f"{node}-boot", 1, ADVICE))

    def way(self, dst: str) -> str:
        self.performer.perform([actions.Send(dst, ADVICE)])
        way, to = self.sent.pop()
        assert to == dst
        return way


def test_only_so_many_are_remembered_to_be_on_mqtt_and_those_heard_last() -> None:
    ways = Ways()
    for number in range(SOURCES_MAX):
        ways.heard(f"n{number}")
    ways.heard("n0")
    ways.heard("late")
    assert [ways.way(node) for node in ("n0", "n1", "n2", "late")] == ["bus", "link", "bus", "bus"]


def test_a_peer_that_is_forgotten_is_forgotten_there_too() -> None:
    ways = Ways()
    ways.heard("y")
    ways.performer.perform([actions.ForgetPeer("y")])
    assert ways.way("y") == "link"
