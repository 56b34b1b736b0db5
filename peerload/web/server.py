"""The web server of one agent: its address and its lifecycle. It uses plain HTTP on loopback and a Unix socket, elsewhere TLS."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import logging
import os
import signal
import ssl
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from peerload.model.errors import ConfigError
from peerload.text.web_address import PORT_DEFAULT, web_address
from peerload.web.access import LOOPBACK_NAMES, Access, ViewerRight, read_secret
from peerload.web.http import REQUEST_S_MAX, HttpServer
from peerload.web.live import AgentLink, LiveFeed
from peerload.web.routes import Routes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

HEADERS = (("X-Content-Type-Options", "nosniff"), ("Cross-Origin-Resource-Policy", "same-origin"))
WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 -- names for what is refused without TLS
ADDRESS = "address"
"""File in the directory of the secrets: the URL of the last server that used them."""
ADDRESS_BYTES_MAX = 400
LISTENS = "0A"
"""State of a socket in /proc/net/tcp."""
log = logging.getLogger("peerload.web")


class ServerSettings(NamedTuple):
    """Settings of one server. listen: HOST:PORT, or the path of a Unix socket, "": PORT_DEFAULT on loopback, or any other port if it
    is taken; tokens: directory of its secrets; hosts: further accepted host names; certificate, key: PEM files
    for TLS, "": none."""

    socket: str
    listen: str
    tokens: Path
    hosts: tuple[str, ...] = ()
    certificate: str = ""
    key: str = ""

    @property
    def is_unix(self) -> bool:
        return "/" in self.listen

    def address(self) -> tuple[str, int]:
        """Host and port. Raises ConfigError."""
        return web_address(self.listen or f"127.0.0.1:{PORT_DEFAULT}", self.certificate)


async def serve(settings: ServerSettings, ready: Callable[[str, Access], None]) -> None:
    """Serve until SIGTERM or SIGINT. ready: called with the URL and the access control once it listens. Raises PeerloadError."""
    tls = None
    if settings.certificate:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            tls.load_cert_chain(settings.certificate, settings.key or None)
        except OSError as error:
            raise ConfigError("web.tls_cert", "the certificate cannot be used", why=str(error)) from None
    host = "" if settings.is_unix else settings.address()[0]
    hosts = (*settings.hosts, *(() if host in ("", *WILDCARDS) else (f"[{host}]" if ":" in host else host,)))
    access = Access(
        settings.tokens, hosts, f"peerload_{zlib.crc32(bytes(settings.tokens)):x}", is_secure=tls is not None
    )
    agent = AgentLink(settings.socket)
    feed = LiveFeed(agent)
    routes = Routes(agent, access, feed, port=0, scheme="http" if tls is None else "https")
    server = HttpServer(routes.answer, HEADERS)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    if os.environ.get("PEERLOAD_WEB_CHILD"):  # stdin has no data; its end means that the agent has ended
        asyncio.get_running_loop().add_reader(0, stopped.set)
    listener, where = await _listen(settings, server.serve(is_local=settings.is_unix), tls)
    if not settings.is_unix:
        routes.port = listener.sockets[0].getsockname()[1]
        with contextlib.suppress(OSError):  # such as a full disk: then `--open` does not find this server
            await asyncio.to_thread((settings.tokens / ADDRESS).write_text, where, encoding="ascii")
    ready(where, access)
    await stopped.wait()
    listener.close()
    await server.close()
    await feed.close()
    if settings.is_unix:
        with contextlib.suppress(OSError):
            os.unlink(settings.listen)  # noqa: PTH108 -- as below


async def _listen(
    settings: ServerSettings, connected: Callable[..., Awaitable[None]], tls: ssl.SSLContext | None
) -> tuple[asyncio.Server, str]:
    """Listen at the configured address → the address. Raises ConfigError."""
    serve = functools.partial(
        asyncio.start_server, connected, ssl=tls, ssl_handshake_timeout=REQUEST_S_MAX if tls is not None else None
    )
    try:
        if settings.is_unix:
            return await _listen_unix(settings.listen, connected), settings.listen
        host, port = settings.address()
        try:
            listener = await serve(host, port)
        except OSError as error:
            if settings.listen or error.errno != errno.EADDRINUSE:
                raise
            listener = await serve(host, 0)
    except OSError as error:
        hint = "another web server may be there:  peerload web --open        another place:  --listen 127.0.0.1:0"
        why = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError("web.listen", f"cannot listen at {settings.listen}", why=why, hint=hint) from None
    name = f"[{host}]" if ":" in host else LOOPBACK_NAMES[0] if host == "localhost" else host
    if host in WILDCARDS and settings.hosts:
        name = settings.hosts[0]
    scheme = "http" if tls is None else "https"
    return listener, f"{scheme}://{name}:{listener.sockets[0].getsockname()[1]}/"


async def _listen_unix(path: str, connected: Callable[..., object]) -> asyncio.Server:
    """Listen at a socket that the user and the group may use. asyncio would replace an existing socket, so a socket in use is
    an error; any other file too. Raises OSError."""
    with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
        _, writer = await asyncio.open_unix_connection(path)
        writer.close()
        raise OSError(errno.EADDRINUSE, "a server listens there")
    old = os.umask(0o117)
    try:
        return await asyncio.start_unix_server(connected, path)  # type: ignore[arg-type]
    finally:
        os.umask(old)


def run(settings: ServerSettings, told: Callable[[str], object]) -> int:
    """Serve until SIGTERM or SIGINT. told: called once, with a one-time URL."""
    logging.basicConfig(format="%(levelname)s %(message)s")

    def ready(where: str, access: Access) -> None:
        told(where if settings.is_unix else f"{where}login?code={access.new_code(ViewerRight.ACT)}")

    asyncio.run(serve(settings, ready))
    return 0


def running(tokens: Path) -> str:
    """A one-time URL of the server that runs with the secrets in this directory; "" if none does, or another user has its
    port. Raises PeerloadError if the secrets cannot be trusted."""
    try:
        owner = tokens.stat().st_uid
        with (tokens / ADDRESS).open(encoding="ascii", errors="replace") as file:
            url = urlsplit(file.read(ADDRESS_BYTES_MAX))
        port = url.port or 0
    except (OSError, ValueError):
        return ""
    if listeners(port) != {owner}:
        return ""
    import http.client  # noqa: PLC0415 -- a server needs no client

    token = read_secret(tokens, ViewerRight.ACT, owner)
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.hostname or "", port, timeout=5)
    try:
        connection.request("POST", "/api/v1/codes", headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        body = answer.read(1 << 16)
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK:
        return ""
    return f"{url.geturl()}login?code={json.loads(body)['code']}"


def listeners(port: int) -> set[int]:
    """The users with a listener at this local port, at any address. A client must check this before it sends a token."""
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == LISTENS and words[1].endswith(f":{port:04X}"):
                    found.add(int(words[7]))
    return found
