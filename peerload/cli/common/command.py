# ruff: noqa: PTH109, PTH111, PTH117, PTH118, PTH113, PTH119
# os.path, since pathlib would cost every command its quick start.
"""Submission: from the flags of `run`, `submit` and `map` to the request, and the messages about its reply."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from peerload.cli.common import files, options, suggestions, task_flags
from peerload.cli.common.errors import CANNOT
from peerload.client import environment
from peerload.model.errors import AgentSilent, AgentUnavailable, BadRequest, NeverRunnable, UsageError
from peerload.model.text import printable
from peerload.text import units
from peerload.text.format import number_text, say, shortened, size_text

if TYPE_CHECKING:
    from argparse import Namespace

    from peerload.client.connection import Client

ARGV_ITEMS_MAX = 32_768
ARGV_BYTES_MAX = 1 << 20
NAME_CHARACTERS_MAX = 128
"""The bounds of peerload.model, which is not imported: that would slow down every submit."""
PLACEMENT_ROUNDS = 9
PLACEMENT_ROUND_S = 0.1
"""Time for a task to find a node that has its directory."""
NODES_NAMED_MAX = 4
"""Nodes named on one line."""

_SCRATCH = b"-"
_INTERPRETERS = ("python", "bash", "sh", "dash", "zsh", "perl", "ruby", "node", "Rscript", "julia", "php", "env")


def command_options(verb: str, says: str, *, usage: str, epilog: str = "") -> options.Options:
    """The flags that `run` and `submit` have in common."""
    reader = options.Options(verb, says, usage=usage, epilog=epilog)
    reader.flag("-c", "--cpus", type=options.cpus, metavar="N", help="cores, may be a fraction (default 1)")
    reader.flag("--mem", type=units.size, metavar="8G", help="memory it needs")
    task_flags.add_device_flags(reader)
    task_flags.add_flags(reader, is_map=verb == "map")
    reader.flag("-t", "--time", type=units.duration, metavar="2h", help="stop it after this (exit code 124)")
    reader.flag("-J", "--name", help="name of the task (default: from the command)")
    reader.flag("-w", "--node", metavar="NAME", help="run it on this node only")
    reader.flag("-x", "--exclude", action="append", default=[], metavar="NAME", help="not on this node (repeatable)")
    reader.flag("-C", "--label", action="append", default=[], metavar="L", help="only where this label is (repeatable)")
    reader.flag("-d", "--chdir", metavar="DIR", help="run in DIR (default: here); - is a fresh scratch directory")
    files.add_flags(reader)
    reader.flag("--env", action="append", default=[], metavar="K=V", help="set a variable (repeatable)")
    reader.flag(
        "--export",
        action="append",
        default=[],
        metavar="NAME,…",
        help="send these variables although they look like secrets; `none` sends only named ones",
    )
    reader.flag("--prio", type=options.whole(-1_000_000, 1_000_000), default=0, metavar="N", help="greater goes first")
    reader.switch("--local", help="do not move it to another node")
    reader.flag("--migrations", type=options.whole(0, 1000), metavar="N", help="move it at most N times")
    reader.switch("--once", help="never start it twice; if its node is lost, its outcome stays unknown")
    reader.switch("--fast", help="start it elsewhere as soon as its node is declared dead: two copies may overlap")
    reader.flag(
        "--lease",
        type=options.lease,
        metavar="10m|auto",
        help="how long its node may be unreachable before it runs elsewhere; auto: a tenth of the time it has run",
    )
    reader.flag("-s", "--shell", metavar="'a | b'", help="run this line in /bin/sh instead of a command")
    reader.switch("--wait-for-node", help="wait for a node that can run it, if no known node ever can")
    reader.switch("--dry-run", help="print what would be submitted, submit nothing")
    return reader


def specification(flags: Namespace, words: list[str], verb: str) -> tuple[dict[str, Any], list[str]]:
    """The task's spec as the agent takes it, and the names of variables left out because they look like secrets."""
    argv = _argv(flags.shell, words, verb)
    suggestions.check_node_names(verb, [*([flags.node] if flags.node else []), *_listed(flags.exclude)])
    if flags.shell is None:
        suggestions.say_if_quoted(words, verb)
    variables, secret = environment.captured(
        os.environb, flags.export, flags.env, moved=flags.chdir is not None or files.travel(flags)
    )
    umask = os.umask(0o077)
    os.umask(umask)
    request = {"cpus": 1.0 if flags.cpus is None else flags.cpus}
    request |= _given(mem_bytes=flags.mem, **task_flags.device_request(flags, verb))
    placement = _given(
        node=flags.node,
        exclude=_listed(flags.exclude),
        labels=_listed(flags.label),
        local=flags.local,
        migrations_max=flags.migrations,
    )
    name = flags.name if flags.name is not None else task_name(argv, shell=flags.shell is not None)
    if not name.isprintable() and any("\udc80" <= character <= "\udcff" for character in name):
        raise UsageError(f"{verb}: --name {printable(name)!r} is not UTF-8", hint="a name of text:  --name NAME")
    if len(name) > NAME_CHARACTERS_MAX:
        raise UsageError(
            f"the name has {len(name)} characters; at most {NAME_CHARACTERS_MAX} are allowed",
            hint="a shorter one:  --name NAME",
        )
    return {
        "argv": argv,
        "directory": _directory(flags.chdir),
        "environment": environment.packed(variables),
        **_given(named=environment.named(flags.export, flags.env) or None),
        "umask": umask & 0o777,
        "name": name,
        "request": request,
        "placement": placement,
        "time_limit_s": flags.time or 0.0,
        "priority": flags.prio,
        **_promise(flags, verb),
    }, secret


def _promise(flags: Namespace, verb: str) -> dict[str, object]:
    """The guarantee and the lease of the task, where they are not the default."""
    if flags.once and flags.fast:
        raise UsageError(
            f"{verb}: --once and --fast contradict each other",
            hint="--once: never started twice        --fast: started again early, two copies may overlap",
        )
    guarantee = "once" if flags.once else "fast" if flags.fast else None
    if flags.lease == options.LEASE_AUTO:
        return _given(guarantee=guarantee, lease_auto=True)
    return _given(guarantee=guarantee, lease_s=flags.lease)


def task_name(argv: list[bytes], *, shell: bool) -> str:
    """The default name of a task: its program, or the script that an interpreter runs."""
    if shell:
        words = argv[-1].split()
        text = next((word for word in words if not _is_assignment(word)), b"sh").rstrip(b";|&") or b"sh"
    else:
        text = os.path.basename(argv[0])
        if text.rstrip(b"0123456789.").decode("utf-8", "replace") in _INTERPRETERS and len(argv) > 1:
            text = text if argv[1].startswith(b"-") else os.path.basename(argv[1]) or text
    return text.decode("utf-8", "replace")[:NAME_CHARACTERS_MAX]


def _is_assignment(word: bytes) -> bool:
    """Whether a shell reads it as `NAME=VALUE` before a command."""
    return word.partition(b"=")[0].decode("utf-8", "replace").isidentifier() and b"=" in word


def print_dry_run(spec: dict[str, Any], secret: list[str], flags: Namespace, **more: object) -> int:
    """Print what would be submitted. Of environment variables only the names are shown."""
    import msgpack

    variables = sorted(os.fsdecode(name) for name in msgpack.unpackb(spec["environment"]))
    shown = {**spec, "argv": [printable(word) for word in spec["argv"]], "directory": printable(spec["directory"])}
    shown |= {"environment": [printable(name) for name in variables], "left_out": secret, **more}
    if flags.json:
        from peerload.text.format import print_json

        print_json(shown)
        return 0
    lines = ["nothing was submitted; this would be:"]
    shown["umask"] = f"{spec['umask']:04o}"
    for key, value in shown.items():
        if value not in ([], {}, (), None):
            lines.append(f"  {key:14} {_readable(value)}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _readable(value: object) -> str:
    """A field as text: mappings as `name value`, lists with blanks or commas between."""
    if isinstance(value, dict):
        return ", ".join(f"{printable(key)} {_readable(one)}" for key, one in value.items())
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(one, (list, tuple)) for one in value):
            return ", ".join(map(_range, value))
        return " ".join(map(_readable, value))
    return number_text(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else printable(value)


def _range(numbers: list[int] | tuple[int, ...]) -> str:
    """A part of an array as one types it; anything else word by word."""
    if len(numbers) != len(("first", "last", "step")) or not all(isinstance(one, int) for one in numbers):
        return _readable(list(numbers))
    first, last, step = numbers
    return f"{first}" if first == last else f"{first}-{last}" + (f":{step}" if step != 1 else "")


def submit(client: Client, spec: dict[str, Any], *, input_comes: bool = False, **more: object) -> dict[str, Any]:
    """Queue the task, or an array of tasks, and return the agent's reply. ``more``: the other fields of `Submit` (docs/wire.md),
    of which False, None and empty ones are left out; ``input_comes``: it reads more than this."""
    fields = {key: value for key, value in more.items() if value} | ({"input_ends": False} if input_comes else {})
    try:
        return client.call("submit", token=os.urandom(16).hex(), spec=spec, **fields)
    except NeverRunnable as error:
        raise suggestions.mended(error, client, spec) from None
    except AgentSilent as error:
        error.hint = f"the task is queued if the agent goes on; then see:  peerload ls        {error.hint}"
        raise
    except AgentUnavailable as error:
        raise AgentUnavailable(
            "the agent went away before it had answered",
            why=error.why,
            hint="the task may be queued; see:  peerload up        peerload ls",
        ) from None


def say_left_out(secret: list[str]) -> None:
    """Say on a terminal which variables were not sent."""
    if secret and sys.stderr.isatty():
        say(
            f"not sent, since they look like secrets: {shortened(', '.join(secret), 200)}",
            f"to send one:  --export {secret[0]}",
        )


def say_declining(reply: dict[str, Any]) -> None:
    """Say on stderr which nodes decline the task just submitted, why, and what helps."""
    nodes_by_reason: dict[str, list[str]] = {}
    for node, why in (reply.get("declining") or {}).items():
        nodes_by_reason.setdefault(str(why), []).append(str(node))
    for why, nodes in nodes_by_reason.items():
        named = ", ".join(nodes[:NODES_NAMED_MAX])
        more = f" and {len(nodes) - NODES_NAMED_MAX} more" if len(nodes) > NODES_NAMED_MAX else ""
        helps = "policy" not in why
        say(
            f"{reply['id']} cannot run on {named}{more}: {why}",
            "another directory:  -d DIR        a fresh scratch directory on its node:  -d -" if helps else "",
        )


def warn_if_stranded(client: Client, reply: dict[str, Any], spec: dict[str, Any]) -> None:
    """Say on stderr, within a second, which nodes cannot take the task just submitted or why it cannot start now."""
    task = reply["id"]
    say_declining(reply)
    if reply.get("directory_here") is False:
        shown = printable(spec["directory"])
        if reply.get("members"):
            reason = "only nodes that have it will take the tasks"
        else:
            reason = _reason_still_queued(client, task)
        if reason:
            say(
                f"{task} waits: the directory {shown} is not on this machine: {reason}",
                f"cancel it:  peerload cancel {task}        name another:  -d DIR        a fresh scratch one:  -d -",
            )
    elif reply.get("placeable"):
        say(
            f"{task} waits: {reply['placeable']}",
            f"why:  peerload why {task}        cancel it:  peerload cancel {task}",
        )


def _reason_still_queued(client: Client, task: str) -> str:
    """The reason why a task is still queued after a second; "" as soon as it has found a node."""
    reason = ""
    for _ in range(PLACEMENT_ROUNDS):
        client.last = {}
        for _ended in client.stream("wait", tasks=[task], timeout_s=PLACEMENT_ROUND_S):
            return ""
        tasks = client.call("show", tasks=[task]).get("tasks") or [{}]
        if tasks[0].get("state") != "queued":
            return ""
        reason = str(tasks[0].get("reason") or "")
    return reason or "no node that has it has taken the task so far"


def exit_code_of(task: dict[str, Any]) -> int:
    """The exit code for an ended task: its own, 128 + signal, or 125 if it has none."""
    code, signal = task.get("exit_code"), task.get("signal")
    if isinstance(code, int):
        return code & 0xFF
    return 128 + signal if isinstance(signal, int) and signal > 0 else 125


def say_unknown(task: dict[str, Any]) -> None:
    """Say on stderr that the outcome of a task is not known, and what to do."""
    name, reason, node = (printable(task.get(key) or "") for key in ("id", "reason", "node"))
    outlook = f"waiting for it, in case {node} comes back" if node else "no copy of it is left that could end"
    say(
        f"the outcome of {name} is not known: it may have ended" + (f": {reason}" if reason else ""),
        f"{outlook}; run it again:  peerload retry {name}        give it up:  peerload cancel {name}",
    )


def say_missing(task: dict[str, Any]) -> int:
    """Say on stderr that a task succeeded but part of its output is lost → CANNOT; 0 if nothing is lost."""
    if not task.get("missing_bytes"):
        return 0
    name, why = (printable(task.get(key) or "") for key in ("id", "reason"))
    say(
        f"exit code {CANNOT}: {name} succeeded, but part of its output is missing: {why}",
        f"the rest:  peerload logs {name}",
    )
    return CANNOT


def say_unsaved(files: dict[str, Any]) -> int:
    """Say on stderr that the output of a task is not completely in its file → CANNOT; 0 if it is."""
    name, state, why = (printable(files.get(key) or "") for key in ("id", "state", "why"))
    if state in ("", "saved"):
        return 0
    again = "; it will be tried again" if state == "postponed" else ""
    say(
        f"the output of {name} is not saved: {why}{again}",
        f"what is kept of it:  peerload logs {name}        more:  peerload show {name}",
    )
    return CANNOT


def say_away(away: dict[str, Any]) -> None:
    """Say on stderr that the home of a task cannot be asked, only the node that runs it."""
    name, home, why = (printable(away.get(key) or "") for key in ("id", "home", "why"))
    say(f"{name}: its home {home} cannot be asked: {why}", "this is what is known here")


def say_waits(waits: dict[str, Any]) -> None:
    """Say on stderr that a task has ended on another node and its home cannot store the result yet."""
    name, node, why = (printable(waits.get(key) or "") for key in ("id", "node", "why"))
    say(
        f"{name} has ended on {node}; its home does not have the result yet: {why}",
        f"it is fetched again; more:  peerload why {name}",
    )


def _argv(shell: str | None, words: list[str], verb: str) -> list[bytes]:
    if shell is not None:
        if words:
            raise UsageError(
                f"{verb}: both a command and --shell are given: {words[0]!r}", hint="quote the whole line for -s"
            )
        words = ["/bin/sh", "-c", shell]
    if not words or not words[0]:
        raise UsageError(f"{verb}: the command is missing", hint=f"such as:  peerload {verb} hostname")
    argv = [os.fsencode(word) for word in words]
    total = sum(map(len, argv))
    if total > ARGV_BYTES_MAX or len(argv) > ARGV_ITEMS_MAX:
        raise BadRequest(
            f"the command has {len(argv)} words of {size_text(total)} in all",
            why=f"at most {ARGV_ITEMS_MAX} words and {size_text(ARGV_BYTES_MAX)} are allowed",
            hint="put the words into a file and have the command read it",
        )
    return argv


def _directory(chosen: str | None) -> bytes:
    if chosen == "-":
        return _SCRATCH
    try:
        here = os.getcwdb()
    except FileNotFoundError:
        if chosen is None or not os.path.isabs(chosen):
            raise BadRequest(
                "the current directory has been removed", hint="change to another, or name one:  -d DIR"
            ) from None
        here = b"/"
    if chosen is None:
        return here
    directory = os.path.normpath(os.path.join(here, os.path.expanduser(os.fsencode(chosen))))
    if os.path.isfile(directory):
        raise BadRequest(
            f"-d {printable(chosen)}", why="that is a file, not a directory", hint="a fresh scratch directory:  -d -"
        )
    return directory


def _given(**fields: object) -> dict[str, object]:
    """The fields that were given; the others have their defaults."""
    return {key: value for key, value in fields.items() if value or (value == 0 and value is not False)}


def _listed(values: list[str]) -> list[str]:
    return [name for value in values for name in value.split(",") if name]
