"""Panes: their places for any terminal size, and their content as lines. The detail pane shows the chosen task with its
usage and the end of its output, or a node with its GPUs. The tables are in `tables.py`."""

from __future__ import annotations

import collections
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from peerload.model.text import times_text
from peerload.text.format import duration_text, number_text, size_text
from peerload.text.tasks import elapsed_s, number_of
from peerload.top import lines as draw
from peerload.top import tables
from peerload.top.model import Series, is_number, number
from peerload.top.view_state import counts_text

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from typing import Any

    from peerload.top.lines import Line
    from peerload.top.model import NodeModel, TopModel
    from peerload.top.view_state import ViewState


# -- the detail pane ---------------------------------------------------------------------------------------------------

MEMORY_HIGH_BYTES_MIN = 1 << 20
"""Smallest scale of a usage graph."""

PROCESSES_CELLS = 8


class UsagePanel:
    """Usage history of one task: cores kept busy and bytes of memory, a value for each answer."""

    def __init__(self) -> None:
        self.cpus = Series()
        self.memory = Series()
        self.processes = 0

    def take(self, told: Mapping[str, Any]) -> None:
        """Add the answer of its node (`usage` of docs/wire.md)."""
        self.cpus.append(_value(told.get("cpus_busy")))
        self.memory.append(_value(told.get("memory_bytes")))
        self.processes = int(_value(told.get("processes")) or 0)

    def words(self) -> str:
        """The newest figures as text, for panes without space for graphs; "" if there are none."""
        parts = [] if self.cpus.now is None else [f"{self.cpus.now:.1f} cpus"]
        parts += [] if self.memory.now is None else [size_text(self.memory.now)]
        return " ".join(parts)

    def lines(self, task: Mapping[str, Any], spark: int, label_cells: int) -> list[Line]:
        """A line for processors and one for memory, each scaled to the requested amount, or to the peak."""
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
"""Bytes of each stream that are fetched a second at most, however much a task writes."""
TAIL_LINES_KEPT = 400
FACTS_FROM_HEIGHT = 12
"""Height from which the facts of a task take more than one line."""
LABEL_CELLS = 10


class Tail:
    """The end of one task's output, bounded in lines and in bytes of each stream. ``why_none``: reason why there is
    nothing to show."""

    def __init__(self, lines_kept: int = TAIL_LINES_KEPT, tail_bytes: int = TAIL_BYTES) -> None:
        self.tail_bytes = tail_bytes
        self._lines_kept = lines_kept
        self.clear("")

    def clear(self, task: str) -> None:
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
                shown = line.rstrip("\r").rpartition("\r")[2]  # the final state of a line that overwrites itself
                self.lines.append((stream, shown.expandtabs(8)))


def detail_lines(
    look: ViewState, tail: Tail, width: int, height: int, now: float, clock_text: Callable[[float], str]
) -> list[Line]:
    """Lines about the chosen row of the table that was used last."""
    if look.subject == "nodes":
        node = look.node()
        return [] if node is None else node_lines(node, width, now)
    task = look.task()
    if task is None:
        return [[(" nothing is chosen", "dim")]]
    if height < FACTS_FROM_HEIGHT:
        lines = [short_line(look, task, now, tail)]
        return [*lines, *tail_lines(tail, str(task.get("id") or ""), width, height - len(lines))]
    lines = task_lines(look, task, width, now, clock_text)
    lines += _usage_lines(look, task, tail, width)
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
    """One-line summary of a task; its output takes the rest of the pane."""
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
    told: Line = []
    elapsed = elapsed_s(task, now)
    if elapsed is not None:
        told.append((f" {'after' if task.get('ended_at') else 'for'} {duration_text(elapsed)}", ""))
    if task.get("exit_code") is not None:
        told.append((f", exit code {draw.plain(task['exit_code'])}", "bad" if task["exit_code"] else "good"))
    if task.get("signal"):
        told.append((f", signal {draw.plain(task['signal'])}", "bad"))
    return told


def _moments(task: dict[str, Any], clock_text: Callable[[float], str]) -> str:
    moments = []
    for key, word in (("submitted_at", "submitted"), ("started_at", "started"), ("ended_at", "ended")):
        at = task.get(key)
        if isinstance(at, (int, float)) and at:
            moments.append(f"{word} {clock_text(at)}")
    return ", ".join(moments) or "-"


def _who_for_whom(task: dict[str, Any], here: str) -> Line:
    home, node = str(task.get("home") or ""), str(task.get("node") or "")
    if home and home != here:
        return [(f"here, for {draw.plain(home)}", "good")]
    moves = task.get("migrations")
    moved: Line = [(f", moved {times_text(moves)}", "dim")] if moves else []
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


def _usage_lines(look: ViewState, task: dict[str, Any], tail: Tail, width: int) -> list[Line]:
    """Usage of a task, load of its node, and output rate."""
    lines: list[Line] = []
    spark = _spark_cells(width)
    if tail.task == task.get("id") and task.get("state") == "running":
        lines += tail.uses.lines(task, spark, LABEL_CELLS)
    node = look.world.nodes.get(str(task.get("node") or ""))
    if node is not None and task.get("state") in ("running", "leased"):
        lines.append(_history(node, "cpu", "node cpu", width))
        if node.gpus and task.get("gpus"):
            lines.append(_history(node, "gpu", "node gpu", width))
    if tail.task == task.get("id") and any(tail.sizes):
        high = max((value or 0.0 for value in tail.rate), default=0.0) or 1.0
        text = draw.sparkline(tail.rate, spark, high=high)
        lines.append(_labelled("writes", (text, "accent"), (f" {size_text(tail.rate.now or 0.0)}/s", "")))
    return lines


def tail_lines(tail: Tail, task: str, width: int, height: int) -> list[Line]:
    """The last lines of its stdout, then those of stderr, which are marked."""
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
    """Line of output; stderr has a mark besides its colour."""
    mark, style = ("! ", "warn") if stream == 2 else ("  ", "")  # noqa: PLR2004 -- stderr
    return [(mark, style), (draw.cut(draw.plain(text), max(width - 2, 0)), style)]


# -- a node ------------------------------------------------------------------------------------------------------------


def node_lines(node: NodeModel, width: int, now: float) -> list[Line]:
    """Facts of a node, its load in the last minutes, its GPUs."""
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
        lines.append([(" old facts: they may have changed since", "warn")])
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
    load = node.series["load"]
    high = max((value or 0.0 for value in load), default=0.0) or 1.0
    for label, text in told.items():
        spark = draw.sparkline(load, max(min(width - 34, 40), 0), high=high) if label == "load" else ""
        lines.append(_labelled(label, (text, ""), (f"  {spark}", "accent")))
    if isinstance(labels, list) and labels:
        lines.append(_labelled("labels", (draw.plain(", ".join(map(str, labels))), "accent")))
    lines += [_history(node, key, f"{key} %", width) for key in ("cpu", "mem")]
    return lines + _gpu_lines(facts.get("gpus"), width)


def _history(node: NodeModel, key: str, label: str, width: int) -> Line:
    series = node.series[key]
    text = draw.sparkline(series, _spark_cells(width))
    return _labelled(label, (text, "accent"), (f" {tables.percent(series.now)}", ""))


def _spark_cells(width: int) -> int:
    return max(min(width - LABEL_CELLS - 16, 60), 0)


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


# -- layout, and the other panes ---------------------------------------------------------------------------------------

METER_CELLS_MAX = 30
EVENT_STYLES = {
    "failed": "bad", "dead": "bad bold", "suspect": "warn", "held": "warn", "unknown": "warn bold", "cancelled": "warn",
    "running": "good", "done": "good", "alive": "good", "leased": "accent", "queued": "",
}  # fmt: skip


WIDE = 112
"""Width from which the detail pane is at the right."""
CLUSTER_HEIGHT = 5
HEIGHTS_MIN = {"nodes": 5, "tasks": 5, "detail": 6, "events": 4}
TASKS_HEIGHT = 12
"""Lines that the tasks get before other panes, if there is not room for all."""
WEIGHTS = {"nodes": 3, "tasks": 4, "detail": 3, "events": 2}
IMPORTANCE = ("tasks", "nodes", "cluster", "detail", "events")
"""Panes in the order in which they get space."""


class Place(NamedTuple):
    """Position and size of a pane, in cells."""

    x: int
    y: int
    width: int
    height: int


def layout(
    width: int,
    height: int,
    hidden: Collection[str] = (),
    wanted_first: Sequence[str] = (),
    zoomed: str = "",
    nodes: int = 0,
) -> dict[str, Place]:
    """Places of the visible panes within ``width`` by ``height`` cells. ``wanted_first``: panes that get space before
    others; ``zoomed``: the only pane that is shown; nodes: the number of nodes, since few need little space."""
    if width <= 0 or height <= 0:
        return {}
    if zoomed:
        return {zoomed: Place(0, 0, width, height)}
    order = [*wanted_first, *(pane for pane in IMPORTANCE if pane not in wanted_first)]
    order = [pane for pane in order if pane not in hidden]
    places: dict[str, Place] = {}
    y = 0
    stacked_min = min((HEIGHTS_MIN[pane] for pane in order if pane != "cluster"), default=0)
    if "cluster" in order and "tasks" in order[: order.index("cluster")]:
        stacked_min = TASKS_HEIGHT
    if "cluster" in order and height >= CLUSTER_HEIGHT + stacked_min:
        places["cluster"] = Place(0, 0, width, CLUSTER_HEIGHT)
        y = CLUSTER_HEIGHT
    rest = [pane for pane in order if pane != "cluster"]
    left_width = width
    if width >= WIDE and "detail" in rest and len(rest) > 1:
        left_width = width - max(width * 2 // 5, 44)
        places["detail"] = Place(left_width, y, width - left_width, height - y)
        rest.remove("detail")
    for pane, (top, size) in _stacked(rest, height - y, nodes).items():
        places[pane] = Place(0, y + top, left_width, size)
    return places


def _stacked(order: Sequence[str], height: int, nodes: int) -> dict[str, tuple[int, int]]:
    """Stack panes in the order of their numbers → (top, height) of those that fit."""
    taken: dict[str, int] = {}
    room = height
    for pane in order:
        least = HEIGHTS_MIN[pane]
        if least <= room or not taken:
            taken[pane] = min(max(least, TASKS_HEIGHT) if pane == "tasks" else least, room)
            room -= taken[pane]
    shown = [pane for pane in ("nodes", "tasks", "detail", "events") if pane in taken]
    sizes = {pane: taken[pane] for pane in shown}
    most = dict.fromkeys(shown, height)
    if "nodes" in most and nodes and len(shown) > 1:
        most["nodes"] = max(nodes + 3, HEIGHTS_MIN["nodes"])
    spare = height - sum(sizes.values())
    while spare > 0:
        growing = [pane for pane in shown if sizes[pane] < most[pane]] or shown[-1:]
        if not growing:
            break
        pane = min(growing, key=lambda pane: (sizes[pane] / WEIGHTS[pane], pane))
        sizes[pane] += 1
        spare -= 1
    tops: dict[str, tuple[int, int]] = {}
    top = 0
    for pane in shown:
        tops[pane] = top, sizes[pane]
        top += sizes[pane]
    return tops


@dataclass(eq=False, repr=False)
class Painter:
    """Draws the panes of a view. ``clock_text(at)``: a time on the viewer's clock; the flags are those of the command
    line."""

    look: ViewState
    tail: Tail
    _clock_text: Callable[[float], str]
    _: KW_ONLY
    ascii_only: bool = False
    readonly: bool = False
    wide: bool = False

    def plainer(self, line: Line) -> Line:
        """The line in the characters that the terminal can show."""
        return draw.in_ascii(line) if self.ascii_only else line

    def pane(self, name: str, width: int, height: int, now: float) -> list[Line]:
        """A pane in its frame, exactly ``width`` by ``height`` cells."""
        world, look = self.look.world, self.look
        inner, room = max(width - 2, 0), max(height - 2, 0)
        match name:
            case "cluster":
                title, lines = self._title("1", "cluster"), cluster_lines(world, inner, wide=self.wide)
            case "nodes":
                columns = tables.node_columns(look, now, wide=self.wide)
                title = self._table_title("2", "nodes", len(world.nodes))
                lines = tables.table(look, "nodes", columns, inner, room, now)
            case "tasks":
                columns = tables.task_columns(look, now)
                title = [*self._table_title("3", "tasks", _all_tasks(world)), *_counts(world)]
                lines = tables.table(look, "tasks", columns, inner, room, now)
                if not world.tasks and not world.guests and not world.ended:
                    lines.append([("  no tasks yet: ", "dim"), ("peerload submit CMD", "accent")])
            case "detail":
                title = self._title("4", "detail")
                lines = detail_lines(look, self.tail, inner, room, now, self._clock_text)
            case _:
                title = self._title("5", "events")
                if look.events_up:
                    title = [*title, (f"  {look.events_up} newer below", "warn")]
                lines = event_lines(look, inner, room, self._clock_text)
        drawn = draw.framed(title, lines, width, height, focus=look.focus == name)
        drawn = [self.plainer(line) for line in drawn]
        return [draw.restyled(line, "stale") for line in drawn] if world.lost_because else drawn

    def _title(self, key: str, name: str) -> Line:
        return [(key, "key"), (f" {name}", "title")]

    def _table_title(self, key: str, name: str, total: int) -> Line:
        self.look.rows(name)
        shown = self.look.numbers[name]
        title = self._title(key, name)
        text = self.look.filters[name]
        is_mine = name == "tasks" and self.look.is_mine
        title.append((f" {shown} of {total}" if text or is_mine else f" {total}", "dim"))
        if is_mine:
            title.append(("  mine", "warn"))
        if name == "tasks" and self.look.marked:
            title.append((f"  {len(self.look.marked)} marked", "warn"))
        if text:
            title.append((f"  /{draw.plain(text)}", "warn"))
        return title

    def header(self, width: int, now: float) -> Line:
        """Name of the cluster and of the node that answers; or why the agent does not answer."""
        world = self.look.world
        agent = world.agent
        line: Line = [(" peerload ", "brand"), (" ", "")]
        if world.lost_because:
            since = duration_text(now - world.lost_at)
            what = f"the agent does not answer, for {since}: {draw.plain(world.lost_because)} -- trying again"
            return self.plainer(draw.fitted([*line, (what, "bad bold")], width))
        if not agent:
            return self.plainer(draw.fitted([*line, ("asking the agent ...", "dim")], width))
        mqtt = agent.get("mqtt")
        broker = draw.plain(mqtt) if mqtt else "broker away" if agent.get("mqtt_configured") else "no broker"
        facts = [(draw.plain(agent.get("cluster") or "-"), "bold"), (f"from {draw.plain(world.node)}", "here")]
        facts += [(f"policy {draw.plain(agent.get('policy') or '-')}", ""), (broker, "" if mqtt else "dim")]
        if self.look.paused_at:
            facts.insert(0, ("paused: p resumes", "warn bold"))
        if self.readonly:
            facts.insert(0, ("read only", "warn bold"))
        for text, style in facts:
            line += [(text, style), ("   ", "")]
        clock = f"{self._clock_text(now)} "
        return (
            self.plainer([*draw.fitted(line, max(width - len(clock), 0)), (clock, "dim")]) if width > len(clock) else []
        )


def cluster_lines(world: TopModel, width: int, *, wide: bool) -> list[Line]:
    """Four bars with the sums and their history, in two columns; counts of nodes and tasks."""
    sums, series = world.sums, world.cluster
    half = (width - 2) // 2
    cpu = f"{number_text(sums.get('cpus_busy'), 1)} / {number_text(sums.get('cpus'))}"
    memory = sizes_text(sums.get("mem_used_bytes"), sums.get("mem_bytes"))
    gpu = gpu_memory = ""
    if sums.get("gpus"):
        gpu = f"{number_text(sums['gpu_busy'], 1)} / {number_text(sums['gpus'])}"
        gpu_memory = sizes_text(sums["gpu_mem_used"], sums["gpu_mem_bytes"])
    rest = width - half - 2
    first = [*_meter("cpu", series["cpu"], cpu, half), ("  ", "")]
    second = [*_meter("mem", series["mem"], memory, half), ("  ", "")]
    if sums.get("gpus"):
        first += _meter("gpu", series["gpu"], gpu, rest)
        second += _meter("gmem", series["gpu_mem"], gpu_memory, rest)
    else:
        first += [(draw.padded("gpu", 5), "bold"), ("no node has any", "dim")]
    return [first, second, _facts(world, wide=wide)]


def sizes_text(part: float | None, whole: float | None) -> str:
    """Text such as ``4.1 / 70.6 GiB``, both in the unit of the total."""
    amount, unit = size_text(whole or 0.0).split()
    factor = float(amount) / whole if whole else 0.0
    return f"{number_text((part or 0.0) * factor, 1)} / {number_text(float(amount), 1)} {unit}"


def _meter(label: str, series: Series, says: str, width: int) -> Line:
    """Line such as ``cpu ■■■■■■■■ 45%  232 / 512 ▁▂▃``, exactly ``width`` cells."""
    share = series.now
    text_cells = 19 if width >= 46 else 0  # noqa: PLR2004 -- narrower, bar and percentage are enough
    room = width - 5 - 6 - text_cells - (1 if text_cells else 0)
    bar_cells = max(min(room * 2 // 3 if room > 18 else room, METER_CELLS_MAX), 0)  # noqa: PLR2004 -- room for both
    spark_cells = max(room - bar_cells - 1, 0)
    line: Line = [(draw.padded(label, 5), "bold")]
    line += draw.bar(share, bar_cells)
    line.append((f"{tables.percent(share):>5} ", draw.level(share)))
    if text_cells:
        line.append((draw.padded(f" {says}", text_cells + 1), "dim"))
    if spark_cells > 2:  # noqa: PLR2004 -- fewer tell nothing
        line.append((" " + draw.sparkline(series, spark_cells), "accent"))
    return draw.fitted(line, width)


def _facts(world: TopModel, *, wide: bool) -> Line:
    """Counts of nodes by state (``wide``: and by load region), and of tasks by state."""
    states: dict[str, int] = {}
    regions: dict[str, int] = {}
    for node in world.nodes.values():
        states[node.state] = states.get(node.state, 0) + 1
        if node.state == "alive" and wide:
            region = str(node.facts.get("region") or "")
            regions[region] = regions.get(region, 0) + 1
    line: Line = [("nodes ", "bold")]
    for state in ("alive", "suspect", "asleep", "dead", "revoked", "left"):
        if states.get(state) or state == "alive":
            line += [(f"{states.get(state, 0)} {state}", tables.STATE_STYLES[state]), (" ", "")]
    line.append((" load " if any(map(regions.get, tables.REGIONS)) else "", "bold"))
    for region, word in (("underloaded", "under"), ("normal", "normal"), ("overloaded", "over")):
        if regions.get(region):
            line += [(f"{regions[region]} {word}", tables.REGIONS[region][1]), (" ", "")]
    running, queued = int(world.sums.get("tasks_running", 0)), int(world.sums.get("tasks_queued", 0))
    line += [(" tasks ", "bold"), (f"{running} running {queued} waiting", "")]
    ours, theirs = sum(world.ours_by_node().values()), len(world.guests)
    away = ours - world.ours_by_node().get(world.node, 0)
    line += [(f"   → {away} of ours", "accent" if away else "faint")]
    line += [(f"  ← {theirs} of others", "good" if theirs else "faint")]
    return line


def _counts(world: TopModel) -> Line:
    line: Line = []
    for key, style in (("placed", "good"), ("waiting", ""), ("held", "warn")):
        if world.counts.get(key):
            line.append((f"  {world.counts[key]} {key}", style or "dim"))
    if world.guests:
        line.append((f"  {len(world.guests)} of others", "accent"))
    return line


def _all_tasks(world: TopModel) -> int:
    return (
        max(sum(world.counts.values()), len(world.tasks))
        + len(world.guests)
        + sum(map(number_of, world.ended.values()))
    )


def event_lines(look: ViewState, width: int, height: int, clock_text: Callable[[float], str]) -> list[Line]:
    """The newest events that fit, the last at the bottom."""
    events = list(look.world.events)
    if look.events_up:
        events = events[: -look.events_up]
    lines: list[Line] = []
    for event in events[-height:] if height > 0 else []:
        what = str(event.get("what") or "")
        who = event.get("task") or event.get("node") or what
        state = str(event.get("state") or "")
        line: Line = [(f"{clock_text(number(event.get('at')))}  ", "dim"), (draw.padded(draw.plain(who), 12), "bold")]
        line.append((" " + draw.padded(draw.plain(state), 10), EVENT_STYLES.get(state, "accent")))
        if what == "attempt":
            line.append((" remote task", "good"))
        if what == "task" and event.get("node"):
            line.append((f" on {draw.plain(event['node'])}", ""))
        if event.get("reason"):
            line.append((f"  {draw.plain(event['reason'])}", "dim"))
        lines.append(draw.fitted(line, width))
    return lines
