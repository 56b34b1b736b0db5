"""The links between agents: who is met, what is sent, and exactly what could not be.

All calls come from the loop's own thread, and none of them waits except those that are coroutines. A message that was
handed to the operating system counts as sent; every other one comes back through ``send_failed``, once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from peerload.agent.peer_address import join_address, parse_address
from peerload.agent.peer_book import Bans, Peer
from peerload.agent.peer_connection import Owner, PeerConnection, dial
from peerload.agent.peer_idle import IDLE, IdleLinks, spoke
from peerload.agent.peer_listen import Listener
from peerload.agent.peer_seeds import Seeds
from peerload.agent.peer_streams import OutputStreams
from peerload.model.errors import LinkUnavailable, PeerloadError, ProtocolError
from peerload.model.messages import Envelope, Hello, Identity, Message, OutputChunk, OutputEnd, OutputRequest, WrongBoot
from peerload.wire import peer as wire

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from peerload.agent.peer_streams import Piece, ServeOutput
    from peerload.agent.tls import Credentials

CLOSE_S = 2.0
LINKS_PER_PEER_MAX = 4

_log = logging.getLogger("peerload.peer")


class PeerLinks:
    """The links of one node. `start` listens; `dial` finds a member by address; `send` reaches one by name.

    identity: ours (`start` fills the address in); tls: how we prove that, and to whom; hello: a fresh introduction; envelope: puts a message into its frame
    (and numbers it); deliver: called with (node, message); met: a peer introduced itself on a new link; unreachable:
    (node, reason), its last link broke or none could be made; send_failed: (node, message), it never left;
    serve_output: the output of an attempt that ran here; peers_max: links beyond it are refused.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        tls: Credentials,
        hello: Callable[[], Hello],
        envelope: Callable[[Message, str, str], Envelope],
        deliver: Callable[[str, Message], None],
        met: Callable[[Hello], None],
        unreachable: Callable[[str, str], None],
        send_failed: Callable[[str, Message], None],
        serve_output: ServeOutput,
        counters: Counter[str],
        peers_max: int = 1000,
    ) -> None:
        self.identity = identity
        self._tls = tls
        self._cluster = tls.cluster.name
        self._hello = hello
        self._envelope = envelope
        self._deliver = deliver
        self._met = met
        self._unreachable = unreachable
        self._send_failed = send_failed
        self._counters = counters
        self._peers_max = peers_max
        self._peers: dict[str, Peer] = {}
        self._connections: set[PeerConnection] = set()
        self._bans = Bans()
        self._tasks: set[asyncio.Task[None]] = set()
        self._seeds = Seeds(
            lambda: self.identity.address,
            lambda address: self._open(address, address, self),
            self._spawn,
            loopback_only=tls.cluster.is_local,
        )
        self._streams = OutputStreams(
            serve_output,
            lambda: self._greeting(stream=True),
            envelope,
            lambda address, who, owner: self._open(address, who, owner, stream=True),
            self._drop,
            self._spawn,
        )
        self._listener = Listener(tls, lambda: self._connection(self, dialled=False), self._drop)
        self._is_closing = False
        self._idle = IdleLinks(lambda: [link for peer in self._peers.values() for link in peer.links])
        self.whereabouts: Callable[[str], Identity | None] = lambda _node: None

    # -- for the agent -----------------------------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> str:
        """Listen → the `HOST:PORT` others can dial. Raises ConfigError if that cannot be, or the port is taken."""
        host, port = parse_address("listen", join_address(host, port), loopback_only=self._tls.cluster.is_local)
        address = await self._listener.start(host, port)
        self.identity = msgspec.structs.replace(self.identity, address=address)
        self._idle.start()
        return address

    def dial(self, address: str) -> None:
        """Find whoever is at this address, however long it takes; given up only if it turns out to be ourselves.

        Raises ConfigError if it is not `HOST:PORT`, or another machine's and we have no cluster directory.
        """
        self._seeds.dial(address)

    @property
    def sought(self) -> dict[str, str]:
        """The addresses that were dialled and at which no peer has answered yet, and why (empty: no word so far)."""
        return dict(self._seeds.sought)

    def learn(self, identity: Identity) -> None:
        """Keep where a node can be dialled; a later start of its agent replaces what was known."""
        if identity.node != self.identity.node and (peer := self._peer(identity.node)) is not None:
            peer.learn(identity)

    def forget(self, node: str) -> None:
        """Have no link to this node any more, and do not know where it can be dialled."""
        peer = self._peers.get(node)
        if peer is not None:
            peer.identity = None
            for link in list(peer.links):
                link.close(f"{node} is forgotten")

    def connect(self, identity: Identity) -> None:
        """Make a link to this node if there is none."""
        self.learn(identity)
        peer = self._peers.get(identity.node)
        if peer is not None and not peer.links and not peer.is_dialled:
            self._dial(peer)

    def send(self, dst: str, message: Message) -> None:
        """Send over the newest link to ``dst``; without one, dial it. Never waits, never raises for want of a link."""
        peer = self._peer(dst) if dst != self.identity.node else None
        if peer is None or self._is_closing:
            self._fail(dst, [message])
            return
        link = peer.link
        if link is not None and not link.paused and not peer.waiting:
            self._write(link, dst, message)
        elif not peer.keep(message):
            self._counters["peer refused: queue full"] += 1
            self._fail(dst, [message])
        elif link is None and not peer.is_dialled:
            self._dial(peer)

    def linked(self) -> list[str]:
        """The nodes there is a live link to."""
        return sorted(node for node, peer in self._peers.items() if peer.links)

    def fetch_output(self, dst: str, request: OutputRequest) -> AsyncIterator[Piece]:
        """The output of an attempt from the node that ran it: pieces as they come, OutputEnd the last.

        Raises LinkUnavailable if ``dst`` cannot be reached, or is lost before the end; ask again from where it broke.
        """
        known = self._peers.get(dst)
        address = known.identity.address if known is not None and known.identity is not None else ""
        return self._streams.fetch(dst, address, request)

    async def close(self) -> None:
        """Stop listening, write what is gathered, close every link; at most about twice CLOSE_S."""
        self._is_closing = True
        self._idle.stop()
        await self._listener.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        connections = list(self._connections)
        for connection in connections:
            connection.close("this agent stops")
        gone = [connection.gone for connection in connections]
        if gone:
            await asyncio.wait(gone, timeout=CLOSE_S)
        for connection in connections:
            connection.abort("this agent stops")
        if gone:
            await asyncio.wait(gone, timeout=CLOSE_S)  # a transport that never says so must not keep the agent
        for peer in self._peers.values():
            self._fail(peer.node, peer.take_all())

    # -- dialling ----------------------------------------------------------------------------------------------------

    def _connection(self, owner: Owner, *, dialled: bool, stream: bool = False) -> PeerConnection:
        return PeerConnection(owner, self._cluster, self.identity, dialled=dialled, stream=stream)

    async def _open(self, address: str, who: str, owner: Owner, *, stream: bool = False) -> PeerConnection:
        """A connection whose other end has introduced itself. Raises LinkUnavailable."""
        return await dial(address, who, self._tls, lambda: self._connection(owner, dialled=True, stream=stream))

    def _dial(self, peer: Peer) -> None:
        """Make a link in the background; within the pause after a failure, fail at once."""
        if (newest := self.whereabouts(peer.node)) is not None:
            peer.learn(newest)  # gossip may have heard of a later start, or of one never linked to
        now_s = asyncio.get_running_loop().time()
        if peer.identity is None or not peer.identity.address:
            self._give_up(peer, "its address is not known")
        elif now_s < peer.not_before_s:
            self._give_up(peer, "it could not be reached a moment ago")
        else:
            peer.is_dialled = True
            self._spawn(self._reach(peer, peer.identity.address), f"dial {peer.node}")

    async def _reach(self, peer: Peer, address: str) -> None:
        reason = ""
        try:
            connection = await self._open(address, peer.node, self)
            if connection.hello is not None and connection.hello.identity.node != peer.node:
                reason = f"{connection.hello.identity.node} answers at {address}"
        except LinkUnavailable as error:
            reason = error.why or error.what
        finally:
            peer.is_dialled = False
        if not peer.links:
            peer.failed(asyncio.get_running_loop().time())
            self._give_up(peer, reason or "the link broke at once")

    def _give_up(self, peer: Peer, reason: str) -> None:
        self._counters["peer unreachable"] += 1
        self._fail(peer.node, peer.take_all())
        asyncio.get_running_loop().call_soon(self._unreachable, peer.node, reason)

    # -- what connections say (Owner) ----------------------------------------------------------------------------------

    def opened(self, connection: PeerConnection) -> None:
        """Introduce ourselves: the other end is of our cluster."""
        self._connections.add(connection)
        hello = self._greeting(stream=connection.stream)
        connection.write(hello, wire.encode_frame(self._envelope(hello, "", "")))

    def _greeting(self, *, stream: bool) -> Hello:
        return msgspec.structs.replace(self._hello(), stream=stream)

    def introduced(self, connection: PeerConnection, hello: Hello) -> bool:
        """Take a peer in, unless it is ourselves, somebody under a taken name, banned, or one too many."""
        self._listener.is_no_stranger(connection)
        told = hello.identity
        if told.node == self.identity.node and told.boot == self.identity.boot:
            connection.reason = "this agent itself answers there"
            return False
        peer = self._peer(told.node) if told.node != self.identity.node else None
        connection.reason = self._objection(peer, hello)
        if connection.reason:
            return False
        if connection.stream:
            self._streams.opened(connection)
            return True
        if peer is None:
            return False
        for link in [link for link in peer.links if link.hello is not None and link.hello.identity.boot != told.boot]:
            link.close("its agent was started again")
        if len(peer.links) >= LINKS_PER_PEER_MAX:
            peer.links[0].close("newer links took its place")
        peer.learn(told)
        peer.failures, peer.not_before_s = 0, 0.0
        peer.links.append(connection)
        self._counters["peer links made"] += 1
        self._met(hello)
        self.writable(connection)
        return True

    def _objection(self, peer: Peer | None, hello: Hello) -> str:
        """Why this peer is not taken in; "" if it is."""
        told = hello.identity
        link = peer.link if peer is not None else None
        other = link.hello.identity if link is not None and link.hello is not None else None
        if told.node == self.identity.node or (other is not None and other.store != told.store):
            self._counters["peer clashes"] += 1
            _log.error(
                "two agents call themselves %s: the one at %r is refused; start the newer one with  --node NAME",
                told.node,
                told.address[:100],
            )
            return f"another agent is called {told.node}"
        if peer is None or (
            not peer.links and sum(1 for known in self._peers.values() if known.links) >= self._peers_max
        ):
            self._drop("too many peers")
            return "too many peers"
        if other is not None and other.boot != told.boot and told.incarnation < other.incarnation:
            self._drop("an earlier start")
            return "a later start of this agent is here"
        if self._bans.holds((told.node, told.boot), asyncio.get_running_loop().time()):
            self._drop("banned")
            return "banned for malformed frames"
        if hello.stream and self._streams.is_full:
            self._drop("too many streams")
            return "too many output streams"
        return ""

    def received(self, connection: PeerConnection, envelope: Envelope) -> None:
        """Pass a message on, if it is for this start of this node."""
        message, node = envelope.body, envelope.src
        if envelope.dst != self.identity.node:
            self._drop("not for us")
        elif envelope.dst_boot not in {"", self.identity.boot}:
            self._drop("for an earlier start")
            if not isinstance(message, WrongBoot):
                self._write(connection, node, WrongBoot(boot=self.identity.boot))
        elif connection.stream:
            self._streams.received(connection, node, message)
        elif isinstance(message, Hello):  # who speaks was said, and proven, when the link was made
            self._drop("a second introduction")
            connection.close("a second introduction")
        elif isinstance(message, OutputRequest | OutputChunk | OutputEnd):
            if not self.malformed(connection, ProtocolError("output on a link that is not for it")):
                connection.close("malformed frames")
        else:
            self._counters["peer received"] += 1
            spoke(connection, message)
            self._deliver(node, message)

    def malformed(self, connection: PeerConnection, error: PeerloadError) -> bool:  # noqa: ARG002 -- the protocol's
        """Count it; too many, and the peer stays out for a while."""
        self._drop("malformed")
        if connection.hello is None:
            return False
        told = connection.hello.identity
        if not self._bans.add((told.node, told.boot), asyncio.get_running_loop().time()):
            return True
        self._counters["peer bans"] += 1
        _log.warning("%s sent malformed frames and stays out for a while", told.node)
        return False

    def refused(self, connection: PeerConnection, why: str) -> None:  # noqa: ARG002 -- the protocol's
        """Count why."""
        self._drop(why)

    def writable(self, connection: PeerConnection) -> None:
        """Send on what waits for this peer."""
        peer = self._peers.get(connection.hello.identity.node) if connection.hello is not None else None
        if peer is None or connection.stream:
            return
        while peer.waiting and (link := peer.link) is not None and not link.paused and not link.is_closed:
            self._write(link, peer.node, peer.take())

    def closed(self, connection: PeerConnection, reason: str) -> None:
        """Give back what was not sent; if that was the last link to a peer, say so."""
        self._listener.is_no_stranger(connection)
        self._connections.discard(connection)
        self._streams.closed(connection)
        peer = self._peers.get(connection.hello.identity.node) if connection.hello is not None else None
        if peer is None or connection not in peer.links:
            return
        peer.links.remove(connection)
        unsent = [message for message in connection.unsent() if not isinstance(message, Hello)]
        if not peer.links:
            self._fail(peer.node, unsent)
            if reason == IDLE and not peer.waiting:
                self._counters["peer links closed for want of use"] += 1
            elif not peer.is_dialled:
                self._give_up(peer, reason)
            return
        for message in unsent:
            self.send(peer.node, message)
        self.writable(peer.links[-1])

    # -- within ------------------------------------------------------------------------------------------------------

    def _write(self, link: PeerConnection, dst: str, message: Message) -> None:
        boot = link.hello.identity.boot if link.hello is not None else ""
        try:
            frame = wire.encode_frame(self._envelope(message, dst, boot))
        except ProtocolError:
            self._counters["peer refused: too large"] += 1
            self._fail(dst, [message])
            return
        self._counters["peer sent"] += 1
        spoke(link, message)
        link.write(message, frame)

    def _fail(self, dst: str, messages: Sequence[Message]) -> None:
        """Give messages back in a later turn, so that a sender is never called from within its own call."""
        loop = asyncio.get_running_loop()
        for message in messages:
            self._counters["peer send failed"] += 1
            loop.call_soon(self._send_failed, dst, message)

    def _peer(self, node: str) -> Peer | None:
        """What is known of a node. A bound keeps this small: one that is in no use is forgotten; None if all are."""
        peer = self._peers.get(node)
        if peer is None and len(self._peers) >= 2 * self._peers_max:
            idle = next((name for name, known in self._peers.items() if known.is_idle), None)
            if idle is None:
                return None
            del self._peers[idle]
        if peer is None:
            peer = self._peers[node] = Peer(node)
        return peer

    def _drop(self, why: str) -> None:
        self._counters["peer dropped"] += 1
        self._counters[f"peer dropped: {why}"] += 1

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler(
                {"message": "a bug in the peer link", "exception": error, "task": task}
            )
