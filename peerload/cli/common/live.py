"""What tasks use while they run, asked of the nodes that run them."""

from __future__ import annotations

import time

from peerload.client.connection import Client
from peerload.model.errors import PeerloadError
from peerload.text.format import counted, size_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

TASKS_MAX = 64
"""So many are asked about; of more, the first."""
NODE_S_MAX = 1.5
"""A node that has not said within this is not waited for …"""
ALL_S_MAX = 3.0
"""… and after this no more are asked."""
AVERAGE_FROM_S = 1.0
"""What has run for less has no average that says anything."""


def usage_of(socket: str | None, tasks: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What those of these tasks that run use now, by id, as far as their nodes say it (`usage` of docs/wire.md)."""
    running = [task for task in tasks if task.get("state") == "running" and task.get("node")][:TASKS_MAX]
    by_node: dict[str, list[str]] = {}
    for task in running:
        by_node.setdefault(str(task["node"]), []).append(str(task["id"]))
    found: dict[str, dict[str, Any]] = {}
    until_s = time.monotonic() + ALL_S_MAX
    for node, names in by_node.items():
        if time.monotonic() > until_s:
            break
        try:
            with Client(socket, timeout_s=NODE_S_MAX) as client:
                told = client.call("usage", at=node, tasks=names)["tasks"]
        except PeerloadError:  # it is away, or of an earlier version: what else is known is told all the same
            continue
        found |= {str(one.get("id")): one for one in told if isinstance(one, dict)}
    return found


def usage_text(usage: Mapping[str, Any], ran_s: float | None) -> str:
    """``1.9 cpus, 812 MiB, 5 processes; 12.3 s of cpu in all``. ran_s: since its start."""
    cpu_s, busy = _number(usage.get("cpu_s")), _number(usage.get("cpus_busy"))
    parts = []
    if busy is not None:
        parts.append(f"{busy:.1f} cpus")
    elif cpu_s is not None and ran_s and ran_s >= AVERAGE_FROM_S:
        parts.append(f"{cpu_s / ran_s:.1f} cpus on average")
    memory_bytes, processes = _number(usage.get("memory_bytes")), _number(usage.get("processes"))
    parts += [size_text(memory_bytes)] if memory_bytes is not None else []
    parts += [counted(int(processes), "process").replace("processs", "processes")] if processes else []
    return ", ".join(parts) + (f"; {cpu_s:.1f} s of cpu in all" if cpu_s is not None else "")


def gpus_text(usage: Mapping[str, Any]) -> str:
    """``GPU 0 3.2 GiB of 8 GiB, 63 % busy with 2 tasks``, for each."""
    gpus = usage.get("gpus")
    return "; ".join(_gpu_text(gpu) for gpu in gpus if isinstance(gpu, dict)) if isinstance(gpus, list) else ""


def _gpu_text(gpu: Mapping[str, Any]) -> str:
    promised, util, tasks = _number(gpu.get("mem_promised_bytes")), _number(gpu.get("util")), gpu.get("tasks")
    text = f"GPU {gpu.get('index')} {size_text(_number(gpu.get('mem_bytes')))}"
    text += f" of {size_text(promised)}" if promised else ""
    text += f", the card {100 * util:.0f} % busy" if util is not None else ""
    text += f" with {tasks} tasks" if isinstance(tasks, int) and tasks > 1 else ""
    return text + ("" if gpu.get("health") in ("ok", None) else f", {gpu['health']}")


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and 0 <= value < float("inf") else None
