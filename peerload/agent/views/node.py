"""Nodes as JSON objects for clients (keys: docs/json.md), and for other systems at the broker; tasks are in `views/task.py`."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import msgspec

from peerload import __version__
from peerload.agent.control.authorization import display_user
from peerload.agent.runtime import next_tick
from peerload.agent.sensors.gpus import NOT_INSTALLED
from peerload.agent.views.task import task_here, text
from peerload.core.membership.peers import PeerState
from peerload.model.bounded import BoundedDict
from peerload.model.errors import PeerloadError
from peerload.model.resources import GPU, MIB, DeviceMode, Health, Quality
from peerload.model.task import order_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peerload.agent.mqtt import MqttBus
    from peerload.agent.sensors.gpus import Gpus
    from peerload.agent.store.store import Store
    from peerload.agent.views.agent import ClusterView
    from peerload.core.membership.peers import PeerInfo
    from peerload.core.node import Node
    from peerload.core.resources.devices import DeviceState
    from peerload.model.actions import TaskChanged
    from peerload.model.resources import Device, LoadReport, PowerCurve, Profile
    from peerload.model.task import TaskRecord


DECLINES_LISTED_MAX = 8
"""Maximum number of missing directories that are listed for one node."""
_MODES = tuple(mode.name.lower() for mode in DeviceMode)
_HEALTHS = tuple(health.name.lower() for health in Health)
_GPU_UNKNOWN = dict.fromkeys(
    (
        "util",
        "mem_used_bytes",
        "mem_ours_bytes",
        "mem_foreign_bytes",
        "mem_free_bytes",
        "tasks",
        "mode",
        "health",
        "why",
        "temperature_c",
    )
)
EVERY_S = 1.0
NODE_EVERY = 5
"""Interval, in rounds, at which the node itself is published if it has changed."""
TASKS_MAX = 500
"""Maximum number of tasks with a topic; for one more, the topic of the task that was published longest ago is removed."""
AT_ONCE_MAX = 200
BYTES_MAX = 4096
NOT_PUBLISHED = ("argv", "age_s", "self", "revoked", "declines", "address", "machine")
"""Keys that are not published: command lines may contain secrets; the others are useful to peers only."""


def nodes(node: Node) -> list[dict[str, object]]:
    """Known nodes, this one first, the others by name."""
    peers = sorted(node.membership, key=lambda peer: peer.identity.node)
    return [_own_object(node), *(_peer_object(node, peer) for peer in peers)]


def _own_object(node: Node) -> dict[str, object]:
    own = _node_object(node.state.profile, node.sharing.shown(), 0.0)
    own["gpus"] = [
        _own_gpu(state, node.ledger.now_s)
        for state in node.ledger.devices.of_kind(GPU)
        if state.device.is_read or state.device.mem_bytes
    ]
    own |= {
        "state": PeerState.ALIVE.value,
        "incarnation": node.state.identity.incarnation,
        "address": node.state.identity.address,
        "machine": node.state.identity.machine_boot,
        "self": True,
        "revoked": False,
        "declines": [],
    }
    return own


def _peer_object(node: Node, peer: PeerInfo) -> dict[str, object]:
    last = node.membership.last_report(peer.identity.node)
    age_s = max(node.state.now.boot_s - (last.at_s if last is not None else peer.heard_s), 0.0)
    is_there = peer.state in (PeerState.ALIVE, PeerState.SUSPECT)  # the old load report of a dead node is meaningless
    return _node_object(peer.profile, last.report if last is not None and is_there else None, age_s) | {
        "state": peer.state.value,
        "incarnation": peer.identity.incarnation,
        "address": peer.identity.address,
        "machine": peer.identity.machine_boot,
        "self": False,
        "revoked": False,
        "declines": declines(node, peer),
    }


def declines(node: Node, peer: PeerInfo) -> list[str]:
    """Reasons why a peer declines some tasks of this home. In system mode they do not name the directories."""
    missing = node.membership.missing_directories(peer.identity.node)
    reasons = [f"no directory {text(directory)}" if not user else "no directory" for directory, user in missing]
    return list(dict.fromkeys(reasons))[:DECLINES_LISTED_MAX]


class NodesView:
    """The known nodes, as `nodes` and `overview` list them."""

    def __init__(self, node: Node, gpus: Gpus, cluster: ClusterView) -> None:
        self._node = node
        self._gpus = gpus
        self._cluster = cluster

    def objects(self) -> list[dict[str, object]]:
        """Objects of the known nodes, this one first, the others by name."""
        return self.objects_of(sorted(self._node.membership, key=lambda peer: peer.identity.node))

    def unmet(self) -> list[str]:
        """Names of members known from earlier starts of this agent that it has not met since."""
        return sorted(self._node.membership.gossip.anti_entropy.known)

    def objects_of(self, peers: Iterable[PeerInfo]) -> list[dict[str, object]]:
        """This node, with the reason why it has no GPUs although there is a driver, and these peers."""
        own = _own_object(self._node)
        why = self._gpus.why_none
        own["no_gpus_because"] = why if why and why != NOT_INSTALLED else None
        own["revoked"] = self._cluster.is_revoked()
        others = (_peer_object(self._node, peer) | {"revoked": self._cluster.is_peer_revoked(peer)} for peer in peers)
        return [own, *others]


def _node_object(profile: Profile, report: LoadReport | None, age_s: float) -> dict[str, object]:
    fields: dict[str, object] = dict.fromkeys(
        (
            "load",
            "region",
            "cpus_busy",
            "cpus_foreign",
            "slots_foreign",
            "mem_used_bytes",
            "cpu_pressure",
            "mem_pressure",
            "tasks_running",
            "tasks_queued",
            "watts",
            "watts_quality",
        )
    )
    if report is not None:
        fields = {
            "load": report.load,
            "region": report.region.name.lower(),
            "cpus_busy": report.cpus_busy,
            "cpus_foreign": report.cpus_foreign,
            "slots_foreign": report.slots_foreign,
            "mem_used_bytes": report.mem_used_bytes,
            "cpu_pressure": report.cpu_pressure,
            "mem_pressure": report.mem_pressure,
            "tasks_running": report.running,
            "tasks_queued": report.waiting,
            **_watts(profile.power, report),
        }
    return fields | {
        "node": profile.node,
        "slots": profile.slots,
        "cpus": profile.cpus,
        "mem_bytes": profile.mem_bytes,
        "gpus": _gpus_reported(profile, report),
        "devices": _counted(profile),
        "age_s": age_s,
        "drained": profile.drained,
        "drain_reason": profile.drain_reason,
        "trouble": profile.trouble or None,
        "no_gpus_because": None,
        "labels": list(profile.labels),
        "speed": profile.speed,
    }


def _watts(curve: PowerCurve | None, report: LoadReport) -> dict[str, object]:
    """Current power of a node: by its sensor, or else from its power curve and load."""
    if report.watts is not None and not report.is_asleep:
        return {"watts": report.watts, "watts_quality": Quality.MEASURED.value}
    if curve is None:
        return {"watts": None, "watts_quality": None}
    watts = curve.off_w if report.is_asleep else curve.watts_at(report.cpus_busy)
    return {"watts": watts, "watts_quality": Quality.ESTIMATED.value}


def _gpus_reported(profile: Profile, report: LoadReport | None) -> list[dict[str, object]]:
    """The GPUs of a peer, from its profile and load report. Has to be fast: `top` needs thousands of these each second."""
    loads = {} if report is None else {load.mark: load for load in report.devices}
    found: list[dict[str, object]] = []
    for device in profile.devices:
        if device.kind != GPU:
            continue
        facts = _gpu_facts(device)
        load = loads.get(device.mark) if loads else None
        if load is not None:
            used, foreign = load.used_mib * MIB, load.foreign_mib * MIB
            facts["util"] = load.busy_percent / 100
            facts["mem_used_bytes"] = used
            facts["mem_ours_bytes"] = used - foreign if used > foreign else 0
            facts["mem_foreign_bytes"] = foreign
            facts["mem_free_bytes"] = load.free_mib * MIB
            facts["tasks"] = load.tasks
            facts["temperature_c"] = load.temperature_c or None
            facts["mode"] = _MODES[load.mode]
            facts["health"] = _HEALTHS[load.health]
        found.append(facts)
    return found


def _gpu_facts(device: Device) -> dict[str, object]:
    return {
        "id": device.name,
        "index": device.index,
        "model": device.model,
        "mem_bytes": device.mem_bytes or None,
        **_GPU_UNKNOWN,
    }


def _own_gpu(state: DeviceState, now_s: float) -> dict[str, object]:
    reading = state.reading
    ours = sum(grant.now_bytes for grant in state.grants.values())
    return _gpu_facts(state.device) | {
        "util": reading.busy,
        "mem_used_bytes": reading.mem_used_bytes,
        "mem_ours_bytes": ours,
        "mem_foreign_bytes": reading.mem_foreign_bytes + state.unknown_bytes,
        "mem_free_bytes": state.free_bytes(now_s),
        "tasks": len(state.grants),
        "mode": state.mode.name.lower(),
        "health": reading.health.name.lower(),
        "why": reading.why or None,
        "temperature_c": reading.temperature_c or None,
    }


def _counted(profile: Profile) -> dict[str, int]:
    counts: dict[str, int] = {}
    for device in profile.devices:
        if device.kind != GPU:
            counts[device.kind] = counts.get(device.kind, 0) + 1
    return counts


# -- at the broker -----------------------------------------------------------------------------------------------------


class StatePublisher:
    """Publishes the state of this node and its tasks as JSON at the broker, for other systems (`mqtt_publish_state`): retained
    topics, of the tasks that changed last, at most AT_ONCE_MAX a second. peerload itself reads none of them. Call it only from the
    loop's thread."""

    def __init__(self, node: Node, store: Store, bus: MqttBus, user: str) -> None:
        self._node = node
        self._store = store
        self._bus = bus
        self._user = user
        self._published: dict[str, TaskRecord] = {}
        self._changed: BoundedDict[str, TaskRecord] = BoundedDict(TASKS_MAX)
        self._node_published: dict[str, object] = {}
        self._connects = 0

    def changed(self, action: TaskChanged) -> None:
        self._changed[action.record.task] = action.record

    async def run(self) -> None:
        for look in itertools.count():
            await next_tick(EVERY_S)
            if self._bus.connected:
                self._publish(is_of_node=look % NODE_EVERY == 0)

    def _publish(self, *, is_of_node: bool) -> None:
        if self._bus.connects != self._connects:  # the broker may have forgotten everything
            is_first = self._connects == 0
            self._connects, self._node_published, is_of_node = self._bus.connects, {}, True
            waiting = (
                [task.record for task in self._node.home.some(TASKS_MAX)] if is_first else self._published.values()
            )
            for record in [*waiting, *self._changed.values()]:
                self._changed[record.task] = record
        for name in list(itertools.islice(self._changed, AT_ONCE_MAX)):
            if len(self._published) >= TASKS_MAX and name not in self._published:
                oldest = next(iter(self._published))
                if not self._bus.publish_json(_topic(oldest), b""):
                    return
                del self._published[oldest]
            if not self._bus.publish_json(_topic(name), self._task(self._changed[name])):
                return
            self._published.pop(name, None)
            self._published[name] = self._changed.pop(name)
        if is_of_node:
            fields = {key: value for key, value in nodes(self._node)[0].items() if key not in NOT_PUBLISHED}
            if fields != self._node_published and self._bus.publish_json(
                "node", _encoded(fields | {"version": __version__})
            ):
                self._node_published = fields

    def _task(self, record: TaskRecord) -> bytes:
        """The payload of a task; empty if it was removed meanwhile."""
        task = self._node.home.tasks.get(record.uid)
        try:
            spec = task.spec if task is not None else self._store.spec(order_of(record.task)[0])
        except PeerloadError:
            return b""
        fields = task_here(self._node, record, spec, display_user(spec, self._user))
        return _encoded({key: value for key, value in fields.items() if key not in NOT_PUBLISHED})


def _topic(task: str) -> str:
    return "task/" + task.partition("/")[2]


def _encoded(fields: dict[str, object]) -> bytes:
    raw = msgspec.json.encode({"v": 1, "at": time.time()} | fields)
    if len(raw) > BYTES_MAX:  # too large for a topic: fields without a bound are left out
        fields = {
            key: value for key, value in fields.items() if key not in ("gpus", "devices", "labels", "device_names")
        }
        raw = msgspec.json.encode({"v": 1, "at": time.time()} | fields)
    return raw
