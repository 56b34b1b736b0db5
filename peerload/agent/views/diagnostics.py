"""What an agent alone knows of its own health, for `peerload doctor`; and the settings it runs with, for `peerload config`."""

from __future__ import annotations

import asyncio
import platform
import time
from itertools import islice
from typing import TYPE_CHECKING

from peerload.agent.views import task as answers
from peerload.agent.views.security_facts import security_object
from peerload.config.check import told
from peerload.security.broker_address import without_password

if TYPE_CHECKING:
    from peerload.agent.parts import Parts
    from peerload.core.membership.membership import PeerInfo

DAMAGED_TOLD_MAX = 100
FROZEN_TOLD_MAX = 100


def checkup_object(parts: Parts) -> dict[str, object]:
    """As `control.Checkup` lists it."""
    disk, launcher = parts.disk, parts.launcher
    node, facts = parts.node, parts.tls.facts
    linked = set(parts.links.linked())
    listing = parts.store.list_tasks(ended_after=parts.now().wall_s, limit=DAMAGED_TOLD_MAX)
    return {
        "node": parts.config.node,
        "python": platform.python_version(),
        "event_loop": type(asyncio.get_running_loop()).__module__.partition(".")[0],
        "launcher": {
            "pid": launcher.pid,
            "units": launcher.units,
            "memory": launcher.memory or None,
            "unenforced": list(launcher.unenforced),
            "silent": launcher.is_silent,
        },
        "disk": {
            "state": disk.state,
            "free_bytes": disk.free_bytes(),
            "total_bytes": disk.total_bytes,
            "low_bytes": disk.low_bytes,
            "reserve_bytes": disk.reserve.size_bytes,
            "reserve_bytes_max": disk.reserve.wanted_bytes,
            "stalled": parts.store.is_stalled,
        },
        "broker": _broker(parts),
        "peers": [_peer(parts, peer, linked) for peer in node.membership],
        "clashes": parts.links.introductions.clashes,
        "refused_by": list(parts.refused_by),
        "damaged": answers.damaged(listing.damaged),
        "lost": parts.store.lost.words(parts.config.node) if parts.store.lost is not None else None,
        "removed_early": _removed_early(parts),
        "frozen": [node.executor.guests[key].task for key in islice(node.runs.frozen, FROZEN_TOLD_MAX)],
        "trouble": node.state.profile.trouble or None,
        "certificate_until": facts.valid_until.timestamp() if facts is not None else None,
        "issuer": parts.cluster.is_issuer,
        "revoked": facts is not None and parts.trust.trust.refuses(facts),
        "security": security_object(parts),
    }


def _removed_early(parts: Parts) -> dict[str, object] | None:
    retention = parts.retention
    if not retention.early:
        return None
    return {"tasks": retention.early, "at": retention.early_at, "why": retention.early_why}


def settings_object(parts: Parts) -> dict[str, object]:
    """As `control.Settings` lists it."""
    return {"settings": told(parts.config, parts.origins)}


def _broker(parts: Parts) -> dict[str, object] | None:
    if parts.bus is None:
        return None
    urls = [without_password(url) for url in parts.config.mqtt]
    told = {"urls": urls, "url": parts.bus.url, "why": parts.bus.why_away or None}
    return told | {"heard": parts.bus.is_heard}


def _peer(parts: Parts, peer: PeerInfo, linked: set[str]) -> dict[str, object]:
    name = peer.identity.node
    fact, now_s = parts.peer_facts.of(name), time.monotonic()
    heard_s = fact.datagram_s if fact is not None else None
    way, way_why = parts.links.ways.way(name)
    return {
        "node": name,
        "state": peer.state.value,
        "address": peer.identity.address,
        "linked": name in linked,
        "met_s": now_s - fact.met_s if fact is not None else None,
        "datagram_age_s": now_s - heard_s if heard_s is not None else None,
        "revoked": not parts.trust.hears(name, peer.identity.boot),
        "clock_ahead_s": fact.clock_ahead_s if fact is not None else None,
        "way": way,
        "way_why": way_why or None,
        "dials_back": parts.links.ways.dials_back(name),
    }
