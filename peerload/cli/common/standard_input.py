"""Standard input that `run`, `attach` and `exec` forward to a task: a pipe, a file or a socket to its end, or a terminal."""

from __future__ import annotations

import os
from typing import Any

PIECE_BYTES = 64 << 10
"""Bytes read and sent at a time: a socket that has room at all has room for these."""
PIECES_UNANSWERED_MAX = 8
"""Bound of pieces that the agent has not answered; it answers when there is room for more."""
BACKGROUND_LOOK_S = 1.0
"""Pause between looks at a terminal that is another job's."""
STDIN = 0
_KIND_MASK, _DIRECTORY, _CHARACTERS = 0o170000, 0o040000, 0o020000  # as in <sys/stat.h>


def takes_input() -> bool:
    """Whether stdin is something that a command may read: a pipe, a file, a socket or a terminal; not /dev/null, and not closed."""
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
        """Whether to poll stdin."""
        return self.is_open and not self.is_paused and len(self._unanswered) < PIECES_UNANSWERED_MAX

    @property
    def is_foreground(self) -> bool:
        """Whether stdin can be read without being stopped."""
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
        """Whether that request was about stdin."""
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
