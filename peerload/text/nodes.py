"""Nodes and their GPUs as tables, for `nodes` and `top --once`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peerload.model.text import printable
from peerload.text.format import ago_text, number_text, shortened, size_text, table, width_of

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADINGS = ("NODE", "STATE", "CPUS", "MEMORY", "GPUS", "RUNNING", "QUEUED", "SEEN")
WIDE_HEADINGS = (*HEADINGS[:-1], "OTHER CPUS", "WATTS", "LOAD", "REGION", "INCARNATION", "SEEN")
"""With `--wide`: cores that other programs keep busy, the power and where that figure comes from, the load index of the policy and the region it puts the node into, and the
number of the node's start."""
RIGHT = ("CPUS", "RUNNING", "QUEUED", "OTHER CPUS", "LOAD", "INCARNATION", "SEEN")
LEFT_OUT_FIRST = ("INCARNATION", "LOAD", "OTHER CPUS", "REGION", "WATTS", "SEEN", "QUEUED")
"""Columns that a narrow terminal does without, in this order."""
GPU_HEADINGS = ("NODE", "GPU", "MODEL", "BUSY", "MEMORY", "BY TASKS", "BY OTHERS", "TASKS", "STATE")
GPU_RIGHT = ("GPU", "BUSY", "BY TASKS", "BY OTHERS", "TASKS")
REASON_WIDTH_MAX = 40
ONE_MACHINE = "one machine; each agent counts its cores and memory as its own (--slots N bounds the tasks of one)"
PAINT = {
    "STATE": {"alive": "green", "suspect": "yellow", "dead": "red", "left": "dim", "revoked": "red"},
    "REGION": {"underloaded": "green", "overloaded": "red"},
}


def node_table(
    headings: Sequence[str], rows: list[list[str]], columns: int, left_out: Sequence[str] = LEFT_OUT_FIRST
) -> list[str]:
    """Rows of `node_cells` as lines, less the columns that a terminal of so many ``columns`` (0: any) has no room for."""
    for name in (*left_out, ""):
        bare = table(headings, rows, RIGHT)
        if not columns or not name or max(map(width_of, bare)) <= columns:
            break
        if name in headings:
            at = headings.index(name)
            headings = [*headings[:at], *headings[at + 1 :]]
            rows = [row[:at] + row[at + 1 :] for row in rows]
    return table(headings, rows, RIGHT, columns=columns, gives_way=("STATE",), paint=PAINT)


def node_cells(node: dict[str, Any], headings: Sequence[str]) -> list[str]:
    """The cells of one node in these columns; the node that was asked is marked with a star."""
    gpus = node.get("gpus")
    memory = f"{size_text(node.get('mem_used_bytes') or None)} / {size_text(node.get('mem_bytes'))}"
    age_s = node.get("age_s")
    cells = {
        "NODE": str(node.get("node", "")) + (" *" if node.get("self") else ""),
        "STATE": _state(node),
        "CPUS": f"{number_text(node.get('cpus_busy'), 1)} / {number_text(node.get('cpus'))}",
        "MEMORY": memory,
        "GPUS": str(len(gpus)) if isinstance(gpus, list) else number_text(gpus),
        "RUNNING": number_text(node.get("tasks_running")),
        "QUEUED": number_text(node.get("tasks_queued")),
        "OTHER CPUS": number_text(node.get("cpus_foreign"), 1),
        "WATTS": f"{number_text(node.get('watts'), 1)} {node.get('watts_quality') or ''}".rstrip(),
        "LOAD": number_text(node.get("load")),
        "REGION": str(node.get("region") or "-"),
        "INCARNATION": number_text(node.get("incarnation")),
        "SEEN": ago_text(age_s) if isinstance(age_s, (int, float)) else "-",
    }
    return [cells[name] for name in headings]


def _state(node: dict[str, Any]) -> str:
    state = "revoked" if node.get("revoked") else str(node.get("state") or "unknown")
    if node.get("drained"):
        reason = shortened(str(node.get("drain_reason") or ""), REASON_WIDTH_MAX)
        state += ", drained" + (f": {reason}" if reason else "")
    if node.get("trouble"):
        state += f", {shortened(str(node['trouble']), REASON_WIDTH_MAX)}"
    if node.get("declines"):
        state += f", {shortened('; '.join(map(str, node['declines'])), REASON_WIDTH_MAX)}"
    return state


def gpu_table(nodes: Sequence[dict[str, Any]], columns: int) -> list[str]:
    """The GPUs of all nodes as lines, after an empty line; nothing where there are none."""
    gpus = [_gpu_cells(node, gpu) for node in nodes for gpu in node.get("gpus") or []]
    return ["", *table(GPU_HEADINGS, gpus, GPU_RIGHT, columns=columns, gives_way=("STATE", "MODEL"))] if gpus else []


def _gpu_cells(node: dict[str, Any], gpu: dict[str, Any]) -> list[str]:
    state = str(gpu.get("health") or "-")
    if state == "ok":
        state = str(gpu.get("mode") or "-")
    if gpu.get("why"):
        state += f": {shortened(str(gpu['why']), REASON_WIDTH_MAX)}"
    busy = gpu.get("util")
    return [
        str(node.get("node", "")),
        number_text(gpu.get("index")),
        str(gpu.get("model") or "GPU"),
        "-" if busy is None else f"{round(100 * busy)} %",
        f"{size_text(gpu.get('mem_used_bytes'))} / {size_text(gpu.get('mem_bytes'))}",
        size_text(gpu.get("mem_ours_bytes")),
        size_text(gpu.get("mem_foreign_bytes")),
        number_text(gpu.get("tasks")),
        state,
    ]


def shared_machine_lines(nodes: Sequence[dict[str, Any]]) -> list[str]:
    """A line about each machine that has several agents."""
    return [f"{printable(', '.join(names))}: {ONE_MACHINE}" for names in on_one_machine(nodes)]


def on_one_machine(nodes: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The names of the living nodes that share a machine, together."""
    names: dict[str, list[str]] = {}
    for node in nodes:
        if node.get("machine") and node.get("state") == "alive":
            names.setdefault(str(node["machine"]), []).append(str(node.get("node", "")))
    return [shared for shared in names.values() if len(shared) > 1]
