"""Shared state of gossip: members with their suspicions, the broadcast queue, this node's health, and timers that
measure their own delay ([SWIM02], [LIFEGUARD17])."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol
from zlib import crc32

import msgspec

from peerload.model import metrics, timers
from peerload.model.actions import SendGossip
from peerload.model.gossip import MESSAGES_BYTES_MAX, MESSAGES_MAX, Load, MembershipUpdate, MemberStatus, size_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from peerload.core.state import CoreState
    from peerload.model.gossip import GossipMessage, GossipPreset
    from peerload.model.resources import LoadReport


GRAVE, PRESENCE, LOADS = range(3)


class _News:
    """An update in the broadcast queue. urgency: GRAVE, PRESENCE or LOADS; sent: number of its datagrams."""

    __slots__ = ("bytes", "message", "number", "sent", "urgency")

    def __init__(self, message: GossipMessage, urgency: int, number: int) -> None:
        self.message = message
        self.urgency = urgency
        self.bytes = size_bytes(message)
        self.number = number
        self.sent = 0

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sort key, smallest first: graver updates, then those sent less often, then newer ones."""
        return self.urgency, self.sent, -self.number


def transmissions(mult: int, members: int) -> int:
    """The number of times that each node sends each update: mult · max(2, ceil(log10(n + 1))). Few members get as many
    as 99, since ping answers reach the same few members again and again."""
    return mult * max(math.ceil(math.log10(members + 1)), 2)


class BroadcastQueue:
    """Broadcast queue: membership updates still to be sent, in which order, and how often.

    Updates ride on every datagram that is sent anyway; while there are any, extra rounds of datagrams are sent for
    them. For each member only the newest is kept. Updates about life and death go first, then presence, then loads;
    among these, the least sent ([SWIM02] section 4.1). Size: at most one update and one load for each member.

    rumours, loads: the number of each. ``mult``, ``loads_max``: of the preset.
    """

    def __init__(self, mult: int, loads_max: int) -> None:
        self._mult = mult
        self._loads_max = loads_max
        self.rumours = 0
        self.loads = 0
        self._news: dict[tuple[bool, str], _News] = {}
        self._number = 0

    def put(self, rumour: MembershipUpdate, *, grave: bool = False) -> None:
        """Queue the newest update about a member. ``grave``: it goes first, whatever its content."""
        grave = grave or rumour.standing in (MemberStatus.SUSPECT, MemberStatus.DEAD)
        self._put((True, rumour.node), rumour, GRAVE if grave else PRESENCE)

    def put_load(self, load: Load) -> None:
        """Queue the newest load of a member."""
        self._put((False, load.node), load, LOADS)

    def _put(self, key: tuple[bool, str], message: GossipMessage, urgency: int) -> None:
        self._number += 1
        if key not in self._news:
            self._count(key, 1)
        self._news[key] = _News(message, urgency, self._number)

    def _count(self, key: tuple[bool, str], by: int) -> None:
        if key[0]:
            self.rumours += by
        else:
            self.loads += by

    def _drop(self, key: tuple[bool, str]) -> None:
        if self._news.pop(key, None) is not None:
            self._count(key, -1)

    def drop(self, node: str) -> None:
        """Drop the update about a member."""
        self._drop((True, node))
        self._drop((False, node))

    def take(self, room: Iterable[GossipMessage], members: int, *, counts: bool = True) -> list[GossipMessage]:
        """Take the updates for a datagram that already contains the messages ``room``; ``counts``: each counts as sent
        once more. members: n, which determines how often is enough."""
        taken = list(room)
        if not self._news:
            return taken
        left = MESSAGES_BYTES_MAX - sum(size_bytes(message) for message in taken)
        told = {message.node for message in taken if isinstance(message, MembershipUpdate)}
        limit = transmissions(self._mult, members)
        loads = 0
        for key, news in sorted(self._news.items(), key=lambda item: item[1].rank):
            if len(taken) >= MESSAGES_MAX:
                break
            if news.bytes > left or (key[0] and key[1] in told):
                continue
            if news.urgency == LOADS:
                if loads >= self._loads_max:
                    break
                loads += 1
            taken.append(news.message)
            left -= news.bytes
            news.sent += counts
            if news.sent >= limit:
                self._drop(key)
        return taken


def suspicion_s(preset: GossipPreset, members: int) -> float:
    """The minimum suspicion timeout, for n members alive."""
    return preset.suspicion_mult * max(1.0, math.log10(max(members, 1))) * preset.probe_s


class Suspicion:
    """Suspicion of one member since ``started_s``: its timeout for a refutation, which shrinks with each confirmation
    ([LIFEGUARD17] section 4.2). members: n at that time."""

    __slots__ = ("_longest_s", "_shortest_s", "_wanted", "started_s")

    def __init__(self, preset: GossipPreset, members: int, now_s: float) -> None:
        others = max(members - 2, 0)  # besides the accuser and the suspect
        self.started_s = now_s
        self._wanted = preset.confirmations if others >= preset.confirmations else 0
        self._shortest_s = suspicion_s(preset, members)
        self._longest_s = self._shortest_s * (preset.suspicion_max_mult if self._wanted else 1.0)

    def over_s(self, accusers: int, factor: int) -> float:
        """End time of the suspicion for a number of confirmations (the first suspicion is not one).
        ``factor``: of the local health."""
        confirmations = min(max(accusers - 1, 0), self._wanted)
        part = math.log(confirmations + 1) / math.log(self._wanted + 1) if self._wanted else 1.0
        return self.started_s + (self._longest_s - part * (self._longest_s - self._shortest_s)) * factor


class LocalHealth:
    """Local health: how far this node may trust its own judgement. A slow node finds all answers slow. It
    counts the delays that only its own slowness explains, and stretches timeouts in proportion. score: 0
    (healthy) … the preset's health_max; factor: multiplier of timeouts."""

    __slots__ = ("_score_max", "score")

    def __init__(self, score_max: int) -> None:
        self.score = 0
        self._score_max = score_max

    @property
    def factor(self) -> int:
        """Multiplier of timeouts, 1 … health_max + 1."""
        return self.score + 1

    def better(self) -> None:
        """A probe was answered in time."""
        self.score = max(self.score - 1, 0)

    def worse(self, by: int = 1) -> None:
        """A helper did not reply, a suspicion had to be refuted, or this node did not run for a while."""
        self.score = min(self.score + by, self._score_max)


UNHEARD_MAX = 2
"""Consecutive probes of a member without its own answer after which its datagrams count as blocked: one may be lost."""


class GossipMember(msgspec.Struct, eq=False):
    """Belief about another node. since_s: boot time of its last change.

    unheard: number of its last probes that were answered only through others or over its link, with no datagram of it
    since; helper: the member through which the last of these was answered; is_cut_off: a message to it could not be
    sent over a link, and neither a link nor an exchange followed.
    """

    rumour: MembershipUpdate
    since_s: float
    synced_s: float = -math.inf
    warned_s: float = -math.inf
    suspicion: Suspicion | None = None
    unheard: int = 0
    helper: str = ""
    is_cut_off: bool = False

    @property
    def is_there(self) -> bool:
        """True if alive or suspected: it is probed, and receives updates."""
        return self.rumour.standing <= MemberStatus.SUSPECT

    @property
    def is_gone(self) -> bool:
        """True if the node is no longer a member."""
        return self.rumour.standing in (MemberStatus.LEFT, MemberStatus.FORGOTTEN)


class GossipListener(Protocol):
    """Calls from gossip to the machine that keeps the peers."""

    def member_changed(self, was: MembershipUpdate | None, now: MembershipUpdate, src: str, /) -> None:
        """The belief about a member changes from ``was`` (None: it was unknown) to ``now``; ``src`` sent the update."""

    def member_forgotten(self, node: str, /) -> None:
        """A member that left long ago is no longer listed."""

    def has_room_for_member(self) -> bool:
        """True if one more member may be kept."""

    def load_heard(self, load: Load, src: str, /) -> bool:
        """Handle a load that src passed on. → True if it is new."""

    def loads(self) -> Iterable[Load]:
        """The newest known loads, for new members."""

    def own_load(self) -> LoadReport | None:
        """The load that this node reports now; None if it reports none."""


class GossipState:
    """members: by name, without this node. rng: gossip's own, so that its draws do not change those of the policies."""

    def __init__(self, state: CoreState, listener: GossipListener) -> None:
        self.core = state
        self.rng = type(state.rng)(f"{state.identity.boot} gossip")
        self.preset: GossipPreset = state.config.gossip
        self.members: dict[str, GossipMember] = {}
        self.news = BroadcastQueue(self.preset.retransmit_mult, self.preset.loads_max)
        self.health = LocalHealth(self.preset.health_max)
        self._listener = listener
        self._there: tuple[str, ...] | None = None
        self._heard: tuple[str, ...] | None = None
        self._ring: tuple[tuple[int, str], ...] | None = None
        self._due_s: dict[tuple[str, str], float] = {}

    @property
    def now_s(self) -> float:
        """CLOCK_BOOTTIME."""
        return self.core.now.boot_s

    # -- members -------------------------------------------------------------------------------------------------------

    @property
    def there(self) -> Sequence[str]:
        """The names of the members that are alive or suspected, in order."""
        if self._there is None:
            self._there = tuple(sorted(name for name, member in self.members.items() if member.is_there))
        return self._there

    @property
    def size(self) -> int:
        """n: the members alive or suspected, and this node."""
        return len(self.there) + 1

    def changed(self) -> None:
        """Clear caches after the status of a member has changed."""
        self._there = self._heard = self._ring = None

    def heard(self, member: GossipMember) -> None:
        """Record that a datagram of a member came."""
        if member.unheard:
            member.unheard, member.helper = 0, ""
            self._heard = None

    def unheard(self, member: GossipMember, helper: str) -> None:
        """Record that a probe of a member was answered only through a helper, or over its link ("")."""
        member.unheard += 1
        member.helper = helper or member.helper
        self._heard = None

    @property
    def ring(self) -> Sequence[tuple[int, str]]:
        """The names of the members that are alive and not suspected, in the order of `ring_place`; if there are none,
        of the suspects."""
        if self._ring is None:
            alive = [name for name in self.there if self.members[name].rumour.standing is MemberStatus.ALIVE]
            self._ring = tuple(sorted((crc32(name.encode()), name) for name in alive or self.there))
        return self._ring

    @property
    def heard_from(self) -> Sequence[str]:
        """The names of the members whose datagrams arrive here, as far as known."""
        if self._heard is None:
            self._heard = tuple(name for name in self.there if self.members[name].unheard < UNHEARD_MAX)
        return self._heard

    def draw(self, count: int, without: str = "") -> list[str]:
        """A random sample of members, smaller if there are too few. Members whose datagrams do not arrive here are
        drawn only if there are no others: between some nodes none pass (IPv4 and IPv6), and updates would be lost."""
        names = [name for name in self.heard_from if name != without]
        names = names or [name for name in self.there if name != without]
        return self.rng.sample(names, min(count, len(names)))

    def draw_unheard(self) -> str:
        """A random member of those that `draw` leaves out; "" if there is none. It may receive datagrams, and only its
        own may be lost."""
        if len(self.heard_from) in (0, len(self.there)):
            return ""
        return self.rng.choice([name for name in self.there if self.members[name].unheard >= UNHEARD_MAX])

    # -- datagrams -----------------------------------------------------------------------------------------------------

    def send(
        self, node: str, *messages: GossipMessage, address: str = "", with_load: bool = False, counts: bool = True
    ) -> None:
        """Send one datagram to a node, filled up with updates. ``address``: destination, if it is not the
        member's known address; counts: the updates count as sent."""
        if not address and node in self.members:
            address = self.members[node].rumour.address
        if not address:
            self.core.count(metrics.GOSSIP_WITHOUT_ADDRESS)
            return
        room = list(messages)
        report = self._listener.own_load() if with_load and self.preset.loads_max else None
        if report is not None:
            room.append(Load.of(self.core.node, report))
        told = self.news.take(room, self.size, counts=counts)
        if told:
            self.core.actions.append(SendGossip(node, address, tuple(told)))
            self.core.count(metrics.GOSSIP_MESSAGES_QUEUED)

    # -- timers --------------------------------------------------------------------------------------------------------

    def arm(self, kind: timers.GossipTimerKind, seconds: float, subject: str = "") -> None:
        """Set a timer; replaces the same timer."""
        self._due_s[(kind, subject)] = self.now_s + seconds
        self.core.set_timer_in(seconds, timers.GossipDue(kind, subject))

    def disarm(self, kind: timers.GossipTimerKind, subject: str = "") -> None:
        if self._due_s.pop((kind, subject), None) is not None:
            self.core.clear_timer(timers.GossipDue(kind, subject))

    def is_armed(self, kind: timers.GossipTimerKind) -> bool:
        return (kind, "") in self._due_s

    def left_s(self, kind: timers.GossipTimerKind) -> float | None:
        """Seconds until this timer fires; None if it is not set."""
        due_s = self._due_s.get((kind, ""))
        return None if due_s is None else max(due_s - self.now_s, 0.0)

    def expired_s(self, kind: timers.GossipTimerKind, subject: str) -> float | None:
        """Delay in seconds of the timer that has just expired; None if it is no longer set."""
        due_s = self._due_s.pop((kind, subject), None)
        return None if due_s is None else self.now_s - due_s
