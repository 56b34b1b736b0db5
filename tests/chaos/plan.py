"""Plan of one run, as data: the cluster, its work, its network, and every fault with its time.

A plan is drawn from a seed (`draw.py`), printed by ``--plan``, and carried out by `driver.py`. Times are simulated seconds
from the start; nodes are named n1 … nN. Each fault struct is one evil with one meaning.
"""

from __future__ import annotations

import msgspec

Pairs = tuple[tuple[str, str], ...]
"""Ordered (from, to): what the first says does not reach the second."""


RETRY_PAUSE_S = 4.0
"""A task that failed rests for so long at most before it is tried again."""
MEMORY_TRIES = 4
"""A task that runs out of GPU memory is tried so often at most."""
AUTO_TIMES = 1.5
"""A lease that grows with its task grows to so many times the usual one."""


class Fault(msgspec.Struct, frozen=True, tag=True):
    """Root of all faults; its tag names the kind."""

    at_s: float


HOST = "*"
"""As a fault's node: one that runs a task of another home then, as soon as there is one."""
HOME = "+"
"""As a fault's node: one whose task, a long one, is at another node then, as soon as there is one."""


class AgentCrash(Fault, frozen=True):
    """kill -9 of the agent; launcher and tasks go on. It is started again ``down_s`` later."""

    node: str
    down_s: float


class CrashAtCommit(Fault, frozen=True):
    """From ``at_s`` on: at the next commit of any node that holds this durability point the agent (or the whole machine)
    dies, just before the row is durable, or just after it and before anything that waited for it went out. ``cut_s``: when
    it is back it is cut off for so long from those who have its tasks."""

    point: str
    after: bool
    machine: bool
    down_s: float
    cut_s: float = 0.0


class BothCrash(Fault, frozen=True):
    """An agent dies, and with it those of the homes whose tasks it has; ``machine``: the machines do."""

    node: str
    machine: bool
    down_s: float


class CrashAtSend(Fault, frozen=True):
    """From ``at_s`` on: the agent (or the whole machine) dies as soon as it has said a message of this kind (or, for
    SpawnTask, has told its launcher)."""

    node: str
    message: str
    machine: bool
    down_s: float


class CommitsLost(Fault, frozen=True):
    """From ``at_s`` on: the next COMMIT of any home for a long task is lost, and all it says again for ``for_s``; and the node that takes it
    in the end is cut off for ``cut_s`` before it can say so."""

    for_s: float
    cut_s: float


class LateThenCut(Fault, frozen=True):
    """From ``at_s`` on: the next message of this kind that anybody says about a long task comes ``late_s`` later, and once it is on its way
    nothing else passes between the two for ``cut_s``."""

    message: str
    late_s: float
    cut_s: float


class CutAtSend(Fault, frozen=True):
    """From ``at_s`` on: as soon as the node says a message of this kind, that one included, nothing passes between it and
    all others (``only_there``: and whom it says it to) for so long. ``uid``: if it says it of that task (b"": of any)."""

    node: str
    message: str
    for_s: float
    only_there: bool = False
    uid: bytes = b""


class CutFromHost(Fault, frozen=True):
    """A home is cut off from a node that runs a long task of it, until that lease has ended and longer."""

    node: str
    for_s: float


class ReplayAtReturn(Fault, frozen=True):
    """From ``at_s`` on: when a node gives a task back, what its home had said to it of that task comes there once more
    ``late_s`` later."""

    late_s: float


class RebootAtAccept(Fault, frozen=True):
    """From ``at_s`` on: the next machine that accepts a long task loses power with that; it is back ``down_s`` later, and the
    OFFER comes there once more; its ACCEPT comes ``late_s`` late, and before anything else of it."""

    down_s: float
    late_s: float


class MachineCrash(Fault, frozen=True):
    """Power loss. ``loses_disk``: it comes back with an empty one."""

    node: str
    down_s: float
    loses_disk: bool = False


class DiskLost(Fault, frozen=True):
    """The database is replaced by an empty one while the machine and its tasks run on; the agent is started again."""

    node: str
    down_s: float


class MachineGone(Fault, frozen=True):
    """It never comes back; a user of another node says so after ``forgotten_s`` (0: only when the cluster has healed)."""

    node: str
    forgotten_s: float


class AgentPause(Fault, frozen=True):
    """SIGSTOP to the agent: what arrives meanwhile waits for it."""

    node: str
    for_s: float


class LauncherPause(Fault, frozen=True):
    """The launcher gets no processor: leases are enforced that much later."""

    node: str
    for_s: float


class LauncherCrash(Fault, frozen=True):
    """kill -9 of the launcher: its tasks end with it, the agent starts another ``down_s`` later. ``at_spawn``: when it is
    next told to start a task, before it has."""

    node: str
    down_s: float
    at_spawn: bool = False


class Suspend(Fault, frozen=True):
    """The machine sleeps; CLOCK_BOOTTIME goes on. ``polite``: its agent was told before."""

    node: str
    for_s: float
    polite: bool


class ClockStep(Fault, frozen=True):
    """The wall clock is set."""

    node: str
    by_s: float


class FsyncError(Fault, frozen=True):
    """From ``at_s`` on: the next fsync fails, which ends the agent."""

    node: str
    down_s: float


class DiskStall(Fault, frozen=True):
    """Nothing becomes durable for so long."""

    node: str
    for_s: float


class DiskFull(Fault, frozen=True):
    """No room for new tasks for so long; what the reserve is for goes on."""

    node: str
    for_s: float


class Shortage(Fault, frozen=True):
    """No process can be made for so long: what is to be started never starts."""

    node: str
    for_s: float


class Cut(Fault, frozen=True):
    """A partition. ``kind``: split, one-way or partial; ``pairs``: what is cut."""

    kind: str
    pairs: Pairs
    for_s: float


class LinkReset(Fault, frozen=True):
    """The peer link between two nodes breaks, perhaps in the middle of a frame."""

    a: str
    b: str


class BrokerDown(Fault, frozen=True):
    """The broker is gone for so long; ``forgets``: its retained states, too."""

    for_s: float
    forgets: bool


class BrokerSlow(Fault, frozen=True):
    """What goes over the broker takes up to so much longer, and comes twice now and then."""

    for_s: float
    delay_s_max: float


class PoliteStop(Fault, frozen=True):
    """`peerload down`, and `up` again later: the agent says good-bye; launcher and tasks go on. The rest is about one task that
    it has elsewhere (``waiting``: that waits there). ``cut_s``: ``cut_after_s`` after its return, or at its first answer to
    a renewal, if that is 0, it is cut off for so long from the node that has the task; ``crash_after_s``: so long after
    its return that node's agent dies, 0 = it does not (and hears again of a task that waited); ``park_late_s``: that
    node hears its PARK so late."""

    node: str
    down_s: float
    cut_s: float = 0.0
    cut_after_s: float = 0.0
    crash_after_s: float = 0.0
    park_late_s: float = 0.0
    waiting: bool = False


class Verb(Fault, frozen=True):
    """A user's cancel, hold, release or other priority of the ``nth`` task (modulo their number) that is not over then."""

    verb: str
    nth: int


class Drain(Fault, frozen=True):
    """The node takes no more work for so long."""

    node: str
    for_s: float


class Leave(Fault, frozen=True):
    """The node leaves the cluster (its tasks run on) and joins again later."""

    node: str
    down_s: float


class GroupSet(Fault, frozen=True):
    """A user of the node sets a group: so many slots (0: any number, -1: as they are), paused (1) or not (0, -1: as it is)."""

    node: str
    group: str
    slots: int
    paused: int = -1


class Job(msgspec.Struct, frozen=True):
    """One `peerload submit`. service_s: how long the command runs; members: > 0 for an array; exit_code: its result;
    guarantee: as `submit` takes it; lease_s: 0 = the node's own; lease_auto: that grows; stubborn: ignores SIGTERM; client: what becomes of the
    client: "waits" for its answer, "repeats" (asks a second time although it was answered), or "dies" after it has asked.
    gpu_gib: > 0: it asks for a GPU with 1 GiB, and an attempt with less than this runs out of memory on the way. group,
    retries: as `submit` takes them; after, after_ok: the numbers of the jobs that it waits for."""

    at_s: float
    node: str
    service_s: float
    members: int = 0
    exit_code: int = 0
    guarantee: str = "at-least-once"
    lease_s: float = 0.0
    lease_auto: bool = False
    held: bool = False
    stubborn: bool = False
    client: str = "waits"
    only: str = ""
    exclude: str = ""
    gpu_gib: float = 0.0
    group: str = ""
    retries: int = 0
    after: tuple[int, ...] = ()
    after_ok: tuple[int, ...] = ()

    def work_s(self) -> float:
        """Upper bound on the run time of its processes, all together."""
        tries = (MEMORY_TRIES if self.gpu_gib else 1) + self.retries
        return (self.service_s + (RETRY_PAUSE_S if self.retries else 0.0)) * max(self.members, 1) * tries


class Machine(msgspec.Struct, frozen=True):
    """One machine: its slots, its clock, how long a commit takes, and whether its agent is of a newer version."""

    name: str
    slots: int
    rate: float
    base_s: float
    disk_s: float
    newer: bool = False


class Evils(msgspec.Struct, frozen=True):
    """Faults of messages until the cluster heals. delay_s: one way, at least; jitter_s: mean of an exponential
    addition, which reorders; loss, duplication: shares; late: the share that is delayed by up to late_s more (a
    duplicate always is, so that it may come after restarts)."""

    delay_s: float
    jitter_s: float = 0.0
    loss: float = 0.0
    duplication: float = 0.0
    late: float = 0.0
    late_s: float = 0.0
    output_loss: float = 0.0


class Plan(msgspec.Struct, frozen=True):
    """A whole run. healed_s: from then on nothing fails; codec: messages pass the wire's codec."""

    seed: int
    preset: str
    lease_s: float
    grace_s: float
    healed_s: float
    attempts_max: int
    poison_nodes: int
    frozen_s_max: float
    has_broker: bool
    codec: bool
    machines: tuple[Machine, ...]
    evils: Evils
    jobs: tuple[Job, ...]
    faults: tuple[
        AgentCrash
        | CrashAtCommit
        | CrashAtSend
        | BothCrash
        | CutAtSend
        | CutFromHost
        | CommitsLost
        | LateThenCut
        | RebootAtAccept
        | ReplayAtReturn
        | MachineCrash
        | DiskLost
        | MachineGone
        | AgentPause
        | LauncherPause
        | LauncherCrash
        | Suspend
        | ClockStep
        | FsyncError
        | DiskStall
        | DiskFull
        | Shortage
        | Cut
        | LinkReset
        | BrokerDown
        | BrokerSlow
        | PoliteStop
        | Verb
        | Drain
        | GroupSet
        | Leave,
        ...,
    ]

    def has_drift(self) -> bool:
        """True if clocks run at rates of their own."""
        return any(machine.rate != 1.0 for machine in self.machines)

    def lease_s_max(self) -> float:
        """The longest lease that any task may have: the node's own, the task's, or what it has grown to."""
        return max(self.lease_s * AUTO_TIMES, *(job.lease_s for job in self.jobs))

    def without_grace(self) -> Plan:
        """The plan with a grace that allows for nothing."""
        return msgspec.structs.replace(self, grace_s=0.001)

    def text(self) -> str:
        """For a terminal: one line a machine, job and fault."""
        head = (
            f"seed {self.seed}: {len(self.machines)} nodes, preset {self.preset}, lease {self.lease_s:g}+{self.grace_s:g} s,"
            f" {'a' if self.has_broker else 'no'} broker, {'with' if self.codec else 'without'} the codec,"
            f" healed at {self.healed_s:g} s"
        )
        return "\n".join([head, repr(self.evils), *map(repr, (*self.machines, *self.jobs, *self.faults))])
