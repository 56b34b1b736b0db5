"""Follows one task to its end, for `run` and `attach`: its output comes here, our input and our signals go there.

One loop waits for the agent, for our stdin and for signals. A signal handler does nothing but note which one came, so
that nothing is ever sent in the middle of something else.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from peerload.cli.common.task_messages import say_away, say_unknown, say_waits
from peerload.cli.common.terminal import BACKGROUND_LOOK_S, DETACH_KEY, RawTerminal, StdinReader, window
from peerload.client.connection import AgentConnection, accepted
from peerload.model.errors import AgentUnavailable, PeerloadError
from peerload.model.text import printable
from peerload.text.format import say, shortened
from peerload.text.tasks import is_mine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, Self

SECOND_INTERRUPT_S = 2.0
"""A second Ctrl-C within this cancels the task."""
RECONNECT_S_MAX = 60.0
"""Patience with an agent that went away."""
RECONNECT_LOOK_S = 0.1
WHY_AFTER_S = 5.0
"""A task that has not started after this long: its reason is said, …"""
WHY_WIDTH_MAX = 200
"""… in at most this width, …"""
SAID_AT_SUBMISSION = "no node known can ever run it"
"""… unless it was already said at its submission."""
STAGING_LOOK_S = 1.0
STAGING_WIDTH_MAX = 78
"""While its files are on their way, a terminal shows how many of them are there, so often and in this width."""
CLEAR_TO_END = "\x1b[K"
SIGNALS_UNHANDLED_MAX = 3
"""An agent that stops in the middle of a frame blocks the loop: after this many signals we give up."""
_CAUGHT = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGTSTP,
    signal.SIGWINCH,
    signal.SIGCONT,
)
_HARMLESS = (signal.SIGWINCH, signal.SIGCONT)


class Detached(Exception):
    """The user has detached from the task."""


class TaskSession:
    r"""Hands the output of a task to ``write``, and passes signals on while its context is open.

    Ctrl-C: the task gets SIGINT; again within 2 s: it is cancelled (SIGTERM, SIGKILL after 10 s); once more: we stop
    following. SIGTERM is passed on alike. A task that has not started yet is cancelled at once. Ctrl-\ detaches, Ctrl-Z
    stops the task and us. ``attends``: the task is cancelled when we are gone; ``stdin``: what it reads, if it does;
    ``has_terminal``: it has a terminal of its own, and ours goes raw for it; ``is_source``: its input ends with us;
    ``tail_lines``: only so much of what it has written so far is shown.
    """

    DETACHES = True
    """True if the user can detach."""

    def __init__(
        self,
        client: AgentConnection,
        write: Callable[[dict[str, Any]], None],
        *,
        attends: bool = False,
        stdin: StdinReader | None = None,
        has_terminal: bool = False,
        is_source: bool = False,
        tail_lines: int | None = None,
    ) -> None:
        self._client = client
        self._write = write
        self._attends = attends
        self._stdin = stdin
        self._has_terminal = has_terminal
        self._is_source = is_source
        self._tail: dict[str, object] = {} if tail_lines is None else {"tail_lines": tail_lines}
        self._raw = RawTerminal()
        self._task = ""
        self._target: dict[str, object] = {}
        self._request = 0
        self._attempt = 0
        self._shown = {1: 0, 2: 0}
        self._skips: dict[int, int] = {}
        self._lost_until_s = 0.0
        self._last_interrupt_s = float("-inf")
        self._why_due_s: float | None = None
        self._why_request = -1
        self._shows_staging = False
        self._forwarded: dict[int, int] = {}
        self._cancels: set[int] = set()
        self._before: dict[int, Any] = {}
        self._waiting: list[int] = []
        self._wakeup = (-1, -1, -1)
        self.interrupts = 0

    @property
    def client(self) -> AgentConnection:
        """The connection to the agent; a new one after the agent went away."""
        return self._client

    def __enter__(self) -> Self:
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = (reading, writing, signal.set_wakeup_fd(writing, warn_on_full_buffer=False))
        for number in _CAUGHT:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup, or in the background of a script
                self._before[number] = signal.signal(number, self._caught)
        self._before[signal.SIGTTIN] = signal.signal(signal.SIGTTIN, signal.SIG_IGN)
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.leave()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        reading, writing, before = self._wakeup
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)

    def follow(self, task: str) -> dict[str, Any]:
        """Pass the task's output on until it has ended → its state, exit code and reason. Raises Detached."""
        self._task = task
        self._target = {"task": task}
        self._why_due_s = time.monotonic() + WHY_AFTER_S
        self._ask()
        try:
            while True:
                try:
                    ended = self._turn()
                except AgentUnavailable as error:
                    self._reconnect(error)
                    continue
                if ended is not None:
                    return ended
        except BrokenPipeError:
            self._reader_gone()
            raise

    def _reader_gone(self) -> None:
        """Cancel the task, since the reader of our output is gone."""
        self._client.call("cancel", tasks=[self._task], signal=int(signal.SIGPIPE))

    def _ask(self) -> None:
        asked: dict[str, object] = {"task": self._task, "follow": True, "tells_start": True, **self._tail}
        self._request = self._client.send("output", **asked, done_with=self._is_source)
        self._tail = {}  # after a reconnection, what was shown is skipped

    # -- one turn ------------------------------------------------------------------------------------------------------

    def _turn(self) -> dict[str, Any] | None:
        """Wait for an event and handle it → the end of the task, None before that."""
        stdin = self._stdin
        poll = select.poll()
        agent = self._client.fileno()
        poll.register(agent, select.POLLIN)
        poll.register(self._wakeup[0], select.POLLIN)
        timeout_ms: float | None = 0 if self._waiting and not self._lost_until_s else None
        if stdin is not None and stdin.wants_to_read:
            if stdin.is_foreground:
                poll.register(0, select.POLLIN)
                poll.register(agent, select.POLLIN)
            else:
                timeout_ms = BACKGROUND_LOOK_S * 1000
        if self._why_due_s is not None and not self._lost_until_s:
            left_ms = max((self._why_due_s - time.monotonic()) * 1000, 0.0)
            timeout_ms = left_ms if timeout_ms is None else min(timeout_ms, left_ms)
        ready = dict(poll.poll(timeout_ms))
        if self._wakeup[0] in ready:
            os.read(self._wakeup[0], 4096)
        if not self._lost_until_s:  # while reconnecting, the agent may not receive them
            self._handle_signals()
            self._ask_why()
        ended = None
        if agent in ready:
            ended = self._receive()
        if ended is None and stdin is not None and 0 in ready:
            self._pass_on(stdin)
        return ended

    def _ask_why(self) -> None:
        """Ask once why the task has not started."""
        if self._why_due_s is not None and time.monotonic() >= self._why_due_s:
            self._why_due_s = None
            self._why_request = self._client.send("why", task=self._task)

    def _receive(self) -> dict[str, Any] | None:
        answered, kind, body = self._client.receive(may_last=True)
        self._lost_until_s = 0.0
        if answered != self._request:
            self._answered(answered, kind, body)
        elif kind != "more":
            return accepted(kind, body)
        elif "running" in body:
            self._runs(body["running"])
        elif "ended" in body:
            self._begins(body["ended"])
        elif "unknown" in body:
            say_unknown(body["unknown"])
        elif "away" in body:
            say_away(body["away"])
        elif "waits" in body:
            say_waits(body["waits"])
        else:
            self._show(body)
        return None

    def _begins(self, where: dict[str, Any]) -> None:
        """Begin with the output of an attempt, without the part shown before a reconnection."""
        attempt = int(where.get("attempt") or 0)
        self._skips = dict(self._shown) if attempt == self._attempt else {}
        if attempt != self._attempt:
            self._shown = {1: 0, 2: 0}
        self._attempt = attempt

    def _runs(self, where: dict[str, Any]) -> None:
        """Note that an attempt runs."""
        self._why_due_s, self._why_request = None, -1
        if self._shows_staging:
            sys.stderr.write(f"\r{CLEAR_TO_END}")
            self._shows_staging = False
        self._begins(where)
        if self._has_terminal:
            self._raw.enter()
            self._resize()
        if self._stdin is not None:
            self._stdin.is_paused = False

    def _show(self, piece: dict[str, Any]) -> None:
        stream, offset, data = piece["stream"], piece["offset"], piece["data"]
        skip = max(0, self._skips.get(stream, 0) - offset)
        if skip < len(data):
            self._shown[stream] = offset + len(data)
            self._write({**piece, "offset": offset + skip, "data": data[skip:]} if skip else piece)

    # -- input ---------------------------------------------------------------------------------------------------------

    def _pass_on(self, stdin: StdinReader) -> None:
        data = stdin.read()
        if data is None:
            return
        if self.DETACHES and self._has_terminal and stdin.is_terminal and DETACH_KEY in data:
            data = data.partition(DETACH_KEY)[0]
            if data:
                stdin.add(data)
            self._send_input(stdin)
            self._detach()
            return
        stdin.add(data)
        self._send_input(stdin)

    def _send_input(self, stdin: StdinReader) -> None:
        """Send the pieces that were read. A piece that cannot be sent stays unsent."""
        more: dict[str, object] = {"is_source": True} if self._is_source else {}
        while stdin.unsent:
            offset, data = stdin.unsent[0]
            if not (self._has_terminal and stdin.is_terminal):
                more["offset"] = offset
            request = self._client.send("input", **self._target, data=data, ends=not data, **more)
            stdin.sent(request)

    def _end_input(self) -> None:
        """End the input, since the task takes no more; another attempt would read the same."""
        if self._is_source and not self._has_terminal:
            self._client.send("input", **self._target, ends=True, is_source=True)

    def _claim_input(self, stdin: StdinReader) -> None:
        """Claim the input again after a reconnection, although there may be nothing to send."""
        if stdin.is_open:
            offset = 0 if self._has_terminal else stdin.at
            request = self._client.send("input", **self._target, offset=offset, is_source=self._is_source)
            stdin.claimed(request)

    def _resize(self) -> None:
        rows, columns = window()
        self._client.send("resize", **self._target, rows=rows, columns=columns)

    # -- signals -------------------------------------------------------------------------------------------------------

    def _caught(self, number: int, _frame: FrameType | None) -> None:
        """Note a signal for the loop. Runs between two instructions of the main thread."""
        self._waiting.append(number)
        unhandled = [number for number in self._waiting if number not in _HARMLESS]
        if len(unhandled) > (SIGNALS_UNHANDLED_MAX if self._task else 1):
            raise KeyboardInterrupt  # the agent does not answer the submit, or stopped in the middle of a frame

    def _handle_signals(self) -> None:
        while self._waiting:
            number = self._waiting.pop(0)
            if number == signal.SIGWINCH:
                if self._has_terminal:
                    self._resize()
            elif number == signal.SIGQUIT:
                self._detach()
            elif number == signal.SIGTSTP:
                self._stop()
            elif number == signal.SIGHUP:
                self._hung_up()
            elif number != signal.SIGCONT:
                self._forward(number)

    def _forward(self, number: int) -> None:
        now = time.monotonic()
        self.interrupts += 1
        again = now - self._last_interrupt_s <= SECOND_INTERRUPT_S
        self._last_interrupt_s = now
        if self._cancels and again:
            raise PeerloadError(
                f"no longer following {self._task}",
                why="it is being cancelled",
                hint=f"its outcome:  peerload show {self._task}        peerload cancel --force {self._task}",
            )
        if again:
            self._cancel(number)
        else:
            self._forwarded[self._client.send("signal", **self._target, signal=number)] = number

    def _cancel(self, number: int) -> None:
        say(f"cancelling {self._task}")
        stop_signal = signal.SIGTERM if number == signal.SIGINT else number
        self._cancels.add(self._client.send("cancel", tasks=[self._task], signal=int(stop_signal)))

    def _stop(self) -> None:
        """Handle Ctrl-Z: stop the task and us. The task gets SIGSTOP, since SIGTSTP stops nothing in a session without a shell."""
        self._raw.leave()
        self._client.send("signal", **self._target, signal=int(signal.SIGSTOP))
        os.kill(os.getpid(), signal.SIGSTOP)
        self._client.send("signal", **self._target, signal=int(signal.SIGCONT))
        if self._has_terminal and self._attempt:
            self._raw.enter()
            self._resize()

    def _hung_up(self) -> None:
        """The terminal is gone: cancel the task, unless the user keeps it."""
        if self._attends:
            self._client.call("cancel", tasks=[self._task], signal=int(signal.SIGHUP))
        raise SystemExit(128 + signal.SIGHUP)

    def _detach(self) -> None:
        self._raw.leave()
        if self._has_terminal:
            os.write(2, b"\r\n")  # the next message begins a line
        self._client.call("detach", task=self._task)
        raise Detached

    def _answered(self, answered: int, kind: str, body: dict[str, Any]) -> None:
        """Handle an answer to another request. A signal that could not be delivered means that the task does not run: cancel it."""
        if self._stdin is not None and self._stdin.is_of(answered):
            why = self._stdin.answered(answered, kind, body)
            if not why and not self._stdin.is_open and body.get("wanted") is False:
                self._end_input()
            if why:
                say(f"no input goes to {self._task}: {why}")
                if self._attends:
                    self._cancel(signal.SIGTERM)
            return
        if answered == self._why_request:
            if kind == "ok" and body.get("staging") and os.isatty(2):
                sys.stderr.write(f"\r{shortened(printable(body['says']), STAGING_WIDTH_MAX)}{CLEAR_TO_END}")
                sys.stderr.flush()
                self._shows_staging = True
                self._why_due_s = time.monotonic() + STAGING_LOOK_S
            elif kind == "ok" and body.get("summary") not in (None, "", SAID_AT_SUBMISSION):
                why = shortened(printable(body["summary"]), WHY_WIDTH_MAX)
                say(f"{self._task} waits: {why}", f"more:  peerload why {self._task}")
            return
        number = self._forwarded.pop(answered, None)
        if number is not None and kind == "error":
            self._cancel(number)
        elif answered in self._cancels and kind == "error":
            say(f"{self._task} was not cancelled: {body.get('what', '')} {body.get('why', '')}")

    # -- an agent that goes away ---------------------------------------------------------------------------------------

    def _reconnect(self, error: AgentUnavailable) -> None:
        """Reconnect to the agent and resume. Raises AgentUnavailable if it stays away."""
        if not self._lost_until_s:
            self._lost_until_s = time.monotonic() + RECONNECT_S_MAX
        self._raw.leave()
        self._client.close()
        while True:
            select.select([self._wakeup[0]], [], [], RECONNECT_LOOK_S)
            if time.monotonic() > self._lost_until_s or set(self._waiting) - set(_HARMLESS):
                raise self._lost(error) from None
            try:
                self._client = AgentConnection(self._client.path)
                if self._attends:
                    self._client.call("attend", task=self._task)
                self._waiting[:0] = self._forwarded.values()  # they may not have arrived
                self._forwarded.clear()
                self._cancels.clear()
                self._ask()
                if self._stdin is not None:
                    if self._has_terminal and self._stdin.is_terminal:
                        self._stdin.forget()
                    self._stdin.send_again()
                    self._send_input(self._stdin)
                    self._claim_input(self._stdin)
            except AgentUnavailable:
                continue
            return

    def _lost(self, error: AgentUnavailable) -> AgentUnavailable:
        hint = f"the task goes on; join it again:  peerload attach {self._task}        peerload wait {self._task}"
        if self._attends:
            hint = (
                "the task goes on, but is cancelled soon after the agent returns; to keep it:  "
                f"peerload attach {self._task}"
            )
        return AgentUnavailable(f"lost the agent while {self._task} was running", why=error.why, hint=hint)


def is_ours(task: dict[str, Any], info: dict[str, Any]) -> bool:
    """True if a task is this user's, so that its output may go to the terminal unchanged. The user that another node names is trusted
    only if all nodes are one person's."""
    return is_mine(task) and (info.get("mode") != "system" or task.get("home") == info.get("node"))
