"""The control socket: requests of local clients in, answers and streams out.

Identity is the peer credential of the socket, never the request. In user mode the agent serves its own user (and
root). A client that sends what is no request is told so and cut off; one that does not read is waited for, and only it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from peerload.agent.connection import Connection
from peerload.agent.pending import Decisions, Pending
from peerload.agent.requests import Requests
from peerload.model.errors import BadRequest, ConfigError, PeerloadError, SlowDown

if TYPE_CHECKING:
    from peerload.agent.parts import Parts
    from peerload.model.actions import Answer, Decided, TaskChanged
    from peerload.wire import control

REQUESTS_PENDING_MAX = 1024
"""Requests of one client that may be unanswered at a time."""


class ControlServer:
    """Listens on the agent's socket; ``Requests`` knows what each verb does."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._server: asyncio.AbstractServer | None = None
        self._connections: set[Connection] = set()
        self._pending = Pending()
        self._decisions = Decisions()
        self._requests = Requests(parts, self._pending, self._decisions)

    # -- listening -----------------------------------------------------------------------------------------------------

    async def start(self, path: str) -> None:
        """Listen. Raises ConfigError if the place is taken by a living agent or cannot be used."""
        listener = _listen(path)
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: Connection(self), sock=listener)

    async def close(self) -> None:
        """Stop listening; clients that wait are told by the closed connection."""
        if self._server is not None:
            self._server.close()
            _remove(self._parts.config.socket)
        for connection in list(self._connections):
            for task in list(connection.tasks):
                task.cancel()
            connection.hang_up()

    def admit(self, connection: Connection) -> PeerloadError | None:
        """None, or why this client is not served."""
        if connection.uid not in (os.getuid(), 0):
            return BadRequest("this agent serves its own user only", hint="start your own:  peerload up")
        if len(self._connections) >= self._parts.config.clients_max:
            return SlowDown("too many clients", why=f"at most {self._parts.config.clients_max} at a time")
        self._connections.add(connection)
        return None

    def gone(self, connection: Connection) -> None:
        """A client hung up."""
        self._connections.discard(connection)

    def count(self, name: str) -> None:
        """Count what was refused."""
        self._parts.counters[name] += 1

    # -- requests ------------------------------------------------------------------------------------------------------

    def handle(self, connection: Connection, request: control.Request) -> None:
        """Route one request. Reads wait their turn behind what is on its way to the disk, so that a client never
        sees, or is told, less than was acknowledged."""
        if connection.pending >= REQUESTS_PENDING_MAX:
            connection.fail(request.id, SlowDown("too many requests at once", why=f"{connection.pending} are pending"))
            return
        try:
            self._requests.handle(connection, request)
        except Exception as error:  # noqa: BLE001 -- `failed` tells errors from bugs
            connection.failed(request.id, error)

    def broke(self, why: str) -> None:
        """A bug: the agent stops."""
        self._parts.fail(why)

    # -- what the core says --------------------------------------------------------------------------------------------

    def answered(self, answer: Answer) -> None:
        """Pass an answer on to whoever asked."""
        self._pending.answered(answer)

    def changed(self, action: TaskChanged) -> None:
        """A task has a new durable record, or runs."""
        self._requests.changed(action)

    def attempt_gone(self, key: str) -> None:
        """No process of this attempt is left."""
        self._requests.endings.gone(key)

    def decided(self, decision: Decided) -> None:
        """Remember the newest decision about a task."""
        self._decisions.keep(decision, self._parts.now().wall_s)


def check_socket(path: str) -> None:
    """Raises ConfigError if `ControlServer.start` could not listen there now."""
    _listen(path).close()
    _remove(path)


def _listen(path: str) -> socket.socket:
    """The socket for clients, mode 0600. Raises ConfigError."""
    try:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _answers(path):
            raise ConfigError("socket", f"another agent answers at {path}", hint=f"peerload down --socket {path}")
        _remove(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old_umask = os.umask(0o177)
        try:
            listener.bind(path)
        except OSError:
            listener.close()
            raise
        finally:
            os.umask(old_umask)
    except OSError as error:
        raise ConfigError("socket", f"{path} cannot be used", why=str(error.strerror or error)) from None
    return listener


def _remove(path: str) -> None:
    """Take a socket's name away; where that is not allowed it stays, and nobody answers there."""
    with contextlib.suppress(OSError):
        Path(path).unlink(missing_ok=True)


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
