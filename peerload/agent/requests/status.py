"""The verbs that look at the node: info, settings, nodes, policy, stats and checkup."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.model import metrics
from peerload.policy import registry

if TYPE_CHECKING:
    from peerload.agent.control.authorization import Principal
    from peerload.agent.inbox import Inbox
    from peerload.agent.node_info import NodeInfo
    from peerload.agent.store.store import Store
    from peerload.agent.views.agent import AgentView, DiagnosticsView
    from peerload.agent.views.node import NodesView
    from peerload.core.node import Node


class StatusRequests:
    """Answers about this node that need no task."""

    def __init__(
        self,
        info: NodeInfo,
        node: Node,
        store: Store,
        inbox: Inbox,
        agent: AgentView,
        nodes: NodesView,
        diagnostics: DiagnosticsView,
    ) -> None:
        self._info = info
        self._node = node
        self._store = store
        self._inbox = inbox
        self.agent = agent
        self.nodes = nodes
        self._diagnostics = diagnostics
        self._policies: dict[str, list[str]] = {}

    def policy(self) -> dict[str, object]:
        """The policies there are, and those in force."""
        if not self._policies:
            self._policies = registry.policies()
        chosen = self._node.state.policies
        return {
            "policies": self._policies,
            "presets": registry.presets(),
            "in_force": {"preset": chosen.name, "description": chosen.description, **chosen.names},
        }

    def stats(self) -> dict[str, object]:
        """The counters since the start of the agent."""
        counters = dict(self._node.state.counts)
        for name, count in self._info.counters.items():
            counters[name] = counters.get(name, 0) + count
        counters[metrics.INBOX_DROPPED] = self._inbox.dropped
        counters[metrics.COMMITS_STALLED] = int(self._store.is_stalled)
        return {"counters": counters}

    def checkup(self, caller: Principal) -> dict[str, object]:
        """The health of the agent; damaged tasks only for those who may see all tasks."""
        told = self._diagnostics.checkup()
        return told if caller.sees_all else told | {"damaged": []}
