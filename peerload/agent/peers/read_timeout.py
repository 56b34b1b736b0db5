"""Read timeout (rule P1): a frame that begins and does not go on costs its connection. Who sends one byte a second
must not hold one for ever.

Looked at every LOOK_S while a frame is unfinished, so that a connection on which frames come whole costs nothing. Three
looks in a row without progress are needed: after this process was stopped itself for a while the first one finds nothing
new, though everything has come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

LOOK_S = 3.0
LOOKS_MAX = 3
"""An unfinished frame that has not gone on at so many looks in a row costs the connection: after 9 s."""
PROGRESS_BYTES_MIN = 1024
"""What has to come from one look to the next, unless a frame comes to its end."""


class ReadTimeout:
    """Of one connection. ``give_up()`` is called once, when a frame does not go on."""

    __slots__ = ("_bytes", "_give_up", "_held", "_is_partial", "_looks", "_loop", "_seen_bytes", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, give_up: Callable[[], None]) -> None:
        self._loop = loop
        self._give_up = give_up
        self._bytes = self._seen_bytes = self._looks = self._held = 0
        self._is_partial = False
        self._timer: asyncio.TimerHandle | None = None

    def came(self, count: int, *, is_whole: bool, is_partial: bool) -> None:
        """So many bytes have come; whether a frame came to its end with them, and whether there is an unfinished one now."""
        self._bytes += PROGRESS_BYTES_MIN if is_whole else count
        self._is_partial = is_partial
        if is_partial and self._timer is None:
            self._begin()

    def hold(self, *, held: bool) -> None:
        """We do not read ourselves, or do again: nothing can come until then."""
        self._held = held

    def stop(self) -> None:
        """The connection is over."""
        self._is_partial = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self) -> None:
        self._seen_bytes, self._looks = self._bytes, 0
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._is_partial:
            return
        if self._held or self._bytes - self._seen_bytes >= PROGRESS_BYTES_MIN:
            self._begin()
            return
        self._looks += 1
        self._seen_bytes = self._bytes
        if self._looks >= LOOKS_MAX:
            self._is_partial = False
            self._give_up()
        else:
            self._timer = self._loop.call_later(LOOK_S, self._look)
