"""The user's terminal: its window, raw mode while a command on another node uses it, and variables that describe it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from peerload.model.text import printable
from peerload.text.format import say

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    what = (
        "draws on a terminal, and it gets none"
        if draws
        else "gets no terminal: it shows no prompt and reads line by line"
    )
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
