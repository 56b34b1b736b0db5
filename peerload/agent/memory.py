"""Memory of many tasks: kept out of the garbage collector while they are there, given back to the machine when they have ended.

A full collection looks at every task, which stops the event loop for seconds where there are a million; so tasks that have come
are frozen (`gc.freeze`). Tables keep the size that they had at most, and the allocator keeps what it has freed for later.
After a million tasks that is more than a gigabyte, which is given back when most tasks have ended. What stays is whole
arenas of the interpreter (1 MiB) in which something younger lives on, such as a task that was submitted meanwhile.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from typing import TYPE_CHECKING

from peerload.agent.runtime import next_tick

if TYPE_CHECKING:
    from peerload.core.node import Node

LOOK_EVERY_S = 2.0
TASKS_MIN = 20_000
"""Number of new tasks that are frozen at a time. Memory is given back when as many have ended, and more than are
left."""
YOUNG = 1
"""The generations of the collector that are small, however many tasks there are."""


async def watch(node: Node) -> None:
    """Look every LOOK_EVERY_S whether many tasks have come, or many have ended and no more are ending just now; until cancelled."""
    most = before = frozen = 0
    await _trim()  # what the start has freed
    while True:
        await next_tick(LOOK_EVERY_S)
        now = len(node.home.tasks)
        most = max(most, now)
        if now - frozen >= TASKS_MIN:
            frozen = now
            gc.collect(YOUNG)
            gc.freeze()
            await _trim()  # the tables that have become too small
        elif now >= before and most - now >= max(TASKS_MIN, now):
            most = frozen = now
            node.shrink()
            if now < TASKS_MIN:
                gc.unfreeze()
            gc.collect()  # it empties the free lists of the interpreter, too, which keep whole arenas
            gc.freeze()
            await _trim()
        before = now


async def _trim() -> None:
    """Give freed memory of the C library back to the machine."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if trim is not None:
        await asyncio.to_thread(trim, 0)
