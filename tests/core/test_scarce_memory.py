"""Tasks that wait for memory, for several cores, or under a power cap, while slots are free: they are given away, and only to nodes
that could start them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from peerload.model import messages
from peerload.model.messages import Need
from peerload.model.resources import BYTES_MAX, LoadReport, PowerCurve, Profile, ResourceRequest
from peerload.policy.api import ANY_LOAD
from peerload.policy.registry import load_preset
from peerload.sim.queueing_model import Arrival, CompletedTask, QueueingModel
from peerload.sim.scenario import Scenario
from tests.core.given import Given, spec

SLOTS, HAS, ASKED = 8, 10, 6
"""Slots and memory of each node, and the memory of each task: one of them runs on a node at a time."""
CAPPED = PowerCurve((0.0, 80.0), SLOTS, SLOTS, cap_w=20.0)
"""Two cores are under the cap."""


def heavy(count: int = 0, **facts: Any) -> Given:
    """A node with so many tasks of which only one can run."""
    x = Given(slots=SLOTS, policies=load_preset("adaptive"), facts={"mem_bytes": HAS, **facts})
    x.meet("y", slots=SLOTS, cpus=float(SLOTS), mem_bytes=HAS)
    for _ in range(count):
        x.submit(spec(request=ResourceRequest(mem_bytes=ASKED)))
    return x


def gives(x: Given, n: int, requested: int, *, ahead: bool = False, **facts: Any) -> bool:
    """True if y, which reports such a load, gets a task."""
    there = LoadReport(load_tasks=n, slots=SLOTS, mem_requested_bytes=requested, incarnation=1, sequence=9)
    asker = Profile("y", SLOTS, float(SLOTS), **{"mem_bytes": HAS, **facts})
    x.hear("y", messages.GiveRequest(1, there, asker, ahead=ahead))
    return bool(x.sent(messages.GiveReply).task)


def test_a_node_with_free_slots_gives_a_task_that_waits_for_memory_to_one_that_has_it() -> None:
    assert not heavy(1).node.sharing.shown().gives
    x = heavy(2)
    assert (x.node.sharing.shown().gives, x.node.sharing.shown().mem_requested_bytes) == (True, 2 * ASKED)
    assert not gives(x, 1, ASKED)
    assert gives(x, 1, HAS - ASKED)


@pytest.mark.parametrize("facts", [{"requested": 0}, {"requested": ASKED, "mem_bytes": 0}], ids=["untold", "unlimited"])
def test_a_node_that_tells_no_memory_gets_the_task(facts: dict[str, Any]) -> None:
    assert gives(heavy(2), 1, **facts)


def test_no_report_exceeds_its_bound_whatever_tasks_ask_for() -> None:
    """Others would refuse the report."""
    x = Given(facts={"mem_bytes": BYTES_MAX})
    for _ in range(2):
        x.submit(spec(request=ResourceRequest(mem_bytes=BYTES_MAX)))
    assert x.node.sharing.shown().mem_requested_bytes == BYTES_MAX


def test_a_task_is_given_ahead_only_where_memory_is_no_scarcer() -> None:
    assert gives(heavy(SLOTS + 3), SLOTS, 4 * ASKED, ahead=True)
    assert not gives(heavy(SLOTS + 3), SLOTS, (SLOTS + 2) * ASKED, ahead=True)
    assert not gives(heavy(SLOTS + 3), SLOTS - 1, 4 * ASKED)


@pytest.mark.parametrize(
    ("preset", "most", "accepted"),
    [("adaptive", 5, False), ("adaptive", ANY_LOAD, True), ("symmetric", 5, True)],
    ids=["lesser load", "asked for", "where tasks may wait"],
)
def test_a_task_that_would_wait_for_memory_is_not_accepted_for_a_lesser_number_of_tasks(
    preset: str, most: int, accepted: bool
) -> None:
    x = Given(slots=SLOTS, policies=load_preset(preset), facts={"mem_bytes": HAS})
    x.submit(spec(request=ResourceRequest(mem_bytes=ASKED)))
    admission = x.node.sharing.admission
    assert admission.would_accept("y", Need(ResourceRequest(mem_bytes=ASKED)), most) == accepted
    assert admission.would_accept("y", Need(ResourceRequest(mem_bytes=HAS - ASKED)), most)


def wide(count: int, preset: str = "adaptive") -> Given:
    """A node of four cores with so many tasks that ask for three."""
    x = Given(slots=4, policies=load_preset(preset))
    x.meet("y", slots=4, cpus=4.0)
    for _ in range(count):
        x.submit(spec(request=ResourceRequest(cpus=3.0)))
    return x


def report(n: int, **more: Any) -> LoadReport:
    return LoadReport(load_tasks=n, slots=4, running=n > 0, incarnation=1, sequence=9, **more)


def test_a_task_of_several_cores_is_given_where_it_could_start_or_has_less_before_it() -> None:
    def is_given(count: int, n: int, **more: Any) -> bool:
        x = wide(count)
        there = Profile("y", 4, 4.0)
        x.hear("y", messages.GiveRequest(1, report(n, **more), there, ahead=n >= 4))
        return bool(x.sent(messages.GiveReply).task)

    assert not is_given(2, 3), "there it would wait for one task, as it does here"
    assert is_given(2, 0)
    assert is_given(2, 2, cpus_free=3.0)
    assert is_given(3, 3)
    assert not is_given(3, 6)
    assert is_given(5, 6)


def test_an_arriving_task_of_several_cores_is_not_counted_in_its_own_decision() -> None:
    x = wide(2)
    view = x.node.sharing.information.view(uncounted=x.task(2))
    assert (view.load_tasks, x.node.ledger.load_tasks) == (3, 6)


@pytest.mark.parametrize(("here", "there", "moved"), [(2, 3, 0), (2, 0, 1), (3, 3, 1), (5, 0, 2)])
def test_a_pair_moves_tasks_of_several_cores_while_that_evens_out_their_loads(
    here: int, there: int, moved: int
) -> None:
    x = wide(here, "pairing")
    x.hear("y", messages.PairRequest(1, report(there)))
    assert len(x.sent(messages.PairReply).promised) == moved


@pytest.mark.parametrize(("cpus", "mem_bytes", "is_skipped"), [(1.0, 0, True), (3.0, 0, False), (1.0, HAS, False)])
def test_a_node_that_has_room_only_for_less_may_decline_more(cpus: float, mem_bytes: int, is_skipped: bool) -> None:
    x = Given(slots=0)
    x.meet("y", slots=4, cpus=4.0, mem_bytes=HAS)
    asked = spec(request=ResourceRequest(cpus=cpus, mem_bytes=mem_bytes))
    offers = []
    for _ in range(x.node.state.config.refusals_max):
        x.submit(asked, waits_for_node=True)
        offers.append(x.sent(messages.Offer))
    says = report(3, accepts=True, mem_requested_bytes=1)
    for one in offers:
        x.hear("y", messages.Decline(one.task, one.uid, one.attempt, "room", "no room there by now", says))
    assert bool(x.node.membership.circuit_breaker.why("y")) == is_skipped


def test_a_node_at_its_power_cap_gives_what_waits_and_asks_for_nothing() -> None:
    x = Given(slots=SLOTS, policies=load_preset("adaptive"), facts={"power": CAPPED})
    x.submit()
    assert x.node.sharing.receiver.wants_more()
    x.submit()
    assert not x.node.sharing.receiver.wants_more()
    assert not x.node.sharing.shown().gives
    x.submit()
    assert x.node.sharing.shown().gives


@pytest.mark.parametrize("cpus", [3.0, 4.0])
def test_a_burst_of_tasks_of_several_cores_spreads(cpus: float) -> None:
    """One at a time fits on a node."""
    profiles = [Profile(f"n{number}", 4, 4.0) for number in range(1, 6)]
    ended, model = played(profiles, [Arrival(1.0, "n1", 3.0, cpus=cpus)] * 40)
    assert max(task.ended_s for task in ended) - 1.0 < 40 / 5 * 3.0 + 0.5
    assert model.counts()["transfers_total"] < 1.5 * 40


def test_tasks_of_several_cores_do_not_go_back_and_forth_between_two_nodes() -> None:
    rng = random.Random(1)
    at_s = [1.0 + 2.0 * number for number in range(200)]
    arrivals = [Arrival(at, rng.choice(["n1", "n2"]), rng.expovariate(1 / 3.2), cpus=3.0) for at in at_s]
    _, model = played([Profile(f"n{number}", 4, 4.0) for number in (1, 2)], arrivals)
    assert model.counts()["transfers_total"] < 0.5 * len(arrivals)


def played(profiles: list[Profile], arrivals: list[Arrival]) -> tuple[list[CompletedTask], QueueingModel]:
    ended: list[CompletedTask] = []
    setup = Scenario(policy="adaptive", nodes=2, load=0.5, tasks=1, warm_up=0, is_live=True, message_s=0.001).setup()
    model = QueueingModel(
        setup.policies, profiles, seed=1, ended=ended.append, delays=setup.delays, config=setup.config
    )
    model.advance(1.0)
    model.run(iter(arrivals), tasks=len(arrivals))
    model.drain()
    return ended, model


@pytest.mark.parametrize(
    ("tasks", "mem_bytes", "curves", "ideal_s"),
    [(6, ASKED, (None, None), 9.0), (8, 0, (CAPPED, CAPPED), 6.0), (30, 0, (None, CAPPED), 9.0)],
    ids=["memory", "cap", "one capped"],
)
def test_tasks_of_one_home_take_no_longer_than_their_room(
    tasks: int, mem_bytes: int, curves: tuple[PowerCurve | None, ...], ideal_s: float
) -> None:
    """Each takes 3 s."""
    profiles = [
        Profile(f"n{number}", SLOTS, float(SLOTS), HAS, slots_fixed=True, power=curve)
        for number, curve in enumerate(curves, 1)
    ]
    ended, _ = played(profiles, [Arrival(1.0, "n1", 3.0, mem_bytes=mem_bytes)] * tasks)
    assert max(task.ended_s for task in ended) - 1.0 < ideal_s + 0.5
