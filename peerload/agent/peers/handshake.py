"""Handshake: which of the nodes that introduce themselves over a link are taken in. Every end has proven its
certificate by then; what is left is a name that another agent has, one peer too many, an earlier start, and who is out
for a while.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from peerload.agent.peers.peer_table import Bans
from peerload.model import rules

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Mapping

    from peerload.agent.peers.peer_table import PeerEntry
    from peerload.model.messages import Hello, Identity

CLASHES_MAX = 16
EARLIER_START = "a later start of this agent is here"

_log = logging.getLogger("peerload.peer")


class Handshakes:
    """What one node holds against newcomers. ``peers``: those it knows, by name; ``drop``: counts why one was not let in
    (why, who); ``broken``: tells of a rule of security that was broken (rule, who, what)."""

    def __init__(
        self,
        peers: Mapping[str, PeerEntry],
        peers_max: int,
        counters: Counter[str],
        drop: Callable[[str, str], None],
        broken: Callable[[str, str, str], None],
    ) -> None:
        self._peers = peers
        self._peers_max = peers_max
        self._counters = counters
        self._drop = drop
        self._broken = broken
        self._bans = Bans()
        self.clashes: dict[str, str] = {}
        """The last CLASHES_MAX agents that were refused since another has their name: name → their address."""

    def is_clash(self, ours: Identity, peer: PeerEntry | None, told: Identity) -> bool:
        """Whether this is another agent under our own name, or under that of a peer that is linked; noted if it is."""
        other = _linked(peer)
        if told.node != ours.node and (other is None or other.store == told.store):
            return False
        self._counters["peer clashes"] += 1
        self._broken(
            rules.NAME_UNIQUE, told.node, f"another agent has that name; the one at {told.address[:100]} is refused"
        )
        self.clashes = dict([*self.clashes.items(), (told.node, told.address)][-CLASHES_MAX:])
        _log.error(
            "two agents call themselves %s: the one at %r is refused; start the newer one with  --node NAME",
            told.node,
            told.address[:100],
        )
        return True

    def objection(self, peer: PeerEntry | None, hello: Hello) -> str:
        """Why this peer, whose name is its own, is not taken in; "" if it is. None: there is no room to know it."""
        told, other = hello.identity, _linked(peer)
        if peer is None or (not peer.links and self._linked_peers() >= self._peers_max):
            self._drop("too many peers", told.node)
            return "too many peers"
        if other is not None and other.boot != told.boot and told.incarnation < other.incarnation:
            self._drop("an earlier start", told.node)
            return EARLIER_START
        if self._bans.holds((told.node, told.boot), asyncio.get_running_loop().time()):
            self._drop("banned", told.node)
            return "banned for malformed frames"
        return ""

    def malformed(self, told: Identity) -> bool:
        """Count a malformed frame of a peer; False if that was one too many, and it stays out for a while (rule P1)."""
        if not self._bans.add((told.node, told.boot), asyncio.get_running_loop().time()):
            return True
        self._counters["peer bans"] += 1
        self._broken(
            rules.FRAMES_BOUNDED, told.node, "it sent malformed frames again and again, and stays out for a while"
        )
        _log.warning("%s sent malformed frames and stays out for a while", told.node)
        return False

    def _linked_peers(self) -> int:
        return sum(1 for known in self._peers.values() if known.links)


def _linked(peer: PeerEntry | None) -> Identity | None:
    """Who is at the other end of the newest link to this peer."""
    link = peer.link if peer is not None else None
    return link.hello.identity if link is not None and link.hello is not None else None
