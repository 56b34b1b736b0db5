"""Thread pool for the agent's blocking calls: what `asyncio.to_thread` uses.

The threads are made when the agent starts, since none can be made later where the limit of processes is reached, as a fork
bomb among the tasks does. What could not be made is tried again with each call. As long as there is none at all, a call
holds up the event loop: that is slow, and the agent lives and can end the task.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import queue
import threading
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("peerload.agent")

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
            thread = threading.Thread(target=self._run, name="worker")
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
