"""`peerload clean` and `files`: delete ended tasks and their outputs; list the files kept for tasks, and remove them."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from peerload.cli.common import selection
from peerload.cli.common.messages import CANNOT
from peerload.cli.common.options import Options, whole
from peerload.client.connection import AgentConnection
from peerload.model.errors import AgentUnavailable, UsageError
from peerload.model.text import printable
from peerload.text.format import counted, duration_text, print_json, say, size_text
from peerload.text.tasks import collapsed
from peerload.text.units import duration

if TYPE_CHECKING:
    from argparse import Namespace

STATES = ("done", "failed", "cancelled")
KEEP_MAX = 1_000_000_000
ID_CHARACTERS = 12


def clean(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "clean",
        "Delete ended tasks whose home is here, with their outputs. The flags narrow the choice: tasks that ended longer ago\n"
        "than --older, in one of these states, without the newest --keep. Unfinished tasks are never deleted.\n"
        "Without an agent (none can start on a full disk) the state directory itself is cleaned.",
    )
    selection.add(reader, changes=True, has_state=False)
    reader.flag("--older 7d", help="that ended longer ago than this", type=duration)
    reader.flag("--keep N", help="all but the newest N of them", type=whole(1, KEEP_MAX))
    reader.flag("--state S …", help=f"that ended so: {' '.join(STATES)}")
    for state in STATES:
        reader.switch(f"--{state}", help=f"the same as --state {state}")
    reader.switch("--all", help="every task that has ended")
    reader.switch("--outputs", help="delete only their outputs, keep the tasks")
    reader.switch("--dry-run", help="only say what would be deleted")
    reader.flag("--state-dir DIR", help="state directory of an agent that does not run (default: your own agent's)")
    flags = reader.read(words)
    chosen_by = selection.Selection(flags, "clean", needed=False)
    asked = _request(flags, chosen_by)
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
        _show(flags, reply)
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
    """References to the selected tasks."""
    if chosen_by.is_plain:
        return chosen_by.words
    chosen_by.states = states
    found = chosen_by.selected(client, selection.ENDED if chosen_by.is_narrowed else ())
    if not found.get("count"):
        selection.say_none()
    return list(found.get("selected") or ())


def _request(flags: Namespace, chosen_by: selection.Selection) -> dict[str, Any]:
    """The request. Raises UsageError if no task is selected, or selectors contradict each other."""
    states = [name for value in flags.state for name in value.split(",") if name]
    states += [state for state in STATES if getattr(flags, state)]
    for name in states:
        if name not in STATES:
            raise UsageError(
                f"clean: {name!r} is not a state in which tasks end", hint=f"there are:  {' '.join(STATES)}"
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
    """Clean the state directory of an agent that does not run → its reply; None if the directory is not known."""
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


def _show(flags: Namespace, reply: dict[str, Any]) -> None:
    tasks, outputs = int(reply.get("removed") or 0), int(reply.get("outputs") or 0)
    lines = [f"{line}\n" for line in collapsed(reply.get("tasks") or [])] if flags.dry_run else []
    would = "would delete" if flags.dry_run else "deleted"
    what = f"{counted(outputs, 'output')} ({size_text(reply.get('output_bytes'))})"
    lines.append(f"{would} {what}\n" if flags.outputs else f"{would} {counted(tasks, 'ended task')} and {what}\n")
    sys.stdout.write("".join(lines))
    if reply.get("in_use"):
        say(
            f"{counted(int(reply['in_use']), 'ended task')} stayed",
            "a client follows them, or their processes have not ended yet",
        )


def files(words: list[str]) -> int:
    """Run the verb."""
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
    if flags.json:
        print_json({**kept, "removed_bytes": removed})
        return 0
    lines = [f"removed {size_text(removed)}"] if flags.gc else []
    lines.append(
        f"{size_text(kept['size_bytes'])} of {size_text(kept['limit_bytes'])} in {counted(kept['blocks'], 'block')}"
    )
    for one in kept["snapshots"]:
        what = counted(one["files"], "file")
        lines.append(f"{one['id'][:ID_CHARACTERS]}  {size_text(one['bytes']):>9}  {what}  {_used(one)}")
    lines += [
        f"{one['id'][:ID_CHARACTERS]}  {size_text(one['bytes']):>9}  {printable(one['name'])}  {_used(one)}"
        for one in kept["environments"]
    ]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _used(one: dict[str, Any]) -> str:
    return "in use" if one["in_use"] else f"used {duration_text(max(time.time() - one['used_at'], 0.0))} ago"
