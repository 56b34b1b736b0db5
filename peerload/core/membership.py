"""Who is there: the peers this node has heard of, what they last said, and whom it suspects.

One peer, in turn, is pinged every `ping_s`; whoever has not been heard of for `suspect_after_s` is suspected, later
called dead. That is advice: it stops new probes and offers, it never re-queues a task.

Peers meet one by one (`meet`), or all at once through a shared directory (`meet_all`): then nothing is kept here of
those of whom nothing else was heard.
"""

from __future__ import annotations

import enum
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from peerload.core.admission import why_never
from peerload.core.directory import ELIGIBLE_KEPT_MAX, NOBODY, Names
from peerload.model.actions import Dial
from peerload.model.load import LoadReport
from peerload.model.messages import PEERS_TOLD_MAX, Hello, Need, Ping, Pong
from peerload.policy.api import KnownReport

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from peerload.core.directory import Directory
    from peerload.core.state import CoreState
    from peerload.model.messages import Identity
    from peerload.model.resources import Profile


class PeerState(enum.StrEnum):
    """What is believed of a peer."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


class Peer:
    """One peer as seen from here. heard_s: boot time of the last live word; pinged_s: of a ping since then, 0 = none."""

    __slots__ = ("heard_s", "identity", "pinged_s", "profile", "state")

    def __init__(self, identity: Identity, profile: Profile, heard_s: float) -> None:
        self.identity = identity
        self.profile = profile
        self.heard_s = heard_s
        self.pinged_s = 0.0
        self.state = PeerState.ALIVE


class Heard(msgspec.Struct, frozen=True, gc=False):
    """A report and the boot time when it came."""

    report: LoadReport
    at_s: float


class Membership:
    """The peers by name: in ``_peers`` those of whom something was heard here, and the rest of ``_directory``."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        believed_s = getattr(state.policies.information, "believed_s", state.config.report_age_s_max)
        self._believed_s = min(believed_s, state.config.report_age_s_max)
        self._peers: dict[str, Peer] = {}
        self._directory = NOBODY
        self._met_s = 0.0
        self._names: Sequence[str] = ()
        self._reports: dict[str, Heard] = {}
        self._eligible: dict[Need, Names] = {}
        self._declined: dict[tuple[str, str, bytes], float] = {}
        self._turn = 0
        self._sequence = 0

    def __iter__(self) -> Iterator[Peer]:
        yield from self._peers.values()
        for name in Names(self._directory.names, without=self._state.node):
            if name not in self._peers:
                yield self._listed(name)

    def get(self, node: str) -> Peer | None:
        """The peer of this name, whatever is believed of it; to be looked at only."""
        peer = self._peers.get(node)
        return self._listed(node) if peer is None and self._is_listed(node) else peer

    def has_any(self) -> bool:
        """Whether any peer was ever met."""
        return bool(self._names)

    def is_usable(self, node: str) -> bool:
        """Whether probes and offers may go there."""
        peer = self._peers.get(node)
        if peer is None:
            return self._is_listed(node) and not self._directory.members[node][1].drained
        return peer.state is PeerState.ALIVE and not peer.profile.drained

    def known(self) -> tuple[Identity, ...]:
        """Members to tell a newcomer about, at most PEERS_TOLD_MAX."""
        alive = (peer.identity for peer in self if peer.state is PeerState.ALIVE and peer.identity.address)
        return tuple(islice(alive, PEERS_TOLD_MAX))

    def report(self, node: str) -> KnownReport | None:
        """The newest report of a peer, unless it is too old to be believed."""
        heard = self._reports.get(node)
        if heard is None:
            return None
        age_s = self._state.now.boot_s - heard.at_s
        return KnownReport(heard.report, age_s) if age_s <= self._believed_s else None

    def last_report(self, node: str) -> Heard | None:
        """The newest report of a peer, however old."""
        return self._reports.get(node)

    # -- what was heard ------------------------------------------------------------------------------------------------

    def meet_all(self, directory: Directory) -> None:
        """Everybody in it, at once; it may name this node, too. Only before anybody else was met."""
        self._directory = directory
        self._met_s = self._state.now.boot_s
        self._names = Names(directory.names, without=self._state.node)
        self._eligible.clear()

    def meet(self, identity: Identity, profile: Profile, report: LoadReport | None) -> bool:
        """A peer introduced itself. True if it is new here, or another start of one that was known."""
        if identity.node == self._state.node:
            return False
        peer = self._own(identity.node)
        now_s = self._state.now.boot_s
        is_new = peer is None or peer.identity.boot != identity.boot
        if (
            peer is not None
            and identity.incarnation < peer.identity.incarnation
            and identity.store == peer.identity.store
        ):
            return False  # a late word of an earlier start
        if peer is None:
            if len(self._names) >= self._state.config.peers_max:
                self._state.count("peers refused")
                return False
            peer = Peer(identity, profile, now_s)
            self._peers[identity.node] = peer
            self._names = sorted([*self._names, identity.node])
            self._eligible.clear()
            self._state.note("node", PeerState.ALIVE.value, node=identity.node, reason="met")
        if is_new:
            self._reports.pop(identity.node, None)
        if profile != peer.profile or is_new:
            self._eligible.clear()
        peer.identity = identity
        peer.profile = profile
        self._alive(peer)
        if report is not None:
            self.heard_report(identity.node, report)
        return is_new

    def heard(self, node: str) -> None:
        """Any word of a peer shows that it is there."""
        peer = self._peers.get(node)
        if peer is not None:
            self._alive(peer)

    def heard_report(self, node: str, report: LoadReport) -> bool:
        """A peer told its load. The newest (incarnation, sequence) wins; True if this one did."""
        known = self._reports.get(node)
        if known is None:
            if node not in self._peers and not self._is_listed(node):
                return False
            if len(self._reports) >= self._state.config.reports_kept_max:
                del self._reports[next(iter(self._reports))]
        elif (report.incarnation, report.sequence) <= (known.report.incarnation, known.report.sequence):
            return False
        else:
            del self._reports[node]  # so that the first is the one that came longest ago
        self._reports[node] = Heard(report, self._state.now.boot_s)
        return True

    def left(self, node: str) -> None:
        """A peer said good-bye."""
        self._become(node, PeerState.LEFT, "it said good-bye")

    def unreachable(self, node: str) -> None:
        """The link to a peer broke: ask it at once rather than in its turn."""
        peer = self._own(node)
        if peer is not None and peer.state is PeerState.ALIVE:
            self._become(node, PeerState.SUSPECT, "its link broke")
            self._ping(peer)

    def learn(self, known: Sequence[Identity]) -> None:
        """Others' members: whoever is new here is dialled, and introduces itself."""
        for identity in known:
            if identity.node == self._state.node or not identity.address:
                continue
            peer = self.get(identity.node)
            if peer is None or (peer.state is not PeerState.ALIVE and peer.identity.boot != identity.boot):
                self._state.actions.append(Dial(identity))

    # -- asking --------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Every `ping_s`: suspect the silent, ping the next in turn."""
        state = self._state
        state.set_timer_in(state.config.ping_s, "ping")
        if not self._names:
            return
        self._turn = (self._turn + 1) % len(self._names)
        peer = self._own(self._names[self._turn])
        if peer is not None:
            self._ping(peer)
        for peer in self._peers.values():
            self._judge(peer)
        for key in [key for key, until_s in self._declined.items() if until_s < state.now.boot_s]:
            del self._declined[key]

    def pinged(self, src: str, ping: Ping, report: LoadReport) -> None:
        """Answer."""
        self._state.send(src, Pong(ping.sequence, report))

    def hello(self, report: LoadReport) -> Hello:
        """How this node introduces itself."""
        return Hello(self._state.identity, self._state.profile, report, self.known())

    # -- who may run what ----------------------------------------------------------------------------------------------

    def eligible(self, need: Need, home: str) -> Sequence[str]:
        """The usable peers that could ever run this, by name."""
        key = need if not need.migrations else Need(need.request, need.placement)
        found = self._eligible.get(key)
        if found is None:
            found = self._eligible_now(key, home)
            if len(self._eligible) >= ELIGIBLE_KEPT_MAX:
                self._eligible.clear()
            self._eligible[key] = found
        return found

    def _eligible_now(self, need: Need, home: str) -> Names:
        listed = self._directory.eligible(need, home)
        if not self._peers:
            return Names(listed, without=self._state.node)
        own = (
            name
            for name, peer in self._peers.items()
            if self.is_usable(name) and not why_never(peer.profile, need.request, need.placement, home)
        )
        return Names(tuple(sorted([*own, *(name for name in listed if name not in self._peers)])), self._state.node)

    def could_ever(self, need: Need, home: str) -> bool:
        """Whether any peer not known to have left could run this, also one that is silent or drained now."""
        return any(
            peer.state is not PeerState.LEFT and not why_never(peer.profile, need.request, need.placement, home)
            for peer in self
        )

    def remember_decline(self, node: str, code: str, subject: bytes) -> None:
        """A decline for a lasting reason: do not probe again for a while."""
        if len(self._declined) < self._state.config.declines_remembered_max:
            self._declined[(node, code, subject)] = self._state.now.boot_s + self._state.config.decline_memory_s

    def has_declined(self, node: str, code: str, subject: bytes) -> bool:
        """Whether this node declined that lately."""
        return bool(self._declined) and self._declined.get((node, code, subject), 0.0) > self._state.now.boot_s

    def any_declined(self) -> bool:
        """Whether anything is remembered at all (the common case is no)."""
        return bool(self._declined)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _is_listed(self, node: str) -> bool:
        return node in self._directory.members and node != self._state.node

    def _listed(self, node: str) -> Peer:
        identity, profile = self._directory.members[node]
        return Peer(identity, profile, self._met_s)

    def _own(self, node: str) -> Peer | None:
        """The peer of this name, to be changed."""
        peer = self._peers.get(node)
        if peer is None and self._is_listed(node):
            peer = self._peers[node] = self._listed(node)
        return peer

    def _alive(self, peer: Peer) -> None:
        peer.heard_s = self._state.now.boot_s
        peer.pinged_s = 0.0
        if peer.state is not PeerState.ALIVE:
            self._become(peer.identity.node, PeerState.ALIVE, "heard again")

    def _become(self, node: str, state: PeerState, reason: str) -> None:
        peer = self._own(node)
        if peer is not None and peer.state is not state:
            peer.state = state
            self._eligible.clear()
            self._state.count(f"peers became {state.value}")
            self._state.note("node", state.value, node=node, reason=reason)

    def _ping(self, peer: Peer) -> None:
        if peer.state is PeerState.LEFT:
            return
        self._sequence += 1
        if not peer.pinged_s:
            peer.pinged_s = self._state.now.boot_s
        self._state.send(peer.identity.node, Ping(self._sequence))

    def _judge(self, peer: Peer) -> None:
        if peer.state is PeerState.LEFT or not peer.pinged_s:
            return
        silent_s = self._state.now.boot_s - max(peer.heard_s, peer.pinged_s)
        if silent_s > self._state.config.dead_after_s:
            self._become(peer.identity.node, PeerState.DEAD, f"silent for {silent_s:.1f} s")
        elif silent_s > self._state.config.suspect_after_s and peer.state is PeerState.ALIVE:
            self._become(peer.identity.node, PeerState.SUSPECT, f"silent for {silent_s:.1f} s")
