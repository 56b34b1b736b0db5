"""The cluster as this agent sees it: its keys, its certificate, and revocations."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from peerload.agent.accounts.accounts import members

if TYPE_CHECKING:
    from peerload.core.membership.membership import PeerInfo
    from peerload.model.config import AgentConfig
    from peerload.security.cluster_dir import ClusterDirectory
    from peerload.security.revocation import Trust
    from peerload.security.tls import Credentials

NAMED_MAX = 8
"""Administrators that are named."""


class ClusterView:
    """Reads the cluster directory, the trust and the credentials of one agent."""

    def __init__(self, config: AgentConfig, cluster: ClusterDirectory, trust: Trust, tls: Credentials) -> None:
        self._config = config
        self._cluster = cluster
        self._trust = trust
        self._tls = tls

    def is_revoked(self) -> bool:
        """True if this node was revoked."""
        return self._tls.is_revoked

    def is_peer_revoked(self, peer: PeerInfo) -> bool:
        """True if this start of that node is revoked."""
        return not self._trust.admits(peer.identity.node, peer.identity.boot)

    def was_revoked(self, node: str) -> bool:
        """True if a node of this name was ever revoked."""
        return self._trust.was_revoked(node)

    def info(self) -> dict[str, object]:
        """The part of `info` that is about the cluster."""
        cluster, trust, facts = self._cluster, self._trust, self._tls.facts
        return {
            "cluster": cluster.name,
            "cluster_id": cluster.id,
            "cluster_directory": str(cluster.directory),
            "cluster_local": cluster.is_local,
            "cluster_fingerprint": cluster.fingerprint,
            "issuer": cluster.is_issuer,
            "seal_key": trust.number,
            "certificate_ends_at": facts.valid_until.timestamp() if facts is not None else None,
            "revoked": sorted({word.node for word in trust.revocations}),
        }

    def checkup(self) -> dict[str, object]:
        """The part of `checkup` that is about the cluster."""
        facts = self._tls.facts
        return {
            "certificate_until": facts.valid_until.timestamp() if facts is not None else None,
            "issuer": self._cluster.is_issuer,
            "revoked": self.is_revoked(),
            "security": self._security(),
        }

    def _security(self) -> dict[str, object]:
        """Facts for `peerload doctor --security` that only the agent knows; no key and no secret is among them."""
        facts, trust = self._tls.facts, self._trust
        return {
            "mode": self._config.mode,
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
            "administrators": self._administrators(),
        }

    def _administrators(self) -> dict[str, object]:
        """Which of those that users of other nodes may be here are administrators: ``may_be``: the settings allow it;
        ``named``: by the table of `users`, some of them."""
        config = self._config
        mapped = () if isinstance(config.users, str) else config.users.values()
        named = members(config.admin_group).intersection(mapped) if mapped else ()
        return {"may_be": config.map_administrators and config.users != "guest", "named": sorted(named)[:NAMED_MAX]}
