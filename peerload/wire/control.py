"""The requests a client may send over the control socket, typed and bounded.

One frame a request, ``{"id": n, "verb": …, …}``; answers are ``{"id": n, "ok": {…}}`` or
``{"id": n, "error": {"code", "what", "why", "hint"}}``; a stream sends ``{"id": n, "more": {…}}`` any number of times
before its ``ok``. Requests on one connection are answered in any order. docs/wire.md lists every key.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from peerload.model.errors import BadMessage
from peerload.model.resources import NodeName
from peerload.model.task import TaskSpec
from peerload.wire.expected import in_words

TASKS_NAMED_MAX = 10_000
RANGES_MAX = 1_000
EVENT_TASKS_MAX = 100
DRAIN_REASON_CHARS_MAX = 256

RequestId = Annotated[int, Meta(ge=0, le=1 << 62)]
TaskRef = Annotated[str, Meta(min_length=1, max_length=80)]
"""`ws1/42`, `42`, `42.7` or `@` (the asker's last task)."""
TaskRefs = Annotated[tuple[TaskRef, ...], Meta(min_length=1, max_length=TASKS_NAMED_MAX)]
Range = tuple[
    Annotated[int, Meta(ge=0, le=10**9)], Annotated[int, Meta(ge=0, le=10**9)], Annotated[int, Meta(ge=1, le=10**9)]
]


class _Request(msgspec.Struct, frozen=True, tag_field="verb", forbid_unknown_fields=True, kw_only=True):
    id: RequestId = 0


class Info(_Request, frozen=True, tag="info"):
    """Who is there → node pid launcher_pid version socket state listen boot policy slots cpus mem_bytes cluster
    cluster_id cluster_directory cluster_local (no other machine can belong to it) mqtt (url in use or null) peers sought
    ({address: why}: where no peer has answered yet) remembered (members of earlier starts that were not met yet)."""


class Submit(_Request, frozen=True, tag="submit"):
    """Queue a command → id, members (of an array, else null), directory_here, placeable (null | why no node known
    can run it now). array: inclusive (first, last, step) ranges; held: it is kept back until it is released;
    wait_for_node: not refused if no node known could ever run it."""

    token: Annotated[str, Meta(min_length=8, max_length=64)]
    spec: TaskSpec
    array: Annotated[tuple[Range, ...], Meta(max_length=RANGES_MAX)] = ()
    held: bool = False
    wait_for_node: bool = False


class Tasks(_Request, frozen=True, tag="tasks"):
    """List → tasks: unfinished ones, and those that ended within the last ``ended_within_s``, oldest first; at most
    ``limit``, ``truncated`` tells: those that a node has come first, then as many of those that wait (who is next) as of
    those that ended (who was last). unfinished: where it is truncated, how many there are in each state. damaged: those
    that cannot be read (id, why)."""

    ended_within_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 86_400.0
    states: Annotated[tuple[Annotated[str, Meta(max_length=20)], ...], Meta(max_length=16)] = ()
    node: Annotated[str, Meta(max_length=40)] = ""
    limit: Annotated[int, Meta(ge=1, le=100_000)] = 10_000


class History(_Request, frozen=True, tag="history"):
    """Ended tasks, also those that ``tasks`` tells no more → tasks, as ``tasks`` tells them and with what they used;
    those that ended at ``since`` (Unix s) or later, the newest ``limit`` of them (null: all), ``truncated`` tells whether
    there were more. The last ended first; with oldest_first in the order they were submitted in."""

    since: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0
    limit: Annotated[int, Meta(ge=1, le=1 << 40)] | None = 1000
    oldest_first: bool = False


class Show(_Request, frozen=True, tag="show"):
    """Everything about tasks → tasks, each with spec, history and usage."""

    tasks: TaskRefs


class Why(_Request, frozen=True, tag="why"):
    """Why a task waits, or why it went where it went → the keys of docs/cli.md; of an array one answer for all."""

    task: TaskRef


class Events(_Request, frozen=True, tag="events"):
    """What happened → ``more`` {events} any number of times, then ok: the newest ``limit``, oldest first; with follow
    also what happens from now on, until the client hangs up. tasks: only of these (of an array: of its members, too);
    what: only of these kinds. docs/cli.md lists the keys."""

    limit: Annotated[int, Meta(ge=0, le=100_000)] = 50
    follow: bool = False
    tasks: Annotated[tuple[TaskRef, ...], Meta(max_length=EVENT_TASKS_MAX)] = ()
    what: Annotated[tuple[Annotated[str, Meta(max_length=20)], ...], Meta(max_length=16)] = ()


class Wait(_Request, frozen=True, tag="wait"):
    """Block until tasks ended → a ``more`` for each that ended (id state exit_code signal node reason), and at once for one
    that is, or becomes, ``unknown``: that may go on; then ok with ``timed_out``. any: the first that ended is enough."""

    tasks: TaskRefs
    any: bool = False
    timeout_s: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None


class Cancel(_Request, frozen=True, tag="cancel"):
    """Stop tasks → cancelled (ids), already_ended (ids). Durable before it is answered. wait: that comes as ``more``, and the
    ok when their processes are gone, too: timed_out, left (ids of which some may be there; at most 100 are named). While
    it takes long, ``more`` {waits_for}: each of the nodes it depends on (node state tasks)."""

    tasks: TaskRefs
    signal: Annotated[int, Meta(ge=1, le=64)] = 15
    force: bool = False
    wait: bool = False
    timeout_s: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None


class Retry(_Request, frozen=True, tag="retry"):
    """Queue what a task was to run as a new one → as `submit`. The task has ended, or is unknown; of an array those members
    that have not succeeded are queued, with ``all`` every one that has ended. ``token``: as with `submit`."""

    token: Annotated[str, Meta(min_length=8, max_length=64)]
    task: TaskRef
    all: bool = False


class Hold(_Request, frozen=True, tag="hold"):
    """Keep waiting tasks back → held, already_held, not_waiting (names of which no task waited)."""

    tasks: TaskRefs


class Release(_Request, frozen=True, tag="release"):
    """Let held tasks go on → released, not_held (names of which no task was held)."""

    tasks: TaskRefs


class Drain(_Request, frozen=True, tag="drain"):
    """This node takes no more tasks; those of others that wait here go back → returned, running (numbers). wait: that comes
    as ``more``, and the ok (timed_out) when nothing runs here and no task of another home is here."""

    reason: Annotated[str, Meta(max_length=DRAIN_REASON_CHARS_MAX)] = ""
    wait: bool = False
    timeout_s: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None


class Undrain(_Request, frozen=True, tag="undrain"):
    """This node takes tasks again → was_drained."""


class Output(_Request, frozen=True, tag="output"):
    """The output of one task → ``more`` {stream: 1|2, offset, data: bytes}, then ok {id state exit_code signal node
    reason, stdout_bytes, stderr_bytes}. follow: until it has ended (also waits for its start); else what there is
    now. tail_bytes: only the last so many bytes of each stream."""

    task: TaskRef
    follow: bool = False
    streams: Annotated[tuple[Annotated[int, Meta(ge=1, le=2)], ...], Meta(min_length=1, max_length=2)] = (1, 2)
    tail_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] | None = None


class Signal(_Request, frozen=True, tag="signal"):
    """Send a signal to the processes of a running task → ok."""

    task: TaskRef
    signal: Annotated[int, Meta(ge=1, le=64)]


class Nodes(_Request, frozen=True, tag="nodes"):
    """Every node known → nodes (keys as docs/cli.md lists them), this one first."""


class Policy(_Request, frozen=True, tag="policy"):
    """The policies there are and the preset in force → policies, presets, in_force."""


class Stats(_Request, frozen=True, tag="stats"):
    """Counters since the agent's start → counters: {name: number}."""


class Stop(_Request, frozen=True, tag="stop"):
    """Stop the agent → ok, then it stops. all: its running tasks and the launcher end too."""

    all: bool = False


class Leave(_Request, frozen=True, tag="leave"):
    """Take this node out of its cluster → pid, node, left_behind (what becomes of its tasks, in words); then the agent
    stops and forgets whom it knew. force: although there are such tasks."""

    force: bool = False


class Forget(_Request, frozen=True, tag="forget"):
    """A node is gone for good → node, was (the state it had). Refused if it is not known, or alive."""

    node: NodeName


Request = (
    Info
    | Submit
    | Tasks
    | History
    | Show
    | Why
    | Events
    | Wait
    | Cancel
    | Retry
    | Hold
    | Release
    | Drain
    | Undrain
    | Output
    | Signal
    | Nodes
    | Policy
    | Stats
    | Stop
    | Leave
    | Forget
)

_decoder = msgspec.msgpack.Decoder(Request)


def decode_request(raw: bytes) -> Request:
    """One request. Raises BadMessage, whatever the bytes are."""
    try:
        request: Request = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage("not a request this agent understands", why=in_words(error)[:300]) from None
    return request


def encode(body: object) -> bytes:
    """One frame for a client."""
    raw = msgspec.msgpack.encode(body)
    return len(raw).to_bytes(4, "big") + raw
