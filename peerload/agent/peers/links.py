"""Links between agents: connections for messages, made when they are needed and closed when they are idle; and the listener.

All calls come from the loop's own thread, and only the coroutines wait. A message that was handed to the operating system
counts as sent; every other one is returned through `LinkOwner.send_failed`, once.

Every connection passes the TLS handshake before any other byte is read. At most STRANGERS_MAX connections may be without a
complete handshake (rule J3). A client without a certificate that asks to join (ALPN) is handed to the join server.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from typing import TYPE_CHECKING, Protocol, cast

from peerload.agent.peers.connection import (
    EARLIER_START,
    HANDSHAKE_S,
    NO_MEMBER,
    REFUSED,
    SHUTDOWN_S,
    ConnectionRegistry,
    PeerTable,
    backoff_s,
    is_link_message,
    os_error_text,
)
from peerload.agent.peers.streams import Reachability, Streams
from peerload.agent.runtime import coalesced_s
from peerload.model import messages, metrics
from peerload.model.bounded import BoundedDict
from peerload.model.errors import ConfigError, LinkUnavailable, PeerloadError, ProtocolError
from peerload.security.address import (
    IP_FREEBIND,
    NOT_WITHOUT,
    NetworkAbsence,
    join_address,
    network_of,
    parse_address,
    plain_host,
    reachable,
    resolve_one,
)
from peerload.security.tls import asks_to_join, tls_error_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
    from concurrent.futures import Executor

    from peerload.agent.peers.connection import Links, PeerBackpressure, PeerConnection, PeerEntry
    from peerload.agent.peers.local_node import LocalNode
    from peerload.agent.peers.streams import Piece, RequestStream, StreamReader
    from peerload.agent.store.write_ahead import SecurityEvents
    from peerload.security.tls import Credentials


CLOSE_S = 2.0
PEERS_MAX = 1000
IDLE_S = 60.0
"""Time without other messages than MEMBERSHIP_MESSAGES after which a link is idle."""
QUIET_S = 5.0
"""A link with any message within this time stays open; one with messages about tasks carries advice, too."""
IDLE_KEPT_MAX = 16
"""Maximum number of idle links that stay open, the most recently used ones."""
IDLE_CHECK_S = 15.0
COPY_DIALS_MAX = 4
"""Maximum number of dials of the reported address of a copy of this agent: any member can invent one."""
MEMBERSHIP_MESSAGES = (
    messages.Hello,
    messages.Leaving,
    messages.NotDialled,
    messages.Ping,
    messages.Pong,
    messages.ProfileRequest,
    messages.ProfileTold,
    messages.Sync,
    messages.WrongBoot,
)
"""Messages about membership; any other message means that the link is in use."""
IDLE = "it was not in use"

_log = logging.getLogger("peerload.peer")


class LinkOwner(Protocol):
    """Receiver of messages from the links."""

    def deliver(self, src: str, message: messages.LinkMessage, /) -> None:
        """Handle a message of a peer."""

    def met(self, hello: messages.Hello, /) -> None:
        """A link to a peer was made."""

    def unreachable(self, node: str, reason: str, /) -> None:
        """The last link to a peer is lost, or none could be made."""

    def send_failed(self, dst: str, message: messages.LinkMessage, /) -> None:
        """Handle a message that could not be sent."""

    def name_taken(self, by: str, /) -> None:
        """The peer at this address refuses this node, because another agent has its name."""

    def copied(self, other: messages.Identity, up_s: float, /) -> None:
        """An agent with this node's name and database, up for ``up_s``, has proven its name."""


class PeerLinks:
    """The links of one node. `start` listens; `dial` finds a member by address; `send` reaches one by name.

    newcomers: serves the join protocol; None: joining is not possible here. peers_max: links to more peers are refused.
    lookups: threads for the lookup of host names, None: the default threads.
    """

    _owner: LinkOwner

    def __init__(
        self,
        local: LocalNode,
        tls: Credentials,
        security: SecurityEvents,
        backpressure: PeerBackpressure | None = None,
        newcomers: NewcomerServer | None = None,
        peers_max: int = PEERS_MAX,
        lookups: Executor | None = None,
    ) -> None:
        self._local = local
        self.lookups = lookups
        self._name, self._boot = local.identity.node, local.identity.boot
        self._tls = tls
        self._counters = security.counters
        self._backpressure = backpressure
        self._open: set[PeerConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._idle_timer: asyncio.TimerHandle | None = None
        self._unanswered: dict[str, str] = {}
        self._own_addresses: set[str] = set()
        self._found_at: BoundedDict[str, str] = BoundedDict(PEERS_MAX)
        """Nodes that answered at addresses passed to `dial`: a seed may be a host name, while nodes publish numbers."""
        self._table = PeerTable(security, peers_max)
        self.connections = ConnectionRegistry(tls, local.envelopes, self._counters, lookups)
        self._listener = Listener(tls, self, self.connections, newcomers)
        self.reachability = Reachability(local, self, self._table, self.connections, self._counters)
        self.streams = Streams(local, self, self.reachability)

    # -- for the agent -----------------------------------------------------------------------------------------------

    async def start(
        self, owner: LinkOwner, host: str, port: int, advertise: str = "", without: NetworkAbsence = NOT_WITHOUT
    ) -> str:
        """Listen → the `HOST:PORT`. owner: receiver of the links' messages; nothing is dialled before this call.
        ``advertise``: the address that is published instead, if it is not empty. Raises ConfigError if the address cannot be
        used. without: behaviour without a network."""
        self._owner = owner
        host, port = parse_address("listen", join_address(host, port), loopback_only=self._tls.cluster.is_local)
        address = await self._listener.start(host, port, without)
        self._local.listens_at(advertise or address)
        self._plan_idle_check()
        self.reachability.start()
        return address

    def dial(self, address: str) -> None:
        """Dial this address until a member answers there, unless it is this node's own, or the member that answered there is
        still reachable. Raises ConfigError if it is not `HOST:PORT`, or is on another machine and this node has no
        cluster directory."""
        parse_address("peer", address, loopback_only=self._tls.cluster.is_local)
        if address in self._found_at and self._found_at[address] in self._local.reachable_peers():
            return
        is_own = address in self._own_addresses or address == self._local.identity.address
        if address not in self._unanswered and not is_own:
            self._unanswered[address] = ""
            self.spawn(self._find(address), f"seed {address}")

    @property
    def unanswered(self) -> dict[str, str]:
        """Addresses passed to `dial` where no member has answered yet, with the last error, if any."""
        return dict(self._unanswered)

    @property
    def name_clashes(self) -> dict[str, str]:
        """Agents that were refused because another has their name: name → address."""
        return self._table.clashes

    def learn(self, identity: messages.Identity) -> bool:
        """Store the identity of a node, unless a later start of its agent is known. → True if it has changed."""
        if identity.node == self._name or (peer := self._table.entry(identity.node)) is None:
            return False
        return peer.identity != identity and peer.learn(identity)

    def forget(self, node: str) -> None:
        """Close the links to this node, and forget its address."""
        peer = self._table.entries.get(node)
        if peer is not None:
            peer.identity = None
            for link in list(peer.links):
                link.close(f"{node} is forgotten")

    def connect(self, identity: messages.Identity) -> None:
        self.learn(identity)
        peer = self._table.entries.get(identity.node)
        if peer is not None and not peer.links and not peer.is_dialled:
            self._dial_peer(peer)

    def send(self, dst: str, message: messages.LinkMessage) -> None:
        """Send over the newest link to ``dst``; without one, dial it. Never waits, and raises nothing."""
        peer = self._table.entry(dst) if dst != self._name else None
        if peer is None or self._is_closing:
            self._fail(dst, [message])
            return
        link = peer.link
        if link is not None and not link.paused and not peer.waiting:
            self._write(link, dst, message)
        elif not peer.queue(message):
            self._counters[metrics.labelled(metrics.PEER_MESSAGES_REFUSED, reason="queue_full")] += 1
            self._fail(dst, [message])
        elif link is None and not peer.is_dialled:
            self._dial_peer(peer)

    def carries_tasks(self, dst: str) -> bool:
        """True if messages about tasks went over the link to this node within QUIET_S, and it can accept more now."""
        peer = self._table.entries.get(dst)
        link = peer.link if peer is not None and not peer.waiting else None
        return link is not None and not link.paused and asyncio.get_running_loop().time() - link.task_s <= QUIET_S

    def linked(self) -> list[str]:
        return sorted(node for node, peer in self._table.entries.items() if peer.links)

    def certificate_of(self, node: str) -> bytes:
        """The certificate (DER) of the newest link to this node; empty without a link."""
        peer = self._table.entries.get(node)
        link = peer.link if peer is not None else None
        return link.certificate if link is not None else b""

    def fetch_output(self, dst: str, request: messages.OutputRequest) -> AsyncIterator[Piece]:
        """Fetch the output of an attempt from the node that ran it: pieces as they arrive, the last one OutputEnd.

        Raises LinkUnavailable if ``dst`` cannot be reached, or is lost before the end; the caller can resume from there.
        """
        return self.streams.fetch(dst, self._address_of(dst), request, f"the output of {request.task}")

    def fetch_blocks(
        self,
        dst: str,
        request: messages.BlocksRequest,
        kept: dict[str, RequestStream],
        following: messages.BlocksRequest | None = None,
    ) -> AsyncIterator[messages.Blocks | messages.BlocksEnd]:
        """Fetch blocks of files from another node, as `fetch_output` does. kept, following: as in `Streams.fetch`."""
        return self.streams.fetch(dst, self._address_of(dst), request, "files of a task", kept, following)

    def _address_of(self, node: str) -> str:
        """The published address of a node that has a link, or is known only by gossip; empty if it is not known."""
        peer, newest = self._table.entries.get(node), self._local.identity_of(node)
        if peer is None:
            return newest.address if newest is not None else ""
        if newest is not None:
            peer.learn(newest)  # gossip may know a later start
        return peer.address

    async def open_stream(
        self, dst: str, kinds: tuple[type[messages.Message], ...]
    ) -> tuple[StreamReader, PeerConnection]:
        """Open a stream to ``dst`` over which it may send messages of these kinds. Raises LinkUnavailable."""
        address = self._address_of(dst)
        if not address:
            raise LinkUnavailable(dst, f"no address of {dst} is known")
        return await self.streams.open(dst, address, kinds)

    def dial_copy(self, address: str) -> None:
        """Dial an agent that was reported to have this node's name and database: its certificate then proves its name.
        It is dialled again if it does not answer in time, at most COPY_DIALS_MAX times in all."""
        if address != self._local.identity.address:
            self.spawn(self._dial_copy(address), f"copy {address}")

    async def close(self) -> None:
        """Stop listening, write the waiting frames, close every link; takes at most about twice CLOSE_S."""
        self._is_closing = True
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self.reachability.stop()
        await self._listener.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        connections = list(self._open)
        for connection in connections:
            connection.close("this agent stops")
        ended = [connection.ended for connection in connections]
        if ended:
            await asyncio.wait(ended, timeout=CLOSE_S)
        for connection in connections:
            connection.abort("this agent stops")
        if ended:
            await asyncio.wait(ended, timeout=CLOSE_S)  # a transport may never report its end
        for peer in self._table.entries.values():
            self._fail(peer.node, peer.take_all())

    # -- Owner: callbacks of connections -------------------------------------------------------------------------------

    def opened(self, connection: PeerConnection) -> None:
        """Send Hello: the other end is of this cluster."""
        self._open.add(connection)
        hello = self._local.hello(stream=connection.stream, back=connection.back)
        connection.send(hello)

    def hello_received(self, connection: PeerConnection, hello: messages.Hello) -> bool:
        """Admit a peer, unless it is this agent itself, has the name of another, or `PeerTable.refusal` refuses it."""
        self._listener.handshake_done(connection)
        own, identity = self._local.identity, hello.identity
        if (identity.node, identity.boot) == (own.node, own.boot):
            connection.reason = "this agent itself answers there"
            return False
        peer = self._table.entry(identity.node) if identity.node != own.node else None
        if self._table.is_name_clash(own, peer, identity):
            if (identity.node, identity.store) == (own.node, own.store):
                self._owner.copied(identity, hello.up_s)
            else:
                self._refuse_name(connection, identity)
            connection.reason = f"another agent is called {identity.node}"
        else:
            connection.reason = self._table.refusal(peer, hello)
            if connection.reason == EARLIER_START and peer is not None:
                self._write(connection, identity.node, messages.NameTaken(peer.address))
        if connection.reason:
            return False
        if peer is not None and not connection.dialled:
            self.reachability.dialled_by(peer)
        if connection.stream and hello.back and not connection.dialled:
            self._open.discard(connection)
            return self.reachability.stream_opened(connection, hello)
        if connection.stream:
            self.streams.accepted(connection)
            return True
        if peer is None:
            return False
        self._notify_earlier_start(peer, identity)
        peer.add(connection, identity)
        self.reachability.link_made(peer, connection)
        self._counters[metrics.PEER_LINKS_OPENED] += 1
        self._owner.met(hello)
        self.writable(connection)
        return True

    def _refuse_name(self, connection: PeerConnection, identity: messages.Identity) -> None:
        """Notify an agent that its name is taken. If it has this node's name and was dialled, this node is refused."""
        if identity.node != self._name:
            self._write(connection, identity.node, messages.NameTaken())
        elif connection.dialled:
            self._owner.name_taken(identity.address or connection.address)

    def _notify_earlier_start(self, peer: PeerEntry, identity: messages.Identity) -> None:
        """Send the address of an agent's later start to its earlier one, before the links of that close: if the earlier
        one is alive, both have copies of one database."""
        for link in peer.links:
            other = link.hello.identity if link.hello is not None else None
            is_earlier = other is not None and other.boot != identity.boot and other.store == identity.store
            if is_earlier and identity.address:
                self._write(link, identity.node, messages.NameTaken(identity.address))

    def _name_taken(self, connection: PeerConnection, message: messages.NameTaken) -> None:
        """Handle a refusal of this node's name. If the other agent has a copy of this database, it is dialled."""
        connection.close(f"another agent is called {self._name}")
        if not message.at:
            self._owner.name_taken(connection.hello.identity.address if connection.hello is not None else "")
        else:
            self.dial_copy(message.at)

    def received(self, connection: PeerConnection, envelope: messages.Envelope) -> None:
        """Deliver a message for this start of this node."""
        message, node = envelope.body, envelope.src
        if envelope.dst != self._name:
            self.drop("wrong_recipient", node)
        elif envelope.dst_boot not in {"", self._boot}:
            self.drop("for_earlier_start")
            if not isinstance(message, messages.WrongBoot):
                self._write(connection, node, messages.WrongBoot(boot=self._boot))
        elif isinstance(message, messages.NameTaken):
            self._name_taken(connection, message)
        elif connection.stream:
            self.streams.received(connection, node, message)
        elif isinstance(message, messages.Hello):
            self.drop("second_hello", node)
            connection.close("second hello")
        elif isinstance(message, messages.DialBack | messages.NotDialled):
            self.reachability.received(node, message)
        elif is_link_message(message):
            self._deliver(connection, node, message, *envelope.others)
        elif not self.malformed(connection, ProtocolError("a stream's message on a link")):
            connection.close("malformed frames")

    def _deliver(self, connection: PeerConnection, node: str, *received: messages.LinkMessage) -> None:
        self._counters[metrics.PEER_MESSAGES_RECEIVED] += len(received)
        for message in received:
            self._owner.deliver(node, message)
        _mark_used(connection, received[0])
        waiting, size_bytes = self._backpressure, connection.frame_bytes
        if waiting is not None and waiting.queued(connection, node, size_bytes, len(received)):
            self.drop("too_many_messages", node)

    def malformed(self, connection: PeerConnection, error: PeerloadError) -> bool:
        """Count a malformed frame. → False if the connection must close."""
        self.drop("malformed", _name_of(connection), str(error))
        return connection.hello is not None and not self._table.count_malformed(connection.hello.identity)

    def refused(self, connection: PeerConnection, reason: str, detail: str = "") -> None:
        self.drop(reason, _name_of(connection), detail)

    def writable(self, connection: PeerConnection) -> None:
        peer = self._table.entries.get(connection.hello.identity.node) if connection.hello is not None else None
        if peer is None or connection.stream:
            return
        while peer.waiting and (link := peer.link) is not None and not link.paused and not link.is_closed:
            self._write(link, peer.node, peer.take())

    def closed(self, connection: PeerConnection, reason: str) -> None:
        """Return the unsent messages; if that was the last link to a peer, report the peer as unreachable."""
        self._listener.handshake_done(connection)
        self._open.discard(connection)
        self.streams.closed(connection)
        peer = self._table.entries.get(connection.hello.identity.node) if connection.hello is not None else None
        if peer is None or connection not in peer.links:
            return
        peer.links.remove(connection)
        unsent = [message for message in connection.unsent() if not isinstance(message, messages.Hello)]
        if not peer.links:
            self._fail(peer.node, unsent)
            self.reachability.link_lost(peer)
            if reason == IDLE and not peer.waiting:
                self._counters[metrics.PEER_LINKS_IDLE_CLOSED] += 1
            elif not peer.is_dialled:
                self._give_up(peer, reason)
            return
        for message in unsent:
            self.send(peer.node, message)
        self.writable(peer.links[-1])

    # -- dialling ------------------------------------------------------------------------------------------------------

    async def _find(self, address: str) -> None:
        failures = 0
        while True:
            try:
                connection = await self.connections.open(address, address, self)
            except LinkUnavailable as error:
                if address == self._local.identity.address or "this agent itself" in error.why:
                    self._own_addresses.add(address)
                    break
                self._unanswered[address] = error.why or error.what
                if failures == 0:
                    _log.warning("no peer answers yet; retrying: address=%s error=%s", address, error.why)
                failures += 1
                await asyncio.sleep(backoff_s(failures))
            else:
                if connection.hello is not None:
                    self._found_at[address] = connection.hello.identity.node
                break
        self._unanswered.pop(address, None)

    async def _dial_copy(self, address: str) -> None:
        with contextlib.suppress(ConfigError):
            parse_address("peer", address, loopback_only=self._tls.cluster.is_local)
            for failures in range(1, COPY_DIALS_MAX + 1):
                try:
                    await self.connections.open(address, address, self)
                except LinkUnavailable as error:
                    if error.kind in {REFUSED, NO_MEMBER}:  # no agent listens there, or no longer
                        return
                    await asyncio.sleep(backoff_s(failures))
                else:
                    return

    def _dial_peer(self, peer: PeerEntry) -> None:
        """Make a link in the background; within the pause after a failure, fail immediately."""
        if (newest := self._local.identity_of(peer.node)) is not None:
            peer.learn(newest)  # gossip may know a later start, or a node that was never linked
        now_s = asyncio.get_running_loop().time()
        if not peer.address:
            self._give_up(peer, "its address is not known")
        elif now_s < peer.not_before_s:
            self._give_up(peer, "it could not be reached a moment ago")
        else:
            peer.is_dialled = True
            self.spawn(self._make_link(peer, peer.address), f"dial {peer.node}")

    async def _make_link(self, peer: PeerEntry, address: str) -> None:
        reason = ""
        try:
            connection = await self.connections.open(address, peer.node, self)
            if connection.hello is not None and connection.hello.identity.node != peer.node:
                reason = f"{connection.hello.identity.node} answers at {address}"
            else:
                peer.dial_succeeded(address)
        except LinkUnavailable as error:
            reason = error.why or error.what
            peer.dialled_s = asyncio.get_running_loop().time()
            peer.dial_failed(address, reason)
        finally:
            peer.is_dialled = False
        if not peer.links:
            peer.back_off(asyncio.get_running_loop().time())
            self._give_up(peer, reason or "the link broke at once")

    def _give_up(self, peer: PeerEntry, reason: str) -> None:
        self._counters[metrics.PEER_UNREACHABLE] += 1
        self._fail(peer.node, peer.take_all())
        asyncio.get_running_loop().call_soon(self._owner.unreachable, peer.node, reason)

    # -- idle links ----------------------------------------------------------------------------------------------------

    def _plan_idle_check(self) -> None:
        self._idle_timer = asyncio.get_running_loop().call_later(coalesced_s(IDLE_CHECK_S), self._check_idle)

    def _check_idle(self) -> None:
        """Close idle links, so that hundreds of members that compare their membership do not stay linked to all others."""
        self._plan_idle_check()
        now_s = asyncio.get_running_loop().time()
        links = (link for peer in self._table.entries.values() for link in peer.links)
        idle = sorted(
            (link for link in links if not link.is_closed and now_s - link.used_s > IDLE_S),
            key=lambda link: link.used_s,
        )
        for link in idle[: max(len(idle) - IDLE_KEPT_MAX, 0)]:
            if now_s - link.active_s > QUIET_S and not link.paused and self.reachability.is_replaceable(link):
                link.close(IDLE)

    # -- within --------------------------------------------------------------------------------------------------------

    def drop(self, reason: str, who: str = "", detail: str = "") -> None:
        self._table.drop(reason, who, detail)

    def _write(self, link: PeerConnection, dst: str, message: messages.LinkMessage) -> None:
        try:
            link.send(message)
        except ProtocolError:
            self._counters[metrics.labelled(metrics.PEER_MESSAGES_REFUSED, reason="too_large")] += 1
            self._fail(dst, [message])
            return
        self._counters[metrics.PEER_MESSAGES_SENT] += 1
        _mark_used(link, message)

    def _fail(self, dst: str, unsent: Sequence[messages.LinkMessage]) -> None:
        """Return messages in a later turn of the loop, so that a sender is never called back within its own call."""
        loop = asyncio.get_running_loop()
        for message in unsent:
            self._counters[metrics.PEER_SEND_ERRORS] += 1
            loop.call_soon(self._owner.send_failed, dst, message)

    def spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler(
                {"message": "a bug in the peer link", "exception": error, "task": task}
            )


def _mark_used(link: PeerConnection, message: messages.Message) -> None:
    """Record that a message went over this link, in either direction."""
    link.active_s = asyncio.get_running_loop().time()
    if type(message) in messages.OWNERSHIP:
        link.used_s = link.task_s = link.active_s
    elif not isinstance(message, MEMBERSHIP_MESSAGES):
        link.used_s = link.active_s


def _name_of(connection: PeerConnection) -> str:
    """The node named by the peer's certificate, else its address."""
    return connection.certified or connection.address.rpartition(":")[0].strip("[]")


STRANGERS_MAX = 64
"""Bound on the connections without a complete handshake (rule J3)."""
STRANGERS_OF_ONE_MAX = 48
"""Bound on the strangers of one address or IPv6 network, so that it cannot keep out all others."""
BACKLOG_MAX = 256
SEGMENT_BYTES_MAX = 1220
"""Maximum size of TCP segments in both directions, except on loopback: they fit into 1280 bytes, the minimum MTU of
IPv6, even where ICMP is dropped and no path MTU is reported."""
_LOOPBACK = ("127.0.0.1", "::1")
ACCEPT_PAUSE_S = 1.0
"""Pause after an error of accept, for example without free descriptors."""

NOTICE_EVERY_S = 60.0
"""Interval of the log lines about refused connections, for each reason; all are counted."""


class NewcomerServer(Protocol):
    """Server for connections of machines that want to join (agent/joining.py)."""

    def newcomer(self, closed: Callable[[asyncio.BaseProtocol], None]) -> asyncio.BaseProtocol:
        """The protocol object of one connection; it calls ``closed`` with itself at its end."""

    def close(self) -> None:
        """Close all connections."""


class Listener:
    """Listens for peers: `start`, then `close`. ``newcomers``: the join server; None: joining is not possible here."""

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

    async def start(self, host: str, port: int, without: NetworkAbsence = NOT_WITHOUT) -> str:
        """Listen → the `HOST:PORT` that others can dial. Raises ConfigError."""
        try:
            host = await resolve_one(host)
            self._socket = _listening(host, port, without)
            address = join_address(_published(host, without), self._socket.getsockname()[1])
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
                    self._links.drop("too_many_handshakes", address)
                    accepted.close()
                    await asyncio.sleep(0)  # an accept that does not wait never yields to other tasks
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
        except asyncio.CancelledError:  # this node stops; the transport may not have closed it yet
            accepted.close()
            raise

    def connected(self, transport: asyncio.Transport, connection: asyncio.BaseProtocol) -> None:
        """Choose the protocol after the TLS handshake: join server for newcomers, peer connection for the others."""
        protocol = connection
        if asks_to_join(transport):
            if self._newcomers is None:
                address = plain_host(str(transport.get_extra_info("peername")[0]))
                self._refused(connection, address, "joining is not possible here")
                transport.abort()
                return
            protocol = self._newcomers.newcomer(self.handshake_done)
            self.strangers[protocol] = self.strangers.pop(connection, "")
        transport.set_protocol(protocol)
        protocol.connection_made(transport)

    def _refused(self, connection: asyncio.BaseProtocol, address: str, why: str) -> None:
        """Count a connection that was refused, and log it at a limited rate; the other end gets no reason."""
        self.strangers.pop(connection, None)
        self._links.drop("handshake_failed", address, why)
        now_s = asyncio.get_running_loop().time()
        if now_s - self._noticed_s.get(why, -NOTICE_EVERY_S) >= NOTICE_EVERY_S:
            self._noticed_s[why] = now_s
            _log.warning("connection refused: address=%s reason=%s", address, why)

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Undecided(asyncio.Protocol):
    """Protocol object during the TLS handshake, which shows whether the other end is a peer or wants to join."""

    def __init__(self, listener: Listener, connection: asyncio.BaseProtocol) -> None:
        self._listener = listener
        self._connection = connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The TLS handshake is complete."""
        self._listener.connected(cast("asyncio.Transport", transport), self._connection)


async def check_listening(host: str, port: int, without: NetworkAbsence) -> None:
    """Check that `Listener.start` could listen there now. Raises ConfigError."""
    try:
        host = await resolve_one(host)
        _listening(host, port, without).close()
        _published(host, without)
    except OSError as error:
        raise _cannot(host, port, error) from None


def _cannot(host: str, port: int, error: OSError) -> ConfigError:
    what = f"cannot listen at {join_address(host, port)}"
    hint = "name an address of this machine that others reach"
    if error.errno == errno.EADDRINUSE:
        hint = f"another port, or any that is free:  --listen {join_address(host, 0)}"
    return ConfigError("listen", what, why=os_error_text(error), hint=hint)


def _published(host: str, without: NetworkAbsence) -> str:
    """The address published to peers. Raises OSError if there is none."""
    try:
        return reachable(host)
    except OSError:
        if not without.last_host or (":" in without.last_host) != (":" in host):
            raise
        return without.last_host


def _listening(host: str, port: int, without: NetworkAbsence = NOT_WITHOUT) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listening.family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # "any" includes IPv4
        if without.may_lack_address:
            listening.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
        if host not in _LOOPBACK:
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES_MAX)
        listening.bind((host, port))
        listening.listen(BACKLOG_MAX)
    except OSError:
        listening.close()
        raise
    return listening
