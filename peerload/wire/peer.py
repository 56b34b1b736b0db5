"""Codecs of the messages between nodes: envelopes (over links and a broker) and gossip datagrams.

Decoding is total: any bytes give a value or a ProtocolError. A datagram is an array of the lowest and the highest
protocol version of its sender, and its messages; its caller seals it, with the sender's name and start in the seal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from peerload.model.errors import BadMessage, FrameTooLarge
from peerload.model.gossip import DATAGRAM_BYTES_MAX, MESSAGES_MAX, GossipMessage, Version
from peerload.model.messages import PROTOCOL_MAX, PROTOCOL_MIN, TOGETHER, Blocks, Envelope, Message
from peerload.wire.frame import HEADER_BYTES, LARGE_BYTES, block_parts, check_bounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peerload.wire.frame import Buffer


DATA_BYTES_MAX = 4 << 20
"""The largest peer frame. An Offer carries up to 1 MiB of argv and 256 KiB of environment."""
MQTT_BYTES_MAX = 4 << 10
"""The largest MQTT payload: only advice, which is small."""

ENVELOPE_BYTES_MAX = 1 << 10
"""Limit on an envelope's bytes besides its messages."""
VALUES_MAX = 1 << 18
"""Values in one frame."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
_NO_BLOCKS = _encoder.encode(Blocks(()))


class _Packed(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """An `Envelope` whose messages are encoded already."""

    v: int
    cluster: str
    src: str
    src_boot: str
    seq: int
    body: msgspec.Raw
    dst: str
    dst_boot: str
    others: tuple[msgspec.Raw, ...] = ()


class Envelopes:
    """Envelopes of one start of one node, with consecutive numbers."""

    def __init__(self, cluster: str, node: str, boot: str) -> None:
        self._sender = cluster, node, boot
        self._sequence = 0

    def make(self, message: Message, dst: str = "", dst_boot: str = "") -> Envelope:
        self._sequence += 1
        return Envelope(PROTOCOL_MAX, *self._sender, self._sequence, message, dst, dst_boot)

    def frame_of(self, messages: Sequence[bytes], dst: str, dst_boot: str) -> bytearray:
        """One frame with these messages, which `encode_message` has encoded."""
        self._sequence += 1
        first, *others = map(msgspec.Raw, messages)
        packed = _Packed(PROTOCOL_MAX, *self._sender, self._sequence, first, dst, dst_boot, tuple(others))
        return _framed(packed)


def encode_message(message: Message) -> bytes:
    """Encode a message for a frame with others. Raises FrameTooLarge."""
    encoded = _encoder.encode(message)
    if len(encoded) > DATA_BYTES_MAX - ENVELOPE_BYTES_MAX:
        raise FrameTooLarge(len(encoded), DATA_BYTES_MAX - ENVELOPE_BYTES_MAX)
    return encoded


def encode(envelope: Envelope) -> bytes:
    """Encode only the body, for MQTT."""
    return _encoder.encode(envelope)


def encode_frame(envelope: Envelope) -> bytearray:
    """Encode length and body, for the peer link."""
    return _framed(envelope)


def _framed(envelope: Envelope | _Packed) -> bytearray:
    frame = bytearray()
    _encoder.encode_into(envelope, frame, HEADER_BYTES)
    size = len(frame) - HEADER_BYTES
    if size > DATA_BYTES_MAX:
        raise FrameTooLarge(size, DATA_BYTES_MAX)
    frame[:HEADER_BYTES] = size.to_bytes(HEADER_BYTES, "big")
    return frame


def frame_parts(envelope: Envelope) -> list[Buffer]:
    """The frame of `encode_frame` in parts, to send one after the other: large blocks of files are not copied."""
    blocks = envelope.body.blocks if isinstance(envelope.body, Blocks) else ()
    if sum(map(len, blocks)) <= LARGE_BYTES * len(blocks):
        return [encode_frame(envelope)]
    before, _, after = encode(msgspec.structs.replace(envelope, body=Blocks(()))).partition(_NO_BLOCKS)
    parts: list[Buffer] = [before + _NO_BLOCKS[:-1], *block_parts(blocks), after]
    size = sum(map(len, parts))
    if size > DATA_BYTES_MAX:
        raise FrameTooLarge(size, DATA_BYTES_MAX)
    return [size.to_bytes(HEADER_BYTES, "big"), *parts]


def decode(raw: Buffer, size_bytes_max: int = DATA_BYTES_MAX) -> Envelope:
    """Decode one envelope; blocks of files in it are views of ``raw``. Raises FrameTooLarge or BadMessage, whatever the bytes are."""
    if len(raw) > size_bytes_max:
        raise FrameTooLarge(len(raw), size_bytes_max)
    try:
        if len(raw) > VALUES_MAX:  # shorter input cannot have more values; the types limit the depth
            check_bounds(raw, VALUES_MAX)
        envelope = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadMessage("not an envelope", why=str(error)[:300]) from None
    if envelope.others and type(envelope.body) not in TOGETHER:
        raise BadMessage("not an envelope", why=f"messages beside {type(envelope.body).__name__}")
    return envelope


class _Sealed(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Content of a sealed datagram."""

    protocol_min: Version
    protocol_max: Version
    messages: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=MESSAGES_MAX)]


class _Known(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Content of a sealed datagram whose messages are all of known types."""

    protocol_min: Version
    protocol_max: Version
    messages: Annotated[tuple[GossipMessage, ...], Meta(max_length=MESSAGES_MAX)]


class Datagram(msgspec.Struct, frozen=True):
    """Decoded datagram. skipped: messages of types that this version does not know."""

    protocol_min: int
    protocol_max: int
    messages: tuple[GossipMessage, ...]
    skipped: int


_datagrams = msgspec.msgpack.Decoder(_Sealed)
_known_datagrams = msgspec.msgpack.Decoder(_Known)
_messages: msgspec.msgpack.Decoder[GossipMessage] = msgspec.msgpack.Decoder(GossipMessage)
_tags = msgspec.msgpack.Decoder(list[msgspec.Raw])
_tag = msgspec.msgpack.Decoder(str)
KNOWN_TAGS = frozenset(str(kind.__struct_config__.tag) for kind in GossipMessage.__args__)


def encode_datagram(messages: Sequence[GossipMessage]) -> bytes:
    return _encoder.encode((PROTOCOL_MIN, PROTOCOL_MAX, tuple(messages)))


def decode_datagram(raw: bytes) -> Datagram:
    """Decode the plaintext of one datagram. Raises FrameTooLarge or BadMessage, whatever the bytes are."""
    if len(raw) > DATAGRAM_BYTES_MAX:
        raise FrameTooLarge(len(raw), DATAGRAM_BYTES_MAX)
    try:
        check_bounds(raw, len(raw))
        try:
            known = _known_datagrams.decode(raw)
        except msgspec.ValidationError:
            return _without_unknown(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadMessage("not a datagram of gossip", why=str(error)[:300]) from None
    return Datagram(known.protocol_min, known.protocol_max, known.messages, 0)


def _without_unknown(raw: bytes) -> Datagram:
    sealed = _datagrams.decode(raw)
    messages = tuple(_messages.decode(one) for one in sealed.messages if _is_known(one))
    return Datagram(sealed.protocol_min, sealed.protocol_max, messages, len(sealed.messages) - len(messages))


def _is_known(raw: msgspec.Raw) -> bool:
    parts = _tags.decode(raw)
    if not parts:
        raise BadMessage("not a datagram of gossip", why="an empty message")
    return _tag.decode(parts[0]) in KNOWN_TAGS
