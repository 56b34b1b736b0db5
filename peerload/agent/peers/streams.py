"""Streams: one connection for one task's output, or for what one client asks, so that it never stands before a lease.

The asking side reads no faster than its consumer takes, the serving side writes no faster than the asking side reads:
what lies between them are the operating system's buffers and a few pieces.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Protocol

from peerload.agent.peers.connection import FORWARD_STALLED_S, STREAM_STALLED_S
from peerload.model.errors import LinkUnavailable
from peerload.model.messages import (
    Envelope,
    Forward,
    ForwardStop,
    Hello,
    InputRequest,
    OutputChunk,
    OutputEnd,
    OutputRequest,
)
from peerload.wire import peer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    from peerload.agent.peers.connection import Owner, PeerConnection
    from peerload.model.errors import PeerloadError
    from peerload.model.messages import Message

STREAMS_MAX = 512
"""Streams of others for output and input served at a time, and as many outputs fetched."""
FORWARDING_MAX = 384
"""Streams of others over which their clients ask: they have places of their own, so that they never stand before outputs,
which have to come home."""
UNASKED_MAX = 256
"""Streams over which nothing was asked yet: nobody knows what they are for. Over it the oldest of the node that has most is
closed."""
PIECES_WAITING_MAX = 8
"""Pieces that may wait for the consumer; reading stops there and goes on when half of them are taken."""
_NOT_TAKEN = "pieces wait for the consumer"

Piece = OutputChunk | OutputEnd


class ServeOutput(Protocol):
    """Where output comes from: called with the asking node and what it asks for."""

    def __call__(self, src: str, request: OutputRequest, /) -> AsyncIterator[Piece]:
        """Pieces, OutputEnd the last."""
        raise NotImplementedError


class ServeForwards(Protocol):
    """Who carries out what clients of other nodes ask; who sends the input that they ask for."""

    def received(
        self,
        link: PeerConnection,
        node: str,
        message: Any,  # noqa: ANN401 -- of the kinds that it serves, which differ
        say: Callable[[Any], None],
        /,
    ) -> None:
        """A message over one stream of that node; ``say`` sends one back."""

    def closed(self, link: PeerConnection, /) -> None:
        """That stream is gone."""


class OutputStreams:
    """Those of one node, to both sides. ``serve_output``: the output of an attempt that ran here; ``greeting()``: our
    introduction on a stream; ``envelope`` puts a message into its frame; ``open_(address, node, make)`` makes a
    connection for a stream, whose owner is what ``make()`` gives, or raises LinkUnavailable; ``drop(why, who)`` counts; ``spawn(work, name)`` does it in the
    background."""

    def __init__(
        self,
        serve_output: ServeOutput,
        greeting: Callable[[], Hello],
        envelope: Callable[[Message, str, str], Envelope],
        open_: Callable[[str, str, Callable[[], Owner]], Awaitable[PeerConnection]],
        drop: Callable[[str, str], None],
        spawn: Callable[[Coroutine[object, object, None], str], asyncio.Task[None]],
    ) -> None:
        self._serve_output = serve_output
        self._greeting = greeting
        self._envelope = envelope
        self._open = open_
        self._drop = drop
        self._spawn = spawn
        self._fetched = 0
        self.forwards: ServeForwards | None = None
        """Who carries out what clients of other nodes ask; None: nobody yet."""
        self.inputs: ServeForwards | None = None
        """Who sends the standard input of attempts that run elsewhere; None: nobody yet."""
        self._forwarding: dict[PeerConnection, ServeForwards] = {}
        self.served: dict[PeerConnection, asyncio.Task[None] | None] = {}
        """The connections that others made to us; None: no output was asked for over it yet."""
        self._unasked: dict[PeerConnection, str] = {}

    async def open(
        self, dst: str, address: str, kinds: tuple[type[Message], ...]
    ) -> tuple[StreamReader, PeerConnection]:
        """A stream to another node, over which it may say messages of these kinds. Raises LinkUnavailable."""
        connection = await self._open(address, dst, lambda: self.reader(dst, kinds))
        assert isinstance(connection.owner, StreamReader)
        return connection.owner, connection

    def reader(self, dst: str, kinds: tuple[type[Message], ...]) -> StreamReader:
        """The asking end of a stream to this node."""
        return StreamReader(dst, self._greeting, self._envelope, kinds)

    def opened(self, connection: PeerConnection) -> None:
        """A peer has introduced itself on a connection for output, or for what its clients ask."""
        self.served[connection] = None
        self._unasked[connection] = connection.hello.identity.node if connection.hello is not None else ""
        if len(self._unasked) > UNASKED_MAX:
            ((most, _),) = Counter(self._unasked.values()).most_common(1)
            self._refuse(next(known for known, node in self._unasked.items() if node == most))

    def _refuse(self, connection: PeerConnection) -> None:
        self._drop("too many streams", connection.certified)
        self._unasked.pop(connection, None)
        connection.close("too many streams")

    def _admit(self, connection: PeerConnection, message: Message) -> bool:
        """Whether there is a place for what is asked over this stream first."""
        if connection not in self._unasked:
            return True
        asks = isinstance(message, Forward | ForwardStop)
        forwarding = sum(1 for known in self._forwarding.values() if known is self.forwards)
        others = len(self.served) - len(self._unasked) - forwarding
        if forwarding >= FORWARDING_MAX if asks else others >= STREAMS_MAX:
            self._refuse(connection)
            return False
        del self._unasked[connection]
        return True

    def received(self, connection: PeerConnection, node: str, message: Message) -> None:
        """One request for output for each connection, or any number of forwarded ones, and nothing else."""
        if not self._admit(connection, message):
            return
        told = connection.hello
        boot = told.identity.boot if told is not None else ""
        conversation = self._conversation(message)
        if (
            conversation is not None
            and self.served.get(connection) is None
            and self._forwarding.get(connection, conversation) is conversation
        ):
            if connection not in self._forwarding and conversation is self.forwards:
                connection.allow_stall(FORWARD_STALLED_S)
            self._forwarding[connection] = conversation
            conversation.received(
                connection, node, message, lambda answer: _write(connection, self._envelope(answer, node, boot))
            )
            return
        is_taken = connection in self._forwarding or self.served.get(connection) is not None
        if is_taken or not isinstance(message, OutputRequest):
            self._drop("no output request", connection.certified)
            connection.close("no output request")
            return
        pieces = self._serve_output(node, message)
        work = serve(connection, pieces, lambda piece: self._envelope(piece, node, boot))
        self.served[connection] = self._spawn(work, f"output for {node}")

    def _conversation(self, message: Message) -> ServeForwards | None:
        """Who deals with a stream over which more than one thing is asked."""
        if isinstance(message, Forward | ForwardStop):
            return self.forwards
        return self.inputs if isinstance(message, InputRequest) else None

    def closed(self, connection: PeerConnection) -> None:
        """The other end is gone: what is left of it is of no use."""
        self._unasked.pop(connection, None)
        conversation = self._forwarding.pop(connection, None)
        if conversation is not None:
            conversation.closed(connection)
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
            reader, connection = await self.open(dst, address, (OutputChunk, OutputEnd))
            reader.write(connection, request)
            while True:
                piece = await reader.next(connection, f"the output of {request.task}")
                assert isinstance(piece, OutputChunk | OutputEnd)
                yield piece
                if isinstance(piece, OutputEnd):
                    return
        finally:
            self._fetched -= 1
            if connection is not None:
                connection.abort("the output is no longer wanted")


class StreamReader:
    """The asking end of a stream: owner of one connection to ``dst``, and of what comes over it of these ``kinds``. Anything
    else ends it. One reader at a time."""

    def __init__(
        self,
        dst: str,
        hello: Callable[[], Message],
        envelope: Callable[[Message, str, str], Envelope],
        kinds: tuple[type[Message], ...],
    ) -> None:
        self._dst = dst
        self._hello = hello
        self._envelope = envelope
        self._kinds = kinds
        self._came: deque[Message] = deque()
        self._arrived = asyncio.Event()
        self._reason = ""

    def write(self, connection: PeerConnection, message: Message) -> None:
        """Say something to the other end. Raises FrameTooLarge."""
        boot = connection.hello.identity.boot if connection.hello is not None else ""
        connection.write(message, peer.encode_frame(self._envelope(message, self._dst, boot)))

    async def next(self, connection: PeerConnection, what: str) -> Message:
        """The next that came; when half of what may wait is taken, more is read. Raises LinkUnavailable, which says what
        has stopped coming, if the connection breaks before that."""
        while not self._came:
            if self._reason:
                raise LinkUnavailable(self._dst, f"{what} stopped coming", why=self._reason)
            self._arrived.clear()
            await self._arrived.wait()
        message = self._came.popleft()
        if len(self._came) == PIECES_WAITING_MAX // 2:
            connection.resume_reading(_NOT_TAKEN)
        return message

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
        """Keep it for the reader."""
        if not isinstance(envelope.body, self._kinds):
            connection.abort("it sent something that was not asked for")
            return
        self._came.append(envelope.body)
        self._arrived.set()
        if len(self._came) >= PIECES_WAITING_MAX:
            connection.pause_reading(_NOT_TAKEN)

    def malformed(self, _: PeerConnection, __: PeerloadError) -> bool:
        """Nothing else can follow."""
        return False

    def refused(self, _: PeerConnection, why: str) -> None:
        """Kept for the error."""
        self._reason = self._reason or why

    def writable(self, _: PeerConnection) -> None:
        """Nothing waits here."""

    def closed(self, _: PeerConnection, reason: str) -> None:
        """Wake the reader."""
        self._reason = self._reason or reason
        self._arrived.set()


def _write(connection: PeerConnection, envelope: Envelope) -> None:
    connection.write(envelope.body, peer.encode_frame(envelope))


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
