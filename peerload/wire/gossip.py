"""Datagrams of gossip: encode, and a decode that is total (any bytes give a Datagram or a ProtocolError).

What is encoded here is sealed by the caller; the sender's name and start are part of the seal. A datagram is an array:
the lowest and the highest version of the protocol that its sender speaks, and its messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from peerload.model.errors import BadMessage, FrameTooLarge
from peerload.model.gossip import DATAGRAM_BYTES_MAX, MESSAGES_MAX, GossipMessage, Version
from peerload.model.messages import PROTOCOL_MAX, PROTOCOL_MIN
from peerload.wire import bounds

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Sealed(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Content of a sealed datagram."""

    protocol_min: Version
    protocol_max: Version
    messages: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=MESSAGES_MAX)]


class Datagram(msgspec.Struct, frozen=True):
    """Decoded datagram. skipped: messages of types that this version does not know."""

    protocol_min: int
    protocol_max: int
    messages: tuple[GossipMessage, ...]
    skipped: int


_encoder = msgspec.msgpack.Encoder()
_datagrams = msgspec.msgpack.Decoder(_Sealed)
_messages: msgspec.msgpack.Decoder[GossipMessage] = msgspec.msgpack.Decoder(GossipMessage)
_tags = msgspec.msgpack.Decoder(list[msgspec.Raw])
_tag = msgspec.msgpack.Decoder(str)
KNOWN_TAGS = frozenset(str(kind.__struct_config__.tag) for kind in GossipMessage.__args__)


def encode(messages: Sequence[GossipMessage]) -> bytes:
    """Encode the plaintext of a datagram."""
    return _encoder.encode((PROTOCOL_MIN, PROTOCOL_MAX, tuple(messages)))


def decode(raw: bytes) -> Datagram:
    """Decode the plaintext of one datagram. Raises FrameTooLarge or BadMessage, whatever the bytes are."""
    if len(raw) > DATAGRAM_BYTES_MAX:
        raise FrameTooLarge(len(raw), DATAGRAM_BYTES_MAX)
    try:
        bounds.check(raw, len(raw))
        sealed = _datagrams.decode(raw)
        messages = [_messages.decode(one) for one in sealed.messages if _is_known(one)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadMessage("not a datagram of gossip", why=str(error)[:300]) from None
    skipped = len(sealed.messages) - len(messages)
    return Datagram(sealed.protocol_min, sealed.protocol_max, tuple(messages), skipped)


def _is_known(raw: msgspec.Raw) -> bool:
    """True if this version knows the type of a message."""
    parts = _tags.decode(raw)
    if not parts:
        raise BadMessage("not a datagram of gossip", why="an empty message")
    return _tag.decode(parts[0]) in KNOWN_TAGS
