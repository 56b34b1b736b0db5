"""The panes as lines: what is at the top and the bottom, the cluster's bars, the events; the tables are `tables`'."""

from __future__ import annotations

from peerload.text.format import duration_text, number_text, size_text
from peerload.text.tasks import number_of
from peerload.top import lines as draw
from peerload.top import tables
from peerload.top.detail import Tail, detail_lines
from peerload.top.model import number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from peerload.top.lines import Line
    from peerload.top.model import TopModel
    from peerload.top.view_state import ViewState

LOST_AFTER_S = 3.0
"""An agent that has not been heard for so long is said to be away."""
METER_CELLS_MAX = 30
EVENT_STYLES = {
    "failed": "bad", "dead": "bad bold", "suspect": "warn", "held": "warn", "unknown": "warn bold", "cancelled": "warn",
    "running": "good", "done": "good", "alive": "good", "leased": "accent", "queued": "",
}  # fmt: skip


class Painter:
    """Draws any pane of a look. ``clock_text(at)``: a moment as the viewer's own clock shows it; readonly and ascii_only as
    asked for on the command line."""

    def __init__(self, look: ViewState, tail: Tail, *, ascii_only: bool = False, readonly: bool = False) -> None:
        self.look = look
        self.tail = tail
        self.ascii_only = ascii_only
        self.readonly = readonly

    def pane(self, name: str, width: int, height: int, now: float, clock_text: Any) -> list[Line]:  # noqa: ANN401 -- a function of a moment
        """A pane in its frame, exactly ``width`` by ``height`` cells."""
        world, look = self.look.world, self.look
        inner, room = max(width - 2, 0), max(height - 2, 0)
        match name:
            case "cluster":
                title, lines = self._title("1", "cluster"), cluster_lines(world, inner, ascii_only=self.ascii_only)
            case "nodes":
                columns = tables.node_columns(look, now, ascii_only=self.ascii_only)
                title = self._table_title("2", "nodes", len(world.nodes))
                lines = tables.table(look, "nodes", columns, inner, room, now)
            case "tasks":
                columns = tables.task_columns(look, now, ascii_only=self.ascii_only)
                title = [*self._table_title("3", "tasks", _all_tasks(world)), *_counts(world)]
                lines = tables.table(look, "tasks", columns, inner, room, now)
                if not world.tasks and not world.guests and not world.ended:
                    lines.append([("  no tasks yet: ", "dim"), ("peerload submit CMD", "accent")])
            case "detail":
                title = self._title("4", "detail")
                lines = detail_lines(look, self.tail, inner, room, now, clock_text, ascii_only=self.ascii_only)
            case _:
                title = self._title("5", "events")
                if look.events_up:
                    title = [*title, (f"  {look.events_up} newer below", "warn")]
                lines = event_lines(look, inner, room, clock_text)
        drawn = draw.framed(title, lines, width, height, focus=look.focus == name, ascii_only=self.ascii_only)
        if self.ascii_only:
            drawn = [draw.in_ascii(line) for line in drawn]
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

    # -- the first and the last line -----------------------------------------------------------------------------------

    def header(self, width: int, now: float, clock_text: Any) -> Line:  # noqa: ANN401 -- a function of a moment
        """Which cluster is seen, from where; or that the agent is away."""
        world = self.look.world
        agent = world.agent
        line: Line = [(" peerload ", "brand"), (" ", "")]
        if world.lost_because:
            since = duration_text(now - world.lost_at)
            what = f"the agent is away, for {since}: {draw.plain(world.lost_because)} -- trying again"
            return draw.fitted([*line, (what, "bad bold")], width)
        if not agent:
            return draw.fitted([*line, ("asking the agent ...", "dim")], width)
        mqtt = agent.get("mqtt")
        broker = draw.plain(mqtt) if mqtt else "broker away" if agent.get("mqtt_configured") else "no broker"
        facts = [(draw.plain(agent.get("cluster") or "-"), "bold"), (f"from {draw.plain(world.node)}", "here")]
        facts += [(f"policy {draw.plain(agent.get('policy') or '-')}", ""), (broker, "" if mqtt else "dim")]
        if self.look.paused_at:
            facts.insert(0, ("paused: p goes on", "warn bold"))
        if self.readonly:
            facts.insert(0, ("read only", "warn bold"))
        for text, style in facts:
            line += [(text, style), ("   ", "")]
        clock = f"{clock_text(now)} "
        return [*draw.fitted(line, max(width - len(clock), 0)), (clock, "dim")] if width > len(clock) else []


def cluster_lines(world: TopModel, width: int, *, ascii_only: bool) -> list[Line]:
    """Four bars with the sums and how they were, in two columns; how many nodes and tasks there are."""
    sums, series = world.sums, world.cluster
    half = (width - 2) // 2
    cpu = f"{number_text(sums.get('cpus_busy'), 1)} / {number_text(sums.get('cpus'))}"
    memory = sizes_text(sums.get("mem_used_bytes"), sums.get("mem_bytes"))
    gpu = gpu_memory = ""
    if sums.get("gpus"):
        gpu = f"{number_text(sums['gpu_busy'], 1)} / {number_text(sums['gpus'])}"
        gpu_memory = sizes_text(sums["gpu_mem_used"], sums["gpu_mem_bytes"])

    def meter(label: str, key: str, says: str, size: int) -> Line:
        return _meter(label, series[key], says, size, ascii_only=ascii_only)

    rest = width - half - 2
    first = [*meter("cpu", "cpu", cpu, half), ("  ", "")]
    second = [*meter("mem", "mem", memory, half), ("  ", "")]
    if sums.get("gpus"):
        first += meter("gpu", "gpu", gpu, rest)
        second += meter("gmem", "gpu_mem", gpu_memory, rest)
    else:
        first += [(draw.padded("gpu", 5), "bold"), ("no node has any", "dim")]
    return [first, second, _facts(world)]


def sizes_text(part: float | None, whole: float | None) -> str:
    """``4.1 / 70.6 GiB``, both in the unit that fits the whole."""
    amount, unit = size_text(whole or 0.0).split()
    factor = float(amount) / whole if whole else 0.0
    return f"{number_text((part or 0.0) * factor, 1)} / {number_text(float(amount), 1)} {unit}"


def _meter(label: str, series: Any, says: str, width: int, *, ascii_only: bool) -> Line:  # noqa: ANN401 -- a Series
    """``cpu ■■■■■■■■ 45%  232 / 512 ▁▂▃``, exactly ``width`` cells."""
    share = series.now
    text_cells = 19 if width >= 46 else 0  # noqa: PLR2004 -- narrower, bar and percentage are enough
    room = width - 5 - 6 - text_cells - (1 if text_cells else 0)
    bar_cells = max(min(room * 2 // 3 if room > 18 else room, METER_CELLS_MAX), 0)  # noqa: PLR2004 -- room for both
    spark_cells = max(room - bar_cells - 1, 0)
    line: Line = [(draw.padded(label, 5), "bold")]
    line += draw.bar(share, bar_cells, ascii_only=ascii_only)
    line.append((f"{tables.percent(share):>5} ", draw.level(share)))
    if text_cells:
        line.append((draw.padded(f" {says}", text_cells + 1), "dim"))
    if spark_cells > 2:  # noqa: PLR2004 -- fewer tell nothing
        line.append((" " + draw.sparkline(series, spark_cells, ascii_only=ascii_only), "accent"))
    return draw.fitted(line, width)


def _facts(world: TopModel) -> Line:
    """Nodes by state and by region, tasks by what they do."""
    states: dict[str, int] = {}
    regions: dict[str, int] = {}
    for node in world.nodes.values():
        states[node.state] = states.get(node.state, 0) + 1
        if node.state == "alive":
            region = str(node.facts.get("region") or "")
            regions[region] = regions.get(region, 0) + 1
    line: Line = [("nodes ", "bold")]
    for state in ("alive", "suspect", "dead", "revoked", "left"):
        if states.get(state) or state == "alive":
            line += [(f"{states.get(state, 0)} {state}", tables.STATE_STYLES[state]), (" ", "")]
    line.append((" load " if any(map(regions.get, tables.REGIONS)) else "", "bold"))
    for region, word in (("underloaded", "under"), ("normal", "normal"), ("overloaded", "over")):
        if regions.get(region):
            line += [(f"{regions[region]} {word}", tables.REGIONS[region][2]), (" ", "")]
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


def event_lines(look: ViewState, width: int, height: int, clock_text: Any) -> list[Line]:  # noqa: ANN401 -- a function of a moment
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
