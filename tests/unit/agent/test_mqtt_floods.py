"""Publishers that flood a broker."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from peerload.agent.mqtt import FLOOD_MAX, MUTED_S, PUBLISHERS_MAX, WINDOW_S, FloodFilter, Received
from peerload.model import metrics
from tests.support import security_events


class Floods:
    """A filter, its clock, and what it has reported."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.counters: Counter[str] = Counter()
        self.security = security_events(self.counters)
        self.filter = FloodFilter(self.security, "own")

    @property
    def reported(self) -> list[tuple[str, str]]:
        return list(self.security._culprits)

    def window(self, name: str, new: int, old: int) -> bool:
        """So many messages, then the first one of the next window → whether that is admitted."""
        for number in range(new + old):
            if self.filter.admits(name, self.now_s) and number < new:
                self.filter.count_new(name)
        self.now_s += WINDOW_S
        return self.filter.admits(name, self.now_s)


@pytest.mark.rule("P2")
def test_who_floods_is_muted_for_a_minute_and_no_other() -> None:
    floods = Floods()
    assert not floods.window("m", 0, 10 * FLOOD_MAX)
    assert floods.reported == [("P2", "m")]
    assert floods.window("a", 5, 5)
    assert not floods.window("m", 0, 10 * FLOOD_MAX), "it goes on"
    assert floods.counters[metrics.MQTT_PUBLISHERS_MUTED] == 1, "it is reported once"
    floods.now_s += MUTED_S
    assert floods.filter.admits("m", floods.now_s)


def test_what_is_new_is_no_flood_and_little_is_none() -> None:
    floods = Floods()
    assert floods.window("a", 10 * FLOOD_MAX, FLOOD_MAX)
    assert floods.window("b", 0, FLOOD_MAX - 1)
    assert floods.reported == []


@pytest.mark.rule("P2")
def test_what_a_node_has_sent_to_all_is_no_flood_when_it_comes_back() -> None:
    floods = Floods()
    assert floods.window("own", 0, 10 * FLOOD_MAX)
    assert floods.reported == []


def test_publishers_without_number_are_bounded() -> None:
    floods = Floods()
    for number in range(2 * PUBLISHERS_MAX):
        floods.filter.admits(f"n{number}", floods.now_s)
    assert len(floods.filter._publishers) == PUBLISHERS_MAX


@pytest.mark.rule("P2")
def test_what_a_muted_publisher_says_is_dropped_before_it_is_looked_at() -> None:
    floods = Floods()
    floods.now_s = time.monotonic() - WINDOW_S
    assert not floods.window("m", 0, FLOOD_MAX)
    queue: Any = Received(floods.counters, floods.filter)
    for publisher, retain in (("m", False), ("a", False), ("m", True)):
        topic = f"peerload/c/s/{publisher}/to/me"
        queue.put_nowait(SimpleNamespace(topic=topic, payload=b"x", retain=retain))
    assert queue.qsize() == 2
    assert floods.counters['mqtt_messages_dropped_total{reason="publisher_muted"}'] == 1
