"""Peer table: what is known of each peer, its links and waiting messages, which handshakes are refused, and backpressure.

The peer of every handshake has proven its certificate. It is refused if another agent has its name, if there are too many
peers, if a later start of the same agent is here, or while it is banned. A peer whose messages the core has not handled
yet is not read further (rule P2)."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from peerload.model import metrics, rules
from peerload.model.bounded import BoundedDict

if TYPE_CHECKING:
    from peerload.agent.peers.connection import PeerConnection
    from peerload.agent.runtime import Inbox
    from peerload.agent.store.write_ahead import SecurityEvents
    from peerload.model.messages import Hello, Identity, Message

WAITING_MESSAGES_MAX = 1024
WAITING_BYTES_MAX = 64 << 20
"""Bounds of the messages that wait for the link to one peer."""
LINKS_PER_PEER_MAX = 4
BACKOFF_S = 0.2
BACKOFF_S_MAX = 15.0
ERRORS_MAX = 3
ERRORS_WITHIN_S = 60.0
BAN_S = 60.0
"""ERRORS_MAX malformed frames within ERRORS_WITHIN_S: the link closes, and the peer is banned for BAN_S (rule P1)."""
BANS_MAX = 1024
CLASHES_MAX = 16
EARLIER_START = "a later start of this agent is here"

_log = logging.getLogger("peerload.peer")
BROKEN_RULES = {
    "a certificate that was revoked": "J4",
    "a frame in another's name": rules.ROLES_CHECKED,
    "a frame that does not go on": rules.FRAMES_BOUNDED,
    "a frame too large": rules.FRAMES_BOUNDED,
    "a name that its certificate does not have": "J3",
    "a second introduction": rules.FRAMES_BOUNDED,
    "banned": rules.FRAMES_BOUNDED,
    "malformed": rules.FRAMES_BOUNDED,
    "malformed frames": rules.FRAMES_BOUNDED,
    "no certificate of a node": "J3",
    "no common protocol version": rules.VERSIONS_CHECKED,
    "no introduction": rules.FRAMES_BOUNDED,
    "no introduction in time": "J3",
    "no output request": rules.FRAMES_BOUNDED,
    "no proof": "J3",
    "not for us": rules.ROLES_CHECKED,
    "other cluster": "J3",
    "too many messages at once": rules.PEERS_LIMITED,
    "too many peers": rules.PEERS_LIMITED,
    "too many strangers": "J3",
    "too many streams": rules.PEERS_LIMITED,
}
"""Security rule that each reason for dropping something breaks (the reason up to a colon). Other reasons break none."""


class PeerEntry:
    """One other node: its newest identity, its live links (the newest last), and the messages that wait for one."""

    __slots__ = (
        "cannot_reach_us",
        "dial_back_failure",
        "dialled_s",
        "failures",
        "has_dialled_us",
        "identity",
        "is_checked",
        "is_dialled",
        "links",
        "node",
        "not_before_s",
        "reached",
        "unreached",
        "waiting",
        "waiting_bytes",
    )

    def __init__(self, node: str) -> None:
        self.node = node
        self.identity: Identity | None = None
        self.links: list[PeerConnection] = []
        self.waiting: deque[tuple[Message, int]] = deque()
        self.waiting_bytes = 0
        self.is_dialled = False
        self.failures = 0
        self.not_before_s = 0.0
        self.reached = ""
        """The address where the last dial succeeded; empty after a failure."""
        self.unreached = ""
        """Error of the last dial of its address; empty if it succeeded, or there was none."""
        self.has_dialled_us = False
        """True if the peer has dialled this node, and has not reported since that it cannot."""
        self.cannot_reach_us = ""
        """Error of the peer's dials of this node, as it reports."""
        self.dial_back_failure = "", 0.0, ""
        """Address, loop time and reason of the last failure to dial the peer back."""
        self.is_checked = False
        """True while it is checked whether the peer can be dialled."""
        self.dialled_s = 0.0
        """Loop time of the last dial."""

    @property
    def address(self) -> str:
        """The published address of the peer; empty if not known."""
        return self.identity.address if self.identity is not None else ""

    def dial_succeeded(self, address: str) -> None:
        """Note a dial that succeeded."""
        self.reached, self.unreached = address, ""

    def dial_failed(self, address: str, why: str) -> None:
        """Note a dial that failed."""
        if address == self.address:
            self.reached, self.unreached = "", why

    @property
    def link(self) -> PeerConnection | None:
        """The link to send over: the newest that is not closing."""
        return next((link for link in reversed(self.links) if not link.is_closed), None)

    @property
    def is_idle(self) -> bool:
        """True if only the address would be lost with this entry."""
        return not self.links and not self.waiting and not self.is_dialled

    def learn(self, identity: Identity) -> bool:
        """Keep the newer identity. Returns whether that is this one."""
        known = self.identity
        if known is not None and identity.boot != known.boot and identity.incarnation < known.incarnation:
            return False
        if known is not None and identity.boot == known.boot and not identity.address:
            return True
        if known is None or identity.boot != known.boot or identity.address != known.address:
            self.failures, self.not_before_s = 0, 0.0
            self.reached = self.unreached = ""
            if known is None or identity.boot != known.boot:
                self.has_dialled_us, self.cannot_reach_us = False, ""
        self.identity = identity
        return True

    def add(self, link: PeerConnection, identity: Identity) -> None:
        """Add a link. Links to an earlier start of the peer close, and the oldest of too many."""
        for other in [
            other for other in self.links if other.hello is not None and other.hello.identity.boot != identity.boot
        ]:
            other.close("its agent was started again")
        if len(self.links) >= LINKS_PER_PEER_MAX:
            self.links[0].close("newer links took its place")
        self.learn(identity)
        self.failures, self.not_before_s = 0, 0.0
        self.links.append(link)

    def queue(self, message: Message) -> bool:
        """Queue a message. False if the queue is full."""
        size = len(msgspec.msgpack.encode(message))
        if len(self.waiting) >= WAITING_MESSAGES_MAX or self.waiting_bytes + size > WAITING_BYTES_MAX:
            return False
        self.waiting.append((message, size))
        self.waiting_bytes += size
        return True

    def take(self) -> Message:
        """Take the oldest queued message."""
        message, size = self.waiting.popleft()
        self.waiting_bytes -= size
        return message

    def take_all(self) -> list[Message]:
        """Take all queued messages, oldest first."""
        messages = [message for message, _ in self.waiting]
        self.waiting.clear()
        self.waiting_bytes = 0
        return messages

    def back_off(self, now_s: float) -> None:
        """Forbid dials for a while that grows with each failure in a row."""
        self.not_before_s = now_s + backoff_s(self.failures)
        self.failures += 1


class PeerTable:
    """Entries by node name, at most twice ``peers_max``; the links of at most ``peers_max`` nodes are admitted."""

    def __init__(self, security: SecurityEvents, peers_max: int) -> None:
        self._security = security
        self._peers_max = peers_max
        self.entries: dict[str, PeerEntry] = {}
        self._bans = Bans()
        self.clashes: dict[str, str] = {}
        """The last CLASHES_MAX agents that were refused because another has their name: name → address."""

    def get(self, node: str) -> PeerEntry | None:
        """The entry of a node, if there is one."""
        return self.entries.get(node)

    def entry(self, node: str) -> PeerEntry | None:
        """The entry of a node, made if need be: in a full table in the place of an idle one. None if there is none."""
        peer = self.entries.get(node)
        if peer is None and len(self.entries) >= 2 * self._peers_max:
            idle = next((name for name, known in self.entries.items() if known.is_idle), None)
            if idle is None:
                return None
            del self.entries[idle]
        if peer is None:
            peer = self.entries[node] = PeerEntry(node)
        return peer

    def drop(self, why: str, who: str = "", detail: str = "") -> None:
        """Count a frame or connection that was dropped, and report it if it breaks a security rule."""
        self._security.counters[metrics.labelled(metrics.PEER_FRAMES_DROPPED, reason=why)] += 1
        if (rule := BROKEN_RULES.get(why.partition(":")[0])) is not None:
            self._security.report(rule, who, f"{why}: {detail}" if detail else why)

    # -- handshakes --------------------------------------------------------------------------------------------------

    def is_name_clash(self, own: Identity, peer: PeerEntry | None, identity: Identity) -> bool:
        """True if the agent with this identity is another one under this node's name, or under that of a linked peer."""
        other = _linked(peer)
        if identity.node != own.node and (other is None or other.store == identity.store):
            return False
        self._security.counters[metrics.PEER_NAME_CLASHES] += 1
        address = identity.address[:100]
        self._security.report(
            rules.NAME_UNIQUE, identity.node, f"another agent has that name; the one at {address} is refused"
        )
        self.clashes = dict([*self.clashes.items(), (identity.node, identity.address)][-CLASHES_MAX:])
        _log.error(
            "duplicate node name: node=%s refused_address=%r; start that agent with  --node NAME",
            identity.node,
            address,
        )
        return True

    def refusal(self, peer: PeerEntry | None, hello: Hello) -> str:
        """Reason why a peer without a name clash is not admitted; empty if it is. ``peer`` is None if the table is full."""
        identity, other = hello.identity, _linked(peer)
        if peer is None or (not peer.links and self._linked_count() >= self._peers_max):
            self.drop("too many peers", identity.node)
            return "too many peers"
        if other is not None and other.boot != identity.boot and identity.incarnation < other.incarnation:
            self.drop("an earlier start", identity.node)
            return EARLIER_START
        if self._bans.holds((identity.node, identity.boot), asyncio.get_running_loop().time()):
            self.drop("banned", identity.node)
            return "banned for malformed frames"
        return ""

    def count_malformed(self, identity: Identity) -> bool:
        """Count a malformed frame of a peer (rule P1). True if that was one too many: the peer is banned."""
        if not self._bans.add((identity.node, identity.boot), asyncio.get_running_loop().time()):
            return False
        self._security.counters[metrics.PEER_BANS] += 1
        self._security.report(
            rules.FRAMES_BOUNDED, identity.node, f"{ERRORS_MAX} malformed frames; it is banned for {BAN_S:g} s"
        )
        _log.warning("peer banned for malformed frames: node=%s ban_s=%g", identity.node, BAN_S)
        return True

    def _linked_count(self) -> int:
        return sum(1 for known in self.entries.values() if known.links)


def _linked(peer: PeerEntry | None) -> Identity | None:
    """The identity at the other end of the newest link."""
    link = peer.link if peer is not None else None
    return link.hello.identity if link is not None and link.hello is not None else None


class Bans:
    """Malformed frames and bans by (node, boot id). Not by network address: many nodes may share one."""

    def __init__(self) -> None:
        self._errors: BoundedDict[tuple[str, str], deque[float]] = BoundedDict(BANS_MAX)
        self._until: BoundedDict[tuple[str, str], float] = BoundedDict(BANS_MAX)

    def add(self, who: tuple[str, str], now_s: float) -> bool:
        """Count one error. True if that was one too many."""
        times = self._errors[who] = self._errors.get(who) or deque(maxlen=ERRORS_MAX)
        times.append(now_s)
        if len(times) < ERRORS_MAX or now_s - times[0] > ERRORS_WITHIN_S:
            return False
        self._until[who] = now_s + BAN_S
        return True

    def holds(self, who: tuple[str, str], now_s: float) -> bool:
        """True if this start of this node is banned."""
        until_s = self._until.get(who)
        if until_s is None:
            return False
        if now_s < until_s:
            return True
        del self._until[who]
        self._errors.pop(who, None)
        return False


def backoff_s(failures: int) -> float:
    """Pause before the next attempt after so many failures in a row: exponential, with jitter."""
    ceiling = min(BACKOFF_S_MAX, BACKOFF_S * 2.0 ** min(failures, 16))
    return ceiling * random.uniform(0.5, 1.0)  # noqa: S311 -- jitter, not a secret


BACKLOG_FRAMES_MAX = 20_000
BACKLOG_BYTES_MAX = 64 << 20
"""Bounds for one node: above either its links are not read until half of the backlog has been handled."""
CHECK_EVERY_S = 0.02
"""Interval of the checks while a node is paused."""
_BACKLOG = "the core has not handled its messages"


class _Backlog:
    """Messages of one node that are in the inbox: (number in the inbox, bytes), oldest first; and its paused links."""

    __slots__ = ("messages", "paused", "size_bytes")

    def __init__(self) -> None:
        self.messages: deque[tuple[int, int]] = deque()
        self.size_bytes = 0
        self.paused: set[PeerConnection] = set()

    def settle(self, taken: int) -> None:
        """Remove what the core has taken."""
        while self.messages and self.messages[0][0] <= taken:
            self.size_bytes -= self.messages.popleft()[1]

    def exceeds(self, divisor: int) -> bool:
        """True if the backlog is above the bounds divided by this."""
        return len(self.messages) * divisor > BACKLOG_FRAMES_MAX or self.size_bytes * divisor > BACKLOG_BYTES_MAX


class PeerBackpressure:
    """Backlogs of all peers of one agent."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._backlogs: dict[str, _Backlog] = {}

    def queued(self, connection: PeerConnection, node: str, size_bytes: int) -> bool:
        """Count a message that was put into the inbox. True if the links of the node are paused from now on."""
        backlog = self._backlogs.get(node)
        if backlog is None:
            backlog = self._backlogs[node] = _Backlog()
        backlog.messages.append((self._inbox.put_count, size_bytes))
        backlog.size_bytes += size_bytes
        backlog.settle(self._inbox.taken_count)
        if not backlog.messages and not backlog.paused:
            del self._backlogs[node]
            return False
        if not backlog.exceeds(1):
            return False
        is_first = not backlog.paused
        backlog.paused.add(connection)
        connection.pause_reading(_BACKLOG)
        if is_first:
            asyncio.get_running_loop().call_later(CHECK_EVERY_S, self._check, node)
        return is_first

    def _check(self, node: str) -> None:
        backlog = self._backlogs[node]
        backlog.settle(self._inbox.taken_count)
        if backlog.exceeds(2):
            asyncio.get_running_loop().call_later(CHECK_EVERY_S, self._check, node)
            return
        paused, backlog.paused = backlog.paused, set()
        for connection in paused:
            connection.resume_reading(_BACKLOG)
        if not backlog.messages:
            del self._backlogs[node]
