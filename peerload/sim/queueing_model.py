"""Queueing model around the real core: only tasks and policies, without delays, losses or crashes.

    cluster = QueueingModel(policies, profiles_of([1] * 20), seed=1, ended=print)
    cluster.run(arrivals, tasks=1000)

A message arrives at the moment it is sent, every write is durable immediately, and leases never expire. So a probe and
the offer after it happen at one instant, as in the reference model (docs/policies.md, "probe and OFFER"). Each node is a
`Node`, driven only by its events. All consequences of one event at one instant are processed, first
come, first served, before the clock advances. Messages may have a travel time (`Delays`): then a search takes
time, and offers may be declined. Since nothing is lost, timeouts still have no meaning.

This driver measures how good a policy is. The chaos harness (tests/chaos) checks the guarantees under faults,
which makes each step expensive. Without faults, both give equal response times.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import heapq
import math
import random
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from peerload.core.membership.membership import Directory, ReceivedReport
from peerload.core.node import Node
from peerload.core.sharing.sharing import ACTS_ON_NONE, ReportFilter
from peerload.model import actions, events, timers
from peerload.model.config import CoreConfig
from peerload.model.errors import InvariantBroken
from peerload.model.events import Instant
from peerload.model.gossip import GossipPreset
from peerload.model.messages import Commit, Identity, Result, State
from peerload.model.resources import Profile, ResourceRequest
from peerload.model.task import SCRATCH, Exit, TaskSpec
from peerload.sim.utilization import SAMPLE, CpuUse, check_modelled, readings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from peerload.model.actions import Action
    from peerload.model.resources import LoadReport
    from peerload.model.task import TaskRecord
    from peerload.policy.preset import PolicySet
    from peerload.sim.utilization import UtilizationMonitor

    Ended = Callable[["CompletedTask"], object]
    Event = tuple[str, events.Event]

EVERYBODY = ""
"""Destination of an announcement: all nodes."""
EPOCH_S = 1_700_000_000.0
"""Unix time at the start of every run."""
NEVER_S = 1e9
REPORTS_IN_ALL_MAX = 400_000
"""Maximum number of reports stored by all nodes together. Up to 632 nodes, each stores one of every peer; beyond that,
only the newest. Otherwise memory would grow with the square of the number of nodes."""
FIRST_WORDS = 2
"""Number of nodes that send an announcement at the start if messages take time, so that each node learns that it has peers.
Announcements of all nodes would be N² messages."""
WITHOUT_MEANING = frozenset(
    (
        actions.Persist,
        actions.Note,
        actions.Decided,
        actions.SetLease,
        actions.ForgetTask,
        actions.Dial,
        actions.DialAddress,
        actions.ForgetPeer,
        actions.WakePeer,
        actions.AttemptGone,
        actions.MembersCancelled,
        actions.AnswerPart,
        actions.SendGossip,
        actions.LookAtDevices,
    )
)
"""Actions without effect in this model, where everything is durable, known and stored without limit."""
NEVER_ASKED_FOR = frozenset((actions.FindTasks, actions.SignalTask, actions.EvictTask, actions.StageFiles))
"""Actions that this model never causes."""

MIGRATIONS_MAX = 32
"""Maximum voluntary placements of one task if the migration policy sets no limit. Without delays, a policy that
places tasks without a probe could move a task among full nodes endlessly at one instant."""

IDEAL_CONFIG = CoreConfig(
    lease_s=NEVER_S,
    lease_grace_s=NEVER_S,
    reservation_s=NEVER_S,
    offer_timeout_s=NEVER_S,
    repeat_s=NEVER_S,
    repeat_s_max=NEVER_S,
    probe_timeout_s=NEVER_S,
    inbound_s=NEVER_S,
    retry_s_min=1e-9,
    retry_s_max=NEVER_S,
    answer_backoff_s=1e-9,
    answer_wait_s=1e-8,
    settle_s=3600.0,
    tell_s_min=0.0,
    report_age_s_max=NEVER_S,
    peers_max=100_000,
    reports_kept_max=100_000,
    guests_max=100_000_000,
    searches_in_flight_max=100_000_000,
    migrations_max=MIGRATIONS_MAX,
    tasks_queued_max=100_000_000,
    tokens_kept_max=1,
    gossip=GossipPreset(probe_s=NEVER_S, load_s=NEVER_S, loads_max=0, sync_s=NEVER_S),
)
"""Configuration without timeouts: nothing is ever late, so only a policy's own timers have a meaning."""


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """Submission: time (s), node, duration of the task (s), and requested resources."""

    at_s: float
    node: str
    service_s: float
    cpus: float = 1.0
    gpus: int = 0
    mem_bytes: int = 0


class CompletedTask(NamedTuple):
    """Ended task. Times in simulated seconds; node: where it ran; started_s: start of the execution there; ended_s: when its
    home learned of its end."""

    number: int
    arrival: Arrival
    node: str
    started_s: float
    ended_s: float

    @property
    def home(self) -> str:
        return self.arrival.node

    @property
    def response_s(self) -> float:
        return self.ended_s - self.arrival.at_s


class _PendingTask:
    """Task that has arrived and not ended. started_s: start of its execution, -1.0 before that; node, ends_s: where it
    runs, and when its home will learn of its end."""

    __slots__ = ("arrival", "ends_s", "node", "number", "started_s")

    def __init__(self, number: int, arrival: Arrival) -> None:
        self.number = number
        self.arrival = arrival
        self.started_s = -1.0
        self.ends_s = math.inf
        self.node = arrival.node


class _Listeners:
    """Index of the nodes that may act on an announcement. changed: nodes that have handled an event since the last announcement; only
    their entries are updated."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.changed: set[str] = set()
        self._nodes = nodes
        self._places: dict[str, int] = {}
        self._filters: dict[str, ReportFilter] = {}
        self._act_on_all: set[str] = set()
        self._want_room: set[str] = set()
        self._want_work: defaultdict[float, set[str]] = defaultdict(set)
        """Minimum tasks per slot of a node → the nodes that would then send it a request."""
        self._hinted: defaultdict[str, set[str]] = defaultdict(set)
        """Name of a node → the nodes that remember it as busy."""

    def of(self, now: Instant, src: str, report: LoadReport) -> Iterator[str]:
        """Nodes that act on this report, in the order of their creation. Each is checked when its turn comes,
        since the actions of earlier nodes may affect it."""
        self._look_again()
        found = self._act_on_all | self._hinted[src]
        if report.accepts or report.gpus:
            found |= self._want_room
        if report.has_work:
            left = (report.load_tasks - 1) / report.slots if report.slots else math.inf
            for tasks, names in self._want_work.items():
                if tasks <= left:
                    found |= names
        found.discard(src)
        self._places = self._places or {name: place for place, name in enumerate(self._nodes)}
        for name in sorted(found, key=self._places.__getitem__):
            if self._nodes[name].sharing.acts_on(now, src, report):
                yield name

    def _look_again(self) -> None:
        for name in self.changed:
            before, now = self._filters.get(name, ACTS_ON_NONE), self._nodes[name].sharing.report_filter()
            if now != before:
                self._filters[name] = now
                self._regroup(name, before, now)
        self.changed.clear()

    def _regroup(self, name: str, before: ReportFilter, now: ReportFilter) -> None:
        """Move a node from its previous groups to its current ones."""
        if now.every != before.every:
            (self._act_on_all.add if now.every else self._act_on_all.discard)(name)
        if now.with_room != before.with_room:
            (self._want_room.add if now.with_room else self._want_room.discard)(name)
        if now.with_work_from != before.with_work_from:
            self._want_work[before.with_work_from].discard(name)
            if now.with_work_from < math.inf:
                self._want_work[now.with_work_from].add(name)
        if now.of_nodes != before.of_nodes:
            for busy in before.of_nodes:
                self._hinted[busy].discard(name)
            for busy in now.of_nodes:
                self._hinted[busy].add(name)


GC_THRESHOLD = 50_000
"""Garbage-collection threshold while a model runs, since a model creates hardly any cycles."""


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Context with a garbage collection only every GC_THRESHOLD objects, since each one visits all nodes."""
    often, *others = gc.get_threshold()
    gc.set_threshold(max(often, GC_THRESHOLD) if often else 0, *others)
    try:
        yield
    finally:
        gc.set_threshold(often, *others)


HEAD = "head"
"""Name of the node without slots that receives and places all tasks, if the preset is central."""


class Delays(NamedTuple):
    """Delays of the model. message_s: of any message between two nodes; transfer_s: additional, of a message that hands over a task,
    which counts at its destination meanwhile; head_s: service time of a head node for each message, one at a
    time; head_fails_s, head_down_s: start and duration of its failure, during which messages wait."""

    message_s: float = 0.0
    transfer_s: float = 0.0
    head_s: float = 0.0
    head_fails_s: float = math.inf
    head_down_s: float = 0.0


def profiles_of(slots: Sequence[int], speeds: Sequence[float] = (), gpus: int = 0) -> list[Profile]:
    """Nodes n1 … nN with this many slots and GPUs each. speeds: the duration of a task is divided by the speed of the node
    that runs it; default: 1.0 everywhere."""
    return [
        Profile(
            f"n{index}", count, float(count), gpus=gpus, slots_fixed=True, speed=speeds[index - 1] if speeds else 1.0
        )
        for index, count in enumerate(slots, 1)
    ]


class QueueingModel:
    """Cluster of nodes with these profiles. ``ended`` is called with each task at its end, numbered 1, 2, … by arrival; ``watch``
    receives every change."""

    def __init__(
        self,
        policies: PolicySet,
        profiles: Sequence[Profile],
        *,
        seed: int,
        ended: Ended,
        delays: Delays = Delays(),  # noqa: B008 -- a value
        watch: UtilizationMonitor | None = None,
        config: CoreConfig = IDEAL_CONFIG,
    ) -> None:
        if policies.is_central:
            profiles = [*profiles, Profile(HEAD, 0, 0.0, slots_fixed=True)]
        self.now_s = 0.0
        self.arrived = 0
        self.messages = 0
        self.at_migrations_max = 0
        """Number of ended tasks that were placed MIGRATIONS_MAX times."""
        self._is_limited = policies.migration.migrations_max is not None
        self.nodes: dict[str, Node] = {}
        self._ended = ended
        self._delays = delays
        self._watch = watch
        self._watched: dict[str, tuple[int, int]] = {}
        """The state last passed to ``watch`` for each node: version of the ledger, number of tasks without a place there."""
        self._instant = Instant(0.0, EPOCH_S)
        self._heap: list[tuple[float, int, str, events.Event]] = []
        self._sequence = 0
        self._now: deque[Event] = deque()
        self._timers: dict[str, dict[timers.Timer, float]] = {profile.node: {} for profile in profiles}
        self._new_timers: list[tuple[str, timers.Timer]] = []
        self._armed: dict[tuple[str, timers.Timer], float] = {}
        self._cpu_use: CpuUse | None = None
        self._unfinished: dict[str, _PendingTask] = {}
        self._head = HEAD if policies.is_central else ""
        self._head_free_s = 0.0
        self._is_heard = False
        self._specs: dict[tuple[float, int, int], TaskSpec] = {}
        self._performers = self._handlers_of_actions()
        kept_max = min(config.reports_kept_max, max(REPORTS_IN_ALL_MAX // max(len(profiles), 1), 1))
        config = msgspec.structs.replace(config, reports_kept_max=kept_max)
        self._listeners = _Listeners(self.nodes)
        for profile in profiles:
            name = profile.node
            if watch is not None:
                watch.add(name, profile.slots)
            identity = Identity(name, f"{name}-boot-1", f"{name}-machine-1", f"{name}-store", 1, f"{name}:1")
            rng = random.Random(f"{seed} {name} 1")  # noqa: S311 -- a seeded simulation
            own = copy.deepcopy(policies)  # nodes share no state of policies, as in separate processes
            self.nodes[name] = Node(config, own, identity, profile, rng)
        gpus_max = max((profile.gpus for profile in profiles), default=0)
        check_modelled(policies, gpus_max, ("cpus_busy",))
        if readings_of(policies, gpus_max):
            self._cpu_use = CpuUse(self.nodes, lambda at_s, name: self._at(at_s, name, SAMPLE))
        for number, name in enumerate(self.nodes):
            self._is_heard = number < FIRST_WORDS
            self._handle(name, events.AgentStarted())
        self._is_heard = True
        self._now.clear()  # no node has met another one yet
        self.messages = 0
        self._directory = Directory((node.state.identity, node.state.profile) for node in self.nodes.values())
        for name, node in self.nodes.items():
            node.membership.meet_all(self._directory)
            self._at(
                delays.message_s, name, events.LoadSampled(0.0, 0.0, 0)
            )  # a node that has met another one may start searches

    # -- the clock -----------------------------------------------------------------------------------------------------

    def run(self, arrivals: Iterator[Arrival], *, tasks: int) -> None:
        """Submit this many more of the arrivals. Unfinished tasks continue in the next run."""
        until = self.arrived + tasks
        with rare_collections():
            while self.arrived < until:
                arrival = next(arrivals, None)
                if arrival is None:
                    return
                self.advance(arrival.at_s)
                self._arrive(arrival)

    def drain(self) -> None:
        """Continue without arrivals until every task has ended."""
        while self._unfinished and self._heap:
            self.advance(self._heap[0][0])

    @property
    def unfinished(self) -> int:
        return len(self._unfinished)

    def waiting(self) -> Iterator[tuple[int, Arrival]]:
        """Unfinished tasks that have not started, with their numbers."""
        return ((task.number, task.arrival) for task in self._unfinished.values() if task.started_s < 0)

    def running(self) -> Iterator[CompletedTask]:
        """Running tasks with their future ends, which are certain, since a running task does not move."""
        for task in self._unfinished.values():
            if task.started_s >= 0:
                yield CompletedTask(task.number, task.arrival, task.node, task.started_s, task.ends_s)

    def counts(self) -> dict[str, int]:
        """The sums of the counters of all nodes since the start."""
        total: dict[str, int] = {}
        for node in self.nodes.values():
            for name, value in node.state.counts.items():
                total[name] = total.get(name, 0) + value
        return total

    def load_tasks(self) -> int:
        """Sum of the nodes' own task counts n."""
        return sum(node.ledger.load_tasks for node in self.nodes.values())

    def advance(self, at_s: float) -> None:
        """Advance the clock to ``at_s`` without arrivals."""
        heap, heappop = self._heap, heapq.heappop
        while heap and heap[0][0] <= at_s:
            due_s, _, name, event = heappop(heap)
            if isinstance(event, events.TimerExpired) and not self._is_due(name, event.timer, due_s):
                continue
            self._move_to(due_s)
            if event is SAMPLE and self._cpu_use is not None:
                event = self._cpu_use.sample(name, due_s)
            if name is not EVERYBODY:
                self._handle(name, event)
                if self._now or self._new_timers:
                    self._finish_instant()
                continue
            for heard in self._who_acts(event):
                self._handle(heard, event)
                self._finish_instant()
        self._move_to(at_s)

    def _move_to(self, at_s: float) -> None:
        if at_s > self.now_s:
            self.now_s = at_s
            self._instant = Instant(at_s, EPOCH_S + at_s)

    def _at(self, at_s: float, name: str, event: events.Event) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at_s, self._sequence, name, event))

    def _finish_instant(self) -> None:
        """Process all consequences at this instant; then arm the timers that are still set."""
        now = self._now
        while now:
            name, event = now.popleft()
            if name is not EVERYBODY:
                self._handle(name, event)
                continue
            for heard in self._who_acts(event):
                self._handle(heard, event)
        for name, timer in self._new_timers:
            at_s = self._timers[name].get(timer)
            if at_s is not None and at_s < self._armed.get((name, timer), math.inf):
                self._arm(name, timer, at_s)
        self._new_timers.clear()

    def _arm(self, name: str, timer: timers.Timer, at_s: float) -> None:
        self._armed[name, timer] = at_s
        self._at(at_s, name, events.TimerExpired(timer))

    def _is_due(self, name: str, timer: timers.Timer, due_s: float) -> bool:
        """Check a timer's entry of the heap. A timer has one entry, even if it is set again: an entry that is too
        early is reinserted."""
        if self._armed.get((name, timer)) != due_s:
            return False  # meanwhile set to an earlier time
        del self._armed[name, timer]
        at_s = self._timers[name].get(timer)
        if at_s is not None and at_s > due_s:
            self._arm(name, timer, at_s)
            return False
        self._timers[name].pop(timer, None)
        return at_s is not None

    # -- events in, actions out ----------------------------------------------------------------------------------------

    def _arrive(self, arrival: Arrival) -> None:
        self.arrived += 1
        token = f"t{self.arrived}"
        self._unfinished[token] = _PendingTask(self.arrived, arrival)
        submitted = events.TaskSubmitted(self.arrived, token, b"", self._spec(arrival))
        if self._head:
            self.messages += 1
            self._delivered(HEAD, submitted, self._delays.message_s)
        else:
            self._handle(arrival.node, submitted)
        self._finish_instant()

    def _spec(self, arrival: Arrival) -> TaskSpec:
        key = (arrival.cpus, arrival.gpus, arrival.mem_bytes)
        spec = self._specs.get(key)
        if spec is None:
            request = ResourceRequest(arrival.cpus, arrival.mem_bytes, arrival.gpus)
            spec = self._specs[key] = TaskSpec((b"task",), SCRATCH, request=request)
        return spec

    def _handle(self, name: str, event: events.Event) -> None:
        node, performers = self.nodes[name], self._performers
        self._listeners.changed.add(name)
        if self._cpu_use is not None:
            self._cpu_use.before(name, self.now_s)
        for action in node.handle(self._instant, event):
            perform = performers[type(action)]
            if perform is not None:
                perform(name, action)
        if self._cpu_use is not None:
            self._cpu_use.after(name, self.now_s)
        if self._watch is not None:
            ledger, stranded = node.ledger, len(node.home.stranded)
            if self._watched.get(name) != (ledger.version, stranded):
                self._watched[name] = ledger.version, stranded
                self._watch.look(self.now_s, name, ledger, ledger.waiting + stranded)

    def _who_acts(self, event: events.Event) -> Iterable[str]:
        """Store an announcement for all nodes → the nodes that act on it."""
        assert isinstance(event, events.MessageReceived)
        src, message = event.src, event.message
        report = message.report if isinstance(message, State) else None
        if report is None:
            return [name for name in self.nodes if name != src]
        self._directory.announced.put(src, ReceivedReport(report, self.now_s))
        return self._listeners.of(self._instant, src, report)

    def _delivered(self, dst: str, received: events.Event, delay_s: float) -> None:
        at_s = self.now_s + delay_s
        if self._head and dst in (HEAD, EVERYBODY):  # only the head reads announcements
            at_s = self._served_s(at_s)
        if at_s > self.now_s:
            self._at(at_s, dst, received)
        else:
            self._now.append((dst, received))

    def _completed(self, record: TaskRecord) -> None:
        task = self._unfinished.pop(record.task)
        self.at_migrations_max += not self._is_limited and record.migrations >= MIGRATIONS_MAX
        ended_s = self.now_s
        if self._head:  # which tells the home
            self.messages += 1
            ended_s += self._delays.message_s
        self._ended(CompletedTask(task.number, task.arrival, record.node, task.started_s, ended_s))

    def _served_s(self, at_s: float) -> float:
        """Time at which the head has served a message that arrives at ``at_s``, after all earlier ones."""
        delays, begins_s = self._delays, max(at_s, self._head_free_s)
        if 0 <= begins_s - delays.head_fails_s < delays.head_down_s:
            begins_s = delays.head_fails_s + delays.head_down_s
        self._head_free_s = begins_s + delays.head_s
        return self._head_free_s

    def _handlers_of_actions(self) -> dict[type[Any], Callable[[str, Any], object] | None]:
        """Handler of each kind of action; None: the action is ignored."""
        return {
            **dict.fromkeys(WITHOUT_MEANING),
            **dict.fromkeys(NEVER_ASKED_FOR, self._unexpected),
            actions.Send: self._send,
            actions.ClearTimer: self._clear_timer,
            actions.SetTimer: self._set_timer,
            actions.SpawnTask: self._spawn,
            actions.TaskChanged: self._changed,
            actions.Answer: self._answer,
            actions.SendResult: self._send_result,
            actions.KeepOutput: self._output,
            actions.FetchOutput: self._output,
            actions.Announce: self._announce,
        }

    def _send(self, name: str, action: actions.Send) -> None:
        delays, message = self._delays, action.message
        delay_s = delays.message_s
        if delays.transfer_s and isinstance(message, Commit):
            delay_s += delays.transfer_s
        self.messages += 1
        received = events.MessageReceived(name, message)
        if delay_s or self._head:
            self._delivered(action.dst, received, delay_s)
        else:
            self._now.append((action.dst, received))

    def _clear_timer(self, name: str, action: actions.ClearTimer) -> None:
        self._timers[name].pop(action.timer, None)

    def _set_timer(self, name: str, action: actions.SetTimer) -> None:
        self._timers[name][action.timer] = action.at_s
        self._new_timers.append((name, action.timer))

    def _spawn(self, name: str, action: actions.SpawnTask) -> None:
        task = self._unfinished[action.task]
        task.started_s = self.now_s
        service_s = task.arrival.service_s / self.nodes[name].state.profile.speed
        task.node = name
        task.ends_s = self.now_s + service_s + (self._delays.message_s if name != task.arrival.node else 0.0)
        exit_ = Exit(0, started_at=EPOCH_S + self.now_s, ended_at=EPOCH_S + self.now_s + service_s)
        self._at(self.now_s + service_s, name, events.TaskEnded(action.key, exit_))

    def _changed(self, _name: str, action: actions.TaskChanged) -> None:
        if action.record.state.is_final:
            self._completed(action.record)

    def _answer(self, _name: str, action: actions.Answer) -> None:
        if action.error is not None:
            raise InvariantBroken(f"submission {action.request} was refused") from action.error
        self._unfinished[str(action.reply["id"])] = self._unfinished.pop(f"t{action.request}")

    def _send_result(self, name: str, action: actions.SendResult) -> None:
        result = Result(action.task, action.uid, action.attempt, action.exit)
        self.messages += 1
        self._delivered(action.dst, events.MessageReceived(name, result), self._delays.message_s)

    def _output(self, name: str, action: actions.KeepOutput | actions.FetchOutput) -> None:
        self._now.append((name, events.OutputArrived(action.uid, action.attempt)))

    def _announce(self, name: str, action: actions.Announce) -> None:
        self.messages += 1  # one message to the broker, which distributes it
        if self._is_heard:
            self._delivered(EVERYBODY, events.MessageReceived(name, action.message), self._delays.message_s)

    def _unexpected(self, name: str, action: Action) -> None:
        raise InvariantBroken(f"{name} returned an action that this model never causes: {action}")
