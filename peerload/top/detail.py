"""The detail pane: the chosen task with its usage and the end of its output, or a node with its GPUs."""

from __future__ import annotations

import collections

from peerload.text.format import duration_text, number_text, size_text
from peerload.top import lines as draw
from peerload.top import tables
from peerload.top.model import Series, is_number, number
from peerload.top.view_state import counts_text

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from peerload.top.lines import Line
    from peerload.top.model import NodeModel
    from peerload.top.view_state import ViewState


MEMORY_HIGH_BYTES_MIN = 1 << 20
"""Nothing that uses less is drawn as if it filled its line."""

PROCESSES_CELLS = 8
"""So much room the number of processes takes."""


class UsagePanel:
    """Of one task: cores kept busy, and bytes of memory, a value a look."""

    def __init__(self) -> None:
        self.cpus = Series()
        self.memory = Series()
        self.processes = 0

    def take(self, told: Mapping[str, Any]) -> None:
        """Take the answer of its node (`usage` of docs/wire.md)."""
        self.cpus.append(_value(told.get("cpus_busy")))
        self.memory.append(_value(told.get("memory_bytes")))
        self.processes = int(_value(told.get("processes")) or 0)

    def words(self) -> str:
        """The newest figures alone, where there is no room for how they were; "" where there are none."""
        parts = [] if self.cpus.now is None else [f"{self.cpus.now:.1f} cpus"]
        parts += [] if self.memory.now is None else [size_text(self.memory.now)]
        return " ".join(parts)

    def lines(self, task: Mapping[str, Any], spark: int, label_cells: int) -> list[Line]:
        """A line for processors and one for memory, each drawn against what it has asked for, or the most it had."""
        lines = []
        for label, series, least, asked in (
            ("cpu", self.cpus, 1.0, number(task.get("cpus"))),
            ("memory", self.memory, float(MEMORY_HIGH_BYTES_MIN), number(task.get("mem_bytes"))),
        ):
            if series.now is None:
                continue
            high = max(asked, least, *(value or 0.0 for value in series))
            text = draw.sparkline(series, max(spark - PROCESSES_CELLS, 0), high=high)
            words = f" {series.now:.1f} cpus" if label == "cpu" else f" {size_text(series.now)}"
            if label == "memory" and self.processes > 1:
                words += f" in {self.processes} procs"
            lines.append([(draw.padded(f" {label}", label_cells), "dim"), (text, "accent"), (words, "")])
        return lines


def _value(told: object) -> float | None:
    return number(told) if is_number(told) and number(told) >= 0 else None


TAIL_BYTES = 16 << 10
"""Of each stream, fetched a second at most: however much a task writes, a look at it costs no more."""
TAIL_LINES_KEPT = 400
GRAPH_HEIGHT = 3
FACTS_FROM_HEIGHT = 12
"""With fewer lines than this the facts of a task are one, and its output has the rest."""
GRAPHS_FROM_HEIGHT = 22
LABEL_CELLS = 10


class Tail:
    """The end of one task's output: so many lines, from so many bytes of each stream. ``why_none``: why there is none to
    be shown."""

    def __init__(self, lines_kept: int = TAIL_LINES_KEPT, tail_bytes: int = TAIL_BYTES) -> None:
        self.tail_bytes = tail_bytes
        self._lines_kept = lines_kept
        self.clear("")

    def clear(self, task: str) -> None:
        """Another task's is wanted."""
        self.task = task
        self.lines: collections.deque[tuple[int, str]] = collections.deque(maxlen=self._lines_kept)
        self.sizes = [0, 0]
        self.rate = Series()
        self.uses = UsagePanel()
        self.seen_at = 0.0
        self.why_none = ""

    def take(self, task: str, pieces: Iterable[dict[str, Any]], at: float) -> None:
        """Take the output of ``task`` from the agent: pieces of ``stream``, ``offset`` and ``data``."""
        if task != self.task:
            return
        data = {1: bytearray(), 2: bytearray()}
        sizes = list(self.sizes)
        for piece in pieces:
            stream = piece.get("stream")
            if stream in data:
                data[stream] += piece.get("data") or b""
                sizes[stream - 1] = max(
                    sizes[stream - 1], int(piece.get("offset") or 0) + len(piece.get("data") or b"")
                )
        if self.seen_at and at > self.seen_at:
            self.rate.append((sum(sizes) - sum(self.sizes)) / (at - self.seen_at))
        self.seen_at, self.sizes, self.why_none = at, sizes, ""
        self.lines.clear()
        for stream in (1, 2):
            text = bytes(data[stream][-self.tail_bytes :]).decode("utf-8", "backslashreplace")
            for line in text.removesuffix("\n").split("\n")[-self._lines_kept // 2 :] if text else ():
                shown = line.rstrip("\r").rpartition("\r")[2]  # of what overwrites itself, what it says now
                self.lines.append((stream, shown.expandtabs(8)))


def detail_lines(
    look: ViewState, tail: Tail, width: int, height: int, now: float, clock_text: Callable[[float], str]
) -> list[Line]:
    """The lines about the chosen row of the table that was used last."""
    if look.subject == "nodes":
        node = look.node()
        return [] if node is None else node_lines(node, width, height, now)
    task = look.task()
    if task is None:
        return [[(" nothing is chosen", "dim")]]
    if height < FACTS_FROM_HEIGHT:
        lines = [short_line(look, task, now, tail)]
        return [*lines, *tail_lines(tail, str(task.get("id") or ""), width, height - len(lines))]
    lines = task_lines(look, task, width, now, clock_text)
    lines += _usage_lines(look, task, tail, width, height - len(lines))
    room = height - len(lines) - 1
    if room > 0:
        lines.append(_rule(" output ", width))
        lines += tail_lines(tail, str(task.get("id") or ""), width, room)
    return lines


def _labelled(label: str, *spans: tuple[str, str]) -> Line:
    return [(draw.padded(f" {label}", LABEL_CELLS), "dim"), *spans]


def _rule(title: str, width: int) -> Line:
    return [("─", "frame"), (title, "dim"), ("─" * max(width - len(title) - 1, 0), "frame")]


def short_line(look: ViewState, task: dict[str, Any], now: float, tail: Tail) -> Line:
    """All that there is room for besides the output."""
    line: Line = [
        (f" {draw.plain(task.get('id') or '')} ", "bold"),
        (f"{draw.plain(task.get('name') or '')}  ", "title"),
    ]
    line += [*tables.state_of_task(task), *_how_long(task, now), ("  ", ""), *_who_for_whom(task, look.world.node)]
    if task.get("state") == "running" and tail.task == task.get("id") and (uses := tail.uses.words()):
        line.append((f"  {uses}", "accent"))
    if task.get("reason") and task.get("state") not in ("running", "done"):
        line.append((f"  {draw.plain(task['reason'])}", "dim"))
    return line


# -- a task ------------------------------------------------------------------------------------------------------------


def task_lines(
    look: ViewState, task: dict[str, Any], width: int, now: float, clock_text: Callable[[float], str]
) -> list[Line]:
    """The facts of a task, one a line."""
    world = look.world
    argv = task.get("argv")
    command = task.get("command") or (" ".join(map(str, argv)) if isinstance(argv, list) else "")
    lines: list[Line] = [
        [(f" {draw.plain(task.get('id') or '')}  ", "bold"), (draw.plain(task.get("name") or ""), "title")],
        _labelled("state", *tables.state_of_task(task), *_how_long(task, now)),
        _labelled("when", (_moments(task, clock_text), "dim")),
        _labelled("runs", *_who_for_whom(task, world.node)),
        _labelled("command", (draw.cut(draw.plain(command), max(width - LABEL_CELLS, 1)), "")),
        _labelled("asked", (_asked(task), "")),
    ]
    counts = task.get("array")
    if isinstance(counts, dict):
        lines.insert(2, _labelled("members", (draw.plain(counts_text(counts, partial=world.more_wait)), "")))
    devices = task.get("device_names")
    if devices:
        lines.append(_labelled("devices", (draw.plain(", ".join(map(str, devices))), "accent")))
    if task.get("reason"):
        lines.append(_labelled("reason", (draw.plain(task["reason"]), "warn" if task.get("state") == "failed" else "")))
    return lines


def _how_long(task: dict[str, Any], now: float) -> Line:
    """For how long, and how it ended."""
    told: Line = []
    elapsed = tables.elapsed_s(task, now)
    if elapsed is not None:
        told.append((f" {'after' if task.get('ended_at') else 'for'} {duration_text(elapsed)}", ""))
    if task.get("exit_code") is not None:
        told.append((f", exit code {draw.plain(task['exit_code'])}", "bad" if task["exit_code"] else "good"))
    if task.get("signal"):
        told.append((f", signal {draw.plain(task['signal'])}", "bad"))
    return told


def _moments(task: dict[str, Any], clock_text: Callable[[float], str]) -> str:
    """When it was submitted, started and ended."""
    moments = []
    for key, word in (("submitted_at", "submitted"), ("started_at", "started"), ("ended_at", "ended")):
        at = task.get(key)
        if isinstance(at, (int, float)) and at:
            moments.append(f"{word} {clock_text(at)}")
    return ", ".join(moments) or "-"


def _who_for_whom(task: dict[str, Any], here: str) -> Line:
    """The home of a task and the node that runs it."""
    home, node = str(task.get("home") or ""), str(task.get("node") or "")
    if home and home != here:
        return [(f"here, for {draw.plain(home)}", "good")]
    moves = task.get("migrations")
    moved: Line = [(f", moved {moves} times" if moves != 1 else ", moved once", "dim")] if moves else []
    if not node and (task.get("nodes") or 0) > 1:
        return [(f"on {task['nodes']} nodes", "accent")]
    if not node:
        return [("nowhere yet", "dim"), *moved]
    if node == here:
        return [("here, at its home", "here"), *moved]
    return [(f"on {draw.plain(node)}, for us", "accent"), *moved]


def _asked(task: dict[str, Any]) -> str:
    asked = [f"{number_text(task.get('cpus'))} cpus"]
    if task.get("mem_bytes"):
        asked.append(size_text(task["mem_bytes"]))
    if task.get("gpus"):
        asked.append(f"{number_text(task['gpus'])} GPUs")
    if task.get("priority"):
        asked.append(f"priority {number_text(task['priority'])}")
    return ", ".join(asked)


def _usage_lines(look: ViewState, task: dict[str, Any], tail: Tail, width: int, height: int) -> list[Line]:
    """Usage of a task, load of its node, and output rate; as graphs where there is room for them besides some output."""
    lines: list[Line] = []
    spark = max(min(width - LABEL_CELLS - 16, 60), 0)
    if tail.task == task.get("id") and task.get("state") == "running":
        lines += tail.uses.lines(task, spark, LABEL_CELLS)
    node = look.world.nodes.get(str(task.get("node") or ""))
    if node is not None and task.get("state") in ("running", "leased"):
        for key, label in (("cpu", "node cpu"), *((("gpu", "node gpu"),) if node.gpus and task.get("gpus") else ())):
            series = node.series[key]
            if height >= GRAPHS_FROM_HEIGHT:
                lines += _graph_block(series, label, width)
                continue
            text = draw.sparkline(series, spark)
            lines.append(_labelled(label, (text, "accent"), (f" {tables.percent(series.now)}", "")))
    if tail.task == task.get("id") and any(tail.sizes):
        high = max((value or 0.0 for value in tail.rate), default=0.0) or 1.0
        text = draw.sparkline(tail.rate, spark, high=high)
        lines.append(_labelled("writes", (text, "accent"), (f" {size_text(tail.rate.now or 0.0)}/s", "")))
    return lines


def tail_lines(tail: Tail, task: str, width: int, height: int) -> list[Line]:
    """The last lines of its stdout, and below them those of stderr, which are marked."""
    if tail.task != task or not tail.lines:
        why = tail.why_none if tail.task == task and tail.why_none else "nothing yet"
        return [[(f" {draw.plain(why)}", "faint")]]
    out = [line for line in tail.lines if line[0] == 1]
    err = [line for line in tail.lines if line[0] != 1]
    of_err = min(len(err), max(height // 2, height - len(out)))
    of_out = height - of_err
    shown = (out[-of_out:] if of_out > 0 else []) + (err[-of_err:] if of_err > 0 else [])
    return [output_line(stream, text, width) for stream, text in shown]


def output_line(stream: int, text: str, width: int) -> Line:
    """One line of output; what came on stderr has a mark, besides its colour."""
    mark, style = ("! ", "warn") if stream == 2 else ("  ", "")  # noqa: PLR2004 -- stderr
    return [(mark, style), (draw.cut(draw.plain(text), max(width - 2, 0)), style)]


# -- a node ------------------------------------------------------------------------------------------------------------


def node_lines(node: NodeModel, width: int, height: int, now: float) -> list[Line]:
    """The facts of a node, its load in the last minutes, its GPUs."""
    facts = node.facts
    labels = facts.get("labels")
    speed = number_text(facts.get("speed"))
    lines: list[Line] = [
        [
            (f" {draw.plain(node.name)}  ", "bold"),
            *tables.state_of_node(node),
            (f"  known {duration_text(node.age_s(now))} ago", "dim"),
        ]
    ]
    if node.is_stale(now):
        lines.append([(" what follows is old: it may be otherwise by now", "warn")])
    for key, label in (("drain_reason", "drained"), ("trouble", "trouble"), ("no_gpus_because", "no GPUs")):
        if facts.get(key):
            lines.append(_labelled(label, (draw.plain(facts[key]), "warn")))
    declines = facts.get("declines")
    if isinstance(declines, list) and declines:
        lines.append(_labelled("declines", (draw.plain("; ".join(map(str, declines))), "warn")))
    foreign = facts.get("cpus_foreign")
    by_others = f", {number_text(foreign, 1)} by other programs" if foreign else ""
    running, waiting = number_text(facts.get("tasks_running")), number_text(facts.get("tasks_queued"))
    told = {
        "load": f"{number_text(facts.get('load'))}  {draw.plain(facts.get('region') or '-')}",
        "tasks": f"{running} running, {waiting} waiting, {number_text(facts.get('slots'))} at a time",
        "cpus": f"{number_text(facts.get('cpus_busy'), 1)} of {number_text(facts.get('cpus'))} busy{by_others}, speed {speed}",
        "memory": f"{size_text(facts.get('mem_used_bytes'))} of {size_text(facts.get('mem_bytes'))}",
        **(
            {}
            if facts.get("watts") is None
            else {"power": f"{number_text(facts['watts'], 1)} W {facts.get('watts_quality')}"}
        ),
        "address": f"{draw.plain(facts.get('address') or '-')}, incarnation {number_text(facts.get('incarnation'))}",
    }
    for label, text in told.items():
        graph = _graph_of(node, label, width) if label == "load" else []
        lines.append(_labelled(label, (text, ""), *graph))
    if isinstance(labels, list) and labels:
        lines.append(_labelled("labels", (draw.plain(", ".join(map(str, labels))), "accent")))
    gpus = _gpu_lines(facts.get("gpus"), width)
    if height - len(lines) - len(gpus) >= 2 * (GRAPH_HEIGHT + 1):
        for key in ("cpu", "mem"):
            lines += _graph_block(node.series[key], key, width)
    return lines + gpus


def _graph_of(node: NodeModel, key: str, width: int) -> Line:
    series = node.series[key]
    high = max((value or 0.0 for value in series), default=0.0) or 1.0
    size = max(min(width - 34, 40), 0)
    return [("  " + draw.sparkline(series, size, high=high), "accent")]


def _graph_block(series: Sequence[float | None], key: str, width: int) -> list[Line]:
    now = series[-1] if series else None
    lines: list[Line] = [_rule(f" {key} {tables.percent(now)} ", width)]
    rows = draw.graph(series, max(width - 2, 0), GRAPH_HEIGHT)
    return lines + [[(" " + row, style)] for row, style in zip(rows, ("bad", "warn", "good"), strict=True)]


def _gpu_lines(gpus: object, width: int) -> list[Line]:
    lines: list[Line] = []
    for gpu in gpus if isinstance(gpus, list) else []:
        busy = gpu.get("util")
        memory = f"{size_text(gpu.get('mem_used_bytes'))} / {size_text(gpu.get('mem_bytes'))}"
        health = str(gpu.get("health") or "-")
        line: Line = [(f" GPU {number_text(gpu.get('index')):>2} ", "bold")]
        line += draw.bar(busy if isinstance(busy, float) else None, 10)
        line.append((f"{tables.percent(busy):>5} ", draw.level(busy)))
        line.append((draw.padded(memory, 21, right=True), ""))
        line.append((f"  {number_text(gpu.get('tasks'))} tasks", "dim"))
        if health not in ("ok", "-"):
            line.append((f"  {draw.plain(health)}", "bad bold"))
        line.append((f"  {draw.plain(gpu.get('model') or '')}", "dim"))
        lines.append(draw.fitted(line, width))
    return lines
