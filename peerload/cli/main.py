"""The `peerload` command: it finds the verb, runs it, and reports errors as one line and a hint.

Only the file of the verb in question is loaded, so that `peerload --help` costs hardly more than a bare Python.
"""

from __future__ import annotations

import errno
import os
import sys
from io import TextIOWrapper

from peerload import __version__
from peerload.cli.verbs import ALIASES, HIDDEN, VERBS, listed, load, suggested
from peerload.model.errors import PeerloadError, UsageError

CANNOT_BE_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF)
"""Errors of writing stdout that are no bugs: no room, a quota, a broken disk, a stdout that is closed."""
OPTIONS = ("--help", "--version", "--debug", "-h", "-V")

HELP = """\
usage: peerload [--debug] VERB ...

Many machines as one, without a head node.

{verbs}
  peerload VERB --help    what a verb takes
  --version               the version
  --debug                 show the traceback of an error

An ID is ws1/42, or 42 for this node's own, 42.7 for a member of an array, @ for my last task.
Exit codes: the task's own; 128+n if signal n ended it; 124 time limit; 125 peerload itself could not (no agent,
refused, lost); 126/127 cannot execute / not found; 2 a mistake on the command line.
"""


def main(words: list[str] | None = None) -> int:
    """Run `peerload WORDS` (default: this process's own) and return its exit code."""
    words = sys.argv[1:] if words is None else words
    _mend_standard_streams()
    debug = False
    while words and words[0] == "--debug":
        debug = True
        words = words[1:]
    try:
        code = _dispatch(words)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        if debug and not isinstance(error, (BrokenPipeError, KeyboardInterrupt)):
            raise
        return _failed(error, words)
    return code


def _mend_standard_streams() -> None:
    """Open the descriptors 0, 1 and 2 if they are closed, so that the agent's socket does not get one of these numbers, and escape
    characters that stdout cannot encode. A closed stdout stays one that cannot be written: what was asked for would be lost."""
    for descriptor, mode in enumerate((os.O_RDWR, os.O_RDONLY, os.O_RDWR)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, mode)  # it gets the lowest free number: this one
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(descriptor, "w", closefd=False))  # noqa: SIM115 -- lasts as long as the process
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _dispatch(words: list[str]) -> int:
    if not words:
        from peerload.cli.common.messages import USAGE

        sys.stderr.write(HELP.format(verbs=listed()))
        return USAGE
    verb, rest = ALIASES.get(words[0], words[0]), words[1:]
    if verb in ("--help", "-h", "help"):
        if rest and verb == "help":
            return _dispatch([rest[0], "--help"])
        sys.stdout.write(HELP.format(verbs=listed()))
        return 0
    if verb in ("--version", "-V", "version"):
        sys.stdout.write(f"peerload {__version__}\n")
        return 0
    if verb not in VERBS and verb not in HIDDEN:
        raise _unknown(verb)
    return load(verb)(rest)


def _unknown(verb: str) -> UsageError:
    if verb.startswith("-"):
        from difflib import get_close_matches

        near = ["--version"] if verb in ("-v", "-version") else get_close_matches(verb, OPTIONS, n=1, cutoff=0.8)
        also = f"did you mean  peerload {near[0]} ?        " if near else "a verb's own flags come after it        "
        return UsageError("no such option", why=repr(verb), hint=f"{also}all of them:  peerload --help")
    also = suggested(verb)
    return UsageError(
        "no such verb", why=repr(verb), hint=f"{also}{'        ' if also else ''}all of them:  peerload --help"
    )


def _failed(error: BaseException, words: list[str]) -> int:
    """Report an error on stderr → the exit code."""
    from peerload.cli.common.messages import CANNOT, INTERRUPTED, USAGE, pipe_closed, report

    if isinstance(error, BrokenPipeError):
        return pipe_closed()
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, PeerloadError):
        report(error, verb=words[0] if words and words[0] in VERBS else "")
        return USAGE if isinstance(error, UsageError) else CANNOT
    if isinstance(error, OSError) and error.errno in CANNOT_BE_WRITTEN and error.filename is None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)  # what is still buffered must not fail again at exit
        os.close(nowhere)
        hint = "the command itself may have succeeded:  peerload ls"
        report(PeerloadError("standard output cannot be written", why=error.strerror or str(error), hint=hint))
        return CANNOT
    report(PeerloadError(f"this is a bug in peerload ({type(error).__name__})", why=str(error)), debug_hint=words)
    return CANNOT
