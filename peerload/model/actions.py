"""Actions: what a node orders, in the imperative. `Node.handle` returns them; a driver carries them out in order.

*Outward* actions (`OUTWARD`) are visible from outside. Those that follow a `Persist` are released only when it is
durable, in order; the consumer of events does not wait for the disk. A granted lease waits only for rows of its own
tasks, because a late lease is worthless.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import msgspec

from peerload.model import rules
from peerload.model.events import Submission
from peerload.model.gossip import GossipMessage
from peerload.model.messages import Advice, Broadcast, Identity, Membership, Ownership
from peerload.model.resources import TaskCost
from peerload.model.task import (
    CompletionJob,
    ExecutionRecord,
    Exit,
    FenceKind,
    GroupSettings,
    TaskOutcome,
    TaskRecord,
    TaskSpec,
    Usage,
    member_record,
)
from peerload.model.timers import Timer

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Action(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Root of all actions; a recording identifies them by their names."""


# -- durable ---------------------------------------------------------------------------------------------------------


class PutRun(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Keep the incarnation of this run of the agent, and the id under which its database makes promises
    (`CoreState.store`)."""

    incarnation: int
    store: str


class PutMaking(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Begin to store the members of a large array, in parts. Before its PutSubmission they do not count: an agent that
    starts without one drops them, and does not use the number again."""

    counter: int


class PutSubmission(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Keep a submission (its spec once, for all its members)."""

    submission: Submission


class PutTask(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Store a task's record, with the event of this change of state: ``at`` Unix s, and the reason."""

    record: TaskRecord
    at: float
    reason: str


class PutMembers(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Store members of a uniform array whose records differ only by name and uid: new ones, or untouched ones that are
    cancelled. record: with the name of the array, without a uid; key: their uids are derived from it; first, last,
    step: the members; ``at`` and ``reason`` as in `PutTask`."""

    record: TaskRecord
    key: bytes
    first: int
    last: int
    step: int
    at: float
    reason: str

    @property
    def members(self) -> range:
        return range(self.first, self.last + 1, self.step)

    def rows(self) -> Iterator[PutTask]:
        """A row for each member, with the same meaning."""
        for member in self.members:
            yield PutTask(member_record(self.record, self.key, member), self.at, self.reason)


class PutUsage(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Store the resource usage of a cancelled task, after the end of its last attempt's processes. Only the first such
    row of a task counts, and only of this attempt at this node. task: "" = the one with this uid."""

    task: str
    uid: bytes
    attempt: int
    node: str
    usage: Usage


class PutExecution(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Keep an attempt committed to this node by another home: START(n), RESULT(n)."""

    record: ExecutionRecord


class DropExecution(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Forget an attempt after its ResultAck (the floor stays)."""

    uid: bytes
    attempt: int


class PutFloor(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Keep the highest attempt of a task that this node will never start (again), and why: REFUSED(n) and START(n). Of the
    same attempt the last kind counts; a lower one changes nothing. home: the home of the task, "" if unknown."""

    uid: bytes
    floor: int
    at: float
    kind: FenceKind = FenceKind.STARTED
    home: str = ""


class PutChores(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Store the completion jobs of a task that has ended; those of an array as a whole are stored with the end of
    its last member."""

    task: str
    chores: tuple[CompletionJob, ...]


class PutEvent(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Store one line of the event log (`EVENTS` lists the kinds). at: Unix s; node: the other node, if there is one."""

    at: float
    what: str
    state: str
    task: str = ""
    attempt: int = 0
    node: str = ""
    reason: str = ""


EVENTS: dict[str, tuple[str, ...]] = {
    "task": ("held", "queued", "leased", "running", "strayed", "parked", "done", "failed", "cancelled", "unknown"),
    "attempt": (
        "accepted", "queued", "started", "running", "strayed", "frozen", "thawed", "evicted", "parked", "returned",
        "refused", "revoked", "cancelled", "ended", "lost", "delivered",
    ),
    "node": ("alive", "suspect", "dead", "left", "forgotten", "skipped", "asleep", "waking", "not woken"),
    "agent": ("started", "stopping", "leaving", "draining", "undrained", "restarting", "reloaded", "not reloaded"),
    "join": ("invited", "welcomed", "refused"),
    "cluster": ("revoked", "rotated", "forged", "certified", "renewed"),
    "launcher": ("lost", "ready", "silent", "answers", "short", "recovered"),
    "disk": ("low", "full", "ok"),
    "energy": ("prices read", "prices refused", "control failed", "asleep", "not asleep", "awake"),
    "gpu": ("found", "ok", "degraded", "sick", "unknown", "mps", "mps-failed", "mps-unused"),
    "files": ("staged", "returning", "waiting", "returned"),
    "environment": ("building", "built", "failed"),
    "chore": ("saved", "notified", "postponed", "abandoned"),
    "hook": ("failed", "dropped"),
    "web": ("ended", "abandoned"),
    "store": ("damaged", "lost", "copied", "removed"),
    "security": rules.SECURITY_RULES,
}  # fmt: skip
"""The kinds of events with their states. ``task``: a task of this home; ``attempt``: a remote attempt here."""


class DropFloors(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Forget fences of tasks about which no message can arrive any more."""

    uids: tuple[bytes, ...]


class PutDrain(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Store that this node is drained, with the reason; None: it takes tasks again."""

    reason: str | None


class PutFate(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Keep the outcome of a task that tasks here depend on."""

    fate: TaskOutcome


class DropFates(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Forget outcomes that no task here depends on any more."""

    tasks: tuple[str, ...]


class PutGroup(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Keep the settings of a group."""

    group: GroupSettings


class DropGroup(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Forget the settings of a group."""

    name: str


Row = (
    PutRun | PutMaking | PutSubmission | PutTask | PutMembers | PutUsage | PutExecution | DropExecution | PutFloor
    | DropFloors | PutDrain | PutEvent | PutChores | PutFate | DropFates | PutGroup | DropGroup
)  # fmt: skip


class Persist(_Action, frozen=True):
    """Make these rows durable, all or none."""

    rows: tuple[Row, ...]


# -- outward ---------------------------------------------------------------------------------------------------------


class Send(_Action, frozen=True):
    """Send a message to one peer. Advice goes over MQTT if both are connected to it and their link carries no tasks
    now, otherwise over the peer link."""

    dst: str
    message: Membership | Advice | Ownership


class Announce(_Action, frozen=True):
    """Send a message to all nodes: over MQTT (this node's own State retained); without a broker to the peers one by one."""

    message: Broadcast


class Dial(_Action, frozen=True):
    """Make a peer link to this node if there is none."""

    identity: Identity


class WakePeer(_Action, frozen=True):
    """Wake a node that is asleep."""

    node: str


class DialAddress(_Action, frozen=True):
    """Make a peer link to the agent at this HOST:PORT, if there is none."""

    address: str


class ForgetPeer(_Action, frozen=True):
    """Forget the address of a node that is gone for good."""

    node: str


class SendGossip(_Action, frozen=True):
    """Send a sealed datagram to a node at this address (HOST:PORT). It may be lost; no answer is expected."""

    node: str
    address: str
    messages: tuple[GossipMessage, ...]


class SpawnTask(_Action, frozen=True):
    """Start the process of this attempt. deadline_s: CLOCK_BOOTTIME at which the launcher freezes it, 0 = never; ts: of
    the message that granted it, stored with it; frozen_s_max: maximum time frozen before it is ended; devices: ids of
    its devices; after: the key of the attempt whose end it waits for, "" = none."""

    key: str
    task: str
    attempt: int
    home: str
    spec: TaskSpec
    deadline_s: float = 0.0
    ts: float = 0.0
    frozen_s_max: float = 0.0
    devices: tuple[str, ...] = ()
    after: str = ""


class LookAtDevices(_Action, frozen=True):
    """Read all devices immediately, and report them with DevicesSampled: an attempt on some of them has ended."""


class FindTasks(_Action, frozen=True):
    """Look up these tasks or arrays of this home in the store, then answer with TasksFound."""

    tasks: tuple[str, ...]


class SignalTask(_Action, frozen=True):
    """Send a signal to the processes of this attempt."""

    key: str
    signal: int


class SetLease(_Action, frozen=True):
    """Move the time at which the launcher freezes this attempt (CLOCK_BOOTTIME s, 0 = never: parked); thaws it if it is
    frozen. ``ts`` is stored with it, so that it survives a restart of the agent."""

    key: str
    deadline_s: float
    ts: float = 0.0


class EvictTask(_Action, frozen=True):
    """End this attempt without a result if it is still frozen: its resources are needed. The launcher then reports it
    lost, with this reason."""

    key: str
    reason: str


class ForgetTask(_Action, frozen=True):
    """Drop the exit record and, with ``output``, the captured output of this attempt."""

    key: str
    output: bool


class SendResult(_Action, frozen=True):
    """Send a Result to its home, with the output itself if it is small."""

    dst: str
    task: str
    uid: bytes
    attempt: int
    exit: Exit


class StageFiles(_Action, frozen=True):
    """Bring the files of this offered attempt into its working directory, from ``sources`` or its home, then answer with
    FilesStaged; report progress to its home meanwhile."""

    key: str
    task: str
    uid: bytes
    attempt: int
    home: str
    spec: TaskSpec
    sources: tuple[str, ...] = ()


class KeepOutput(_Action, frozen=True):
    """Write the output inside a Result of ``node`` to this home's spool under ``key``, place its output files (files:
    their manifest), then answer with OutputArrived."""

    key: str
    task: str
    uid: bytes
    attempt: int
    stdout: bytes
    stderr: bytes
    node: str = ""
    files: bytes = b""


class FetchOutput(_Action, frozen=True):
    """Fetch the complete output of this attempt, of these sizes, from ``node`` into the spool under ``key``, and place its
    output files (files: their manifest); then OutputArrived."""

    key: str
    task: str
    uid: bytes
    attempt: int
    node: str
    stdout_bytes: int
    stderr_bytes: int
    files: bytes = b""


class Answer(_Action, frozen=True):
    """Answer a client's request: ``reply`` on success, else ``error`` (one of the model's errors)."""

    request: int
    reply: dict[str, object] = {}
    error: Exception | None = None


class AnswerPart(_Action, frozen=True):
    """Send lists of an answer ahead of it; the client joins them with later ones."""

    request: int
    reply: dict[str, object] = {}


class TaskChanged(_Action, frozen=True):
    """Report a task of this home that has a new durable record, or has been seen running (started_at and node set)."""

    record: TaskRecord
    running: bool
    reason: str


class MembersCancelled(_Action, frozen=True):
    """Report the cancel of untouched members of a uniform array: many `TaskChanged` in one. row: the durable row."""

    row: PutMembers

    def changes(self) -> Iterator[TaskChanged]:
        """A change for each member, with the same meaning."""
        for row in self.row.rows():
            yield TaskChanged(row.record, running=False, reason=row.reason)


class AttemptGone(_Action, frozen=True):
    """Report that all processes of this attempt, whose end was requested (EndAsked), have ended."""

    key: str


# -- inward ----------------------------------------------------------------------------------------------------------


class SetTimer(_Action, frozen=True):
    """Put TimerExpired(timer) into the inbox at ``at_s`` (CLOCK_BOOTTIME s); replaces a timer of the same name."""

    timer: Timer
    at_s: float


class ClearTimer(_Action, frozen=True):
    """Forget a timer."""

    timer: Timer


class Note(_Action, frozen=True):
    """Store an event with the rows of this turn, else with the next rows (or a second later): nothing waits for it, and
    a crash may lose the last ones."""

    event: PutEvent


class Decided(_Action, frozen=True, omit_defaults=True):
    """Record of a decision: the policy, the inputs with their age in seconds, the choice and the reason. compared: the
    costs behind it."""

    task: str
    policy: str
    inputs: tuple[tuple[str, float, float], ...]
    choice: str
    reason: str
    compared: tuple[TaskCost, ...] = ()


Outward = (
    Send | Announce | Dial | DialAddress | ForgetPeer | WakePeer | SpawnTask | FindTasks | SignalTask | SetLease
    | EvictTask | ForgetTask | StageFiles | SendResult | KeepOutput | FetchOutput | Answer | AnswerPart | TaskChanged
    | MembersCancelled | AttemptGone
)  # fmt: skip
OUTWARD: tuple[type, ...] = get_args(Outward)
Action = Outward | Persist | SendGossip | LookAtDevices | SetTimer | ClearTimer | Note | Decided
