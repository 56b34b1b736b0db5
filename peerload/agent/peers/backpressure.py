"""Backpressure on peers (rule P2): what each of them has sent and the core has not looked at yet is bounded, by
reading no further."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerload.agent.inbox import Inbox
    from peerload.agent.peers.connection import PeerConnection

BACKLOG_FRAMES_MAX = 20_000
BACKLOG_BYTES_MAX = 64 << 20
"""Of one node: with more than either its links are not read until half of it has been looked at."""
LOOK_S = 0.02
"""How often it is looked at while a node is held back."""
_NOT_LOOKED_AT = "the core has not looked at its messages"


class _Waiting:
    """Of one node: (the inbox's number, bytes) of each message, oldest first."""

    __slots__ = ("held", "messages", "size_bytes")

    def __init__(self) -> None:
        self.messages: deque[tuple[int, int]] = deque()
        self.size_bytes = 0
        self.held: set[PeerConnection] = set()

    def settle(self, taken: int) -> None:
        """Forget what the core has taken."""
        while self.messages and self.messages[0][0] <= taken:
            self.size_bytes -= self.messages.popleft()[1]

    def is_over(self, share: int) -> bool:
        """Whether there is more than this share (1: all, 2: half) of what may be."""
        return len(self.messages) * share > BACKLOG_FRAMES_MAX or self.size_bytes * share > BACKLOG_BYTES_MAX


class PeerBackpressure:
    """Of one agent; ``inbox``: where messages go."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._waiting: dict[str, _Waiting] = {}

    def came(self, connection: PeerConnection, node: str, size_bytes: int) -> bool:
        """A message of so many bytes of this node has been put into the inbox. → whether that was too much: its links are
        held back from here on. False if they were already."""
        waiting = self._waiting.get(node)
        if waiting is None:
            waiting = self._waiting[node] = _Waiting()
        waiting.messages.append((self._inbox.put_count, size_bytes))
        waiting.size_bytes += size_bytes
        waiting.settle(self._inbox.taken_count)
        if not waiting.messages and not waiting.held:
            del self._waiting[node]
            return False
        if not waiting.is_over(1):
            return False
        is_first = not waiting.held
        waiting.held.add(connection)
        connection.pause_reading(_NOT_LOOKED_AT)
        if is_first:
            asyncio.get_running_loop().call_later(LOOK_S, self._look, node)
        return is_first

    def _look(self, node: str) -> None:
        waiting = self._waiting[node]
        waiting.settle(self._inbox.taken_count)
        if waiting.is_over(2):
            asyncio.get_running_loop().call_later(LOOK_S, self._look, node)
            return
        held, waiting.held = waiting.held, set()
        for connection in held:
            connection.resume_reading(_NOT_LOOKED_AT)
        if not waiting.messages:
            del self._waiting[node]
