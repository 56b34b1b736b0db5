"""Stranded tasks: timers for a bounded number of them, in turns."""

from __future__ import annotations

import pytest

from peerload.core.sharing import sender
from peerload.model import actions, events, timers
from tests.core.given import SENDER, Given, spec


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
