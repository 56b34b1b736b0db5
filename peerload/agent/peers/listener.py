"""Listener of the peer links: every connection passes the TLS handshake before any other byte is read.

At most STRANGERS_MAX connections may be without a complete handshake (rule J3). A client without a certificate that asks
to join (ALPN) is handed to the join server; any other connection becomes a peer connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from typing import TYPE_CHECKING, Protocol, cast

from peerload.agent.peers.connection import HANDSHAKE_S, SHUTDOWN_S, os_error_text
from peerload.model.errors import ConfigError
from peerload.security.address import join_address, network_of, plain_host, reachable, resolve_one
from peerload.security.tls import asks_to_join, tls_error_text

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from peerload.agent.peers.connection import ConnectionRegistry, Links
    from peerload.security.tls import Credentials

STRANGERS_MAX = 64
"""Connections without a complete handshake (rule J3) …"""
STRANGERS_OF_ONE_MAX = 48
"""… and those of one address, so that one address cannot keep out all others."""
BACKLOG_MAX = 256
SEGMENT_BYTES_MAX = 1220
"""Size of TCP segments in both directions, but for loopback: they fit into 1280 bytes, the smallest MTU of IPv6, also
where ICMP is dropped and no path MTU is reported."""
_LOOPBACK = ("127.0.0.1", "::1")
ACCEPT_PAUSE_S = 1.0
"""Pause after an error of accept, for example for want of descriptors."""

NOTICE_EVERY_S = 60.0
"""Interval of the log lines about refused connections, for each reason; all are counted."""

_log = logging.getLogger("peerload.peer")


class NewcomerServer(Protocol):
    """Serves those who ask to join (agent/joining/enrollment.py)."""

    def newcomer(self, closed: Callable[[asyncio.BaseProtocol], None]) -> asyncio.BaseProtocol:
        """The protocol object of one connection; it calls ``closed`` with itself at its end."""
        raise NotImplementedError

    def close(self) -> None:
        """Close all connections."""


class Listener:
    """Listens for peers: `start`, then `close`. ``newcomers``: where joining is served; None: nowhere."""

    def __init__(
        self, tls: Credentials, links: Links, connections: ConnectionRegistry, newcomers: NewcomerServer | None
    ) -> None:
        self._tls = tls
        self._links = links
        self._connections = connections
        self._newcomers = newcomers
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._noticed_s: dict[str, float] = {}
        self.strangers: dict[asyncio.BaseProtocol, str] = {}
        """Connections without a complete handshake, and the network of each."""
        self._accepted: set[socket.socket] = set()
        """Sockets whose TLS handshake has not begun: a task that is cancelled before it runs does not close its socket."""

    def handshake_done(self, connection: asyncio.BaseProtocol) -> None:
        """The handshake of a connection is complete, or the connection is closed."""
        self.strangers.pop(connection, None)

    async def start(self, host: str, port: int) -> str:
        """Listen → the `HOST:PORT` that others can dial. Raises ConfigError."""
        try:
            host = await resolve_one(host)
            self._socket = _listening(host, port)
            address = join_address(reachable(host), self._socket.getsockname()[1])
        except OSError as error:
            if self._socket is not None:
                self._socket.close()
            raise _cannot(host, port, error) from None
        self._spawn(self._accept(self._socket), "peers listen")
        return address

    async def close(self) -> None:
        """Stop listening, and close the connections of strangers and newcomers."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for accepted in self._accepted:
            accepted.close()
        if self._newcomers is not None:
            self._newcomers.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.closing(listening):
            while True:
                try:
                    accepted, came_from = await loop.sock_accept(listening)
                except OSError as error:
                    _log.warning("cannot accept peer connections: error=%s", os_error_text(error))
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                address = plain_host(str(came_from[0]))
                network = network_of(address)
                of_one = sum(1 for one in self.strangers.values() if one == network)
                if len(self.strangers) >= STRANGERS_MAX or of_one >= STRANGERS_OF_ONE_MAX:
                    self._links.drop("too many strangers", address)
                    accepted.close()
                    await asyncio.sleep(0)  # an accept that need not wait would never let other tasks run
                else:
                    connection = self._connections.make(self._links, dialled=False)
                    self.strangers[connection] = network
                    self._accepted.add(accepted)
                    self._spawn(self._handshake(accepted, address, connection), "handshake")

    async def _handshake(self, accepted: socket.socket, address: str, connection: asyncio.BaseProtocol) -> None:
        """Do the TLS handshake; then `connected` is called."""
        self._accepted.discard(accepted)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Undecided(self, connection),
                accepted,
                ssl=self._tls.server,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except OSError as error:  # an SSLError is one, and so is a timeout of the handshake
            self._refused(connection, address, tls_error_text(error))

    def connected(self, transport: asyncio.Transport, connection: asyncio.BaseProtocol) -> None:
        """Choose the protocol after the TLS handshake: join server for newcomers, peer connection for the others."""
        protocol = connection
        if asks_to_join(transport):
            if self._newcomers is None:
                address = plain_host(str(transport.get_extra_info("peername")[0]))
                self._refused(connection, address, "nobody is let in here")
                transport.abort()
                return
            protocol = self._newcomers.newcomer(self.handshake_done)
            self.strangers[protocol] = self.strangers.pop(connection, "")
        transport.set_protocol(protocol)
        protocol.connection_made(transport)

    def _refused(self, connection: asyncio.BaseProtocol, address: str, why: str) -> None:
        """Count a connection that was refused, and log it now and then; the other end gets no reason."""
        self.strangers.pop(connection, None)
        self._links.drop(f"no proof: {why}", address)
        now_s = asyncio.get_running_loop().time()
        if now_s - self._noticed_s.get(why, -NOTICE_EVERY_S) >= NOTICE_EVERY_S:
            self._noticed_s[why] = now_s
            _log.warning("connection refused: address=%s reason=%s", address, why)

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Undecided(asyncio.Protocol):
    """Protocol object until the TLS handshake has shown what the other end wants."""

    def __init__(self, listener: Listener, connection: asyncio.BaseProtocol) -> None:
        self._listener = listener
        self._connection = connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The TLS handshake is complete."""
        self._listener.connected(cast("asyncio.Transport", transport), self._connection)


async def check_listening(host: str, port: int) -> None:
    """Check that `Listener.start` could listen there now. Raises ConfigError."""
    try:
        host = await resolve_one(host)
        _listening(host, port).close()
        reachable(host)
    except OSError as error:
        raise _cannot(host, port, error) from None


def _cannot(host: str, port: int, error: OSError) -> ConfigError:
    what = f"cannot listen at {join_address(host, port)}"
    hint = "name an address of this machine that others reach"
    if error.errno == errno.EADDRINUSE:
        hint = f"another port, or any that is free:  --listen {join_address(host, 0)}"
    return ConfigError("listen", what, why=os_error_text(error), hint=hint)


def _listening(host: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listening.family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # "any" is IPv4's too
        if host not in _LOOPBACK:
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES_MAX)
        listening.bind((host, port))
        listening.listen(BACKLOG_MAX)
    except OSError:
        listening.close()
        raise
    return listening
