"""Views of the agent for clients: `info`, `settings`, `checkup`, `stats` and `samples`; its cluster, links and storage."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import struct
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from peerload import __version__
from peerload.agent.accounts import group_members
from peerload.agent.runtime import next_tick, now
from peerload.agent.views import task as views
from peerload.config.loader import describe
from peerload.core.membership.peers import PeerState
from peerload.model import metrics
from peerload.model.metrics import labelled
from peerload.model.resources import GPU, Health
from peerload.model.task import TaskState
from peerload.policy import registry
from peerload.security.address import is_absent
from peerload.security.broker import without_password
from peerload.security.private_files import write_private

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from peerload.agent.completion.retention import Retention
    from peerload.agent.control.authorization import Principal
    from peerload.agent.event_sources import ExitRecords
    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.mqtt import MqttBus
    from peerload.agent.peers.links import PeerLinks
    from peerload.agent.peers.membership import Members
    from peerload.agent.runtime import AgentInfo, Histogram, Inbox
    from peerload.agent.sensors.energy import EnergySensors
    from peerload.agent.sensors.gpus import Gpus
    from peerload.agent.store.disk_space import DiskSpace
    from peerload.agent.store.store import Store
    from peerload.core.membership.peers import PeerInfo
    from peerload.core.node import Node
    from peerload.model.resources import LoadReport, Profile
    from peerload.security.cluster_dir import ClusterDirectory
    from peerload.security.revocation import TrustStore
    from peerload.security.tls import Credentials


NAMED_MAX = 8
"""Maximum number of administrators that are named."""
log = logging.getLogger("peerload.agent")

REVOKED_NOTICE = "this node was revoked by its cluster: it works alone"
DRAINED_NOTICE = "this node is drained: it takes no tasks until  peerload undrain"
DAMAGED_LISTED_MAX = 100
FROZEN_LISTED_MAX = 100
GPUS_LISTED_MAX = 8
LABEL_VALUES_MAX = 8
"""Maximum number of label values of one counter; the rarest of more are added up as `other`."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
EVERY_S = 30.0
SAMPLES_MAX = 1440
"""Twelve hours."""
WRITTEN_EVERY = 20
"""Number of samples between two writes."""
NAME = "samples"
KEYS = ("nodes", "cpus", "cpus_busy", "cpus_foreign", "running", "waiting", "gpus", "gpus_busy", "gpu_mem_share")
"""Sums over the last reports of live nodes. gpus_busy: utilization in whole GPUs; gpu_mem_share: used share of all GPU memory."""
_HEAD = b"peerload samples 1\n"
_SAMPLE = struct.Struct(f"<d{len(KEYS)}f")


@dataclass(eq=False, repr=False)
class ClusterView:
    """Reads the cluster directory, the trust and the credentials of one agent."""

    _info: AgentInfo
    _cluster: ClusterDirectory
    _trust: TrustStore
    _tls: Credentials

    def is_revoked(self) -> bool:
        return self._tls.is_revoked

    def is_peer_revoked(self, peer: PeerInfo) -> bool:
        """True if this start of the peer is revoked."""
        return not self._trust.admits(peer.identity.node, peer.identity.boot)

    def was_revoked(self, node: str) -> bool:
        return self._trust.was_revoked(node)

    def info(self) -> dict[str, object]:
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
            "revoked": sorted({statement.node for statement in trust.revocations}),
        }

    def checkup(self) -> dict[str, object]:
        facts = self._tls.facts
        return {
            "certificate_until": facts.valid_until.timestamp() if facts is not None else None,
            "issuer": self._cluster.is_issuer,
            "revoked": self.is_revoked(),
            "security": self._security(),
        }

    def _security(self) -> dict[str, object]:
        """Facts for `peerload doctor --security` that only the agent knows, without keys and secrets."""
        facts, trust = self._tls.facts, self._trust
        return {
            "mode": self._info.config.mode,
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
        """Administrators among the accounts to which users of other nodes are mapped. ``may_be``: the settings allow
        it; ``named``: some of those in the table of `users`."""
        config = self._info.config
        mapped = () if isinstance(config.users, str) else config.users.values()
        named = group_members(config.admin_group).intersection(mapped) if mapped else ()
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
        return {
            "mqtt": self._bus.url if self._bus is not None and self._bus.connected else None,
            "mqtt_configured": bool(self._info.config.mqtt),
            "sought": self._links.unanswered,
        }

    def checkup(self, peers: Iterable[PeerInfo]) -> dict[str, object]:
        linked = set(self._links.linked())
        return {
            "broker": self._broker(),
            "peers": [self._peer(peer, linked) for peer in peers],
            "clashes": self._links.name_clashes,
            "refused_by": list(self._info.refused_by),
            "listen_absent": is_absent(self._members.listens_at),
        }

    def gauges(self) -> dict[str, float]:
        gauges: dict[str, float] = {metrics.PEER_LINKS: len(self._links.linked())}
        return gauges if self._bus is None else gauges | {metrics.MQTT_CONNECTED: int(self._bus.connected)}

    def _broker(self) -> dict[str, object] | None:
        if self._bus is None:
            return None
        urls = [without_password(url) for url in self._info.config.mqtt]
        broker = {"urls": urls, "url": self._bus.url, "why": self._bus.unavailable_because or None}
        return broker | {"heard": self._bus.is_echoed}

    def _peer(self, peer: PeerInfo, linked: set[str]) -> dict[str, object]:
        name = peer.identity.node
        fact, now_s = self._members.facts_of(name), time.monotonic()
        heard_s = fact.datagram_s if fact is not None else None
        route, route_reason = self._links.reachability.route(name)
        return {
            "node": name,
            "state": peer.state.value,
            "address": peer.identity.address,
            "linked": name in linked,
            "met_s": now_s - fact.met_s if fact is not None else None,
            "datagram_age_s": now_s - heard_s if heard_s is not None else None,
            "revoked": self._cluster.is_peer_revoked(peer),
            "issuer": peer.profile.issuer,
            "clock_ahead_s": fact.clock_ahead_s() if fact is not None else None,
            "way": route,
            "way_why": route_reason or None,
        }


@dataclass(eq=False, repr=False)
class AgentView:
    """Answers to `info` and `settings`."""

    _info: AgentInfo
    _node: Node
    _launcher: LauncherLink
    _gpus: Gpus
    _cluster: ClusterView
    _links: PeerLinksView
    _policies: dict[str, list[str]] = field(default_factory=dict, init=False)

    def policy(self) -> dict[str, object]:
        if not self._policies:
            self._policies = registry.policies()
        chosen = self._node.state.policies
        return {
            "policies": self._policies,
            "presets": registry.presets(),
            "in_force": {"preset": chosen.name, "description": chosen.description, **chosen.names},
        }

    def info(self) -> dict[str, object]:
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
            "peers": sum(peer.state is not PeerState.LEFT for peer in self._node.membership),
            "remembered": len(self._node.membership.gossip.anti_entropy.known),
            "started_at": info.started_at,
            "notices": [
                *info.notices,
                *([REVOKED_NOTICE] if self._cluster.is_revoked() else []),
                *([DRAINED_NOTICE] if profile.drained else []),
            ],
        }

    def settings(self) -> dict[str, object]:
        return {"settings": describe(self._info.config, self._info.origins)}


@dataclass(eq=False, repr=False)
class StorageView:
    """The disk and the database of one agent. lost: losses that this start has found, besides `Store.lost`."""

    _node: str
    _disk: DiskSpace
    _store: Store
    _retention: Retention
    _lost: Sequence[str]

    def gauges(self) -> dict[str, float]:
        """Gauges of disk and database; those of a disk that cannot be read are missing."""
        gauges: dict[str, float] = {metrics.COMMITS_STALLED: int(self._store.is_stalled)}
        with contextlib.suppress(OSError):
            gauges[metrics.DISK_FREE] = self._disk.free_bytes()
            gauges[metrics.DISK_SIZE] = self._disk.total_bytes
        return gauges

    def checkup(self) -> dict[str, object]:
        disk, store, retention = self._disk, self._store, self._retention
        listing = store.list_tasks(ended_after=now().wall_s, limit=DAMAGED_LISTED_MAX)
        removed_early: dict[str, object] | None = None
        lost = [*self._lost, *([store.lost.message(self._node)] if store.lost is not None else [])]
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
            "lost": "; ".join(lost) or None,
            "removed_early": removed_early,
        }


@dataclass(eq=False, repr=False)
class DiagnosticsView:
    """Answer to `checkup`: the health of the agent, its links and its storage; and their gauges, for `stats`."""

    _node: Node
    _launcher: LauncherLink
    _exits: ExitRecords
    _storage: StorageView
    _cluster: ClusterView
    _links: PeerLinksView

    def gauges(self) -> dict[str, float]:
        expiry = self._cluster.info()["certificate_ends_at"]
        gauges = (
            {metrics.LAUNCHER_UP: int(not self._launcher.is_silent)} | self._storage.gauges() | self._links.gauges()
        )
        return gauges | {metrics.CERTIFICATE_EXPIRY: expiry} if isinstance(expiry, float) else gauges

    def checkup(self, caller: Principal) -> dict[str, object]:
        """The answer to `checkup`; only callers that may see all tasks get damaged tasks."""
        node, launcher, exits = self._node, self._launcher, self._exits
        frozen = islice(node.runs.frozen, FROZEN_LISTED_MAX)
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
            **({} if caller.sees_all else {"damaged": []}),
            **self._links.checkup(node.membership),
            "outputs_waiting": _waiting_for_room(exits, caller),
            "ends_waiting": {"attempts": exits.waiting, "why": exits.waits_because} if exits.waiting else None,
            "frozen": [node.executor.remote_tasks[key].task for key in frozen],
            "trouble": node.state.profile.trouble or None,
            **self._cluster.checkup(),
        }


def _waiting_for_room(exits: ExitRecords, caller: Principal) -> dict[str, object] | None:
    """Ended attempts whose output files wait. Only callers that may see all tasks get the reason, since it may name a file."""
    reasons = list(exits.without_room.values())
    if not reasons:
        return None
    return {"attempts": len(reasons), "why": reasons[0] if caller.sees_all else ""}


# -- metrics -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class MetricsView:
    """Answer to `stats`: counters, gauges and histograms. It reads nothing that grows with the number of tasks, so that a scrape
    always costs the same."""

    _info: AgentInfo
    _node: Node
    _inbox: Inbox
    _diagnostics: DiagnosticsView
    _histograms: Mapping[str, Histogram]
    _energy: EnergySensors

    def stats(self) -> dict[str, object]:
        """The answer to `stats`: all statistics; a missing counter is 0."""
        gauges = self._diagnostics.gauges()
        counters = _merged(self._node.state.counts, self._info.counters)
        counters[metrics.INBOX_DROPPED] = self._inbox.dropped
        counters[metrics.COMMITS_STALLED] = int(gauges.pop(metrics.COMMITS_STALLED))
        return {
            "counters": counters | self._energy.counters(),
            "gauges": gauges
            | self._energy.gauges()
            | self._of_tasks()
            | self._of_nodes()
            | self._of_agent()
            | self._of_gpus(),
            "histograms": {name: histogram.to_dict() for name, histogram in self._histograms.items()},
        }

    def _of_tasks(self) -> dict[str, float]:
        node = self._node
        states, ledger = node.home.states, node.ledger
        unfinished = [state for state in TaskState if not state.is_final]
        return {
            **{labelled(metrics.TASKS, state=state.value): states[state] for state in unfinished},
            metrics.QUEUE_LENGTH: len(node.queue),
            metrics.QUEUE_OLDEST_WAIT: node.queue.oldest_wait_s(),
            labelled(metrics.EXECUTIONS, home="this"): ledger.running_local,
            labelled(metrics.EXECUTIONS, home="other"): len(ledger.running) - ledger.running_local,
            metrics.GUESTS: len(node.executor.remote_tasks),
            metrics.FROZEN_TASKS: sum(1 for _ in node.runs.frozen),
        }

    def _of_nodes(self) -> dict[str, float]:
        peers = dict.fromkeys(PeerState, 0)
        for peer in self._node.membership:
            peers[peer.state] += 1
        return {labelled(metrics.PEERS, state=state.value): count for state, count in peers.items()}

    def _of_agent(self) -> dict[str, float]:
        node = self._node
        profile, report = node.state.profile, node.sharing.shown()
        identity = {"node": node.state.node, "version": __version__, "policy": node.state.policies.name}
        return {
            labelled(metrics.INFO, **identity): 1,
            metrics.STARTED_AT: self._info.started_at,
            metrics.AGENT_CPU: time.process_time(),
            metrics.AGENT_MEMORY: int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES,
            metrics.INBOX_EVENTS: len(self._inbox),
            metrics.SLOTS: profile.slots,
            metrics.CPUS: profile.cpus,
            metrics.CPUS_BUSY: report.cpus_busy,
            metrics.MEMORY_SIZE: profile.mem_bytes,
            metrics.MEMORY_USED: report.mem_used_bytes,
            metrics.DRAINED: int(profile.drained),
        }

    def _of_gpus(self) -> dict[str, float]:
        gauges: dict[str, float] = {}
        for state in self._node.ledger.devices.of_kind(GPU)[:GPUS_LISTED_MAX]:
            if not state.device.is_read:
                continue
            gpu, reading = str(state.device.index), state.reading
            others = reading.mem_foreign_bytes
            gauges |= {
                labelled(metrics.GPU_UTILIZATION, gpu=gpu): reading.busy,
                labelled(metrics.GPU_MEMORY, gpu=gpu): state.device.mem_bytes,
                labelled(metrics.GPU_MEMORY_USED, gpu=gpu, by="others"): others,
                labelled(metrics.GPU_MEMORY_USED, gpu=gpu, by="tasks"): max(reading.mem_used_bytes - others, 0),
                labelled(metrics.GPU_TEMPERATURE, gpu=gpu): reading.temperature_c,
                labelled(metrics.GPU_TASKS, gpu=gpu): len(state.grants),
                labelled(metrics.GPU_HEALTHY, gpu=gpu): int(reading.health is Health.OK),
            }
            if reading.power_w is not None:
                gauges[labelled(metrics.GPU_POWER, gpu=gpu)] = reading.power_w
        return gauges


def _merged(*sources: Mapping[str, int]) -> dict[str, int]:
    """The sums of counters, each with at most LABEL_VALUES_MAX label values and `other`."""
    values: dict[str, dict[str, int]] = {}
    for source in sources:
        for name, count in source.items():
            plain, _, labels = name.partition("{")
            of_name = values.setdefault(plain, {})
            of_name[labels] = of_name.get(labels, 0) + count
    merged: dict[str, int] = {}
    for plain, of_name in values.items():
        most = sorted(of_name.items(), key=lambda item: (-item[1], item[0]))
        for labels, count in most[:LABEL_VALUES_MAX]:
            merged[f"{plain}{{{labels}" if labels else plain] = count
        if others := most[LABEL_VALUES_MAX:]:
            key = others[0][0].partition("=")[0]
            merged[labelled(plain, **{key: "other"})] = sum(count for _, count in others)
    return merged


# -- samples -----------------------------------------------------------------------------------------------------------


class Samples:
    """Samples of the last hours, for charts: the state of the cluster as this node knows it, twice a minute, in a ring on disk.

    The agent takes them, so that they exist even when no client was connected. They are kept in memory, and written without a sync
    at the stop and every ten minutes. A crash loses the samples since then; an unreadable file is replaced.
    """

    def __init__(self, node: Node, state: Path) -> None:
        self._node = node
        self._path = state / NAME
        self._ring: list[tuple[float, ...]] = []
        self._unwritten = 0

    async def run(self) -> None:
        self._ring = await asyncio.to_thread(self._read)
        while True:
            await next_tick(EVERY_S)
            self.take(now().wall_s)
            if self._unwritten >= WRITTEN_EVERY:
                await asyncio.to_thread(self.write)

    def take(self, at: float) -> None:
        """Add a sample. Samples that are not older were taken while the wall clock was ahead, and are dropped."""
        while self._ring and self._ring[-1][0] >= at:
            self._ring.pop()
        self._ring.append((at, *self._sums()))
        del self._ring[:-SAMPLES_MAX]
        self._unwritten += 1

    def _sums(self) -> list[float]:
        node = self._node
        known: list[tuple[Profile, LoadReport | None]] = [(node.state.profile, node.sharing.shown())]
        for peer in node.membership:
            if peer.state is PeerState.ALIVE:
                last = node.membership.last_report(peer.identity.node)
                known.append((peer.profile, None if last is None else last.report))
        sums = dict.fromkeys(KEYS, 0.0)
        memory = used = 0
        for profile, report in known:
            gpus = [device for device in profile.devices if device.kind == GPU]
            sums["nodes"] += 1
            sums["cpus"] += profile.cpus
            sums["gpus"] += len(gpus)
            if report is not None:
                sums["cpus_busy"] += report.cpus_busy
                sums["cpus_foreign"] += report.cpus_foreign
                sums["running"] += report.running
                sums["waiting"] += report.waiting
                marks = {device.mark for device in gpus}
                loads = [load for load in report.devices if load.mark in marks]
                sums["gpus_busy"] += sum(load.busy_percent for load in loads) / 100
                memory += sum(device.mem_bytes for device in gpus) >> 20
                used += sum(load.used_mib for load in loads)
        sums["gpu_mem_share"] = used / memory if memory else 0.0
        return list(sums.values())

    def to_dict(self, since: float) -> dict[str, object]:
        """Answer to `samples`: the samples after the time ``since``."""
        found = [[round(value, 3) for value in sample] for sample in self._ring if sample[0] > since]
        return {"every_s": EVERY_S, "keys": ["at", *KEYS], "samples": found}

    def _read(self) -> list[tuple[float, ...]]:
        try:
            with self._path.open("rb") as file:
                raw = file.read(len(_HEAD) + SAMPLES_MAX * _SAMPLE.size)
        except FileNotFoundError:
            return []
        except OSError as error:
            log.warning("cannot read samples: path=%s error=%s", self._path, error)
            return []
        body = raw.removeprefix(_HEAD)
        if len(body) == len(raw) or len(body) % _SAMPLE.size:
            log.warning("samples file is damaged, starting a new one: path=%s", self._path)
            return []
        return [sample for sample in _SAMPLE.iter_unpack(body) if 0.0 < sample[0] < now().wall_s]

    def write(self) -> None:
        """Write all samples. An error, such as a full disk, is only logged."""
        if not self._unwritten:
            return
        self._unwritten = 0
        try:
            body = b"".join(_SAMPLE.pack(*sample) for sample in self._ring)
            write_private(self._path, _HEAD + body, is_durable=False)
        except OSError as error:
            log.warning("cannot write samples: path=%s error=%s", self._path, error)
