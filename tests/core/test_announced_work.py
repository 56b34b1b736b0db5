"""A node that tells everybody that it has work is asked by three of those that want more, not by all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from peerload.core.sharing.information import WAITING_LOOKED_AT_MAX
from peerload.core.sharing.sharing import TaskDonor
from peerload.model import events, messages
from peerload.model.resources import LoadReport, Placement, Profile, Region
from tests.core.given import Given, identity, spec

if TYPE_CHECKING:
    from peerload.core.work import Work

PULLS: dict[str, Any] = {
    "transfer": {"threshold": 1.0, "prefetch": 1},
    "information": {"policy": "region-change"},
    "location": {"memory": True, "receiver": {"policy": "poll", "probes": 2, "retry_rate": 0.5}},
}
TIMES = 200


def told(x: Given, node: str, sequence: int, **load: Any) -> list[str]:
    """That node tells everybody so of its load."""
    report = LoadReport(slots=1, incarnation=1, sequence=sequence, **load)
    return x.when(events.PeerMet(identity(node), Profile(node, 1, 1.0, slots_fixed=True), report))


def has_work(x: Given, sequence: int, n: int = 3) -> list[str]:
    """y tells everybody that it has n tasks. Returns whom x asks for one; nobody gives any."""
    did = told(x, "y", sequence, load_tasks=n, waiting=n - 1, movable=n - 1, region=Region.OVERLOADED, gives=True)
    asked = [step.rpartition(" ")[2] for step in did if step.startswith("GiveRequest")]
    for node in asked:
        did = x.hear(node, messages.GiveReply(x.sent(messages.GiveRequest).search, LoadReport(slots=1, incarnation=1)))
        assert not [step for step in did if step.startswith("GiveRequest")]
    return asked


@pytest.mark.parametrize(("others", "least", "most"), [(2, TIMES, TIMES), (9, 40, 82), (39, 5, 28)])
def test_three_of_those_with_room_ask(others: int, least: int, most: int) -> None:
    """With 3, 10 and 40 that want more, 200, 60 and 15 of 200 are expected."""
    names = [f"p{number}" for number in range(others)]
    x = Given(policies=PULLS, peers=("y", *names))
    for name in names:
        told(x, name, 1, accepts=True)
    assert least <= sum(len(has_work(x, sequence)) for sequence in range(2, TIMES + 2)) <= most


def test_nodes_that_know_the_same_agree_on_who_asks() -> None:
    names = [f"p{number}" for number in range(6)]
    nodes = [
        Given(policies=PULLS, node=name, peers=("y", *(other for other in names if other != name))) for name in names
    ]
    for x in nodes:
        for name in names:
            if name != x.profile.node:
                told(x, name, 1, accepts=True)
    for sequence in range(2, 12):
        assert sum(len(has_work(x, sequence)) for x in nodes) == 3


def test_a_busy_node_does_not_search_where_the_task_would_only_wait_here_instead() -> None:
    policies = {**PULLS, "location": {"receiver": {"policy": "poll", "probes": 2, "retry_rate": 0.5}}}
    x = Given(policies=policies, peers=("y", "z"))
    x.submit()
    x.submit()
    told(x, "y", 2, load_tasks=2, waiting=1, movable=1, gives=True)
    told(x, "z", 2, load_tasks=3, waiting=2, movable=2, gives=True)
    did = x.end(x.task().key)
    assert [step for step in did if step.startswith("GiveRequest")] == ["GiveRequest to z"]


def test_a_busy_node_does_not_ask_where_the_task_would_only_wait_here_instead() -> None:
    x = Given(policies=PULLS)
    x.submit()
    assert has_work(x, 2, n=2) == []
    assert has_work(x, 3, n=3) == ["y"]


def test_without_a_retry_a_node_always_asks() -> None:
    """It would not come to it later."""
    once = {**PULLS, "location": {"receiver": {"policy": "poll", "probes": 1}}}
    x = Given(policies=once, peers=("y", "z"))
    told(x, "z", 1, accepts=True)
    assert all(has_work(x, sequence) for sequence in range(2, 22))


def test_one_search_asks_few_of_those_that_memory_names() -> None:
    names = [f"p{number}" for number in range(8)]
    x = Given(
        policies={**PULLS, "location": {**PULLS["location"], "receiver": {"policy": "poll", "probes": 0}}},
        peers=("y", *names),
    )
    for name in names:
        x.hear(name, messages.Footprint(has_room=False))
    x.submit()
    did, asked = x.end(x.task().key), 0
    while nodes := [step.rpartition(" ")[2] for step in did if step.startswith("GiveRequest")]:
        asked += len(nodes)
        search = x.sent(messages.GiveRequest).search
        did = x.hear(nodes[0], messages.GiveReply(search, LoadReport(slots=1, incarnation=1)))
    assert asked == 2


def test_who_refuses_remembers_the_searcher_without_a_message() -> None:
    sender = {**PULLS["location"], "sender": {"policy": "idle-first"}}
    x = Given(policies={**PULLS, "location": sender}, peers=("y", "z"))
    x.submit()
    busy = LoadReport(load_tasks=1, slots=1, incarnation=1, sequence=3)
    x.hear("y", messages.ProbeRequest(1, messages.Need(), busy))
    asker = Profile("z", 1, 1.0, slots_fixed=True)
    assert x.hear("z", messages.GiveRequest(1, LoadReport(slots=1, incarnation=1, sequence=3), asker)) == [
        "GiveReply to z"
    ]
    view = x.node.sharing.information.view()
    assert (list(view.busy_list), list(view.idle_list)) == (["y"], ["z"])
    assert not [step for step in x.submit() + x.timer("probe", "1") if step.startswith("Footprint")]


def asks(x: Given, profile: Profile) -> list[str]:
    """What x does when y, which is idle, asks it for a task."""
    return x.hear("y", messages.GiveRequest(1, LoadReport(slots=1, incarnation=1, sequence=3), profile))


def queued(x: Given, count: int, **placement: Any) -> None:
    x.submit(spec(placement=Placement(**placement)), indices=tuple(range(count)))
    x.finish(x.requests)


def test_a_task_that_may_leave_is_found_among_many_that_may_not() -> None:
    x = Given(policies=PULLS)
    queued(x, WAITING_LOOKED_AT_MAX + 1, local=True)
    queued(x, WAITING_LOOKED_AT_MAX + 1, node="x")
    x.submit()
    queued(x, 2 * WAITING_LOOKED_AT_MAX, local=True)
    assert "Offer to y" in asks(x, Profile("y", 1, 1.0, slots_fixed=True))
    assert x.sent(messages.Offer).task == "x/3"


def test_a_node_that_asks_for_work_is_held_against_so_many_tasks_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Given(policies=PULLS, labels=("fast",))
    queued(x, 3 * WAITING_LOOKED_AT_MAX, labels=("fast",))
    looked_at: list[str] = []
    may_go = TaskDonor._may_go

    def counted(donor: TaskDonor, work: Work, profile: Profile) -> bool:
        looked_at.append(work.task)
        return may_go(donor, work, profile)

    monkeypatch.setattr(TaskDonor, "_may_go", counted)
    assert asks(x, Profile("y", 1, 1.0, slots_fixed=True)) == ["GiveReply to y"]
    assert len(looked_at) == len(set(looked_at)) == 2 * WAITING_LOOKED_AT_MAX
    assert {"x/1.1", f"x/1.{3 * WAITING_LOOKED_AT_MAX - 1}"} <= set(looked_at)
    x.submit()  # the last of all
    assert "Offer to y" in asks(x, Profile("y", 1, 1.0, slots_fixed=True))


def test_a_node_with_nobody_to_ask_searches_again_only_when_it_has_heard_of_something() -> None:
    x = Given(policies={**PULLS, "location": {"receiver": {"policy": "poll", "probes": 2, "retry_rate": 0.5}}})
    told(x, "y", 1, accepts=True)
    assert x.timer("retry") == [], "y has nothing to give"
    assert [step for step in told(x, "y", 2, accepts=True) if step.startswith("timer retry")]
    assert x.timer("retry") == []
    has_work(x, 3)
    assert [step for step in x.timer("retry") if step.startswith("GiveRequest")]
