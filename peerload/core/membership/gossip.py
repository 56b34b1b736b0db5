"""Gossip: what this node believes of every other, how a word changes it, and what is passed on ([SWIM02], [LIFEGUARD17]).

Of each node counts the weightiest word (`MembershipUpdate.weight`): a later run before an earlier, within a run a later word of
the node about itself, and of words about the same the graver. So a node that is called dead only has to say that it is
not. No clock is compared with another's, and the order in which words arrive makes no difference.

The parts: `Detector` (probing), `AntiEntropy` (joining, exchanging everything, finding the lost again), and what they share
(`gossip_state.py`). Datagrams come in by `handle`, exchanges over the peer link by `synced`, timers by `timer`.
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
"""Probes in flight at a time; the follow-up of suspicions needs more than one."""
HELPED_MAX = 256
"""Pings in flight on behalf of others."""
NACK_SHARE = 0.8
"""Share of probe_timeout_s after which a helper without an answer sends a nack, so that it arrives in time."""


class _Probe(msgspec.Struct, eq=False):
    """A probe in flight. helpers: the nodes asked to probe indirectly, and whether they gave a sign of life."""

    node: str
    started_s: float
    helpers: dict[str, bool] = {}


class Detector:
    """Probing: one member at a time is pinged, and those that answer nobody are suspected. ``suspect`` is called with one.

    At every second turn it is the next on the ring of names: each node is probed by its neighbour every 2·probe_s whatever
    chance does, and a loss waits no longer for its first probe. At the turns between it is the next of all, in an order
    drawn anew for each round: however many are lost at once, somebody probes each of them.

    A ping without an answer is followed by three helpers' pings and one over the peer link, where no datagram is lost. A
    node that was not running itself draws no conclusions from answers it did not hear.
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
        """True if this node has run, and probed, since it last stood still."""
        return not self._is_stale

    # -- whose turn it is ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start probing, at a random moment, so that nodes that start together do not probe in step."""
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
        """The next on the ring, where names lie in the order of a checksum, so that racks are mixed."""
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
        """A new member takes a random place in the rest of this round."""
        if node not in self._order:
            self._order.insert(self._shared.rng.randint(0, len(self._order)), node)

    def gone(self, node: str) -> None:
        """Remove a member from the ring."""
        if node in self._order:
            self._order.remove(node)

    # -- one probe -----------------------------------------------------------------------------------------------------

    def probe(self, node: str) -> None:
        """Ping it, unless that is being done."""
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
        if member is not None and member.rumour.standing:  # it is the first to hear what is said of it
            self._shared.send(node, ping, member.rumour, address=address, with_load=True)
        else:
            self._shared.send(node, ping, address=address, with_load=True)

    def unanswered(self, sequence: int) -> None:
        """probe_timeout_s is over: others try, and the peer link."""
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
        """Answer, if it is this node that is meant."""
        if ping.to == self._shared.core.node:
            self._shared.send(src, GossipAck(ping.sequence), address=address, with_load=True)

    def acked(self, src: str, sequence: int, *, over_link: bool = False) -> None:
        """Handle an acknowledgement of a member, to this node or to a helper, or over its link."""
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
        """Tell the asker by a nack that no ack has come; one that comes later is still passed on."""
        helped = self._helped.get(sequence)
        if helped is not None:
            asker, address, asked = helped
            self._shared.send(asker, GossipNack(asked), address=address)

    # -- standing still ------------------------------------------------------------------------------------------------

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
"""Members above which everything is exchanged less often."""
JITTER = 0.1
"""Exchanges come at sync_s ± this share, so that nodes that start together do not beat together."""


class AntiEntropy:
    """Joining, exchanging everything with one member now and then, and finding lost members again, for ever.

    Datagrams go to the living only. So whoever was called dead, rightly or since the network had split, would stay dead for
    ever if nobody tried: each node goes on trying its lost members, the members of its last start and its seeds, all
    together about once in `reconnect_s` for each that is lost.

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
        """Try a few members that may be there, as long as none is known to be."""
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

    # -- exchanging everything -----------------------------------------------------------------------------------------

    def _arm_sync(self) -> None:
        shared = self._shared
        scale = math.ceil(math.log2(shared.size / SCALED_ABOVE)) + 1 if shared.size > SCALED_ABOVE else 1
        shared.arm(Kind.SYNC, shared.preset.sync_s * scale * shared.rng.uniform(1.0 - JITTER, 1.0 + JITTER))

    def _sync(self) -> None:
        """Exchange everything with a member that could be reached the last time, and try one of those that could not."""
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
        """Forget those that left long ago, and drop the tombstones of those that were forgotten long ago."""
        shared = self._shared
        left_until_s = shared.now_s - shared.preset.left_s
        kept_until_s = shared.now_s - shared.preset.tombstone_s
        for node, member in list(shared.members.items()):
            if member.rumour.standing is MemberStatus.LEFT and member.since_s < left_until_s:
                member.rumour = msgspec.structs.replace(member.rumour, standing=MemberStatus.FORGOTTEN, by=())
                self._listener.member_forgotten(node)
            if member.rumour.standing is MemberStatus.FORGOTTEN and member.since_s < kept_until_s:
                del shared.members[node]

    # -- the lost ------------------------------------------------------------------------------------------------------

    def _lost(self) -> list[Identity | str]:
        """Members called dead, members of earlier starts not heard of since, seeds where nobody known is alive."""
        members = self._shared.members.values()
        addresses = {member.rumour.address for member in members if member.is_there}
        dead = [identity_of(member.rumour) for member in members if member.rumour.standing is MemberStatus.DEAD]
        seeds = [address for address in self.seeds if address not in addresses]
        return [*dead, *self.known.values(), *seeds]

    def _count_lost(self) -> int:
        """The number of nodes in `_lost`: this is asked at every death, of which there may be many at once."""
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
            self._shared.send(one.node, member.rumour)  # if it is there, it says so
            self._exchange(one.node)


def identity_of(rumour: MembershipUpdate) -> Identity:
    return Identity(rumour.node, rumour.boot, rumour.machine_boot, rumour.store, rumour.incarnation, rumour.address)


GONE = (MemberStatus.DEAD, MemberStatus.LEFT, MemberStatus.FORGOTTEN)
FORGOTTEN_AHEAD = 1 << 20
"""Lead of a tombstone's refutation number over the known one: members that heard later of that run bring it back no more than
others, and the node itself can still object."""
LEAVE_TOLD_MAX = 16
"""Members that a node tells itself that it leaves; they tell the others."""
WARN_S = 1.0
"""Shortest interval, in s, at which a node that sends although it is declared dead is notified of that."""
EPSILON_S = 1e-6
"""Instants are sums of floats."""
CLASH_S = 10.0
"""A node whose name another run carries with a greater number counts on from there at most this often."""


class Gossip:
    """The gossip of one node. ``listener``: whom it tells what it has heard."""

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
        """Something about this node has changed: say so."""
        self.refutation += 1
        self.pass_on(self.own, grave=grave)

    def leave(self) -> None:
        """Announce that this node leaves on purpose."""
        self._is_leaving = True
        for node in self.shared.draw(LEAVE_TOLD_MAX):
            self.shared.send(node, self.own)

    def sleep(self) -> None:
        """Announce that this machine is about to be suspended, also over the links, where nothing is lost. Members pass
        it on."""
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

    # -- what is said of others ----------------------------------------------------------------------------------------

    def update_received(self, rumour: MembershipUpdate, src: str, *, spread: bool = True) -> bool:
        """Handle an update → True if it is news. src: the member that passed it on; spread: pass it on further."""
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
        if spread and age_s < self.shared.preset.sync_s:  # what is old and new here only is known elsewhere
            self.pass_on(member.rumour)
        return True

    def _admits(self, rumour: MembershipUpdate) -> bool:
        """True if one more member may be kept. Names of those that are gone for good are kept only while there is room, and
        make it for whoever comes: the longest known first."""
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
        """Follow up on a suspicion of others: perhaps confirm it, or else send it to the suspect, which can
        refute it."""
        shared = self.shared
        chance = shared.preset.corroborators / max(shared.size - 2, 1)
        if shared.core.node not in rumour.by and shared.rng.random() < chance:
            self.detector.probe(rumour.node)

    def _unheard(self, node: str) -> None:
        """A probe of it has failed."""
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
        """Declare a suspect dead whose time is over, unless its suspicion was prolonged meanwhile."""
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
        """Declare a member gone for good: broadcast that, and stop probing it. False if it is not known."""
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
        """Think no more of a member that is gone."""
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
            if rumour.boot == own.boot and rumour.standing:  # its refutation was lost on the way to that node
                self.shared.send(src, own)
            return
        if (rumour.boot, rumour.incarnation) == (own.boot, own.incarnation):
            self.shared.core.count(metrics.SUSPICIONS_REFUTED)
            self.shared.health.worse()
            self.refutation = rumour.refutation
        elif self.shared.now_s - self._raised_s < CLASH_S:
            return
        else:  # an earlier run, of a database that was lost or put back since; or another agent of this name
            self.shared.core.count(metrics.INCARNATIONS_RAISED)
            self._raised_s = self.shared.now_s
            self.shared.core.advance_incarnation(rumour.incarnation, is_copy=rumour.store == own.store)
            self.refutation = 0
        self.announce_change(grave=True)
        for node in dict.fromkeys((src, *rumour.by)):
            if node in self.shared.members:
                self.shared.send(node, self.own)

    # -- passing on ----------------------------------------------------------------------------------------------------

    def pass_on(self, rumour: MembershipUpdate, *, grave: bool = False) -> None:
        """Let everybody know."""
        self.shared.news.put(rumour, grave=grave)
        self._spread_soon()

    def _spread_soon(self) -> None:
        shared = self.shared
        if shared.news.rumours and shared.there and not shared.is_armed(Kind.SPREAD):
            shared.arm(Kind.SPREAD, shared.preset.spread_s * shared.rng.random())

    def _spread(self) -> None:
        """Run one gossip round: send news to a few members. No round follows once all news has been sent
        often enough."""
        if unheard := self.shared.draw_unheard():
            self.shared.send(unheard, counts=False)
        for node in self.shared.draw(self.shared.preset.fanout):
            self.shared.send(node)
        if self.shared.news.rumours and self.shared.there:
            self.shared.arm(Kind.SPREAD, self.shared.preset.spread_s)

    def _pass_on_load(self, load: Load) -> None:
        """Piggyback a load on other datagrams; what is left after load_s has one of its own."""
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
        """A datagram of another node."""
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
        """Handle one message. ``is_current``: the sender's start is the one that this node believes in."""
        match message:
            case Load():  # the frequent ones first
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
        """Record a message of a member's current run; one that is declared dead is told so."""
        shared = self.shared
        if member.rumour.standing is MemberStatus.ALIVE or shared.now_s - member.warned_s < WARN_S:
            return
        member.warned_s = shared.now_s
        if over_link:
            shared.core.send(member.rumour.node, Sync((member.rumour,)))
        else:
            shared.send(member.rumour.node, member.rumour)

    def synced(self, src: str, sync: Sync) -> None:
        """Handle a full exchange from a member over the peer link. It is answered with another if the member asks for
        that, or is wrong about this node."""
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
        """Full exchange: all that this node knows of the members, each with its age."""
        now_s = self.shared.now_s
        rumours = [
            msgspec.structs.replace(member.rumour, age_s=max(now_s - member.since_s, 0.0))
            for member in self.shared.members.values()
        ]
        return Sync((self.own, *rumours[: RUMOURS_MAX - 1]), tuple(islice(self._listener.loads(), RUMOURS_MAX)), asks)

    def unreachable(self, node: str) -> None:
        """The link to a member broke, or could not be made: see at once whether it is there."""
        member = self.shared.members.get(node)
        if member is not None and member.is_there:
            self.detector.probe(node)

    def cut_off(self, node: str) -> None:
        """A message to a member could not be sent over a link."""
        member = self.shared.members.get(node)
        if member is not None:
            member.is_cut_off = True

    def timer(self, kind: Kind, subject: str) -> None:
        """Handle one of the timers that were armed."""
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
    """Update by which a node declares itself alive."""
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
