"""The values of the Python interface: tasks, their ends, nodes and events, frozen.

Times are Unix seconds, sizes bytes, durations seconds; None means unknown or not applicable.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping


class _FromReply:
    """A value made of a reply of the agent; keys that this version does not know are left out."""

    __slots__ = ()

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """The value with these keys."""
        found: dict[str, Any] = {}
        for field in fields(cls):  # type: ignore[arg-type]
            value = body.get(field.name)
            found[field.name] = tuple(value or ()) if str(field.type).startswith("tuple") else value
        return cls(**found)


@dataclass(frozen=True, slots=True)
class TaskInfo(_FromReply):
    """A task as `peerload ls` shows it. state: held, queued, leased, running, done, failed, cancelled or unknown."""

    id: str
    name: str
    user: str
    state: str
    node: str | None
    home: str
    argv: tuple[str, ...]
    cpus: float
    mem_bytes: int
    gpus: float
    attempt: int
    migrations: int
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    exit_code: int | None
    signal: int | None
    reason: str
    device_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ended(_FromReply):
    """The end of a task. state: done, failed or cancelled; out_of: ``"memory"`` or ``"gpu memory"`` if it ran out of that."""

    id: str
    state: str
    exit_code: int | None
    signal: int | None
    node: str | None
    reason: str
    out_of: str | None

    @property
    def succeeded(self) -> bool:
        """Whether it ran with exit code 0."""
        return self.state == "done"


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a task, as far as it was captured."""

    stdout: bytes
    stderr: bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a task's output. stream: 1 is stdout, 2 is stderr; offset: its place in that."""

    stream: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class NodeInfo(_FromReply):
    """A node as `peerload nodes` shows it. state: alive, suspect, dead or left; region: underloaded, normal or overloaded;
    cpus_foreign: cores that other programs than tasks keep busy; gpus: one mapping each (docs/json.md has its
    keys); age_s: how old that is."""

    node: str
    state: str
    load: float | None
    region: str | None
    slots: int
    cpus: float
    cpus_busy: float | None
    cpus_foreign: float | None
    mem_bytes: int
    mem_used_bytes: int | None
    tasks_running: int | None
    tasks_queued: int | None
    gpus: tuple[Mapping[str, Any], ...]
    labels: tuple[str, ...]
    drained: bool
    age_s: float


@dataclass(frozen=True, slots=True)
class Event(_FromReply):
    """An event. number: grows with time; what: task, attempt, node, agent …"""

    number: int
    at: float
    what: str
    state: str
    task: str | None
    attempt: int | None
    node: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Why(_FromReply):
    """Why a task waits, or why it went where it went. nodes: whether each known node could ever run it and why not now,
    as mappings (docs/json.md has their keys); change: the smallest change that would let it start."""

    id: str
    state: str
    says: str
    summary: str
    node: str | None
    could_ever: int | None
    nodes: tuple[Mapping[str, Any], ...]
    change: Any
    decision: Any
