"""Members of an array that are one row of `ls`: what the agent tells of them together, as cells."""

from __future__ import annotations

from peerload.text.format import counted
from peerload.text.tasks import array_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RANGES_NAMED_MAX = 3


def as_row(task: dict[str, Any]) -> dict[str, Any]:
    """The task as it is listed: of one that stands for several members its id is their ranges and count."""
    members = task.get("members")
    if not isinstance(members, dict):
        return task
    count, nodes = number_of(task), _whole(members.get("nodes"))
    return task | {
        "id": f"{array_of(str(task.get('id', '')))}.{ranges(members.get('spans'))}  {counted(count, 'task')}",
        "node": counted(nodes, "node") if nodes > 1 else task.get("node"),
    }


def number_of(task: dict[str, Any]) -> int:
    """How many tasks it stands for."""
    members = task.get("members")
    return _whole(members.get("count")) if isinstance(members, dict) else 1


def ranges(spans: object) -> str:
    """``1-5,8``: at most the first RANGES_NAMED_MAX of them."""
    pairs = [span for span in spans if isinstance(span, (list, tuple))] if isinstance(spans, (list, tuple)) else []
    text = ",".join("-".join(dict.fromkeys(map(str, span))) for span in pairs[:RANGES_NAMED_MAX])
    return text + (",…" if len(pairs) > RANGES_NAMED_MAX else "")


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
