"""`peerload run`: run a command where there is room, in the foreground.

Output comes as it is written, stdout and stderr apart; Ctrl-C goes to the task; the exit code is the task's.
"""

from __future__ import annotations

import signal
import sys
import time

from peerload.cli import command
from peerload.cli.main import CANNOT, INTERRUPTED
from peerload.cli.output import OutputWriter
from peerload.cli.text import print_json, printable, say
from peerload.client import Client, accepted
from peerload.model.errors import AgentUnavailable, PeerloadError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, Self

SECOND_INTERRUPT_S = 2.0
"""A second Ctrl-C within this stops the task for good."""
TOLD_IN_WORDS = (124, 126, 127)
"""Exit codes whose reason is worth a line: time limit, cannot execute, not found."""


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = command.command_options(
        "run",
        "Run a command where there is room, as if it ran here: live output, Ctrl-C and exit code pass through.\n"
        "Standard input is not passed on: the command reads from /dev/null.",
        usage="[flags] COMMAND ...",
        epilog="The flags end at the first word that is none; the rest is the command.",
    )
    flags, rest = reader.read_command(words)
    spec, secret = command.specification(flags, rest, "run")
    if flags.dry_run:
        return command.print_dry_run(spec, secret, flags)
    with Client(flags.socket) as client:
        following = Following(client, print_json if flags.json else OutputWriter().write)
        with following:
            reply = command.submit(client, spec, secret, [], waits_for_node=flags.wait_for_node)
            command.warn_if_stranded(client, reply, spec)
            ended = following.follow(reply["id"])
    _say_if_input_was_ignored()
    if flags.json:
        keys = ("id", "state", "exit_code", "signal", "node", "reason", "out_of")
        print_json({key: ended.get(key) for key in keys})
    return _told(ended, interrupted=following.interrupts > 0)


class Following:
    """Follows one task to its end, hands its output to ``write``, and passes signals on while its context is open.

    Ctrl-C: the task gets SIGINT; again within 2 s: it is cancelled; once more: we stop following. SIGTERM is passed
    on alike. A task that has not started yet is cancelled at once.
    """

    def __init__(self, client: Client, write: Callable[[dict[str, Any]], None]) -> None:
        self._client = client
        self._write = write
        self._task = ""
        self._last_interrupt_s = float("-inf")
        self._forwarded: dict[int, int] = {}
        self._cancels: set[int] = set()
        self._before: dict[int, Any] = {}
        self._busy = False
        self._waiting: list[int] = []
        self.interrupts = 0

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def follow(self, task: str) -> dict[str, Any]:
        """Hand on the task's output as it comes; its state, exit code and reason when it has ended."""
        request = self._client.send("output", task=task, follow=True)
        self._task = task  # from here on nothing but a signal handler sends
        self._forward_waiting()
        try:
            while True:
                answered, kind, body = self._client.receive(follows=True)
                if answered == request and kind == "more" and "unknown" in body:
                    command.say_unknown(body["unknown"])
                elif answered == request and kind == "more":
                    self._write(body)
                elif answered == request:
                    return accepted(kind, body)
                else:
                    self._answered(answered, kind, body)
        except BrokenPipeError:
            self._client.call("cancel", tasks=[task], signal=int(signal.SIGPIPE))
            raise
        except AgentUnavailable as error:
            raise AgentUnavailable(
                f"lost the agent while {task} was running",
                why=error.why,
                hint=f"the task goes on; follow it again:  peerload logs -f {task}        peerload wait {task}",
            ) from None

    def _caught(self, number: int, _frame: FrameType | None) -> None:
        """Runs between two instructions of the main thread, so it may send only while nothing else is being sent."""
        self._waiting.append(number)
        if self._task and not self._busy:
            self._forward_waiting()
        elif not self._task and len(self._waiting) > 1:
            raise KeyboardInterrupt  # the agent does not even answer the submit

    def _forward_waiting(self) -> None:
        self._busy = True
        try:
            while self._waiting:
                self._forward(self._waiting.pop(0))
        finally:
            self._busy = False

    def _forward(self, number: int) -> None:
        now = time.monotonic()
        self.interrupts += 1
        again = now - self._last_interrupt_s <= SECOND_INTERRUPT_S
        self._last_interrupt_s = now
        if self._cancels and again:
            raise PeerloadError(
                f"no longer following {self._task}",
                why="it is being cancelled",
                hint=f"what became of it:  peerload show {self._task}        peerload cancel --force {self._task}",
            )
        if again:
            self._cancel(number)
        else:
            self._forwarded[self._client.send("signal", task=self._task, signal=number)] = number

    def _cancel(self, number: int) -> None:
        say(f"cancelling {self._task}")
        stop_signal = signal.SIGTERM if number == signal.SIGINT else number
        self._cancels.add(self._client.send("cancel", tasks=[self._task], signal=int(stop_signal)))

    def _answered(self, answered: int, kind: str, body: dict[str, Any]) -> None:
        """A signal that could not be delivered means that nothing runs yet (or no longer): then it is cancelled."""
        number = self._forwarded.pop(answered, None)
        if number is not None and kind == "error":
            self._busy = True
            try:
                self._cancel(number)
            finally:
                self._busy = False
            self._forward_waiting()
        elif answered in self._cancels and kind == "error":
            say(f"{self._task} was not cancelled: {body.get('what', '')} {body.get('why', '')}")


def _told(ended: dict[str, Any], *, interrupted: bool) -> int:
    """Our exit code; a line on stderr where the code alone would not tell."""
    task, state, reason = str(ended.get("id", "")), str(ended.get("state", "")), str(ended.get("reason") or "")
    code = command.exit_code_of(ended)
    if state == "cancelled" and interrupted:
        return code if ended.get("exit_code") is not None else INTERRUPTED
    if state == "unknown" or code == CANNOT:
        say(f"{task} is {state}: {reason or 'it has no exit code'}", f"more:  peerload show {task}")
    elif (code in TOLD_IN_WORDS or ended.get("out_of")) and reason:
        say(f"{task}: {printable(reason)}", f"it ran on {ended['node']}" if ended.get("node") else "")
    elif state == "cancelled":
        say(f"{task} was cancelled" + (f": {reason}" if reason else ""))
    return code


def _say_if_input_was_ignored() -> None:
    """A pipe or file on our stdin that still holds something was meant for the command, which did not get it."""
    import fcntl
    import os
    import stat

    try:
        status = os.fstat(0)
        if stat.S_ISFIFO(status.st_mode):
            size = fcntl.ioctl(0, 0x541B, b"\0" * 8)  # FIONREAD
            ignored = any(size)
        else:
            ignored = stat.S_ISREG(status.st_mode) and os.lseek(0, 0, os.SEEK_CUR) < status.st_size
    except OSError:
        return  # stdin is closed, or is of a kind that cannot be asked: nothing to say
    if ignored and sys.stderr:
        say(
            "standard input was not passed on to the command",
            "let it read a file instead:  peerload run -s 'command < file'        needs none:  peerload run … </dev/null",
        )
