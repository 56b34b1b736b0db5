"""Event log: what happened to tasks and nodes, for people, and those who follow it.

An event of a task's own record is written with that record. All others are *notes*: they go with the next commit, or
with one of their own after a second, so that they cost no sync while there is work.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from peerload.model.actions import PutEvent
from peerload.model.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from peerload.agent.runtime import RunState
    from peerload.agent.store.write_ahead import Outbox

NOTES_WITHIN_S = 1.0
"""A note is on its way to the disk after this, at the latest."""


class EventLog:
    """The events of one agent, which stops if they cannot be kept. From the loop's thread only."""

    def __init__(self, outbox: Outbox, run: RunState) -> None:
        self._outbox = outbox
        self._run = run
        self._timer: asyncio.TimerHandle | None = None
        self._followers: set[asyncio.Event] = set()
        self._noted: list[Callable[[PutEvent], None]] = []
        outbox.on_commit(self._committed)

    def on_note(self, call: Callable[[PutEvent], None]) -> None:
        """Call this with each event that is noted."""
        self._noted.append(call)

    def note(self, event: PutEvent) -> None:
        """Keep an event."""
        self._outbox.note(event)
        for call in self._noted:
            call(event)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(NOTES_WITHIN_S, self.settle)

    def record(self, what: str, state: str, *, task: str = "", node: str = "", reason: str = "") -> None:
        """Keep an event that the core does not decide about, with the present time."""
        self.note(PutEvent(time.time(), what, state, task=task, node=node, reason=reason))

    def settle(self) -> None:
        """Hand over what was noted."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            self._outbox.settle()
        except StoreError as error:
            self._run.fail(f"the store failed: {error}")

    @contextlib.contextmanager
    def followed(self) -> Iterator[asyncio.Event]:
        """An event that is set whenever there may be new ones in the store."""
        news = asyncio.Event()
        self._followers.add(news)
        try:
            yield news
        finally:
            self._followers.discard(news)

    def _committed(self) -> None:
        for news in self._followers:
            news.set()
