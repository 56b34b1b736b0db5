"""Interfaces of policies: their kinds, what each sees and proposes, validation of their answers, and helpers for
policies.

Policies *propose*, and the core decides: it owns timeouts, refusals, leases and the migration limit. So a policy can be
bad but never unsafe. A policy is a frozen struct of its parameters; it reads no clock and takes chance only from the
given ``rng``. A policy with state keeps it in its instance: each node, live or simulated, has separate instances. An
exception in a policy counts as "keep the task here" and is shown to the user.

Sources are named as in docs/references.md.
"""

from __future__ import annotations

import typing
from bisect import bisect_right
from itertools import filterfalse
from math import inf, isfinite
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from peerload.model.resources import (
    LOAD_MAX,
    LoadReport,
    Placement,
    Profile,
    ResourceRequest,
    TaskCost,
    Thresholds,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Container, Iterator, Mapping, Sequence


POLICY_FAILURES = (Exception, SystemExit)
"""Exceptions of a policy, which may be of any type. They are counted, and cost only performance."""


# -- what a policy sees ----------------------------------------------------------------------------------------------


class KnownReport(msgspec.Struct, frozen=True, gc=False):
    """Newest load report of a peer, and how old it is here."""

    report: LoadReport
    age_s: float


class Reply(msgspec.Struct, frozen=True, gc=False):
    """Answer of one peer in this search. No answer in time counts as ``accepts=False`` with no report, and so does
    a declined offer. remembered: the peer was asked because of a hint, which costs no probe of the search; price_s:
    its bid: the estimated seconds from the question until the task would have ended there; 0 if the policy wants no
    bids."""

    node: str
    accepts: bool
    report: LoadReport | None = None
    remembered: bool = False
    price_s: float = 0.0


class TaskView(msgspec.Struct, frozen=True, gc=False):
    """Waiting task as a policy sees it. expected_s: its expected duration on this node, 0 = unknown; moved_bytes: size
    of a transfer."""

    task: str
    request: ResourceRequest
    placement: Placement
    migrations: int
    waited_s: float
    expected_s: float = 0.0
    moved_bytes: int = 0
    slack: float | None = None
    """Share by which its user lets it end later to save energy; None: as the preset says."""


class RunningView(Protocol):
    """Task that runs here."""

    @property
    def used_s(self) -> float:
        """Seconds since it was started."""

    @property
    def durations(self) -> Sequence[float]:
        """Its user's estimate, else the durations of the last runs of its command, in seconds of this node, ascending;
        of all commands if its own is unknown; empty if nothing has ended yet."""


class LoadView(Protocol):
    """Work of this node. Counts are in tasks, cpus in cores, expected durations in seconds of this node; n = running
    + waiting + inbound + foreign slots."""

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
        """Speed of this node: a task that takes t on the reference machine takes t / speed here."""

    @property
    def mean_s(self) -> float:
        """The mean of the last durations of all commands; 1 s of the reference machine before the first."""

    @property
    def waiting_s(self) -> float:
        """Sum of the expected durations of all waiting and inbound tasks: each by its user's estimate, else by its
        command's history, else ``mean_s``. The cost does not depend on the number of tasks."""

    @property
    def running(self) -> Sequence[RunningView]:
        """Tasks that run here, at most as many as there is room for."""

    @property
    def cpus_busy(self) -> float:
        """Cores kept busy by any program, averaged over 5 s."""

    @property
    def cpus_foreign(self) -> float:
        """Cores kept busy by programs that are not tasks of this node, averaged over 15 s; 0 if foreign load is
        ignored."""

    @property
    def foreign_slots(self) -> int:
        """Slots that foreign programs occupy: `cpus_foreign` in whole slots, with hysteresis. Part of n."""

    @property
    def gpus(self) -> int:
        """GPUs of this node."""

    @property
    def gpu_tasks(self) -> int:
        """GPUs asked for by running, waiting and inbound tasks."""

    @property
    def gpus_busy(self) -> float:
        """GPUs kept busy by any program: for each the larger share of time (averaged over 5 s) and of memory."""

    @property
    def gpus_foreign(self) -> float:
        """GPUs kept busy by programs that are not tasks, among those without a task."""


Said = Literal["accepts", "gives"]
"""Content of a report: its node accepts a task, or gives one."""
Reported = Literal["accepts", "gives", "nothing"]
"""The content of the newest report of a peer: it accepts a task, it gives one; nothing: there is no report."""


class NodeView(LoadView, Protocol):
    """View of a location policy: this node's load, and the peers that could ever run the task in question.

    A sender's search does not count the task itself in n. A transfer policy sees all usable peers.
    """

    @property
    def node(self) -> str:
        """Name of this node."""

    @property
    def load(self) -> float:
        """Load index of this node per slot, as the load policy gives it."""

    @property
    def load_mean(self) -> float:
        """Mean load index over this node and the newest unexpired reports of `peers`, at a constant cost."""

    @property
    def load_unit(self) -> float:
        """Amount of one task per slot in the load index: 1; `mean_s` if the index is in seconds."""

    @property
    def thresholds(self) -> Thresholds:
        """Thresholds of the transfer policy, per slot."""

    @property
    def peers(self) -> Sequence[str]:
        """Eligible peers in the order of their names; never this node, never a suspected or drained one."""

    @property
    def reports_guide_probing(self) -> bool:
        """True if peers are drawn by their reports (`draw_receiver`), False if uniformly."""

    @property
    def idle_list(self) -> Sequence[str]:
        """Nodes whose search for work found nothing, newest last; empty unless memory is on."""

    @property
    def busy_list(self) -> Sequence[str]:
        """Nodes whose search for room found nothing, newest last; empty unless memory is on."""

    @property
    def starts_here(self) -> bool:
        """True if the task in question could start on this node now."""

    @property
    def asleep(self) -> Mapping[str, float]:
        """Nodes asleep that could run the task in question, with their wake times in seconds; for a policy that places
        all."""

    @property
    def cpus_started(self) -> float:
        """Cores requested by running and inbound tasks."""

    @property
    def backlog(self) -> int:
        """Tasks of this home that wait for a place, the one in question included."""

    @property
    def price(self) -> float | None:
        """Price of a kWh on this node now, or its carbon; None: not known."""

    def profile(self, node: str) -> Profile | None:
        """Static facts of a peer, or of this node; None: not known."""

    def report(self, node: str) -> KnownReport | None:
        """Newest unexpired report of a peer."""

    def reports(self, age_s_max: float = inf, wanted: Said | None = None) -> Iterator[tuple[str, LoadReport]]:
        """Peers in the order of their names, each with its newest unexpired report of at most that age; only reports
        with the flag ``wanted``."""

    def reporting(self, wanted: Reported) -> Sequence[str]:
        """Peers in the order of their names whose newest unexpired report has the flag ``wanted``, or that have
        none."""


# -- what a location policy proposes ----------------------------------------------------------------------------------


class Probe(msgspec.Struct, frozen=True, gc=False):
    """Proposal to ask these nodes next (all together); the policy is called again when they have answered or the time
    is over."""

    nodes: tuple[str, ...]


ANY_LOAD = 1 << 40
"""Bound on ``load_tasks_max`` above the number of tasks of any node."""


class Transfer(msgspec.Struct, frozen=True, gc=False):
    """Proposal to offer the task to this node; a decline comes back as a Reply and costs no probe.

    load_tasks_max: with n at most this the node accepts regardless of its thresholds (ANY_LOAD: always); -1: only its
    thresholds decide.
    """

    to: str
    load_tasks_max: int = -1
    compared: tuple[TaskCost, ...] = ()
    """Costs behind the choice, for people."""


class Keep(msgspec.Struct, frozen=True, gc=False):
    """Proposal to let the task stay (sender side), or to stop asking (receiver side)."""

    reason: str
    compared: tuple[TaskCost, ...] = ()
    """See `Transfer`."""
    wakes: str = ""
    """A sleeping node to wake for the task, which waits for it."""


class Broadcast(msgspec.Struct, frozen=True, gc=False):
    """Proposal to ask all nodes together. Only nodes that accept answer, each after a short random pause, and the
    policy is called again at each answer; returning this again waits for more. otherwise: the decision when the time
    for answers is over; None: the task stays."""

    otherwise: Transfer | None = None


# -- the kinds ---------------------------------------------------------------------------------------------------------
#
# Properties are read once, when a node starts: only methods can change their answers.

Rate = Annotated[float, Meta(ge=0.0, le=1000.0)]
"""Repetitions per mean service time."""


@runtime_checkable
class LoadPolicy(Protocol):
    """Load index: the number by which nodes are compared."""

    def load(self, view: LoadView) -> float:
        """Return the load index per slot, ≥ 0. The thresholds of the transfer policy are compared with it: 1 is one
        task per slot.

        A policy with ``in_seconds = True`` counts expected seconds of work instead: one task per slot is `mean_s`. A
        policy with ``steady = True`` depends only on the tasks of the node, by number and by request,
        and on sensor readings; it is called again only when these have changed. A policy may also have
        ``gpu_load(view)``: the load index per GPU, by which nodes are compared for tasks that ask for GPUs. Without
        it, that is the GPUs asked for by the tasks of a node, per GPU.
        """


@runtime_checkable
class TransferPolicy(Protocol):
    """Decision whether to send, accept, ask for or give a task."""

    def thresholds(self, view: NodeView) -> Thresholds:
        """Return the four thresholds on the load index: in tasks per slot.

        A policy with ``steady = True`` always returns the same thresholds and is called only once. One with ``stateless =
        True`` keeps nothing from call to call: what it returns follows from the load and the reports alone.
        """


@runtime_checkable
class SelectionPolicy(Protocol):
    """Choice of the waiting task that is transferred."""

    def select(self, waiting: WaitingView) -> TaskView | None:
        """Return one of the movable tasks, or None."""


class WaitingView(Protocol):
    """Waiting tasks that may go to the asking node."""

    def oldest_first(self) -> Iterator[TaskView]:
        """Movable tasks in the order of their arrival here."""

    def newest_first(self) -> Iterator[TaskView]:
        """Movable tasks, the last arrival first."""


WatchedChange = Literal["region", "tasks", "nothing"]


@runtime_checkable
class InformationPolicy(Protocol):
    """Policy of load reports: when, and to which nodes.

    reports_guide_probing: the nodes to probe are drawn by reports first; period_s: time between periodic broadcasts (0:
    none); with ``believed_s``, in seconds, reports expire no later than that; watches: the changes at which `tells`
    and `asks` are called: of the load region, once it has held for settle_s, of n, or none (then both are called at
    the start only).
    """

    @property
    def watches(self) -> WatchedChange:
        """Kind of change that triggers the policy: ``region``, ``tasks`` or ``nothing``."""

    @property
    def reports_guide_probing(self) -> bool:
        """True if reports guide the choice of nodes to probe."""

    @property
    def period_s(self) -> Annotated[float, Meta(ge=0.0, le=86_400.0)]:
        """Seconds between periodic broadcasts, 0 = none."""

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        """Return whether this change is announced, given the last announced report (None: none yet): to all nodes,
        unless the policy has ``audience(view, rng)``, which names the nodes to tell (of ``view.peers``; None: all).
        At the start and at its period a node tells all."""

    def asks(self, before: LoadReport | None, now: LoadReport) -> bool:
        """Return whether to ask for the load of others at this change from ``before`` (None: at the start). Nodes
        that are useful to this one answer: the busy ones if it has room, the idle ones if it has too much."""


@runtime_checkable
class SenderPolicy(Protocol):
    """Location policy of the sender's side: finds a node for a task."""

    def locate(
        self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random
    ) -> Probe | Broadcast | Transfer | Keep:
        """Return the next step of a search; ``replies`` holds every answer so far, in order.

        A policy with ``passes_on = True`` is also called for a task of another home that was placed on a node
        without room for it; a Transfer then proposes to that home where it might go. A policy with ``wants_bids =
        True`` gets a price with every answer (`Reply.price_s`). A policy with ``announced(node, report, *, to_all)``
        is called with every announcement of another node: to all nodes, or to this node alone (an `audience`, or the
        answer to a broadcast). Reports that come with probes and replies do not count as announcements.
        """


@runtime_checkable
class ReceiverPolicy(Protocol):
    """Location policy of the receiver's side: finds a node that gives a task.

    retry_rate: searches per mean service time while n < receive_below (0: only on completions), of retry_probes
    each.
    """

    @property
    def retry_rate(self) -> Rate:
        """Extra searches per mean service time."""

    @property
    def retry_probes(self) -> Annotated[int, Meta(ge=1, le=64)]:
        """Probes of such a search."""

    def locate(
        self, view: NodeView, probes_max: int | None, replies: Sequence[Reply], rng: random.Random
    ) -> Probe | Keep:
        """Return the nodes to ask for a task next; a search ends with the first node that gives one."""


@runtime_checkable
class PairingPolicy(Protocol):
    """Pairing of two nodes that even out their loads [BF81]. rate: searches for a partner per mean service time (0:
    none)."""

    @property
    def rate(self) -> Rate:
        """Initiations per mean service time."""

    def partner(self, view: NodeView, rng: random.Random) -> str | None:
        """Return the node to ask, None = no node now. A node that is already paired refuses."""

    def moves(self, richer: LoadReport, poorer: LoadReport) -> bool:
        """Return whether one more waiting task moves from the richer node to the poorer one; the selection policy
        chooses it."""


PriorityClass = Literal["local", "remote", "first"]
PRIORITY_CLASSES = typing.get_args(PriorityClass)


@runtime_checkable
class PriorityPolicy(Protocol):
    """Order of local tasks (at their home) and remote ones, among waiting tasks of equal user priority."""

    def prefer(self, local_tasks: int, remote_tasks: int) -> PriorityClass:
        """Return the class that goes first; ``first`` = whichever arrived first. The counts are running and waiting
        tasks of each class."""


@runtime_checkable
class MigrationPolicy(Protocol):
    """Limit on how often a task may be placed away from its home by choice."""

    @property
    def migrations_max(self) -> Annotated[int, Meta(ge=0, le=1000)] | None:
        """The limit, None = no limit."""


# -- parameters that every transfer policy has: each of the four thresholds may be set by hand ---------------------------

THRESHOLD_MAX = 1e6
"""Tasks per slot; more never wait at one node."""

SendAt = Annotated[
    float, Meta(ge=0.0, le=THRESHOLD_MAX, description="send an arriving task on from this many tasks per slot")
]
AcceptBelow = Annotated[
    float, Meta(ge=0.0, le=THRESHOLD_MAX, description="accept others' tasks below this many tasks per slot")
]
ReceiveBelow = Annotated[
    float, Meta(ge=0.0, le=THRESHOLD_MAX, description="ask others for a task below this many tasks per slot")
]
GiveAbove = Annotated[
    float,
    Meta(
        ge=0.0, le=THRESHOLD_MAX, description="give a waiting task to a node that asks, above this many tasks per slot"
    ),
]


def remaining_s(task: RunningView, mean_s: float) -> float:
    """E[X - t | X > t]: expected remaining time of a task that has run for t. A task that has outlived all known
    runs takes as long again; ``mean_s`` if no run is known (memoryless)."""
    durations = task.durations
    if not durations:
        return mean_s
    used_s = task.used_s
    longer = durations[bisect_right(durations, used_s) :]
    return sum(longer) / len(longer) - used_s if longer else used_s


# -- validation ----------------------------------------------------------------------------------------------------------
#
# Each function returns the answer of a policy or raises TypeError or ValueError, so that an invalid answer counts as a failure
# of the policy and reaches no other node. The messages are the same in every process, as decisions are: they contain no
# address of an object.


NUMBER = (int, float)


def valid_load(answer: object) -> float:
    """Validate a load index: a number, 0 … LOAD_MAX."""
    if not isinstance(answer, NUMBER):
        raise TypeError(f"a {type(answer).__name__} is not a load index")
    if not 0.0 <= answer <= LOAD_MAX:
        raise ValueError(f"a load index of {answer!r}")
    return float(answer)


def valid_thresholds(answer: object) -> Thresholds:
    """Validate thresholds: finite numbers ≥ 0."""
    if not isinstance(answer, Thresholds):
        raise TypeError(f"a {type(answer).__name__} is not Thresholds")
    thresholds = answer.send_at, answer.accept_below, answer.receive_below, answer.give_above, answer.prefetch
    if set(map(type, thresholds)) == {float} and all(map(isfinite, thresholds)) and min(thresholds) >= 0.0:  # mostly
        return answer
    for threshold in thresholds:
        if not isinstance(threshold, NUMBER):
            raise TypeError(f"a {type(threshold).__name__} is not a threshold")
        if threshold < 0 or not isfinite(threshold):
            raise ValueError(f"a threshold of {threshold!r}")
    return answer


def valid_partner(answer: object) -> str | None:
    """Validate a partner: a node's name, or None."""
    if not isinstance(answer, str | None):
        raise TypeError(f"a {type(answer).__name__} is not the name of a node")
    return answer


def valid_class(answer: object) -> str:
    """Validate the class of tasks that goes first."""
    if answer not in PRIORITY_CLASSES:
        raise ValueError(f"a {type(answer).__name__} is none of {', '.join(PRIORITY_CLASSES)}")
    return str(answer)


def valid_answer(answer: object) -> bool:
    if not isinstance(answer, bool):
        raise TypeError(f"a {type(answer).__name__} is neither yes nor no")
    return answer


def valid_audience(answer: object, peers: Sequence[str]) -> Sequence[str] | None:
    """Validate an audience: different names of peers; None: all."""
    if answer is None:
        return None
    if not isinstance(answer, (tuple, list)):
        raise TypeError(f"a {type(answer).__name__} is not a list of names")
    if not set(answer) <= set(peers) or len(set(answer)) < len(answer):
        raise ValueError(f"an audience of {answer!r}")
    return answer


def _is_cost(cost: object) -> bool:
    if not isinstance(cost, TaskCost):
        return False
    texts: list[object] = [cost.node, cost.quality]
    numbers: list[object] = [cost.joules, cost.wake_s, cost.wake_joules, cost.price or 0.0]
    is_finite = (isinstance(number, (int, float)) and isfinite(number) for number in numbers)
    return all(isinstance(text, str) for text in texts) and all(is_finite)


def valid_step(answer: object, asleep: Container[str] = ()) -> Probe | Broadcast | Transfer | Keep:
    """Validate a step of a search: names and reasons are texts, and a node that is to wake is one of those asleep."""
    if isinstance(answer, Probe):  # as most are
        nodes: object = answer.nodes
        if isinstance(nodes, tuple) and set(map(type, nodes)) <= {str}:
            return answer
    compared = answer.compared if isinstance(answer, Transfer | Keep) else ()
    if compared != () and not all(map(_is_cost, compared)):
        raise TypeError("a compared cost is none")
    if isinstance(answer, Keep) and answer.wakes != "" and answer.wakes not in asleep:
        raise ValueError("the node to wake is not asleep")
    match answer:
        case Broadcast(otherwise=None):
            return answer
        case Broadcast(otherwise=Transfer() as late):
            valid_step(late)
            return answer
        case Transfer(to=str(), load_tasks_max=int() as most) if -1 <= most <= ANY_LOAD and not isinstance(most, bool):
            return answer
        case Keep(reason=str()):
            return answer
        case _:
            raise TypeError(f"a {type(answer).__name__} is not a step of a search")


# -- random choice of peers, one after the other, without replacement (docs/policies.md, reports and probing) ------------
#
# Remembered nodes are asked first, newest first, at most REMEMBERED_MAX of them, which costs none of a search's probes.
# The others are drawn at random.

REMEMBERED_MAX = 2
"""Remembered names that one search asks. With many nodes the lists are always full, mostly of outdated hints."""
DIRECT_DRAWS_MAX = 16
"""Draws by rejection before the remaining peers are listed; keeps a draw O(1) among many peers."""


def draw_receiver(view: NodeView, replies: Sequence[Reply], rng: random.Random, probes: int) -> str | None:
    """Draw a peer to ask whether it accepts a task: from the idle list first; then, up to ``probes`` of them,
    uniformly, or by reports: first peers that reported that they accept, then peers without a report, never the
    others. None if no peer is left."""
    return _draw(view, view.idle_list, replies, rng, probes, "accepts")


def draw_donor(view: NodeView, replies: Sequence[Reply], rng: random.Random, probes: int) -> str | None:
    """Draw a peer to ask for a task: as `draw_receiver`, from the busy list, and by whether reports say that it
    gives."""
    return _draw(view, view.busy_list, replies, rng, probes, "gives")


def _draw(
    view: NodeView, names: Sequence[str], replies: Sequence[Reply], rng: random.Random, probes: int, wanted: Reported
) -> str | None:
    asked: set[str] = set()
    remembered: set[str] = set()
    drawn: set[str] = set()
    for reply in replies:
        asked.add(reply.node)
        (remembered if reply.remembered else drawn).add(reply.node)
    if names and len(remembered) < REMEMBERED_MAX:
        peers = view.peers
        for name in reversed(names):
            if name not in asked and name in peers:
                return name
    if len(drawn) >= probes:  # a declined offer does not count
        return None
    if not view.reports_guide_probing:
        return _uniform(view.peers, asked, rng)
    return _by_report(view, asked, rng, wanted)


def was_declined(replies: Sequence[Reply]) -> bool:
    """True if an offer was declined: then no more probes, the next best node is tried."""
    return len({reply.node for reply in replies}) < len(replies)


def _uniform(peers: Sequence[str], asked: Collection[str], rng: random.Random) -> str | None:
    number = len(peers)
    if not number:
        return None
    for _ in range(DIRECT_DRAWS_MAX):
        peer = peers[rng.randrange(number)]
        if peer not in asked:
            return peer
    left = [peer for peer in peers if peer not in asked]
    return left[rng.randrange(len(left))] if left else None


def _by_report(view: NodeView, asked: Collection[str], rng: random.Random, wanted: Reported) -> str | None:
    pool = list(filterfalse(asked.__contains__, view.reporting(wanted)))
    if not pool:
        pool = list(filterfalse(asked.__contains__, view.reporting("nothing")))
    return pool[rng.randrange(len(pool))] if pool else None
