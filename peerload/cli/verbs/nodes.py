"""`peerload nodes`, `drain` and `undrain`: list nodes, have one take no more tasks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from peerload.cli.common.messages import TIMED_OUT
from peerload.cli.common.options import Options, node_name
from peerload.client.connection import AgentConnection
from peerload.model.errors import UsageError
from peerload.model.text import printable
from peerload.text.format import counted, print_json, say, table, terminal_columns
from peerload.text.nodes import HEADINGS, WIDE_HEADINGS, gpu_table, node_cells, node_table, shared_machine_lines
from peerload.text.tasks import WHY_HEADINGS, verdict_rows
from peerload.text.units import duration

if TYPE_CHECKING:
    from argparse import Namespace


def nodes(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "nodes",
        "List the nodes: state, busy and all cores, used and all memory, GPUs, running and queued tasks, and how long ago they\n"
        "were last heard of. Then the GPUs: model, how busy, memory in use by tasks and by other programs, tasks.",
    )
    reader.switch(
        "--wide",
        help="also: cores that other programs keep busy, power, load index and region of the policy, incarnation (counts its starts)",
    )
    reader.flag("--for ID", dest="task", help="say for each node whether it could ever run this task, and why not now")
    reader.at()
    flags = reader.read(words)
    with AgentConnection(flags.socket) as client:
        nodes = client.call("nodes", at=flags.at)["nodes"]
        if flags.task is not None:
            return _for_task(client.call("why", task=flags.task), nodes, flags)
    if flags.json:
        print_json({"nodes": nodes})
        return 0
    headings, columns = WIDE_HEADINGS if flags.wide else HEADINGS, terminal_columns()
    lines = node_table(headings, [node_cells(node, headings) for node in nodes], columns)
    lines += gpu_table(nodes, columns)
    lines += [
        f"{printable(str(node.get('node', '')))} has no GPUs: {printable(str(node['no_gpus_because']))}"
        for node in nodes
        if node.get("no_gpus_because")
    ]
    lines += shared_machine_lines(nodes)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _for_task(told: dict[str, Any], nodes: list[dict[str, Any]], flags: Namespace) -> int:
    """Show what each node is to a waiting task."""
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
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def drain(words: list[str]) -> int:
    """Run the verb."""
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
    reader.flag("--timeout 30s", help="with --wait: no longer than this; exit code 124 then", type=duration)
    flags = reader.read(words)
    if flags.timeout is not None and not flags.wait:
        raise UsageError("drain: --timeout is for --wait", hint="peerload drain --wait --timeout 30s")
    with AgentConnection(flags.socket) as client:
        if not flags.wait:
            _show(client.call("drain", reason=flags.reason, at=flags.node), flags)
            return 0
        asked = {"reason": flags.reason, "wait": True, "timeout_s": flags.timeout}
        for part in client.stream("drain", **asked, at=flags.node):
            _show(part, flags)
        timed_out = bool(client.last.get("timed_out"))
    if timed_out:
        say(f"not empty within {flags.timeout:g} s", "it stays drained; running tasks:  peerload top --once")
        return TIMED_OUT
    if not flags.json:
        sys.stdout.write(f"nothing runs {_where(flags)} any more\n")
    return 0


def _show(reply: dict[str, Any], flags: Namespace) -> None:
    returned, running = int(reply.get("returned", 0)), int(reply.get("running", 0))
    if flags.json:
        print_json({"returned": returned, "running": running})
        return
    node = f" {flags.node}" if flags.node else ""
    sys.stdout.write(
        f"drained: {counted(returned, 'task')} of other nodes went back, {counted(running, 'task')} still running"
        f" {_where(flags)}\n  undo:  peerload undrain{node}\n"
    )
    sys.stdout.flush()


def _where(flags: Namespace) -> str:
    return f"on {flags.node}" if flags.node else "here"


def undrain(words: list[str]) -> int:
    """Run the verb."""
    reader = Options("undrain", "Have this or another node take tasks again, after  peerload drain.")
    reader.add_argument("node", nargs="?", type=node_name, default="", metavar="NODE", help="default: this one")
    flags = reader.read(words)
    with AgentConnection(flags.socket) as client:
        was_drained = bool(client.call("undrain", at=flags.node).get("was_drained", True))
    if flags.json:
        print_json({"was_drained": was_drained})
    else:
        node = flags.node or "this node"
        sys.stdout.write(f"{node} takes tasks again\n" if was_drained else f"{node} was not drained\n")
    return 0
