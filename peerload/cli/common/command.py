# ruff: noqa: PTH109, PTH110, PTH111, PTH113, PTH117, PTH118, PTH119
# os.path, since pathlib would cost every command its quick start.
"""Submission: converts the flags of `run`, `submit` and `map` to a request, sends the files along, reports on the
reply, and gives hints about likely mistakes. The limits are those of peerload.model, which is not imported: that would slow
down every submit."""

from __future__ import annotations

import os
import sys

from peerload.cli.common import options
from peerload.client import submission
from peerload.model.errors import AgentSilent, AgentUnavailable, BadRequest, NeverRunnable, SnapshotWanted, UsageError
from peerload.model.text import printable
from peerload.text.format import counted, number_text, say, shortened, size_text
from peerload.text.units import duration, invalid, size

TYPE_CHECKING = False

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence
    from typing import Any

    from peerload.client.connection import AgentConnection
    from peerload.files.tree import Found


ARGV_ITEMS_MAX = 32_768
ARGV_BYTES_MAX = 1 << 20
NAME_CHARACTERS_MAX = 128
"""The limits of peerload.model, which is not imported: that would slow down every submit."""

_SCRATCH = b"-"
_INTERPRETERS = ("python", "bash", "sh", "dash", "zsh", "perl", "ruby", "node", "Rscript", "julia", "php", "env")


def command_options(verb: str, says: str, *, usage: str, epilog: str = "") -> options.Options:
    reader = options.Options(verb, says, usage=usage, epilog=epilog)
    reader.flag("-c, --cpus N", help="cores, may be a fraction (default 1)", type=options.cpus)
    reader.switch("--overcommit", help="also run it where only 0.8 of its cores are guaranteed")
    reader.flag("--mem 8G", help="memory it needs", type=size)
    add_device_flags(reader)
    add_flags(reader, is_map=verb == "map")
    reader.flag("-t, --time 2h", help="stop it after this (exit code 124)", type=duration)
    reader.flag("--est 5m", help="its expected run time", type=duration)
    reader.flag(
        "--prefer", help="what placement by energy minimizes: presets `energy`", choices=("time", "balanced", "energy")
    )
    reader.flag(
        "--defer-until T", help="start when energy is cheapest, but not later than T: 8h, 06:00", type=options.instant
    )
    reader.flag("-J, --name", help="name of the task (default: from the command)")
    reader.flag("-w, --node NAME", help="run it on this node only")
    reader.flag("-x, --exclude NAME …", help="not on this node (repeatable)")
    reader.flag("-C, --label L …", help="only where this label is (repeatable)")
    reader.flag("-d, --chdir DIR", help="run in DIR (default: here); - is a fresh scratch directory")
    add_file_flags(reader)
    reader.flag(
        "--env K=V|PATH …",
        help="set a variable (repeatable); or run it in the environment of this lock file: requirements.txt, uv.lock,"
        " pyproject.toml, conda-lock.yml",
    )
    reader.flag(
        "--export NAME,… …", help="send these variables although they look like secrets; `none` sends only named ones"
    )
    reader.flag("--prio N", help="greater goes first", type=options.whole(-1_000_000, 1_000_000), default=0)
    reader.switch("--local", help="do not move it to another node")
    reader.flag("--migrations N", help="move it at most N times", type=options.whole(0, 1000))
    reader.switch("--once", help="never start it twice; if its node is lost, its outcome stays unknown")
    reader.switch("--fast", help="start it elsewhere as soon as its node is declared dead: two copies may overlap")
    reader.flag(
        "--lease 10m|auto",
        help="how long its node may be unreachable before it runs elsewhere; auto: a tenth of the time it has run",
        type=options.lease,
    )
    reader.flag("-s, --shell 'a | b'", help="run this line in /bin/sh instead of a command")
    reader.switch("--wait-for-node", help="wait for a node that can run it, if no known node ever can")
    reader.switch("--dry-run", help="print what would be submitted, submit nothing")
    return reader


def specification(flags: Namespace, words: list[str], verb: str) -> tuple[dict[str, Any], list[str]]:
    """The task's spec for the request, and the names of variables left out because they look like secrets."""
    argv = _argv(flags.shell, words, verb)
    locks = [word for word in flags.env if "=" not in word]
    for word in locks:
        if word.isidentifier() and not os.path.exists(word):
            hint = f"to send a variable of yours:  --export {word}"
            raise UsageError(f"{verb}: --env takes NAME=VALUE or a lock file, not {word!r}", hint=hint)
    flags.env = [word for word in flags.env if "=" in word]
    if len(locks) > 1:
        raise UsageError(f"{verb}: --env names two environments: {printable(' '.join(locks))}", hint="--env PATH")
    check_node_names(verb, [*([flags.node] if flags.node else []), *_listed(flags.exclude)])
    if flags.shell is None:
        say_if_quoted(words, verb)
    variables, secret = submission.captured_variables(
        os.environb, flags.export, flags.env, moved=flags.chdir is not None
    )
    umask = os.umask(0o077)
    os.umask(umask)
    request = {"cpus": 1.0 if flags.cpus is None else flags.cpus}
    request |= _given(mem_bytes=flags.mem, overcommit=flags.overcommit, **device_request(flags, verb))
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
    spec = {
        "argv": argv,
        "directory": _directory(flags.chdir),
        "environment": submission.packed_variables(variables),
        **_given(named=submission.named_variables(flags.export, flags.env) or None),
        "umask": umask & 0o777,
        "name": name,
        "request": request,
        "placement": placement,
        "time_limit_s": flags.time or 0.0,
        "priority": flags.prio,
        **_given(est_s=flags.est, prefer=flags.prefer),
        **_promise(flags, verb),
    }
    if locks:
        submission.add_lock(spec, locks[0])
    elif flags.shell is None:
        submission.add_script(spec)
    return spec, secret


def _promise(flags: Namespace, verb: str) -> dict[str, object]:
    """The guarantee and the lease of the task, if not the default."""
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
    """True if a shell would read this word as `NAME=VALUE` before a command."""
    return word.partition(b"=")[0].decode("utf-8", "replace").isidentifier() and b"=" in word


def print_dry_run(spec: dict[str, Any], secret: list[str], flags: Namespace, **more: object) -> int:
    """Print what would be submitted, without the values of environment variables."""
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
    """A field as text: mappings as `name value`, lists separated by blanks or commas."""
    if isinstance(value, dict):
        return ", ".join(f"{printable(key)} {_readable(one)}" for key, one in value.items())
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(one, (list, tuple)) for one in value):
            return ", ".join(map(_range, value))
        return " ".join(map(_readable, value))
    return number_text(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else printable(value)


def _range(numbers: list[int] | tuple[int, ...]) -> str:
    """A range of an array in command-line form; anything else word by word."""
    if len(numbers) != len(("first", "last", "step")) or not all(isinstance(one, int) for one in numbers):
        return _readable(list(numbers))
    first, last, step = numbers
    return f"{first}" if first == last else f"{first}-{last}" + (f":{step}" if step != 1 else "")


def new_token() -> str:
    """A new token, which identifies one submission: repeating it with the same token queues nothing."""
    return os.urandom(TOKEN_BYTES).hex()


def repeat_hint(token: str) -> str:
    return f"the same again is queued only once with:  peerload submit --token {token} ...        or look:  peerload ls"


def submit(
    client: AgentConnection,
    spec: dict[str, Any],
    terms: dict[str, Any],
    *,
    token: str = "",
    input_comes: bool = False,
    **more: object,
) -> dict[str, Any]:
    """Queue the task, or an array of tasks → the agent's reply. ``token``: lets the user repeat the submission safely
    (default: a new one); ``more``: the other fields of `Submit` (docs/wire.md), omitted if False, None or empty;
    ``input_comes``: more input follows."""
    fields = {key: value for key, value in more.items() if value} | ({"input_ends": False} if input_comes else {})
    repeat = repeat_hint(token) if token else "see:  peerload up        peerload ls"
    token = token or new_token()
    try:
        try:
            return client.call(
                "submit", token=token, spec=spec, terms=terms, freezes=submission.may_freeze(spec), **fields
            )
        except SnapshotWanted:
            freeze_directory(client, spec, terms)
            return client.call("submit", token=token, spec=spec, terms=terms, **fields)
    except NeverRunnable as error:
        raise mended(error, client, spec) from None
    except AgentSilent as error:
        why = "; ".join(filter(None, (error.why, NOT_KNOWN)))
        raise AgentSilent(error.what, why=why, hint=f"{repeat}        {error.hint}") from None
    except AgentUnavailable as error:
        raise AgentUnavailable(
            f"the agent disconnected before it answered: {NOT_KNOWN}", why=error.why, hint=repeat
        ) from None


NOT_KNOWN = "it is not known whether the task is queued"
TOKEN_BYTES = 16
TOKEN_LENGTH_MIN, TOKEN_LENGTH_MAX = 8, 64
"""The limits of peerload.wire.control."""
PLACEMENT_ROUNDS = 9
PLACEMENT_ROUND_S = 0.1
"""Time for a task to find a node that has its directory."""
NODES_NAMED_MAX = 4


def say_left_out(secret: list[str]) -> None:
    """Report on a terminal which variables were not sent."""
    if secret and sys.stderr.isatty():
        say(
            f"not sent, since they look like secrets: {shortened(', '.join(secret), 200)}",
            f"to send one:  --export {secret[0]}",
        )


def say_declining(reply: dict[str, Any]) -> None:
    """Report on stderr which nodes decline the task just submitted, why, and how to fix it."""
    nodes_by_reason: dict[str, list[str]] = {}
    for node, why in (reply.get("declining") or {}).items():
        nodes_by_reason.setdefault(str(why), []).append(str(node))
    for why, nodes in nodes_by_reason.items():
        named = ", ".join(nodes[:NODES_NAMED_MAX])
        more = f" and {len(nodes) - NODES_NAMED_MAX} more" if len(nodes) > NODES_NAMED_MAX else ""
        helps = "policy" not in why
        say(
            f"{reply['id']} cannot run on {named}{more}: {why}",
            "another directory:  -d DIR        take this one along:  --snapshot        a fresh one:  -d -"
            if helps
            else "",
        )


def warn_if_stranded(client: AgentConnection, reply: dict[str, Any], spec: dict[str, Any]) -> None:
    """Report on stderr, within a second, which nodes cannot take the task just submitted or why it cannot start now."""
    task = reply["id"]
    if not reply.get("declining_told"):
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
                f"cancel it:  peerload cancel {task}        another:  -d DIR        a fresh one:  -d -",
            )
    elif reply.get("placeable"):
        say(
            f"{task} waits: {reply['placeable']}",
            f"why:  peerload why {task}        cancel it:  peerload cancel {task}",
        )


def _reason_still_queued(client: AgentConnection, task: str) -> str:
    """The reason why a task is still queued after a second; returns "" as soon as the task has a node."""
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
    """The given fields, without those at their defaults."""
    return {key: value for key, value in fields.items() if value or (value == 0 and value is not False)}


AFTER_MAX = 100
RETRIES_MAX = 100
TAGS_MAX = 16
TAG_VALUE_LENGTH_MAX = 128


def add_flags(reader: options.Options, *, is_map: bool = False) -> None:
    """Add the flags for group, dependencies, tags and retries. is_map: without `--tag`, which means something else in `map`."""
    reader.flag("--after ID …", help="start after this task has ended (repeatable; an array: all of it)")
    reader.flag("--after-ok ID …", help="start after this task has succeeded; cancelled if it does not (repeatable)")
    reader.flag("--group G", help="the group whose slots it uses:  peerload group")
    name = "--task-tag" if is_map else "--tag"
    reader.flag(
        name, dest="tags", action="append", default=[], metavar="K=V", help="a tag to select it by (repeatable)"
    )
    reader.flag(
        "--retries N",
        help="run it again up to N times if it fails (PEERLOAD_ATTEMPT counts)",
        type=options.whole(0, RETRIES_MAX),
        default=0,
    )
    add_completion_flags(reader)


def terms(flags: Namespace, verb: str) -> dict[str, object]:
    """The options for the request, without defaults. Raises UsageError."""
    if flags.retries and flags.once:
        raise UsageError(
            f"{verb}: --once and --retries contradict each other",
            hint="--once: never started twice        --retries N: started again when it has failed",
        )
    if flags.group is not None:
        flags.group = options.group_name(flags.group, verb)
    after, after_ok = _listed(flags.after), _listed(flags.after_ok)
    for flag, names in (("--after", after), ("--after-ok", after_ok)):
        if len(names) > AFTER_MAX:
            raise UsageError(
                f"{verb}: {flag} names {len(names)} tasks; at most {AFTER_MAX} are allowed",
                hint="the id of an array means all its members:  --after 42",
            )
    given = {
        "group": flags.group,
        "after": after,
        "after_ok": after_ok,
        "retries": flags.retries,
        "tags": _tags(flags, verb),
        "start_by": flags.defer_until,
    }
    return {key: value for key, value in given.items() if value} | completion_terms(flags, verb)


def _tags(flags: Namespace, verb: str) -> list[str]:
    """Tags as `key=value`, each key once; the last value counts. Raises UsageError."""
    tags: dict[str, str] = {}
    for word in flags.tags:
        key, equals, value = word.partition("=")
        is_key = (
            0 < len(key) <= options.GROUP_LENGTH_MAX
            and options.GROUP_CHARACTERS.issuperset(key)
            and key[0] not in "._-"
        )
        if not is_key or not equals or len(value) > TAG_VALUE_LENGTH_MAX or not (value.isprintable() or not value):
            raise UsageError(
                f"{verb}: {printable(word[:60])!r} is not a tag",
                hint=f"such as:  --tag project=mnist        the key has {options.GROUP_SAYS}",
            )
        tags[key] = value
    if len(tags) > TAGS_MAX:
        raise UsageError(f"{verb}: {len(tags)} tags; at most {TAGS_MAX} are allowed")
    return [f"{key}={value}" for key, value in tags.items()]


def _listed(values: list[str]) -> list[str]:
    return list(dict.fromkeys(name for value in values for name in value.split(",") if name))


PATH_BYTES_MAX = 4096
NOTIFY_BYTES_MAX = 64 << 10


def add_completion_flags(reader: options.Options) -> None:
    """Add the flags for output files and notifications: `-o`, `-e` and `--notify`."""
    reader.flag(
        "-o, --output FILE",
        help="write its stdout to this file; %%j is its number, %%A its array's, %%a its member's, %%x its name",
    )
    reader.flag("-e, --error FILE", help="the same for its stderr; both may be one file")
    reader.flag(
        "--notify CMD",
        help="run this line in /bin/sh on this node when it has ended (an array: all of it);"
        " or notify https://URL, ntfy:TOPIC or mail:ADDRESS",
    )


def completion_terms(flags: Namespace, verb: str) -> dict[str, object]:
    """The given options. Raises UsageError."""
    found: dict[str, object] = {}
    for flag, key, pattern in (("-o", "output_file", flags.output), ("-e", "error_file", flags.error)):
        if pattern is not None:
            found[key] = _absolute(pattern, f"{verb}: {flag}")
    if flags.notify is not None:
        command = os.fsencode(flags.notify)
        if not command.strip() or b"\0" in command or len(command) > NOTIFY_BYTES_MAX:
            raise UsageError(
                f"{verb}: --notify needs a command of at most {NOTIFY_BYTES_MAX} bytes",
                hint="such as:  --notify 'notify-send \"$PEERLOAD_TASK_ID $PEERLOAD_STATE\"'",
            )
        from peerload import notification

        if why := notification.objection(flags.notify):
            raise UsageError(f"{verb}: --notify {flags.notify!r} cannot be used: {why}")
        found["notify"] = command
    return found


def _absolute(pattern: str, flag: str) -> bytes:
    """The pattern as an absolute path; a % in the working directory is escaped."""
    raw = os.path.expanduser(os.fsencode(pattern))
    if not raw or raw.endswith(b"/"):
        raise UsageError(f"{flag} {pattern!r} names no file", hint=f"such as:  {flag.rpartition(' ')[2]} out-%j.txt")
    if not raw.startswith(b"/"):
        try:
            here = os.getcwdb()
        except FileNotFoundError:
            raise UsageError(f"{flag} {pattern!r}: the current directory has been removed") from None
        raw = os.path.join(here.replace(b"%", b"%%"), raw)
    if len(raw) > PATH_BYTES_MAX:
        raise UsageError(f"{flag}: the path has {len(raw)} bytes; at most {PATH_BYTES_MAX} are allowed")
    return raw


GPUS_MAX = 1024
OOM_RETRIES_MAX = 16


def add_device_flags(reader: options.Options) -> None:
    reader.flag("-G, --gpus N", help="GPUs, all on one node; 0.25: a fraction of one", type=gpus)
    reader.flag("--gpu-mem 12G", help="memory of each GPU", type=size)
    reader.flag(
        "--gpu-prefer 0,1 …",
        help="GPUs to take first: numbers, prefixes of names (GPU-ab12), or patterns of models (A100*)",
    )
    reader.flag(
        "--gpu-wait",
        help="if they have no room: wait for them (queue), or take others (schedule)",
        choices=("queue", "schedule"),
    )
    reader.flag("--gpu-wait-max 10m", help="turn queue into schedule after this time", type=duration)
    reader.flag(
        "--gpu-share", help="how it shares its GPUs with other tasks", choices=("auto", "exclusive", "time", "mps")
    )
    reader.flag("--gpu-pct P", help="percent of the GPU's multiprocessors that it may use under MPS", type=gpu_percent)
    reader.flag(
        "--gpu-oom-retries N",
        help="retries with more GPU memory after it ran out of that (default 2, 0: never)",
        type=options.whole(0, OOM_RETRIES_MAX),
    )
    reader.flag("-l, --device KIND=N …", help="other devices (repeatable)", type=device)


def gpus(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= GPUS_MAX:
        raise invalid(f"{text!r} is not a number of GPUs; such as 1, 4, or 0.25 for a fraction of one")
    if number > 1 and number != int(number):
        raise invalid(f"{text!r} is neither a whole number nor below 1; such as 2, or 0.5")
    return number


PERCENT = 100


def gpu_percent(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= PERCENT:
        raise invalid(f"{text!r} is not a whole number from 1 to 100")
    return int(text)


def device(text: str) -> tuple[str, int]:
    """A device kind and its count: ``fpga=2``; ``fpga`` alone means one."""
    name, equals, number = text.partition("=")
    count = number if equals else "1"
    if not name or not count.isdecimal() or not 1 <= int(count) <= GPUS_MAX:
        raise invalid(f"{text!r} is not KIND=N; such as fpga=1")
    if name == "gpu":
        raise invalid("GPUs are requested with -G")
    return name, int(count)


def device_request(flags: Namespace, verb: str) -> dict[str, object]:
    """The part of a request about devices. Raises UsageError if flags contradict each other."""
    about_gpus = ("gpu_mem", "gpu_prefer", "gpu_wait", "gpu_wait_max", "gpu_share", "gpu_pct")
    given = [name for name in about_gpus if getattr(flags, name)]
    given += ["gpu_oom_retries"] if flags.gpu_oom_retries is not None else []
    if given and not flags.gpus:
        raise UsageError(f"{verb}: --{given[0].replace('_', '-')} needs GPUs, and none is requested", hint="add  -G 1")
    if len({name for name, _ in flags.device}) < len(flags.device):
        raise UsageError(f"{verb}: the same kind of device is given twice", hint="such as:  -l fpga=2")
    found: dict[str, object] = {"devices": flags.device or None}
    if not flags.gpus:
        return found
    is_part = flags.gpus < 1
    if is_part and flags.gpu_share == "exclusive":
        raise UsageError(f"{verb}: a fraction of a GPU cannot be exclusive (--gpu-share)")
    if flags.gpu_share == "mps" and flags.gpus > 1:
        raise UsageError(f"{verb}: --gpu-share mps is for one GPU", hint="add  -G 1")
    if flags.gpu_pct and flags.gpu_share != "mps":
        raise UsageError(f"{verb}: --gpu-pct is only for --gpu-share mps", hint="add  --gpu-share mps")
    if flags.gpu_wait_max and flags.gpu_wait != "queue":
        raise UsageError(f"{verb}: --gpu-wait-max is only for --gpu-wait queue", hint="add  --gpu-wait queue")
    return found | {
        "gpus": 1 if is_part else int(flags.gpus),
        "gpu_fraction": flags.gpus if is_part else None,
        "gpu_mem_bytes": flags.gpu_mem,
        "gpu_prefer": [name for value in flags.gpu_prefer for name in value.split(",") if name] or None,
        "gpu_wait": flags.gpu_wait,
        "gpu_wait_s_max": flags.gpu_wait_max,
        "gpu_share": flags.gpu_share,
        "gpu_pct": flags.gpu_pct,
        "gpu_oom_retries": flags.gpu_oom_retries,
    }


NODES_SUGGESTED_MAX = 8
SHELL_MARKS = "|&;<>()$`*?~"
"""Characters that only a shell interprets."""
LINE_MARKS = "|&;<>"
"""Characters that show that a single word without a blank is a shell command line."""
SHELL_OPERATORS = ("|", "||", "&&", ">", ">>", "2>", "2>&1")


def check_node_names(verb: str, names: list[str]) -> None:
    for name in names:
        if not options.is_node_name(name):
            lower = name.lower()
            also = f"did you mean {lower} ?        " if options.is_node_name(lower) else ""
            raise UsageError(
                f"{verb}: {name!r} is not a valid node name: {options.NODE_NAME_SAYS}",
                hint=f"{also}there are:  peerload nodes",
            )


def say_if_quoted(words: list[str], verb: str) -> None:
    """Warn on stderr that a quoted line is one word, and that a word such as `|` is an argument: no shell interprets it."""
    is_line = len(words) == 1 and (len(words[0].split()) > 1 or any(mark in words[0] for mark in LINE_MARKS))
    if is_line and not os.path.exists(words[0]):
        shown = printable(words[0])
        needs_shell = any(mark in words[0] for mark in SHELL_MARKS)
        by_words = "" if needs_shell else f"without the quotes:  peerload {verb} {shown}        "
        say(
            f"{shown!r} is one word: it is used as the name of a program",
            f"{by_words}as a line for a shell:  peerload {verb} -s {quoted(shown)}",
        )
    elif operators := [word for word in words[1:] if word in SHELL_OPERATORS]:
        shown = printable(" ".join(words))
        say(
            f"{operators[0]!r} is passed to {printable(words[0])} as an argument: no shell interprets it",
            f"as a line for a shell:  peerload {verb} -s {quoted(shown)}",
        )


def quoted(line: str) -> str:
    return "'" + line.replace("'", "'\\''") + "'"


def mended(error: NeverRunnable, client: AgentConnection, spec: dict[str, Any]) -> NeverRunnable:
    """The refusal of a task, with a better hint if the task named an unknown node."""
    wanted = spec["placement"].get("node")
    if not wanted:
        return error
    if spec["placement"].get("local") and wanted != client.call("info")["node"]:
        error.hint = f"--local keeps it here, -w {wanted} sends it there: leave one of them out"
        return error
    from difflib import get_close_matches

    reply = client.call("nodes")
    states = {str(node["node"]): node["state"] for node in reply["nodes"]}
    names = [*(name for name in states if states[name] != "left"), *map(str, reply.get("unmet", []))]
    if wanted in names:
        return error
    near = get_close_matches(wanted, names, n=1)
    also = f"did you mean  -w {near[0]} ?        " if near else ""
    more = f" and {len(names) - NODES_SUGGESTED_MAX} more" if len(names) > NODES_SUGGESTED_MAX else ""
    better = NeverRunnable(
        f"no node {wanted} is known here; nothing was submitted",
        why=("it has left; " if wanted in states else "") + f"there are {', '.join(names[:NODES_SUGGESTED_MAX])}{more}",
        hint=f"{also}peerload nodes        to wait for it:  --wait-for-node",
    )
    better.code = error.code
    return better


LARGEST_NAMED = 3
PROGRESS_BYTES = 64 << 20
"""On a terminal, a progress line is shown for files larger than this."""


def add_file_flags(reader: options.Options) -> None:
    reader.flag(
        "--in PATH …",
        dest="inputs",
        help="bring this file or directory to the node that runs it, into a fresh working directory (repeatable)",
    )
    reader.flag(
        "--out GLOB …",
        dest="outputs",
        help="bring these files of its working directory here when it has ended (repeatable)",
    )
    reader.switch(
        "--snapshot",
        help="run it in a copy of this directory as it is now, without files in .gitignore and .peerloadignore; without --out"
        " all new and changed files are copied back",
    )


def prepare_files(flags: Namespace, spec: dict[str, Any], terms: dict[str, Any]) -> list[Found]:
    """Set up the task to run in a new directory, with outputs copied home → the files to send. Raises StagingFailed."""
    return submission.prepare(spec, terms, flags.inputs, flags.outputs, snapshot=flags.snapshot)


def send_files(client: AgentConnection, spec: dict[str, Any], terms: dict[str, Any], found: Sequence[Found]) -> None:
    """Upload the files to the agent and set their ids in the spec. Raises PeerloadError."""
    submission.send(client, spec, terms, found, _progress(submission.size_of(found)))


def freeze_directory(client: AgentConnection, spec: dict[str, Any], terms: dict[str, Any]) -> None:
    """Send the working directory along, as the agent's settings request, or report why it is not sent. Raises
    PeerloadError."""
    if why := submission.freeze(client, spec, terms, _progress(0)):
        say(
            f"{printable(spec['directory'])} is not sent with the task: {why}",
            "only nodes that have it run the task; leave files out:  .peerloadignore        send all of it:  --snapshot",
        )


def _progress(total: int) -> Callable[[int], None]:
    """A function that shows on a terminal how many bytes the agent has received. total: 0 = not known."""
    if not os.isatty(2):
        return lambda _: None

    def show(sent: int) -> None:
        if max(sent, total) > PROGRESS_BYTES:
            of = f" of {size_text(total)}" if total else ""
            sys.stderr.write(f"\r{size_text(sent)}{of} sent to the agent \r")
            sys.stderr.flush()

    return show


def described_files(found: Sequence[Found], spec: dict[str, Any]) -> dict[str, object]:
    lock = spec.pop(submission.LOCK, None)
    environment: dict[str, object] = {} if lock is None else {"env": f"{lock.name}, built by {lock.kind}"}
    if spec.pop("files", None) is None:
        return environment
    from peerload.files import tree

    largest = [(item.path, item.status.st_size) for item in tree.largest(found, LARGEST_NAMED) if item.status]
    return environment | {
        "files": counted(sum(item.status is not None and not item.target for item in found), "file"),
        "files_bytes": submission.size_of(found),
        "largest": [f"{printable(path)} ({size_text(size)})" for path, size in largest],
    }
