"""`peerload cancel`, `signal`, `hold`, `release`, `prio` and `retry`: the verbs that change tasks."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from peerload.cli.common import selection
from peerload.cli.common.messages import CANNOT, TIMED_OUT, report
from peerload.cli.common.options import Options, signal_number, whole
from peerload.client.connection import AgentConnection
from peerload.model.errors import BadRequest, UsageError
from peerload.model.text import printable
from peerload.text.format import counted, print_json, say
from peerload.text.tasks import ENDED, collapsed
from peerload.text.units import duration

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence


def cancel(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "cancel",
        "Stop tasks: waiting ones never start, running ones get TERM and, 10 s later, KILL.\n"
        "With --wait the exit code is 124 if the timeout ended before all processes were gone.",
    )
    selection.add(reader, changes=True)
    reader.flag("--signal NAME", help="the first signal (default TERM)", type=signal_number, default=15)
    reader.switch("--force", help="KILL at once")
    reader.switch(
        "--remote",
        help="tasks of other homes on this node: waiting ones go back to their homes, running ones are stopped",
    )
    reader.switch("--wait", help="return when their processes are gone, wherever they ran")
    reader.flag("--timeout 30s", help="with --wait: no longer than this", type=duration)
    flags = reader.read(words)
    if flags.timeout is not None and not flags.wait:
        raise UsageError("cancel: --timeout is for --wait", hint="peerload cancel --wait --timeout 30s ID")
    if flags.remote and flags.wait:
        raise UsageError("cancel: --remote does not wait", hint="list them:  peerload ls --remote")
    chosen_by = selection.Selection(flags, "cancel")
    if flags.remote and not chosen_by.is_plain:
        raise UsageError("cancel: --remote takes ids of tasks only", hint="list them:  peerload ls --remote")
    asked = {"signal": flags.signal, "force": flags.force}
    with AgentConnection(flags.socket) as client:
        chosen = chosen_by.references(client, selection.UNFINISHED)
        if chosen is None:
            return CANNOT
        if flags.wait:
            return _wait(client, flags, chosen, asked)
        if flags.remote:
            reply = client.call("cancel_remote", guests=chosen, **asked)
        else:
            reply = selection.changed(client, "cancel", chosen, **asked)
    cancelled, already = reply.get("cancelled", []), reply.get("already_ended", [])
    if flags.json:
        print_json({"cancelled": cancelled, "already_ended": already})
    else:
        _show(cancelled, already)
    return 0


def _wait(client: AgentConnection, flags: Namespace, chosen: list[str], asked: dict[str, Any]) -> int:
    return max([_wait_for(client, flags, part, asked) for part in selection.batches(chosen)], default=0)


def _wait_for(client: AgentConnection, flags: Namespace, refs: list[str], asked: dict[str, Any]) -> int:
    cancelled: list[str] = []
    already: list[str] = []
    is_shown = flags.json
    for part in client.stream("cancel", tasks=refs, wait=True, timeout_s=flags.timeout, **asked):
        cancelled += part.get("cancelled", ())
        already += part.get("already_ended", ())
        if part.get("waits_for") and not is_shown:
            _show(cancelled, already)
            is_shown = True
        for node in part.get("waits_for", ()):
            _say_waiting(node)
    if not is_shown:
        _show(cancelled, already)
    left = client.last.get("left", [])
    if flags.json:
        print_json({"cancelled": cancelled, "already_ended": already, "left": left})
    if not client.last.get("timed_out"):
        return 0
    say(
        f"cancelled, but not gone within {flags.timeout:g} s: {', '.join(map(str, left))}",
        "they are still being ended; see on their nodes",
    )
    return TIMED_OUT


def _say_waiting(waits_for: dict[str, Any]) -> None:
    """Say which node has not confirmed that the processes are gone."""
    node, state = waits_for.get("node"), waits_for.get("state")
    what = (
        f"cancelled; waiting for the processes of {counted(int(waits_for.get('tasks') or 0), 'task')} at {node} to end"
    )
    if state in ("alive", None):
        say(what)
    else:
        say(
            f"{what}, which is {state}",
            f"they end when it is reachable again; if it is gone for good:  peerload forget {node}",
        )


def _show(cancelled: list[str], already: list[str]) -> None:
    lines = [f"{line}  cancelled\n" for line in collapsed(cancelled)]
    lines += [f"{line}  had already ended\n" for line in collapsed(already)]
    sys.stdout.write("".join(lines))
    sys.stdout.flush()


RUNNING = ("running",)
SENT_MAX = 64
"""Bound of unanswered requests."""
TASKS_MAX = 100_000
"""Bound of tasks in one answer, from peerload.wire.control."""


def signal(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "signal",
        "Send a signal, such as USR1 or 12, to the processes of running tasks, wherever they run. If a task ends by it, that is its\n"
        "result; to stop a task:  peerload cancel.  Exit code 125 if a named task does not run.",
        usage="[flags] SIGNAL ID ...",
    )
    reader.add_argument("signal", nargs="?", metavar="SIGNAL")
    selection.add(reader, changes=True, has_state=False)
    flags = reader.read(words)
    number = _number(flags.signal)
    chosen_by = selection.Selection(flags, "signal")
    with AgentConnection(flags.socket) as client:
        chosen = chosen_by.references(client, RUNNING)
        if not chosen:
            return CANNOT
        running, others = _running(client, chosen, are_named=bool(chosen_by.words))
        refused = _sent(client, [str(task["id"]) for task in running], number)
    signalled = [str(task["id"]) for task in running if str(task["id"]) not in refused]
    unsure = {str(task["id"]): str(task["node"]) for task in running if task.get("unreachable_since")}
    if flags.json:
        print_json(
            {"signal": number, "signalled": signalled, "not_running": [*others, *refused], "unreachable": [*unsure]}
        )
    else:
        sys.stdout.write("".join(f"{line}  signalled\n" for line in collapsed(signalled)))
        sys.stdout.flush()
    for task, why in (others | refused).items():
        say(f"{printable(task)}: {printable(why)}", f"details:  peerload show {printable(task)}")
    for task, node in unsure.items():
        say(f"{task}: {node} does not answer; the signal may not have arrived", "peerload nodes")
    return CANNOT if others or refused or unsure else 0


def _number(word: str | None) -> int:
    """The number of the signal. Raises UsageError."""
    hint = "peerload signal USR1 42"
    if word is None:
        raise UsageError("signal: the signal is missing", hint=hint)
    try:
        return signal_number(word)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"signal: {error}", why="the signal comes before the tasks", hint=hint) from None


def _running(
    client: AgentConnection, refs: Sequence[str], *, are_named: bool
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The running tasks among these; and the named ones that do not run, each with its state. Raises NoSuchTask."""
    running: dict[str, dict[str, Any]] = {}
    others: dict[str, str] = {}
    for part in [[ref] for ref in refs] if are_named else selection.batches(refs):
        found = client.call("tasks", tasks=part, states=RUNNING, limit=TASKS_MAX)["tasks"]
        running |= {str(task["id"]): task for task in found}
        if are_named and not found:
            shown = client.call("show", tasks=part)["tasks"]
            state = f"it is {shown[0]['state']}" if len(shown) == 1 else f"none of its {len(shown)} members is running"
            others[part[0]] = f"{state} and gets no signal"
    return list(running.values()), others


def _sent(client: AgentConnection, tasks: Sequence[str], number: int) -> dict[str, str]:
    """Send the signal to each task → those that did not get it, with the reason."""
    refused: dict[str, str] = {}
    asked: dict[int, str] = {}
    left = list(reversed(tasks))
    while left or asked:
        if left and len(asked) < SENT_MAX:
            task = left.pop()
            asked[client.send("signal", task=task, signal=number)] = task
            continue
        request, kind, body = client.receive()
        named = asked.pop(request, None)
        if named is not None and kind == "error":
            refused[named] = str(body.get("what") or "refused")
    return refused


LOOKED_AT_MAX = 100
"""Tasks whose states are asked to explain why they cannot be held."""
PRIORITY_MAX = 1_000_000


def hold(words: list[str]) -> int:
    """Run the verb."""
    reader = Options("hold", "Keep waiting tasks from starting, until  peerload release.  Running tasks go on.")
    says = {
        "held": "held",
        "already_held": "was held already",
        "not_waiting": "is not waiting; stop a running task:  peerload cancel",
    }
    return _change(reader, words, "hold", ("queued",), says)


def release(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "release",
        "Let held tasks start: those held by  peerload hold  or  submit --held,  and those held because several nodes that ran\n"
        "them were lost.",
    )
    return _change(reader, words, "release", ("held",), {"released": "released", "not_held": "is not held"})


def prio(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "prio", "Change the priority of waiting tasks: greater numbers go first.", usage="[flags] N ID ..."
    )
    reader.add_argument("priority", type=whole(-PRIORITY_MAX, PRIORITY_MAX), metavar="N")
    says = {
        "changed": "priority {priority}",
        "passed_on": "priority {priority}; passed on to the node that has it queued",
        "elsewhere": "has started: priority {priority} counts only if it is queued again",
        "ended": "has ended",
    }
    return _change(reader, _with_number_first(words), "prio", selection.UNFINISHED, says)


def _change(reader: Options, words: list[str], verb: str, states: Sequence[str], says: dict[str, str]) -> int:
    """Change the selected tasks, and print what became of each. ``says``: the sentence for each list of the answer, whose
    places in braces are the flags."""
    selection.add(reader, changes=True)
    flags = reader.read(words)
    asked = {"priority": flags.priority} if verb == "prio" else {}
    chosen_by = selection.Selection(flags, verb)
    with AgentConnection(flags.socket) as client:
        chosen = chosen_by.references(client, states)
        if chosen is None:
            return CANNOT
        reply = selection.changed(client, verb, chosen, **asked)
        found = {key: reply.get(key, []) for key in says}
        refused = found.get("not_waiting", [])
        code = CANNOT if refused and not found["held"] and not found["already_held"] else 0
        if flags.json:
            print_json(asked | found)
            return code
        ended = [task for task in refused[:LOOKED_AT_MAX] if _state(client, task) in ENDED]
    lines = []
    for key, tasks in found.items():
        if key == "not_waiting":
            lines += [f"{line}  has ended; run it again:  peerload retry\n" for line in collapsed(ended)]
        others = [task for task in tasks if task not in ended]
        lines += [f"{line}  {says[key].format(**asked)}\n" for line in collapsed(others)]
    sys.stdout.write("".join(lines))
    return code


def _state(client: AgentConnection, task: str) -> str:
    try:
        return str(client.call("show", tasks=[task])["tasks"][0]["state"])
    except BadRequest:  # removed meanwhile
        return ""


def _with_number_first(words: list[str]) -> list[str]:
    """``-5 3`` as ``-- -5 3``, so that a priority below 0 is not taken for a flag."""
    for index, word in enumerate(words):
        if word[:1] == "-" and word[1:].isdecimal():
            return [*words[:index], "--", *words[index:]]
    return words


TOKEN_BYTES = 16
FAILED = ("failed", "unknown")
FAILED_WITHIN_S = 86_400.0
FAILED_TASKS_MAX = 100_000
"""Bound of the tasks of the last day that are searched for failed ones."""


def retry(words: list[str]) -> int:
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
    with AgentConnection(flags.socket) as client:
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


def _retry(client: AgentConnection, task: str, *, is_json: bool, **fields: object) -> None:
    from peerload.cli.common.command import warn_if_stranded

    reply = client.call("retry", token=os.urandom(TOKEN_BYTES).hex(), task=task, **fields)
    members = reply.get("members")
    if is_json:
        print_json({"id": reply["id"], "retry_of": reply.get("retry_of")} | ({"members": members} if members else {}))
    else:
        sys.stdout.write(f"{printable(reply['id'])}\n")
        sys.stdout.flush()
    spec = {} if reply.get("directory_here") else client.call("show", tasks=[reply["id"]])["tasks"][0]
    warn_if_stranded(client, reply, spec)


def _chosen(
    client: AgentConnection, chosen_by: selection.Selection, flags: Namespace
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


def _failed_lately(client: AgentConnection) -> list[str]:
    """The tasks that failed within the last day and were not queued again, whole arrays where possible; their number is said."""
    reply = client.call("tasks", ended_within_s=FAILED_WITHIN_S, limit=FAILED_TASKS_MAX)
    chosen = to_retry(reply["tasks"])
    number = sum(len(members) for _, members in chosen)
    if not number:
        say("no task has failed in the last 24 hours that was not queued again")
        return []
    say(f"{counted(number, 'task')} failed in the last 24 hours, queued again as:")
    if reply.get("truncated"):
        say(
            f"there were more than {TASKS_MAX} tasks; older ones were not considered",
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
