"""The panes: where each is, for any size of terminal, and what is in it, as lines."""

from __future__ import annotations

from typing import NamedTuple

from peerload.text.format import duration_text, number_text, size_text
from peerload.text.tasks import number_of
from peerload.top import lines as draw
from peerload.top import tables
from peerload.top.detail import Tail, detail_lines
from peerload.top.model import number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from peerload.top.lines import Line
    from peerload.top.model import Series, TopModel
    from peerload.top.view_state import ViewState

METER_CELLS_MAX = 30
EVENT_STYLES = {
    "failed": "bad", "dead": "bad bold", "suspect": "warn", "held": "warn", "unknown": "warn bold", "cancelled": "warn",
    "running": "good", "done": "good", "alive": "good", "leased": "accent", "queued": "",
}  # fmt: skip


WIDE = 112
"""From this width on the detail stands at the right."""
CLUSTER_HEIGHT = 5
HEIGHTS_MIN = {"nodes": 5, "tasks": 5, "detail": 6, "events": 4}
TASKS_HEIGHT = 12
"""So many lines the tasks have before other panes have any, where there is not room for all."""
WEIGHTS = {"nodes": 3, "tasks": 4, "detail": 3, "events": 2}
IMPORTANCE = ("tasks", "nodes", "cluster", "detail", "events")
"""Panes in the order in which they get room."""


class Place(NamedTuple):
    """Of a pane, in cells."""

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
    """The places of the visible panes within ``width`` by ``height`` cells. ``wanted_first`` have room before others;
    ``zoomed``: this one alone; nodes: how many there are, since few need not much room."""
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
    """Panes one below the other, in the order of their numbers → (top, height) of those that there is room for."""
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


class Painter:
    """Draws the panes of a view. ``clock_text(at)``: a moment as the viewer's own clock shows it; the flags as on the command line."""

    def __init__(
        self,
        look: ViewState,
        tail: Tail,
        clock_text: Callable[[float], str],
        *,
        ascii_only: bool = False,
        readonly: bool = False,
        wide: bool = False,
    ) -> None:
        self.look = look
        self.tail = tail
        self.ascii_only = ascii_only
        self._clock_text = clock_text
        self._readonly = readonly
        self._wide = wide

    def plainer(self, line: Line) -> Line:
        """The line as the terminal can show it."""
        return draw.in_ascii(line) if self.ascii_only else line

    def pane(self, name: str, width: int, height: int, now: float) -> list[Line]:
        """A pane in its frame, exactly ``width`` by ``height`` cells."""
        world, look = self.look.world, self.look
        inner, room = max(width - 2, 0), max(height - 2, 0)
        match name:
            case "cluster":
                title, lines = self._title("1", "cluster"), cluster_lines(world, inner, wide=self._wide)
            case "nodes":
                columns = tables.node_columns(look, now, wide=self._wide)
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
        """Which cluster is seen, from where; or that the agent is away."""
        world = self.look.world
        agent = world.agent
        line: Line = [(" peerload ", "brand"), (" ", "")]
        if world.lost_because:
            since = duration_text(now - world.lost_at)
            what = f"the agent is away, for {since}: {draw.plain(world.lost_because)} -- trying again"
            return self.plainer(draw.fitted([*line, (what, "bad bold")], width))
        if not agent:
            return self.plainer(draw.fitted([*line, ("asking the agent ...", "dim")], width))
        mqtt = agent.get("mqtt")
        broker = draw.plain(mqtt) if mqtt else "broker away" if agent.get("mqtt_configured") else "no broker"
        facts = [(draw.plain(agent.get("cluster") or "-"), "bold"), (f"from {draw.plain(world.node)}", "here")]
        facts += [(f"policy {draw.plain(agent.get('policy') or '-')}", ""), (broker, "" if mqtt else "dim")]
        if self.look.paused_at:
            facts.insert(0, ("paused: p goes on", "warn bold"))
        if self._readonly:
            facts.insert(0, ("read only", "warn bold"))
        for text, style in facts:
            line += [(text, style), ("   ", "")]
        clock = f"{self._clock_text(now)} "
        return (
            self.plainer([*draw.fitted(line, max(width - len(clock), 0)), (clock, "dim")]) if width > len(clock) else []
        )


def cluster_lines(world: TopModel, width: int, *, wide: bool) -> list[Line]:
    """Four bars with the sums and how they were, in two columns; how many nodes and tasks there are."""
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
    """``4.1 / 70.6 GiB``, both in the unit that fits the whole."""
    amount, unit = size_text(whole or 0.0).split()
    factor = float(amount) / whole if whole else 0.0
    return f"{number_text((part or 0.0) * factor, 1)} / {number_text(float(amount), 1)} {unit}"


def _meter(label: str, series: Series, says: str, width: int) -> Line:
    """``cpu ■■■■■■■■ 45%  232 / 512 ▁▂▃``, exactly ``width`` cells."""
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
    """Nodes by state (``wide``: and by region), tasks by what they do."""
    states: dict[str, int] = {}
    regions: dict[str, int] = {}
    for node in world.nodes.values():
        states[node.state] = states.get(node.state, 0) + 1
        if node.state == "alive" and wide:
            region = str(node.facts.get("region") or "")
            regions[region] = regions.get(region, 0) + 1
    line: Line = [("nodes ", "bold")]
    for state in ("alive", "suspect", "dead", "revoked", "left"):
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
    """The newest events that there is room for, the last at the bottom."""
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
            line.append((" a guest", "good"))
        if what == "task" and event.get("node"):
            line.append((f" on {draw.plain(event['node'])}", ""))
        if event.get("reason"):
            line.append((f"  {draw.plain(event['reason'])}", "dim"))
        lines.append(draw.fitted(line, width))
    return lines
