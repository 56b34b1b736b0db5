"""Frames: a 4-byte big-endian length and a MessagePack body. Imports msgpack alone, so that clients start fast."""

from __future__ import annotations

import msgpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HEADER_BYTES = 4
CONTROL_BYTES_MAX = 4 << 20
"""The largest frame on the control socket, either way."""

LAST_WORDS_ENDING = ".why"
"""Beside its socket, so called, an agent that had to end leaves the reason: a line with what, and one with what helps …"""
LAST_WORDS_BYTES_MAX = 2000
"""… in so many bytes at most."""


def pack(body: object, size_bytes_max: int = CONTROL_BYTES_MAX) -> bytes:
    """Encode one frame. Raises ValueError if its body is larger than ``size_bytes_max``."""
    raw: bytes = msgpack.packb(body)
    if len(raw) > size_bytes_max:
        raise ValueError(f"a frame of {len(raw)} bytes; at most {size_bytes_max} are allowed")
    return len(raw).to_bytes(HEADER_BYTES, "big") + raw


def unpack(raw: bytes) -> Any:  # noqa: ANN401 -- whatever the agent said
    """The body of one frame. Raises ValueError (also msgpack's own errors are ValueErrors) if it is malformed."""
    return msgpack.unpackb(raw)
