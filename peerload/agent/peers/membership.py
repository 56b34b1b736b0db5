"""The agent's side of membership: where peers are met, what gossip says and hears, and whom the last start knew.

Who is alive is decided in the core. Here are the ports (the peer link and gossip share one number), the watch for
stalls of the agent itself, and the file by which an agent that was killed finds its peers again, however long ago.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from peerload.agent.peers.address_file import Addresses
from peerload.agent.peers.gossip import GossipSocket, LagWatch
from peerload.core.membership.membership import PeerState
from peerload.model import events
from peerload.model.errors import ConfigError
from peerload.model.gossip import MembershipUpdate
from peerload.security.address import numeric, parse_address
from peerload.wire import gossip as wire

if TYPE_CHECKING:
    from pathlib import Path

    from peerload.agent.parts import Parts
    from peerload.model.actions import SendGossip
    from peerload.model.messages import Identity
    from peerload.wire.gossip import Datagram
    from peerload.wire.seal import Sealer

PORT_TRIES_MAX = 20
"""Where any port will do: so many are tried until one is free for TCP and for UDP."""
SEEN_S = 30.0
"""Where a node's datagrams come from it is answered, and told things, for so long: behind address translation that is not
where it says it is, and the way back is closed again when nothing went over it for a while."""
SEEN_MAX = 1000
KEEP_S = 1.0
"""So long after news of members it is written down who is known: what a kill forgets is no older."""


class _Seen(NamedTuple):
    """Where the last datagram of a run of a node came from, and when, by the loop's time."""

    address: str
    boot: str
    at_s: float


class Members:
    """``parts``: of this agent, its links too, by the time that `listen` is called; sealer: that of gossip."""

    def __init__(self, parts: Parts, sealer: Sealer, file: Path) -> None:
        self._parts = parts
        self._addresses = Addresses(file)
        self._socket = GossipSocket(
            sealer,
            wire.encode,
            wire.decode,
            self._received,
            parts.counters,
            loopback_only=parts.cluster.is_local,
            broken=parts.security.tell,
        )
        self._lag = LagWatch(
            parts.node.state.config.gossip.lag_s, lambda lag_s: parts.inbox.put(events.LoopLagged(lag_s))
        )
        self._keeping: asyncio.TimerHandle | None = None
        self._seen: OrderedDict[str, _Seen] = OrderedDict()

    @property
    def known(self) -> tuple[Identity, ...]:
        """The members of the last start, and where they were."""
        return tuple(self._addresses.peers.values())

    @property
    def listens_at(self) -> str:
        """The `HOST:PORT` where this node listens, whatever others are told."""
        return self._addresses.listen

    async def listen(self) -> str:
        """Open both ports → the `HOST:PORT` that peers can dial. Where any port will do, that of the last start is tried
        first: others may look for us there. Raises ConfigError."""
        parts = self._parts
        host, port = parse_address("listen", parts.config.listen, loopback_only=parts.cluster.is_local)
        try:
            ip = await numeric(host)
        except OSError as error:
            raise ConfigError("listen", f"{host!r} has no address", why=str(error)) from None
        last = self._addresses.port_of(host)
        tries = [port] if port else [*([last] if last else []), *[0] * PORT_TRIES_MAX]
        for number, wanted in enumerate(tries, start=1):
            try:
                address = await self._listen_at(ip, wanted)
            except ConfigError:
                if number == len(tries):
                    raise
            else:
                self._addresses.keep_listen(address)
                for identity in self.known:
                    parts.links.learn(identity)  # they may hold tasks of ours, or we of theirs
                return address
        raise AssertionError("there is always a last try")

    async def _listen_at(self, ip: str, wanted: int) -> str:
        port = self._socket.start(ip, wanted)
        try:
            return await self._parts.links.start(ip, port, self._parts.config.advertise)
        except ConfigError:
            self._socket.close()
            raise

    def start(self) -> None:
        """Begin to watch for stalls."""
        self._lag.start()
        self._parts.links.ways.members = self._alive

    def _alive(self) -> list[Identity]:
        return [peer.identity for peer in self._parts.node.membership if peer.state is PeerState.ALIVE]

    def send(self, action: SendGossip) -> None:
        """Say something to a peer, by one datagram."""
        self._socket.send(action.node, self._where(action.node) or action.address, action.messages)

    def _where(self, node: str) -> str:
        """Where the last datagram of this run of a node came from, if that was a moment ago; else empty."""
        seen = self._seen.get(node)
        if seen is None or asyncio.get_running_loop().time() - seen.at_s > SEEN_S:
            return ""
        identity = self.identity_of(node)
        return seen.address if identity is not None and identity.boot == seen.boot else ""

    def identity_of(self, node: str) -> Identity | None:
        """Where a peer is, as far as the core knows."""
        peer = self._parts.node.membership.get(node)
        return None if peer is None else peer.identity

    def close(self, *, forget: bool = False) -> None:
        """End; ``forget``: the next start is to know nobody."""
        self._lag.close()
        if self._keeping is not None:
            self._keeping.cancel()
            self._keep()
        if forget:
            self._addresses.keep_only(())
        self._socket.close()

    def _received(self, node: str, boot: str, address: str, datagram: Datagram) -> None:
        self._lag.look()
        if not self._parts.trust.hears(node, boot):
            self._parts.counters["gossip dropped: of a node that was shut out"] += 1
            self._parts.security.tell("J4", node, "a datagram, though it was shut out")
            return
        self._parts.peer_facts.datagram(node)
        self._seen[node] = _Seen(address, boot, asyncio.get_running_loop().time())
        self._seen.move_to_end(node)
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
        if any(isinstance(message, MembershipUpdate) for message in datagram.messages):
            self.news()
        if datagram.skipped:
            self._parts.counters["gossip not understood"] += datagram.skipped
        self._parts.inbox.put(
            events.GossipReceived(node, boot, datagram.messages, address, datagram.protocol_min, datagram.protocol_max)
        )

    def news(self) -> None:
        """Something about members has come in: soon it is written down who they are."""
        if self._keeping is None:
            self._keeping = asyncio.get_running_loop().call_later(KEEP_S, self._keep)

    def _keep(self) -> None:
        """Those that are known and have not left; of earlier starts also those that were not met yet."""
        self._keeping = None
        membership = self._parts.node.membership
        met = {peer.identity.node: peer for peer in membership}
        there = [peer.identity for peer in met.values() if peer.state is not PeerState.LEFT]
        unmet = [identity for node, identity in membership.gossip.anti_entropy.known.items() if node not in met]
        self._addresses.keep_only([identity for identity in (*unmet, *there) if identity.address])
