"""Text that is drawn again each second, for `ls --watch` and `top` without Textual."""

from __future__ import annotations

import contextlib
import os
import sys
import time

from peerload.client.connection import readable_within
from peerload.model.errors import PeerloadError
from peerload.model.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


EVERY_S = 1.0
QUITS = b"qQ"
_CLEAR = "\x1b[H\x1b[2J"


def redrawn(lines: Callable[[], list[str]]) -> int:
    """Draw until `q` or Ctrl-C. If stdout is not a terminal, or cannot be cleared, the texts are printed one after another. An error
    of the first text is raised; later errors are shown and retried."""
    is_terminal = sys.stdout.isatty()
    clear = _CLEAR if is_terminal and os.environ.get("TERM", "dumb") != "dumb" else ""
    shown = lines()
    try:
        with _keys() if is_terminal and sys.stdin.isatty() else contextlib.nullcontext(_no_keys) as quits_within:
            while True:
                sys.stdout.write(clear + "".join(f"{line}\n" for line in shown))
                sys.stdout.flush()
                if quits_within(EVERY_S):
                    return 0
                try:
                    shown = lines()
                except PeerloadError as error:
                    shown = [f"peerload: {printable(error.what)} -- trying again"]
    except KeyboardInterrupt:
        return 0


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Read keys unbuffered and without echo. Yields a function that waits for some seconds and returns True as soon as `q` is pressed."""
    import termios
    import tty

    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)

    def quits_within(seconds: float) -> bool:
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            if readable_within(stdin, left_s):
                pressed = os.read(stdin, 1)
                if not pressed or pressed in QUITS:  # the terminal was closed, or q
                    return True
        return False

    try:
        tty.setcbreak(stdin, termios.TCSANOW)
        yield quits_within
    finally:
        termios.tcsetattr(stdin, termios.TCSANOW, before)


def _no_keys(seconds: float) -> bool:
    time.sleep(seconds)
    return False
