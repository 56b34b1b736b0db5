"""Certificate renewal: this node's own certificate, and those that it makes for other members."""

from __future__ import annotations

import asyncio
import logging
import random
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from peerload.core.membership.membership import PeerState
from peerload.model import messages, metrics
from peerload.model.errors import ConfigError
from peerload.security import certificates

if TYPE_CHECKING:
    from collections import Counter

    from peerload.agent.peers.links import PeerLinks
    from peerload.agent.store.write_ahead import EventLog
    from peerload.core.node import Node
    from peerload.security.revocation import TrustStore
    from peerload.security.tls import Credentials

REQUESTS_PER_S = 1.0
"""Certificates made for one member; more requests are refused."""
ASKED_MAX = 4
"""Members that are asked for a certificate where none is known to make them."""

_log = logging.getLogger("peerload.trust")


class CertificateRenewal:
    """Keeps the certificate of this node valid, and answers the requests of other members."""

    def __init__(
        self,
        tls: Credentials,
        trust: TrustStore,
        links: PeerLinks,
        node: Node,
        events: EventLog,
        counters: Counter[str],
    ) -> None:
        self._tls = tls
        self._trust = trust
        self._links = links
        self._node = node
        self._events = events
        self._counters = counters
        self._served_s: dict[str, float] = {}

    async def run(self) -> None:
        """Renew the certificate whenever it is due, and close links whose certificate has expired."""
        while True:
            await asyncio.sleep(self._tls.check_every_s)
            try:
                if self._tls.cluster.is_issuer:
                    if self._tls.renew_if_due():
                        _log.info("certificate renewed")
                elif self._tls.is_due(datetime.now(UTC)):
                    self.request()
            except ConfigError as error:
                _log.error("cannot renew the certificate: error=%s", error)
            self._links.close_expired(datetime.now(UTC))

    def request(self) -> None:
        """Ask a node with the CA's key for a new certificate; if none is known, some others: what members report of each
        other may be wrong."""
        peers = list(self._node.membership)
        issuers = [peer.identity.node for peer in peers if peer.profile.issuer and peer.state is PeerState.ALIVE]
        asked = random.sample(issuers, min(1, len(issuers)))
        if not issuers:
            self._counters[metrics.CERTIFICATE_ISSUER_MISSING] += 1
            _log.warning("certificate is due, and no node with the CA's key is known to be alive")
            alive = [peer.identity.node for peer in peers if peer.state in (PeerState.ALIVE, PeerState.SUSPECT)]
            asked = random.sample(alive, min(ASKED_MAX, len(alive)))
        for node in asked:
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
        """Install a certificate for this node."""
        try:
            self._tls.install(message.certificate)
        except (ValueError, ConfigError) as error:
            self._counters[metrics.CERTIFICATES_REJECTED] += 1
            _log.warning("certificate rejected: from=%s error=%s", src, error)
            return
        self._events.record("cluster", "renewed", node=src)
        _log.info("certificate renewed: from=%s", src)
