"""Events: what can happen to a node. `Node.handle(now, event)` takes the union of all.

Names are in the past tense; each is a frozen value that recordings contain as well.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

from peerload.model.gossip import GossipMessage, MembershipUpdate
from peerload.model.messages import Identity, LinkMessage
from peerload.model.resources import Device, DeviceReading, LoadReport, PowerCurve, Profile
from peerload.model.task import (
    NO_TERMS,
    ExecutionRecord,
    Exit,
    FenceKind,
    GroupSettings,
    SubmitOptions,
    TaskOutcome,
    TaskRecord,
    TaskSpec,
    member_record,
)
from peerload.model.timers import Timer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet


class Instant(msgspec.Struct, frozen=True, gc=False):
    """A moment on two clocks of one node.

    ``boot_s`` is CLOCK_BOOTTIME in seconds and decides (suspend counts, clock steps do not);
    ``wall_s`` is Unix time in seconds and is for records and people only.
    """

    boot_s: float
    wall_s: float


class _Event(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Root of all events; a recording identifies them by their names."""


class _Request(_Event, frozen=True):
    """Root of events that are answered."""

    request: int


class Submission(msgspec.Struct, frozen=True, gc=False):
    """Acknowledged `submit`: a task, or an array of tasks with one spec.

    counter: the number in the id; indices: () for a single task, else the array's; each: if its members run different
    commands, that of member i is each[i - 1]; uid_key: of a uniform array, see `PutMembers`; token: the client's own,
    unique for 7 days, so that repeating a submit is safe; digest: of the payload, to distinguish a repeat from a
    mistake; terms: options that only this home needs.
    """

    counter: int
    token: str
    digest: bytes
    spec: TaskSpec
    indices: tuple[int, ...]
    submitted_at: float
    terms: SubmitOptions = NO_TERMS
    each: tuple[tuple[bytes, ...], ...] = ()
    uid_key: bytes = b""

    def spec_of(self, member: int) -> TaskSpec:
        """The spec of a member. ``member``: its number; any for a single task."""
        return self.spec if not self.each else msgspec.structs.replace(self.spec, argv=self.each[member - 1])


class TaskRow(msgspec.Struct, frozen=True, gc=False):
    """A task from the store at start: durable record, spec and terms; directory_here: its working directory exists on
    this node now."""

    record: TaskRecord
    spec: TaskSpec
    directory_here: bool = True
    terms: SubmitOptions = NO_TERMS


class MembersRow(msgspec.Struct, frozen=True, gc=False):
    """Untouched members of a uniform array from the store at start: they wait, and have no history. record, key, first,
    last, step: as in `PutMembers`; the rest as in `TaskRow`."""

    record: TaskRecord
    key: bytes
    first: int
    last: int
    step: int
    spec: TaskSpec
    directory_here: bool = True
    terms: SubmitOptions = NO_TERMS

    @property
    def members(self) -> range:
        return range(self.first, self.last + 1, self.step)

    def rows(self) -> Iterator[TaskRow]:
        """A row for each member, with the same meaning."""
        for member in self.members:
            record = member_record(self.record, self.key, member)
            yield TaskRow(record, self.spec, self.directory_here, self.terms)


class PastRun(msgspec.Struct, frozen=True):
    """An ended task of this home: its spec and its end."""

    spec: TaskSpec
    exit: Exit


Running = tuple[tuple[str, float, float], ...]
"""Attempts that a launcher runs: (execution key, start in Unix s, the newest ts applied to its lease). The start is
converted to the present date by the boot clock, so that a changed date does not affect the run time."""


class AgentStarted(_Event, frozen=True):
    """The first event: all that was durable, and all that the launcher still knows.

    tasks: unfinished ones of this home, and members: those of them stored together; executions: attempts for other
    homes without a ResultAck; floors: per uid the highest attempt never to be started (again), why, and the task's
    home; counter: the last task number used; running / ended: attempts (by execution key) that the launcher runs or has
    an exit record of; frozen: the frozen ones among the running. A START that is in neither has died. past: the last
    runs of tasks of this home, the oldest first, from which durations are learned; drained: why this node takes no
    tasks ("" is a reason, too), None if it does; known: members met before, with their last addresses; seeds: addresses
    (HOST:PORT) at which a member may be, tried without end. fates: outcomes of tasks that tasks here wait for; groups:
    those that a user has set; commits_lost: the database has lost its last commits, so that any of this may be
    outdated; revoked: nodes that were ever shut out of the cluster, and when (Unix s). attempts_from: the next attempt
    of a task of a submission up to attempts_up_to has at least this number, because a loss of commits may hide the use
    of lower numbers. wake_s: measured times that nodes took to wake; asleep: nodes that were asleep; gone: nodes that
    had left or were forgotten, with the age of that; prices: as in `PricesRead`.
    """

    tasks: tuple[TaskRow, ...] = ()
    executions: tuple[ExecutionRecord, ...] = ()
    floors: tuple[tuple[bytes, int, FenceKind, str], ...] = ()
    counter: int = 0
    running: Running = ()
    ended: tuple[tuple[str, Exit], ...] = ()
    frozen: tuple[str, ...] = ()
    past: tuple[PastRun, ...] = ()
    drained: str | None = None
    known: tuple[Identity, ...] = ()
    seeds: tuple[str, ...] = ()
    fates: tuple[TaskOutcome, ...] = ()
    groups: tuple[GroupSettings, ...] = ()
    commits_lost: bool = False
    revoked: tuple[tuple[str, float], ...] = ()
    attempts_from: int = 1
    attempts_up_to: int = 0
    members: tuple[MembersRow, ...] = ()
    wake_s: tuple[tuple[str, float], ...] = ()
    asleep: tuple[Profile, ...] = ()
    gone: tuple[MembershipUpdate, ...] = ()
    prices: tuple[tuple[float, float], ...] = ()


class TaskSubmitted(_Request, frozen=True):
    """A client asks to run a command. directory_here: the working directory exists on this node; before: what the store
    knows of an earlier submission with this token: (digest, id, members; 0 = a single task); held: it waits until it is
    released; retry_of: the id of the task that it repeats; waits_for_node: accept it even if no known node could ever
    run it; each: as in `Submission`; client: the connection that attends it, 0 = none; input: the name of its standard
    input, "" = nothing."""

    token: str
    digest: bytes
    spec: TaskSpec
    indices: tuple[int, ...] = ()
    directory_here: bool = True
    before: tuple[bytes, str, int] | None = None
    held: bool = False
    retry_of: str = ""
    waits_for_node: bool = False
    terms: SubmitOptions = NO_TERMS
    each: tuple[tuple[bytes, ...], ...] = ()
    client: int = 0
    input: str = ""


class AttendRequested(_Request, frozen=True):
    """A client attends its task again after a restart of this agent, which has lost its connections. Answered with
    ``attended``: whether the task still has to be attended."""

    client: int
    task: str


class DetachRequested(_Request, frozen=True):
    """A client detaches a task: it is not cancelled when its clients disconnect. Answered when that is durable."""

    task: str


class ClientGone(_Event, frozen=True):
    """A connection of a client that attended tasks is closed. Not answered."""

    client: int


class InputCut(_Event, frozen=True):
    """The standard input of a task of this home exceeds its limit: the part that was read must be dropped, once the
    task's record says so. Not answered."""

    uid: bytes


class InputCame(_Event, frozen=True):
    """The first bytes of the standard input of a task of this home have arrived. Not answered."""

    uid: bytes


class CancelRequested(_Request, frozen=True):
    """A client wants tasks of this home cancelled: ids of tasks or of whole arrays."""

    tasks: tuple[str, ...]
    signal: int = 15
    force: bool = False


class CancelledAttempt(msgspec.Struct, frozen=True):
    """An attempt of a cancelled task of this home, and the node that had it."""

    task: str
    uid: bytes
    attempt: int
    node: str


class EndAsked(_Event, frozen=True):
    """A client waits for the end of the processes of these attempts: AttemptGone reports each. query: ask the other
    nodes, because their answer may have been lost. Repeated from time to time, because no entry is kept without end."""

    attempts: tuple[CancelledAttempt, ...]
    query: bool = False


class SignalRequested(_Request, frozen=True):
    """A client wants a signal sent to a running task, which may continue."""

    task: str
    signal: int


class HoldRequested(_Request, frozen=True):
    """A client holds waiting tasks of this home: ids of tasks or of whole arrays. Answered with ``held``,
    ``already_held`` and ``not_waiting`` (names of which no task waited)."""

    tasks: tuple[str, ...]


class ReleaseRequested(_Request, frozen=True):
    """A client releases held tasks; their lost attempts are forgotten. Answered with ``released`` and
    ``not_held``."""

    tasks: tuple[str, ...]


class PriorityRequested(_Request, frozen=True):
    """A client changes the priority of tasks of this home: ids of tasks or of whole arrays. Answered with ``changed``,
    ``elsewhere`` (names with a task that already runs on another node, where nothing changes) and ``ended``."""

    tasks: tuple[str, ...]
    priority: int


class GroupRequested(_Request, frozen=True):
    """A client changes a group: its ``slots`` (0: no limit), whether it is ``paused``, or that it is removed; None:
    unchanged. Answered with the resulting group."""

    name: str
    slots: int | None = None
    paused: bool | None = None
    removed: bool = False


class TaskFound(msgspec.Struct, frozen=True, gc=False):
    """The durable outcome of a task or an array of this home. failed: failures as text; is_over: all has ended."""

    task: str
    is_known: bool
    failed: str = ""
    is_over: bool = False


class TasksFound(_Event, frozen=True):
    """The answer to FindTasks."""

    found: tuple[TaskFound, ...]


class DrainRequested(_Request, frozen=True):
    """A client drains this node: it takes no more tasks. Waiting remote tasks are given back, its own look for another
    node, running ones run on. Answered with ``returned`` and ``running`` (numbers of tasks)."""

    reason: str = ""


class EmptyAwaited(_Request, frozen=True):
    """Request to wait until nothing runs on this drained node and no remote task is here. The answer then is empty; it
    is an error as soon as the node is no longer drained."""


class EmptyAwaitedNoMore(_Request, frozen=True):
    """The client of a request has disconnected or given up. Not answered."""


class UndrainRequested(_Request, frozen=True):
    """A client undrains this node: it takes tasks again."""


class ForgetRequested(_Request, frozen=True):
    """A client declares a node gone for good, which proves the loss of the tasks that are parked there, and ends that
    node's tasks here. Answered with ``node`` and ``tasks`` (the number of tasks that waited for it)."""

    node: str


class NodeRevoked(_Event, frozen=True):
    """A node was revoked: its tasks may neither run nor wait on this node any longer."""

    node: str


class RemoteCancelRequested(_Request, frozen=True):
    """A client ends tasks of other homes on this node: ids of tasks or of whole arrays. reason: the client, as text.
    Answered with ``cancelled`` and ``already_ended`` (ids)."""

    tasks: tuple[str, ...]
    signal: int
    force: bool
    reason: str


class DiskRoomChanged(_Event, frozen=True):
    """The disk of this node's store has enough free room for more tasks again, or no longer has."""

    has_room: bool
    trouble: str = ""


class CoresEnforced(_Event, frozen=True):
    """The launcher enforces the processor shares of tasks on this node."""


class PricesRead(_Event, frozen=True):
    """Price of energy, or its carbon, over time: (start, Unix s, value per kWh), ascending; empty: unknown."""

    prices: tuple[tuple[float, float], ...]


class MachineSleeping(_Event, frozen=True):
    """This machine is about to sleep: tasks of this home on other nodes are parked. is_suspended: it will run nothing,
    so that other nodes are notified; not while there are tasks."""

    is_suspended: bool = False


class MachineWoke(_Event, frozen=True):
    """This machine has woken from suspend."""


class PeerMet(_Event, frozen=True):
    """A peer introduced itself, over the peer link (Hello) or over MQTT (State)."""

    identity: Identity
    profile: Profile
    report: LoadReport
    known: tuple[Identity, ...] = ()
    retained: bool = False
    refutation: int = 0


class PeerUnreachable(_Event, frozen=True):
    """The peer link to a node broke, or could not be made."""

    node: str
    reason: str


class MessageReceived(_Event, frozen=True):
    """A message of a peer arrived. For an Offer: directory_here: its working directory exists on this node; refused:
    why the policy of this node runs no tasks of its user, "" if it does; stalled: why it is not known whether the
    directory exists, "" if it is known."""

    src: str
    message: LinkMessage
    directory_here: bool = True
    refused: str = ""
    stalled: str = ""


class Together(_Event, frozen=True):
    """Consecutive events that are decided together: each has the same effects as alone, but what to start or request
    next is decided once."""

    events: tuple[MessageReceived | TaskStarted | TaskEnded | OutputArrived, ...]


class GossipReceived(_Event, frozen=True):
    """A datagram came from this start of a node's agent, at this address (HOST:PORT, "": as known). protocol_min,
    protocol_max: the versions that it supports."""

    src: str
    src_boot: str
    messages: tuple[GossipMessage, ...]
    address: str = ""
    protocol_min: int = 1
    protocol_max: int = 1


class LoopLagged(_Event, frozen=True):
    """The event loop lagged for this time: messages missed meanwhile are not the fault of other nodes."""

    lag_s: float


class SendFailed(_Event, frozen=True):
    """A message never left this agent: no node can have read it."""

    dst: str
    message: LinkMessage


class TimerExpired(_Event, frozen=True):
    """A timer that the core had set expired."""

    timer: Timer


class TaskStarted(_Event, frozen=True):
    """The launcher has the process of this attempt. started_at: Unix s."""

    key: str
    started_at: float


class TaskEnded(_Event, frozen=True):
    """The process of this attempt is gone and its exit record is kept (D4). with_start: no `TaskStarted` came before."""

    key: str
    exit: Exit
    with_start: bool = False


class TaskLost(_Event, frozen=True):
    """An attempt has no process and will have none. never_started: it never had one: its lease had expired when the
    launcher got the order, or the machine lacked a resource. shortage: that resource, "" if none."""

    key: str
    reason: str
    never_started: bool = False
    shortage: str = ""


class TaskFrozen(_Event, frozen=True):
    """The launcher has frozen this attempt because its lease expired; or (``frozen`` False) it runs again."""

    key: str
    frozen: bool


class LauncherLost(_Event, frozen=True):
    """The launcher died, its tasks are being ended and a new one is starting; or, as ``reason`` says, its connection
    broke."""

    reason: str = "its tasks are being ended, and another one is starting"


class LauncherSilent(_Event, frozen=True):
    """The launcher does not answer, and its orders may not be carried out; or (``is_silent`` False) it answers again."""

    is_silent: bool


class LauncherReady(_Event, frozen=True):
    """A (new) launcher answers. Every attempt that it neither runs nor has an exit record of has died."""

    running: Running = ()
    ended: tuple[tuple[str, Exit], ...] = ()
    frozen: tuple[str, ...] = ()

    def without(self, keys: AbstractSet[str]) -> LauncherReady:
        return LauncherReady(
            tuple(run for run in self.running if run[0] not in keys),
            tuple(end for end in self.ended if end[0] not in keys),
            tuple(key for key in self.frozen if key not in keys),
        )


class OutputArrived(_Event, frozen=True):
    """The output of an attempt is complete at home and synced. error: reason why it could not be fetched, "" if it was;
    missing: bytes of stdout and stderr that its node did not have. unplaced: reason why an output file could not be
    written to its path, "" = all were; conflicts: files stored beside one that was changed at home."""

    uid: bytes
    attempt: int
    error: str = ""
    missing: tuple[int, int] = (0, 0)
    unplaced: str = ""
    conflicts: int = 0


class OutputWaits(_Event, frozen=True):
    """The process of an attempt here has ended, and its output files wait for disk space; its end is reported later."""

    key: str
    why: str


class OutputComing(_Event, frozen=True):
    """Progress of the output files of an attempt: the amount that has arrived at home."""

    uid: bytes
    attempt: int
    done_bytes: int


class FilesStaged(_Event, frozen=True):
    """Staging of the files of an offered attempt has ended: they are in its working directory, or ``code`` (of
    `DECLINES`) and ``why`` give the reason."""

    key: str
    code: str = ""
    why: str = ""


class LoadSampled(_Event, frozen=True):
    """Readings of the sensors: cores kept busy by all programs (averaged over 5 s) and by programs that are not tasks
    of this node (over 15 s), memory in use, the share of the last 10 s in which some process waited for a core, or for
    memory, and the number of cores that the readings cover (0: the profile's)."""

    cpus_busy: float
    cpus_busy_foreign: float
    mem_used_bytes: int
    cpu_pressure: float = 0.0
    mem_pressure: float = 0.0
    cpus: float = 0.0
    watts: float | None = None
    """Power as sensors read it; None without a sensor."""


class DevicesFound(_Event, frozen=True):
    """The complete list of devices of this node."""

    devices: tuple[Device, ...]


class DirectoryFound(_Event, frozen=True):
    """A file system that had not answered in time has answered: this working directory exists on this node."""

    directory: bytes


class DevicesSampled(_Event, frozen=True):
    """Readings of devices, at ``at_s`` (CLOCK_BOOTTIME)."""

    at_s: float
    readings: tuple[DeviceReading, ...]


class MpsReported(_Event, frozen=True):
    """MPS of a GPU works (why ""), or does not: its daemon cannot start, or its server ended under its tasks
    (is_fault)."""

    device: str
    why: str = ""
    is_fault: bool = False


class SpeedMeasured(_Event, frozen=True):
    """The speed of this node was measured (`Profile.speed`)."""

    speed: float


class PowerMeasured(_Event, frozen=True):
    """The power curve of this node was measured, or has turned out to be stale."""

    curve: PowerCurve


class BusChanged(_Event, frozen=True):
    """The MQTT broker can be reached, or no longer."""

    connected: bool


class LoadPublished(_Event, frozen=True, tag="LoadTold"):
    """The driver has sent this node's load (`Sharing.shown`) to a peer or a broker, without a decision of the core."""

    report: LoadReport


class AgentStopping(_Event, frozen=True):
    """The agent is about to stop on purpose."""


Event = (
    AgentStarted | TaskSubmitted | AttendRequested | DetachRequested | ClientGone | InputCut | InputCame
    | CancelRequested | EndAsked | SignalRequested | HoldRequested | ReleaseRequested | PriorityRequested
    | GroupRequested | TasksFound | DrainRequested | EmptyAwaited | EmptyAwaitedNoMore | UndrainRequested
    | ForgetRequested | NodeRevoked | RemoteCancelRequested | DiskRoomChanged | CoresEnforced | PricesRead
    | MachineSleeping | MachineWoke | PeerMet | PeerUnreachable | MessageReceived | GossipReceived | LoopLagged
    | Together
    | SendFailed | TimerExpired | TaskStarted | TaskEnded | TaskLost | TaskFrozen | LauncherLost | LauncherSilent
    | LauncherReady | OutputArrived | OutputWaits | OutputComing | FilesStaged | LoadSampled | DevicesFound | DevicesSampled
    | MpsReported | DirectoryFound | SpeedMeasured | PowerMeasured | BusChanged | LoadPublished | AgentStopping
)  # fmt: skip

FREQUENT = MessageReceived, TaskStarted, TaskEnded, OutputArrived


def together(batch: Sequence[Event]) -> Iterator[Event]:
    """These events, in order, the frequent ones that follow each other as one."""
    for is_frequent, group in groupby(batch, lambda event: type(event) in FREQUENT):
        first, *others = group
        if is_frequent and others:
            yield Together((first, *others))  # type: ignore[arg-type]
        else:
            yield first
            yield from others
