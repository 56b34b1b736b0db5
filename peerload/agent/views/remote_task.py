"""Tasks of other homes as their executor shows them, also while the homes are away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.agent.runtime import now
from peerload.agent.views import task as views
from peerload.core.work import RemotePhase
from peerload.model.task import TaskRecord, TaskState

if TYPE_CHECKING:
    from peerload.agent.control.authorization import Authorization, Principal
    from peerload.core.node import Node
    from peerload.core.work import RemoteTask


def find(node: Node, name: str) -> RemoteTask | None:
    """The newest attempt here of the task with this whole id; None if there is none."""
    found = [
        guest
        for guest in node.executor.guests.values()
        if guest.task == name and guest.phase is not RemotePhase.RESERVED
    ]
    return max(found, key=lambda guest: guest.attempt, default=None)


def seen_by(node: Node, access: Authorization, caller: Principal) -> list[RemoteTask]:
    """All that are here and that this caller may see."""
    guests = node.executor.guests.values()
    return [g for g in guests if g.phase is not RemotePhase.RESERVED and access.sees_guest(caller, g)]


def listed(node: Node, guest: RemoteTask, user: str) -> dict[str, object]:
    """The task as `ls` lists tasks; submitted_at: when it came to this node."""
    record, moment = record_of(node, guest), now()
    names = views.device_names(node, record.node, guest.devices)
    task = views.task_object(record, guest.spec, user, running_at=guest.running_at, devices=names)
    arrived_at = moment.wall_s - (moment.boot_s - guest.arrived_s)
    return task | {"submitted_at": arrived_at, "reason": _reason(node, guest)}


def _reason(node: Node, guest: RemoteTask) -> str:
    """State of the task that only this node knows, in words."""
    if guest.phase is RemotePhase.ENDED:
        return f"{guest.home} has not taken its result yet"
    if guest.killed_because:
        return guest.killed_because
    if guest.key in node.runs.frozen:
        return f"frozen: {guest.home} is silent"
    if guest.is_parked:
        return f"{guest.home} is away, and lets it run on"
    return "waits for room here" if guest.phase is RemotePhase.WAITING else ""


def shown(node: Node, guest: RemoteTask, user: str) -> dict[str, object]:
    """The task as `show` shows tasks; what only its home knows is missing."""
    record = record_of(node, guest)
    names = views.device_names(node, record.node, guest.devices)
    task = views.task_object(record, guest.spec, user, running_at=guest.running_at, devices=names)
    task["reason"] = f"told by {record.node}, where it is: its home {guest.home} knows more"
    return task | views.detail_object(guest.spec, record, guest.devices) | {"history": [], "decision": None}


def record_of(node: Node, guest: RemoteTask) -> TaskRecord:
    """The record that its home would have, as far as it is known here."""
    state = TaskState.LEASED
    exit_ = guest.exit
    if exit_ is not None:
        state = TaskState.DONE if exit_.exit_code == 0 and not exit_.signal else TaskState.FAILED
    return TaskRecord(
        guest.task,
        guest.uid,
        state,
        0.0,
        attempt=guest.attempt,
        node=node.state.node,
        migrations=guest.migrations,
        started_at=exit_.started_at if exit_ is not None else guest.running_at,
        ended_at=exit_.ended_at if exit_ is not None else 0.0,
        exit=exit_,
    )
