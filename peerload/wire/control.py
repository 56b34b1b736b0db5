"""Requests of clients, in one file since they are one vocabulary: a request is decoded into the union of all.

One frame a request, ``{"id": n, "verb": …, …}``; answers are ``{"id": n, "ok": {…}}`` or ``{"id": n, "error":
{"code", "what", "why", "hint"}}``; a stream sends ``{"id": n, "more": {…}}`` any number of times before its ``ok``.
Requests on one connection are answered in any order. docs/wire.md lists every key.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from peerload.model.errors import BadMessage
from peerload.model.messages import BLOCKS_MAX
from peerload.model.resources import NodeName
from peerload.model.task import (
    ARGV_ITEMS_MAX,
    NO_TERMS,
    TAGS_MAX,
    Digest,
    GroupName,
    SubmitOptions,
    TaskSpec,
    TerminalSize,
)
from peerload.wire.expected import validation_error_text
from peerload.wire.frame import check_bounds

TASKS_NAMED_MAX = 10_000
NAME_GLOB_CHARS_MAX = 128
TAG_CHARS_MAX = 169
RANGES_MAX = 1_000
EVENT_TASKS_MAX = 100
USAGE_TASKS_MAX = 64
DRAIN_REASON_CHARS_MAX = 256
INPUT_BYTES_MAX = 1 << 20
"""The largest piece of a standard input that one request carries."""
EXEC_ENVIRONMENT_BYTES_MAX = 64 << 10
OUTPUT_TOLD_BYTES_MAX = 64 << 10
LEVELS_MAX = 64
PROFILE_BYTES_MAX = 64 << 10
EACH_MAX = 100_000
"""Command lines of one array; the size of a frame bounds them sooner."""

RequestId = Annotated[int, Meta(ge=0, le=1 << 62)]
REF_CHARS_MAX = 4096
TaskRef = Annotated[str, Meta(max_length=REF_CHARS_MAX)]
"""`ws1/42`, `42`, `42.7`, `42.3-9,12` (members of an array), `@` (the asker's last task) or `@~1` (the one before it)."""
CommandKey = Annotated[str, Meta(max_length=64)]
"""A command of `exec`, as its first answer names it; "" = none."""
TaskRefs = Annotated[tuple[TaskRef, ...], Meta(min_length=1, max_length=TASKS_NAMED_MAX)]
Argv = Annotated[tuple[bytes, ...], Meta(min_length=1, max_length=ARGV_ITEMS_MAX)]
Range = tuple[
    Annotated[int, Meta(ge=0, le=10**9)], Annotated[int, Meta(ge=0, le=10**9)], Annotated[int, Meta(ge=1, le=10**9)]
]


class _Request(
    msgspec.Struct, frozen=True, tag_field="verb", forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """at: the node that is to answer; "": the home of the tasks that are named, else the node that is asked."""

    id: RequestId = 0
    at: Annotated[str, Meta(pattern=r"^([a-z0-9-]{1,40})?\Z")] = ""


class Info(_Request, frozen=True, tag="info"):
    """Facts about this agent → node pid launcher_pid version socket state listen boot policy slots cpus mem_bytes cluster
    cluster_id cluster_directory cluster_local (no other machine can belong to it) mqtt (url in use or null) peers sought
    ({address: why}: where no peer has answered yet) remembered (members of earlier starts that were not met yet)."""


class Submit(_Request, frozen=True, tag="submit"):
    """Queue a command → id, members (of an array, else null), directory_here, placeable (null | why no node known
    can run it now). array: inclusive (first, last, step) ranges; each: in the place of that, what each member runs
    instead of the spec's argv, the members counted from 1; held: it is kept back until it is released;
    wait_for_node: not refused if no node known could ever run it; terms: what only its home has to know. input: what it reads
    from its standard input, or the beginning of that; input_ends: that is all, else `input` sends more (both only if its spec
    takes_input). freezes: the client can send the working directory instead: where that is wanted, it is refused with the code
    `snapshot`. attended: it is cancelled when this connection closes, unless another one attends it or it was detached."""

    token: Annotated[str, Meta(min_length=8, max_length=64)]
    spec: TaskSpec
    array: Annotated[tuple[Range, ...], Meta(max_length=RANGES_MAX)] = ()
    each: Annotated[tuple[Argv, ...], Meta(max_length=EACH_MAX)] = ()
    held: bool = False
    wait_for_node: bool = False
    terms: SubmitOptions = NO_TERMS
    input: Annotated[bytes, Meta(max_length=INPUT_BYTES_MAX)] = b""
    input_ends: bool = True
    attended: bool = False
    freezes: bool = False


class _Selecting(_Request, frozen=True):
    """Selection of tasks of this home: each field narrows it. tasks: only these references; states: in one of
    these; name: a glob; group; node: that has or had it; tags: each of `key=value`, or `key` for any value."""

    tasks: Annotated[tuple[TaskRef, ...], Meta(max_length=TASKS_NAMED_MAX)] = ()
    states: Annotated[tuple[Annotated[str, Meta(max_length=20)], ...], Meta(max_length=16)] = ()
    node: Annotated[str, Meta(max_length=40)] = ""
    name: Annotated[str, Meta(max_length=NAME_GLOB_CHARS_MAX)] = ""
    group: Annotated[str, Meta(max_length=40)] = ""
    tags: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=TAG_CHARS_MAX)], ...], Meta(max_length=TAGS_MAX)
    ] = ()


class TasksRequest(_Selecting, frozen=True, tag="tasks"):
    """List → tasks: unfinished ones, and those that ended within the last ``ended_within_s``, oldest first; at most
    ``limit``, ``truncated`` tells: those that a node has come first, then as many of those that wait (who is next) as of
    those that ended (who was last). unfinished: where it is truncated, how many there are in each state. damaged: those
    that cannot be read (id, why). cluster: those of all nodes, in no order, at most ``limit`` of each; missing: which nodes
    did not answer (node state why). gathered: members of an array that are held, queued, done or cancelled, and many that failed
    or are unknown, are one task of the list for each of these states, and the limit counts it as one: that of the first with ``members``: spans (the first of
    their ranges) count nodes (how many), and started_at, ended_at, exit_code and reason as of all of them."""

    ended_within_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 86_400.0
    limit: Annotated[int, Meta(ge=1, le=100_000)] = 10_000
    gathered: bool = False
    cluster: bool = False


class Select(_Selecting, frozen=True, tag="select"):
    """Query for the tasks that match → selected: references that name exactly these, of an array its id or ranges
    of its members; count; states ({state: number}). In system mode it covers the caller's tasks; all_users: an
    administrator means everybody's, as where tasks are named."""

    all_users: bool = False


class History(_Request, frozen=True, tag="history"):
    """Ended tasks, also those that ``tasks`` tells no more → tasks, as ``tasks`` tells them and with what they used;
    those that ended at ``since`` (Unix s) or later, the newest ``limit`` of them (null: all), ``truncated`` tells whether
    there were more. The last ended first; with oldest_first in the order they were submitted in. cluster: as with
    ``tasks``."""

    since: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0
    limit: Annotated[int, Meta(ge=1, le=1 << 40)] | None = 1000
    oldest_first: bool = False
    cluster: bool = False


class Show(_Request, frozen=True, tag="show"):
    """Details of tasks → tasks, each with spec, history and usage."""

    tasks: TaskRefs


class ReadUsage(_Request, frozen=True, tag="usage"):
    """Current usage of the tasks that run on this node → tasks: id node cpu_s cpus_busy memory_bytes processes of those that do,
    null for what is not known."""

    tasks: Annotated[tuple[TaskRef, ...], Meta(min_length=1, max_length=USAGE_TASKS_MAX)]


class ExplainTask(_Request, frozen=True, tag="why"):
    """Why a task waits, or why it went where it went → the keys of docs/json.md; of an array one answer for all."""

    task: TaskRef


class Events(_Request, frozen=True, tag="events"):
    """The event log → ``more`` {events} any number of times, then ok: the newest ``limit``, oldest first; with follow
    also what happens from now on, until the client hangs up. tasks: only of these (of an array: of its members, too);
    what: only of these kinds. docs/json.md lists the keys."""

    limit: Annotated[int, Meta(ge=0, le=100_000)] = 50
    follow: bool = False
    tasks: Annotated[tuple[TaskRef, ...], Meta(max_length=EVENT_TASKS_MAX)] = ()
    what: Annotated[tuple[Annotated[str, Meta(max_length=20)], ...], Meta(max_length=16)] = ()


class Wait(_Request, frozen=True, tag="wait"):
    """Block until tasks ended → a ``more`` for each that ended (id state exit_code signal node reason), and at once for one
    that is, or becomes, ``unknown``: that may go on; then ok with ``timed_out``. any: the first that ended is enough. outputs:
    each that ended is told with started_at, ended_at, stdout_bytes, stderr_bytes, and, where they have no more than
    OUTPUT_TOLD_BYTES_MAX together and are here, stdout and stderr. files: of those whose output goes into files it is waited
    until that was tried → ``more`` {files: {id state why}} for each, where state is that of its chore's event; "" = it never ran."""

    tasks: TaskRefs
    any: bool = False
    outputs: bool = False
    files: bool = False
    timeout_s: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None


class Cancel(_Request, frozen=True, tag="cancel"):
    """Stop tasks → cancelled (ids), already_ended (ids); unreachable, if there are any: of each that was cancelled while its
    node was suspect or dead (id node state). Durable before it is answered. wait: that comes as ``more``, and the
    ok when their processes are gone, too: timed_out, left (ids of which some may be there; at most 100 are named). While
    it takes long, ``more`` {waits_for}: each of the nodes it depends on (node state tasks)."""

    tasks: TaskRefs
    signal: Annotated[int, Meta(ge=1, le=64)] = 15
    force: bool = False
    wait: bool = False
    timeout_s: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None


class Remote(_Request, frozen=True, tag="remote"):
    """List the tasks of other homes that are on this node → tasks, as ``tasks`` tells them, also of homes that are away or
    were shut out; truncated: there are more than ``limit``."""

    limit: Annotated[int, Meta(ge=1, le=100_000)] = 10_000


class CancelRemote(_Request, frozen=True, tag="cancel_remote"):
    """End tasks of other homes on this node, whatever their homes say → cancelled, already_ended (ids). One that waits goes
    back to its home unstarted; one that runs gets the signal, and ends as its processes do. guests: whole ids of tasks or of
    arrays, ``ws1/42``."""

    guests: TaskRefs
    signal: Annotated[int, Meta(ge=1, le=64)] = 15
    force: bool = False


class RetryRequest(_Request, frozen=True, tag="retry"):
    """Queue what a task was to run as a new one → as `submit`. The task has ended, or is unknown; of an array those members
    that have not succeeded are queued, with ``all`` every one that has ended, with ``failed`` those that failed, or of which
    nobody knows how they ended: none that was cancelled. ``token``: as with `submit`."""

    token: Annotated[str, Meta(min_length=8, max_length=64)]
    task: TaskRef
    all: bool = False
    failed: bool = False


class Hold(_Request, frozen=True, tag="hold"):
    """Keep waiting tasks back → held, already_held, not_waiting (names of which no task waited)."""

    tasks: TaskRefs


class Release(_Request, frozen=True, tag="release"):
    """Let held tasks go on → released, not_held (names of which no task was held)."""

    tasks: TaskRefs


class Prio(_Request, frozen=True, tag="prio"):
    """Give tasks another priority → changed, passed_on (names of which another node has one in its queue, and is told),
    elsewhere (names of which one runs already: it counts only if it is queued again), ended."""

    tasks: TaskRefs
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)]


class Groups(_Request, frozen=True, tag="groups"):
    """The groups of tasks of this node → groups: name slots (null: any number) paused taken running waiting held."""


class Group(_Request, frozen=True, tag="group"):
    """Set a group → group, as it is then. slots: at most so many of it are leased at a time, 0 = any number; paused: none of
    it is started; removed: nothing of this is wanted any more; null: as it was."""

    name: GroupName
    slots: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    paused: bool | None = None
    removed: bool = False


class Drain(_Request, frozen=True, tag="drain"):
    """This node takes no more tasks; those of others that wait here go back → returned, running (numbers). wait: that comes
    as ``more``, and the ok (timed_out) when nothing runs here and no task of another home is here."""

    reason: Annotated[str, Meta(max_length=DRAIN_REASON_CHARS_MAX)] = ""
    wait: bool = False
    timeout_s: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None


class Undrain(_Request, frozen=True, tag="undrain"):
    """This node takes tasks again → was_drained."""


class ReadOutput(_Request, frozen=True, tag="output"):
    """The output of one task → ``more`` {stream: 1|2, offset, data: bytes}, then ok {id state exit_code signal node
    reason, stdout_bytes, stderr_bytes}. follow: until it has ended (also waits for its start); else what there is
    now. tail_bytes, tail_lines: of what there is now, only the last so many bytes, or lines, of each stream. tells_start:
    ``more`` {running: {node, attempt}}, too, when an attempt of it runs, before its output, and {ended: {node, attempt}}
    before what is left of the output of one that has ended. done_with: when all of it was sent, no more of it need be kept than
    of any output. behind: why the newest output of a running task is missing, only where its node cannot be asked. Of a task
    whose home is away the node that runs it tells, and says so first: ``more`` {away: {id home why}}."""

    task: TaskRef
    follow: bool = False
    streams: Annotated[tuple[Annotated[int, Meta(ge=1, le=2)], ...], Meta(min_length=1, max_length=2)] = (1, 2)
    tail_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] | None = None
    tells_start: bool = False
    tail_lines: Annotated[int, Meta(ge=0, le=1 << 40)] | None = None
    done_with: bool = False


class Exec(_Request, frozen=True, tag="exec"):
    """Run a command inside a task that runs on the node asked: in its working directory, with its environment, in its cgroup
    → ``more`` {stream: 1|2, offset, data: bytes}, the first at once and with ``command``, the key of this command in the requests
    `input`, `resize` and `signal` of the same client; then ok {exit_code signal reason}. It is killed when the client hangs up.
    takes_input: its standard input comes by `input` requests, else it reads /dev/null; terminal: it gets a terminal;
    environment: MessagePack map of variables that are added to the task's."""

    task: TaskRef
    argv: Annotated[tuple[bytes, ...], Meta(min_length=1, max_length=ARGV_ITEMS_MAX)]
    takes_input: bool = False
    terminal: TerminalSize | None = None
    environment: Annotated[bytes, Meta(max_length=EXEC_ENVIRONMENT_BYTES_MAX)] = b"\x80"


class SendSignal(_Request, frozen=True, tag="signal"):
    """Send a signal to the processes of a running task → ok. command: to those of this command of `exec` instead."""

    task: TaskRef
    signal: Annotated[int, Meta(ge=1, le=64)]
    command: CommandKey = ""


class Input(_Request, frozen=True, tag="input"):
    """More of the standard input of a task whose spec takes_input → offset (so many bytes have come), wanted (false: the task
    takes no more), ended. Answered when there is room for more. offset: where this belongs, so that what is sent again is
    not read twice, null = at the end; ends: that is all; is_source: it ends, too, when this client is gone without a word. One
    client at a time feeds a task, unless it has a terminal. command: it is for this command of `exec` instead."""

    task: TaskRef
    data: Annotated[bytes, Meta(max_length=INPUT_BYTES_MAX)] = b""
    offset: Annotated[int, Meta(ge=0, le=1 << 60)] | None = None
    ends: bool = False
    is_source: bool = False
    command: CommandKey = ""


class Resize(_Request, frozen=True, tag="resize"):
    """The window of the client of a task with a terminal → ok. command: of this command of `exec` instead."""

    task: TaskRef
    rows: Annotated[int, Meta(ge=1, le=65_535)]
    columns: Annotated[int, Meta(ge=1, le=65_535)]
    command: CommandKey = ""


class Attend(_Request, frozen=True, tag="attend"):
    """Be the client of a task again that was submitted as attended → attended (false: it has ended, or was detached)."""

    task: TaskRef


class Detach(_Request, frozen=True, tag="detach"):
    """Leave an attended task to itself: it is not cancelled when this connection closes, and its input stays open → ok."""

    task: TaskRef


class Clean(_Request, frozen=True, tag="clean"):
    """Drop ended tasks and their outputs → ``more`` {tasks (ids)} any number of times, then ok {removed, outputs
    (numbers), output_bytes, in_use (how many did not go since somebody follows or waits for them)}. Those that ended longer than
    ``older_s`` ago, in one of ``states``, of ``tasks``, and not one of the newest ``keep``: each narrows it. outputs_only: the
    tasks themselves stay. dry_run: nothing goes, the answer is the same."""

    tasks: Annotated[tuple[TaskRef, ...], Meta(max_length=TASKS_NAMED_MAX)] = ()
    older_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    keep: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    states: Annotated[tuple[Literal["done", "failed", "cancelled"], ...], Meta(max_length=3)] = ()
    outputs_only: bool = False
    dry_run: bool = False


class Nodes(_Request, frozen=True, tag="nodes"):
    """List of known nodes → nodes (keys as docs/json.md lists them), this one first."""


class Overview(_Request, frozen=True, tag="overview"):
    """State for a live view, cheap to ask for each second → revision complete agent nodes nodes_gone tasks tasks_gone
    guests guests_gone counts events took_s. since: the ``revision`` of an earlier answer; then only what has changed since comes,
    and what is gone by name; everything, and ``complete``, if that is not known any more. events: the newest
    ``events_max`` with greater numbers than ``events_after``."""

    since: Annotated[str, Meta(max_length=100)] = ""
    events_after: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    events_max: Annotated[int, Meta(ge=0, le=1000)] = 100


class Policy(_Request, frozen=True, tag="policy"):
    """The policies there are and the preset in force → policies, presets, in_force."""


class Files(_Request, frozen=True, tag="files"):
    """Files that travel with tasks. have: → missing: those of these SHA-256 digests whose blocks are not here; blocks: keep
    these; manifest: → complete: whether it and all its blocks are here; gc: → removed_bytes: what no task needs was removed.
    Without any of them → size_bytes limit_bytes blocks snapshots (id bytes files used_at in_use) environments (id name bytes
    used_at in_use)."""

    have: Annotated[tuple[Digest, ...], Meta(max_length=BLOCKS_MAX)] = ()
    blocks: Annotated[tuple[Annotated[memoryview, Meta(max_length=1 << 20)], ...], Meta(max_length=BLOCKS_MAX)] = ()
    manifest: Annotated[bytes, Meta(max_length=32)] = b""
    gc: bool = False


class Power(_Request, frozen=True, tag="power"):
    """Power of this node → node watts quality scope source sources (name scope quality watts why of each) curve (watts cores
    threads smt_gain all_core quality)."""


class KeepPowerProfile(_Request, frozen=True, tag="power-profile"):
    """Take a measured power profile → it, as it is stored (cpu levels watts sd governor source scope date curve). measured:
    threads, watts, standard deviation and work rate of each level, of a machine with so many cores and threads; document: in
    the place of that one that was stored."""

    measured: Annotated[tuple[tuple[int, float, float, float], ...], Meta(max_length=LEVELS_MAX)] = ()
    cores: Annotated[int, Meta(ge=1, le=65536)] = 1
    threads: Annotated[int, Meta(ge=1, le=65536)] = 1
    document: Annotated[bytes, Meta(max_length=PROFILE_BYTES_MAX)] = b""


class Energy(_Request, frozen=True, tag="energy"):
    """Joules of this node since then (Unix s) → node since until joules wh tasks_joules other_joules idle_joules gap_s quality scope
    source, null where nothing was counted."""

    since: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0


class Stats(_Request, frozen=True, tag="stats"):
    """Counters since the agent's start, gauges and histograms → counters, gauges: {name: number}, histograms: {name: bounds counts
    sum}; counts: one for each bound, then one for what is greater."""


class ReadSamples(_Request, frozen=True, tag="samples"):
    """History of the cluster's load as this node saw it, after `since` (Unix s) → every_s keys samples: a list of numbers each,
    in the order of keys."""

    since: float = 0.0


class Checkup(_Request, frozen=True, tag="checkup"):
    """Health of the agent, as it alone knows it → node python event_loop launcher (pid units memory unenforced silent)
    disk (state free_bytes total_bytes low_bytes reserve_bytes reserve_bytes_max stalled) broker (null, or urls url why)
    peers (node state address linked met_s datagram_age_s clock_ahead_s) clashes ({name: address}: agents that were refused
    since their name is taken) damaged (id why) lost (null, or what the database
    has lost, in words) removed_early (null, or tasks at why: what went within a day of its end for want of room) frozen (tasks of other homes held still) trouble certificate_until issuer (it can
    renew that itself, and let others in) revoked (that certificate was)."""


class Settings(_Request, frozen=True, tag="settings"):
    """The settings this agent runs with → settings: key value origin of each, the passwords of brokers left out."""


class Stop(_Request, frozen=True, tag="stop"):
    """Stop the agent → pid running (the number of tasks that run here), then it stops. all: these and the launcher end too."""

    all: bool = False


class Leave(_Request, frozen=True, tag="leave"):
    """Take this node out of its cluster → pid, node, left_behind (what becomes of its tasks, in words); then the agent
    stops and forgets whom it knew. force: although there are such tasks."""

    force: bool = False


class Forget(_Request, frozen=True, tag="forget"):
    """A node is gone for good → node, was (the state it had). Refused if it is not known, or alive."""

    node: NodeName


class Invite(_Request, frozen=True, tag="invite"):
    """Let somebody join → token (one word, a secret), address, cluster, uses, ends_at. node: who alone may; issuer: who
    joins may let others in, too."""

    uses: Annotated[int, Meta(ge=1, le=1000)] = 1
    ttl_s: Annotated[float, Meta(ge=1.0, le=604_800.0)] = 900.0
    node: Annotated[str, Meta(pattern=r"^([a-z0-9-]{1,40})?\Z")] = ""
    issuer: bool = False


class RevokeRequest(_Request, frozen=True, tag="revoke"):
    """Shut a node out of the cluster → node, was (the state it had, null: not known), told (members told at once),
    was_issuer. force: although it is not known here."""

    node: NodeName
    force: bool = False


class Rotate(_Request, frozen=True, tag="rotate"):
    """Change the key of gossip and MQTT → number (of the new one), told (members told at once), overlap_s (so long the
    one before still opens)."""


class Restart(_Request, frozen=True, tag="restart"):
    """Stop the agent and start it in the same process, with the settings as they are then → pid, boot (of the start that
    ends). Running tasks run on."""

    reason: Annotated[str, Meta(max_length=100)] = ""


Request = (
    Info
    | Submit
    | TasksRequest
    | Select
    | History
    | Show
    | ReadUsage
    | ExplainTask
    | Events
    | Wait
    | Cancel
    | Remote
    | CancelRemote
    | RetryRequest
    | Hold
    | Release
    | Prio
    | Groups
    | Group
    | Drain
    | Undrain
    | ReadOutput
    | Exec
    | SendSignal
    | Input
    | Resize
    | Attend
    | Detach
    | Clean
    | Nodes
    | Overview
    | Policy
    | Files
    | Power
    | KeepPowerProfile
    | Energy
    | Stats
    | Checkup
    | ReadSamples
    | Settings
    | Stop
    | Leave
    | Forget
    | Invite
    | RevokeRequest
    | Rotate
    | Restart
)

_decoder = msgspec.msgpack.Decoder(Request)
REQUEST_VALUES_MAX = 1 << 20
"""Values in one request: the words of 100,000 commands are among them."""


def decode_request(raw: bytes) -> Request:
    """Decode one request. Raises BadMessage, whatever the bytes are."""
    try:
        check_bounds(raw, REQUEST_VALUES_MAX)
        request: Request = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadMessage("not a request this agent understands", why=validation_error_text(error)[:300]) from None
    return request


def encode(body: object) -> bytes:
    """Encode one frame for a client."""
    raw = msgspec.msgpack.encode(body)
    return len(raw).to_bytes(4, "big") + raw


def encode_request(request: Request) -> bytes:
    """A request as it was decoded, what is at its default left out."""
    return msgspec.msgpack.encode(request)


class ResponseFrame(msgspec.Struct, frozen=True):
    """A frame of an answer: exactly one of its three bodies is present."""

    id: RequestId = 0
    ok: dict[str, Any] | None = None
    more: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


ANSWER_VALUES_MAX = 1 << 18
"""Values in one frame of an answer, which an agent sends in parts long before it has so many."""
_PLAIN = frozenset((type(None), bool, int, float, str, bytes))


def _check(body: dict[str, Any]) -> None:
    """Check that a client can read a body. Raises ValueError if not, such as for a key that is not text."""
    level: list[Any] = [body]
    while level:
        below: list[Any] = []
        for value in level:
            if type(value) is list:
                below += [item for item in value if type(item) not in _PLAIN]
            elif type(value) is dict:
                if any(type(key) is not str for key in value):
                    raise ValueError("a key is not text")
                below += [item for item in value.values() if type(item) not in _PLAIN]
            else:
                raise ValueError(f"a value of type {type(value).__name__}")
        level = below


def _no_extension(code: int, _data: memoryview) -> object:
    raise ValueError(f"an extension of type {code}")


_answers = msgspec.msgpack.Decoder(ResponseFrame, ext_hook=_no_extension)


def decode_answer(raw: bytes) -> tuple[int, str, dict[str, Any]]:
    """The number of the request, the kind ("ok", "more" or "error") and the body of one frame of an answer. Raises
    BadMessage, whatever the bytes are."""
    try:
        check_bounds(raw, ANSWER_VALUES_MAX)
        answer = _answers.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadMessage("not an answer", why=validation_error_text(error)[:300]) from None
    bodies = [(kind, body) for kind in ("ok", "more", "error") if (body := getattr(answer, kind)) is not None]
    if len(bodies) != 1:
        raise BadMessage("not an answer", why=f"{len(bodies)} bodies in one frame")
    try:
        _check(bodies[0][1])
    except ValueError as error:
        raise BadMessage("not an answer", why=str(error)) from None
    return answer.id, *bodies[0]
