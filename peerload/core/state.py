"""Shared parts of the machines of a node: its state, calls between machines without mutual references, batches."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Protocol

import msgspec

from peerload.core.estimates import NOTHING_LEARNED, RUNS_KNOWN_MIN, DurationEstimates
from peerload.model import metrics, timers
from peerload.model.actions import ClearTimer, Note, Persist, PutEvent, PutRun, Send, SetTimer
from peerload.model.events import Instant
from peerload.model.resources import GpuShare

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from peerload.core.work import HomeTask, Offering, RemoteTask, Work
    from peerload.model.actions import Action, Row
    from peerload.model.config import CoreConfig
    from peerload.model.events import TaskSubmitted
    from peerload.model.messages import Advice, Identity, Membership, Offer, Ownership
    from peerload.model.resources import LoadReport, Profile
    from peerload.model.task import TaskRecord
    from peerload.model.timers import Timer
    from peerload.policy.preset import PolicySet


LATER_RUN = "peers know a later run with this database: it was restored from a copy, or another agent uses one"
FOREVER_S = 1e8
"""Three years: such a distant moment never comes, and no timer is set for it."""


class CoreState:
    """Shared state of the core, one object per node. ``actions`` is emptied by `Node.handle` at every event; ``counts``
    are plain counters; ``history`` is the past durations of commands; ``has_disk_room``: the disk has enough space for
    more tasks; ``runs_frozen_only``: only frozen attempts run here; ``is_stuck``: and they leave no core free;
    ``turned_away``: the offer that was declined for this reason in this event; ``unsure_until_s``: until then another
    node may have a task of this home under a lease that is missing in the database; ``attempts_from``,
    ``attempts_up_to``: as in `AgentStarted`; ``store``: the id of the database under which this node makes promises to
    homes; it differs from the one in ``identity`` once the database is known to be an older copy."""

    def __init__(
        self,
        config: CoreConfig,
        policies: PolicySet,
        identity: Identity,
        profile: Profile,
        rng: random.Random,
    ) -> None:
        self.config = config
        self.policies = policies
        self.reports_guide_probing = policies.information.reports_guide_probing
        self.identity = identity
        self.node = identity.node
        self.store = identity.store
        self.profile = profile
        self.rng = rng
        self.now = Instant(0.0, 0.0)
        self.actions: list[Action] = []
        self.counts: dict[str, int] = {}
        self.policy_failure = ""
        """First failure of a policy, and its place in the code."""
        self.has_disk_room = True
        self.runs_frozen_only = False
        self.is_stuck = False
        self.is_asleep = False
        self.prices: tuple[tuple[float, float], ...] = ()
        self.turned_away: Offer | None = None
        self.unsure_until_s = 0.0
        self.attempts_from, self.attempts_up_to = 1, 0
        self.history = DurationEstimates(config.commands_kept_max, config.durations_kept_max)

    @property
    def price(self) -> float | None:
        """The current price of energy; None if it is unknown."""
        if not self.prices:
            return None
        value = self.prices[max(bisect_right(self.prices, self.now.wall_s, key=lambda one: one[0]) - 1, 0)][1]
        return value if math.isfinite(value) else None

    def run_s_max(self, work: Work, models: Sequence[str] = ()) -> float:
        """An upper bound of its run time here that nearly always holds, from its limit and its command's history; else
        infinite. ``models``: of the GPUs it may have; its run times on these count first."""
        keys, limit_s = self.history.keys_of(work), work.spec.time_limit_s or math.inf
        if work.spec.request.gpus and models:
            on_such = [self.history.gpu.on(keys, model, RUNS_KNOWN_MIN) for model in models]
            known = [runs.durations.nearly_all_s(self.profile.speed) for runs in on_such if runs is not None]
            if len(known) == len(models):
                return min(max(known), limit_s)
        past = self.history.past(keys)
        if past is None or len(past) < RUNS_KNOWN_MIN:
            return limit_s
        return min(past.nearly_all_s(self.profile.speed), limit_s)

    def learned_gpu_bytes(self, work: Work, models: Iterable[str]) -> Mapping[str, int]:
        """GPU memory that its command has needed on these models, as far as it is known. A task that shares GPUs by
        time and whose command is unknown gets the typical need of all tasks."""
        request, known = work.spec.request, self.history.gpu
        if not request.gpus or request.gpu_mem_bytes or request.gpu_fraction < 1.0 or not len(known):
            return NOTHING_LEARNED
        found = known.needs(self.history.keys_of(work), models, RUNS_KNOWN_MIN)
        if not found and request.gpu_share is GpuShare.TIME:
            return known.typical(models, RUNS_KNOWN_MIN)
        return found

    @property
    def takes_remote_tasks(self) -> bool:
        """True if tasks of other homes may come here."""
        return not self.profile.drained and not self.profile.trouble and self.has_disk_room and not self.is_stuck

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter; the `stats` request and the simulator's report show them."""
        self.counts[name] = self.counts.get(name, 0) + by

    def policy_failed(self, error: Exception | SystemExit) -> None:
        """Count a failure of a policy (an exception or an invalid answer), and keep the first one."""
        self.count(metrics.POLICY_ERRORS)
        if not self.policy_failure:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            where = ""
            if trace is not None and not trace.tb_frame.f_globals.get("__name__", "").startswith("peerload."):
                where = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"
            self.policy_failure = f"{type(error).__name__}: {error}{where}"

    def send(self, dst: str, message: Membership | Advice | Ownership) -> None:
        self.actions.append(Send(dst, message))

    def persist(self, *rows: Row) -> None:
        """Make rows durable; messages sent after this call wait until they are."""
        self.actions.append(Persist(rows))

    def advance_incarnation(self, incarnation: int, *, is_copy: bool) -> None:
        """Move to an incarnation after this one. is_copy: it was a run of this same database, which does not contain
        it. Its promises are missing here, so this node makes promises under another id of the database from now on."""
        self.identity = msgspec.structs.replace(self.identity, incarnation=incarnation + 1)
        if is_copy and self.store == self.identity.store:
            self.store = f"{self.rng.getrandbits(64):016x}"
            self.note("store", "copied", reason=LATER_RUN)
        self.persist(PutRun(self.identity.incarnation, self.store))

    def note(
        self, what: str, state: str, *, task: str = "", attempt: int = 0, node: str = "", reason: str = ""
    ) -> None:
        """Record an event for people (`EVENTS` lists the possible ones); nothing waits for it."""
        self.actions.append(Note(PutEvent(self.now.wall_s, what, state, task, attempt, node, reason)))

    def broken(self, rule: str, who: str, what: str) -> None:
        """Report a break of a security rule, and the node that broke it. Only for messages that a correct node never
        sends, not even late."""
        self.note("security", rule, node=who, reason=what)

    def note_remote(self, remote: RemoteTask, state: str, reason: str) -> None:
        """Record an event about an attempt of another home that is here."""
        self.note("attempt", state, task=remote.task, attempt=remote.attempt, node=remote.home, reason=reason)

    def set_timer_in(self, seconds: float, timer: Timer) -> None:
        """Set a timer, if ``seconds`` is less than FOREVER_S."""
        if seconds < FOREVER_S:
            self.actions.append(SetTimer(timer, self.now.boot_s + seconds))

    def set_time_limit(self, key: str, limit_s: float, started_at: float) -> None:
        """Set the timer that stops an attempt at its time limit, if it has one."""
        if limit_s:
            left_s = started_at + limit_s - self.now.wall_s
            self.set_timer_in(max(min(left_s, limit_s), 0.0), timers.TimeLimit(key))

    def clear_timer(self, timer: Timer) -> None:
        self.actions.append(ClearTimer(timer))


class Mediator(Protocol):
    """Calls of a machine to machines that are built after it."""

    # -- tasks of this home --------------------------------------------------------------------------------------------

    def task_arrives(self, task: HomeTask, /) -> None:
        """A task may run from now on: it is queued, and considered for other nodes."""

    def task_placed(self, task: HomeTask, node: str, /) -> None:
        """A task no longer needs a place: ``node`` has it, or "" if the task is over."""

    def task_kept_back(self, task: HomeTask, /) -> None:
        """A task no longer waits, and is not leased either."""

    def task_left_gate(self, task: HomeTask, /) -> None:
        """A task left the gate without passing it."""

    def rows_at_end(self, record: TaskRecord, /) -> Sequence[Row]:
        """The rows that are made durable together with the end of this task."""

    def task_ended(self, record: TaskRecord, /) -> None:
        """A task has ended, and its end is being written to disk."""

    def is_awaited(self, array: str, /) -> bool:
        """True if other tasks or other homes wait for the ends of this array's members."""

    def task_left(self, task: HomeTask, /) -> None:
        """A task is over and leaves memory."""

    def submission_checked(self, event: TaskSubmitted, /) -> None:
        """Continue a submission: all tasks that it depends on are known to exist."""

    # -- attempts ------------------------------------------------------------------------------------------------------

    def offer_declined(self, task: HomeTask, offering: Offering, reason: str, /) -> None:
        """Handle an offer that was declined."""

    def may_regain_lease(self, task: HomeTask, /) -> bool:
        """True if a task that was held may regain its lease."""

    # -- tasks of other homes ------------------------------------------------------------------------------------------

    def is_own_task(self, uid: bytes, /) -> bool:
        """True if an unfinished task of this home has this uid."""

    def is_ending(self, key: str, /) -> bool:
        """True if the launcher is still ending an attempt that this node does not know."""

    def accepts_offer(self, offer: Offer, /) -> bool:
        """True if the transfer policy accepts an offer."""

    def remote_arrived(self, remote: RemoteTask, /) -> None:
        """A task of another home was committed, and waits here."""

    # -- load ----------------------------------------------------------------------------------------------------------

    def running_tasks(self) -> Iterable[Work]:
        """The tasks that run here."""

    def own_report(self) -> LoadReport:
        """This node's load report."""

    def ask_for_states(self, report: LoadReport, /) -> None:
        """Ask other nodes for their states, as the information policy wants."""

    def report_met(self, node: str, report: LoadReport, /) -> None:
        """Handle a newer load report of a peer."""

    # -- peers ---------------------------------------------------------------------------------------------------------

    def peer_died(self, node: str, /) -> None:
        """A peer is declared dead."""

    def peer_came_back_older(self, node: str, /) -> None:
        """A peer has started with a database older than its last start: it was restored from a copy, and later promises
        are missing in it."""


TASKS_AT_A_TIME = 250
"""Steps that one request takes before others have their turn: some milliseconds, including the agent's part of each."""


class BatchedRequests:
    """Requests that are handled in batches, one object per node; its timer is ``request``. Requests in progress are
    not durable: a client of an agent that is killed meanwhile gets no answer."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._under_way: dict[int, Iterator[int | None]] = {}

    def carry_out(self, request: int, steps: Iterator[int | None]) -> None:
        """Carry out the steps of a request: each handles one task, or as many similar tasks as it yields. After
        TASKS_AT_A_TIME tasks the rest continues in later events, so each step must check the current state of its
        task."""
        self._under_way[request] = steps
        self.go_on(request)

    def go_on(self, request: int) -> None:
        """Carry out the next steps of a request in progress."""
        steps = self._under_way.get(request)
        if steps is None:
            return
        left = TASKS_AT_A_TIME
        for number in steps:
            left -= number or 1
            if left <= 0:
                self._state.set_timer_in(0.0, timers.Batch(str(request)))
                return
        del self._under_way[request]
