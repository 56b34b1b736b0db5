"""Messages about a task: its outcome, missing output, a home or node that does not answer; and its exit code."""

from __future__ import annotations

import os
import sys

from peerload.cli.common.errors import CANNOT, INTERRUPTED
from peerload.model.text import printable
from peerload.text.format import say, shortened, size_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from peerload.client.connection import AgentConnection

PLACEMENT_ROUNDS = 9
PLACEMENT_ROUND_S = 0.1
"""Time for a task to find a node that has its directory."""
NODES_NAMED_MAX = 4
"""Nodes named on one line."""
EXPLAINED_EXIT_CODES = (124, 126, 127)
"""Exit codes whose reason is worth a line: time limit, cannot execute, not found."""
WITHOUT_ROOM = "; the disk of "
"""Part of the reason of a task whose output may not have been kept."""
DETACHED = 131
"""Exit code after Ctrl-\\: that of a command which this key ends, so that nothing after && runs."""


def exit_code_of(task: dict[str, Any]) -> int:
    """The exit code for an ended task: its own, 128 + signal, or 125 if it has none."""
    code, signal = task.get("exit_code"), task.get("signal")
    if isinstance(code, int):
        return code & 0xFF
    return 128 + signal if isinstance(signal, int) and signal > 0 else 125


def say_unknown(task: dict[str, Any]) -> None:
    """Say on stderr that the outcome of a task is not known, and what to do."""
    name, reason, node = (printable(task.get(key) or "") for key in ("id", "reason", "node"))
    outlook = f"waiting for it, in case {node} comes back" if node else "no running copy of it is known"
    say(
        f"the outcome of {name} is not known: it may have ended" + (f": {reason}" if reason else ""),
        f"{outlook}; run it again:  peerload retry {name}        give it up:  peerload cancel {name}",
    )


def say_missing(task: dict[str, Any]) -> int:
    """Say on stderr that a task succeeded but part of its output is lost → CANNOT; 0 if nothing is lost."""
    if not task.get("missing_bytes"):
        return 0
    name, why = (printable(task.get(key) or "") for key in ("id", "reason"))
    say(
        f"exit code {CANNOT}: {name} succeeded, but part of its output is missing: {why}",
        f"the rest:  peerload logs {name}",
    )
    return CANNOT


def say_unsaved(files: dict[str, Any]) -> int:
    """Say on stderr that the output of a task is not completely in its file → CANNOT; 0 if it is."""
    name, state, why = (printable(files.get(key) or "") for key in ("id", "state", "why"))
    if state in ("", "saved"):
        return 0
    again = "; it will be tried again" if state == "postponed" else ""
    say(
        f"the output of {name} is not saved: {why}{again}",
        f"the kept part:  peerload logs {name}        details:  peerload show {name}",
    )
    return CANNOT


def say_away(away: dict[str, Any]) -> None:
    """Say on stderr that the home of a task cannot be asked, only the node that runs it."""
    name, home, why = (printable(away.get(key) or "") for key in ("id", "home", "why"))
    say(f"{name}: its home {home} does not answer: {why}", "shown is what this node knows")


def say_waits(waits: dict[str, Any]) -> None:
    """Say on stderr that a task has ended on another node and its home cannot store the result yet."""
    name, node, why = (printable(waits.get(key) or "") for key in ("id", "node", "why"))
    say(
        f"{name} has ended on {node}; its home does not have the result yet: {why}",
        f"the result is requested again; details:  peerload why {name}",
    )


def report_missing(ended: dict[str, Any], code: int, missing_bytes: int) -> int:
    """The exit code for a task whose output is incomplete: never 0, and stderr says so."""
    if code or not missing_bytes:
        return code
    say(
        f"exit code {CANNOT}: {ended['id']} succeeded, and {size_text(missing_bytes)} of its output are missing",
        f"the kept part:  peerload logs {ended['id']}",
    )
    return CANNOT


def say_detached(task: str) -> int:
    """Say that the user has detached → the exit code."""
    say(f"detached from {task}; it runs on", f"join it again:  peerload attach {task}        peerload logs -f {task}")
    return DETACHED


def _needs_explanation(ended: dict[str, Any], code: int, reason: str) -> bool:
    """True if the exit code alone does not explain the failure."""
    if reason in ("", f"exit code {code}"):
        return False
    return code in EXPLAINED_EXIT_CODES or bool(ended.get("out_of")) or WITHOUT_ROOM in reason


def report_end(ended: dict[str, Any], *, interrupted: bool) -> int:
    """The exit code for an ended task, with a line on stderr if the code alone does not explain it."""
    task, state, reason = str(ended.get("id", "")), str(ended.get("state", "")), str(ended.get("reason") or "")
    code = exit_code_of(ended)
    if state == "cancelled" and interrupted:
        return code if ended.get("exit_code") is not None else INTERRUPTED
    if state == "unknown" or code == CANNOT:
        say(f"{task} is {state}: {reason or 'it has no exit code'}", f"more:  peerload show {task}")
    elif _needs_explanation(ended, code, reason):
        say(f"{task}: {printable(reason)}", f"it ran on {ended['node']}" if ended.get("node") else "")
    elif (
        state == "failed" and ended.get("node") and os.isatty(2)
    ):  # only the command's own stderr is of interest elsewhere
        say(f"{task} failed on {printable(ended['node'])}: {printable(reason or f'exit code {code}')}")
    elif state == "cancelled":
        say(f"{task} was cancelled" + (f": {reason}" if reason else ""))
    return code


def say_left_out(secret: list[str]) -> None:
    """Say on a terminal which variables were not sent."""
    if secret and sys.stderr.isatty():
        say(
            f"not sent, since they look like secrets: {shortened(', '.join(secret), 200)}",
            f"to send one:  --export {secret[0]}",
        )


def say_declining(reply: dict[str, Any]) -> None:
    """Say on stderr which nodes decline the task just submitted, why, and what helps."""
    nodes_by_reason: dict[str, list[str]] = {}
    for node, why in (reply.get("declining") or {}).items():
        nodes_by_reason.setdefault(str(why), []).append(str(node))
    for why, nodes in nodes_by_reason.items():
        named = ", ".join(nodes[:NODES_NAMED_MAX])
        more = f" and {len(nodes) - NODES_NAMED_MAX} more" if len(nodes) > NODES_NAMED_MAX else ""
        helps = "policy" not in why
        say(
            f"{reply['id']} cannot run on {named}{more}: {why}",
            "another directory:  -d DIR        take this one along:  --snapshot        a fresh one:  -d -"
            if helps
            else "",
        )


def warn_if_stranded(client: AgentConnection, reply: dict[str, Any], spec: dict[str, Any]) -> None:
    """Say on stderr, within a second, which nodes cannot take the task just submitted or why it cannot start now."""
    task = reply["id"]
    say_declining(reply)
    if reply.get("directory_here") is False:
        shown = printable(spec["directory"])
        if reply.get("members"):
            reason = "only nodes that have it will take the tasks"
        else:
            reason = _reason_still_queued(client, task)
        if reason:
            say(
                f"{task} waits: the directory {shown} is not on this machine: {reason}",
                f"cancel it:  peerload cancel {task}        another:  -d DIR        a fresh one:  -d -",
            )
    elif reply.get("placeable"):
        say(
            f"{task} waits: {reply['placeable']}",
            f"why:  peerload why {task}        cancel it:  peerload cancel {task}",
        )


def _reason_still_queued(client: AgentConnection, task: str) -> str:
    """The reason why a task is still queued after a second; "" as soon as it has found a node."""
    reason = ""
    for _ in range(PLACEMENT_ROUNDS):
        client.last = {}
        for _ended in client.stream("wait", tasks=[task], timeout_s=PLACEMENT_ROUND_S):
            return ""
        tasks = client.call("show", tasks=[task]).get("tasks") or [{}]
        if tasks[0].get("state") != "queued":
            return ""
        reason = str(tasks[0].get("reason") or "")
    return reason or "no node that has it has taken the task so far"
