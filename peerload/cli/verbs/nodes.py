"""`peerload nodes`, `drain`, `undrain` and `top`: list the nodes and their GPUs, drain a node, watch nodes and
tasks live."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from peerload.cli.common.messages import TIMED_OUT
from peerload.cli.common.options import Options, node_name
from peerload.client.connection import AgentConnection
from peerload.model.errors import UsageError
from peerload.model.text import printable
from peerload.text import tasks
from peerload.text.format import (
    ago_text,
    coloured,
    counted,
    number_text,
    print_json,
    print_lines,
    print_result,
    say,
    shortened,
    size_text,
    table,
    terminal_columns,
)
from peerload.text.tasks import WHY_HEADINGS, verdict_rows
from peerload.text.units import duration

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Sequence


def nodes(words: list[str]) -> int:
    reader = Options(
        "nodes",
        "List the nodes: state, busy and all cores, used and all memory, GPUs, running and queued tasks, and how long ago they\n"
        "were last heard of; and the power where a sensor measures it. Then the GPUs: model, how busy, memory in use by tasks and by other programs, tasks.",
    )
    reader.switch(
        "--wide",
        help="also: cores that other programs keep busy, power, load index and region of the policy, incarnation (counts its starts)",
    )
    reader.flag(
        "--for ID", dest="task", help="show for each node whether it could ever run this task, and why it cannot now"
    )
    reader.at()
    flags = reader.read(words)
    with AgentConnection(flags.socket) as client:
        reply = client.call("nodes", at=flags.at)
        nodes, unmet = reply["nodes"], reply.get("unmet", [])
        if flags.task is not None:
            return _for_task(client.call("why", task=flags.task), nodes, flags)
    if flags.json:
        print_json({"nodes": nodes, "unmet": unmet})
        return 0
    headings, columns = headings_for(nodes, is_wide=flags.wide), terminal_columns()
    lines = node_table(headings, [node_cells(node, headings) for node in nodes], columns)
    lines += gpu_table(nodes, columns)
    lines += [
        f"{printable(str(node.get('node', '')))} has no GPUs: {printable(str(node['no_gpus_because']))}"
        for node in nodes
        if node.get("no_gpus_because")
    ]
    if unmet:
        names = ", ".join(map(printable, unmet[:UNMET_NAMED_MAX])) + (" …" if unmet[UNMET_NAMED_MAX:] else "")
        lines.append(
            f"not met since this agent's start: {names}        gone for good:  peerload forget {printable(unmet[0])}"
        )
    print_lines([*lines, *shared_machine_lines(nodes)])
    return 0


UNMET_NAMED_MAX = 8


def _for_task(told: dict[str, Any], nodes: list[dict[str, Any]], flags: Namespace) -> int:
    """Show, for each node, whether it could run a waiting task."""
    verdicts = {one["node"]: one for one in told["nodes"]}
    if flags.json:
        keys = ("can_ever", "now", "reason")
        shown = [node | {key: verdicts.get(node["node"], {}).get(key) for key in keys} for node in nodes]
        print_json({"nodes": shown})
    elif not verdicts:
        where = f" on {told['node']}" if told.get("node") else ""
        say(f"{told['id']} is {told['state']}{where}, and waits for no node", f"more:  peerload why {told['id']}")
    else:
        states = {node["node"]: node["state"] for node in nodes}
        lines = table(
            ("NODE", "STATE", *WHY_HEADINGS[1:]),
            [(name, states.get(name, "-"), *verdict) for name, *verdict in verdict_rows(list(verdicts.values()))],
            columns=terminal_columns(),
        )
        print_lines(lines)
    return 0


def drain(words: list[str]) -> int:
    reader = Options(
        "drain",
        "Have this or another node take no more tasks, also after a restart. Waiting tasks of other nodes go back to them, its\n"
        "own waiting tasks look for other nodes, running tasks go on.",
    )
    reader.add_argument("node", nargs="?", type=node_name, default="", metavar="NODE", help="default: this one")
    reader.flag("--reason TEXT", help="the reason, shown to others", default="")
    reader.switch(
        "--wait", help="return when nothing runs there any more and the results of other nodes' tasks have arrived"
    )
    reader.flag("--timeout 30s", help="with --wait: give up after this time (exit code 124)", type=duration)
    flags = reader.read(words)
    if flags.timeout is not None and not flags.wait:
        raise UsageError("drain: --timeout is for --wait", hint="peerload drain --wait --timeout 30s")
    with AgentConnection(flags.socket) as client:
        if not flags.wait:
            _show_drained(client.call("drain", reason=flags.reason, at=flags.node), flags)
            return 0
        asked = {"reason": flags.reason, "wait": True, "timeout_s": flags.timeout}
        for part in client.stream("drain", **asked, at=flags.node):
            _show_drained(part, flags)
        timed_out = bool(client.last.get("timed_out"))
    if timed_out:
        say(f"not empty within {flags.timeout:g} s", "it stays drained; running tasks:  peerload top --once")
        return TIMED_OUT
    if not flags.json:
        sys.stdout.write(f"nothing runs {_where(flags)} any more\n")
    return 0


def _show_drained(reply: dict[str, Any], flags: Namespace) -> None:
    returned, running = int(reply.get("returned", 0)), int(reply.get("running", 0))
    done = f"drained: {counted(returned, 'task')} of other nodes went back, {counted(running, 'task')} still running"
    lines = (f"{done} {_where(flags)}", f"  undo:  peerload undrain{f' {flags.node}' if flags.node else ''}")
    print_result({"returned": returned, "running": running}, lines, as_json=flags.json)


def _where(flags: Namespace) -> str:
    return f"on {flags.node}" if flags.node else "here"


def undrain(words: list[str]) -> int:
    reader = Options("undrain", "Have this or another node take tasks again, after  peerload drain.")
    reader.add_argument("node", nargs="?", type=node_name, default="", metavar="NODE", help="default: this one")
    flags = reader.read(words)
    with AgentConnection(flags.socket) as client:
        was_drained = bool(client.call("undrain", at=flags.node).get("was_drained", True))
    text = f"{flags.node or 'this node'} {'takes tasks again' if was_drained else 'was not drained'}"
    print_result({"was_drained": was_drained}, [text], as_json=flags.json)
    return 0


HEADINGS = ("NODE", "STATE", "CPUS", "MEMORY", "GPUS", "RUNNING", "QUEUED", "SEEN")
OTHERS_SHOWN_CPUS = 0.5
"""Threshold of cores that other programs keep busy: from here on they occupy slots, and `nodes` shows them without `--wide`."""
WIDE_HEADINGS = (*HEADINGS[:-1], "OTHER CPUS", "WATTS", "LOAD", "REGION", "INCARNATION", "SEEN")
"""Columns of `--wide`, with the cores that other programs keep busy, the power and its source, the load index and region of the
policy, and the incarnation."""
RIGHT = ("CPUS", "RUNNING", "QUEUED", "OTHER CPUS", "LOAD", "INCARNATION", "SEEN")
LEFT_OUT_FIRST = ("INCARNATION", "LOAD", "OTHER CPUS", "REGION", "WATTS", "SEEN", "QUEUED", "GPUS", "MEMORY", "CPUS")
"""Columns that a narrow terminal does without, in this order."""
STATE_WIDTH_MIN = 24
"""A longer state is shortened to this length before a column is dropped."""
GPU_LEFT_OUT_FIRST = ("BY OTHERS", "BY TASKS", "STATE", "MEMORY", "MODEL")
GPU_HEADINGS = ("NODE", "GPU", "MODEL", "BUSY", "MEMORY", "BY TASKS", "BY OTHERS", "TASKS", "STATE")
GPU_RIGHT = ("GPU", "BUSY", "BY TASKS", "BY OTHERS", "TASKS")
REASON_WIDTH_MAX = 40
ONE_MACHINE = "one machine; each agent counts its cores and memory as its own (--slots N bounds the tasks of one)"
PAINT = {
    "STATE": {"alive": "green", "suspect": "yellow", "dead": "red", "left": "dim", "asleep": "dim", "revoked": "red"},
    "REGION": {"underloaded": "green", "overloaded": "red"},
}


def headings_for(nodes: Iterable[dict[str, Any]], *, is_wide: bool) -> Sequence[str]:
    """The columns for these nodes. Without `--wide`, foreign load is shown only from half a core on, and power only if a
    sensor measures it."""
    if is_wide:
        return WIDE_HEADINGS
    nodes = list(nodes)
    has_others = any((node.get("cpus_foreign") or 0.0) >= OTHERS_SHOWN_CPUS for node in nodes)
    has_sensor = any(node.get("watts") is not None and node.get("watts_quality") != "estimated" for node in nodes)
    shown = (("OTHER CPUS", has_others), ("WATTS", has_sensor))
    return (*HEADINGS[:-1], *(name for name, is_shown in shown if is_shown), HEADINGS[-1])


def node_table(
    headings: Sequence[str], rows: list[list[str]], columns: int, left_out: Sequence[str] = LEFT_OUT_FIRST
) -> list[str]:
    """Rows of `node_cells` as lines, without the columns that do not fit into a terminal of ``columns`` (0: any width)."""
    gives_way = (("STATE", STATE_WIDTH_MIN),)
    return table(headings, rows, RIGHT, columns=columns, gives_way=gives_way, left_out=left_out, paint=PAINT)


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
    """The GPUs of all nodes as lines, after an empty line; [] without GPUs."""
    gpus = [_gpu_cells(node, gpu) for node in nodes for gpu in node.get("gpus") or []]
    if not gpus:
        return []
    gives_way = ("STATE", "MODEL")
    lines = table(GPU_HEADINGS, gpus, GPU_RIGHT, columns=columns, gives_way=gives_way, left_out=GPU_LEFT_OUT_FIRST)
    return ["", *lines]


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
    return [f"{printable(', '.join(names))}: {ONE_MACHINE}" for names in on_one_machine(nodes)]


def on_one_machine(nodes: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The names of live nodes, grouped by shared machine."""
    names: dict[str, list[str]] = {}
    for node in nodes:
        if node.get("machine") and node.get("state") == "alive":
            names.setdefault(str(node["machine"]), []).append(str(node.get("node", "")))
    return [shared for shared in names.values() if len(shared) > 1]


NARROW = (*LEFT_OUT_FIRST[:4], "GPUS", "CPU", "MEMORY", "SEEN", "QUEUED", "CPUS", "SLOTS")
"""Columns that a narrow terminal does without, in this order."""
ON_DUMB = "q quits.  TERM={term} can show text alone.  With keys:  TERM=xterm peerload top"
WIDE = 10_000
"""The width if stdout is not a terminal."""


def top(words: list[str]) -> int:
    reader = Options("top", "Watch the cluster: nodes with their load, and the running tasks of this home.")
    reader.switch("--once", help="print it once as text")
    reader.switch("--ascii", help="draw with plain characters only")
    reader.switch("--wide", help="also: load index and region of the policy, and what `nodes --wide` shows")
    reader.switch("--readonly", help="read-only: refuse keys that change something")
    reader.flag("--at NODE", help="show the cluster as this node sees it", default="")
    flags = reader.read(words)
    is_live = not flags.json and not flags.once
    is_live = is_live and all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    with AgentConnection(flags.socket) as client:  # reports a missing agent or node like every verb
        if not is_live:
            seen = top_sample(client, flags.at)
            print_result(seen, top_lines(seen, time.time(), wide=flags.wide), as_json=flags.json)
            return 0
        client.call("info", **({"at": flags.at} if flags.at else {}))
    if lacks := _lacks_view():
        from peerload.cli.common.redraw import redrawn

        return redrawn(lambda: _again(flags.socket, flags.at, lacks, wide=flags.wide))
    from peerload.top.app import TopApp
    from peerload.top.model import LiveSampler

    is_plain = flags.ascii or "utf" not in (sys.stdout.encoding or "").lower()
    view = {"node": flags.at, "readonly": flags.readonly, "ascii_only": is_plain, "wide": flags.wide}
    return TopApp(LiveSampler(flags.socket, flags.at), flags.socket, **view).to_the_end()


def _again(socket_path: str | None, at: str, lacks: str, *, wide: bool) -> list[str]:
    with AgentConnection(socket_path) as client:
        return [*top_lines(top_sample(client, at), time.time(), wide=wide), "", coloured(lacks, "dim", sys.stdout)]


def _lacks_view() -> str:
    """The reason why the live view cannot be shown, and what to do; "" if it can."""
    term = os.environ.get("TERM") or "dumb"
    if term == "dumb":
        return ON_DUMB.format(term=printable(term))
    from importlib.util import find_spec

    if find_spec("textual") is not None:
        return ""
    from peerload.distribution import how_to_add

    return f"q quits.  With keys, output and graphs:  {how_to_add('top')}"


def top_lines(shown: dict[str, Any], now: float, *, wide: bool = False) -> list[str]:
    """A sample as text: a line about the cluster, the nodes with bars, the running tasks."""
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
    columns = terminal_columns() or WIDE
    of_node = headings_for(shown["nodes"], is_wide=wide)
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
        rows = [tasks.row(task, now) for task in shown["tasks"]]
        gives_way = ("NAME", "REASON")
        drawn += [
            "",
            *table(
                tasks.HEADINGS, rows, ("TIME",), columns=columns, gives_way=gives_way, left_out=tasks.LEFT_OUT_FIRST
            ),
        ]
    return drawn


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
    """A bar of running tasks over slots; a dash if these are not known."""
    slots, running = node.get("slots"), node.get("tasks_running")
    return bar(running / slots) if slots and isinstance(running, (int, float)) else "-"


def _cpu_bar(node: dict[str, Any]) -> str:
    cpus, busy = node.get("cpus"), node.get("cpus_busy")
    return bar(busy / cpus) if cpus and isinstance(busy, (int, float)) else "-"


TOP_TASKS_MAX = 1000
BAR_WIDTH = 10


def top_sample(client: AgentConnection, at: str = "") -> dict[str, Any]:
    """Sample of the cluster: {cluster: {…}, nodes: […], tasks: […]} with the leased or running tasks. ``at``: the view of
    that node."""
    there = {"at": at} if at else {}
    info = client.call("info", **there)
    nodes = client.call("nodes", **there)["nodes"]
    reply = client.call("tasks", ended_within_s=0.0, limit=TOP_TASKS_MAX, **there)
    tasks = reply["tasks"]
    waiting = sum(task.get("state") == "queued" for task in tasks)
    if reply.get("truncated"):
        waiting = int((reply.get("unfinished") or {}).get("queued", 0))
    return {
        "cluster": cluster_sums(info, nodes) | {"tasks_waiting_here": waiting},
        "nodes": nodes,
        "tasks": [task for task in tasks if task.get("state") in ("running", "leased")],
    }


def cluster_sums(info: dict[str, Any], nodes: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the nodes that are alive, and this agent's own notices."""
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
    }


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """A bar such as ``[######....]`` for a share of 0 … 1; a share above 1 ends in ``+``."""
    filled = max(0, min(width, round(share * width)))
    text = "#" * filled + "." * (width - filled)
    return f"[{text[:-1]}+]" if share > 1 + 0.5 / width else f"[{text}]"


def _total(nodes: list[dict[str, Any]], key: str) -> float:
    return sum(float(node[key]) for node in nodes if isinstance(node.get(key), (int, float)))
