"""Timeouts that do not count the time that the event loop itself takes: what another thread has said meanwhile, it has
said in time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

STEP_S = 0.1
"""Bound on the time that counts of one turn of the loop."""


async def done_within(answer: asyncio.Future[Any], seconds: float) -> bool:
    """Wait for an answer, which is neither taken nor cancelled → whether it is there, after ``seconds`` at the latest in which
    the loop could have seen it: while a busy loop or machine stood still, nothing is held against who answers."""
    left_s = seconds
    while left_s > 0:
        done, _ = await asyncio.wait({answer}, timeout=min(left_s, STEP_S))
        if done:
            return True
        left_s -= STEP_S
    return answer.done()
