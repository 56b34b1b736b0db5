"""What each member has: gossip tells the version of its profile, the profile itself is fetched over the peer link.

Whoever told of the member is asked first, for all it told of at once; then the member itself, for ever, less and less
often.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.model.messages import PROFILES_MAX, ProfileRequest

if TYPE_CHECKING:
    from peerload.core.gossip_state import GossipState

GATHER_S = 0.05
"""Profiles wanted within this are asked for together."""
REPEAT_S = 1.0
REPEAT_S_MAX = 60.0
"""A profile that was not told is asked for again after this, doubling up to the next."""
ASKED_MAX = 16
"""Nodes asked at a time."""


class _Wanted:
    """whom: to ask next; at_s: when; tries: so far."""

    __slots__ = ("at_s", "tries", "whom")

    def __init__(self, whom: str, at_s: float) -> None:
        self.whom = whom
        self.at_s = at_s
        self.tries = 0


class Profiles:
    """Those that are wanted: at most one per member."""

    def __init__(self, shared: GossipState) -> None:
        self._shared = shared
        self._wanted: dict[str, _Wanted] = {}

    def want(self, node: str, teller: str) -> None:
        """The profile of this node is not known, or an old one; ``teller`` may know."""
        shared = self._shared
        if node not in self._wanted:
            self._wanted[node] = _Wanted(teller if teller in shared.members else node, shared.now_s)
            self._arm(GATHER_S)

    def have(self, node: str) -> None:
        """It is known, or there is nobody left to ask."""
        self._wanted.pop(node, None)

    def _arm(self, seconds: float) -> None:
        if not self._shared.is_armed("profiles"):
            self._shared.arm("profiles", seconds)

    def ask(self) -> None:
        """Ask for what is due."""
        shared = self._shared
        due: dict[str, list[str]] = {}
        for node, wanted in self._wanted.items():
            if wanted.at_s > shared.now_s or (wanted.whom not in due and len(due) >= ASKED_MAX):
                continue
            nodes = due.setdefault(wanted.whom, [])
            if len(nodes) >= PROFILES_MAX:
                continue
            nodes.append(node)
            wanted.at_s = shared.now_s + min(REPEAT_S * 2.0**wanted.tries, REPEAT_S_MAX)
            wanted.tries = min(wanted.tries + 1, 10)
            wanted.whom = node
        for whom, nodes in due.items():
            shared.core.send(whom, ProfileRequest(tuple(nodes)))
        if self._wanted:
            next_s = min(wanted.at_s for wanted in self._wanted.values()) - shared.now_s
            self._arm(max(next_s, GATHER_S))
