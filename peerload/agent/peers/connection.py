"""One TLS connection between two agents: frames in, frames out, and the introduction both ends must make first.

A frame is a 4-byte big-endian length and one MessagePack envelope (wire/peer.py). The length is judged before the body
is awaited. Frames of one turn of the event loop leave in one write. Whoever speaks is the node that its certificate
names: in the introduction, and in every frame after it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from typing import TYPE_CHECKING, Protocol, cast

from peerload.agent.peers.read_timeout import ReadTimeout
from peerload.model.errors import ConfigError, FrameTooLarge, LinkUnavailable, ProtocolError
from peerload.model.messages import PROTOCOL_MAX, PROTOCOL_MIN, Envelope, Hello, Identity, Message
from peerload.security.address import connected, join_address, parse_address, plain_host
from peerload.security.tls import node_of, shown_by, tls_says
from peerload.wire import peer

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.model.errors import PeerloadError
    from peerload.security.tls import Credentials

CONNECT_S = 5.0
HANDSHAKE_S = 5.0
"""Both ends have proven who they are within this, or the connection is closed."""
SHUTDOWN_S = 2.0
"""How long a good-bye may take that the other end does not answer."""
HELLO_S = 5.0
"""Both ends have introduced themselves within this, or the connection is closed."""
HELLO_BYTES_MAX = 256 << 10
"""The largest first frame: a Hello that tells of 300 other members fits."""
HEADER_BYTES = 4
FLUSH_BYTES = 256 << 10
"""More than this is not gathered: it is written at once."""
BUFFERED_BYTES_MAX = 1 << 20
"""Bytes in the transport from which on nothing more is handed to it until it has drained."""
STALLED_S = 20.0
"""A peer that reads nothing for so long while we wait to write is given up."""
STREAM_STALLED_S = 600.0
"""The same for an output stream, whose reader may well be a person."""
FORWARD_STALLED_S = 21_600.0
"""The same for what a client asks another node, who may well look at it in a pager, page by page."""
FRAMES_PER_S_MAX = 20_000
"""A peer that sends more is read from again in the next second."""
KEEPALIVE_IDLE_S = 10
KEEPALIVE_EVERY_S = 5
KEEPALIVE_COUNT = 3


class Owner(Protocol):
    """What a connection tells whoever made it. Nothing of this may raise."""

    def opened(self, connection: PeerConnection) -> None:
        """The transport is there; nobody has said anything yet. The place to send Hello."""

    def introduced(self, connection: PeerConnection, hello: Hello) -> bool:
        """A valid Hello of the right cluster came first; False refuses the peer, and the connection closes."""
        raise NotImplementedError

    def received(self, connection: PeerConnection, envelope: Envelope) -> None:
        """A frame from the peer that introduced itself, addressed to us."""

    def malformed(self, connection: PeerConnection, error: PeerloadError) -> bool:
        """A frame that says nothing we understand; whether to go on reading."""
        raise NotImplementedError

    def refused(self, connection: PeerConnection, why: str) -> None:
        """The connection breaks a rule named ``why``, and closes."""

    def writable(self, connection: PeerConnection) -> None:
        """What was handed over has drained."""

    def closed(self, connection: PeerConnection, reason: str) -> None:
        """It is gone. `unsent` has what never was handed to the operating system."""


class PeerConnection(asyncio.Protocol):
    """The protocol object of one connection; ``dialled``: we made it; ``stream``: it is for one output alone;
    ``back``: and was asked for under this number."""

    def __init__(
        self, owner: Owner, cluster: str, identity: Identity, *, dialled: bool, stream: bool = False, back: int = 0
    ) -> None:
        self.dialled = dialled
        self.stream = stream
        self.back = back
        self.hello: Hello | None = None
        self.certified = ""
        """The node that the other end has proven to be."""
        self.certificate = b""
        """… and by which certificate (DER)."""
        self.is_shut_out: Callable[[PeerConnection], bool] = lambda _connection: False
        """Whether that certificate was revoked."""
        self.address = ""
        self.paused = False
        self.is_closed = False
        self.reason = ""
        self.owner = owner
        self._cluster = cluster
        self._identity = identity
        self._loop = asyncio.get_running_loop()
        self.used_s = self.spoken_s = self._loop.time()
        """When it was last used for more than small talk, and for anything at all (`idle.py`)."""
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._held_for: set[str] = set()
        self._is_lost = False
        self._slow = ReadTimeout(self._loop, lambda: self._refuse("a frame that does not go on"))
        self.frame_bytes = 0
        """The size of the frame that is being dealt with."""
        self._waiting: list[tuple[Message | None, bytes]] = []
        self._waiting_bytes = 0
        self._flush_planned = False
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._second = 0.0
        self._frames = 0
        self._drained: asyncio.Event = asyncio.Event()
        self._drained.set()
        self._turn = asyncio.Lock()
        self._stalled_s = STALLED_S
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.gone: asyncio.Future[None] = self._loop.create_future()

    # -- the transport's side ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Introduce ourselves and start the clock."""
        transport = cast("asyncio.Transport", transport)  # what TLS gives; that of uvloop is no subclass
        self._transport = transport
        self.certified, self.certificate = node_of(transport), shown_by(transport)
        transport.set_write_buffer_limits(high=BUFFERED_BYTES_MAX)
        sock = transport.get_extra_info("socket")
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT),
        ):
            sock.setsockopt(level, option, value)
        self.allow_stall(STREAM_STALLED_S if self.stream else STALLED_S)
        peername = transport.get_extra_info("peername")
        self.address = join_address(plain_host(str(peername[0])), peername[1]) if peername else "?"
        self._timer = self._loop.call_later(HELLO_S, self._refuse, "no introduction in time")
        if self.certified and self.is_shut_out(self):
            self.shut_out("a certificate that was revoked")
        elif self.certified:
            self.owner.opened(self)
        elif not self.certificate:
            self.shut_out("no proof: it shows no certificate")
        else:  # of our CA, but it speaks something else: not a word to it
            self.shut_out("no certificate of a node")

    def shut_out(self, why: str) -> None:
        """End it without another word, and count why."""
        self.owner.refused(self, why)
        self.abort(why)

    def data_received(self, data: bytes) -> None:
        """Take the frames out of what came."""
        if not self.is_closed:
            self._buffer += data
            taken = self._take_frames()
            del self._buffer[:taken]
            self._slow.came(len(data), is_whole=taken > 0, is_partial=bool(self._buffer) and not self.is_closed)

    def _take_frames(self) -> int:
        """Handle every whole frame in the buffer, until it is to be read no further → how many bytes of it are done with."""
        start, end = 0, len(self._buffer)
        while end - start >= HEADER_BYTES and not self.is_closed and not self._held_for:
            size = int.from_bytes(self._buffer[start : start + HEADER_BYTES], "big")
            limit = peer.DATA_BYTES_MAX if self.hello is not None else HELLO_BYTES_MAX
            if size > limit:
                self.owner.malformed(self, FrameTooLarge(size, limit))
                self._refuse("a frame too large")  # where the next one starts cannot be known
                break
            if end - start - HEADER_BYTES < size:
                break
            start += HEADER_BYTES
            self._frame(bytes(self._buffer[start : start + size]))
            start += size
        return end if self.is_closed else start

    def pause_writing(self) -> None:
        """The peer reads slower than we write."""
        self.paused = True
        self._drained.clear()
        reason = f"it took no data for {self._stalled_s:g} s"
        self._stalled = self._loop.call_later(self._stalled_s, self.abort, reason)

    def allow_stall(self, seconds: float) -> None:
        """Give the other end up when it has taken nothing for so long."""
        self._stalled_s = seconds
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))

    def resume_writing(self) -> None:
        """It has caught up."""
        self.paused = False
        self._drained.set()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        self._flush()
        self.owner.writable(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the owner, once."""
        for timer in (self._timer, self._stalled):
            if timer is not None:
                timer.cancel()
        self._is_lost = True
        self._held_for.clear()
        self.data_received(b"")  # what had come whole while it was held
        self.is_closed = True
        self._slow.stop()
        self.reason = self.reason or _why_lost(exc)
        self._drained.set()
        self._buffer.clear()
        if not self.gone.done():
            self.gone.set_result(None)
        self.owner.closed(self, self.reason)

    # -- frames in ---------------------------------------------------------------------------------------------------

    def _frame(self, raw: bytes) -> None:
        self._limit_rate()
        self.frame_bytes = len(raw)
        try:
            envelope = peer.decode(raw)
        except ProtocolError as error:
            if not self.owner.malformed(self, error):
                self._refuse("malformed frames")
            return
        if self.hello is None:
            self._introduce(envelope)
            return
        told = self.hello.identity
        if envelope.cluster != self._cluster or envelope.src != told.node or envelope.src_boot != told.boot:
            self._refuse("a frame in another's name")
            return
        self.owner.received(self, envelope)

    def _introduce(self, envelope: Envelope) -> None:
        hello = envelope.body
        if not isinstance(hello, Hello):
            self._refuse("no introduction")
            return
        told, profile = hello.identity, hello.profile
        if envelope.cluster != self._cluster:
            self._refuse("other cluster")
        elif told.node != self.certified:
            self._refuse("a name that its certificate does not have")
        elif told.node != envelope.src or told.boot != envelope.src_boot or profile.node != told.node:
            self._refuse("a frame in another's name")
        elif profile.protocol_min > PROTOCOL_MAX or profile.protocol_max < PROTOCOL_MIN:
            self._refuse("no common protocol version")
        else:
            self.hello = hello
            if self._timer is not None:
                self._timer.cancel()
            if hello.stream and not self.dialled:
                self.stream = True
                self.allow_stall(STREAM_STALLED_S)
            if not self.owner.introduced(self, hello):
                self.close(self.reason or "refused")
            elif not self.ready.done():
                self.ready.set_result(None)

    def _limit_rate(self) -> None:
        """Stop reading until the next second if this one had enough frames."""
        now = self._loop.time()
        if now - self._second >= 1.0:
            self._second, self._frames = now, 0
        self._frames += 1
        if self._frames == FRAMES_PER_S_MAX and self._transport is not None:
            self.pause_reading("its frames are too many a second")
            self._loop.call_later(1.0, self.resume_reading, "its frames are too many a second")

    def pause_reading(self, why: str) -> None:
        """Let the operating system hold the peer back, until `resume_reading` for this reason; what has come already waits."""
        if self._is_lost:
            return  # what is left is taken to its end
        self._held_for.add(why)
        if self._transport is not None and not self._transport.is_closing():
            self._slow.hold(held=True)
            self._transport.pause_reading()

    def resume_reading(self, why: str) -> None:
        """Go on, first with what has come, unless there are other reasons not to."""
        self._held_for.discard(why)
        if not self._held_for:
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._held_for or self._transport is None or self._transport.is_closing():
            return
        self._slow.hold(held=False)
        self.data_received(b"")
        if not self._held_for and not self._transport.is_closing():
            self._transport.resume_reading()

    def _refuse(self, why: str) -> None:
        if not self.is_closed:
            self.owner.refused(self, why)
            self.close(why)

    # -- frames out --------------------------------------------------------------------------------------------------

    def write(self, message: Message, frame: bytes) -> None:
        """Write a frame at the end of this turn of the loop, with all others of the turn."""
        self._waiting.append((None if self.stream else message, frame))
        self._waiting_bytes += len(frame)
        if self._waiting_bytes >= FLUSH_BYTES:
            self._flush()
        elif not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        if self._transport is None or self._transport.is_closing() or self.paused or not self._waiting:
            return
        frames = b"".join(frame for _, frame in self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        self._transport.write(frames)

    async def drain(self) -> None:
        """Wait until the transport takes more, and all who have waited before had their turn. Raises ConnectionError if it is
        gone."""
        self._flush()
        async with self._turn:
            while not self._drained.is_set():
                await self._drained.wait()
        if self.is_closed:
            raise ConnectionError(self.reason or "closed")

    @property
    def unsent_bytes(self) -> int:
        """What was written and the operating system has not taken yet."""
        in_transport = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self._waiting_bytes + in_transport

    def unsent(self) -> list[Message]:
        """The messages that were never handed to the operating system; they are forgotten here. Of a stream none: who asked
        asks again, and its frames alone are memory enough."""
        messages = [message for message, _ in self._waiting if message is not None]
        self._waiting.clear()
        self._waiting_bytes = 0
        return messages

    def close(self, reason: str) -> None:
        """Write what is gathered, then close; nothing is read any more. ``reason`` is for `closed`."""
        if self.is_closed or self._transport is None:
            return
        self._flush()
        self.reason = self.reason or reason
        self.is_closed = True
        self._transport.close()

    def abort(self, reason: str) -> None:
        """Close at once, whatever the transport still holds."""
        self.is_closed = True
        self.reason = self.reason or reason
        if self._transport is not None:
            self._transport.abort()


NO_ANSWER, REFUSED, NO_WAY = "it does not answer", "it refuses connections", "there is no way to it"
NO_MEMBER = "what answers there is no node of the cluster"
"""What a peer that cannot be dialled is told of that."""


async def dial(address: str, who: str, tls: Credentials, make: Callable[[], PeerConnection]) -> PeerConnection:
    """A connection to `HOST:PORT` whose other end, ``who`` for people, is of our cluster and has introduced itself.
    Raises LinkUnavailable."""
    what = f"no link to {who}"
    connection = make()
    try:
        host, port = parse_address("peer", address, loopback_only=tls.cluster.is_local)
        async with asyncio.timeout(CONNECT_S):
            sock = await connected(host, port)
            try:
                await asyncio.get_running_loop().create_connection(
                    lambda: connection,
                    sock=sock,
                    ssl=tls.client,
                    server_hostname="",  # a peer is who its certificate says, wherever it was reached
                    ssl_handshake_timeout=HANDSHAKE_S,
                    ssl_shutdown_timeout=SHUTDOWN_S,
                )
            except BaseException:
                sock.close()
                raise
    except asyncio.CancelledError:
        connection.abort("no longer wanted")  # it may have been made in the meantime
        raise
    except TimeoutError:
        raise LinkUnavailable(
            who, what, why=f"{address} does not answer within {CONNECT_S:g} s", kind=NO_ANSWER
        ) from None
    except ssl.SSLError as error:
        raise LinkUnavailable(who, what, why=f"{address}: {tls_says(error)}", kind=NO_MEMBER) from None
    except OSError as error:
        kind = REFUSED if isinstance(error, ConnectionError) else NO_WAY
        raise LinkUnavailable(who, what, why=f"{address}: {operating_system_says(error)}", kind=kind) from None
    except (ConfigError, UnicodeError) as error:
        raise LinkUnavailable(who, what, why=str(error)) from None
    try:
        await asyncio.wait([connection.ready, connection.gone], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        connection.abort("no longer wanted")
        raise
    if not connection.ready.done():
        raise LinkUnavailable(who, what, why=f"{address}: {connection.reason}")
    return connection


def operating_system_says(error: OSError) -> str:
    """The system's own words for it; asyncio and uvloop have different ones."""
    return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)


def _why_lost(error: Exception | None) -> str:
    if error is None:
        return "the other end closed the connection"
    return tls_says(error) if isinstance(error, ssl.SSLError) else str(error)
