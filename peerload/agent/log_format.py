"""The lines of the agent's log: one record, one line, whatever foreign text is in it (rule T1)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from peerload.model.text import printable

if TYPE_CHECKING:
    from types import TracebackType

FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MESSAGE_CHARS_MAX = 4000
"""Bound on a message; a longer one is cut off."""
TRACEBACK_LINES_MAX = 200
INDENT = "    "
"""The lines of a traceback begin so; no record does, so that none can be forged from within an exception's text."""


class LogLines(logging.Formatter):
    """Writes a record as one line; a traceback below it, indented."""

    def __init__(self) -> None:
        super().__init__(FORM)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 -- the base class's
        """The line, foreign characters in it escaped."""
        record.message = printable(record.message[:MESSAGE_CHARS_MAX])
        return super().formatMessage(record)

    def formatException(  # noqa: N802 -- the base class's
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        """The traceback, each line of it escaped and indented."""
        lines = super().formatException(ei).split("\n")[:TRACEBACK_LINES_MAX]
        return "\n".join(INDENT + printable(line) for line in lines)
