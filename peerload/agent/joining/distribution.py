"""Distribution of the CA's signed statements: revocations and seal keys reach every member and take effect.

A node with a new statement sends it to all members that it can reach; a node that receives a new one passes it on to a few.
Each Hello carries a digest of the statements that its sender knows, so that a member that was away gets what it missed.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from typing import TYPE_CHECKING

from peerload.model import messages, metrics
from peerload.model.errors import BadRequest, ConfigError
from peerload.model.events import NodeRevoked
from peerload.security import certificates
from peerload.security.revocation import OVERLAP_REVOKED_S, OVERLAP_S, Revoked
from peerload.wire.seal import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peerload.agent.peers.links import PeerLinks
    from peerload.agent.peers.local_node import LocalNode
    from peerload.agent.runtime import Inbox
    from peerload.agent.store.write_ahead import EventLog, SecurityEvents
    from peerload.model.messages import Hello
    from peerload.security.revocation import Keyring
    from peerload.security.tls import Credentials

PASSED_ON_TO = 4
"""Members to which a received statement is passed on."""
FORGED_EVERY_S = 60.0
"""Interval of the events about statements without a valid signature; all are counted."""

_log = logging.getLogger("peerload.trust")


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
        """Revoke a node, and change the seal key that it knows → how many members were sent both. Raises BadRequest;
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
        """Change the seal key → how many members were sent it. Raises OSError if it cannot be written."""
        new = self.trust.rotate(secrets.token_bytes(KEY_BYTES), time.time(), OVERLAP_S)
        self._keyring.refresh()
        self._events.record("cluster", "rotated", reason=f"key {self.trust.number}")
        return self._send([new], self._local.reachable_peers())

    def read_again(self) -> int:
        """Apply the statements in STATE/trust that are not known yet; an administrator has put them there. Returns their
        number. Raises ConfigError."""
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
        """Send statements to these nodes; to one that is revoked and still linked, revocations only."""
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
        """True if the node has no link with a certificate that counts."""
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
            # Both at once: an issuer that receives both makes no key of its own.
            statements.append(self.trust.rotate(secrets.token_bytes(KEY_BYTES), time.time(), OVERLAP_REVOKED_S))
            self._events.record("cluster", "rotated", reason=f"key {self.trust.number}")
            self._send(statements, members)
        else:
            chosen = random.sample(members, min(PASSED_ON_TO, len(members)))
            self._send(statements, [node for node in chosen if node != src])
        self._apply(new)

    def _withdraw(self, new: Iterable[tuple[bytes, object]]) -> None:
        """Withdraw the admission of nodes that were revoked since."""
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
                _log.warning("node revoked: node=%s", statement.node)
                if statement.node == self._local.identity.node and self._tls.is_revoked:
                    _log.error("this node was revoked; it works alone")
            else:
                self._events.record("cluster", "rotated", reason=f"key {self.trust.number}")
        self._keyring.refresh()
        self._links.close_revoked()
        for _, statement in new:
            # A node of that name may have been let in again.
            if isinstance(statement, Revoked) and self._is_refused(statement.node):
                self._inbox.put(NodeRevoked(statement.node))
