"""The user's terminal and standard input: its window, raw mode, variables that describe it, and the input that is forwarded to a task."""

from __future__ import annotations

import os

from peerload.model.text import printable
from peerload.text.format import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


DETACH_KEY = b"\x1c"
"""The byte of Ctrl-\\."""
ROWS, COLUMNS = 24, 80
"""The size of an unknown window."""


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
    """Raw mode of the terminal on stdin between `enter` and `leave`; nothing happens if stdin is no terminal."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def enter(self) -> None:
        """Switch to raw mode: every key is a byte."""
        if self._before is None and os.isatty(0):
            import termios
            import tty

            try:
                self._before = termios.tcgetattr(0)
                tty.setraw(0, termios.TCSADRAIN)  # keys typed ahead are for the command
            except termios.error:  # a hangup
                self._before = None

    def leave(self) -> None:
        """Restore the terminal."""
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
"""Options with which they still are."""
BATCH = frozenset(("-b", "--batch", "-es", "-Es", "-batch"))
"""Options with which programs that draw do not draw."""
TERM_DEFAULT = b"xterm"
COLOURS_FORCED = ("CLICOLOR_FORCE=1", "FORCE_COLOR=1")
"""Variables that make programs print colours though their output is no terminal."""


def say_if_it_needs_a_terminal(argv: Sequence[bytes]) -> None:
    """Say on stderr that a command needs a terminal. ``argv``: a command without `--pty`."""
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
    """The given variables (`K=V`) and those that make programs print colours, if the user sees them. has_terminal: the command gets a
    terminal of its own."""
    if os.environ.get("NO_COLOR") or not (has_terminal or (os.isatty(1) and os.isatty(2))):
        return given
    wanted = [] if has_terminal or os.environ.get("TERM", "dumb") == "dumb" else list(COLOURS_FORCED)
    if "COLORTERM" in os.environ:
        wanted.append(f"COLORTERM={os.environ['COLORTERM']}")
    named = {word.partition("=")[0] for word in given}
    return [*given, *(word for word in wanted if word.partition("=")[0] not in {*named, *_own(wanted)})]


def _own(wanted: list[str]) -> set[str]:
    """The variables among these that the user has set in the environment; they travel anyway."""
    names = {word.partition("=")[0] for word in wanted} - {"COLORTERM"}
    return {name for name in names if name in os.environ}


PIECE_BYTES = 64 << 10
"""Bytes read and sent at a time: a writable socket has room for these."""
PIECES_UNANSWERED_MAX = 8
"""Bound of pieces that the agent has not answered; it answers when there is room for more."""
BACKGROUND_LOOK_S = 1.0
"""Pause between looks at a terminal that is another job's."""
STDIN = 0
_KIND_MASK, _DIRECTORY, _CHARACTERS = 0o170000, 0o040000, 0o020000  # as in <sys/stat.h>


def takes_input() -> bool:
    """True if stdin is something that a command may read: a pipe, a file, a socket or a terminal; not /dev/null, and not closed."""
    try:
        status = os.fstat(STDIN)
        kind = status.st_mode & _KIND_MASK
        if kind == _DIRECTORY:
            return False
        return kind != _CHARACTERS or os.isatty(STDIN) or status.st_rdev != os.stat(os.devnull).st_rdev  # noqa: PTH116 -- pathlib would cost every command its quick start
    except OSError:
        return False


class StdinReader:
    """Pieces of stdin on their way to the agent, each kept until it is answered. ``at``: the offset of the next piece.

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
        """True if to poll stdin."""
        return self.is_open and not self.is_paused and len(self._unanswered) < PIECES_UNANSWERED_MAX

    @property
    def is_foreground(self) -> bool:
        """True if stdin can be read without being stopped."""
        if not self.is_terminal:
            return True
        try:
            return os.tcgetpgrp(STDIN) == os.getpgrp()
        except OSError:  # it is not our controlling terminal: it can be read
            return True

    def read(self) -> bytes | None:
        """Read the next piece: b"" at the end, None if there is nothing now."""
        try:
            data = os.read(STDIN, PIECE_BYTES)
        except BlockingIOError:
            return None
        except OSError:  # such as a terminal after a hangup
            data = b""
        self.is_open = bool(data)
        return data

    def add(self, data: bytes) -> None:
        """Add a piece that was read."""
        self.unsent.append((self.at, data))
        self.at += len(data)

    def sent(self, request: int) -> None:
        """Note that the first unsent piece was sent with this request."""
        self._unanswered[request] = self.unsent.pop(0)

    def claimed(self, request: int) -> None:
        """Note the request that claims the input without sending any."""
        self._claim = request

    def answered(self, request: int, kind: str, body: dict[str, Any]) -> str:
        """Handle an answer → why no more input can be sent, "" if it goes on. If the task wants no more, stdin is closed, so that
        whoever writes to it notices."""
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
        """True if that request was about stdin."""
        return request in self._unanswered or request == self._claim

    def stop(self) -> None:
        """Read no more, and let the writer of a pipe notice."""
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
        """Send unanswered pieces again: they may have been lost with the connection. Answers come in any order."""
        self.unsent[:0] = sorted(self._unanswered.values(), key=lambda piece: piece[0])
        self._unanswered.clear()
