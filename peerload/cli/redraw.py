"""Drawing the same text again each second on a terminal."""

from __future__ import annotations

import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

EVERY_S = 1.0
_CLEAR = "\x1b[H\x1b[2J"


def redrawn(lines: Callable[[], list[str]]) -> int:
    """Draw until Ctrl-C. Where stdout is no terminal the screen is not cleared: one text follows the other."""
    tick = threading.Event()
    clear = _CLEAR if sys.stdout.isatty() else ""
    try:
        while True:
            sys.stdout.write(clear + "".join(f"{line}\n" for line in lines()))
            sys.stdout.flush()
            tick.wait(EVERY_S)
    except KeyboardInterrupt:
        return 0
