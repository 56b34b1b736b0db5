"""TLS connections between agents, the table of peers, refusal of handshakes, and backpressure.

A frame is a 4-byte big-endian length and one MessagePack envelope (wire/peer.py). The length is checked before the body
is read. All data of one turn of the event loop is sent in one write; small messages of a link share a frame. The first
frame of each end is its Hello (the handshake). Every frame must come from the node that the peer's certificate names. A
peer is refused if another agent has its name, if there are too many peers, if a later start of the same agent is linked,
or while it is banned. Reading from a peer pauses while the core has too many unhandled messages of it (rule P2).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import socket
import ssl
import weakref
from collections import deque
from typing import TYPE_CHECKING, Protocol, TypeGuard, cast

import msgspec

from peerload.agent.runtime import ReadTimeout
from peerload.model import metrics, rules
from peerload.model.bounded import BoundedDict
from peerload.model.errors import ConfigError, FrameTooLarge, LinkUnavailable, ProtocolError
from peerload.model.messages import (
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    STREAMED,
    TOGETHER,
    TOGETHER_MAX,
    Envelope,
    Hello,
    Identity,
    LinkMessage,
    Message,
    Trust,
)
from peerload.security.address import join_address, open_tcp, parse_address, plain_host
from peerload.security.certificates import proven_info
from peerload.security.tls import node_of, peer_certificate, tls_error_text
from peerload.wire import peer as wire
from peerload.wire.frame import HEADER_BYTES, LARGE_BYTES

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Coroutine
    from concurrent.futures import Executor
    from datetime import datetime

    from peerload.agent.runtime import Inbox
    from peerload.agent.store.write_ahead import SecurityEvents
    from peerload.model.errors import PeerloadError
    from peerload.security.tls import Credentials
    from peerload.wire.frame import Buffer


CONNECT_S = 5.0
HANDSHAKE_S = 5.0
SHUTDOWN_S = 2.0
HELLO_S = 5.0
"""Timeout for the other end's Hello."""
HELLO_BYTES_MAX = 256 << 10
"""Size limit of the first frame: a Hello that describes 300 other members fits."""
READ_BYTES = 16 << 10
"""Minimum size of the read buffer: one TLS record."""
FLUSH_BYTES = 256 << 10
"""Waiting data of at least this size is written immediately."""
BUFFERED_BYTES_MAX = 1 << 20
"""High-water mark of the transport's buffer: above it, no more data is handed to the transport until it has drained."""
STALLED_S = 20.0
"""Time after which a peer that reads nothing is disconnected, while this node has data to write."""
STREAM_STALLED_S = 600.0
"""Limit for an output stream, whose reader may be a person."""
FORWARD_STALLED_S = 21_600.0
"""Limit for a forwarded request, whose answer may be read in a pager."""
MESSAGES_PER_S_MAX = 20_000
"""Maximum number of messages a second; after more, the peer is not read again before the next second."""
KEEPALIVE_IDLE_S = 10
KEEPALIVE_EVERY_S = 5
KEEPALIVE_COUNT = 3


class Owner(Protocol):
    """Callbacks of a connection. None of them may raise."""

    def opened(self, connection: PeerConnection) -> None:
        """The TLS handshake is complete and nothing was sent yet: send Hello."""

    def hello_received(self, connection: PeerConnection, hello: Hello) -> bool:
        """Handle a valid Hello of this cluster, the first frame. False refuses the peer: the connection closes."""

    def received(self, connection: PeerConnection, envelope: Envelope) -> None:
        """Handle a later frame of the peer."""

    def malformed(self, connection: PeerConnection, error: PeerloadError) -> bool:
        """Handle a frame that could not be decoded. → True to continue reading."""

    def refused(self, connection: PeerConnection, reason: str, detail: str = "") -> None:
        """The connection closes. reason: an identifier; detail: text for people."""

    def writable(self, connection: PeerConnection) -> None:
        """The transport's buffer has drained."""

    def closed(self, connection: PeerConnection, reason: str) -> None:
        """The connection is closed. `PeerConnection.unsent` has what never reached the operating system."""


class Links(Owner, Protocol):
    """Interface of `PeerLinks` for its parts."""

    def send(self, dst: str, message: LinkMessage) -> None:
        """Send a message over a link."""

    def connect(self, identity: Identity) -> None:
        """Make a link to this node if there is none."""

    def drop(self, why: str, who: str = "", detail: str = "") -> None:
        """Count a frame or connection that was dropped, and report it if it breaks a security rule."""

    def spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Run this in the background until it ends or the links are closed."""


class PeerConnection(asyncio.BufferedProtocol):
    """The protocol object of one connection. ``dialled``: this node made it. ``stream``: it carries one output, input or
    forwarded client, not messages. ``back``: number of the peer's request for this stream, 0 without one."""

    def __init__(
        self,
        owner: Owner,
        tls: Credentials,
        envelopes: wire.Envelopes,
        *,
        dialled: bool,
        stream: bool = False,
        back: int = 0,
    ) -> None:
        self._envelopes = envelopes
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
        self.task_s = -math.inf
        """Loop time of the last message about a task."""
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._filled = 0
        self._paused_for: set[str] = set()
        self._is_lost = False
        self._read_timeout = ReadTimeout(self._loop, lambda: self._refuse("frame_timeout"))
        self.frame_bytes = 0
        """Size of the frame that is being handled."""
        self._waiting: list[tuple[Message | None, list[Buffer] | bytes]] = []
        """Data to send at the end of this turn: frames, and messages that share a frame with their neighbours."""
        self._waiting_bytes = 0
        self._flush_planned = False
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._second = 0.0
        self._messages = 0
        self._drained: asyncio.Event = asyncio.Event()
        self._drained.set()
        self._turn = asyncio.Lock()
        self._stalled_s = STALLED_S
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()

    # -- the transport's side ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Check the peer's certificate, let the owner send Hello, and start the timeout for the peer's Hello."""
        transport = cast("asyncio.Transport", transport)  # TLS has one; uvloop's is not a subclass
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
        self._timer = self._loop.call_later(HELLO_S, self._refuse, "hello_timeout")
        if self.certified and self.is_revoked:
            self._reject_revoked()
        elif self.certified:
            self.owner.opened(self)
        elif not self.certificate:
            self._reject("handshake_failed", "it shows no certificate")
        else:  # of this cluster's CA, but not for a node
            self._reject("not_a_node_certificate")

    @property
    def is_revoked(self) -> bool:
        """True if the peer's certificate was revoked, or does not have the form of this cluster's certificates."""
        try:
            return self._tls.refuses(proven_info(self.certificate))
        except ValueError:
            return True

    def _reject(self, reason: str, detail: str = "") -> None:
        """Close without sending anything."""
        self.owner.refused(self, reason, detail)
        self.abort(detail or metrics.label_text(reason))

    def _reject_revoked(self) -> None:
        """Send only the CA's revocation, then close: a node that was away does not know that it was revoked."""
        with contextlib.suppress(ValueError):
            if told := self._tls.refusal(self.certificate):
                frame = wire.frame_parts(self._envelopes.make(Trust((told,)), self.certified))
                self._waiting.append((None, frame))
                self._flush()
        self.owner.refused(self, "certificate_revoked")
        self.close(metrics.label_text("certificate_revoked"))

    def get_buffer(self, _: int) -> memoryview:
        """Buffer for the rest of a partial frame, or for the next frames. A large frame has a buffer of its own size: it is
        decrypted directly into this buffer and, if it carries blocks of files, never copied."""
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
            limit = wire.DATA_BYTES_MAX if self.hello is not None else HELLO_BYTES_MAX
            if size > limit:
                self.owner.malformed(self, FrameTooLarge(size, limit))
                self._refuse("frame_too_large")  # the start of the next frame is unknown
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
        """The peer has caught up with reading."""
        self.paused = False
        self._drained.set()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        self._flush()
        self.owner.writable(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the bytes received so far, then notify the owner, once."""
        for timer in (self._timer, self._stalled):
            if timer is not None:
                timer.cancel()
        self._is_lost = True
        self._paused_for.clear()
        self.buffer_updated(0)  # complete frames that arrived while reading was paused
        self.is_closed = True
        self._read_timeout.stop()
        self.reason = self.reason or _why_lost(exc)
        self._drained.set()
        self._buffer, self._filled = bytearray(), 0
        self._transport = None  # frees its buffers, as large as a frame, before the next garbage collection
        if not self.ended.done():
            self.ended.set_result(None)
        self.owner.closed(self, self.reason)

    # -- frames in ---------------------------------------------------------------------------------------------------

    def _frame(self, raw: memoryview) -> None:
        self.frame_bytes = len(raw)
        try:
            envelope = wire.decode(raw)
            self._limit_rate(1 + len(envelope.others))
        except ProtocolError as error:
            self._limit_rate(1)
            if not self.owner.malformed(self, error):
                self._refuse("too_many_malformed")
            return
        if self.hello is None:
            if isinstance(envelope.body, Trust):
                self._revocation_received(envelope)
            else:
                self._handshake(envelope)
            return
        identity = self.hello.identity
        is_its_own = envelope.src == identity.node and envelope.src_boot == identity.boot
        if envelope.cluster != self._tls.cluster.name or not is_its_own:
            self._refuse("wrong_sender")
            return
        self.owner.received(self, envelope)

    def _revocation_received(self, envelope: Envelope) -> None:
        """Handle the revocation of this node, which a peer sends in place of its Hello."""
        if self.stream or (envelope.cluster, envelope.src) != (self._tls.cluster.name, self.certified):
            self._refuse("no_hello")
            return
        self.owner.received(self, envelope)
        self.close("it says that this node was revoked")

    def _handshake(self, envelope: Envelope) -> None:
        hello = envelope.body
        if not isinstance(hello, Hello):
            self._refuse("no_hello")
            return
        identity, profile = hello.identity, hello.profile
        if envelope.cluster != self._tls.cluster.name:
            self._refuse("other_cluster")
        elif identity.node != self.certified:
            self._refuse("name_not_certified")
        elif (identity.node, identity.boot) != (envelope.src, envelope.src_boot) or profile.node != identity.node:
            self._refuse("wrong_sender")
        elif profile.protocol_min > PROTOCOL_MAX or profile.protocol_max < PROTOCOL_MIN:
            self._refuse("no_common_version")
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

    def _limit_rate(self, messages: int) -> None:
        """Pause reading until the next second if this one had MESSAGES_PER_S_MAX messages."""
        now = self._loop.time()
        if now - self._second >= 1.0:
            self._second, self._messages = now, 0
        before, self._messages = self._messages, self._messages + messages
        if before < MESSAGES_PER_S_MAX <= self._messages and self._transport is not None:
            self.pause_reading("message rate limit")
            self._loop.call_later(1.0, self.resume_reading, "message rate limit")

    def pause_reading(self, why: str) -> None:
        """Stop reading until `resume_reading` for the same reason. Complete frames that were received already wait."""
        if self._is_lost:
            return  # all frames received before the loss are handled
        self._paused_for.add(why)
        if self._transport is not None and not self._transport.is_closing():
            self._read_timeout.pause(paused=True)
            self._transport.pause_reading()

    def resume_reading(self, why: str) -> None:
        """Continue, first with the frames already received, unless reading is also paused for another reason."""
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

    def _refuse(self, reason: str) -> None:
        if not self.is_closed:
            self.owner.refused(self, reason)
            self.close(metrics.label_text(reason))

    # -- frames out --------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send a message at the end of this turn of the loop, together with the others of the turn. Raises FrameTooLarge."""
        if type(message) in TOGETHER and self.hello is not None:
            encoded = wire.encode_message(message)
            self._waiting.append((message, encoded))
            self._waiting_bytes += len(encoded)
        else:
            dst = (self.hello.identity.node, self.hello.identity.boot) if self.hello is not None else ()
            frame = wire.frame_parts(self._envelopes.make(message, *dst))
            self._waiting.append((None if self.stream else message, frame))
            self._waiting_bytes += sum(map(len, frame))
        if self._waiting_bytes >= FLUSH_BYTES:
            self._flush()
        elif not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        if self._transport is None or self._transport.is_closing() or self.paused or not self._waiting:
            return
        parts = self._frames_waiting()
        self._waiting.clear()
        self._waiting_bytes = 0
        if any(len(part) >= LARGE_BYTES for part in parts):
            self._transport.writelines(parts)
        else:
            self._transport.write(b"".join(parts))

    def _frames_waiting(self) -> list[Buffer]:
        """The waiting data as frames. Successive small messages share a frame."""
        parts: list[Buffer] = []
        together: list[bytes] = []
        for _, waiting in self._waiting:
            if isinstance(waiting, bytes) and len(waiting) < LARGE_BYTES and len(together) <= TOGETHER_MAX:
                together.append(waiting)
                continue
            if together:
                parts.append(self._frame_of(together))
                together = []
            if isinstance(waiting, bytes):
                parts.append(self._frame_of([waiting]))
            else:
                parts += waiting
        if together:
            parts.append(self._frame_of(together))
        return parts

    def _frame_of(self, messages: list[bytes]) -> bytearray:
        assert self.hello is not None
        return self._envelopes.frame_of(messages, self.hello.identity.node, self.hello.identity.boot)

    async def drain(self) -> None:
        """Wait until the transport accepts more and all earlier callers had their turn. Raises ConnectionError if the
        connection is closed."""
        self._flush()
        async with self._turn:
            while not self._drained.is_set():
                await self._drained.wait()
        if self.is_closed:
            raise ConnectionError(self.reason or "closed")

    @property
    def unsent_bytes(self) -> int:
        """Bytes to send that the operating system has not accepted yet."""
        in_transport = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self._waiting_bytes + in_transport

    def unsent(self) -> list[LinkMessage]:
        """Remove and return the messages that were never handed to the operating system. Empty for a stream: its
        opener repeats the request."""
        messages = [message for message, _ in self._waiting if message is not None and is_link_message(message)]
        self._waiting.clear()
        self._waiting_bytes = 0
        return messages

    def close(self, reason: str) -> None:
        """Write the waiting frames, then close; nothing more is read. The owner gets ``reason``."""
        if self.is_closed or self._transport is None:
            return
        self._flush()
        self.reason = self.reason or reason
        self.is_closed = True
        self._transport.close()

    def abort(self, reason: str) -> None:
        """Close immediately and discard the unsent data."""
        self.is_closed = True
        self.reason = self.reason or reason
        if self._transport is not None:
            self._transport.abort()


def is_link_message(message: Message) -> TypeGuard[LinkMessage]:
    """True of a message that goes over a link, not over a stream."""
    return not isinstance(message, STREAMED)


NO_ANSWER, REFUSED, NO_WAY = "it does not answer", "it refuses connections", "there is no route to it"
NO_MEMBER = "what answers there is not a node of this cluster"
"""Kinds of failed dials, as they are reported to the peer that could not be dialled."""


class ConnectionRegistry:
    """Registry of one node's connections, streams included: creates them, and closes those whose certificate is no
    longer valid. lookups: threads for the lookup of host names, None: the default threads."""

    def __init__(
        self, tls: Credentials, envelopes: wire.Envelopes, counters: Counter[str], lookups: Executor | None = None
    ) -> None:
        self._tls = tls
        self._lookups = lookups
        self._envelopes = envelopes
        self._counters = counters
        self._connections: weakref.WeakSet[PeerConnection] = weakref.WeakSet()

    def make(self, owner: Owner, *, dialled: bool, stream: bool = False, back: int = 0) -> PeerConnection:
        made = PeerConnection(owner, self._tls, self._envelopes, dialled=dialled, stream=stream, back=back)
        self._connections.add(made)
        return made

    async def open(
        self, address: str, who: str, owner: Owner, *, stream: bool = False, back: int = 0
    ) -> PeerConnection:
        """Connect to `HOST:PORT` → the connection, after the handshake. who: the peer's name in errors. Raises LinkUnavailable."""
        what = f"no link to {who}"
        connection = self.make(owner, dialled=True, stream=stream, back=back)
        try:
            host, port = parse_address("peer", address, loopback_only=self._tls.cluster.is_local)
            async with asyncio.timeout(CONNECT_S):
                sock = await open_tcp(host, port, self._lookups)
                try:
                    await asyncio.get_running_loop().create_connection(
                        lambda: connection,
                        sock=sock,
                        ssl=self._tls.client,
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
            await asyncio.wait([connection.ready, connection.ended], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            connection.abort("no longer wanted")
            raise
        if not connection.ready.done():
            raise LinkUnavailable(who, what, why=f"{address}: {connection.reason}")
        return connection

    def close_revoked(self) -> None:
        for connection in self._established():
            if connection.is_revoked:
                connection.close("its certificate was revoked")

    def close_expired(self, now: datetime) -> None:
        """Close every connection whose peer's certificate has expired. A peer with a new one reconnects immediately. A
        local cluster checks no dates."""
        if self._tls.cluster.is_local:
            return
        for connection in self._established():
            if proven_info(connection.certificate).valid_until <= now:
                self._counters[metrics.PEER_LINKS_EXPIRED] += 1
                connection.close("its certificate has expired")

    def _established(self) -> list[PeerConnection]:
        return [one for one in self._connections if one.certified and not one.is_closed]


def os_error_text(error: OSError) -> str:
    """The operating system's text of an error; the texts of asyncio and uvloop differ."""
    return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)


def _why_lost(error: Exception | None) -> str:
    if error is None:
        return "the other end closed the connection"
    return tls_error_text(error) if isinstance(error, ssl.SSLError) else str(error)


WAITING_MESSAGES_MAX = 1024
WAITING_BYTES_MAX = 64 << 20
"""Bounds of the messages that wait for the link to one peer."""
LINKS_PER_PEER_MAX = 4
BACKOFF_S = 0.2
BACKOFF_S_MAX = 15.0
ERRORS_MAX = 3
ERRORS_WITHIN_S = 60.0
BAN_S = 60.0
"""ERRORS_MAX malformed frames within ERRORS_WITHIN_S: the link closes, and the peer is banned for BAN_S (rule P1)."""
BANS_MAX = 1024
CLASHES_MAX = 16
EARLIER_START = "a later start of this agent is here"

_log = logging.getLogger("peerload.peer")
BROKEN_RULES = {
    "banned": rules.FRAMES_BOUNDED,
    "certificate_revoked": "J4",
    "frame_timeout": rules.FRAMES_BOUNDED,
    "frame_too_large": rules.FRAMES_BOUNDED,
    "handshake_failed": "J3",
    "hello_timeout": "J3",
    "malformed": rules.FRAMES_BOUNDED,
    "name_not_certified": "J3",
    "no_common_version": rules.VERSIONS_CHECKED,
    "no_hello": rules.FRAMES_BOUNDED,
    "no_output_request": rules.FRAMES_BOUNDED,
    "not_a_node_certificate": "J3",
    "other_cluster": "J3",
    "second_hello": rules.FRAMES_BOUNDED,
    "too_many_handshakes": "J3",
    "too_many_malformed": rules.FRAMES_BOUNDED,
    "too_many_messages": rules.PEERS_LIMITED,
    "too_many_peers": rules.PEERS_LIMITED,
    "too_many_streams": rules.PEERS_LIMITED,
    "wrong_recipient": rules.ROLES_CHECKED,
    "wrong_sender": rules.ROLES_CHECKED,
}
"""Security rule that each reason for dropping a frame or connection breaks. `earlier_start` and `for_earlier_start` break none."""


class PeerEntry:
    """A peer: its newest identity, its live links (the newest last), and the messages that wait for a link."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.identity: Identity | None = None
        self.links: list[PeerConnection] = []
        self.waiting: deque[tuple[LinkMessage, int]] = deque()
        self.waiting_bytes = 0
        self.is_dialled = False
        self.failures = 0
        self.not_before_s = 0.0
        self.reached = ""
        """The address where the last dial succeeded; empty after a failure."""
        self.unreached = ""
        """Error of the last dial of its address; empty if it succeeded, or there was none."""
        self.has_dialled_us = False
        """True if the peer has dialled this node, and has not reported since that it cannot."""
        self.cannot_reach_us = ""
        """Error of the peer's last dial of this node, as the peer reports it; empty without a report."""
        self.dial_back_failure = "", 0.0, ""
        """Address, loop time and reason of the last failure to dial the peer back."""
        self.is_checked = False
        """True while this node checks whether it can dial the peer."""
        self.dialled_s = 0.0
        """Loop time of the last dial."""

    @property
    def address(self) -> str:
        return self.identity.address if self.identity is not None else ""

    def dial_succeeded(self, address: str) -> None:
        self.reached, self.unreached = address, ""

    def dial_failed(self, address: str, why: str) -> None:
        if address == self.address:
            self.reached, self.unreached = "", why

    @property
    def link(self) -> PeerConnection | None:
        return next((link for link in reversed(self.links) if not link.is_closed), None)

    @property
    def is_idle(self) -> bool:
        """True if removal of this entry would lose only the address."""
        return not self.links and not self.waiting and not self.is_dialled

    def learn(self, identity: Identity) -> bool:
        """Keep the newer identity. → True if that is ``identity``."""
        known = self.identity
        if known is not None and identity.boot != known.boot and identity.incarnation < known.incarnation:
            return False
        if known is not None and identity.boot == known.boot and not identity.address:
            return True
        if known is None or identity.boot != known.boot or identity.address != known.address:
            self.failures, self.not_before_s = 0, 0.0
            self.reached = self.unreached = ""
            if known is None or identity.boot != known.boot:
                self.has_dialled_us, self.cannot_reach_us = False, ""
        self.identity = identity
        return True

    def add(self, link: PeerConnection, identity: Identity) -> None:
        """Add a link. Links to earlier starts of the peer are closed, and the oldest link if there are too many."""
        for other in [
            other for other in self.links if other.hello is not None and other.hello.identity.boot != identity.boot
        ]:
            other.close("its agent was started again")
        if len(self.links) >= LINKS_PER_PEER_MAX:
            self.links[0].close("newer links took its place")
        self.learn(identity)
        self.failures, self.not_before_s = 0, 0.0
        self.links.append(link)

    def queue(self, message: LinkMessage) -> bool:
        """Queue a message. False if the queue is full."""
        size = len(msgspec.msgpack.encode(message))
        if len(self.waiting) >= WAITING_MESSAGES_MAX or self.waiting_bytes + size > WAITING_BYTES_MAX:
            return False
        self.waiting.append((message, size))
        self.waiting_bytes += size
        return True

    def take(self) -> LinkMessage:
        message, size = self.waiting.popleft()
        self.waiting_bytes -= size
        return message

    def take_all(self) -> list[LinkMessage]:
        messages = [message for message, _ in self.waiting]
        self.waiting.clear()
        self.waiting_bytes = 0
        return messages

    def back_off(self, now_s: float) -> None:
        """Forbid dials for a time that grows with each consecutive failure."""
        self.not_before_s = now_s + backoff_s(self.failures)
        self.failures += 1


class PeerTable:
    """Entries by node name, at most twice ``peers_max``; the links of at most ``peers_max`` nodes are admitted."""

    def __init__(self, security: SecurityEvents, peers_max: int) -> None:
        self._security = security
        self._peers_max = peers_max
        self.entries: dict[str, PeerEntry] = {}
        self._bans = Bans()
        self.clashes: dict[str, str] = {}
        """The last CLASHES_MAX agents that were refused because another has their name: name → address."""

    def entry(self, node: str) -> PeerEntry | None:
        """The entry of a node, created if needed. In a full table it replaces an idle entry; None if none is idle."""
        peer = self.entries.get(node)
        if peer is None and len(self.entries) >= 2 * self._peers_max:
            idle = next((name for name, known in self.entries.items() if known.is_idle), None)
            if idle is None:
                return None
            del self.entries[idle]
        if peer is None:
            peer = self.entries[node] = PeerEntry(node)
        return peer

    def drop(self, reason: str, who: str = "", detail: str = "") -> None:
        """Count a frame or connection that was dropped, and report it if it breaks a security rule."""
        self._security.counters[metrics.labelled(metrics.PEER_FRAMES_DROPPED, reason=reason)] += 1
        if (rule := BROKEN_RULES.get(reason)) is not None:
            what = metrics.label_text(reason)
            self._security.report(rule, who, f"{what}: {detail}" if detail else what)

    # -- handshakes --------------------------------------------------------------------------------------------------

    def is_name_clash(self, own: Identity, peer: PeerEntry | None, identity: Identity) -> bool:
        """True if this identity is of a different agent with the name of this node or of a linked peer."""
        other = _linked(peer)
        if identity.node != own.node and (other is None or other.store == identity.store):
            return False
        self._security.counters[metrics.PEER_NAME_CLASHES] += 1
        address = identity.address[:100]
        self._security.report(
            rules.NAME_UNIQUE, identity.node, f"another agent has that name; the one at {address} is refused"
        )
        self.clashes = dict([*self.clashes.items(), (identity.node, identity.address)][-CLASHES_MAX:])
        _log.error(
            "duplicate node name: node=%s refused_address=%r; start that agent with  --node NAME",
            identity.node,
            address,
        )
        return True

    def refusal(self, peer: PeerEntry | None, hello: Hello) -> str:
        """Reason why a peer without a name clash is not admitted; empty if it is. ``peer`` is None if the table is full."""
        identity, other = hello.identity, _linked(peer)
        if peer is None or (not peer.links and self._linked_count() >= self._peers_max):
            self.drop("too_many_peers", identity.node)
            return "too many peers"
        if other is not None and other.boot != identity.boot and identity.incarnation < other.incarnation:
            self.drop("earlier_start", identity.node)
            return EARLIER_START
        if self._bans.holds((identity.node, identity.boot), asyncio.get_running_loop().time()):
            self.drop("banned", identity.node)
            return "banned for malformed frames"
        return ""

    def count_malformed(self, identity: Identity) -> bool:
        """Count a malformed frame of a peer (rule P1). → True if the limit is reached, and the peer is banned."""
        if not self._bans.add((identity.node, identity.boot), asyncio.get_running_loop().time()):
            return False
        self._security.counters[metrics.PEER_BANS] += 1
        self._security.report(
            rules.FRAMES_BOUNDED, identity.node, f"{ERRORS_MAX} malformed frames; it is banned for {BAN_S:g} s"
        )
        _log.warning("peer banned for malformed frames: node=%s ban_s=%g", identity.node, BAN_S)
        return True

    def _linked_count(self) -> int:
        return sum(1 for known in self.entries.values() if known.links)


def _linked(peer: PeerEntry | None) -> Identity | None:
    """The identity at the other end of the newest link."""
    link = peer.link if peer is not None else None
    return link.hello.identity if link is not None and link.hello is not None else None


class Bans:
    """Malformed frames and bans by (node, boot id). Not by network address: many nodes may share one."""

    def __init__(self) -> None:
        self._errors: BoundedDict[tuple[str, str], deque[float]] = BoundedDict(BANS_MAX)
        self._until: BoundedDict[tuple[str, str], float] = BoundedDict(BANS_MAX)

    def add(self, who: tuple[str, str], now_s: float) -> bool:
        """Count one error. → True if the limit is reached."""
        times = self._errors[who] = self._errors.get(who) or deque(maxlen=ERRORS_MAX)
        times.append(now_s)
        if len(times) < ERRORS_MAX or now_s - times[0] > ERRORS_WITHIN_S:
            return False
        self._until[who] = now_s + BAN_S
        return True

    def holds(self, who: tuple[str, str], now_s: float) -> bool:
        """True if this start of this node is banned."""
        until_s = self._until.get(who)
        if until_s is None:
            return False
        if now_s < until_s:
            return True
        del self._until[who]
        self._errors.pop(who, None)
        return False


def backoff_s(failures: int) -> float:
    """Pause before the next attempt after consecutive failures: exponential, with jitter."""
    ceiling = min(BACKOFF_S_MAX, BACKOFF_S * 2.0 ** min(failures, 16))
    return ceiling * random.uniform(0.5, 1.0)  # noqa: S311 -- jitter, not a secret


BACKLOG_MESSAGES_MAX = 20_000
BACKLOG_BYTES_MAX = 64 << 20
"""Limits for one node: above either, its links are not read until half of the backlog has been handled."""
CHECK_EVERY_S = 0.02
"""Interval of the checks while a node is paused."""
_BACKLOG = "the core has not handled its messages"


class _Backlog:
    """Frames of one node whose messages are in the inbox: (inbox number of the last message, messages, bytes), oldest
    first; and its paused links."""

    __slots__ = ("frames", "messages", "paused", "size_bytes")

    def __init__(self) -> None:
        self.frames: deque[tuple[int, int, int]] = deque()
        self.messages = 0
        self.size_bytes = 0
        self.paused: set[PeerConnection] = set()

    def settle(self, taken: int) -> None:
        while self.frames and self.frames[0][0] <= taken:
            _, messages, size_bytes = self.frames.popleft()
            self.messages -= messages
            self.size_bytes -= size_bytes

    def exceeds(self, divisor: int) -> bool:
        return self.messages * divisor > BACKLOG_MESSAGES_MAX or self.size_bytes * divisor > BACKLOG_BYTES_MAX


class PeerBackpressure:
    """Backlogs of all peers of one agent."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._backlogs: dict[str, _Backlog] = {}

    def queued(self, connection: PeerConnection, node: str, size_bytes: int, messages: int = 1) -> bool:
        """Count the messages of a frame, which were put into the inbox. True if the links of the node are paused from now on."""
        backlog = self._backlogs.get(node)
        if backlog is None:
            backlog = self._backlogs[node] = _Backlog()
        backlog.frames.append((self._inbox.put_count, messages, size_bytes))
        backlog.messages += messages
        backlog.size_bytes += size_bytes
        backlog.settle(self._inbox.taken_count)
        if not backlog.frames and not backlog.paused:
            del self._backlogs[node]
            return False
        if not backlog.exceeds(1):
            return False
        is_first = not backlog.paused
        backlog.paused.add(connection)
        connection.pause_reading(_BACKLOG)
        if is_first:
            asyncio.get_running_loop().call_later(CHECK_EVERY_S, self._check, node)
        return is_first

    def _check(self, node: str) -> None:
        backlog = self._backlogs[node]
        backlog.settle(self._inbox.taken_count)
        if backlog.exceeds(2):
            asyncio.get_running_loop().call_later(CHECK_EVERY_S, self._check, node)
            return
        paused, backlog.paused = backlog.paused, set()
        for connection in paused:
            connection.resume_reading(_BACKLOG)
        if not backlog.frames:
            del self._backlogs[node]
