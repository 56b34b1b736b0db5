"""Whose name somebody new may have: whoever has a member's name has its tasks, so one that is only away keeps its own."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peerload.agent import joining
from peerload.agent.joining import Enrollment
from peerload.core.membership.peers import PeerState
from peerload.model.events import Instant
from tests.each import each


def enrollment(
    state: PeerState | None, known: tuple[str, ...] = (), revoked_at: float = 0.0, since_s: float = 0.0
) -> Enrollment:
    """Of a node that believes this of ws2, since then (boot time), and remembers these members of its last start."""
    contacts = SimpleNamespace(known=dict.fromkeys(known))
    membership: Any = SimpleNamespace(
        get=lambda _node: None if state is None else SimpleNamespace(state=state, since_s=since_s),
        gossip=SimpleNamespace(anti_entropy=contacts),
    )
    made = Enrollment.__new__(Enrollment)
    made._info = cast("Any", SimpleNamespace(config=SimpleNamespace(node="ws1")))
    made._node = cast("Any", SimpleNamespace(membership=membership))
    made._trust = cast(
        "Any", SimpleNamespace(was_revoked=lambda _node: revoked_at > 0, revoked_at=lambda _node: revoked_at)
    )
    return made


@pytest.fixture(autouse=True)
def boot_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "now", lambda: Instant(1000.0, time.time()))


@pytest.mark.rule("J2")
@each(
    ("state", "known", "is_free"),
    [
        (None, (), True),
        (None, ("ws2",), False),  # killed, or asleep, since before this agent's start
        (PeerState.LEFT, (), False),  # it was shut down for the night
        (PeerState.DEAD, (), False),
    ],
)
def test_a_member_that_is_away_keeps_its_name(state: PeerState | None, known: tuple[str, ...], is_free: bool) -> None:
    """Unless whoever invites says that it is for that name, or it was shut out."""
    told = enrollment(state, known).name_objection("ws2")
    assert (told == "") == is_free
    assert is_free or "peerload invite --node ws2" in told
    assert enrollment(state, known).name_objection("ws2", is_meant=True) == ""
    assert enrollment(state, known, revoked_at=1.0).name_objection("ws2") == ""


@pytest.mark.rule("J2")
@each("state", [PeerState.ALIVE, PeerState.SUSPECT])
def test_one_that_is_there_keeps_it_whatever_was_said(state: PeerState) -> None:
    for revoked_at in (0.0, 1.0):
        assert state.value in enrollment(state, revoked_at=revoked_at).name_objection("ws2", is_meant=True)
    assert enrollment(None).name_objection("ws1", is_meant=True)


@pytest.mark.rule("J2")
@each("state", [PeerState.LEFT, PeerState.DEAD])
def test_a_name_that_was_just_given_away_is_free_when_that_machine_has_come_and_gone(state: PeerState) -> None:
    let_in_at = time.time() - 30.0
    gone = enrollment(state, since_s=990.0)
    assert gone.name_objection("ws2", let_in_at, is_meant=True) == ""
    on_its_way = enrollment(state, since_s=900.0)  # it is the one of before that has left
    assert on_its_way.name_objection("ws2", let_in_at, is_meant=True)
    assert enrollment(None).name_objection("ws2", let_in_at, is_meant=True)
