"""The thread that calls the driver of the GPUs, since a call may never return."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class GpuThread:
    """Does one call at a time, for the loop in which it is made. A daemon thread: it does not keep the process alive."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._done: asyncio.Future[Any] | None = None
        self._is_started = False

    @property
    def is_busy(self) -> bool:
        """True if the last call has not returned."""
        return self._done is not None and not self._done.done()

    async def do(self, call: Callable[[], Any], seconds_max: float) -> Any:  # noqa: ANN401 -- what the call returns
        """The result of the call, or its exception. Raises TimeoutError if it does not return in time, or the last one
        has not; RuntimeError if no thread can be made."""
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
        """Return when the last call has returned."""
        if self._done is not None:
            await asyncio.wait((self._done,))

    def stop(self) -> None:
        """Stop the thread when it comes back."""
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
    """Retrieve the exception of a call that nobody waits for any more, so that asyncio does not log it."""
    if not done.cancelled():
        done.exception()
