"""Connection of one client: decodes its requests, and encodes the responses."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from peerload.agent.control.authorization import NOBODY
from peerload.agent.runtime import ReadTimeout
from peerload.model import metrics
from peerload.model.errors import BadMessage, BadRequest, FrameTooLarge, InvariantBroken, PeerloadError, SlowDown
from peerload.wire import control
from peerload.wire.frame import CONTROL_BYTES_MAX, HEADER_BYTES

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Coroutine, Iterator

log = logging.getLogger("peerload.agent")

WRITE_BUFFER_BYTES = 1 << 20
"""Bytes buffered for a slow client before streams to it wait (backpressure)."""
UNREAD_BYTES_MAX = 8 << 20
"""A client with more unread bytes than this is not read until it has caught up."""
PART_BYTES = 1 << 20
"""Size of the parts in which longer lists are sent."""
REST_S_MAX = 1.0
"""Bound on the pause of a client that is over its rate."""
REQUESTS_PENDING_MAX = 1024
"""Unanswered requests of one client at a time."""
CLOSE_GRACE_S = 0.5
"""Time between the last frame to a refused client and the close."""


class Server(Protocol):
    """Serves the requests of connections."""

    @property
    def counters(self) -> Counter[str]:
        """The counters of the agent."""

    def refused(self, connection: Connection, name: str, rule: str, what: str, /) -> None:
        """Count a violation of a security rule by this client under this metric."""

    def handle(self, connection: Connection, request: control.Request, /) -> None:
        """Carry out a request."""

    def broke(self, why: str, /) -> None:
        """Stop the agent because of a bug."""


class LocalClients(Protocol):
    """The clients of a socket."""

    def admit(self, connection: LocalConnection, /) -> PeerloadError | None:
        """Decide whether to serve a new client → None, or the reason against it."""

    def disconnected(self, connection: LocalConnection, /) -> None:
        """A client has disconnected."""


class Connection:
    """One client, local or at another node; subclasses provide the transport. ``from_node``: the node that forwards its
    requests, "" for a client of this machine."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.uid = -1
        self.caller = NOBODY
        self.from_node = ""
        self.on_disconnect: list[Callable[[], None]] = []
        """Callbacks for the time when the client has disconnected."""
        self.pending = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.closed = False
        self._draining: asyncio.Task[None] | None = None

    async def drain(self) -> None:
        """Wait until the client has read most of what was written. Waiters are served in their order."""
        raise NotImplementedError

    @property
    def unread_bytes(self) -> int:
        """Bytes that were written and not sent yet, as far as is known."""
        return 0

    def _write(self, raw: bytes) -> None:
        """Send one frame; do nothing if the client has disconnected. Raises BadRequest if the frame is too large."""
        raise NotImplementedError

    def hold_requests(self) -> None:
        """Stop reading requests. Calls nest: each needs one `release_requests`."""

    def release_requests(self) -> None:
        """Undo one `hold_requests`."""

    def rest(self, seconds: float) -> None:
        """Stop reading requests for this time, at most REST_S_MAX."""
        self.hold_requests()
        asyncio.get_running_loop().call_later(min(seconds, REST_S_MAX), self.release_requests)

    def check_pending(self) -> None:
        """Raises SlowDown if too many requests of this client are unanswered."""
        if self.pending >= REQUESTS_PENDING_MAX:
            raise SlowDown("too many requests at once", why=f"{self.pending} are pending")

    def request(self, raw: bytes) -> bool:
        """Take the body of one frame → False if it has no request number. Then nothing can be answered."""
        try:
            return self._request(raw)
        finally:
            if self._draining is None and self.unread_bytes > UNREAD_BYTES_MAX:
                self.hold_requests()
                self._draining = asyncio.get_running_loop().create_task(self._drain_unread())

    async def _drain_unread(self) -> None:
        await self.drain()
        self._draining = None
        self.release_requests()

    def _request(self, raw: bytes) -> bool:
        try:
            request = control.decode_request(raw)
        except BadMessage as error:
            number = request_number(raw)
            if number is None:
                self._server.refused(self, metrics.CONTROL_FRAMES_REFUSED, "L3", f"no request: {error}")
                self._no_request(error)
                return False
            self.fail(number, BadRequest(error.what, why=error.why))
        else:
            self._server.handle(self, request)
        return True

    def _no_request(self, error: PeerloadError) -> None:
        self.fail(0, error)

    def ok(self, number: int, body: dict[str, Any]) -> None:
        """Send the final response; long lists in it are sent ahead in parts. Raises BadRequest if one item is too large."""
        raw = control.encode({"id": number, "ok": body})
        if len(raw) > PART_BYTES:
            *before, last = _in_parts(body)
            for part in before:
                self._write(control.encode({"id": number, "more": part}))
            raw = control.encode({"id": number, "ok": last})
        self._write(raw)

    async def stream(self, number: int, body: dict[str, Any]) -> None:
        """Send a part of the response as soon as the client has read most of the earlier parts."""
        await self.drain()
        self.more(number, body)

    def more(self, number: int, body: dict[str, Any]) -> None:
        """Send a part of the response. Raises BadRequest if one item is too large."""
        raw = control.encode({"id": number, "more": body})
        if len(raw) <= PART_BYTES:
            self._write(raw)
            return
        for part in _in_parts(body):
            self._write(control.encode({"id": number, "more": part}))

    def fail(self, number: int, error: Exception) -> None:
        """Send an error as the final response."""
        self._write(control.encode({"id": number, "error": error_object(error)}))

    def forward_frame(self, number: int, kind: str, body: dict[str, Any]) -> None:
        """Send a frame of another node's response: "ok", "more" or "error". Raises BadMessage if no frame can hold it."""
        try:
            raw = control.encode({"id": number, kind: body})
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise BadMessage("a response of another node exceeds a frame", why=str(error)[:200]) from None
        self._write(raw)

    def report_failure(self, number: int, error: Exception) -> None:
        """Send the exception that a request raised, and count it. If it is a bug, the agent stops."""
        code = error.code if isinstance(error, PeerloadError) else "error"
        self._server.counters[metrics.labelled(metrics.REQUESTS_REFUSED, code=code)] += 1
        self.fail(number, error)
        if isinstance(error, InvariantBroken) or not isinstance(error, (PeerloadError, OSError)):
            log.error("a bug in a request", exc_info=error)
            self._server.broke(f"a bug: {error!r}")

    def spawn(self, number: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start the work on a request. It is cancelled when the client disconnects; an exception becomes the response."""
        self.pending += 1
        task = asyncio.get_running_loop().create_task(self._carry_out(number, work))
        self.tasks.add(task)
        task.add_done_callback(lambda task: self._work_done(task, work))
        return task

    async def _carry_out(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 -- `report_failure` tells errors from bugs
            self.report_failure(number, error)

    def _work_done(self, task: asyncio.Task[None], work: Coroutine[Any, Any, None]) -> None:
        self.pending -= 1
        self.tasks.discard(task)
        work.close()  # the client had disconnected before the work began

    def lost(self) -> None:
        """The client has disconnected: cancel its requests. Its tasks are not touched."""
        self.closed = True
        for task in self.tasks:
            task.cancel()
        if self._draining is not None:
            self._draining.cancel()
        for act in self.on_disconnect:
            act()


class LocalConnection(Connection, asyncio.Protocol):
    """A client at the agent's own socket."""

    def __init__(self, server: Server, clients: LocalClients) -> None:
        super().__init__(server)
        self._clients = clients
        self._buffer = bytearray()
        self._slow = ReadTimeout(asyncio.get_running_loop(), self._read_timed_out)
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._turn = asyncio.Lock()
        self._held = 0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Identify the client by its socket credentials, and admit or refuse it."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own is no subclass
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        raw = transport.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        self.uid = struct.unpack("3i", raw)[1]
        refusal = self._clients.admit(self)
        if refusal is not None:
            self._close_with(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has disconnected."""
        del exc
        self._slow.stop()
        self._can_write.set()
        self.lost()
        self._clients.disconnected(self)

    def pause_writing(self) -> None:
        """The write buffer is full."""
        self._can_write.clear()

    def resume_writing(self) -> None:
        """The write buffer has room again."""
        self._can_write.set()

    async def drain(self) -> None:
        """Wait until the client has read most of what was written."""
        if self._can_write.is_set() and not self._turn.locked():
            return
        async with self._turn:  # in their order, so that a long stream does not starve the others
            while not self._can_write.is_set():
                await self._can_write.wait()

    @property
    def unread_bytes(self) -> int:
        """Bytes in the write buffer."""
        return self._transport.get_write_buffer_size()

    def hold_requests(self) -> None:
        """Stop reading; received frames stay in the buffer."""
        self._held += 1
        self._slow.pause(paused=True)
        if self._held == 1 and not self._transport.is_closing():
            self._transport.pause_reading()

    def release_requests(self) -> None:
        """Continue with the frames in the buffer, then read on."""
        self._held -= 1
        if not self._held:
            asyncio.get_running_loop().call_soon(self._resume)

    def _resume(self) -> None:
        if self._held or self._transport.is_closing():
            return
        self._slow.pause(paused=False)
        self.data_received(b"")
        if not self._held:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Take whole frames. The length of a frame is checked before its body is buffered."""
        if self.closed:
            return
        buffer = self._buffer
        buffer += data
        before = len(buffer)
        self._take_frames(buffer)
        is_partial = bool(buffer) and not self.closed
        self._slow.received(len(data), is_whole=len(buffer) < before, is_partial=is_partial)

    def _take_frames(self, buffer: bytearray) -> None:
        while len(buffer) >= HEADER_BYTES and not self.closed and not self._held:
            size = int.from_bytes(buffer[:HEADER_BYTES], "big")
            if size > CONTROL_BYTES_MAX:
                self._server.refused(self, metrics.CONTROL_FRAMES_REFUSED, "L3", "a frame too large")
                self._close_with(FrameTooLarge(size, CONTROL_BYTES_MAX))
                return
            if len(buffer) < HEADER_BYTES + size:
                return
            with memoryview(buffer) as view:
                raw = bytes(view[HEADER_BYTES : HEADER_BYTES + size])
            del buffer[: HEADER_BYTES + size]
            if not self.request(raw):
                return

    def _read_timed_out(self) -> None:
        self._server.refused(self, metrics.CONTROL_FRAMES_REFUSED, "L3", "a frame stopped before its end")
        self._close_with(BadRequest("the request is incomplete", hint="send it whole"))

    def _no_request(self, error: PeerloadError) -> None:
        self._close_with(error)

    def _close_with(self, error: PeerloadError) -> None:
        """Send an error, and close. Input is dropped for a moment before the close: a reset would discard the error."""
        self.fail(0, error)
        self._buffer.clear()
        self.closed = True
        self._transport.write_eof()
        asyncio.get_running_loop().call_later(CLOSE_GRACE_S, self._transport.close)

    def _write(self, raw: bytes) -> None:
        if self.closed or self._transport.is_closing():
            return
        check_size(raw)
        self._transport.write(raw)

    def hang_up(self) -> None:
        """Close after the write buffer was sent."""
        self._transport.close()


def check_size(raw: bytes) -> None:
    """Raises BadRequest for a frame that is larger than clients accept."""
    if len(raw) > HEADER_BYTES + CONTROL_BYTES_MAX:
        raise BadRequest(
            "the answer is too large",
            why=f"a frame of {len(raw) - HEADER_BYTES} bytes; at most {CONTROL_BYTES_MAX} are allowed",
            hint="peerload ls  lists tasks in short",
        )


def error_object(error: Exception) -> dict[str, Any]:
    """The error as sent to a client."""
    if isinstance(error, PeerloadError):
        return {"code": error.code, "what": error.what, "why": error.why, "hint": error.hint}
    return {"code": "error", "what": str(error), "why": "", "hint": ""}


def _in_parts(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Split a large body: its lists are cut, everything else is in the last part."""
    part: dict[str, Any] = {}
    size = 0
    for key, value in body.items():
        for item in value if isinstance(value, list) else ():
            more = len(control.encode(item))
            if part and size + more > PART_BYTES:
                yield part
                part, size = {}, 0
            part.setdefault(key, []).append(item)
            size += more
    yield {key: [] if isinstance(value, list) else value for key, value in body.items()} | part


def request_number(raw: bytes) -> int | None:
    """The request number in a frame that is MessagePack but no request; None if it is neither."""
    try:
        body = msgspec.msgpack.decode(raw, type=_Numbered)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return body.id


class _Numbered(msgspec.Struct):
    id: control.RequestId
