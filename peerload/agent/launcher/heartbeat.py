"""Heartbeat between agent and launcher: a launcher that is stopped or hangs breaks no connection."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from peerload.agent.runtime import coalesced_s

if TYPE_CHECKING:
    from collections.abc import Callable


PING_EVERY_S = 10.0
ANSWERS_WITHIN_S = 5.0
WAITING_MAX = 16
"""Maximum number of concurrent callers of `answers`."""
LATE_S = 0.5
"""If the agent itself was stalled for this long when the answer was due, the answer may be unread: the timeout starts
again."""


class HeartbeatOwner(Protocol):
    """Owner of a connection whose other end has to answer pings."""

    def ping(self) -> None:
        """Send a ping."""

    def silence_changed(self, *, silent: bool) -> None:
        """Handle the loss of the other end (no answer to a ping in time), or its return."""


class Heartbeat:
    """The heartbeat of one connection: a ping every ``every_s``, one at a time, to be answered within ``within_s``."""

    def __init__(
        self, owner: HeartbeatOwner, every_s: float = PING_EVERY_S, within_s: float = ANSWERS_WITHIN_S
    ) -> None:
        self._owner = owner
        self._every_s = every_s
        self._within_s = within_s
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._is_ping_pending = False
        self.is_silent = False
        self._waiting: list[asyncio.Future[bool]] = []

    def start(self) -> None:
        """Start sending pings; the launcher has just answered."""
        self.stop()
        self._schedule(self._every_s, self._send_ping)

    def stop(self) -> None:
        """Stop sending pings; the connection is closed."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._is_ping_pending = self.is_silent = False

    async def answers(self, within_s: float) -> bool:
        """Send a ping now → True if anything is received within ``within_s``."""
        waiting = asyncio.get_running_loop().create_future()
        if len(self._waiting) >= WAITING_MAX:
            return False
        self._waiting.append(waiting)
        self._owner.ping()
        try:
            async with asyncio.timeout(within_s):
                return bool(await waiting)
        except TimeoutError:
            return False
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def received(self) -> None:
        """Record that something was received."""
        if self._is_ping_pending:
            self._is_ping_pending = False
            self._schedule(self._every_s, self._send_ping)  # not combined with the check: each timer wakes the agent
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(True)
        self._waiting.clear()
        if self.is_silent:
            self.is_silent = False
            self._owner.silence_changed(silent=False)

    def _schedule(self, seconds: float, call: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        seconds = coalesced_s(seconds)
        self._due_s = loop.time() + seconds
        self._timer = loop.call_later(seconds, call)

    def _send_ping(self) -> None:
        self._is_ping_pending = True
        self._owner.ping()
        self._schedule(self._within_s, self._check)

    def _check(self) -> None:
        if asyncio.get_running_loop().time() - self._due_s > LATE_S:
            self._schedule(self._within_s, self._check)
        else:
            self.is_silent = True
            self._owner.silence_changed(silent=True)
