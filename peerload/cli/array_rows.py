"""Arrays in `ls`: members that wait, or ended well or by the user's wish, as one row; those that run or failed singly."""

from __future__ import annotations

from peerload.cli.text import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TOGETHER = ("held", "queued", "done", "cancelled")
RANGES_NAMED_MAX = 3


def gathered(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same tasks in the same order, such members of an array that are in one state as one, where its first was: ``id`` is
    their range and count, times from the first start to the last end, and what they do not have in common is left out."""
    rows: dict[object, list[dict[str, Any]]] = {}
    for number, task in enumerate(tasks):
        array, dot, member = str(task.get("id", "")).rpartition(".")
        is_member = bool(dot) and member.isdecimal() and "/" in array
        key = (array, task.get("state")) if is_member and task.get("state") in TOGETHER else number
        rows.setdefault(key, []).append(task)
    return [members[0] if len(members) == 1 else _as_one(members) for members in rows.values()]


def _as_one(members: list[dict[str, Any]]) -> dict[str, Any]:
    first = members[0]
    same = {key: value for key, value in first.items() if all(task.get(key) == value for task in members)}
    numbers = sorted(int(str(task["id"]).rpartition(".")[2]) for task in members)
    array = str(first["id"]).rpartition(".")[0]
    nodes = {task.get("node") for task in members if task.get("node")}
    starts = [task["started_at"] for task in members if task.get("started_at")]
    ends = [task["ended_at"] for task in members if task.get("ended_at")]
    return same | {
        "id": f"{array}.{ranges(numbers)}  {counted(len(numbers), 'task')}",
        "name": first.get("name"),
        "argv": first.get("argv"),
        "node": counted(len(nodes), "node") if len(nodes) > 1 else next(iter(nodes), None),
        "submitted_at": first.get("submitted_at"),
        "started_at": min(starts, default=None),
        "ended_at": max(ends, default=None),
    }


def ranges(numbers: list[int]) -> str:
    """``1-5,8``: at most the first RANGES_NAMED_MAX of them."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans[:RANGES_NAMED_MAX])
    return text + (",…" if len(spans) > RANGES_NAMED_MAX else "")
