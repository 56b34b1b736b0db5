"""`peerload top`: nodes and tasks, live or once as text."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from peerload.cli.common.options import Options
from peerload.cli.common.output import redrawn
from peerload.client.connection import AgentConnection
from peerload.distribution import how_to_add
from peerload.model.errors import PeerloadError
from peerload.model.text import printable
from peerload.text import tasks
from peerload.text.format import coloured, number_text, print_result, table
from peerload.text.nodes import (
    HEADINGS,
    LEFT_OUT_FIRST,
    WIDE_HEADINGS,
    gpu_table,
    node_cells,
    node_table,
    shared_machine_lines,
)

NARROW = (*LEFT_OUT_FIRST[:4], "GPUS", "CPU", "MEMORY", "SEEN")
"""Columns that a narrow terminal does without, in this order."""
WITHOUT_EXTRA = f"q quits.  With keys, output and graphs:  {how_to_add('top')}"
ON_DUMB = "q quits.  TERM={term} can show text alone.  With keys:  TERM=xterm peerload top"
WIDE = 10_000
"""The width if stdout is no terminal."""


def top(words: list[str]) -> int:
    """Run the verb."""
    reader = Options("top", "Watch the cluster: nodes with their load, and the running tasks of this home.")
    reader.switch("--once", help="print it once as text")
    reader.switch("--ascii", help="draw with plain characters only")
    reader.switch("--wide", help="also: load index and region of the policy, and what `nodes --wide` shows")
    reader.switch("--readonly", help="allow no changes from it")
    reader.flag("--at NODE", help="show the cluster as this node sees it", default="")
    flags = reader.read(words)
    is_live = not flags.json and not flags.once
    is_live = is_live and all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    with AgentConnection(flags.socket) as client:  # a missing agent or node is reported as by every verb
        if not is_live:
            seen = sample(client, flags.at)
            print_result(
                seen, "".join(f"{line}\n" for line in lines(seen, time.time(), wide=flags.wide)), as_json=flags.json
            )
            return 0
        client.call("info", **({"at": flags.at} if flags.at else {}))
    if lacks := _lacks_view():
        return redrawn(lambda: _again(flags.socket, flags.at, lacks, wide=flags.wide))
    from peerload.top.app import TopApp
    from peerload.top.model import LiveSampler

    is_plain = flags.ascii or "utf" not in (sys.stdout.encoding or "").lower()
    view = {"node": flags.at, "readonly": flags.readonly, "ascii_only": is_plain, "wide": flags.wide}
    return TopApp(LiveSampler(flags.socket, flags.at), flags.socket, **view).to_the_end()


def _again(socket_path: str | None, at: str, lacks: str, *, wide: bool) -> list[str]:
    """The current text; if the agent is away, a line that says so."""
    try:
        with AgentConnection(socket_path) as client:
            return [*lines(sample(client, at), time.time(), wide=wide), "", coloured(lacks, "dim", sys.stdout)]
    except PeerloadError as error:
        return [f"peerload: {printable(error.what)} -- trying again", coloured(lacks, "dim", sys.stdout)]


def _lacks_view() -> str:
    """The reason why the live view cannot be shown, and what to do; "" if it can."""
    term = os.environ.get("TERM") or "dumb"
    if term == "dumb":
        return ON_DUMB.format(term=printable(term))
    try:
        import textual
    except ImportError:
        return WITHOUT_EXTRA
    return "" if bool(textual) else WITHOUT_EXTRA


def lines(shown: dict[str, Any], now: float, *, wide: bool = False) -> list[str]:
    """A sample as text: a line on the cluster, the nodes with bars, the tasks that run."""
    cluster = shown["cluster"]
    away = "broker away" if cluster["mqtt_configured"] else "no broker"
    mqtt = f"mqtt {cluster['mqtt']}" if cluster["mqtt"] else away
    facts = [
        f"peerload  {cluster['name'] or ''}  seen from {cluster['node']}:",
        f"{cluster['nodes_alive']} of {cluster['nodes_known']} nodes alive",
        f"{number_text(cluster['cpus_busy'], 1)} of {number_text(cluster['cpus'])} cpus busy",
        f"{cluster['tasks_running']} running  {cluster['tasks_queued']} queued",
        f"policy {cluster['policy']}",
        mqtt,
    ]
    columns = _width()
    of_node = WIDE_HEADINGS if wide else HEADINGS
    headings = ["NODE", "SLOTS", "CPU", *of_node[1:]]
    rows = [
        [name, _slots_bar(node), _cpu_bar(node), *cells]
        for node in shown["nodes"]
        for name, *cells in [node_cells(node, of_node)]
    ]
    drawn = [coloured(line, "bold", sys.stdout) for line in _filled([printable(fact) for fact in facts], columns)]
    drawn += ["", *node_table(headings, rows, columns, NARROW), *shared_machine_lines(shown["nodes"])]
    drawn += gpu_table(shown["nodes"], columns)
    if shown["tasks"]:
        headings_tasks = ("ID", "NAME", "STATE", "NODE", "TIME", "EXIT", "REASON")
        drawn += ["", *table(headings_tasks, [tasks.row(task, now) for task in shown["tasks"]], ("TIME",))]
    return drawn


def _width() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return WIDE


def _filled(facts: list[str], columns: int) -> list[str]:
    """The facts in as few lines as they fit into."""
    lines = [facts[0]]
    for fact in facts[1:]:
        if len(lines[-1]) + 2 + len(fact) <= columns:
            lines[-1] += f"  {fact}"
        else:
            lines.append(fact)
    return lines


def _slots_bar(node: dict[str, Any]) -> str:
    """A bar of the tasks running out of the slots; a dash if they are not known."""
    slots, running = node.get("slots"), node.get("tasks_running")
    return bar(running / slots) if slots and isinstance(running, (int, float)) else "-"


def _cpu_bar(node: dict[str, Any]) -> str:
    cpus, busy = node.get("cpus"), node.get("cpus_busy")
    return bar(busy / cpus) if cpus and isinstance(busy, (int, float)) else "-"


TASKS_MAX = 1000
BAR_WIDTH = 10


def sample(client: AgentConnection, at: str = "") -> dict[str, Any]:
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
