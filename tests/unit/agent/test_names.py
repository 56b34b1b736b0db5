"""Whose name somebody new may have: whoever has a member's name has its tasks, so one that is only away keeps its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from peerload.agent.joining import Joining
from peerload.core.membership import PeerState


def joining(state: PeerState | None, known: tuple[str, ...] = (), revoked_at: float = 0.0) -> Joining:
    """Of a node that believes this of ws2, and remembers these members of its last start."""
    contacts = SimpleNamespace(known=dict.fromkeys(known))
    membership: Any = SimpleNamespace(
        get=lambda _node: None if state is None else SimpleNamespace(state=state),
        gossip=SimpleNamespace(contacts=contacts),
    )
    trust = SimpleNamespace(was_revoked=lambda _node: revoked_at > 0, revoked_at=lambda _node: revoked_at)
    made = Joining.__new__(Joining)
    made._parts = SimpleNamespace(  # type: ignore[assignment]
        config=SimpleNamespace(node="ws1"),
        node=SimpleNamespace(membership=membership),
        trust=SimpleNamespace(trust=trust),
    )
    return made


@pytest.mark.rule("J2")
@pytest.mark.parametrize(
    ("state", "known", "is_free", "says"),
    [
        (None, (), True, ""),
        (None, ("ws2",), False, "was not met lately"),  # killed, or asleep, since before this agent's start
        (PeerState.LEFT, (), False, "said good-bye"),  # it was shut down for the night
        (PeerState.DEAD, (), False, "is dead"),
    ],
)
def test_a_member_that_is_away_keeps_its_name(
    state: PeerState | None, known: tuple[str, ...], is_free: bool, says: str
) -> None:
    """Unless whoever invites says that it is for that name, or it was shut out."""
    told = joining(state, known)._objection("ws2")
    assert (told == "") == is_free
    assert says in told
    assert is_free or "peerload invite --node ws2" in told
    assert joining(state, known)._objection("ws2", is_meant=True) == ""
    assert joining(state, known, revoked_at=1.0)._objection("ws2") == ""


@pytest.mark.rule("J2")
@pytest.mark.parametrize("state", [PeerState.ALIVE, PeerState.SUSPECT])
def test_one_that_is_there_keeps_it_whatever_was_said(state: PeerState) -> None:
    for revoked_at in (0.0, 1.0):
        assert state.value in joining(state, revoked_at=revoked_at)._objection("ws2", is_meant=True)
    assert joining(None)._objection("ws1", is_meant=True)
