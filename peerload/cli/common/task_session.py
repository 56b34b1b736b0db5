"""Follows one task to its end, for `run`, `attach` and `exec`: prints its output, forwards our input and signals, and sets our
terminal to raw mode for a task that has a terminal.

One loop waits for the agent, for our stdin and for signals. A signal handler only records the signal, so that
no request is ever sent in the middle of another.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from peerload.cli.common.messages import say_notice
from peerload.client.connection import (
    RECONNECT_S_MAX,
    AgentConnection,
    OutputPosition,
    accepted,
    is_worth_another_try,
    readable_within,
)
from peerload.model.errors import AgentUnavailable, PeerloadError
from peerload.model.text import printable
from peerload.text.format import say, shortened
from peerload.text.tasks import is_mine

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType
    from typing import Any, Self


DETACH_KEY = b"\x1c"
"""The byte of Ctrl-\\."""
ROWS, COLUMNS = 24, 80
"""The size to assume for an unknown window."""


def window() -> tuple[int, int]:
    """The rows and columns of the terminal on stdout, stdin or stderr."""
    for descriptor in (1, 0, 2):
        try:
            columns, rows = os.get_terminal_size(descriptor)
        except OSError:
            continue
        if rows > 0 and columns > 0:
            return rows, columns
    return ROWS, COLUMNS


class RawTerminal:
    """Raw mode of the terminal on stdin between `enter` and `leave`; nothing happens if stdin is not a terminal."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def enter(self) -> None:
        """Switch to raw mode: every key is a byte."""
        if self._before is None and os.isatty(0):
            import termios
            import tty

            try:
                self._before = termios.tcgetattr(0)
                tty.setraw(0, termios.TCSADRAIN)  # keys typed before belong to the command
            except termios.error:  # a hangup
                self._before = None

    def leave(self) -> None:
        if self._before is not None:
            import termios

            before, self._before = self._before, None
            try:
                termios.tcsetattr(0, termios.TCSADRAIN, before)
            except termios.error:
                return


SCREENS = frozenset((
    "vi", "vim", "nvim", "view", "nano", "pico", "emacs", "joe", "micro", "less", "more", "most", "man", "top",
    "htop", "btop", "atop", "nvtop", "watch", "tmux", "screen", "mc", "ranger", "ncdu", "tig", "visidata", "vd",
))  # fmt: skip
"""Programs that draw on the screen."""
TALKERS = frozenset((
    "bash", "sh", "dash", "zsh", "fish", "ksh", "csh", "tcsh", "python", "python2", "python3", "ipython",
    "ipython3", "node", "irb", "R", "julia", "octave", "ghci", "lua", "luajit", "sqlite3", "psql", "mysql",
    "redis-cli", "gdb", "lldb", "bc", "ftp", "sftp", "su", "passwd",
))  # fmt: skip
"""Programs that are interactive without arguments."""
TALKS_WITH = frozenset(("-i", "-l", "-q", "--login", "--interactive", "--norc", "--noprofile"))
"""Options with which these programs are still interactive."""
BATCH = frozenset(("-b", "--batch", "-es", "-Es", "-batch"))
"""Options with which programs that draw on the screen do not."""
TERM_DEFAULT = b"xterm"
COLOURS_FORCED = ("CLICOLOR_FORCE=1", "FORCE_COLOR=1")
"""Variables that make programs print colours although their output is not a terminal."""


def say_if_it_needs_a_terminal(argv: Sequence[bytes]) -> None:
    """Warn on stderr if a command needs a terminal. ``argv``: a command without `--pty`."""
    if not (os.isatty(0) and os.isatty(1)):
        return
    words = [word.decode("utf-8", "replace") for word in argv]
    name = words[0].rpartition("/")[2]
    draws = name in SCREENS and BATCH.isdisjoint(words[1:])
    talks = name in TALKERS and TALKS_WITH.issuperset(words[1:])
    if not draws and not talks:
        return
    what = "needs a terminal, and gets none" if draws else "gets no terminal: it shows no prompt and reads line by line"
    import shlex

    say(f"{printable(name)} {what}", f"with a terminal:  peerload run --pty {printable(shlex.join(words))}")


def with_term(given: list[str]) -> list[str]:
    """The given variables (`K=V`) and TERM, unless it is among them."""
    if any(word.startswith("TERM=") for word in given):
        return given
    return [*given, f"TERM={os.fsdecode(os.environb.get(b'TERM') or TERM_DEFAULT)}"]


def with_colours(given: list[str], *, has_terminal: bool) -> list[str]:
    """The given variables (`K=V`), plus COLOURS if the output goes to a terminal. has_terminal: the command gets its own
    terminal."""
    if os.environ.get("NO_COLOR") or not (has_terminal or (os.isatty(1) and os.isatty(2))):
        return given
    wanted = [] if has_terminal or os.environ.get("TERM", "dumb") == "dumb" else list(COLOURS_FORCED)
    if "COLORTERM" in os.environ:
        wanted.append(f"COLORTERM={os.environ['COLORTERM']}")
    named = {word.partition("=")[0] for word in given}
    return [*given, *(word for word in wanted if word.partition("=")[0] not in {*named, *_own(wanted)})]


def _own(wanted: list[str]) -> set[str]:
    """The variables among these that the user has set in the environment, which are sent anyway."""
    names = {word.partition("=")[0] for word in wanted} - {"COLORTERM"}
    return {name for name in names if name in os.environ}


PIECE_BYTES = 64 << 10
"""Bytes read and sent at a time: a writable socket always accepts this many."""
PIECES_UNANSWERED_MAX = 8
"""Maximum number of pieces that the agent has not answered. The agent answers when it can buffer more."""
BACKGROUND_LOOK_S = 1.0
"""Interval between checks of a terminal while another job is in the foreground."""
STDIN = 0
_KIND_MASK, _DIRECTORY, _CHARACTERS = 0o170000, 0o040000, 0o020000  # as in <sys/stat.h>


def takes_input() -> bool:
    """True if stdin can provide input: a pipe, a file, a socket or a terminal; not /dev/null, and not closed."""
    try:
        status = os.fstat(STDIN)
        kind = status.st_mode & _KIND_MASK
        if kind == _DIRECTORY:
            return False
        return kind != _CHARACTERS or os.isatty(STDIN) or status.st_rdev != os.stat(os.devnull).st_rdev  # noqa: PTH116 -- pathlib would cost every command its quick start
    except OSError:
        return False


class StdinReader:
    """Pieces of stdin that are sent to the agent, each kept until it is answered. ``at``: the offset of the next piece.

    A terminal is read only while we are its foreground job; a background job would be stopped.
    """

    def __init__(self) -> None:
        self.is_terminal = os.isatty(STDIN)
        self.at = 0
        self.is_open = True
        self.is_paused = self.is_terminal
        """A terminal is not read before its command runs."""
        self.unsent: list[tuple[int, bytes]] = []
        """Pieces to send, in order, each with its offset; b"" is the end."""
        self._unanswered: dict[int, tuple[int, bytes]] = {}
        self._claim = 0

    @property
    def wants_to_read(self) -> bool:
        return self.is_open and not self.is_paused and len(self._unanswered) < PIECES_UNANSWERED_MAX

    @property
    def is_foreground(self) -> bool:
        """True if reading stdin would not stop this process (SIGTTIN)."""
        if not self.is_terminal:
            return True
        try:
            return os.tcgetpgrp(STDIN) == os.getpgrp()
        except OSError:  # not our controlling terminal: reading it does not stop us
            return True

    def read(self) -> bytes | None:
        """Read the next piece: b"" at the end, None if no data is available now."""
        try:
            data = os.read(STDIN, PIECE_BYTES)
        except BlockingIOError:
            return None
        except OSError:  # such as a terminal after a hangup
            data = b""
        self.is_open = bool(data)
        return data

    def add(self, data: bytes) -> None:
        self.unsent.append((self.at, data))
        self.at += len(data)

    def sent(self, request: int) -> None:
        self._unanswered[request] = self.unsent.pop(0)

    def claimed(self, request: int) -> None:
        self._claim = request

    def answered(self, request: int, kind: str, body: dict[str, Any]) -> str:
        """Handle an answer → the reason why no more input can be sent, "" if it can. If the task accepts no more, stdin is closed, so
        that the process writing to it notices."""
        if not self.is_of(request):
            return ""
        self._unanswered.pop(request, None)
        if kind == "error":
            self.stop()
            return str(body.get("why") or body.get("what") or "refused")
        if not body.get("wanted", True) or (body.get("ended") and self.is_open):
            self.stop()
        return ""

    def is_of(self, request: int) -> bool:
        return request in self._unanswered or request == self._claim

    def stop(self) -> None:
        """Stop reading, and close a pipe so that its writer notices."""
        self.is_open = False
        self.unsent.clear()
        if not self.is_terminal:
            nowhere = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nowhere, STDIN)
            os.close(nowhere)

    def forget(self) -> None:
        """Drop unanswered pieces: keys must not be typed twice."""
        self._unanswered.clear()

    def send_again(self) -> None:
        """Send unanswered pieces again: they may have been lost with the connection. Answers arrive in any order."""
        self.unsent[:0] = sorted(self._unanswered.values(), key=lambda piece: piece[0])
        self._unanswered.clear()


SECOND_INTERRUPT_S = 2.0
"""A second Ctrl-C within this cancels the task."""
RECONNECT_LOOK_S = 0.1
WHY_AFTER_S = 5.0
"""The reason is shown for a task that has not started after this time, …"""
WHY_WIDTH_MAX = 200
"""… in at most this width, …"""
SAID_AT_SUBMISSION = "no node known can ever run it"
"""… unless it was already shown at its submission."""
STAGING_LOOK_S = 1.0
STAGING_WIDTH_MAX = 78
"""Interval and width of the progress line on a terminal while its files are transferred."""
CLEAR_TO_END = "\x1b[K"
SIGNALS_UNHANDLED_MAX = 3
"""An agent that stops in the middle of a frame blocks the loop. After this many signals, the session gives up."""
_CAUGHT = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGWINCH, signal.SIGCONT,
)  # fmt: skip
_HARMLESS = (signal.SIGWINCH, signal.SIGCONT)
_CAN_WAIT = (*_HARMLESS, signal.SIGTSTP, signal.SIGQUIT)
"""Signals that are handled only after a reconnection: Ctrl-Z and Ctrl-\\ leave the task alive."""


class Detached(Exception):
    """The user has detached from the task."""


class TaskSession:
    r"""Passes the output of a task to ``write``, and forwards signals while its context is open.

    Ctrl-C: the task gets SIGINT; again within 2 s: it is cancelled (SIGTERM, SIGKILL after 10 s); once more: we stop
    following. SIGTERM is forwarded in the same way if the task ends with us, else it ends only us. A task that has not started
    is cancelled immediately. Ctrl-\ detaches, Ctrl-Z stops the task and us. ``attends``: the task is cancelled when we disconnect;
    ``stdin``: its input, if it has any; ``has_terminal``: it has its own terminal, so ours is set to raw mode;
    ``is_source``: its input ends with us; ``tail_lines``: number of earlier lines of its output to show.
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
        self._position = OutputPosition()
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
        """The current connection to the agent, which a reconnection replaces."""
        return self._client

    def __enter__(self) -> Self:
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = (reading, writing, signal.set_wakeup_fd(writing, warn_on_full_buffer=False))
        for number in _CAUGHT:
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup, or in the background of a script
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
        """Cancel the task if it ends with us, since its output has no reader any more."""
        if self._attends:
            self._client.call("cancel", tasks=[self._task], signal=int(signal.SIGPIPE))

    def _ask(self) -> None:
        asked: dict[str, object] = {"task": self._task, "follow": True, "tells_start": True, **self._tail}
        self._request = self._client.send("output", **asked, done_with=self._is_source)
        self._tail = {}  # after a reconnection, output that was already shown is skipped

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
        elif "ended" not in body and not say_notice(body):
            self._show(body)
        return None

    def _runs(self, where: dict[str, Any]) -> None:
        self._why_due_s, self._why_request = None, -1
        if self._shows_staging:
            sys.stderr.write(f"\r{CLEAR_TO_END}")
            self._shows_staging = False
        self._attempt = int(where.get("attempt") or 0)
        if self._has_terminal:
            self._raw.enter()
            self._resize()
        if self._stdin is not None:
            self._stdin.is_paused = False

    def _show(self, piece: dict[str, Any]) -> None:
        if (new := self._position.beyond(piece)) is not None:
            self._write(new)

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
        """End the input, since the task accepts no more; another attempt would read the same input."""
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
            elif number == signal.SIGTERM and self.DETACHES and not self._attends:
                raise SystemExit(128 + signal.SIGTERM)  # the task continues without us
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
        """Handle Ctrl-Z: stop the task and us. The task gets SIGSTOP, since SIGTSTP has no effect in a session without a shell."""
        self._raw.leave()
        self._client.send("signal", **self._target, signal=int(signal.SIGSTOP))
        os.kill(os.getpid(), signal.SIGSTOP)
        self._client.send("signal", **self._target, signal=int(signal.SIGCONT))
        if self._has_terminal and self._attempt:
            self._raw.enter()
            self._resize()

    def _hung_up(self) -> None:
        """Handle a hangup of the terminal: cancel the task, unless it is kept."""
        if self._attends:
            self._client.call("cancel", tasks=[self._task], signal=int(signal.SIGHUP))
        raise SystemExit(128 + signal.SIGHUP)

    def _detach(self) -> None:
        self._raw.leave()
        if self._has_terminal:
            os.write(2, b"\r\n")  # start the next message on a new line
        self._client.call("detach", task=self._task)
        raise Detached

    def _answered(self, answered: int, kind: str, body: dict[str, Any]) -> None:
        """Handle an answer to another request. A signal that could not be delivered means that the task does not run: cancel it."""
        if self._stdin is not None and self._stdin.is_of(answered):
            why = self._stdin.answered(answered, kind, body)
            if not why and not self._stdin.is_open and body.get("wanted") is False:
                self._end_input()
            if why:
                say(f"input cannot be sent to {self._task}: {why}")
                if self._attends:
                    self._cancel(signal.SIGTERM)
            return
        if answered == self._why_request:
            if kind == "ok":
                self._say_why(body)
            return
        number = self._forwarded.pop(answered, None)
        if number is not None and kind == "error":
            self._cancel(number)
        elif answered in self._cancels and kind == "error":
            say(f"{self._task} was not cancelled: {body.get('what', '')} {body.get('why', '')}")

    def _say_why(self, body: dict[str, Any]) -> None:
        """Show why the task has not started: once, or repeatedly on a terminal while its files are staged."""
        why = str(body["says"] if body.get("staging") else body.get("summary") or "")
        if body.get("staging") and os.isatty(2):
            sys.stderr.write(f"\r{shortened(printable(why), STAGING_WIDTH_MAX)}{CLEAR_TO_END}")
            sys.stderr.flush()
            self._shows_staging = True
            self._why_due_s = time.monotonic() + STAGING_LOOK_S
        elif why not in ("", SAID_AT_SUBMISSION):
            say(f"{self._task} waits: {shortened(printable(why), WHY_WIDTH_MAX)}", f"more:  peerload why {self._task}")

    # -- reconnection --------------------------------------------------------------------------------------------------

    def _reconnect(self, error: AgentUnavailable) -> None:
        """Reconnect to the agent and resume. Raises AgentUnavailable if it does not return in time."""
        if not self._lost_until_s:
            self._lost_until_s = time.monotonic() + RECONNECT_S_MAX
        self._raw.leave()
        self._client.close()
        while True:
            if readable_within(self._wakeup[0], RECONNECT_LOOK_S):
                os.read(self._wakeup[0], 4096)
            if time.monotonic() > self._lost_until_s or set(self._waiting) - set(_CAN_WAIT):
                raise self._lost(error) from None
            try:
                self._client = AgentConnection(self._client.path, room_s=0.0)
                if self._attends:
                    self._client.call("attend", task=self._task)
                else:
                    self._client.call("info")  # once it answers, it receives signals
                self._waiting[:0] = self._forwarded.values()  # these may not have arrived
                self._forwarded.clear()
                self._cancels.clear()
                self._ask()
                if self._stdin is not None:
                    if self._has_terminal and self._stdin.is_terminal:
                        self._stdin.forget()
                    self._stdin.send_again()
                    self._send_input(self._stdin)
                    self._claim_input(self._stdin)
            except PeerloadError as again:
                if is_worth_another_try(again):
                    continue
                raise
            self._lost_until_s = 0.0
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
    """True if the task belongs to this user, so that its output may go to the terminal unchanged. A user name from another node is
    trusted only if one person owns all nodes."""
    return is_mine(task) and (info.get("mode") != "system" or task.get("home") == info.get("node"))
