"""The `peerload` command: finds the verb, runs it, and turns errors into one line and a hint.

Everything but the verb asked for stays unloaded, so that `peerload --help` costs hardly more than a bare Python.
"""

from __future__ import annotations

import errno
import os
import sys
from io import TextIOWrapper

from peerload import __version__
from peerload.model.errors import PeerloadError, UsageError

CANNOT = 125
"""Exit code: peerload itself could not."""
USAGE = 2
"""Exit code: the command line makes no sense."""
INTERRUPTED = 130

VERBS = (
    ("up", "start an agent for me on this machine"),
    ("down", "stop it (--all: its running tasks too)"),
    ("agent", "be the agent, in the foreground"),
    ("run", "run a command where there is room, as if it ran here"),
    ("sh", "a shell on another node"),
    ("submit", "queue a command, print its id"),
    ("map", "run a command once for each input, as GNU parallel does"),
    ("ls", "my tasks: unfinished ones and those of the last 24 hours"),
    ("history", "ended tasks: when, how long, where, what they used"),
    ("show", "everything about a task"),
    ("why", "why a task waits: a reason for every node; or why it went where it went"),
    ("events", "what happened: every change with its reason and time"),
    ("logs", "the output of a task"),
    ("attach", "join a running task: its output, its input, its end"),
    ("exec", "run a command inside a running task"),
    ("wait", "block until tasks have ended"),
    ("cancel", "stop tasks"),
    ("signal", "send a signal to running tasks"),
    ("hold", "keep waiting tasks back"),
    ("release", "let held tasks go on"),
    ("prio", "change the priority of waiting tasks"),
    ("group", "groups of tasks: how many of each at a time, pause, resume"),
    ("retry", "queue what a task was to run once more"),
    ("clean", "drop ended tasks and their outputs"),
    ("drain", "have this node take no more tasks"),
    ("undrain", "have it take tasks again"),
    ("nodes", "every node: state, load, cpu, memory, tasks"),
    ("invite", "have another machine join: prints the line to type there"),
    ("join", "make this machine a member of another's cluster"),
    ("leave", "take this node out of its cluster"),
    ("forget", "say that a node is gone for good"),
    ("revoke", "shut a node out of the cluster"),
    ("cluster", "make a cluster for several machines; show which one is used here"),
    ("policy", "the policies there are; what each is and what its knobs do; check a preset"),
    ("sim", "what a policy does to response times, by simulation"),
    ("replay", "decide a recording of an agent again, and compare"),
    ("doctor", "what usually goes wrong here, and what mends it"),
    ("config", "the settings in force and where each comes from; check a configuration file"),
    ("service", "the service for all users of this machine: install, upgrade, uninstall"),
    ("completions", "what has a shell complete verbs, flags, ids and names"),
    ("top", "the cluster at a glance"),
    ("demo", "three agents and a broker on this machine, at work"),
)

HIDDEN = ("launcher",)
"""Verbs that services run, and nobody else."""
CANNOT_BE_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
"""What writing our output may fail with, for which nobody here is to blame."""
DEFAULT_HINT = "what may be wrong here:  peerload doctor"
"""Where an error does not know better."""
OPTIONS = ("--help", "--version", "--debug", "-h", "-V")

HELP = f"""\
usage: peerload [--debug] VERB ...

Many machines as one, without a head node.

{chr(10).join(f"  {name:11} {says}" for name, says in VERBS)}

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
    except BrokenPipeError:
        return _pipe_closed()
    except KeyboardInterrupt:
        return INTERRUPTED
    except PeerloadError as error:
        if debug:
            raise
        report(error, verb=words[0] if words else "")
        return USAGE if isinstance(error, UsageError) else CANNOT
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.errno in CANNOT_BE_WRITTEN and error.filename is None:
            return _output_refused(error)
        report(PeerloadError(f"this is a bug in peerload ({type(error).__name__})", why=str(error)), debug_hint=words)
        return CANNOT
    return code


def _mend_standard_streams() -> None:
    """Make sure that 0, 1 and 2 are open, lest the agent's socket gets one of these numbers and output goes there,
    and that no character is one which stdout cannot show."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 -- lasts as long as the process
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _dispatch(words: list[str]) -> int:
    if not words:
        sys.stderr.write(HELP)
        return USAGE
    verb, rest = words[0], words[1:]
    if verb in ("--help", "-h", "help"):
        if rest and verb == "help":
            return _dispatch([rest[0], "--help"])
        sys.stdout.write(HELP)
        return 0
    if verb in ("--version", "-V"):
        sys.stdout.write(f"peerload {__version__}\n")
        return 0
    if verb not in dict(VERBS) and verb not in HIDDEN:
        raise _unknown(verb)
    module = __import__(f"peerload.cli.verbs.{verb}", fromlist=["main"])
    code: int = module.main(rest)
    return code


def _unknown(verb: str) -> UsageError:
    from difflib import get_close_matches

    if verb.startswith("-"):
        near = ["--version"] if verb in ("-v", "-version") else get_close_matches(verb, OPTIONS, n=1, cutoff=0.8)
        also = f"did you mean  peerload {near[0]} ?        " if near else "a verb's own flags come after it        "
        return UsageError("no such option", why=repr(verb), hint=f"{also}all of them:  peerload --help")
    near = get_close_matches(verb, [name for name, _ in VERBS], n=1)
    also = f"did you mean  peerload {near[0]} ?        " if near else ""
    return UsageError("no such verb", why=repr(verb), hint=f"{also}all of them:  peerload --help")


def report(error: PeerloadError, debug_hint: list[str] | None = None, verb: str = "") -> None:
    """Say on stderr what happened and why, on one line, and the next command to type on another."""
    from peerload.text.format import printable

    hint = error.hint or DEFAULT_HINT
    if isinstance(error, UsageError) and not error.hint:
        known = verb in dict(VERBS)
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
        _pipe_closed()


def _output_refused(error: OSError) -> int:
    """Where our output goes there is no room, or it cannot be written for another reason."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # what is left of it is not to fail once more at our end
    os.close(nowhere)
    hint = "what was asked for may have been done all the same:  peerload ls"
    report(PeerloadError("standard output cannot be written", why=error.strerror or str(error), hint=hint))
    return CANNOT


def _pipe_closed() -> int:
    """Whoever read our output has gone: end quietly, as if by SIGPIPE, with nothing left to flush."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    return 128 + 13
