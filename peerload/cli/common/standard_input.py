"""What `run` and `attach` read from their own stdin for a task: a pipe, a file or a socket to its end, or a terminal."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PIECE_BYTES = 64 << 10
"""Read, and sent, at a time: so much fits into a socket that has room at all."""
PIECES_UNANSWERED_MAX = 8
"""Pieces on their way that the agent has not answered; it answers when there is room for more."""
BACKGROUND_LOOK_S = 1.0
"""A terminal that is another job's is looked at again after so long."""
STDIN = 0
_KIND_MASK, _DIRECTORY, _CHARACTERS = 0o170000, 0o040000, 0o020000  # as in <sys/stat.h>


def takes_input() -> bool:
    """Whether our stdin is anything that a command may want to read: a pipe, file or socket, or a terminal; not /dev/null,
    and not closed."""
    try:
        status = os.fstat(STDIN)
        kind = status.st_mode & _KIND_MASK
        if kind == _DIRECTORY:
            return False
        return kind != _CHARACTERS or os.isatty(STDIN) or status.st_rdev != os.stat(os.devnull).st_rdev  # noqa: PTH116 -- pathlib would cost every command its quick start
    except OSError:
        return False


class StdinReader:
    """Pieces of stdin on their way to the agent, each kept until it was answered. ``at`` is where the next one that is read
    begins.

    A terminal is read only while we are its foreground job, so that a command in the background is not stopped for it.
    """

    def __init__(self) -> None:
        self.is_terminal = os.isatty(STDIN)
        self.at = 0
        self.is_open = True
        self.is_paused = self.is_terminal
        """Nothing is read from a terminal before its command runs."""
        self.unsent: list[tuple[int, bytes]] = []
        """What was read and is to be sent, in order, each piece with where it begins; b"" is the end."""
        self._unanswered: dict[int, tuple[int, bytes]] = {}
        self._claim = 0

    @property
    def wants_to_read(self) -> bool:
        """Whether stdin is to be waited for."""
        return self.is_open and not self.is_paused and len(self._unanswered) < PIECES_UNANSWERED_MAX

    @property
    def is_foreground(self) -> bool:
        """Whether reading from our stdin would not stop us."""
        if not self.is_terminal:
            return True
        try:
            return os.tcgetpgrp(STDIN) == os.getpgrp()
        except OSError:  # it is not our terminal, and so reads without being asked
            return True

    def read(self) -> bytes | None:
        """The next piece, b"" at its end, None if there is nothing now."""
        try:
            data = os.read(STDIN, PIECE_BYTES)
        except BlockingIOError:
            return None
        except OSError:  # such as a terminal that was hung up
            data = b""
        self.is_open = bool(data)
        return data

    def add(self, data: bytes) -> None:
        """This was read, and is to be sent."""
        self.unsent.append((self.at, data))
        self.at += len(data)

    def sent(self, request: int) -> None:
        """The first piece that was unsent was sent."""
        self._unanswered[request] = self.unsent.pop(0)

    def claimed(self, request: int) -> None:
        """This request says that we are who sends it, and carries nothing."""
        self._claim = request

    def answered(self, request: int, kind: str, body: dict[str, Any]) -> str:
        """An answer came. → why nothing more is to be sent, in words, "" if it goes on. What the task wants no more is not
        read any more either: whoever writes to our stdin is told so by its being closed."""
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
        """Whether that request was about our stdin."""
        return request in self._unanswered or request == self._claim

    def stop(self) -> None:
        """Read no more, and let whoever writes there know."""
        self.is_open = False
        self.unsent.clear()
        if not self.is_terminal:
            nowhere = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nowhere, STDIN)
            os.close(nowhere)

    def forget(self) -> None:
        """Keys whose arrival is not known are not typed twice."""
        self._unanswered.clear()

    def send_again(self) -> None:
        """What was sent and not answered may have been lost with the connection; of what came before it some may have been
        answered, since answers come in any order."""
        self.unsent[:0] = sorted(self._unanswered.values(), key=lambda piece: piece[0])
        self._unanswered.clear()
