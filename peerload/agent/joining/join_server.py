"""The door for newcomers: who is no member yet, speaks here, and says and hears nothing else.

It is the peer link's own port, told apart by what the newcomer offers to speak (ALPN). It shows no certificate, so
everything it says is a stranger's: a few frames, small, within seconds, a few newcomers at a time. A refusal says nothing
about why and comes after a second, however it came about; who is refused too often is heard no more for a while.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict, deque
from ipaddress import ip_address
from typing import TYPE_CHECKING, cast

from peerload.agent.security_events import untold
from peerload.model import rules
from peerload.model.errors import ProtocolError
from peerload.security.address import plain_host
from peerload.security.invitations import InvitationRefused
from peerload.wire import join

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from peerload.agent.security_events import Tell
    from peerload.security.invitations import Invitations, Objection
    from peerload.wire.join import JoinRequest, JoinWelcome

NEWCOMERS_MAX = 16
"""At the door at a time, of the strangers there may be in all: they can never keep members out …"""
NEWCOMERS_OF_ONE_MAX = 12
"""… and of them those that come from one address: who has one only keeps nobody waiting who comes from another."""
SPEAKS_WITHIN_S = 5.0
"""What a newcomer has to say it says within this."""
REFUSAL_S = 1.0
"""A refusal comes so long after what it answers."""
REFUSALS_MAX = 10
WITHIN_S = 60.0
"""Who was refused so often within so long is not heard until that is over."""
ADDRESSES_MAX = 1024
NETWORK_BITS = 64
"""Of IPv6 the network counts: whoever has one has all addresses in it."""
NOTICE_EVERY_S = 60.0
"""Refusals are noted as events so often for each address; all are counted."""

_log = logging.getLogger("peerload.join")


class Refusals:
    """How often those at an address were refused lately. The address guards nothing but our time: it lets nobody in."""

    def __init__(self) -> None:
        self._at: OrderedDict[str, deque[float]] = OrderedDict()

    def add(self, address: str, now_s: float) -> bool:
        """One more; whether the last one noted there is long ago."""
        times = self._at.setdefault(network_of(address), deque(maxlen=REFUSALS_MAX))
        is_news = not times or now_s - times[-1] >= NOTICE_EVERY_S
        times.append(now_s)
        self._at.move_to_end(network_of(address))
        if len(self._at) > ADDRESSES_MAX:
            self._at.popitem(last=False)
        return is_news

    def are_too_many(self, address: str, now_s: float) -> bool:
        """Whether who comes from there is not to be heard now."""
        times = self._at.get(network_of(address))
        return times is not None and len(times) == REFUSALS_MAX and now_s - times[0] < WITHIN_S


class JoinServer:
    """certificate(): our own, as TLS shows it (DER); ca: the cluster's (PEM); objection: as
    `Invitations.redeem` has it; welcome(invite, key, name): the answer to whoever is let in; happened(state, reason): an
    event; broken(rule, who, what): what was refused."""

    def __init__(
        self,
        invites: Invitations,
        ca: bytes,
        certificate: Callable[[], bytes],
        objection: Objection,
        welcome: Callable[..., JoinWelcome],
        happened: Callable[[str, str], None],
        counters: Counter[str],
        broken: Tell = untold,
    ) -> None:
        self._invites = invites
        self._objection = objection
        self._welcome = welcome
        self._happened = happened
        self._counters = counters
        self._broken = broken
        self.ca = ca
        self.certificate = certificate
        self.refusals = Refusals()
        self.newcomers: set[JoiningNode] = set()

    def admit(self, newcomer: JoiningNode) -> bool:
        """Whether it is heard."""
        now_s = asyncio.get_running_loop().time()
        if self.refusals.are_too_many(newcomer.address, now_s):
            self._counters["join dropped: refused too often"] += 1
            self._broken(rules.JOINS_LIMITED, newcomer.address, "refused too often, and not heard")
            return False
        network = network_of(newcomer.address)
        of_one = sum(network_of(one.address) == network for one in self.newcomers)
        if len(self.newcomers) >= NEWCOMERS_MAX or of_one >= NEWCOMERS_OF_ONE_MAX:
            self._counters["join dropped: too many newcomers"] += 1
            self._broken(rules.JOINS_LIMITED, newcomer.address, "too many newcomers at the door")
            return False
        self.newcomers.add(newcomer)
        return True

    def asked(self, newcomer: JoiningNode, request: JoinRequest, certificate: bytes, nonce: bytes) -> JoinWelcome:
        """Let it in. Raises Refused."""
        try:
            invite, key = self._invites.redeem(request, certificate, nonce, time.time(), self._objection)
        except OSError as error:
            raise InvitationRefused(
                "busy", f"its use cannot be kept: {error.strerror}", "try again in a minute"
            ) from None
        answer = self._welcome(invite, key, request.node)
        self._counters["join welcomed"] += 1
        self._happened("welcomed", f"{request.node}, from {newcomer.address}")
        _log.info("%s has joined, from %s", request.node, newcomer.address)
        return answer

    def refused(self, newcomer: JoiningNode, why: str) -> None:
        """Count it, and note it now and then."""
        self._counters["join refused"] += 1
        self._broken(rules.JOINS_LIMITED, newcomer.address, why)
        if self.refusals.add(newcomer.address, asyncio.get_running_loop().time()):
            self._happened("refused", f"somebody at {newcomer.address}: {why}")
            _log.warning("somebody at %s was not let in: %s", newcomer.address, why)

    def gone(self, newcomer: JoiningNode) -> None:
        """It has hung up, or we have."""
        self.newcomers.discard(newcomer)


class JoiningNode(asyncio.Protocol):
    """One connection of somebody who asks to be let in; ``gone(self)`` is called at its end."""

    def __init__(self, door: JoinServer, gone: Callable[[], None]) -> None:
        self.address = "?"
        self._door = door
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._nonce = os.urandom(join.NONCE_BYTES)
        self._certificate = b""
        self._has_asked = self._is_over = False
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the clock; nothing is said before it asks."""
        self._transport = cast("asyncio.Transport", transport)
        peername = transport.get_extra_info("peername")
        self.address = plain_host(str(peername[0])) if peername else "?"
        self._certificate = self._door.certificate()
        if self._door.admit(self):
            self._timer = self._loop.call_later(SPEAKS_WITHIN_S, self._over)
        else:
            self._over()

    def data_received(self, data: bytes) -> None:
        """One frame at a time, and only those that are due."""
        if self._is_over:
            return
        self._buffer += data
        while len(self._buffer) >= 4 and not self._is_over:  # noqa: PLR2004 -- the header
            size = int.from_bytes(self._buffer[:4], "big")
            if size > join.REQUEST_BYTES_MAX:
                self._refuse(InvitationRefused("request", "a frame too large"))
                return
            if len(self._buffer) < 4 + size:
                return
            raw = bytes(self._buffer[4 : 4 + size])
            del self._buffer[: 4 + size]
            self._said(raw)

    def _said(self, raw: bytes) -> None:
        try:
            message = join.decode_newcomer(raw)
        except ProtocolError:
            self._refuse(InvitationRefused("request", "not a word of joining"))
            return
        if isinstance(message, join.JoinAsk) and not self._has_asked:
            self._has_asked = True
            self._write(join.encode(join.JoinWho(self._door.ca, self._nonce)))
        elif isinstance(message, join.JoinRequest) and self._has_asked:
            try:
                answer = join.encode(self._door.asked(self, message, self._certificate, self._nonce))
            except InvitationRefused as refusal:
                self._refuse(refusal)
            else:
                self._write(answer)
                self._over()
        else:
            self._refuse(InvitationRefused("request", "out of turn"))

    def _refuse(self, refusal: InvitationRefused) -> None:
        """The same words after the same time, whatever was wrong with a token."""
        self._door.refused(self, refusal.why)
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        answer = join.encode(join.JoinRefused(refusal.code, refusal.what))
        self._loop.call_later(REFUSAL_S, self._last_word, answer)

    def _last_word(self, answer: bytes) -> None:
        self._write(answer)
        self._over()

    def _write(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def _over(self) -> None:
        self._is_over = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """The agent stops."""
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Make room."""
        del exc
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._door.gone(self)
        self._gone()


def network_of(address: str) -> str:
    """What counts as one address: of IPv6 the network, since whoever has one has all addresses in it."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if found.version == 4:  # noqa: PLR2004 -- IPv4
        return address
    mapped = found.ipv4_mapped
    return str(mapped) if mapped is not None else f"{int(found) >> NETWORK_BITS:x}"
