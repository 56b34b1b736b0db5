"""`peerload trace`: where the time of one task went, on all nodes that had it."""

from __future__ import annotations

import time
from typing import Any

from peerload.cli.common.options import Options
from peerload.client.connection import AgentConnection
from peerload.model.errors import PeerloadError, UsageError
from peerload.text import trace
from peerload.text.format import print_result


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "trace",
        "Show where the time of a task went: waiting, search, handover, start, run, output home; on its home and on each node\n"
        "that had it. Times of other nodes (~) are by their own clocks.",
    )
    reader.add_argument("task", metavar="ID")
    flags = reader.read(words)
    events: dict[str, list[dict[str, Any]]] = {}
    missing: list[str] = []
    with AgentConnection(flags.socket) as client:
        shown = client.call("show", tasks=[flags.task])["tasks"]
        if len(shown) != 1:
            hint = f"name a member:  peerload trace {shown[0]['id']}" if shown else ""
            raise UsageError(f"trace: {flags.task} is an array of {len(shown)} tasks", hint=hint)
        task = shown[0]
        for node in (task["home"], *trace.executors_of(task)):
            try:
                told = client.call("events", tasks=[task["id"]], what=["attempt", "chore"], at=node)
                events[node] = told["events"]
            except PeerloadError:
                missing.append(node)
    now = time.time()
    spans = trace.spans_of(task, events, now)
    result = {key: task[key] for key in ("id", "name", "state", "home", "trace")} | {"spans": spans, "missing": missing}
    lines = trace.lines_of(task, spans, missing, now)
    print_result(result, "".join(f"{line}\n" for line in lines), as_json=flags.json)
    return 0
