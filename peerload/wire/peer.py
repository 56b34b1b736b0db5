"""Codec of envelopes between nodes. Decoding is total: any bytes give an Envelope or a ProtocolError."""

from __future__ import annotations

import msgspec

from peerload.model.errors import BadMessage, FrameTooLarge
from peerload.model.messages import Envelope
from peerload.wire import bounds
from peerload.wire.frame import HEADER_BYTES

CONTROL_BYTES_MAX = 1 << 20
DATA_BYTES_MAX = 4 << 20
"""The largest peer frame. An Offer carries up to 1 MiB of argv and 256 KiB of environment."""
MQTT_BYTES_MAX = 4 << 10
"""The largest MQTT payload: only advice, which is small."""

_encoder = msgspec.msgpack.Encoder()
VALUES_MAX = 1 << 18
"""Values in one frame."""
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    """Encode the body alone, as it is published on MQTT."""
    return _encoder.encode(envelope)


def encode_frame(envelope: Envelope) -> bytearray:
    """Encode length and body, as they are sent over the peer link."""
    frame = bytearray()
    _encoder.encode_into(envelope, frame, HEADER_BYTES)
    size = len(frame) - HEADER_BYTES
    if size > DATA_BYTES_MAX:
        raise FrameTooLarge(size, DATA_BYTES_MAX)
    frame[:HEADER_BYTES] = size.to_bytes(HEADER_BYTES, "big")
    return frame


def decode(raw: bytes | bytearray | memoryview, size_bytes_max: int = DATA_BYTES_MAX) -> Envelope:
    """Decode one envelope; blocks of files in it are views of ``raw``. Raises FrameTooLarge or BadMessage, whatever the bytes are."""
    if len(raw) > size_bytes_max:
        raise FrameTooLarge(len(raw), size_bytes_max)
    try:
        bounds.check(raw, VALUES_MAX)
        return _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadMessage("not an envelope", why=str(error)[:300]) from None
