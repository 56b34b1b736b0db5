"""Placement by energy in the core: the joules compared, caps, price, and that nobody undoes it."""

from __future__ import annotations

from typing import Any

import pytest

from peerload.core.work import HomePhase
from peerload.energy import price
from peerload.model import actions, events, messages
from peerload.model.config import CoreConfig
from peerload.model.gossip import MemberStatus
from peerload.model.resources import LoadReport, PowerCurve, Profile, Quality, ResourceRequest
from peerload.model.task import SubmitOptions, TaskRecord, TaskState
from peerload.policy.registry import build_preset, preset_source
from tests.core.given import WALL_S, Given, spec
from tests.wording import Says

CHEAP = PowerCurve((10.0, 20.0), 4, 4, quality=Quality.MEASURED)
DEAR = PowerCurve((10.0, 90.0), 4, 4, quality=Quality.MEASURED)
ENERGY = build_preset(*preset_source("energy").tables())


def given(curve: PowerCurve | None = DEAR, *, slots: int = 4, cap_w: float | None = None, **peers: PowerCurve) -> Given:
    made = Given(
        slots=slots,
        peers=(),
        policies=ENERGY,
        facts={"power": curve, "slots_fixed": False},
        config=CoreConfig(cap_w=cap_w),
    )
    for name, of in peers.items():
        made.meet(name, slots=4, cpus=4.0, power=of)
    return made


def told(**changes: Any) -> LoadReport:
    return LoadReport(slots=4, accepts=True, incarnation=1, sequence=9, **changes)


def answer(given: Given, **reports: LoadReport) -> None:
    probe = given.sent(messages.ProbeRequest)
    for node, report in reports.items():
        given.hear(node, messages.ProbeReply(probe.search, report.accepts, report))


def offered(given: Given) -> list[str]:
    sent = (action for action in given.last if isinstance(action, actions.Send))
    return [action.dst for action in sent if isinstance(action.message, messages.Offer)]


def test_an_idle_home_gives_its_task_to_the_node_where_it_costs_less_and_tells_the_joules() -> None:
    x = given(y=CHEAP)
    x.submit(spec(est_s=100.0))
    answer(x, y=told())
    assert x.sent(messages.Offer).task == "x/1"
    x.hear("y", messages.Accept("x/1", x.task().uid, 1, 7, 1.0, "y-machine-1"))
    (decided,) = (action for action in x.last if isinstance(action, actions.Decided))
    compared = {cost.node: (cost.joules, cost.quality) for cost in decided.compared}
    assert compared == {"x": (2000.0, Quality.MEASURED), "y": (250.0, Quality.MEASURED)}


OFF = PowerCurve((10.0, 20.0), 4, 4, may_sleep=True, wake_s=20.0, quality=Quality.MEASURED)


def wakes(given: Given) -> list[str]:
    return [action.node for action in given.last if isinstance(action, actions.WakePeer)]


def compared(given: Given) -> dict[str, tuple[float, float]]:
    (decided,) = (action for action in given.last if isinstance(action, actions.Decided))
    return {cost.node: (cost.wake_s, cost.wake_joules) for cost in decided.compared}


def test_a_node_that_sleeps_is_woken_where_that_costs_less_and_the_task_waits_for_it() -> None:
    x = given(y=OFF)
    x.rumour("y", MemberStatus.ASLEEP, 1)
    x.submit(spec(est_s=300.0))  # 20 s later, and far less joules
    assert wakes(x) == ["y"]
    assert compared(x) == {"x": (0.0, 0.0), "y": (20.0, 200.0)}
    assert x.task().phase is HomePhase.RESTING
    x.after(8.0).rumour("y", MemberStatus.ALIVE, 2)
    x.timer("rest", x.task().uid.hex())
    answer(x, y=told())
    assert offered(x) == ["y"]
    assert x.node.membership.waking.took_s == {"y": 8.0}


def test_a_node_that_sleeps_is_left_alone_where_waking_it_takes_longer_or_costs_more() -> None:
    x = given(y=OFF)
    x.rumour("y", MemberStatus.ASLEEP, 1)
    x.submit(spec(est_s=100.0))  # 20 % later than here
    assert wakes(x) == []
    assert x.done(actions.SpawnTask)
    x = given(CHEAP, y=OFF)
    x.rumour("y", MemberStatus.ASLEEP, 1)
    x.submit(spec(est_s=300.0))
    assert wakes(x) == []


def test_a_node_that_is_not_woken_keeps_no_task_for_ever() -> None:
    x = given(y=OFF)
    x.rumour("y", MemberStatus.ASLEEP, 1)
    x.submit(spec(est_s=300.0))
    for _ in range(3):
        x.after(20.0).timer("wake", "y")
    x.timer("rest", x.task().uid.hex())
    assert x.done(actions.SpawnTask)


def test_nobody_pulls_a_task_that_was_placed_by_energy() -> None:
    x = given(CHEAP, slots=1, y=DEAR)
    x.submit(spec(est_s=100.0))
    answer(x, y=told())
    x.submit(spec(est_s=100.0))  # it waits for the cheaper node, or is searched for
    x.hear("y", messages.GiveRequest(1, told(), Profile("y", 4, 4.0)))
    assert not x.sent(messages.GiveReply).task


def test_a_home_without_cores_places_by_its_policy() -> None:
    x = given(None, slots=0, y=DEAR, z=CHEAP)
    x.submit(spec(est_s=100.0))
    answer(x, y=told(), z=told())
    assert offered(x) == ["z"]


@pytest.mark.parametrize(("prefer", "chosen"), [("time", "y"), ("energy", "z"), ("", "y")])
def test_a_user_says_how_much_later_a_task_may_end_for_its_joules(prefer: Any, chosen: str) -> None:
    x = given(None, slots=0, y=DEAR)
    x.meet("z", slots=4, cpus=4.0, speed=0.7, power=CHEAP)
    x.submit(spec(est_s=100.0, prefer=prefer))
    answer(x, y=told(), z=told())
    assert offered(x) == [chosen]


def test_no_task_starts_above_the_cap_and_none_is_accepted_there() -> None:
    x = given(cap_w=51.0)  # 10, 30, 50, 70, 90 W with 0 … 4 tasks
    for _ in range(3):
        x.submit()
    assert len(x.node.ledger.running) == 2
    assert not x.node.sharing.shown().accepts
    x.end(next(iter(x.node.ledger.running)))
    assert len(x.node.ledger.running) == 2
    x.meet("y")
    x.hear("y", messages.ProbeRequest(5, messages.Need(), told(), 1.0))
    assert not x.sent(messages.ProbeReply).accepts


def test_a_request_above_the_cap_can_never_run_and_its_refusal_says_so() -> None:
    x = given(cap_w=51.0)
    x.submit(spec(request=ResourceRequest(cpus=3.0)))
    assert Says.CPUS_CAPPED(2, 51, 3) in str(x.done(actions.Answer).error)


def test_prices_of_nodes_weigh_their_joules() -> None:
    x = given(None, slots=0, y=CHEAP, z=DEAR)
    x.submit(spec(est_s=100.0))
    answer(x, y=told(price=0.9), z=told(price=0.1))
    assert offered(x) == ["z"]


PRICES = ((WALL_S, 5.0), (WALL_S + 1000.0, 1.0), (WALL_S + 2000.0, float("inf")))


def test_a_task_that_may_wait_starts_in_the_cheapest_window_and_new_prices_count_at_once() -> None:
    x = given()
    x.when(events.PricesRead(PRICES))
    x.submit(spec(est_s=500.0), terms=SubmitOptions(start_by=WALL_S + 5000.0))
    assert x.node.dispatch.deferral(x.task()) == (WALL_S + 1000.0, 1.0, 5.0)
    assert not x.node.ledger.running
    x.when(events.PricesRead(((WALL_S, 2.0),)))
    assert x.node.dispatch.deferral(x.task()) is None
    assert x.node.ledger.running


def test_the_cheapest_window_of_many_tasks_that_are_alike_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[float] = []
    exact = price.integral

    def counted(of: price.Price, start_s: float, end_s: float) -> float:
        looked.append(start_s)
        return exact(of, start_s, end_s)

    monkeypatch.setattr(price, "integral", counted)
    x = given()
    x.when(events.PricesRead(PRICES))
    x.submit(spec(est_s=501.0), indices=tuple(range(1, 51)), terms=SubmitOptions(start_by=WALL_S + 5000.0))
    x.finish(1)
    assert {task.phase for task in x.node.home.tasks.values()} == {HomePhase.RESTING}
    x.when(events.PricesRead((*PRICES[:2], (WALL_S + 3000.0, float("inf")))))
    assert len(looked) < 50


def test_a_task_waits_for_its_cheapest_window_also_after_a_restart() -> None:
    record = TaskRecord("x/4", bytes(range(16)), TaskState.QUEUED, WALL_S, reason="submitted")
    row = events.TaskRow(record, spec(est_s=500.0), terms=SubmitOptions(start_by=WALL_S + 5000.0))
    x = Given(peers=(), started=events.AgentStarted((row,), counter=4, prices=PRICES))
    assert x.node.dispatch.deferral(x.task(4)) == (WALL_S + 1000.0, 1.0, 5.0)
    assert not x.node.ledger.running


def test_a_task_that_waits_for_its_cheapest_window_takes_no_slot_of_its_group() -> None:
    x = given()
    x.when(events.PricesRead(PRICES))
    x.when(events.GroupRequested(9, "g", slots=1))
    x.submit(spec(est_s=500.0), terms=SubmitOptions(group="g", start_by=WALL_S + 5000.0))
    x.submit(spec(est_s=500.0), terms=SubmitOptions(group="g"))
    assert [x.task(number).phase for number in (1, 2)] == [HomePhase.RESTING, HomePhase.HERE]
    x.when(events.PricesRead(((WALL_S, 2.0),)))
    assert x.task().phase is HomePhase.GATED
    x.end(x.task(2).key)
    assert x.task().phase is HomePhase.HERE


def test_what_is_not_known_of_the_time_after_the_prices_is_not_waited_for() -> None:
    x = given()
    x.when(events.PricesRead(PRICES))
    x.submit(spec(est_s=5000.0), terms=SubmitOptions(start_by=WALL_S + 5000.0))
    assert x.node.ledger.running
