"""One TLS connection between two agents, and the registry of all of them.

A frame is a 4-byte big-endian length and one MessagePack envelope (wire/peer.py). The length is checked before the body
is read. Frames written in one turn of the event loop leave in one write. The first frame of each end is its Hello (the
handshake). The sender of every frame has to be the node that its certificate names.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import weakref
from typing import TYPE_CHECKING, Protocol, cast

from peerload.agent.runtime import ReadTimeout
from peerload.model import metrics
from peerload.model.errors import ConfigError, FrameTooLarge, LinkUnavailable, ProtocolError
from peerload.model.messages import PROTOCOL_MAX, PROTOCOL_MIN, Envelope, Hello, Identity, Message
from peerload.security.address import join_address, open_tcp, parse_address, plain_host
from peerload.security.certificates import proven_info
from peerload.security.tls import node_of, peer_certificate, tls_error_text
from peerload.wire import peer
from peerload.wire.frame import HEADER_BYTES

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Coroutine
    from datetime import datetime

    from peerload.model.errors import PeerloadError
    from peerload.security.tls import Credentials

CONNECT_S = 5.0
HANDSHAKE_S = 5.0
"""Timeout of the TLS handshake."""
SHUTDOWN_S = 2.0
"""Timeout of the TLS shutdown."""
HELLO_S = 5.0
"""Timeout of the Hello of the other end."""
HELLO_BYTES_MAX = 256 << 10
"""Size limit of the first frame: a Hello that describes 300 other members fits."""
READ_BYTES = 16 << 10
"""Room for the next frames: a TLS record."""
FLUSH_BYTES = 256 << 10
"""Gathered frames of this size are written at once."""
BUFFERED_BYTES_MAX = 1 << 20
"""High-water mark of the transport's buffer: above it nothing more is handed to the transport until it has drained."""
STALLED_S = 20.0
"""A peer that reads nothing for so long while this node has something to write is disconnected."""
STREAM_STALLED_S = 600.0
"""Limit for an output stream, whose reader may be a person."""
FORWARD_STALLED_S = 21_600.0
"""Limit for a forwarded request, whose answer may be read in a pager."""
FRAMES_PER_S_MAX = 20_000
"""A peer that sends more frames is not read again before the next second."""
KEEPALIVE_IDLE_S = 10
KEEPALIVE_EVERY_S = 5
KEEPALIVE_COUNT = 3


class Owner(Protocol):
    """Callbacks of a connection. None of them may raise."""

    def opened(self, connection: PeerConnection) -> None:
        """TLS is up; nothing was sent yet. The place to send Hello."""

    def hello_received(self, connection: PeerConnection, hello: Hello) -> bool:
        """A valid Hello of this cluster came first. False refuses the peer: the connection closes."""
        raise NotImplementedError

    def received(self, connection: PeerConnection, envelope: Envelope) -> None:
        """A later frame of the peer came."""

    def malformed(self, connection: PeerConnection, error: PeerloadError) -> bool:
        """A frame could not be decoded. Returns whether to go on reading."""
        raise NotImplementedError

    def refused(self, connection: PeerConnection, why: str) -> None:
        """The peer has broken the rule named ``why``; the connection closes."""

    def writable(self, connection: PeerConnection) -> None:
        """The transport's buffer has drained."""

    def closed(self, connection: PeerConnection, reason: str) -> None:
        """The connection is closed. `PeerConnection.unsent` has what never reached the operating system."""


class Links(Owner, Protocol):
    """Interface of `PeerLinks` for its parts."""

    def send(self, dst: str, message: Message) -> None:
        """Send a message over a link."""

    def connect(self, identity: Identity) -> None:
        """Make a link to this node if there is none."""

    def drop(self, why: str, who: str = "", detail: str = "") -> None:
        """Count a frame or connection that was dropped, and report it if it breaks a security rule."""

    def spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Run this in the background until it ends or the links are closed."""
        raise NotImplementedError


class PeerConnection(asyncio.BufferedProtocol):
    """The protocol object of one connection. ``dialled``: this node made it. ``stream``: it carries one output, input or
    forwarded client, not messages. ``back``: the number under which the peer asked for this stream, 0 if it did not."""

    def __init__(self, owner: Owner, tls: Credentials, *, dialled: bool, stream: bool = False, back: int = 0) -> None:
        self.dialled = dialled
        self.stream = stream
        self.back = back
        self.hello: Hello | None = None
        self.certified = ""
        """The node named by the peer's certificate."""
        self.certificate = b""
        """The peer's certificate (DER)."""
        self.address = ""
        self.paused = False
        self.is_closed = False
        self.reason = ""
        self.owner = owner
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self.used_s = self.active_s = self._loop.time()
        """Loop time of the last message that was more than membership traffic, and of the last message at all."""
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._filled = 0
        self._paused_for: set[str] = set()
        self._is_lost = False
        self._read_timeout = ReadTimeout(self._loop, lambda: self._refuse("a frame that does not go on"))
        self.frame_bytes = 0
        """Size of the frame that is being handled."""
        self._waiting: list[tuple[Message | None, bytes | bytearray]] = []
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
        """Check the peer's certificate, let the owner send Hello, and start the timeout of the peer's."""
        transport = cast("asyncio.Transport", transport)  # what TLS gives; that of uvloop is no subclass
        self._transport = transport
        self.certified, self.certificate = node_of(transport), peer_certificate(transport)
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
        if self.certified and self.is_revoked:
            self._reject("a certificate that was revoked")
        elif self.certified:
            self.owner.opened(self)
        elif not self.certificate:
            self._reject("no proof: it shows no certificate")
        else:  # of this cluster's CA, but for another protocol
            self._reject("no certificate of a node")

    @property
    def is_revoked(self) -> bool:
        """True if the peer's certificate was revoked, or is none that this cluster's CA makes."""
        try:
            return self._tls.refuses(proven_info(self.certificate))
        except ValueError:
            return True

    def _reject(self, why: str) -> None:
        """Close without sending anything."""
        self.owner.refused(self, why)
        self.abort(why)

    def get_buffer(self, _: int) -> memoryview:
        """Room for the rest of the frame that has begun, or for the next ones. A large frame has a buffer of its own size:
        it is decrypted into it and, if it carries blocks of files, never copied."""
        if self.is_closed:
            self._buffer, self._filled = bytearray(), 0
        if self._filled == len(self._buffer):
            begun = self._buffer
            size = HEADER_BYTES + int.from_bytes(begun[:HEADER_BYTES], "big") if begun else 0
            self._buffer = bytearray(max(size, READ_BYTES))
            self._buffer[: self._filled] = begun
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Handle the complete frames."""
        self._filled += nbytes
        if self.is_closed:
            return
        taken = self._take_frames()
        if taken:
            self._buffer = self._buffer[taken : self._filled]
            self._filled = len(self._buffer)
        self._read_timeout.received(nbytes, is_whole=taken > 0, is_partial=self._filled > 0 and not self.is_closed)

    def _take_frames(self) -> int:
        """Handle each complete frame in the buffer, until reading is paused. Returns the number of bytes handled."""
        start, end = 0, self._filled
        while end - start >= HEADER_BYTES and not self.is_closed and not self._paused_for:
            size = int.from_bytes(self._buffer[start : start + HEADER_BYTES], "big")
            limit = peer.DATA_BYTES_MAX if self.hello is not None else HELLO_BYTES_MAX
            if size > limit:
                self.owner.malformed(self, FrameTooLarge(size, limit))
                self._refuse("a frame too large")  # where the next one starts cannot be known
                break
            if end - start - HEADER_BYTES < size:
                break
            start += HEADER_BYTES
            self._frame(memoryview(self._buffer)[start : start + size])
            start += size
        return end if self.is_closed else start

    def pause_writing(self) -> None:
        """The peer reads slower than this node writes."""
        self.paused = True
        self._drained.clear()
        reason = f"it took no data for {self._stalled_s:g} s"
        self._stalled = self._loop.call_later(self._stalled_s, self.abort, reason)

    def allow_stall(self, seconds: float) -> None:
        """Set how long the peer may read nothing before it is disconnected."""
        self._stalled_s = seconds
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))

    def resume_writing(self) -> None:
        """The peer has caught up."""
        self.paused = False
        self._drained.set()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        self._flush()
        self.owner.writable(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle what has come, then tell the owner, once."""
        for timer in (self._timer, self._stalled):
            if timer is not None:
                timer.cancel()
        self._is_lost = True
        self._paused_for.clear()
        self.buffer_updated(0)  # complete frames that came while reading was paused
        self.is_closed = True
        self._read_timeout.stop()
        self.reason = self.reason or _why_lost(exc)
        self._drained.set()
        self._buffer, self._filled = bytearray(), 0
        if not self.gone.done():
            self.gone.set_result(None)
        self.owner.closed(self, self.reason)

    # -- frames in ---------------------------------------------------------------------------------------------------

    def _frame(self, raw: memoryview) -> None:
        self._limit_rate()
        self.frame_bytes = len(raw)
        try:
            envelope = peer.decode(raw)
        except ProtocolError as error:
            if not self.owner.malformed(self, error):
                self._refuse("malformed frames")
            return
        if self.hello is None:
            self._handshake(envelope)
            return
        identity = self.hello.identity
        is_its_own = envelope.src == identity.node and envelope.src_boot == identity.boot
        if envelope.cluster != self._tls.cluster.name or not is_its_own:
            self._refuse("a frame in another's name")
            return
        self.owner.received(self, envelope)

    def _handshake(self, envelope: Envelope) -> None:
        hello = envelope.body
        if not isinstance(hello, Hello):
            self._refuse("no introduction")
            return
        identity, profile = hello.identity, hello.profile
        if envelope.cluster != self._tls.cluster.name:
            self._refuse("other cluster")
        elif identity.node != self.certified:
            self._refuse("a name that its certificate does not have")
        elif (identity.node, identity.boot) != (envelope.src, envelope.src_boot) or profile.node != identity.node:
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
            if not self.owner.hello_received(self, hello):
                self.close(self.reason or "refused")
            elif not self.ready.done():
                self.ready.set_result(None)

    def _limit_rate(self) -> None:
        """Pause reading until the next second if this one had FRAMES_PER_S_MAX frames."""
        now = self._loop.time()
        if now - self._second >= 1.0:
            self._second, self._frames = now, 0
        self._frames += 1
        if self._frames == FRAMES_PER_S_MAX and self._transport is not None:
            self.pause_reading("its frames are too many a second")
            self._loop.call_later(1.0, self.resume_reading, "its frames are too many a second")

    def pause_reading(self, why: str) -> None:
        """Read nothing more until `resume_reading` for the same reason; frames that have come already wait."""
        if self._is_lost:
            return  # what is left is handled to its end
        self._paused_for.add(why)
        if self._transport is not None and not self._transport.is_closing():
            self._read_timeout.pause(paused=True)
            self._transport.pause_reading()

    def resume_reading(self, why: str) -> None:
        """Go on, first with the frames that have come, unless there are other reasons not to."""
        self._paused_for.discard(why)
        if not self._paused_for:
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._paused_for or self._transport is None or self._transport.is_closing():
            return
        self._read_timeout.pause(paused=False)
        self.buffer_updated(0)
        if not self._paused_for and not self._transport.is_closing():
            self._transport.resume_reading()

    def _refuse(self, why: str) -> None:
        if not self.is_closed:
            self.owner.refused(self, why)
            self.close(why)

    # -- frames out --------------------------------------------------------------------------------------------------

    def write(self, message: Message, frame: bytes | bytearray) -> None:
        """Write a frame at the end of this turn of the loop, together with the others of the turn."""
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
        frames = self._waiting[0][1] if len(self._waiting) == 1 else b"".join(frame for _, frame in self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        self._transport.write(frames)

    async def drain(self) -> None:
        """Wait until the transport takes more and all earlier callers had their turn. Raises ConnectionError if the
        connection is closed."""
        self._flush()
        async with self._turn:
            while not self._drained.is_set():
                await self._drained.wait()
        if self.is_closed:
            raise ConnectionError(self.reason or "closed")

    @property
    def unsent_bytes(self) -> int:
        """Bytes written that the operating system has not taken yet."""
        in_transport = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self._waiting_bytes + in_transport

    def unsent(self) -> list[Message]:
        """Remove and return the messages that were never handed to the operating system. None for a stream: whoever
        opened it asks again."""
        messages = [message for message, _ in self._waiting if message is not None]
        self._waiting.clear()
        self._waiting_bytes = 0
        return messages

    def close(self, reason: str) -> None:
        """Write the gathered frames, then close; nothing is read any more. The owner gets ``reason``."""
        if self.is_closed or self._transport is None:
            return
        self._flush()
        self.reason = self.reason or reason
        self.is_closed = True
        self._transport.close()

    def abort(self, reason: str) -> None:
        """Close at once and discard what the transport still holds."""
        self.is_closed = True
        self.reason = self.reason or reason
        if self._transport is not None:
            self._transport.abort()


class ConnectionRegistry:
    """All connections of one node, streams included: makes them, and closes those whose certificate counts no more."""

    def __init__(self, tls: Credentials, counters: Counter[str]) -> None:
        self._tls = tls
        self._counters = counters
        self._connections: weakref.WeakSet[PeerConnection] = weakref.WeakSet()

    def make(self, owner: Owner, *, dialled: bool, stream: bool = False, back: int = 0) -> PeerConnection:
        """A connection without a transport."""
        made = PeerConnection(owner, self._tls, dialled=dialled, stream=stream, back=back)
        self._connections.add(made)
        return made

    async def open(
        self, address: str, who: str, owner: Owner, *, stream: bool = False, back: int = 0
    ) -> PeerConnection:
        """Dial an address → the connection, after the handshake. Raises LinkUnavailable."""
        return await dial(address, who, self._tls, lambda: self.make(owner, dialled=True, stream=stream, back=back))

    def close_revoked(self) -> None:
        """Close every connection whose peer's certificate was revoked."""
        for connection in self._established():
            if connection.is_revoked:
                connection.close("its certificate was revoked")

    def close_expired(self, now: datetime) -> None:
        """Close every connection whose peer's certificate has expired. A peer with a new one is back at once. A cluster
        that never leaves this machine checks no dates."""
        if self._tls.cluster.is_local:
            return
        for connection in self._established():
            if proven_info(connection.certificate).valid_until <= now:
                self._counters[metrics.PEER_LINKS_EXPIRED] += 1
                connection.close("its certificate has expired")

    def _established(self) -> list[PeerConnection]:
        return [one for one in self._connections if one.certified and not one.is_closed]


NO_ANSWER, REFUSED, NO_WAY = "it does not answer", "it refuses connections", "there is no way to it"
NO_MEMBER = "what answers there is no node of the cluster"
"""Kinds of failed dials, as they are reported to the peer that could not be dialled."""


async def dial(address: str, who: str, tls: Credentials, make: Callable[[], PeerConnection]) -> PeerConnection:
    """Connect to `HOST:PORT` → the connection, after the handshake. ``who``: the peer's name in errors. Raises
    LinkUnavailable."""
    what = f"no link to {who}"
    connection = make()
    try:
        host, port = parse_address("peer", address, loopback_only=tls.cluster.is_local)
        async with asyncio.timeout(CONNECT_S):
            sock = await open_tcp(host, port)
            try:
                await asyncio.get_running_loop().create_connection(
                    lambda: connection,
                    sock=sock,
                    ssl=tls.client,
                    server_hostname="",  # the certificate names the node, not its address
                    ssl_handshake_timeout=HANDSHAKE_S,
                    ssl_shutdown_timeout=SHUTDOWN_S,
                )
            except BaseException:
                sock.close()
                raise
    except asyncio.CancelledError:
        connection.abort("no longer wanted")  # it may be connected by now
        raise
    except TimeoutError:
        raise LinkUnavailable(
            who, what, why=f"{address} does not answer within {CONNECT_S:g} s", kind=NO_ANSWER
        ) from None
    except ssl.SSLError as error:
        raise LinkUnavailable(who, what, why=f"{address}: {tls_error_text(error)}", kind=NO_MEMBER) from None
    except OSError as error:
        kind = REFUSED if isinstance(error, ConnectionError) else NO_WAY
        raise LinkUnavailable(who, what, why=f"{address}: {os_error_text(error)}", kind=kind) from None
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


def os_error_text(error: OSError) -> str:
    """The operating system's text of an error: asyncio and uvloop have different ones of their own."""
    return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)


def _why_lost(error: Exception | None) -> str:
    if error is None:
        return "the other end closed the connection"
    return tls_error_text(error) if isinstance(error, ssl.SSLError) else str(error)
