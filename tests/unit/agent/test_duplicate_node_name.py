"""Agents with this node's name: what is reported of them has a bound."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from peerload.agent.peers.local_node import COPIES_REPORTED_MAX, DuplicateNames
from peerload.model.messages import Identity


def test_copies_that_a_member_makes_up_are_reported_and_dialled_so_often_at_most() -> None:
    happened: list[str] = []
    dialled: list[str] = []
    info: Any = SimpleNamespace(config=SimpleNamespace(state="/state"), notices=["something else"])
    events: Any = SimpleNamespace(record=lambda _what, state, **_more: happened.append(state))
    duplicates = DuplicateNames(info, cast("Any", None), cast("Any", None), events)
    for number in range(10_000):
        for _ in range(2):  # each is said once
            other = Identity("n1", f"boot {number}", "machine", "store", 1, f"192.0.2.1:{number}")
            if duplicates.copy_reported(other):
                dialled.append(other.address)
    assert dialled == [f"192.0.2.1:{number}" for number in range(COPIES_REPORTED_MAX)]
    assert happened == ["copied"] * COPIES_REPORTED_MAX
    assert len(info.notices) == 1 + COPIES_REPORTED_MAX
