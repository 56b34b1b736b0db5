"""Output streams: one connection for one task's output, so that a long output never stands before a lease.

The asking side reads no faster than its consumer takes, the serving side writes no faster than the asking side reads:
what lies between them are the operating system's buffers and a few pieces.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from peerload.agent.peer_connection import STREAM_STALLED_S
from peerload.model.errors import LinkUnavailable
from peerload.model.messages import Envelope, Hello, OutputChunk, OutputEnd, OutputRequest
from peerload.wire import peer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from peerload.agent.peer_connection import PeerConnection
    from peerload.model.errors import PeerloadError
    from peerload.model.messages import Message

PIECES_WAITING_MAX = 8
"""Pieces that may wait for the consumer; reading stops there and goes on when half of them are taken."""

Piece = OutputChunk | OutputEnd


class OutputReader:
    """The asking end: owner of one connection to ``dst``. Iterate over `pieces` once."""

    def __init__(
        self, dst: str, hello: Callable[[], Message], envelope: Callable[[Message, str, str], Envelope]
    ) -> None:
        self._dst = dst
        self._hello = hello
        self._envelope = envelope
        self._pieces: deque[Piece] = deque()
        self._arrived = asyncio.Event()
        self._reason = ""

    async def pieces(self, connection: PeerConnection, request: OutputRequest) -> AsyncIterator[Piece]:
        """Every piece, OutputEnd the last. Raises LinkUnavailable if the connection breaks before that."""
        boot = connection.hello.identity.boot if connection.hello is not None else ""
        connection.write(request, peer.encode_frame(self._envelope(request, self._dst, boot)))
        while True:
            while not self._pieces:
                if self._reason:
                    what = f"the output of {request.task} stopped coming"
                    raise LinkUnavailable(self._dst, what, why=self._reason)
                self._arrived.clear()
                await self._arrived.wait()
            piece = self._pieces.popleft()
            if len(self._pieces) == PIECES_WAITING_MAX // 2:
                connection.resume_reading()
            yield piece
            if isinstance(piece, OutputEnd):
                return

    # -- what the connection says ------------------------------------------------------------------------------------

    def opened(self, connection: PeerConnection) -> None:
        """Introduce ourselves."""
        hello = self._hello()
        connection.write(hello, peer.encode_frame(self._envelope(hello, "", "")))

    def introduced(self, connection: PeerConnection, hello: Hello) -> bool:
        """Only the node that was asked for will do."""
        if hello.identity.node == self._dst:
            return True
        connection.reason = f"{hello.identity.node} answers there"
        return False

    def received(self, connection: PeerConnection, envelope: Envelope) -> None:
        """Keep a piece for the consumer."""
        if not isinstance(envelope.body, OutputChunk | OutputEnd):
            connection.abort("it sent something else than output")
            return
        self._pieces.append(envelope.body)
        self._arrived.set()
        if len(self._pieces) >= PIECES_WAITING_MAX:
            connection.pause_reading()

    def malformed(self, _: PeerConnection, __: PeerloadError) -> bool:
        """Nothing else can follow."""
        return False

    def refused(self, _: PeerConnection, why: str) -> None:
        """Kept for the error."""
        self._reason = self._reason or why

    def writable(self, _: PeerConnection) -> None:
        """Nothing waits here."""

    def closed(self, _: PeerConnection, reason: str) -> None:
        """Wake the consumer."""
        self._reason = self._reason or reason
        self._arrived.set()


async def serve(
    connection: PeerConnection, pieces: AsyncIterator[Piece], envelope: Callable[[Message], Envelope]
) -> None:
    """The serving end: write every piece as fast as the other end reads, then close when that has taken all and is gone.
    Returns early if it is gone before."""
    try:
        async for piece in pieces:
            connection.write(piece, peer.encode_frame(envelope(piece)))
            await connection.drain()
            if isinstance(piece, OutputEnd):
                await asyncio.wait([connection.gone], timeout=STREAM_STALLED_S)
                break
    except ConnectionError:
        return  # the asker went away, and can ask again from where it was
    finally:
        if (aclose := getattr(pieces, "aclose", None)) is not None:
            await aclose()
        connection.close("the output is complete")
