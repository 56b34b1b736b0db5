"""A home and two executors on an in-memory network that loses, repeats and reorders at hypothesis' will.

The machine owns every message: it delivers, repeats, drops or holds back, moves the clock, restarts agents, sends home to
sleep, ends tasks and breaks output off. After every step: at most one copy of the task executes; its recorded result
never changes; one that may run once only is started at most once. Nothing is told of boot ids: the rules must do.
"""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from peerload.core.handoff.executor import RENEWALS_PER_LEASE, ExecutorLeases
from peerload.core.handoff.home import TaskParking
from peerload.core.node import Node
from peerload.core.work import HomeTask, RemoteTask
from peerload.model import actions, events, messages, timers
from peerload.model.config import CoreConfig
from peerload.model.events import Instant
from peerload.model.resources import LoadReport, Placement, Profile
from peerload.model.task import SCRATCH, Exit, Guarantee, TaskSpec
from peerload.policy.registry import build_preset
from tests.chaos import broken_core
from tests.chaos.engine.store import SimStore
from tests.core.given import assert_durable_first, identity
from tests.sim import broken_variants

CONFIG = CoreConfig(
    lease_s=4.0,
    lease_grace_s=1.0,
    reservation_s=2.0,
    offer_timeout_s=3.0,
    probe_timeout_s=2.0,
    attempts_max=1000,
    loss_backoff_s=0.01,
    loss_backoff_s_max=0.01,
    poison_nodes=1000,
)
PRESET = build_preset("t", {})
NAMES = ("h", "x", "y")
CLOCKS_S = {"h": 0.0, "x": 5000.0, "y": 900.0}
PREFIX_MAX = 60
IN_FLIGHT_MAX = 40
CALM_STEP_S = 0.5
LONG_EXAMPLES = 400
WAYS = [(("h", "x"),), (("h", "y"),), (("h", "x"), ("x", "h")), (("h", "y"), ("y", "h"))]


class Handoff(RuleBasedStateMachine):
    """One task of h that x and y may run; it runs when hypothesis takes over."""

    guarantee = Guarantee.AT_LEAST_ONCE

    def __init__(self) -> None:
        super().__init__()
        self.at_s = 100.0
        self.starts = dict.fromkeys(NAMES, 0)
        self.stores = {name: SimStore() for name in NAMES}
        self.profiles = {name: Profile(name, 1, 1.0, slots_fixed=True) for name in NAMES}
        self.nodes: dict[str, Node] = {}
        self.flying: list[tuple[str, str, Any]] = []
        self.timers: dict[str, dict[timers.Timer, float]] = {name: {} for name in NAMES}
        self.running: dict[str, tuple[str, float, float]] = {}
        """By key: where, until when (infinite: parked), and the ts that was told with that."""
        self.ended: dict[str, dict[str, Exit]] = {name: {} for name in NAMES}
        self.spawned: set[str] = set()
        self.result: Exit | None = None
        self.held: set[tuple[str, str]] = set()
        self.parks: list[tuple[str, str, Any]] = []
        self.output_breaks = False
        for name in NAMES:
            self.start(name)
        self.meet()
        spec = TaskSpec((b"true",), SCRATCH, placement=Placement(exclude=("h",)), guarantee=self.guarantee)
        self.handle("h", events.TaskSubmitted(1, "token", b"digest", spec))
        for _ in range(PREFIX_MAX):
            if self.running:
                break
            src, dst, message = self.flying.pop(0)
            self.handle(dst, events.MessageReceived(src, message))
        assert self.running

    def meet(self) -> None:
        for here in NAMES:
            for there in NAMES:
                if here != there:
                    met = events.PeerMet(identity(there, self.starts[there]), self.profiles[there], LoadReport())
                    self.handle(here, met)

    def start(self, name: str) -> None:
        self.starts[name] += 1
        number = self.starts[name]
        rng = random.Random(f"{name} {number}")
        self.nodes[name] = Node(CONFIG, PRESET, identity(name, number), self.profiles[name], rng)
        self.timers[name].clear()
        mine = tuple((key, 5.0, ts) for key, (where, _, ts) in self.running.items() if where == name)
        self.handle(name, self.stores[name].started(mine, dict(self.ended[name])))

    def handle(self, name: str, event: events.Event) -> None:
        offset_s = CLOCKS_S[name]
        done = self.nodes[name].handle(Instant(self.at_s + offset_s, 1e6 + self.at_s), event)
        assert_durable_first(done)
        for action in done:
            self.perform(name, action, offset_s)
        assert len(self.executing()) <= 1

    def perform(self, name: str, action: actions.Action, offset_s: float) -> None:  # noqa: C901 PLR0912 -- one line an action
        match action:
            case actions.Persist():
                for row in action.rows:
                    self.stores[name].apply(row)
                    if isinstance(row, actions.PutTask) and row.record.exit is not None:
                        assert self.result in (None, row.record.exit)
                        self.result = row.record.exit
            case actions.Send():
                self.flying = [*self.flying, (name, action.dst, action.message)][-IN_FLIGHT_MAX:]
            case actions.SendResult():
                result = messages.Result(action.task, action.uid, action.attempt, action.exit)
                self.flying.append((name, action.dst, result))
            case actions.SetTimer():
                self.timers[name][action.timer] = action.at_s - offset_s
            case actions.ClearTimer():
                self.timers[name].pop(action.timer, None)
            case actions.SpawnTask():
                assert name != "h"
                assert action.key not in self.spawned
                self.spawned.add(action.key)
                self.lease(name, action, offset_s)
                assert self.guarantee is not Guarantee.ONCE or len(self.spawned) == 1
            case actions.SetLease():
                if action.key in self.running:
                    self.lease(name, action, offset_s)
            case actions.SignalTask():
                self.finish(action.key, action.signal)
            case actions.ForgetTask():
                self.ended[name].pop(action.key, None)
            case actions.FetchOutput():
                error = "it broke off" if self.output_breaks else ""
                self.handle(name, events.OutputArrived(action.uid, action.attempt, error))
            case _:
                pass

    def lease(self, name: str, action: actions.SpawnTask | actions.SetLease, offset_s: float) -> None:
        until_s = action.deadline_s - offset_s if action.deadline_s else math.inf
        self.running[action.key] = (name, until_s, action.ts)

    def finish(self, key: str, signal: int) -> str:
        where, *_ = self.running.pop(key, ("", 0.0, 0.0))
        if where:
            code = 128 + signal if signal else 0
            self.ended[where][key] = Exit(code, signal, started_at=5.0, ended_at=self.at_s)
        return where

    def executing(self) -> list[str]:
        return [key for key, (_, deadline_s, _) in self.running.items() if deadline_s > self.at_s]

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), what=st.sampled_from(["deliver", "deliver", "repeat", "lose"]))
    def network(self, data: st.DataObject, what: str) -> None:
        place = data.draw(st.integers(0, len(self.flying) - 1))
        src, dst, message = self.flying[place] if what == "repeat" else self.flying.pop(place)
        if what != "lose":
            self.handle(dst, events.MessageReceived(src, message))

    @rule()
    def calm(self) -> None:
        """Whatever is not held back arrives, in order."""
        for _ in range(PREFIX_MAX):
            free = [flight for flight in self.flying if flight[:2] not in self.held]
            if not free:
                break
            self.flying.remove(free[0])
            src, dst, message = free[0]
            self.handle(dst, events.MessageReceived(src, message))

    @rule(ways=st.sampled_from(WAYS))
    def hold_back(self, ways: tuple[tuple[str, str], ...]) -> None:
        """From now on what one says to the other is kept for later."""
        self.held.update(ways)

    @rule(name=st.sampled_from(["x", "y"]))
    def falls_silent(self, name: str) -> None:
        """It asks for more time, home hears that, and from then on nothing passes between the two until later."""
        self.time_passes(CONFIG.lease_s / RENEWALS_PER_LEASE)
        asked = [flight for flight in self.flying if flight[0] == name and isinstance(flight[2], messages.Renew)]
        if asked:
            self.flying.remove(asked[-1])
            self.handle("h", events.MessageReceived(name, asked[-1][2]))
        self.held.update({("h", name), (name, "h")})

    @rule()
    def let_go(self) -> None:
        """What was held back arrives now, all at once."""
        self.held.clear()
        self.calm()

    @rule(breaks=st.booleans())
    def output_breaks_off(self, breaks: bool) -> None:
        self.output_breaks = breaks

    @rule(seconds=st.sampled_from([1.0, 6.0, 12.0]))
    def calm_time_passes(self, seconds: float) -> None:
        """Time passes, and whatever is not held back arrives at once."""
        until_s = self.at_s + seconds
        while self.at_s < until_s:
            self.calm()
            self.time_passes(min(CALM_STEP_S, until_s - self.at_s))
        self.calm()

    @rule(seconds=st.sampled_from([0.3, 1.0, 2.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        until_s = self.at_s + seconds
        for _ in range(100):
            due = [
                (at_s, name, timer) for name in NAMES for timer, at_s in self.timers[name].items() if at_s <= until_s
            ]
            if not due:
                break
            at_s, name, timer = min(due, key=lambda one: (one[0], one[1], msgspec.to_builtins(one[2])))
            self.at_s = max(self.at_s, at_s)
            del self.timers[name][timer]
            self.handle(name, events.TimerExpired(timer))
        self.at_s = until_s

    @precondition(lambda self: self.executing())
    @rule()
    def task_ends(self) -> None:
        key = self.executing()[0]
        where = self.finish(key, 0)
        self.handle(where, events.TaskEnded(key, self.ended[where][key]))

    @rule(name=st.sampled_from(NAMES))
    def agent_restarts(self, name: str) -> None:
        self.start(name)
        self.meet()

    @invariant()
    def the_task_is_kept(self) -> None:
        assert "h/1" in self.stores["h"].tasks


SETTINGS = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


class HandoffParked(Handoff):
    """The same with a home that goes away politely and comes back."""

    @rule(stops=st.booleans(), seconds=st.sampled_from([0.0, 2.0, 7.0]), ways=st.sampled_from(WAYS))
    def home_is_away(self, stops: bool, seconds: float, ways: tuple[tuple[str, str], ...]) -> None:
        """It stops, or its machine sleeps, and wakes up later, when somebody does not hear it."""
        self.let_go()
        self.handle("h", events.AgentStopping() if stops else events.MachineSleeping())
        self.parks += [flight for flight in self.flying if isinstance(flight[2], messages.Park)]
        self.calm()
        self.time_passes(seconds)
        self.held.update(ways)
        if stops:
            self.agent_restarts("h")
        else:
            self.handle("h", events.MachineWoke())

    @precondition(lambda self: self.parks)
    @rule(data=st.data())
    def an_old_park_comes_late(self, data: st.DataObject) -> None:
        """And then nothing passes for a while."""
        src, dst, park = data.draw(st.sampled_from(self.parks))
        self.handle(dst, events.MessageReceived(src, park))
        self.held.update({("h", dst), (dst, "h")})


class HandoffOnce(HandoffParked):
    """The same for a task that may run once only."""

    guarantee = Guarantee.ONCE


TestHandoffParked = HandoffParked.TestCase
TestHandoffParked.settings = SETTINGS
TestHandoffOnce = HandoffOnce.TestCase
TestHandoffOnce.settings = SETTINGS


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("machine", [Handoff, HandoffParked, HandoffOnce])
def test_many_handoffs(machine: type[Handoff]) -> None:
    run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=LONG_EXAMPLES))


def park_no_confirm(patch: pytest.MonkeyPatch) -> None:
    """R12: any RENEW since the home is back ends PARKED."""

    def confirm(self: TaskParking, task: HomeTask, src: str, renewal: messages.Renewal) -> bool:
        renewal = msgspec.structs.replace(renewal, deadline_ts=max(renewal.ts, renewal.deadline_ts))
        return is_answered(self, task, src, renewal)

    is_answered = TaskParking.is_answered
    patch.setattr(TaskParking, "is_answered", confirm)


def park_late(patch: pytest.MonkeyPatch) -> None:
    """R12: x applies a PARK although it has applied a newer answer since."""

    def late(self: ExecutorLeases, guest: RemoteTask, ts: float) -> None:
        park(self, guest, max(ts, guest.ts))

    park = ExecutorLeases.park
    patch.setattr(ExecutorLeases, "park", late)


@pytest.mark.long
@pytest.mark.parametrize(
    ("variant", "machine"),
    [
        (broken_core.lease_from_receipt, Handoff),
        (broken_variants.renewal_of_any_attempt, Handoff),
        (park_no_confirm, HandoffParked),
        (park_late, HandoffParked),
    ],
)
def test_a_rule_left_out_is_found_out(variant: Any, machine: type[Handoff], monkeypatch: pytest.MonkeyPatch) -> None:
    variant(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            machine, settings=settings(SETTINGS, max_examples=2000, phases=[Phase.generate], database=None)
        )
