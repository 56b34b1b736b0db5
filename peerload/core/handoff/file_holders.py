"""Nodes that have the files of tasks, as far as their home knows: sources for others, and better places for the next task."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from peerload.model.messages import SOURCES_MAX

if TYPE_CHECKING:
    from peerload.core.membership.membership import Membership
    from peerload.core.work import HomeTask
    from peerload.model.task import Staged

MANIFESTS_MAX = 1024
HOLDERS_MAX = 64
"""Nodes that are remembered for each manifest."""
BYTES_PER_S = 50e6
"""How fast files come to a node, until that was seen."""
LEARNED_BYTES_MIN = 1 << 20
"""Smaller transfers say nothing about the speed."""
SAVED_S_MIN = 0.5
"""Nobody is preferred for less."""


class FileHolders:
    """The nodes that have accepted tasks with files, by manifest, the latest first; it is memory alone. A node that has removed
    them meanwhile costs another node one question, or itself the transfer that was to be saved."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._nodes: OrderedDict[bytes, dict[str, None]] = OrderedDict()
        self._bytes_per_s = BYTES_PER_S

    def has(self, node: str, task: HomeTask) -> None:
        """A node has accepted a task, whose files are there."""
        if task.spec.files is None:
            return
        nodes = self._nodes.setdefault(task.spec.files.manifest, {})
        self._nodes.move_to_end(task.spec.files.manifest)
        nodes.pop(node, None)
        nodes[node] = None
        if len(nodes) > HOLDERS_MAX:
            del nodes[next(iter(nodes))]
        if len(self._nodes) > MANIFESTS_MAX:
            self._nodes.popitem(last=False)

    def took(self, staged: Staged | None) -> None:
        """An attempt has ended whose files came so fast."""
        if staged is not None and staged.in_bytes >= LEARNED_BYTES_MIN and staged.in_s > 0:
            self._bytes_per_s += (staged.in_bytes / staged.in_s - self._bytes_per_s) / 2

    def nodes(self, task: HomeTask) -> list[str]:
        """The usable nodes that have the files of this task, the latest first."""
        if task.spec.files is None:
            return []
        known = self._nodes.get(task.spec.files.manifest, {})
        return [node for node in reversed(known) if self._membership.is_usable(node)]

    def sources(self, task: HomeTask, node: str) -> tuple[str, ...]:
        """Nodes from which this node may fetch the files, besides their home."""
        return tuple([other for other in self.nodes(task) if other != node][:SOURCES_MAX])

    def saved_at(self, node: str, task: HomeTask) -> float:
        """The seconds that this node saves, since it has the files of this task; 0 if it does not, or they are not worth it."""
        files = task.spec.files
        return self.saved_s(task) if files is not None and node in self._nodes.get(files.manifest, ()) else 0.0

    def has_any(self, node: str) -> bool:
        """True if a node has files of some task."""
        return any(node in nodes for nodes in self._nodes.values())

    def saved_s(self, task: HomeTask) -> float:
        """The seconds that a node saves which has the files; 0 if they are not worth a preference."""
        size_bytes = task.spec.files.size_bytes if task.spec.files is not None else 0
        saved_s = size_bytes / self._bytes_per_s
        return saved_s if saved_s >= SAVED_S_MIN else 0.0
