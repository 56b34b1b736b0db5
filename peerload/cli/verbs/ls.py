"""`peerload ls`, `logs`, `why`, `history` and `events`: tasks, their output, why they wait, which have ended (also as traces for the
simulator), and what happened."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from peerload.cli.common import selection
from peerload.cli.common.messages import CANNOT, report, say_notice
from peerload.cli.common.options import Options, is_node_name, past_instant, whole
from peerload.cli.common.output import OutputWriter, followed
from peerload.cli.common.redraw import redrawn
from peerload.client.connection import EVENTS_MAX, AgentConnection, OutputPosition
from peerload.model.errors import BadRequest, PeerloadError, UsageError
from peerload.model.text import printable
from peerload.text import tasks
from peerload.text.format import (
    counted,
    duration_text,
    json_line,
    number_text,
    print_json,
    print_lines,
    print_result,
    say,
    shortened,
    size_text,
    table,
    terminal_columns,
)
from peerload.text.tasks import as_row, instant_text, is_mine, number_of, own_names, why_lines

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Iterator

    from peerload.cli.common.selection import Selection


EVER_S = 1e9
"""The time range for named tasks: without limit."""


def ls(words: list[str]) -> int:
    reader = Options(
        "ls", "List my tasks whose home is here: unfinished ones and those that ended in the last 24 hours."
    )
    selection.add(reader)
    reader.switch("--cluster", help="the tasks of all nodes, not only of this one")
    reader.switch("--remote", help="the tasks of other homes on this node, even if their homes are unreachable")
    reader.at()
    reader.switch("--all", help="tasks of all users")
    reader.switch("--members", help="all members of arrays one by one")
    reader.switch("-w, --watch", help="redraw each second, until q or Ctrl-C")
    reader.flag("--limit N", help="show at most N tasks (default 200)", type=whole(1, 100_000), default=200)
    flags = reader.read(words)
    chosen = selection.Selection(flags, "ls", needed=False)
    if flags.remote and (flags.cluster or chosen.words or chosen.is_narrowed):
        raise UsageError(
            "ls: --remote can only be combined with --at, --all, --limit, --watch and --json", hint="peerload ls --help"
        )
    if flags.cluster and chosen.words:
        raise UsageError(f"ls: --cluster asks all nodes, and {chosen.words[0]} is of one", hint="omit --cluster")
    if flags.cluster and flags.at:
        raise UsageError("ls: --cluster asks all nodes, --at one", hint=f"peerload ls --at {flags.at}")
    if flags.watch and not flags.json:
        return redrawn(lambda: _watched(flags, chosen))
    with AgentConnection(flags.socket) as client:
        gc.disable()  # a collection takes longer the more tasks are listed, and the process ends soon
        if flags.json:
            reply = listed(client, flags, chosen)
            keys = ("tasks", "truncated", "unfinished", "damaged", *(("missing",) if flags.cluster else ()))
            print_json({key: reply.get(key) for key in (keys[:2] if flags.remote else keys)})
        else:
            reply = listed(client, flags, chosen)
            print_lines(lines(reply, flags, chosen))
    return CANNOT if reply.get("missing") else 0


def _watched(flags: Namespace, chosen: Selection) -> list[str]:
    """The current table. Each call opens a new connection, since the agent may have restarted."""
    with AgentConnection(flags.socket) as client:
        return lines(listed(client, flags, chosen), flags, chosen)


def listed(client: AgentConnection, flags: Namespace, chosen: Selection) -> dict[str, Any]:
    """The reply of the agent, without tasks of other users unless --all is given; ``hidden`` counts them."""
    if flags.remote:
        reply = client.call("remote", limit=flags.limit, at=flags.at)
        return {**reply, "hidden": 0}
    asked = chosen.request_fields() | {"limit": flags.limit}
    asked |= {} if flags.members or flags.json else {"gathered": True}
    asked |= {"ended_within_s": EVER_S} if chosen.words else {}
    reply = _without_others(client, flags, "tasks", asked)
    shown = tasks.together(reply["tasks"], flags.limit) if flags.cluster else reply["tasks"]
    truncated = bool(reply.get("truncated")) or len(shown) < len(reply["tasks"])
    return {**reply, "tasks": shown, "truncated": truncated}


def _without_others(client: AgentConnection, flags: Namespace, verb: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The reply to a request for tasks, without tasks of other users unless --all is given; ``hidden`` counts them."""
    reply = client.call(verb, **asked, at=flags.at, cluster=flags.cluster)
    own = tasks.own_names()
    other = [task for task in reply["tasks"] if not flags.all and not tasks.is_mine(task, own)]
    if other and reply.get("truncated"):  # an administrator's own tasks may have been cut off by other users' tasks
        reply = client.call(verb, **asked, own=True, at=flags.at, cluster=flags.cluster)
    found = [task for task in reply["tasks"] if flags.all or tasks.is_mine(task, own)]
    return {**reply, "tasks": found, "hidden": sum(map(number_of, other))}


def lines(reply: dict[str, Any], flags: Namespace, chosen: Selection) -> list[str]:
    """The table as lines; messages about omitted tasks go to stderr."""
    if not flags.watch:
        if reply.get("truncated"):
            say(
                f"no more than {counted(len(reply['tasks']), 'row')} shown{_unfinished(reply)}",
                "more:  --limit N  or  --state S",
            )
        tasks.say_missing(reply)
        for task in reply.get("damaged", ()):
            say(f"{task['id']} is damaged: it cannot be read", task["why"])
        if reply["hidden"]:
            say(f"not shown: {counted(reply['hidden'], 'task')} of other users", "to see them:  peerload ls --all")
    now = time.time()
    if not reply["tasks"] and sys.stdout.isatty():
        return [_none(flags, chosen)]
    return tasks.listed_table(list(map(as_row, reply["tasks"])), now, terminal_columns())


def _none(flags: Namespace, chosen: Selection) -> str:
    """Line in place of an empty table, with the next command to type."""
    if flags.remote:
        return "no task of another home is on this node        my own tasks:  peerload ls"
    if chosen.words or chosen.is_narrowed:
        return "no such tasks        all of mine:  peerload ls        ended tasks:  peerload history"
    return "no tasks        queue one:  peerload submit sleep 5        tasks that ended earlier:  peerload history"


def _unfinished(reply: dict[str, Any]) -> str:
    counts = [f"{number} {state}" for state, number in sorted((reply.get("unfinished") or {}).items()) if number]
    return f" (unfinished: {', '.join(counts)})" if counts else ""


OUTPUTS_MAX = 1000
"""Maximum number of tasks whose outputs one command prints."""
TAIL_LINES_MAX = 1_000_000


def logs(words: list[str]) -> int:
    reader = Options(
        "logs",
        "Print the output of tasks: stdout on stdout, stderr on stderr, byte for byte. On a terminal control characters are shown\n"
        "as \\x1b and the like, unless --raw is given. The outputs of several tasks follow each other.",
        json_says="one object for each piece of output",
    )
    selection.add(reader)
    reader.switch("-f, --follow", help="follow the output until the task has ended")
    reader.switch("--err", help="only its stderr")
    reader.flag("--tail N", help="only the last N lines of each stream", type=whole(0, TAIL_LINES_MAX))
    reader.switch("--raw", help="do not escape control characters on a terminal")
    reader.at()
    flags = reader.read(words)
    chosen = selection.Selection(flags, "logs")
    with AgentConnection(flags.socket) as client:
        if not chosen.is_plain or len(chosen.words) > 1:
            return _print_several(client, chosen, flags)
        try:
            (name, *_) = selection.pinned(client, chosen.words) if flags.follow else chosen.words
            return _print_one(client, name, flags)
        except BadRequest as error:
            if error.code != BadRequest.code or flags.at:
                raise
            return _print_several(client, chosen, flags, refused=error)  # the word may name an array


def _print_several(
    client: AgentConnection, chosen: selection.Selection, flags: Namespace, refused: BadRequest | None = None
) -> int:
    """Print the outputs of several tasks in the order of submission, each with a heading on stderr. ``refused``: the error from
    reading the only word as the id of one task. It is raised if the word does not name several tasks either."""
    asked = chosen.request_fields() | {"ended_within_s": EVER_S, "limit": OUTPUTS_MAX}
    reply = client.call("tasks", **asked, at=flags.at)
    own = own_names()
    tasks = [str(task["id"]) for task in reply["tasks"] if chosen.words or is_mine(task, own)]
    if refused is not None and len(tasks) < 2:  # noqa: PLR2004 -- more than one
        raise refused
    if not tasks:
        selection.say_none()
    code = 0
    for task in tasks:
        if not flags.json:
            say(f"output of {task}")
        try:
            code = _print_one(client, task, flags, names=True) or code
        except BadRequest as error:  # removed meanwhile
            report(error)
            code = CANNOT
    if reply.get("truncated"):
        say(f"only the first {OUTPUTS_MAX} of them", "fewer:  --state S  --name GLOB  or ranges of an array: 42.3-9")
        code = CANNOT
    return code


def _print_one(client: AgentConnection, task: str, flags: Namespace, *, names: bool = False) -> int:
    streams = [2] if flags.err else [1, 2]
    asked = {"task": task, "follow": flags.follow, "streams": streams, "tail_lines": flags.tail, "at": flags.at}
    writer = OutputWriter(raw=flags.raw, is_whole=flags.tail is None, is_json=flags.json, streams=streams)
    position = OutputPosition()
    pieces = followed(client, "output", lambda: asked) if flags.follow else client.stream("output", **asked)
    for piece in pieces:
        asked["tail_lines"] = None  # after a reconnection, output that was already shown is skipped
        if not say_notice(piece) and (new := position.beyond(piece)):
            writer.write(({"id": task} if names else {}) | new)
    writer.close()
    if code := say_if_gone(client.last):
        return code
    if behind := client.last.get("behind"):
        say(f"the newest output of {task} may be missing: {behind}", "states of the nodes:  peerload nodes")
        return CANNOT
    writer.end(client.last)
    return CANNOT if writer.missing_bytes else 0


def say_if_gone(end: dict[str, Any]) -> int:
    """Report that an output was removed → CANNOT; 0 if it was not."""
    if not end.get("output_gone_at"):
        return 0
    why = str(end.get("output_gone_why") or "")
    say(
        f"the output of {end.get('id')} was removed on {instant_text(end['output_gone_at'])} ({why})",
        f"the task itself:  peerload show {end.get('id')}",
    )
    return CANNOT


def why(words: list[str]) -> int:
    reader = Options(
        "why",
        "Explain why a task waits: for every known node whether it could ever run it, whether it has room now, and the reason;\n"
        "how old these facts are; and the smallest change that would let it start now. For a task that has started: where it\n"
        "runs and why. For an array: how many members wait for what, and all this for the next one to start.",
    )
    reader.add_argument("task", metavar="ID")
    reader.at()
    flags = reader.read(words)
    with AgentConnection(flags.socket) as client:
        told = client.call("why", task=flags.task, at=flags.at)
    print_result(told, why_lines(told, time.time()), as_json=flags.json)
    return 0


WHAT = (
    "task", "attempt", "node", "agent", "join", "cluster", "launcher", "disk", "energy", "gpu", "files", "environment",
    "chore", "hook", "web", "store", "security",
)  # fmt: skip


def events(words: list[str]) -> int:
    reader = Options(
        "events",
        "List what happened on this node, to its tasks and to tasks of other homes that it runs: every change with its reason\n"
        "and time, oldest first.",
        json_says="one object an event",
    )
    reader.add_argument("task", nargs="*", metavar="ID", help="only of these tasks (of an array: of all its members)")
    reader.switch("-f, --follow", help="follow new events until Ctrl-C")
    reader.flag("--limit N", help="begin with the newest N (50)", type=whole(0, EVENTS_MAX), default=50)
    reader.flag("--what KIND …", help=f"only of this kind: {' '.join(WHAT)}")
    reader.at()
    flags = reader.read(words)
    what = [name for value in flags.what for name in value.split(",") if name]
    for name in what:
        if name not in WHAT:
            raise UsageError(f"events: no such kind: {name!r}", hint=f"there are:  {' '.join(WHAT)}")
    with AgentConnection(flags.socket) as client:
        names = selection.pinned(client, flags.task) if flags.follow else flags.task
        asked = {"limit": flags.limit, "follow": flags.follow, "tasks": names, "what": what, "at": flags.at}
        for part in followed(client, "events", lambda: asked) if flags.follow else client.stream("events", **asked):
            if "begins" in part:  # after a reconnection, events that were already shown are not sent
                asked.update(after=part["begins"], limit=EVENTS_MAX)
            for event in part["events"]:
                sys.stdout.write(json_line(event) if flags.json else event_line(event))
                asked["after"] = event["number"]
            sys.stdout.flush()
    return 0


def event_line(event: dict[str, Any]) -> str:
    """Line of text for an event: time, subject, new state, reason."""
    who = event.get("task") or event.get("node") if event.get("what") != "agent" else "agent"
    if event.get("what") == "security":
        who = f"security: {who or 'somebody'}"
    attempt = f" attempt {event['attempt']}" if event.get("attempt") else ""
    where = f" on {event['node']}" if event.get("task") and event.get("node") and event["what"] == "task" else ""
    home = " (remote task)" if event.get("what") == "attempt" else ""
    subject = printable(who or event.get("what") or "")
    said = f"{printable(event.get('state') or '')}{attempt}{printable(where)}{home}"
    why = f": {printable(event['reason'])}" if event.get("reason") else ""
    return f"{tasks.instant_text(event.get('at'))}  {subject}  {said}{why}\n"


HISTORY_HEADINGS = ("ID", "NAME", "STATE", "NODE", "ENDED", "WAITED", "RAN", "CPU", "MEMORY", "ENERGY", "EXIT")
HISTORY_RIGHT = ("WAITED", "RAN", "CPU", "MEMORY", "ENERGY", "GPUS", "GPU MEM", "FETCHED", "STAGED IN", "RETURNED")
LEFT_OUT_FIRST = (
    "ENERGY", "FETCHED", "STAGED IN", "RETURNED", "CPU", "WAITED", "GPU", "GPU MEM", "GPUS", "MEMORY", "NODE", "ENDED",
    "EXIT",
)  # fmt: skip
"""Columns that are dropped on a narrow terminal, in this order."""
GPU_HEADINGS = ("GPUS", "GPU MEM", "GPU")
"""Columns that are shown if any task requested GPUs: their number, the peak memory of one GPU, and the model."""
FILE_HEADINGS = ("FETCHED", "STAGED IN", "RETURNED")
"""Columns that are shown if any task has files."""
HISTORY_LIMIT = 1000
"""Default length limit of the list; an export has no limit."""
HISTORY_LIMIT_MAX = 1_000_000


def history(words: list[str]) -> int:
    reader = Options("history", "List ended tasks whose home is here, the last one first.")
    reader.flag("--since T", help="ended since: 2h (ago), 2026-11-20, …T14:30", type=past_instant, default=0.0)
    reader.flag(
        "--limit N", help=f"at most the newest N ({HISTORY_LIMIT}; exports: all)", type=whole(1, HISTORY_LIMIT_MAX)
    )
    reader.switch("--cluster", help="the tasks of all nodes, not only of this one")
    reader.at()
    reader.switch("--all", help="tasks of all users")
    reader.flag("--export FILE", help="write a trace for `peerload sim`: .csv, .jsonl, or - (CSV on stdout)")
    flags = reader.read(words)
    if flags.cluster and flags.at:
        raise UsageError("history: --cluster is not for --at", hint="all nodes:  --cluster        one:  --at NODE")
    if flags.export is not None:
        return export(flags)
    with AgentConnection(flags.socket) as client:
        asked = {"since": flags.since, "limit": flags.limit or HISTORY_LIMIT}
        reply = _without_others(client, flags, "history", asked)
    shown = reply["tasks"]
    if flags.cluster:
        newest_first = sorted(shown, key=lambda task: -float(task.get("ended_at") or 0))
        shown = newest_first[: flags.limit or HISTORY_LIMIT]
        reply["truncated"] = bool(reply.get("truncated")) or len(shown) < len(newest_first)
    if flags.json:
        missing = {"missing": reply.get("missing")} if flags.cluster else {}
        print_json({"tasks": shown, "truncated": bool(reply.get("truncated")), **missing})
    else:
        _say_left_out(flags, reply)
        print_lines(_history_lines(shown))
    return CANNOT if reply.get("missing") else 0


def _say_left_out(flags: Namespace, reply: dict[str, Any]) -> None:
    if reply.get("truncated"):
        say(f"only the newest {flags.limit or HISTORY_LIMIT} tasks are shown", "more:  --limit N")
    tasks.say_missing(reply)
    if reply["hidden"]:
        say(f"not shown: {counted(reply['hidden'], 'task')} of other users", "to see them:  peerload history --all")


def _history_lines(shown: list[dict[str, Any]]) -> list[str]:
    if not shown and sys.stdout.isatty():
        return ["no tasks have ended        unfinished ones:  peerload ls"]
    has_gpus, has_files = any(task.get("gpus") for task in shown), any(task.get("files") for task in shown)
    columns = terminal_columns()
    headings = (*HISTORY_HEADINGS, *(GPU_HEADINGS if has_gpus else ()), *(FILE_HEADINGS if has_files else ()))
    rows = [
        _history_row(task) + (_gpu_cells(task) if has_gpus else []) + (_file_cells(task) if has_files else [])
        for task in shown
    ]
    paint = {"STATE": tasks.STATE_COLOURS}
    return table(
        headings,
        rows,
        HISTORY_RIGHT,
        columns=columns,
        gives_way=("NAME", "NODE", "GPU"),
        left_out=LEFT_OUT_FIRST,
        paint=paint,
    )


def _gpu_cells(task: dict[str, Any]) -> list[str]:
    usage = task.get("usage") or {}
    if not task.get("gpus"):
        return ["-", "-", "-"]
    return [
        number_text(task["gpus"]),
        size_text(usage.get("gpu_memory_bytes_max") or None),
        str(usage.get("gpu_model") or "-"),
    ]


def _file_cells(task: dict[str, Any]) -> list[str]:
    files = task.get("files")
    if not files:
        return ["-", "-", "-"]
    return [size_text(files["fetched_bytes"]), duration_text(files["staging_s"]), size_text(files["returned_bytes"])]


def _history_row(task: dict[str, Any]) -> list[str]:
    usage = task.get("usage") or {}
    is_known = task.get("duration_s") is not None and usage.get("user_s") is not None
    return [
        str(task.get("id", "")),
        shortened(str(task.get("name") or ""), tasks.NAME_WIDTH_MAX),
        str(task.get("state", "")),
        str(task.get("node") or "-"),
        tasks.instant_text(task.get("ended_at")),
        duration_text(task.get("waited_s")),
        duration_text(task.get("duration_s")),
        duration_text(usage["user_s"] + usage["system_s"]) if is_known else "-",
        size_text(usage["memory_bytes_max"]) if is_known else "-",
        "-" if usage.get("joules") is None else f"{number_text(usage['joules'], 1)} J {usage.get('energy_quality')}",
        tasks.exit_text(task),
    ]


TRACE_KEYS = ("submitted_at", "duration_s", "cpus", "gpus", "home")
"""The fields of a task that a trace needs."""
TRACE_NUMBERS = ("submitted_at", "cpus", "gpus")
"""The numeric fields of a trace; a task that never ran has no duration."""
TRACE_NUMBER_END = 1e12
TRACE_COLUMNS = ("arrival", "duration", "cpus", "gpus", "node")
TRACE_DIGITS = 6
"""Microseconds."""


class Trace:
    """A trace of ended tasks for the simulator, one line for each task in the order of submission.

    Columns: ``arrival`` (seconds since the first submission in the trace), ``duration`` (seconds the process ran), ``cpus``,
    ``gpus``, ``node`` (the home node). Tasks that never ran are left out. With ``--cluster`` it has the tasks of all homes,
    in the order of submission by the clock of each home. ``written`` and ``left_out`` count tasks; ``missing``: nodes that
    did not answer.
    """

    def __init__(self, out: TextIO, *, as_csv: bool) -> None:
        self._out = out
        self._as_csv = as_csv
        self._first_at: float | None = None
        self._arrival = 0.0
        self.written = 0
        self.left_out = 0
        self.missing: list[dict[str, Any]] = []
        if as_csv:
            out.write(",".join(TRACE_COLUMNS) + "\n")

    def add(self, task: dict[str, Any]) -> None:
        """Write an ended task that was submitted after the previous one."""
        duration_s = task.get("duration_s")
        if not duration_s or not _is_number(duration_s):
            self.left_out += 1
            return
        if self._first_at is None:
            self._first_at = float(task["submitted_at"])
        # Arrivals never decrease, even if the wall clock was set back meanwhile.
        self._arrival = max(self._arrival, task["submitted_at"] - self._first_at)
        duration = max(round(float(duration_s), TRACE_DIGITS), 10.0**-TRACE_DIGITS)
        self._write(
            [round(self._arrival, TRACE_DIGITS), duration, float(task["cpus"]), int(task["gpus"]), str(task["home"])]
        )
        self.written += 1

    def _write(self, values: list[Any]) -> None:
        if self._as_csv:  # no value can contain a comma or a quote
            self._out.write(",".join(_plain(value) for value in values) + "\n")
        else:
            import json

            self._out.write(json.dumps(dict(zip(TRACE_COLUMNS, values, strict=True))) + "\n")


def _plain(value: object) -> str:
    """A number without an exponent or trailing zeros."""
    return f"{value:.{TRACE_DIGITS}f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def export(flags: Namespace) -> int:
    """Write the trace that ``--export`` names; a file is written completely or not at all."""
    path: str = flags.export
    if path == "-":
        if flags.json:
            raise UsageError("history: --export - writes CSV", hint="for JSON lines:  --export FILE.jsonl")
        return _report_export(_copied(flags, sys.stdout, as_csv=True), "", flags)
    if not path.endswith((".csv", ".jsonl")):
        raise UsageError(f"history: {path!r} has no known ending", hint="the name of a trace ends in .csv or .jsonl")
    partial = f"{path}.{os.getpid()}.part"
    try:
        with open(partial, "x", encoding="utf-8") as out:  # noqa: PTH123 -- as client/connection.py: no pathlib on the way to a start
            trace = _copied(flags, out, as_csv=path.endswith(".csv"))
        os.replace(partial, path)  # noqa: PTH105
    except OSError as error:
        raise PeerloadError(f"{path} cannot be written", why=error.strerror or str(error)) from None
    finally:
        with contextlib.suppress(FileNotFoundError):  # already renamed, or never created
            os.unlink(partial)  # noqa: PTH108
    return _report_export(trace, path, flags)


def _copied(flags: Namespace, out: TextIO, *, as_csv: bool) -> Trace:
    trace = Trace(out, as_csv=as_csv)
    with AgentConnection(flags.socket) as client:
        own = tasks.own_names()
        ended: Iterable[dict[str, Any]] = (
            task for task in _ended(client, flags) if flags.all or tasks.is_mine(task, own)
        )
        if flags.cluster:
            ended, trace.left_out = _in_order(ended, flags.limit)
        for task in ended:
            trace.add(task)
        trace.missing = client.last.get("missing") or []
    return trace


def _ended(client: AgentConnection, flags: Namespace) -> Iterator[dict[str, Any]]:
    """The ended tasks, page by page, so that only one page is in memory."""
    asked = {"since": flags.since, "limit": flags.limit, "oldest_first": True}
    for part in client.stream("history", **asked, at=flags.at, cluster=flags.cluster):
        yield from part.get("tasks", ())
    yield from client.last.get("tasks", ())


def _in_order(ended: Iterable[dict[str, Any]], limit: int | None) -> tuple[Iterable[dict[str, Any]], int]:
    """The newest ``limit`` tasks (None: all) of several homes in the order of submission, with only the fields of a trace; and the
    number of tasks left out because their home reports invalid fields."""
    kept, left_out = [], 0
    for task in ended:
        if (
            isinstance(task.get("home"), str)
            and is_node_name(task["home"])
            and all(map(_is_number, _of(task, TRACE_NUMBERS)))
        ):
            kept.append(dict(zip(TRACE_KEYS, _of(task, TRACE_KEYS), strict=True)))
        else:
            left_out += 1
    kept.sort(key=lambda task: float(task["submitted_at"]))
    return iter(kept if limit is None else kept[-limit:]), left_out


def _of(task: dict[str, Any], keys: tuple[str, ...]) -> list[Any]:
    return [task.get(key) for key in keys]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < TRACE_NUMBER_END


def _report_export(trace: Trace, path: str, flags: Namespace) -> int:
    code = CANNOT if trace.missing else 0
    if flags.json:
        missing = {"missing": trace.missing} if flags.cluster else {}
        print_json({"file": path, "tasks": trace.written, "left_out": trace.left_out, **missing})
        return code
    tasks.say_missing({"missing": trace.missing})
    left_out = f"; {trace.left_out} that never ran are left out" if trace.left_out else ""
    say(
        f"{counted(trace.written, 'task')} written{f' to {path}' if path else ''}{left_out}",
        f"replay them:  peerload sim --arrivals trace:{path}" if path else "",
    )
    return code
