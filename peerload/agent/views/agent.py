"""The agent itself as a client is shown it: `info`, and the settings in force."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from peerload import __version__
from peerload.config.check import told

if TYPE_CHECKING:
    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.node_info import NodeInfo
    from peerload.agent.sensors.gpus import Gpus
    from peerload.agent.views.cluster import ClusterView
    from peerload.agent.views.peer_links import PeerLinksView
    from peerload.core.node import Node
REVOKED_NOTICE = "this node was revoked by its cluster: it works alone"


class AgentView:
    """Answers to `info` and `settings`."""

    def __init__(
        self,
        info: NodeInfo,
        node: Node,
        launcher: LauncherLink,
        gpus: Gpus,
        cluster: ClusterView,
        links: PeerLinksView,
    ) -> None:
        self._info = info
        self._node = node
        self._launcher = launcher
        self._gpus = gpus
        self._cluster = cluster
        self._links = links

    def info(self) -> dict[str, object]:
        """The answer to `info`."""
        info, config, profile = self._info, self._info.config, self._node.state.profile
        return {
            "node": config.node,
            "pid": os.getpid(),
            "launcher_pid": self._launcher.pid,
            "memory_limits": self._launcher.memory or None,
            "no_gpus_because": self._gpus.why_none or None,
            "version": __version__,
            "mode": config.mode,
            "socket": config.socket,
            "state": config.state,
            "listen": info.identity.address,
            "boot": info.identity.boot,
            "policy": self._node.state.policies.name,
            "slots": profile.slots,
            "cpus": profile.cpus,
            "mem_bytes": profile.mem_bytes,
            **self._cluster.info(),
            **self._links.info(),
            "peers": len(list(self._node.membership)),
            "remembered": len(self._node.membership.gossip.anti_entropy.known),
            "started_at": info.started_at,
            "notices": [*info.notices, *([REVOKED_NOTICE] if self._cluster.is_revoked() else [])],
        }

    def settings(self) -> dict[str, object]:
        """The answer to `settings`."""
        return {"settings": told(self._info.config, self._info.origins)}
