"""The launcher's socket: one agent connection, frames of requests in, frames of events out. A malformed frame costs the
connection.

Used by the launcher alone; the imports are few for its sake.
"""

from __future__ import annotations

import os
import select
import socket

from peerload.launcher.protocol import (
    FRAME_BYTES_MAX,
    HEADER_BYTES,
    REQUEST_FAILURES,
    LauncherProtocolError,
    ListRequest,
    decode_requests,
    encode,
    frame,
)
from peerload.launcher.record_log import log_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from peerload.launcher.multi_user import MultiUser
    from peerload.launcher.protocol import LauncherEvent, Request

UNSENT_BYTES_MAX = 64 << 20
"""An agent that leaves more than this unread is disconnected; it reconnects and asks for the list."""
EVENTS_PER_FRAME_MAX = 1_000
PENDING_MAX = 8
"""Bound on connections that have not asked for the list yet; the oldest is closed."""
FIRST_FRAME_BYTES_MAX = 4096
LAST_READS_MAX = 64
"""Bound on reads from an agent that is being replaced."""
READ_BYTES = 1 << 18
NAME = "launcher.sock"


def claim_name(what: str, store: str) -> str:
    """Name of the abstract socket by which a process of this kind claims a database."""
    return f"\0peerload-{what}-{store}"


def claim_store(store: str) -> socket.socket | None:
    """Claim a database on this machine as its launcher, so that an agent with a copy of its directory finds out. None:
    the name is taken, or cannot be bound."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(claim_name("launcher", store))  # nobody may connect: it does not listen
    except OSError as error:
        held.close()
        log_line(f"cannot claim the database: store={store} error={error}")
        return None
    return held


class AgentSocket:
    """A listener for one agent at a time. A newer one replaces the older as soon as it asks for the list, which agents
    do first. Other connections change nothing.

    ``carry_out(request)`` gets each request; whatever of `REQUEST_FAILURES` it raises costs the connection. listed: the
    agent has asked for the list, and gets events. system: decides who is the agent; None: whoever may open the
    directory.
    """

    def __init__(
        self,
        directory: str,
        epoll: select.epoll,
        carry_out: Callable[[Request], None],
        system: MultiUser | None = None,
    ) -> None:
        self._path = f"{directory}/{NAME}"
        self._system = system
        self._epoll = epoll
        self._carry_out = carry_out
        self._agent: socket.socket | None = None
        self._pending: dict[int, tuple[socket.socket, bytearray]] = {}
        self._received = bytearray()
        self._unsent = bytearray()
        self._writing = False
        self.listed = False
        self._directory = directory
        self._listener = self._listening()

    def _listening(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            os.chdir(self._directory)  # a path within it is never too long for a socket
            if os.path.lexists(NAME):
                os.unlink(NAME)  # noqa: PTH108 -- pathlib costs the launcher a megabyte
            listener.bind(NAME)
            listener.listen(16)
            listener.setblocking(False)
            if self._system is not None:
                os.chown(NAME, self._system.access.uid, -1)
            self._epoll.register(listener, select.EPOLLIN)
        except OSError:
            listener.close()
            raise
        finally:
            os.umask(before)
            os.chdir("/")
        return listener

    def listen_again(self) -> None:
        """Make the socket again if its name is gone, since nobody could connect any more. Connections stay."""
        if os.path.lexists(self._path):
            return
        try:
            listener = self._listening()
        except OSError as error:
            log_line(f"socket is gone and cannot be restored: path={self._path} error={error}")
            return
        self._epoll.unregister(self._listener)
        self._listener.close()
        self._listener = listener
        log_line(f"socket was gone and is restored: path={self._path}")

    def close(self) -> None:
        """Remove the socket."""
        if os.path.lexists(self._path):
            os.unlink(self._path)  # noqa: PTH108 -- as above

    def ready(self, masks: dict[int, int]) -> None:
        """Handle what epoll reported: new connections, and requests."""
        if self._listener.fileno() in masks:
            self._accept()
        for fd in [fd for fd in self._pending if fd in masks]:
            self._receive_first(fd)
        if self._agent is not None and masks.get(self._agent.fileno(), 0) & ~select.EPOLLOUT:
            self._receive()

    def send(self, events: Sequence[LauncherEvent]) -> None:
        """Queue events for the agent; `flush` writes them. Without an agent they are dropped."""
        for at in range(0, len(events), EVENTS_PER_FRAME_MAX):
            if self._agent is not None:
                self._unsent += frame([encode(event) for event in events[at : at + EVENTS_PER_FRAME_MAX]])

    def flush(self) -> None:
        """Write the queue, as far as the agent reads."""
        if self._agent is None or not (self._unsent or self._writing):
            return
        try:
            while self._unsent:
                del self._unsent[: self._agent.send(self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > UNSENT_BYTES_MAX:
                self._disconnect("it does not read")
                return
        except OSError as error:
            self._receive_rest()
            self._disconnect(str(error))
            return
        if bool(self._unsent) != self._writing:
            self._writing = not self._writing
            self._epoll.modify(self._agent, select.EPOLLIN | (select.EPOLLOUT if self._writing else 0))

    def _accept(self) -> None:
        try:
            agent, _ = self._listener.accept()
        except OSError as error:
            log_line(f"cannot accept a connection: error={error}")
            return
        if self._system is not None and not self._system.admits(agent):
            agent.close()
            return
        agent.setblocking(False)
        self._epoll.register(agent, select.EPOLLIN)
        self._receive_rest()
        if self._agent is None:
            self._agent = agent
            return
        if len(self._pending) >= PENDING_MAX:
            self._reject(next(iter(self._pending)))
        self._pending[agent.fileno()] = agent, bytearray()

    def _receive_rest(self) -> None:
        """Carry out what an agent sent before it was disconnected."""
        for _ in range(LAST_READS_MAX):
            if not self._receive():
                break

    def _receive_first(self, fd: int) -> None:
        """Read the first frame of a pending connection; it becomes the agent's if it asks for the list."""
        newcomer, buffer = self._pending[fd]
        try:
            raw = newcomer.recv(FIRST_FRAME_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            raw = b""
        buffer += raw
        size = int.from_bytes(buffer[:HEADER_BYTES], "big")
        if not raw or (len(buffer) >= HEADER_BYTES and size > FIRST_FRAME_BYTES_MAX):
            self._reject(fd)
        elif len(buffer) >= HEADER_BYTES + size:
            if not _starts_with_list(bytes(buffer[HEADER_BYTES : HEADER_BYTES + size])):
                self._reject(fd)
                return
            del self._pending[fd]
            self._receive_rest()
            self._disconnect("a newer agent connects")
            self._agent = newcomer
            self._process(buffer)

    def _reject(self, fd: int) -> None:
        newcomer, _ = self._pending.pop(fd)
        self._epoll.unregister(newcomer)
        newcomer.close()

    def _disconnect(self, reason: str) -> None:
        if self._agent is None:
            return
        if reason:
            log_line(f"agent connection closed: {reason}")
        self._epoll.unregister(self._agent)
        self._agent.close()
        self._agent = None
        self._received.clear()
        self._unsent.clear()
        self._writing = self.listed = False

    def _receive(self) -> bool:
        """Read and carry out requests. → whether there may be more."""
        if self._agent is None:
            return False
        try:
            raw = self._agent.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._disconnect(str(error))
            return False
        if not raw:
            self._disconnect("")
            return False
        return self._process(raw)

    def _process(self, raw: bytes | bytearray) -> bool:
        """Carry out the complete frames. → whether there may be more."""
        buffer = self._received
        buffer += raw
        while len(buffer) >= HEADER_BYTES:
            size = int.from_bytes(buffer[:HEADER_BYTES], "big")
            if size > FRAME_BYTES_MAX:
                self._disconnect(f"a frame that claims {size} bytes")
                return False
            if len(buffer) < HEADER_BYTES + size:
                return True
            body = bytes(buffer[HEADER_BYTES : HEADER_BYTES + size])
            del buffer[: HEADER_BYTES + size]
            try:
                for request in decode_requests(body):
                    self._carry_out(request)
            except REQUEST_FAILURES as error:
                self._disconnect(f"not a request: {type(error).__name__}: {str(error)[:200]}")
                return False
        return True


def _starts_with_list(body: bytes) -> bool:
    try:
        return isinstance(next(decode_requests(body), None), ListRequest)
    except LauncherProtocolError:
        return False
