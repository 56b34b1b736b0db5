"""When a broker brings what it has brought before, and when one publisher floods it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from peerload.agent.mqtt.loop_detector import (
    FLOOD_MAX,
    LEFT_ALONE_S,
    LOOK_EVERY_S,
    PUBLISHERS_MAX,
    REPEATS_MIN,
    LoopDetector,
)
from peerload.agent.mqtt.message_filter import Received

OWN = "me"


def heard(repeats: LoopDetector, new: int, old: int, *publishers: str) -> None:
    for publisher in publishers or ("a",):
        for number in range(new + old):
            if repeats.heard(publisher) and publisher != OWN:
                repeats.judged(publisher, is_new=number < new)


def test_a_circle_is_a_flood_of_what_is_old() -> None:
    repeats = LoopDetector(OWN)
    heard(repeats, 5, FLOOD_MAX // 4, "a", "b", "c", "d", OWN)
    assert repeats.look() == ([], True)
    assert repeats.look() == ([], False), "nothing has come since"
    heard(repeats, 0, FLOOD_MAX - 1)
    assert repeats.look() == ([], False), "that is not much"


def test_a_circle_that_brings_our_own_messages_is_no_publishers_fault() -> None:
    repeats = LoopDetector(OWN)
    heard(repeats, 0, FLOOD_MAX, "a", "b", OWN)
    assert repeats.look() == ([], True)


def test_states_that_replaced_one_another_unseen_count_as_what_came() -> None:
    repeats = LoopDetector(OWN)
    for number in range(FLOOD_MAX):
        repeats.heard(f"n{number % 10}")
    repeats.judged("n1", is_new=True)
    assert repeats.look() == ([], True)


@pytest.mark.rule("P2")
def test_who_floods_alone_is_muted_for_a_minute_and_the_broker_is_kept() -> None:
    repeats = LoopDetector(OWN)
    looks = int(LEFT_ALONE_S / LOOK_EVERY_S)
    heard(repeats, 20, 0, "a", "b", OWN)
    heard(repeats, 0, 10 * FLOOD_MAX, "m")
    assert repeats.look() == (["m"], False)
    assert not repeats.are_many, "that is no second bridge"
    for _ in range(2):
        heard(repeats, 0, 10 * FLOOD_MAX, "m")
        assert repeats.look() == ([], False), "it goes on, and is told of once"
    for _ in range(looks):
        assert not repeats.heard("m")
        assert repeats.heard("a")
        assert repeats.look() == ([], False)
    assert repeats.heard("m")


def test_what_is_new_is_no_flood() -> None:
    repeats = LoopDetector(OWN)
    heard(repeats, 10 * FLOOD_MAX, FLOOD_MAX)
    assert repeats.look() == ([], False)
    assert not repeats.are_many


def test_two_bridges_between_two_brokers_are_worth_a_word() -> None:
    repeats = LoopDetector(OWN)
    heard(repeats, REPEATS_MIN - 1, REPEATS_MIN - 1)
    assert not repeats.are_many
    heard(repeats, 1, 1)
    assert repeats.are_many
    assert repeats.look() == ([], False)


def test_publishers_without_number_are_counted_together() -> None:
    repeats = LoopDetector(OWN)
    for number in range(2 * PUBLISHERS_MAX):
        repeats.heard(f"n{number}")
    assert len(repeats._publishers) <= PUBLISHERS_MAX + 1
    assert repeats.look() == ([], True)


@pytest.mark.rule("P2")
def test_what_a_muted_publisher_says_is_dropped_before_it_is_looked_at() -> None:
    repeats, counters = LoopDetector(OWN), Counter[str]()
    queue: Received[Any] = Received(counters, repeats)
    heard(repeats, 0, FLOOD_MAX, "m")
    repeats.look()
    for publisher, retain in (("m", False), ("a", False), ("m", True)):
        topic = f"peerload/c/s/{publisher}/to/me"
        queue.put_nowait(SimpleNamespace(topic=topic, payload=b"x", retain=retain))
    assert queue.qsize() == 2
    assert counters["mqtt dropped: its publisher floods"] == 1
