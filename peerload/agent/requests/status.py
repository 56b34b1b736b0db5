"""The verbs that look at the node: info, nodes, policy, stats, checkup, settings, usage and overview."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.policy import registry

if TYPE_CHECKING:
    from peerload.agent.control.authorization import Principal
    from peerload.agent.views.agent import AgentView, DiagnosticsView
    from peerload.agent.views.metrics import MetricsView
    from peerload.agent.views.node import NodesView
    from peerload.core.node import Node


class StatusRequests:
    """Answers about this node that need no task."""

    def __init__(
        self,
        node: Node,
        agent: AgentView,
        nodes: NodesView,
        diagnostics: DiagnosticsView,
        figures: MetricsView,
    ) -> None:
        self._node = node
        self._agent = agent
        self._nodes = nodes
        self._metrics = figures
        self._diagnostics = diagnostics
        self._policies: dict[str, list[str]] = {}

    def info(self) -> dict[str, object]:
        """This agent."""
        return self._agent.info()

    def nodes(self) -> dict[str, object]:
        """The nodes known here."""
        return {"nodes": self._nodes.objects()}

    def settings(self) -> dict[str, object]:
        """The settings in force, with their sources."""
        return self._agent.settings()

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
        """The counters since the start of the agent, its gauges and its histograms."""
        return self._metrics.stats()

    def checkup(self, caller: Principal) -> dict[str, object]:
        """The health of the agent; damaged tasks only for those who may see all tasks."""
        told = self._diagnostics.checkup()
        return told if caller.sees_all else told | {"damaged": []}
