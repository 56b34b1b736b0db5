"""Requests of clients, in one file because a request is decoded into the union of all.

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
    Priority,
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
"""Command lines of one array; the size of a frame is a tighter limit."""

RequestId = Annotated[int, Meta(ge=0, le=1 << 62)]
REF_CHARS_MAX = 4096
TaskRef = Annotated[str, Meta(max_length=REF_CHARS_MAX)]
"""`ws1/42`, `42`, `42.7`, `42.3-9,12` (members of an array), `@` (the asker's last task) or `@~1` (the one before it)."""
CommandKey = Annotated[str, Meta(max_length=64)]
"""Key of a command of `exec`, from its first answer; "" = none."""
TaskRefs = Annotated[tuple[TaskRef, ...], Meta(min_length=1, max_length=TASKS_NAMED_MAX)]
Argv = Annotated[tuple[bytes, ...], Meta(min_length=1, max_length=ARGV_ITEMS_MAX)]
Range = tuple[
    Annotated[int, Meta(ge=0, le=10**9)], Annotated[int, Meta(ge=0, le=10**9)], Annotated[int, Meta(ge=1, le=10**9)]
]


class _Request(
    msgspec.Struct, frozen=True, tag_field="verb", forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """at: the node that answers; "": the home of the named tasks, else the node that receives the request."""

    id: RequestId = 0
    at: Annotated[str, Meta(pattern=r"^([a-z0-9-]{1,40})?\Z")] = ""


class Info(_Request, frozen=True, tag="info"):
    """Facts about this agent → node pid launcher_pid version socket state listen boot policy slots cpus mem_bytes cluster
    cluster_id cluster_directory cluster_local (no other machine can belong to it) mqtt (url in use or null) peers sought
    ({address: why}: where no peer has answered yet) remembered (members of earlier starts that were not met yet)."""


class Submit(_Request, frozen=True, tag="submit"):
    """Queue a command → id, members (of an array, else null), directory_here, placeable (null | why no known node can
    run it now). array: inclusive (first, last, step) ranges; each: instead of array: the argv of each member, counted
    from 1; held: it waits until it is released; wait_for_node: accept it even if no known node could ever run it;
    terms: options for its home only. input: its standard input, or its beginning; input_ends: that is all, else `input`
    sends more (both only if its spec takes_input). freezes: the client can send the working directory, which the agent
    requests with the code `snapshot`. attended: it is cancelled when this connection closes, unless another one attends
    it or it was detached."""

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
    """Selection of tasks of this home: each field narrows it. tasks: only these references; states: in one of these;
    name: a glob; group; node: that has or had the task; tags: each of `key=value`, or `key` for any value."""

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
    ``limit``, with ``truncated`` if there are more: tasks at a node come first, then equal numbers of waiting tasks
    (the next to start) and of ended ones (the last to end). unfinished: if truncated, the number in each state.
    damaged: tasks that cannot be read (id, why). cluster: the tasks of all nodes, in no order, at most ``limit`` of
    each; missing: nodes that did not answer (node state why). gathered: the list has one entry, which the limit counts
    as one, for all members of an array in the same state, if they are held, queued, done or cancelled, or many are
    failed or unknown: the entry of the first one, with ``members``: spans (the first of their ranges) count nodes
    (number), and started_at, ended_at, exit_code and reason for all of them. own: only the caller's, also for an
    administrator."""

    ended_within_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 86_400.0
    limit: Annotated[int, Meta(ge=1, le=100_000)] = 10_000
    gathered: bool = False
    own: bool = False
    cluster: bool = False


class Select(_Selecting, frozen=True, tag="select"):
    """Query for the tasks that match → selected: references that name exactly these, for an array its id or ranges
    of its members; count; states ({state: number}). In system mode it covers the caller's tasks; all_users: an
    administrator means everybody's, as where tasks are named."""

    all_users: bool = False


class History(_Request, frozen=True, tag="history"):
    """List ended tasks, also those that ``tasks`` no longer lists → tasks, as ``tasks`` lists them, with their usage:
    those that ended at ``since`` (Unix s) or later, the newest ``limit`` of them (null: all), with ``truncated`` if
    there were more. The last ended first; with oldest_first in the order of submission. own, cluster: as with
    ``tasks``."""

    since: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0
    limit: Annotated[int, Meta(ge=1, le=1 << 40)] | None = 1000
    oldest_first: bool = False
    own: bool = False
    cluster: bool = False


class Show(_Request, frozen=True, tag="show"):
    """Details of tasks → tasks, each with spec, history and usage."""

    tasks: TaskRefs


class ReadUsage(_Request, frozen=True, tag="usage"):
    """Current usage of the tasks that run on this node → tasks: id node cpu_s cpus_busy memory_bytes processes, null if
    unknown."""

    tasks: Annotated[tuple[TaskRef, ...], Meta(min_length=1, max_length=USAGE_TASKS_MAX)]


class ExplainTask(_Request, frozen=True, tag="why"):
    """Explanation of a task: why it waits, or why it runs on its node → the keys of docs/json.md; one answer for an
    array."""

    task: TaskRef


class Events(_Request, frozen=True, tag="events"):
    """The event log → ``more`` {events} any number of times, then ok: the newest ``limit``, oldest first; follow: also
    new events, until the client disconnects, preceded by ``begins``: each event sent has a greater number. after: only
    events of greater numbers. tasks: only of these (for an array: also of its members); what: only these kinds.
    docs/json.md has the keys."""

    limit: Annotated[int, Meta(ge=0, le=100_000)] = 50
    after: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    follow: bool = False
    tasks: Annotated[tuple[TaskRef, ...], Meta(max_length=EVENT_TASKS_MAX)] = ()
    what: Annotated[tuple[Annotated[str, Meta(max_length=20)], ...], Meta(max_length=16)] = ()


class Wait(_Request, frozen=True, tag="wait"):
    """Block until tasks ended → a ``more`` for each ended task (id state exit_code signal node reason), and immediately
    for a task that is, or becomes, ``unknown``, which may continue; then ok with ``timed_out``. any: the first ended
    task is enough. outputs: ended tasks also have started_at, ended_at, stdout_bytes, stderr_bytes, and stdout and
    stderr if these are here and have at most OUTPUT_TOLD_BYTES_MAX together. files: wait also for the attempt to write
    the output to its files → ``more`` {files: {id state why}} for each; state: of the completion job's event; "" = the
    task never ran."""

    tasks: TaskRefs
    any: bool = False
    outputs: bool = False
    files: bool = False
    timeout_s: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None


class Cancel(_Request, frozen=True, tag="cancel"):
    """Stop tasks → cancelled (ids), already_ended (ids); unreachable, if any: cancelled tasks whose node was suspect or
    dead (id node state). Durable before the answer. wait: this answer comes as ``more``, and the ok when their
    processes are gone, too: timed_out, left (ids of tasks whose processes may remain; at most 100 are named). During a
    long wait, ``more`` {waits_for}: the nodes it depends on (node state tasks)."""

    tasks: TaskRefs
    signal: Annotated[int, Meta(ge=1, le=64)] = 15
    force: bool = False
    wait: bool = False
    timeout_s: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None


class Remote(_Request, frozen=True, tag="remote"):
    """List the tasks of other homes that are on this node → tasks, in the form of ``tasks``, also of homes that are
    away or were shut out; truncated: there are more than ``limit``."""

    limit: Annotated[int, Meta(ge=1, le=100_000)] = 10_000


class CancelRemote(_Request, frozen=True, tag="cancel_remote"):
    """End tasks of other homes on this node, without their homes → cancelled, already_ended (ids). A waiting one is
    given back to its home unstarted; a running one gets the signal, and ends as its processes do. guests: whole ids of
    tasks or of arrays, ``ws1/42``."""

    guests: TaskRefs
    signal: Annotated[int, Meta(ge=1, le=64)] = 15
    force: bool = False


class RetryRequest(_Request, frozen=True, tag="retry"):
    """Queue the command of a task as a new task → as `submit`. The task has ended, or is unknown; of an array, the
    members that have not succeeded are queued, with ``all`` every ended one, with ``failed`` those that failed or whose
    outcome is unknown, but none that was cancelled. ``token``: as with `submit`."""

    token: Annotated[str, Meta(min_length=8, max_length=64)]
    task: TaskRef
    all: bool = False
    failed: bool = False


class Hold(_Request, frozen=True, tag="hold"):
    """Hold waiting tasks → held, already_held, not_waiting: lists of names."""

    tasks: TaskRefs


class Release(_Request, frozen=True, tag="release"):
    """Release held tasks → released, not_held: lists of names."""

    tasks: TaskRefs


class Prio(_Request, frozen=True, tag="prio"):
    """Change the priority of tasks → changed, passed_on (another node has them in its queue, and is notified),
    elsewhere (they already run: it counts only if they are queued again), ended: lists of names."""

    tasks: TaskRefs
    priority: Priority


class Groups(_Request, frozen=True, tag="groups"):
    """The groups of tasks of this node → groups: name slots (null: any number) paused taken running waiting held."""


class Group(_Request, frozen=True, tag="group"):
    """Change a group → group, after the change. slots: limit on its leased tasks, 0 = none; paused: its tasks do not
    start; removed: forget its settings; null: unchanged."""

    name: GroupName
    slots: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    paused: bool | None = None
    removed: bool = False


class Drain(_Request, frozen=True, tag="drain"):
    """Drain this node: it takes no more tasks, and waiting remote ones are given back → returned, running (numbers).
    wait: this comes as ``more``, and the ok (timed_out) when nothing runs here and no task of another home is here."""

    reason: Annotated[str, Meta(max_length=DRAIN_REASON_CHARS_MAX)] = ""
    wait: bool = False
    timeout_s: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None


class Undrain(_Request, frozen=True, tag="undrain"):
    """Undrain this node: it takes tasks again → was_drained."""


class ReadOutput(_Request, frozen=True, tag="output"):
    """The output of one task → ``more`` {stream: 1|2, offset, data: bytes, attempt}, then ok {id state exit_code signal
    node reason, stdout_bytes, stderr_bytes}. follow: until it has ended (also waits for its start); otherwise the
    present output. tail_bytes, tail_lines: only the last bytes or lines of the present output of each stream; with
    follow and tail_lines a piece without data first gives the start of each stream. tells_start: also ``more``
    {running: {node, attempt}} before the output of a running attempt, and {ended: {node, attempt}} before the remaining
    output of an ended one. done_with: once all is sent, no more of it is kept than of any output. behind: why the
    newest output of a running task is missing, only if its node cannot be asked. If the task's home is away, the node
    that runs it answers, and says so first: ``more`` {away: {id home why}}."""

    task: TaskRef
    follow: bool = False
    streams: Annotated[tuple[Annotated[int, Meta(ge=1, le=2)], ...], Meta(min_length=1, max_length=2)] = (1, 2)
    tail_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] | None = None
    tells_start: bool = False
    tail_lines: Annotated[int, Meta(ge=0, le=1 << 40)] | None = None
    done_with: bool = False


class Exec(_Request, frozen=True, tag="exec"):
    """Run a command inside a task that runs on the node asked: in its working directory, environment and cgroup →
    ``more`` {stream: 1|2, offset, data: bytes}, the first one immediately and with ``command``, the key of this command
    in the requests `input`, `resize` and `signal` of the same client; then ok {exit_code signal reason}. It is killed
    when the client disconnects. takes_input: its standard input comes by `input` requests, else it reads /dev/null;
    terminal: it gets a terminal; environment: MessagePack map of variables that are added to the task's."""

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
    """Send standard input to a task whose spec takes_input → offset (bytes received), wanted (false: the task takes no
    more), ended. Answered when more can be sent. offset: of this piece, so that repeated bytes are not read twice, null
    = at the end; ends: this is the last piece; is_source: it also ends when this client disconnects. Only one client at
    a time may send input to a task without a terminal. command: send it to this command of `exec` instead."""

    task: TaskRef
    data: Annotated[bytes, Meta(max_length=INPUT_BYTES_MAX)] = b""
    offset: Annotated[int, Meta(ge=0, le=1 << 60)] | None = None
    ends: bool = False
    is_source: bool = False
    command: CommandKey = ""


class Resize(_Request, frozen=True, tag="resize"):
    """Set the window size of a task with a terminal → ok. command: of this command of `exec` instead."""

    task: TaskRef
    rows: Annotated[int, Meta(ge=1, le=65_535)]
    columns: Annotated[int, Meta(ge=1, le=65_535)]
    command: CommandKey = ""


class Attend(_Request, frozen=True, tag="attend"):
    """Attend a task again that was submitted as attended → attended (false: it has ended, or was detached)."""

    task: TaskRef


class Detach(_Request, frozen=True, tag="detach"):
    """Detach an attended task: it is not cancelled when this connection closes, and its input stays open → ok."""

    task: TaskRef


class Clean(_Request, frozen=True, tag="clean"):
    """Drop ended tasks and their outputs → ``more`` {tasks (ids)} any number of times, then ok {removed, outputs (numbers),
    output_bytes, in_use (number kept because a client follows or waits for them)}. older_s, states, tasks and keep (all but
    the newest so many) narrow the selection. outputs_only: the tasks themselves stay. dry_run: drop nothing, with the same
    answer."""

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
    guests guests_gone counts events took_s. since: the ``revision`` of an earlier answer: only changes since then, and the
    names of removed ones; everything, and ``complete``, if that revision is not known any more. events: the newest
    ``events_max`` with greater numbers than ``events_after``."""

    since: Annotated[str, Meta(max_length=100)] = ""
    events_after: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    events_max: Annotated[int, Meta(ge=0, le=1000)] = 100


class Policy(_Request, frozen=True, tag="policy"):
    """Available policies and the preset in force → policies, presets, in_force."""


class Files(_Request, frozen=True, tag="files"):
    """Files that travel with tasks. have: → missing: those of these BLAKE3 digests whose blocks are not here; blocks: keep
    these; manifest: → complete: it and all its blocks are here; gc: remove files that no task needs → removed_bytes. Without any
    of them → size_bytes limit_bytes blocks snapshots (id bytes files used_at in_use) environments (id name bytes
    used_at in_use)."""

    have: Annotated[tuple[Digest, ...], Meta(max_length=BLOCKS_MAX)] = ()
    blocks: Annotated[tuple[Annotated[memoryview, Meta(max_length=1 << 20)], ...], Meta(max_length=BLOCKS_MAX)] = ()
    manifest: Annotated[bytes, Meta(max_length=32)] = b""
    gc: bool = False


class Power(_Request, frozen=True, tag="power"):
    """Power of this node → node watts quality scope source sources (name scope quality watts why of each) curve (watts cores
    threads smt_gain all_core quality)."""


class KeepPowerProfile(_Request, frozen=True, tag="power-profile"):
    """Store a measured power profile → the stored profile (cpu levels watts sd governor source scope date curve). measured:
    threads, watts, standard deviation and work rate of each level, of a machine with so many cores and threads; document: a
    stored profile instead."""

    measured: Annotated[tuple[tuple[int, float, float, float], ...], Meta(max_length=LEVELS_MAX)] = ()
    cores: Annotated[int, Meta(ge=1, le=65536)] = 1
    threads: Annotated[int, Meta(ge=1, le=65536)] = 1
    document: Annotated[bytes, Meta(max_length=PROFILE_BYTES_MAX)] = b""


class Energy(_Request, frozen=True, tag="energy"):
    """Joules of this node since ``since`` (Unix s) → node since until joules wh tasks_joules other_joules idle_joules gap_s quality scope
    source, null where nothing was counted."""

    since: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0


class Stats(_Request, frozen=True, tag="stats"):
    """Counters since the agent's start, gauges and histograms → counters, gauges: {name: number}, histograms: {name: bounds counts
    sum}; counts: one for each bound, then one for greater values."""


class ReadSamples(_Request, frozen=True, tag="samples"):
    """History of the cluster's load as this node saw it, after `since` (Unix s) → every_s keys samples: a list of numbers each,
    in the order of keys."""

    since: float = 0.0


class Checkup(_Request, frozen=True, tag="checkup"):
    """Health of the agent, for `doctor` → node python event_loop launcher (pid units memory unenforced silent) disk (state
    free_bytes total_bytes low_bytes reserve_bytes reserve_bytes_max stalled) broker (null, or urls url why) peers (node
    state address linked met_s datagram_age_s clock_ahead_s issuer) clashes ({name: address}: agents that were refused since their
    name is taken) listen_absent (this machine does not have the address where it listens) damaged (id why) lost (null, or text about data that the database has lost) removed_early (null, or tasks
    at why: removed within a day of their end for lack of room) frozen (frozen tasks of other homes) trouble
    certificate_until issuer (it has the CA's key) revoked (its certificate was)."""


class Settings(_Request, frozen=True, tag="settings"):
    """The settings of this agent → settings: key value origin of each, without the passwords of brokers."""


class Stop(_Request, frozen=True, tag="stop"):
    """Stop the agent → pid running (the number of tasks that run here), then it stops. all: these and the launcher end too."""

    all: bool = False


class Leave(_Request, frozen=True, tag="leave"):
    """Take this node out of its cluster → pid, node, left_behind (text about its remaining tasks); then the agent
    stops and forgets the other members. force: also with such tasks."""

    force: bool = False


class Forget(_Request, frozen=True, tag="forget"):
    """Forget a node that is gone for good → node, was (the state it had), tasks (how many of this home waited
    for it), ended (how many of its own ended here). Refused if it is unknown or alive."""

    node: NodeName


class Invite(_Request, frozen=True, tag="invite"):
    """Make an invitation → token (one word, a secret), address, cluster, uses, ends_at. node: the only name that may join; issuer:
    the new member may invite others, too."""

    uses: Annotated[int, Meta(ge=1, le=1000)] = 1
    ttl_s: Annotated[float, Meta(ge=1.0, le=604_800.0)] = 900.0
    node: Annotated[str, Meta(pattern=r"^([a-z0-9-]{1,40})?\Z")] = ""
    issuer: bool = False


class RevokeRequest(_Request, frozen=True, tag="revoke"):
    """Revoke a node → node, was (the state it had, null: not known), told (members informed at once), was_issuer. force: also if
    it is not known here."""

    node: NodeName
    force: bool = False


class Rotate(_Request, frozen=True, tag="rotate"):
    """Change the key of gossip and MQTT → number (of the new key), told (members informed at once), overlap_s (time for which
    the old key is still accepted)."""


class Restart(_Request, frozen=True, tag="restart"):
    """Stop the agent and start it in the same process, with the settings read again → pid, boot (of the start
    that ends). Running tasks run on."""

    reason: Annotated[str, Meta(max_length=100)] = ""


TaskCommand = (
    Cancel | CancelRemote | SendSignal | Hold | Release | Prio | Group | Groups | Clean | Wait | ReadOutput | Exec
    | Input | Resize | Attend | Detach
)  # fmt: skip
"""Requests that change tasks, or follow them."""
TaskQuery = TasksRequest | Select | History | Remote | Show | Events | ExplainTask | ReadUsage | Overview | Files
"""Requests for lists and explanations, which see everything that was decided before them."""
NodeQuery = Info | Settings | Nodes | Policy | Power | KeepPowerProfile | Energy | Stats | ReadSamples | Checkup
"""Requests that the node answers at once, from what it knows of itself and its cluster."""
NodeCommand = Drain | Undrain | Leave | Forget | Stop | Restart | Invite | RevokeRequest | Rotate
"""Requests that change the node or its cluster."""
Request = Submit | RetryRequest | TaskCommand | TaskQuery | NodeQuery | NodeCommand

_decoder = msgspec.msgpack.Decoder(Request)
REQUEST_VALUES_MAX = 1 << 20
"""Bound on the values in one request, such as the words of 100,000 commands."""


def decode_request(raw: bytes | memoryview) -> Request:
    """Decode one request. Raises BadMessage, whatever the bytes are."""
    try:
        check_bounds(raw, REQUEST_VALUES_MAX)
        request: Request = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadMessage("not a request this agent understands", why=validation_error_text(error)[:300]) from None
    return request


def encode(body: object) -> bytes:
    raw = msgspec.msgpack.encode(body)
    return len(raw).to_bytes(4, "big") + raw


def encode_request(request: Request) -> bytes:
    """Encode a decoded request, without values at their defaults."""
    return msgspec.msgpack.encode(request)


class ResponseFrame(msgspec.Struct, frozen=True):
    """A frame of an answer: exactly one of its three bodies is present."""

    id: RequestId = 0
    ok: dict[str, Any] | None = None
    more: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


ANSWER_VALUES_MAX = 1 << 18
"""Bound on the values in one frame of an answer; agents send answers in parts long before that."""
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
