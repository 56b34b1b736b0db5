"""State that the parts of gossip share: members, news, this node's health, and timers that know how late they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol
from zlib import crc32

from peerload.core.membership.broadcast_queue import BroadcastQueue
from peerload.core.membership.suspicion import LocalHealth
from peerload.model import metrics, timers
from peerload.model.actions import SendGossip
from peerload.model.gossip import Load, MemberStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from peerload.core.membership.suspicion import Suspicion
    from peerload.core.state import CoreState
    from peerload.model.gossip import GossipMessage, GossipPreset, MembershipUpdate
    from peerload.model.load import LoadReport


class GossipMember:
    """Belief about another node. since_s: boot time since when; heard_s: of its last message to this node."""

    __slots__ = ("heard_s", "rumour", "since_s", "suspicion", "synced_s", "warned_s")

    def __init__(self, rumour: MembershipUpdate, since_s: float) -> None:
        self.rumour = rumour
        self.since_s = since_s
        self.heard_s = float("-inf")
        self.synced_s = float("-inf")
        self.warned_s = float("-inf")
        self.suspicion: Suspicion | None = None

    @property
    def is_there(self) -> bool:
        """Alive, or suspected and not given up yet: it is probed, and told the news."""
        return self.rumour.standing <= MemberStatus.SUSPECT

    @property
    def is_gone(self) -> bool:
        """No member any more."""
        return self.rumour.standing in (MemberStatus.LEFT, MemberStatus.FORGOTTEN)


class GossipListener(Protocol):
    """Calls of gossip to the machine that keeps the peers."""

    def member_changed(self, was: MembershipUpdate | None, now: MembershipUpdate, src: str, /) -> None:
        """A member is believed to be ``now``; ``was``: before, None if nothing was; ``src`` said so."""

    def member_forgotten(self, node: str, /) -> None:
        """A member that left long ago is listed no more."""

    def has_room_for_member(self) -> bool:
        """True if one more member may be kept."""

    def load_heard(self, load: Load, src: str, /) -> bool:
        """``src`` told this load. Whether it was news."""

    def loads(self) -> Iterable[Load]:
        """The newest loads known, for members that are new."""

    def own_load(self) -> LoadReport | None:
        """The load that this node reports now; None: it reports none."""


class GossipState:
    """members: by name, without this node. rng: gossip's own, so that what it draws changes nothing that policies draw."""

    def __init__(self, state: CoreState, listener: GossipListener) -> None:
        self.core = state
        self.rng = type(state.rng)(f"{state.identity.boot} gossip")
        self.preset: GossipPreset = state.config.gossip
        self.members: dict[str, GossipMember] = {}
        self.news = BroadcastQueue(self.preset.retransmit_mult, self.preset.loads_max)
        self.health = LocalHealth(self.preset.health_max)
        self._listener = listener
        self._there: tuple[str, ...] | None = None
        self._ring: tuple[tuple[int, str], ...] | None = None
        self._due_s: dict[tuple[str, str], float] = {}

    @property
    def now_s(self) -> float:
        """CLOCK_BOOTTIME."""
        return self.core.now.boot_s

    # -- who is there --------------------------------------------------------------------------------------------------

    @property
    def there(self) -> Sequence[str]:
        """The names of the members that are alive or suspected, in order."""
        if self._there is None:
            self._there = tuple(sorted(name for name, member in self.members.items() if member.is_there))
        return self._there

    @property
    def size(self) -> int:
        """n: those, and this node."""
        return len(self.there) + 1

    def changed(self) -> None:
        """The standing of a member has changed."""
        self._there = self._ring = None

    @property
    def ring(self) -> Sequence[tuple[int, str]]:
        """The names of the members that are alive and not suspected, in the order of `ring_place`; if there is none, of
        the suspects."""
        if self._ring is None:
            alive = [name for name in self.there if self.members[name].rumour.standing is MemberStatus.ALIVE]
            self._ring = tuple(sorted((crc32(name.encode()), name) for name in alive or self.there))
        return self._ring

    def draw(self, count: int, without: str = "") -> list[str]:
        """A random sample of members, smaller if there are not so many."""
        names = [name for name in self.there if name != without]
        return self.rng.sample(names, min(count, len(names)))

    # -- datagrams -----------------------------------------------------------------------------------------------------

    def send(self, node: str, *messages: GossipMessage, address: str = "", with_load: bool = False) -> None:
        """One datagram to a node, and what news there is room for. ``address``: where to, if not where the member is
        known to be."""
        address = address or self._address(node)
        if not address:
            self.core.count(metrics.GOSSIP_WITHOUT_ADDRESS)
            return
        room = list(messages)
        report = self._listener.own_load() if with_load and self.preset.loads_max else None
        if report is not None:
            room.append(Load.of(self.core.node, report))
        told = self.news.take(room, self.size)
        if told:
            self.core.actions.append(SendGossip(node, address, tuple(told)))
            self.core.count(metrics.GOSSIP_MESSAGES_QUEUED)

    def _address(self, node: str) -> str:
        member = self.members.get(node)
        return member.rumour.address if member is not None else ""

    # -- timers --------------------------------------------------------------------------------------------------------

    def arm(self, kind: timers.GossipTimerKind, seconds: float, subject: str = "") -> None:
        """Set a timer; replaces the same one."""
        self._due_s[(kind, subject)] = self.now_s + seconds
        self.core.set_timer_in(seconds, timers.GossipDue(kind, subject))

    def disarm(self, kind: timers.GossipTimerKind, subject: str = "") -> None:
        """Clear a timer."""
        if self._due_s.pop((kind, subject), None) is not None:
            self.core.clear_timer(timers.GossipDue(kind, subject))

    def is_armed(self, kind: timers.GossipTimerKind, subject: str = "") -> bool:
        """True if this timer is set."""
        return (kind, subject) in self._due_s

    def left_s(self, kind: timers.GossipTimerKind, subject: str = "") -> float | None:
        """In how long this timer comes; None if it is not set."""
        due_s = self._due_s.get((kind, subject))
        return None if due_s is None else max(due_s - self.now_s, 0.0)

    def expired_s(self, kind: timers.GossipTimerKind, subject: str) -> float | None:
        """Seconds by which the timer that has just expired was late; None if it is not set any more."""
        due_s = self._due_s.pop((kind, subject), None)
        return None if due_s is None else self.now_s - due_s
