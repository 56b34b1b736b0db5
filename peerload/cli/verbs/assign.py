"""`peerload assign`: assign the tasks of a program to nodes at the least cost, draw the assignment, submit it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from peerload.assign.program import FILE_BYTES_MAX, in_order, read_program
from peerload.assign.solver import serial, solve
from peerload.cli.common.options import Options
from peerload.client.blocking import Client
from peerload.model.errors import ConfigError, PeerloadError, UsageError
from peerload.model.text import printable
from peerload.text.format import counted, print_lines, print_result, say, table

if TYPE_CHECKING:
    from typing import Any

    from peerload.assign.program import Program
    from peerload.assign.solver import Assignment


def main(words: list[str]) -> int:
    reader = Options(
        "assign",
        "Assign the tasks of a program to nodes so that execution and communication cost least in all. The file names nodes,"
        " tasks with their cost on each node, and what each pair costs apart.",
        usage="[--dot | --submit] PROGRAM.toml",
    )
    reader.switch("--dot", help="print the assignment as a graph for Graphviz")
    reader.switch("--submit", help="submit each task to its node, after those that it waits for")
    reader.add_argument("program", metavar="PROGRAM.toml")
    flags = reader.read(words)
    if flags.dot and flags.submit:
        raise UsageError("assign: --dot and --submit cannot be combined")
    path = Path(flags.program)
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"assign: {path} cannot be read", why=error.strerror or str(error)) from None
    program = read_program(raw, str(path))
    found = solve(program)
    if flags.dot:
        print_lines(_dot(program, found))
        return 0
    ids = _submitted(program, found, flags.socket) if flags.submit else {}
    told = _as_json(program, found) | ({"tasks": ids} if ids else {})
    print_result(told, _lines(program, found, ids), as_json=flags.json)
    return 0


def _as_json(program: Program, found: Assignment) -> dict[str, Any]:
    compared = serial(program)
    names = [task.name for task in program.tasks]
    return {
        "assignment": {name: program.nodes[node] for name, node in zip(names, found.places, strict=True)},
        "total": found.total,
        "execution": found.execution,
        "communication": found.communication,
        "method": found.method,
        "bound": found.bound,
        "gap": found.gap,
        "serial": compared.total if compared is not None else None,
    }


def _lines(program: Program, found: Assignment, ids: dict[str, str]) -> list[str]:
    rows = []
    for task, place in zip(program.tasks, found.places, strict=True):
        costs = [
            ("-" if math.isinf(cost) else f"{cost:g}") + " *" * (node == place) for node, cost in enumerate(task.costs)
        ]
        rows.append([printable(task.name), *(cost if cost.endswith("*") else f"{cost}  " for cost in costs)])
        if ids:
            rows[-1].append(printable(ids[task.name]))
    headings = ["TASK", *(f"{printable(node)}  " for node in program.nodes), *(["ID"] if ids else [])]
    compared = serial(program)
    if found.gap is None:
        exact = f"{found.method}, how far above the optimum is not known"
    elif found.total <= found.bound:
        exact = f"optimal, by {found.method}"
    else:
        exact = f"{found.method}, at most {found.gap:.1%} above the optimum"
    return [
        *table(headings, rows, right=headings[1 : 1 + len(program.nodes)]),
        "",
        f"total {found.total:g}: execution {found.execution:g}, communication {found.communication:g} ({exact})",
        f"serial (in order, {counted(len(program.nodes), 'equal part')}): {compared.total:g}"
        if compared is not None
        else "serial (in order, equal parts): does not fit",
    ]


def _dot(program: Program, found: Assignment) -> list[str]:
    """The assignment as a Graphviz graph with a box for each node; communication between nodes is bold, dependencies are arrows."""

    def quoted(text: str) -> str:
        return '"' + printable(text).replace("\\", "\\\\").replace('"', '\\"') + '"'

    lines = ["digraph assignment {", "  node [shape=ellipse]"]
    for node, name in enumerate(program.nodes):
        lines += [f"  subgraph cluster_{node} {{", f"    label={quoted(name)}"]
        for task, place in zip(program.tasks, found.places, strict=True):
            if place == node:
                lines.append(f"    {quoted(task.name)} [label={quoted(f'{task.name} ({task.costs[node]:g})')}]")
        lines.append("  }")
    for (one, other), cost in program.apart.items():
        pair = f"{quoted(program.tasks[one].name)} -> {quoted(program.tasks[other].name)}"
        style = ", style=bold, color=red" if found.places[one] != found.places[other] else ""
        lines.append(f'  {pair} [dir=none, label="{cost:g}"{style}]')
    for task in program.tasks:
        lines += [f"  {quoted(before)} -> {quoted(task.name)} [style=dashed]" for before in task.after]
    return [*lines, "}"]


def _submitted(program: Program, found: Assignment, socket: str | None) -> dict[str, str]:
    """Submit all tasks, each to its node → id by name. If one is refused, the tasks submitted before it are cancelled."""
    if missing := [task.name for task in program.tasks if not task.command]:
        raise ConfigError(f"tasks.{missing[0]}.command", "is missing", why="--submit runs it")
    client, ids = Client(socket), dict[str, str]()
    nodes = {task.name: program.nodes[node] for task, node in zip(program.tasks, found.places, strict=True)}
    for task in in_order(program):
        command = task.command if isinstance(task.command, str) else list(task.command)
        try:
            handle = client.submit(
                command,
                shell=isinstance(task.command, str),
                name=task.name,
                node=nodes[task.name],
                mem=task.mem_bytes,
                after_ok=[ids[before] for before in task.after],
            )
        except PeerloadError:
            if ids:
                say(
                    f"{printable(task.name)} is refused; cancelling the tasks before it: {printable(' '.join(ids.values()))}"
                )
                client.cancel(list(ids.values()))
            raise
        ids[task.name] = handle.id
    return ids
