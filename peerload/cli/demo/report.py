"""Output of `peerload demo`: how the tasks spread while it runs, and the account at the end."""

from __future__ import annotations

import os
import sys
import time

from peerload.cli.demo.work import list_schedule_s
from peerload.model import metrics
from peerload.text.format import coloured, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

BAR_WIDTH = 30
SLOT_MARKS_MAX = 8
LINE_EVERY_S = 1.0
REDRAW_EVERY_S = 0.2
HANDOFF_COUNTERS = {
    "offers sent": metrics.OFFERS_SENT,
    "offers declined": metrics.OFFERS_DECLINED,
    "transfers": metrics.TRANSFERS,
    "tasks given": metrics.TASKS_GIVEN,
}
"""Keys of the report, and the counters behind them."""

_UP_TO_START = "\x1b[{lines}F\x1b[J"


class DemoScreen:
    """Live view of how the tasks spread, on stderr: redrawn on a terminal, otherwise a line a second."""

    def __init__(self, slots: Mapping[str, int], home: str) -> None:
        self._slots = slots
        self._home = home
        self._redraws = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._drawn_lines = 0
        self._due_s = 0.0

    def show(self, tasks: Sequence[Mapping[str, Any]], elapsed_s: float, *, at_last: bool = False) -> None:
        """Draw, if it is time to: always ``at_last``."""
        now_s = time.monotonic()
        if now_s < self._due_s and not at_last:
            return
        self._due_s = now_s + (REDRAW_EVERY_S if self._redraws else LINE_EVERY_S)
        spread = {node: tally(tasks, node) for node in self._slots}
        waiting = sum(task["state"] == "queued" for task in tasks)
        if self._redraws:
            lines = self._picture(spread, waiting, len(tasks), elapsed_s)
            back = _UP_TO_START.format(lines=self._drawn_lines) if self._drawn_lines else ""
            sys.stderr.write(back + "".join(f"{line}\n" for line in lines))
            self._drawn_lines = len(lines)
        else:
            each = "  ".join(f"{node} {running}/{done}" for node, (running, _, done) in spread.items())
            sys.stderr.write(f"{elapsed_s:5.1f} s  running/done:  {each}   {waiting} wait at {self._home}\n")
        sys.stderr.flush()

    def _picture(
        self, spread: Mapping[str, tuple[int, int, int]], waiting: int, total: int, elapsed_s: float
    ) -> list[str]:
        done_in_all = sum(done for _, _, done in spread.values())
        head = f"{elapsed_s:5.1f} s   {done_in_all} of {total} done, {waiting} wait at {self._home}"
        lines = [coloured(head, "bold", sys.stderr)]
        most = max(1, total // 2)
        for node, (running, held, done) in spread.items():
            slots = self._slots[node]
            marks = "#" * min(running, SLOT_MARKS_MAX) + "." * max(0, min(slots, SLOT_MARKS_MAX) - running)
            bar = "#" * min(BAR_WIDTH, round(done * BAR_WIDTH / most))
            lines.append(f"  {node:8} running [{marks}]".ljust(32) + f"{held:3} next  {done:4} done {bar}")
        return lines


def tally(tasks: Sequence[Mapping[str, Any]], node: str) -> tuple[int, int, int]:
    """→ numbers of tasks that run on this node, are held there to run next, and have ended there."""
    there = [task["state"] for task in tasks if task["node"] == node]
    running, held = there.count("running"), there.count("leased")
    return running, held, len(there) - running - held - there.count("queued")


def account(
    tasks: Sequence[Mapping[str, Any]], slots: Mapping[str, int], home: str, counters: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """The figures at the end, as `--json` prints them.

    tasks: ended ones, as `show` gives them; slots: node → tasks at a time; counters: node → its agent's. The ideal is
    the sum of the measured durations over all slots, alone_s the same durations in the same order on the home's slots.
    """
    took_s = {task["id"]: max(task["ended_at"] - (task["started_at"] or task["ended_at"]), 0.0) for task in tasks}
    makespan_s = max(task["ended_at"] for task in tasks) - min(task["submitted_at"] for task in tasks)
    sum_s = sum(took_s.values())
    ideal_s = max(sum_s / sum(slots.values()), *took_s.values())
    alone_s = list_schedule_s((took_s[task["id"]] for task in tasks), slots[home])
    cpu_s = sum(task["usage"]["user_s"] + task["usage"]["system_s"] for task in tasks)
    nodes = []
    for node, room in slots.items():
        there = [task for task in tasks if task["node"] == node]
        busy_s = sum(took_s[task["id"]] for task in there)
        nodes.append(
            {
                "node": node,
                "slots": room,
                "tasks": len(there),
                "from_elsewhere": len(there) if node != home else 0,
                "busy_s": busy_s,
                "busy_share": busy_s / (room * makespan_s) if makespan_s else 0.0,
            }
        )
    return {
        "home": home,
        "tasks": len(tasks),
        "failed": sum(task["exit_code"] != 0 for task in tasks),
        "nodes": nodes,
        "migrations": sum(task["migrations"] for task in tasks),
        "makespan_s": makespan_s,
        "ideal_s": ideal_s,
        "alone_s": alone_s,
        "sum_s": sum_s,
        "cpu_s": cpu_s,
        "cpus": len(os.sched_getaffinity(0)),
        "mqtt": _by_type(counters),
        "handoffs": {key: _sum(counters, name) for key, name in HANDOFF_COUNTERS.items()},
        "peer_link": {
            "sent": _sum(counters, metrics.PEER_MESSAGES_SENT),
            "received": _sum(counters, metrics.PEER_MESSAGES_RECEIVED),
        },
    }


def _by_type(counters: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """MQTT messages of all agents together: published and received, and each by type."""
    told: dict[str, Any] = {}
    names = (("published", metrics.MQTT_MESSAGES_PUBLISHED), ("received", metrics.MQTT_MESSAGES_RECEIVED))
    for way, metric in names:
        found = sorted({name for one in counters.values() for name in one if name.startswith(f"{metric}{{")})
        counts = {name.partition('"')[2].removesuffix('"}'): _sum(counters, name) for name in found}
        told[way] = sum(counts.values())
        told[f"{way}_by_type"] = {kind: count for kind, count in counts.items() if count}
    return told


def _sum(counters: Mapping[str, Mapping[str, int]], name: str) -> int:
    return sum(one.get(name, 0) for one in counters.values())


def lines(told: Mapping[str, Any]) -> list[str]:
    """The account as text, 80 columns."""
    headings = ("NODE", "SLOTS", "TASKS", "FROM ELSEWHERE", "BUSY")
    rows = [
        (one["node"], one["slots"], one["tasks"], one["from_elsewhere"] or "-", f"{one['busy_share']:.0%}")
        for one in told["nodes"]
    ]
    slots = sum(one["slots"] for one in told["nodes"])
    home = next(one for one in told["nodes"] if one["node"] == told["home"])
    makespan_s, ideal_s, alone_s = told["makespan_s"], told["ideal_s"], told["alone_s"]
    least_s = told["cpu_s"] / told["cpus"]
    handoffs = told["handoffs"]
    slower, faster = makespan_s / ideal_s, alone_s / makespan_s
    of_tasks = f"{told['sum_s']:.1f} s of tasks on {slots} slots; took {slower:.2f} times as long"
    of_home = f"on its {home['slots']} slot{'s' if home['slots'] > 1 else ''}; sharing was {faster:.1f} times as fast"
    of_work = f"at least: {told['cpu_s']:.1f} s of work for the {told['cpus']} of this machine"
    of_offers = f"{handoffs['offers sent']} offers ({handoffs['offers declined']} declined)"
    return [
        *table(headings, rows, headings[1:]),
        "",
        f"all tasks in   {makespan_s:6.1f} s",
        f"ideal          {ideal_s:6.1f} s  {of_tasks}",
        f"{home['node']} alone".ljust(15) + f"{alone_s:6.1f} s  the same {of_home}",
        f"processors     {least_s:6.1f} s  {of_work}",
        "",
        f"migrations     {told['migrations']:6}    placements on another node than {home['node']}",
        f"hand-offs      {handoffs['transfers']:6}    of {of_offers}; {told['peer_link']['sent']} peer-link messages",
        "",
        *_messages(told["mqtt"]),
    ]


def _messages(mqtt: Mapping[str, Any]) -> list[str]:
    """MQTT messages by type; several nodes may receive one published message."""
    published, received = mqtt["published_by_type"], mqtt["received_by_type"]
    rows = [(kind, published.get(kind, 0), received.get(kind, 0)) for kind in sorted({*published, *received})]
    headings = ("MQTT MESSAGES", "PUBLISHED", "RECEIVED")
    return table(headings, [*rows, ("all", mqtt["published"], mqtt["received"])], headings[1:])
