"""Tunnels carry requests of local clients to other nodes, and the responses back; and serve the clients of other nodes.

Each client has one tunnel, a stream of the peer link, to each node that it sends requests to. A tunnel keeps the order of requests.
The other end treats it as a client of its own (`ForwardServer`), so that every verb works there as here.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import pwd
from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.agent.control.authorization import NOBODY
from peerload.agent.control.connection import Connection, check_size, request_number
from peerload.agent.peers.connection import FORWARD_STALLED_S
from peerload.core.membership.peers import PeerState
from peerload.model import metrics, rules
from peerload.model.errors import BadMessage, BadRequest, LinkUnavailable, NotAllowed, PeerloadError, SlowDown
from peerload.model.messages import FORWARD_BYTES_MAX, FORWARDED_PART_BYTES_MAX, Forward, Forwarded, ForwardStop
from peerload.wire import control
from peerload.wire.frame import CONTROL_BYTES_MAX, HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

    from peerload.agent.control.authorization import Authorization
    from peerload.agent.control.connection import Server
    from peerload.agent.peers.connection import PeerConnection
    from peerload.agent.peers.links import PeerLinks
    from peerload.agent.peers.streams import StreamReader
    from peerload.core.membership.membership import Membership


TUNNELS_MAX = 256
"""Maximum number of tunnels; beyond it, an idle one is closed."""
OPEN_S_MAX = 5.0
"""Timeout for opening a tunnel to a node that is believed to be alive."""
OPEN_DEAD_S_MAX = 2.0
"""Timeout for opening one to a node that is believed to be dead, since the belief may be wrong."""
OPENINGS_AT_ONCE = 16
"""Maximum number of tunnels to one node that are being opened: a node bounds unauthenticated connections."""
LOOK_EVERY_S = 2.0
"""Interval of the check of a silent tunnel."""
SILENT_S_MAX = 5.0
"""Silence after which the tunnel to a node that is believed to be dead is closed."""
IDLE_S_MAX = 10.0
"""An idle tunnel is closed after this time, unless its client is attached to a task: the other node would take the
close for a disconnect of the client."""
WAITING_BYTES_MAX = 4 << 20
"""Number of unsent request bytes at which the client is no longer read (backpressure)."""
FRAMES_WAITING_MAX = 4
"""Number of response frames waiting for the client at which the tunnel is no longer read."""
ANSWER_BYTES_MAX = 128 << 20
"""Bound on a response that is not streamed."""
FRAME_BYTES_MIN = 4 << 10
"""Minimum size that a frame counts as, so that the number of empty frames is bounded, too."""
ERROR_CHARS_MAX = 2000
"""Bound on each field of an error of another node."""


STREAMED = (control.Wait, control.ReadOutput, control.Events, control.Exec)
"""Requests with streamed, possibly endless responses."""
ATTACHING = (control.Attend, control.Input)
"""Requests after which the other node notices a disconnect of the client."""
FORWARDS_MAX = 256
"""Maximum number of clients of one other node."""
PENDING_BYTES_MAX = 1 << 20
"""Number of bytes of running requests at which a client is no longer read (backpressure)."""


class ResponseQueue:
    """Queue of the response frames of one request. Iterate once: (kind, body), the last is "ok" or "error"."""

    def __init__(self, bytes_max: float = math.inf) -> None:
        self._bytes_left = bytes_max
        self._frames: deque[tuple[str, dict[str, Any]]] = deque()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._error: PeerloadError | None = None
        self.is_over = False

    def add(self, kind: str, body: dict[str, Any]) -> None:
        """Add a frame; frames after the last one are dropped."""
        if self.is_over:
            return
        self._frames.append((kind, body))
        self._news.set()
        self.is_over = kind != "more"
        if len(self._frames) >= FRAMES_WAITING_MAX:
            self._room.clear()

    def has_budget(self, size: int) -> bool:
        """Charge the bytes of a frame → True while the response is within its bound."""
        self._bytes_left -= max(size, FRAME_BYTES_MIN)
        return self._bytes_left >= 0

    def fail(self, error: PeerloadError) -> None:
        if not self.is_over:
            self._error = error
            self.is_over = True
            self._news.set()
            self._room.set()

    async def drain(self) -> None:
        """Wait until there is room for another frame."""
        await self._room.wait()

    def close(self) -> None:
        """Drop all later frames."""
        self.is_over = True
        self._room.set()

    async def __aiter__(self) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        while True:
            while not self._frames:
                if self._error is not None:
                    raise self._error
                self._news.clear()
                await self._news.wait()
            kind, body = self._frames.popleft()
            if not self._frames:
                self._room.set()
            yield kind, body
            if kind != "more":
                return


class ForwardedRequests:
    """The tunnels of one agent."""

    def __init__(self, links: PeerLinks, membership: Membership) -> None:
        self._links = links
        self._membership = membership
        self._tunnels: dict[tuple[Connection, str], Tunnel] = {}
        self._clients: set[Connection] = set()
        self._openings: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(OPENINGS_AT_ONCE))

    async def ensure_open(self, connection: Connection, node: str) -> None:
        """Wait until there is a tunnel to the node. Raises LinkUnavailable."""
        await self._tunnel(connection, node).opened()

    def ask(
        self, connection: Connection, node: str, request: control.Request
    ) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Forward a request → (kind, body) of each response frame, the last is "ok" or "error". Raises LinkUnavailable if the
        node cannot be reached, or disconnects before the end."""
        return self._tunnel(connection, node).ask(request)

    def _tunnel(self, connection: Connection, node: str) -> Tunnel:
        """The tunnel of this client to this node; opened if there is none. Raises SlowDown."""
        key = connection, node
        tunnel = self._tunnels.get(key)
        if tunnel is None or tunnel.is_over:
            if len(self._tunnels) >= TUNNELS_MAX and not self._close_an_idle_one():
                raise SlowDown(
                    "too many requests to other nodes at once", why=f"at most {TUNNELS_MAX} connections to them"
                )
            if connection not in self._clients:
                self._clients.add(connection)
                connection.on_disconnect.append(lambda: self._client_gone(connection))
            tunnel = self._tunnels[key] = Tunnel(self._links, self._membership, connection, node, self._openings[node])
            tunnel.work.add_done_callback(lambda _: self._closed(key))
        return tunnel

    def _close_an_idle_one(self) -> bool:
        """Close an idle tunnel → False if there is none."""
        key = next((key for key, tunnel in self._tunnels.items() if tunnel.is_idle), None)
        if key is None:
            return False
        self._tunnels.pop(key).close()
        return True

    def _client_gone(self, connection: Connection) -> None:
        self._clients.discard(connection)
        for client, node in [key for key in self._tunnels if key[0] is connection]:
            self._tunnels.pop((client, node)).close()

    async def close(self) -> None:
        work = [tunnel.close() for tunnel in self._tunnels.values()]
        await asyncio.gather(*work, return_exceptions=True)

    def _closed(self, key: tuple[Connection, str]) -> None:
        tunnel = self._tunnels.get(key)
        if tunnel is not None and tunnel.is_over:
            del self._tunnels[key]


class Tunnel:
    """Stream of one client to one other node. ``opening`` bounds concurrent openings; the stream ends with the task ``work``."""

    def __init__(
        self, links: PeerLinks, membership: Membership, connection: Connection, node: str, opening: asyncio.Semaphore
    ) -> None:
        self._links = links
        self._membership = membership
        self._connection = connection
        self._node = node
        self._opening = opening
        self._answers: dict[int, ResponseQueue] = {}
        self._next = 0
        self._waiting_bytes = 0
        self._holds_client = False
        self._has_task = False
        self._link: PeerConnection | None = None
        self._reader: StreamReader | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._error: PeerloadError | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.work = asyncio.get_running_loop().create_task(self._run(), name=f"tunnel to {node}")

    @property
    def is_over(self) -> bool:
        return self._error is not None or self.work.done()

    @property
    def is_idle(self) -> bool:
        """True if no request is pending, and the client is attached to no task."""
        return not self._answers and not self._has_task

    def close(self) -> asyncio.Task[None]:
        """Close the tunnel → the task that ends when it is closed."""
        self._end(LinkUnavailable(self._node, f"the connection to {self._node} was closed"))
        self.work.cancel()
        return self.work

    async def opened(self) -> None:
        """Wait until the tunnel is open. Raises LinkUnavailable."""
        await asyncio.wait([self._ready])
        if self._error is not None:
            raise self._error

    async def ask(self, request: control.Request) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        self._next += 1
        number = self._next
        self._has_task = self._has_task or isinstance(request, ATTACHING) or getattr(request, "attended", False)
        raw = control.encode_request(msgspec.structs.replace(request, id=number))
        if len(raw) > FORWARD_BYTES_MAX:
            why = f"it has {len(raw)} bytes; at most {FORWARD_BYTES_MAX} are carried to another node"
            raise BadRequest("the request is too large", why=why)
        answers = self._answers[number] = ResponseQueue(math.inf if isinstance(request, STREAMED) else ANSWER_BYTES_MAX)
        try:
            await self._send(raw)
            async for answer in answers:
                yield answer
        finally:
            del self._answers[number]
            if not answers.is_over:
                self._cancel(number)
            answers.close()
            self._schedule_close()

    async def _send(self, raw: bytes) -> None:
        """Send a request. While too many bytes are unsent, the client is not read."""
        self._waiting_bytes += len(raw)
        self._update_reading()
        try:
            await self.opened()
            assert self._link is not None
            assert self._reader is not None
            self._link.send(Forward(raw, _name_of(self._connection.uid), max(self._connection.uid, 0)))
            with contextlib.suppress(ConnectionError):  # `_run` reports the reason
                await self._link.drain()
        finally:
            self._waiting_bytes -= len(raw)
            self._update_reading()

    def _update_reading(self) -> None:
        too_much = self._waiting_bytes > WAITING_BYTES_MAX
        if too_much and not self._holds_client:
            self._connection.hold_requests()
        elif self._holds_client and not too_much:
            self._connection.release_requests()
        self._holds_client = too_much

    def _cancel(self, number: int) -> None:
        if self._link is not None and self._reader is not None and not self._link.is_closed:
            self._link.send(ForwardStop(number))

    def _schedule_close(self) -> None:
        """Close the tunnel when it is idle: immediately if the client has disconnected, else after IDLE_S_MAX."""
        if self._idle is not None:
            self._idle.cancel()
        if not self._answers and not (self._has_task and not self._connection.closed):
            pause_s = 0.0 if self._connection.closed else IDLE_S_MAX
            self._idle = asyncio.get_running_loop().call_later(pause_s, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if not self._answers:
            self.close()

    # -- responses -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        within_s = OPEN_DEAD_S_MAX if self._is_dead() else OPEN_S_MAX
        try:
            async with self._opening, asyncio.timeout(within_s):
                self._reader, self._link = await self._links.open_stream(self._node, (Forwarded,))
            self._link.allow_stall(FORWARD_STALLED_S)
            self._ready.set_result(None)
            while True:
                await self._take_frame(await self._frame())
        except TimeoutError:
            why = f"it does not answer within {within_s:g} s"
            self._end(LinkUnavailable(self._node, f"{self._node} cannot be reached", why=why))
        except (LinkUnavailable, BadMessage) as error:
            self._end(error)
        finally:
            if self._idle is not None:
                self._idle.cancel()
            self._end(LinkUnavailable(self._node, f"the connection to {self._node} was closed"))
            if self._link is not None:
                self._link.close("no request is left")

    def _end(self, error: PeerloadError) -> None:
        if self._error is None:
            self._error = error
            for answers in self._answers.values():
                answers.fail(error)
            if not self._ready.done():
                self._ready.set_result(None)

    async def _frame(self) -> bytes:
        """The next response frame, joined from its parts. Raises LinkUnavailable or BadMessage."""
        whole = bytearray()
        while True:
            part = await self._next_message()
            if not whole and not part.continues:
                return part.answer
            whole += part.answer
            if len(whole) > CONTROL_BYTES_MAX:
                raise BadMessage(f"{self._node} sent an oversized response", why=f"over {CONTROL_BYTES_MAX} bytes")
            if not part.continues:
                return bytes(whole)

    async def _next_message(self) -> Forwarded:
        assert self._link is not None
        assert self._reader is not None
        loop = asyncio.get_running_loop()
        since_s = loop.time()
        while True:
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    message = await self._reader.next(self._link, f"the answer of {self._node}")
            except TimeoutError:
                if self._answers and self._is_dead() and loop.time() - since_s > SILENT_S_MAX:
                    what = f"{self._node} stopped answering"
                    raise LinkUnavailable(self._node, what, why="it counts as dead") from None
                continue
            assert isinstance(message, Forwarded)
            return message

    async def _take_frame(self, raw: bytes) -> None:
        number, kind, body = control.decode_answer(raw)
        if kind == "error":
            body = {key: str(body.get(key) or "")[:ERROR_CHARS_MAX] for key in ("code", "what", "why", "hint")}
        if number == 0:  # about the tunnel, not about one request
            raise LinkUnavailable(self._node, body.get("what") or f"{self._node} refuses", why=body.get("why") or "")
        answers = self._answers.get(number)
        if answers is None:
            return
        if not answers.is_over and not answers.has_budget(len(raw)):
            what = f"{self._node} sent an oversized response"
            answers.fail(BadMessage(what, why=f"more than {ANSWER_BYTES_MAX >> 20} MiB without an end"))
            self._cancel(number)
        answers.add(kind, body)
        await answers.drain()

    def _is_dead(self) -> bool:
        peer = self._membership.get(self._node)
        return peer is not None and peer.state in (PeerState.DEAD, PeerState.LEFT)


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name[:64]
    except (KeyError, OverflowError):
        return ""


# -- the other end -----------------------------------------------------------------------------------------------------


class ForwardServer:
    """The clients of other nodes. ``server`` carries out requests, ``access`` maps their users."""

    def __init__(self, server: Server, access: Authorization) -> None:
        self._server = server
        self._access = access
        self._clients: dict[PeerConnection, ForwardedClient] = {}

    def received(self, link: PeerConnection, node: str, message: Forward | ForwardStop, /) -> None:
        """Process a message of one tunnel of that node."""
        client = self._clients.get(link)
        if client is None:
            client = ForwardedClient(self._server, link, node)
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
                raise NotAllowed(f"{node} sent requests of two users over one connection", why=what)
        except PeerloadError as error:
            self._server.refused(client, metrics.FORWARDS_REFUSED, rules.ROLES_CHECKED, str(error))
            client.fail(request_number(message.request) or 0, error)
        else:
            client.caller, client.uid = caller, caller.uid
            client.ask(message.request)

    def closed(self, link: PeerConnection) -> None:
        """End the requests of a client whose tunnel was closed."""
        client = self._clients.pop(link, None)
        if client is not None:
            client.lost()

    def close(self) -> None:
        """Cancel all requests. Disconnect callbacks are dropped: the clients may reconnect after the next start."""
        for client in self._clients.values():
            client.on_disconnect.clear()
            client.lost()


class ForwardedClient(Connection):
    """A client of another node. Its requests are carried out as its principal at this node."""

    def __init__(self, server: Server, link: PeerConnection, node: str) -> None:
        super().__init__(server)
        self.from_node = node
        self._link = link
        self._size = 0
        self._pending_bytes = 0
        self._work_of: dict[int, asyncio.Task[None]] = {}
        self._held = 0

    def ask(self, raw: bytes) -> None:
        self._size = len(raw)
        if not self.closed:
            self.request(raw)
        self._size = 0

    def stop(self, number: int) -> None:
        """Cancel a request that its client has given up."""
        work = self._work_of.get(number)
        if work is not None:
            work.cancel()

    def close_with(self, error: PeerloadError) -> None:
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
            self._link.send(Forwarded(bytes(body[first:after]), continues=after < len(body)))

    async def drain(self) -> None:
        """Wait until the other node has read most of the sent data; it reads only as fast as its client."""
        try:
            await self._link.drain()
        except ConnectionError:
            await asyncio.sleep(0)  # the tunnel is closed, which cancels the work

    @property
    def unread_bytes(self) -> int:
        """Number of bytes not sent yet to the other node, which reads no faster than its client."""
        return self._link.unsent_bytes

    def hold_requests(self) -> None:
        self._held += 1
        self._link.pause_reading("a client is held back")

    def release_requests(self) -> None:
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
