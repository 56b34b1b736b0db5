"""The join protocol: messages between a newcomer and the node that admits it, inside TLS, before the newcomer is a member.

    newcomer: JoinAsk · node: JoinWho · newcomer: JoinRequest · node: JoinWelcome or JoinRefused

Frames are those of the peer links, and small. Nothing here is ever said over a link of members, nor a link's messages
here. `transcript` is what the newcomer signs with a key that only the token's secret gives: who it speaks to (the
certificate it sees), this one connection, and what it asks for. So a proof is good for nobody else, nowhere else.
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
"""Largest frame that a newcomer reads; a `JoinWelcome` with all that was revoked may be the largest."""
REQUEST_BYTES_MAX = 8 << 10
"""Largest request that a node reads from a stranger."""
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
    """Question for the node's identity. The newcomer says nothing secret before it knows the answer."""


class JoinWho(_Message, frozen=True, tag="join-who"):
    """Certificate of the cluster's CA, and a nonce that makes this connection different from every other."""

    ca: Pem
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class JoinRequest(_Message, frozen=True, tag="join-request"):
    """token: the id of it; csr: a certificate request (PKCS #10, DER) for a key made by the newcomer; proof: its
    signature of `transcript` by the key of the token's secret."""

    token: TokenId
    node: NodeName
    csr: Annotated[bytes, Meta(max_length=CSR_BYTES_MAX)]
    proof: Annotated[bytes, Meta(min_length=64, max_length=64)]


class JoinWelcome(_Message, frozen=True, tag="join-welcome"):
    """Admission. certificate: the newcomer's; seal_key: of gossip and MQTT; ca_key: only for nodes that may let
    others in; trust: what the CA has signed since (docs/wire.md); peers: members, to be dialled."""

    certificate: Pem
    name: NodeName
    cluster: Annotated[str, Meta(min_length=1, max_length=64)]
    seal_key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    ca_key: Pem = b""
    trust: Annotated[tuple[Signed, ...], Meta(max_length=SIGNED_MAX)] = ()
    peers: Annotated[tuple[Address, ...], Meta(max_length=16)] = ()


class JoinRefused(_Message, frozen=True, tag="join-refused"):
    """Refusal. code: `token` (which says nothing about why), `name`, `request` or `busy`."""

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
        raise BadMessage("not a word of joining", why=str(error)[:300]) from None


def proof_key(token_id: bytes, secret: bytes) -> Ed25519PrivateKey:
    """Key that is derived from a token's secret. The node that made the token keeps only the public half."""
    if len(secret) != SECRET_BYTES:
        raise ValueError("not a token's secret")
    return Ed25519PrivateKey.from_private_bytes(HKDF(SHA256(), 32, token_id, b"peerload join proof 1").derive(secret))


def transcript(certificate: bytes, nonce: bytes, token_id: bytes, node: str, csr: bytes) -> bytes:
    """Bytes that are signed: for whom (the certificate that TLS has proven, DER), in which connection, and for what."""
    parts = (certificate, nonce, token_id, node.encode(), csr)
    return b"peerload join 1\0" + b"".join(hashlib.sha256(part).digest() for part in parts)
