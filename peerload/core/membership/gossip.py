"""Gossip: what this node believes of every other, how a word changes it, and what is passed on ([SWIM02], [LIFEGUARD17]).

Of each node counts the weightiest word (`MembershipUpdate.weight`): a later run before an earlier, within a run a later word of
the node about itself, and of words about the same the graver. So a node that is called dead only has to say that it is
not. No clock is compared with another's, and the order in which words arrive makes no difference.

The parts: `detector` (probing), `suspicion` (how long to refute), `rumours` (what is passed on), `contacts` (joining,
exchanging everything, finding the lost again), `health`. Datagrams come in by `received`, exchanges over the peer link
by `synced`, timers by `timer`.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from peerload.core.membership.anti_entropy import AntiEntropy
from peerload.core.membership.detector import Detector
from peerload.core.membership.gossip_state import GossipMember, GossipState
from peerload.core.membership.suspicion import Suspicion
from peerload.model import metrics
from peerload.model.events import GossipReceived
from peerload.model.gossip import (
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
from peerload.model.messages import PROTOCOL_MAX, PROTOCOL_MIN, RUMOURS_MAX, Sync
from peerload.model.timers import GossipTimerKind as Kind

if TYPE_CHECKING:
    from peerload.core.membership.gossip_state import GossipListener
    from peerload.core.state import CoreState
    from peerload.model.events import LoopLagged
    from peerload.model.gossip import GossipMessage
    from peerload.model.load import LoadReport
    from peerload.model.messages import Identity
    from peerload.model.resources import Profile

LEAVE_TOLD_MAX = 16
"""Members that a node tells itself that it leaves; they tell the others."""
WARN_S = 1.0
"""A node that speaks although it is called dead is told so at most this often."""
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
        """This node's word about itself."""
        state = self.shared.core
        rumour = rumour_of(state.identity, state.profile, self.refutation)
        if self._is_asleep:
            return msgspec.structs.replace(rumour, standing=MemberStatus.ASLEEP)
        return msgspec.structs.replace(rumour, standing=MemberStatus.LEFT) if self._is_leaving else rumour

    def speak(self, *, grave: bool = False) -> None:
        """Something about this node has changed: say so."""
        self.refutation += 1
        self.pass_on(self.own, grave=grave)

    def leave(self) -> None:
        """This node stops on purpose."""
        self._is_leaving = True
        for node in self.shared.draw(LEAVE_TOLD_MAX):
            self.shared.send(node, self.own)

    def sleep(self) -> None:
        """This machine is about to be suspended: members that know it pass it on. Over their links, too, where nothing is lost."""
        self._is_asleep = True
        self.refutation += 1
        for node in self.shared.draw(LEAVE_TOLD_MAX):
            self.shared.send(node, self.own)
            self.shared.core.send(node, Sync((self.own,)))

    def wake(self) -> None:
        """It is back, if it was."""
        if self._is_asleep:
            self._is_asleep = False
            self.speak(grave=True)
            for node in self.shared.draw(LEAVE_TOLD_MAX):
                self.shared.core.send(node, Sync((self.own,)))

    def spread_load(self, report: LoadReport) -> None:
        """This node's load, for everybody."""
        if self.shared.there:
            self._pass_on_load(Load.of(self.shared.core.node, report, is_news=True))

    # -- what is said of others ----------------------------------------------------------------------------------------

    def update_received(self, rumour: MembershipUpdate, src: str, *, spread: bool = True) -> bool:
        """Somebody says this; true if it is news. ``src``: who passed it on; spread: whether it is worth passing on."""
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
            if age_s >= self.shared.preset.tombstone_s and GossipMember(rumour, 0.0).is_gone:
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
        """The word of a member has changed: what follows for probing and suspicion."""
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
        """Of a suspicion of others: perhaps confirm it, or else bring the suspect the word to refute."""
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
        """The time of a suspect is over, if nothing was said meanwhile to prolong it."""
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

    def forget(self, node: str) -> None:
        """Forget a member that is gone for good, as its operator says: it is broadcast, and nobody looks for it any more."""
        member = self.shared.members.get(node)
        if member is not None:
            self.update_received(msgspec.structs.replace(member.rumour, standing=MemberStatus.FORGOTTEN, by=()), "")

    def drop(self, node: str) -> None:
        """Think no more of a member that is gone."""
        shared = self.shared
        if shared.members.pop(node, None) is not None:
            shared.disarm(Kind.SUSPECT, node)
            shared.news.drop(node)
            self.detector.gone(node)
            shared.changed()

    def _about_this_node(self, rumour: MembershipUpdate, src: str) -> None:
        """Refute what others say of this node, if it is wrong."""
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
            self.shared.core.outdo(rumour.incarnation, is_copy=rumour.store == own.store)
            self.refutation = 0
        self.speak(grave=True)
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
        """One round: a few members are told what is new; none follows when all has been sent often enough."""
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
        """Handle an event of gossip."""
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
            self._spoke(member, over_link=False)
        for message in event.messages:
            self._said(src, message, event.address, is_current=is_current)

    def _said(self, src: str, message: GossipMessage, address: str, *, is_current: bool) -> None:
        """One message; ``is_current``: it is the run that is believed in who says it."""
        match message:
            case GossipPing():
                self.detector.pinged(src, message, address)
            case GossipPingRequest():
                self.detector.asked(src, message, address)
            case GossipAck():
                if is_current:
                    self.detector.acked(src, message.sequence)
            case GossipNack():
                if is_current:
                    self.detector.nacked(src, message.sequence)
            case MembershipUpdate():
                self.update_received(message, src)
            case Load():
                self._load_told(message, src)

    def _load_told(self, load: Load, src: str) -> None:
        if load.node == self.shared.core.node:
            return
        if self._listener.load_heard(load, src) and load.is_news:
            self._pass_on_load(load)

    def heard_from(self, node: str) -> None:
        """Note that a member has sent something over its link."""
        member = self.shared.members.get(node)
        if member is not None:
            self._spoke(member, over_link=True)

    def _spoke(self, member: GossipMember, *, over_link: bool) -> None:
        """A word of the run that is believed in; if that is called dead, it should know."""
        shared = self.shared
        member.heard_s = shared.now_s
        if member.rumour.standing is MemberStatus.ALIVE or shared.now_s - member.warned_s < WARN_S:
            return
        member.warned_s = shared.now_s
        if over_link:
            shared.core.send(member.rumour.node, Sync((member.rumour,)))
        else:
            shared.send(member.rumour.node, member.rumour)

    def synced(self, src: str, sync: Sync) -> None:
        """All that another member knows, over the peer link; it is answered in kind if it asks, or is wrong about this
        node."""
        before = self.refutation, self.shared.core.identity.incarnation
        for rumour in sync.rumours:
            self.update_received(rumour, src)
        for load in sync.loads:
            self._load_told(load, src)
        if sync.asks:
            self.shared.core.send(src, self.everything(asks=False))
        elif before != (self.refutation, self.shared.core.identity.incarnation):
            self.shared.core.send(src, Sync((self.own,)))

    def everything(self, *, asks: bool) -> Sync:
        """All that this node knows, with its age."""
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

    def timer(self, kind: Kind, subject: str) -> None:
        """One of the timers that were armed."""
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
                self.detector.nothing_heard(int(subject))
            case Kind.SUSPECT:
                self._unrefuted(subject)
            case Kind.SPREAD:
                self._spread()
            case Kind.LOADS:
                self._spread_loads()
            case _:
                self.anti_entropy.timer(kind)


def rumour_of(identity: Identity, profile: Profile, refutation: int) -> MembershipUpdate:
    """The update of a node that says itself that it is alive."""
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
