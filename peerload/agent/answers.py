"""Tasks and nodes as the objects a client is shown (keys: docs/cli.md)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from peerload import __version__
from peerload.agent.sensors.gpus import NOT_INSTALLED
from peerload.core.membership import PeerState
from peerload.core.work import HomePhase
from peerload.model.devices import GPU, MIB
from peerload.model.task import TaskState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peerload.agent.parts import Parts
    from peerload.agent.store_read import Damage, Happened
    from peerload.core.devices import DeviceState
    from peerload.core.membership import Peer
    from peerload.core.node import Node
    from peerload.core.work import HomeTask
    from peerload.model.devices import Device
    from peerload.model.load import LoadReport
    from peerload.model.resources import Profile, ResourceRequest
    from peerload.model.task import TaskRecord, TaskSpec


def text(raw: bytes) -> str:
    """Bytes as text for people and JSON; what is not UTF-8 is shown escaped."""
    return raw.decode("utf-8", "backslashreplace")


def task_object(
    record: TaskRecord, spec: TaskSpec, user: str, *, running_at: float = 0.0, devices: Sequence[str] = ()
) -> dict[str, object]:
    """One task, as `ls` lists it. ``running_at``: seen running since (Unix s), 0 = not seen; devices: what it has, or
    had, in words."""
    exit_ = record.exit
    state = "running" if record.state is TaskState.LEASED and running_at else record.state.value
    started_at = record.started_at or running_at
    return {
        "id": record.task,
        "name": spec.name or text(spec.argv[0]).rpartition("/")[2],
        "user": user,
        "state": state,
        "node": record.node or None,
        "home": record.task.partition("/")[0],
        "argv": [text(word) for word in spec.argv],
        "cpus": spec.request.cpus,
        "mem_bytes": spec.request.mem_bytes,
        "gpus": spec.request.gpus * spec.request.gpu_fraction if spec.request.gpu_fraction < 1 else spec.request.gpus,
        "attempt": record.attempt,
        "migrations": record.migrations,
        "submitted_at": record.submitted_at,
        "started_at": started_at or None,
        "ended_at": record.ended_at or None,
        "exit_code": exit_.exit_code if exit_ is not None else None,
        "signal": exit_.signal if exit_ is not None and exit_.signal else None,
        "reason": ": ".join([f"started on {record.node}", *([", ".join(devices)] if devices else [])])
        if state == "running"
        else record.reason,
        "device_names": list(devices),
    }


def task_here(node: Node, record: TaskRecord, spec: TaskSpec, user: str) -> dict[str, object]:
    """The same with what this home knows of it besides its record: whether it runs, and on what."""
    running_at = running_since(node.home.tasks.get(record.uid), record)
    names = device_names(node, record.node, devices_of(node, record))
    return task_object(record, spec, user, running_at=running_at, devices=names)


def running_since(task: HomeTask | None, record: TaskRecord) -> float:
    """Since when the current attempt is seen running (Unix s), 0 = it is not. ``task``: of this home, if unfinished."""
    return task.running_at if task is not None and task.record.attempt == record.attempt else 0.0


def why_waiting(task: HomeTask | None, record: TaskRecord) -> str:
    """Why a queued task waits, in a few words; `why` tells more."""
    if task is None:
        return record.reason
    if task.stranded_because:
        return f"waits for another node: {task.stranded_because}"
    if task.phase is HomePhase.OFFERED:
        return f"offered to {task.offered_to}"
    return "waits for room"


def ended_object(record: TaskRecord) -> dict[str, object]:
    """How a task ended, as `wait` and `output` say it."""
    exit_ = record.exit
    return {
        "id": record.task,
        "state": record.state.value,
        "exit_code": exit_.exit_code if exit_ is not None else None,
        "signal": exit_.signal if exit_ is not None and exit_.signal else None,
        "node": record.node or None,
        "reason": record.reason,
        "out_of": (exit_.out_of or None) if exit_ is not None else None,
    }


def devices_of(node: Node, record: TaskRecord) -> tuple[str, ...]:
    """The ids of the devices that a task has, or had where it ended; those at another node as that has told."""
    task = node.home.tasks.get(record.uid)
    if record.devices or task is None or task.record.attempt != record.attempt:
        return record.devices
    return task.devices if record.node else ()


def device_names(node: Node, where: str, ids: Sequence[str]) -> list[str]:
    """The devices of a node in words: ``GPU 1 (RTX 4090)``; by their ids where that node is not known (any more)."""
    if not ids:
        return []
    peer = node.membership.get(where)
    known = {device.id: device for device in peer.profile.devices} if peer is not None else {}
    if where == node.state.node:
        known = {state.id: state.device for state in node.ledger.devices.states.values()}
    return [_device_name(known[name]) if name in known else name for name in ids]


def _device_name(device: Device) -> str:
    if device.kind != GPU:
        return f"{device.kind} {device.name}"
    return f"GPU {device.index}" + (f" ({device.model})" if device.model else "")


def detail(spec: TaskSpec, record: TaskRecord, devices: Sequence[str] = ()) -> dict[str, object]:
    """What `show` adds. devices: the ids of what it has."""
    placement = spec.placement
    exit_ = record.exit
    return {
        "directory": text(spec.directory),
        "priority": spec.priority,
        "time_limit_s": spec.time_limit_s,
        "guarantee": spec.guarantee.value,
        "lease": "auto" if spec.lease_auto else spec.lease_s or None,
        "parked": record.parked_ts > 0,
        "lost": record.losses,
        "lost_on": list(record.lost_on),
        "retry_of": record.retry_of or None,
        **asked_devices(spec.request),
        "devices": list(devices),
        "placement": {
            "node": placement.node,
            "exclude": list(placement.exclude),
            "labels": list(placement.labels),
            "local": placement.local,
            "migrations_max": placement.migrations_max,
        },
        "memory_retries": record.memory_retries,
        "usage": _usage(record),
        "out_of": (exit_.out_of or None) if exit_ is not None else None,
        "stdout_bytes": exit_.stdout_bytes if exit_ is not None else None,
        "stderr_bytes": exit_.stderr_bytes if exit_ is not None else None,
    }


def asked_devices(request: ResourceRequest) -> dict[str, object]:
    """What a task asks of GPUs and other devices, beyond how many GPUs."""
    return {
        "gpu_mem_bytes": request.gpu_mem_bytes,
        "gpu_prefer": list(request.gpu_prefer),
        "gpu_wait": request.gpu_wait.value,
        "gpu_wait_s_max": request.gpu_wait_s_max,
        "gpu_share": request.gpu_share.value,
        "gpu_oom_retries": request.gpu_oom_retries,
        "other_devices": dict(request.devices),
    }


def used(record: TaskRecord) -> dict[str, object]:
    """What `history` adds about an ended task. duration_s: how long its process ran, None if it never did; waited_s:
    from its submission to that, or to its end."""
    ran = record.ended_at > record.started_at > 0
    until = record.started_at if ran else record.ended_at
    return {
        "duration_s": record.ended_at - record.started_at if ran else None,
        "waited_s": max(until - record.submitted_at, 0.0),
        "usage": _usage(record),
    }


def step(event: Happened) -> dict[str, object]:
    """One line of a task's history."""
    return {
        "at": event.at,
        "state": event.state,
        "reason": event.reason,
        "attempt": event.attempt,
        "node": event.node or None,
    }


def event_object(event: Happened) -> dict[str, object]:
    """One event, as `events` lists it."""
    return {
        "number": event.number,
        "at": event.at,
        "what": event.what,
        "state": event.state,
        "task": event.task or None,
        "attempt": event.attempt or None,
        "node": event.node or None,
        "reason": event.reason,
    }


def damaged(rows: Sequence[Damage]) -> list[dict[str, object]]:
    """Tasks whose rows cannot be read."""
    return [{"id": row.task, "why": row.why} for row in rows]


def _usage(record: TaskRecord) -> dict[str, object]:
    exit_ = record.exit
    return {
        "user_s": exit_.usage.user_s if exit_ is not None else 0.0,
        "system_s": exit_.usage.system_s if exit_ is not None else 0.0,
        "memory_bytes_max": exit_.usage.memory_bytes_max if exit_ is not None else 0,
        "gpu_memory_bytes_max": exit_.usage.gpu_memory_bytes_max if exit_ is not None else 0,
        "gpu_model": exit_.usage.gpu_model or None if exit_ is not None else None,
    }


def nodes(node: Node) -> list[dict[str, object]]:
    """Every node known, this one first, the others by name."""
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
        "self": True,
    }
    peers = sorted(node.membership, key=lambda peer: peer.identity.node)
    return [own, *(_peer_object(node, peer) for peer in peers)]


def _peer_object(node: Node, peer: Peer) -> dict[str, object]:
    heard = node.membership.last_report(peer.identity.node)
    age_s = max(node.state.now.boot_s - (heard.at_s if heard is not None else peer.heard_s), 0.0)
    is_there = peer.state in (PeerState.ALIVE, PeerState.SUSPECT)  # what was, before, says nothing of what is
    return _node_object(peer.profile, heard.report if heard is not None and is_there else None, age_s) | {
        "state": peer.state.value,
        "incarnation": peer.identity.incarnation,
        "address": peer.identity.address,
        "self": False,
    }


def nodes_object(parts: Parts) -> list[dict[str, object]]:
    """The same with why this node has no GPUs although there is a driver."""
    found = nodes(parts.node)
    why = parts.gpus.why_none
    found[0]["no_gpus_because"] = why if why and why != NOT_INSTALLED else None
    return found


def _node_object(profile: Profile, report: LoadReport | None, age_s: float) -> dict[str, object]:
    told: dict[str, object] = dict.fromkeys(
        (
            "load",
            "region",
            "cpus_busy",
            "mem_used_bytes",
            "cpu_pressure",
            "mem_pressure",
            "tasks_running",
            "tasks_queued",
        )
    )
    if report is not None:
        told = {
            "load": report.load,
            "region": report.region.name.lower(),
            "cpus_busy": report.cpus_busy,
            "mem_used_bytes": report.mem_used_bytes,
            "cpu_pressure": report.cpu_pressure,
            "mem_pressure": report.mem_pressure,
            "tasks_running": report.running,
            "tasks_queued": report.waiting,
        }
    return told | {
        "node": profile.node,
        "slots": profile.slots,
        "cpus": profile.cpus,
        "mem_bytes": profile.mem_bytes,
        "gpus": _gpus_told(profile, report),
        "devices": _counted(profile),
        "age_s": age_s,
        "drained": profile.drained,
        "drain_reason": profile.drain_reason,
        "trouble": profile.trouble or None,
        "no_gpus_because": None,
        "labels": list(profile.labels),
        "speed": profile.speed,
    }


def _gpus_told(profile: Profile, report: LoadReport | None) -> list[dict[str, object]]:
    """The GPUs of a peer, as far as it has told of them."""
    loads = {} if report is None else {load.mark: load for load in report.devices}
    found: list[dict[str, object]] = []
    for device in profile.devices:
        if device.kind != GPU:
            continue
        load = loads.get(device.mark)
        facts = _gpu_facts(device)
        if load is not None:
            used, foreign = load.used_mib * MIB, load.foreign_mib * MIB
            facts |= {
                "util": load.busy_percent / 100,
                "mem_used_bytes": used,
                "mem_ours_bytes": max(used - foreign, 0),
                "mem_foreign_bytes": foreign,
                "mem_free_bytes": load.free_mib * MIB,
                "tasks": load.tasks,
                "mode": load.mode.name.lower(),
                "health": load.health.name.lower(),
            }
        found.append(facts)
    return found


def _gpu_facts(device: Device) -> dict[str, object]:
    unknown = (
        "util",
        "mem_used_bytes",
        "mem_ours_bytes",
        "mem_foreign_bytes",
        "mem_free_bytes",
        "tasks",
        "mode",
        "health",
        "why",
    )
    return {
        "id": device.name,
        "index": device.index,
        "model": device.model,
        "mem_bytes": device.mem_bytes or None,
    } | dict.fromkeys(unknown)


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
    }


def _counted(profile: Profile) -> dict[str, int]:
    """How many devices of other kinds there are."""
    counts: dict[str, int] = {}
    for device in profile.devices:
        if device.kind != GPU:
            counts[device.kind] = counts.get(device.kind, 0) + 1
    return counts


def agent_object(parts: Parts) -> dict[str, object]:
    """This agent, as `info` answers."""
    return {
        "node": parts.config.node,
        "pid": os.getpid(),
        "launcher_pid": parts.launcher.pid,
        "memory_limits": parts.launcher.memory or None,
        "no_gpus_because": parts.gpus.why_none or None,
        "version": __version__,
        "socket": parts.config.socket,
        "state": parts.config.state,
        "listen": parts.identity.address,
        "boot": parts.identity.boot,
        "policy": parts.node.state.policies.name,
        "slots": parts.node.state.profile.slots,
        "cpus": parts.node.state.profile.cpus,
        "mem_bytes": parts.node.state.profile.mem_bytes,
        "cluster": parts.cluster.name,
        "cluster_id": parts.cluster.id,
        "cluster_directory": str(parts.cluster.directory),
        "cluster_local": parts.cluster.is_local,
        "mqtt": parts.bus.url if parts.bus is not None and parts.bus.connected else None,
        "mqtt_configured": bool(parts.config.mqtt),
        "peers": len(list(parts.node.membership)),
        "sought": parts.links.sought,
        "remembered": len(parts.node.membership.gossip.contacts.known),
        "started_at": parts.started_at,
        "notices": parts.notices,
    }
