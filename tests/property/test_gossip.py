"""Rumours in any order, any number of times, come to the same end; what is sent fits; suspicion has its bounds."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerload.core.membership.gossip_state import BroadcastQueue, Suspicion, suspicion_s, transmissions
from peerload.model.errors import ProtocolError
from peerload.model.gossip import (
    ACCUSERS_MAX,
    LAN,
    MESSAGES_BYTES_MAX,
    MESSAGES_MAX,
    GossipPing,
    Load,
    MembershipUpdate,
    MemberStatus,
    merged,
    size_bytes,
)
from peerload.model.resources import LoadReport
from peerload.wire import peer as wire

NAMES = st.sampled_from(["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k"])
RUMOURS = st.builds(
    MembershipUpdate,
    node=st.just("n"),
    boot=st.sampled_from(["boot-1", "boot-2"]),
    machine_boot=st.sampled_from(["m", "n"]),
    store=st.just("s"),
    incarnation=st.integers(0, 2),
    refutation=st.integers(0, 2),
    standing=st.sampled_from(MemberStatus),
    address=st.sampled_from(["", "n:1", "n:2"]),
    profile_version=st.integers(0, 1),
    by=st.lists(NAMES, max_size=ACCUSERS_MAX, unique=True).map(lambda names: tuple(sorted(names))),
)


@settings(max_examples=150, deadline=None)
@given(RUMOURS, RUMOURS, RUMOURS)
def test_rumours_merge_in_any_order_and_any_number_of_times_and_the_weightiest_wins(
    one: MembershipUpdate, two: MembershipUpdate, three: MembershipUpdate
) -> None:
    both = merged(one, two)
    assert both == merged(two, one)
    assert merged(both, three) == merged(one, merged(two, three))
    assert merged(one, one) == one
    assert merged(both, one) == merged(both, two) == both
    assert both.weight == max(one.weight, two.weight)


LONG = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=40)
NEWS = st.builds(
    MembershipUpdate,
    node=LONG,
    boot=st.text("0123456789abcdef", min_size=1, max_size=64),
    machine_boot=st.text("0123456789abcdef", min_size=1, max_size=64),
    store=st.text("0123456789abcdef", min_size=1, max_size=64),
    incarnation=st.integers(0, 1 << 62),
    refutation=st.integers(0, 1 << 62),
    standing=st.sampled_from(MemberStatus),
    address=st.text(max_size=300).filter(lambda text: len(text.encode()) <= 300),
    by=st.lists(LONG, max_size=ACCUSERS_MAX, unique=True).map(tuple),
)
LOADS = st.builds(lambda node, n: Load.of(node, LoadReport(load_tasks=n, load=n / 3.0)), LONG, st.integers(0, 1 << 40))


@settings(max_examples=50, deadline=None)
@given(st.lists(NEWS | LOADS, max_size=40))
def test_what_is_sent_fits_is_read_again_and_is_sent_often_enough(news: list[MembershipUpdate | Load]) -> None:
    queue = BroadcastQueue(LAN.retransmit_mult, LAN.loads_max)
    for one in news:
        if isinstance(one, MembershipUpdate):
            queue.put(one)
        else:
            queue.put_load(one)
    kept = {(isinstance(one, MembershipUpdate), one.node): one for one in news}
    often = transmissions(LAN.retransmit_mult, 10)
    sent: dict[tuple[bool, str], int] = {}
    for _ in range(often * (len(kept) + 1)):
        told = queue.take([GossipPing(1, "x")], 10)
        assert sum(size_bytes(message) for message in told) <= MESSAGES_BYTES_MAX
        assert len(told) <= MESSAGES_MAX
        assert wire.decode_datagram(wire.encode_datagram(told)).messages == tuple(told)
        for message in told[1:]:
            assert isinstance(message, MembershipUpdate | Load)
            key = isinstance(message, MembershipUpdate), message.node
            assert message == kept[key]
            sent[key] = sent.get(key, 0) + 1
    assert (queue.rumours, queue.loads) == (0, 0)
    assert sent == dict.fromkeys(kept, often)


@settings(deadline=None)
@given(st.integers(2, 1000), st.integers(1, ACCUSERS_MAX), st.integers(1, 8))
def test_suspicion_lies_within_its_bounds_and_falls_with_every_confirmation(n: int, accusers: int, factor: int) -> None:
    suspicion = Suspicion(LAN, n, 100.0)
    least_s = suspicion_s(LAN, n) * factor
    over_s = suspicion.over_s(accusers, factor) - 100.0
    assert least_s - 1e-6 <= over_s <= least_s * LAN.suspicion_max_mult + 1e-6
    assert suspicion.over_s(accusers + 1, factor) <= suspicion.over_s(accusers, factor)


@settings(deadline=None)
@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers(-(1 << 63), 1 << 63) | st.text(), st.lists).map(msgspec.msgpack.encode)
)
def test_any_bytes_are_a_datagram_or_a_refusal(raw: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        wire.decode_datagram(raw)


@pytest.mark.rule("P6")
def test_a_type_that_is_not_known_is_skipped() -> None:
    raw = msgspec.msgpack.encode([1, 3, [["hologram", 1, 2], ["ping", 7, "x", "more"]]])
    read = wire.decode_datagram(raw)
    assert (read.messages, read.skipped, read.protocol_max) == ((GossipPing(7, "x"),), 1, 3)
