"""The Python interface, once: each operation is a request and how its answer is read; the values that are returned.

`blocking.py` and `asynchronous.py` make methods of the operations. In values, times are Unix seconds, sizes bytes, durations
seconds; None means unknown or not applicable."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar, Unpack

from peerload.client import request, submission
from peerload.client.connection import OutputGaps, joined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


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
    """The end of a task. state: done, failed or cancelled; out_of: ``"memory"`` or ``"gpu memory"`` if it ran out of that;
    kept_beside: its output files that are beside a file that was changed meanwhile, as ``name.peerload-<id>``."""

    id: str
    state: str
    exit_code: int | None
    signal: int | None
    node: str | None
    reason: str
    out_of: str | None
    kept_beside: int

    @property
    def succeeded(self) -> bool:
        """True if it ran with exit code 0."""
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


Parts = list[dict[str, Any]]
"""The parts of an answer that come before its final reply."""
Reply = dict[str, Any]
Result = TypeVar("Result")
Item = TypeVar("Item")


class Call(NamedTuple, Generic[Result]):
    """A request whose answer is read when it is complete; without a verb nothing is asked."""

    verb: str
    fields: dict[str, Any]
    read: Callable[[Parts, Reply], Result]
    before: Callable[[str], None] | None = None
    """Work before the request, which blocks: it is given the path of the agent's socket."""


class Stream(NamedTuple, Generic[Item]):
    """A request whose answer is read as it comes: the items in one part, and those in the final reply."""

    verb: str
    fields: dict[str, object]
    items: Callable[[Reply], Iterable[Item]]
    end: Callable[[Reply], Iterable[Item]]


class Handle:
    """The id of a task, and those of its members if it is an array."""

    id: str
    members: tuple[Handle, ...]

    def __repr__(self) -> str:
        return f"<peerload task {self.id}>"


Named = Handle | str


def _name(task: Named) -> str:
    return task if isinstance(task, str) else task.id


# -- submit: each results in the id, followed by the ids of the members ------------------------------------------------


def submit(
    argv: Sequence[request.Word] | str, *, shell: bool = False, **wanted: Unpack[request.RunRequest]
) -> Call[list[str]]:
    """Queue a command; durable when this returns. ``argv``: its words, or, with ``shell``, one line for /bin/sh. What
    else can be asked for: `peerload.client.request.RunRequest`."""
    return _submit(request.submission(request.command(argv, shell=shell), wanted), (), wanted)


def submit_array(
    argv: Sequence[request.Word] | str,
    indices: Iterable[int],
    *,
    shell: bool = False,
    **wanted: Unpack[request.RunRequest],
) -> Call[list[str]]:
    """Queue it once for each number, which the task finds in PEERLOAD_ARRAY_INDEX."""
    numbers = sorted(set(indices))
    fields = request.submission(request.command(argv, shell=shell), wanted)
    return _submit({**fields, "array": request.array(numbers)}, numbers, wanted)


def submit_each(commands: Sequence[Sequence[request.Word]], **wanted: Unpack[request.RunRequest]) -> Call[list[str]]:
    """Queue an array whose members, counted from 1, run one of these commands each: at most 100,000, and 3 MiB in all."""
    each = [request.command(argv, shell=False) for argv in commands]
    fields = request.submission(each[0] if each else [b""], wanted)
    return _submit({**fields, "each": each}, range(1, len(each) + 1), wanted)


def _submit(fields: dict[str, Any], numbers: Sequence[int], wanted: request.RunRequest) -> Call[list[str]]:
    def read(_: Parts, reply: Reply) -> list[str]:
        return [reply["id"], *(f"{reply['id']}.{number}" for number in numbers)]

    return Call("submit", fields, read, submission.sender(fields, wanted))


# -- ends and output ---------------------------------------------------------------------------------------------------


def wait(
    tasks: Iterable[Named],
    *,
    timeout_s: float | None = None,
    any: bool = False,  # noqa: A002 -- the flag's name
) -> Call[list[Ended]]:
    """Return when these tasks, and all members of arrays among them, have ended; with ``any``: one of them. → each end, the
    first first. Raises TimeoutError."""

    def read(parts: Parts, reply: Reply) -> list[Ended]:
        found = [end for part in parts for end in _ended(part)]
        if reply.get("timed_out"):
            raise TimeoutError(f"{len(found)} had ended after {timeout_s:g} s")
        return found

    names = list(map(_name, tasks))
    return Call("wait" if names else "", {"tasks": names, "any": any, "timeout_s": timeout_s}, read)


def wait_one(task: Handle, timeout_s: float | None = None) -> Call[Ended]:
    """Return when it has ended. Raises TimeoutError; ValueError for an array (the client's `wait` takes one)."""
    if task.members:
        raise ValueError(f"{task.id} is an array of {len(task.members)} tasks: client.wait(task.members)")
    verb, fields, read, _ = wait([task], timeout_s=timeout_s)
    return Call(verb, fields, lambda parts, reply: read(parts, reply)[0])


def ended(tasks: Iterable[Named]) -> Stream[Ended]:
    """Each end as it comes."""
    return Stream("wait", {"tasks": list(map(_name, tasks))}, _ended, lambda _: ())


def _ended(part: Reply) -> list[Ended]:
    return [Ended.of(part)] if part.get("state") != "unknown" else []


def output(task: Named) -> Call[Output]:
    """The output that a task has written so far. Raises OutputIncomplete if not all of it is there (any more)."""

    def read(parts: Parts, reply: Reply) -> Output:
        written, gaps = {1: bytearray(), 2: bytearray()}, OutputGaps()
        for part in parts:
            if "data" in part:  # other parts say why some of it may be missing
                gaps.add(part)
                written[part["stream"]] += part["data"]
        gaps.require_all(reply)
        return Output(bytes(written[1]), bytes(written[2]))

    return Call("output", {"task": _name(task)}, read)


def follow(task: Named) -> Stream[Piece]:
    """A task's output as it comes, until it has ended. Raises OutputIncomplete then if not all of it came."""
    gaps = OutputGaps()

    def items(part: Reply) -> Iterator[Piece]:
        if "data" in part:
            gaps.add(part)
            yield Piece(part["stream"], part["offset"], part["data"])

    def end(reply: Reply) -> tuple[()]:
        gaps.require_all(reply)
        return ()

    return Stream("output", {"task": _name(task), "follow": True}, items, end)


# -- changes and facts -------------------------------------------------------------------------------------------------


def cancel(tasks: Iterable[Named], *, signal: int = 15, force: bool = False) -> Call[list[str]]:
    """Stop tasks. → the ids of those that had not ended."""
    fields: dict[str, object] = {"tasks": list(map(_name, tasks)), "signal": signal, "force": force}
    return Call("cancel", fields, lambda parts, reply: list(joined(parts, reply)["cancelled"]))


def cancel_one(task: Handle, *, signal: int = 15, force: bool = False) -> Call[bool]:
    """Stop it, or all members. → whether there was something to stop."""
    verb, fields, read, _ = cancel([task], signal=signal, force=force)
    return Call(verb, fields, lambda parts, reply: bool(read(parts, reply)))


def info(task: Named) -> Call[TaskInfo]:
    """The facts known of a task now."""
    return Call("show", {"tasks": [_name(task)]}, lambda _, reply: TaskInfo.of(reply["tasks"][0]))


def tasks(*, states: Sequence[str] = (), ended_within_s: float = 86_400.0, limit: int = 10_000) -> Call[list[TaskInfo]]:
    """My tasks: unfinished ones, and those that ended lately."""
    fields: dict[str, object] = {"states": list(states), "ended_within_s": ended_within_s, "limit": limit}
    return Call("tasks", fields, lambda parts, reply: list(map(TaskInfo.of, joined(parts, reply)["tasks"])))


def nodes() -> Call[list[NodeInfo]]:
    """Every node known, this one first."""
    return Call("nodes", {}, lambda parts, reply: list(map(NodeInfo.of, joined(parts, reply)["nodes"])))


def why(task: Named) -> Call[Why]:
    """Why a task waits, or why it went where it went."""
    return Call("why", {"task": _name(task)}, lambda parts, reply: Why.of(joined(parts, reply)))


def events(*, follow: bool = False, limit: int = 50, tasks: Iterable[Named] = ()) -> Stream[Event]:
    """Events: the newest ``limit``, oldest first; with ``follow`` also those that happen from now on."""

    def items(part: Reply) -> Iterator[Event]:
        return map(Event.of, part.get("events", ()))

    fields: dict[str, object] = {"follow": follow, "limit": limit, "tasks": list(map(_name, tasks))}
    return Stream("events", fields, items, items)
