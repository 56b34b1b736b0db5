"""The kinds of policy and what each may see.

Policies *propose*, the core disposes: it owns time-outs, refusals, leases and the migration limit, so a policy can be
bad but never unsafe. A policy is a frozen struct of its parameters; it reads no clock and takes its chance from the
``rng`` it is given. One that keeps state keeps it in its instance: each node has instances of its own, live and
simulated. An exception in one counts as "keep the task here" and is shown to the user.

Sources are named as in docs/references.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import msgspec

from peerload.model.load import LoadReport, Thresholds
from peerload.model.resources import Placement, ResourceRequest

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

# -- what a policy sees ----------------------------------------------------------------------------------------------


class KnownReport(msgspec.Struct, frozen=True, gc=False):
    """A peer's newest load report and how old it is here."""

    report: LoadReport
    age_s: float


class Reply(msgspec.Struct, frozen=True, gc=False):
    """What one peer answered in this search. No answer in time counts as ``accepts=False`` with no report, and so does
    an offer that was declined. remembered: it was asked because memory named it, which costs no probe of the search; price_s: its bid, when the
    task would have ended there, in seconds from when it was asked, as far as it can tell; 0 where the policy wants no bids."""

    node: str
    accepts: bool
    report: LoadReport | None = None
    remembered: bool = False
    price_s: float = 0.0


class TaskView(msgspec.Struct, frozen=True, gc=False):
    """A waiting task as a policy sees it. expected_s: how long it would take on this node, 0 = not known; moved_bytes:
    what a transfer would carry."""

    task: str
    request: ResourceRequest
    placement: Placement
    migrations: int
    waited_s: float
    expected_s: float = 0.0
    moved_bytes: int = 0


class RunningView(Protocol):
    """A task that runs here."""

    @property
    def used_s(self) -> float:
        """Seconds since it was started."""

    @property
    def durations(self) -> Sequence[float]:
        """How long the last runs of its command took, in seconds of this node, ascending; those of all commands where
        nothing is known of its own; empty if nothing has ended yet."""


class LoadView(Protocol):
    """This node's own work. Counts in tasks, cpus in cores, expected durations in seconds of this node;
    n = running + waiting + inbound + foreign slots."""

    @property
    def load_tasks(self) -> int:
        """n."""

    @property
    def slots(self) -> int:
        """c."""

    @property
    def cpus(self) -> float:
        """Cores of this node."""

    @property
    def cpus_requested(self) -> float:
        """Cores asked for by running and waiting tasks."""

    @property
    def speed(self) -> float:
        """How fast this node works: a task that takes t on the reference machine takes t / speed here."""

    @property
    def mean_s(self) -> float:
        """The mean of the last durations seen, of all commands; 1 s of the reference machine before the first."""

    @property
    def waiting_s(self) -> float:
        """The expected durations of all waiting and inbound tasks together, each that of its command as learned, or
        ``mean_s`` where nothing is known of it. Costs the same however many wait."""

    @property
    def running(self) -> Sequence[RunningView]:
        """What runs here, at most as many as there is room for."""

    @property
    def cpus_busy(self) -> float:
        """Cores kept busy, by anybody, averaged over 5 s."""

    @property
    def cpus_foreign(self) -> float:
        """Cores kept busy by programs that are no tasks of this node, averaged over 15 s; 0 where these are ignored."""

    @property
    def foreign_slots(self) -> int:
        """The slots that those programs occupy: `cpus_foreign` in whole slots, with hysteresis. Part of n."""

    @property
    def gpus(self) -> int:
        """GPUs of this node."""

    @property
    def gpu_tasks(self) -> int:
        """GPUs asked for by running, waiting and inbound tasks."""

    @property
    def gpus_busy(self) -> float:
        """GPUs kept busy, by anybody: of each the share of time (averaged over 5 s) or of memory, whichever is larger."""

    @property
    def gpus_foreign(self) -> float:
        """The same of those that programs use which are no tasks, and no task has."""


class NodeView(LoadView, Protocol):
    """What a location policy sees: this node's load, and the peers that could ever run the task in question.

    A sender's search does not count the task itself in n. A transfer policy sees all usable peers."""

    @property
    def node(self) -> str:
        """This node's name."""

    @property
    def load(self) -> float:
        """This node's load index per slot, as the load policy gives it."""

    @property
    def load_unit(self) -> float:
        """What one task per slot amounts to in the load index: 1; `mean_s` where it is in seconds."""

    @property
    def thresholds(self) -> Thresholds:
        """The four thresholds of the transfer policy, per slot."""

    @property
    def peers(self) -> Sequence[str]:
        """Eligible peers in the order of their names; never this node, never a suspected or drained one."""

    @property
    def reports_guide_probing(self) -> bool:
        """Whether peers are drawn by their reports (`peerload.policy.draw`) or uniformly."""

    @property
    def idle_list(self) -> Sequence[str]:
        """Nodes that searched for work in vain, newest last; empty unless memory is on."""

    @property
    def busy_list(self) -> Sequence[str]:
        """Nodes that searched for room in vain, newest last; empty unless memory is on."""

    def report(self, node: str) -> KnownReport | None:
        """The newest unexpired report of a peer."""


# -- what a location policy proposes ----------------------------------------------------------------------------------


class Probe(msgspec.Struct, frozen=True, gc=False):
    """Ask these nodes next (all at once); the policy is asked again when they have answered or time is up."""

    nodes: tuple[str, ...]


ANY_LOAD = 1 << 40
"""More tasks than any node has."""


class Transfer(msgspec.Struct, frozen=True, gc=False):
    """Offer the task to this node; a decline comes back as a Reply and costs no probe.

    load_tasks_max: with n at most this it accepts whatever its thresholds say (ANY_LOAD: always); -1: its thresholds alone
    decide."""

    to: str
    load_tasks_max: int = -1


class Keep(msgspec.Struct, frozen=True, gc=False):
    """The task stays (sender side), or nothing is asked for any more (receiver side)."""

    reason: str


class Broadcast(msgspec.Struct, frozen=True, gc=False):
    """Ask everybody at once. Only those that accept answer, each after a short random pause, and the policy is asked
    again at each answer; to return this again is to wait for more of them. otherwise: what is done when time is up for
    answers; None: the task stays."""

    otherwise: Transfer | None = None


# -- the kinds ---------------------------------------------------------------------------------------------------------


@runtime_checkable
class LoadPolicy(Protocol):
    """How busy is this node? The number compared between nodes."""

    def load(self, view: LoadView) -> float:
        """The load index per slot, ≥ 0. The thresholds of the transfer policy are compared with it: 1 is one task per slot.

        A policy with ``in_seconds = True`` counts expected seconds of work instead: one task per slot is `mean_s`. One with
        ``steady = True`` depends on nothing but the tasks of the node, by number and by what they ask for, and on what the
        sensors read; it is asked again only when these have changed. A policy may have ``gpu_load(view)`` besides: the load index per GPU, by which nodes are compared for tasks that ask
        for GPUs. Without one it is the GPUs asked for by the tasks of a node, per GPU."""


@runtime_checkable
class TransferPolicy(Protocol):
    """Whether to send, accept, ask for or give a task."""

    def thresholds(self, view: NodeView) -> Thresholds:
        """The four thresholds, on the load index: in tasks per slot.

        A policy with ``steady = True`` gives the same thresholds always and is asked for them only once."""


@runtime_checkable
class SelectionPolicy(Protocol):
    """Which waiting task goes."""

    def select(self, waiting: WaitingView) -> TaskView | None:
        """One of the movable tasks, or None."""


class WaitingView(Protocol):
    """The waiting tasks that may go to the asking node."""

    def oldest_first(self) -> Iterator[TaskView]:
        """Movable tasks in the order of their arrival here."""

    def newest_first(self) -> Iterator[TaskView]:
        """Movable tasks, the last arrival first."""


WatchedChange = Literal["region", "tasks", "nothing"]


@runtime_checkable
class InformationPolicy(Protocol):
    """When and to whom load is told.

    reports_guide_probing: whom to probe is drawn from reports first; period_s: tell everybody this often (0: never);
    with ``believed_s``, in seconds, no report is believed for longer;
    watches: which changes `tells` and `asks` are asked about: of the load region, once it has held for settle_s, of n,
    or none (both are then asked at the start only).
    """

    @property
    def watches(self) -> WatchedChange:
        """``region``, ``tasks`` or ``nothing``."""

    @property
    def reports_guide_probing(self) -> bool:
        """Whether reports steer whom to probe."""

    @property
    def period_s(self) -> float:
        """Seconds between periodic broadcasts, 0 = none."""

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        """Whether this change is announced, given what was told last (None: nothing yet): to everybody, unless the policy has
        ``audience(view, rng)``, which names the nodes to tell (of ``view.peers``; None: everybody). At the start and at its
        period a node tells everybody."""

    def asks(self, before: LoadReport | None, now: LoadReport) -> bool:
        """Whether the others' load is asked for at this change from ``before`` (None: at the start): those useful to
        this node answer, the busy ones if it has room, the idle ones if it has too much."""


@runtime_checkable
class SenderPolicy(Protocol):
    """Where to: the sender's side."""

    def locate(
        self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random
    ) -> Probe | Broadcast | Transfer | Keep:
        """The next step of a search; ``replies`` holds every answer so far, in order.

        A policy with ``passes_on = True`` is also asked about a task of another home that was placed on a node with no
        room for it; a Transfer then proposes to that home where it might go. One with ``wants_bids = True`` gets a price with
        every answer (`Reply.price_s`). One with ``announced(node, report, *, to_all)`` is called with every announcement of
        another node: to everybody, or to this node alone (an `audience`, or the answer to a broadcast). Reports that come
        with probes and replies are none."""


@runtime_checkable
class ReceiverPolicy(Protocol):
    """Where from: the receiver's side.

    retry_rate: searches per mean service time while n < receive_below (0: only on completions), of retry_probes each.
    """

    @property
    def retry_rate(self) -> float:
        """Extra searches per mean service time."""

    @property
    def retry_probes(self) -> int:
        """Probes of such a search."""

    def locate(
        self, view: NodeView, probes_max: int | None, replies: Sequence[Reply], rng: random.Random
    ) -> Probe | Keep:
        """Whom to ask for a task next; a search ends with the first node that gives one."""


@runtime_checkable
class PairingPolicy(Protocol):
    """Two nodes pair and even out their loads [BF81]. rate: searches for a partner per mean service time (0: never)."""

    @property
    def rate(self) -> float:
        """Initiations per mean service time."""

    def partner(self, view: NodeView, rng: random.Random) -> str | None:
        """Whom to ask, None = nobody now. Somebody who is paired already refuses."""

    def moves(self, richer: LoadReport, poorer: LoadReport) -> bool:
        """Whether one more waiting task goes from the one to the other; the selection policy says which."""


PriorityClass = Literal["local", "remote", "first"]


@runtime_checkable
class PriorityPolicy(Protocol):
    """Among waiting tasks of equal user priority: local (at their home) or remote first?"""

    def prefer(self, local_tasks: int, remote_tasks: int) -> PriorityClass:
        """``first`` = whichever arrived first. The counts are running and waiting ones of each class."""


@runtime_checkable
class MigrationPolicy(Protocol):
    """How often a task may be placed away from its home by choice."""

    @property
    def migrations_max(self) -> int | None:
        """The limit, None = no limit."""
