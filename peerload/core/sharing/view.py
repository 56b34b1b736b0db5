"""The read-only views that policies get."""

from __future__ import annotations

from itertools import chain, islice
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from peerload.core.resources.gpu_terms import seen_by
from peerload.core.tasks.queue import MOVABLE
from peerload.energy.price import price_at
from peerload.model import metrics
from peerload.model.messages import Need
from peerload.policy.api import KnownReport, TaskView
from peerload.policy.validation import valid_load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence, Sized

    from peerload.core.membership.membership import Membership
    from peerload.core.sharing.peer_hints import PeerHints
    from peerload.core.state import CoreState, Mediator
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.core.work import Work
    from peerload.model.events import LoadSampled
    from peerload.model.load import LoadReport, Thresholds
    from peerload.model.resources import Profile, ResourceRequest

SLACK = {"time": 0.0, "balanced": 0.1, "energy": 0.5}
"""Share by which a task may end later for the sake of its joules, by what its user prefers."""
WAITING_LOOKED_AT_MAX = 1000
"""Waiting tasks at either end of the queue that are held against a node that asks for work: some milliseconds."""
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


class View:
    """`policy.api.NodeView` over the machines of one node; made anew for each question, it copies nothing."""

    __slots__ = (
        "_hints",
        "_ledger",
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
    )

    def __init__(
        self, observed: Observed, sensed: LoadSampled, peers: Sequence[str] | None, uncounted: Work | None
    ) -> None:
        """peers: None = all that are usable; uncounted: a waiting task that is left out. `for_request`: that of the task in question,
        if it asks for GPUs: then loads are in GPUs (`gpu_terms.py`)."""
        self._state, self._queue, self._membership, self._hints, self._mediator, self._stranded = observed
        self._ledger = observed.queue.ledger
        self._peers = peers
        self._uncounted = uncounted
        self.sensed = sensed
        self.for_request: ResourceRequest | None = None
        self.thresholds: Thresholds
        self.told: KnownReport | None = None
        self.starts_here = False
        self.asleep: Mapping[str, float] = {}

    @property
    def node(self) -> str:
        """This node's name."""
        return self._state.node

    @property
    def peers(self) -> Sequence[str]:
        """Nodes that may be asked."""
        return self._membership.eligible(ANYTHING, "") if self._peers is None else self._peers

    @property
    def reports_guide_probing(self) -> bool:
        """The information policy's word."""
        return self._state.policies.information.reports_guide_probing

    @property
    def load(self) -> float:
        """The load policy's word."""
        if self.for_request is not None:
            return self.gpu_load
        try:
            return valid_load(self._state.policies.load.load(self))
        except Exception:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
            self._state.count(metrics.POLICY_ERRORS)
            return self.load_tasks / max(self.slots, 1) * self.load_unit

    @property
    def load_unit(self) -> float:
        """The load index of one task per slot."""
        is_in_seconds = self.for_request is None and getattr(self._state.policies.load, "in_seconds", False)
        return self.mean_s or 1.0 if is_in_seconds else 1.0

    @property
    def gpu_load(self) -> float:
        """Load index of the GPUs."""
        policy_load = getattr(self._state.policies.load, "gpu_load", None)
        if policy_load is not None:
            try:
                return valid_load(policy_load(self))
            except Exception:  # noqa: BLE001 -- a policy may fail in any way; it costs only performance
                self._state.count(metrics.POLICY_ERRORS)
        return self.gpu_tasks / max(self.gpus, 1)

    @property
    def gpus(self) -> int:
        """GPUs of this node."""
        return self._ledger.profile.gpus

    @property
    def gpu_tasks(self) -> int:
        """n in GPUs."""
        return self._ledger.gpu_tasks

    @property
    def gpus_busy(self) -> float:
        """GPUs kept busy."""
        return self._ledger.devices.gpus_busy

    @property
    def gpus_foreign(self) -> float:
        """By others."""
        return self._ledger.devices.gpus_foreign

    @property
    def load_tasks(self) -> int:
        """n."""
        if self.for_request is not None:
            own = self.for_request.gpus if self._uncounted is not None else 0
            return max(self.gpu_tasks - own, 0)
        n = self._ledger.load_tasks
        return n if self._uncounted is None else max(n - 1, 0)

    @property
    def slots(self) -> int:
        """c."""
        return self.gpus if self.for_request is not None else self._ledger.profile.slots

    @property
    def cpus(self) -> float:
        """Cores of this node."""
        return self._ledger.profile.cpus

    @property
    def cpus_busy(self) -> float:
        """Cores kept busy by anybody."""
        return self.sensed.cpus_busy

    @property
    def cpus_foreign(self) -> float:
        """By others than tasks of this node, if that counts."""
        return self.sensed.cpus_busy_foreign if self._state.config.counts_foreign else 0.0

    @property
    def foreign_slots(self) -> int:
        """The slots that those occupy."""
        return 0 if self.for_request is not None else self._ledger.foreign_slots

    @property
    def cpus_requested(self) -> float:
        """Cores asked for by the tasks here."""
        own = 0.0 if self._uncounted is None else self._uncounted.spec.request.cpus
        return max(self._ledger.cpus_requested - own, 0.0)

    @property
    def speed(self) -> float:
        """How fast this node works."""
        return self._ledger.profile.speed

    @property
    def mean_s(self) -> float:
        """The mean of the last durations seen, here."""
        return self._state.history.mean_s / self.speed

    @property
    def waiting_s(self) -> float:
        """The durations expected of what waits and is on its way, together."""
        history = self._state.history
        work_s = self._queue.expected_s + len(self._ledger.inbound) * history.mean_s
        if self._uncounted is not None:
            work_s = max(work_s - (history.expected_s(history.keys_of(self._uncounted)) or history.mean_s), 0.0)
        return work_s / self.speed

    @property
    def running(self) -> Sequence[RunningTasksView]:
        """The running attempts."""
        return tuple(RunningTasksView(work, self._state) for work in self._mediator.running_tasks())

    @property
    def idle_list(self) -> Sequence[str]:
        """Empty where the preset has no memory."""
        return self._hints.idle

    @property
    def busy_list(self) -> Sequence[str]:
        """Empty where the preset has no memory."""
        return self._hints.busy

    @property
    def cpus_started(self) -> float:
        """Cores that what runs or comes has."""
        return self._ledger.cpus_running + self._ledger.cpus_inbound

    @property
    def backlog(self) -> int:
        """Tasks that wait here, and tasks that have no place."""
        return len(self._queue) + len(self._stranded)

    @property
    def price(self) -> float | None:
        """Of a kWh here now."""
        return price_at(self._state.prices, self._state.now.wall_s)

    def profile(self, node: str) -> Profile | None:
        """That of this node, or of a peer."""
        if node == self._state.node:
            return self._ledger.profile
        peer = self._membership.get(node)
        return peer.profile if peer is not None else None

    def report(self, node: str) -> KnownReport | None:
        """The newest unexpired report of a peer; this node's own is the one it told last."""
        known = self.told if node == self._state.node else self._membership.report(node)
        if known is None or self.for_request is None:
            return known
        return KnownReport(seen_by(self.for_request, known.report), known.age_s)

    def reports(self, age_s_max: float = inf) -> Iterator[tuple[str, LoadReport]]:
        """Those of the peers."""
        known = self._membership.reports(self.peers, age_s_max)
        request = self.for_request
        return known if request is None else ((node, seen_by(request, report)) for node, report in known)


class RunningTasksView:
    """`policy.api.RunningView`: an attempt that has room here."""

    __slots__ = ("_state", "_work")

    def __init__(self, work: Work, state: CoreState) -> None:
        self._work = work
        self._state = state

    @property
    def used_s(self) -> float:
        """Since it took its room."""
        return max(self._state.now.boot_s - self._work.started_s, 0.0)

    @property
    def durations(self) -> Sequence[float]:
        """Of its command, else of all."""
        history = self._state.history
        past = history.past(history.keys_of(self._work)) or history.all
        return past.ascending(self._state.profile.speed)


class MovableTasksView:
    """`policy.api.WaitingView`: the waiting work that ``may_go`` lets go, as task views; of the first WAITING_LOOKED_AT_MAX,
    and if there are more, of as many from the other end: what a node asks for does not take longer where more waits."""

    __slots__ = ("_may_go", "_queue", "_state", "works")

    def __init__(self, queue: WaitingQueue, may_go: Callable[[Work], bool], state: CoreState) -> None:
        self._queue = queue
        self._may_go = may_go
        self._state = state
        self.works: dict[str, Work] = {}

    def oldest_first(self) -> Iterator[TaskView]:
        """In the order of arrival."""
        return self._views(self._queue.oldest_first(MOVABLE), self._queue.newest_first(MOVABLE))

    def newest_first(self) -> Iterator[TaskView]:
        """The reverse."""
        return self._views(self._queue.newest_first(MOVABLE), self._queue.oldest_first(MOVABLE))

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
        (spec.est_s or history.expected_s(history.keys(spec))) / state.profile.speed,
        sum(map(len, spec.argv)) + len(spec.environment) + len(spec.directory),
        SLACK.get(spec.prefer),
    )
