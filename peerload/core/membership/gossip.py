"""Gossip: this node's beliefs about every other node, how updates change them, and broadcast ([SWIM02], [LIFEGUARD17]).

Of each node counts the update of greatest weight (`MembershipUpdate.weight`): a later run before an earlier one; within
a run, the node's later statement about itself; then the graver status. So a node that is declared dead only has to
refute it. Clocks are never compared between nodes, and the order in which updates arrive makes no difference.

The parts: `Detector` (probing), `AntiEntropy` (joining, full exchanges, finding lost members), and their shared state
(`gossip_state.py`). Datagrams enter through `handle`, full exchanges through `synced`, timers through `timer`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import islice
from typing import TYPE_CHECKING
from zlib import crc32

import msgspec

from peerload.core.membership.gossip_state import GossipMember, GossipState, Suspicion
from peerload.model import metrics
from peerload.model.actions import Dial, DialAddress
from peerload.model.events import GossipReceived
from peerload.model.gossip import (
    CLAIM_MAX,
    OUTDO_MAX,
    GossipAck,
    GossipNack,
    GossipPing,
    GossipPingRequest,
    Load,
    MembershipUpdate,
    MemberStatus,
    merged,
)
from peerload.model.messages import PROTOCOL_MAX, PROTOCOL_MIN, RUMOURS_MAX, Identity, Ping, Sync
from peerload.model.timers import GossipTimerKind as Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from peerload.core.membership.gossip_state import GossipListener
    from peerload.core.state import CoreState
    from peerload.model.events import LoopLagged
    from peerload.model.gossip import GossipMessage
    from peerload.model.resources import LoadReport, Profile


PROBES_MAX = 64
"""Probes in flight at a time; checks of suspicions need more than one."""
HELPED_MAX = 256
"""Pings in flight on behalf of others."""
NACK_SHARE = 0.8
"""Share of probe_timeout_s after which a helper without an answer sends a nack, so that it arrives in time."""


class _Probe(msgspec.Struct, eq=False):
    """A probe in flight. helpers: the nodes asked to probe indirectly, and whether each replied."""

    node: str
    started_s: float
    helpers: dict[str, bool] = {}


class Detector:
    """Failure detector: pings one member at a time, and calls ``suspect`` for a member that answers no ping.

    Every second turn pings the next member on the ring of names: each node is probed by its neighbour every 2·probe_s
    regardless of chance, so a failure is first probed within this time. The other turns take all members in a random
    order that changes every round, so that some node probes each failed member, however many fail together.

    An unanswered ping is followed by pings of three helpers and one over the peer link, which loses no datagrams. A
    node that was not running draws no conclusions from answers that it missed.
    """

    def __init__(self, shared: GossipState, suspect: Callable[[str], None]) -> None:
        self._shared = shared
        self._suspect = suspect
        self._sequence = 0
        self._probes: dict[int, _Probe] = {}
        self._helped: dict[int, tuple[str, str, int]] = {}
        self._order: list[str] = []
        self._is_neighbours_turn = False
        self._stalled_s = float("-inf")
        self._is_stale = False

    @property
    def may_judge(self) -> bool:
        """True if this node has run and probed since its last pause."""
        return not self._is_stale

    # -- turns ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start probing at a random moment, so that nodes that start together do not probe in step."""
        shared = self._shared
        if not shared.is_armed(Kind.TURN):
            shared.arm(Kind.TURN, shared.preset.probe_s * shared.rng.random())

    def turn(self) -> None:
        """Probe the next member; called every probe_s."""
        shared = self._shared
        if not shared.there:
            return
        shared.arm(Kind.TURN, shared.preset.probe_s * shared.health.factor)
        self._is_neighbours_turn = not self._is_neighbours_turn
        self.probe(self._neighbour() if self._is_neighbours_turn else self._next())

    def _neighbour(self) -> str:
        """The next member on the ring, where names are ordered by a checksum, so that racks are mixed."""
        shared = self._shared
        ring = shared.ring
        place = bisect_right(ring, ring_place(shared.core.node))
        return ring[place % len(ring)][1]

    def _next(self) -> str:
        shared = self._shared
        while self._order:
            node = self._order.pop()
            member = shared.members.get(node)
            if member is not None and member.is_there:
                return node
        self._order = list(shared.there)
        shared.rng.shuffle(self._order)
        return self._order.pop()

    def joined(self, node: str) -> None:
        """Put a new member at a random place in the rest of this round."""
        if node not in self._order:
            self._order.insert(self._shared.rng.randint(0, len(self._order)), node)

    def gone(self, node: str) -> None:
        """Remove a member from the rest of this round."""
        if node in self._order:
            self._order.remove(node)

    # -- one probe -----------------------------------------------------------------------------------------------------

    def probe(self, node: str) -> None:
        """Ping a member, unless it is being pinged."""
        shared = self._shared
        if len(self._probes) >= PROBES_MAX or any(probe.node == node for probe in self._probes.values()):
            return
        self._sequence += 1
        self._probes[self._sequence] = _Probe(node, shared.now_s)
        self._ping(node, self._sequence)
        shared.arm(Kind.ACK, shared.preset.probe_timeout_s * shared.health.factor, str(self._sequence))

    def _ping(self, node: str, sequence: int, address: str = "") -> None:
        member = self._shared.members.get(node)
        ping = GossipPing(sequence, node)
        if member is not None and member.rumour.standing:  # the suspect itself gets the suspicion first
            self._shared.send(node, ping, member.rumour, address=address, with_load=True)
        else:
            self._shared.send(node, ping, address=address, with_load=True)

    def unanswered(self, sequence: int) -> None:
        """Handle the end of probe_timeout_s: probe through helpers and over the peer link."""
        probe = self._probes.get(sequence)
        if probe is None:
            return
        shared = self._shared
        shared.core.count(metrics.INDIRECT_PROBES)
        member = shared.members.get(probe.node)
        address = member.rumour.address if member is not None else ""
        helpers = shared.draw(shared.preset.helpers, without=probe.node)
        if helpers and member is not None and member.helper in shared.there and member.helper not in helpers:
            helpers[0] = member.helper
        for helper in helpers:
            probe.helpers[helper] = False
            shared.send(helper, GossipPingRequest(sequence, probe.node, address))
        shared.core.send(probe.node, Ping(sequence))
        shared.arm(Kind.VERDICT, shared.preset.indirect_timeout_s * shared.health.factor, str(sequence))

    def failed(self, sequence: int) -> None:
        """End a probe that failed, indirect probes included."""
        probe = self._probes.pop(sequence, None)
        if probe is None:
            return
        self._concluded(probe)
        silent = sum(not heard for heard in probe.helpers.values())
        if silent or not probe.helpers:
            self._shared.health.worse(max(silent, 1))
        self._shared.core.count(metrics.MEMBER_PROBES_FAILED)
        self._suspect(probe.node)

    def _concluded(self, probe: _Probe) -> None:
        if probe.started_s >= self._stalled_s:
            self._is_stale = False

    # -- answers -------------------------------------------------------------------------------------------------------

    def pinged(self, src: str, ping: GossipPing, address: str) -> None:
        """Answer a ping that is meant for this node."""
        if ping.to == self._shared.core.node:
            self._shared.send(src, GossipAck(ping.sequence), address=address, with_load=True)

    def acked(self, src: str, sequence: int, *, over_link: bool = False) -> None:
        """Handle an acknowledgement from a member, to this node or to a helper, or over its link."""
        helped = self._helped.pop(sequence, None)
        if helped is not None:
            asker, address, asked = helped
            self._shared.disarm(Kind.NACK, str(sequence))
            member = self._shared.members.get(src)
            told = () if member is None else (member.rumour,)
            self._shared.send(asker, GossipAck(asked), *told, address=address)
            return
        probe = self._probes.get(sequence)
        if probe is None or (src != probe.node and src not in probe.helpers):
            return
        del self._probes[sequence]
        self._concluded(probe)
        member = self._shared.members.get(probe.node)
        if member is not None and (over_link or src != probe.node):
            self._shared.unheard(member, "" if over_link else src)
        self._shared.disarm(Kind.ACK, str(sequence))
        self._shared.disarm(Kind.VERDICT, str(sequence))
        self._shared.health.better()

    def nacked(self, src: str, sequence: int) -> None:
        """Handle the NACK of a helper: it got no answer from the probed member, but is alive itself."""
        probe = self._probes.get(sequence)
        if probe is not None and src in probe.helpers:
            probe.helpers[src] = True

    # -- helping others ------------------------------------------------------------------------------------------------

    def asked(self, src: str, request: GossipPingRequest, address: str) -> None:
        """Handle an indirect probe: ping its target on behalf of src."""
        shared = self._shared
        if len(self._helped) >= HELPED_MAX:
            dropped = next(iter(self._helped))
            del self._helped[dropped]
            shared.disarm(Kind.NACK, str(dropped))
        self._sequence += 1
        self._helped[self._sequence] = (src, address, request.sequence)
        self._ping(request.node, self._sequence, request.address)
        shared.arm(Kind.NACK, shared.preset.probe_timeout_s * NACK_SHARE, str(self._sequence))

    def ack_missing(self, sequence: int) -> None:
        """Send the requester a nack because no ack has come; a later ack is still forwarded."""
        helped = self._helped.get(sequence)
        if helped is not None:
            asker, address, asked = helped
            self._shared.send(asker, GossipNack(asked), address=address)

    # -- pauses of this node -------------------------------------------------------------------------------------------

    def stalled(self) -> None:
        """Handle a pause of this node itself: missing answers during the pause prove nothing."""
        shared = self._shared
        if shared.now_s > self._stalled_s + shared.preset.lag_s:
            shared.core.count(metrics.STALLS)
            shared.health.worse()
        self._stalled_s = shared.now_s
        self._is_stale = True
        for sequence in self._probes:
            shared.disarm(Kind.ACK, str(sequence))
            shared.disarm(Kind.VERDICT, str(sequence))
        self._probes.clear()


def ring_place(node: str) -> tuple[int, str]:
    return crc32(node.encode()), node


SCALED_ABOVE = 32
"""Number of members above which full exchanges are less frequent."""
JITTER = 0.1
"""Full exchanges come at sync_s ± this share, so that nodes that start together do not stay in step."""


class AntiEntropy:
    """Joining, occasional full exchange with one member, and endless search for lost members.

    Datagrams go only to members that are alive. So a node that was declared dead, rightly or after a network partition,
    would stay dead if no node contacted it. Each node therefore keeps contacting its lost members, the members of its
    last start and its seeds: one of them at a time, about once in `reconnect_s` for each lost one in the whole cluster.

    ``everything``: makes a `Sync`. known: members of earlier starts not met yet; seeds: addresses to try.
    """

    def __init__(self, shared: GossipState, everything: Callable[..., Sync], listener: GossipListener) -> None:
        self._listener = listener
        self._shared = shared
        self._everything = everything
        self.known: dict[str, Identity] = {}
        self.seeds: tuple[str, ...] = ()
        self._join_s = shared.preset.join_s
        self._share = 1.0
        """The share of lost members when the next attempt was scheduled."""

    def start(self, known: Sequence[Identity], seeds: Sequence[str]) -> None:
        """Add the members that the agent remembers, and contact some of them immediately."""
        for identity in known:
            self.learn(identity)
        self.seeds = tuple(seeds)
        if self.known or self.seeds:
            self._join()
            self._look_again()

    def learn(self, identity: Identity) -> None:
        """Remember a node that may be a member."""
        shared = self._shared
        is_new = identity.node not in shared.members and identity.node != shared.core.node
        if is_new and identity.address and len(self.known) < shared.core.config.peers_max:
            self.known[identity.node] = identity

    def changed(self, rumour: MembershipUpdate) -> None:
        """Record that the belief about a member has changed."""
        self.known.pop(rumour.node, None)
        if rumour.standing is MemberStatus.ALIVE and not self._shared.is_armed(Kind.SYNC):
            self._arm_sync()
        elif rumour.standing is MemberStatus.DEAD:
            self._look_again()

    def linked(self, node: str) -> None:
        """Handle a new link to a node: exchange all of membership. The rate is limited unless the node is believed to
        be gone."""
        shared = self._shared
        member = shared.members.get(node)
        if member is None:
            return
        member.is_cut_off = False
        is_due = shared.now_s - member.synced_s >= min(shared.preset.reconnect_s, shared.preset.sync_s)
        if is_due or member.rumour.standing is not MemberStatus.ALIVE:
            self._exchange(node)

    def _exchange(self, node: str) -> None:
        self._shared.members[node].synced_s = self._shared.now_s
        self._shared.core.send(node, self._everything(asks=True))

    def timer(self, kind: str) -> None:
        """Handle one of its timers: join, sync or again."""
        match kind:
            case "join":
                self._join()
            case "sync":
                self._sync()
            case "again":
                self._try_one()

    # -- joining -------------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Contact a few possible members, as long as no member is known to be alive."""
        shared = self._shared
        if shared.there:
            self._join_s = shared.preset.join_s
            return
        at_most = shared.preset.join_contacts
        for identity in shared.rng.sample(list(self.known.values()), min(len(self.known), at_most)):
            shared.core.actions.append(Dial(identity))
        for address in shared.rng.sample(self.seeds, min(len(self.seeds), at_most)):
            shared.core.actions.append(DialAddress(address))
        shared.arm(Kind.JOIN, self._join_s)
        self._join_s = min(self._join_s * 2.0, shared.preset.reconnect_s)

    # -- full exchange -------------------------------------------------------------------------------------------------

    def _arm_sync(self) -> None:
        shared = self._shared
        scale = math.ceil(math.log2(shared.size / SCALED_ABOVE)) + 1 if shared.size > SCALED_ABOVE else 1
        shared.arm(Kind.SYNC, shared.preset.sync_s * scale * shared.rng.uniform(1.0 - JITTER, 1.0 + JITTER))

    def _sync(self) -> None:
        """Exchange everything with a member that was last reachable, and contact one that was not."""
        shared, members = self._shared, self._shared.members
        self.bury()
        alive = [node for node in shared.there if members[node].rumour.standing is MemberStatus.ALIVE]
        reached = [node for node in alive if not members[node].is_cut_off]
        cut_off = [node for node in alive if members[node].is_cut_off]
        for nodes in filter(None, (reached, cut_off)):
            self._exchange(shared.rng.choice(nodes))
        if alive:
            self._arm_sync()

    def bury(self) -> None:
        """Forget members that left long ago, and drop tombstones that are old."""
        shared = self._shared
        left_until_s = shared.now_s - shared.preset.left_s
        kept_until_s = shared.now_s - shared.preset.tombstone_s
        for node, member in list(shared.members.items()):
            if member.rumour.standing is MemberStatus.LEFT and member.since_s < left_until_s:
                member.rumour = msgspec.structs.replace(member.rumour, standing=MemberStatus.FORGOTTEN, by=())
                self._listener.member_forgotten(node)
            if member.rumour.standing is MemberStatus.FORGOTTEN and member.since_s < kept_until_s:
                del shared.members[node]

    # -- lost members --------------------------------------------------------------------------------------------------

    def _lost(self) -> list[Identity | str]:
        """Dead members, members of earlier starts not met since, and seeds without a live member at their address."""
        members = self._shared.members.values()
        addresses = {member.rumour.address for member in members if member.is_there}
        dead = [identity_of(member.rumour) for member in members if member.rumour.standing is MemberStatus.DEAD]
        seeds = [address for address in self.seeds if address not in addresses]
        return [*dead, *self.known.values(), *seeds]

    def _count_lost(self) -> int:
        """The length of `_lost`: needed at every death, of which there may be many together."""
        members = self._shared.members.values()
        dead = sum(member.rumour.standing is MemberStatus.DEAD for member in members)
        there = {member.rumour.address for member in members if member.is_there} if self.seeds else ()
        return dead + len(self.known) + sum(address not in there for address in self.seeds)

    def _look_again(self) -> None:
        """Schedule the next contact with a lost member. After a partition members die one after the other: as their
        share grows, the remaining time shrinks; otherwise the first death alone would determine it."""
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
        """Contact one of the lost members, chosen at random."""
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
            self._shared.send(one.node, member.rumour)  # if it is alive, it refutes this
            self._exchange(one.node)


def identity_of(rumour: MembershipUpdate) -> Identity:
    return Identity(rumour.node, rumour.boot, rumour.machine_boot, rumour.store, rumour.incarnation, rumour.address)


GONE = (MemberStatus.DEAD, MemberStatus.LEFT, MemberStatus.FORGOTTEN)
FORGOTTEN_AHEAD = 1 << 20
"""Lead of a tombstone's refutation number over the known one: later updates of other members about this run cannot
revive it, but the node itself can still refute."""
LEAVE_TOLD_MAX = 16
"""Members that a leaving node notifies itself; they notify the others."""
WARN_S = 1.0
"""Minimum interval, in s, between notices to a node that sends although it is declared dead."""
EPSILON_S = 1e-6
"""Tolerance in s: instants are sums of floats."""
CLASH_S = 10.0
"""Minimum interval, in s, at which a node continues after the greater number of another run under its name."""


class Gossip:
    """The gossip of one node. ``listener``: is notified of what changes."""

    def __init__(self, state: CoreState, listener: GossipListener) -> None:
        self._listener = listener
        self.shared = GossipState(state, listener)
        self.detector = Detector(self.shared, self._unheard)
        self.anti_entropy = AntiEntropy(self.shared, self.everything, listener)
        self.refutation = 0
        self._is_leaving = self._is_asleep = False
        self._raised_s = float("-inf")

    # -- this node itself ----------------------------------------------------------------------------------------------

    @property
    def own(self) -> MembershipUpdate:
        """This node's update about itself."""
        state = self.shared.core
        rumour = rumour_of(state.identity, state.profile, self.refutation)
        if self._is_asleep:
            return msgspec.structs.replace(rumour, standing=MemberStatus.ASLEEP)
        return msgspec.structs.replace(rumour, standing=MemberStatus.LEFT) if self._is_leaving else rumour

    def announce_change(self, *, grave: bool = False) -> None:
        """Broadcast a change of this node."""
        self.refutation += 1
        self.pass_on(self.own, grave=grave)

    def leave(self) -> None:
        """Announce that this node leaves on purpose."""
        self._is_leaving = True
        for node in self.shared.draw(LEAVE_TOLD_MAX):
            self.shared.send(node, self.own)

    def sleep(self) -> None:
        """Announce that this machine is about to be suspended, also over the reliable links. Members pass it on."""
        self._is_asleep = True
        self.refutation += 1
        for node in self.shared.draw(LEAVE_TOLD_MAX):
            self.shared.send(node, self.own)
            self.shared.core.send(node, Sync((self.own,)))

    def wake(self) -> None:
        """Announce that this machine is awake again, if it was asleep."""
        if self._is_asleep:
            self._is_asleep = False
            self.announce_change(grave=True)
            for node in self.shared.draw(LEAVE_TOLD_MAX):
                self.shared.core.send(node, Sync((self.own,)))

    def spread_load(self, report: LoadReport) -> None:
        if self.shared.there:
            self._pass_on_load(Load.of(self.shared.core.node, report, is_news=True))

    # -- updates about others ------------------------------------------------------------------------------------------

    def update_received(self, rumour: MembershipUpdate, src: str, *, spread: bool = True) -> bool:
        """Handle an update → True if it is new. src: the member that passed it on; spread: pass it on further."""
        if rumour.node == self.shared.core.node:
            self._about_this_node(rumour, src)
            return False
        member = self.shared.members.get(rumour.node)
        if src not in ("", rumour.node) and not rumour.is_credible(None if member is None else member.rumour):
            self.shared.core.count(metrics.GOSSIP_INCARNATIONS_TOO_GREAT)
            return False
        age_s = rumour.age_s
        rumour = msgspec.structs.replace(rumour, age_s=0.0) if age_s else rumour
        if member is None:
            if age_s >= self.shared.preset.tombstone_s and rumour.standing in GONE:
                return False
            if not self._admits(rumour):
                self.shared.core.count(metrics.MEMBERS_REFUSED)
                return False
            member = self.shared.members[rumour.node] = GossipMember(rumour, self.shared.now_s - age_s)
            self._believe(member, None, rumour, src)
        else:
            was, now = member.rumour, merged(member.rumour, rumour)
            if now == was:
                return False
            member.rumour = now
            if now.weight != was.weight:
                member.since_s = self.shared.now_s - age_s
            self._believe(member, was, now, src)
            age_s = 0.0
        if spread and age_s < self.shared.preset.sync_s:  # others already know an old update that is new only here
            self.pass_on(member.rumour)
        return True

    def _admits(self, rumour: MembershipUpdate) -> bool:
        """True if one more member may be kept. The oldest tombstone is dropped for a new member if space is short."""
        shared = self.shared
        is_gone = rumour.standing is MemberStatus.FORGOTTEN
        if not is_gone and not self._listener.has_room_for_member():
            return False
        if len(shared.members) < 2 * shared.core.config.peers_max:
            return True
        forgotten = MemberStatus.FORGOTTEN
        gone = [(that.since_s, node) for node, that in shared.members.items() if that.rumour.standing is forgotten]
        if is_gone or not gone:
            return False
        self.drop(min(gone)[1])
        return True

    def _believe(self, member: GossipMember, was: MembershipUpdate | None, now: MembershipUpdate, src: str) -> None:
        """Adopt an update of a member: adjust probing and suspicion."""
        shared = self.shared
        if was is None or was.standing is not now.standing:
            shared.changed()
        if now.standing is not MemberStatus.SUSPECT:
            member.suspicion = None
            shared.disarm(Kind.SUSPECT, now.node)
        elif member.suspicion is None or was is None or was.weight != now.weight:
            member.suspicion = Suspicion(shared.preset, shared.size, shared.now_s)
            self._follow_up(now)
        if member.suspicion is not None:
            self._arm_suspicion(member)
        if member.is_there:
            if was is None or was.standing > MemberStatus.SUSPECT:
                self.detector.joined(now.node)
            self.detector.start()
            self._spread_soon()
        else:
            self.detector.gone(now.node)
        if now.standing >= MemberStatus.LEFT:
            shared.news.drop(now.node)
        self.anti_entropy.changed(now)
        self._listener.member_changed(was, now, src)

    def _follow_up(self, rumour: MembershipUpdate) -> None:
        """Follow up on a suspicion by others: with some probability, probe the suspect. It gets the suspicion with the
        ping and can refute it."""
        shared = self.shared
        chance = shared.preset.corroborators / max(shared.size - 2, 1)
        if shared.core.node not in rumour.by and shared.rng.random() < chance:
            self.detector.probe(rumour.node)

    def _unheard(self, node: str) -> None:
        """Suspect a member after a failed probe."""
        member = self.shared.members.get(node)
        if member is not None and member.is_there:
            accusers = (*member.rumour.by, self.shared.core.node)
            self.update_received(
                msgspec.structs.replace(member.rumour, standing=MemberStatus.SUSPECT, by=accusers[-1:]), ""
            )

    def _arm_suspicion(self, member: GossipMember) -> None:
        suspicion, rumour = member.suspicion, member.rumour
        if suspicion is not None:
            over_s = suspicion.over_s(len(rumour.by), self.shared.health.factor)
            self.shared.arm(Kind.SUSPECT, max(over_s - self.shared.now_s, 0.0), rumour.node)

    def _unrefuted(self, node: str) -> None:
        """Declare a suspect dead after its timeout, unless its suspicion was prolonged meanwhile."""
        shared, member = self.shared, self.shared.members.get(node)
        if member is None or member.suspicion is None:
            return
        if not self.detector.may_judge:
            shared.core.count(metrics.VERDICTS_DEFERRED)
            self.detector.probe(node)
            shared.arm(Kind.SUSPECT, shared.preset.probe_s, node)
        elif member.suspicion.over_s(len(member.rumour.by), shared.health.factor) > shared.now_s + EPSILON_S:
            self._arm_suspicion(member)
        else:
            self.update_received(
                msgspec.structs.replace(member.rumour, standing=MemberStatus.DEAD, by=(shared.core.node,)), ""
            )

    def forget(self, node: str) -> bool:
        """Declare a member gone for good: broadcast that, and stop probing it. False if it is unknown."""
        member, of_earlier_start = self.shared.members.get(node), self.anti_entropy.known.pop(node, None)
        if member is not None and member.rumour.standing is not MemberStatus.FORGOTTEN:
            rumour = member.rumour
        elif (one := of_earlier_start) is not None:
            fields = one.node, one.boot, one.machine_boot, one.store, one.incarnation
            rumour = MembershipUpdate(*fields, 0, MemberStatus.DEAD, one.address)
        else:
            return False
        refutation = max(rumour.refutation, min(rumour.refutation + FORGOTTEN_AHEAD, CLAIM_MAX))
        gone = msgspec.structs.replace(rumour, refutation=refutation, standing=MemberStatus.FORGOTTEN, by=())
        return self.update_received(gone, "") or of_earlier_start is not None

    def drop(self, node: str) -> None:
        """Remove a member that is gone from memory."""
        shared = self.shared
        if shared.members.pop(node, None) is not None:
            shared.disarm(Kind.SUSPECT, node)
            shared.news.drop(node)
            self.detector.gone(node)
            shared.changed()

    def _about_this_node(self, rumour: MembershipUpdate, src: str) -> None:
        """Refute an update about this node, if it is wrong."""
        own = self.own
        if self._is_leaving:
            return
        if max(rumour.incarnation, rumour.refutation) > OUTDO_MAX:
            self.shared.core.count(metrics.GOSSIP_INCARNATIONS_TOO_GREAT)
            return
        if rumour.weight <= own.weight:
            if rumour.boot == own.boot and rumour.standing:  # that node did not receive the refutation
                self.shared.send(src, own)
            return
        if (rumour.boot, rumour.incarnation) == (own.boot, own.incarnation):
            self.shared.core.count(metrics.SUSPICIONS_REFUTED)
            self.shared.health.worse()
            self.refutation = rumour.refutation
        elif self.shared.now_s - self._raised_s < CLASH_S:
            return
        else:  # an earlier run, whose database was lost or replaced by a copy; or another agent of this name
            self.shared.core.count(metrics.INCARNATIONS_RAISED)
            self._raised_s = self.shared.now_s
            self.shared.core.advance_incarnation(rumour.incarnation, is_copy=rumour.store == own.store)
            self.refutation = 0
        self.announce_change(grave=True)
        for node in dict.fromkeys((src, *rumour.by)):
            if node in self.shared.members:
                self.shared.send(node, self.own)

    # -- broadcast -----------------------------------------------------------------------------------------------------

    def pass_on(self, rumour: MembershipUpdate, *, grave: bool = False) -> None:
        """Broadcast an update."""
        self.shared.news.put(rumour, grave=grave)
        self._spread_soon()

    def _spread_soon(self) -> None:
        shared = self.shared
        if shared.news.rumours and shared.there and not shared.is_armed(Kind.SPREAD):
            shared.arm(Kind.SPREAD, shared.preset.spread_s * shared.rng.random())

    def _spread(self) -> None:
        """Run one gossip round: send updates to a few members. No round follows once all updates were sent
        often enough."""
        if unheard := self.shared.draw_unheard():
            self.shared.send(unheard, counts=False)
        for node in self.shared.draw(self.shared.preset.fanout):
            self.shared.send(node)
        if self.shared.news.rumours and self.shared.there:
            self.shared.arm(Kind.SPREAD, self.shared.preset.spread_s)

    def _pass_on_load(self, load: Load) -> None:
        """Piggyback a load on other datagrams; after load_s the remaining loads get their own."""
        self.shared.news.put_load(load)
        if not self.shared.is_armed(Kind.LOADS):
            self.shared.arm(Kind.LOADS, self.shared.preset.load_s)

    def _spread_loads(self) -> None:
        if self.shared.news.loads:
            for node in self.shared.draw(1):
                self.shared.send(node)
        if self.shared.news.loads:
            self.shared.arm(Kind.LOADS, self.shared.preset.load_s)

    # -- events --------------------------------------------------------------------------------------------------------

    def handle(self, event: GossipReceived | LoopLagged) -> None:
        if isinstance(event, GossipReceived):
            self._received(event)
        else:
            self.detector.stalled()

    def _received(self, event: GossipReceived) -> None:
        """Handle a datagram of another node."""
        shared, src = self.shared, event.src
        if event.protocol_min > PROTOCOL_MAX or event.protocol_max < PROTOCOL_MIN:
            shared.core.count(metrics.GOSSIP_OTHER_VERSION)
            return
        if src == shared.core.node:
            shared.core.count(metrics.GOSSIP_UNDER_OWN_NAME)
            return
        member = shared.members.get(src)
        is_current = member is not None and member.rumour.boot == event.src_boot
        if member is not None and is_current:
            shared.heard(member)
            self._spoke(member, over_link=False)
        for message in event.messages:
            self._message_received(src, message, event.address, is_current=is_current)

    def _message_received(self, src: str, message: GossipMessage, address: str, *, is_current: bool) -> None:
        """Handle one message. ``is_current``: it is from the sender's run that this node knows."""
        match message:
            case Load():  # the most frequent first
                self._load_told(message, src)
            case GossipPing():
                self.detector.pinged(src, message, address)
            case GossipAck():
                if is_current:
                    self.detector.acked(src, message.sequence)
            case MembershipUpdate():
                self.update_received(message, src)
            case GossipPingRequest():
                self.detector.asked(src, message, address)
            case GossipNack():
                if is_current:
                    self.detector.nacked(src, message.sequence)

    def _load_told(self, load: Load, src: str) -> None:
        if load.node == self.shared.core.node:
            return
        if self._listener.load_heard(load, src) and load.is_news:
            self._pass_on_load(load)

    def heard_from(self, node: str) -> None:
        """Record that a member has sent something over its link."""
        member = self.shared.members.get(node)
        if member is not None:
            self._spoke(member, over_link=True)

    def _spoke(self, member: GossipMember, *, over_link: bool) -> None:
        """Record a message of a member's current run; a member that is declared dead is notified."""
        shared = self.shared
        if member.rumour.standing is MemberStatus.ALIVE or shared.now_s - member.warned_s < WARN_S:
            return
        member.warned_s = shared.now_s
        if over_link:
            shared.core.send(member.rumour.node, Sync((member.rumour,)))
        else:
            shared.send(member.rumour.node, member.rumour)

    def synced(self, src: str, sync: Sync) -> None:
        """Handle a full exchange from a member over the peer link. It is answered with another if the member requests
        it or is wrong about this node."""
        before = self.refutation, self.shared.core.identity.incarnation
        if src in self.shared.members:
            self.shared.members[src].is_cut_off = False
        for rumour in sync.rumours:
            self.update_received(rumour, src)
        for load in sync.loads:
            self._load_told(load, src)
        if sync.asks:
            self.shared.core.send(src, self.everything(asks=False))
        elif before != (self.refutation, self.shared.core.identity.incarnation):
            self.shared.core.send(src, Sync((self.own,)))

    def everything(self, *, asks: bool) -> Sync:
        """Full exchange: all known members, each with its age."""
        now_s = self.shared.now_s
        rumours = [
            msgspec.structs.replace(member.rumour, age_s=max(now_s - member.since_s, 0.0))
            for member in self.shared.members.values()
        ]
        return Sync((self.own, *rumours[: RUMOURS_MAX - 1]), tuple(islice(self._listener.loads(), RUMOURS_MAX)), asks)

    def unreachable(self, node: str) -> None:
        """Probe a member whose link broke or could not be made."""
        member = self.shared.members.get(node)
        if member is not None and member.is_there:
            self.detector.probe(node)

    def cut_off(self, node: str) -> None:
        """Record that a message to a member could not be sent over a link."""
        member = self.shared.members.get(node)
        if member is not None:
            member.is_cut_off = True

    def timer(self, kind: Kind, subject: str) -> None:
        """Handle one of the timers that were set."""
        late_s = self.shared.expired_s(kind, subject)
        if late_s is None:
            return
        if late_s > self.shared.preset.lag_s:
            self.detector.stalled()
        match kind:
            case Kind.TURN:
                self.detector.turn()
            case Kind.ACK:
                self.detector.unanswered(int(subject))
            case Kind.VERDICT:
                self.detector.failed(int(subject))
            case Kind.NACK:
                self.detector.ack_missing(int(subject))
            case Kind.SUSPECT:
                self._unrefuted(subject)
            case Kind.SPREAD:
                self._spread()
            case Kind.LOADS:
                self._spread_loads()
            case _:
                self.anti_entropy.timer(kind)


def rumour_of(identity: Identity, profile: Profile, refutation: int) -> MembershipUpdate:
    """Update in which a node declares itself alive."""
    return MembershipUpdate(
        identity.node,
        identity.boot,
        identity.machine_boot,
        identity.store,
        identity.incarnation,
        refutation,
        MemberStatus.ALIVE,
        identity.address,
        profile.version,
        profile.protocol_min,
        profile.protocol_max,
    )
