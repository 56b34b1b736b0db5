"""The web server under viewers that do not read, too many of them, tokens in URLs, and a date that jumps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import select
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from peerload.web import http
from peerload.web.access import SESSION_S, ViewerRight
from peerload.web.http import HttpServer, Response
from tests.unit.test_web import FakeAgent, access_in, bearer, request, routes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def serving(answer: Callable[[Any], Awaitable[Response]], scenario: Callable[[str], Awaitable[None]]) -> None:
    """Run the scenario with the path of a server that answers so."""

    async def run(path: str) -> None:
        server = HttpServer(answer)
        listener = await asyncio.start_unix_server(server.serve(is_local=True), path)
        try:
            await scenario(path)
        finally:
            listener.close()
            await server.close()

    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pl-") as directory:  # the path of a socket is short
        asyncio.run(run(str(Path(directory) / "s")))


def test_a_viewer_that_never_reads_is_cut_off_and_its_stream_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "UNREAD_S_MAX", 0.2)
    ended = asyncio.Event()
    sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        try:
            while True:
                sent += 1
                yield bytes(1 << 16)
        finally:
            ended.set()

    async def answer(_: Any) -> Response:
        return Response(200, "text/event-stream", pieces=pieces())

    async def scenario(path: str) -> None:
        _, writer = await asyncio.open_unix_connection(path, limit=1)
        writer.write(GET)
        await ended.wait()
        assert sent < 100, "what it does not read is not kept for it"
        writer.close()

    serving(answer, scenario)


def test_a_request_after_a_stream_on_the_same_connection_is_answered() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"all"

    async def answer(_: Any) -> Response:
        return Response(200, "text/event-stream", pieces=pieces())

    async def scenario(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        for _ in range(3):
            writer.write(GET)
            assert (await reader.readuntil(b"\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()

    serving(answer, scenario)


def test_a_viewer_that_reads_later_gets_the_whole_of_a_last_response() -> None:
    body = bytes(http.UNREAD_BYTES_MAX - 4096)

    async def answer(_: Any) -> Response:
        return Response(200, "text/plain", body)

    async def scenario(path: str) -> None:
        with socket.socket(socket.AF_UNIX) as viewer:
            viewer.connect(path)
            viewer.sendall(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            await asyncio.to_thread(select.select, [viewer], [], [])
            for _ in range(10):  # the server has sent what it can, without its reader
                await asyncio.sleep(0)
            with viewer.makefile("rb") as file:
                said = await asyncio.to_thread(file.read)
        assert said.endswith(b"\r\n\r\n" + body)

    serving(answer, scenario)


def test_of_a_thousand_connections_some_are_served_and_the_others_closed() -> None:
    async def answer(_: Any) -> Response:
        return Response(200, "text/plain", b"here")

    async def scenario(path: str) -> None:
        links = [await asyncio.open_unix_connection(path) for _ in range(1000)]
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(GET)
        assert b" 200 " in await reader.readline()
        links.append((reader, writer))
        closed = 0
        for reader, _ in links[: -http.CONNECTIONS_MAX]:  # the newest took the places of idle ones
            closed += await reader.read() == b""
        assert closed == 1001 - http.CONNECTIONS_MAX
        for _, one in links:
            one.close()
        line = b""
        while b" 200 " not in line:  # until the server has noticed
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(GET)
            with contextlib.suppress(ConnectionResetError):  # closed with the request unread
                line = await reader.readline()
            writer.close()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    serving(answer, scenario)


def test_a_token_in_a_url_gives_no_right_and_is_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    token = bearer(tmp_path, ViewerRight.ACT).partition(" ")[2]
    agent = FakeAgent()
    served = routes(tmp_path, agent)
    answers = [
        asyncio.run(served.answer(request(f"/metrics?token={token}"))),
        asyncio.run(served.answer(request(f"/login?code={token}"))),
        asyncio.run(served.answer(request(f"/{token}?x={token}"))),
    ]
    assert [answer.status for answer in answers] == [401, 403, 401]
    assert token not in "".join(str(answer) for answer in answers) + caplog.text
    assert not agent.asked

    async def bug(_: Any) -> Response:
        raise ValueError("a bug")

    async def scenario(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"GET /metrics?token=" + token.encode() + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 500 " in await reader.readline()
        writer.close()

    serving(bug, scenario)
    assert "request failed" in caplog.text
    assert token not in caplog.text


def test_a_date_that_jumps_signs_nobody_in_and_codes_do_not_mind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = access_in(tmp_path)
    cookie = access.cookie_for(ViewerRight.ACT)[1].partition(";")[0]
    code, real = access.new_code(ViewerRight.LOOK), time.time
    monkeypatch.setattr("peerload.web.access.time.time", lambda: real() + SESSION_S + 1)
    assert access.right_of(request("/", cookie=cookie)) is ViewerRight.NOTHING
    assert access.take_code(code) is ViewerRight.LOOK
    monkeypatch.setattr("peerload.web.access.time.time", lambda: 1.0)
    assert access.right_of(request("/", cookie=cookie)) is ViewerRight.ACT
