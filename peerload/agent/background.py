"""Background tasks of the event loop: a bug in one of them stops the agent (crash-only); and the common tick of periodic work."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from peerload.agent.run_state import RunState

log = logging.getLogger("peerload.agent")


async def next_tick(every_s: float) -> None:
    """Sleep until the next multiple of ``every_s`` on the loop's clock. Periodic work whose intervals are multiples of one
    another wakes the process together: an idle agent pays for each wake-up, not for what it looks at."""
    now_s = asyncio.get_running_loop().time()
    await asyncio.sleep(every_s - now_s % every_s)


class BackgroundTasks:
    """The tasks of one owner. `close` cancels those that are left."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin this work."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("bug in a background task", exc_info=error)
            self._run.fail(f"a bug: {error!r}")

    async def close(self) -> None:
        """Cancel all, and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
