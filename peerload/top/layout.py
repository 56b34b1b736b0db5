"""Where the panes are, for any size of terminal."""

from __future__ import annotations

from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

WIDE = 112
"""From this width on the detail stands at the right."""
CLUSTER_HEIGHT = 5
HEIGHTS_MIN = {"nodes": 5, "tasks": 5, "detail": 6, "events": 4}
TASKS_HEIGHT = 12
"""So many lines the tasks have before other panes have any, where there is not room for all."""
WEIGHTS = {"nodes": 3, "tasks": 4, "detail": 3, "events": 2}
IMPORTANCE = ("tasks", "nodes", "cluster", "detail", "events")
"""Where there is not room for all, the last go first."""


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
    """Where each pane is that can be seen, within ``width`` by ``height`` cells. ``wanted_first`` have room before others;
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
