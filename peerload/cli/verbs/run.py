r"""`peerload run`: run a command where there is room, in the foreground.

Output comes as it is written, stdout and stderr apart, and standard input goes there; Ctrl-C goes to the task; the exit
code is the task's. The task ends with us, unless `--keep` says otherwise or Ctrl-\ has left it to itself.
"""

from __future__ import annotations

import os

from peerload.cli.common import command, interactive, terms_flags
from peerload.cli.common.errors import CANNOT, INTERRUPTED
from peerload.cli.common.output import OutputWriter
from peerload.cli.common.standard_input import StdinReader, takes_input
from peerload.cli.common.task_session import Detached, TaskSession
from peerload.cli.common.terminal import window
from peerload.client.connection import Client
from peerload.model.text import printable
from peerload.text.format import print_json, say, size_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TOLD_IN_WORDS = (124, 126, 127)
WITHOUT_ROOM = "; the disk of "
"""In the reason of a task whose output may not have been kept."""
"""Exit codes whose reason is worth a line: time limit, cannot execute, not found."""
DETACHED = 131
"""Our exit code when Ctrl-\\ left the task to itself: as of a command that this key has ended, so that nothing which
follows with && goes on."""


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = command.command_options(
        "run",
        "Run a command where there is room, as if it ran here: input, live output, Ctrl-C and exit code pass through.\n"
        "Ctrl-\\ leaves it to itself (peerload attach ID joins it again); otherwise it is cancelled when this command ends.",
        usage="[flags] COMMAND ...",
        epilog="The flags end at the first word that is none; the rest is the command.",
    )
    reader.switch("--pty", help="give it a terminal, for interactive programs: stdout and stderr are one")
    reader.switch("--keep", help="let it run on when this command is ended")
    flags, rest = reader.read_command(words)
    if flags.pty:
        flags.env = interactive.with_term(flags.env)
    flags.env = interactive.with_colours(flags.env, has_terminal=flags.pty)
    spec, secret = command.specification(flags, rest, "run")
    terms = terms_flags.terms(flags, "run")
    stdin = StdinReader() if takes_input() else None
    if flags.pty:
        rows, columns = window()
        spec["terminal"] = {"rows": rows, "columns": columns}
    if stdin is not None or flags.pty:
        spec["takes_input"] = True
    spec["followed"] = True
    if flags.dry_run:
        return command.print_dry_run(spec, secret, flags, **terms)
    unsaved = 0
    if not flags.pty:
        interactive.say_if_it_needs_a_terminal(spec["argv"])
    with Client(flags.socket) as client:
        writer = OutputWriter(is_json=flags.json)
        following = TaskSession(
            client, writer.write, attends=not flags.keep, stdin=stdin, has_terminal=flags.pty, is_source=True
        )
        with following:
            reply = command.submit(
                client,
                spec,
                [],  # what was left out is told where it may be to blame
                [],
                waits_for_node=flags.wait_for_node,
                attended=not flags.keep,
                input_ends=stdin is None,
                terms=terms,
            )
            command.warn_if_stranded(client, reply, spec)
            try:
                ended = following.follow(reply["id"])
            except Detached:
                return say_detached(reply["id"])
        if "output_file" in terms or "error_file" in terms:
            unsaved = _unsaved(following.client, reply["id"])
    if flags.json:
        keys = ("id", "state", "exit_code", "signal", "node", "reason", "out_of")
        print_json({key: ended.get(key) for key in keys})
    writer.end(ended)
    code = told(ended, interrupted=following.interrupts > 0)
    if code:
        command.say_left_out(secret)
    return told_missing(ended, code, writer.missing_bytes) or unsaved


def _unsaved(client: Client, task: str) -> int:
    """Wait for the files that its output goes to → CANNOT, which is said, if not all of it is there."""
    unsaved = 0
    for body in client.stream("wait", tasks=[task], files=True):
        if "files" in body:
            unsaved = command.say_unsaved(body["files"])
    return unsaved


def told_missing(ended: dict[str, Any], code: int, missing_bytes: int) -> int:
    """Our exit code for a task whose output is not complete: no success, and stderr says so."""
    if code or not missing_bytes:
        return code
    say(
        f"exit code {CANNOT}: {ended['id']} succeeded, and {size_text(missing_bytes)} of its output are missing",
        f"what is kept of it:  peerload logs {ended['id']}",
    )
    return CANNOT


def say_detached(task: str) -> int:
    """What is said when a task was left to itself → our exit code."""
    say(f"{task} runs on without us", f"join it again:  peerload attach {task}        peerload logs -f {task}")
    return DETACHED


def _needs_words(ended: dict[str, Any], code: int, reason: str) -> bool:
    """Whether the exit code alone does not tell what was the matter."""
    if reason in ("", f"exit code {code}"):
        return False
    return code in TOLD_IN_WORDS or bool(ended.get("out_of")) or WITHOUT_ROOM in reason


def told(ended: dict[str, Any], *, interrupted: bool) -> int:
    """Our exit code; a line on stderr where the code alone would not tell."""
    task, state, reason = str(ended.get("id", "")), str(ended.get("state", "")), str(ended.get("reason") or "")
    code = command.exit_code_of(ended)
    if state == "cancelled" and interrupted:
        return code if ended.get("exit_code") is not None else INTERRUPTED
    if state == "unknown" or code == CANNOT:
        say(f"{task} is {state}: {reason or 'it has no exit code'}", f"more:  peerload show {task}")
    elif _needs_words(ended, code, reason):
        say(f"{task}: {printable(reason)}", f"it ran on {ended['node']}" if ended.get("node") else "")
    elif (
        state == "failed" and ended.get("node") and os.isatty(2)
    ):  # elsewhere nothing but what the command says is read
        say(f"{task} failed on {printable(ended['node'])}: {printable(reason or f'exit code {code}')}")
    elif state == "cancelled":
        say(f"{task} was cancelled" + (f": {reason}" if reason else ""))
    return code
