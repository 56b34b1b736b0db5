"""The join token: one word that `peerload invite` prints and `peerload join` takes.

    plj1-<base32 of: format · CA's SHA-256 · token id · secret · node · addresses · checksum>

It contains the identity of the cluster (the hash of its CA's certificate), which is checked before anything secret is
sent, addresses, and the secret by which the newcomer proves that it was invited. The checksum only detects mistakes of
typing and copying: any holder of the word can use it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import NamedTuple

from peerload.model.errors import BadRequest

PREFIX = "plj1-"
FORMAT = 1
FINGERPRINT_BYTES = 32
ID_BYTES = 8
SECRET_BYTES = 16
CHECKSUM_BYTES = 4
ADDRESSES_MAX = 4
ADDRESS_BYTES_MAX = 255
NODE_BYTES_MAX = 40
CHARACTERS_MAX = 2048
"""Greatest length of a token, in characters."""
_HINT = "copy it again, from  peerload join  to its last character; a new one:  peerload invite"


class Token(NamedTuple):
    """Join token. fingerprint: SHA-256 of the CA's certificate (DER); id: of the invitation; secret: known to holders
    of the token; addresses: `HOST:PORT` of nodes that admit its holder; node: the only name that may join, "" for
    any."""

    fingerprint: bytes
    id: bytes
    secret: bytes
    addresses: tuple[str, ...]
    node: str = ""

    def __repr__(self) -> str:
        return f"Token({self.id.hex()})"

    def text(self) -> str:
        body = bytes((FORMAT,)) + self.fingerprint + self.id + self.secret + _prefixed(self.node)
        body += bytes((len(self.addresses),)) + b"".join(map(_prefixed, self.addresses))
        return PREFIX + base64.b32encode(body + _checksum(body)).decode().rstrip("=").lower()


def parse(text: str) -> Token:
    """Parse the text of a token. Raises BadRequest, without a request to any node, if it is not a token or was
    copied wrongly."""
    word = "".join(text.split()).lower()
    if not word.startswith(PREFIX):
        raise BadRequest("this is not a join token", why=f"one begins with {PREFIX}", hint=_HINT)
    if len(word) > CHARACTERS_MAX:
        raise _not_whole(f"it has more than {CHARACTERS_MAX} characters")
    digits = word[len(PREFIX) :].upper()
    try:
        raw = base64.b32decode(digits + "=" * (-len(digits) % 8))
    except (binascii.Error, ValueError):
        raise _not_whole("it has characters that no token has, or is cut off") from None
    body, checksum = raw[:-CHECKSUM_BYTES], raw[-CHECKSUM_BYTES:]
    is_as_written = base64.b32encode(raw).decode().rstrip("=") == digits  # the last letter has unused bits
    if _checksum(body) != checksum or not is_as_written:
        raise _not_whole("a character is wrong or missing")
    if not body:
        raise _not_whole("there is nothing in it")
    if body[0] != FORMAT:
        raise BadRequest("this token is of a newer peerload", why=f"format {body[0]}", hint="upgrade this one")
    try:
        return _parsed(body)
    except (IndexError, UnicodeDecodeError):
        raise _not_whole("its parts do not fit together") from None


def _parsed(body: bytes) -> Token:
    place = 1
    parts = []
    for size in (FINGERPRINT_BYTES, ID_BYTES, SECRET_BYTES):
        parts.append(body[place : place + size])
        place += size
    fingerprint, token_id, secret = parts
    node, place = _part(body, place, NODE_BYTES_MAX)
    count, place = body[place], place + 1
    addresses = []
    for _ in range(count):
        address, place = _part(body, place, ADDRESS_BYTES_MAX)
        addresses.append(address)
    if place != len(body) or not 0 < count <= ADDRESSES_MAX:
        raise IndexError
    return Token(fingerprint, token_id, secret, tuple(addresses), node)


def _part(body: bytes, place: int, size_max: int) -> tuple[str, int]:
    size = body[place]
    end = place + 1 + size
    if size > size_max or end > len(body):
        raise IndexError
    return body[place + 1 : end].decode("ascii"), end


def _prefixed(text: str) -> bytes:
    raw = text.encode("ascii")
    return bytes((len(raw),)) + raw


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(b"peerload join token" + body).digest()[:CHECKSUM_BYTES]


def _not_whole(why: str) -> BadRequest:
    return BadRequest("this token is incomplete", why=why, hint=_HINT)
