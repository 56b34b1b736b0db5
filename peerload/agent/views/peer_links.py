"""The links of this agent as a client is shown them: the broker, and each peer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from peerload.security.broker_address import without_password

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peerload.agent.mqtt.client import MqttBus
    from peerload.agent.node_info import NodeInfo
    from peerload.agent.peers.links import PeerLinks
    from peerload.agent.peers.membership import Members
    from peerload.agent.views.cluster import ClusterView
    from peerload.core.membership.membership import PeerInfo


class PeerLinksView:
    """Reads the peer links and the bus of one agent. ``bus``: None if no broker is configured."""

    def __init__(
        self, info: NodeInfo, links: PeerLinks, members: Members, bus: MqttBus | None, cluster: ClusterView
    ) -> None:
        self._info = info
        self._links = links
        self._members = members
        self._bus = bus
        self._cluster = cluster

    def info(self) -> dict[str, object]:
        """The part of `info` that is about links."""
        return {
            "mqtt": self._bus.url if self._bus is not None and self._bus.connected else None,
            "mqtt_configured": bool(self._info.config.mqtt),
            "sought": self._links.unanswered,
        }

    def checkup(self, peers: Iterable[PeerInfo]) -> dict[str, object]:
        """The part of `checkup` that is about links."""
        linked = set(self._links.linked())
        return {
            "broker": self._broker(),
            "peers": [self._peer(peer, linked) for peer in peers],
            "clashes": self._links.name_clashes,
            "refused_by": list(self._info.refused_by),
        }

    def _broker(self) -> dict[str, object] | None:
        if self._bus is None:
            return None
        urls = [without_password(url) for url in self._info.config.mqtt]
        told = {"urls": urls, "url": self._bus.url, "why": self._bus.unavailable_because or None}
        return told | {"heard": self._bus.is_echoed}

    def _peer(self, peer: PeerInfo, linked: set[str]) -> dict[str, object]:
        name = peer.identity.node
        fact, now_s = self._members.facts_of(name), time.monotonic()
        heard_s = fact.datagram_s if fact is not None else None
        way, way_why = self._links.reachability.route(name)
        return {
            "node": name,
            "state": peer.state.value,
            "address": peer.identity.address,
            "linked": name in linked,
            "met_s": now_s - fact.met_s if fact is not None else None,
            "datagram_age_s": now_s - heard_s if heard_s is not None else None,
            "revoked": self._cluster.is_peer_revoked(peer),
            "clock_ahead_s": fact.clock_ahead_s if fact is not None else None,
            "way": way,
            "way_why": way_why or None,
            "dials_back": self._links.reachability.dials_back(name),
        }
