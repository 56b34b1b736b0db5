"""Frames: a 4-byte big-endian length and a MessagePack body. Imports msgpack alone, so that clients start fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack

if TYPE_CHECKING:
    import socket

HEADER_BYTES = 4
CONTROL_BYTES_MAX = 4 << 20
"""The largest frame on the control socket, either way."""

LAST_WORDS_ENDING = ".why"
"""Beside its socket, so called, an agent that had to end leaves the reason: a line with what, and one with what helps …"""
LAST_WORDS_BYTES_MAX = 2000
"""… in so many bytes at most."""


def pack(body: object, size_bytes_max: int = CONTROL_BYTES_MAX) -> bytes:
    """One frame. Raises ValueError if its body is larger than ``size_bytes_max``."""
    raw: bytes = msgpack.packb(body)
    if len(raw) > size_bytes_max:
        raise ValueError(f"a frame of {len(raw)} bytes; at most {size_bytes_max} are allowed")
    return len(raw).to_bytes(HEADER_BYTES, "big") + raw


def unpack(raw: bytes) -> Any:  # noqa: ANN401 -- whatever the agent said
    """The body of one frame. Raises ValueError (also msgpack's own errors are ValueErrors) if it is malformed."""
    return msgpack.unpackb(raw)


def read(sock: socket.socket) -> Any:  # noqa: ANN401 -- whatever the agent said
    """The next frame's body from a blocking socket.

    Raises ConnectionError if the other end closes, ValueError if the frame is too large or malformed.
    """
    size = int.from_bytes(_read_exactly(sock, HEADER_BYTES), "big")
    if size > CONTROL_BYTES_MAX:
        raise ValueError(f"a frame that claims {size} bytes; at most {CONTROL_BYTES_MAX} are allowed")
    return unpack(_read_exactly(sock, size))


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError("the agent closed the connection")
        view = view[count:]
    return bytes(buffer)
