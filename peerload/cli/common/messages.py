"""Exit codes of the command line, and its messages on stderr: errors with hints, and the outcomes of tasks."""

from __future__ import annotations

import os
import sys

from peerload.model.errors import PeerloadError, UsageError
from peerload.model.text import printable
from peerload.text.format import counted, say, size_text

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any, TextIO

    from peerload.model.errors import ConfigError


CANNOT = 125
"""Exit code: peerload itself failed."""
USAGE = 2
"""Exit code: a mistake on the command line."""
INTERRUPTED = 130
"""Exit code: ended by Ctrl-C."""
TIMED_OUT = 124
"""Exit code: `--timeout` expired."""
PIPE_CLOSED = 128 + 13
"""Exit code: as if ended by SIGPIPE."""
DEFAULT_HINT = "check this machine:  peerload doctor"
"""The hint of an error without one."""


def report(error: PeerloadError, debug_hint: list[str] | None = None, verb: str = "") -> None:
    """Print on stderr what happened and why, on one line, and the next command to type on another. verb: the typed verb, "" if
    unknown."""
    hint = error.hint or DEFAULT_HINT
    if isinstance(error, UsageError) and not error.hint:
        hint = f"what it takes:  peerload {verb} --help" if verb else "all of them:  peerload --help"
    if debug_hint is not None:
        hint = f"please report it, with what this prints:  peerload --debug {' '.join(debug_hint)}"
    try:
        sys.stdout.flush()
        say(str(error), hint)
    except BrokenPipeError:
        pipe_closed()


def mistake_as_json(mistake: ConfigError) -> dict[str, object]:
    return {
        "file": mistake.file or None,
        "line": mistake.line or None,
        "key": mistake.key,
        "what": mistake.says,
        "why": mistake.why,
        "hint": mistake.hint,
    }


def pipe_closed() -> int:
    """Discard the remaining output, since its reader has closed the pipe → the exit code."""
    discard(sys.stdout, sys.stderr)
    return PIPE_CLOSED


def discard(*streams: TextIO) -> None:
    """Redirect these streams to /dev/null, so that flushing them at exit does not fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


EXPLAINED_EXIT_CODES = (124, 126, 127)
"""Exit codes that are reported with a reason: time limit, cannot execute, not found."""
WITHOUT_ROOM = "; the disk of "
"""Part of the reason of a task whose output may not have been kept."""
DETACHED = 131
"""Exit code after Ctrl-\\: as for a command ended by SIGQUIT, so that nothing after && runs."""


def exit_code_of(task: dict[str, Any]) -> int:
    """The exit code for an ended task: its own, 128 + signal, or 125 if it has none."""
    code, signal = task.get("exit_code"), task.get("signal")
    if isinstance(code, int):
        return code & 0xFF
    return 128 + signal if isinstance(signal, int) and signal > 0 else 125


def say_unknown(task: dict[str, Any]) -> None:
    """Report on stderr that the outcome of a task is not known, and what to do."""
    name, reason, node = (printable(task.get(key) or "") for key in ("id", "reason", "node"))
    outlook = f"waiting for it, in case {node} comes back" if node else "no running copy of it is known"
    say(
        f"the outcome of {name} is not known: it may have ended" + (f": {reason}" if reason else ""),
        f"{outlook}; run it again:  peerload retry {name}        give it up:  peerload cancel {name}",
    )


def say_missing(task: dict[str, Any]) -> int:
    """Report on stderr that a task succeeded but part of its output is lost → CANNOT; 0 if nothing is lost."""
    if not task.get("missing_bytes"):
        return 0
    name, why = (printable(task.get(key) or "") for key in ("id", "reason"))
    say(
        f"exit code {CANNOT}: {name} succeeded, but part of its output is missing: {why}",
        f"the rest:  peerload logs {name}",
    )
    return CANNOT


def say_unsaved(files: dict[str, Any]) -> int:
    """Report on stderr that the output of a task is not completely in its file → CANNOT; 0 if it is."""
    name, state, why = (printable(files.get(key) or "") for key in ("id", "state", "why"))
    if state in ("", "saved"):
        return 0
    again = "; it will be tried again" if state == "postponed" else ""
    say(
        f"the output of {name} is not saved: {why}{again}",
        f"the kept part:  peerload logs {name}        details:  peerload show {name}",
    )
    return CANNOT


def say_notice(piece: dict[str, Any]) -> bool:
    """Report a notice within a stream of output on stderr → False if it is a piece of the output instead."""
    for key, say_it in (("unknown", say_unknown), ("away", _say_away), ("waits", _say_waits)):
        if key in piece:
            say_it(piece[key])
            return True
    return False


def _say_away(away: dict[str, Any]) -> None:
    """Report on stderr that the home of a task does not answer, only the node that runs it."""
    name, home, why = (printable(away.get(key) or "") for key in ("id", "home", "why"))
    say(f"{name}: its home {home} does not answer: {why}", "shown is what this node knows")


def _say_waits(waits: dict[str, Any]) -> None:
    """Report on stderr that a task has ended on another node and its home cannot store the result yet."""
    name, node, why = (printable(waits.get(key) or "") for key in ("id", "node", "why"))
    say(
        f"{name} has ended on {node}; its home does not have the result yet: {why}",
        f"the result is requested again; details:  peerload why {name}",
    )


def report_missing(ended: dict[str, Any], code: int, missing_bytes: int) -> int:
    """Report incomplete output of a task on stderr → the exit code, never 0."""
    if code or not missing_bytes:
        return code
    say(
        f"exit code {CANNOT}: {ended['id']} succeeded, and {size_text(missing_bytes)} of its output are missing",
        f"the kept part:  peerload logs {ended['id']}",
    )
    return CANNOT


def say_detached(task: str) -> int:
    say(f"detached from {task}; it runs on", f"join it again:  peerload attach {task}        peerload logs -f {task}")
    return DETACHED


def _needs_explanation(ended: dict[str, Any], code: int, reason: str) -> bool:
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
        how = {"failed": "failed", "cancelled": "was cancelled"}.get(state, f"is {state}")
        say(f"{task} {how}: {reason or 'it has no exit code'}", f"more:  peerload show {task}")
    elif _needs_explanation(ended, code, reason):
        say(f"{task}: {printable(reason)}", f"it ran on {ended['node']}" if ended.get("node") else "")
    elif (
        state == "failed" and ended.get("node") and os.isatty(2)
    ):  # only the command's own stderr is of interest elsewhere
        say(f"{task} failed on {printable(ended['node'])}: {printable(reason or f'exit code {code}')}")
    elif state == "cancelled":
        say(f"{task} was cancelled" + (f": {reason}" if reason else ""))
    return code


def say_conflicts(task: dict[str, Any]) -> None:
    """Report on stderr which outputs were stored under another name, because the file was changed here meanwhile."""
    kept = task.get("kept_beside") or 0
    if kept:
        name = printable(task.get("id") or "")
        say(
            f"{counted(kept, 'output')} of {name} {'is' if kept == 1 else 'are'} stored next to files that were changed here meanwhile",
            f"find them:  find . -name '*.peerload-{name.rpartition('/')[2]}'",
        )
