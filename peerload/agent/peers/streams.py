"""Streams: one connection for the output of one task, its standard input, files, or one forwarded client, so that bulk data never
delays a lease.

The reading end reads no faster than its consumer takes, and the serving end writes no faster than the other reads: between
them are the buffers of the operating system and a few pieces.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Protocol

from peerload.agent.peers.connection import FORWARD_STALLED_S, STREAM_STALLED_S
from peerload.model.errors import LinkUnavailable
from peerload.model.messages import (
    Blocks,
    BlocksEnd,
    BlocksRequest,
    Forward,
    ForwardStop,
    Hello,
    InputRequest,
    Message,
    OutputChunk,
    OutputEnd,
    OutputRequest,
)
from peerload.wire import peer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from peerload.agent.peers.connection import Links, Owner, PeerConnection
    from peerload.agent.peers.local_node import LocalNode
    from peerload.model.errors import PeerloadError
    from peerload.model.messages import Envelope

STREAMS_MAX = 512
"""Streams of other nodes for output, input and files served at a time, and as many fetched."""
FORWARDING_MAX = 384
"""Streams of other nodes for forwarded clients. They have places of their own, so that they never block outputs."""
UNASKED_MAX = 256
"""Streams without a request yet. Over it the oldest of the node that has most of them is closed."""
PIECES_WAITING_MAX = 4
"""Pieces that may wait for the consumer. Reading stops there, and goes on when half of them are taken."""
_CONSUMER_BEHIND = "pieces wait for the consumer"

Piece = OutputChunk | OutputEnd
LAST = OutputEnd | BlocksEnd
KINDS: dict[type[Message], tuple[type[Message], ...]] = {
    OutputRequest: (OutputChunk, OutputEnd),
    BlocksRequest: (Blocks, BlocksEnd),
}
"""Requests that are answered by a sequence of pieces, and these pieces."""


class PieceServer(Protocol):
    """Source of the pieces that answer one kind of request. src: the node that asks; the last piece is one of LAST."""

    def __call__(self, src: str, request: Any, /) -> AsyncIterator[Message]:  # noqa: ANN401 -- of its kind
        """The pieces."""
        raise NotImplementedError


class StreamServer(Protocol):
    """Serves the streams of one kind: forwarded clients, or standard input."""

    def received(
        self,
        link: PeerConnection,
        node: str,
        message: Any,  # noqa: ANN401 -- of the kinds that it serves, which differ
        reply: Callable[[Any], None],
        /,
    ) -> None:
        """A message came over a stream of this node; ``reply`` sends one back."""

    def closed(self, link: PeerConnection, /) -> None:
        """The stream is closed."""


class StreamDialer(Protocol):
    """Opens streams to other nodes."""

    def open(self, address: str, node: str, make: Callable[[], Owner]) -> Awaitable[PeerConnection]:
        """A stream to this node, owned by what ``make()`` gives. Raises LinkUnavailable."""
        raise NotImplementedError


class Streams:
    """The streams of one node in both directions."""

    def __init__(self, local: LocalNode, links: Links, dialer: StreamDialer) -> None:
        self._local = local
        self._links = links
        self._dialer = dialer
        self._pieces: Mapping[type[Message], PieceServer] = {}
        self._fetched = 0
        self._forwards: StreamServer | None = None
        self._inputs: StreamServer | None = None
        self._servers: dict[PeerConnection, StreamServer] = {}
        self.served: dict[PeerConnection, asyncio.Task[None] | None] = {}
        """Connections that other nodes made, with the task that writes an output; None: no output was requested."""
        self._unasked: dict[PeerConnection, str] = {}

    def serve(
        self,
        pieces: Mapping[type[Message], PieceServer],
        inputs: StreamServer | None = None,
        forwards: StreamServer | None = None,
    ) -> None:
        """Serve from now on what is requested in pieces (outputs of attempts that ran here, blocks of files), the standard
        input of tasks that run elsewhere, and the clients of other nodes."""
        self._pieces, self._inputs, self._forwards = pieces, inputs, forwards

    async def open(
        self, dst: str, address: str, kinds: tuple[type[Message], ...]
    ) -> tuple[StreamReader, PeerConnection]:
        """Open a stream over which the other node may send messages of these kinds. Raises LinkUnavailable."""
        connection = await self._dialer.open(address, dst, lambda: StreamReader(self._local, dst, kinds))
        assert isinstance(connection.owner, StreamReader)
        return connection.owner, connection

    def accepted(self, connection: PeerConnection) -> None:
        """A peer has opened a stream; its request is still to come."""
        self.served[connection] = None
        self._unasked[connection] = connection.hello.identity.node if connection.hello is not None else ""
        if len(self._unasked) > UNASKED_MAX:
            ((most, _),) = Counter(self._unasked.values()).most_common(1)
            self._refuse(next(known for known, node in self._unasked.items() if node == most))

    def _refuse(self, connection: PeerConnection) -> None:
        self._links.drop("too many streams", connection.certified)
        self._unasked.pop(connection, None)
        connection.close("too many streams")

    def _admit(self, connection: PeerConnection, message: Message) -> bool:
        """Check the limits at the first request of a stream. False: it is refused, and closed."""
        if connection not in self._unasked:
            return True
        is_forward = isinstance(message, Forward | ForwardStop)
        forwarding = sum(1 for known in self._servers.values() if known is self._forwards)
        others = len(self.served) - len(self._unasked) - forwarding
        if forwarding >= FORWARDING_MAX if is_forward else others >= STREAMS_MAX:
            self._refuse(connection)
            return False
        del self._unasked[connection]
        return True

    def received(self, connection: PeerConnection, node: str, message: Message) -> None:
        """Handle a message over a stream: one request for output, or any number for one `StreamServer`."""
        if not self._admit(connection, message):
            return
        boot = connection.hello.identity.boot if connection.hello is not None else ""
        server = self._server_of(message)
        if (
            server is not None
            and self.served.get(connection) is None
            and self._servers.get(connection, server) is server
        ):
            if connection not in self._servers and server is self._forwards:
                connection.allow_stall(FORWARD_STALLED_S)
            self._servers[connection] = server
            server.received(
                connection, node, message, lambda reply: _write(connection, self._local.envelope(reply, node, boot))
            )
            return
        is_taken = connection in self._servers or self.served.get(connection) is not None
        source = self._pieces.get(type(message))
        if is_taken or source is None:
            self._links.drop("no output request", connection.certified)
            connection.close("no output request")
            return
        pieces = source(node, message)
        work = write_output(connection, pieces, lambda piece: self._local.envelope(piece, node, boot))
        self.served[connection] = self._links.spawn(work, f"pieces for {node}")

    def _server_of(self, message: Message) -> StreamServer | None:
        if isinstance(message, Forward | ForwardStop):
            return self._forwards
        return self._inputs if isinstance(message, InputRequest) else None

    def closed(self, connection: PeerConnection) -> None:
        """Stop serving a connection that has closed."""
        self._unasked.pop(connection, None)
        server = self._servers.pop(connection, None)
        if server is not None:
            server.closed(connection)
        task = self.served.pop(connection, None)
        if task is not None:
            task.cancel()

    async def fetch(self, dst: str, address: str, request: Message, what: str) -> AsyncIterator[Any]:
        """Fetch the pieces that answer a request to another node as they come, one of LAST at the end. ``what``: for messages.
        Raises LinkUnavailable."""
        if not address:
            raise LinkUnavailable(dst, f"no address of {dst} is known")
        if self._fetched >= STREAMS_MAX:
            raise LinkUnavailable(dst, "too many output streams", why=f"at most {STREAMS_MAX} at a time")
        self._fetched += 1
        connection: PeerConnection | None = None
        try:
            reader, connection = await self.open(dst, address, KINDS[type(request)])
            reader.write(connection, request)
            while True:
                piece = await reader.next(connection, what)
                yield piece
                if isinstance(piece, LAST):
                    return
        finally:
            self._fetched -= 1
            if connection is not None:
                connection.abort(f"{what} is no longer wanted")


class StreamReader:
    """The asking end of a stream: owner of one connection to ``dst``, which may send messages of these ``kinds``; any other
    ends it. One reader at a time."""

    def __init__(self, local: LocalNode, dst: str, kinds: tuple[type[Message], ...]) -> None:
        self._local = local
        self._dst = dst
        self._kinds = kinds
        self._pieces: deque[Message] = deque()
        self._arrived = asyncio.Event()
        self._reason = ""

    def write(self, connection: PeerConnection, message: Message) -> None:
        """Send a message to the other end. Raises FrameTooLarge."""
        boot = connection.hello.identity.boot if connection.hello is not None else ""
        connection.write(message, peer.encode_frame(self._local.envelope(message, self._dst, boot)))

    async def next(self, connection: PeerConnection, what: str) -> Message:
        """The next message. Raises LinkUnavailable, which names ``what`` has stopped coming, if the connection closes
        before."""
        while not self._pieces:
            if self._reason:
                raise LinkUnavailable(self._dst, f"{what} stopped coming", why=self._reason)
            self._arrived.clear()
            await self._arrived.wait()
        message = self._pieces.popleft()
        if len(self._pieces) == PIECES_WAITING_MAX // 2:
            connection.resume_reading(_CONSUMER_BEHIND)
        return message

    # -- Owner -------------------------------------------------------------------------------------------------------

    def opened(self, connection: PeerConnection) -> None:
        """Send Hello."""
        hello = self._local.hello(stream=True)
        connection.write(hello, peer.encode_frame(self._local.envelope(hello)))

    def hello_received(self, connection: PeerConnection, hello: Hello) -> bool:
        """Refuse every node but ``dst``."""
        if hello.identity.node == self._dst:
            return True
        connection.reason = f"{hello.identity.node} answers there"
        return False

    def received(self, connection: PeerConnection, envelope: Envelope) -> None:
        """Keep the message for the reader."""
        if not isinstance(envelope.body, self._kinds):
            connection.abort("it sent something that was not asked for")
            return
        self._pieces.append(envelope.body)
        self._arrived.set()
        if len(self._pieces) >= PIECES_WAITING_MAX:
            connection.pause_reading(_CONSUMER_BEHIND)

    def malformed(self, _: PeerConnection, __: PeerloadError) -> bool:
        """Read no further."""
        return False

    def refused(self, _: PeerConnection, why: str) -> None:
        """Keep the reason for the error."""
        self._reason = self._reason or why

    def writable(self, _: PeerConnection) -> None:
        """Do nothing: no message waits here."""

    def closed(self, _: PeerConnection, reason: str) -> None:
        """Wake the reader."""
        self._reason = self._reason or reason
        self._arrived.set()


def _write(connection: PeerConnection, envelope: Envelope) -> None:
    connection.write(envelope.body, peer.encode_frame(envelope))


async def write_output(
    connection: PeerConnection, pieces: AsyncIterator[Message], envelope: Callable[[Message], Envelope]
) -> None:
    """Write each piece as fast as the other end reads, then close when it has read all. Returns early if it is gone."""
    try:
        async for piece in pieces:
            connection.write(piece, peer.encode_frame(envelope(piece)))
            await connection.drain()
            if isinstance(piece, LAST):
                await asyncio.wait([connection.gone], timeout=STREAM_STALLED_S)
                break
    except ConnectionError:
        return  # the reader is gone, and can go on from where it was
    finally:
        if (aclose := getattr(pieces, "aclose", None)) is not None:
            await aclose()
        connection.close("the output is complete")
