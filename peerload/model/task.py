"""A task: its spec and terms, its durable life-cycle, and its outcome.

The life-cycle is that of the home node. ``running`` is not a durable state: the executor reports that a leased task has
started, and the home keeps that in memory.
"""

from __future__ import annotations

import enum
from functools import cached_property
from hashlib import blake2s
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from peerload.model.errors import BadRequest
from peerload.model.resources import Builder, Name, Placement, Quality, ResourceRequest, Speed

if TYPE_CHECKING:
    from collections.abc import Sequence


ARGV_ITEMS_MAX = 32_768
ARGV_BYTES_MAX = 1 << 20
ENVIRONMENT_BYTES_MAX = 256 << 10
ARRAY_MEMBERS_MAX = 1_000_000
PRIORITY_MAX = 1_000_000
Priority = Annotated[int, Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)]
PATH_BYTES_MAX = 4096
TIME_LIMIT_EXIT_CODE = 124
LEASE_S_MIN, LEASE_S_MAX = 1.0, 86_400.0
"""Bounds of a lease. It is renewed every quarter of its time, so a shorter one would cost too many renewals."""
GRANTS_KEPT_MAX = 16
"""Attempts of a task whose results are accepted. By default a task fails after fewer losses."""

TaskId = Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,40}/[0-9]{1,18}(\.[0-9]{1,9})?\Z")]
Uid = Annotated[bytes, Meta(min_length=16, max_length=16)]
ATTEMPT_MAX = 1 << 31
Attempt = Annotated[int, Meta(ge=0, le=ATTEMPT_MAX)]
Nonce = Annotated[int, Meta(ge=0, le=1 << 62)]

SCRATCH = b"-"
"""Placeholder for a fresh scratch directory on the node that runs the task."""


class Guarantee(enum.StrEnum):
    """Guarantee about the executions of a task; in every case one result at most is recorded.

    at-least-once: it runs until there is a result; two copies never execute at the same time. once: it is never started
    twice, and its outcome may stay unknown. fast: like at-least-once, but queued again as soon as its node is declared
    dead, so that two copies may overlap.
    """

    AT_LEAST_ONCE = "at-least-once"
    ONCE = "once"
    FAST = "fast"


class TaskState(enum.StrEnum):
    """The durable states of a task at its home."""

    HELD = "held"
    QUEUED = "queued"
    LEASED = "leased"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"

    __hash__ = str.__hash__  # Enum's is a Python function, and every change of a task uses states as keys

    @cached_property
    def is_final(self) -> bool:
        """True for a final state: no transition leaves it."""
        return not TRANSITIONS[self]


TRANSITIONS: dict[TaskState, tuple[TaskState, ...]] = {
    TaskState.HELD: (
        TaskState.QUEUED,
        TaskState.DONE,  # as for QUEUED
        TaskState.FAILED,
        TaskState.CANCELLED,
    ),
    TaskState.QUEUED: (
        TaskState.LEASED,
        TaskState.HELD,
        TaskState.DONE,  # an attempt given up as lost has a result after all
        TaskState.FAILED,
        TaskState.CANCELLED,
    ),
    TaskState.LEASED: (
        TaskState.QUEUED,  # refused, proven dead, or its lease has expired
        TaskState.HELD,  # its node was lost; a user should check it first
        TaskState.DONE,
        TaskState.FAILED,
        TaskState.CANCELLED,
        TaskState.UNKNOWN,
    ),
    TaskState.UNKNOWN: (
        TaskState.QUEUED,  # it is proven that the command was never started
        TaskState.DONE,
        TaskState.FAILED,
        TaskState.LEASED,
        TaskState.CANCELLED,
    ),
    TaskState.DONE: (),
    TaskState.FAILED: (),
    TaskState.CANCELLED: (),
}
"""Allowed transitions of task states; `docs/lifecycle.md` is drawn from this table."""


class TerminalSize(msgspec.Struct, frozen=True, gc=False):
    """The window of a terminal, in characters."""

    rows: Annotated[int, Meta(ge=1, le=65_535)]
    columns: Annotated[int, Meta(ge=1, le=65_535)]


WorkingDirectory = Annotated[bytes, Meta(min_length=1, max_length=PATH_BYTES_MAX)]


Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
OutputGlob = Annotated[str, Meta(min_length=1, max_length=1024)]
OUTPUT_GLOBS_MAX = 1000


class TaskFiles(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The files that travel with a task. manifest: id of the tree of its working directory at the start; size_bytes,
    count: of its files; outputs: globs of the files to bring home; returns_changes: without globs, all new or changed
    files are brought home."""

    manifest: Digest
    size_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    count: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    outputs: Annotated[tuple[OutputGlob, ...], Meta(max_length=OUTPUT_GLOBS_MAX)] = ()
    returns_changes: bool = False


class EnvironmentLock(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The environment of a task, which its node builds from a lock file before the task starts. manifest: id of the tree of
    its files; kind: of `BUILDERS`; name: of the file; python: the versions that it supports, "" = any."""

    manifest: Digest
    kind: Builder
    name: Name = ""
    python: Annotated[str, Meta(max_length=200)] = ""


class Staged(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Files of an ended attempt. in_bytes, in_s: fetched for it by its node, and the seconds until all was in place;
    outputs: id of the manifest of its output files, b"" = none; out_bytes, out_count: of these. conflicts: number of
    outputs stored beside a file that was changed at home."""

    in_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    in_s: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0
    outputs: Annotated[bytes, Meta(max_length=32)] = b""
    out_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    out_count: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    conflicts: Annotated[int, Meta(ge=0, le=1 << 40)] = 0


class TaskSpec(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Specification of a task: a command line and its requests. Bytes where the operating system has bytes.

    environment: a MessagePack map of bytes to bytes, opaque to the core; directory: an absolute path, or SCRATCH;
    umask: 0 … 0o777; time_limit_s: 0 = none; priority: the greater goes first. lease_s: how long its executor may be
    unreachable, at least LEASE_S_MIN, or 0 = its home's setting; lease_auto: the lease grows with its run time.
    takes_input: its standard input comes from its home, else from /dev/null; terminal: it gets a terminal, initially
    with this window, and stdout and stderr are one stream; followed: a client reads its output live, so more of it is
    stored than usual. user: the account that submitted it, which a home in system mode gets from the operating system;
    "" in user mode. named: variables that the submitter requested by name: they are also set if the task runs as
    another user. files: travel with it, into a working directory that is SCRATCH; lock: the environment in its PATH.
    """

    argv: Annotated[tuple[bytes, ...], Meta(min_length=1, max_length=ARGV_ITEMS_MAX)]
    directory: WorkingDirectory
    environment: Annotated[bytes, Meta(max_length=ENVIRONMENT_BYTES_MAX)] = b"\x80"
    umask: Annotated[int, Meta(ge=0, le=0o777)] = 0o022
    name: Name = ""
    request: ResourceRequest = ResourceRequest()
    placement: Placement = Placement()
    time_limit_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    priority: Priority = 0
    guarantee: Guarantee = Guarantee.AT_LEAST_ONCE
    lease_s: Annotated[float, Meta(ge=0.0, le=LEASE_S_MAX)] = 0.0
    lease_auto: bool = False
    takes_input: bool = False
    terminal: TerminalSize | None = None
    followed: bool = False
    user: Name = ""
    named: Annotated[tuple[Annotated[bytes, Meta(min_length=1, max_length=256)], ...], Meta(max_length=1024)] = ()
    files: TaskFiles | None = None
    lock: EnvironmentLock | None = None
    est_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    """Run time on the reference machine as estimated by its user, 0 = not given."""
    prefer: Literal["", "time", "balanced", "energy"] = ""
    """Goal of its placement: time, energy or both; "": as the preset says."""

    @property
    def is_staged(self) -> bool:
        """True if its node must fetch files or build an environment before it starts."""
        return self.files is not None or self.lock is not None

    def __post_init__(self) -> None:
        """Raise ValueError (when decoded: ValidationError) for values that no range excludes."""
        if 0.0 < self.lease_s < LEASE_S_MIN:
            raise ValueError(f"lease_s is 0 or {LEASE_S_MIN:g} … {LEASE_S_MAX:g}")


AFTER_MAX = 100
"""Tasks, or whole arrays, in each of ``after`` and ``after_ok``."""
RETRIES_MAX = 100

GroupName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}\Z")]
Tag = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}=[^\x00-\x1f\x7f]{0,128}\Z")]
"""A tag, `key=value`, by which users select tasks."""
TAGS_MAX = 16
Awaited = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=80)], ...], Meta(max_length=AFTER_MAX)]


NOTIFY_BYTES_MAX = 64 << 10

FilePattern = Annotated[bytes, Meta(max_length=PATH_BYTES_MAX)]


class CompletionJob(enum.StrEnum):
    """A job of a home after the end of a task: write the output files that its user named, or notify the user."""

    FILES = "files"
    NOTIFY = "notify"


class SubmitOptions(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Options of all tasks of one submission that only its home needs: they are not sent to other nodes.

    group: the group whose slots they take, "" = none; after: ids of tasks and arrays that must end before they start;
    after_ok: ids of those that must succeed; retries: number of times that a failed task is started again. output_file,
    error_file: files to which home writes the output of each, absolute paths with the placeholders %j, %A, %a, %x, %N and
    %%, b"" = none; notify: command for a shell at home when all of them have ended, b"" = none. owner: the uid of their
    user at a home in system mode, from the operating system, -1 = the agent's. tags: one `key=value` for
    each key. files_home: the directory to which output files return.
    """

    group: Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,39})?\Z")] = ""
    after: Awaited = ()
    after_ok: Awaited = ()
    retries: Annotated[int, Meta(ge=0, le=RETRIES_MAX)] = 0
    output_file: FilePattern = b""
    error_file: FilePattern = b""
    notify: Annotated[bytes, Meta(max_length=NOTIFY_BYTES_MAX)] = b""
    owner: Annotated[int, Meta(ge=-1, lt=1 << 32)] = -1
    tags: Annotated[tuple[Tag, ...], Meta(max_length=TAGS_MAX)] = ()
    files_home: FilePattern = b""
    start_by: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0
    """Unix time until which the start may wait for a cheaper hour, 0 = it does not wait."""

    @property
    def awaits(self) -> bool:
        return bool(self.after or self.after_ok)

    @property
    def is_conditional(self) -> bool:
        """True if its tasks wait for others, or for a slot of their group."""
        return bool(self.group or self.after or self.after_ok)

    def again(self) -> SubmitOptions:
        """The options of a task that repeats this one for a user: without dependencies."""
        return msgspec.structs.replace(self, after=(), after_ok=())

    def completion_jobs(self) -> tuple[CompletionJob, ...]:
        files = (CompletionJob.FILES,) if self.output_file or self.error_file else ()
        return (*files, CompletionJob.NOTIFY) if self.notify else files


NO_TERMS = SubmitOptions()


def owner_key(owner: int, user: str) -> str:
    """The owner of a submission as one word: a uid; or ``node:user`` if it came from another node (account names have
    no colon); "" = the agent's own."""
    return str(owner) if owner >= 0 else user


class TaskOutcome(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Outcome of a task, or of a whole array, that other tasks depend on. is_over: all of it has ended; failed: its
    failures as text, "" = none so far; lost: why the outcome can no longer be known, "" = it can."""

    task: str
    is_over: bool = False
    failed: str = ""
    lost: str = ""

    @property
    def is_news(self) -> bool:
        """True if the outcome has changed since the submission."""
        return bool(self.is_over or self.failed or self.lost)


class GroupSettings(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Settings of a group of tasks of this home. slots: limit on its leased tasks, 0 = none; is_paused: its tasks do
    not start."""

    name: str
    slots: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    is_paused: bool = False


WORDS_MAX = 200
"""Limit, in characters, on the reason of a failure, for tasks that depend on it."""


def failure_text(task: str, *, is_cancelled: bool, reason: str) -> str:
    """Text about a task that has not succeeded, for tasks that depend on it."""
    return f"{task} was cancelled" if is_cancelled else f"{task} failed ({reason})"[:WORDS_MAX]


class Usage(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Resources that an ended process used: cpu seconds, the largest resident set in bytes; the peak memory in bytes on
    any of its GPUs, and their model (0 and "": no GPU, or unknown)."""

    user_s: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0
    system_s: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0
    memory_bytes_max: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    gpu_memory_bytes_max: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    gpu_model: Annotated[str, Meta(max_length=96)] = ""
    joules: Annotated[float, Meta(ge=0.0, le=1e15)] | None = None
    """Energy beyond what the node would have drawn anyway; None: not known."""
    energy_quality: Quality | None = None
    energy_scope: Annotated[str, Meta(max_length=64)] = ""
    """Parts of the node that the joules include, such as ``package+dram+gpu``."""


class Exit(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The end of an attempt. exit_code: as a shell shows it: the process's own, 128 + signal, 124 time limit, 126
    cannot execute, 127 not found. signal: the one that ended it, or 0. The sizes are of the captured output. speed: of
    the node where it ran. out_of: the resource that it lacked, "" if it did not end for that; had_bytes: how much of
    that it could have had, 0 if unknown, or if others had taken its promised share. failed_device: the device whose
    failure ended it, "" if none. missing_bytes: captured output that could not be read or fetched. staged: its files,
    None = it had none. not_built: its environment could not be built, so that it never ran."""

    exit_code: Annotated[int, Meta(ge=0, le=255)]
    signal: Annotated[int, Meta(ge=0, le=255)] = 0
    reason: Annotated[str, Meta(max_length=512)] = ""
    started_at: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0
    ended_at: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0
    usage: Usage = Usage()
    stdout_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    stderr_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    speed: Speed = 1.0
    out_of: Literal["", "memory", "gpu memory"] = ""
    had_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    failed_device: Annotated[str, Meta(max_length=128)] = ""
    missing_bytes: Annotated[int, Meta(ge=0, le=1 << 61)] = 0
    staged: Staged | None = None
    not_built: bool = False


STAGING_EXIT_CODE = 125
REASON_CHARS_MAX = 512


def without_missing(exit_: Exit, missing: tuple[int, int], why: str) -> Exit:
    """The exit of an attempt, with the number of missing bytes of stdout and stderr, and a reason that says so."""
    if not any(missing):
        return exit_
    words = "; ".join(filter(None, (exit_.reason, f"{why} ({sum(missing)} bytes are missing)")))
    return msgspec.structs.replace(
        exit_,
        reason=words[:REASON_CHARS_MAX],
        stdout_bytes=max(exit_.stdout_bytes - missing[0], 0),
        stderr_bytes=max(exit_.stderr_bytes - missing[1], 0),
        missing_bytes=exit_.missing_bytes + sum(missing),
    )


def without_files(exit_: Exit, why: str) -> Exit:
    """The exit of an attempt whose files could not be staged or brought home: a failure; the reason says why."""
    words = "; ".join(filter(None, (f"staging: {why}", exit_.reason)))
    return msgspec.structs.replace(
        exit_, exit_code=exit_.exit_code or STAGING_EXIT_CODE, reason=words[:REASON_CHARS_MAX]
    )


SIGNALS = {
    1: "HUP", 2: "INT", 3: "QUIT", 4: "ILL", 6: "ABRT", 7: "BUS", 8: "FPE", 9: "KILL", 10: "USR1", 11: "SEGV",
    12: "USR2", 13: "PIPE", 14: "ALRM", 15: "TERM", 24: "XCPU", 25: "XFSZ",
}  # fmt: skip
"""Names of the signals that end processes, on Linux."""


def how_it_ended(exit_: Exit) -> str:
    """End of the attempt in words: the reason if there is one, else the signal or the exit code."""
    if exit_.reason:
        return exit_.reason
    if exit_.signal:
        name = SIGNALS.get(exit_.signal, "")
        return f"ended by signal {exit_.signal}" + (f" ({name})" if name else "")
    return f"exit code {exit_.exit_code}"


class Grant(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An attempt that was granted to a node other than its home."""

    attempt: int
    node: str


class TaskRecord(msgspec.Struct, frozen=True, gc=False):
    """The durable state of one task at its home: one row.

    attempt: the highest number ever granted (0 = none); node: lessee of the current attempt ("" = none); nonce,
    machine_boot, store: of the ACCEPT for this lease; lease_s: the longest single lease ever granted to this attempt;
    migrations: placements elsewhere by choice. parked_ts: time (the node's clock) of the last message of the node when
    the home parked the attempt, 0 = not parked: until the node confirms a newer deadline, only proof takes the attempt
    back. losses: attempts that ended without a result; lost_on: the nodes that were lost with them; last_node: the node
    that may still have the abandoned attempt; retry_of: the task that this one repeats. grants: attempts that may have
    a result, the newest last, at most GRANTS_KEPT_MAX: those granted to other nodes, except those that they promised
    never to start. devices: ids of its devices on this node. gpu_mem_bytes: memory of each GPU that replaces its
    request, 0 = as
    requested; gpu_alone: it no longer shares its GPUs; memory_retries: times it was queued again because it had run out
    of GPU memory. attended: it is cancelled when its client disconnects; input: name of its standard input in this
    home's spool, "" = none; input_is_cut: the beginning of that was dropped, so that no other attempt can read it;
    input_came: some of it has arrived, so that a repetition of the task needs it again. failures: times it failed and
    was queued again; priority: replaces the submitted one, None = unchanged; is_freed: it no longer waits for other
    tasks, because their outcome cannot be known. usage: of a cancelled task, once its processes are gone (`PutUsage`);
    None: not known. For other tasks it is in ``exit``.
    """

    task: str
    uid: bytes
    state: TaskState
    submitted_at: float
    attempt: int = 0
    node: str = ""
    nonce: int = 0
    machine_boot: str = ""
    lease_s: float = 0.0
    migrations: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    exit: Exit | None = None
    reason: str = ""
    store: str = ""
    parked_ts: float = 0.0
    losses: int = 0
    lost_on: tuple[str, ...] = ()
    last_node: str = ""
    retry_of: str = ""
    grants: tuple[Grant, ...] = ()
    devices: tuple[str, ...] = ()
    gpu_mem_bytes: int = 0
    gpu_alone: bool = False
    memory_retries: int = 0
    attended: bool = False
    input: str = ""
    input_is_cut: bool = False
    failures: int = 0
    priority: int | None = None
    is_freed: bool = False
    input_came: bool = False
    usage: Usage | None = None


class FenceKind(enum.IntEnum):
    """The reason why a node will never start an attempt (again): it started it; it promised not to; or it started a task with
    `--once`, so that it keeps the fence until its home has confirmed it."""

    STARTED = 0
    REFUSED = 1
    STARTED_ONCE = 2


class ExecutionState(enum.StrEnum):
    """The durable states of an attempt at the node that runs it for another home."""

    START = "start"
    RESULT = "result"


class ExecutionRecord(msgspec.Struct, frozen=True, gc=False):
    """The durable state of one attempt that another home committed to this node: one row. devices: their ids."""

    task: str
    uid: bytes
    attempt: int
    home: str
    state: ExecutionState
    spec: TaskSpec
    ts: float
    lease_s: float
    exit: Exit | None = None
    devices: tuple[str, ...] = ()


SINGLE = -1
"""The member number of a task that is not in an array."""


def task_home(task: str) -> str:
    """The home node in a task id: ``ws1`` in ``ws1/42.7``."""
    return task.partition("/")[0]


def submission_of(task: str) -> int:
    """The submission's number in a task id: 42 in ``ws1/42.7``."""
    return int(task.partition("/")[2].partition(".")[0])


def member_of(task: str) -> int:
    """The member's number in a task id: 7 in ``ws1/42.7``; 0 for a task outside arrays."""
    return int(task.rpartition(".")[2]) if "." in task else 0


def order_of(task: str) -> tuple[int, int]:
    """The number of a task's submission, and of its member (SINGLE outside arrays)."""
    counter, dot, member = task.partition("/")[2].partition(".")
    return int(counter), int(member) if dot else SINGLE


def is_id(name: str) -> bool:
    """True for the id of a task; a damaged row may contain any name."""
    counter, dot, member = name.partition("/")[2].partition(".")
    return counter.isdecimal() and (not dot or member.isdecimal())


def task_name(node: str, counter: object, member: object) -> str:
    return f"{node}/{counter}" + (f".{member}" if member != SINGLE else "")


def ranges(numbers: Sequence[int]) -> list[range]:
    """Ascending numbers as ranges with a step."""
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:  # the usual case
        return [range(numbers[0], numbers[-1] + 1)]
    found: list[range] = []
    for number in numbers:
        last = found[-1] if found else range(0)
        if last and (len(last) == 1 or number == last[-1] + last.step):
            found[-1] = range(last[0], number + 1, number - last[-1])
        else:
            found.append(range(number, number + 1))
    return found


def member_record(record: TaskRecord, key: bytes, member: int) -> TaskRecord:
    """The record of a member of a uniform array, from the common record of its untouched members."""
    return msgspec.structs.replace(record, task=f"{record.task}.{member}", uid=member_uid(key, member))


def member_uid(key: bytes, member: int) -> bytes:
    """The uid of a member of a uniform array, derived from the array's secret: no other node can guess it."""
    return blake2s(key + b"%d" % member, digest_size=16).digest()


def execution_key(uid: bytes, attempt: int) -> str:
    """The name of one attempt of one task in the launcher and the spool."""
    return f"{uid.hex()}-{attempt}"


def attempt_of(key: str) -> tuple[bytes, int]:
    """The uid and the number of the attempt with this execution key. Raises ValueError if it is malformed."""
    uid, _, attempt = key.rpartition("-")
    return bytes.fromhex(uid), int(attempt)


_environment_decoder = msgspec.msgpack.Decoder(dict[bytes, bytes])


def variables_of(packed: bytes) -> dict[bytes, bytes]:
    """The variables of `TaskSpec.environment`, which peers and clients send unchecked. Raises BadRequest if it is
    malformed, or has a variable that no process can have: an empty name, a name with ``=``, a NUL byte."""
    try:
        variables = _environment_decoder.decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("the environment is not a map of bytes to bytes", why=str(error)[:200]) from None
    for name, value in variables.items():
        if not name or b"=" in name or b"\0" in name or b"\0" in value:
            shown = name[:80].decode("utf-8", "backslashreplace")
            raise BadRequest(f"{shown!r} cannot be an environment variable", why="it is empty, or has = or NUL in it")
    return variables
