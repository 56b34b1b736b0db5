"""`peerload retry`: queue the command of an ended task again, as a new task."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from peerload.cli.common import command, selection
from peerload.cli.common.errors import CANNOT, report
from peerload.cli.common.options import Options
from peerload.client.connection import Client
from peerload.model.errors import BadRequest, UsageError
from peerload.model.text import printable
from peerload.text.format import counted, print_json, say

if TYPE_CHECKING:
    from argparse import Namespace

TOKEN_BYTES = 16
FAILED = ("failed", "unknown")
FAILED_WITHIN_S = 86_400.0
TASKS_MAX = 100_000
"""Bound of the tasks of the last day that are searched for failed ones."""


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "retry",
        "Queue the command of a task again, as a new task with a new id. It must have ended, or its outcome be unknown.\n"
        "Of an array the members that have not succeeded are queued.",
        json_says="one object a task",
    )
    selection.add(reader, changes=True)
    reader.switch("--all", help="of an array all ended members, succeeded ones, too")
    reader.switch("--failed", help="failed tasks, not cancelled ones; without an ID: all that failed in the last 24 h")
    flags = reader.read(words)
    if flags.all and flags.failed:
        raise UsageError("retry: --all and --failed contradict each other")
    chosen_by = selection.Selection(flags, "retry", needed=not flags.failed)
    code = again = 0
    with Client(flags.socket) as client:
        chosen = _chosen(client, chosen_by, flags)
        if chosen is None:
            return CANNOT
        for task, how in chosen:
            try:
                _retry(client, task, is_json=flags.json, **how)
            except BadRequest as error:
                if len(chosen) == 1:
                    raise
                report(error)  # the others are queued all the same
                code = CANNOT
            else:
                again += 1
    if code and len(chosen) > 1:
        say(f"queued again: {again}; refused: {len(chosen) - again}, see above")
    return code


def _retry(client: Client, task: str, *, is_json: bool, **fields: object) -> None:
    reply = client.call("retry", token=os.urandom(TOKEN_BYTES).hex(), task=task, **fields)
    members = reply.get("members")
    if is_json:
        print_json({"id": reply["id"], "retry_of": reply.get("retry_of")} | ({"members": members} if members else {}))
    else:
        sys.stdout.write(f"{printable(reply['id'])}\n")
        sys.stdout.flush()
    spec = {} if reply.get("directory_here") else client.call("show", tasks=[reply["id"]])["tasks"][0]
    command.warn_if_stranded(client, reply, spec)


def _chosen(
    client: Client, chosen_by: selection.Selection, flags: Namespace
) -> list[tuple[str, dict[str, object]]] | None:
    """The tasks to repeat, each with its fields of the request; None if the user said no."""
    if not chosen_by.words and not chosen_by.means_all and not chosen_by.is_narrowed:
        return [(task, {"failed": True}) for task in _failed_lately(client)]
    states = FAILED if flags.failed else (*FAILED, "cancelled", *(("done",) if flags.all else ()))
    if chosen_by.states and not set(chosen_by.states) <= {*selection.ENDED, "unknown"}:
        raise UsageError("retry: only tasks that have ended or are unknown can be queued again")
    refs = chosen_by.references(client, states)
    if refs is None:
        return None
    if chosen_by.is_narrowed or chosen_by.means_all:
        return [(ref, {"all": True}) for ref in refs]  # their states were checked already
    return [(ref, {"all": flags.all, **({"failed": True} if flags.failed else {})}) for ref in refs]


def _failed_lately(client: Client) -> list[str]:
    """The tasks that failed within the last day and were not queued again, whole arrays where possible; their number is said."""
    reply = client.call("tasks", ended_within_s=FAILED_WITHIN_S, limit=TASKS_MAX)
    chosen = to_retry(reply["tasks"])
    number = sum(len(members) for _, members in chosen)
    if not number:
        say("no task has failed in the last 24 hours that was not queued again")
        return []
    say(f"{counted(number, 'task')} failed in the last 24 hours, queued again as:")
    if reply.get("truncated"):
        say(
            f"there were more than {TASKS_MAX} tasks; older ones were not looked at",
            "name them:  peerload retry --failed ID",
        )
    return [task for array, members in chosen for task in ([array] if array else members)]


def to_retry(tasks: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """(array, ids of its members) for tasks that failed and were not queued again. The array is "" if its members must be named one by
    one, since others were queued again; a single task counts as an array."""
    again = {(str(task["retry_of"]), _member(task)) for task in tasks if task.get("retry_of")}
    failed: dict[str, list[str]] = {}
    partly: set[str] = set()
    for task in tasks:
        if task.get("state") not in ("failed", "unknown"):
            continue
        name = str(task["id"])
        array = name.rpartition(".")[0]
        if (name, _member(task)) in again or (array and (array, _member(task)) in again):
            partly.add(array)
        else:
            failed.setdefault(array or name, []).append(name)
    return [("" if name in partly else name, members) for name, members in failed.items()]


def _member(task: dict[str, Any]) -> str:
    """The number within its array, which its repetition has, too."""
    return str(task["id"]).rpartition("/")[2].partition(".")[2]
