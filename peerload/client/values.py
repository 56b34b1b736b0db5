"""What the Python interface tells: tasks, their ends, nodes and events, as frozen values.

Times are Unix seconds, sizes bytes, durations seconds; None stands for what is not known or does not apply.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping


class _Told:
    """Made of what the agent says; keys that this version does not know are left out."""

    __slots__ = ()

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """The value that these keys tell."""
        told: dict[str, Any] = {}
        for field in fields(cls):  # type: ignore[arg-type]
            value = body.get(field.name)
            told[field.name] = tuple(value or ()) if str(field.type).startswith("tuple") else value
        return cls(**told)


@dataclass(frozen=True, slots=True)
class TaskInfo(_Told):
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
class Ended(_Told):
    """How a task ended. state: done, failed or cancelled; out_of: ``"memory"`` or ``"gpu memory"`` where it ended for want
    of that."""

    id: str
    state: str
    exit_code: int | None
    signal: int | None
    node: str | None
    reason: str
    out_of: str | None

    @property
    def succeeded(self) -> bool:
        """Whether it ran and its exit code was 0."""
        return self.state == "done"


@dataclass(frozen=True, slots=True)
class Output:
    """What a task has written, as far as it was captured."""

    stdout: bytes
    stderr: bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a task's output. stream: 1 is stdout, 2 is stderr; offset: where in that it stands."""

    stream: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class NodeInfo(_Told):
    """A node as `peerload nodes` shows it. state: alive, suspect, dead or left; region: underloaded, normal or overloaded;
    cpus_foreign: cores that programs keep busy which are no tasks of that node; gpus: one mapping each (docs/json.md has its
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
class Event(_Told):
    """Something that happened. number: grows with time; what: task, attempt, node, agent …"""

    number: int
    at: float
    what: str
    state: str
    task: str | None
    attempt: int | None
    node: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Why(_Told):
    """Why a task waits, or why it went where it went. nodes: of each node known whether it could ever run it and why not
    now, as mappings (docs/json.md has their keys); change: the smallest change that would let it start."""

    id: str
    state: str
    says: str
    summary: str
    node: str | None
    could_ever: int | None
    nodes: tuple[Mapping[str, Any], ...]
    change: Any
    decision: Any
