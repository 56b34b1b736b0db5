"""The agent's side of membership: listening, gossip datagrams, and the members of the last start.

The core decides who is alive. Here are the ports (links and gossip share one number), the watch for stalls of the agent
itself, and the address file, by which an agent that was killed finds its peers again after any time.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from peerload.agent.peers.addresses import AddressFile
from peerload.agent.peers.gossip import GossipSocket, LagWatch
from peerload.core.membership.membership import PeerState
from peerload.model import events, metrics
from peerload.model.bounded import BoundedDict
from peerload.model.errors import ConfigError
from peerload.model.gossip import MembershipUpdate
from peerload.security.address import parse_address, resolve_one
from peerload.wire import gossip as wire

if TYPE_CHECKING:
    from peerload.agent.peers.links import PeerLinks
    from peerload.agent.peers.local_node import LocalNode
    from peerload.agent.runtime import AgentInfo, Inbox
    from peerload.agent.store.write_ahead import SecurityEvents
    from peerload.core.node import Node
    from peerload.model.actions import SendGossip
    from peerload.model.messages import Hello, Identity
    from peerload.security.revocation import TrustStore
    from peerload.wire.gossip import Datagram

ADDRESS_FILE = "addresses"
PORT_TRIES_MAX = 20
"""Attempts to find a port that is free for TCP and UDP, where any will do."""
SOURCE_S = 30.0
"""Time for which the source address of a node's last datagram is used instead of the address in its identity: behind address
translation the two differ, and the way back closes when it is not used."""
SOURCES_MAX = 1000
WRITE_S = 1.0
"""Delay of writing the address file after a change: a kill loses no more than that."""
FACTS_MAX = 1000


class _Source(NamedTuple):
    """Source of the last datagram of one start of a node, and its loop time."""

    address: str
    boot: str
    at_s: float


class PeerFacts:
    """Facts about one peer for `peerload doctor`; nothing is decided by them.

    met_s: when it was first linked or heard (monotonic); datagram_s: when its last datagram came, None: never;
    clock_ahead_s: by how much its clock was ahead in its last Hello, None: not known.
    """

    __slots__ = ("clock_ahead_s", "datagram_s", "met_s")

    def __init__(self) -> None:
        self.met_s = time.monotonic()
        self.datagram_s: float | None = None
        self.clock_ahead_s: float | None = None


class Members:
    """Listens for links and gossip, sends datagrams, and keeps the addresses of members."""

    def __init__(
        self,
        info: AgentInfo,
        local: LocalNode,
        node: Node,
        links: PeerLinks,
        trust: TrustStore,
        inbox: Inbox,
        security: SecurityEvents,
    ) -> None:
        self._info = info
        self._local = local
        self._node = node
        self._links = links
        self._trust = trust
        self._inbox = inbox
        self._security = security
        self._file = AddressFile(Path(info.config.state) / ADDRESS_FILE)
        self._socket = GossipSocket(
            local.sealer("gossip"),
            wire.encode,
            wire.decode,
            self._received,
            security,
            loopback_only=local.cluster.is_local,
        )
        preset = node.state.config.gossip
        self._lag = LagWatch(
            preset.lag_s, 1.1 * preset.probe_s, lambda lag_s: inbox.put(events.LoopLagged(lag_s))
        )  # a healthy node probes once in probe_s
        self._write_timer: asyncio.TimerHandle | None = None
        self._sources: BoundedDict[str, _Source] = BoundedDict(SOURCES_MAX)
        self._facts: BoundedDict[str, PeerFacts] = BoundedDict(FACTS_MAX)

    @property
    def known(self) -> tuple[Identity, ...]:
        """The members of the last start."""
        return tuple(self._file.peers.values())

    @property
    def listens_at(self) -> str:
        """The `HOST:PORT` where this node listens; the published address may be another."""
        return self._file.listen

    async def listen(self) -> str:
        """Open both ports → the `HOST:PORT` that peers can dial. Where any port will do, that of the last start is tried
        first, because peers may dial it. Raises ConfigError."""
        listen = self._info.config.listen
        host, port = parse_address("listen", listen, loopback_only=self._local.cluster.is_local)
        try:
            ip = await resolve_one(host)
        except OSError as error:
            raise ConfigError("listen", f"{host!r} has no address", why=str(error)) from None
        last = self._file.port_of(host)
        tries = [port] if port else [*([last] if last else []), *[0] * PORT_TRIES_MAX]
        for number, wanted in enumerate(tries, start=1):
            try:
                address = await self._listen_at(ip, wanted)
            except ConfigError:
                if number == len(tries):
                    raise
            else:
                self._file.set_listen(address)
                for identity in self.known:
                    self._links.learn(identity)  # they may have tasks of this node, or this node tasks of theirs
                return address
        raise AssertionError("there is always a last try")

    async def _listen_at(self, ip: str, wanted: int) -> str:
        port = self._socket.start(ip, wanted)
        try:
            return await self._links.start(ip, port, self._info.config.advertise)
        except ConfigError:
            self._socket.close()
            raise

    def send(self, action: SendGossip) -> None:
        """Send a datagram to a peer."""
        self._lag.watch()
        self._socket.send(action.node, self._source_of(action.node) or action.address, action.messages)

    def _source_of(self, node: str) -> str:
        """The source address of the last datagram of this start of a node, if that was a moment ago; else empty."""
        source = self._sources.get(node)
        if source is None or asyncio.get_running_loop().time() - source.at_s > SOURCE_S:
            return ""
        identity = self._local.identity_of(node)
        return source.address if identity is not None and identity.boot == source.boot else ""

    def close(self, *, forget: bool = False) -> None:
        """Close the gossip socket. ``forget``: the next start is to know no member."""
        self._lag.close()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_addresses()
        if forget:
            self._file.set_peers(())
        self._socket.close()

    def _received(self, node: str, boot: str, address: str, datagram: Datagram) -> None:
        self._lag.check()
        self._lag.watch()
        if not self._trust.admits(node, boot):
            reason = metrics.labelled(metrics.GOSSIP_DATAGRAMS_DROPPED, reason="revoked node")
            self._security.counters[reason] += 1
            self._security.report("J4", node, "a datagram, though it was revoked")
            return
        self._facts_of(node).datagram_s = time.monotonic()
        self._sources[node] = _Source(address, boot, asyncio.get_running_loop().time())
        if any(isinstance(message, MembershipUpdate) for message in datagram.messages):
            self.changed()
        if datagram.skipped:
            self._security.counters[metrics.GOSSIP_MESSAGES_UNKNOWN] += datagram.skipped
        self._inbox.put(
            events.GossipReceived(node, boot, datagram.messages, address, datagram.protocol_min, datagram.protocol_max)
        )

    # -- the address file ----------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Plan to write the address file, because there is news about members."""
        if self._write_timer is None:
            self._write_timer = asyncio.get_running_loop().call_later(WRITE_S, self._write_addresses)

    def _write_addresses(self) -> None:
        """Write down the members that have not left, and those of earlier starts that were not met yet."""
        self._write_timer = None
        membership = self._node.membership
        met = {peer.identity.node: peer for peer in membership}
        present = [peer.identity for peer in met.values() if peer.state is not PeerState.LEFT]
        unmet = [identity for node, identity in membership.gossip.anti_entropy.known.items() if node not in met]
        self._file.set_peers([identity for identity in (*unmet, *present) if identity.address])

    # -- facts for people ----------------------------------------------------------------------------------------------

    def met(self, hello: Hello) -> None:
        """Note the Hello of a peer on a new link."""
        self.changed()
        facts = self._facts_of(hello.identity.node)
        if hello.wall_at:
            facts.clock_ahead_s = hello.wall_at - time.time()

    def facts_of(self, node: str) -> PeerFacts | None:
        """Facts about this peer for `peerload doctor`."""
        return self._facts.get(node)

    def _facts_of(self, node: str) -> PeerFacts:
        found = self._facts.get(node)
        if found is None:
            found = self._facts[node] = PeerFacts()
        return found
