"""Reads of the store that see every earlier decision."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerload.agent.control.connection import Connection
    from peerload.agent.store.store import Store
    from peerload.agent.store.write_ahead import EventLog, Outbox

STALLED_CHECK_S = 0.2
"""Interval at which a read that waits for the disk checks whether the disk is full."""


class DurableReads:
    """The store of one agent as clients read it: all that was acknowledged, and nothing that a crash could undo."""

    def __init__(self, store: Store, outbox: Outbox, event_log: EventLog) -> None:
        self.store = store
        self.event_log = event_log
        self._outbox = outbox

    async def durable(self) -> Store:
        """Wait until every earlier decision is on disk and its messages are sent → the store. While the disk is full nothing
        is committed, so that the store is current as it is."""
        store, reached = self.store, asyncio.Event()
        if not store.is_stalled:
            self._outbox.when_durable(reached.set)
        while not store.is_stalled and not reached.is_set():
            with contextlib.suppress(TimeoutError):  # that very commit may find the disk full
                async with asyncio.timeout(STALLED_CHECK_S):
                    await reached.wait()
        return store

    async def readable(self, connection: Connection, *, events: bool = False) -> Store:
        """As `durable`, once the client has read most of the earlier responses. ``events``: with all events so far."""
        if events:
            self.event_log.settle()
        await self.durable()
        await connection.drain()
        return self.store
