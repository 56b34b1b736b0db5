"""Two nodes even out their loads: whoever is richer gives, whoever is paired refuses, nobody waits for ever."""

from __future__ import annotations

from typing import Any

from peerload.core.sharing.sharing import PARTNERS_ASKED_MAX
from peerload.core.work import HomePhase
from peerload.model import messages
from peerload.model.resources import LoadReport
from peerload.policy.api import ANY_LOAD
from tests.core.given import UID, Given, Placement, spec

PAIRING: dict[str, Any] = {
    "transfer": {"threshold": 2.0},
    "selection": {"policy": "newest"},
    "location": {"pairing": {"policy": "pairing", "asks_from": 0.0}},
}


def loaded(n: int) -> LoadReport:
    return LoadReport(load_tasks=n, slots=1, running=min(n, 1), waiting=max(n - 1, 0), incarnation=1, sequence=n + 1)


def given(tasks: int, **also: Any) -> Given:
    x = Given(policies=PAIRING, **also)
    for _ in range(tasks):
        x.submit()
    return x


def test_a_node_asks_by_and_by_and_only_once_at_a_time() -> None:
    x = Given(policies=PAIRING, peers=())
    assert "pair" not in " ".join(x.started)
    (armed,) = x.meet("y")
    assert armed.startswith("timer pair ")
    assert x.timer("pair")[:2] == ["timer paired 0.25", "PairRequest to y"]
    assert x.sent(messages.PairRequest).pairing == 1
    assert not [did for did in x.timer("pair") if did.startswith("PairRequest")]  # it has a partner in view
    x.timer("paired")
    assert "PairRequest to y" in x.timer("pair")


def test_too_few_tasks_to_ask() -> None:
    policies = {**PAIRING, "location": {"pairing": {"policy": "pairing"}}}
    x = Given(policies=policies)
    x.submit()
    assert not [did for did in x.timer("pair") if did.startswith("PairRequest")]
    x.submit()
    assert "PairRequest to y" in x.timer("pair")


def test_the_asker_is_richer_and_gives_its_newest_while_they_differ_by_two() -> None:
    x = given(5)
    x.timer("pair")
    did = x.hear("y", messages.PairReply(1, accepts=True, report=loaded(0)))
    # 5 and 0, then 4 and 1, then 3 and 2
    assert did[:5] == ["clear paired", "Unpair to y", "decided y", "Offer to y", "timer offer 5"]
    assert len(x.sent(messages.Unpair).promised) == 2
    assert [x.task(number).phase for number in (3, 4, 5)] == [HomePhase.WAITING, HomePhase.OFFERED, HomePhase.OFFERED]
    assert x.sent(messages.Offer).load_tasks_max == ANY_LOAD


def test_the_asked_is_richer_and_gives() -> None:
    x = given(3)
    did = x.hear("y", messages.PairRequest(7, loaded(0)))
    assert did[:3] == ["PairReply to y", "decided y", "Offer to y"]
    assert x.sent(messages.PairReply).promised == (x.task(3).uid,)
    x.hear("y", messages.PairRequest(8, loaded(9)))
    assert x.sent(messages.PairReply).accepts  # it has given and is free again


def test_the_asked_is_poorer_and_paired_until_the_word_or_for_a_while() -> None:
    x = given(0, peers=("y", "z"))
    assert x.hear("y", messages.PairRequest(7, loaded(3))) == ["timer paired 2", "PairReply to y"]
    assert x.sent(messages.PairReply).accepts
    x.hear("z", messages.PairRequest(1, loaded(3)))
    assert not x.sent(messages.PairReply).accepts
    assert x.hear("y", messages.Unpair(7, (UID,))) == ["timer inbound 2", "clear paired"]
    assert x.node.ledger.load_tasks == 1  # what was promised counts
    x.hear("z", messages.PairRequest(2, loaded(3)))
    assert x.sent(messages.PairReply).accepts
    x.timer("paired")
    x.hear("y", messages.PairRequest(8, loaded(3)))
    assert x.sent(messages.PairReply).accepts


def test_equals_part_at_once() -> None:
    x = given(2)
    x.hear("y", messages.PairRequest(7, loaded(1)))
    reply = x.sent(messages.PairReply)
    assert (reply.accepts, reply.promised) == (True, ())
    x.hear("y", messages.PairRequest(8, loaded(1)))
    assert x.sent(messages.PairReply).accepts


def test_a_refusal_and_a_late_word_change_nothing() -> None:
    x = given(4)
    x.timer("pair")
    assert x.hear("y", messages.PairReply(1, accepts=False, report=loaded(0))) == ["clear paired"]
    assert x.hear("y", messages.PairReply(1, accepts=True, report=loaded(0))) == []
    assert x.hear("y", messages.Unpair(5)) == []


def test_another_node_is_asked_at_once_after_a_refusal_and_none_twice_in_a_turn() -> None:
    x = given(4, peers=("y", "z"))
    asked = x.timer("pair")
    first = next(name for name in ("y", "z") if f"PairRequest to {name}" in asked)
    second = "z" if first == "y" else "y"
    did = x.hear(first, messages.PairReply(1, accepts=False, report=loaded(0)))
    assert f"PairRequest to {second}" in did
    assert x.sent(messages.PairRequest).pairing == 2
    assert x.hear(second, messages.PairReply(2, accepts=False, report=loaded(0))) == ["clear paired"]
    assert "PairRequest" in " ".join(x.timer("pair"))  # the next turn begins anew


def test_a_turn_asks_a_bounded_number_of_nodes() -> None:
    x = given(4, peers=tuple(f"p{number}" for number in range(2 * PARTNERS_ASKED_MAX)))
    did, asked = x.timer("pair"), list[str]()
    while requests := [word.split()[-1] for word in did if word.startswith("PairRequest")]:
        asked += requests
        did = x.hear(asked[-1], messages.PairReply(len(asked), accepts=False, report=loaded(0)))
    assert len(asked) == len(set(asked)) == PARTNERS_ASKED_MAX


def test_a_task_that_may_not_go_stays_and_what_is_drained_is_left_alone() -> None:
    x = Given(policies=PAIRING)
    for _ in range(4):
        x.submit(spec(placement=Placement(local=True)))
    x.hear("y", messages.PairRequest(1, loaded(0)))
    assert x.sent(messages.PairReply).promised == ()
    x = given(4)
    x.meet("y", drained=True)
    x.hear("y", messages.PairRequest(1, loaded(0)))
    assert not x.sent(messages.PairReply).accepts


def test_between_different_sizes_loads_are_compared_in_the_richer_ones_slots() -> None:
    x = Given(policies=PAIRING, slots=2)
    x.meet("y", slots=4, cpus=4.0)
    for _ in range(4):
        x.submit()
    x.hear("y", messages.PairRequest(1, LoadReport(load_tasks=8, slots=4, incarnation=1, sequence=1)))
    assert x.sent(messages.PairReply).promised == ()  # both are twice full
    x.hear("y", messages.PairRequest(2, LoadReport(load_tasks=4, slots=4, incarnation=1, sequence=2)))
    assert len(x.sent(messages.PairReply).promised) == 1
