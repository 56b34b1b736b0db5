"""Anti-entropy: joining, exchanging everything with one member now and then, and finding lost members again, for ever.

Datagrams go to the living only. So whoever was called dead, rightly or since the network had split, would stay dead for
ever if nobody tried: each node goes on trying its lost members, the members of its last start and its seeds, all
together about once in `reconnect_s` for each that is lost.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from peerload.model import metrics
from peerload.model.actions import Dial, DialAddress
from peerload.model.gossip import MemberStatus
from peerload.model.messages import Identity
from peerload.model.timers import GossipTimerKind as Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from peerload.core.membership.gossip_state import GossipListener, GossipState
    from peerload.model.gossip import MembershipUpdate
    from peerload.model.messages import Sync

Thing = TypeVar("Thing")

SCALED_ABOVE = 32
"""Members above which everything is exchanged less often."""
JITTER = 0.1
"""Exchanges come at sync_s ± this share, so that nodes that start together do not beat together."""


class AntiEntropy:
    """``everything``: makes a `Sync`. known: members of earlier starts not met yet; seeds: addresses to try."""

    def __init__(self, shared: GossipState, everything: Callable[..., Sync], listener: GossipListener) -> None:
        self._listener = listener
        self._shared = shared
        self._everything = everything
        self.known: dict[str, Identity] = {}
        self.seeds: tuple[str, ...] = ()
        self._join_s = shared.preset.join_s
        self._share = 1.0
        """The share of all members that was lost when the next try was set."""

    def start(self, known: Sequence[Identity], seeds: Sequence[str]) -> None:
        """Take in the members that the agent remembers, and try some of them at once."""
        for identity in known:
            self.learn(identity)
        self.seeds = tuple(seeds)
        if self.known or self.seeds:
            self._join()
            self._look_again()

    def learn(self, identity: Identity) -> None:
        """A node that may be there."""
        shared = self._shared
        is_new = identity.node not in shared.members and identity.node != shared.core.node
        if is_new and identity.address and len(self.known) < shared.core.config.peers_max:
            self.known[identity.node] = identity

    def changed(self, rumour: MembershipUpdate) -> None:
        """Note that the belief about a member has changed."""
        self.known.pop(rumour.node, None)
        if rumour.standing is MemberStatus.ALIVE and not self._shared.is_armed(Kind.SYNC):
            self._arm_sync()
        elif rumour.standing is MemberStatus.DEAD:
            self._look_again()

    def linked(self, node: str) -> None:
        """There is a new link to it: exchange everything, not too often unless it is believed to be gone."""
        shared = self._shared
        member = shared.members.get(node)
        if member is None:
            return
        is_due = shared.now_s - member.synced_s >= min(shared.preset.reconnect_s, shared.preset.sync_s)
        if is_due or member.rumour.standing is not MemberStatus.ALIVE:
            self._exchange(node)

    def _exchange(self, node: str) -> None:
        self._shared.members[node].synced_s = self._shared.now_s
        self._shared.core.send(node, self._everything(asks=True))

    def timer(self, kind: str) -> None:
        """One of its timers: join, sync or again."""
        match kind:
            case "join":
                self._join()
            case "sync":
                self._sync()
            case "again":
                self._try_one()

    # -- joining -------------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Try a few members that may be there, as long as none is known to be."""
        shared = self._shared
        if shared.there:
            self._join_s = shared.preset.join_s
            return
        for identity in self._some(list(self.known.values())):
            shared.core.actions.append(Dial(identity))
        for address in self._some(list(self.seeds)):
            shared.core.actions.append(DialAddress(address))
        shared.arm(Kind.JOIN, self._join_s)
        self._join_s = min(self._join_s * 2.0, shared.preset.reconnect_s)

    def _some(self, things: list[Thing]) -> list[Thing]:
        return self._shared.rng.sample(things, min(len(things), self._shared.preset.join_contacts))

    # -- exchanging everything -----------------------------------------------------------------------------------------

    def _arm_sync(self) -> None:
        shared = self._shared
        scale = math.ceil(math.log2(shared.size / SCALED_ABOVE)) + 1 if shared.size > SCALED_ABOVE else 1
        shared.arm(Kind.SYNC, shared.preset.sync_s * scale * shared.rng.uniform(1.0 - JITTER, 1.0 + JITTER))

    def _sync(self) -> None:
        shared = self._shared
        self._bury()
        alive = [node for node in shared.there if shared.members[node].rumour.standing is MemberStatus.ALIVE]
        if alive:
            self._exchange(shared.rng.choice(alive))
            self._arm_sync()

    def _bury(self) -> None:
        """Forget those that left long ago."""
        shared = self._shared
        until_s = shared.now_s - shared.preset.tombstone_s
        for node in [name for name, member in shared.members.items() if member.is_gone]:
            if shared.members[node].since_s < until_s:
                del shared.members[node]
                self._listener.member_forgotten(node)

    # -- the lost ------------------------------------------------------------------------------------------------------

    def _lost(self) -> list[Identity | str]:
        """Members called dead, members of earlier starts not heard of since, seeds where nobody known is alive."""
        members = self._shared.members.values()
        addresses = {member.rumour.address for member in members if member.is_there}
        dead = [identity_of(member.rumour) for member in members if member.rumour.standing is MemberStatus.DEAD]
        seeds = [address for address in self.seeds if address not in addresses]
        return [*dead, *self.known.values(), *seeds]

    def _count_lost(self) -> int:
        """How many `_lost` has: this is asked at every death, of which there may be many at once."""
        members = self._shared.members.values()
        dead = sum(member.rumour.standing is MemberStatus.DEAD for member in members)
        there = {member.rumour.address for member in members if member.is_there} if self.seeds else ()
        return dead + len(self.known) + sum(address not in there for address in self.seeds)

    def _look_again(self) -> None:
        """Set when one of the lost is tried next. Members of a half that was cut off are called dead one after the other:
        what is left of the time then shrinks as their share grows, or the first of them alone would say how long it is."""
        shared = self._shared
        left_s = shared.left_s(Kind.AGAIN)
        lost = self._count_lost()
        if not lost:
            return
        share = lost / (lost + len(shared.there))
        if left_s is None:
            left_s = shared.preset.reconnect_s / share * shared.rng.uniform(0.5, 1.5)
        elif share > self._share:
            left_s *= self._share / share
        else:
            return
        self._share = share
        shared.arm(Kind.AGAIN, left_s)

    def _try_one(self) -> None:
        """One of the lost, at random."""
        shared = self._shared
        lost = self._lost()
        if lost:
            shared.core.count(metrics.LOST_MEMBERS_TRIED)
            self._try(shared.rng.choice(lost))
            self._look_again()

    def _try(self, one: Identity | str) -> None:
        actions = self._shared.core.actions
        if isinstance(one, str):
            actions.append(DialAddress(one))
            return
        actions.append(Dial(one))
        member = self._shared.members.get(one.node)
        if member is not None:
            self._shared.send(one.node, member.rumour)  # if it is there, it says so
            self._exchange(one.node)


def identity_of(rumour: MembershipUpdate) -> Identity:
    """The identity in an update."""
    return Identity(rumour.node, rumour.boot, rumour.machine_boot, rumour.store, rumour.incarnation, rumour.address)
