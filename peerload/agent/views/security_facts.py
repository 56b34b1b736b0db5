"""What an agent alone knows of its own security, for `peerload doctor --security`; no key and no secret is in it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from peerload.agent.accounts.accounts import members
from peerload.agent.joining import join_server
from peerload.agent.peers import connection, listener, peer_table
from peerload.agent.requests import server
from peerload.wire.frame import CONTROL_BYTES_MAX

if TYPE_CHECKING:
    from peerload.agent.parts import Parts

NAMED_MAX = 8


def security_object(parts: Parts) -> dict[str, object]:
    """`security` of what `control.Checkup` lists."""
    facts, trust = parts.tls.facts, parts.trust.trust
    return {
        "mode": parts.config.mode,
        "user_id": os.getuid(),
        "certificate": None
        if facts is None
        else {
            "issued_at": facts.issued_at.timestamp(),
            "due_at": facts.due_at.timestamp(),
            "valid_until": facts.valid_until.timestamp(),
            "fingerprint": facts.fingerprint,
        },
        "seal_number": trust.number,
        "sealed_since": trust.sealed_since,
        "invitations": parts.enrollment.open_count(parts.now().wall_s),
        "bounds": bounds(parts),
        "administrators": administrators(parts),
    }


def administrators(parts: Parts) -> dict[str, object]:
    """Which of those that users of other nodes may be here are administrators: ``may_be``: the settings allow it; ``named``: by
    the table of `users`, some of them."""
    config = parts.config
    mapped = () if isinstance(config.users, str) else config.users.values()
    named = members(config.admin_group).intersection(mapped) if mapped else ()
    return {"may_be": config.map_administrators and config.users != "guest", "named": sorted(named)[:NAMED_MAX]}


def bounds(parts: Parts) -> dict[str, int]:
    """Limits in force at this node's doors, by what they bound."""
    return {
        "local clients": parts.config.clients_max,
        "requests of a client at a time": server.REQUESTS_PENDING_MAX,
        "bytes of a request": CONTROL_BYTES_MAX,
        "strangers": listener.STRANGERS_MAX,
        "newcomers": join_server.NEWCOMERS_MAX,
        "refusals of an address in a minute": join_server.REFUSALS_MAX,
        "malformed frames of a peer in a minute": peer_table.ERRORS_MAX,
        "frames of a peer in a second": connection.FRAMES_PER_S_MAX,
        "bytes that wait for a peer": peer_table.WAITING_BYTES_MAX,
        "peers": parts.node.state.config.peers_max,
    }
