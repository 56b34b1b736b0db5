"""The terminal that a command is typed at: raw while a command elsewhere uses it, its window, and how commands are told of it."""

from __future__ import annotations

import os

from peerload.model.text import printable
from peerload.text.format import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

DETACH_KEY = b"\x1c"
"""Ctrl-\\ as a terminal sends it."""
ROWS, COLUMNS = 24, 80
"""Of a window that nobody knows."""


def window() -> tuple[int, int]:
    """The rows and columns of the window that our stdout, stdin or stderr is in."""
    for descriptor in (1, 0, 2):
        try:
            columns, rows = os.get_terminal_size(descriptor)
        except OSError:
            continue
        if rows > 0 and columns > 0:
            return rows, columns
    return ROWS, COLUMNS


class RawTerminal:
    """The terminal on stdin, raw while `enter` … `leave`; does nothing if stdin is none."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def enter(self) -> None:
        """Every key is a byte from here on."""
        if self._before is None and os.isatty(0):
            import termios
            import tty

            try:
                self._before = termios.tcgetattr(0)
                tty.setraw(0, termios.TCSADRAIN)  # what was typed ahead is for the command
            except termios.error:  # hung up
                self._before = None

    def leave(self) -> None:
        """As it was."""
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
"""Programs that draw on a terminal."""
TALKERS = frozenset((
    "bash", "sh", "dash", "zsh", "fish", "ksh", "csh", "tcsh", "python", "python2", "python3", "ipython",
    "ipython3", "node", "irb", "R", "julia", "octave", "ghci", "lua", "luajit", "sqlite3", "psql", "mysql",
    "redis-cli", "gdb", "lldb", "bc", "ftp", "sftp", "su", "passwd",
))  # fmt: skip
"""Programs that talk with a user where they are told nothing else to do."""
TALKS_WITH = frozenset(("-i", "-l", "-q", "--login", "--interactive", "--norc", "--noprofile"))
"""Options with which they still do."""
BATCH = frozenset(("-b", "--batch", "-es", "-Es", "-batch"))
"""Options with which programs that draw do not."""
TERM_DEFAULT = b"xterm"
COLOURS_FORCED = ("CLICOLOR_FORCE=1", "FORCE_COLOR=1")
"""The variables by which programs print colours although their output is no terminal."""


def say_if_it_needs_a_terminal(argv: Sequence[bytes]) -> None:
    """On stderr, of a command that waits for a user who sees nothing of it. ``argv``: what is to be run without `--pty`."""
    if not (os.isatty(0) and os.isatty(1)):
        return
    words = [word.decode("utf-8", "replace") for word in argv]
    name = words[0].rpartition("/")[2]
    draws = name in SCREENS and BATCH.isdisjoint(words[1:])
    talks = name in TALKERS and TALKS_WITH.issuperset(words[1:])
    if not draws and not talks:
        return
    what = (
        "draws on a terminal, and has none"
        if draws
        else "has no terminal: no prompt, and it reads what you type line by line"
    )
    import shlex

    say(f"{printable(name)} {what}", f"with a terminal:  peerload run --pty {printable(shlex.join(words))}")


def with_term(given: list[str]) -> list[str]:
    """The variables a user has given (`K=V`), and what a program needs to know of the terminal, unless they say that."""
    if any(word.startswith("TERM=") for word in given):
        return given
    return [*given, f"TERM={os.fsdecode(os.environb.get(b'TERM') or TERM_DEFAULT)}"]


def with_colours(given: list[str], *, has_terminal: bool) -> list[str]:
    """The variables a user has given (`K=V`), and those by which programs know that their colours are seen. has_terminal: the
    command gets a terminal of its own, else only ours is one, for both of its outputs."""
    if os.environ.get("NO_COLOR") or not (has_terminal or (os.isatty(1) and os.isatty(2))):
        return given
    wanted = [] if has_terminal or os.environ.get("TERM", "dumb") == "dumb" else list(COLOURS_FORCED)
    if "COLORTERM" in os.environ:
        wanted.append(f"COLORTERM={os.environ['COLORTERM']}")
    named = {word.partition("=")[0] for word in given}
    return [*given, *(word for word in wanted if word.partition("=")[0] not in {*named, *_own(wanted)})]


def _own(wanted: list[str]) -> set[str]:
    """Of these variables those that the user has set in the environment, which travel as they are."""
    names = {word.partition("=")[0] for word in wanted} - {"COLORTERM"}
    return {name for name in names if name in os.environ}
