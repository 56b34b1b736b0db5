"""What an agent alone knows of its own security, for `peerload doctor --security`; no key and no secret is in it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from peerload.agent.accounts.accounts import members
from peerload.agent.control.connection import REQUESTS_PENDING_MAX
from peerload.agent.joining import join_server
from peerload.agent.node_info import now
from peerload.agent.peers import connection, listener, peer_table
from peerload.wire.frame import CONTROL_BYTES_MAX

if TYPE_CHECKING:
    from peerload.agent.joining.enrollment import Enrollment
    from peerload.agent.views.cluster import ClusterView
    from peerload.core.node import Node
    from peerload.model.config import AgentConfig

NAMED_MAX = 8


class SecurityView:
    """The security of one agent, as far as it alone knows it."""

    def __init__(self, config: AgentConfig, node: Node, cluster: ClusterView, joining: Enrollment) -> None:
        self._config = config
        self._node = node
        self._cluster = cluster
        self._joining = joining

    def checkup(self) -> dict[str, object]:
        """`security` of what `control.Checkup` lists."""
        return {
            "mode": self._config.mode,
            "user_id": os.getuid(),
            **self._cluster.security(),
            "invitations": self._joining.open_count(now().wall_s),
            "bounds": self._bounds(),
            "administrators": self._administrators(),
        }

    def _administrators(self) -> dict[str, object]:
        """Which of those that users of other nodes may be here are administrators: ``may_be``: the settings allow it;
        ``named``: by the table of `users`, some of them."""
        config = self._config
        mapped = () if isinstance(config.users, str) else config.users.values()
        named = members(config.admin_group).intersection(mapped) if mapped else ()
        return {"may_be": config.map_administrators and config.users != "guest", "named": sorted(named)[:NAMED_MAX]}

    def _bounds(self) -> dict[str, int]:
        """Limits in force, by what they bound."""
        return {
            "local clients": self._config.clients_max,
            "requests of a client at a time": REQUESTS_PENDING_MAX,
            "bytes of a request": CONTROL_BYTES_MAX,
            "strangers": listener.STRANGERS_MAX,
            "newcomers": join_server.NEWCOMERS_MAX,
            "refusals of an address in a minute": join_server.REFUSALS_MAX,
            "malformed frames of a peer in a minute": peer_table.ERRORS_MAX,
            "frames of a peer in a second": connection.FRAMES_PER_S_MAX,
            "bytes that wait for a peer": peer_table.WAITING_BYTES_MAX,
            "peers": self._node.state.config.peers_max,
        }
