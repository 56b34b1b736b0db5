"""`peerload cancel`, `signal`, `hold`, `release`, `prio`, `group`, `retry`, `clean` and `files`: the verbs that change tasks,
their groups, and stored data of ended tasks."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, Any

from peerload.cli.common import selection
from peerload.cli.common.messages import CANNOT, TIMED_OUT, report
from peerload.cli.common.options import Options, group_name, signal_number, whole
from peerload.client.connection import AgentConnection
from peerload.model.errors import AgentUnavailable, BadRequest, UsageError
from peerload.model.text import printable
from peerload.text.format import counted, duration_text, print_json, print_lines, print_result, say, size_text, table
from peerload.text.tasks import ENDED, collapsed
from peerload.text.units import duration

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence


def cancel(words: list[str]) -> int:
    reader = Options(
        "cancel",
        "Stop tasks: waiting ones never start, running ones get TERM and, 10 s later, KILL.\n"
        "With --wait the exit code is 124 if the timeout ended before all processes were gone; without it 125 if a node that\n"
        "has one of them does not answer: its processes may run on there.",
    )
    selection.add(reader, changes=True)
    reader.flag("--signal NAME", help="the first signal (default TERM)", type=signal_number, default=15)
    reader.switch("--force", help="KILL at once")
    reader.switch(
        "--remote",
        help="tasks of other homes on this node: waiting ones go back to their homes, running ones are stopped",
    )
    reader.switch("--wait", help="return when their processes are gone, wherever they ran")
    reader.flag("--timeout 30s", help="with --wait: give up after this time", type=duration)
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
    lines = _cancelled_lines(cancelled, already)
    unreachable = reply.get("unreachable", [])
    told = {"cancelled": cancelled, "already_ended": already, "unreachable": [task.get("id") for task in unreachable]}
    print_result(told, lines, as_json=flags.json)
    return _say_unreachable(unreachable)


def _say_unreachable(tasks: list[dict[str, Any]]) -> int:
    """Report which nodes did not receive the order to end the processes of cancelled tasks → CANNOT; 0 if there are none."""
    for node, state in dict.fromkeys((task.get("node"), task.get("state")) for task in tasks):
        names = [task.get("id") for task in tasks if task.get("node") == node]
        say(
            f"cancelled, but the processes of {counted(len(names), 'task')} may run on at {node}, which does not answer ({state})",
            f"they end when it is reachable again; to wait for that:  peerload cancel --wait {printable(names[0])}"
            f"        if it is gone for good:  peerload forget {node}",
        )
    return CANNOT if tasks else 0


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
            print_lines(_cancelled_lines(cancelled, already))
            is_shown = True
        for node in part.get("waits_for", ()):
            _say_waiting(node)
    if not is_shown:
        print_lines(_cancelled_lines(cancelled, already))
    left = client.last.get("left", [])
    if flags.json:
        print_json({"cancelled": cancelled, "already_ended": already, "left": left})
    if not client.last.get("timed_out"):
        return 0
    say(
        f"cancelled, but not ended within {flags.timeout:g} s: {', '.join(map(str, left))}",
        "they are still being stopped; see:  peerload ls --remote --at NODE",
    )
    return TIMED_OUT


def _say_waiting(waits_for: dict[str, Any]) -> None:
    """Report which node has not confirmed that the processes have ended."""
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


def _cancelled_lines(cancelled: list[str], already: list[str]) -> list[str]:
    lines = [f"{line}  cancelled" for line in collapsed(cancelled)]
    return lines + [f"{line}  had already ended" for line in collapsed(already)]


RUNNING = ("running",)
SENT_MAX = 64
LISTED_MAX = 100_000
"""Maximum number of tasks in one answer, from peerload.wire.control."""


def signal(words: list[str]) -> int:
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
    told = {"signal": number, "signalled": signalled, "not_running": [*others, *refused], "unreachable": [*unsure]}
    print_result(told, (f"{line}  signalled" for line in collapsed(signalled)), as_json=flags.json)
    for task, why in (others | refused).items():
        say(f"{printable(task)}: {printable(why)}", f"details:  peerload show {printable(task)}")
    for task, node in unsure.items():
        say(f"{task}: {node} does not answer; the signal may not have arrived", "peerload nodes")
    return CANNOT if others or refused or unsure else 0


def _number(word: str | None) -> int:
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
    """The running tasks among the selected ones; and the named tasks that do not run, each with its state. Raises NoSuchTask."""
    running: dict[str, dict[str, Any]] = {}
    others: dict[str, str] = {}
    for part in [[ref] for ref in refs] if are_named else selection.batches(refs):
        found = client.call("tasks", tasks=part, states=RUNNING, limit=LISTED_MAX)["tasks"]
        running |= {str(task["id"]): task for task in found}
        if are_named and not found:
            shown = client.call("show", tasks=part)["tasks"]
            state = f"it is {shown[0]['state']}" if len(shown) == 1 else f"none of its {len(shown)} members is running"
            others[part[0]] = f"{state} and gets no signal"
    return list(running.values()), others


def _sent(client: AgentConnection, tasks: Sequence[str], number: int) -> dict[str, str]:
    """Send the signal to each task → the tasks that did not receive it, with the reason."""
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
"""Maximum number of tasks whose states are fetched to explain why they cannot be held."""
PRIORITY_MAX = 1_000_000


def hold(words: list[str]) -> int:
    reader = Options("hold", "Keep waiting tasks from starting, until  peerload release.  Running tasks go on.")
    says = {
        "held": "held",
        "already_held": "was held already",
        "not_waiting": "is not waiting; stop a running task:  peerload cancel",
    }
    return _change(reader, words, "hold", ("queued",), says)


def release(words: list[str]) -> int:
    reader = Options(
        "release",
        "Let held tasks start: those held by  peerload hold  or  submit --held,  and those held because several nodes that ran\n"
        "them were lost.",
    )
    return _change(reader, words, "release", ("held",), {"released": "released", "not_held": "is not held"})


def prio(words: list[str]) -> int:
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
    """Change the selected tasks, and print the outcome of each. ``says``: a sentence for each list of the answer,
    with flags as placeholders in braces."""
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
        unchanged = found.get("not_waiting", found.get("not_held", []))
        ended = [task for task in unchanged[:LOOKED_AT_MAX] if _has_ended(client, task)]
        refused = {*found.get("not_waiting", []), *found.get("ended", [])}
        is_all = all(map(refused.issuperset, found.values()))
        code = CANNOT if refused and (chosen_by.words or is_all) else 0
        if flags.json:
            print_json(asked | found)
            return code
    lines = []
    for key, tasks in found.items():
        if tasks is unchanged:
            lines += [f"{line}  has ended; run it again:  peerload retry" for line in collapsed(ended)]
        others = [task for task in tasks if task not in ended]
        lines += [f"{line}  {says[key].format(**asked)}" for line in collapsed(others)]
    print_lines(lines)
    return code


def _has_ended(client: AgentConnection, task: str) -> bool:
    """True if the task, or every member of the array, has ended."""
    try:
        return all(shown["state"] in ENDED for shown in client.call("show", tasks=[task])["tasks"])
    except BadRequest:  # removed meanwhile
        return False


def _with_number_first(words: list[str]) -> list[str]:
    """Convert ``-5 3`` to ``-- -5 3``, so that a priority below 0 is not read as a flag."""
    for index, word in enumerate(words):
        if word[:1] == "-" and word[1:].isdecimal():
            return [*words[:index], "--", *words[index:]]
    return words


TOKEN_BYTES = 16
FAILED = ("failed", "unknown")
FAILED_WITHIN_S = 86_400.0


def retry(words: list[str]) -> int:
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
                report(error)  # the other tasks are still queued
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
    told = {"id": reply["id"], "retry_of": reply.get("retry_of")} | ({"members": members} if members else {})
    print_result(told, [printable(reply["id"])], as_json=is_json)
    spec = {} if reply.get("directory_here") else client.call("show", tasks=[reply["id"]])["tasks"][0]
    warn_if_stranded(client, reply, spec)


def _chosen(
    client: AgentConnection, chosen_by: selection.Selection, flags: Namespace
) -> list[tuple[str, dict[str, object]]] | None:
    """The tasks to repeat, each with its fields of the request; None if the user declined."""
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
    """The tasks that failed within the last day and were not queued again, whole arrays where possible. Prints their number."""
    reply = client.call("tasks", ended_within_s=FAILED_WITHIN_S, limit=LISTED_MAX)
    chosen = to_retry(reply["tasks"])
    number = sum(len(members) for _, members in chosen)
    if not number:
        say("no task has failed in the last 24 hours that was not queued again")
        return []
    say(f"{counted(number, 'task')} failed in the last 24 hours, queued again as:")
    if reply.get("truncated"):
        say(
            f"there were more than {LISTED_MAX} tasks; older ones were not considered",
            "name them:  peerload retry --failed ID",
        )
    return [task for array, members in chosen for task in ([array] if array else members)]


def to_retry(tasks: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """(array, ids of its members) for tasks that failed and were not queued again. The array is "" if its members must be named one
    by one, because others of it were queued again. A single task counts as an array."""
    again = {(str(task["retry_of"]), _member(task)) for task in tasks if task.get("retry_of")}
    failed: dict[str, list[str]] = {}
    partly: set[str] = set()
    for task in tasks:
        if task.get("state") not in FAILED:
            continue
        name = str(task["id"])
        array = name.rpartition(".")[0]
        if (name, _member(task)) in again or (array and (array, _member(task)) in again):
            partly.add(array)
        else:
            failed.setdefault(array or name, []).append(name)
    return [("" if name in partly else name, members) for name, members in failed.items()]


def _member(task: dict[str, Any]) -> str:
    """The number within its array, which a repetition keeps."""
    return str(task["id"]).rpartition("/")[2].partition(".")[2]


SLOTS_MAX = 1_000_000
GROUP_COUNTS = ("running", "waiting", "held")
GROUP_ACTIONS = ("ls", "set", "pause", "resume", "rm")
GROUP_HINT = "peerload group        peerload group set G --slots 2        peerload group pause|resume|rm G"


def group(words: list[str]) -> int:
    reader = Options(
        "group",
        "Groups of tasks (--group G of run, submit and map). A group's slots bound how many of its tasks run at a time, anywhere\n"
        "in the cluster, of those submitted on this node. Tasks of a paused group do not start. Running tasks go on.\n\n"
        "  peerload group [ls]               all groups\n"
        "  peerload group set G --slots N    at most N at a time; none: any number\n"
        "  peerload group pause G            start none of it\n"
        "  peerload group resume G           go on\n"
        "  peerload group rm G               delete a group that has no unfinished tasks",
        usage="[ls | set G --slots N | pause G | resume G | rm G] [flags]",
    )
    reader.add_argument("what", nargs="?", default="ls", metavar="ls|set|pause|resume|rm")
    reader.add_argument("name", nargs="?", metavar="G")
    reader.flag("--slots N", help="with set: at most N tasks at a time; none: any number")
    flags = reader.read(words)
    request = _group_request(flags)
    with AgentConnection(flags.socket) as client:
        if request is None:
            _show_groups(client.call("groups").get("groups", []), flags)
            return 0
        group = client.call("group", **request)["group"]
    print_result(group, [printable(_group_text(flags.what, group))], as_json=flags.json)
    return 0


def _group_request(flags: Namespace) -> dict[str, Any] | None:
    """The fields of the request; None: list the groups. Raises UsageError."""
    if flags.what not in GROUP_ACTIONS:
        raise UsageError(f"group: unknown action: {flags.what[:60]!r}", hint=GROUP_HINT)
    if flags.what != "set" and flags.slots is not None:
        raise UsageError("group: --slots belongs to  group set G", hint=GROUP_HINT)
    if flags.what == "ls":
        if flags.name is not None:
            raise UsageError(f"group: ls takes no name: {flags.name[:60]!r}", hint=GROUP_HINT)
        return None
    if flags.name is None:
        raise UsageError(f"group {flags.what}: the name of the group is missing", hint=GROUP_HINT)
    name = group_name(flags.name, "group")
    match flags.what:
        case "set":
            return {"name": name, "slots": _group_slots(flags.slots)}
        case "rm":
            return {"name": name, "removed": True}
        case _:
            return {"name": name, "paused": flags.what == "pause"}


def _group_slots(text: str | None) -> int:
    if text is None:
        raise UsageError("group set: --slots is missing", hint="--slots 4        any number:  --slots none")
    if text in ("none", "0"):
        return 0
    if not text.isascii() or not text.isdecimal() or int(text) > SLOTS_MAX:
        raise UsageError(
            f"group: --slots {text[:60]!r} is not a number from 1 to {SLOTS_MAX}", hint="any number:  --slots none"
        )
    return int(text)


def _show_groups(groups: list[dict[str, Any]], flags: Namespace) -> None:
    lines = ["no groups.  Make one:  peerload group set G --slots 2        use it:  peerload submit --group G CMD"]
    if groups:
        rows = [
            [group["name"], group["slots"] or "-", "yes" if group["paused"] else "no", *map(group.get, GROUP_COUNTS)]
            for group in groups
        ]
        headings = ["GROUP", "SLOTS", "PAUSED", *map(str.upper, GROUP_COUNTS)]
        lines = table(headings, rows, right=("SLOTS", *map(str.upper, GROUP_COUNTS)))
    print_result({"groups": groups}, lines, as_json=flags.json)


def _group_text(what: str, group: dict[str, Any]) -> str:
    name = group["name"]
    if what == "rm":
        return f"group {name}: deleted"
    slots = counted(group["slots"], "slot") if group["slots"] else "no limit"
    stands = "paused" if group["paused"] else "not paused"
    return f"group {name}: {slots}, {stands}; {group['running']} running, {group['waiting']} waiting"


KEEP_MAX = 1_000_000_000
ID_CHARACTERS = 12


def clean(words: list[str]) -> int:
    reader = Options(
        "clean",
        "Delete ended tasks whose home is here, with their outputs. The flags narrow the choice: tasks that ended longer ago\n"
        "than --older, in one of these states, without the newest --keep. Unfinished tasks are never deleted.\n"
        "Without an agent (none can start on a full disk) the state directory itself is cleaned.",
    )
    selection.add(reader, changes=True, has_state=False)
    reader.flag("--older 7d", help="that ended longer ago than this", type=duration)
    reader.flag("--keep N", help="all but the newest N of them", type=whole(1, KEEP_MAX))
    reader.flag("--state S …", help=f"that ended in this state: {' '.join(ENDED)}")
    for state in ENDED:
        reader.switch(f"--{state}", help=f"the same as --state {state}")
    reader.switch("--all", help="every task that has ended")
    reader.switch("--outputs", help="delete only their outputs, keep the tasks")
    reader.switch("--dry-run", help="print what would be deleted, delete nothing")
    reader.flag("--state-dir DIR", help="state directory of an agent that does not run (default: your own agent's)")
    flags = reader.read(words)
    chosen_by = selection.Selection(flags, "clean", needed=False)
    asked = _clean_request(flags, chosen_by)
    try:
        client = AgentConnection(flags.socket)
    except AgentUnavailable:
        selects = chosen_by.is_narrowed or bool(chosen_by.words and not chosen_by.is_plain)
        answer = None if selects else _without_agent(flags, asked | {"tasks": chosen_by.words})
        if answer is None:
            raise
        reply = answer
    else:
        with client:
            found = _cleaned(client, flags, chosen_by, asked)
        if found is None:
            return CANNOT
        reply = found
    if flags.json:
        print_json(reply | {"dry_run": flags.dry_run})
    else:
        _show_cleaned(flags, reply)
    return 0


def _cleaned(
    client: AgentConnection, flags: Namespace, chosen_by: selection.Selection, asked: dict[str, Any]
) -> dict[str, Any] | None:
    """The reply of the agent: the deleted tasks, or those that would be deleted; None if the user declined."""
    parts = [asked]
    if chosen_by.words or chosen_by.is_narrowed:
        parts = [asked | {"tasks": refs} for refs in selection.batches(_refs(client, chosen_by, asked["states"]))]
    if chosen_by.would_ask() and not flags.dry_run:
        count = sum(int(client.call("clean", **part | {"dry_run": True}).get("removed") or 0) for part in parts)
        if not selection.agreed("clean", count):
            return None
    reply: dict[str, Any] = {"tasks": [], "removed": 0, "outputs": 0, "output_bytes": 0, "in_use": 0}
    for part in parts:
        answer = client.call("clean", **part)
        reply = {key: value + (answer.get(key) or type(value)()) for key, value in reply.items()}
    return reply


def _refs(client: AgentConnection, chosen_by: selection.Selection, states: list[str]) -> list[str]:
    if chosen_by.is_plain:
        return chosen_by.words
    chosen_by.states = states
    found = chosen_by.selected(client, selection.ENDED if chosen_by.is_narrowed else ())
    if not found.get("count"):
        selection.say_none()
    return list(found.get("selected") or ())


def _clean_request(flags: Namespace, chosen_by: selection.Selection) -> dict[str, Any]:
    """The request. Raises UsageError if no task is selected, or selectors contradict each other."""
    states = [name for value in flags.state for name in value.split(",") if name]
    states += [state for state in ENDED if getattr(flags, state)]
    for name in states:
        if name not in ENDED:
            raise UsageError(
                f"clean: {name!r} is not a state in which tasks end", hint=f"there are:  {' '.join(ENDED)}"
            )
    if (chosen_by.words or chosen_by.is_narrowed) and (flags.all or flags.keep):
        named = chosen_by.words[0] if chosen_by.words else "a selection"
        raise UsageError(
            f"clean: {named} and {'--all' if flags.all else '--keep'} contradict each other", hint="give one of them"
        )
    if not (flags.task or chosen_by.is_narrowed or flags.all or flags.keep or flags.older or states):
        raise UsageError(
            "clean: which tasks?",
            why="nothing is deleted by default",
            hint="peerload clean --older 7d   --keep 1000   --failed   ID ...   or  --all;  first look:  --dry-run",
        )
    return {
        "tasks": [],
        "older_s": flags.older or 0.0,
        "keep": flags.keep or 0,
        "states": list(dict.fromkeys(states)),
        "outputs_only": flags.outputs,
        "dry_run": flags.dry_run,
    }


def _without_agent(flags: Namespace, asked: dict[str, Any]) -> dict[str, Any] | None:
    """Clean the state directory of an agent that does not run → the reply; None if the directory is not known."""
    if flags.state_dir is None and (flags.socket is not None or os.environ.get("PEERLOAD_SOCKET")):
        return None  # another agent than the user's own
    from pathlib import Path

    from peerload.agent.offline_clean import cleaned
    from peerload.cli.common.agent_process import located

    state = located({"state": flags.state_dir} if flags.state_dir else {})["state"]
    reply = cleaned(Path(state), asked)
    if reply is not None:
        say(f"no agent runs; searched {state} itself" if flags.dry_run else f"no agent runs; cleaned {state} itself")
    return reply


def _show_cleaned(flags: Namespace, reply: dict[str, Any]) -> None:
    tasks, outputs = int(reply.get("removed") or 0), int(reply.get("outputs") or 0)
    lines = collapsed(reply.get("tasks") or []) if flags.dry_run else []
    would = "would delete" if flags.dry_run else "deleted"
    what = f"{counted(outputs, 'output')} ({size_text(reply.get('output_bytes'))})"
    print_lines([*lines, f"{would} {what}" if flags.outputs else f"{would} {counted(tasks, 'ended task')} and {what}"])
    if reply.get("in_use"):
        say(
            f"{counted(int(reply['in_use']), 'ended task')} stayed",
            "a client follows them, or their processes have not ended yet",
        )


def files(words: list[str]) -> int:
    reader = Options(
        "files",
        "Show the files and environments of tasks that this node keeps: each snapshot or lock file, its size, whether a task needs it,\n"
        "and when it was last used.\n"
        "Unneeded ones are removed when the cache is full (cache of [files] in the settings), or with --gc.",
    )
    reader.switch("--gc", help="remove everything that no task needs now")
    reader.at()
    flags = reader.read(words)
    with AgentConnection(flags.socket) as client:
        removed = client.call("files", gc=True, at=flags.at)["removed_bytes"] if flags.gc else 0
        kept = client.call("files", at=flags.at)
    lines = [f"removed {size_text(removed)}"] if flags.gc else []
    lines.append(
        f"{size_text(kept['size_bytes'])} of {size_text(kept['limit_bytes'])} in {counted(kept['blocks'], 'block')}"
    )
    for one in kept["snapshots"]:
        what = counted(one["files"], "file")
        lines.append(f"{one['id'][:ID_CHARACTERS]}  {size_text(one['bytes']):>9}  {what}  {_used(one)}")
    lines += [
        f"{one['id'][:ID_CHARACTERS]}  {size_text(one['bytes']):>9}  {one['name']}  {_used(one)}"
        for one in kept["environments"]
    ]
    print_result({**kept, "removed_bytes": removed}, map(printable, lines), as_json=flags.json)
    return 0


def _used(one: dict[str, Any]) -> str:
    return "in use" if one["in_use"] else f"used {duration_text(max(time.time() - one['used_at'], 0.0))} ago"
