"""The answer of `why` as lines of text: why a task waits, or why it went where it went."""

from __future__ import annotations

from typing import Any

from peerload.model.text import printable
from peerload.text import tasks
from peerload.text.format import counted, duration_text, number_text, shortened, table
from peerload.text.tasks import ENDED, NAME_WIDTH_MAX

HEADINGS = ("NODE", "CAN EVER", "NOW", "REASON")


def described(told: dict[str, Any], now: float) -> list[str]:
    """The answer as lines of text."""
    lines = _of_array(told["array"], str(told.get("id", ""))) if told.get("array") else []
    name = shortened(str(told.get("name") or ""), NAME_WIDTH_MAX)
    head = f"{printable(told.get('id', ''))} {printable(name)}"
    needs = f"needs {printable(told.get('needs') or 'nothing')}"
    if told.get("nodes"):
        lines += _waiting(told, f"{head} {needs}.", now)
    else:
        lines += _placed(told, f"{head} {needs}.", now)
    return lines


def _of_array(array: dict[str, Any], first: str) -> list[str]:
    groups = array.get("groups") or []
    lines = [f"{printable(array.get('id', ''))}: {counted(int(array.get('looked_at') or 0), 'member')}"]
    for group in groups:
        reason = f": {printable(group['reason'])}" if group.get("reason") else ""
        lines.append(f"  {group.get('tasks', 0):>7} {printable(group.get('state', ''))}{reason}")
    if array.get("more_groups"):
        lines.append(f"  and {counted(array['more_groups'], 'other reason')}")
    return [*lines, "", f"One of them, {printable(first)}:"]


def _waiting(told: dict[str, Any], head: str, now: float) -> list[str]:
    nodes = told["nodes"]
    could = told.get("could_ever") or 0
    where = f" at {printable(told['node'])}" if told.get("node") else ""
    lines = [f"{head} It waits{where}: {could} of {counted(len(nodes), 'node')} could ever run it."]
    if told.get("says"):
        lines.append(f"  {printable(told['says'])}")
    rows = [(node["node"], _yes(node["can_ever"]), _now(node), node["reason"]) for node in nodes]
    lines += [f"  {line}" for line in table(HEADINGS, rows)]
    if told.get("oldest_node"):
        freshest, oldest = told["freshest_s"], told["oldest_s"]
        lines.append(f"Facts: freshest {freshest:.1f} s old, oldest {oldest:.1f} s ({printable(told['oldest_node'])}).")
    change = told.get("change")
    if change:
        lines.append(
            f"{printable(change['words'])[:1].upper()}{printable(change['words'])[1:]} it would start now on {printable(change['node'])}."
        )
    lines += _decided(told.get("decision"), now)
    return lines


def _placed(told: dict[str, Any], head: str, now: float) -> list[str]:
    state, node, since = str(told.get("state") or ""), told.get("node"), told.get("since")
    at = f" on {printable(node)}" if node else ""
    for_s = duration_text(now - since) if isinstance(since, (int, float)) else "-"
    if state in ENDED:
        stands = f"It ended{at} {for_s} ago, {printable(state)}: {printable(told.get('says') or '')}"
    else:
        stands = f"It is {printable(state)}{at}, for {for_s}: {printable(told.get('says') or '')}"
    lines = [head, stands.removesuffix(": ")]
    if told.get("devices"):
        lines.append(f"  with {printable(', '.join(map(str, told['devices'])))}")
    lines += _decided(told.get("decision"), now)
    steps = told.get("steps") or []
    if steps:
        lines += [f"  {line}" for line in tasks.steps_table(steps)]
    return lines


def _decided(decision: object, now: float) -> list[str]:
    """The last decision of the policy, and the facts that it had."""
    if not isinstance(decision, dict):
        return []
    asked = [
        f"{one['node']} (load {number_text(one['load'])})" if one["load"] >= 0 else f"{one['node']} (no answer)"
        for one in decision.get("inputs") or []
    ]
    knew = f" It asked {', '.join(asked)}." if asked else ""
    chosen = f"{decision.get('choice', '')}: {decision.get('reason', '')}"
    at = decision.get("at")
    when = f" {duration_text(now - at)} ago" if at else ""
    return [f"The policy {printable(decision.get('policy', ''))} said{when}, {printable(chosen)}.{printable(knew)}"]


def _yes(value: object) -> str:
    return "?" if value is None else "yes" if value else "no"


def _now(node: dict[str, Any]) -> str:
    return "-" if node["can_ever"] is False else _yes(node["now"])
