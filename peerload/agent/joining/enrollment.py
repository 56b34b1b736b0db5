"""Letting others in and shutting them out, as local clients ask for it: invite, revoke, rotate; and what a newcomer gets.

Only a node that has the CA's key can do any of this.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from peerload.agent.joining.join_server import JoinServer
from peerload.agent.run_state import Ending
from peerload.core.membership.membership import PeerState
from peerload.model.errors import BadRequest, StoreError
from peerload.security import certificates
from peerload.security.address import reachable_by_both
from peerload.security.invitations import Invitations
from peerload.security.revocation import OVERLAP_S
from peerload.wire.join import JoinWelcome
from peerload.wire.token import Token

if TYPE_CHECKING:
    from collections.abc import Callable

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from peerload.agent.control.connection import Connection
    from peerload.agent.parts import Parts
    from peerload.core.membership.membership import PeerInfo
    from peerload.security.invitations import Invitation
    from peerload.wire import control

INVITES_FILE = "invites"
PEERS_TOLD_MAX = 8
ARRIVES_WITHIN_S = 60.0
"""Who was let in has so long to come up; until then nobody else gets its name."""


class Enrollment:
    """Of one agent, whose peer links are there by now; its other parts are by the time anything is called."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._invites = Invitations(Path(parts.config.state) / INVITES_FILE)
        self._open_door()

    def _open_door(self) -> None:
        """Have newcomers let in at the peer links' port, where that can be."""
        parts = self._parts
        if parts.tls.lets_in:
            parts.links.serve_newcomers(
                JoinServer(
                    self._invites,
                    parts.cluster.authority.certificate,
                    lambda: parts.tls.certificate,
                    self._objection,
                    self._welcome,
                    lambda state, reason: parts.journal.happened("join", state, reason=reason),
                    parts.counters,
                    parts.security.tell,
                )
            )

    def invitations(self, now: float) -> int:
        """How many are open."""
        return self._invites.open(now)

    def _objection(self, node: str, let_in_at: float = 0.0, *, is_meant: bool = False) -> str:
        """Why nobody new can be called that now; "" if somebody can. let_in_at: when somebody was last let in by it; is_meant: whoever
        invites has said that it is for the node of that name.

        Who has a name of a member has its tasks, too: so one that is only away keeps its own."""
        if node == self._parts.config.node:
            return "that is the name of the node that lets you in"
        membership, trust = self._parts.node.membership, self._parts.trust.trust
        known = membership.get(node)
        revoked = trust.was_revoked(node)
        is_awaited = time.time() - let_in_at < ARRIVES_WITHIN_S and let_in_at > trust.revoked_at(node)
        if is_awaited and not (known is not None and self._has_gone_since(known, let_in_at)):
            return "it has just been given to another machine"
        is_free = revoked or is_meant
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

    def _has_gone_since(self, peer: PeerInfo, let_in_at: float) -> bool:
        """True if the machine that was let in then (Unix s) has joined, and has left or died since."""
        now = self._parts.now()
        changed_at = now.wall_s - (now.boot_s - peer.since_s)
        return peer.state in (PeerState.LEFT, PeerState.DEAD) and changed_at > let_in_at

    def _welcome(self, invite: Invitation, key: Ed25519PublicKey, node: str) -> JoinWelcome:
        parts, trust = self._parts, self._parts.trust.trust
        now = trust.certified_at(node, datetime.now(UTC))
        return JoinWelcome(
            certificates.certify(parts.cluster.authority, node, key, now, parts.tls.life),
            parts.cluster.name,
            parts.cluster.id,
            trust.newest_key,
            parts.cluster.authority.key if invite.issuer else b"",
            trust.signed,
            self._addresses(),
        )

    def _addresses(self) -> tuple[str, ...]:
        """Where members can be dialled, this node first."""
        others = (
            peer.identity.address
            for peer in self._parts.node.membership
            if peer.state is PeerState.ALIVE and peer.identity.address
        )
        return tuple(dict.fromkeys((self._parts.identity.address, *others)))[:PEERS_TOLD_MAX]

    # -- verbs ---------------------------------------------------------------------------------------------------------

    def invite(self, connection: Connection, request: control.Invite) -> None:
        """A token for who is to join."""
        parts = self._parts
        self._check_issuer("invite", "let nobody in")
        if request.node and (why := self._objection(request.node, is_meant=True)):
            raise BadRequest(f"no node can be called {request.node}", why=why, hint="name another:  --node NAME")
        try:
            token_id, secret = self._invites.make(
                time.time(), life_s=request.ttl_s, uses=request.uses, node=request.node, issuer=request.issuer
            )
        except OSError as error:
            raise StoreError("the invitation cannot be kept", why=str(error.strerror)) from None
        fingerprint = bytes.fromhex(parts.cluster.fingerprint)
        port = int(parts.members.listens_at.rpartition(":")[2])
        both = reachable_by_both(parts.config.listen, port)
        here = tuple(dict.fromkeys((parts.identity.address, parts.members.listens_at, *both)))
        token = Token(fingerprint, token_id, secret, here, request.node)
        parts.journal.happened("join", "invited", reason=f"{request.uses} to join within {request.ttl_s:g} s")
        answer = {"token": token.text(), "address": parts.identity.address, "cluster": parts.cluster.name}
        connection.ok(request.id, answer | {"ends_at": time.time() + request.ttl_s, "uses": request.uses})

    def revoke(self, connection: Connection, request: control.Revoke) -> None:
        """Shut a node out."""
        parts = self._parts
        self._check_issuer("revoke", "shut nobody out")
        if request.node == parts.config.node:
            raise BadRequest("a node cannot shut itself out", hint="peerload leave  takes this node out of its cluster")
        known = parts.node.membership.get(request.node)
        if known is None and not request.force:
            raise BadRequest(
                f"no node called {request.node} is known here",
                hint="the nodes known:  peerload nodes        all the same:  peerload revoke --force NODE",
            )
        told = self._kept(lambda: parts.trust.revoke(request.node))
        was = known.state.value if known is not None else None
        can_invite = bool(known is not None and known.profile.issuer)
        connection.ok(request.id, {"node": request.node, "was": was, "told": told, "was_issuer": can_invite})

    def rotate(self, connection: Connection, request: control.Rotate) -> None:
        """A new key for gossip and MQTT."""
        self._check_issuer("cluster rotate", "change no key")
        told = self._kept(self._parts.trust.rotate)
        number = self._parts.trust.trust.number
        connection.ok(request.id, {"number": number, "told": told, "overlap_s": OVERLAP_S})

    def restart(self, connection: Connection, request: control.Restart) -> None:
        """Stop, and start in the same process with the settings as they are then."""
        self._parts.journal.happened("agent", "restarting", reason=request.reason)
        connection.ok(request.id, {"pid": os.getpid(), "boot": self._parts.identity.boot})
        self._parts.run.stop(Ending.RESTART)

    @staticmethod
    def _kept(make: Callable[[], int]) -> int:
        try:
            return make()
        except OSError as error:
            raise StoreError("it cannot be kept", why=str(error.strerror)) from None

    def _check_issuer(self, verb: str, cannot: str) -> None:
        parts = self._parts
        if parts.cluster.is_local:
            raise BadRequest(
                f"this node can {cannot}",
                why="it is of no cluster beyond this machine",
                hint="make one:  peerload invite",
            )
        if not parts.cluster.is_issuer:
            issuers = sorted(peer.identity.node for peer in parts.node.membership if peer.profile.issuer)
            where = f"on {' or '.join(issuers[:3])}" if issuers else "where the cluster was made"
            raise BadRequest(
                f"this node can {cannot}",
                why="it does not have the key of the cluster's CA",
                hint=f"{where}:  peerload {verb}",
            )
