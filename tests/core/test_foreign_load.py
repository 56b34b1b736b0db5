"""Foreign load: what other programs keep busy occupies slots, and keeps no task of this node from starting."""

from __future__ import annotations

from typing import Any

import pytest

from peerload.core.explain import reported_room
from peerload.core.resources.admission import foreign_slots
from peerload.model import actions, events, messages
from peerload.model.config import CoreConfig
from peerload.model.resources import LoadReport, Profile, Region, ResourceRequest
from tests.core.given import RECEIVER, SENDER, Given, spec
from tests.wording import Says


def sampled(foreign: float, cpus: float = 0.0) -> events.LoadSampled:
    return events.LoadSampled(foreign, foreign, 0, cpus=cpus)


def report(given: Given) -> LoadReport:
    return given.node.sharing.shown()


@pytest.mark.parametrize(
    ("before", "cores", "cpus", "slots", "after"),
    [
        (0, 0.7, 2.0, 2, 0),
        (0, 0.75, 2.0, 2, 1),
        (1, 0.3, 2.0, 2, 1),
        (1, 0.25, 2.0, 2, 0),
        (0, 1.98, 2.0, 2, 2),
        (2, 9.0, 2.0, 2, 2),
        (0, 4.0, 8.0, 2, 1),
        (0, 2.0, 2.0, 8, 8),
        (3, 1.0, 0.0, 2, 0),
        (3, 1.0, 2.0, 0, 0),
    ],
)
def test_foreign_cores_are_rounded_to_slots_with_hysteresis(
    before: int, cores: float, cpus: float, slots: int, after: int
) -> None:
    assert foreign_slots(before, cores, cpus, slots) == after


def test_a_node_that_others_keep_busy_is_loaded_says_so_and_accepts_nothing() -> None:
    given = Given(slots=2)
    given.when(sampled(2.0))
    told = report(given)
    assert (told.load_tasks, told.slots_foreign, told.cpus_foreign, told.load) == (2, 2, 2.0, 1.0)
    assert told.region is Region.OVERLOADED
    assert not told.accepts
    given.hear("y", messages.ProbeRequest(1, messages.Need(), LoadReport()))
    assert not given.sent(messages.ProbeReply).accepts
    given.when(sampled(0.2))
    told = report(given)
    assert (told.load_tasks, told.slots_foreign, told.accepts) == (0, 0, True)


def test_the_readings_are_about_the_cores_that_they_say() -> None:
    given = Given(slots=8)
    given.when(sampled(2.0, cpus=2.0))
    assert report(given).slots_foreign == 8


def test_where_foreign_load_is_ignored_it_is_only_told() -> None:
    given = Given(slots=2, config=CoreConfig(counts_foreign=False))
    given.when(sampled(2.0))
    told = report(given)
    assert (told.load_tasks, told.slots_foreign, told.cpus_foreign, told.accepts) == (0, 0, 2.0, True)


def test_a_wide_task_of_another_home_is_not_accepted_beside_foreign_load() -> None:
    given = Given(slots=4)
    given.when(sampled(2.0))
    for cpus, accepts in ((2.0, True), (3.0, False)):
        need = messages.Need(ResourceRequest(cpus=cpus))
        given.hear("y", messages.ProbeRequest(1, need, LoadReport()))
        assert given.sent(messages.ProbeReply).accepts is accepts


def test_on_a_busy_node_alone_its_own_tasks_start_at_once() -> None:
    given = Given(slots=2, peers=(), policies=SENDER)
    given.when(sampled(2.0))
    for _ in range(2):
        given.submit()
        assert given.done(actions.SpawnTask)


def test_on_a_busy_node_a_place_is_looked_for_first_and_then_the_task_starts_here() -> None:
    given = Given(slots=1, policies=SENDER)
    given.when(sampled(1.0))
    given.submit()
    probe = given.sent(messages.ProbeRequest)
    assert not [action for action in given.last if isinstance(action, actions.SpawnTask)]
    given.hear("y", messages.ProbeReply(probe.search, accepts=False, report=LoadReport(slots=1, load_tasks=1)))
    assert given.done(actions.SpawnTask)


def test_a_node_asks_for_no_work_while_others_keep_it_busy_and_at_once_when_they_stop() -> None:
    given = Given(slots=1, policies=RECEIVER)
    given.when(sampled(1.0))
    given.submit()
    given.end(given.task().key)
    assert not [
        one for one in given.last if isinstance(one, actions.Send) and isinstance(one.message, messages.GiveRequest)
    ]
    given.when(sampled(0.0))
    assert given.sent(messages.GiveRequest)


def test_a_busy_node_gives_what_waits_there() -> None:
    given = Given(slots=2, policies=RECEIVER)
    given.when(sampled(2.0))
    for _ in range(3):
        given.submit()
    assert report(given).gives


def test_a_task_that_only_busy_nodes_can_run_waits_and_then_runs_beside_foreign_load() -> None:
    given = Given(slots=1, peers=(), policies=SENDER)
    for peer in ("y", "z"):
        given.meet(peer, slots=4, cpus=4.0)
    given.submit(spec(request=ResourceRequest(cpus=2.0)))
    full = {peer: LoadReport(load_tasks=n, slots=4, slots_foreign=3) for peer, n in (("y", 5), ("z", 3))}

    def offers() -> list[tuple[str, int]]:
        """All who are asked decline → whom it is offered to, and with how many tasks at most."""
        while asked := [
            one
            for one in given.last
            if isinstance(one, actions.Send) and isinstance(one.message, messages.ProbeRequest)
        ]:
            for one in asked:
                search = one.message.search  # type: ignore[union-attr]
                given.hear(one.dst, messages.ProbeReply(search, accepts=False, report=full[one.dst]))
        sent = [one for one in given.last if isinstance(one, actions.Send) and isinstance(one.message, messages.Offer)]
        return [(one.dst, one.message.load_tasks_max) for one in sent]  # type: ignore[union-attr]

    tried = 0
    while not (offered := offers()):
        tried += 1
        assert tried < 10
        given.after(15.0).timer("stranded", given.task().uid.hex())
    assert offered == [("z", 3)], "the one with the fewest tasks"
    assert given.task().backoff_s == given.node.state.config.stranded_backoff_s_max


def test_why_tells_how_many_slots_other_programs_take() -> None:
    profile = Profile("y", 4, 4.0, slots_fixed=True)
    told = LoadReport(load_tasks=4, slots=4, slots_foreign=3, region=Region.OVERLOADED)
    now, words = reported_room(profile, told, ResourceRequest())
    assert now is False
    assert Says.SLOTS_FOREIGN(4, 4, 3) in words


# -- the load index is what the thresholds are compared with ----------------------------------------------------------------


def indexed(index: str, location: dict[str, Any], **transfer: object) -> dict[str, Any]:
    return {"load": {"policy": index}, "transfer": transfer, "location": location}


BOTH = {**SENDER["location"], **RECEIVER["location"]}
UTILIZATION = indexed("cpu", BOTH, policy="double-threshold", low=0.5, high=0.9)


def busy(cores: float) -> events.LoadSampled:
    return events.LoadSampled(cores, 0.0, 0)


@pytest.mark.parametrize(
    ("cores", "region", "accepts"),
    [
        (0.9, Region.UNDERLOADED, True),
        (1.0, Region.NORMAL, False),
        (1.7, Region.NORMAL, False),
        (1.8, Region.OVERLOADED, False),
    ],
)
def test_a_double_threshold_on_cpu_utilization_makes_the_regions(
    cores: float, region: Region, *, accepts: bool
) -> None:
    given = Given(slots=2, policies=UTILIZATION)
    given.when(busy(cores))
    assert (report(given).region, report(given).accepts) == (region, accepts)
    given.hear("y", messages.ProbeRequest(1, messages.Need(), LoadReport()))
    assert given.sent(messages.ProbeReply).accepts is accepts


def test_foreign_programs_on_all_cores_leave_no_node_underloaded_by_cpu_utilization() -> None:
    given = Given(slots=2, policies=indexed("cpu", BOTH, policy="double-threshold"))
    given.when(sampled(1.995))
    assert report(given).region is not Region.UNDERLOADED
    assert not report(given).accepts


def test_the_index_decides_whether_an_arriving_task_looks_for_a_place() -> None:
    for cores, sends in ((0.0, False), (2.0, True)):
        given = Given(slots=2, policies=UTILIZATION)
        given.when(busy(cores))
        given.submit()
        probes = [
            one
            for one in given.last
            if isinstance(one, actions.Send) and isinstance(one.message, messages.ProbeRequest)
        ]
        assert bool(probes) is sends


def test_a_node_that_is_full_accepts_nothing_however_idle_its_cores_are() -> None:
    given = Given(slots=2, policies=indexed("cpu", BOTH, policy="single-threshold", threshold=1.0))
    for _ in range(3):
        given.submit()
    told = report(given)
    assert (told.accepts, told.gives, told.region) == (False, True, Region.OVERLOADED)


@pytest.mark.parametrize("policy", ["tasks", "demand", "memoryless", "composite"])
def test_indices_that_agree_on_equal_tasks_agree_with_every_mark(policy: str) -> None:
    """Whatever unit an index has, a threshold of 1 is one task per slot."""
    given = Given(slots=3, policies=indexed(policy, BOTH, policy="single-threshold", threshold=1.0))
    for number in range(1, 5):
        assert report(given).accepts
        assert report(given).region is Region.UNDERLOADED
        given.submit()
        if number == 3:
            break
    told = report(given)
    assert (told.load_tasks, told.accepts, told.region) == (3, False, Region.OVERLOADED)
    assert not told.gives
    given.submit()
    assert report(given).gives
