"""Server side of forwarding: serves the clients of other nodes like local ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

from peerload.agent.control.authorization import NOBODY
from peerload.agent.control.connection import Connection, check_size, request_number
from peerload.model import metrics, rules
from peerload.model.errors import NotAllowed, PeerloadError, SlowDown
from peerload.model.messages import FORWARDED_PART_BYTES_MAX, Forward, Forwarded, ForwardStop
from peerload.wire.frame import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from peerload.agent.control.authorization import Authorization
    from peerload.agent.control.connection import Server
    from peerload.agent.peers.connection import PeerConnection

FORWARDS_MAX = 256
"""Clients of one other node at a time."""
PENDING_BYTES_MAX = 1 << 20
"""Bytes of running requests at which a client is no longer read (backpressure)."""


class ForwardServer:
    """The clients of other nodes. ``server`` carries out requests, ``access`` maps their users."""

    def __init__(self, server: Server, access: Authorization) -> None:
        self._server = server
        self._access = access
        self._clients: dict[PeerConnection, ForwardedClient] = {}

    def received(
        self, link: PeerConnection, node: str, message: Forward | ForwardStop, send: Callable[[Forwarded], None]
    ) -> None:
        """Take a message of one tunnel of that node; ``send`` sends a response."""
        client = self._clients.get(link)
        if client is None:
            client = ForwardedClient(self._server, link, node, send)
            if Counter(known.from_node for known in self._clients.values())[node] >= FORWARDS_MAX:
                self._server.refused(client, metrics.FORWARDS_REFUSED, rules.PEERS_LIMITED, "too many clients at once")
                client.close_with(
                    SlowDown(f"too many requests of {node} at once", why=f"at most {FORWARDS_MAX} clients of it")
                )
                return
            self._clients[link] = client
        if isinstance(message, ForwardStop):
            client.stop(message.number)
            return
        try:
            caller = self._access.forwarded(node, message)
            if client.caller not in (NOBODY, caller):
                what = f"a request of {caller.user or 'another user'} over the stream of {client.caller.user}"
                raise NotAllowed(f"{node} mixes up users", why=what)
        except PeerloadError as error:
            self._server.refused(client, metrics.FORWARDS_REFUSED, rules.ROLES_CHECKED, str(error))
            client.fail(request_number(message.request) or 0, error)
        else:
            client.caller, client.uid = caller, caller.uid
            client.ask(message.request)

    def closed(self, link: PeerConnection) -> None:
        """A tunnel was closed: its client has disconnected."""
        client = self._clients.pop(link, None)
        if client is not None:
            client.lost()

    def close(self) -> None:
        """Cancel all requests. Disconnect callbacks are dropped: the clients may reconnect after the next start."""
        for client in self._clients.values():
            client.on_disconnect.clear()
            client.lost()


class ForwardedClient(Connection):
    """One client of another node. Its requests are carried out as the principal that it is here."""

    def __init__(self, server: Server, link: PeerConnection, node: str, send: Callable[[Forwarded], None]) -> None:
        super().__init__(server)
        self.from_node = node
        self._link = link
        self._send = send
        self._size = 0
        self._pending_bytes = 0
        self._work_of: dict[int, asyncio.Task[None]] = {}
        self._held = 0

    def ask(self, raw: bytes) -> None:
        """Take one request."""
        self._size = len(raw)
        if not self.closed:
            self.request(raw)
        self._size = 0

    def stop(self, number: int) -> None:
        """Cancel a request that nobody waits for any more."""
        work = self._work_of.get(number)
        if work is not None:
            work.cancel()

    def close_with(self, error: PeerloadError) -> None:
        """Send an error, and close the tunnel."""
        self.fail(0, error)
        self.closed = True
        self._link.close(error.what)

    def _no_request(self, error: PeerloadError) -> None:
        self.close_with(error)

    def _write(self, raw: bytes) -> None:
        if self.closed or self._link.is_closed:
            return
        check_size(raw)
        body = memoryview(raw)[HEADER_BYTES:]
        for first in range(0, len(body), FORWARDED_PART_BYTES_MAX):
            after = first + FORWARDED_PART_BYTES_MAX
            self._send(Forwarded(bytes(body[first:after]), continues=after < len(body)))

    async def drain(self) -> None:
        """Wait until the other node has read most of what was written; its client may be slow."""
        try:
            await self._link.drain()
        except ConnectionError:
            await asyncio.sleep(0)  # the tunnel is closed, which cancels the work

    @property
    def unread_bytes(self) -> int:
        """Bytes not sent yet to the other node, which reads no faster than its client."""
        return self._link.unsent_bytes

    def hold_requests(self) -> None:
        """Stop reading the tunnel."""
        self._held += 1
        self._link.pause_reading("a client is held back")

    def release_requests(self) -> None:
        """Read the tunnel again."""
        self._held -= 1
        if not self._held:
            self._link.resume_reading("a client is held back")

    def spawn(self, number: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start the work on a request; the bytes of running requests are bounded."""
        size = self._size
        task = super().spawn(number, work)
        self._work_of[number] = task
        self._pending_bytes += size
        task.add_done_callback(lambda task: self._work_ended(number, task, size))
        if self._pending_bytes > PENDING_BYTES_MAX:
            self._link.pause_reading("requests are being carried out")
        return task

    def _work_ended(self, number: int, task: asyncio.Task[None], size: int) -> None:
        if self._work_of.get(number) is task:
            del self._work_of[number]
        before = self._pending_bytes
        self._pending_bytes -= size
        if self._pending_bytes <= PENDING_BYTES_MAX < before:
            self._link.resume_reading("requests are being carried out")
