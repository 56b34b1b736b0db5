"""The one thread in which the driver of the GPUs is called, since a call may never come back."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

THREADS_MAX = 1
"""A driver that hangs holds so many threads, however long it hangs: nothing is asked of it meanwhile."""


class GpuThread:
    """Does one thing at a time, for the loop in which it is made. It is no reason to keep a process that ends."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._done: asyncio.Future[Any] | None = None
        self._is_started = False

    @property
    def is_busy(self) -> bool:
        """Whether it has not come back from the last call."""
        return self._done is not None and not self._done.done()

    async def do(self, call: Callable[[], Any], seconds_max: float) -> Any:  # noqa: ANN401 -- what the call returns
        """What the call returns, or raises. Raises TimeoutError if it has not come back in time, or the last one has not;
        RuntimeError if no thread can be made."""
        if self.is_busy:
            raise TimeoutError
        if not self._is_started:
            threading.Thread(target=self._run, name="gpus", daemon=True).start()
            self._is_started = True
        self._done = self._loop.create_future()
        self._done.add_done_callback(_looked_at)
        self._work.put(call)
        async with asyncio.timeout(seconds_max):
            return await asyncio.shield(self._done)

    async def idle(self) -> None:
        """Return when it has come back from the last call, whenever that is."""
        if self._done is not None:
            await asyncio.wait((self._done,))

    def stop(self) -> None:
        """It ends when it comes back."""
        self._work.put(None)

    def _run(self) -> None:
        while (call := self._work.get()) is not None:
            result, error = None, None
            try:
                result = call()
            except Exception as failure:  # noqa: BLE001 -- it is the caller's, in the loop
                error = failure
            try:
                self._loop.call_soon_threadsafe(self._hand_over, result, error)
            except RuntimeError:  # the loop is closed: nobody waits for it any more
                return

    def _hand_over(self, result: object, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(result)
        else:
            self._done.set_exception(error)


def _looked_at(done: asyncio.Future[Any]) -> None:
    """What came too late for anybody to see must not be complained of."""
    if not done.cancelled():
        done.exception()
