"""Arrays as rows: the members of one array that are known are one row, which can be opened."""

from __future__ import annotations

from peerload.text.tasks import array_of, as_row, command_text, number_of, ranges
from peerload.top.model import number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

STATE_ORDER = ("running", "leased", "unknown", "promised", "queued", "held", "ended", "failed", "cancelled", "done")
OVER = ("failed", "cancelled", "done")


def gathered(tasks: Iterable[dict[str, Any]], here: str) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each task, or each array with those of its members that are among ``tasks``, in the order of the first of them. here:
    the node whose tasks these are, besides guests."""
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
    """How many tasks a row stands for."""
    counts = task.get("array")
    return sum(counts.values()) if isinstance(counts, dict) else number_of(task)


def refs(task: dict[str, Any]) -> tuple[str, ...]:
    """The names by which the agent is asked for what a row stands for. A guest's array is named by its members: the others
    are not here."""
    return task.get("refs") or (str(task.get("id")),)


def running(task: dict[str, Any]) -> tuple[str, ...]:
    """The tasks that run, of those that a row stands for."""
    if task.get("array"):
        return tuple(task.get("members_running") or ())
    return (str(task.get("id")),) if task.get("state") == "running" else ()


def key_of(task: dict[str, Any]) -> str:
    """The name of a row that stays while its id, which may be a list of ranges, changes."""
    return str(task.get("row") or task.get("id") or "")


def counts_text(counts: dict[str, int], *, partial: bool = False) -> str:
    """``4 running 180 queued``; partial: of those that wait there are more than are known."""
    return " ".join(
        f"{count}{'+' if partial and state in ('queued', 'held') else ''} {state}" for state, count in counts.items()
    )


def is_over(task: dict[str, Any]) -> bool:
    """True if all that a row stands for has ended."""
    return task.get("state") in OVER


def _member(task: dict[str, Any]) -> dict[str, Any]:
    if number_of(task) == 1:
        return task
    name = array_of(str(task.get("id")))
    return as_row(task) | {"id": f"{name}.{ranges(task['members'].get('spans'))}", "row": f"{name} {task.get('state')}"}


def _rank(state: str) -> int:
    return STATE_ORDER.index(state) if state in STATE_ORDER else len(STATE_ORDER)


def _array_row(name: str, members: list[dict[str, Any]], here: str) -> dict[str, Any]:
    """The row of an array; its state is that of the member that is nearest to running."""
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
