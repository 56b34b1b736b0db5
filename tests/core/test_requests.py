"""Asking everybody at once: only the useful answer, each after a pause, until it is enough."""

from __future__ import annotations

from typing import Any

import msgspec

from peerload.core.work import HomePhase
from peerload.model import events, messages, metrics, timers
from peerload.model.actions import Announce, SetTimer
from peerload.model.config import CoreConfig
from peerload.model.resources import LoadReport, Profile
from peerload.model.task import Exit
from peerload.policy.api import Keep
from peerload.policy.registry import build_preset
from tests.core.given import Given, ResourceRequest, identity, spec

ON_DEMAND: dict[str, Any] = {
    "transfer": {"threshold": 1.0},
    "information": {"policy": "on-demand"},
    "location": {"sender": {"policy": "threshold"}, "receiver": {"policy": "poll"}},
}
WHEN_IDLE: dict[str, Any] = {
    "transfer": {"threshold": 1.0},
    "information": {"policy": "broadcast-when-idle"},
    "location": {"receiver": {"policy": "poll", "probes": 0}},
}
FIRST_REPLY: dict[str, Any] = {"transfer": {"threshold": 1.0}, "location": {"sender": {"policy": "first-reply"}}}
HAS_ROOM = LoadReport(slots=1, accepts=True, incarnation=1, sequence=1)
HAS_WORK = LoadReport(load_tasks=2, slots=1, running=1, waiting=1, movable=1, gives=True, incarnation=1, sequence=1)


def broadcast(x: Given, kind: type[Any]) -> Any:
    return [act.message for act in x.last if isinstance(act, Announce) and isinstance(act.message, kind)][-1]


def pending(x: Given) -> list[tuple[str, ...]]:
    return [
        tuple(msgspec.to_builtins(act.timer))
        for act in x.last
        if isinstance(act, SetTimer) and isinstance(act.timer, timers.AnswerDue)
    ]


# -- being asked -------------------------------------------------------------------------------------------------------


def test_only_the_useful_answer_and_after_a_pause() -> None:
    x = Given(policies=ON_DEMAND)
    assert x.hear("y", messages.StateRequest(3, HAS_ROOM)) == []  # it seeks work, and there is none here
    x.hear("y", messages.StateRequest(4, HAS_WORK))  # it seeks room
    (timer,) = pending(x)
    assert x.timer(*timer) == ["StateAnswer to y"]
    assert x.sent(messages.StateAnswer).report.accepts
    x.submit()
    x.submit()
    assert x.hear("y", messages.StateRequest(5, HAS_WORK)) == []
    x.hear("y", messages.StateRequest(6, HAS_ROOM))
    (timer,) = pending(x)
    assert x.timer(*timer) == ["StateAnswer to y"]
    assert x.timer(*timer) == []


def test_no_answer_once_it_is_enough_or_no_longer_true() -> None:
    x = Given(policies=ON_DEMAND)
    x.hear("y", messages.StateRequest(3, HAS_WORK))
    (timer,) = pending(x)
    assert x.hear("y", messages.Enough(3)) == ["clear answer"]
    assert x.timer(*timer) == []
    x.hear("y", messages.StateRequest(4, HAS_WORK))
    (timer,) = pending(x)
    x.submit()
    assert "StateAnswer to y" not in x.timer(*timer)


def test_requests_are_bounded_and_strangers_get_no_answer() -> None:
    x = Given(policies=ON_DEMAND, config=CoreConfig(answers_pending_max=2))
    for number in range(4):
        x.hear("y", messages.StateRequest(number, HAS_WORK))
    assert x.node.state.counts[metrics.REQUESTS_UNANSWERED] == 2
    assert x.hear("stranger", messages.StateRequest(9, HAS_WORK)) == []


def test_a_request_for_room_for_a_task_is_answered_by_who_could_run_it() -> None:
    x = Given()
    need = messages.Need(ResourceRequest(cpus=4.0))
    assert x.hear("y", messages.StateRequest(3, HAS_WORK, need)) == []
    x.hear("y", messages.StateRequest(4, HAS_WORK, messages.Need()))
    assert len(pending(x)) == 1


# -- asking ------------------------------------------------------------------------------------------------------------


def test_a_node_asks_when_it_leaves_the_normal_region_and_takes_from_the_first() -> None:
    policies = {**ON_DEMAND, "transfer": {"policy": "double-threshold", "low": 1.0, "high": 2.0}}
    x = Given(policies=policies, peers=("y", "z"))
    x.submit()
    x.timer("region")
    assert not [act for act in x.last if isinstance(act, Announce)]  # normal
    x.end(x.task().key)
    x.timer("region")
    request = broadcast(x, messages.StateRequest)
    assert request.need is None
    did = x.hear("y", messages.StateAnswer(request.request, HAS_WORK))
    assert did[0] == "GiveRequest to y"
    assert broadcast(x, messages.Enough).request == request.request
    assert not [act for act in x.last if isinstance(act, Announce) and act.message == messages.Enough(0)]
    assert "Announce" not in x.hear("z", messages.StateAnswer(request.request, HAS_WORK))


def test_a_node_with_too_much_asks_until_it_has_answers_enough() -> None:
    x = Given(policies=ON_DEMAND, peers=("a", "b", "c", "d"), config=CoreConfig(answers_enough=2))
    x.submit()
    x.submit()
    x.timer("region")
    request = broadcast(x, messages.StateRequest)
    assert "Announce" not in x.hear("a", messages.StateAnswer(request.request, HAS_ROOM))
    assert "Announce" in x.hear("b", messages.StateAnswer(request.request, HAS_ROOM))
    assert "Announce" not in x.hear("c", messages.StateAnswer(request.request, HAS_ROOM))


def test_a_free_slot_is_told_at_once_and_not_too_often() -> None:
    x = Given(policies=WHEN_IDLE)
    x.submit()
    assert "Announce" in x.end(x.task().key)
    assert broadcast(x, messages.StateRequest).report.accepts
    assert "timer tell 0.05" in [x._shape(act) for act in x.last]
    x.submit()
    assert "Announce" not in x.end(x.task(2).key)
    x.submit()
    x.timer("tell")
    assert "Announce" in x.end(x.task(3).key)


# -- a search that asks everybody --------------------------------------------------------------------------------------


def searching() -> tuple[Given, int]:
    x = Given(policies=FIRST_REPLY, peers=("y", "z"))
    x.submit()
    did = x.submit()
    assert "Announce" in did
    assert "timer probe 0.25" in did
    request = broadcast(x, messages.StateRequest)
    assert request.need == messages.Need()
    return x, request.request


def test_the_first_that_accepts_gets_the_task_and_the_others_may_stop() -> None:
    x, request = searching()
    assert "Offer to y" in x.hear("y", messages.StateAnswer(request, HAS_ROOM))
    assert x.hear("z", messages.StateAnswer(request, HAS_ROOM)) == []  # kept in mind
    task = x.task(2)
    x.hear("y", messages.Accept(task.task, task.uid, 1, 7, 1.0))
    assert task.phase is HomePhase.AWAY
    assert broadcast(x, messages.Enough).request == request


def test_one_that_declines_is_followed_by_the_next_answer() -> None:
    x, request = searching()
    x.hear("y", messages.StateAnswer(request, HAS_ROOM))
    x.hear("z", messages.StateAnswer(request, HAS_ROOM))
    task = x.task(2)
    decline = messages.Decline(task.task, task.uid, 1, "room", "no room", HAS_WORK)
    assert "Offer to z" in x.hear("y", decline)
    x.hear("z", decline)  # and then it is waited for, until time is up
    assert task.search is not None
    did = x.timer("probe", str(request))
    assert "decided stay" in did
    assert "Announce" not in did  # nobody is about to answer any more
    assert task.phase is HomePhase.WAITING


def test_time_is_up_while_an_offer_is_out() -> None:
    x, request = searching()
    x.hear("y", messages.StateAnswer(request, HAS_ROOM))
    assert x.timer("probe", str(request)) == []
    task = x.task(2)
    did = x.hear("y", messages.Decline(task.task, task.uid, 1, "room", "no room", HAS_WORK))
    assert "decided stay" in did


def test_nobody_answers() -> None:
    x, request = searching()
    assert "decided stay" in x.timer("probe", str(request))
    assert x.hear("y", messages.StateAnswer(request, HAS_ROOM)) == []
    assert x.task(2).phase is HomePhase.WAITING


def test_with_nobody_there_nobody_is_asked() -> None:
    x = Given(policies=FIRST_REPLY, peers=("y",))
    x.meet("y", drained=True)
    x.submit()
    assert "Announce" not in x.submit()


# -- bidding -----------------------------------------------------------------------------------------------------------


def test_all_bidders_are_asked_at_once_and_the_cheapest_must_confirm() -> None:
    x = Given(
        policies={"transfer": {"threshold": 1.0}, "location": {"sender": {"policy": "bidding", "bidders": 2}}},
        peers=("a", "b", "c"),
    )
    x.submit()
    did = x.submit()
    asked = [name.split()[-1] for name in did if name.startswith("ProbeRequest to")]
    assert len(set(asked)) == 2
    first, second = asked
    x.hear(first, messages.ProbeReply(1, accepts=True, report=HAS_ROOM, price_s=3.0))
    assert f"Offer to {second}" in x.hear(second, messages.ProbeReply(1, accepts=True, report=HAS_ROOM, price_s=2.0))
    task = x.task(2)
    refusal = messages.Decline(task.task, task.uid, 1, "room", "promised to another", HAS_WORK)
    assert f"Offer to {first}" in x.hear(second, refusal)
    assert "decided stay" in x.hear(first, refusal)


def test_the_price_is_when_one_more_task_would_have_ended() -> None:
    x = Given(slots=2)
    prices = []
    for _ in range(4):
        x.hear("y", messages.ProbeRequest(1, messages.Need(), HAS_WORK, expected_s=1.0))
        prices.append(x.sent(messages.ProbeReply).price_s)
        x.submit()
    assert prices == [1.0, 1.0, 1.5, 2.0]  # one second each until one has ended


def price(x: Given, expected_s: float) -> float:
    x.hear("y", messages.ProbeRequest(1, messages.Need(), HAS_WORK, expected_s=expected_s))
    bid: float = x.sent(messages.ProbeReply).price_s
    return bid


def run_for(x: Given, seconds: float) -> None:
    """A task of another home runs here for so long."""
    x.node.state.history.learn(spec(), Exit(0, started_at=1.0, ended_at=1.0 + seconds))


def test_the_price_is_the_tasks_own_duration_and_not_the_mean_of_the_node() -> None:
    idle, crowd = Given(), Given()
    run_for(idle, 500.0)
    run_for(crowd, 1.0)
    for _ in range(5):
        crowd.submit()
    assert price(idle, 2.0) == 2.0
    assert price(crowd, 2.0) == 2.0 + 5 * 1.0
    assert price(Given(facts={"speed": 2.0}), 2.0) == 1.0


def test_the_price_knows_what_is_left_of_the_tasks_that_run() -> None:
    x = Given()
    run_for(x, 10.0)
    x.submit()
    assert price(x, 1.0) == 11.0
    assert price(x.after(8), 1.0) == 3.0
    assert price(x.after(4), 1.0) == 13.0  # it has outlived all that are known: as long again


def test_a_slot_that_foreign_programs_occupy_is_in_the_price() -> None:
    x = Given()
    run_for(x, 3.0)
    x.when(events.LoadSampled(1.0, 1.0, 0))
    assert x.node.ledger.foreign_slots == 1
    assert price(x, 2.0) == 5.0


def test_only_a_bidding_home_asks_for_a_price_and_names_the_expected_duration() -> None:
    for policy, expected_s in (("bidding", 7.0), ("threshold", 0.0)):
        x = Given(policies={"transfer": {"threshold": 1.0}, "location": {"sender": {"policy": policy}}})
        run_for(x, 7.0)
        x.submit()
        x.submit()
        assert x.sent(messages.ProbeRequest).expected_s == expected_s
    x = Given()
    x.hear("y", messages.ProbeRequest(1, messages.Need(), HAS_WORK))
    assert x.sent(messages.ProbeReply).price_s == 0.0


BROADCAST: dict[str, Any] = {
    "transfer": {"threshold": 1.0},
    "location": {"sender": {"policy": "bidding", "broadcast": True, "bidders": 2}},
}


def test_bids_by_broadcast_are_taken_until_there_are_enough_and_the_cheapest_must_confirm() -> None:
    x = Given(policies=BROADCAST, peers=("a", "b", "c"))
    run_for(x, 7.0)
    x.submit()
    x.submit()
    request = broadcast(x, messages.StateRequest)
    assert (request.need, request.expected_s) == (messages.Need(), 7.0)
    assert x.hear("a", messages.StateAnswer(request.request, HAS_ROOM, price_s=9.0)) == []
    assert "Offer to b" in x.hear("b", messages.StateAnswer(request.request, HAS_ROOM, price_s=8.0))
    task = x.task(2)
    refusal = messages.Decline(task.task, task.uid, 1, "room", "promised to another", HAS_WORK)
    assert "Offer to a" in x.hear("b", refusal)
    assert "decided stay" in x.hear("a", refusal)


def test_when_time_is_up_for_bids_the_cheapest_of_those_there_are_gets_the_task() -> None:
    x = Given(policies=BROADCAST, peers=("a", "b", "c"))
    x.submit()
    x.submit()
    request = broadcast(x, messages.StateRequest).request
    x.hear("a", messages.StateAnswer(request, HAS_ROOM, price_s=9.0))
    assert "Offer to a" in x.timer("probe", str(request))
    task = x.task(2)
    refusal = messages.Decline(task.task, task.uid, 1, "room", "promised to another", HAS_WORK)
    assert "decided stay" in x.hear("a", refusal)


def test_a_bid_by_broadcast_is_the_price_when_the_pause_is_over() -> None:
    x = Given()
    run_for(x, 3.0)
    for expected_s, bid in ((2.0, 2.0), (0.0, 0.0)):
        x.hear("y", messages.StateRequest(3, HAS_WORK, messages.Need(), expected_s))
        (timer,) = pending(x)
        x.timer(*timer)
        assert x.sent(messages.StateAnswer).price_s == bid


# -- telling -----------------------------------------------------------------------------------------------------------


def test_every_change_is_told_but_not_too_often() -> None:
    x = Given(policies={**FIRST_REPLY, "information": {"policy": "state-change"}})
    assert "Announce" in x.submit()
    x.submit()
    assert not [act for act in x.last if isinstance(act, Announce) and isinstance(act.message, messages.State)]
    assert "Announce" in x.timer("tell")
    assert broadcast(x, messages.State).report.load_tasks == 2
    assert x.timer("tell") == []


def test_the_period_is_kept() -> None:
    x = Given(policies={**FIRST_REPLY, "information": {"policy": "periodic", "period_s": 3.0}})
    assert "timer period 3" in x.started
    assert x.timer("period") == ["Announce", "timer period 3"]


def test_a_home_that_sends_although_it_has_room_waits_for_the_answer() -> None:
    policies = {"transfer": {"send_at": 0.0, "accept_below": 1.0}, "location": {"sender": {"policy": "threshold"}}}
    x = Given(policies=policies)
    assert not [did for did in x.submit() if did.startswith("spawn")]
    assert "spawn 1" in x.hear("y", messages.ProbeReply(1, accepts=False, report=HAS_WORK))
    x = Given(policies=policies)
    x.submit()
    assert "Offer to y" in x.hear("y", messages.ProbeReply(1, accepts=True, report=HAS_ROOM))
    task = x.task()
    did = x.hear("y", messages.Decline(task.task, task.uid, 1, "room", "no room", HAS_WORK))
    assert "spawn 1" in did


class Hears:
    """A location policy that keeps what is announced to its node; an information policy that tells one node alone."""

    watches = "tasks"
    reports_guide_probing = False
    period_s = 0.0
    to: tuple[str, ...] = ("z",)

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, bool]] = []

    def announced(self, node: str, report: LoadReport, *, to_all: bool) -> None:
        self.heard.append((node, report.load_tasks, to_all))

    def locate(self, view: Any, task: Any, replies: Any, rng: Any) -> Keep:
        return Keep("here")

    def tells(self, told: LoadReport | None, now: LoadReport) -> bool:
        return True

    def asks(self, before: LoadReport | None, now: LoadReport) -> bool:
        return False

    def audience(self, view: Any, rng: Any) -> tuple[str, ...]:
        return self.to


def with_hooks(policy: Hears) -> Given:
    preset = msgspec.structs.replace(build_preset("hooks", {}), sender=policy, information=policy)
    return Given(policies=preset, peers=("y", "z"))


def test_an_announcement_goes_to_the_audience_that_the_information_policy_names() -> None:
    x = with_hooks(Hears())
    assert "Announce" in x.started  # at the start everybody hears who is there
    did = x.submit()
    assert "StateAnswer to z" in did
    assert "Announce" not in did
    told = x.sent(messages.StateAnswer)
    assert (told.request, told.report.load_tasks) == (messages.UNASKED, 1)


def test_an_audience_that_is_none_is_an_error_of_the_policy() -> None:
    for to in (("x",), ("z", "z"), ("far",), "z"):
        policy = Hears()
        policy.to = to  # type: ignore[assignment]
        x = with_hooks(policy)
        assert not [step for step in x.submit() if step.startswith(("StateAnswer", "Announce"))]
        assert x.node.state.counts[metrics.POLICY_ERRORS] == 1


def test_a_sender_policy_hears_announcements_and_whether_they_went_to_all() -> None:
    policy = Hears()
    x = with_hooks(policy)
    policy.heard.clear()
    x.hear("y", messages.StateAnswer(messages.UNASKED, HAS_ROOM))
    busy = msgspec.structs.replace(HAS_WORK, sequence=2)
    x.when(events.PeerMet(identity("y"), Profile("y", 1, 1.0, slots_fixed=True), busy))
    x.hear("y", messages.ProbeRequest(1, messages.Need(), msgspec.structs.replace(HAS_WORK, sequence=3)))
    assert policy.heard == [("y", 0, False), ("y", 2, True)]
    assert not [act for act in x.last if isinstance(act, Announce)]
