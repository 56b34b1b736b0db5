"""Exit codes of the command line, and how an error is reported: one line with what and why, one with what to type next."""

from __future__ import annotations

import os
import sys

from peerload.cli.common.verb_table import VERBS
from peerload.model.errors import PeerloadError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from peerload.model.errors import ConfigError

CANNOT = 125
"""Exit code: peerload itself could not do what was asked."""
USAGE = 2
"""Exit code: a mistake on the command line."""
INTERRUPTED = 130
"""Exit code: ended by Ctrl-C."""
TIMED_OUT = 124
"""Exit code: the time of `--timeout` was up."""
PIPE_CLOSED = 128 + 13
"""Exit code: as if ended by SIGPIPE."""
DEFAULT_HINT = "check this machine:  peerload doctor"
"""The hint of an error without one."""


def report(error: PeerloadError, debug_hint: list[str] | None = None, verb: str = "") -> None:
    """Say on stderr what happened and why, on one line, and the next command to type on another."""
    from peerload.model.text import printable

    hint = error.hint or DEFAULT_HINT
    if isinstance(error, UsageError) and not error.hint:
        known = verb in VERBS
        hint = f"what it takes:  peerload {verb} --help" if known else "all of them:  peerload --help"
    if debug_hint is not None:
        hint = f"please report it, with what this prints:  peerload --debug {' '.join(debug_hint)}"
    lines = f"peerload: {printable(str(error))}\n"
    if hint:
        lines += f"  {printable(hint)}\n"
    try:
        sys.stdout.flush()
        sys.stderr.write(lines)
        sys.stderr.flush()
    except BrokenPipeError:
        pipe_closed()


def mistake_as_json(mistake: ConfigError) -> dict[str, object]:
    """A mistake in a file, for ``--json``."""
    return {
        "file": mistake.file or None,
        "line": mistake.line or None,
        "key": mistake.key,
        "what": mistake.says,
        "why": mistake.why,
        "hint": mistake.hint,
    }


def pipe_closed() -> int:
    """Discard the remaining output, since its reader has gone → the exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    return PIPE_CLOSED
