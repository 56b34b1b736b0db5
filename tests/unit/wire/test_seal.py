"""Sealed messages: who can open them, once, and what every other string of bytes gets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerload.model.errors import NotAuthentic, ProtocolError, Replayed
from peerload.wire import seal
from peerload.wire.seal import Sealer
from tests.each import each

KEY = bytes(range(32))
OTHER_KEY = bytes(range(1, 33))


def sealer(
    node: str = "ws1", boot: str = "b1", key: bytes = KEY, cluster: str = "c1", purpose: str = "gossip"
) -> Sealer:
    return Sealer(key, cluster, node, boot, purpose=purpose)


def test_a_sealed_message_opens_with_its_sender_and_what_it_says() -> None:
    sealed = sealer().seal(b"hello", b"topic")
    assert sealer("ws2").open(sealed, b"topic") == ("ws1", "b1", b"hello")
    assert b"hello" not in sealed


def test_the_same_words_are_never_sealed_to_the_same_bytes() -> None:
    first = sealer()
    assert first.seal(b"x") != first.seal(b"x")
    assert sealer(boot="b2").seal(b"x") != sealer().seal(b"x")


@each(
    "other",
    [
        sealer("ws2", key=OTHER_KEY),
        sealer("ws2", cluster="c2"),
        sealer("ws2", purpose="mqtt"),
    ],
)
def test_it_does_not_open_for(other: Sealer) -> None:
    with pytest.raises(NotAuthentic):
        other.open(sealer().seal(b"hello"))


def test_it_does_not_open_with_another_aad() -> None:
    with pytest.raises(NotAuthentic):
        sealer("ws2").open(sealer().seal(b"hello", b"peerload/c/main/ws1/state"), b"peerload/c/main/ws3/state")


@pytest.mark.rule("J5")
def test_no_bit_of_it_can_be_changed_and_no_byte_cut_or_added() -> None:
    sealed = sealer().seal(b"hello", b"t")
    reader = sealer("ws2")
    for bit in range(len(sealed) * 8):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            reader.open(bytes(changed), b"t")
    for size in range(len(sealed)):
        with pytest.raises(NotAuthentic):
            reader.open(sealed[:size], b"t")
    with pytest.raises(NotAuthentic):
        reader.open(sealed + b"\0", b"t")
    assert reader.open(sealed, b"t")[2] == b"hello", "and forgeries shut nothing out"


@pytest.mark.rule("J5", "P5")
def test_a_message_opens_once() -> None:
    sealed, reader = sealer().seal(b"hello"), sealer("ws2")
    reader.open(sealed)
    with pytest.raises(Replayed):
        reader.open(sealed)


@pytest.mark.rule("J5", "P5")
def test_late_ones_open_within_the_window_and_no_later() -> None:
    writer, reader = sealer(), sealer("ws2")
    sealed = [writer.seal(b"") for _ in range(seal.WINDOW_MESSAGES + 1)]
    reader.open(sealed[-1])
    reader.open(sealed[1])
    reader.open(sealed[-2])
    for late in (sealed[0], sealed[1], sealed[-1], sealed[-2]):
        with pytest.raises(Replayed):
            reader.open(late)


def test_a_forged_counter_does_not_shut_out_those_that_follow() -> None:
    writer, reader = sealer(), sealer("ws2")
    forged = bytearray(writer.seal(b""))
    at = len(forged) - seal.TAG_BYTES - seal.COUNTER_BYTES
    forged[at : at + seal.COUNTER_BYTES] = b"\xff" * seal.COUNTER_BYTES
    with pytest.raises(NotAuthentic):
        reader.open(bytes(forged))
    assert reader.open(writer.seal(b"next"))[2] == b"next"


def test_ones_own_come_back_in_vain() -> None:
    own = sealer()
    with pytest.raises(Replayed):
        own.open(own.seal(b""))
    assert sealer(boot="b2").open(own.seal(b"")), "but those of an earlier start are another's"


def test_senders_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "SENDERS_MAX", 3)
    reader = sealer("ws2")
    for number in range(10):
        reader.open(sealer(boot=f"b{number}").seal(b""))
    assert len(reader._senders) == 3


def test_forgeries_take_no_place_among_the_senders() -> None:
    reader = sealer("ws2")
    for number in range(10):
        with pytest.raises(NotAuthentic):
            reader.open(sealer(boot=f"b{number}", key=OTHER_KEY).seal(b""))
    assert not reader._senders


def test_no_key_is_shown() -> None:
    assert repr(sealer()) == "Sealer(node='ws1', purpose='gossip')"


def test_what_cannot_be_a_key_or_a_sender_is_an_error_of_ours() -> None:
    for key, node, boot in ((b"short", "ws1", "b1"), (KEY, "", "b1"), (KEY, "n" * 41, "b1"), (KEY, "ws1", "")):
        with pytest.raises(ValueError, match=r"key|sender"):
            Sealer(key, "c1", node, boot)


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_any_other_bytes_are_a_protocol_error(raw: bytes) -> None:
    with pytest.raises(NotAuthentic):
        sealer("ws2").open(raw, b"t")


@given(
    head=st.integers(min_value=0, max_value=255),
    src=st.binary(max_size=60),
    boot=st.binary(max_size=80),
    rest=st.binary(max_size=60),
)
@settings(max_examples=300)
def test_any_other_header_is_a_protocol_error(head: int, src: bytes, boot: bytes, rest: bytes) -> None:
    raw = bytes((head % 3, len(src))) + src + bytes((len(boot),)) + boot + rest
    with pytest.raises(NotAuthentic):
        sealer("ws2").open(raw)
