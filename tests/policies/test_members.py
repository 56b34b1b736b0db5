"""What the members of each kind propose in the cases that tell them apart."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from statistics import fmean
from typing import Any

import msgspec
import pytest

from peerload.model.errors import ConfigError
from peerload.model.resources import LoadReport, Placement, ResourceRequest, Thresholds
from peerload.policy.api import ANY_LOAD, Keep, KnownReport, Probe, Reply, Reported, Said, TaskView, Transfer
from peerload.policy.registry import build_preset, load_preset, policy_class
from tests.chaos.engine.engine import Simulation
from tests.workloads import burst

TASK = TaskView("x/1", ResourceRequest(), Placement(), 0, 0.0)


class View:
    def __init__(
        self,
        load_tasks: int = 5,
        peers: Sequence[str] = ("a", "b", "c", "d"),
        slots: int = 1,
        idle: Sequence[str] = (),
        told: Mapping[str, KnownReport] | None = None,
    ) -> None:
        self.load_tasks, self.peers, self.slots = load_tasks, peers, slots
        self.load, self.load_unit = load_tasks / slots, 1.0
        self.idle_list, self.busy_list = idle, ()
        self.reports_guide_probing = False
        self._told = told or {}

    @property
    def load_mean(self) -> float:
        return fmean([self.load, *(known.report.load for known in self._told.values())])

    def report(self, node: str) -> KnownReport | None:
        return self._told.get(node)

    def reports(self, age_s_max: float = inf, wanted: Said | None = None) -> Iterator[tuple[str, LoadReport]]:
        told = ((peer, self._told[peer]) for peer in self.peers if peer in self._told)
        young = ((peer, known.report) for peer, known in told if known.age_s <= age_s_max)
        return ((peer, report) for peer, report in young if wanted is None or getattr(report, wanted))

    def reporting(self, wanted: Reported) -> list[str]:
        known = {peer: self.report(peer) for peer in self.peers}
        if wanted == "nothing":
            return [peer for peer, told in known.items() if told is None]
        return [peer for peer, told in known.items() if told is not None and getattr(told.report, wanted)]


def made(kind: str, name: str, **parameters: Any) -> Any:
    return msgspec.convert(parameters, policy_class(kind, name))


def locate(name: str, view: View, replies: Sequence[Reply], **parameters: Any) -> Any:
    return made("location.sender", name, **parameters).locate(view, TASK, replies, random.Random(1))


def no(node: str, load_tasks: int, slots: int = 1, *, remembered: bool = False) -> Reply:
    return Reply(node, accepts=False, report=LoadReport(load_tasks=load_tasks, slots=slots), remembered=remembered)


def yes(node: str) -> Reply:
    return Reply(node, accepts=True, report=LoadReport(slots=1, accepts=True))


DECLINED = Reply("a", accepts=False)


def test_the_cheapest_bid_is_as_the_bid_specification_says() -> None:
    replies = [
        Reply("a", accepts=True, report=LoadReport(load=0.5), price_s=9.0),
        Reply("b", accepts=True, report=LoadReport(load=0.2), price_s=8.0),
        Reply("c", accepts=True, report=LoadReport(load=0.9), price_s=2.0),
        Reply("d", accepts=False, price_s=1.0),
    ]
    for price, best in (("completion", "c"), ("load", "b"), ("constant", "a")):
        assert locate("bidding", View(), replies, price=price) == Transfer(best)
        assert made("location.sender", "bidding", price=price).wants_bids is (price == "completion")


@pytest.mark.parametrize("name", ["improve", "idle-first"])
def test_the_least_loaded_gets_it_if_that_is_an_improvement(name: str) -> None:
    assert locate(name, View(5), [no("a", 4), no("b", 3)]) == Transfer("b", 3)
    assert isinstance(locate(name, View(5), [no("a", 4), no("b", 4)]), Keep)
    assert locate(name, View(5), [no("a", 4), no("b", 4)], delta=1) == Transfer("a", 4)
    assert isinstance(locate(name, View(5), [no("a", 4)]), Probe)
    assert isinstance(locate(name, View(5, peers=()), []), Keep)


@pytest.mark.parametrize("name", ["improve", "idle-first"])
def test_after_a_decline_or_silence_the_next_best(name: str) -> None:
    declined = [no("a", 1), no("b", 2), DECLINED]
    assert locate(name, View(5), declined) == Transfer("b", 3)
    assert isinstance(locate(name, View(5), [DECLINED, Reply("b", accepts=False)]), Keep)


@pytest.mark.parametrize("name", ["improve", "idle-first"])
def test_between_nodes_of_different_sizes_tasks_count_in_slots(name: str) -> None:
    assert locate(name, View(4, slots=2), [no("a", 14, 8), no("b", 14, 8)]) == Transfer("a", 14)
    assert isinstance(locate(name, View(4, slots=2), [no("a", 15, 8), no("b", 15, 8)]), Keep)


def test_idle_first_takes_the_first_and_improve_spends_every_probe() -> None:
    assert locate("idle-first", View(), [yes("a")]) == Transfer("a")
    assert isinstance(locate("improve", View(), [yes("a")]), Probe)


@pytest.mark.parametrize("name", ["threshold", "shortest", "improve", "idle-first"])
def test_whom_memory_names_is_asked_first_and_costs_no_probe(name: str) -> None:
    view = View(idle=("gone", "b", "c"))
    assert locate(name, view, []) == Probe(("c",))
    assert locate(name, view, [no("c", 5, remembered=True)]) == Probe(("b",))
    both = [no("c", 5, remembered=True), no("b", 5, remembered=True)]
    assert locate(name, view, both, probes=1) in (Probe(("a",)), Probe(("d",)))
    assert isinstance(locate(name, view, [*both, no("a", 5)], probes=1), Keep)


def test_random_asks_nobody_and_is_never_declined_for_load() -> None:
    step = locate("random", View(), [])
    assert step.to in ("a", "b", "c", "d")
    assert step.load_tasks_max == ANY_LOAD
    assert locate("random", View(peers=("a", "b")), [DECLINED]) == Transfer("b", ANY_LOAD)
    assert isinstance(locate("random", View(peers=("a",)), [DECLINED]), Keep)


def test_least_known_believes_fresh_reports_of_who_accepts() -> None:
    def told(load: float, age_s: float, *, accepts: bool = True) -> KnownReport:
        return KnownReport(LoadReport(load=load, accepts=accepts), age_s)

    view = View(told={"a": told(0.5, 1), "b": told(0.2, 1), "c": told(0.0, 11), "d": told(0.0, 1, accepts=False)})
    assert locate("least-known", view, []) == Transfer("b")
    assert locate("least-known", view, [Reply("b", accepts=False)]) == Transfer("a")
    assert isinstance(locate("least-known", View(), []), Keep)


def test_the_priority_policies() -> None:
    expected = {"selfish": ("local", "local"), "altruistic": ("remote", "remote"), "intermediate": ("local", "remote")}
    for name, (equal, more_remote) in expected.items():
        policy = made("priority", name)
        assert (policy.prefer(2, 2), policy.prefer(1, 2)) == (equal, more_remote)


def test_all_or_nothing() -> None:
    assert made("transfer", "all-or-nothing").thresholds(View()) == Thresholds(1, 1, 1, 1)
    assert made("transfer", "all-or-nothing", processing_margin=True).thresholds(View()) == Thresholds(2, 2, 2, 2)
    assert made("transfer", "all-or-nothing", give_above=3).thresholds(View()) == Thresholds(1, 1, 1, 3)


def test_dynamic_threshold_follows_the_average_of_what_is_known() -> None:
    told = {node: KnownReport(LoadReport(load=n), 1.0) for node, n in (("a", 1.0), ("b", 3.0))}
    policy = made("transfer", "dynamic-threshold", factor=1.5)
    assert policy.thresholds(View(5, told=told)) == Thresholds(4.5, 4.5, 4.5, 4.5)
    assert policy.thresholds(View(0)) == Thresholds(1, 1, 1, 1)
    in_seconds = View(5, told=told)
    in_seconds.load_unit = 0.5
    assert policy.thresholds(in_seconds) == Thresholds(9, 9, 9, 9), (
        "the thresholds are in tasks per slot whatever the index is in"
    )


def test_prefetch_is_beside_the_marks() -> None:
    policy = made("transfer", "single-threshold", threshold=1.0, prefetch=1)
    assert policy.thresholds(View()) == Thresholds(1, 1, 1, 1, prefetch=1)


def test_limits() -> None:
    assert made("migration", "uncontrolled").migrations_max is None


def test_memory_is_true_or_false() -> None:
    assert build_preset("t", {"location": {"memory": True}}).memory is True
    assert load_preset("symmetric").memory is False
    with pytest.raises(ConfigError, match="memory"):
        build_preset("t", {"location": {"memory": "on"}})


def test_the_default_preset_is_there() -> None:
    assert load_preset("adaptive").name == "adaptive"


def test_random_passes_on_until_the_limit() -> None:
    table: dict[str, Any] = {"transfer": {"threshold": 1.0}, "location": {"sender": {"policy": "random"}}}
    table["migration"] = {"policy": "controlled", "limit": 3}
    report = Simulation(build_preset("t", table), nodes=4, slots=1, seed=1).run(burst("n1", 40, 1.0))
    assert report.ended == 40
    assert report.counts["tasks_passed_on_total"] > 0
    assert report.transfers <= 3 * 40
    table["location"] = {"sender": {"policy": "random", "passes_on": False}}
    report = Simulation(build_preset("t", table), nodes=4, slots=1, seed=1).run(burst("n1", 40, 1.0))
    assert "tasks_passed_on_total" not in report.counts
    assert report.ended == 40
