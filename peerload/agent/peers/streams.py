"""Streams: one connection for the output of one task, its standard input, files, or one forwarded client, so that bulk data never
delays a lease; and reachability: often only one of two nodes can dial the other (address translation, firewalls).

The reading end reads only as fast as its consumer, and the serving end writes only as fast as the other reads. In between are
only the buffers of the operating system and a few pieces.

A link serves both directions, regardless of which end made it. It is kept if the other end could not make a new one, and
immediately restored if only this end can. A stream that cannot be dialled is requested over the link: the other end
dials back, with the number of the request in its Hello. After a peer has dialled this node, this node checks
once whether it can dial the peer, and reports a failure to the peer: no node can see by itself whether it is reachable.
Two nodes that cannot dial each other in either direction have no link; they know of each other only by gossip.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from peerload.agent.peers.connection import FORWARD_STALLED_S, STREAM_STALLED_S
from peerload.agent.runtime import coalesced_s
from peerload.model import messages, metrics
from peerload.model.errors import LinkUnavailable
from peerload.security.address import is_loopback

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping

    from peerload.agent.peers.connection import ConnectionRegistry, Links, Owner, PeerConnection, PeerEntry, PeerTable
    from peerload.agent.peers.local_node import LocalNode
    from peerload.model.errors import PeerloadError


STREAMS_MAX = 512
"""Maximum number of served streams for output, input and files, and the same for fetched ones."""
FORWARDING_MAX = 384
"""Maximum number of streams of forwarded clients. They are counted separately, so that they never block outputs."""
UNASKED_MAX = 256
"""Maximum number of streams without a request. Beyond it, the oldest one of the node with the most is closed."""
PIECES_WAITING_MAX = 2
"""Number of pieces waiting for the consumer at which reading stops. It continues when half of them are consumed."""
_CONSUMER_BEHIND = "pieces wait for the consumer"

Piece = messages.OutputChunk | messages.OutputEnd
LAST = messages.OutputEnd | messages.BlocksEnd
KINDS: dict[type[messages.Message], tuple[type[messages.Message], ...]] = {
    messages.OutputRequest: (messages.OutputChunk, messages.OutputEnd),
    messages.BlocksRequest: (messages.Blocks, messages.BlocksEnd),
}
"""Requests that are answered by a sequence of pieces, and these pieces."""


class PieceServer(Protocol):
    """Source of the pieces that answer one kind of request. src: the requesting node; the last piece is one of LAST."""

    def __call__(self, src: str, request: Any, /) -> AsyncIterator[messages.Message]:  # noqa: ANN401 -- of its kind
        raise NotImplementedError


class StreamServer(Protocol):
    """Serves the streams of one kind: forwarded clients, or standard input."""

    def received(
        self,
        link: PeerConnection,
        node: str,
        message: Any,  # noqa: ANN401 -- of the kinds that it serves, which differ
        /,
    ) -> None:
        """Handle a message of this node from a stream."""

    def closed(self, link: PeerConnection, /) -> None:
        """The stream is closed."""


class Streams:
    """The streams of one node in both directions."""

    def __init__(self, local: LocalNode, links: Links, dialer: Reachability) -> None:
        self._local = local
        self._links = links
        self._dialer = dialer
        self._pieces: Mapping[type[messages.Message], PieceServer] = {}
        self._fetched = 0
        self._forwards: StreamServer | None = None
        self._inputs: StreamServer | None = None
        self._servers: dict[PeerConnection, StreamServer] = {}
        self.served: dict[PeerConnection, asyncio.Task[None] | None] = {}
        """Connections made by other nodes, with the task that writes an output; None: no output was requested."""
        self._unasked: dict[PeerConnection, str] = {}
        self._requests: dict[PeerConnection, asyncio.Queue[AsyncIterator[messages.Message]]] = {}
        """For each connection with a task: the answers that the task has not begun to write."""

    def serve(
        self,
        pieces: Mapping[type[messages.Message], PieceServer],
        inputs: StreamServer | None = None,
        forwards: StreamServer | None = None,
    ) -> None:
        """Start to serve requests for pieces (outputs of attempts that ran here, blocks of files), for the standard
        input of tasks that run elsewhere, and from clients of other nodes."""
        self._pieces, self._inputs, self._forwards = pieces, inputs, forwards

    async def open(
        self, dst: str, address: str, kinds: tuple[type[messages.Message], ...]
    ) -> tuple[StreamReader, PeerConnection]:
        """Open a stream over which the other node may send messages of these kinds. Raises LinkUnavailable."""
        connection = await self._dialer.open(address, dst, lambda: StreamReader(self._local, dst, kinds))
        assert isinstance(connection.owner, StreamReader)
        return connection.owner, connection

    def accepted(self, connection: PeerConnection) -> None:
        """Register a stream that a peer has opened; its request will follow."""
        self.served[connection] = None
        self._unasked[connection] = connection.hello.identity.node if connection.hello is not None else ""
        if len(self._unasked) > UNASKED_MAX:
            ((most, _),) = Counter(self._unasked.values()).most_common(1)
            self._refuse(next(known for known, node in self._unasked.items() if node == most))

    def _refuse(self, connection: PeerConnection) -> None:
        self._links.drop("too_many_streams", connection.certified)
        self._unasked.pop(connection, None)
        connection.close("too many streams")

    def _admit(self, connection: PeerConnection, message: messages.Message) -> bool:
        """Check the limits at the first request of a stream. → False if it was refused and closed."""
        if connection not in self._unasked:
            return True
        is_forward = isinstance(message, messages.Forward | messages.ForwardStop)
        forwarding = sum(1 for known in self._servers.values() if known is self._forwards)
        others = len(self.served) - len(self._unasked) - forwarding
        if forwarding >= FORWARDING_MAX if is_forward else others >= STREAMS_MAX:
            self._refuse(connection)
            return False
        del self._unasked[connection]
        return True

    def received(self, connection: PeerConnection, node: str, message: messages.Message) -> None:
        """Handle a message over a stream: a request for output, successive requests for blocks (one may wait), or any
        number of messages for one `StreamServer`."""
        if not self._admit(connection, message):
            return
        server = self._server_of(message)
        if (
            server is not None
            and self.served.get(connection) is None
            and self._servers.get(connection, server) is server
        ):
            if connection not in self._servers and server is self._forwards:
                connection.allow_stall(FORWARD_STALLED_S)
            self._servers[connection] = server
            server.received(connection, node, message)
            return
        source, requests = self._pieces.get(type(message)), self._requests.get(connection)
        is_further = requests is not None and not requests.full() and isinstance(message, messages.BlocksRequest)
        if source is None or connection in self._servers or not (requests is None or is_further):
            self._links.drop("no_output_request", connection.certified)
            connection.close("no output request")
            return
        if requests is None:
            requests = self._requests[connection] = asyncio.Queue(maxsize=1)
            self.served[connection] = self._links.spawn(write_answers(connection, requests), f"pieces for {node}")
        requests.put_nowait(source(node, message))

    def _server_of(self, message: messages.Message) -> StreamServer | None:
        if isinstance(message, messages.Forward | messages.ForwardStop):
            return self._forwards
        return self._inputs if isinstance(message, messages.InputRequest) else None

    def closed(self, connection: PeerConnection) -> None:
        """Stop serving a connection that has closed."""
        self._unasked.pop(connection, None)
        server = self._servers.pop(connection, None)
        if server is not None:
            server.closed(connection)
        self._requests.pop(connection, None)
        task = self.served.pop(connection, None)
        if task is not None:
            task.cancel()

    async def fetch(
        self,
        dst: str,
        address: str,
        request: messages.Message,
        what: str,
        kept: dict[str, RequestStream] | None = None,
        following: messages.Message | None = None,
    ) -> AsyncIterator[Any]:
        """Fetch the pieces that answer a request to another node as they arrive; the last is one of LAST. ``what``: subject
        for messages; kept: open streams by node, from which the stream is taken, and to which it returns after a complete answer;
        following: the next request over it. Raises LinkUnavailable."""
        if not address:
            raise LinkUnavailable(dst, f"no address of {dst} is known")
        if self._fetched >= STREAMS_MAX:
            raise LinkUnavailable(dst, "too many output streams", why=f"at most {STREAMS_MAX} at a time")
        self._fetched += 1
        stream = (kept.pop(dst, None) if kept is not None else None) or RequestStream()
        is_whole = False
        try:
            piece = await stream.ask(request, lambda: self.open(dst, address, KINDS[type(request)]), what)
            if following is not None:
                stream.ask_ahead(following)
            while not is_whole:
                is_whole = isinstance(piece, LAST)
                yield piece
                del piece  # it is as large as a frame: free it before the next one arrives
                if not is_whole:
                    piece = await stream.next(what)
        finally:
            self._fetched -= 1
            if kept is not None and is_whole:
                kept[dst] = stream
            else:
                stream.close(f"{what} is no longer wanted")


class RequestStream:
    """The requesting end of a stream with successive requests for pieces, which saves a TLS handshake for each. Opened when it is
    needed. One reader at a time."""

    def __init__(self) -> None:
        self._stream: tuple[StreamReader, PeerConnection] | None = None
        self._ahead: messages.Message | None = None
        """Request that was sent while the previous one was answered."""
        self._answers = 0

    async def ask(
        self,
        request: messages.Message,
        open_: Callable[[], Coroutine[object, object, tuple[StreamReader, PeerConnection]]],
        what: str,
    ) -> messages.Message:
        """Send a request, unless it was sent ahead → the first piece of its answer. Raises LinkUnavailable."""
        if self._ahead not in (None, request):
            self.close("another request was sent ahead")
        if self._stream is not None:
            try:
                return await self._first(request, what)
            except LinkUnavailable:  # it was closed meanwhile, or the node accepts only one request for each stream
                self._ahead = None
        self._stream, self._answers = await open_(), 0
        return await self._first(request, what)

    async def _first(self, request: messages.Message, what: str) -> messages.Message:
        assert self._stream is not None
        if self._ahead is None:
            self._stream[1].send(request)
        piece = await self.next(what)
        self._ahead = None
        self._answers += 1
        return piece

    def ask_ahead(self, request: messages.Message) -> None:
        """Send the next request while one is answered, if the other node has accepted a second one before."""
        if self._stream is not None and self._answers > 1:
            self._stream[1].send(request)
            self._ahead = request

    async def next(self, what: str) -> messages.Message:
        """The next piece. Raises LinkUnavailable."""
        assert self._stream is not None
        reader, connection = self._stream
        return await reader.next(connection, what)

    def close(self, reason: str) -> None:
        if self._stream is not None:
            self._stream[1].abort(reason)
        self._stream = self._ahead = None


class StreamReader:
    """The requesting end of a stream: owner of one connection to ``dst``, which may send messages of these ``kinds``. Any other
    message closes it. One reader at a time."""

    def __init__(self, local: LocalNode, dst: str, kinds: tuple[type[messages.Message], ...]) -> None:
        self._local = local
        self._dst = dst
        self._kinds = kinds
        self._pieces: deque[messages.Message] = deque()
        self._arrived = asyncio.Event()
        self._reason = ""

    async def next(self, connection: PeerConnection, what: str) -> messages.Message:
        """The next message. Raises LinkUnavailable, with ``what`` in its text, if the connection closes
        before."""
        while not self._pieces:
            if self._reason:
                raise LinkUnavailable(self._dst, f"{what} was interrupted", why=self._reason)
            self._arrived.clear()
            await self._arrived.wait()
        message = self._pieces.popleft()
        if len(self._pieces) == PIECES_WAITING_MAX // 2:
            connection.resume_reading(_CONSUMER_BEHIND)
        return message

    # -- Owner -------------------------------------------------------------------------------------------------------

    def opened(self, connection: PeerConnection) -> None:
        connection.send(self._local.hello(stream=True))

    def hello_received(self, connection: PeerConnection, hello: messages.Hello) -> bool:
        """Refuse every node except ``dst``."""
        if hello.identity.node == self._dst:
            return True
        connection.reason = f"{hello.identity.node} answers there"
        return False

    def received(self, connection: PeerConnection, envelope: messages.Envelope) -> None:
        if not isinstance(envelope.body, self._kinds):
            connection.abort("it sent a message that was not requested")
            return
        self._pieces.append(envelope.body)
        self._arrived.set()
        if len(self._pieces) >= PIECES_WAITING_MAX:
            connection.pause_reading(_CONSUMER_BEHIND)

    def malformed(self, _: PeerConnection, __: PeerloadError) -> bool:
        """Stop reading."""
        return False

    def refused(self, _: PeerConnection, reason: str, detail: str = "") -> None:
        self._reason = self._reason or detail or metrics.label_text(reason)

    def writable(self, _: PeerConnection) -> None:
        """Do nothing: no message waits here."""

    def closed(self, _: PeerConnection, reason: str) -> None:
        self._reason = self._reason or reason
        self._arrived.set()


async def write_answers(connection: PeerConnection, requests: asyncio.Queue[AsyncIterator[messages.Message]]) -> None:
    """Write one answer after the other, then close when there is no further request. Returns early if the reader has
    disconnected; is cancelled when the connection has ended."""
    try:
        while await _write_answer(connection, await asyncio.wait_for(requests.get(), STREAM_STALLED_S)):
            pass
    except (ConnectionError, TimeoutError):
        return  # the reader has disconnected, and can resume later
    finally:
        connection.close("the output is complete")


async def _write_answer(connection: PeerConnection, pieces: AsyncIterator[messages.Message]) -> bool:
    """Write each piece as fast as the other end reads → True if the answer is complete."""
    try:
        async for piece in pieces:
            connection.send(piece)
            is_last = isinstance(piece, LAST)
            del piece  # it is in the transport's buffer
            await connection.drain()
            if is_last:
                return True
    finally:
        if (aclose := getattr(pieces, "aclose", None)) is not None:
            await aclose()
    return False


CHECK_S = 2.0
"""Delay before this node checks whether it can dial a peer that has dialled it; jitter at most doubles it."""
CHECK_AGAIN_S = 300.0
"""Interval of further checks of a linked peer that cannot be dialled."""
CHECK_EVERY_S = 5.0
"""Interval at which a node that some peers cannot dial checks for members without a link."""
DIALS_PER_CHECK_MAX = 16
"""Maximum number of these members dialled in one check."""
TRY_AGAIN_S = 60.0
"""Interval of dials of a member that this node cannot reach either."""
DIAL_BACK_S = 6.0
"""Timeout of a requested dial back."""
REQUESTED_MAX = 256
"""Maximum number of streams requested from other nodes at a time."""
DIAL_BACKS_MAX = 64
"""Maximum number of concurrent dial backs to one node."""
DIAL_BACK_AGAIN_S = 1.0
"""Pause after a failed dial back, so that no peer can use this node to dial third parties."""
STAGGER_S = 0.3
STAGGER_REACHED_S = 2.0
"""Head start of one direction before the other is tried, too; STAGGER_REACHED_S if the direction has worked before."""


class _RequestedStream(NamedTuple):
    """A stream that ``node`` was asked to open; ``make()`` returns its owner."""

    node: str
    make: Callable[[], Owner]
    opened: asyncio.Future[PeerConnection]


@dataclass(eq=False, repr=False)
class Reachability:
    """Reachability of peers: which ones this node can dial, and streams to the others."""

    _local: LocalNode
    _links: Links
    _table: PeerTable
    _connections: ConnectionRegistry
    _counters: Counter[str]
    _requested: dict[int, _RequestedStream] = field(default_factory=dict, init=False)
    _dial_backs: Counter[str] = field(default_factory=Counter, init=False)
    _timer: asyncio.TimerHandle | None = None
    _is_stopped: bool = False

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(coalesced_s(CHECK_EVERY_S), self._check_all)

    def stop(self) -> None:
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    # -- who can dial whom ---------------------------------------------------------------------------------------------

    @staticmethod
    def dialled_by(peer: PeerEntry) -> None:
        peer.has_dialled_us, peer.cannot_reach_us = True, ""

    def link_made(self, peer: PeerEntry, connection: PeerConnection) -> None:
        """Plan the check of a peer that has made a link."""
        address = peer.address
        if not connection.dialled and address and peer.reached != address and not is_loopback(connection.address):
            pause_s = CHECK_S * random.uniform(1.0, 2.0)  # noqa: S311 -- jitter, not a secret
            asyncio.get_running_loop().call_later(pause_s, self._check, peer)

    def is_replaceable(self, link: PeerConnection) -> bool:
        """True if either end could make another link if this one were closed."""
        peer = self._table.entries.get(link.hello.identity.node) if link.hello is not None else None
        if peer is None or is_loopback(link.address):
            return True
        if link.dialled:
            return peer.has_dialled_us
        return bool(peer.reached) and peer.reached == peer.address

    def route(self, node: str) -> tuple[str, str]:
        """Directions that can be dialled: `both` (as far as known), `ours`, `theirs` or `none`; and the error of the
        other direction."""
        peer = self._table.entries.get(node)
        if peer is None:
            return "both", ""
        if peer.unreached:
            return ("theirs" if peer.links else "none"), peer.unreached
        return ("ours", peer.cannot_reach_us) if peer.cannot_reach_us else ("both", "")

    def link_lost(self, peer: PeerEntry) -> None:
        """Handle the loss of the last link to a peer: if the peer cannot make another, this node does."""
        if peer.cannot_reach_us:
            peer.dialled_s = 0.0
            asyncio.get_running_loop().call_later(STAGGER_S, self._make_links)

    def _check(self, peer: PeerEntry) -> None:
        if (
            not self._is_stopped
            and peer.links
            and peer.address
            and peer.reached != peer.address
            and not peer.is_checked
        ):
            peer.is_checked = True
            self._links.spawn(self._check_dial(peer, peer.address), f"check {peer.node}")

    async def _check_dial(self, peer: PeerEntry, address: str) -> None:
        """Dial a peer, and report a failure to it."""
        try:
            connection = await self._dial(peer, address, lambda: StreamReader(self._local, peer.node, ()))
            connection.close("only a check that it can be reached")
        except LinkUnavailable as error:
            if peer.link is not None:
                self._counters[metrics.PEER_UNREACHABLE_NOTICES] += 1
                self._links.send(peer.node, messages.NotDialled(0, error.kind))
        finally:
            peer.is_checked = False

    def _check_all(self) -> None:
        self.start()
        now_s = asyncio.get_running_loop().time()
        for peer in self._table.entries.values():
            if peer.unreached and peer.links and now_s - peer.dialled_s > CHECK_AGAIN_S:
                self._check(peer)
        self._make_links()

    def _make_links(self) -> None:
        """Make a link to each member that has never dialled this node, if some peer cannot dial this node."""
        if self._is_stopped or not any(peer.cannot_reach_us for peer in self._table.entries.values()):
            return
        now_s, left = asyncio.get_running_loop().time(), DIALS_PER_CHECK_MAX
        for identity in self._local.alive_peers():
            peer = self._table.entries.get(identity.node)
            if peer is not None:
                can_dial_us = peer.has_dialled_us and not peer.cannot_reach_us
                pause_s = TRY_AGAIN_S if peer.unreached and not peer.cannot_reach_us else 0.0
                is_too_early = now_s < max(peer.not_before_s, peer.dialled_s + pause_s)
                if peer.links or peer.is_dialled or can_dial_us or is_too_early:
                    continue
            self._counters[metrics.PEER_LINKS_DIALED_BACK] += 1
            self._links.connect(identity)
            left -= 1
            if not left:
                return

    # -- streams -------------------------------------------------------------------------------------------------------

    async def open(self, address: str, node: str, make: Callable[[], Owner]) -> PeerConnection:
        """Open a stream to this node, by dialling or by a dial back, whichever succeeds first. Raises LinkUnavailable."""
        peer = self._table.entries.get(node)
        if peer is None:
            return await self._connections.open(address, node, make(), stream=True)
        if is_loopback(address) or peer.link is None:
            return await self._dial(peer, address, make)

        def direct() -> Coroutine[object, object, PeerConnection]:
            return self._dial(peer, address, make)

        def back() -> Coroutine[object, object, PeerConnection]:
            return self._request(peer, make)

        if peer.unreached:
            return await first_of(back, direct, DIAL_BACK_S)
        return await first_of(direct, back, STAGGER_REACHED_S if peer.reached == address else STAGGER_S)

    async def _dial(self, peer: PeerEntry, address: str, make: Callable[[], Owner]) -> PeerConnection:
        peer.dialled_s = asyncio.get_running_loop().time()
        try:
            connection = await self._connections.open(address, peer.node, make(), stream=True)
        except LinkUnavailable as error:
            peer.dial_failed(address, error.why or error.what)
            raise
        peer.dial_succeeded(address)
        return connection

    async def _request(self, peer: PeerEntry, make: Callable[[], Owner]) -> PeerConnection:
        """Ask the peer to dial back. Raises LinkUnavailable."""
        what = f"no link to {peer.node}"
        if len(self._requested) >= REQUESTED_MAX:
            raise LinkUnavailable(peer.node, what, why=f"{REQUESTED_MAX} requested streams have not arrived yet")
        number = secrets.randbits(62) or 1
        opened: asyncio.Future[PeerConnection] = asyncio.get_running_loop().create_future()
        self._requested[number] = _RequestedStream(peer.node, make, opened)
        self._counters[metrics.PEER_STREAMS_REQUESTED] += 1
        self._links.send(peer.node, messages.DialBack(number))
        try:
            async with asyncio.timeout(DIAL_BACK_S):
                return await opened
        except TimeoutError:
            why = f"it did not dial back within {DIAL_BACK_S:g} s, as requested over its link"
            raise LinkUnavailable(peer.node, what, why=why) from None
        except asyncio.CancelledError:
            if opened.done() and not opened.cancelled() and opened.exception() is None:
                opened.result().abort("no longer wanted")
            raise
        finally:
            del self._requested[number]

    def stream_opened(self, connection: PeerConnection, hello: messages.Hello) -> bool:
        """Hand over a stream that a peer has opened on request. → False if it was not requested."""
        requested = self._requested.get(hello.back)
        if requested is None or requested.node != hello.identity.node or requested.opened.done():
            connection.reason = "a stream that was not requested"
            return False
        connection.owner = requested.make()
        requested.opened.set_result(connection)
        return True

    def received(self, node: str, message: messages.DialBack | messages.NotDialled) -> None:
        """Handle a request to dial back, or the report that this node cannot be dialled."""
        peer = self._table.entries.get(node)
        if peer is None:
            return
        if isinstance(message, messages.DialBack):
            if self._dial_backs[node] >= DIAL_BACKS_MAX:
                self._counters[metrics.PEER_STREAMS_REFUSED] += 1
                self._links.send(
                    node, messages.NotDialled(message.number, f"{DIAL_BACKS_MAX} streams are being made already")
                )
                return
            self._dial_backs[node] += 1
            self._links.spawn(self._dial_back(peer, message.number), f"dial {node} back")
        elif message.number == 0:
            is_news = not peer.cannot_reach_us
            peer.has_dialled_us, peer.cannot_reach_us = False, message.why or "it could not dial this node"
            if is_news:
                self._make_links()
        else:
            requested = self._requested.get(message.number)
            if requested is not None and requested.node == node and not requested.opened.done():
                why = f"it cannot dial this node: {message.why}"
                requested.opened.set_exception(LinkUnavailable(node, f"no link to {node}", why=why))

    async def _dial_back(self, peer: PeerEntry, number: int) -> None:
        """Open the stream that a peer requests: at the address of this node's link to it, else at its published
        address. A loopback address of a peer on another machine is not dialled."""
        dialled = [link.address for link in peer.links if link.dialled and not link.is_closed]
        address, loop = dialled[-1] if dialled else peer.address, asyncio.get_running_loop()
        try:
            if not dialled and is_loopback(address) and not any(is_loopback(link.address) for link in peer.links):
                raise LinkUnavailable(peer.node, f"no link to {peer.node}", why=f"{address} is this machine")  # noqa: TRY301
            failed_at, failed_s, kind = peer.dial_back_failure
            if failed_at == address and loop.time() < failed_s + DIAL_BACK_AGAIN_S:
                raise LinkUnavailable(peer.node, f"no link to {peer.node}", kind=kind)  # noqa: TRY301
            try:
                connection = await self._connections.open(address, peer.node, self._links, stream=True, back=number)
            except LinkUnavailable as error:
                peer.dial_back_failure = address, loop.time(), error.kind
                raise
            if connection.hello is None or connection.hello.identity.node != peer.node:
                connection.abort("another node answers there")
                raise LinkUnavailable(peer.node, f"no link to {peer.node}", why="another node answers there")  # noqa: TRY301
        except LinkUnavailable as error:
            self._links.send(peer.node, messages.NotDialled(number, error.kind))
        finally:
            self._dial_backs[peer.node] -= 1
            if not self._dial_backs[peer.node]:
                del self._dial_backs[peer.node]


async def first_of(
    first: Callable[[], Coroutine[object, object, PeerConnection]],
    second: Callable[[], Coroutine[object, object, PeerConnection]],
    after_s: float,
) -> PeerConnection:
    """The connection that succeeds first. The second one is begun when the first has failed, or after ``after_s``. Raises
    the error of the second one if both fail."""
    tasks = [asyncio.ensure_future(first())]
    chosen: PeerConnection | None = None
    try:
        await asyncio.wait(tasks, timeout=after_s)
        if not tasks[0].done() or tasks[0].exception() is not None:
            tasks.append(asyncio.ensure_future(second()))
        waiting = set(tasks)
        while waiting and chosen is None:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            chosen = next((task.result() for task in tasks if task in done and task.exception() is None), None)
        if chosen is None:
            raise next(error for task in reversed(tasks) if (error := task.exception()) is not None)
        return chosen
    finally:
        for task in tasks:
            task.cancel()
            task.add_done_callback(lambda done: _close_late(done, chosen))


def _close_late(task: asyncio.Future[PeerConnection], chosen: PeerConnection | None) -> None:
    """Close the connection that was not chosen."""
    if not task.cancelled() and task.exception() is None and task.result() is not chosen:
        task.result().abort("another way was quicker")
