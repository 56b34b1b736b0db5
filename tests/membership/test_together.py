"""Nodes that watch one another, as a whole: what is split comes together, what is gone is noticed, idling is cheap."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import pytest

from peerload.model.gossip import LAN
from tests.membership import measures
from tests.membership.arena import Arena, Faults
from tests.membership.ours import Peerload
from tests.support import in_short

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.membership.arena import Host, Say

NODES = 8
SPLIT_S = 400.0
"""A node that is alone doubts itself, and takes its time to call all others dead."""
PRESET = msgspec.structs.replace(LAN, sync_s=20.0)


class Torn(Arena):
    """From ``from_s`` until ``until_s`` nothing passes of which ``cut(src, dst, connected)`` is true."""

    def __init__(self, cut: Callable[[str, str, bool], bool], seed: int) -> None:
        super().__init__(NODES, lambda name, run, rng: Peerload(name, run, rng, PRESET), Faults(), seed)
        self._cut = cut
        self.from_s = self.until_s = float("inf")
        names = list(self.hosts)
        for number, name in enumerate(names):
            self.at(0.1 * number, self.start, name, names[:1] if number else ())
        self.run(5.0)
        assert self.agreed()

    def tear(self, for_s: float) -> None:
        """Begin now, and let that time pass."""
        self.from_s, self.until_s = self.now_s, self.now_s + for_s
        self.run(self.until_s)

    def _send(self, host: Host, said: Say) -> None:
        if not (self.from_s <= self.now_s < self.until_s and self._cut(host.name, said.dst, said.connected)):
            super()._send(host, said)


@pytest.mark.parametrize("seed_and_lost", in_short([(1, 1), (1, NODES // 2), (2, 1), (2, NODES // 2)], 3))
def test_what_was_split_finds_itself_again(seed_and_lost: tuple[int, int]) -> None:
    seed, lost = seed_and_lost
    away = {f"n{number}" for number in range(lost)}
    arena = Torn(lambda src, dst, _: (src in away) != (dst in away), seed)
    arena.tear(SPLIT_S)
    for host in arena.up():
        others = {name for name, state in host.beliefs.items() if state == "dead"}
        assert others == (set(arena.hosts) - away if host.name in away else away)
    arena.run(arena.until_s + 120.0, arena.agreed)
    assert arena.agreed(), f"not together {arena.now_s - arena.until_s:.0f} s after the split"


def test_where_no_datagram_passes_the_links_keep_everybody_alive() -> None:
    arena = Torn(lambda _src, _dst, connected: not connected, 3)
    arena.tear(120.0)
    assert arena.agreed()


def test_a_node_that_hears_nothing_does_not_bury_the_others_in_their_own_eyes() -> None:
    deaf = "n3"
    arena = Torn(lambda _src, dst, _: dst == deaf, 4)
    arena.tear(60.0)
    for host in arena.up():
        if host.name != deaf:
            assert host.beliefs[deaf] == "dead"
            assert all(state == "alive" for name, state in host.beliefs.items() if name != deaf)


@pytest.mark.parametrize("seed", in_short([1, 2, 3], 1))
def test_a_node_of_which_alone_no_datagram_passes_hears_news_as_soon_as_the_others(seed: int) -> None:
    arena = Torn(lambda src, _dst, connected: src == "n3" and not connected, seed)
    arena.tear(60.0)
    arena.until_s = float("inf")
    nodes = {name: host.detector for name, host in arena.hosts.items() if isinstance(host.detector, Peerload)}
    for name in ("n0", "n4", "n5", "n7"):
        arena.carry_out(arena.hosts[name], nodes[name].drain(arena.now_s))
        arena.run(arena.now_s + 4.0)
        assert nodes["n3"].knows_drained(name)


def test_a_crash_is_known_to_all_and_the_next_start_to_all_again() -> None:
    told = measures.crashes("peerload", NODES, 5, 5)
    assert told.wrong == 0
    assert max(told.detection_s) <= 8.0


def test_idling_costs_two_datagrams_a_second_however_many_there_are() -> None:
    for nodes in (4, 16):
        cost = measures.idle("peerload", nodes, 60.0, 6)
        assert cost.datagrams <= 2.2
        assert cost.bytes + cost.stream_bytes <= 640.0  # 22 of them tell foreign load and memory


def test_many_restarted_at_once_agree_soon() -> None:
    assert measures.restarted_at_once("peerload", 16, 7) <= 30.0


@pytest.mark.parametrize("faults", in_short([measures.MILD, measures.HARSH], 2))
def test_nobody_healthy_is_called_dead(faults: Faults) -> None:
    told = measures.falsehoods("peerload", 10, 0.1, 8, faults)
    assert told.deaths == 0


@pytest.mark.parametrize("families", [["46", "6", "6", "6", "4"], ["46", *["6"] * 6, *["4"] * 3]], ids=len)
def test_nodes_that_cannot_reach_one_another_hear_of_one_another_through_others(families: list[str]) -> None:
    told = measures.partly_connected(families, 4, 1)
    assert max(told.drained_s) <= 10.0
    assert told.suspected <= 600


def test_equal_seeds_play_equal_games() -> None:
    def played() -> tuple[float, ...]:
        return measures.crashes("peerload", 6, 3, 9, Faults(loss=0.05)).detection_s

    assert played() == played()
    random.seed(1)  # nobody draws from the process's own chance
    assert played() == played()
