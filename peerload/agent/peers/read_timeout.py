"""Read timeout (rule P1): closes a connection on which a frame has begun and does not continue.

The connection is checked every CHECK_EVERY_S while a frame is incomplete, so that complete frames cost nothing. Three
checks in a row without progress are needed: after this process itself was stopped for a while, the first check finds no
progress although all data has come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

CHECK_EVERY_S = 3.0
CHECKS_MAX = 3
"""Checks without progress after which the connection is closed: 9 s."""
PROGRESS_BYTES_MIN = 1024
"""Bytes between two checks that count as progress; the end of a frame does, too."""


class ReadTimeout:
    """The read timeout of one connection. ``expired()`` is called once, when a frame does not continue."""

    __slots__ = ("_bytes", "_checked_bytes", "_checks", "_expired", "_is_partial", "_is_paused", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._bytes = self._checked_bytes = self._checks = 0
        self._is_partial = self._is_paused = False
        self._timer: asyncio.TimerHandle | None = None

    def received(self, count: int, *, is_whole: bool, is_partial: bool) -> None:
        """Count received bytes. is_whole: they completed a frame. is_partial: an incomplete frame is left."""
        self._bytes += PROGRESS_BYTES_MIN if is_whole else count
        self._is_partial = is_partial
        if is_partial and self._timer is None:
            self._restart()

    def pause(self, *, paused: bool) -> None:
        """Reading is paused (nothing can come), or goes on."""
        self._is_paused = paused

    def stop(self) -> None:
        """The connection is closed."""
        self._is_partial = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _restart(self) -> None:
        self._checked_bytes, self._checks = self._bytes, 0
        self._timer = self._loop.call_later(CHECK_EVERY_S, self._check)

    def _check(self) -> None:
        self._timer = None
        if not self._is_partial:
            return
        if self._is_paused or self._bytes - self._checked_bytes >= PROGRESS_BYTES_MIN:
            self._restart()
            return
        self._checks += 1
        self._checked_bytes = self._bytes
        if self._checks >= CHECKS_MAX:
            self._is_partial = False
            self._expired()
        else:
            self._timer = self._loop.call_later(CHECK_EVERY_S, self._check)
