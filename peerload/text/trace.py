"""The waterfall of one task: spans from its history at home, and from the events of the nodes where its attempts were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peerload.model.text import printable
from peerload.text.format import duration_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

BAR_COLUMNS = 32
_FINAL = ("done", "failed", "cancelled")
_AT_HOME = {"held": "held", "queued": "waits", "leased": "handed over", "running": "runs", "parked": "runs"}
_ELSEWHERE = {
    "accepted": "waits there",
    "queued": "waits there",
    "started": "starts",
    "running": "runs",
    "thawed": "runs",
    "frozen": "frozen",
    "parked": "runs",
    "ended": "output home",
}
"""Name of the span that begins with each state of an attempt; any other state ends a span."""
_CHORES = {"saved": "output file written", "notified": "notified", "abandoned": "given up", "postponed": "postponed"}


def executors_of(task: Mapping[str, Any]) -> list[str]:
    """The other nodes that had attempts of a task, as `show` tells it."""
    nodes = dict.fromkeys(step["node"] for step in task["history"] if step["node"])
    return [node for node in nodes if node != task["home"]]


def spans_of(task: Mapping[str, Any], events: Mapping[str, list[dict[str, Any]]], now: float) -> list[dict[str, Any]]:
    """Spans `name node began ended attempt reason own_clock`, by their beginning; ended is null while it goes on, and began for a
    moment. task: as `show` tells it; events: of the home (chores) and of each executor (attempts)."""
    home, steps = task["home"], task["history"]
    found = [
        _span(_AT_HOME.get(step["state"], step["state"]), home, step, step if step["state"] in _FINAL else after)
        for step, after in zip(steps, [*steps[1:], None], strict=True)
    ]
    if decision := task.get("decision"):
        asked = ", ".join(f"{one['node']} (load {one['load']:g})" for one in decision["inputs"]) or "nobody"
        step = {"at": decision["at"], "reason": f"probed {asked}: {decision['reason']}"}
        found.append(_span("searched", home, step, step))
    chores = [event for event in events.get(home, ()) if event["what"] == "chore"]
    found += [_span(_CHORES.get(event["state"], event["state"]), home, event, event) for event in chores]
    came_at = task["started_at"]
    for node in executors_of(task):
        attempts: dict[int, list[dict[str, Any]]] = {}
        for event in events.get(node, ()):
            if event["what"] == "attempt":
                attempts.setdefault(event["attempt"] or 0, []).append(event)
        for number, of_attempt in attempts.items():
            found += _of_attempt(node, of_attempt)
            if (node, number) == (task["node"], task["attempt"]):
                came_at = of_attempt[0]["at"]
    if came_at and (staged_s := (task.get("files") or {}).get("staging_s") or 0.0):
        found.append(_span("files staged", task["node"], {"at": came_at - staged_s}, {"at": came_at}))
    for span in found:
        span["own_clock"] = span["node"] == home
    return sorted(found, key=lambda span: (span["began"], span["ended"] or now))


def _of_attempt(node: str, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The spans of one attempt, from what its node noted; a wait of no length is left out."""
    found = []
    for event, after in zip(events, [*events[1:], None], strict=True):
        name = _ELSEWHERE.get(event["state"])
        if name is None and event["state"] != "delivered":
            found.append(_span(event["state"], node, event, event))
        elif name and (after is None or event["state"] != "accepted" or after["at"] > event["at"]):
            found.append(_span(name, node, event, after))
    return found


def _span(name: str, node: str, first: Mapping[str, Any], last: Mapping[str, Any] | None) -> dict[str, Any]:
    ended = None if last is None else max(last["at"], first["at"])
    facts = {"attempt": first.get("attempt") or None, "reason": first.get("reason") or ""}
    return {"name": name, "node": node, "began": first["at"], "ended": ended, **facts}


def lines_of(task: Mapping[str, Any], spans: list[dict[str, Any]], missing: Iterable[str], now: float) -> list[str]:
    """The waterfall as text."""
    first = min((span["began"] for span in spans), default=now)
    last = max([span["ended"] or now for span in spans] + [first + 1e-6])
    trace = task.get("trace")
    told = [f"{task['id']}  {printable(task['name'])}  {task['state']}  {duration_text(last - first)}"]
    if trace:
        told.append(f"trace {trace['trace_id']}, span {trace['span_id'] or '-'} of {trace['parent_id']}")
    width = max((len(span["node"]) for span in spans), default=0) + 1
    for span in spans:
        began, ended = span["began"] - first, (span["ended"] or now) - first
        left = min(int(began / (last - first) * BAR_COLUMNS), BAR_COLUMNS - 1)
        right = max(int(ended / (last - first) * BAR_COLUMNS), left + 1)
        mark = "|" if ended == began else "=" * (right - left)
        length = "" if ended == began else duration_text(ended - began) + ("" if span["ended"] else " …")
        node = span["node"] + ("" if span["own_clock"] else "~")
        words = f"{span['name']}: {printable(span['reason'])}" if span["reason"] else span["name"]
        told.append(
            f"{began:9.3f} s  {length:>9}  {node:{width}} [{' ' * left}{mark:{BAR_COLUMNS - left}}]  {words}".rstrip()
        )
    if any(not span["own_clock"] for span in spans):
        told.append("~  by the clock of that node, which may differ")
    return told + [f"{node} does not answer: what happened there is missing" for node in missing]
