"""The listening end of the peer links: whoever connects proves who it is before a byte of it is looked at.

Nobody who cannot do that within HANDSHAKE_S is told anything but what TLS itself has to say, and at most STRANGERS_MAX
of them are held at a time (rule J3).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from typing import TYPE_CHECKING, cast

from peerload.agent.joining.join_server import JoiningNode, network_of
from peerload.agent.peers.connection import HANDSHAKE_S, SHUTDOWN_S, operating_system_says
from peerload.model.errors import ConfigError
from peerload.security.address import join_address, numeric, plain_host, reachable
from peerload.security.tls import asks_to_join, tls_says

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from peerload.agent.joining.join_server import JoinServer
    from peerload.agent.peers.connection import PeerConnection
    from peerload.security.tls import Credentials

STRANGERS_MAX = 64
"""Connections to us that have not introduced themselves (rule J3) …"""
STRANGERS_OF_ONE_MAX = 48
"""… and of them those that come from one address: who has one only keeps nobody out who comes from another."""
BACKLOG_MAX = 256
SEGMENT_BYTES_MAX = 1220
"""Of both directions of a connection to us: so it passes where at most 1280 bytes do, even if nobody tells that there is
such a place on the way (ICMP that is dropped). Not on loopback, where a segment has 64 KiB."""
_LOOPBACK = ("127.0.0.1", "::1")
ACCEPT_PAUSE_S = 1.0
"""The pause after a connection could not be accepted, for want of descriptors say."""

NOTICE_EVERY_S = 60.0
"""Strangers who are not let in are logged so often for each reason; all are counted."""

_log = logging.getLogger("peerload.peer")


class Listener:
    """Listens for peers. `start`, then `close`. ``make()``: the connection that somebody will be who has proven to be of the
    cluster; ``drop(why, who)`` counts those who have not; ``door``: where newcomers are let in, None: nowhere."""

    def __init__(self, tls: Credentials, make: Callable[[], PeerConnection], drop: Callable[[str, str], None]) -> None:
        self._tls = tls
        self._make = make
        self._drop = drop
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._turned_away_at: dict[str, float] = {}
        self.door: JoinServer | None = None
        self.strangers: dict[PeerConnection | JoiningNode, str] = {}
        """The connections of those who have not introduced themselves yet, and the network of each."""
        self._accepted: set[socket.socket] = set()
        """Accepted sockets whose handshake has not begun: of a task that is cancelled before it runs nobody else closes them."""

    def is_no_stranger(self, connection: PeerConnection | JoiningNode) -> None:
        """It has introduced itself, or is gone."""
        self.strangers.pop(connection, None)

    async def start(self, host: str, port: int) -> str:
        """Listen → the `HOST:PORT` others can dial. Raises ConfigError."""
        try:
            host = await numeric(host)
            self._socket = _listening(host, port)
            address = join_address(reachable(host), self._socket.getsockname()[1])
        except OSError as error:
            if self._socket is not None:
                self._socket.close()
            raise _cannot(host, port, error) from None
        self._spawn(self._accept(self._socket), "peers listen")
        return address

    async def close(self) -> None:
        """Listen no more, and let strangers go."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for accepted in self._accepted:
            accepted.close()
        for newcomer in list(self.door.newcomers) if self.door is not None else ():
            newcomer.abort()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.closing(listening):
            while True:
                try:
                    accepted, came_from = await loop.sock_accept(listening)
                except OSError as error:
                    _log.warning("no peer can be let in for a moment: %s", operating_system_says(error))
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                address = plain_host(str(came_from[0]))
                network = network_of(address)
                of_one = sum(1 for one in self.strangers.values() if one == network)
                if len(self.strangers) >= STRANGERS_MAX or of_one >= STRANGERS_OF_ONE_MAX:
                    self._drop("too many strangers", address)
                    accepted.close()
                    await asyncio.sleep(0)  # accepting waits for nothing while others wait: the agent has more to do
                else:
                    connection = self._make()
                    self.strangers[connection] = network
                    self._accepted.add(accepted)
                    self._spawn(self._secure(accepted, address, connection), "handshake")

    async def _secure(self, accepted: socket.socket, address: str, connection: PeerConnection) -> None:
        """Have the other end prove who it is; `connection_made` is called when it has."""
        self._accepted.discard(accepted)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Vestibule(self, connection),
                accepted,
                ssl=self._tls.server,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except OSError as error:  # an SSLError is one too, and so are ours for a handshake that takes too long
            self._turned_away(connection, address, tls_says(error))

    def comes_in(self, transport: asyncio.Transport, connection: PeerConnection) -> None:
        """TLS stands: a newcomer goes to the door, everybody else is to be a peer."""
        protocol: PeerConnection | JoiningNode = connection
        if asks_to_join(transport):
            if self.door is None:
                address = plain_host(str(transport.get_extra_info("peername")[0]))
                self._turned_away(connection, address, "nobody is let in here")
                transport.abort()
                return
            newcomer = protocol = JoiningNode(self.door, lambda: self.is_no_stranger(newcomer))
            self.strangers[newcomer] = self.strangers.pop(connection, "")
        transport.set_protocol(protocol)
        protocol.connection_made(transport)

    def _turned_away(self, connection: PeerConnection, address: str, why: str) -> None:
        """Count why, and say it now and then: it was told nothing itself."""
        self.strangers.pop(connection, None)
        self._drop(f"no proof: {why}", address)
        now_s = asyncio.get_running_loop().time()
        if now_s - self._turned_away_at.get(why, -NOTICE_EVERY_S) >= NOTICE_EVERY_S:
            self._turned_away_at[why] = now_s
            _log.warning("somebody at %s was not let in: %s", address, why)

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Vestibule(asyncio.Protocol):
    """Until it is known what the other end wants to speak."""

    def __init__(self, listener: Listener, connection: PeerConnection) -> None:
        self._listener = listener
        self._connection = connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """TLS stands."""
        self._listener.comes_in(cast("asyncio.Transport", transport), self._connection)


async def check_listening(host: str, port: int) -> None:
    """Raises ConfigError if `Listener.start` could not listen there now."""
    try:
        host = await numeric(host)
        _listening(host, port).close()
        reachable(host)
    except OSError as error:
        raise _cannot(host, port, error) from None


def _cannot(host: str, port: int, error: OSError) -> ConfigError:
    what = f"cannot listen at {join_address(host, port)}"
    hint = "name an address of this machine that others reach"
    if error.errno == errno.EADDRINUSE:
        hint = f"another port, or any that is free:  --listen {join_address(host, 0)}"
    return ConfigError("listen", what, why=operating_system_says(error), hint=hint)


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
