"""The panes that are tables: nodes and tasks."""

from __future__ import annotations

from typing import NamedTuple

from rich.cells import cell_len

from peerload.text.format import duration_text, number_text, size_text
from peerload.text.tasks import command_text, elapsed_s
from peerload.top import lines as draw
from peerload.top import view_state
from peerload.top.actions import SIGNALS
from peerload.top.model import UNREACHABLE
from peerload.top.view_state import NODE_ORDERS, TASK_ORDERS, name_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from peerload.top.lines import Line, Span
    from peerload.top.model import NodeModel
    from peerload.top.view_state import ViewState

STATE_STYLES = {
    "alive": "good", "suspect": "warn bold", "dead": "bad bold", "revoked": "bad bold", "left": "dim", "asleep": "dim",
    "running": "good", "leased": "accent", "queued": "", "held": "warn", "promised": "accent", "ended": "dim",
    "done": "dim", "failed": "bad", "cancelled": "dim", "unknown": "warn bold", UNREACHABLE: "bad bold",
}  # fmt: skip
REGIONS = {"underloaded": ("○ under", "good"), "normal": ("◐ normal", ""), "overloaded": ("● over", "warn")}
NO_DIRECTORY = "no directory"
STATE_CELLS = 9
STRETCH_CELLS_MAX = 16
"""Maximum extra cells of a stretching column while another one can grow."""
USER_CELLS_MAX = 8
COMMAND_CELLS_MIN = 14
NAME_CELLS_MAX = 22
"""Columns of names and ids are as wide as their longest value, up to this."""


class Column(NamedTuple):
    """Column of a table. ``cell(row)`` returns its spans; rank: columns of the highest rank are dropped first on a narrow
    terminal; stretches: fills the remaining width; letter: the key that sorts by it."""

    heading: str
    width: int
    cell: Callable[[Any], Line]
    rank: int = 0
    right: bool = False
    stretches: bool = False
    letter: str = ""


def chosen_columns(columns: Sequence[Column], width: int) -> list[tuple[Column, int]]:
    """The columns that fit, with their widths; with the gaps they fill the width if one stretches."""
    kept = list(columns)
    while len(kept) > 1 and sum(column.width + 1 for column in kept) - 1 > width:
        kept.remove(max(kept, key=lambda column: column.rank))
    spare = max(width - (sum(column.width + 1 for column in kept) - 1), 0)
    stretching = [column for column in kept if column.stretches]
    more: dict[str, int] = {}
    for number, column in enumerate(stretching):
        is_last = number == len(stretching) - 1
        more[column.heading] = spare if is_last else min(spare // 3, STRETCH_CELLS_MAX)
        spare -= more[column.heading]
    return [(column, column.width + more.get(column.heading, 0)) for column in kept]


def table(look: ViewState, pane: str, columns: Sequence[Column], width: int, height: int, now: float) -> list[Line]:
    """The heading and the visible rows, each of exactly ``width`` cells."""
    kept = chosen_columns(columns, width)
    order, backwards = look.orders[pane], look.backwards[pane]
    head: Line = []
    for column, size in kept:
        is_order = column.letter == order
        heading = column.heading + (("↑" if backwards else "↓") if is_order else "")
        head += [(draw.padded(heading, size, right=column.right), "head focus" if is_order else "head"), (" ", "")]
    drawn = [draw.fitted(head[:-1], width)]
    chosen = look.chosen[pane]
    _, rows = look.window(pane, height - 1)
    for row in rows:
        line: Line = []
        for column, size in kept:
            line += _cell(column, row, size)
            line.append((" ", ""))
        line = draw.fitted(line[:-1], width)
        if pane == "nodes" and row.is_stale(now):
            line = draw.restyled(line, "stale")
        if name_of(row) == chosen:
            line = [(draw.as_text(line), "chosen")] if look.focus == pane else draw.restyled(line, "marked")
        drawn.append(line)
    return drawn


def _cell(column: Column, row: object, size: int) -> list[Span]:
    spans = column.cell(row)
    if column.right:
        return [(" " * max(size - draw.width_of(spans), 0), ""), *draw.fitted(spans, min(draw.width_of(spans), size))]
    if len(spans) == 1:
        text, style = spans[0]
        return [(draw.padded(text, size), style)]
    return draw.fitted(spans, size)


def _longest(names: Iterable[str], least: int) -> int:
    return max(least, min(max(map(cell_len, names), default=0), NAME_CELLS_MAX))


# -- nodes -------------------------------------------------------------------------------------------------------------


def node_columns(look: ViewState, now: float, *, wide: bool = False) -> list[Column]:
    """Columns of the nodes. ``wide``: also the load index and load region of the policy."""
    ours, theirs = look.world.ours_by_node(), look.world.theirs_by_home()
    name = _longest((draw.plain(node.name) for node in look.rows("nodes")), 8) + 2

    lacks = any(node.facts.get("declines") for node in look.world.nodes.values())
    state = len(NO_DIRECTORY) if lacks else STATE_CELLS

    def flow(node: NodeModel) -> Line:
        there, here = ours.get(node.name, 0), theirs.get(node.name, 0)
        if node.facts.get("self"):
            return [("-", "faint")]
        return [
            (f"→{there}" if there else " ·", "accent" if there else "faint"),
            (" ", ""),
            (f"←{here}" if here else "", "good"),
        ]

    def meter(share: Callable[[NodeModel], float | None], width: int) -> Callable[[NodeModel], Line]:
        def drawn(node: NodeModel) -> Line:
            part = share(node)
            if part is None:
                return [(" " * width + "   -", "faint")]
            return [*draw.bar(part, width), (f"{percent(part):>4}", draw.level(part))]

        return drawn

    columns = [
        Column("NODE", name, _node_name, 0, stretches=True, letter="n"),
        Column("STATE", state, state_of_node, 1, letter="s"),
        Column("LOAD", 6, lambda node: [(number_text(node.facts.get("load")), "")], 3, right=True, letter="l"),
        Column("REGION", 8, _region, 4),
        Column("CPU", 11, meter(lambda node: node.cpu, 6), 2, letter="c"),
        Column("MEM", 5, lambda node: [(percent(node.mem), draw.level(node.mem))], 6, right=True, letter="m"),
        Column("GPU", 8, _gpus, 5, right=True, letter="g"),
        Column("GMEM", 4, lambda node: [(percent(node.gpu_mem), draw.level(node.gpu_mem))], 8, right=True),
        Column("RUN", 4, lambda node: [(number_text(node.facts.get("tasks_running")), "")], 2, right=True, letter="t"),
        Column("WAIT", 4, lambda node: [(number_text(node.facts.get("tasks_queued")), "")], 7, right=True),
        Column("FLOW", 9, flow, 9),
        Column("AGE", 7, lambda node: _age(node, now), 1, right=True, letter="a"),
    ]
    has_gpus = any(node.gpus for node in look.world.nodes.values())
    left_out = [*(() if has_gpus else ("GPU", "GMEM")), *(() if wide else ("LOAD", "REGION"))]
    return [column for column in columns if column.heading not in left_out]


def _node_name(node: NodeModel) -> Line:
    name = draw.plain(node.name)
    return [(f"{name} *", "here")] if node.facts.get("self") else [(name, "")]


def state_of_node(node: NodeModel) -> Line:
    """State in one word; drained, trouble and a missing directory take precedence over alive."""
    if node.state == "alive":
        if node.facts.get("trouble"):
            return [("trouble!", "warn bold")]
        if node.facts.get("drained"):
            return [("drained", "warn")]
        if node.facts.get("declines"):
            return [(NO_DIRECTORY, "warn")]
    word = node.state + ("?" if node.state == "suspect" else "!" if node.state == "dead" else "")
    return [(draw.plain(word), STATE_STYLES.get(node.state, "warn"))]


def _region(node: NodeModel) -> Line:
    region = str(node.facts.get("region") or "")
    if region not in REGIONS:
        return [("-", "faint")]
    return [REGIONS[region]]


def _gpus(node: NodeModel) -> Line:
    if not node.gpus:
        return [("-", "faint")]
    return [(f"{node.gpus}x", "dim"), (f"{percent(node.gpu):>5}", draw.level(node.gpu))]


def _age(node: NodeModel, now: float) -> Line:
    age_s = node.age_s(now)
    text = duration_text(age_s)
    if node.is_stale(now):
        return [(f"≈{text}", "warn")]
    return [("now" if node.facts.get("self") else text, "dim")]


def percent(share: float | None) -> str:
    """``45%``; a dash if unknown."""
    return "-" if share is None else f"{min(round(share * 100), 9999)}%"


# -- tasks -------------------------------------------------------------------------------------------------------------


def task_columns(look: ViewState, now: float) -> list[Column]:
    here = look.world.node
    rows, more_wait = look.rows("tasks"), look.world.more_wait
    has_arrays = any(task.get("array") for task in rows)
    state = len(UNREACHABLE) if any(task.get("state") == UNREACHABLE for task in rows) else STATE_CELLS

    def name_shown(task: dict[str, Any]) -> str:
        name = draw.plain(task.get("id") or "")
        if look.marked:
            name = ("*" if view_state.key_of(task) in look.marked else " ") + name
        if not has_arrays:
            return name
        mark = ("▾" if view_state.key_of(task) in look.opened else "▸") if task.get("array") else " "
        return f"{mark}{name}"

    def where(task: dict[str, Any]) -> Line:
        node, home = str(task.get("node") or ""), str(task.get("home") or "")
        if home and home != here:
            return [(f"← {draw.plain(home)}", "good")]
        if not node and (task.get("nodes") or 0) > 1:
            return [(f"{task['nodes']} nodes", "accent")]
        if not node:
            return [("-", "faint")]
        if node == here:
            return [("here", "here")]
        return [(f"→ {draw.plain(node)}", "accent")]

    return [
        Column(
            "ID",
            _longest(map(name_shown, rows), 5),
            lambda task: [(name_shown(task), "key" if view_state.key_of(task) in look.marked else "bold")],
            0,
            letter="i",
        ),
        Column("NAME", 8, lambda task: [(draw.plain(task.get("name") or ""), "")], 5, letter="n"),
        Column(
            "USER",
            min(_longest((draw.plain(task.get("user") or "") for task in rows), 4), USER_CELLS_MAX),
            lambda task: [(draw.plain(task.get("user") or ""), "dim")],
            4,
            letter="u",
        ),
        Column("STATE", state, state_of_task, 0, letter="s"),
        Column("WHERE", 9, where, 2, letter="w"),
        Column("CPU%", 5, lambda task: [_cpu_used(look, task)], 2, right=True),
        Column("MEM", 6, lambda task: [_memory_used(look, task)], 3, right=True),
        Column("TIME", 6, lambda task: [(duration_text(elapsed_s(task, now)), "")], 3, right=True, letter="t"),
        Column("EXIT", 4, lambda task: [_exit(task)], 6, right=True),
        Column("CPUS", 4, lambda task: [(number_text(task.get("cpus"), 1), "dim")], 9, right=True, letter="c"),
        Column("GPUS", 4, lambda task: [(number_text(task.get("gpus") or None, 2), "dim")], 8, right=True, letter="g"),
        Column(
            "PRIO", 4, lambda task: [(number_text(task.get("priority") or None), "dim")], 10, right=True, letter="p"
        ),
        Column("REASON", 12, lambda task: [(draw.plain(task.get("reason") or ""), "dim")], 7, stretches=True),
        Column("COMMAND", COMMAND_CELLS_MIN, lambda task: _command(task, partial=more_wait), 1, stretches=True),
    ]


def state_of_task(task: dict[str, Any]) -> Line:
    """State, with a mark if it needs attention."""
    state = str(task.get("state") or "")
    mark = "!" if state == "failed" else "?" if state == "unknown" else ""
    return [(draw.plain(state) + mark, STATE_STYLES.get(state, ""))]


def _cpu_used(look: ViewState, task: dict[str, Any]) -> Span:
    cpus, _ = look.world.usage(view_state.running(task))
    return ("-", "faint") if cpus is None else (percent(cpus), "")


def _memory_used(look: ViewState, task: dict[str, Any]) -> Span:
    _, memory = look.world.usage(view_state.running(task))
    return ("-", "faint") if memory is None else (size_text(memory).replace(" ", "").replace("iB", ""), "")


def _command(task: dict[str, Any], *, partial: bool) -> Line:
    """Command of a task; for an array, the number of members in each state comes first."""
    argv = task.get("argv")
    command = draw.plain(task.get("command") or (command_text(argv) if isinstance(argv, list) else ""))
    counts = task.get("array") or (
        {str(task.get("state")): view_state.number_in(task)} if task.get("members") else None
    )
    if not isinstance(counts, dict):
        return [(command, "")]
    return [(draw.plain(view_state.counts_text(counts, partial=partial)), "accent"), (f"  {command}", "dim")]


def _exit(task: dict[str, Any]) -> Span:
    if task.get("signal"):
        return f"s{draw.plain(task['signal'])}", "bad"
    code = task.get("exit_code")
    if code is None:
        return "-", "faint"
    return draw.plain(code), "bad" if code else "dim"


def signal_hint() -> Line:
    hint: Line = [(" send  ", "bold")]
    for letter, name in SIGNALS.items():
        hint += [(letter, "key"), (f" {name}  ", "")]
    return hint


def order_hint(pane: str) -> Line:
    orders: dict[str, tuple[str, Any]] = dict(NODE_ORDERS if pane == "nodes" else TASK_ORDERS)
    hint: Line = [(" sort by  ", "bold")]
    for letter, (name, _) in orders.items():
        hint += [(letter, "key"), (f" {name}  ", "")]
    return hint
