"""Members that know one another from the start: what is shared, and what a node keeps of its own."""

from __future__ import annotations

import random
from statistics import fmean
from typing import Any

import msgspec
import pytest

from peerload.core.membership.membership import Directory, Membership, NamesWithout, ReceivedReport
from peerload.core.membership.peers import PeerState
from peerload.core.state import CoreState
from peerload.model.config import CoreConfig
from peerload.model.events import Instant
from peerload.model.messages import Need
from peerload.model.resources import LoadReport, Placement, Profile, ResourceRequest
from peerload.policy.registry import build_preset
from tests.core.given import identity, spec

ALL = ("a", "b", "c", "d")


@pytest.mark.parametrize("without", ["", "a", "b", "d", "bb", "z"])
def test_names_without_one_are_like_a_tuple_without_it(without: str) -> None:
    names, plain = NamesWithout(ALL, without), tuple(name for name in ALL if name != without)
    assert tuple(names) == plain
    assert len(names) == len(plain)
    assert [names[place] for place in range(len(plain))] == list(plain)
    assert [names[-place] for place in range(1, len(plain) + 1)] == list(reversed(plain))
    assert names[1:] == plain[1:]
    assert [name in names for name in (*ALL, "", "bb", "z")] == [name in plain for name in (*ALL, "", "bb", "z")]
    for beyond in (len(plain), -len(plain) - 1):
        with pytest.raises(IndexError):
            names[beyond]


def members(**profiles: dict[str, object]) -> Directory:
    """Nodes of one slot, unless said otherwise."""
    facts = {name: {"slots": 1, "cpus": 1.0, **changes} for name, changes in profiles.items()}
    return Directory(
        (identity(name), msgspec.convert({"node": name, **changes}, Profile)) for name, changes in facts.items()
    )


def membership(node: str, directory: Directory, **config: Any) -> Membership:
    preset = build_preset("given", {})
    state = CoreState(CoreConfig(**config), preset, identity(node), Profile(node, 1, 1.0), random.Random(1))
    nobody: Any = None  # what it is told here is for nobody else
    met = Membership(state, nobody)
    met.meet_all(directory)
    return met


def test_everybody_but_oneself_is_met_and_nothing_is_kept() -> None:
    directory = members(a={}, b={"cpus": 4.0}, c={"drained": True})
    a, b = membership("a", directory), membership("b", directory)
    assert list(a.eligible(Need(), "a")) == ["b"]
    assert list(b.eligible(Need(), "b")) == ["a"]
    assert list(a.eligible(Need(ResourceRequest(cpus=2.0)), "a")) == ["b"]
    assert list(b.eligible(Need(ResourceRequest(cpus=2.0)), "b")) == []
    assert list(a.eligible(Need(placement=Placement(local=True)), "a")) == []
    assert [peer.identity.node for peer in a] == ["b", "c"]
    assert a.has_any()
    assert a.is_usable("b")
    assert not a.is_usable("a")
    assert not a.is_usable("c")
    assert a.get("a") is None
    a.heard_from("b")
    assert not a._peers
    assert a.could_ever(spec(request=ResourceRequest(cpus=4.0)), "a")
    assert not membership("a", members(a={})).has_any()


def test_the_mean_load_is_that_of_all_reports_that_are_believed() -> None:
    names, chance = [f"n{number}" for number in range(9)], random.Random(1)
    directory = members(**{name: {} for name in names})
    known = membership("n0", directory, report_age_s_max=5.0)
    for step in range(1500):
        known._state.now = Instant(step * 0.1, 0.0)
        told, node = LoadReport(load=chance.random(), sequence=step), chance.choice(names[1:])
        match chance.randrange(20):
            case 0:
                known._reports.drop(node)
            case 1:  # a peer is drained, or is no more
                known._eligible.clear()
            case number if number < 10:
                known.report_received(node, told, age_s=chance.random())
            case _:
                directory.announced.put(node, ReceivedReport(told, step * 0.1))
        if step > 1400 or chance.random() < 0.3:
            peers = known.eligible(Need(), "")
            loads = [report.load for _, report in known.reports(peers)]
            assert known.load_mean(0.1, peers) == fmean([0.1, *loads])
    assert known.load_mean(0.1, ()) == 0.1


def test_what_is_heard_of_one_is_kept_by_the_one_that_heard_it() -> None:
    directory = members(a={}, b={}, c={})
    a, b = membership("a", directory), membership("b", directory)
    a.left("c")
    known = a.get("c")
    assert known is not None
    assert known.state is PeerState.LEFT
    assert list(a.eligible(Need(), "a")) == ["b"]
    assert list(b.eligible(Need(), "b")) == ["a", "c"]
    assert a.meet(identity("c", 2), Profile("c", 1, 1.0), LoadReport())
    assert list(a.eligible(Need(), "a")) == ["b", "c"]
    assert a.meet(identity("d"), Profile("d", 1, 1.0), None)
    assert list(a.eligible(Need(), "a")) == ["b", "c", "d"]
    assert [peer.identity.node for peer in b] == ["a", "c"]


def test_the_newest_reports_are_kept() -> None:
    a = membership("a", members(a={}, b={}, c={}, d={}), reports_kept_max=2)
    for number, name in enumerate(("b", "c", "b", "d"), 1):
        assert a.report_received(name, LoadReport(load_tasks=number, sequence=number))
    assert not a.report_received("b", LoadReport(sequence=2))  # an older one
    assert not a.report_received("stranger", LoadReport(sequence=9))
    assert not a.report_received("a", LoadReport(sequence=9))
    kept = [known.report.load_tasks for name in "abcd" if (known := a.report(name)) is not None]
    assert kept == [3, 4]
