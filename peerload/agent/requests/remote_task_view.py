"""What this node can tell of tasks of other homes that it runs, while their homes are away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.agent.requests.output_stream import last_lines
from peerload.agent.views import task as answers
from peerload.core.tasks.work import RemotePhase
from peerload.model.messages import OutputEnd, OutputRequest
from peerload.model.task import TaskRecord, TaskState
from peerload.wire import control

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peerload.agent.control.connection import Connection
    from peerload.agent.control.principal import Principal
    from peerload.agent.parts import Parts
    from peerload.core.tasks.work import RemoteTask


def find(parts: Parts, name: str) -> RemoteTask | None:
    """The guest of this whole id, the newest attempt of it; None if none is here."""
    found = [
        guest
        for guest in parts.node.executor.guests.values()
        if guest.task == name and guest.phase is not RemotePhase.RESERVED
    ]
    return max(found, key=lambda guest: guest.attempt, default=None)


def seen_by(parts: Parts, caller: Principal) -> list[RemoteTask]:
    """All that are here, and there for this caller."""
    guests = parts.node.executor.guests.values()
    return [g for g in guests if g.phase is not RemotePhase.RESERVED and parts.access.sees_guest(caller, g)]


def listed(parts: Parts, guest: RemoteTask, user: str) -> dict[str, object]:
    """It as `ls` lists tasks; submitted_at: when it came to this node."""
    record, now = _record(parts, guest), parts.now()
    names = answers.device_names(parts.node, record.node, guest.devices)
    task = answers.task_object(record, guest.spec, user, running_at=guest.running_at, devices=names)
    arrived_at = now.wall_s - (now.boot_s - guest.arrived_s)
    return task | {"submitted_at": arrived_at, "reason": _stands(parts, guest)}


def _stands(parts: Parts, guest: RemoteTask) -> str:
    """What is so far told of it by nobody but this node."""
    if guest.phase is RemotePhase.ENDED:
        return f"{guest.home} has not taken its result yet"
    if guest.killed_because:
        return guest.killed_because
    if guest.key in parts.node.runs.frozen:
        return f"frozen: {guest.home} is silent"
    if guest.is_parked:
        return f"{guest.home} is away, and lets it run on"
    return "waits for room here" if guest.phase is RemotePhase.WAITING else ""


def knows(parts: Parts, request: control.Request, names: Iterable[str]) -> bool:
    """Whether this node can tell what is asked about all of these: what became of them here, or, of those that are here
    now, how they stand and what they have written."""
    if isinstance(request, control.Events):
        return all(parts.store.events(0, 1, newest=True, tasks=[name]) for name in names)
    if isinstance(request, control.Show | control.Output):
        return all(find(parts, name) is not None for name in names)
    return False


def shown(parts: Parts, guest: RemoteTask, user: str) -> dict[str, object]:
    """It as `show` shows tasks; what only its home knows is missing."""
    record = _record(parts, guest)
    names = answers.device_names(parts.node, record.node, guest.devices)
    task = answers.task_object(record, guest.spec, user, running_at=guest.running_at, devices=names)
    task["reason"] = f"told by {record.node}, where it is: its home {guest.home} knows more"
    return task | answers.detail(guest.spec, record, guest.devices) | {"history": [], "decision": None}


async def send_output(parts: Parts, connection: Connection, request: control.Output, guest: RemoteTask) -> None:
    """Its output, as far as it was written here; with ``follow`` until it has ended."""
    first = second = 0
    if request.tail_lines is not None:
        first, second = await last_lines(parts.spool, guest.key, request.tail_lines, parts.spool.sizes(guest.key))
    elif request.tail_bytes is not None and (guest.exit is not None or not request.follow):
        first, second = (max(size - request.tail_bytes, 0) for size in parts.spool.sizes(guest.key))
    if request.follow and request.tells_start:
        word = "running" if guest.exit is None else "ended"
        connection.more(request.id, {word: {"node": parts.config.node, "attempt": guest.attempt}})
    asked = OutputRequest(guest.task, guest.uid, guest.attempt, first, second, follow=request.follow)
    sizes = (0, 0)
    async for piece in parts.output.serve(guest.home, asked):
        if isinstance(piece, OutputEnd):
            sizes = piece.stdout_bytes, piece.stderr_bytes
        elif piece.stream in request.streams:
            await connection.tell(request.id, {"stream": piece.stream, "offset": piece.offset, "data": piece.data})
    told = answers.ended_object(_record(parts, guest))
    connection.ok(request.id, {**told, "stdout_bytes": sizes[0], "stderr_bytes": sizes[1]})


def _record(parts: Parts, guest: RemoteTask) -> TaskRecord:
    """What its home's record of it would say, as far as that is known here."""
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
        node=parts.config.node,
        migrations=guest.migrations,
        started_at=exit_.started_at if exit_ is not None else guest.running_at,
        ended_at=exit_.ended_at if exit_ is not None else 0.0,
        exit=exit_,
    )
