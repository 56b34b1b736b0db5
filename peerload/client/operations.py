# ruff: noqa: PTH109, PTH118, PTH119, PTH123
# os.path, since directories and commands are bytes.
"""The part of the Python interface that both clients share: the options of a task, the returned values, and the operations. An
operation is a request with a reader for its answer.

`blocking.py` and `asynchronous.py` make methods of the operations. In values, times are Unix seconds, sizes bytes, durations
seconds; None means unknown or not applicable."""

from __future__ import annotations

import argparse
import functools
import os
import secrets
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypedDict, TypeVar, Unpack

from peerload.client import submission
from peerload.client.connection import EVENTS_MAX, OutputGaps, OutputPosition, Reconnection, joined
from peerload.client.submission import captured_variables, listed, packed_variables
from peerload.model.errors import AgentGone, BadRequest, PeerloadError, SnapshotWanted
from peerload.text.format import counted
from peerload.text.units import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


class Handle:
    """The id of a task, and the ids of its members if it is an array."""

    id: str
    members: tuple[Handle, ...]

    def __repr__(self) -> str:
        return f"<peerload task {self.id}>"


Named = Handle | str
Word = str | bytes
GPU_WAITS = ("schedule", "queue")
GPU_SHARES = ("auto", "exclusive", "time", "mps")
"""The values of peerload.model."""


class RunRequest(TypedDict, total=False):
    """The options of a task, as the flags of `peerload submit`: cpus (1), mem (bytes, or ``"8G"``), gpus, gpu_mem (of each
    GPU), gpu_prefer (numbers, names or patterns of models to take first), gpu_wait (``"schedule"`` or ``"queue"``),
    gpu_share (``"auto"``, ``"exclusive"``, ``"time"`` or ``"mps"``), gpu_pct (of the multiprocessors, under MPS),
    time_limit_s, name, node (only this one), exclude (not these nodes), labels (only nodes that have all of these),
    directory (default: the current one; ``"-"``: a new empty one), environment (default: the variables that `submit` sends),
    priority, local (do not move it), migrations_max, once, fast, lease_s, wait_for_node, held, group, after, after_ok (handles or ids),
    retries, tags (a mapping, to select tasks by:  peerload ls --tag K=V), in_, out (paths and globs of files that travel),
    snapshot (the directory as it is now; without it: as the settings say), est_s (how long it will take), prefer
    (``"time"``, ``"balanced"`` or ``"energy"``), defer_until (Unix time by which it starts, when energy is cheapest); env (a
    lock file of the environment to run in), overcommit (0.8 of its cores are enough), token (8 to 64 characters that identify
    this submission: sending it again within 7 days does not queue it again).
    """

    cpus: float
    mem: int | str
    gpus: float
    gpu_mem: int | str
    gpu_prefer: str | Sequence[str]
    gpu_wait: str
    gpu_share: str
    gpu_pct: int
    time_limit_s: float
    name: str
    node: str
    exclude: str | Sequence[str]
    labels: str | Sequence[str]
    directory: str | os.PathLike[str]
    environment: Mapping[str, str]
    priority: int
    local: bool
    migrations_max: int
    once: bool
    fast: bool
    lease_s: float
    wait_for_node: bool
    held: bool
    group: str
    after: Named | Sequence[Named]
    after_ok: Named | Sequence[Named]
    retries: int
    tags: Mapping[str, str]
    est_s: float
    prefer: str
    defer_until: float
    overcommit: bool
    in_: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    out: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    snapshot: bool
    env: str | os.PathLike[str]
    token: str


def command_words(words: Sequence[Word] | str, *, shell: bool) -> list[bytes]:
    """The argv. Raises TypeError for a string without ``shell``, BadRequest for an empty command."""
    if shell:
        if not isinstance(words, (str, bytes)):
            raise TypeError("with shell=True the command must be one string")
        return [b"/bin/sh", b"-c", os.fsencode(words)]
    if isinstance(words, (str, bytes)):
        raise TypeError("the command must be a list of words; a string for the shell needs shell=True")
    argv = [os.fsencode(word) for word in words]
    if not argv or not argv[0]:
        raise BadRequest("the command is empty", hint='such as  client.submit(["hostname"])')
    return argv


def submit_fields(argv: Sequence[bytes], wanted: RunRequest) -> dict[str, Any]:
    """The fields of a `submit` request, with a new token if none was given. Raises BadRequest."""
    terms = _given(wanted, "group", "retries")
    for name in ("after", "after_ok"):
        if wanted.get(name):
            terms[name] = _names(wanted[name])
    if wanted.get("defer_until"):
        terms["start_by"] = wanted["defer_until"]
    if wanted.get("tags"):
        terms["tags"] = [f"{key}={value}" for key, value in wanted["tags"].items()]
    fields = {"token": wanted.get("token") or secrets.token_hex(16), "spec": task_spec(argv, wanted)}
    fields |= _given(wanted, "held", "wait_for_node")
    return fields | ({"terms": terms} if terms else {})


def task_spec(argv: Sequence[bytes], wanted: RunRequest) -> dict[str, Any]:
    """The task's spec. Raises BadRequest for options that contradict each other, TypeError for unknown ones."""
    unknown = set(wanted) - set(RunRequest.__annotations__)
    if unknown:
        raise TypeError(f"no such argument: {', '.join(sorted(unknown))}")
    if wanted.get("once") and wanted.get("fast"):
        raise BadRequest("once and fast contradict each other")
    directory = wanted.get("directory")
    here = os.fsencode(directory) if directory is not None else os.getcwdb()
    request: dict[str, Any] = {"cpus": wanted.get("cpus", 1.0), **_devices(wanted)}
    for name, field in (("mem", "mem_bytes"), ("gpu_mem", "gpu_mem_bytes")):
        if wanted.get(name):
            request[field] = _size(wanted[name])  # type: ignore[literal-required]
    request |= _given(wanted, "overcommit")
    placement = _given(wanted, "node", "local", "migrations_max")
    for name in ("exclude", "labels"):
        if wanted.get(name):
            placement[name] = listed(wanted[name])  # type: ignore[literal-required]
    made = {
        "argv": list(argv),
        "directory": here if here == b"-" else os.path.normpath(os.path.join(os.getcwdb(), here)),
        "environment": packed_environment(wanted.get("environment"), moved=directory is not None),
        "umask": _umask(),
        "name": wanted.get("name") or os.path.basename(argv[0]).decode("utf-8", "replace")[:128],
        "request": request,
        "placement": placement,
        "followed": True,  # `Task.output` returns all of it
    }
    made |= _given(wanted, "time_limit_s", "priority", "lease_s", "est_s", "prefer")
    return made | ({"guarantee": "once"} if wanted.get("once") else {"guarantee": "fast"} if wanted.get("fast") else {})


def packed_environment(environment: Mapping[str, str] | None, *, moved: bool = False) -> bytes:
    """Pack the given variables, by default the captured ones of this process. Raises BadRequest if they are too large."""
    if environment is None:
        kept, _ = captured_variables(os.environb, [], [], moved=moved)
    else:
        kept = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
    return packed_variables(kept)


def array_ranges(indices: Iterable[int]) -> list[tuple[int, int, int]]:
    """The ranges (first, last, step) of these numbers: few, if they are evenly spaced."""
    ranges: list[tuple[int, int, int]] = []
    for number in sorted(set(indices)):
        first, last, step = ranges[-1] if ranges else (number, number, 0)
        if ranges and (first == last or number == last + step):
            ranges[-1] = (first, number, number - last)
        else:
            ranges.append((number, number, 1))
    return ranges


def _umask() -> int:
    """The umask of this process, read from /proc, since setting it even briefly would affect other threads."""
    with open("/proc/self/status", encoding="utf-8") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022


def _devices(wanted: RunRequest) -> dict[str, Any]:
    gpus, terms = wanted.get("gpus", 0), _given(wanted, "gpu_prefer", "gpu_wait", "gpu_share", "gpu_pct")
    if not gpus:
        if terms:
            raise BadRequest(f"{min(terms)} is set, but no GPU is requested", hint="add  gpus=1")
        return {}
    for name, known in (("gpu_wait", GPU_WAITS), ("gpu_share", GPU_SHARES)):
        if terms.get(name, known[0]) not in known:
            raise BadRequest(f"{name} is {terms[name]!r}", hint="one of  " + "  ".join(known))
    if isinstance(terms.get("gpu_prefer"), str):
        terms["gpu_prefer"] = [name for name in terms["gpu_prefer"].split(",") if name]
    is_part = 0 < gpus < 1
    if is_part and terms.get("gpu_share") == "exclusive":
        raise BadRequest("a part of a GPU is always shared, but gpu_share is 'exclusive'")
    return ({"gpus": 1, "gpu_fraction": gpus} if is_part else {"gpus": int(gpus)}) | terms


def _size(given: int | str) -> int:
    if isinstance(given, int):
        return given
    try:
        return size(given)
    except argparse.ArgumentTypeError as error:
        raise BadRequest(str(error)) from None


def _given(wanted: RunRequest, *names: str) -> dict[str, Any]:
    given = {name: _plain(wanted[name]) for name in names if name in wanted}  # type: ignore[literal-required]
    return {name: value for name, value in given.items() if value is not False and value not in (None, "", [])}


def _plain(value: Any) -> Any:  # noqa: ANN401 -- whatever was given
    return list(value) if isinstance(value, (tuple, list, set, frozenset)) else value


class _FromReply:
    """A value made from an agent's reply; unknown keys are ignored."""

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
    kept_beside: output files stored as ``name.peerload-<id>``, because the file ``name`` was changed meanwhile."""

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
    """The captured output of a task."""

    stdout: bytes
    stderr: bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a task's output. stream: 1 is stdout, 2 is stderr; offset: its position in the stream."""

    stream: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class NodeInfo(_FromReply):
    """A node as `peerload nodes` shows it. state: alive, suspect, dead or left; region: underloaded, normal or overloaded;
    cpus_foreign: cores that other programs than tasks keep busy; gpus: one mapping each (docs/json.md lists its
    keys); age_s: the age of this data."""

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
    """Explanation of a task: why it waits, or why it runs on its node. nodes: for each known node, whether it could ever run the
    task and why not now, as mappings (docs/json.md lists the keys); change: the smallest change that would let it start."""

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
    """A request whose answer is read when it is complete; with an empty verb, none is sent. After a lost connection it is sent again
    if it ``may_repeat``; if its answer waits for future events (`connection.follows`), parts from before the loss are kept."""

    verb: str
    fields: dict[str, Any]
    read: Callable[[Parts, Reply], Result]
    before: Callable[[str], None] | None = None
    """Blocking work before the request. Its argument is the path of the agent's socket."""
    may_repeat: bool = True


class Stream(NamedTuple, Generic[Item]):
    """A request whose answer is read as it arrives. ``items`` reads a part, ``end`` the final reply. After a lost connection it is
    sent again with the current ``fields``. ``items`` drops repeated items, or updates ``fields`` so that none is sent twice."""

    verb: str
    fields: dict[str, Any]
    items: Callable[[Reply], Iterable[Item]]
    end: Callable[[Reply], Iterable[Item]]


class Attempts(Reconnection):
    """The attempts of a client at one request: the fields of the next attempt, and the decision to retry after a failure."""

    __slots__ = ("_may_repeat", "_request", "before")

    def __init__(self, request: Call[Any] | Stream[Any], patience_s: float, *, was_there: bool) -> None:
        timeout_s = request.fields.get("timeout_s")
        until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        super().__init__(patience_s, until_s=until_s, was_there=was_there)
        self._request = request
        names = [request.fields.get("task"), *request.fields.get("tasks", ())]
        is_same = not any(str(name).startswith("@") for name in names)  # @ may mean another task after a reconnection
        self._may_repeat = is_same and (isinstance(request, Stream) or request.may_repeat)
        self.before = request.before if isinstance(request, Call) else None
        """Blocking work before the next attempt."""

    def fields(self) -> dict[str, Any]:
        """The fields of the next attempt."""
        fields = self._request.fields
        if not self.is_lost or fields.get("timeout_s") is None:
            return fields
        return fields | {"timeout_s": max(self._until_s - time.monotonic(), 0.0)}

    def continues(self, error: PeerloadError) -> bool:
        """True if the request should be sent again: immediately if the agent wants a snapshot, otherwise after RECONNECT_EVERY_S."""
        if isinstance(error, SnapshotWanted) and self._request.fields.get("freezes"):
            self.before = functools.partial(submission.freeze_fields, fields=self._request.fields)
            return True
        return (self._may_repeat or not isinstance(error, AgentGone)) and super().continues(error)


def _name(task: Named) -> str:
    return task if isinstance(task, str) else task.id


def _names(tasks: Named | Iterable[Named]) -> list[str]:
    return [_name(task) for task in ([tasks] if isinstance(tasks, Handle | str) else tasks)]


# -- submit: each returns the id, followed by the ids of the members ---------------------------------------------------


def submit(argv: Sequence[Word] | str, *, shell: bool = False, **wanted: Unpack[RunRequest]) -> Call[list[str]]:
    """Queue a command; durable when this returns. ``argv``: its words, or, with ``shell``, one line for /bin/sh. Options:
    see `RunRequest`."""
    return _submit(submit_fields(command_words(argv, shell=shell), wanted), (), wanted)


def submit_array(
    argv: Sequence[Word] | str, indices: Iterable[int], *, shell: bool = False, **wanted: Unpack[RunRequest]
) -> Call[list[str]]:
    """Queue it once for each number. The task reads its number from PEERLOAD_ARRAY_INDEX."""
    numbers = sorted(set(indices))
    if not all(isinstance(number, int) for number in numbers):
        raise TypeError(f"the indices of an array must be numbers, such as range(0, 10, 2), not {indices!r}")
    if not numbers:
        raise _no_members()
    fields = submit_fields(command_words(argv, shell=shell), wanted)
    return _submit({**fields, "array": array_ranges(numbers)}, numbers, wanted)


def submit_each(commands: Sequence[Sequence[Word]], **wanted: Unpack[RunRequest]) -> Call[list[str]]:
    """Queue an array whose members, counted from 1, run one of these commands each: at most 100,000, and 3 MiB in all."""
    each = [command_words(argv, shell=False) for argv in commands]
    if not each:
        raise _no_members()
    fields = submit_fields(each[0], wanted)
    return _submit({**fields, "each": each}, range(1, len(each) + 1), wanted)


def _no_members() -> BadRequest:
    return BadRequest("an array without members", why="nothing was submitted", hint="give it at least one")


def _submit(fields: dict[str, Any], numbers: Sequence[int], wanted: RunRequest) -> Call[list[str]]:
    def read(_: Parts, reply: Reply) -> list[str]:
        return [reply["id"], *(f"{reply['id']}.{number}" for number in numbers)]

    return Call("submit", fields, read, submission.sender(fields, wanted))


# -- ends and output ---------------------------------------------------------------------------------------------------


def wait(
    tasks: Named | Iterable[Named],
    *,
    timeout_s: float | None = None,
    any: bool = False,  # noqa: A002 -- the flag's name
) -> Call[list[Ended]]:
    """Return when these tasks, and all members of arrays among them, have ended; with ``any``: when one of them has. → the ends in
    order of time. Raises TimeoutError."""

    def read(parts: Parts, reply: Reply) -> list[Ended]:
        new_ends = _new_ends()
        found = [end for part in parts for end in new_ends(part)]
        if reply.get("timed_out"):
            away = f"; the agent is away: {reply['away']}" if "away" in reply else ""
            raise TimeoutError(f"{counted(len(found), 'task')} had ended after {timeout_s:g} s, not all of them{away}")
        return found

    names = _names(tasks)
    return Call("wait" if names else "", {"tasks": names, "any": any, "timeout_s": timeout_s}, read)


def wait_one(task: Handle, timeout_s: float | None = None) -> Call[Ended]:
    """Return when it has ended. Raises TimeoutError; ValueError for an array (the client's `wait` accepts arrays)."""
    if task.members:
        raise ValueError(f"{task.id} is an array of {len(task.members)} tasks: client.wait(task.members)")
    verb, fields, read, *_ = wait([task], timeout_s=timeout_s)
    return Call(verb, fields, lambda parts, reply: read(parts, reply)[0])


def ended(tasks: Named | Iterable[Named]) -> Stream[Ended]:
    """Yield the end of each task as it arrives."""
    return Stream("wait", {"tasks": _names(tasks)}, _new_ends(), lambda _: ())


def _new_ends() -> Callable[[Reply], list[Ended]]:
    """A function that extracts the end of a task from a part, unless it was seen before: a reconnection sends all ends again."""
    known: set[str] = set()

    def new(part: Reply) -> list[Ended]:
        if part.get("state") == "unknown" or part["id"] in known:
            return []
        known.add(part["id"])
        return [Ended.of(part)]

    return new


def output(task: Named) -> Call[Output]:
    """The output that a task has written so far. Raises OutputIncomplete if some of it is missing."""

    def read(parts: Parts, reply: Reply) -> Output:
        written, gaps = {1: bytearray(), 2: bytearray()}, OutputGaps()
        for part in parts:
            if "data" in part:  # other parts explain why some output may be missing
                gaps.add(part)
                written[part["stream"]] += part["data"]
        gaps.require_all(reply)
        return Output(bytes(written[1]), bytes(written[2]))

    return Call("output", {"task": _name(task)}, read)


def follow(task: Named) -> Stream[Piece]:
    """Follow a task's output until it has ended. Raises OutputIncomplete at the end if some of it is missing."""
    gaps, position = OutputGaps(), OutputPosition()

    def items(part: Reply) -> Iterator[Piece]:
        if "data" in part and (new := position.beyond(part)) is not None:
            gaps.add(new)
            yield Piece(new["stream"], new["offset"], new["data"])

    def end(reply: Reply) -> tuple[()]:
        gaps.require_all(reply)
        return ()

    return Stream("output", {"task": _name(task), "follow": True}, items, end)


# -- changes and facts -------------------------------------------------------------------------------------------------


def cancel(tasks: Named | Iterable[Named], *, signal: int = 15, force: bool = False) -> Call[list[str]]:
    """Stop tasks. → the ids of those that had not ended."""
    fields: dict[str, object] = {"tasks": _names(tasks), "signal": signal, "force": force}
    return Call("cancel", fields, lambda parts, reply: list(joined(parts, reply)["cancelled"]), may_repeat=False)


def cancel_one(task: Handle, *, signal: int = 15, force: bool = False) -> Call[bool]:
    """Stop it, or all members → True if any of them had not ended."""
    verb, fields, read, *_ = cancel([task], signal=signal, force=force)
    return Call(verb, fields, lambda parts, reply: bool(read(parts, reply)), may_repeat=False)


def info(task: Named) -> Call[TaskInfo]:
    """The current state of a task."""
    return Call("show", {"tasks": [_name(task)]}, lambda _, reply: TaskInfo.of(reply["tasks"][0]))


def tasks(
    *, states: str | Sequence[str] = (), ended_within_s: float = 86_400.0, limit: int = 10_000
) -> Call[list[TaskInfo]]:
    """The user's tasks: unfinished ones and recently ended ones."""
    fields: dict[str, object] = {"states": listed(states), "ended_within_s": ended_within_s, "limit": limit}
    return Call("tasks", fields, lambda parts, reply: list(map(TaskInfo.of, joined(parts, reply)["tasks"])))


def nodes() -> Call[list[NodeInfo]]:
    """Known nodes, this one first."""
    return Call("nodes", {}, lambda parts, reply: list(map(NodeInfo.of, joined(parts, reply)["nodes"])))


def why(task: Named) -> Call[Why]:
    """Explain why a task waits, or why it runs on its node."""
    return Call("why", {"task": _name(task)}, lambda parts, reply: Why.of(joined(parts, reply)))


def events(*, follow: bool = False, limit: int = 50, tasks: Named | Iterable[Named] = ()) -> Stream[Event]:
    """Events: the newest ``limit``, oldest first; with ``follow`` also those that happen from now on."""

    def items(part: Reply) -> Iterator[Event]:
        if "begins" in part:  # after a reconnection, events that were already yielded are not sent
            fields.update(after=part["begins"], limit=EVENTS_MAX)
        for event in map(Event.of, part.get("events", ())):
            fields["after"] = event.number
            yield event

    fields: dict[str, Any] = {"follow": follow, "limit": limit, "tasks": _names(tasks)}
    return Stream("events", fields, items, items)
