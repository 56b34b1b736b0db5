"""One client on the control socket: its frames in, its answers out."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from peerload.model.errors import BadMessage, BadRequest, FrameTooLarge, InvariantBroken, PeerloadError
from peerload.wire import control
from peerload.wire.frame import CONTROL_BYTES_MAX, HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

log = logging.getLogger("peerload.agent")

WRITE_BUFFER_BYTES = 1 << 20
"""What is gathered for a client that reads slowly before its streams wait."""
PART_BYTES = 1 << 20
"""Lists that make an answer larger than this are sent in parts of about this size."""
PARTING_S = 0.5
"""Who is cut off may go on sending for so long, unheard."""


class Server(Protocol):
    """Who serves the clients."""

    def admit(self, connection: Connection, /) -> PeerloadError | None:
        """None, or why this client is not served."""

    def gone(self, connection: Connection, /) -> None:
        """A client hung up."""

    def count(self, name: str, /) -> None:
        """Count what was refused."""

    def handle(self, connection: Connection, request: control.Request, /) -> None:
        """A request came."""

    def broke(self, why: str, /) -> None:
        """A bug of ours came to light in a request: the agent stops."""


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._buffer = bytearray()
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._transport: asyncio.Transport
        self.uid = -1
        self.pending = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Who is it, and is there room?"""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own is no subclass
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        raw = transport.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        self.uid = struct.unpack("3i", raw)[1]
        refusal = self._server.admit(self)
        if refusal is not None:
            self._part(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone; what it only watched is dropped, its tasks are not touched."""
        del exc
        self.closed = True
        self._can_write.set()
        for task in self.tasks:
            task.cancel()
        self._server.gone(self)

    def pause_writing(self) -> None:
        """The client reads slower than we write."""
        self._can_write.clear()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._can_write.set()

    async def drain(self) -> None:
        """Wait until the client has read most of what was written."""
        await self._can_write.wait()

    def data_received(self, data: bytes) -> None:
        """Whole frames are requests; a frame's length is looked at before anything is kept for it."""
        if self.closed:
            return
        buffer = self._buffer
        buffer += data
        while len(buffer) >= 4 and not self.closed:  # noqa: PLR2004 -- the header
            size = int.from_bytes(buffer[:4], "big")
            if size > CONTROL_BYTES_MAX:
                self._cut(FrameTooLarge(size, CONTROL_BYTES_MAX))
                return
            if len(buffer) < 4 + size:
                return
            raw = bytes(buffer[4 : 4 + size])
            del buffer[: 4 + size]
            try:
                request = control.decode_request(raw)
            except BadMessage as error:
                number = _number(raw)
                if number is None:
                    self._cut(error)
                    return
                self.fail(number, BadRequest(error.what, why=error.why))
                continue
            self._server.handle(self, request)

    def _cut(self, error: PeerloadError) -> None:
        self._server.count("control frames refused")
        self._part(error)

    def _part(self, error: PeerloadError) -> None:
        """Close after a last word. What the client still sends is dropped for a moment: closing on top of it would
        reset the connection, and the last word would be lost."""
        self.fail(0, error)
        self._buffer.clear()
        self.closed = True
        self._transport.write_eof()
        asyncio.get_running_loop().call_later(PARTING_S, self._transport.close)

    def ok(self, number: int, body: dict[str, Any]) -> None:
        """The answer to a request; long lists in it go ahead in parts. Raises BadRequest if one item is too large."""
        raw = control.encode({"id": number, "ok": body})
        if len(raw) > PART_BYTES:
            *before, last = _in_parts(body)
            for part in before:
                self._write(control.encode({"id": number, "more": part}))
            raw = control.encode({"id": number, "ok": last})
        self._write(raw)

    def more(self, number: int, body: dict[str, Any]) -> None:
        """A part of a stream, or of the lists of an answer. Raises BadRequest if one item is too large."""
        raw = control.encode({"id": number, "more": body})
        if len(raw) <= PART_BYTES:
            self._write(raw)
            return
        for part in _in_parts(body):
            self._write(control.encode({"id": number, "more": part}))

    def fail(self, number: int, error: Exception) -> None:
        """A request could not be carried out."""
        if isinstance(error, PeerloadError):
            told = {"code": error.code, "what": error.what, "why": error.why, "hint": error.hint}
        else:
            told = {"code": "error", "what": str(error), "why": "", "hint": ""}
        self._write(control.encode({"id": number, "error": told}))

    def failed(self, number: int, error: Exception) -> None:
        """Carrying out a request raised this: the client is told. If that was a bug of ours, the agent stops."""
        self.fail(number, error)
        if isinstance(error, InvariantBroken) or not isinstance(error, (PeerloadError, OSError)):
            log.error("a bug in a request", exc_info=error)
            self._server.broke(f"a bug: {error!r}")

    def _write(self, raw: bytes) -> None:
        """One frame; to a client that is gone: nothing. Raises BadRequest, with nothing sent, if it is too large."""
        if self.closed or self._transport.is_closing():
            return
        if len(raw) > HEADER_BYTES + CONTROL_BYTES_MAX:
            raise BadRequest(
                "the answer is too large",
                why=f"a frame of {len(raw) - HEADER_BYTES} bytes; at most {CONTROL_BYTES_MAX} are allowed",
                hint="peerload ls  lists tasks in short",
            )
        self._transport.write(raw)

    def spawn(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        """Work on a request, which ends with this client. What it raises is the answer."""
        self.pending += 1
        task = asyncio.get_running_loop().create_task(self._carry_out(number, work))
        self.tasks.add(task)
        task.add_done_callback(lambda task: self._carried_out(task, work))

    async def _carry_out(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 -- `failed` tells errors from bugs
            self.failed(number, error)
        finally:
            self.pending -= 1

    def _carried_out(self, task: asyncio.Task[None], work: Coroutine[Any, Any, None]) -> None:
        self.tasks.discard(task)
        work.close()  # of a client that was gone before it began

    def hang_up(self) -> None:
        """Close after what was written has gone out."""
        self._transport.close()


def _in_parts(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A large body as several: its lists cut, everything else in the last."""
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


def _number(raw: bytes) -> int | None:
    """The request number in a frame that is MessagePack but no request; None if it is neither."""
    try:
        body = msgspec.msgpack.decode(raw, type=_Numbered)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return body.id


class _Numbered(msgspec.Struct):
    id: control.RequestId
