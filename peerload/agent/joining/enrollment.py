"""Enrollment: the invitations of this node, which names newcomers may have, and what they get.

Only a node with the CA's key can do this.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from peerload.agent.node_info import now
from peerload.core.membership.membership import PeerState
from peerload.model.errors import BadRequest, StoreError
from peerload.security import certificates
from peerload.security.invitations import InvitationRefused, Invitations
from peerload.wire.join import JoinRequest, JoinWelcome
from peerload.wire.token import Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from peerload.agent.node_info import NodeInfo
    from peerload.core.membership.membership import PeerInfo
    from peerload.core.node import Node
    from peerload.security.invitations import Invitation
    from peerload.security.revocation import Trust
    from peerload.security.tls import Credentials
    from peerload.wire.control import Invite

INVITES_FILE = "invites"
PEERS_SENT_MAX = 8
ARRIVES_WITHIN_S = 60.0
"""Time in which a newcomer has to come up; until then its name is reserved."""


class Enrollment:
    """The invitations of one node, and who may use them."""

    def __init__(self, info: NodeInfo, node: Node, tls: Credentials, trust: Trust) -> None:
        self._info = info
        self._node = node
        self._tls = tls
        self._trust = trust
        self._invites = Invitations(Path(info.config.state) / INVITES_FILE)

    @property
    def cluster_name(self) -> str:
        """The name of the cluster."""
        return self._tls.cluster.name

    def check_issuer(self, verb: str, cannot: str) -> None:
        """Check that this node has the CA's key. Raises BadRequest, which says what it cannot do without."""
        cluster = self._tls.cluster
        if cluster.is_local:
            raise BadRequest(
                f"this node can {cannot}",
                why="it is of no cluster beyond this machine",
                hint="make one:  peerload invite",
            )
        if not cluster.is_issuer:
            issuers = sorted(peer.identity.node for peer in self._node.membership if peer.profile.issuer)
            where = f"on {' or '.join(issuers[:3])}" if issuers else "where the cluster was made"
            raise BadRequest(
                f"this node can {cannot}",
                why="it does not have the key of the cluster's CA",
                hint=f"{where}:  peerload {verb}",
            )

    def invite(self, request: Invite, addresses: Sequence[str]) -> Token:
        """Make an invitation. addresses: where newcomers may dial this node, beside its own address. Raises BadRequest or
        StoreError."""
        if request.node and (why := self.name_objection(request.node, is_meant=True)):
            raise BadRequest(f"no node can be called {request.node}", why=why, hint="name another:  --node NAME")
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
        """Let a newcomer in, which was shown this certificate and nonce. Raises InvitationRefused."""
        try:
            invite, key = self._invites.redeem(request, certificate, nonce, time.time(), self.name_objection)
        except OSError as error:
            why = f"its use cannot be saved: {error.strerror}"
            raise InvitationRefused("busy", why, "try again in a minute") from None
        return self._welcome(invite, key, request.node)

    def name_objection(self, node: str, let_in_at: float = 0.0, *, is_meant: bool = False) -> str:
        """Reason why no newcomer may have this name now; empty if one may. let_in_at: when a newcomer last got it (Unix s).
        is_meant: the invitation is for this name alone.

        Whoever has the name of a member has its tasks: a member that is only away keeps its name."""
        if node == self._info.config.node:
            return "that is the name of the node that lets you in"
        membership = self._node.membership
        known = membership.get(node)
        is_awaited = time.time() - let_in_at < ARRIVES_WITHIN_S and let_in_at > self._trust.revoked_at(node)
        if is_awaited and not (known is not None and _has_gone_since(known, let_in_at)):
            return "it has just been given to another machine"
        is_free = self._trust.was_revoked(node) or is_meant
        meant = f"peerload invite --node {node}  if that is the one meant"
        if known is None:
            is_away = node in membership.gossip.anti_entropy.known and not is_free
            return f"a member is called so that was not met lately ({meant})" if is_away else ""
        match known.state:
            case PeerState.LEFT | PeerState.DEAD if is_free:
                return ""
            case PeerState.LEFT:
                return f"a member is called so, and has said good-bye ({meant})"
            case PeerState.DEAD:
                return f"a member is called so, and is dead ({meant})"
            case _:
                return f"a member is called so, and is {known.state.value}"

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
    """True if the machine that got the name then (Unix s) has joined, and has left or died since."""
    at = now()
    changed_at = at.wall_s - (at.boot_s - peer.since_s)
    return peer.state in (PeerState.LEFT, PeerState.DEAD) and changed_at > let_in_at
