"""How deep a message is, and how many values it has, is known before anything is made of it (rules L3, P1, S18)."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peerload.model.errors import BadMessage
from peerload.model.messages import Envelope, Unpair
from peerload.wire import control, frame, join, peer
from tests.wording import Says

DOORS = [
    control.decode_request,
    control.decode_answer,
    peer.decode_datagram,
    join.decode_newcomer,
    join.decode_node,
]


def nested(depth: int, inner: bytes = b"\xc0", outer: bytes = b"\x91") -> bytes:
    return outer * depth + inner


@pytest.mark.rule("L3", "P1", "S18")
@pytest.mark.parametrize(
    "outer", [b"\x91", b"\x81\xa1a", b"\xdc\x00\x01", b"\xdd\x00\x00\x00\x01", b"\xde\x00\x01\x01"]
)
def test_sixteen_within_one_another_and_no_more(outer: bytes) -> None:
    frame.check_bounds(nested(16, outer=outer), 1000)
    with pytest.raises(ValueError, match="more than 16 lists"):
        frame.check_bounds(nested(17, outer=outer), 1000)


@pytest.mark.rule("L3", "P1", "S18")
@pytest.mark.parametrize("decode", DOORS, ids=lambda decode: f"{decode.__module__}.{decode.__name__}")
def test_each_door_says_so(decode: Any) -> None:
    """Before anything else that is wrong, such as a field that nobody knows."""
    request = msgpack.packb({"id": 1, "verb": "info", "nobody knows it": "here"})
    if decode is control.decode_request:
        with pytest.raises(BadMessage, match=Says.UNKNOWN_FIELD()):
            decode(request.replace(b"\xa4here", nested(15)))
        deep = request.replace(b"\xa4here", nested(16))
    else:
        deep = nested(17)
    with pytest.raises(BadMessage) as told:
        decode(deep)
    assert Says.NESTED(16) in told.value.why


@pytest.mark.rule("P1", "S18")
@pytest.mark.parametrize("outer", [b"\x91", b"\x81\xa1a"])
def test_a_frame_of_a_peer_is_as_deep_as_its_types(outer: bytes) -> None:
    """What nobody knows is skipped, but not at any depth."""
    known = peer.encode(Envelope(1, "c", "n1", "b" * 32, 1, Unpair(1)))
    with_more = bytes((known[0] + 1,)) + known[1:] + b"\xa4more"
    assert peer.decode(with_more + nested(17, outer=outer)) == peer.decode(known)
    for deep in (
        nested(17, outer=outer),
        with_more + nested(2_000, outer=outer),
        with_more + nested(99_000, outer=outer),
    ):
        with pytest.raises(BadMessage):
            peer.decode(deep)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.binary(max_size=300)
    | st.text(),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=3), inner, max_size=20),
    max_leaves=60,
)


def measured(value: object) -> tuple[int, int]:
    """Depth and number of values, counted on what was packed."""
    inner = list(value) if isinstance(value, list) else []
    if isinstance(value, dict):
        inner = [*value.keys(), *value.values()]
    below = [measured(one) for one in inner]
    is_container = isinstance(value, list | dict)
    return is_container + max((depth for depth, _ in below), default=0), 1 + sum(count for _, count in below)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_VALUES)
def test_it_counts_as_whoever_has_packed_it(value: object) -> None:
    raw = msgpack.packb([value] * 3 + [b"\x91" * 40])  # enough of what looks like lists that it is gone through
    depth, count = measured([value, value, value, b""])
    frame.check_bounds(raw, count, depth)
    with pytest.raises(ValueError, match=f"more than {depth - 1} lists"):
        frame.check_bounds(raw, count, depth - 1)
    with pytest.raises(ValueError, match=f"more than {count - 1} values"):
        frame.check_bounds(raw, count - 1, depth) if len(raw) > count - 1 else pytest.fail("never")


def test_whatever_the_bytes_are() -> None:
    drawn = random.Random(7)
    for _ in range(3000):
        raw = drawn.randbytes(drawn.randrange(400))
        with contextlib.suppress(ValueError):
            frame.check_bounds(raw, 1 << 18)


@pytest.mark.rule("S18")
def test_four_mebibytes_of_small_lists_are_refused_before_they_are_made() -> None:
    """Who makes values meets the byte at the end, which begins none, and says so instead."""
    raw = b"\x82\xa2id\x01\xa2ok\x81\xa1a\xdd" + (4_000_000).to_bytes(4, "big") + b"\x90" * 3_999_999 + b"\xc1"
    with pytest.raises(BadMessage) as told:
        control.decode_answer(raw)
    assert "values" in told.value.why
