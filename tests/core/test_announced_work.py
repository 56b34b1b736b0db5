"""A node that tells everybody that it has work is asked by three of those that want more, not by all of them."""

from __future__ import annotations

from typing import Any

import pytest

from peerload.model import events, messages
from peerload.model.load import LoadReport, Region
from peerload.model.resources import Profile
from tests.core.given import Given, identity

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
    x.hear("y", messages.Probe(1, messages.Need(), busy))
    asker = Profile("z", 1, 1.0, slots_fixed=True)
    assert x.hear("z", messages.GiveRequest(1, LoadReport(slots=1, incarnation=1, sequence=3), asker)) == [
        "GiveReply to z"
    ]
    view = x.node.sharing.information.view()
    assert (list(view.busy_list), list(view.idle_list)) == (["y"], ["z"])
    assert not [step for step in x.submit() + x.timer("probe", "1") if step.startswith("Footprint")]
