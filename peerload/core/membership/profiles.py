"""What each member has: gossip tells the version of its profile, the profile itself is fetched over the peer link.

Whoever told of the member is asked first, for all it told of at once; then the member itself, for ever, less and less
often.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.model import metrics
from peerload.model.messages import PROFILES_MAX, KnownProfile, ProfileRequest, ProfileTold
from peerload.model.timers import GossipTimerKind as Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from peerload.core.membership.gossip_state import GossipState
    from peerload.core.membership.membership import PeerInfo
    from peerload.model.resources import Profile

GATHER_S = 0.05
"""Profiles wanted within this are asked for together."""
REPEAT_S = 1.0
REPEAT_S_MAX = 60.0
"""A profile that was not told is asked for again after this, doubling up to the next."""
ASKED_MAX = 16
"""Nodes asked at a time."""


class _Wanted:
    """whom: to ask next; at_s: when; tries: so far; asked: who was."""

    __slots__ = ("asked", "at_s", "tries", "whom")

    def __init__(self, whom: str, at_s: float) -> None:
        self.whom = whom
        self.at_s = at_s
        self.tries = 0
        self.asked: frozenset[str] = frozenset()


class Profiles:
    """Those that are wanted: at most one per member. ``changed`` is called when one has come that is new."""

    def __init__(self, shared: GossipState, peers: Mapping[str, PeerInfo], changed: Callable[[], object]) -> None:
        self._shared = shared
        self._peers = peers
        self._changed = changed
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
        if not self._shared.is_armed(Kind.PROFILES):
            self._shared.arm(Kind.PROFILES, seconds)

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
            wanted.asked |= {wanted.whom}
            wanted.whom = node
        for whom, nodes in due.items():
            shared.core.send(whom, ProfileRequest(tuple(nodes)))
        if self._wanted:
            next_s = min(wanted.at_s for wanted in self._wanted.values()) - shared.now_s
            self._arm(max(next_s, GATHER_S))

    def requested(self, src: str, request: ProfileRequest) -> None:
        """Tell those that are known, this node's own, too."""
        told = []
        for node in request.nodes:
            peer = self._peers.get(node)
            if node == self._shared.core.node:
                told.append(KnownProfile(self._shared.core.identity.boot, self._shared.core.profile))
            elif peer is not None and peer.knows_profile:
                told.append(KnownProfile(peer.identity.boot, peer.profile))
        if told:
            self._shared.core.send(src, ProfileTold(tuple(told)))

    def told(self, src: str, told: ProfileTold) -> bool:
        """What was asked for, of whom it was asked; a node's word about itself always, and before any other. True if a
        peer became known by it, or has changed."""
        found = False
        for known in told.profiles:
            node = known.profile.node
            peer, wanted = self._peers.get(node), self._wanted.get(node)
            if node != src and (wanted is None or src not in wanted.asked):
                self._shared.core.count(metrics.PROFILES_UNASKED)
            elif peer is not None and peer.identity.boot == known.boot:
                found = self.has(peer, known.profile, is_new=False, by_itself=node == src) or found
        return found

    def has(self, peer: PeerInfo, profile: Profile, *, is_new: bool, by_itself: bool = False) -> bool:
        """The profile of this run, unless a newer one is known and this is not, by_itself, the node's answer. True if it
        is another than was believed."""
        if peer.knows_profile and not is_new and not by_itself and profile.version < peer.profile.version:
            return False
        was_known, peer.knows_profile = peer.knows_profile, True
        self.have(peer.identity.node)
        if was_known and not is_new and profile == peer.profile:
            return False
        peer.profile = profile
        self._changed()
        return True
