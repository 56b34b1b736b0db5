"""Additions to asyncio: background tasks, timeouts that do not count event-loop lag, read timeouts, and a thread pool.

A bug in a background task stops the agent (crash-only). The threads of the pool are made when the agent starts, since none
can be made later where the limit of processes is reached, as a fork bomb among the tasks does. What could not be made is
tried again with each call. As long as there is none at all, a call holds up the event loop: that is slow, and the agent
lives and can end the task."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import queue
import threading
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

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


CHECK_EVERY_S = 3.0
CHECKS_MAX = 3
"""Checks without progress after which the connection is closed: 9 s."""
PROGRESS_BYTES_MIN = 1024
"""Bytes between two checks that count as progress; the end of a frame does, too."""


class ReadTimeout:
    """The read timeout of one connection. ``expired()`` is called once, when a frame does not continue."""

    __slots__ = ("_bytes", "_checked_bytes", "_checks", "_expired", "_is_partial", "_is_paused", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._bytes = self._checked_bytes = self._checks = 0
        self._is_partial = self._is_paused = False
        self._timer: asyncio.TimerHandle | None = None

    def received(self, count: int, *, is_whole: bool, is_partial: bool) -> None:
        """Count received bytes. is_whole: they completed a frame. is_partial: an incomplete frame is left."""
        self._bytes += PROGRESS_BYTES_MIN if is_whole else count
        self._is_partial = is_partial
        if is_partial and self._timer is None:
            self._restart()

    def pause(self, *, paused: bool) -> None:
        """Reading is paused (nothing can come), or goes on."""
        self._is_paused = paused

    def stop(self) -> None:
        """The connection is closed."""
        self._is_partial = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _restart(self) -> None:
        self._checked_bytes, self._checks = self._bytes, 0
        self._timer = self._loop.call_later(CHECK_EVERY_S, self._check)

    def _check(self) -> None:
        self._timer = None
        if not self._is_partial:
            return
        if self._is_paused or self._bytes - self._checked_bytes >= PROGRESS_BYTES_MIN:
            self._restart()
            return
        self._checks += 1
        self._checked_bytes = self._bytes
        if self._checks >= CHECKS_MAX:
            self._is_partial = False
            self._expired()
        else:
            self._timer = self._loop.call_later(CHECK_EVERY_S, self._check)


THREADS = 8

P = ParamSpec("P")
R = TypeVar("R")


class Workers(Executor):
    """The thread pool of one event loop, whose thread alone submits. ``count``: the number of threads."""

    def __init__(self, count: int = THREADS) -> None:
        self._count = count
        self._work: queue.SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_short = False
        self._grow()

    def submit(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """See `Executor`."""
        future: Future[R] = Future()
        self._grow()
        work = (future, lambda: function(*args, **kwargs))
        if self._threads:
            self._work.put(work)  # type: ignore[arg-type]
        else:
            _carry_out(*work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `Executor`."""
        del cancel_futures
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads if wait else ():
            thread.join()
        self._threads.clear()
        self._count = 0

    def _grow(self) -> None:
        while len(self._threads) < self._count:
            # A daemon: an agent that fails while it starts, before anybody shuts its threads down, ends.
            thread = threading.Thread(target=self._run, name="worker", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if not self._is_short:
                    log.warning(
                        "cannot start a thread: running=%d wanted=%d error=%s", len(self._threads), self._count, error
                    )
                self._is_short = True
                return
            self._threads.append(thread)
        self._is_short = False

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            _carry_out(*work)


def _carry_out(future: Future[R], work: Callable[[], R]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 -- it is the caller's
        future.set_exception(error)
    else:
        future.set_result(result)


def in_own_thread(work: Callable[[], R]) -> asyncio.Future[R]:
    """Do blocking work that may hang (a dead network mount) in a thread of its own, which holds up neither other work nor
    the end of the agent. Raises BlockingIOError if no thread can be made."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()

    def settle(result: list[R], error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result[0])
        else:
            done.set_exception(error)

    def run() -> None:
        result: list[R] = []
        error: Exception | None = None
        try:
            result.append(work())
        except Exception as raised:  # noqa: BLE001 -- it is raised where it is waited for
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            loop.call_soon_threadsafe(settle, result, error)

    try:
        threading.Thread(target=run, name="own thread", daemon=True).start()
    except RuntimeError:
        raise BlockingIOError(errno.EAGAIN, "no thread can be made: the limit of processes is reached") from None
    return done


def call_in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Call in the loop's thread, from another one; a loop that is closed already needs it no more."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
