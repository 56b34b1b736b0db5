"""`peerload exec ID CMD`: run a command inside a running task."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

from peerload.cli.common import command
from peerload.cli.common.errors import CANNOT
from peerload.cli.common.options import Options
from peerload.cli.common.output import OutputWriter
from peerload.cli.common.standard_input import StdinReader, takes_input
from peerload.cli.common.task_session import TaskSession, is_ours
from peerload.cli.common.terminal import window, with_colours, with_term
from peerload.client.connection import Client
from peerload.client.environment import packed
from peerload.model.errors import AgentUnavailable, BadRequest, UsageError
from peerload.model.text import printable
from peerload.text.format import print_json, say

if TYPE_CHECKING:
    from collections.abc import Callable


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "exec",
        "Run a command inside a running task, on its node: in its working directory, with its environment, in its cgroup.\n"
        "Input, live output, Ctrl-C and exit code pass through. It gets a terminal if stdin and stdout are one here. It takes\n"
        "no slot, and ends with this command, or with the task.",
        usage="[flags] ID COMMAND ...",
    )
    reader.switch(
        "-t", "--pty", help="give it a terminal, even if stdin or stdout here is none: stdout and stderr are one"
    )
    reader.switch("-T", "--no-pty", help="give it none: stdout and stderr stay apart")
    flags, (ref, *argv) = _split(reader, words)
    stdin = StdinReader() if takes_input() else None
    with Client(flags.socket) as client:
        task = _running(client, ref)
        is_raw = flags.pty or is_ours(task, client.call("info"))
        is_interactive = stdin is not None and stdin.is_terminal and stdin.is_foreground and os.isatty(1)
        has_terminal = flags.pty or (is_interactive and is_raw and not flags.no_pty and not flags.json)
        asked: dict[str, object] = {"at": task["node"], "task": ref, "argv": [os.fsencode(word) for word in argv]}
        if has_terminal:
            rows, columns = window()
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
    code = command.exit_code_of(ended)
    if ended.get("reason"):
        say(f"{printable(argv[0])}: {printable(ended['reason'])}")
    if code == 0 and writer.missing_bytes:
        say(f"exit code {CANNOT}: it succeeded, and not all of its output came through")
        return CANNOT
    return code


class ExecSession(TaskSession):
    """A session of one command inside a task. The command ends with us: one cannot detach from it or reconnect to it.

    ``asked``: the fields of the request that starts it."""

    DETACHES = False

    def __init__(
        self,
        client: Client,
        write: Callable[[dict[str, Any]], None],
        asked: dict[str, object],
        *,
        stdin: StdinReader | None,
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

    def _detach(self) -> None:
        self._forward(signal.SIGQUIT)

    def _reader_gone(self) -> None:
        """Closing the connection kills the command."""

    def _reconnect(self, error: AgentUnavailable) -> None:
        what = f"lost the agent while a command ran inside {self._task}"
        raise AgentUnavailable(what, why=error.why or error.what, hint=error.hint) from None


def _environment() -> bytes:
    """The variables that describe our terminal to the command."""
    pairs = (word.partition("=") for word in with_colours(with_term([]), has_terminal=True))
    return packed({os.fsencode(name): os.fsencode(value) for name, _, value in pairs})


def _split(reader: Options, words: list[str]) -> tuple[Any, list[str]]:
    """The flags, and the id with the command."""
    flags, rest = reader.read_command(words)
    if len(rest) > 1 and rest[1] == "--":
        rest = [rest[0], *rest[2:]]
    if len(rest) < len(("ID", "COMMAND")):
        raise UsageError("exec: an ID and a command are needed", hint="peerload exec 42 ps x")
    if flags.pty and (flags.no_pty or flags.json):
        other = "--no-pty" if flags.no_pty else "--json"
        raise UsageError(f"exec: --pty and {other} contradict each other", hint="give one of them")
    return flags, rest


def _running(client: Client, task: str) -> dict[str, Any]:
    """The task of this name, as `show` has it. Raises BadRequest if it does not run."""
    shown = client.call("show", tasks=[task])["tasks"]
    if len(shown) > 1:
        raise BadRequest(
            f"{task} has {len(shown)} members", hint=f"name one of them:  peerload exec {shown[0]['id']} …"
        )
    found: dict[str, Any] = shown[0]
    state = found.get("state")
    if state != "running" or not found.get("node"):
        raise BadRequest(f"{task} is {state}: only a running task takes commands", hint=f"peerload show {task}")
    return found
