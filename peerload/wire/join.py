"""The join protocol: messages between a newcomer and the node that admits it, over TLS, before it is a member.

    newcomer: JoinAsk · node: JoinWho · newcomer: JoinRequest · node: JoinWelcome or JoinRefused

Frames are those of the peer links, and small. These messages are never sent over a link of members, nor a link's
messages here. The newcomer signs `transcript` with a key derived from the token's secret: the peer's identity (the
certificate that it sees), this one connection, and the request. So a proof is useless for any other node or connection.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, TypeVar

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import Meta

from peerload.model.errors import BadMessage, FrameTooLarge
from peerload.model.resources import Address, NodeName
from peerload.wire.frame import check_bounds
from peerload.wire.token import ID_BYTES, SECRET_BYTES

PROTOCOL = "peerload-join/1"
"""Name of the protocol in TLS (ALPN)."""
FRAME_BYTES_MAX = 64 << 10
"""Largest frame that a newcomer reads; a `JoinWelcome` with all revocations may be the largest."""
REQUEST_BYTES_MAX = 8 << 10
"""Largest request that a node reads from a newcomer."""
CSR_BYTES_MAX = 2048
NONCE_BYTES = 32
PEM_BYTES_MAX = 8192
SIGNED_MAX = 256
SIGNED_BYTES_MAX = 1024

Pem = Annotated[bytes, Meta(max_length=PEM_BYTES_MAX)]
TokenId = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Signed = Annotated[bytes, Meta(max_length=SIGNED_BYTES_MAX)]


class _Message(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True):
    """Root of the join messages."""


class JoinAsk(_Message, frozen=True, tag="join-ask"):
    """Question for the node's identity. The newcomer sends nothing secret before it has checked the answer."""


class JoinWho(_Message, frozen=True, tag="join-who"):
    """Certificate of the cluster's CA, and a nonce that is unique for this connection."""

    ca: Pem
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class JoinRequest(_Message, frozen=True, tag="join-request"):
    """Request to join. token: id of the token; csr: a certificate request (PKCS #10, DER) for a key made by the
    newcomer; proof: its signature of `transcript` by the key derived from the token's secret."""

    token: TokenId
    node: NodeName
    csr: Annotated[bytes, Meta(max_length=CSR_BYTES_MAX)]
    proof: Annotated[bytes, Meta(min_length=64, max_length=64)]


class JoinWelcome(_Message, frozen=True, tag="join-welcome"):
    """Admission. certificate: the newcomer's; seal_key: of gossip and MQTT; ca_key: only for nodes that may invite
    others; trust: statements of the CA (docs/wire.md); peers: addresses of members."""

    certificate: Pem
    name: NodeName
    cluster: Annotated[str, Meta(min_length=1, max_length=64)]
    seal_key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    ca_key: Pem = b""
    trust: Annotated[tuple[Signed, ...], Meta(max_length=SIGNED_MAX)] = ()
    peers: Annotated[tuple[Address, ...], Meta(max_length=16)] = ()


class JoinRefused(_Message, frozen=True, tag="join-refused"):
    """Refusal. code: `token` (without a reason), `name`, `request` or `busy`."""

    code: Annotated[str, Meta(max_length=20)]
    what: Annotated[str, Meta(max_length=300)] = ""


FromNewcomer = JoinAsk | JoinRequest
FromNode = JoinWho | JoinWelcome | JoinRefused

_Said = TypeVar("_Said")

_encoder = msgspec.msgpack.Encoder()
_from_newcomer: msgspec.msgpack.Decoder[FromNewcomer] = msgspec.msgpack.Decoder(FromNewcomer)
_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)


def encode(message: FromNewcomer | FromNode) -> bytes:
    """Encode one frame: length and body. Raises FrameTooLarge."""
    raw = _encoder.encode(message)
    if len(raw) > FRAME_BYTES_MAX:
        raise FrameTooLarge(len(raw), FRAME_BYTES_MAX)
    return len(raw).to_bytes(4, "big") + raw


def decode_newcomer(raw: bytes) -> FromNewcomer:
    """Decode a message of a newcomer. Raises BadMessage, whatever the bytes are."""
    return _decoded(_from_newcomer, raw)


def decode_node(raw: bytes) -> FromNode:
    """Decode a message of the node. Raises BadMessage, whatever the bytes are."""
    return _decoded(_from_node, raw)


def _decoded(decoder: msgspec.msgpack.Decoder[_Said], raw: bytes) -> _Said:
    try:
        check_bounds(raw, len(raw))
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadMessage("not a join message", why=str(error)[:300]) from None


def proof_key(token_id: bytes, secret: bytes) -> Ed25519PrivateKey:
    """Key derived from a token's secret. The node that made the token keeps only the public half."""
    if len(secret) != SECRET_BYTES:
        raise ValueError("not a token's secret")
    return Ed25519PrivateKey.from_private_bytes(HKDF(SHA256(), 32, token_id, b"peerload join proof 1").derive(secret))


def transcript(certificate: bytes, nonce: bytes, token_id: bytes, node: str, csr: bytes) -> bytes:
    """Bytes that are signed: the peer (the certificate that TLS has proven, DER), the connection, and the request."""
    parts = (certificate, nonce, token_id, node.encode(), csr)
    return b"peerload join 1\0" + b"".join(hashlib.sha256(part).digest() for part in parts)
