"""The agent as a client is shown it: `info`, `settings` and `checkup`; its cluster, links and storage."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import time
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from peerload import __version__
from peerload.agent.accounts.accounts import members
from peerload.agent.node_info import now
from peerload.agent.views import task as views
from peerload.config.loader import describe
from peerload.model import metrics
from peerload.security.broker import without_password

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peerload.agent.completion.retention import Retention
    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.mqtt import MqttBus
    from peerload.agent.node_info import AgentInfo
    from peerload.agent.peers.links import PeerLinks
    from peerload.agent.peers.membership import Members
    from peerload.agent.sensors.gpus import Gpus
    from peerload.agent.store.disk_space import DiskSpace
    from peerload.agent.store.store import Store
    from peerload.core.membership.membership import PeerInfo
    from peerload.core.node import Node
    from peerload.model.config import AgentConfig
    from peerload.security.cluster_dir import ClusterDirectory
    from peerload.security.revocation import TrustStore
    from peerload.security.tls import Credentials

NAMED_MAX = 8
"""Administrators that are named."""


@dataclass(eq=False, repr=False)
class ClusterView:
    """Reads the cluster directory, the trust and the credentials of one agent."""

    _config: AgentConfig
    _cluster: ClusterDirectory
    _trust: TrustStore
    _tls: Credentials

    def is_revoked(self) -> bool:
        """True if this node was revoked."""
        return self._tls.is_revoked

    def is_peer_revoked(self, peer: PeerInfo) -> bool:
        """True if this start of that node is revoked."""
        return not self._trust.admits(peer.identity.node, peer.identity.boot)

    def was_revoked(self, node: str) -> bool:
        """True if a node of this name was ever revoked."""
        return self._trust.was_revoked(node)

    def info(self) -> dict[str, object]:
        """The part of `info` that is about the cluster."""
        cluster, trust, facts = self._cluster, self._trust, self._tls.facts
        return {
            "cluster": cluster.name,
            "cluster_id": cluster.id,
            "cluster_directory": str(cluster.directory),
            "cluster_local": cluster.is_local,
            "cluster_fingerprint": cluster.fingerprint,
            "issuer": cluster.is_issuer,
            "seal_key": trust.number,
            "certificate_ends_at": facts.valid_until.timestamp() if facts is not None else None,
            "revoked": sorted({word.node for word in trust.revocations}),
        }

    def checkup(self) -> dict[str, object]:
        """The part of `checkup` that is about the cluster."""
        facts = self._tls.facts
        return {
            "certificate_until": facts.valid_until.timestamp() if facts is not None else None,
            "issuer": self._cluster.is_issuer,
            "revoked": self.is_revoked(),
            "security": self._security(),
        }

    def _security(self) -> dict[str, object]:
        """Facts for `peerload doctor --security` that only the agent knows; no key and no secret is among them."""
        facts, trust = self._tls.facts, self._trust
        return {
            "mode": self._config.mode,
            "user_id": os.getuid(),
            "certificate": None
            if facts is None
            else {
                "issued_at": facts.issued_at.timestamp(),
                "due_at": facts.due_at.timestamp(),
                "valid_until": facts.valid_until.timestamp(),
                "fingerprint": facts.fingerprint,
            },
            "seal_number": trust.number,
            "sealed_since": None if trust.newest is None else trust.newest.at,
            "administrators": self._administrators(),
        }

    def _administrators(self) -> dict[str, object]:
        """Which of those that users of other nodes may be here are administrators: ``may_be``: the settings allow it;
        ``named``: by the table of `users`, some of them."""
        config = self._config
        mapped = () if isinstance(config.users, str) else config.users.values()
        named = members(config.admin_group).intersection(mapped) if mapped else ()
        return {"may_be": config.map_administrators and config.users != "guest", "named": sorted(named)[:NAMED_MAX]}


@dataclass(eq=False, repr=False)
class PeerLinksView:
    """Reads the peer links and the bus of one agent. ``bus``: None if no broker is configured."""

    _info: AgentInfo
    _links: PeerLinks
    _members: Members
    _bus: MqttBus | None
    _cluster: ClusterView

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

    def gauges(self) -> dict[str, float]:
        """Gauges of links and broker."""
        told: dict[str, float] = {metrics.PEER_LINKS: len(self._links.linked())}
        return told if self._bus is None else told | {metrics.MQTT_CONNECTED: int(self._bus.connected)}

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


REVOKED_NOTICE = "this node was revoked by its cluster: it works alone"


@dataclass(eq=False, repr=False)
class AgentView:
    """Answers to `info` and `settings`."""

    _info: AgentInfo
    _node: Node
    _launcher: LauncherLink
    _gpus: Gpus
    _cluster: ClusterView
    _links: PeerLinksView

    def info(self) -> dict[str, object]:
        """The answer to `info`."""
        info, config, profile = self._info, self._info.config, self._node.state.profile
        return {
            "node": config.node,
            "pid": os.getpid(),
            "launcher_pid": self._launcher.pid,
            "memory_limits": self._launcher.memory or None,
            "no_gpus_because": self._gpus.why_none or None,
            "version": __version__,
            "mode": config.mode,
            "socket": config.socket,
            "state": config.state,
            "listen": info.identity.address,
            "boot": info.identity.boot,
            "policy": self._node.state.policies.name,
            "slots": profile.slots,
            "cpus": profile.cpus,
            "mem_bytes": profile.mem_bytes,
            **self._cluster.info(),
            **self._links.info(),
            "peers": len(list(self._node.membership)),
            "remembered": len(self._node.membership.gossip.anti_entropy.known),
            "started_at": info.started_at,
            "notices": [*info.notices, *([REVOKED_NOTICE] if self._cluster.is_revoked() else [])],
        }

    def settings(self) -> dict[str, object]:
        """The answer to `settings`."""
        return {"settings": describe(self._info.config, self._info.origins)}


DAMAGED_TOLD_MAX = 100
FROZEN_TOLD_MAX = 100


@dataclass(eq=False, repr=False)
class StorageView:
    """The disk and the database of one agent."""

    _node: str
    _disk: DiskSpace
    _store: Store
    _retention: Retention

    def gauges(self) -> dict[str, float]:
        """Gauges of disk and database; without those of a disk that cannot be looked at."""
        told: dict[str, float] = {metrics.COMMITS_STALLED: int(self._store.is_stalled)}
        with contextlib.suppress(OSError):
            told[metrics.DISK_FREE] = self._disk.free_bytes()
            told[metrics.DISK_SIZE] = self._disk.total_bytes
        return told

    def checkup(self) -> dict[str, object]:
        """The part of `checkup` that is about storage."""
        disk, store, retention = self._disk, self._store, self._retention
        listing = store.list_tasks(ended_after=now().wall_s, limit=DAMAGED_TOLD_MAX)
        removed_early: dict[str, object] | None = None
        if retention.early:
            removed_early = {"tasks": retention.early, "at": retention.early_at, "why": retention.early_why}
        return {
            "disk": {
                "state": disk.state,
                "free_bytes": disk.free_bytes(),
                "total_bytes": disk.total_bytes,
                "low_bytes": disk.low_bytes,
                "reserve_bytes": disk.reserve.size_bytes,
                "reserve_bytes_max": disk.reserve.wanted_bytes,
                "stalled": store.is_stalled,
            },
            "damaged": views.damaged_objects(listing.damaged),
            "lost": store.lost.words(self._node) if store.lost is not None else None,
            "removed_early": removed_early,
        }


@dataclass(eq=False, repr=False)
class DiagnosticsView:
    """Answer to `checkup`: the health of the agent, its links and its storage. The gauges of these, for `stats`."""

    _node: Node
    _launcher: LauncherLink
    _storage: StorageView
    _cluster: ClusterView
    _links: PeerLinksView

    def gauges(self) -> dict[str, float]:
        """Gauges of launcher, storage and links."""
        expiry = self._cluster.info()["certificate_ends_at"]
        told = {metrics.LAUNCHER_UP: int(not self._launcher.is_silent)} | self._storage.gauges() | self._links.gauges()
        return told | {metrics.CERTIFICATE_EXPIRY: expiry} if isinstance(expiry, float) else told

    def checkup(self) -> dict[str, object]:
        """The answer to `checkup`."""
        node, launcher = self._node, self._launcher
        frozen = islice(node.runs.frozen, FROZEN_TOLD_MAX)
        return {
            "node": node.state.node,
            "python": platform.python_version(),
            "event_loop": type(asyncio.get_running_loop()).__module__.partition(".")[0],
            "launcher": {
                "pid": launcher.pid,
                "units": launcher.units,
                "memory": launcher.memory or None,
                "unenforced": list(launcher.unenforced),
                "silent": launcher.is_silent,
            },
            **self._storage.checkup(),
            **self._links.checkup(node.membership),
            "frozen": [node.executor.guests[key].task for key in frozen],
            "trouble": node.state.profile.trouble or None,
            **self._cluster.checkup(),
        }
