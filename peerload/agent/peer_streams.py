"""Output streams: one connection for one task's output, so that a long output never stands before a lease.

The asking side reads no faster than its consumer takes, the serving side writes no faster than the asking side reads:
what lies between them are the operating system's buffers and a few pieces.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

from peerload.agent.peer_connection import STREAM_STALLED_S
from peerload.model.errors import LinkUnavailable
from peerload.model.messages import Envelope, Hello, OutputChunk, OutputEnd, OutputRequest
from peerload.wire import peer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    from peerload.agent.peer_connection import Owner, PeerConnection
    from peerload.model.errors import PeerloadError
    from peerload.model.messages import Message

STREAMS_MAX = 256
"""Output streams served at a time, and as many fetched."""
PIECES_WAITING_MAX = 8
"""Pieces that may wait for the consumer; reading stops there and goes on when half of them are taken."""

Piece = OutputChunk | OutputEnd


class ServeOutput(Protocol):
    """Where output comes from: called with the asking node and what it asks for."""

    def __call__(self, src: str, request: OutputRequest, /) -> AsyncIterator[Piece]:
        """Pieces, OutputEnd the last."""
        raise NotImplementedError


class OutputStreams:
    """Those of one node, to both sides. ``serve_output``: the output of an attempt that ran here; ``greeting()``: our
    introduction on a stream; ``envelope`` puts a message into its frame; ``open_(address, node, owner)`` makes a
    connection for a stream, or raises LinkUnavailable; ``drop(why)`` counts; ``spawn(work, name)`` does it in the
    background."""

    def __init__(
        self,
        serve_output: ServeOutput,
        greeting: Callable[[], Hello],
        envelope: Callable[[Message, str, str], Envelope],
        open_: Callable[[str, str, Owner], Awaitable[PeerConnection]],
        drop: Callable[[str], None],
        spawn: Callable[[Coroutine[object, object, None], str], asyncio.Task[None]],
    ) -> None:
        self._serve_output = serve_output
        self._greeting = greeting
        self._envelope = envelope
        self._open = open_
        self._drop = drop
        self._spawn = spawn
        self._fetched = 0
        self.served: dict[PeerConnection, asyncio.Task[None] | None] = {}
        """The connections that others made to us for it; None: nothing was asked for yet."""

    @property
    def is_full(self) -> bool:
        """Whether as many are served as may be."""
        return len(self.served) >= STREAMS_MAX

    def opened(self, connection: PeerConnection) -> None:
        """A peer has introduced itself on a connection for output."""
        self.served[connection] = None

    def received(self, connection: PeerConnection, node: str, message: Message) -> None:
        """One request for each connection, and nothing else."""
        if not isinstance(message, OutputRequest) or self.served.get(connection) is not None:
            self._drop("no output request")
            connection.close("no output request")
            return
        told = connection.hello
        boot = told.identity.boot if told is not None else ""
        pieces = self._serve_output(node, message)
        work = serve(connection, pieces, lambda piece: self._envelope(piece, node, boot))
        self.served[connection] = self._spawn(work, f"output for {node}")

    def closed(self, connection: PeerConnection) -> None:
        """The other end is gone: what is left of it is of no use."""
        task = self.served.pop(connection, None)
        if task is not None:
            task.cancel()

    async def fetch(self, dst: str, address: str, request: OutputRequest) -> AsyncIterator[Piece]:
        """The output of an attempt from the node that ran it: pieces as they come, OutputEnd the last. Raises
        LinkUnavailable."""
        if not address:
            raise LinkUnavailable(dst, f"no address of {dst} is known")
        if self._fetched >= STREAMS_MAX:
            raise LinkUnavailable(dst, "too many output streams", why=f"at most {STREAMS_MAX} at a time")
        self._fetched += 1
        connection: PeerConnection | None = None
        try:
            reader = OutputReader(dst, self._greeting, self._envelope)
            connection = await self._open(address, dst, reader)
            async for piece in reader.pieces(connection, request):
                yield piece
        finally:
            self._fetched -= 1
            if connection is not None:
                connection.abort("the output is no longer wanted")


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
