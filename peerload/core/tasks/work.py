"""The two kinds of work a node holds: tasks whose home it is, and guests, attempts committed to it by other homes."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from peerload.model.devices import GpuShare
from peerload.model.messages import Need
from peerload.model.submit_options import NO_TERMS
from peerload.model.task import ExecutionRecord, ExecutionState, execution_key

if TYPE_CHECKING:
    from peerload.model.submit_options import SubmitOptions
    from peerload.model.task import Exit, TaskRecord, TaskSpec


class HomePhase(enum.Enum):
    """What a home knows of its task beyond the durable state; kept in memory only."""

    WAITING = enum.auto()
    """Queued here, may start here or be offered."""
    OFFERED = enum.auto()
    """Queued, and an offer is out: it must not start here."""
    RESTING = enum.auto()
    """Queued, but an attempt of it was lost, or has failed: it waits a while before it is considered."""
    GATED = enum.auto()
    """Queued, but it has to wait for other tasks, or for a slot of its group: nobody is offered it."""
    HELD = enum.auto()
    """Kept back until it is released."""
    HERE = enum.auto()
    """Leased to this node itself: starting, running or ending."""
    AWAY = enum.auto()
    """Leased to another node."""
    COLLECTING = enum.auto()
    """The result is known, its output is on the way home."""
    UNKNOWN = enum.auto()
    """It may run once only, and what became of that is not known (yet)."""
    OVER = enum.auto()
    """Final; kept only while its process is still being ended here."""


class RemotePhase(enum.Enum):
    """What an executor knows of an attempt of another home."""

    RESERVED = enum.auto()
    """Accepted: room is kept until the COMMIT comes or time is up."""
    WAITING = enum.auto()
    """Committed, in this node's queue."""
    HERE = enum.auto()
    """START is durable: starting, running or ending."""
    ENDED = enum.auto()
    """RESULT is durable; repeated until it is acknowledged."""


class Work:
    """What both have in common: enough to wait in the queue and to be started.

    order: the place in the order of arrival at this node; withheld: an offer is out, so it must not start here;
    started_s: when it took its room here (boot time); keys: what its command is known by, once that was asked for;
    devices: the ids of those it was given, here or, as its node has said, there; reserved: of those that are kept for it, once nobody may overtake it there.
    """

    __slots__ = (
        "arrived_s",
        "devices",
        "is_local",
        "keys",
        "killed_because",
        "order",
        "reserved",
        "spec",
        "started_s",
        "task",
        "uid",
        "withheld",
    )

    def __init__(self, task: str, uid: bytes, spec: TaskSpec, arrived_s: float, *, is_local: bool) -> None:
        self.task = task
        self.uid = uid
        self.spec = spec
        self.arrived_s = arrived_s
        self.is_local = is_local
        self.order = 0
        self.withheld = False
        self.killed_because = ""
        self.started_s = 0.0
        self.keys: tuple[bytes, ...] = ()
        self.devices: tuple[str, ...] = ()
        self.reserved: tuple[str, ...] = ()

    def moves(self) -> int:
        """Placements away from its home by choice, so far."""
        return 0


class HomeTask(Work):
    """A task of this home with its durable record and what is known of it in memory.

    deadline_s: when the lease of an AWAY task has run out for sure; commits: how often COMMIT was handed over; heard_ts:
    the newest that its node's clock was heard to show, 0 = nothing since this home's start;
    cannot_here: why this home can never run it, though its profile fits (no such directory);
    is_forgotten_there: its node came back with an older database. false_starts: how often this node could not start it; stranded_because: why it has no place now; collected_attempt:
    the one whose output is on its way, collected_from whom; uncollected_because: why its result, which its node has, could not be kept here the last time; why_over: why it is not tried again; signalled: (attempt, the signals that a user has sent it); terms: what only its home
    has to know.
    """

    __slots__ = (
        "backoff_s",
        "cannot_here",
        "collected_attempt",
        "collected_from",
        "commits",
        "deadline_s",
        "exit",
        "false_starts",
        "heard_ts",
        "is_forgotten_there",
        "offer_only",
        "offered_to",
        "on_decline_search",
        "phase",
        "record",
        "repeat_s",
        "running_at",
        "search",
        "signalled",
        "stranded_because",
        "terms",
        "uncollected_because",
        "voluntary",
        "why_over",
    )

    def __init__(self, record: TaskRecord, spec: TaskSpec, arrived_s: float, terms: SubmitOptions = NO_TERMS) -> None:
        spec = as_recorded(spec, record)
        super().__init__(record.task, record.uid, spec, arrived_s, is_local=True)
        self.record = record
        self.terms = terms
        self.phase = HomePhase.WAITING
        self.search: int | None = None
        self.offered_to = ""
        self.offer_only = False
        self.on_decline_search = False
        self.voluntary = False
        self.commits = 0
        self.deadline_s = 0.0
        self.repeat_s = 0.0
        self.false_starts = 0
        self.is_forgotten_there = False
        self.backoff_s = 0.0
        self.running_at = 0.0
        self.heard_ts = 0.0
        self.stranded_because = ""
        self.cannot_here = ""
        self.collected_attempt = 0
        self.collected_from = ""
        self.exit: Exit | None = None
        self.why_over = ""
        self.uncollected_because = ""
        self.signalled: tuple[int, tuple[int, ...]] = (0, ())

    @property
    def key(self) -> str:
        """The name of the current attempt in launcher and spool."""
        return execution_key(self.uid, self.record.attempt)

    def moves(self) -> int:
        """As its durable record has it."""
        return self.record.migrations

    def need(self) -> Need:
        """What the task asks of a node."""
        return Need(self.spec.request, self.spec.placement, self.record.migrations)


class RemoteTask(Work):
    """An attempt of another home. ts: this node's clock at the newest message that its home has answered or told of;
    deadline_s: ts + the lease granted for it, when the launcher freezes it; infinite while the home has parked it
    (is_parked). is_revoked: its home was shut out of the cluster, and its processes are being ended."""

    __slots__ = (
        "attempt",
        "deadline_s",
        "exit",
        "home",
        "is_parked",
        "is_revoked",
        "key",
        "lease_s",
        "migrations",
        "migrations_max",
        "nonce",
        "phase",
        "repeat_s",
        "running_at",
        "ts",
    )

    def __init__(self, task: str, uid: bytes, attempt: int, home: str, spec: TaskSpec, arrived_s: float) -> None:
        super().__init__(task, uid, spec, arrived_s, is_local=False)
        self.attempt = attempt
        self.key = execution_key(uid, attempt)
        """The name of this attempt in launcher and spool."""
        self.home = home
        self.phase = RemotePhase.RESERVED
        self.nonce = 0
        self.ts = 0.0
        self.lease_s = 0.0
        self.deadline_s = 0.0
        self.is_parked = False
        self.is_revoked = False
        self.migrations = 0
        self.migrations_max = -1
        self.running_at = 0.0
        self.repeat_s = 0.0
        self.exit: Exit | None = None

    @classmethod
    def of(cls, record: ExecutionRecord, arrived_s: float) -> RemoteTask:
        """One that was durable: started (whether it still runs, its launcher knows) or ended."""
        guest = cls(record.task, record.uid, record.attempt, record.home, record.spec, arrived_s)
        guest.ts = record.ts
        guest.lease_s = record.lease_s
        guest.deadline_s = record.ts + record.lease_s
        guest.devices = record.devices
        guest.phase = RemotePhase.HERE
        if record.state is ExecutionState.RESULT:
            guest.phase = RemotePhase.ENDED
            guest.exit = record.exit
        return guest

    def record(self, state: ExecutionState) -> ExecutionRecord:
        """What is durable of it, once it has come so far."""
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
        """The id of the array that it is a member of; its own if it is of none."""
        return self.task.rpartition(".")[0] or self.task

    def moves(self) -> int:
        """As its home said with the offer."""
        return self.migrations

    @property
    def may_move(self) -> bool:
        """Whether its home would still place it elsewhere."""
        return self.migrations_max < 0 or self.migrations < self.migrations_max


def as_recorded(spec: TaskSpec, record: TaskRecord) -> TaskSpec:
    """What a task asks for by now, that was submitted with this."""
    if record.priority is not None and record.priority != spec.priority:
        spec = msgspec.structs.replace(spec, priority=record.priority)
    return with_more_memory(spec, record.gpu_mem_bytes, alone=record.gpu_alone)


def with_more_memory(spec: TaskSpec, gpu_mem_bytes: int, *, alone: bool) -> TaskSpec:
    """What a task asks for that has run out of GPU memory before: so much of each GPU (0: as it was submitted), and, if
    ``alone``, GPUs that it shares with nobody."""
    request = spec.request
    if gpu_mem_bytes:
        request = msgspec.structs.replace(request, gpu_mem_bytes=gpu_mem_bytes)
    if alone:
        request = msgspec.structs.replace(request, gpu_share=GpuShare.EXCLUSIVE, gpu_fraction=1.0)
    return spec if request is spec.request else msgspec.structs.replace(spec, request=request)
