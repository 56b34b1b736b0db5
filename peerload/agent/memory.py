"""Memory that many ended tasks have left: given back to the machine.

Tables keep the size that they had at most, and the allocator keeps what it has freed for later. After a million tasks that is more than a gigabyte, which is given back
when many tasks have ended.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerload.agent.parts import Parts

LOOK_EVERY_S = 2.0
ENDED_MIN = 20_000
"""Memory is given back once the number of tasks is this far below its peak."""


async def give_back(parts: Parts) -> None:
    """Look every LOOK_EVERY_S whether many tasks have ended, and no more are ending just now; until cancelled."""
    most = before = 0
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        now = len(parts.node.home.tasks)
        most = max(most, now)
        if now >= before and most - now >= ENDED_MIN:
            most = now
            parts.node.shrink()
            gc.collect()  # it empties the free lists of the interpreter, too, which keep whole arenas
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
            if trim is not None:
                await asyncio.to_thread(trim, 0)
        before = now
