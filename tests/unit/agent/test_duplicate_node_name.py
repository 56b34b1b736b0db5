"""Agents with this node's name: what is reported of them has a bound."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from peerload.agent.peers.duplicate_node_name import COPIES_TOLD_MAX, heard_of_copy
from peerload.model.messages import Identity


def test_copies_that_a_member_makes_up_are_reported_and_dialled_so_often_at_most() -> None:
    events: list[str] = []
    dialled: list[str] = []
    parts: Any = SimpleNamespace(
        config=SimpleNamespace(state="/state"),
        notices=["something else"],
        journal=SimpleNamespace(happened=lambda _what, state, **_more: events.append(state)),
        links=SimpleNamespace(meet_copy=dialled.append),
    )
    for number in range(10_000):
        for _ in range(2):  # each is said once
            heard_of_copy(parts, Identity("n1", f"boot {number}", "machine", "store", 1, f"192.0.2.1:{number}"))
    assert dialled == [f"192.0.2.1:{number}" for number in range(COPIES_TOLD_MAX)]
    assert events == ["copied"] * COPIES_TOLD_MAX
    assert len(parts.notices) == 1 + COPIES_TOLD_MAX
