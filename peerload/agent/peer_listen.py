"""The listening end of the peer links: whoever connects proves who it is before a byte of it is looked at.

Nobody who cannot do that within HANDSHAKE_S is told anything but what TLS itself has to say, and at most STRANGERS_MAX
of them are held at a time (rule J3).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import TYPE_CHECKING

from peerload.agent.peer_address import join_address, numeric, reachable
from peerload.agent.peer_connection import HANDSHAKE_S, SHUTDOWN_S, operating_system_says
from peerload.agent.tls import tls_says
from peerload.model.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from peerload.agent.peer_connection import PeerConnection
    from peerload.agent.tls import Credentials

STRANGERS_MAX = 64
"""Connections to us that have not introduced themselves (rule J3)."""
BACKLOG_MAX = 256
ACCEPT_PAUSE_S = 1.0
"""The pause after a connection could not be accepted, for want of descriptors say."""

NOTICE_EVERY_S = 60.0
"""Strangers who are not let in are logged so often for each reason; all are counted."""

_log = logging.getLogger("peerload.peer")


class Listener:
    """Listens for peers. `start`, then `close`. ``make()``: the connection that somebody will be who has proven to be of the
    cluster; ``drop(why)`` counts those who have not."""

    def __init__(self, tls: Credentials, make: Callable[[], PeerConnection], drop: Callable[[str], None]) -> None:
        self._tls = tls
        self._make = make
        self._drop = drop
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._turned_away_at: dict[str, float] = {}
        self.strangers: set[PeerConnection] = set()
        """The connections of those who have not introduced themselves yet."""

    def is_no_stranger(self, connection: PeerConnection) -> None:
        """It has introduced itself, or is gone."""
        self.strangers.discard(connection)

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
                if len(self.strangers) >= STRANGERS_MAX:
                    self._drop("too many strangers")
                    accepted.close()
                else:
                    connection = self._make()
                    self.strangers.add(connection)
                    self._spawn(self._secure(accepted, str(came_from[0]), connection), "handshake")

    async def _secure(self, accepted: socket.socket, address: str, connection: PeerConnection) -> None:
        """Have the other end prove who it is; `connection_made` is called when it has."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._tls.server,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except OSError as error:  # an SSLError is one too, and so are ours for a handshake that takes too long
            self._turned_away(connection, address, tls_says(error))

    def _turned_away(self, connection: PeerConnection, address: str, why: str) -> None:
        """Count why, and say it now and then: it was told nothing itself."""
        self.strangers.discard(connection)
        self._drop(f"no proof: {why}")
        now_s = asyncio.get_running_loop().time()
        if now_s - self._turned_away_at.get(why, -NOTICE_EVERY_S) >= NOTICE_EVERY_S:
            self._turned_away_at[why] = now_s
            _log.warning("somebody at %s was not let in: %s", address, why)

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


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
    return ConfigError("listen", what, why=operating_system_says(error), hint=hint)


def _listening(host: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listening.family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # "any" is IPv4's too
        listening.bind((host, port))
        listening.listen(BACKLOG_MAX)
    except OSError:
        listening.close()
        raise
    return listening
