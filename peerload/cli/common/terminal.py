"""Our own terminal while a command elsewhere uses it: raw, so that every key goes there, and always as it was afterwards."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
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
