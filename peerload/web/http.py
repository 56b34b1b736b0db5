"""HTTP/1.1 for a few viewers: asyncio for transport, h11 for parsing and framing. Requests are limited in
size, number and time; a client that does not read its response is disconnected."""

from __future__ import annotations

import asyncio
import http
import json
import logging
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import h11

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

CONNECTIONS_MAX = 200
HEAD_BYTES_MAX = 16 << 10
BODY_BYTES_MAX = 64 << 10
REQUEST_S_MAX = 10.0
"""Time limit for a whole request, from its first byte."""
IDLE_S_MAX = 60.0
"""Time limit between requests on one connection."""
UNREAD_S_MAX = 20.0
"""A client that does not read for this long is disconnected."""
UNREAD_BYTES_MAX = 256 << 10

log = logging.getLogger("peerload.web")


class Request(NamedTuple):
    """HTTP request. Names of headers are in lower case; the last one of duplicates counts."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    is_local: bool
    """True for a request over the Unix socket."""

    @property
    def host(self) -> str:
        name = self.headers.get("host", "").lower()
        return name[: name.index("]") + 1] if name.startswith("[") and "]" in name else name.partition(":")[0]


class Response(NamedTuple):
    """HTTP response: a body, or a stream of pieces."""

    status: int
    content_type: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    pieces: AsyncIterator[bytes] | None = None


def json_response(value: object, status: int = 200) -> Response:
    """A JSON response. Bytes (words of a command line) become text."""
    body = json.dumps(value, separators=(",", ":"), default=_text)
    return Response(status, "application/json", body.encode("utf-8", "replace"))


def error_response(status: int, what: str, why: str = "", hint: str = "") -> Response:
    return json_response({"error": {"what": what, "why": why, "hint": hint}}, status)


def _text(value: object) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


class HttpServer:
    """Serves connections with ``answer``. ``headers`` are added to every response. At CONNECTIONS_MAX a new connection replaces
    the one that has been idle for longest; if none is idle, the new one is closed."""

    def __init__(
        self, answer: Callable[[Request], Awaitable[Response]], headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self._answer = answer
        self._headers = headers
        self._connections: dict[asyncio.Task[None], _Connection] = {}

    def serve(self, *, is_local: bool) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        """The callback of a listening socket."""

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            if len(self._connections) >= CONNECTIONS_MAX and not self._drop_idle():
                writer.close()
                return
            connection = _Connection(reader, writer, self._answer, self._headers, is_local=is_local)
            self._connections[task] = connection
            try:
                await connection.run()
                writer.close()
                async with asyncio.timeout(UNREAD_S_MAX):
                    await writer.wait_closed()  # `abort` drops what is not sent yet
            except (OSError, TimeoutError, EOFError, h11.ProtocolError, asyncio.CancelledError):
                pass  # `close` cancels; asyncio in Python 3.11 would log that as an error
            finally:
                self._connections.pop(task, None)
                writer.transport.abort()

        return connected

    def _drop_idle(self) -> bool:
        """Close the connection that has been idle for longest → False if none is idle."""
        waiting = [(one.idle_since_s, task) for task, one in self._connections.items() if one.idle_since_s is not None]
        if not waiting:
            return False
        _, task = min(waiting, key=lambda pair: pair[0])
        del self._connections[task]
        task.cancel()
        return True

    async def close(self) -> None:
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)


class _Connection:
    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer: Callable[[Request], Awaitable[Response]],
        headers: tuple[tuple[str, str], ...],
        *,
        is_local: bool,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._answer = answer
        self._headers = headers
        self._is_local = is_local
        self.idle_since_s: float | None = asyncio.get_running_loop().time()
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        writer.transport.set_write_buffer_limits(high=UNREAD_BYTES_MAX)

    async def run(self) -> None:
        """Answer requests until the client is done."""
        while True:
            try:
                request = await self._request()
            except h11.RemoteProtocolError as error:
                if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                    await self._send("GET", error_response(error.error_status_hint, "not a request", why=str(error)))
                return
            if request is None:
                return
            await self._send(request.method, await self._answered(request))
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return
            self._http.start_next_cycle()

    async def _answered(self, request: Request) -> Response:
        try:
            return await self._answer(request)
        except Exception:
            log.exception("request failed: path=%s", request.path)
            return error_response(500, "this is a bug in peerload", why="the log of the web server has more")

    async def _request(self) -> Request | None:
        """The next request; None if the client is done, or too slow."""
        self.idle_since_s = asyncio.get_running_loop().time()
        head = await self._event(IDLE_S_MAX)
        self.idle_since_s = None
        if not isinstance(head, h11.Request):
            return None
        body = b""
        async with asyncio.timeout(REQUEST_S_MAX):
            while not isinstance(event := await self._event(REQUEST_S_MAX), h11.EndOfMessage):
                if not isinstance(event, h11.Data):
                    return None
                body += event.data
                if len(body) > BODY_BYTES_MAX:
                    raise h11.RemoteProtocolError("the body is too large", error_status_hint=413)
        try:
            target = urlsplit(head.target.decode("ascii"))
            query = dict(parse_qsl(target.query, max_num_fields=32))
        except ValueError as error:
            raise h11.RemoteProtocolError(str(error)) from None
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in head.headers}
        return Request(head.method.decode("ascii"), unquote(target.path), query, headers, body, is_local=self._is_local)

    async def _event(self, within_s: float) -> object:
        async with asyncio.timeout(within_s):
            while (event := self._http.next_event()) is h11.NEED_DATA:
                data = await self._reader.read(64 << 10)
                self._http.receive_data(data)
                if not data and self._http.their_state is h11.IDLE:
                    return None
            return event

    async def _send(self, method: str, response: Response) -> None:
        headers = [
            *self._headers,
            ("Content-Type", response.content_type),
            ("Cache-Control", "no-store"),
            *response.headers,
        ]
        if response.pieces is None:
            headers.append(("Content-Length", str(len(response.body))))
        reason = http.HTTPStatus(response.status).phrase
        await self._write(h11.Response(status_code=response.status, reason=reason, headers=headers))
        if method == "HEAD":
            if response.pieces is not None:
                return
        elif response.pieces is None:
            await self._write(h11.Data(data=response.body))
        else:
            await self._stream(response.pieces)
        await self._write(h11.EndOfMessage())

    async def _stream(self, pieces: AsyncIterator[bytes]) -> None:
        """Send pieces until they end, or the client is gone."""
        sender = asyncio.ensure_future(self._send_pieces(pieces))
        gone = asyncio.ensure_future(self._reader.read(1))  # during a stream, clients send no second request
        try:
            await asyncio.wait((sender, gone), return_when=asyncio.FIRST_COMPLETED)
            if not sender.done():
                raise ConnectionResetError
            sender.result()
        finally:
            for task in (sender, gone):
                task.cancel()
            await asyncio.gather(sender, gone, return_exceptions=True)  # the next request is read by another

    async def _send_pieces(self, pieces: AsyncIterator[bytes]) -> None:
        try:
            async for piece in pieces:
                await self._write(h11.Data(data=piece))
        finally:
            close = getattr(pieces, "aclose", None)
            if close is not None:
                await close()

    async def _write(self, event: h11.Event) -> None:
        parts = self._http.send_with_data_passthrough(event)
        if parts:
            self._writer.write(b"".join(parts))  # `writelines` of Python 3.12 and 3.13.0 has no backpressure
            async with asyncio.timeout(UNREAD_S_MAX):
                await self._writer.drain()
