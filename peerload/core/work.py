"""The two kinds of work of a node: tasks of this home, and remote tasks (attempts that other homes committed to it)."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from peerload.model.errors import InvariantBroken
from peerload.model.messages import Need, Staging
from peerload.model.resources import GpuShare
from peerload.model.task import NO_TERMS, ExecutionRecord, ExecutionState, Exit, execution_key, member_record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from peerload.model.task import SubmitOptions, TaskRecord, TaskSpec


class HomePhase(enum.StrEnum):
    """Phase of a task at its home, beyond the durable state; kept in memory only."""

    WAITING = "waiting"
    """Queued: it may start here, or be offered."""
    OFFERED = "offered"
    """Queued, and an offer is pending: it must not start here."""
    RESTING = "resting"
    """Queued, but an attempt was lost or has failed: it waits before it is considered again."""
    GATED = "gated"
    """Queued, but waits for other tasks or for a slot of its group: it is not offered to other nodes."""
    HELD = "held"
    """Held until a user releases it."""
    HERE = "here"
    """Leased to this node itself: starting, running or ending."""
    AWAY = "away"
    """Leased to another node."""
    COLLECTING = "collecting"
    """The result is known; its output is being fetched."""
    UNKNOWN = "unknown"
    """It may run only once, and the outcome of its attempt is not known (yet)."""
    OVER = "over"
    """Cancelled; kept only while its process is still being ended here."""

    __hash__ = str.__hash__  # as with `TaskState`


class RemotePhase(enum.StrEnum):
    """Phase of an attempt of another home at its executor."""

    RESERVED = "reserved"
    """Accepted: its resources are reserved until the COMMIT comes or the reservation times out."""
    WAITING = "waiting"
    """Committed, in this node's queue."""
    HERE = "here"
    """START is durable: starting, running or ending."""
    ENDED = "ended"
    """RESULT is durable; repeated until it is acknowledged."""


QUEUED_PHASES = (HomePhase.WAITING, HomePhase.OFFERED, HomePhase.RESTING, HomePhase.GATED)
"""The phases of a task that is QUEUED on disk and whose result is not known."""

HOME_TRANSITIONS: Mapping[HomePhase, tuple[HomePhase, ...]] = {
    HomePhase.WAITING: (
        HomePhase.OFFERED,
        HomePhase.RESTING,  # a lease that is missing in the database may be valid
        HomePhase.GATED,
        HomePhase.HELD,
        HomePhase.HERE,
        HomePhase.AWAY,  # accepted; or a node given up as lost returns with it (R11), as from other phases
        HomePhase.COLLECTING,  # a node given up as lost has its result, as from other phases
        HomePhase.OVER,
    ),
    HomePhase.OFFERED: (HomePhase.WAITING,),  # the offer is withdrawn before any other transition
    HomePhase.RESTING: (
        HomePhase.WAITING,
        HomePhase.HELD,
        HomePhase.AWAY,
        HomePhase.COLLECTING,
        HomePhase.OVER,
    ),
    HomePhase.GATED: (
        HomePhase.WAITING,
        HomePhase.HELD,
        HomePhase.AWAY,
        HomePhase.COLLECTING,
        HomePhase.OVER,
    ),
    HomePhase.HELD: (HomePhase.WAITING, HomePhase.AWAY, HomePhase.COLLECTING, HomePhase.OVER),
    HomePhase.HERE: (HomePhase.WAITING, HomePhase.RESTING, HomePhase.HELD, HomePhase.UNKNOWN, HomePhase.OVER),
    HomePhase.AWAY: (
        HomePhase.WAITING,
        HomePhase.RESTING,
        HomePhase.HELD,
        HomePhase.COLLECTING,
        HomePhase.UNKNOWN,
        HomePhase.OVER,
    ),
    HomePhase.COLLECTING: (  # its output did not come: back to the phase of its record
        HomePhase.WAITING,
        HomePhase.HELD,
        HomePhase.AWAY,
        HomePhase.UNKNOWN,
        HomePhase.OVER,
    ),
    HomePhase.UNKNOWN: (
        HomePhase.WAITING,
        HomePhase.RESTING,
        HomePhase.HELD,
        HomePhase.AWAY,
        HomePhase.COLLECTING,
        HomePhase.UNKNOWN,  # its node confirms that it has no attempt
        HomePhase.OVER,
    ),
    HomePhase.OVER: (),
}
"""Allowed transitions of phases at home; `docs/architecture.md` draws this table. A task that ends is forgotten in its
current phase, except a cancelled task whose process is still here."""

REMOTE_TRANSITIONS: Mapping[RemotePhase, tuple[RemotePhase, ...]] = {
    RemotePhase.RESERVED: (RemotePhase.WAITING,),
    RemotePhase.WAITING: (RemotePhase.HERE,),
    RemotePhase.HERE: (RemotePhase.ENDED,),
    RemotePhase.ENDED: (),
}
"""Allowed transitions of remote attempts. An attempt given back, refused or forgotten leaves the table in any phase."""


class Offering(NamedTuple):
    """The pending offer of an OFFERED task.

    is_voluntary: it counts as a migration; searches_on: a declined offer starts another search (not for a task that a
    node asked for). staging: the last report on its files and its environment, None = no report.
    """

    node: str
    is_voluntary: bool
    searches_on: bool
    staging: Staging | None = None


class GrantedLease(msgspec.Struct, gc=False):
    """The newest lease that a home has granted to another node for a task. A task has one from its first COMMIT on,
    also after that node was given up as lost: it may return with the task (R11).

    deadline_s: the lease has surely expired then (boot time); repeat_s: the pause before the node is asked again;
    heard_ts: the newest time reported of the node's clock, 0 = none since this home's start; commits: how often COMMIT
    was sent; is_forgotten: the node returned with an older database.
    """

    repeat_s: float = 0.0
    heard_ts: float = 0.0
    commits: int = 0
    deadline_s: float = 0.0
    is_forgotten: bool = False


class Collection(msgspec.Struct, frozen=True, gc=False):
    """Result whose output is being fetched. A COLLECTING task has one, and keeps it if the fetch fails.

    why: why the task is not retried; failed_because: why the last attempt to store the output here failed; done_bytes:
    bytes of the output files that have arrived.
    """

    attempt: int
    node: str
    exit: Exit
    why: str = ""
    failed_because: str = ""
    done_bytes: int = 0


class Work:
    """A task or an attempt that may wait in the queue of this node and be started here.

    order: place in the order of arrival at this node; line: the line of its priority that it was last added to;
    is_queued: it waits in the queue, between ``before`` and ``after``; withheld: an offer is pending, so it must not
    start here; started_s: when it took its resources here (boot time); keys: identify its command, () until needed;
    devices: ids of its devices, here or as its node reported; reserved: ids of devices kept for it, once no task may
    overtake it there.
    """

    __slots__ = (
        "__dict__",  # for attributes that few tasks have: class attributes until they are set
        "after",
        "arrived_s",
        "before",
        "is_local",
        "is_queued",
        "keys",
        "line",
        "order",
        "spec",
        "task",
        "uid",
        "withheld",
    )
    count = 1
    """Number of tasks that this object represents."""
    killed_because = ""
    output_waits_because = ""
    """Reason why the output files of its ended process are not collected or placed yet."""
    started_s = 0.0
    devices: tuple[str, ...] = ()
    reserved: tuple[str, ...] = ()

    def __init__(self, task: str, uid: bytes, spec: TaskSpec, arrived_s: float, *, is_local: bool) -> None:
        self.task = task
        self.uid = uid
        self.spec = spec
        self.arrived_s = arrived_s
        self.is_local = is_local
        self.before: Work | None = None
        self.after: Work | None = None
        self.is_queued = False
        self.order = 0
        self.line = 0
        self.withheld = False
        self.keys: tuple[bytes, ...] = ()

    def moves(self) -> int:
        """Number of placements away from its home by choice."""
        return 0


class HomeTask(Work):
    """A task of this home: its durable record and its state in memory.

    search: the search for a place, 0 = the task waits for its turn; stranded_because: why it has no place now;
    backoff_s: the pause before a stranded task asks again; cannot_here: why this home can never run it, though its
    profile fits (no such directory); not_built: why its environment could not be built here; running_at: when its
    process started (Unix s), 0 = no known process; false_starts: how often nodes could not start it; signalled:
    (attempt, the signals that a user has sent it); terms: options that only its home needs.
    """

    __slots__ = ("phase", "record", "search", "terms")
    offering: Offering | None = None
    lease: GrantedLease | None = None
    collection: Collection | None = None
    backoff_s = 0.0
    stranded_because = ""
    cannot_here = ""
    not_built = ""
    running_at = 0.0
    false_starts = 0
    signalled: tuple[int, tuple[int, ...]] = (0, ())

    def __init__(
        self,
        record: TaskRecord,
        spec: TaskSpec,
        arrived_s: float,
        terms: SubmitOptions = NO_TERMS,
        phase: HomePhase = HomePhase.WAITING,
    ) -> None:
        spec = as_recorded(spec, record)
        super().__init__(record.task, record.uid, spec, arrived_s, is_local=True)
        self.record = record
        self.terms = terms
        self.phase = phase
        self.search: int | None = None

    @property
    def has_ended_elsewhere(self) -> bool:
        """True if the process of its attempt is known to have ended on its node, and its output waits."""
        is_collected = self.collection is not None and self.collection.attempt == self.record.attempt
        return is_collected or bool(self.output_waits_because)

    def enter(
        self, phase: HomePhase, *, offering: Offering | None = None, collection: Collection | None = None
    ) -> None:
        """Set the phase and its fields; no other method does. Raises InvariantBroken for a transition that is not in
        HOME_TRANSITIONS."""
        if (
            phase not in HOME_TRANSITIONS[self.phase]
            or (offering is None) == (phase is HomePhase.OFFERED)
            or (collection is None) == (phase is HomePhase.COLLECTING)
        ):
            raise InvariantBroken(f"{self.task}: {self.phase} → {phase}", story=story(self))
        self.phase = phase
        self.offering = offering
        if collection is not None:
            self.collection = collection

    @property
    def offered_to(self) -> str:
        """The node that holds its pending offer; "" if there is none."""
        return self.offering.node if self.offering is not None else ""

    @property
    def key(self) -> str:
        """The name of the current attempt in launcher and spool."""
        return execution_key(self.uid, self.record.attempt)

    def moves(self) -> int:
        """Number of moves in the task's durable record."""
        return self.record.migrations

    def need(self) -> Need:
        return Need(self.spec.request, self.spec.placement, self.record.migrations)


class UntouchedMembers(Work):
    """Waiting members of a uniform array of this home, next to each other in the queue, that differ only by number: one
    object for all. Before a member is started, offered, changed or shown, it is made a task of its own (`Home.touch`).

    task: the name of the array; ``order``: of the first member; members: their numbers; no other member of this array
    lies between the first and the last of them; record: their common record; uid_key: the key of their uids.
    """

    __slots__ = ("home", "members", "record", "terms", "uid_key")

    def __init__(
        self,
        home: MemberTable,
        members: range,
        record: TaskRecord,
        uid_key: bytes,
        spec: TaskSpec,
        arrived_s: float,
        terms: SubmitOptions,
    ) -> None:
        super().__init__(record.task, b"", spec, arrived_s, is_local=True)
        self.home = home
        self.members = members
        self.record = record
        self.uid_key = uid_key
        self.terms = terms

    @property
    def count(self) -> int:  # type: ignore[override]
        """Number of tasks that this object represents."""
        return len(self.members)

    def split(self, members: range) -> UntouchedMembers:
        """Some of these members as an object of their own."""
        return UntouchedMembers(self.home, members, self.record, self.uid_key, self.spec, self.arrived_s, self.terms)

    def member(self, number: int) -> HomeTask:
        """A member of the array as a task of its own."""
        record = member_record(self.record, self.uid_key, number)
        task = HomeTask(record, self.spec, self.arrived_s, self.terms)
        task.keys = self.keys
        return task


class MemberTable(Protocol):
    """Makes members of uniform arrays tasks of their own."""

    def touch(self, block: UntouchedMembers, member: int, /) -> HomeTask:
        """Make this member a task of its own, in the same place of the queue."""


class RemoteTask(Work):
    """An attempt of another home. ts: this node's clock at the newest message that its home has answered or mentioned;
    deadline_s: ts + the granted lease, when the launcher freezes it; infinite while its home has parked it (is_parked).
    unwanted_because: why its home left the cluster, while its processes are being ended. is_staging: it is reserved,
    and will be accepted when its files are here; no lease runs while they are copied."""

    nonce = 0
    ts = 0.0
    lease_s = 0.0
    deadline_s = 0.0
    is_parked = False
    unwanted_because = ""
    is_staging = False
    migrations = 0
    migrations_max = -1
    running_at = 0.0
    repeat_s = 0.0
    exit: Exit | None = None

    def __init__(
        self,
        task: str,
        uid: bytes,
        attempt: int,
        home: str,
        spec: TaskSpec,
        arrived_s: float,
        phase: RemotePhase = RemotePhase.RESERVED,
    ) -> None:
        super().__init__(task, uid, spec, arrived_s, is_local=False)
        self.attempt = attempt
        self.key = execution_key(uid, attempt)
        """The name of this attempt in launcher and spool."""
        self.home = home
        self.phase = phase

    @classmethod
    def of(cls, record: ExecutionRecord, arrived_s: float) -> RemoteTask:
        """Rebuild work from its durable row: started (the launcher knows whether it still runs) or ended."""
        has_ended = record.state is ExecutionState.RESULT
        phase = RemotePhase.ENDED if has_ended else RemotePhase.HERE
        remote = cls(record.task, record.uid, record.attempt, record.home, record.spec, arrived_s, phase)
        remote.ts = record.ts
        remote.lease_s = record.lease_s
        remote.deadline_s = record.ts + record.lease_s
        remote.devices = record.devices
        if has_ended:
            remote.exit = record.exit
        return remote

    def enter(self, phase: RemotePhase) -> None:
        """Set the phase; no other method does. Raises InvariantBroken for a transition that is not in
        REMOTE_TRANSITIONS."""
        if phase not in REMOTE_TRANSITIONS[self.phase]:
            raise InvariantBroken(f"{self.key} of {self.home}: {self.phase} → {phase}", story=story(self))
        self.phase = phase

    def record(self, state: ExecutionState) -> ExecutionRecord:
        """The durable record of this attempt in that state."""
        return ExecutionRecord(
            self.task,
            self.uid,
            self.attempt,
            self.home,
            state,
            self.spec,
            self.ts,
            self.lease_s,
            self.exit,
            self.devices,
        )

    @property
    def array(self) -> str:
        """The id of the array that it is a member of, or its own id."""
        return self.task.rpartition(".")[0] or self.task

    def moves(self) -> int:
        """Number of moves that its home stated with the offer."""
        return self.migrations

    @property
    def may_move(self) -> bool:
        """True if its home would still place it elsewhere."""
        return self.migrations_max < 0 or self.migrations < self.migrations_max


def as_recorded(spec: TaskSpec, record: TaskRecord) -> TaskSpec:
    """The spec of a task with the changes that its record has made since the submission."""
    if record.priority is not None and record.priority != spec.priority:
        spec = msgspec.structs.replace(spec, priority=record.priority)
    return with_more_memory(spec, record.gpu_mem_bytes, alone=record.gpu_alone)


def with_more_memory(spec: TaskSpec, gpu_mem_bytes: int, *, alone: bool) -> TaskSpec:
    """The spec of a task that ran out of GPU memory before: with this much memory of each GPU (0: unchanged), and, if
    ``alone``, with GPUs that it shares with no task."""
    request = spec.request
    if gpu_mem_bytes:
        request = msgspec.structs.replace(request, gpu_mem_bytes=gpu_mem_bytes)
    if alone:
        request = msgspec.structs.replace(request, gpu_share=GpuShare.EXCLUSIVE, gpu_fraction=1.0)
    return spec if request is spec.request else msgspec.structs.replace(spec, request=request)


def story(work: Work) -> str:
    """All that is known of a task or an attempt, for a bug report."""
    slots = {name for kind in type(work).__mro__ for name in getattr(kind, "__slots__", ())}
    names = (slots | vars(work).keys()) - {"__dict__", "before", "after"}
    return ", ".join(f"{name}={value!r}" for name in sorted(names) if (value := getattr(work, name)) not in (None, ""))
