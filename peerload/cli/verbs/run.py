"""`peerload run`, `sh`, `attach` and `exec`: verbs with a live connection to a command, perhaps on another node. They print its
output as it is written, stdout and stderr separately, forward standard input and Ctrl-C, and return its exit code."""

from __future__ import annotations

import os
import signal
import sys

from peerload.cli.common import command, messages, task_session
from peerload.cli.common.messages import CANNOT, exit_code_of, report_end, report_missing, say_detached, say_unsaved
from peerload.cli.common.options import Options, whole
from peerload.cli.common.output import OutputWriter
from peerload.client.connection import RECONNECT_S_MAX, AgentConnection
from peerload.client.submission import packed_variables
from peerload.model.errors import AgentUnavailable, BadRequest, NoSuchTask, UsageError
from peerload.model.text import printable
from peerload.text.format import print_json, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable
    from typing import Any


def run(words: list[str]) -> int:
    reader = command.command_options(
        "run",
        "Run a command where there is room, as if it ran here: input, live output, Ctrl-C and exit code pass through.\n"
        "Ctrl-\\ detaches from it (peerload attach ID follows it again); otherwise it is cancelled when this command ends.",
        usage="[flags] COMMAND ...",
        epilog="The flags end at the first word that is not a flag; the rest is the command.",
    )
    reader.switch("--pty", help="give it a terminal, for interactive programs: stdout and stderr are one")
    reader.switch("--keep", help="let the task run on when this command ends")
    flags, rest = reader.read_command(words)
    if flags.pty:
        flags.env = task_session.with_term(flags.env)
    flags.env = task_session.with_colours(flags.env, has_terminal=flags.pty)
    spec, secret = command.specification(flags, rest, "run")
    terms = command.terms(flags, "run")
    stdin = task_session.StdinReader() if task_session.takes_input() else None
    if flags.pty:
        rows, columns = task_session.window()
        spec["terminal"] = {"rows": rows, "columns": columns}
    if stdin is not None or flags.pty:
        spec["takes_input"] = True
    spec["followed"] = True
    found = command.prepare_files(flags, spec, terms)
    if flags.dry_run:
        return command.print_dry_run(spec, secret, flags, **(command.described_files(found, spec) | terms))
    unsaved = 0
    if not flags.pty:
        task_session.say_if_it_needs_a_terminal(spec["argv"])
    with AgentConnection(flags.socket, room_s=RECONNECT_S_MAX) as client:
        writer = OutputWriter(is_json=flags.json)
        following = task_session.TaskSession(
            client, writer.write, attends=not flags.keep, stdin=stdin, has_terminal=flags.pty, is_source=True
        )
        with following:
            command.send_files(client, spec, terms, found)
            reply = command.submit(
                client,
                spec,
                terms,
                wait_for_node=flags.wait_for_node,
                attended=not flags.keep,
                input_comes=stdin is not None,
            )
            command.warn_if_stranded(client, reply, spec)
            try:
                ended = following.follow(reply["id"])
            except task_session.Detached:
                return say_detached(reply["id"])
        if "output_file" in terms or "error_file" in terms:
            unsaved = _unsaved(following.client, reply["id"])
    if flags.json:
        keys = ("id", "state", "exit_code", "signal", "node", "reason", "out_of")
        print_json({key: ended.get(key) for key in keys})
    writer.end(ended)
    messages.say_conflicts(ended)
    code = report_end(ended, interrupted=following.interrupts > 0)
    if code:
        command.say_left_out(secret)
    return report_missing(ended, code, writer.missing_bytes) or unsaved


def _unsaved(client: AgentConnection, task: str) -> int:
    """Wait until the output is in its files → CANNOT, with a message, if some of it is not."""
    unsaved = 0
    for body in client.stream("wait", tasks=[task], files=True):
        if "files" in body:
            unsaved = say_unsaved(body["files"])
    return unsaved


LOGIN_SHELL = (
    'shell=$(getent passwd "$(id -u)" 2>/dev/null | cut -d: -f7); [ -x "$shell" ] || shell=/bin/sh; exec "$shell" "$@"'
)
"""Starts the login shell of the user that the task runs as, who may not be the user here."""
SHELL_AT_HOME = f"cd ~ 2>/dev/null || cd /; {LOGIN_SHELL}"
SHELL_CPUS = "0.1"
SHELL_PRIORITY = "1000"
"""The priority of a shell: it waits for free slots like any task, but before other tasks."""


def sh(words: list[str]) -> int:
    reader = Options(
        "sh",
        "Open a shell on NODE: a task there that ends with the shell. Without a terminal it reads commands from stdin.\n"
        "It waits for a slot like any task, but before tasks of default priority.",
    )
    reader.add_argument("node", metavar="NODE")
    reader.flag("-d, --chdir DIR", help="start in DIR (default: the home directory there)")
    flags = reader.read(words)
    return run(as_run(flags, has_terminal=sys.stdin.isatty() and sys.stdout.isatty()))


def as_run(flags: Namespace, *, has_terminal: bool) -> list[str]:
    """The words of the equivalent `peerload run`."""
    words = ["--node", flags.node, "--name", "sh", "--cpus", SHELL_CPUS, "--prio", SHELL_PRIORITY]
    words += ["--chdir", "/" if flags.chdir is None else flags.chdir]
    words += ["--socket", flags.socket] if flags.socket else []
    words += ["--json"] if flags.json else []
    words += ["--pty"] if has_terminal else []
    login = ["-l"] if has_terminal else []
    return [*words, "/bin/sh", "-c", SHELL_AT_HOME if flags.chdir is None else LOGIN_SHELL, "sh", *login]


TAIL_LINES = 10
"""Number of earlier output lines to show, as with `tail -f`."""


def attach(words: list[str]) -> int:
    reader = Options(
        "attach",
        "Follow a task: its live output, and its input if no other client sends it; wait as run does, with its exit code.\n"
        "Ctrl-C goes to the task, Ctrl-\\ detaches from it.",
        usage="[--tail N] [--raw] ID",
    )
    reader.add_argument("task", metavar="ID")
    reader.flag(
        "--tail N",
        help=f"begin with its last N lines (default {TAIL_LINES})",
        type=whole(0, 1_000_000),
        default=TAIL_LINES,
    )
    reader.switch("--raw", help="do not escape control characters, though the task is another user's")
    flags = reader.read(words)
    with AgentConnection(flags.socket) as client:
        shown = _single(client, flags.task)
        task = str(shown["id"])
        is_raw = flags.raw or task_session.is_ours(shown, client.call("info"))
        has_terminal = bool(shown.get("terminal")) and is_raw
        stdin = _input(client, task) if task_session.takes_input() else None
        tail = None if has_terminal else flags.tail
        writer = OutputWriter(raw=is_raw, is_whole=tail is None, is_json=flags.json)
        following = task_session.TaskSession(
            client, writer.write, stdin=stdin, has_terminal=has_terminal, tail_lines=tail
        )
        with following:
            try:
                ended = following.follow(task)
            except task_session.Detached:
                return say_detached(task)
            finally:
                writer.close()
        has_files = shown.get("output_file") or shown.get("error_file")
        unsaved = _unsaved(following.client, task) if has_files else 0
    if flags.json:
        keys = ("id", "state", "exit_code", "signal", "node", "reason", "out_of")
        print_json({key: ended.get(key) for key in keys})
    writer.end(ended)
    code = report_end(ended, interrupted=following.interrupts > 0)
    return report_missing(ended, code, writer.missing_bytes) or unsaved


def _single(client: AgentConnection, name: str) -> dict[str, Any]:
    """The one task of this name. Raises BadRequest for an array."""
    shown: list[dict[str, Any]] = client.call("show", tasks=[name])["tasks"]
    if len(shown) > 1:
        raise BadRequest(
            f"{name} is an array", why="name one of its members", hint=f"such as  peerload attach {shown[0]['id']}"
        )
    return shown[0]


def _input(client: AgentConnection, task: str) -> task_session.StdinReader | None:
    """The stdin of this process for the task, if the task takes input and no other client sends it."""
    try:
        reply = client.call("input", task=task)
    except NoSuchTask:
        raise
    except BadRequest:
        return None
    if reply.get("ended") or not reply.get("wanted", True):
        return None
    stdin = task_session.StdinReader()
    stdin.at = int(reply.get("offset") or 0)
    return stdin


def exec(words: list[str]) -> int:  # noqa: A001 -- the name of the verb
    reader = Options(
        "exec",
        "Run a command inside a running task, on its node: in its working directory, with its environment, in its cgroup.\n"
        "Input, live output, Ctrl-C and exit code pass through. It gets a terminal if stdin and stdout are one here. It takes\n"
        "no slot, and ends with this command, or with the task.",
        usage="[flags] ID COMMAND ...",
    )
    reader.switch(
        "-t, --pty",
        help="give it a terminal, even if stdin or stdout here is not a terminal: stdout and stderr are one",
    )
    reader.switch("-T, --no-pty", help="give it none: stdout and stderr stay apart")
    flags, (ref, *argv) = _split(reader, words)
    command.say_if_quoted(argv, f"exec {printable(ref)}")
    stdin = task_session.StdinReader() if task_session.takes_input() else None
    with AgentConnection(flags.socket) as client:
        task = _running_task(client, ref)
        is_raw = flags.pty or task_session.is_ours(task, client.call("info"))
        is_interactive = stdin is not None and stdin.is_terminal and stdin.is_foreground and os.isatty(1)
        has_terminal = flags.pty or (is_interactive and is_raw and not flags.no_pty and not flags.json)
        asked: dict[str, object] = {"at": task["node"], "task": ref, "argv": [os.fsencode(word) for word in argv]}
        if has_terminal:
            rows, columns = task_session.window()
            asked |= {"terminal": {"rows": rows, "columns": columns}, "environment": _environment()}
        asked["takes_input"] = stdin is not None or has_terminal
        writer = OutputWriter(raw=is_raw, is_json=flags.json)
        following = ExecSession(client, writer.write, asked, stdin=stdin, has_terminal=has_terminal)
        with following:
            try:
                ended = following.follow(ref)
            finally:
                writer.close()
    if flags.json:
        print_json({key: ended.get(key) for key in ("exit_code", "signal", "reason")})
    code = exit_code_of(ended)
    if ended.get("reason"):
        say(f"{printable(argv[0])}: {printable(ended['reason'])}")
    if code == 0 and writer.missing_bytes:
        say(f"exit code {CANNOT}: it succeeded, but part of its output is missing")
        return CANNOT
    return code


class ExecSession(task_session.TaskSession):
    """A session of one command inside a task. The command ends with us: the user cannot detach from it or reconnect to it.

    ``asked``: the fields of the request that starts it."""

    DETACHES = False

    def __init__(
        self,
        client: AgentConnection,
        write: Callable[[dict[str, Any]], None],
        asked: dict[str, object],
        *,
        stdin: task_session.StdinReader | None,
        has_terminal: bool,
    ) -> None:
        super().__init__(client, write, stdin=stdin, has_terminal=has_terminal)
        self._asked = asked
        if stdin is not None:
            stdin.is_paused = True  # nothing is sent before the command has an id

    def _ask(self) -> None:
        self._why_due_s = None
        self._request = self._client.send("exec", **self._asked)

    def _show(self, piece: dict[str, Any]) -> None:
        if "command" in piece:
            self._target = {"at": self._asked["at"], "task": self._task, "command": piece["command"]}
            self._runs({"attempt": 1})
        super()._show(piece)

    def _forward(self, number: int) -> None:
        if "command" not in self._target:
            self._cancel(number)
        super()._forward(number)

    def _cancel(self, number: int) -> None:
        raise SystemExit(128 + number)  # closing the connection kills it

    def _stop(self) -> None:
        if "command" in self._target:
            super()._stop()
        else:  # until then, signals would reach the task
            os.kill(os.getpid(), signal.SIGSTOP)

    def _detach(self) -> None:
        self._forward(signal.SIGQUIT)

    def _reader_gone(self) -> None:
        """Close the connection, which kills the command."""

    def _reconnect(self, error: AgentUnavailable) -> None:
        what = f"lost the agent while a command ran inside {self._task}"
        raise AgentUnavailable(what, why=error.why or error.what, hint=error.hint) from None


def _environment() -> bytes:
    """The variables that describe our terminal to the command."""
    pairs = (word.partition("=") for word in task_session.with_colours(task_session.with_term([]), has_terminal=True))
    return packed_variables({os.fsencode(name): os.fsencode(value) for name, _, value in pairs})


def _split(reader: Options, words: list[str]) -> tuple[Any, list[str]]:
    """The flags, and the words: the id and the command."""
    flags, rest = reader.read_command(words)
    if len(rest) > 1 and rest[1] == "--":
        rest = [rest[0], *rest[2:]]
    if len(rest) < len(("ID", "COMMAND")):
        raise UsageError("exec: an ID and a command are needed", hint="peerload exec 42 ps x")
    if flags.pty and (flags.no_pty or flags.json):
        other = "--no-pty" if flags.no_pty else "--json"
        raise UsageError(f"exec: --pty and {other} contradict each other", hint="give one of them")
    return flags, rest


def _running_task(client: AgentConnection, task: str) -> dict[str, Any]:
    """The answer to `show` for this task. Raises BadRequest if it is not running."""
    shown = client.call("show", tasks=[task])["tasks"]
    if len(shown) > 1:
        raise BadRequest(
            f"{task} has {len(shown)} members", hint=f"name one of them:  peerload exec {shown[0]['id']} …"
        )
    found: dict[str, Any] = shown[0]
    state = found.get("state")
    if state != "running" or not found.get("node"):
        raise BadRequest(f"{task} is {state}: exec needs a running task", hint=f"peerload show {task}")
    return found
