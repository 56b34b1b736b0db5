"""The links between agents: who is met, what is sent, and exactly what could not be.

All calls come from the loop's own thread, and none of them waits except those that are coroutines. A message that was
handed to the operating system counts as sent; every other one comes back through ``send_failed``, once.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec

from peerload.agent.peers.bootstrap import Bootstrap
from peerload.agent.peers.connection_registry import ConnectionRegistry
from peerload.agent.peers.dial import Dialer
from peerload.agent.peers.handshake import EARLIER_START, Handshakes
from peerload.agent.peers.idle import IDLE, IdleLinks, spoke
from peerload.agent.peers.listener import Listener
from peerload.agent.peers.peer_table import BROKEN_RULES, PeerEntry
from peerload.agent.peers.reachability import Reachability
from peerload.agent.peers.streams import OutputStreams
from peerload.agent.security_events import untold
from peerload.model.errors import ConfigError, LinkUnavailable, PeerloadError, ProtocolError
from peerload.model.messages import (
    STREAMED,
    DialBack,
    Envelope,
    Hello,
    Identity,
    Message,
    NameTaken,
    NotDialled,
    OutputRequest,
    WrongBoot,
)
from peerload.security.address import join_address, parse_address
from peerload.wire import peer as wire

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from peerload.agent.joining.join_server import JoinServer
    from peerload.agent.peers.backpressure import PeerBackpressure
    from peerload.agent.peers.connection import PeerConnection
    from peerload.agent.peers.streams import Piece, ServeOutput, StreamReader
    from peerload.agent.security_events import Tell
    from peerload.security.tls import Credentials

CLOSE_S = 2.0


class PeerLinks:
    """The links of one node. `start` listens; `dial` finds a member by address; `send` reaches one by name.

    identity: ours (`start` fills the address in); tls: how we prove that, and to whom; hello: a fresh introduction; envelope: puts a message into its frame
    (and numbers it); deliver: called with (node, message); met: a peer introduced itself on a new link; unreachable:
    (node, reason), its last link broke or none could be made; send_failed: (node, message), it never left;
    serve_output: the output of an attempt that ran here; peers_max: links beyond it are refused;
    name_taken: by whom (`HOST:PORT`) we were refused for our own name; copied: (who, how long it has been up), an agent that has
    our name and our database; broken: (rule, who, what), what was refused;
    backlog: bounds what of each peer was not looked at yet.
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
        name_taken: Callable[[str], None] = lambda _by: None,
        copied: Callable[[Identity, float], None] = lambda _other, _up_s: None,
        broken: Tell = untold,
        backlog: PeerBackpressure | None = None,
    ) -> None:
        self.identity = identity
        self._tls = tls
        self._hello = hello
        self._envelope = envelope
        self._deliver = deliver
        self._met = met
        self._unreachable = unreachable
        self._send_failed = send_failed
        self._counters = counters
        self._broken = broken
        self._backlog = backlog
        self._peers_max = peers_max
        self._peers: dict[str, PeerEntry] = {}
        self._connections: set[PeerConnection] = set()
        self.made = ConnectionRegistry(tls, lambda: self.identity, counters)
        self.introductions = Handshakes(self._peers, peers_max, counters, self._drop, broken)
        self._tasks: set[asyncio.Task[None]] = set()
        self._seeds = Bootstrap(
            lambda: self.identity.address,
            lambda address: self.made.open(address, address, self),
            self._spawn,
            loopback_only=tls.cluster.is_local,
        )
        self._name_taken = name_taken
        self._copied = copied
        self.ways = Reachability(
            peers=self._peers,
            open_=lambda address, who, owner, back: self.made.open(address, who, owner, stream=True, back=back),
            serve=lambda: self,
            knock=lambda node: self._streams.reader(node, ()),
            send=self.send,
            connect=self.connect,
            spawn=self._spawn,
            counters=counters,
        )
        self._streams = OutputStreams(
            serve_output,
            lambda: self._greeting(stream=True),
            envelope,
            self.ways.open,
            self._drop,
            self._spawn,
        )
        self._dialling = Dialer(
            lambda address, who: self.made.open(address, who, self),
            self._spawn,
            self._give_up,
            lambda node: self.whereabouts(node),  # noqa: PLW0108 -- it is set later
        )
        self._listener = Listener(tls, lambda: self.made.make(self, dialled=False), self._drop)
        self._is_closing = False
        self._idle = IdleLinks(
            lambda: [link for peer in self._peers.values() for link in peer.links], self.ways.can_do_without
        )
        self.whereabouts: Callable[[str], Identity | None] = lambda _node: None

    # -- for the agent -----------------------------------------------------------------------------------------------

    async def start(self, host: str, port: int, advertise: str = "") -> str:
        """Listen → the `HOST:PORT` where that is; others are told to dial that, unless ``advertise`` is another. Raises
        ConfigError if that cannot be, or the port is taken."""
        host, port = parse_address("listen", join_address(host, port), loopback_only=self._tls.cluster.is_local)
        address = await self._listener.start(host, port)
        self.identity = msgspec.structs.replace(self.identity, address=advertise or address)
        self._idle.start()
        self.ways.start()
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
            self._dialling.dial(peer)

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
            self._dialling.dial(peer)

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

    @property
    def streams(self) -> OutputStreams:
        """The connections that are no links."""
        return self._streams

    async def open_stream(self, dst: str, kinds: tuple[type[Message], ...]) -> tuple[StreamReader, PeerConnection]:
        """A connection of its own to ``dst``, which may say messages of these kinds over it. Raises LinkUnavailable."""
        known, newest = self._peers.get(dst), self.whereabouts(dst)
        identity = newest or (known.identity if known is not None else None)
        if identity is None or not identity.address:
            raise LinkUnavailable(dst, f"no address of {dst} is known")
        return await self._streams.open(dst, identity.address, kinds)

    async def close(self) -> None:
        """Stop listening, write what is gathered, close every link; at most about twice CLOSE_S."""
        self._is_closing = True
        self._idle.stop()
        self.ways.stop()
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

    def serve_newcomers(self, door: JoinServer) -> None:
        """Let newcomers in here."""
        self._listener.door = door

    def certificate_of(self, node: str) -> bytes:
        """The certificate (DER) that this node has proven to be its own, on its newest link; empty if it has none."""
        peer = self._peers.get(node)
        link = peer.link if peer is not None else None
        return link.certificate if link is not None else b""

    # -- what connections say (Owner) ----------------------------------------------------------------------------------

    def opened(self, connection: PeerConnection) -> None:
        """Introduce ourselves: the other end is of our cluster."""
        self._connections.add(connection)
        hello = self._greeting(stream=connection.stream, back=connection.back)
        connection.write(hello, wire.encode_frame(self._envelope(hello, "", "")))

    def _greeting(self, *, stream: bool, back: int = 0) -> Hello:
        return msgspec.structs.replace(self._hello(), stream=stream, forwards=True, dials_back=True, back=back)

    def introduced(self, connection: PeerConnection, hello: Hello) -> bool:
        """Take a peer in, unless it is ourselves, somebody under a taken name, banned, or one too many."""
        self._listener.is_no_stranger(connection)
        told = hello.identity
        if told.node == self.identity.node and told.boot == self.identity.boot:
            connection.reason = "this agent itself answers there"
            return False
        peer = self._peer(told.node) if told.node != self.identity.node else None
        if self.introductions.is_clash(self.identity, peer, told):
            if told.node == self.identity.node and told.store == self.identity.store:
                self._copied(told, hello.up_s)
            else:
                self._refuse_name(connection, told)
            connection.reason = f"another agent is called {told.node}"
        else:
            connection.reason = self.introductions.objection(peer, hello)
            if connection.reason == EARLIER_START and peer is not None:
                self._write(connection, told.node, NameTaken(peer.address))
        if connection.reason:
            return False
        if peer is not None and not connection.dialled:
            self.ways.came(peer)
        if connection.stream and hello.back and not connection.dialled:
            self._connections.discard(connection)
            return self.ways.came_back(connection, hello)
        if connection.stream:
            self._streams.opened(connection)
            return True
        if peer is None:
            return False
        self._tell_earlier(peer, told)
        peer.add(connection, told)
        self.ways.met(peer, connection)
        self._counters["peer links made"] += 1
        self._met(hello)
        self.writable(connection)
        return True

    def _refuse_name(self, connection: PeerConnection, told: Identity) -> None:
        """Tell whoever has another's name; if that name is ours, and we came to them, it is we who came second."""
        if told.node != self.identity.node:
            self._write(connection, told.node, NameTaken())
        elif connection.dialled:
            self._name_taken(told.address or connection.address)

    def _tell_earlier(self, peer: PeerEntry, told: Identity) -> None:
        """The links to an earlier start of this agent are about to close. If it lives all the same, it has a copy of the
        same database: it is told where the later one is."""
        for link in peer.links:
            other = link.hello.identity if link.hello is not None else None
            if other is not None and other.boot != told.boot and other.store == told.store and told.address:
                self._write(link, told.node, NameTaken(told.address))

    def _name_is_taken(self, connection: PeerConnection, message: NameTaken) -> None:
        """We are refused. An agent that has our database, too, is dialled once: its certificate proves its name when it
        introduces itself."""
        connection.close(f"another agent is called {self.identity.node}")
        if not message.at:
            self._name_taken(connection.hello.identity.address if connection.hello is not None else "")
        else:
            self.meet_copy(message.at)

    def meet_copy(self, address: str) -> None:
        """Dial an agent once that is said to have this node's name and database."""
        if address != self.identity.address:
            self._spawn(self._meet(address), f"copy {address}")

    async def _meet(self, address: str) -> None:
        with contextlib.suppress(LinkUnavailable, ConfigError):
            parse_address("peer", address, loopback_only=self._tls.cluster.is_local)
            await self.made.open(address, address, self)

    def received(self, connection: PeerConnection, envelope: Envelope) -> None:
        """Pass a message on, if it is for this start of this node."""
        message, node = envelope.body, envelope.src
        if envelope.dst != self.identity.node:
            self._drop("not for us", node)
        elif envelope.dst_boot not in {"", self.identity.boot}:
            self._drop("for an earlier start")
            if not isinstance(message, WrongBoot):
                self._write(connection, node, WrongBoot(boot=self.identity.boot))
        elif isinstance(message, NameTaken):
            self._name_is_taken(connection, message)
        elif connection.stream:
            self._streams.received(connection, node, message)
        elif isinstance(message, Hello):  # who speaks was said, and proven, when the link was made
            self._drop("a second introduction", node)
            connection.close("a second introduction")
        elif isinstance(message, DialBack | NotDialled):
            self.ways.received(node, message)
        elif isinstance(message, STREAMED):
            if not self.malformed(connection, ProtocolError("a stream's message on a link that is not for it")):
                connection.close("malformed frames")
        else:
            self._pass_on(connection, node, message)

    def _pass_on(self, connection: PeerConnection, node: str, message: Message) -> None:
        self._counters["peer received"] += 1
        spoke(connection, message)
        self._deliver(node, message)
        if self._backlog is not None and self._backlog.came(connection, node, connection.frame_bytes):
            self._drop("too many messages at once", node)

    def malformed(self, connection: PeerConnection, error: PeerloadError) -> bool:
        """Count it; too many, and the peer stays out for a while."""
        self._drop("malformed", _who(connection), str(error))
        if connection.hello is None:
            return False
        return self.introductions.malformed(connection.hello.identity)

    def refused(self, connection: PeerConnection, why: str) -> None:
        """Count why."""
        self._drop(why, _who(connection))

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
            self.ways.lost(peer)
            if reason == IDLE and not peer.waiting:
                self._counters["peer links closed for want of use"] += 1
            elif not peer.is_dialled:
                self._give_up(peer, reason)
            return
        for message in unsent:
            self.send(peer.node, message)
        self.writable(peer.links[-1])

    # -- within ------------------------------------------------------------------------------------------------------

    def _give_up(self, peer: PeerEntry, reason: str) -> None:
        self._counters["peer unreachable"] += 1
        self._fail(peer.node, peer.take_all())
        asyncio.get_running_loop().call_soon(self._unreachable, peer.node, reason)

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

    def _peer(self, node: str) -> PeerEntry | None:
        """What is known of a node. A bound keeps this small: one that is in no use is forgotten; None if all are."""
        peer = self._peers.get(node)
        if peer is None and len(self._peers) >= 2 * self._peers_max:
            idle = next((name for name, known in self._peers.items() if known.is_idle), None)
            if idle is None:
                return None
            del self._peers[idle]
        if peer is None:
            peer = self._peers[node] = PeerEntry(node)
        return peer

    def _drop(self, why: str, who: str = "", more: str = "") -> None:
        self._counters["peer dropped"] += 1
        self._counters[f"peer dropped: {why}"] += 1
        if (rule := BROKEN_RULES.get(why.partition(":")[0])) is not None:
            self._broken(rule, who, f"{why}: {more}" if more else why)

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


def _who(connection: PeerConnection) -> str:
    """The node that the other end has proven to be, else its address."""
    return connection.certified or connection.address.rpartition(":")[0].strip("[]")
