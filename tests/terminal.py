"""A command at a terminal of its own, and all that the terminal is sent until the command has ended."""

from __future__ import annotations

import errno
import os
import pty
import select
import termios
import time
from typing import TYPE_CHECKING

from tests.integration import forks
from tests.integration.cluster import program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def shown_at_a_terminal(
    words: Sequence[str], environment: Mapping[str, str], lines: int, columns: int, within_s: float
) -> bytes:
    """What the command writes, stdout and stderr together. It is killed, and this raises TimeoutExpired, if it has not
    ended after ``within_s``."""
    own, terminal = pty.openpty()
    os.set_blocking(own, False)
    termios.tcsetwinsize(own, (lines, columns))
    how = {"stdin": terminal, "stdout": terminal, "stderr": terminal, "cwd": "/", "start_new_session": True}
    process = forks.start(words, program(), env=environment, **how)
    os.close(terminal)
    shown = bytearray()
    deadline_s = time.monotonic() + within_s
    try:
        while time.monotonic() < deadline_s and (piece := _piece(own)) != b"":
            shown += piece or b""
        process.wait(within_s)
    finally:
        process.kill()
        process.wait()
        os.close(own)
    return bytes(shown)


def _piece(own: int) -> bytes | None:
    """What has come; None if there was nothing for a while, empty if nobody has the terminal open any more."""
    select.select([own], [], [], 1.0)
    try:
        return os.read(own, 65536)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""
