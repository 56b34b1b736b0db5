"""Health of an agent from the inside, for `peerload doctor`."""

from __future__ import annotations

import asyncio
import platform
from itertools import islice
from typing import TYPE_CHECKING

from peerload.agent.node_info import now
from peerload.agent.views import task as views

if TYPE_CHECKING:
    from peerload.agent.completion.retention import Retention
    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.store.disk_space import DiskSpace
    from peerload.agent.store.store import Store
    from peerload.agent.views.cluster import ClusterView
    from peerload.agent.views.peer_links import PeerLinksView
    from peerload.core.node import Node

DAMAGED_TOLD_MAX = 100
FROZEN_TOLD_MAX = 100


class StorageView:
    """The disk and the database of one agent."""

    def __init__(self, node: str, disk: DiskSpace, store: Store, retention: Retention) -> None:
        self._node = node
        self._disk = disk
        self._store = store
        self._retention = retention

    def checkup(self) -> dict[str, object]:
        """The part of `checkup` that is about storage."""
        disk, store, retention = self._disk, self._store, self._retention
        listing = store.list_tasks(ended_after=now().wall_s, limit=DAMAGED_TOLD_MAX)
        removed_early: dict[str, object] | None = None
        if retention.early:
            removed_early = {"tasks": retention.early, "at": retention.early_at, "why": retention.early_why}
        return {
            "disk": {
                "state": disk.state,
                "free_bytes": disk.free_bytes(),
                "total_bytes": disk.total_bytes,
                "low_bytes": disk.low_bytes,
                "reserve_bytes": disk.reserve.size_bytes,
                "reserve_bytes_max": disk.reserve.wanted_bytes,
                "stalled": store.is_stalled,
            },
            "damaged": views.damaged_objects(listing.damaged),
            "lost": store.lost.words(self._node) if store.lost is not None else None,
            "removed_early": removed_early,
        }


class DiagnosticsView:
    """Answer to `checkup`: the health of the agent, its links and its storage."""

    def __init__(
        self,
        node: Node,
        launcher: LauncherLink,
        storage: StorageView,
        cluster: ClusterView,
        links: PeerLinksView,
    ) -> None:
        self._node = node
        self._launcher = launcher
        self._storage = storage
        self._cluster = cluster
        self._links = links

    def checkup(self) -> dict[str, object]:
        """The answer to `checkup`."""
        node, launcher = self._node, self._launcher
        frozen = islice(node.runs.frozen, FROZEN_TOLD_MAX)
        return {
            "node": node.state.node,
            "python": platform.python_version(),
            "event_loop": type(asyncio.get_running_loop()).__module__.partition(".")[0],
            "launcher": {
                "pid": launcher.pid,
                "units": launcher.units,
                "memory": launcher.memory or None,
                "unenforced": list(launcher.unenforced),
                "silent": launcher.is_silent,
            },
            **self._storage.checkup(),
            **self._links.checkup(node.membership),
            "frozen": [node.executor.guests[key].task for key in frozen],
            "trouble": node.state.profile.trouble or None,
            **self._cluster.checkup(),
        }
