"""View of the cluster: panes, filtered and sorted rows, the chosen row. The known members of an array are one row,
which can be expanded. The choice is stored by name: a row that moves in the table stays chosen, unless it moves to the
ended tasks."""

from __future__ import annotations

from peerload.text.tasks import array_of, as_row, command_text, is_mine, number_of, ranges
from peerload.top.model import NodeModel, TopModel, number

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any


STATE_ORDER = (
    "running", "leased", "unreachable", "unknown", "promised", "queued", "held", "ended", "failed", "cancelled", "done",
)  # fmt: skip
OVER = ("failed", "cancelled", "done")


def gathered(tasks: Iterable[dict[str, Any]], here: str) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """A row for each task, or for each array with its members among ``tasks``, in the order of the first of them. here:
    the home of these tasks; tasks of other homes are guests."""
    found: dict[str, list[dict[str, Any]]] = {}
    for task in tasks:
        name = str(task.get("id") or "")
        found.setdefault(array_of(name), []).append(task)
    return [
        (_array_row(name, some, here), [_member(task) for task in some])
        if str(some[0].get("id") or "") != name
        else (some[0], [])
        for name, some in found.items()
    ]


def number_in(task: dict[str, Any]) -> int:
    counts = task.get("array")
    return sum(counts.values()) if isinstance(counts, dict) else number_of(task)


def refs(task: dict[str, Any]) -> tuple[str, ...]:
    """References to the tasks of a row, for requests. For a guest array these are its members on this node, not the
    array."""
    return task.get("refs") or (str(task.get("id")),)


def running(task: dict[str, Any]) -> tuple[str, ...]:
    if task.get("array"):
        return tuple(task.get("members_running") or ())
    return (str(task.get("id")),) if task.get("state") == "running" else ()


def key_of(task: dict[str, Any]) -> str:
    """Stable name of a row, since its id may be a list of ranges that changes."""
    return str(task.get("row") or task.get("id") or "")


def counts_text(counts: dict[str, int], *, partial: bool = False) -> str:
    """Text such as ``4 running  180 queued``; partial: more tasks wait than are listed."""
    return " ".join(
        f"{count}{'+' if partial and state in ('queued', 'held') else ''} {state}" for state, count in counts.items()
    )


def is_over(task: dict[str, Any]) -> bool:
    return task.get("state") in OVER


def _member(task: dict[str, Any]) -> dict[str, Any]:
    if number_of(task) == 1:
        return task
    name = array_of(str(task.get("id")))
    return as_row(task) | {"id": f"{name}.{ranges(task['members'].get('spans'))}", "row": f"{name} {task.get('state')}"}


def _rank(state: str) -> int:
    return STATE_ORDER.index(state) if state in STATE_ORDER else len(STATE_ORDER)


def _array_row(name: str, members: list[dict[str, Any]], here: str) -> dict[str, Any]:
    """Row of an array; its state is that of the member nearest to running."""
    counts: dict[str, int] = {}
    for task in sorted(members, key=lambda task: _rank(str(task.get("state") or ""))):
        state = str(task.get("state") or "")
        counts[state] = counts.get(state, 0) + number_of(task)
    state = next(iter(counts))
    first = members[0]
    home = str(first.get("home") or "")
    nodes = {str(task["node"]) for task in members if task.get("node") and (task.get("state") == state)}
    started = [number(task.get("started_at")) for task in members if task.get("started_at")]
    argv = first.get("argv")
    return {
        "id": name,
        "array": counts,
        "refs": (name,) if not home or home == here else tuple(str(task.get("id")) for task in members),
        "members_running": tuple(str(task.get("id")) for task in members if task.get("state") == "running"),
        "name": first.get("name"),
        "user": first.get("user"),
        "state": state,
        "home": home,
        "node": next(iter(nodes)) if len(nodes) == 1 else None,
        "nodes": len(nodes),
        "cpus": first.get("cpus"),
        "mem_bytes": first.get("mem_bytes"),
        "gpus": first.get("gpus"),
        "priority": first.get("priority"),
        "submitted_at": first.get("submitted_at"),
        "started_at": min(started, default=None),
        "ended_at": max(number(task.get("ended_at")) for task in members) or None if state in OVER else None,
        "command": first.get("command") or (command_text(argv) if isinstance(argv, list) else ""),
        "reason": first.get("reason") if len(members) == 1 else "",
    }


PANES = {"1": "cluster", "2": "nodes", "3": "tasks", "4": "detail", "5": "events"}
TABLES = ("nodes", "tasks")
FILTER_CHARS_MAX = 200
MEASURED_MAX = 64
"""Maximum number of tasks whose usage is requested, the limit of one answer."""

NODE_ORDERS: dict[str, tuple[str, Callable[[NodeModel], object]]] = {
    "n": ("name", lambda node: node.name),
    "s": ("state", lambda node: (node.state, node.name)),
    "l": ("load", lambda node: -number(node.facts.get("load"))),
    "c": ("cpu", lambda node: -(node.cpu or 0.0)),
    "m": ("memory", lambda node: -(node.mem or 0.0)),
    "g": ("gpu", lambda node: (-(node.gpu or 0.0), -node.gpus)),
    "t": ("tasks", lambda node: -number(node.facts.get("tasks_running"))),
    "a": ("age", lambda node: -(number(node.facts.get("age_s")) - node.told_at)),
}
"""Letter → (name of the sort order, sort key). Numbers are sorted in descending order."""

TASK_ORDERS: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "s": ("state", lambda task: (_state_rank(task), _ended_last(task), *id_key(str(task.get("id") or "")))),
    "i": ("id", lambda task: id_key(str(task.get("id") or ""))),
    "n": ("name", lambda task: str(task.get("name") or "")),
    "u": ("user", lambda task: str(task.get("user") or "")),
    "w": ("where", lambda task: (not task.get("node"), str(task.get("node") or ""))),
    "h": ("home", lambda task: str(task.get("home") or "")),
    "t": ("time", lambda task: -number(task.get("started_at") or task.get("submitted_at"))),
    "c": ("cpus", lambda task: -number(task.get("cpus"))),
    "g": ("gpus", lambda task: -number(task.get("gpus"))),
    "p": ("priority", lambda task: -number(task.get("priority"))),
}
ORDERS: dict[str, dict[str, tuple[str, Callable[[Any], object]]]] = {"nodes": NODE_ORDERS, "tasks": TASK_ORDERS}


class ViewState:
    """View of a model. Rows are computed on demand, once for each sample."""

    def __init__(self, world: TopModel) -> None:
        self.world = world
        self.hidden: set[str] = set()
        self.wanted_first: list[str] = []
        """Panes that the user showed by number, the last one first. They get space before others."""
        self.focus = "tasks"
        self.zoomed = False
        self.filters = dict.fromkeys(TABLES, "")
        self.orders = {"nodes": "n", "tasks": "s"}
        self.backwards = dict.fromkeys(TABLES, False)
        self.chosen = dict.fromkeys(TABLES, "")
        self.tops = dict.fromkeys(TABLES, 0)
        self.heights = dict.fromkeys(TABLES, 0)
        """The number of visible rows at the last drawing."""
        self.events_up = 0
        """The number of newer events below the visible ones; 0: the pane follows new events."""
        self.subject = "tasks"
        """The table whose chosen row the detail pane shows."""
        self.opened: set[str] = set()
        """Arrays whose members are shown as rows of their own."""
        self.marked: set[str] = set()
        """Rows of tasks to which an action applies together. A row that is not shown is not marked."""
        self.own: tuple[str, ...] = ()
        """The user names of tasks that belong to the viewer."""
        self.is_mine = False
        """True if only the viewer's own tasks are shown."""
        self.paused_at = 0.0
        """Time at which the view was paused; 0.0: it is not paused."""
        self.numbers = dict.fromkeys(TABLES, 0)
        """The number of nodes or tasks that the rows stand for."""
        self._rows: dict[str, tuple[object, list[Any]]] = {}

    # -- rows ----------------------------------------------------------------------------------------------------------

    def rows(self, pane: str) -> list[Any]:
        """Nodes, or tasks of this home and guests, filtered and sorted."""
        mark = (
            self.world.turns[pane],
            self.filters[pane],
            self.orders[pane],
            self.backwards[pane],
            frozenset(self.opened),
            self.is_mine,
        )
        known = self._rows.get(pane)
        if known is not None and known[0] == mark:
            return known[1]
        rows = self._computed(pane)
        self._rows[pane] = mark, rows
        self._keep_chosen(pane, known[1] if known else [], rows)
        if pane == "tasks" and self.marked:
            self.marked.intersection_update(map(name_of, rows))
        return rows

    def _computed(self, pane: str) -> list[Any]:
        world = self.world
        words = self.filters[pane].lower().split()
        key = ORDERS[pane][self.orders[pane]][1]
        backwards = self.backwards[pane]
        if pane == "nodes":
            nodes = sorted(world.nodes.values(), key=lambda node: node.name)
            kept = [node for node in nodes if matches(words, node_words(node))]
            kept.sort(key=key, reverse=backwards)  # type: ignore[arg-type]
            self.numbers[pane] = len(kept)
            return kept
        known = {**world.ended, **world.guests, **world.tasks}
        tasks = [task for _, task in sorted(known.items(), key=lambda pair: id_key(pair[0]))]
        if self.is_mine:
            tasks = [task for task in tasks if is_mine(task, self.own) and not world.is_guest(task)]
        if words:
            tasks = [task for task in tasks if matches(words, task_words(task, is_remote=world.is_guest(task)))]
        found = gathered(tasks, world.node)
        self.numbers[pane] = sum(number_in(row) for row, _ in found)
        found.sort(key=lambda pair: key(pair[0]), reverse=backwards)  # type: ignore[arg-type,return-value]
        rows: list[Any] = []
        for row, members in found:
            rows.append(row)
            if members and key_of(row) in self.opened:
                rows += sorted(members, key=key, reverse=backwards)  # type: ignore[arg-type]
        return rows

    def _keep_chosen(self, pane: str, before: list[Any], rows: list[Any]) -> None:
        """Keep the same row chosen. If it is gone, or has moved to the ended tasks, choose the row that is now in its place."""
        names = [name_of(row) for row in rows]
        chosen = self.chosen[pane]
        if not names:
            return
        place = next((place for place, row in enumerate(before) if name_of(row) == chosen), 0)
        if chosen in names:
            moves = pane == "tasks" and self.orders[pane] == "s" and before
            now = rows[names.index(chosen)]
            if not moves or not is_over(now) or is_over(before[place]) or name_of(before[place]) != chosen:
                return
        self.chosen[pane] = names[min(place, len(names) - 1)]

    # -- the choice ----------------------------------------------------------------------------------------------------

    def place(self, pane: str) -> int:
        """Index of the chosen row; 0 if there is none."""
        rows, chosen = self.rows(pane), self.chosen[pane]
        return next((place for place, row in enumerate(rows) if name_of(row) == chosen), 0)

    def choose(self, pane: str, place: int) -> None:
        rows = self.rows(pane)
        if rows:
            self.chosen[pane] = name_of(rows[max(0, min(place, len(rows) - 1))])
        self.subject = pane

    def move(self, by: int) -> None:
        """Choose a row further down (up, if negative), or scroll the events."""
        if self.focus in TABLES:
            self.choose(self.focus, self.place(self.focus) + by)
        elif self.focus == "events":
            self.events_up = max(0, min(self.events_up - by, max(len(self.world.events) - 1, 0)))

    def window(self, pane: str, height: int) -> tuple[int, list[Any]]:
        """The rows for ``height`` lines, the chosen one among them, and the index of the first."""
        rows, place = self.rows(pane), self.place(pane)
        self.heights[pane] = height
        top = min(self.tops[pane], max(len(rows) - height, 0))
        if place < top:
            top = place
        elif place >= top + height:
            top = place - height + 1
        self.tops[pane] = max(top, 0)
        return self.tops[pane], rows[self.tops[pane] : self.tops[pane] + max(height, 0)]

    def open(self) -> bool:
        """Expand or collapse the chosen array, or the array of the chosen task. False if there is no array."""
        task = self.task()
        name = array_of(str(task.get("id") or "")) if task is not None else ""
        if task is None or self.focus != "tasks" or (not task.get("array") and name == str(task.get("id") or "")):
            return False
        self.opened ^= {name}
        if name not in self.opened:
            self.chosen["tasks"] = name
        return True

    def pause(self, now: float) -> None:
        self.paused_at = 0.0 if self.paused_at else now

    def mark(self) -> None:
        """Mark or unmark the chosen task, and choose the next one."""
        task = self.task()
        if task is not None and self.focus == "tasks":
            self.marked ^= {name_of(task)}
            self.move(1)

    def acted_on(self) -> list[dict[str, Any]]:
        """The marked tasks, else the chosen one, without members of an array that is included itself."""
        rows = [row for row in self.rows("tasks") if name_of(row) in self.marked]
        if rows:
            return [row for row in rows if array_of(name_of(row)) not in self.marked - {name_of(row)}]
        task = self.task()
        return [] if task is None else [task]

    def measured(self) -> dict[str, list[str]]:
        """Tasks whose usage is requested, by node: the chosen one first, then running ones that were visible."""
        task = self.task()
        top = self.tops["tasks"]
        rows = ([task] if task is not None else []) + self.rows("tasks")[top : top + max(self.heights["tasks"], 0)]
        names = dict.fromkeys(name for row in rows for name in running(row))
        found: dict[str, list[str]] = {}
        for name in list(names)[:MEASURED_MAX]:
            node = (self.world.task(name) or {}).get("node")
            if node:
                found.setdefault(str(node), []).append(name)
        return found

    def task(self) -> dict[str, Any] | None:
        rows = self.rows("tasks")
        return rows[self.place("tasks")] if rows else None

    def node(self) -> NodeModel | None:
        rows = self.rows("nodes")
        return rows[self.place("nodes")] if rows else None

    # -- what the keys do ----------------------------------------------------------------------------------------------

    def sort(self, pane: str, letter: str) -> bool:
        """Sort by the column of a letter; reverse the order if it is that column already. False for an unknown
        letter."""
        if letter not in ORDERS.get(pane, ()):
            return False
        self.backwards[pane] = self.orders[pane] == letter and not self.backwards[pane]
        self.orders[pane] = letter
        return True

    def filter(self, pane: str, text: str) -> None:
        """Filter rows by words, all of which must occur; ``key:word`` matches one fact, ``!word`` excludes rows."""
        self.filters[pane] = text[:FILTER_CHARS_MAX]
        self.tops[pane] = 0

    def toggle(self, pane: str, *, is_visible: bool) -> None:
        """Hide a visible pane; show a hidden one with priority over all others."""
        if is_visible:
            self.hidden.add(pane)
            if pane in self.wanted_first:
                self.wanted_first.remove(pane)
        else:
            self.hidden.discard(pane)
            self.wanted_first = [pane, *(name for name in self.wanted_first if name != pane)]

    def refocus(self, visible: list[str], by: int = 0) -> None:
        """Focus the next pane (the previous one if ``by`` is negative); with 0 keep the focus if possible."""
        possible = [pane for pane in ("nodes", "tasks", "events") if pane in visible]
        if not possible:
            return
        if self.focus not in possible:
            self.focus = possible[0] if by >= 0 else possible[-1]
        elif by:
            self.focus = possible[(possible.index(self.focus) + by) % len(possible)]
        if self.focus in TABLES:
            self.subject = self.focus


def name_of(row: Any) -> str:  # noqa: ANN401 -- a node or a task
    return row.name if isinstance(row, NodeModel) else key_of(row)


def id_key(name: str) -> tuple[str, int, int]:
    """Sort key of ``ws1/42.7``: its numbers as numbers."""
    home, _, rest = name.partition("/")
    counter, _, member = rest.partition(".")
    return home, int(counter) if counter.isdecimal() else 0, int(member) if member.isdecimal() else 0


def matches(words: list[str], facts: dict[str, str]) -> bool:
    return all(_has(word, facts) for word in words)


def _has(word: str, facts: dict[str, str]) -> bool:
    if word.startswith("!") and len(word) > 1:
        return not _has(word[1:], facts)
    key, colon, value = word.partition(":")
    if colon and key in facts:
        return value in facts[key]
    return any(word in fact for fact in facts.values())


def node_words(node: NodeModel) -> dict[str, str]:
    """Facts of a node that a filter matches, in lower case."""
    facts = node.facts
    labels = facts.get("labels")
    told = {
        "node": node.name,
        "state": f"{node.state}{' drained' if facts.get('drained') else ''}{' no directory' if facts.get('declines') else ''}",
        "region": str(facts.get("region") or ""),
        "label": " ".join(map(str, labels)) if isinstance(labels, list) else "",
        "trouble": str(facts.get("trouble") or ""),
        "gpu": "gpu" if node.gpus else "",
    }
    return {key: value.lower() for key, value in told.items()}


def task_words(task: dict[str, Any], *, is_remote: bool) -> dict[str, str]:
    argv = task.get("argv")
    told = {
        "id": str(task.get("id") or ""),
        "name": str(task.get("name") or ""),
        "state": str(task.get("state") or ""),
        "node": str(task.get("node") or ""),
        "home": str(task.get("home") or ""),
        "user": str(task.get("user") or ""),
        "command": str(task.get("command") or "") or " ".join(map(str, argv if isinstance(argv, list) else ())),
        "reason": str(task.get("reason") or ""),
        "remote": "remote" if is_remote else "",
    }
    return {key: value.lower() for key, value in told.items()}


def _state_rank(task: dict[str, Any]) -> int:
    state = str(task.get("state") or "")
    order = STATE_ORDER
    if state in OVER:
        return len(order)
    return order.index(state) if state in order else len(order) - 1


def _ended_last(task: dict[str, Any]) -> float:
    return -number(task.get("ended_at"))
