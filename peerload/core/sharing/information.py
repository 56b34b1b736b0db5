"""Load information: what this node knows of its own load and of its peers' room, and what it reports.

In reading order: hints about peers, the views for policies, the load index with thresholds, region, report and
announcements (`Information`), and admission control for tasks of other homes (`RemoteAdmission`).

The information policy names what it watches: the load region, n, or nothing. A change of the load region, or of having
a task to give, is announced when it has held for settle_s and the policy says so; besides, at the policy's period, if
it has one. It is also announced again if a probe or reply has carried another state meanwhile, because its receiver
would believe that state until the next change. The transfer policy is asked for its thresholds once an event, or once
for all if they are steady.
"""

from __future__ import annotations

from itertools import chain, islice
from math import ceil, fsum, inf
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from peerload.core.resources.admission import foreign_slots, seen_by, why_never
from peerload.core.resources.devices import EPSILON
from peerload.core.tasks.queue import MOVABLE
from peerload.model import metrics, timers
from peerload.model.actions import Announce
from peerload.model.events import LoadSampled
from peerload.model.messages import GIVEN_MAX, UNASKED, Need, ProbeReply, ProbeRequest, State, StateAnswer
from peerload.model.resources import BYTES_MAX, LoadReport, Region, Thresholds
from peerload.model.task import task_home
from peerload.policy.api import (
    ANY_LOAD,
    POLICY_FAILURES,
    KnownReport,
    TaskView,
    remaining_s,
    valid_answer,
    valid_audience,
    valid_load,
    valid_thresholds,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence, Sized

    from peerload.core.membership.membership import Membership
    from peerload.core.resources.admission import Ledger
    from peerload.core.state import CoreState, Mediator
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.core.work import Work
    from peerload.model.events import Instant
    from peerload.model.messages import Offer
    from peerload.model.resources import Profile, ResourceRequest
    from peerload.policy.api import Reported, Said, TransferPolicy


NAMES_MAX = 16
"""Names on each list; one more drops the oldest."""


class PeerHints:
    """Hints of which peer last had room, and which had work, after the sender and receiver lists of [SK90]: newest
    last. Both lists stay empty if the preset has no memory.

    A search that found nothing leaves its node's name with the nodes that it asked at random: a sender's on the busy
    list, a receiver's on the idle list. If reports guide probing, a node that refuses remembers the searcher
    immediately instead, which costs no message. A name is only a hint: it is removed when that node is asked.
    """

    __slots__ = ("_busy", "_idle", "_is_on", "leaves_footprints")

    def __init__(self, *, is_on: bool, by_refusal: bool = False) -> None:
        self._is_on = is_on
        self.leaves_footprints = is_on and not by_refusal
        """True if a search that found nothing notifies the nodes that it asked."""
        self._idle: list[str] = []
        self._busy: list[str] = []

    @property
    def idle(self) -> Sequence[str]:
        """Nodes whose search for work found nothing."""
        return self._idle

    @property
    def busy(self) -> Sequence[str]:
        """Nodes whose search for room found nothing, or that report too much load."""
        return self._busy

    def is_idle(self, node: str) -> None:
        """Record a node that searched here for work and found none."""
        self._put(self._idle, node)

    def is_busy(self, node: str) -> None:
        """Record a node that searched here for room and found none."""
        self._put(self._busy, node)

    def refused_work(self, node: str) -> None:
        """Remember a node whose request for work this node refused."""
        if not self.leaves_footprints:
            self.is_idle(node)

    def refused_room(self, node: str) -> None:
        """Remember a node whose request for room this node refused."""
        if not self.leaves_footprints:
            self.is_busy(node)

    def take_idle(self, node: str) -> bool:
        """Remove a node that is asked now from the idle list → whether it was on it."""
        return _taken(self._idle, node)

    def take_busy(self, node: str) -> bool:
        """Remove a node that is asked now from the busy list → whether it was on it."""
        return _taken(self._busy, node)

    def _put(self, names: list[str], node: str) -> None:
        if not self._is_on:
            return
        _taken(names, node)
        names.append(node)
        del names[:-NAMES_MAX]


def _taken(names: list[str], node: str) -> bool:
    if node not in names:
        return False
    names.remove(node)
    return True


SLACK = {"time": 0.0, "balanced": 0.1, "energy": 0.5}
"""Share by which a task may end later to save energy, by its user's preference."""
WAITING_LOOKED_AT_MAX = 1000
"""Waiting tasks at each end of the queue that are compared for a node that asks for work: some milliseconds."""
ANYTHING = Need()
"""The need that every node with slots can meet."""


class Observed(NamedTuple):
    """The machines of a node that a view reads."""

    state: CoreState
    queue: WaitingQueue
    membership: Membership
    hints: PeerHints
    mediator: Mediator
    stranded: Sized
    ledger: Ledger


class View:
    """`policy.api.NodeView` over the machines of one node; created for each question, copies nothing."""

    __slots__ = (
        "_hints",
        "_ledger",
        "_load",
        "_load_version",
        "_mediator",
        "_membership",
        "_peers",
        "_queue",
        "_state",
        "_stranded",
        "_uncounted",
        "asleep",
        "for_request",
        "sensed",
        "starts_here",
        "thresholds",
        "told",
        "told_s",
    )

    def __init__(
        self,
        observed: Observed,
        sensed: LoadSampled,
        thresholds: Thresholds,
        peers: Sequence[str] | None = None,
        uncounted: Work | None = None,
        request: ResourceRequest | None = None,
        told: tuple[LoadReport | None, float] = (None, 0.0),
    ) -> None:
        """peers: None = all usable ones; uncounted: a waiting task that is left out; told: the last announcement, and
        its time. `for_request`: of the task in question, if it asks for GPUs: then loads are in GPUs (`seen_by`)."""
        self._state, self._queue, self._membership, self._hints, self._mediator, self._stranded, self._ledger = observed
        self._peers = peers
        self._uncounted = uncounted
        self.sensed = sensed
        self.for_request = request if request is not None and request.gpus else None
        self.thresholds = thresholds
        self.told, self.told_s = told
        self._load: float
        self._load_version = NOT_COMPARED
        self.starts_here = False
        self.asleep: Mapping[str, float] = {}

    @property
    def node(self) -> str:
        return self._state.node

    @property
    def peers(self) -> Sequence[str]:
        return self._membership.eligible(ANYTHING, "") if self._peers is None else self._peers

    @property
    def reports_guide_probing(self) -> bool:
        return self._state.reports_guide_probing

    @property
    def load(self) -> float:
        """Load index by the load policy; cached until a change that it may depend on."""
        if self.for_request is not None:
            return self.gpu_load
        if self._load_version == self._ledger.load_version:
            return self._load
        policy = self._state.policies.load
        try:
            self._load = load = valid_load(policy.load(self))
        except POLICY_FAILURES as error:
            self._state.policy_failed(error)
            return self.load_tasks / max(self.slots, 1) * self.load_unit
        if getattr(policy, "steady", False):
            self._load_version = self._ledger.load_version
        return load

    @property
    def load_mean(self) -> float:
        if self.for_request is None:
            return self._membership.load_mean(self.load, self.peers)
        loads = [self.load, *(report.load for _, report in self.reports())]
        return fsum(loads) / len(loads)  # not `statistics.fmean`, whose module takes memory

    @property
    def load_unit(self) -> float:
        is_in_seconds = self.for_request is None and getattr(self._state.policies.load, "in_seconds", False)
        return self.mean_s or 1.0 if is_in_seconds else 1.0

    @property
    def gpu_load(self) -> float:
        policy_load = getattr(self._state.policies.load, "gpu_load", None)
        if policy_load is not None:
            try:
                return valid_load(policy_load(self))
            except POLICY_FAILURES as error:
                self._state.policy_failed(error)
        return self.gpu_tasks / max(self.gpus, 1)

    @property
    def gpus(self) -> int:
        return self._ledger.profile.gpus

    @property
    def gpu_tasks(self) -> int:
        return self._ledger.gpu_tasks

    @property
    def gpus_busy(self) -> float:
        return self._ledger.devices.gpus_busy

    @property
    def gpus_foreign(self) -> float:
        return self._ledger.devices.gpus_foreign

    @property
    def load_tasks(self) -> int:
        """Tasks of this node (n), for a task with GPUs counted in GPUs."""
        if self.for_request is not None:
            own = self.for_request.gpus if self._uncounted is not None else 0
            return max(self.gpu_tasks - own, 0)
        ledger = self._ledger
        return ledger.load_tasks if self._uncounted is None else ledger.load_tasks_without(self._uncounted.spec.request)

    @property
    def slots(self) -> int:
        """Slots of this node (c), for a task with GPUs its GPUs."""
        return self.gpus if self.for_request is not None else self._ledger.profile.slots

    @property
    def cpus(self) -> float:
        return self._ledger.profile.cpus

    @property
    def cpus_busy(self) -> float:
        return self.sensed.cpus_busy

    @property
    def cpus_foreign(self) -> float:
        return self.sensed.cpus_busy_foreign if self._state.config.counts_foreign else 0.0

    @property
    def foreign_slots(self) -> int:
        return 0 if self.for_request is not None else self._ledger.foreign_slots

    @property
    def cpus_requested(self) -> float:
        own = 0.0 if self._uncounted is None else self._uncounted.spec.request.cpus
        return max(self._ledger.cpus_requested - own, 0.0)

    @property
    def speed(self) -> float:
        return self._ledger.profile.speed

    @property
    def mean_s(self) -> float:
        return self._state.history.mean_s / self.speed

    @property
    def waiting_s(self) -> float:
        history = self._state.history
        work_s = self._queue.expected_s + len(self._ledger.inbound) * history.mean_s
        if self._uncounted is not None:
            work_s = max(work_s - (history.expected_of(self._uncounted) or history.mean_s), 0.0)
        return work_s / self.speed

    @property
    def running(self) -> Sequence[RunningTasksView]:
        return tuple(RunningTasksView(work, self._state) for work in self._mediator.running_tasks())

    @property
    def idle_list(self) -> Sequence[str]:
        return self._hints.idle

    @property
    def busy_list(self) -> Sequence[str]:
        return self._hints.busy

    @property
    def cpus_started(self) -> float:
        return self._ledger.cpus_running + self._ledger.cpus_inbound

    @property
    def backlog(self) -> int:
        return len(self._queue) + len(self._stranded)

    @property
    def price(self) -> float | None:
        return self._state.price

    def profile(self, node: str) -> Profile | None:
        if node == self._state.node:
            return self._ledger.profile
        return self._membership.profile(node)

    def report(self, node: str) -> KnownReport | None:
        """The newest unexpired report of a peer; of this node the last announced one."""
        known = self._told_last() if node == self._state.node else self._membership.report(node)
        if known is None or self.for_request is None:
            return known
        return KnownReport(seen_by(self.for_request, known.report), known.age_s)

    def _told_last(self) -> KnownReport | None:
        return None if self.told is None else KnownReport(self.told, self._state.now.boot_s - self.told_s)

    def reports(self, age_s_max: float = inf, wanted: Said | None = None) -> Iterator[tuple[str, LoadReport]]:
        if self.for_request is None and wanted is not None:
            return self._membership.saying(self.peers, wanted, age_s_max)
        known, request = self._membership.reports(self.peers, age_s_max), self.for_request
        if request is None:
            return known
        seen = ((node, seen_by(request, report)) for node, report in known)
        return seen if wanted is None else ((node, report) for node, report in seen if getattr(report, wanted))

    def reporting(self, wanted: Reported) -> Sequence[str]:
        if self.for_request is None or wanted == "nothing":
            return self._membership.reporting(self.peers, wanted)
        return [node for node, _ in self.reports(wanted=wanted)]


class RunningTasksView:
    """`policy.api.RunningView`: an attempt that holds resources here."""

    __slots__ = ("_state", "_work")

    def __init__(self, work: Work, state: CoreState) -> None:
        self._work = work
        self._state = state

    @property
    def used_s(self) -> float:
        return max(self._state.now.boot_s - self._work.started_s, 0.0)

    @property
    def durations(self) -> Sequence[float]:
        history, said_s = self._state.history, self._work.spec.est_s
        if said_s:
            return (said_s / self._state.profile.speed,)
        past = history.past(history.keys_of(self._work)) or history.all
        return past.ascending(self._state.profile.speed)


class MovableTasksView:
    """`policy.api.WaitingView`: the waiting work that ``may_go`` accepts, as task views. In a long queue it covers only
    WAITING_LOOKED_AT_MAX tasks from each end, so that the cost of a request is bounded. Views are cached for the next
    task, as long as nothing changes."""

    __slots__ = ("_may_go", "_newest", "_oldest", "_queue", "_state", "works")

    def __init__(self, queue: WaitingQueue, may_go: Callable[[Work], bool], state: CoreState) -> None:
        self._queue = queue
        self._may_go = may_go
        self._state = state
        self.works: dict[str, Work] = {}
        self._oldest: tuple[list[TaskView], Iterator[TaskView]] | None = None
        self._newest: tuple[list[TaskView], Iterator[TaskView]] | None = None

    def oldest_first(self) -> Iterator[TaskView]:
        if self._oldest is None:
            self._oldest = [], self._views(self._queue.oldest_first(MOVABLE), self._queue.newest_first(MOVABLE))
        return self._seen(*self._oldest)

    def newest_first(self) -> Iterator[TaskView]:
        if self._newest is None:
            self._newest = [], self._views(self._queue.newest_first(MOVABLE), self._queue.oldest_first(MOVABLE))
        return self._seen(*self._newest)

    def take(self, work: Work) -> None:
        """Leave a task out from now on."""
        del self.works[work.task]
        for seen, _ in filter(None, (self._oldest, self._newest)):
            seen[:] = [view for view in seen if view.task != work.task]

    def _seen(self, seen: list[TaskView], others: Iterator[TaskView]) -> Iterator[TaskView]:
        yield from [view for view in seen if view.task in self.works]
        for view in others:
            seen.append(view)
            yield view

    def _views(self, works: Iterator[Work], other_end: Iterator[Work]) -> Iterator[TaskView]:
        if len(self._queue) > 2 * WAITING_LOOKED_AT_MAX:
            works = chain(islice(works, WAITING_LOOKED_AT_MAX), islice(other_end, WAITING_LOOKED_AT_MAX))
        for work in works:
            if self._may_go(work):
                self.works[work.task] = work
                yield task_view(work, self._state)


def task_view(work: Work, state: CoreState) -> TaskView:
    """A waiting task as policies see it on this node."""
    spec, history = work.spec, state.history
    return TaskView(
        work.task,
        spec.request,
        spec.placement,
        work.moves(),
        state.now.boot_s - work.arrived_s,
        history.expected_of(work) / state.profile.speed,
        sum(map(len, spec.argv)) + len(spec.environment) + len(spec.directory),
        SLACK.get(spec.prefer),
    )


Standing = tuple[Region, bool, bool]

THRESHOLDS_AT_FIRST = Thresholds(send_at=1.0, accept_below=1.0, receive_below=1.0, give_above=1.0)
"""Thresholds before the transfer policy has returned any, and while it fails."""
NOT_SETTLED = (-1, 0, 0)
NOT_COMPARED = -1
PIPELINED_MAX = 64
"""Limit on tasks that are requested beyond the running ones because handoffs take longer than tasks."""
HANDOFF_SHARE = 0.02
"""Weight of a handoff that took longer than the recent minimum."""
LEVEL_DIGITS = 6
"""Decimals of the load index in slots: n / c · c must give n."""


class Information:
    """Information policy of one node; its timers are ``region``, ``period`` and ``tell``. ``ask(report)`` is called
    when the policy wants a query for the others' load. stranded: the tasks of this home without a place, which count as
    movable; running: the attempts that run here."""

    def __init__(
        self,
        state: CoreState,
        queue: WaitingQueue,
        membership: Membership,
        hints: PeerHints,
        stranded: Sized,
        mediator: Mediator,
    ) -> None:
        self._state = state
        self._queue = queue
        self._ledger = queue.ledger
        self._membership = membership
        self._observed = Observed(state, queue, membership, hints, mediator, stranded, queue.ledger)
        self._stranded = stranded
        self._sequence = 0
        self._told: LoadReport | None = None
        self._told_s = 0.0
        self._said: LoadReport | None = None
        self._before: LoadReport | None = None
        self._told_standing: Standing | None = None
        self._before_standing: Standing | None = None
        self._seen_tasks = 0
        self._is_quiet = False
        self._watches = state.policies.information.watches
        self._period_s = state.policies.information.period_s
        self._mediator = mediator
        self._due: Standing | None = None
        self._thresholds = THRESHOLDS_AT_FIRST
        self._marks_at: Instant | None = None
        self._steady: TransferPolicy | None = None
        self._settled_version = NOT_SETTLED
        self._sensed = LoadSampled(0.0, 0.0, 0)
        self._own = View(self._observed, self._sensed, self._thresholds)
        """View of all tasks here, for load policies."""
        self._is_index_steady = bool(getattr(state.policies.load, "steady", False))
        """True if the load index changes only with the tasks here and with sensor readings."""
        self._is_in_seconds = bool(getattr(state.policies.load, "in_seconds", False))
        self._compared_at = NOT_COMPARED
        self._load = self._level = 0.0
        self._region = Region.UNDERLOADED
        self._accepts = self._has_many = self._asks_ahead = False
        self._receive_below = 0.0
        self._description: LoadReport | None = None
        self._described_at: tuple[object, ...] = ()
        self._handoff_s = 0.0
        """Estimated time of a handoff to this node; 0 before the first."""

    # -- queries of the other parts ------------------------------------------------------------------------------------

    def sampled(self, event: LoadSampled) -> bool:
        """Handle new readings of the sensors. → whether foreign programs have freed a slot."""
        self._sensed = self._own.sensed = event
        ledger = self._ledger
        ledger.load_version += 1
        before = ledger.foreign_slots
        if self._state.config.counts_foreign:
            profile = ledger.profile
            cpus = event.cpus or profile.cpus
            ledger.set_foreign_slots(foreign_slots(before, event.cpus_busy_foreign, cpus, profile.slots))
        return ledger.foreign_slots < before

    def view(
        self,
        peers: Sequence[str] | None = None,
        uncounted: Work | None = None,
        request: ResourceRequest | None = None,
    ) -> View:
        """The view of this node, and of the peers in question (None: all), for a policy. ``uncounted``: a waiting task
        that the load leaves out. request: of the task that is to be placed."""
        told = self._told, self._told_s
        return View(self._observed, self._sensed, self.thresholds(), peers, uncounted, request, told)

    def thresholds(self) -> Thresholds:
        """The transfer policy's thresholds; asked for once an event."""
        policy = self._state.policies.transfer
        if policy is self._steady or self._marks_at is self._state.now:
            return self._thresholds
        try:
            thresholds = policy.thresholds(self._own)
            if thresholds != self._thresholds:
                self._thresholds = self._own.thresholds = valid_thresholds(thresholds)
            self._steady = policy if getattr(policy, "steady", False) else None
        except POLICY_FAILURES as error:
            self._state.policy_failed(error)
        self._marks_at = self._state.now
        return self._thresholds

    # -- the thresholds, which are on the load index ------------------------------------------------------------------------
    #
    # A threshold of at most one task per slot also applies to n: whatever the index, a node with a task in every slot
    # asks for and accepts no more, and sends and gives what it cannot start.

    def level(self, uncounted: Work | None = None) -> float:
        """The load index in slots, for comparison with the thresholds; for the index `tasks` it is n. ``uncounted``: a
        waiting task that is left out."""
        if uncounted is not None:
            view = View(self._observed, self._sensed, self._thresholds, uncounted=uncounted)
            return self._in_slots(view, view.load)
        if self._ledger.load_version != self._compared_at:
            self._compare()
        return self._level

    def _in_slots(self, view: View, load: float) -> float:
        unit = view.load_unit if self._is_in_seconds else 1.0
        return round(load / unit * max(self._ledger.profile.slots, 1), LEVEL_DIGITS)

    def _compare(self) -> None:
        """Compare the load index with the thresholds. Valid until `Ledger.load_version` or a threshold changes."""
        ledger, thresholds = self._ledger, self.thresholds()
        profile, n = ledger.profile, ledger.load_tasks
        self._compared_at = ledger.load_version if self._is_index_steady else NOT_COMPARED
        slots, send_at, below, above = profile.slots, thresholds.send_at, thresholds.accept_below, thresholds.give_above
        self._load = load = self._own.load
        self._level = level = self._in_slots(self._own, load)
        self._accepts = (
            level < below * slots and (below > 1.0 or n < slots) and not ledger.exceeds_cap(ledger.cpus_requested + 1.0)
        )
        self._has_many = level > above * slots or (above <= 1.0 and (n > slots or ledger.is_oversubscribed))
        self._receive_below = thresholds.receive_below * slots
        self._asks_ahead = level >= self._receive_below
        is_full = send_at <= 1.0 and n >= max(slots, 1)
        if level > 0 and level >= send_at * slots:
            self._region = Region.OVERLOADED
        elif self._accepts:
            self._region = Region.UNDERLOADED
        else:
            self._region = Region.OVERLOADED if is_full else Region.NORMAL

    def sends(self, uncounted: Work | None = None) -> bool:
        """True if an arriving task should go elsewhere by the load. ``uncounted``: this task, if it is in the load."""
        return self.level(uncounted) >= self.thresholds().send_at * self._ledger.profile.slots

    def accepts(self) -> bool:
        """True if the load allows a task of another home."""
        if self._ledger.load_version != self._compared_at:
            self._compare()
        return self._accepts

    def wants(self, expected: int = 0) -> bool:
        """True if this node should ask for a task in addition to the ``expected`` ones that it has asked for."""
        if self._ledger.load_version != self._compared_at:
            self._compare()
        thresholds, slots = self._thresholds, self._ledger.profile.slots
        prefetch = thresholds.prefetch
        if thresholds.is_pipelined and self._handoff_s:
            prefetch = max(prefetch, self._pipelined())
        is_capped = self._ledger.exceeds_cap(self._ledger.cpus_requested + expected + 1.0)
        if is_capped or self._level + expected >= self._receive_below + prefetch:
            return False
        return thresholds.receive_below > 1.0 or self._ledger.load_tasks + expected < slots + prefetch

    def wanted(self, expected: int = 0) -> int:
        """Number of tasks that this node should request at once, in addition to ``expected``. If handoffs take longer
        than tasks, it requests none until half of the pipeline is free, so that one message moves many."""
        if not self.wants(expected):
            return 0
        if not self.is_pipelining():
            return 1
        ahead = self._pipelined()
        level = max(self._level, self._ledger.load_tasks) + expected
        lacking = ceil(self._receive_below + ahead - level)
        if level >= self._receive_below and 2 * lacking < ahead:
            return 0
        is_capped = self._ledger.exceeds_cap(self._ledger.cpus_requested + expected + lacking)
        return 1 if is_capped else max(min(lacking, GIVEN_MAX), 1)

    def _finished_during_handoff(self) -> float:
        """Tasks that the slots of this node are expected to finish during a handoff: the bandwidth-delay product."""
        return min(self._ledger.profile.slots * self._handoff_s / self._mean_s, PIPELINED_MAX)

    def _pipelined(self) -> float:
        """Tasks to request ahead: those finished during a handoff and, if these are many, enough to fill the lanes of
        the launcher."""
        bridging, config = self._finished_during_handoff(), self._state.config
        if bridging <= max(self._thresholds.prefetch, 1.0):
            return bridging
        in_lanes = self._ledger.profile.slots * min(config.ahead_s / self._mean_s, config.ahead_max)
        return max(bridging, min(in_lanes, PIPELINED_MAX))

    @property
    def _mean_s(self) -> float:
        return self._state.history.mean_s / self._state.profile.speed

    def is_pipelining(self) -> bool:
        """True if tasks are so short that more are requested ahead than the policy prefetches anyway."""
        thresholds = self.thresholds()
        return thresholds.is_pipelined and self._finished_during_handoff() > max(thresholds.prefetch, 1.0)

    def handoff_took(self, handoff_s: float) -> None:
        """Learn the time from a request for a task to its arrival. The estimate stays near the shortest recent time,
        because a request's time in line belongs to the requests before it."""
        if not self._handoff_s or handoff_s < self._handoff_s:
            self._handoff_s = handoff_s
        else:
            self._handoff_s += HANDOFF_SHARE * (handoff_s - self._handoff_s)

    def asks_ahead(self) -> bool:
        """True if a task that it asks for would have to wait here (`Thresholds.prefetch`)."""
        if self._ledger.load_version != self._compared_at:
            self._compare()
        return self._asks_ahead

    def gives(self) -> bool:
        """True if this node has enough tasks to give one away."""
        if self._ledger.load_version != self._compared_at:
            self._compare()
        return self._has_many

    def _has_to_give(self) -> bool:
        """True if this node has a waiting task that may move."""
        if self._stranded or self._ledger.waits_for_devices:
            return True
        return len(self._queue) > 0 and self.gives()

    def report(self) -> LoadReport:
        """Current load report of this node, to be sent."""
        self._sequence += 1
        report = self._described()
        self.report_sent(report)
        return report

    def shown(self) -> LoadReport:
        """The load report of this node as of the end of the last event; changes nothing."""
        return self._described()

    def report_sent(self, report: LoadReport) -> None:
        """Handle a report that was sent: record whether its standing differs from the announced one."""
        if self._watches == "region" and self._told is not None and self._standing(report) != self._told_standing:
            self._said = report
            self._settled_version = NOT_SETTLED

    def _described(self) -> LoadReport:
        """The load report. It is built again only after a change of its contents: one goes with every probe and reply,
        and usually only the number differs from the last one."""
        state, ledger = self._state, self._ledger
        at = (
            ledger.load_version,
            len(self._stranded),
            self.thresholds(),
            state.identity,
            state.takes_remote_tasks,
            state.is_asleep,
            state.price if state.prices else None,
        )
        if self._description is None or at != self._described_at or not self._is_index_steady or ledger.devices.states:
            self._description, self._described_at = self._describe(), at
            return self._description
        return replace(self._description, sequence=self._sequence)

    def _describe(self) -> LoadReport:
        if self._ledger.load_version != self._compared_at:
            self._compare()
        ledger, sensed = self._ledger, self._sensed
        n, slots = ledger.load_tasks, ledger.profile.slots
        stranded, devices = len(self._stranded), ledger.devices
        report = LoadReport(
            load_tasks=n,
            slots=slots,
            running=len(ledger.running),
            waiting=ledger.waiting + stranded,
            movable=len(self._queue) + stranded,
            load=self._load,
            region=self._region,
            accepts=self._accepts and self._state.takes_remote_tasks,
            gives=self._has_to_give(),
            cpus_busy=sensed.cpus_busy,
            mem_used_bytes=sensed.mem_used_bytes,
            incarnation=self._state.identity.incarnation,
            sequence=self._sequence,
            cpu_pressure=sensed.cpu_pressure,
            mem_pressure=sensed.mem_pressure,
            cpus_foreign=sensed.cpus_busy_foreign,
            slots_foreign=ledger.foreign_slots,
            is_asleep=self._state.is_asleep,
            watts=sensed.watts,
            price=self._state.price,
            mem_requested_bytes=min(ledger.mem_requested_bytes, BYTES_MAX),
        )
        if devices.states:
            return replace(
                report,
                cpus_free=ledger.cpus_free,
                gpus=ledger.profile.gpus,
                gpus_free=devices.gpus_free(),
                gpu_tasks=ledger.gpu_tasks,
                gpu_load=self._own.gpu_load,
                devices=devices.loads(ledger.now_s) if ledger.profile.devices else (),
            )
        as_counted = (n - ledger.foreign_slots) * ledger.profile.cpus / max(slots, 1)
        if abs(ledger.cpus_requested - as_counted) > EPSILON:
            return replace(report, cpus_free=ledger.cpus_free)
        return report

    def _standing(self, report: LoadReport) -> Standing:
        """The part of a report whose change is announced. The region; whether this node has a task to give, if reports
        guide probing (with a threshold of 1 the region is the same for one task and for ten); and whether it has an
        unused GPU, for tasks that wait for one elsewhere."""
        guides = self._state.reports_guide_probing
        return report.region, report.gives and guides, report.gpus_free > 0

    # -- announcements -------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Check for changes in what the information policy watches; called after every event."""
        self._sequence += 1  # `shown` after this event is newer than all reports sent in it
        if self._told is None:
            self.announce()
            self._before, self._before_standing = self._told, self._told_standing
        elif self._watches == "region":
            self._settle_standing()
        elif self._watches == "tasks":
            self._settle_tasks()
        if self._steady is None:
            self.between_events()

    def between_events(self) -> None:
        """Drop the thresholds of the transfer policy after an event, unless they are steady."""
        self._marks_at = None
        if self._steady is None:
            self._compared_at = NOT_COMPARED

    def _settle_standing(self) -> None:
        """Start or stop the settle timer of a changed load region."""
        ledger, devices = self._ledger, self._ledger.devices
        version = ledger.load_version, devices.version if devices.states else 0, len(self._stranded)
        if version == self._settled_version and self._is_index_steady and self._steady is not None:
            return  # no task, reading or threshold has changed since
        self._settled_version = version
        guides = self._state.reports_guide_probing
        if ledger.load_version != self._compared_at:
            self._compare()
        standing = self._region, guides and self._has_to_give(), bool(devices.states and devices.gpus_free())
        if standing == self._told_standing == (self._before_standing or standing) and self._said is None:
            if self._due is not None:
                self._due = None
                self._state.clear_timer(timers.RegionSettled())
        elif self._due != standing:
            self._due = standing
            self._state.set_timer_in(self._state.config.settle_s, timers.RegionSettled())

    def region_held(self) -> None:
        """Handle a load region that has held for settle_s: announce it, or ask others, as the information policy
        decides."""
        said = self._said
        now = self.report()
        known = said if said is not None and self._standing(said) != self._standing(now) else self._told
        self._changed(known, now)

    def _settle_tasks(self) -> None:
        if self._ledger.load_tasks != self._seen_tasks and not self._is_quiet:
            self._seen_tasks = self._ledger.load_tasks
            self._changed(self._told, self.report())

    def announce_again(self) -> None:
        """Allow announcements again after tell_s_min."""
        self._is_quiet = False

    def _changed(self, told: LoadReport | None, now: LoadReport) -> None:
        """Announce a change, or ask others, as the information policy decides."""
        before, self._before, self._before_standing = self._before, now, self._standing(now)
        self._settled_version = NOT_SETTLED
        policy = self._state.policies.information
        try:
            tells, asks = valid_answer(policy.tells(told, now)), valid_answer(policy.asks(before, now))
        except POLICY_FAILURES as error:
            self._state.policy_failed(error)
            return
        if tells:
            audience = self._audience()
            if audience is None:
                self.announce(now)
            else:
                self._announce_to(audience, now)
        if asks:
            self._mediator.ask_for_states(now)
        quiet_s = self._state.config.tell_s_min
        if self._watches == "tasks" and quiet_s and (tells or asks):
            self._is_quiet = True
            self._state.set_timer_in(quiet_s, timers.Announcement())

    def _audience(self) -> Sequence[str] | None:
        """Nodes to which the information policy sends an announcement; None: all, as without a choice."""
        choose = getattr(self._state.policies.information, "audience", None)
        if choose is None:
            return None
        view = self.view()
        try:
            return valid_audience(choose(view, self._state.rng), view.peers)
        except POLICY_FAILURES as error:
            self._state.policy_failed(error)
            return ()

    def _announce_to(self, audience: Sequence[str], report: LoadReport) -> None:
        """Announce this node's load only to these."""
        self._announced(report)
        for node in audience:
            self._state.count(metrics.ANNOUNCEMENTS_TO_ONE)
            self._state.send(node, StateAnswer(UNASKED, report))

    def _announced(self, report: LoadReport) -> None:
        self._told, self._told_standing = report, self._standing(report)
        self._told_s = self._state.now.boot_s
        self._said = self._due = None

    def period_passed(self) -> None:
        """Announce the load after the fixed period of the information policy."""
        self.announce()

    def announce(self, report: LoadReport | None = None) -> None:
        """Announce this node's load to all nodes."""
        report = report or self.report()
        self._announced(report)
        self._state.count(metrics.ANNOUNCEMENTS)
        self._membership.announce_load(report)
        self._state.actions.append(Announce(State(self._state.identity, self._state.profile, report)))
        if self._period_s:
            self._state.set_timer_in(max(self._period_s, self._state.config.tell_s_min), timers.Period())


class RemoteAdmission:
    """Admission control for tasks of other homes: whether this node would accept one now, and its bid. One per node.

    The answer to a probe is advice: nothing is reserved. The same test is made again when an offer comes.
    """

    def __init__(
        self, state: CoreState, ledger: Ledger, membership: Membership, information: Information, hints: PeerHints
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._membership = membership
        self._information = information
        self._hints = hints

    def probe_received(self, src: str, probe: ProbeRequest) -> None:
        """Answer a probe with advice: whether this node would accept the task now; nothing is reserved."""
        self._membership.report_received(src, probe.report)
        accepts = self.would_accept(src, probe.need)
        if not accepts:
            self._hints.refused_room(src)
        self._state.send(
            src, ProbeReply(probe.search, accepts, self._information.report(), self.price_s(probe.expected_s))
        )

    def price_s(self, expected_s: float) -> float:
        """The bid of this node: the expected time until a task would be complete here, in seconds. expected_s: its
        duration on the reference machine; 0: no bid is wanted, and the price is 0.

        With a free slot the task starts immediately. Otherwise it waits for the first end of a running task, after 1/c
        of their mean remaining time for c slots (exact for exponential durations), and until the c slots have done the
        waiting work. A slot that foreign programs occupy counts as a running task of the mean duration.
        """
        if not expected_s:
            return 0.0
        view = self._information.view()
        slots, mean_s = max(view.slots, 1), view.mean_s
        wait_s = 0.0
        if view.load_tasks >= slots:
            running_s = sum(remaining_s(task, mean_s) for task in view.running) + view.foreign_slots * mean_s
            wait_s = (running_s / slots + view.waiting_s) / slots
        return wait_s + expected_s / view.speed

    def accepts_offer(self, offer: Offer) -> bool:
        home, need = task_home(offer.task), Need(offer.spec.request, offer.spec.placement)
        return self.would_accept(home, need, offer.load_tasks_max)

    def would_accept(self, home: str, need: Need, load_tasks_max: int = -1) -> bool:
        """True if this node would accept such a task of that home now; with n at most ``load_tasks_max``, regardless of
        its thresholds. A threshold of at most 1 accepts no task that would wait for memory, unless this node has asked
        for it."""
        profile = self._state.profile
        if not self._state.takes_remote_tasks:
            return False
        if why_never(profile, need.request, need.placement, home):
            return False
        lets_wait = self._information.thresholds().accept_below > 1.0
        if need.request.takes_devices:
            is_little = need.request.gpus > 0 and self._ledger.gpu_tasks <= load_tasks_max < ANY_LOAD
            return is_little or self._ledger.fits_beside_all(need.request)
        if self._ledger.load_tasks <= load_tasks_max:
            return lets_wait or load_tasks_max == ANY_LOAD or self._ledger.has_memory_beside_all(need.request)
        if need.request.overcommit and profile.enforces_cores:
            return self._ledger.fits_beside_all(need.request)
        if not self._information.accepts():
            return False
        return lets_wait or self._ledger.fits_beside_all(need.request)
