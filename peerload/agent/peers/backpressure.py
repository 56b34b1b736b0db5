"""Backpressure on peers (rule P2): a peer whose messages the core has not handled yet is not read further."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerload.agent.inbox import Inbox
    from peerload.agent.peers.connection import PeerConnection

BACKLOG_FRAMES_MAX = 20_000
BACKLOG_BYTES_MAX = 64 << 20
"""Bounds for one node: above either its links are not read until half of the backlog has been handled."""
CHECK_EVERY_S = 0.02
"""Interval of the checks while a node is paused."""
_BACKLOG = "the core has not handled its messages"


class _Backlog:
    """Messages of one node that are in the inbox: (number in the inbox, bytes), oldest first; and its paused links."""

    __slots__ = ("messages", "paused", "size_bytes")

    def __init__(self) -> None:
        self.messages: deque[tuple[int, int]] = deque()
        self.size_bytes = 0
        self.paused: set[PeerConnection] = set()

    def settle(self, taken: int) -> None:
        """Remove what the core has taken."""
        while self.messages and self.messages[0][0] <= taken:
            self.size_bytes -= self.messages.popleft()[1]

    def exceeds(self, divisor: int) -> bool:
        """True if the backlog is above the bounds divided by this."""
        return len(self.messages) * divisor > BACKLOG_FRAMES_MAX or self.size_bytes * divisor > BACKLOG_BYTES_MAX


class PeerBackpressure:
    """Backlogs of all peers of one agent."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._backlogs: dict[str, _Backlog] = {}

    def queued(self, connection: PeerConnection, node: str, size_bytes: int) -> bool:
        """Count a message that was put into the inbox. True if the links of the node are paused from now on."""
        backlog = self._backlogs.get(node)
        if backlog is None:
            backlog = self._backlogs[node] = _Backlog()
        backlog.messages.append((self._inbox.put_count, size_bytes))
        backlog.size_bytes += size_bytes
        backlog.settle(self._inbox.taken_count)
        if not backlog.messages and not backlog.paused:
            del self._backlogs[node]
            return False
        if not backlog.exceeds(1):
            return False
        is_first = not backlog.paused
        backlog.paused.add(connection)
        connection.pause_reading(_BACKLOG)
        if is_first:
            asyncio.get_running_loop().call_later(CHECK_EVERY_S, self._check, node)
        return is_first

    def _check(self, node: str) -> None:
        backlog = self._backlogs[node]
        backlog.settle(self._inbox.taken_count)
        if backlog.exceeds(2):
            asyncio.get_running_loop().call_later(CHECK_EVERY_S, self._check, node)
            return
        paused, backlog.paused = backlog.paused, set()
        for connection in paused:
            connection.resume_reading(_BACKLOG)
        if not backlog.messages:
            del self._backlogs[node]
