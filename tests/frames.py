"""Frames of the control socket, read by fakes of an agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peerload.wire import frame

if TYPE_CHECKING:
    import socket


def read_raw(connection: socket.socket) -> bytes:
    """The body of the next frame. Raises ConnectionError where the other end has closed."""
    return _exactly(connection, int.from_bytes(_exactly(connection, frame.HEADER_BYTES), "big"))


def read(connection: socket.socket) -> Any:
    return frame.unpack(read_raw(connection))


def _exactly(connection: socket.socket, size: int) -> bytes:
    raw = b""
    while len(raw) < size:
        piece = connection.recv(size - len(raw))
        if not piece:
            raise ConnectionError("the other end has closed the connection")
        raw += piece
    return raw
