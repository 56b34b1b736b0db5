"""Footprints: a search in vain leaves its node's name where it asked at random, and others ask that name first."""

from __future__ import annotations

from typing import Any

import msgspec

from peerload.core.sharing.information import NAMES_MAX, PeerHints
from peerload.model import messages
from peerload.model.resources import LoadReport, Profile, Region
from peerload.model.task import execution_key
from peerload.policy.api import ANY_LOAD
from tests.core.given import UID, Given, spec

BOTH: dict[str, Any] = {
    "transfer": {"threshold": 1.0},
    "location": {
        "memory": True,
        "sender": {"policy": "threshold", "probes": 1},
        "receiver": {"policy": "poll", "probes": 1},
    },
}
WITHOUT = {**BOTH, "location": {**BOTH["location"], "memory": False}}
FULL = LoadReport(load_tasks=1, slots=1, running=1, incarnation=1, sequence=1)
ROOM = messages.Footprint(has_room=True)
WORK = messages.Footprint(has_room=False)


def test_names_are_unique_bounded_and_the_newest_last() -> None:
    memory = PeerHints(is_on=True)
    for number in range(NAMES_MAX + 2):
        memory.is_idle(f"n{number}")
    assert list(memory.idle) == [f"n{number}" for number in range(2, NAMES_MAX + 2)]
    memory.is_idle("n5")
    assert memory.idle[-1] == "n5"
    assert len(memory.idle) == NAMES_MAX
    assert memory.take_idle("n5") is True
    assert memory.take_idle("n5") is False
    assert list(memory.busy) == []


def test_a_senders_search_in_vain_leaves_its_name_and_one_that_succeeds_does_not() -> None:
    x = Given(policies=BOTH)
    x.submit()
    assert "ProbeRequest to y" in x.submit()
    assert x.hear("y", messages.ProbeReply(1, accepts=False, report=FULL)) == [
        "clear probe",
        "decided stay",
        "Footprint to y",
    ]
    assert x.sent(messages.Footprint) == WORK
    x.submit()
    done = x.hear("y", messages.ProbeReply(2, accepts=True, report=FULL))
    assert "Offer to y" in done
    assert "Footprint to y" not in done


def test_a_receivers_search_in_vain_leaves_its_name() -> None:
    x = Given(policies=BOTH)
    x.submit()
    assert "GiveRequest to y" in x.end(x.task().key)
    assert "Footprint to y" in x.hear("y", messages.GiveReply(1, FULL))
    assert x.sent(messages.Footprint) == ROOM


def test_a_node_that_did_not_answer_is_left_nothing() -> None:
    x = Given(policies=BOTH)
    x.submit()
    x.submit()
    assert "Footprint to y" not in x.timer("probe", "1")


def test_the_named_are_asked_first_newest_first_and_cost_no_probe() -> None:
    x = Given(policies=BOTH, peers=("a", "b", "c", "d"))
    x.hear("b", ROOM)
    x.hear("d", ROOM)
    x.submit()
    assert "ProbeRequest to d" in x.submit()
    assert "ProbeRequest to b" in x.hear("d", messages.ProbeReply(1, accepts=False, report=FULL))
    asked = [step for step in x.hear("b", messages.ProbeReply(1, accepts=False, report=FULL)) if "ProbeRequest" in step]
    assert asked in (["ProbeRequest to a"], ["ProbeRequest to c"])
    other = asked[0][-1]
    done = x.hear(other, messages.ProbeReply(1, accepts=False, report=FULL))
    assert [step for step in done if "Footprint" in step] == [f"Footprint to {other}"]
    memory = x.node.sharing.information.view()
    assert list(memory.idle_list) == []


def test_a_receiver_asks_the_busy_list_first() -> None:
    x = Given(policies=BOTH, peers=("a", "b", "c", "d"))
    x.hear("c", WORK)
    x.submit()
    assert "GiveRequest to c" in x.end(x.task().key)


def test_who_says_that_it_is_overloaded_is_asked_or_remembered() -> None:
    x = Given(policies=BOTH, peers=("a", "b", "c", "d"))
    loaded = LoadReport(load_tasks=3, slots=1, movable=2, region=Region.OVERLOADED, incarnation=1, sequence=2)
    assert "GiveRequest to c" in x.hear("c", messages.Pong(1, loaded))
    x.hear("c", messages.GiveReply(1, msgspec.structs.replace(loaded, sequence=3)))
    x.submit()
    x.hear("c", messages.Pong(2, msgspec.structs.replace(loaded, sequence=4)))
    assert list(x.node.sharing.information.view().busy_list) == ["c"]


def test_without_memory_nothing_is_left_or_kept() -> None:
    x = Given(policies=WITHOUT)
    x.hear("y", ROOM)
    assert list(x.node.sharing.information.view().idle_list) == []
    x.submit()
    x.submit()
    assert x.hear("y", messages.ProbeReply(1, accepts=False, report=FULL)) == ["clear probe", "decided stay"]


def test_a_node_that_prefetches_gets_a_task_only_where_more_are_left() -> None:
    x = Given(policies={"transfer": {"threshold": 1.0, "prefetch": 1}, "location": {"receiver": {"policy": "poll"}}})
    x.submit()
    x.submit()
    asker = Profile("y", 1, 1.0, slots_fixed=True)
    busy = LoadReport(load_tasks=1, slots=1, incarnation=1, sequence=3)
    assert x.hear("y", messages.GiveRequest(1, busy, asker, ahead=True)) == ["GiveReply to y"]
    x.submit()
    assert "Offer to y" in x.hear("y", messages.GiveRequest(2, busy, asker, ahead=True))


def test_a_node_asks_ahead_when_it_prefetches() -> None:
    x = Given(policies={"transfer": {"threshold": 1.0, "prefetch": 1}, "location": {"receiver": {"policy": "poll"}}})
    x.submit()
    x.submit()
    assert "GiveRequest to y" in x.end(x.task(1).key)
    assert x.sent(messages.GiveRequest).ahead
    assert "GiveRequest to y" not in x.submit()


def test_a_node_asks_for_as_many_tasks_as_its_slot_finishes_during_a_handoff() -> None:
    x = Given(policies={**PULLS, "transfer": {"threshold": 1.0, "prefetch": 1, "pipelined": True}})
    x.submit()
    x.submit()
    x.end(x.task(1).key)
    did = x.after(3.0).hear("y", messages.GiveReply(1, FULL, "y/1", UID))
    assert "GiveRequest to y" not in did, "the time of a handoff is not known yet"
    x.hear("y", messages.Offer("y/1", UID, 1, spec(), 60.0, load_tasks_max=ANY_LOAD))
    accept = x.sent(messages.Accept)
    x.after(1.0).hear("y", messages.Commit("y/1", UID, 1, accept.nonce, accept.ts, 60.0))
    assert "GiveRequest to y" in x.end(x.task(2).key)
    second = bytes(15) + b"2"
    did = x.hear("y", messages.GiveReply(2, FULL, "y/2", second))
    assert did.count("GiveRequest to y") == 1
    assert x.sent(messages.GiveRequest).most == 3, "a handoff took 4 s, a task 1 s: four are wanted"


def test_while_it_has_room_a_node_asks_again_by_a_timer() -> None:
    retrying = {**WITHOUT, "location": {"receiver": {"policy": "poll", "probes": 1, "retry_rate": 0.5}}}
    x = Given(policies=retrying)
    (armed,) = [step for step in x.meet("z") + x.started if step.startswith("timer retry")] or ["timer retry 1"]
    assert 0.25 <= float(armed.split()[-1]) <= 2.0
    done = x.timer("retry")
    assert [step for step in done if step.startswith("GiveRequest")]
    assert [step for step in done if step.startswith("timer retry")]
    x.submit()
    done = x.timer("retry")
    assert not [step for step in done if "retry" in step or step.startswith("GiveRequest")]


PULLS: dict[str, Any] = {
    "transfer": {"threshold": 1.0, "prefetch": 1},
    "location": {"receiver": {"policy": "poll", "probes": 1}},
}


def test_a_task_given_on_request_is_taken_though_its_offer_is_faster_than_the_promise() -> None:
    """The promise may go over the broker while the offer goes straight."""
    x = Given(policies=PULLS)
    x.submit()
    x.submit()
    assert "GiveRequest to y" in x.end(x.task(1).key)
    given = messages.Offer("y/1", UID, 1, spec(), 60.0, load_tasks_max=ANY_LOAD)
    assert "Accept to y" in x.hear("y", given)
    assert x.node.ledger.load_tasks == 2
    x.hear("y", messages.GiveReply(1, FULL, "y/1", UID))
    assert x.node.ledger.load_tasks == 2


def test_a_promise_that_comes_after_its_task_is_over_counts_for_nothing() -> None:
    x = Given(policies=PULLS)
    x.submit()
    x.end(x.task(1).key)
    x.hear("y", messages.Offer("y/1", UID, 1, spec(), 60.0, load_tasks_max=ANY_LOAD))
    accept = x.sent(messages.Accept)
    x.hear("y", messages.Commit("y/1", UID, 1, accept.nonce, accept.ts, 60.0))
    x.end(execution_key(UID, 1))
    x.hear("y", messages.ResultAck("y/1", UID, 1))
    x.hear("y", messages.GiveReply(1, FULL, "y/1", UID))
    assert x.node.ledger.load_tasks == 0


def test_no_more_is_expected_than_was_asked_for() -> None:
    x = Given(policies={**PULLS, "transfer": {"threshold": 1.0, "prefetch": 1}})
    x.submit()
    assert "GiveRequest to y" in x.end(x.task().key)
    search = x.sent(messages.GiveRequest).search
    uids = [bytes(15) + bytes((number,)) for number in range(1, 65)]
    x.hear("y", messages.GiveReply(search, FULL, "y/1", uids[0], tuple(uids[1:])))
    assert list(x.node.ledger.inbound) == uids[:1]
