"""Joining a cluster: enrollment of machines, distribution of the CA's statements, and renewal of certificates.

Only a node with the CA's key can admit a machine. A newcomer shows no certificate, and connects to the port of the peer links
(ALPN), so its input is not trusted: a few small frames, within seconds, from a few newcomers at a time. Every refusal comes
after the same pause and gives no reason. An address that is refused too often is not served for a while.

Revocations and seal keys reach every member and take effect. A node that makes a new statement of the CA sends it to all members
that it can reach; a node that receives a new one forwards it to a few. Each Hello carries a digest of the statements that
its sender knows, so that a member that was away gets the missing ones.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast

from peerload.agent.runtime import now
from peerload.core.membership.peers import PeerState
from peerload.model import messages, metrics, rules
from peerload.model.bounded import BoundedDict
from peerload.model.errors import BadRequest, ConfigError, ProtocolError, StoreError
from peerload.model.events import NodeRevoked
from peerload.security import certificates
from peerload.security.address import network_of, plain_host
from peerload.security.invitations import InvitationRefused, Invitations
from peerload.security.revocation import OVERLAP_REVOKED_S, OVERLAP_S, Revoked
from peerload.wire import join
from peerload.wire.join import JoinRequest, JoinWelcome
from peerload.wire.seal import KEY_BYTES
from peerload.wire.token import Token

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Sequence

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from peerload.agent.peers.links import PeerLinks
    from peerload.agent.peers.local_node import LocalNode
    from peerload.agent.runtime import AgentInfo, Inbox
    from peerload.agent.store.write_ahead import EventLog, SecurityEvents
    from peerload.core.membership.peers import PeerInfo
    from peerload.core.node import Node
    from peerload.model.messages import Hello
    from peerload.security.invitations import Invitation
    from peerload.security.revocation import Keyring, TrustStore
    from peerload.security.tls import Credentials
    from peerload.wire.control import Invite


INVITES_FILE = "invites"
PEERS_SENT_MAX = 8
ARRIVES_WITHIN_S = 60.0
"""Time in which a newcomer has to appear as a member; until then its name is reserved."""


class Enrollment:
    """Open invitations of one node, and the checks of requests to join."""

    def __init__(self, info: AgentInfo, node: Node, tls: Credentials, trust: TrustStore) -> None:
        self._info = info
        self._node = node
        self._tls = tls
        self._trust = trust
        self._invites = Invitations(Path(info.config.state) / INVITES_FILE, trust)

    @property
    def cluster_name(self) -> str:
        return self._tls.cluster.name

    def check_issuer(self, verb: str, cannot: str) -> None:
        """Check that this node has the CA's key. cannot: text of what it cannot do without the key. Raises BadRequest."""
        cluster = self._tls.cluster
        if cluster.is_local:
            raise BadRequest(
                f"this node can {cannot}",
                why="it has no cluster of several machines",
                hint="make one:  peerload invite",
            )
        if not cluster.is_issuer:
            issuers = sorted(
                peer.identity.node
                for peer in self._node.membership
                if peer.profile.issuer and peer.state is not PeerState.LEFT
            )
            where = f"on {' or '.join(issuers[:3])}" if issuers else "on a machine that has it (docs/security.md)"
            raise BadRequest(
                f"this node can {cannot}",
                why="it does not have the key of the cluster's CA",
                hint=f"{where}:  peerload {verb}",
            )

    def invite(self, request: Invite, addresses: Sequence[str]) -> Token:
        """Make an invitation. addresses: further addresses at which newcomers may dial this node. Raises BadRequest or
        StoreError."""
        if request.node and (why := self.name_objection(request.node, is_meant=True)):
            what = f"the name {request.node} cannot be given"
            raise BadRequest(what, why=why, hint="name another:  --node NAME")
        try:
            token_id, secret = self._invites.make(
                time.time(), life_s=request.ttl_s, uses=request.uses, node=request.node, issuer=request.issuer
            )
        except OSError as error:
            raise StoreError("cannot save the invitation", why=str(error.strerror)) from None
        fingerprint = bytes.fromhex(self._tls.cluster.fingerprint)
        here = tuple(dict.fromkeys((self._info.identity.address, *addresses)))
        return Token(fingerprint, token_id, secret, here, request.node)

    def admit(self, request: JoinRequest, certificate: bytes, nonce: bytes) -> JoinWelcome:
        """Admit a newcomer, which was sent this certificate and nonce. Raises InvitationRefused."""
        try:
            invite, key = self._invites.redeem(request, certificate, nonce, time.time(), self.name_objection)
        except OSError as error:
            why = f"its use cannot be saved: {error.strerror}"
            raise InvitationRefused("busy", why, "try again in a minute") from None
        return self._welcome(invite, key, request.node)

    def name_objection(self, node: str, let_in_at: float = 0.0, *, is_meant: bool = False) -> str:
        """Reason why no newcomer may have this name now; empty if one may. let_in_at: last time at which a newcomer got it (Unix
        s). is_meant: the invitation is only for this name.

        A node with the name of a member gets its tasks, so a member that is only away keeps its name."""
        if node == self._info.config.node:
            return "the inviting node has this name"
        membership = self._node.membership
        known = membership.get(node)
        is_awaited = time.time() - let_in_at < ARRIVES_WITHIN_S and let_in_at > self._trust.revoked_at(node)
        if is_awaited and not (known is not None and _has_gone_since(known, let_in_at)):
            return "it was given to a machine less than a minute ago"
        is_free = self._trust.was_revoked(node) or is_meant
        meant = f"if this machine is to replace it:  peerload invite --node {node}"
        if known is None:
            is_away = node in membership.gossip.anti_entropy.known and not is_free
            return f"a member of this name was not met lately ({meant})" if is_away else ""
        match known.state:
            case PeerState.LEFT | PeerState.DEAD if is_free:
                return ""
            case PeerState.LEFT:
                return f"a member of this name has left ({meant})"
            case PeerState.DEAD:
                return f"a member of this name is dead ({meant})"
            case _:
                return f"a member of this name is {known.state.value}"

    def _welcome(self, invite: Invitation, key: Ed25519PublicKey, node: str) -> JoinWelcome:
        cluster, trust = self._tls.cluster, self._trust
        issued_at = trust.certified_at(node, datetime.now(UTC))
        return JoinWelcome(
            certificates.certify(cluster.authority, node, key, issued_at, self._tls.life),
            cluster.name,
            cluster.id,
            trust.newest_key,
            cluster.authority.key if invite.issuer else b"",
            trust.signed,
            self._addresses(),
        )

    def _addresses(self) -> tuple[str, ...]:
        """Addresses of members, this node's first."""
        others = (
            peer.identity.address
            for peer in self._node.membership
            if peer.state is PeerState.ALIVE and peer.identity.address
        )
        return tuple(dict.fromkeys((self._info.identity.address, *others)))[:PEERS_SENT_MAX]


def _has_gone_since(peer: PeerInfo, let_in_at: float) -> bool:
    """True if the machine that got the name at this time (Unix s) has joined, and has left or died since."""
    at = now()
    changed_at = at.wall_s - (at.boot_s - peer.since_s)
    return peer.state in (PeerState.LEFT, PeerState.DEAD) and changed_at > let_in_at


NEWCOMERS_MAX = 16
"""Maximum number of newcomers at a time; they also count as unauthenticated, and can never block members."""
NEWCOMERS_OF_ONE_MAX = 12
"""Maximum number of newcomers from one address, so that it cannot block all others."""
REQUEST_S = 5.0
"""Timeout of a newcomer's request."""
REFUSAL_S = 1.0
"""Pause before a refusal."""
REFUSALS_MAX = 10
WITHIN_S = 60.0
"""An address that was refused REFUSALS_MAX times within WITHIN_S is not served until these have expired."""
ADDRESSES_MAX = 1024
NOTICE_EVERY_S = 60.0
"""Minimum interval of the events about refusals, for each address; all are counted."""
HEADER_BYTES = 4

_log = logging.getLogger("peerload.join")


class Refusals:
    """Recent refusals by address. They only save this node's time, since an address proves nothing."""

    def __init__(self) -> None:
        self._at: BoundedDict[str, deque[float]] = BoundedDict(ADDRESSES_MAX)

    def add(self, address: str, now_s: float) -> bool:
        """Count a refusal. → True if the previous one was at least NOTICE_EVERY_S ago."""
        network = network_of(address)
        times = self._at[network] = self._at.get(network) or deque(maxlen=REFUSALS_MAX)
        is_news = not times or now_s - times[-1] >= NOTICE_EVERY_S
        times.append(now_s)
        return is_news

    def are_too_many(self, address: str, now_s: float) -> bool:
        times = self._at.get(network_of(address))
        return times is not None and len(times) == REFUSALS_MAX and now_s - times[0] < WITHIN_S


class JoinServer:
    """Serves the newcomers of one node. ``tls``: shows the node's certificate."""

    def __init__(self, enrollment: Enrollment, tls: Credentials, events: EventLog, security: SecurityEvents) -> None:
        self._enrollment = enrollment
        self._tls = tls
        self._events = events
        self._security = security
        self._counters = security.counters
        self.refusals = Refusals()
        self.newcomers: set[JoiningNode] = set()

    @property
    def ca(self) -> bytes:
        return self._tls.cluster.authority.certificate

    @property
    def certificate(self) -> bytes:
        return self._tls.certificate

    def newcomer(self, closed: Callable[[asyncio.BaseProtocol], None]) -> JoiningNode:
        return JoiningNode(self, closed)

    def close(self) -> None:
        for newcomer in list(self.newcomers):
            newcomer.abort()

    def opened(self, newcomer: JoiningNode) -> bool:
        """Count a connection. → True if it is served."""
        now_s = asyncio.get_running_loop().time()
        if self.refusals.are_too_many(newcomer.address, now_s):
            self._drop("too_many_refusals", newcomer.address)
            return False
        network = network_of(newcomer.address)
        of_one = sum(network_of(one.address) == network for one in self.newcomers)
        if len(self.newcomers) >= NEWCOMERS_MAX or of_one >= NEWCOMERS_OF_ONE_MAX:
            self._drop("too_many_newcomers", newcomer.address)
            return False
        self.newcomers.add(newcomer)
        return True

    def _drop(self, reason: str, address: str) -> None:
        self._counters[metrics.labelled(metrics.JOIN_CONNECTIONS_DROPPED, reason=reason)] += 1
        self._security.report(rules.JOINS_LIMITED, address, metrics.label_text(reason))

    def admit(self, newcomer: JoiningNode, request: JoinRequest, certificate: bytes, nonce: bytes) -> JoinWelcome:
        welcome = self._enrollment.admit(request, certificate, nonce)
        self._counters[metrics.JOINS_ACCEPTED] += 1
        self._events.record("join", "welcomed", reason=f"{request.node}, from {newcomer.address}")
        _log.info("node joined: node=%s address=%s", request.node, newcomer.address)
        return welcome

    def refused(self, newcomer: JoiningNode, why: str) -> None:
        """Count a refusal, and report it at a limited rate."""
        self._counters[metrics.JOINS_REFUSED] += 1
        self._security.report(rules.JOINS_LIMITED, newcomer.address, why)
        if self.refusals.add(newcomer.address, asyncio.get_running_loop().time()):
            self._events.record("join", "refused", reason=f"a client at {newcomer.address}: {why}")
            _log.warning("join refused: address=%s reason=%s", newcomer.address, why)

    def closed(self, newcomer: JoiningNode) -> None:
        self.newcomers.discard(newcomer)


class JoiningNode(asyncio.Protocol):
    """A connection of a joining node."""

    def __init__(self, server: JoinServer, closed: Callable[[asyncio.BaseProtocol], None]) -> None:
        self.address = "?"
        self._server = server
        self._closed = closed
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._nonce = os.urandom(join.NONCE_BYTES)
        self._certificate = b""
        self._has_asked = self._is_over = False
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timeout; nothing is sent before the newcomer's request."""
        self._transport = cast("asyncio.Transport", transport)
        peername = transport.get_extra_info("peername")
        self.address = plain_host(str(peername[0])) if peername else "?"
        self._certificate = self._server.certificate
        if self._server.opened(self):
            self._timer = self._loop.call_later(REQUEST_S, self._close)
        else:
            self._close()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._buffer += data
        while len(self._buffer) >= HEADER_BYTES and not self._is_over:
            size = int.from_bytes(self._buffer[:HEADER_BYTES], "big")
            if size > join.REQUEST_BYTES_MAX:
                self._refuse(InvitationRefused("request", "a frame too large"))
                return
            if len(self._buffer) < HEADER_BYTES + size:
                return
            raw = bytes(self._buffer[HEADER_BYTES : HEADER_BYTES + size])
            del self._buffer[: HEADER_BYTES + size]
            self._received(raw)

    def _received(self, raw: bytes) -> None:
        try:
            message = join.decode_newcomer(raw)
        except ProtocolError:
            self._refuse(InvitationRefused("request", "not a message of the join protocol"))
            return
        if isinstance(message, join.JoinAsk) and not self._has_asked:
            self._has_asked = True
            self._write(join.encode(join.JoinWho(self._server.ca, self._nonce)))
        elif isinstance(message, join.JoinRequest) and self._has_asked:
            try:
                answer = join.encode(self._server.admit(self, message, self._certificate, self._nonce))
            except InvitationRefused as refusal:
                self._refuse(refusal)
            else:
                self._write(answer)
                self._close()
        else:
            self._refuse(InvitationRefused("request", "out of turn"))

    def _refuse(self, refusal: InvitationRefused) -> None:
        """Send the same refusal after the same pause, whatever error a token had."""
        self._server.refused(self, refusal.why)
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        answer = join.encode(join.JoinRefused(refusal.code, refusal.what))
        self._loop.call_later(REFUSAL_S, self._write_last, answer)

    def _write_last(self, answer: bytes) -> None:
        self._write(answer)
        self._close()

    def _write(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def _close(self) -> None:
        self._is_over = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._server.closed(self)
        self._closed(self)


PASSED_ON_TO = 4
"""Number of members to which a received statement is forwarded."""
FORGED_EVERY_S = 60.0
"""Minimum interval of the events about statements without a valid signature; all are counted."""

_trust_log = logging.getLogger("peerload.trust")


class TrustDistribution:
    """Sends, receives and applies the statements of the cluster's CA."""

    def __init__(
        self,
        local: LocalNode,
        keyring: Keyring,
        tls: Credentials,
        links: PeerLinks,
        events: EventLog,
        inbox: Inbox,
        security: SecurityEvents,
    ) -> None:
        self._local = local
        self._keyring = keyring
        self.trust = keyring.trust
        self._tls = tls
        self._links = links
        self._events = events
        self._inbox = inbox
        self._security = security
        self._forged_s = -FORGED_EVERY_S

    # -- new statements ------------------------------------------------------------------------------------------------

    def revoke(self, node: str) -> int:
        """Revoke a node, and change the seal key, which it knows → number of members that were sent both. Raises BadRequest;
        OSError if the statements cannot be written."""
        keys = []
        if certificate := self._links.certificate_of(node):
            keys.append(certificates.key_fingerprint(certificates.key_of(certificate)))
        known = frozenset(self.trust.signed)
        revoked = self.trust.revoke(node, keys, time.time(), key=secrets.token_bytes(KEY_BYTES))
        self.trust.withdraw(node)
        members = self._local.reachable_peers()
        count = self._send([raw for raw in self.trust.signed if raw not in known], members)
        self._apply([(revoked, self.trust.revocations[-1])])
        return count - 1 if node in members else count

    def rotate(self) -> int:
        """Change the seal key → number of members that were sent it. Raises OSError if it cannot be written."""
        new = self.trust.rotate(secrets.token_bytes(KEY_BYTES), time.time(), OVERLAP_S)
        self._keyring.refresh()
        self._events.record("cluster", "rotated", reason=f"key {self.trust.number}")
        return self._send([new], self._local.reachable_peers())

    def read_again(self) -> int:
        """Apply the unknown statements in STATE/trust, which an administrator has put there → their number. Raises
        ConfigError."""
        try:
            new = self.trust.take(self.trust.read().signed, time.time())
        except (BadRequest, OSError) as error:
            raise ConfigError("state", "cannot reload the statements of the CA", why=str(error)) from None
        if new:
            self._withdraw(new)
            self._send([raw for raw, _ in new], self._local.reachable_peers())
            self._apply(new)
        return len(new)

    def _send(self, signed: Iterable[bytes], nodes: Iterable[str]) -> int:
        """Send statements to these nodes; a revoked node that is still linked gets only revocations."""
        statements, count = tuple(signed), 0
        public = frozenset(self.trust.signed_revocations)
        for node in nodes:
            some = [raw for raw in statements if raw in public] if self._is_out(node) else statements
            for at in range(0, len(some), messages.SIGNED_MAX):
                self._links.send(node, messages.Trust(tuple(some[at : at + messages.SIGNED_MAX])))
            count += 1
        return count

    def _is_out(self, node: str) -> bool:
        """True if the certificate of the node's link is revoked; without a link, if its name is, and was not admitted
        again."""
        if self._links.certificate_of(node):
            return self._is_refused(node)
        return self.trust.is_out(node)

    def _is_refused(self, node: str) -> bool:
        """True if the node has no link with a valid certificate."""
        certificate = self._links.certificate_of(node)
        return not certificate or self.trust.refuses(certificates.proven_info(certificate))

    # -- received statements -------------------------------------------------------------------------------------------

    def met(self, hello: Hello) -> None:
        """Send a peer on a new link the statements that it may not know."""
        identity = hello.identity
        self.trust.admit(identity.node, identity.boot)
        if hello.trust != self.trust.digest and self.trust.signed:
            self._send(self.trust.signed, [identity.node])

    def received(self, src: str, message: messages.Trust) -> None:
        """Apply and pass on the statements that are new. Raises OSError if they cannot be written."""
        try:
            new = self.trust.take(message.signed, time.time())
        except BadRequest:
            what = "it forwarded a statement that the CA did not sign"
            self._security.counters[metrics.STATEMENTS_UNSIGNED] += 1
            self._security.report("J4", src, what)
            if time.monotonic() - self._forged_s >= FORGED_EVERY_S:
                self._forged_s = time.monotonic()
                self._events.record("cluster", "forged", node=src, reason=what)
            return
        if not new:
            return
        self._withdraw(new)
        statements, members = [raw for raw, _ in new], self._local.reachable_peers()
        if self._local.cluster.is_issuer and self._knew_the_key(new):
            # Both together: an issuer that receives both makes no new key itself.
            statements.append(self.trust.rotate(secrets.token_bytes(KEY_BYTES), time.time(), OVERLAP_REVOKED_S))
            self._events.record("cluster", "rotated", reason=f"key {self.trust.number}")
            self._send(statements, members)
        else:
            chosen = random.sample(members, min(PASSED_ON_TO, len(members)))
            self._send(statements, [node for node in chosen if node != src])
        self._apply(new)

    def _withdraw(self, new: Iterable[tuple[bytes, object]]) -> None:
        """Cancel the admission of nodes that have been revoked meanwhile."""
        for _, statement in new:
            if isinstance(statement, Revoked) and self._is_refused(statement.node):
                self.trust.withdraw(statement.node)

    def _knew_the_key(self, new: Iterable[tuple[bytes, object]]) -> bool:
        """True if a node was revoked by an issuer that did not know the newest key: the revoked node may have that key."""
        statements = [statement for _, statement in new]
        has_revoked = any(isinstance(statement, Revoked) for statement in statements)
        return has_revoked and self.trust.newest not in (None, *statements)

    def _apply(self, new: Iterable[tuple[bytes, object]]) -> None:
        for _, statement in new:
            if isinstance(statement, Revoked):
                self._events.record(
                    "cluster", "revoked", node=statement.node, reason="its certificate is no longer valid"
                )
                _trust_log.warning("node revoked: node=%s", statement.node)
                if statement.node == self._local.identity.node and self._tls.is_revoked:
                    _trust_log.error("this node was revoked; it works alone")
            else:
                self._events.record("cluster", "rotated", reason=f"key {self.trust.number}")
        self._keyring.refresh()
        self._links.connections.close_revoked()
        for _, statement in new:
            # A node of that name may have been admitted again.
            if isinstance(statement, Revoked) and self._is_refused(statement.node):
                self._inbox.put(NodeRevoked(statement.node))


REQUESTS_PER_S = 1.0
"""Rate of certificates made for one member; more requests are refused."""
ISSUERS_ASKED_MAX = 4
"""Number of members asked for a certificate if no member with the CA's key is known."""


@dataclass(eq=False, repr=False)
class CertificateRenewal:
    """Keeps the certificate of this node valid, and answers the requests of other members."""

    _tls: Credentials
    _trust: TrustStore
    _links: PeerLinks
    _node: Node
    _events: EventLog
    _counters: Counter[str]
    _served_s: dict[str, float] = field(default_factory=dict, init=False)

    async def run(self) -> None:
        """Renew the certificate whenever it is due, and close links whose certificate has expired."""
        while True:
            await asyncio.sleep(self._tls.check_every_s)
            try:
                if self._tls.cluster.is_issuer:
                    if self._tls.renew_if_due():
                        _trust_log.info("certificate renewed")
                elif self._tls.is_due(datetime.now(UTC)):
                    self.request()
            except ConfigError as error:
                _trust_log.error("cannot renew the certificate: error=%s", error)
            self._links.connections.close_expired(datetime.now(UTC))

    def request(self) -> None:
        """Ask a node with the CA's key for a new certificate; if none is known, ask some others, since reports of members about
        each other may be wrong."""
        peers = list(self._node.membership)
        issuers = [peer.identity.node for peer in peers if peer.profile.issuer and peer.state is PeerState.ALIVE]
        chosen = random.sample(issuers, min(1, len(issuers)))
        if not issuers:
            self._counters[metrics.CERTIFICATE_ISSUER_MISSING] += 1
            _trust_log.warning("certificate is due, and no node with the CA's key is known to be alive")
            alive = [peer.identity.node for peer in peers if peer.state in (PeerState.ALIVE, PeerState.SUSPECT)]
            chosen = random.sample(alive, min(ISSUERS_ASKED_MAX, len(alive)))
        for node in chosen:
            self._links.send(node, messages.CertificateRequest())

    def requested(self, src: str) -> None:
        """Make a certificate for the name and the key of a member's link, and for no other."""
        now_s = asyncio.get_running_loop().time()
        shown = self._links.certificate_of(src)
        is_too_early = now_s - self._served_s.get(src, -1e9) < 1 / REQUESTS_PER_S
        if not self._tls.cluster.is_issuer or not shown or is_too_early:
            self._counters[metrics.CERTIFICATES_REFUSED] += 1
            return
        self._served_s[src] = now_s
        facts = certificates.proven_info(shown)
        if facts.name != src or self._trust.refuses(facts):
            self._counters[metrics.CERTIFICATES_REFUSED] += 1
            return
        now = self._trust.certified_at(src, datetime.now(UTC))
        authority = self._tls.cluster.authority
        made = certificates.certify(authority, src, certificates.key_of(shown), now, self._tls.life)
        self._counters[metrics.CERTIFICATES_ISSUED] += 1
        self._events.record("cluster", "certified", node=src)
        self._links.send(src, messages.CertificateTold(made))

    def received(self, src: str, message: messages.CertificateTold) -> None:
        try:
            self._tls.install(message.certificate)
        except (ValueError, ConfigError) as error:
            self._counters[metrics.CERTIFICATES_REJECTED] += 1
            _trust_log.warning("certificate rejected: from=%s error=%s", src, error)
            return
        self._events.record("cluster", "renewed", node=src)
        _trust_log.info("certificate renewed: from=%s", src)
