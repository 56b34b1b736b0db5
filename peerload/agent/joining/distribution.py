"""How what the CA has said gets to every member and takes effect there, and how members get new certificates.

Whoever has something new tells it to all it can reach, whoever hears something new passes it on to a few; and each new
link begins with a digest of what its ends know (`Hello.trust`), so that those who were away hear of it when they are back.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from peerload.core.membership.membership import PeerState
from peerload.model import messages
from peerload.model.errors import BadRequest, ConfigError
from peerload.model.events import NodeRevoked
from peerload.security import certificates
from peerload.security.revocation import OVERLAP_REVOKED_S, OVERLAP_S, Revoked
from peerload.wire.seal import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peerload.agent.parts import Parts
    from peerload.model.messages import Hello
    from peerload.security.revocation import Trust
    from peerload.wire.seal import Sealer

PASSED_ON_TO = 4
"""Members that are told what somebody else has told us."""
REQUESTS_PER_S = 1.0
"""Certificates made for one member; more often is refused."""
FORGED_EVERY_S = 60.0
"""What the CA never said is noted so often; all of it is counted."""
WORDS = (messages.Trust, messages.CertificateRequest, messages.CertificateTold)
"""What is handled here, and never reaches the core."""

_log = logging.getLogger("peerload.trust")


class TrustLink:
    """``parts``: of this agent, complete by the time anything is called."""

    def __init__(self, parts: Parts, trust: Trust) -> None:
        self._parts = parts
        self.trust = trust
        self._sealers: list[Sealer] = []
        self._timer: asyncio.TimerHandle | None = None
        self._admitted: dict[str, str] = {}
        self._served_s: dict[str, float] = {}
        self._forged_s = -FORGED_EVERY_S

    # -- effects -------------------------------------------------------------------------------------------------------

    def seals(self, sealer: Sealer) -> Sealer:
        """The same, and from now on with the keys in force."""
        self._sealers.append(sealer)
        sealer.use(self.trust.keys(time.time()))
        return sealer

    def start(self) -> None:
        """Put what is known into effect."""
        self._use_keys()
        self._parts.tls.looked = self._parts.links.made.cut_ended

    def close(self) -> None:
        """End."""
        if self._timer is not None:
            self._timer.cancel()

    def hears(self, node: str, boot: str) -> bool:
        """Whether datagrams and broker messages of this start of a node count: of a name that was shut out, only those of
        whoever has proven since, over a link, to have it anew."""
        return not self.trust.was_revoked(node) or self._admitted.get(node) == boot

    def _use_keys(self) -> None:
        now = time.time()
        for sealer in self._sealers:
            sealer.use(self.trust.keys(now))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        changes_at = self.trust.changes_at(now)
        if changes_at is not None:
            wait_s = min(max(changes_at - now, 0.0) + 0.01, 86_400.0)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._use_keys)

    # -- what is new ---------------------------------------------------------------------------------------------------

    def revoke(self, node: str) -> int:
        """Shut a node out, here and everywhere, and change the key that it knew → how many were told at once. Raises
        BadRequest; OSError if it cannot be kept."""
        keys = []
        if shown := self._parts.links.certificate_of(node):
            keys.append(certificates.key_fingerprint(certificates.key_of(shown)))
        known = frozenset(self.trust.signed)
        revoked = self.trust.revoke(node, keys, time.time(), key=secrets.token_bytes(KEY_BYTES))
        self._admitted.pop(node, None)
        told = self._tell([raw for raw in self.trust.signed if raw not in known], self._alive(), but="")
        self._take_effect([(revoked, self.trust.revocations[-1])])
        return told - 1 if node in self._alive() else told

    def rotate(self) -> int:
        """A new key for gossip and MQTT → how many were told at once. Raises OSError if it cannot be kept."""
        new = self.trust.rotate(secrets.token_bytes(KEY_BYTES), time.time(), OVERLAP_S)
        self._use_keys()
        self._parts.journal.happened("cluster", "rotated", reason=f"key {self.trust.number}")
        return self._tell([new], self._alive(), but="")

    def _alive(self) -> list[str]:
        membership = self._parts.node.membership
        return [peer.identity.node for peer in membership if peer.state in (PeerState.ALIVE, PeerState.SUSPECT)]

    def _tell(self, signed: Iterable[bytes], nodes: Iterable[str], *, but: str) -> int:
        """Whoever is shut out, and still linked, is told of that, and of no key."""
        words, told = tuple(signed), 0
        public = frozenset(self.trust.signed_revocations)
        for node in nodes:
            if node != but:
                some = [raw for raw in words if raw in public] if self._is_shut_out(node) else words
                for at in range(0, len(some), messages.SIGNED_MAX):
                    self._parts.links.send(node, messages.Trust(tuple(some[at : at + messages.SIGNED_MAX])))
                told += 1
        return told

    def _is_shut_out(self, node: str) -> bool:
        """Whether who is linked by that name is, or, if nobody is, whether anybody of that name ever was, and nobody has
        proven since to have it anew."""
        if self._parts.links.certificate_of(node):
            return self._is_refused(node)
        return self.trust.was_revoked(node) and node not in self._admitted

    def _is_refused(self, node: str) -> bool:
        """Whether nobody is linked by that name whose certificate counts."""
        shown = self._parts.links.certificate_of(node)
        return not shown or self.trust.refuses(certificates.proven_facts(shown))

    def read_again(self) -> int:
        """Take what lies in STATE/trust and is not known here yet: somebody has put it there. → how many words. Raises
        ConfigError."""
        try:
            new = self.trust.take(self.trust.read().signed, time.time())
        except (BadRequest, OSError) as error:
            raise ConfigError("state", "what the CA has said cannot be read again", why=str(error)) from None
        if new:
            self._let_go(new)
            self._tell([raw for raw, _ in new], self._alive(), but="")
            self._take_effect(new)
        return len(new)

    # -- what is heard -------------------------------------------------------------------------------------------------

    def met(self, hello: Hello) -> None:
        """A link was made: its other end is told what it may not know."""
        told = hello.identity
        if self.trust.was_revoked(told.node):
            self._admitted[told.node] = told.boot
        if hello.trust != self.trust.digest and self.trust.signed:
            self._tell(self.trust.signed, [told.node], but="")

    def received(self, src: str, message: messages.Message) -> None:
        """One of WORDS."""
        match message:
            case messages.Trust():
                self._told(src, message)
            case messages.CertificateRequest():
                self._asked(src)
            case messages.CertificateTold():
                self._certified(src, message)

    def _told(self, src: str, message: messages.Trust) -> None:
        try:
            new = self.trust.take(message.signed, time.time())
        except BadRequest:
            self._parts.counters["words not signed by the CA"] += 1
            self._parts.security.tell("J4", src, "it passed on what the CA never said")
            if time.monotonic() - self._forged_s >= FORGED_EVERY_S:
                self._forged_s = time.monotonic()
                self._parts.journal.happened(
                    "cluster", "forged", node=src, reason="it passed on what the CA never said"
                )
            return
        except OSError as error:
            self._parts.run.fail(f"what the CA has said cannot be kept: {error.strerror}")
            return
        if new:
            self._let_go(new)
            words, alive = [raw for raw, _ in new], self._alive()
            if self._parts.cluster.is_issuer and self._knew_the_key(new):
                words += self._made_again()  # both at once: who hears of both makes no key of its own
                self._tell(words, alive, but="")
            else:
                self._tell(words, random.sample(alive, min(PASSED_ON_TO, len(alive))), but=src)
            self._take_effect(new)

    def _let_go(self, new: Iterable[tuple[bytes, object]]) -> None:
        """Who has proven to have its name anew, and was shut out since, has not."""
        for _, word in new:
            if isinstance(word, Revoked) and self._is_refused(word.node):
                self._admitted.pop(word.node, None)

    def _knew_the_key(self, new: Iterable[tuple[bytes, object]]) -> bool:
        """Whether somebody was shut out where the newest key was not known, which that one then may have: keys were
        changed here meanwhile."""
        words = [word for _, word in new]
        return any(isinstance(word, Revoked) for word in words) and self.trust.newest not in (None, *words)

    def _made_again(self) -> list[bytes]:
        """Another new key; none if it cannot be kept."""
        try:
            made = self.trust.rotate(secrets.token_bytes(KEY_BYTES), time.time(), OVERLAP_REVOKED_S)
        except OSError as error:
            self._parts.run.fail(f"a new key cannot be kept: {error.strerror}")
            return []
        self._parts.journal.happened("cluster", "rotated", reason=f"key {self.trust.number}")
        return [made]

    def _take_effect(self, new: Iterable[tuple[bytes, object]]) -> None:
        journal = self._parts.journal
        for _, word in new:
            if isinstance(word, Revoked):
                journal.happened("cluster", "revoked", node=word.node, reason="its certificate counts no more")
                _log.warning("%s is shut out: its certificate was revoked", word.node)
                facts = self._parts.tls.facts
                if word.node == self._parts.config.node and facts is not None and self.trust.refuses(facts):
                    _log.error("this node was shut out of the cluster; it works alone")
                    self._parts.notices.append("this node was shut out of its cluster (revoked): it works alone")
            else:
                journal.happened("cluster", "rotated", reason=f"key {self.trust.number}")
        self._use_keys()
        self._parts.links.made.cut_revoked()
        for _, word in new:
            if isinstance(word, Revoked) and self._is_refused(word.node):  # else somebody was let in anew by that name
                self._parts.inbox.put(NodeRevoked(word.node))

    # -- certificates --------------------------------------------------------------------------------------------------

    def ask_for_another(self) -> None:
        """Our certificate is due: ask one that can make them."""
        membership = self._parts.node.membership
        issuers = [peer.identity.node for peer in membership if peer.profile.issuer and peer.state is PeerState.ALIVE]
        asked = random.sample(issuers, min(1, len(issuers)))
        if not issuers:
            self._parts.counters["certificates: nobody to ask"] += 1
            _log.warning("this node's certificate is due, and no node that can make one is there")
            alive = self._alive()  # what members tell of each other may be a lie: one may be able to all the same
            asked = random.sample(alive, min(PASSED_ON_TO, len(alive)))
        for node in asked:
            self._parts.links.send(node, messages.CertificateRequest())

    def _asked(self, src: str) -> None:
        """For the name and the key that the link was made with, and for no other."""
        parts, now_s = self._parts, asyncio.get_running_loop().time()
        shown = parts.links.certificate_of(src)
        if not parts.cluster.is_issuer or not shown or now_s - self._served_s.get(src, -1e9) < 1 / REQUESTS_PER_S:
            parts.counters["certificates not made"] += 1
            return
        self._served_s[src] = now_s
        facts = certificates.proven_facts(shown)
        if facts.name != src or self.trust.refuses(facts):
            parts.counters["certificates not made"] += 1
            return
        now = self.trust.certified_at(src, datetime.now(UTC))
        made = certificates.certify(parts.cluster.authority, src, certificates.key_of(shown), now, parts.tls.life)
        parts.counters["certificates made"] += 1
        parts.journal.happened("cluster", "certified", node=src)
        parts.links.send(src, messages.CertificateTold(made))

    def _certified(self, src: str, message: messages.CertificateTold) -> None:
        try:
            self._parts.tls.install(message.certificate)
        except (ValueError, ConfigError) as error:
            self._parts.counters["certificates not taken"] += 1
            _log.warning("a certificate that %s has sent is not taken: %s", src, error)
            return
        self._parts.journal.happened("cluster", "renewed", node=src)
        _log.info("this node has a new certificate, made by %s", src)
