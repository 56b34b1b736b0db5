"""Cluster commands: invite, revoke and rotate, as local clients request them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from peerload.model.errors import BadRequest, StoreError
from peerload.security.address import reachable_by_both
from peerload.security.revocation import OVERLAP_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.agent.control.connection import Connection
    from peerload.agent.joining.distribution import TrustDistribution
    from peerload.agent.joining.enrollment import Enrollment
    from peerload.agent.node_info import NodeInfo
    from peerload.agent.peers.membership import Members
    from peerload.agent.store.event_log import EventLog
    from peerload.core.node import Node
    from peerload.wire import control


class ClusterCommands:
    """The commands that need the key of the cluster's CA."""

    def __init__(
        self,
        info: NodeInfo,
        node: Node,
        enrollment: Enrollment,
        trust: TrustDistribution,
        members: Members,
        events: EventLog,
    ) -> None:
        self._info = info
        self._node = node
        self._enrollment = enrollment
        self._trust = trust
        self._members = members
        self._events = events

    def invite(self, connection: Connection, request: control.Invite) -> None:
        """Make a token for a newcomer."""
        self._enrollment.check_issuer("invite", "let nobody in")
        listens_at = self._members.listens_at
        port = int(listens_at.rpartition(":")[2])
        token = self._enrollment.invite(request, (listens_at, *reachable_by_both(self._info.config.listen, port)))
        self._events.record("join", "invited", reason=f"{request.uses} to join within {request.ttl_s:g} s")
        answer = {
            "token": token.text(),
            "address": self._info.identity.address,
            "cluster": self._enrollment.cluster_name,
        }
        connection.ok(request.id, answer | {"ends_at": time.time() + request.ttl_s, "uses": request.uses})

    def revoke(self, connection: Connection, request: control.Revoke) -> None:
        """Revoke a node."""
        self._enrollment.check_issuer("revoke", "shut nobody out")
        if request.node == self._info.config.node:
            raise BadRequest("a node cannot shut itself out", hint="peerload leave  takes this node out of its cluster")
        known = self._node.membership.get(request.node)
        if known is None and not request.force:
            raise BadRequest(
                f"no node called {request.node} is known here",
                hint="the nodes known:  peerload nodes        all the same:  peerload revoke --force NODE",
            )
        told = _saved(lambda: self._trust.revoke(request.node))
        was = known.state.value if known is not None else None
        can_invite = bool(known is not None and known.profile.issuer)
        connection.ok(request.id, {"node": request.node, "was": was, "told": told, "was_issuer": can_invite})

    def rotate(self, connection: Connection, request: control.Rotate) -> None:
        """Change the key of gossip and MQTT."""
        self._enrollment.check_issuer("cluster rotate", "change no key")
        told = _saved(self._trust.rotate)
        number = self._trust.trust.number
        connection.ok(request.id, {"number": number, "told": told, "overlap_s": OVERLAP_S})


def _saved(make: Callable[[], int]) -> int:
    try:
        return make()
    except OSError as error:
        raise StoreError("cannot save the statement of the CA", why=str(error.strerror)) from None
