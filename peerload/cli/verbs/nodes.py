"""`peerload nodes`: every node known here."""

from __future__ import annotations

import sys

from peerload.cli.common.options import Options
from peerload.client.connection import Client
from peerload.model.text import printable
from peerload.text.format import (
    duration_text,
    number_text,
    print_json,
    shortened,
    size_text,
    table,
    terminal_columns,
    width_of,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

HEADINGS = (
    "NODE",
    "STATE",
    "LOAD",
    "REGION",
    "CPUS",
    "FOREIGN",
    "MEMORY",
    "GPUS",
    "RUNNING",
    "QUEUED",
    "INCARNATION",
    "AGE",
)
GPU_HEADINGS = ("NODE", "GPU", "MODEL", "BUSY", "MEMORY", "OURS", "FOREIGN", "TASKS", "STATE")
GPU_RIGHT = ("GPU", "BUSY", "OURS", "FOREIGN", "TASKS")
REASON_WIDTH_MAX = 40
ONE_MACHINE = "one machine; each agent counts its cores and memory as its own (--slots N bounds the tasks of one)"
LEFT_OUT_FIRST = ("INCARNATION", "LOAD", "FOREIGN", "REGION", "QUEUED")
"""Columns that a narrow terminal does without, in this order."""
STATE_COLOURS = {"alive": "green", "suspect": "yellow", "dead": "red", "left": "dim", "revoked": "red"}
REGION_COLOURS = {"underloaded": "green", "overloaded": "red"}
RIGHT = ("LOAD", "CPUS", "FOREIGN", "RUNNING", "QUEUED", "INCARNATION", "AGE")


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "nodes",
        "Every node: state, load index and region, cpu, cores that other programs keep busy, memory, GPUs, tasks, incarnation (which grows with each start of\n"
        "its agent), and how old what we know is. Then every GPU: model, how busy, memory in use by our tasks and by others.",
    )
    reader.at()
    flags = reader.read(words)
    with Client(flags.socket) as client:
        nodes = client.call("nodes", at=flags.at)["nodes"]
    if flags.json:
        print_json({"nodes": nodes})
    else:
        lines = fitted(HEADINGS, [row(node) for node in nodes], terminal_columns())
        lines += gpu_lines(nodes, terminal_columns())
        lines += [
            f"{printable(str(node.get('node', '')))} has no GPUs: {printable(str(node['no_gpus_because']))}"
            for node in nodes
            if node.get("no_gpus_because")
        ]
        lines += shared_machines(nodes)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def shared_machines(nodes: Sequence[dict[str, Any]]) -> list[str]:
    """A line about each machine that has several agents."""
    return [f"{printable(', '.join(names))}: {ONE_MACHINE}" for names in on_one_machine(nodes)]


def on_one_machine(nodes: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The names of the living nodes that share a machine, together."""
    names: dict[str, list[str]] = {}
    for node in nodes:
        if node.get("machine") and node.get("state") == "alive":
            names.setdefault(str(node["machine"]), []).append(str(node.get("node", "")))
    return [shared for shared in names.values() if len(shared) > 1]


def fitted(headings: Sequence[str], rows: list[list[str]], columns: int) -> list[str]:
    """The table of the nodes, less the columns that a narrow terminal has no room for."""
    paint = {"STATE": STATE_COLOURS, "REGION": REGION_COLOURS}
    for name in (*LEFT_OUT_FIRST, ""):
        bare = table(headings, rows, RIGHT)
        if not columns or not name or max(map(width_of, bare)) <= columns:
            break
        at = headings.index(name)
        headings = [*headings[:at], *headings[at + 1 :]]
        rows = [row[:at] + row[at + 1 :] for row in rows]
    return table(headings, rows, RIGHT, columns=columns, gives_way=("STATE",), paint=paint)


def gpu_lines(nodes: Sequence[dict[str, Any]], columns: int) -> list[str]:
    """The table of the GPUs of all nodes, after an empty line; nothing where there are none."""
    gpus = [gpu_row(node, gpu) for node in nodes for gpu in node.get("gpus") or []]
    if not gpus:
        return []
    return ["", *table(GPU_HEADINGS, gpus, GPU_RIGHT, columns=columns, gives_way=("STATE", "MODEL"))]


def gpu_row(node: dict[str, Any], gpu: dict[str, Any]) -> list[str]:
    """The cells of one GPU."""
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


def row(node: dict[str, Any]) -> list[str]:
    """The cells of one node; this one is marked with a star."""
    state = "revoked" if node.get("revoked") else str(node.get("state") or "unknown")
    if node.get("drained"):
        reason = shortened(str(node.get("drain_reason") or ""), REASON_WIDTH_MAX)
        state += ", drained" + (f": {reason}" if reason else "")
    if node.get("trouble"):
        state += f", {shortened(str(node['trouble']), REASON_WIDTH_MAX)}"
    if node.get("declines"):
        state += f", {shortened('; '.join(map(str, node['declines'])), REASON_WIDTH_MAX)}"
    memory = f"{size_text(node.get('mem_used_bytes') or None)} / {size_text(node.get('mem_bytes'))}"
    gpus = node.get("gpus")
    return [
        str(node.get("node", "")) + (" *" if node.get("self") else ""),
        state,
        number_text(node.get("load")),
        str(node.get("region") or "-"),
        f"{number_text(node.get('cpus_busy'), 1)} / {number_text(node.get('cpus'))}",
        number_text(node.get("cpus_foreign"), 1),
        memory,
        str(len(gpus)) if isinstance(gpus, list) else number_text(gpus),
        number_text(node.get("tasks_running")),
        number_text(node.get("tasks_queued")),
        number_text(node.get("incarnation")),
        duration_text(node.get("age_s")),
    ]
