"""Stranded tasks: timers for a bounded number of them, in turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from peerload.core.sharing import sender
from peerload.model import actions, events, messages, timers
from peerload.model.resources import LoadReport, Profile
from tests.core.given import SENDER, Given, identity, spec

if TYPE_CHECKING:
    from peerload.core.work import HomeTask


def test_only_some_have_a_timer_and_each_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "STRANDED_TIMED_MAX", 2)
    given = Given(policies=SENDER, peers=(), slots=0)
    given.meet("y", slots=4)
    timed: set[bytes] = set()

    def note() -> None:
        for one in given.last:
            if isinstance(one, actions.SetTimer) and isinstance(one.timer, timers.Stranded):
                timed.add(one.timer.uid)
            elif isinstance(one, actions.ClearTimer) and isinstance(one.timer, timers.Stranded):
                timed.discard(one.timer.uid)
        assert len(timed) <= 2

    for _ in range(5):
        given.submit(spec())
        note()
    stranded = given.node.home.stranded
    assert len(stranded) == 5
    assert len(timed) == 2
    asked: list[bytes] = []
    for _ in range(60):
        uid = min(timed, key=asked.count)
        timed.discard(uid)  # its timer is over
        asked.append(uid)
        given.after(15.0).timer("stranded", uid.hex())
        note()
    assert set(asked) == set(stranded)
    uid = next(iter(timed))
    given.when(events.CancelRequested(99, (stranded[uid].record.task,)))
    note()
    assert uid not in timed
    assert len(timed) == 2


FULL = LoadReport(load_tasks=4, slots=4)


def asked(given: Given) -> list[tuple[str, int]]:
    """The nodes that were asked by the last event, and for which search."""
    sent = [action for action in given.last if isinstance(action, actions.Send)]
    return [(one.dst, one.message.search) for one in sent if isinstance(one.message, messages.ProbeRequest)]


def refuse(given: Given, probes: list[tuple[str, int]]) -> int:
    """All that are asked have no room, those too that are asked thereupon → how many."""
    for node, search in probes:  # grows while it is read
        given.hear(node, messages.ProbeReply(search, accepts=False, report=FULL))
        probes += asked(given)
    return len(probes)


def crowded() -> tuple[Given, list[HomeTask]]:
    """A home without slots, the two other nodes are full, 40 tasks."""
    given = Given(policies=SENDER, peers=(), slots=0)
    for peer in ("y", "z"):
        given.meet(peer, slots=4)
    probes = []
    for _ in range(40):
        given.submit(spec())
        probes += asked(given)
    assert refuse(given, probes) <= 2 * given.node.state.config.searches_in_flight_max
    return given, [given.task(number) for number in range(1, 41)]


def test_full_nodes_are_asked_again_after_growing_pauses_and_not_for_each_task() -> None:
    given, tasks = crowded()
    config, count = given.node.state.config, 0
    for task in tasks * 4:
        count += refuse(given, asked(given.after(0.1)) if given.timer("stranded", task.uid.hex()) else [])
    seconds = 0.1 * len(tasks) * 4
    assert 2 <= count <= 2 * (seconds / config.full_s_max + 8)  # 8 pauses until the longest


def test_a_full_node_is_asked_as_soon_as_it_says_that_it_has_room_or_has_ended_a_task_of_this_home() -> None:
    given, tasks = crowded()
    given.timer("stranded", tasks[0].uid.hex())
    assert not asked(given)
    room = LoadReport(slots=4, accepts=True, incarnation=1, sequence=9)
    y = messages.State(identity("y"), Profile("y", 4, 4.0), room)
    given.hear("y", y)
    assert {node for node, _ in asked(given)} >= {"y"}
    refuse(given, asked(given))
    given.node.sharing.sender.room_freed("z")
    assert sum(task.search is not None for task in tasks) == 1
