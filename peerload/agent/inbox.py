"""The one inbox of an agent: whatever happens is put here, and one consumer hands it to the `Node`, in order."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from peerload.model.events import GossipReceived, LoadSampled, MessageReceived
from peerload.model.messages import ADVICE

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from peerload.model.events import Event

TURN_EVENTS_MAX = 256
"""Events handled before sockets and timers get their turn."""


class Inbox:
    """`start` names who gets the events: what has come since its last turn, at most TURN_EVENTS_MAX at a time.

    A full inbox drops advice, gossip and samples, which may be lost, and counts them; everything else is bounded where it
    comes from (tasks, peers, clients) and is kept.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, events_max: int) -> None:
        self._loop = loop
        self._consume: Callable[[list[Event]], None] | None = None
        self._events_max = events_max
        self._events: deque[Event] = deque()
        self._scheduled = False
        self.dropped = 0
        self.put_count = self.taken_count = 0
        """Number of events that were ever queued, and of those that were handed over."""

    def __len__(self) -> int:
        return len(self._events)

    def start(self, consume: Callable[[list[Event]], None]) -> None:
        """Hand events over from now on, from the loop; those that have come before are the first."""
        self._consume = consume
        self._schedule()

    def put(self, event: Event) -> None:
        """Queue an event. From the loop's thread only."""
        if len(self._events) >= self._events_max and _may_be_lost(event):
            self.dropped += 1
            return
        self._events.append(event)
        self.put_count += 1
        self._schedule()

    def _schedule(self) -> None:
        if self._events and not self._scheduled and self._consume is not None:
            self._scheduled = True
            self._loop.call_soon(self._turn, self._consume)

    def _turn(self, consume: Callable[[list[Event]], None]) -> None:
        events = [self._events.popleft() for _ in range(min(len(self._events), TURN_EVENTS_MAX))]
        self.taken_count += len(events)
        self._scheduled = False
        self._schedule()
        consume(events)


def _may_be_lost(event: Event) -> bool:
    return isinstance(event, LoadSampled | GossipReceived) or (
        isinstance(event, MessageReceived) and isinstance(event.message, ADVICE)
    )
