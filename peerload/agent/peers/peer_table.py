"""Who the peers are, how their links stand, who is banned: the memory of the peer links, without any I/O."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

import msgspec

from peerload.model import rules

if TYPE_CHECKING:
    from peerload.agent.peers.connection import PeerConnection
    from peerload.model.messages import Identity, Message

WAITING_MESSAGES_MAX = 1024
WAITING_BYTES_MAX = 64 << 20
"""What may wait per peer for its link to come up or to drain."""
LINKS_PER_PEER_MAX = 4
BACKOFF_S = 0.2
BACKOFF_S_MAX = 15.0
ERRORS_MAX = 3
ERRORS_WITHIN_S = 60.0
BAN_S = 60.0
"""So many malformed frames within so long: the link closes and the sender stays out for a while (rule P1)."""
BANS_MAX = 1024
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
"""Why a peer is refused, up to a colon: which rule of security it has broken. What is not here may be nobody's fault."""


class PeerEntry:
    """One other node: its newest identity, its live links (the newest last), and what waits for one of them."""

    __slots__ = (
        "came_in",
        "cannot_reach_us",
        "failures",
        "identity",
        "is_checked",
        "is_dialled",
        "links",
        "node",
        "not_back",
        "not_before_s",
        "reached",
        "tried_s",
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
        """The address at which it was dialled last, if that went well."""
        self.unreached = ""
        """Why it could not be dialled at its address when that was tried last; empty: it could, or was not tried."""
        self.came_in = False
        """It has made a connection to us, and has not said since that it cannot."""
        self.cannot_reach_us = ""
        """Why it cannot dial us, as it says."""
        self.not_back = "", 0.0, ""
        """Where and when it could last not be dialled back, and why."""
        self.is_checked = False
        """It is being tried whether it can be dialled …"""
        self.tried_s = 0.0
        """… or was, at this time of the loop."""

    @property
    def address(self) -> str:
        """Where it says it can be dialled, empty if that is not known."""
        return self.identity.address if self.identity is not None else ""

    def was_reached(self, address: str) -> None:
        """It was dialled there, and answered."""
        self.reached, self.unreached = address, ""

    def was_not_reached(self, address: str, why: str) -> None:
        """It was dialled there, in vain."""
        if address == self.address:
            self.reached, self.unreached = "", why

    @property
    def link(self) -> PeerConnection | None:
        """The link to send over: the newest that is not about to close."""
        return next((link for link in reversed(self.links) if not link.is_closed), None)

    @property
    def is_idle(self) -> bool:
        """Nothing would be lost but its address if it were forgotten."""
        return not self.links and not self.waiting and not self.is_dialled

    def learn(self, identity: Identity) -> bool:
        """Keep the newer identity; whether this one is (again) the one that counts."""
        known = self.identity
        if known is not None and identity.boot != known.boot and identity.incarnation < known.incarnation:
            return False
        if known is not None and identity.boot == known.boot and not identity.address:
            return True
        if known is None or identity.boot != known.boot or identity.address != known.address:
            self.failures, self.not_before_s = 0, 0.0
            self.reached = self.unreached = ""
            if known is None or identity.boot != known.boot:
                self.came_in, self.cannot_reach_us = False, ""
        self.identity = identity
        return True

    def add(self, link: PeerConnection, told: Identity) -> None:
        """One more link, whose other end is ``told``: those to an earlier start close, or the oldest of too many."""
        for other in [
            other for other in self.links if other.hello is not None and other.hello.identity.boot != told.boot
        ]:
            other.close("its agent was started again")
        if len(self.links) >= LINKS_PER_PEER_MAX:
            self.links[0].close("newer links took its place")
        self.learn(told)
        self.failures, self.not_before_s = 0, 0.0
        self.links.append(link)

    def keep(self, message: Message) -> bool:
        """Let a message wait; False if there is no room for it."""
        size = len(msgspec.msgpack.encode(message))
        if len(self.waiting) >= WAITING_MESSAGES_MAX or self.waiting_bytes + size > WAITING_BYTES_MAX:
            return False
        self.waiting.append((message, size))
        self.waiting_bytes += size
        return True

    def take(self) -> Message:
        """The message that has waited longest."""
        message, size = self.waiting.popleft()
        self.waiting_bytes -= size
        return message

    def take_all(self) -> list[Message]:
        """All that waits, oldest first."""
        messages = [message for message, _ in self.waiting]
        self.waiting.clear()
        self.waiting_bytes = 0
        return messages

    def failed(self, now_s: float) -> None:
        """It could not be dialled: not again before a growing while has passed."""
        self.not_before_s = now_s + backoff_s(self.failures)
        self.failures += 1


class Bans:
    """Counts malformed frames by (node, boot id) and says who is to stay out.

    Not by network address: whoever sends frames has proven its name, and many nodes may come from one address.
    """

    def __init__(self) -> None:
        self._errors: OrderedDict[tuple[str, str], deque[float]] = OrderedDict()
        self._until: OrderedDict[tuple[str, str], float] = OrderedDict()

    def add(self, who: tuple[str, str], now_s: float) -> bool:
        """Count one error; True if that was one too many."""
        times = self._errors.setdefault(who, deque(maxlen=ERRORS_MAX))
        times.append(now_s)
        self._errors.move_to_end(who)
        if len(self._errors) > BANS_MAX:
            self._errors.popitem(last=False)
        if len(times) < ERRORS_MAX or now_s - times[0] > ERRORS_WITHIN_S:
            return False
        self._until[who] = now_s + BAN_S
        if len(self._until) > BANS_MAX:
            self._until.popitem(last=False)
        return True

    def holds(self, who: tuple[str, str], now_s: float) -> bool:
        """Whether this start of this node is to stay out."""
        until_s = self._until.get(who)
        if until_s is None:
            return False
        if now_s < until_s:
            return True
        del self._until[who]
        self._errors.pop(who, None)
        return False


def backoff_s(failures: int) -> float:
    """How long to wait after so many failures in a row before the next attempt, with jitter."""
    ceiling = min(BACKOFF_S_MAX, BACKOFF_S * 2.0 ** min(failures, 16))
    return ceiling * random.uniform(0.5, 1.0)  # noqa: S311 -- jitter, not a secret
