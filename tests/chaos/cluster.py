"""The event heap of one chaos run: (time, sequence, call), one plan, one seed for everything.

    outcome = Cluster(draw(7), policies).run()

Equal plans give equal traces, whatever the machine, the process or its hash seed.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import msgspec

from peerload.model.config import CoreConfig
from peerload.model.errors import InvariantBroken
from tests.chaos.clients import Clients
from tests.chaos.driver import Driver
from tests.chaos.gauges import Gauges
from tests.chaos.invariants import Invariants
from tests.chaos.liveness import Rest
from tests.chaos.machine import Machine
from tests.chaos.network import Network
from tests.chaos.plan import AUTO_TIMES
from tests.chaos.triggered_faults import Provoked

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.core.node import Node
    from peerload.policy.preset import PolicySet
    from tests.chaos.engine.trace import Trace
    from tests.chaos.network import Codec
    from tests.chaos.plan import CrashAtCommit, Plan

AHEAD_S = 40.0
"""Expected work that waits at launchers behind what runs, in every second plan; far more than a live agent has there."""
LOOK_S = 1.0
"""After the cluster has healed, it is looked this often whether it is at rest."""
STEPS_MAX = 3_000_000
"""More steps than this in one run are a storm of messages that never ends (promise 11)."""


class Outcome(msgspec.Struct, frozen=True):
    """Outcome of a run. broken: the promise that was broken, "" if none; rest_s: so long after the cluster had healed
    it was at rest; steps: events handled by all nodes."""

    seed: int
    broken: str
    story: str
    rest_s: float
    steps: int
    tasks: int
    gauges: dict[str, int]
    counts: dict[str, int]
    trace_hash: str = ""


class Cluster:
    """``checks_boots``: see `Network`; ``codec``: what messages pass if the plan says so; ``trace``: None = none."""

    def __init__(
        self,
        plan: Plan,
        policies: PolicySet,
        *,
        codec: Codec | None = None,
        trace: Trace | None = None,
        checks_boots: bool = True,
        config: CoreConfig | None = None,
    ) -> None:
        self.plan = plan
        self.policies = policies
        self.trace = trace
        self.config = config or CoreConfig(
            lease_s=plan.lease_s,
            lease_grace_s=plan.grace_s,
            lease_auto_s_max=plan.lease_s * AUTO_TIMES,
            attempts_max=plan.attempts_max,
            poison_nodes=plan.poison_nodes,
            frozen_s_max=plan.frozen_s_max,
            ahead_s=AHEAD_S if plan.seed % 2 else 0.0,
            members_at_a_time=1,  # so that an agent may crash while an array is being kept
            uniform_array_min=2,
            uniform_at_a_time=2,
        )
        self.now_s = 0.0
        self.steps = 0
        self.gauges = Gauges()
        self.counts: dict[str, int] = {}
        self._heap: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._sequence = 0
        self._serial = 0
        self.armed: list[CrashAtCommit] = []
        """Everything that waits for a commit of a node."""
        self.checker = Invariants(self)
        self.machines = {facts.name: Machine(self, facts) for facts in plan.machines}
        self.network = Network(self, codec if plan.codec else None, checks_boots=checks_boots)
        self.clients = Clients(self)
        self.provoked = Provoked(self)
        self.driver = Driver(self)
        self.rest = Rest(self)
        for machine in self.machines.values():
            self.at(0.0, machine.start_agent)
        if self.network.broker is not None:
            self.at(0.0, self.network.broker.tend)

    # -- the heap ------------------------------------------------------------------------------------------------------

    def at(self, at_s: float, call: Callable[..., object], *given: object) -> None:
        """Do this at that time; what is due at the same time is done in the order in which it was asked for."""
        self._sequence += 1
        heapq.heappush(self._heap, (max(self.now_s, at_s), self._sequence, call, given))

    def after(self, seconds: float, call: Callable[..., object], *given: object) -> None:
        """Do this later."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now_s + seconds, self._sequence, call, given))

    def run(self) -> Outcome:
        """Go on until the cluster is at rest after it has healed, or a promise is broken."""
        broken = story = ""
        try:
            self._run()
        except InvariantBroken as error:
            broken, story = error.what, error.story
        for machine in self.machines.values():
            if machine.node is not None:
                self.collect(machine.node)
        digest = self.trace.digest() if self.trace is not None else ""
        rest_s = self.now_s - self.plan.healed_s
        tasks = len(self.checker.acknowledged)
        gauges, counts = dict(sorted(self.gauges.counts.items())), dict(sorted(self.counts.items()))
        return Outcome(self.plan.seed, broken, story, rest_s, self.steps, tasks, gauges, counts, digest)

    def _run(self) -> None:
        look_s = self.plan.healed_s + LOOK_S
        heap = self._heap
        while heap:
            self.now_s, _, call, given = heapq.heappop(heap)
            if self.now_s >= look_s:
                if self.rest.has_come():
                    return
                look_s = self.now_s + LOOK_S
            call(*given)
            if self.steps > STEPS_MAX:
                raise InvariantBroken(f"I11: more than {STEPS_MAX} steps")

    # -- what its parts share ------------------------------------------------------------------------------------------

    def next_serial(self) -> int:
        """The number of the next process."""
        self._serial += 1
        return self._serial

    def seeds(self, node: str) -> tuple[str, ...]:
        """The addresses that a node's user gave it: those of two others, so that one of them may be gone."""
        others = [name for name in self.machines if name != node]
        return tuple(f"{name}:1" for name in others[:2])

    def left_s(self, uid: str) -> float:
        """The time that a task will still run, 0 if it does not run."""
        for machine in self.machines.values():
            for process in machine.launcher.running.values():
                if process.uid == uid and process.since_s is not None:
                    return process.left_s - (self.now_s - process.since_s)
        return 0.0

    def traced(self, node: str, thing: object) -> None:
        """A line of the trace, if there is one."""
        if self.trace is not None:
            self.trace.add(self.now_s, node, thing)

    def collect(self, node: Node) -> None:
        """Keep the counters of a core that is about to go."""
        for name, value in node.state.counts.items():
            self.counts[name] = self.counts.get(name, 0) + value
