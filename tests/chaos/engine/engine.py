"""The event heap that drives the very same core as the agent: (time, sequence, what), and one seed for everything.

    simulation = Simulation(load_preset("symmetric"), nodes=3, slots=2, seed=1)
    report = simulation.run(burst("n1", 120, 0.2))

Equal seeds give equal traces, whatever the machine, the process or its hash seed.
"""

from __future__ import annotations

import heapq
import random
from typing import TYPE_CHECKING, NamedTuple

from peerload.model import events
from peerload.model.config import CoreConfig
from peerload.model.resources import Profile
from peerload.model.task import SCRATCH, TaskSpec
from peerload.sim.utilization import check_modelled
from tests.chaos.engine.checker import Checker
from tests.chaos.engine.host import EPOCH_S, Host
from tests.chaos.engine.network import NetworkOptions, SimNetwork
from tests.chaos.engine.report import Report, percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from peerload.model.actions import Answer, SendGossip, TaskChanged
    from peerload.model.events import Submission
    from peerload.model.messages import Advice, Membership, Ownership
    from peerload.policy.preset import PolicySet
    from peerload.sim.queueing_model import Arrival
    from tests.chaos.engine.network import Codec
    from tests.chaos.engine.trace import Trace

CLOCK_STEP_S = 10_000.0
"""The clocks of two machines differ by this: whoever compares them is found out."""
ASK_AGAIN_S = 1.0
"""A client without an answer submits again, with the same token, after this."""


class WorldOptions(NamedTuple):
    """What is around the nodes. codec: what every message passes (the wire's, in tests); disk_s: how long it takes until something is
    durable; notice_s: how long after a process's end its agent knows."""

    network: NetworkOptions = NetworkOptions()
    codec: Codec | None = None
    disk_s: float = 0.0
    notice_s: float = 0.0


class Simulation:
    """A cluster named n1 … nN. ``trace``: None = none."""

    def __init__(
        self,
        policies: PolicySet,
        *,
        nodes: int,
        slots: int,
        seed: int,
        config: CoreConfig | None = None,
        world: WorldOptions = WorldOptions(),  # noqa: B008 -- a value
        trace: Trace | None = None,
    ) -> None:
        check_modelled(policies, 0, ())
        self.policies = policies
        self.seed = seed
        self.config = config or CoreConfig()
        self.world = world
        self.trace = trace
        self.now_s = 0.0
        self.checker = Checker()
        self.services: dict[str, float] = {}
        network_rng = random.Random(f"{seed} network")
        self.network = SimNetwork(world.network, network_rng, world.codec)
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._sequence = 0
        self._unanswered: dict[int, Arrival] = {}
        self._by_token: dict[str, float] = {}
        self._submitted_s: dict[str, float] = {}
        self.responses_s: dict[str, float] = {}
        self._last_end_s = 0.0
        self._submissions = 0
        self._counts: dict[str, int] = {}
        self.hosts: dict[str, Host] = {}
        for index in range(1, nodes + 1):
            profile = Profile(f"n{index}", slots, float(slots), slots_fixed=True)
            self.hosts[profile.node] = Host(self, profile, index * CLOCK_STEP_S)
        for host in self.hosts.values():
            self.at(0.0, lambda host=host: self.start(host))  # type: ignore[misc]

    # -- the heap ------------------------------------------------------------------------------------------------------

    def at(self, at_s: float, what: Callable[[], object]) -> None:
        """Do this at that time; what is due at the same time is done in the order in which it was asked for."""
        self._sequence += 1
        heapq.heappush(self._heap, (max(at_s, self.now_s), self._sequence, what))

    def after(self, seconds: float, what: Callable[[], object]) -> None:
        """Do this later."""
        self.at(self.now_s + seconds, what)

    def step(self) -> None:
        """The next thing on the heap."""
        self.now_s, _, what = heapq.heappop(self._heap)
        what()

    def run(self, arrivals: Iterable[Arrival], *, until_s: float = 1e6) -> Report:
        """Submit all of them and go on until everything acknowledged has ended, or until this time."""
        due = iter(arrivals)
        self._submit_next(due)
        while self._heap and self.now_s < until_s:
            self.step()
            if not self._unanswered and len(self.responses_s) >= self._submissions and self._exhausted:
                break
        self.checker.kept(self.now_s, {name: host.store for name, host in self.hosts.items()})
        return self.report()

    _exhausted = False

    def _submit_next(self, due: Iterable[Arrival]) -> None:
        """Arrivals are taken one by one, so that a long workload needs no memory."""
        arrival = next(iter(due), None)
        if arrival is None:
            self._exhausted = True
            return
        self._submissions += 1
        number = self._submissions
        self._unanswered[number] = arrival

        def arrive() -> None:
            self._by_token[f"t{number}"] = arrival.service_s
            self._submit(number)
            self._submit_next(due)

        self.at(arrival.at_s, arrive)

    def _submit(self, number: int) -> None:
        arrival = self._unanswered.get(number)
        if arrival is None:
            return
        token = f"t{number}"
        spec = TaskSpec((b"task",), SCRATCH)
        self.hosts[arrival.node].handle(events.TaskSubmitted(number, token, token.encode(), spec))
        if number in self._unanswered:
            self.after(ASK_AGAIN_S, lambda: self._submit(number))

    # -- start, crash and meet -----------------------------------------------------------------------------------------

    def start(self, host: Host) -> None:
        """Start its agent; whoever is up meets it, both ways, now and whenever a partition ends."""
        host.start_agent()
        self._introduce(host)
        for partition in self.world.network.partitions:
            if partition.until_s > self.now_s:
                self.at(partition.until_s, lambda: self._introduce(host))

    def _introduce(self, host: Host) -> None:
        for other in self.hosts.values():
            if other is host or other.node is None or host.node is None:
                continue
            if self.network.is_cut(self.now_s, host.name, other.name):
                continue
            self._meet(host, other)
            self._meet(other, host)

    def _meet(self, host: Host, other: Host) -> None:
        if other.node is not None:
            report = other.node.sharing.shown()
            other.handle(events.LoadPublished(report))
            met = events.PeerMet(
                other.identity, other.profile, report, refutation=other.node.membership.gossip.refutation
            )
            self.after(self.world.network.delay_s, lambda: host.handle(met))

    def crash(self, host: Host, down_s: float, *, machine: bool = False) -> None:
        """Its agent (or the whole machine) is gone, and back after ``down_s``."""
        self._collect_counts(host)
        self.traced(host.name, "machine crashed" if machine else "agent crashed")
        if machine:
            host.crash_machine()
        else:
            host.crash_agent()
        self.after(down_s, lambda: self.start(host))

    # -- what hosts ask for --------------------------------------------------------------------------------------------

    def traced(self, node: str, thing: object) -> None:
        """A line of the trace, if there is one."""
        if self.trace is not None:
            self.trace.add(self.now_s, node, thing)

    def send(self, src: Host, dst: str, message: Membership | Advice | Ownership) -> bool:
        """Put it on its way. False if there is no way to that node now: nobody will read it."""
        other = self.hosts.get(dst)
        if other is None or other.node is None or self.network.is_cut(self.now_s, src.name, dst):
            self.network.sent += 1
            return False
        event = events.MessageReceived(src.name, self.network.carried(src.name, src.identity.boot, dst, message))  # type: ignore[arg-type]
        for at_s in self.network.arrivals(self.now_s, src.name, dst):
            self.at(at_s, lambda: other.handle(event))
        return True

    def gossip(self, src: Host, action: SendGossip) -> None:
        """A datagram, for whichever start of its receiver is there when it comes."""
        other = self.hosts.get(action.node)
        if other is None:
            return
        event = events.GossipReceived(src.name, src.identity.boot, action.messages)
        for at_s in self.network.arrivals(self.now_s, src.name, action.node):
            self.at(at_s, lambda: other.handle(event))

    def submitted(self, node: str, submission: Submission) -> None:
        """A submission is durable: from now on the launcher knows how long its task takes."""
        task = f"{node}/{submission.counter}"
        self.services[task] = self._by_token[submission.token]
        self._submitted_s.setdefault(task, submission.submitted_at - EPOCH_S)

    def answered(self, host: Host, answer: Answer) -> None:
        """A client has its answer; an error counts as ended at once."""
        if self._unanswered.pop(answer.request, None) is None:
            return
        if answer.error is not None:
            raise answer.error
        self.checker.acknowledge(host.name, str(answer.reply["id"]))

    def changed(self, host: Host, change: TaskChanged) -> None:
        """A task's new record is seen from outside."""
        del host
        record = change.record
        if record.state.is_final and record.task not in self.responses_s:
            self.responses_s[record.task] = self.now_s - self._submitted_s[record.task]
            self._last_end_s = self.now_s

    # -- the report ----------------------------------------------------------------------------------------------------

    def _collect_counts(self, host: Host) -> None:
        if host.node is not None:
            for name, value in host.node.state.counts.items():
                self._counts[name] = self._counts.get(name, 0) + value

    def report(self) -> Report:
        """What was seen so far."""
        before = dict(self._counts)
        for host in self.hosts.values():
            self._collect_counts(host)
        counts, self._counts = self._counts, before
        responses = list(self.responses_s.values())
        return Report(
            self._submissions,
            len(responses),
            sum(responses) / max(len(responses), 1),
            percentile(responses, 0.95),
            self._last_end_s - min(self._submitted_s.values(), default=0.0),
            counts.get("transfers_total", 0),
            counts.get("sender_probes_total", 0) + counts.get("receiver_probes_total", 0),
            self.network.sent,
            self.trace.digest() if self.trace is not None else "",
            dict(sorted(counts.items())),
        )
