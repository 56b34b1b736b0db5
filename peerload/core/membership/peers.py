"""Peers: what a node believes of each, the fetching of their profiles, and the waking of those that are asleep."""

from __future__ import annotations

import enum
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.core.resources.admission import why_never
from peerload.energy.plan import slope_at
from peerload.model import messages, metrics, timers
from peerload.model.actions import WakePeer
from peerload.model.gossip import MemberStatus
from peerload.model.messages import PROFILES_MAX, KnownProfile, Need, ProfileRequest, ProfileTold
from peerload.model.resources import Profile, estimated_curve
from peerload.model.timers import GossipTimerKind as Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from peerload.core.membership.gossip_state import GossipState
    from peerload.core.state import CoreState
    from peerload.core.work import HomeTask
    from peerload.model.messages import Identity


BOOTS_KEPT_MAX = 8
"""Starts of a peer that are remembered, so that a late word of one is not taken for news."""


NOT_MET = "not met since this agent's start"
"""Reason why it is not known what a member of an earlier start has."""


class PeerState(enum.StrEnum):
    """Belief about a peer."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"
    ASLEEP = "asleep"


STATE_OF_STATUS = {
    MemberStatus.ALIVE: PeerState.ALIVE,
    MemberStatus.SUSPECT: PeerState.SUSPECT,
    MemberStatus.DEAD: PeerState.DEAD,
    MemberStatus.LEFT: PeerState.LEFT,
    MemberStatus.FORGOTTEN: PeerState.LEFT,
    MemberStatus.ASLEEP: PeerState.ASLEEP,
}


class PeerInfo:
    """A peer as seen from here. heard_s: boot time of its last message to this node; since_s: start of its
    present state; knows_profile: its profile is that of this run, else an old or, at first, an empty one; boots:
    its starts that introduced themselves in person, the newest last, at most BOOTS_KEPT_MAX; boot_shut_out: the
    start that was shut out of the cluster."""

    __slots__ = ("boot_shut_out", "boots", "heard_s", "identity", "knows_profile", "profile", "since_s", "state")

    def __init__(self, identity: Identity, profile: Profile | None, heard_s: float) -> None:
        self.identity = identity
        self.profile = profile or Profile(identity.node, 0, 0.0)
        self.knows_profile = profile is not None
        self.heard_s = self.since_s = heard_s
        self.state = PeerState.ALIVE
        self.boots: tuple[str, ...] = ()
        self.boot_shut_out: str | None = None

    @property
    def is_shut_out(self) -> bool:
        return self.boot_shut_out == self.identity.boot

    def was_later_than(self, identity: Identity) -> bool:
        """True if this is a late message of an earlier start. After the loss of its disk, only the boot id tells:
        incarnations began anew."""
        mine = self.identity
        is_earlier = identity.store == mine.store and identity.incarnation < mine.incarnation
        return is_earlier or identity.boot in self.boots[:-1]

    def introduced(self, identity: Identity) -> None:
        if identity.boot not in self.boots:
            self.boots = (*self.boots, identity.boot)[-BOOTS_KEPT_MAX:]


GATHER_S = 0.05
"""Profiles wanted within this are asked for together."""
REPEAT_S = 1.0
REPEAT_S_MAX = 60.0
"""A profile that was not told is asked for again after this, doubling up to the next."""
PROFILE_NODES_MAX = 16


class _Wanted(msgspec.Struct, eq=False):
    """A profile that is not known. whom: to ask next; at_s: when; tries: so far; asked: who was."""

    whom: str
    at_s: float
    tries: int = 0
    asked: frozenset[str] = frozenset()


class Profiles:
    """The fetching of profiles: gossip tells the version of a member's profile, the profile itself is fetched over the peer link.
    Whoever told of the member is asked first, for all it told of at once; then the member itself, or another while that sleeps or
    cannot be reached, for ever, less and less often.

    Those that are wanted: at most one per member. eligible: what is remembered of the nodes that could run a task, which is
    cleared when a new profile has come."""

    def __init__(self, shared: GossipState, peers: Mapping[str, PeerInfo], eligible: dict[Need, Any]) -> None:
        self._shared = shared
        self._peers = peers
        self._eligible = eligible
        self._wanted: dict[str, _Wanted] = {}

    def want(self, node: str, teller: str) -> None:
        """The profile of this node is not known, or an old one; ``teller`` may know."""
        shared = self._shared
        if node not in self._wanted:
            self._wanted[node] = _Wanted(teller if teller in shared.members else node, shared.now_s)
            self._arm(GATHER_S)

    def have(self, node: str) -> None:
        self._wanted.pop(node, None)

    def _arm(self, seconds: float) -> None:
        if not self._shared.is_armed(Kind.PROFILES):
            self._shared.arm(Kind.PROFILES, seconds)

    def ask(self) -> None:
        shared = self._shared
        due: dict[str, list[str]] = {}
        for node, wanted in self._wanted.items():
            if wanted.at_s > shared.now_s:
                continue
            if wanted.tries:
                wanted.whom = self._knower(node, wanted.asked) or wanted.whom
            if wanted.whom not in due and len(due) >= PROFILE_NODES_MAX:
                continue
            nodes = due.setdefault(wanted.whom, [])
            if len(nodes) >= PROFILES_MAX:
                continue
            nodes.append(node)
            wanted.at_s = shared.now_s + min(REPEAT_S * 2.0**wanted.tries, REPEAT_S_MAX)
            wanted.tries = min(wanted.tries + 1, 10)
            wanted.asked |= {wanted.whom}
        for whom, nodes in due.items():
            shared.core.send(whom, ProfileRequest(tuple(nodes)))
        if self._wanted:
            next_s = min(wanted.at_s for wanted in self._wanted.values()) - shared.now_s
            self._arm(max(next_s, GATHER_S))

    def _knower(self, node: str, asked: frozenset[str]) -> str:
        """The member to ask for a profile: its own, unless that sleeps or cannot be reached; then the helper that has reached it, once,
        since it may have no link to it either, then others by chance; "" if there is none."""
        shared, member = self._shared, self._shared.members.get(node)
        is_cut_off = member is not None and member.is_cut_off
        if not is_cut_off and self._peers[node].state is not PeerState.ASLEEP:
            return node
        if member is not None and member.helper in shared.there and member.helper not in asked:
            return member.helper
        return next(iter(shared.draw(1, without=node)), "")

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

    def received(self, src: str, told: ProfileTold) -> bool:
        """Handle profiles. A node's own profile is always accepted, and first; others only if requested from src. →
        True if a peer became known, or has changed."""
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
        member = self._shared.members.get(peer.identity.node)
        if by_itself or is_new or member is None or profile.version >= member.rumour.profile_version:
            self.have(peer.identity.node)  # what another told may be older than what gossip has told of
        if was_known and not is_new and profile == peer.profile:
            return False
        peer.profile = profile
        self._eligible.clear()
        return True


WAKE_S = 60.0
"""Time that a node takes to wake, until that is learned."""
IPV4 = 4
ASKED_MAX = 4
"""Peers that are asked to send magic packets, too."""
AGAIN_S = 1.0
"""A node is woken no more than once in this, whoever asks."""
RESTING_MAX = 1024
TRIES = 3
"""A node that is not there after so many times its wake time is not asked again before it is heard of."""


class Waking:
    """Waking of nodes that are asleep: asked for when a task has no place elsewhere, repeated, and given up when a node does not
    wake. One per node; its timers are ``wake``. took_s: how long nodes took to wake the last time."""

    def __init__(self, state: CoreState, peers: Mapping[str, PeerInfo]) -> None:
        self._state = state
        self._peers = peers
        self._under_way: dict[str, tuple[float, int]] = {}
        self._asked_s: dict[str, float] = {}
        self._resting: dict[str, list[bytes]] = {}
        self.took_s: dict[str, float] = {}
        self.failed: set[str] = set()

    def could_run(self, task: HomeTask) -> dict[str, float]:
        """The nodes asleep that could run a task, and how long each takes to be there."""
        spec, home, now_s = task.spec, self._state.node, self._state.now.boot_s
        return {
            name: max(self.wake_s(name) - (now_s - self._under_way[name][0] if name in self._under_way else 0.0), 1.0)
            for name, peer in self._peers.items()
            if peer.state is PeerState.ASLEEP
            and name not in self.failed
            and not why_never(peer.profile, spec.request, spec.placement, home)
        }

    def for_task(self, task: HomeTask) -> None:
        """Wake the node that could run a task and costs least, unless one is being woken."""
        if self._under_way:
            return
        fit = [(_cost(self._peers[name].profile), name) for name in self.could_run(task)]
        if fit:
            self._wake(min(fit)[1], 0, "a task has no place elsewhere")

    def for_joules(self, task: HomeTask, node: str) -> float:
        """Wake a node where a task costs least, for which it is to rest → how long at most."""
        if node not in self._under_way:
            self._wake(node, 0, "a task costs least there")
        resting = self._resting.setdefault(node, [])
        if len(resting) < RESTING_MAX:
            resting.append(task.uid)
        return self.wake_s(node)

    def _wake(self, node: str, tries: int, reason: str = "") -> None:
        began_s = self._under_way[node][0] if tries else self._state.now.boot_s
        self._under_way[node] = began_s, tries + 1
        self._state.actions.append(WakePeer(node))
        for peer in self._near(node, everywhere=tries > 0):
            self._state.send(peer, messages.Wake(node))
        self._state.set_timer_in(self.wake_s(node), timers.WakeTimeout(node))
        if not tries:
            self._state.note("node", "waking", node=node, reason=reason)

    def _near(self, node: str, *, everywhere: bool) -> list[str]:
        """Peers that may reach a node by a magic packet: those on its network, if this node is on another.
        ``everywhere``: any peers, after those on its network have failed."""
        network = _network(self._peers[node].identity.address)
        if not everywhere and network == _network(self._state.identity.address):
            return []
        alive = sorted(name for name, peer in self._peers.items() if peer.state is PeerState.ALIVE)
        near = [name for name in alive if network and _network(self._peers[name].identity.address) == network]
        return [*near, *(name for name in alive if everywhere and name not in near)][:ASKED_MAX]

    def wake_requested(self, node: str) -> None:
        peer, now_s = self._peers.get(node), self._state.now.boot_s
        if peer is not None and peer.state is PeerState.ASLEEP and now_s - self._asked_s.get(node, -AGAIN_S) >= AGAIN_S:
            self._asked_s[node] = now_s
            self._state.actions.append(WakePeer(node))

    def wake_s(self, node: str) -> float:
        """Time that a node takes to wake: as it was the last time, else as it tells, else WAKE_S."""
        peer = self._peers.get(node)
        power = peer.profile.power if peer is not None else None
        return self.took_s.get(node) or (power.wake_s if power is not None else 0.0) or WAKE_S

    def overdue(self, node: str) -> None:
        """A node was to be awake by now: ask again, or give up."""
        began_s, tries = self._under_way.get(node, (0.0, 0))
        if not tries:
            return
        if tries < TRIES:
            self._wake(node, tries)
            return
        del self._under_way[node]
        self.failed.add(node)
        self._rested(node)
        passed_s = self._state.now.boot_s - began_s
        self._state.note("node", "not woken", node=node, reason=f"it did not wake within {passed_s:.0f} s")

    def is_there(self, node: str) -> None:
        """A node is alive: learn how long that took."""
        self.failed.discard(node)
        self._asked_s.pop(node, None)
        self._rested(node)
        if node in self._under_way:
            began_s, _ = self._under_way.pop(node)
            self.took_s[node] = max(self._state.now.boot_s - began_s, 1.0)
            self._state.clear_timer(timers.WakeTimeout(node))

    def forgotten(self, node: str) -> None:
        """Drop everything about a node that is no longer a member; tasks that waited for it look for another place."""
        self.failed.discard(node)
        self._asked_s.pop(node, None)
        self.took_s.pop(node, None)
        self._rested(node)
        if self._under_way.pop(node, None) is not None:
            self._state.clear_timer(timers.WakeTimeout(node))

    def _rested(self, node: str) -> None:
        """Tasks that waited for this node to wake look for a place again."""
        for uid in self._resting.pop(node, ()):
            self._state.set_timer_in(0.0, timers.Rest(uid.hex()))


def _network(address: str) -> str:
    """Network of an address, guessed from its number: the first 24 bits, of IPv6 64; "" for a name."""
    try:
        number = ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return ""
    return str(ip_network((number, 24 if number.version == IPV4 else 64), strict=False))


def _cost(profile: Profile) -> float:
    curve = profile.power or estimated_curve(round(profile.cpus))
    return slope_at(curve, 0.0, curve.threads) / profile.speed
