"""Tasks as text: rows, states, times, commands, members of an array that share a row; the answer to `why`; and the
waterfall of `trace`: spans from the history at home and from the events of the nodes that had attempts of the task."""

from __future__ import annotations

import os
import time

from peerload.model.text import printable
from peerload.text.format import INSTANT_S_MAX, ago_text, counted, duration_text, number_text, say, shortened, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any


ENDED = ("done", "failed", "cancelled")
REASON_WIDTH_MAX = 60
REASON_WIDTH_MIN = 16
COMMAND_WIDTH_MAX = 40
"""Width if stdout is not a terminal; on a terminal the command gets the remaining width."""
STATE_COLOURS = {
    "running": "green", "leased": "green", "done": "dim", "failed": "red", "unknown": "red", "cancelled": "yellow",
    "held": "yellow", "unreachable": "red",
}  # fmt: skip
HEADINGS = ("ID", "NAME", "STATE", "NODE", "TIME", "EXIT", "REASON")
LEFT_OUT_FIRST = ("WHEN", "EXIT", "COMMAND", "REASON", "TIME", "NODE", "NAME")
"""Columns that are dropped on a narrow terminal, in this order."""
NAME_WIDTH_MAX = 32


def elapsed_s(task: dict[str, Any], now: float) -> float | None:
    """Seconds that a task has run, or seconds since its submission if it has not started."""
    start, end = task.get("started_at") or task.get("submitted_at"), task.get("ended_at") or now
    return float(end - start) if isinstance(start, (int, float)) and isinstance(end, (int, float)) and start else None


def together(found: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """The tasks of several nodes in the order of submission, at most ``limit``: unfinished ones first, then the newest."""
    if len(found) > limit:
        found = sorted(found, key=lambda task: (task.get("state") in ENDED, -float(task.get("submitted_at") or 0)))[
            :limit
        ]
    return sorted(found, key=lambda task: float(task.get("submitted_at") or 0))


def say_missing(reply: dict[str, Any]) -> None:
    for node in reply.get("missing") or ():
        say(f"without the tasks of {node.get('node')}: {node.get('why')}", "states of the nodes:  peerload nodes")


def exit_text(task: dict[str, Any]) -> str:
    """The exit as text: ``0``, ``3``, ``signal 9``; a dash before the end."""
    if task.get("signal"):
        return f"signal {task['signal']}"
    code = task.get("exit_code")
    return "-" if code is None else str(code)


def row(task: dict[str, Any], now: float) -> list[str]:
    """The cells of `ls`: id, name, state, node, time, exit, reason."""
    return [
        str(task.get("id", "")),
        shortened(str(task.get("name") or ""), NAME_WIDTH_MAX),
        state_text(task, now),
        str(task.get("node") or "-"),
        duration_text(elapsed_s(task, now)),
        exit_text(task),
        shortened(_reason(task), REASON_WIDTH_MAX),
    ]


def state_text(task: dict[str, Any], now: float) -> str:
    """The state of a task; if its node is unreachable, for how long."""
    since = task.get("unreachable_since")
    if not isinstance(since, (int, float)) or isinstance(since, bool):
        return str(task.get("state", ""))
    return f"unreachable {max(now - since, 0.0):.0f} s"


BY_SIGNAL = "ended by signal "
"""Prefix of the reason of a task that a signal ended."""


def beyond_code(task: dict[str, Any]) -> str:
    """The reason of an ended task, without a part that only repeats the exit code or signal."""
    said = str(task.get("reason") or "").removeprefix(f"exit code {task.get('exit_code')}").removeprefix("; ")
    return "" if said.startswith(BY_SIGNAL) else said


def _reason(task: dict[str, Any]) -> str:
    """The reason of its state. For a failed task with only an exit code, the last line that it wrote to stderr."""
    reason = str(task.get("reason") or "")
    is_code = reason in ("", f"exit code {task.get('exit_code')}")
    return str(task.get("error_line") or reason) if is_code else reason


def listed_table(shown: list[dict[str, Any]], now: float, columns: int = 0) -> list[str]:
    """Tasks as lines for `ls`: the cells of `row`, a time and the command; the column of reasons only if it is not empty."""
    headings = [*HEADINGS[:-1], "WHEN", "COMMAND", HEADINGS[-1]]
    width = max(columns, COMMAND_WIDTH_MAX)
    rows = []
    for task in shown:
        *cells, reason = row(task, now)
        rows.append([*cells, when_text(task, now), command_start(task.get("argv"), width), reason])
    if rows and not any(cells[-1] for cells in rows):
        headings, rows = headings[:-1], [cells[:-1] for cells in rows]
    gives_way = ("NAME", ("COMMAND", COMMAND_WIDTH_MAX), ("REASON", REASON_WIDTH_MIN), "COMMAND", "REASON")
    paint = {"STATE": STATE_COLOURS}
    return table(headings, rows, ("TIME",), columns=columns, gives_way=gives_way, left_out=LEFT_OUT_FIRST, paint=paint)


def when_text(task: dict[str, Any], now: float) -> str:
    """The time since it ended; else since it started; else since it was submitted."""
    at = task.get("ended_at") or task.get("started_at") or task.get("submitted_at")
    return ago_text(now - at) if isinstance(at, (int, float)) and at else "-"


def instant_text(at: object) -> str:
    """A Unix time in this machine's local time; a dash if there is none."""
    if not isinstance(at, (int, float)) or not 0 < at < INSTANT_S_MAX:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def steps_table(steps: list[dict[str, Any]]) -> list[str]:
    """The history of a task's states as lines."""
    rows = [
        (instant_text(step.get("at")), step.get("state", ""), step.get("node") or "-", step.get("reason") or "")
        for step in steps
    ]
    return table(("AT", "STATE", "NODE", "REASON"), rows)


def command_text(argv: object) -> str:
    """An argv quoted for a shell, with escapes that are safe on a terminal."""
    import shlex

    return printable(shlex.join(map(str, argv))) if isinstance(argv, list) else "-"


def _is_plain(word: object) -> bool:
    return (
        isinstance(word, str) and len(word) <= COMMAND_WIDTH_MAX and word.isascii() and word.replace("-", "").isalnum()
    )


def command_start(argv: object, width: int = COMMAND_WIDTH_MAX) -> str:
    """The beginning of a command, at most ``width`` columns: a command may have a million characters."""
    if not isinstance(argv, list):
        return "-"
    if argv[:2] == ["/bin/sh", "-c"] and len(argv) == 3:  # noqa: PLR2004 -- what -s and map make of a line
        return shortened(printable(argv[2]), width)
    if argv and all(map(_is_plain, argv)) and len(text := " ".join(argv)) <= width:
        return text
    words: list[str] = []
    length = 0
    for word in argv:
        words.append(str(word)[:width])
        length += len(words[-1]) + 1
        if length > width:
            break
    is_whole = words == argv
    text = command_text(words)
    return shortened(text if is_whole else f"{text}…", width)


def own_names() -> tuple[str, ...]:
    import pwd

    own = os.getuid()
    try:
        return pwd.getpwuid(own).pw_name, str(own)
    except KeyError:
        return (str(own),)


def is_mine(task: dict[str, Any], own: tuple[str, ...] = ()) -> bool:
    """True if a task is this user's, or has no user. ``own``: the result of `own_names`, for calls with many tasks."""
    user = task.get("user")
    return user in (None, "") or str(user) in (own or own_names())


def collapsed(tasks: list[str]) -> list[str]:
    """The ids of tasks; several members of one array become one line with their number."""
    members: dict[str, list[str]] = {}
    for task in tasks:
        members.setdefault(array_of(task), []).append(task)
    return [
        printable(of[0]) if len(of) == 1 else f"{printable(array)}  {counted(len(of), 'task')}"
        for array, of in members.items()
    ]


def array_of(task: str) -> str:
    """The id without the member: `ws1/42` for `ws1/42.7`. The name of a node may contain dots."""
    node, slash, number = task.rpartition("/")
    return node + slash + number.partition(".")[0]


RANGES_NAMED_MAX = 3


def as_row(task: dict[str, Any]) -> dict[str, Any]:
    """The task as a row: if it represents several members, its id is their ranges and count."""
    members = task.get("members")
    if not isinstance(members, dict):
        return task
    count, nodes = number_of(task), _whole(members.get("nodes"))
    return task | {
        "id": f"{array_of(str(task.get('id', '')))}.{ranges(members.get('spans'))}  {counted(count, 'task')}",
        "node": counted(nodes, "node") if nodes > 1 else task.get("node"),
    }


def number_of(task: dict[str, Any]) -> int:
    members = task.get("members")
    return _whole(members.get("count")) if isinstance(members, dict) else 1


def ranges(spans: object) -> str:
    """Ranges as text, such as ``1-5,8``: at most the first RANGES_NAMED_MAX."""
    pairs = [span for span in spans if isinstance(span, (list, tuple))] if isinstance(spans, (list, tuple)) else []
    text = ",".join("-".join(dict.fromkeys(map(str, span))) for span in pairs[:RANGES_NAMED_MAX])
    return text + (",…" if len(pairs) > RANGES_NAMED_MAX else "")


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


WHY_HEADINGS = ("NODE", "CAN EVER", "NOW", "REASON")


def why_lines(told: dict[str, Any], now: float) -> list[str]:
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
    where = f" in the queue of {printable(told['node'])}" if told.get("node") else ""
    may = sum(node["can_ever"] is None for node in nodes)
    also = f", {may} may" if may else ""
    lines = [f"{head} It waits{where}: {could} of {counted(len(nodes), 'node')} could ever run it{also}."]
    if told.get("says"):
        lines.append(f"  {printable(told['says'])}")
    lines += [f"  {line}" for line in table(WHY_HEADINGS, verdict_rows(nodes))]
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


def verdict_rows(nodes: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each node: whether it could ever run a task, whether now, and why not."""
    return [(node["node"], _yes(node["can_ever"]), _now(node), node["reason"]) for node in nodes]


def _placed(told: dict[str, Any], head: str, now: float) -> list[str]:
    state, node, since = str(told.get("state") or ""), told.get("node"), told.get("since")
    at = f" on {printable(node)}" if node else ""
    for_s = duration_text(now - since) if isinstance(since, (int, float)) else "-"
    if state in ENDED:
        says = str(told.get("says") or "")
        stands = f"It ended{at} {for_s} ago, {printable(state)}: {printable(says if says != state else '')}"
    else:
        stands = f"It is {printable(state)}{at}, for {for_s}: {printable(told.get('says') or '')}"
    lines = [head, stands.removesuffix(": ")]
    if told.get("devices"):
        lines.append(f"  with {printable(', '.join(map(str, told['devices'])))}")
    lines += _decided(told.get("decision"), now)
    steps = told.get("steps") or []
    if steps:
        lines += [f"  {line}" for line in steps_table(steps)]
    return lines


def _decided(decision: object, now: float) -> list[str]:
    """The last decision of the policy, and its inputs."""
    if not isinstance(decision, dict):
        return []
    asked = [
        f"{one['node']} (load {number_text(one['load'])})" if one["load"] >= 0 else f"{one['node']} (no answer)"
        for one in decision.get("inputs") or []
    ]
    knew = f" It asked {', '.join(asked)}." if asked else ""
    if costs := decision.get("compared"):
        joules = [f"{one['node']} {_cost_text(one)}" for one in costs]
        knew += f" It compared {', '.join(joules)}."
    chosen = f"{decision.get('choice', '')}: {decision.get('reason', '')}"
    at = decision.get("at")
    when = f" {duration_text(now - at)} ago" if at else ""
    return [f"The policy {printable(decision.get('policy', ''))} said{when}, {printable(chosen)}.{printable(knew)}"]


def _cost_text(cost: dict[str, Any]) -> str:
    """Text such as ``812 J and 60 J to wake in 5 s at 0.31 a kWh, estimated``."""
    price = f" at {number_text(cost['price'])} a kWh" if cost.get("price") is not None else ""
    wake = f" and {cost['wake_joules']:.4g} J to wake in {cost['wake_s']:.3g} s" if cost.get("wake_s") else ""
    quality = "" if cost.get("quality") == "measured" else f", {cost.get('quality')}"
    return f"{cost['joules']:.4g} J{wake}{price}{quality}"


def _yes(value: object) -> str:
    return "?" if value is None else "yes" if value else "no"


def _now(node: dict[str, Any]) -> str:
    return "-" if node["can_ever"] is False else _yes(node["now"])


TRACE_BAR_COLUMNS = 32
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
"""The span that begins with each state of an attempt; any other state ends a span."""
_CHORES = {"saved": "output file written", "notified": "notified", "abandoned": "given up", "postponed": "postponed"}


def executors_of(task: Mapping[str, Any]) -> list[str]:
    """Other nodes that had attempts of a task, from the answer to `show`."""
    nodes = dict.fromkeys([*(step["node"] for step in task["history"]), task["node"]])
    return [node for node in nodes if node and node != task["home"]]


def trace_spans(
    task: Mapping[str, Any], events: Mapping[str, list[dict[str, Any]]], now: float
) -> list[dict[str, Any]]:
    """Spans `name node began ended attempt reason own_clock`, sorted by start. ended is null for an open span, and equal
    to began for an instant. task: answer to `show`; events: of the home (chores) and of each executor (attempts)."""
    home, steps = task["home"], task["history"]
    found = [
        _span(_AT_HOME.get(step["state"], step["state"]), home, step, step if step["state"] in ENDED else after)
        for step, after in zip(steps, [*steps[1:], None], strict=False)  # none of a task whose events were removed
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
    """Spans of one attempt, from the events of its node; a wait of no length is left out."""
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


def trace_lines(task: Mapping[str, Any], spans: list[dict[str, Any]], missing: Iterable[str], now: float) -> list[str]:
    first = min((span["began"] for span in spans), default=now)
    last = max([span["ended"] or now for span in spans] + [first + 1e-6])
    trace = task.get("trace")
    told = [f"{task['id']}  {task['name']}  {task['state']}  {duration_text(last - first)}"]
    if trace:
        told.append(f"trace {trace['trace_id']}, span {trace['span_id'] or '-'} of {trace['parent_id']}")
    width = max((len(span["node"]) for span in spans), default=0) + 1
    for span in spans:
        began, ended = span["began"] - first, (span["ended"] or now) - first
        left = min(int(began / (last - first) * TRACE_BAR_COLUMNS), TRACE_BAR_COLUMNS - 1)
        right = max(int(ended / (last - first) * TRACE_BAR_COLUMNS), left + 1)
        mark = "|" if ended == began else "=" * (right - left)
        length = "" if ended == began else duration_text(ended - began) + ("" if span["ended"] else " …")
        node = span["node"] + ("" if span["own_clock"] else "~")
        words = f"{span['name']}: {span['reason']}" if span["reason"] else span["name"]
        told.append(
            f"{began:9.3f} s  {length:>9}  {node:{width}} [{' ' * left}{mark:{TRACE_BAR_COLUMNS - left}}]  {words}".rstrip()
        )
    if any(not span["own_clock"] for span in spans):
        told.append("~  by the clock of that node, which may differ")
    told += [f"{node} does not answer: its part is missing" for node in missing]
    return list(map(printable, told))
