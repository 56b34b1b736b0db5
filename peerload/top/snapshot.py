"""What `peerload top` shows, sampled once: the agent, every node, the tasks of this home that have not ended."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from peerload.client.connection import Client

TASKS_MAX = 1000
BAR_WIDTH = 10


def sample(client: Client, at: str = "") -> dict[str, Any]:
    """One look at the cluster: {cluster: {…}, nodes: […], tasks: […]}, tasks being those leased or running. ``at``: as seen
    from that node."""
    there = {"at": at} if at else {}
    info = client.call("info", **there)
    nodes = client.call("nodes", **there)["nodes"]
    tasks = client.call("tasks", ended_within_s=0.0, limit=TASKS_MAX, **there)["tasks"]
    return {
        "cluster": cluster(info, nodes, tasks),
        "nodes": nodes,
        "tasks": [task for task in tasks if task.get("state") in ("running", "leased")],
    }


def cluster(info: dict[str, Any], nodes: list[dict[str, Any]], tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """The sums over the nodes that are alive, and what this agent says about itself."""
    alive = [node for node in nodes if node.get("state") == "alive"]
    return {
        "node": info.get("node"),
        "name": info.get("cluster"),
        "policy": info.get("policy"),
        "mqtt": info.get("mqtt"),
        "mqtt_configured": bool(info.get("mqtt_configured") or info.get("mqtt")),
        "nodes_alive": len(alive),
        "nodes_known": len(nodes),
        "cpus": _total(alive, "cpus"),
        "cpus_busy": _total(alive, "cpus_busy"),
        "tasks_running": int(_total(alive, "tasks_running")),
        "tasks_queued": int(_total(alive, "tasks_queued")),
        "tasks_waiting_here": sum(task.get("state") == "queued" for task in tasks),
    }


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """``[######....]`` for a share of 0 … 1; more than 1 ends in ``+``."""
    filled = max(0, min(width, round(share * width)))
    text = "#" * filled + "." * (width - filled)
    return f"[{text[:-1]}+]" if share > 1 + 0.5 / width else f"[{text}]"


def _total(nodes: list[dict[str, Any]], key: str) -> float:
    return sum(float(node[key]) for node in nodes if isinstance(node.get(key), (int, float)))
