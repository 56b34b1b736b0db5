"""Peers: a node's beliefs about each, fetching their profiles, and waking those that are asleep."""

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
"""Starts of a peer that are remembered, so that a late message of one does not count as a new start."""


NOT_MET = "not met since this agent's start"
"""Reason why the resources of a member of an earlier start are unknown."""


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
    """A peer as this node knows it. heard_s: boot time of its last message to this node; since_s: start of its
    present state; knows_profile: its profile is of this run, otherwise old or, at first, empty; boots: its
    starts that introduced themselves in person, the newest last, at most BOOTS_KEPT_MAX; boot_shut_out: the
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
        """True if this is a late message of an earlier start. After the loss of its disk, only the boot id shows it:
        incarnations started again."""
        mine = self.identity
        is_earlier = identity.store == mine.store and identity.incarnation < mine.incarnation
        return is_earlier or identity.boot in self.boots[:-1]

    def introduced(self, identity: Identity) -> None:
        if identity.boot not in self.boots:
            self.boots = (*self.boots, identity.boot)[-BOOTS_KEPT_MAX:]


GATHER_S = 0.05
"""Profiles wanted within this interval are requested together."""
REPEAT_S = 1.0
REPEAT_S_MAX = 60.0
"""Pause before an unanswered profile request is repeated, doubling up to the next value."""
PROFILE_NODES_MAX = 16


class _Wanted(msgspec.Struct, eq=False):
    """An unknown profile. whom: the next node to ask; at_s: when; tries: so far; asked: the nodes asked so far."""

    whom: str
    at_s: float
    tries: int = 0
    asked: frozenset[str] = frozenset()


class Profiles:
    """Fetching of profiles: gossip carries the version of a member's profile, the profile itself is fetched over the
    peer link. The first request goes to the member that passed the update on, for all its updates together. Later ones
    go to the member itself, or to another while it is asleep or unreachable. They repeat without end at growing
    intervals.

    One entry for each member at most. eligible: cached nodes that could run a task, cleared by each new profile."""

    def __init__(self, shared: GossipState, peers: Mapping[str, PeerInfo], eligible: dict[Need, Any]) -> None:
        self._shared = shared
        self._peers = peers
        self._eligible = eligible
        self._wanted: dict[str, _Wanted] = {}

    def want(self, node: str, teller: str) -> None:
        """Fetch a profile that is unknown or old; ``teller`` may know it."""
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
        """The member to ask for a profile: its own, unless that is asleep or unreachable; then, once, the helper that
        reached it (which may have no link to it either), then random others; "" if there is none."""
        shared, member = self._shared, self._shared.members.get(node)
        is_cut_off = member is not None and member.is_cut_off
        if not is_cut_off and self._peers[node].state is not PeerState.ASLEEP:
            return node
        if member is not None and member.helper in shared.there and member.helper not in asked:
            return member.helper
        return next(iter(shared.draw(1, without=node)), "")

    def requested(self, src: str, request: ProfileRequest) -> None:
        """Answer with the known ones of the requested profiles, including this node's own."""
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
        """Handle profiles. A node's own profile is always accepted; others only if requested from src. → True if a
        peer became known, or has changed."""
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
        """Store a profile of the current run, unless a newer one is known and this is not the node's own answer
        (by_itself). True if it differs from the stored one."""
        if peer.knows_profile and not is_new and not by_itself and profile.version < peer.profile.version:
            return False
        was_known, peer.knows_profile = peer.knows_profile, True
        member = self._shared.members.get(peer.identity.node)
        if by_itself or is_new or member is None or profile.version >= member.rumour.profile_version:
            self.have(peer.identity.node)  # another member's copy may be older than the version in gossip
        if was_known and not is_new and profile == peer.profile:
            return False
        peer.profile = profile
        self._eligible.clear()
        return True


WAKE_S = 60.0
"""Default time that a node takes to wake, before it was measured."""
IPV4 = 4
ASKED_MAX = 4
"""Peers that are asked to send magic packets as well."""
AGAIN_S = 1.0
"""Minimum interval between magic packets that peers request for one node."""
RESTING_MAX = 1024
TRIES = 3
"""Number of attempts, each of one wake time, after which a node is not woken again before it is alive."""


class Waking:
    """Waking of nodes that are asleep: started when a task has no place elsewhere, repeated, and given up if a node
    does not wake. One per node; its timers are ``wake``. took_s: how long nodes took to wake the last time."""

    def __init__(self, state: CoreState, peers: Mapping[str, PeerInfo]) -> None:
        self._state = state
        self._peers = peers
        self._under_way: dict[str, tuple[float, int]] = {}
        self._asked_s: dict[str, float] = {}
        self._resting: dict[str, list[bytes]] = {}
        self.took_s: dict[str, float] = {}
        self.failed: set[str] = set()

    def could_run(self, task: HomeTask) -> dict[str, float]:
        """The nodes asleep that could run a task, and how long each takes to wake."""
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
        """Wake a node where a task costs least; the task will rest meanwhile → for how long at most."""
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
        """Time that a node takes to wake: as measured the last time, else as in its profile, else WAKE_S."""
        peer = self._peers.get(node)
        power = peer.profile.power if peer is not None else None
        return self.took_s.get(node) or (power.wake_s if power is not None else 0.0) or WAKE_S

    def overdue(self, node: str) -> None:
        """Handle a node that is not awake in time: try again, or give up."""
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
        """Handle a node that is alive, and learn how long it took to wake."""
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
        """Let tasks that waited for this node look for a place again."""
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
