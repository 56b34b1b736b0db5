"""The `peerload` command: the table of its verbs by purpose. It finds the verb, runs it, and reports errors as one
line and a hint.

Only the file of the requested verb is loaded, so that `peerload --help` costs little more than a bare Python.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from io import TextIOWrapper

from peerload import __version__
from peerload.model.errors import PeerloadError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

CANNOT_BE_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF)
"""Errors of writing stdout that are not bugs: a full disk, a quota, a broken disk, a closed stdout."""
GROUPS = {
    "Run commands": {
        "run": "run a command where there is room, as if it ran here",
        "submit": "queue a command and print its id",
        "assign": "assign the tasks of a program to nodes at the least cost",
        "map": "run a command once for each input, like GNU parallel",
        "sh": "open a shell on another node",
        "attach": "follow a running task as run does",
        "exec": "run a command inside a running task",
        "wait": "wait until tasks have ended",
    },
    "Look at tasks": {
        "ls": "list my tasks: unfinished ones and those of the last 24 hours",
        "show": "show everything about tasks",
        "why": "explain why a task waits, or why it runs where it does",
        "trace": "show where the time of a task went, on all nodes that had it",
        "logs": "print the output of tasks",
        "history": "list ended tasks: when, how long, where, what they used",
        "events": "list what happened: every change with its reason and time",
        "top": "watch nodes and tasks live",
        "web": "show the cluster in a browser; metrics for Prometheus",
    },
    "Change tasks": {
        "cancel": "stop tasks",
        "signal": "send a signal to running tasks",
        "hold": "keep waiting tasks from starting",
        "release": "let held tasks start",
        "prio": "change the priority of waiting tasks",
        "group": "limit how many tasks of a group run at a time; pause and resume groups",
        "retry": "queue ended tasks again",
        "clean": "delete ended tasks and their outputs",
        "files": "show the files of tasks that are kept here, and remove them",
    },
    "Nodes": {
        "up": "start an agent for me on this machine",
        "down": "stop my agent (--all: its running tasks too)",
        "nodes": "list the nodes: state, cores, memory, GPUs, tasks",
        "power": "show the power of this node, and its sensors",
        "energy": "print the joules of nodes, tasks and users",
        "drain": "have a node take no more tasks",
        "undrain": "have a node take tasks again",
        "doctor": "find the usual problems and the commands that fix them",
        "config": "show the settings and where each comes from; check a configuration file",
        "service": "install, upgrade or uninstall the service for all users of this machine",
        "agent": "run the agent in the foreground",
    },
    "Cluster": {
        "invite": "let another machine join: prints the command to type there",
        "join": "make this machine a member of another machine's cluster",
        "leave": "take this node out of its cluster",
        "forget": "drop a node that is gone for good",
        "revoke": "shut a node out of the cluster",
        "cluster": "make a cluster; show which one is used here",
    },
    "Policies": {
        "policy": "list and explain policies and presets; check a preset",
        "sim": "simulate what a policy does to response times",
        "replay": "repeat the decisions of a recorded agent, and compare",
    },
    "More": {
        "demo": "start three agents and a broker on this machine, and give them work",
        "completions": "print a script that completes verbs, flags, ids and names in a shell",
    },
}
"""Each verb with a one-line description, by purpose."""
VERBS = {verb: says for group in GROUPS.values() for verb, says in group.items()}
HIDDEN = ("launcher",)
"""Verbs that only services run."""
FILES = {
    "agent": ("up", "down", "agent", "launcher"),
    "change": ("cancel", "signal", "hold", "release", "prio", "group", "retry", "clean", "files"),
    "cluster": ("cluster", "leave", "forget", "revoke"),
    "energy": ("power", "energy"),
    "join": ("invite", "join"),
    "ls": ("ls", "why", "logs", "history", "events"),
    "nodes": ("nodes", "top", "drain", "undrain"),
    "run": ("run", "sh", "attach", "exec"),
    "show": ("show", "trace"),
}
"""Files with several verbs, each a function with the verb's name. Any other verb is `main` in a file with the verb's name."""
ALIASES = {"kill": "cancel", "list": "ls", "log": "logs", "ps": "ls"}
"""Words that users may type in place of a verb; `version` means --version."""
_STOP_OR_DELETE = (
    "stop tasks:  peerload cancel        delete ended ones:  peerload clean        drop a node:  peerload forget"
)
_TASKS_OR_AGENT = "a task:  peerload {}        the agent:  peerload {}"
SUGGESTIONS = {
    "add": "queue a command:  peerload submit CMD        let another machine join:  peerload invite",
    "delete": _STOP_OR_DELETE,
    "enqueue": "peerload release ID",
    "follow": "peerload logs -f ID",
    "info": "a task:  peerload show ID        the nodes:  peerload nodes        the settings:  peerload config",
    "parallel": "commands:  peerload map 'CMD {}' ::: a b c        tasks at a time:  peerload up --slots N  or  peerload group set G --slots N",
    "pause": "a task:  peerload hold        a group:  peerload group pause G        a node:  peerload drain",
    "queue": "list the queue:  peerload ls        queue a command:  peerload submit CMD",
    "restart": _TASKS_OR_AGENT.format("retry", "down ; peerload up"),
    "resume": "a task:  peerload release        a group:  peerload group resume G        a node:  peerload undrain",
    "remove": _STOP_OR_DELETE,
    "reset": "peerload cancel all; peerload clean --all",
    "rm": _STOP_OR_DELETE,
    "sbatch": "peerload submit CMD",
    "scancel": "peerload cancel",
    "sinfo": "peerload nodes",
    "squeue": "peerload ls",
    "srun": "peerload run CMD",
    "stash": "peerload hold ID        a new one:  peerload submit --held CMD",
    "start": _TASKS_OR_AGENT.format("run CMD", "up"),
    "status": "tasks:  peerload ls        nodes:  peerload nodes        both:  peerload top --once        problems:  peerload doctor",
    "stop": _TASKS_OR_AGENT.format("cancel", "down"),
    "switch": "peerload prio N ID",
}
"""Hints for words that users may type."""
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


def process() -> int:
    """Run `main` in a process that ends afterwards. The objects alive by then are hidden from the garbage collector, whose
    last run over all of them would take a tenth of the time of a short command."""
    code = main()
    gc.freeze()
    return code


def main(words: list[str] | None = None) -> int:
    """Run `peerload WORDS` (default: this process's own) and return its exit code."""
    words = sys.argv[1:] if words is None else words
    _repair_standard_streams()
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


def _repair_standard_streams() -> None:
    """Open the descriptors 0, 1 and 2 if they are closed, so that the agent's socket does not get one of these numbers, and escape
    characters that stdout cannot encode. Writing to a closed stdout still fails, so that output is not lost silently."""
    for descriptor, mode in enumerate((os.O_RDWR, os.O_RDONLY, os.O_RDWR)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, mode)  # gets the lowest free number, which is this one
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


def load(verb: str) -> Callable[[list[str]], int]:
    """The function that runs this verb."""
    file, function = next(((file, verb) for file, verbs in FILES.items() if verb in verbs), (verb, "main"))
    run: Callable[[list[str]], int] = getattr(__import__(f"peerload.cli.verbs.{file}", fromlist=[function]), function)
    return run


def listed() -> str:
    groups = (
        f"{title}\n" + "".join(f"  {verb:12}{says}\n" for verb, says in verbs.items())
        for title, verbs in GROUPS.items()
    )
    return "\n".join(groups)


def suggested(word: str) -> str:
    """A hint for a word that is not a verb; "" if there is none."""
    if word in SUGGESTIONS:
        return SUGGESTIONS[word]
    from difflib import get_close_matches

    near = get_close_matches(word, [*VERBS, *ALIASES], n=1)
    return f"did you mean  peerload {ALIASES.get(near[0], near[0])} ?" if near else ""


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
    from peerload.cli.common.messages import CANNOT, INTERRUPTED, USAGE, discard, pipe_closed, report

    if isinstance(error, BrokenPipeError):
        return pipe_closed()
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, PeerloadError):
        report(error, verb=words[0] if words and words[0] in VERBS else "")
        return USAGE if isinstance(error, UsageError) else CANNOT
    if isinstance(error, OSError) and error.errno in CANNOT_BE_WRITTEN and error.filename is None:
        discard(sys.stdout)
        hint = "the command itself may have succeeded:  peerload ls"
        report(PeerloadError("standard output cannot be written", why=error.strerror or str(error), hint=hint))
        return CANNOT
    report(PeerloadError(f"this is a bug in peerload ({type(error).__name__})", why=str(error)), debug_hint=words)
    return CANNOT
