"""`peerload.Executor`: a `concurrent.futures.Executor` whose functions run where there is room in the cluster.

>>> with Executor(cpus=2, mem="4G") as executor:        # doctest: +SKIP
...     print(list(executor.map(pow, [2, 3], [5, 2])))
[32, 9]

Each call is a task: `peerload ls` lists it, `peerload logs` prints its output. One thread talks to the agent while calls are
pending (`executor_link.py`).
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import os
import secrets
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, ParamSpec, Unpack

from peerload.client import call, connection, request, submission
from peerload.client.executor_link import ExecutorLink, PendingCall, Result, TaskFuture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

TASKS_MAX = 500
"""Pending calls: one more blocks in `submit` until another has ended."""
TASKS_MAX_LIMIT = 10_000
NAME_CHARACTERS_MAX = 128

Arguments = ParamSpec("Arguments")


class Executor(concurrent.futures.Executor):
    """Runs functions as tasks.

    ``wanted``: the resources and placement of each call, as for `peerload.Client.submit`: cpus, mem, gpus, node, labels, group,
    retries, time_limit_s … ``python``: the interpreter on the nodes, which needs peerload and the same minor version (default: this
    one; with ``env`` that of the environment). ``tasks_max``: bound of pending calls. ``keep``: tasks go on when this program ends; otherwise they are cancelled then,
    even if it is killed. ``serializer``: how results come back. Unpickling a result runs code that the node put there, in this
    program. With "json" nothing is unpickled here: results are JSON values (tuples come back as lists), and an exception comes back
    as `RemoteError`.

    A call is pickled by cloudpickle: functions of `__main__`, lambdas and closures travel; modules must exist on the nodes, in the
    same directories or installed. Files (``in_``, ``out``, ``snapshot``) are read when the executor is made, which needs the agent
    then. Futures raise AgentUnavailable, BadRequest, TaskFailed if a task ends without a result, StagingFailed if its files are not
    where they belong, and whatever the function raised, with its traceback as ``__cause__``.
    """

    def __init__(
        self,
        socket_path: str | None = None,
        *,
        python: str = "",
        tasks_max: int = TASKS_MAX,
        keep: bool = False,
        serializer: call.Serializer = "pickle",
        **wanted: Unpack[request.RunRequest],
    ) -> None:
        if not 1 <= tasks_max <= TASKS_MAX_LIMIT:
            raise ValueError(f"tasks_max is {tasks_max}; it must be from 1 to {TASKS_MAX_LIMIT}")
        if serializer not in call.SERIALIZERS:
            raise ValueError(f"serializer is {serializer!r}; there are: {', '.join(call.SERIALIZERS)}")
        self._serializer = serializer
        own = "python" if wanted.get("env") is not None else sys.executable
        argv = [os.fsencode(python or own), b"-m", b"peerload.client.function"]
        self._fields = request.submission(argv, wanted)
        self._fields["spec"]["takes_input"] = True
        if not keep:
            self._fields["attended"] = True
        path = socket_path or connection.default_socket_path()
        bring = submission.sender(self._fields, wanted)
        if (
            lock := self._fields["spec"].get(submission.LOCK)
        ) is not None:  # a call is read by the version that wrote it
            version = f"=={sys.version_info.major}.{sys.version_info.minor}.*"
            self._fields["spec"][submission.LOCK] = lock._replace(python=",".join(filter(None, (lock.python, version))))
        if bring is not None:
            bring(path)
        self._named = wanted.get("name") or ""
        self._room = threading.BoundedSemaphore(tasks_max)
        self._tasks_max = tasks_max
        self._lock = threading.Lock()
        self._is_shut = False
        self._link = ExecutorLink(path, self._fields)

    def submit(
        self, fn: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> TaskFuture[Result]:
        """Call ``fn(*args, **kwargs)`` on some node. Blocks while ``tasks_max`` calls are pending."""
        return self._submit(fn, args, kwargs)

    def _submit(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> TaskFuture[Any]:
        self._refuse_if_shut()
        future: TaskFuture[Any] = TaskFuture()
        mark = secrets.token_hex(16)
        try:
            path = [entry for entry in sys.path if entry]
            raw = call.packed_call(mark, fn, args, kwargs, path, self._serializer)
        except Exception as error:  # noqa: BLE001 -- whatever pickling raises, as in the executors of the standard library
            future.set_exception(error)
            return future
        fields = {**self._fields, "token": secrets.token_hex(16)}
        fields["spec"] = {**self._fields["spec"], "name": self._named or _name(args[0] if fn is _called else fn)}
        made = PendingCall(future, mark, fields, raw, self._serializer)
        future._call = made  # noqa: SLF001 -- they belong together
        future._stop = lambda: self._link.cancel(made)  # noqa: SLF001 -- as above
        future._aside = self._link.aside  # noqa: SLF001 -- as above
        self._room.acquire()
        concurrent.futures.Future.add_done_callback(future, lambda _: self._room.release())
        with self._lock:
            try:
                self._refuse_if_shut()
            except RuntimeError:
                future.cancel()  # gives its room back
                raise
            self._link.add(made)
        return future

    def _refuse_if_shut(self) -> None:
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")

    def map(
        self, fn: Callable[..., Result], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[Result]:
        """Yield the results in order. ``chunksize``: calls in one task, which pays for calls shorter than some tens of milliseconds.
        Inputs are consumed as there is room, so there may be infinitely many."""
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        until_s = None if timeout is None else time.monotonic() + timeout
        chunks = _chunks(zip(*iterables, strict=False), chunksize)
        ahead: collections.deque[TaskFuture[list[Result]]] = collections.deque()
        for chunk in itertools.islice(chunks, self._tasks_max):
            ahead.append(self._submit(_called, (fn, chunk), {}))
        return self._results(fn, chunks, ahead, until_s)

    def _results(
        self,
        fn: Callable[..., Result],
        chunks: Iterator[list[tuple[Any, ...]]],
        ahead: collections.deque[TaskFuture[list[Result]]],
        until_s: float | None,
    ) -> Iterator[Result]:
        try:
            while ahead:
                left_s = None if until_s is None else max(until_s - time.monotonic(), 0.0)
                results = ahead[0].result(left_s)
                ahead.popleft()
                for chunk in itertools.islice(chunks, 1):
                    ahead.append(self._submit(_called, (fn, chunk), {}))
                yield from results
        finally:
            for future in ahead:
                future.cancel()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls. ``wait``: return when all have ended; ``cancel_futures``: cancel those that have not ended, running ones
        too."""
        with self._lock:
            self._is_shut = True
        if cancel_futures:
            for made in self._link.pending():
                made.future.cancel()
        if wait:
            self._link.join()


def _called(fn: Callable[..., Any], chunk: list[tuple[Any, ...]]) -> list[Any]:
    """The function that a task of `Executor.map` runs."""
    return [fn(*args) for args in chunk]


def _chunks(items: Iterable[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


def _name(fn: Callable[..., Any]) -> str:
    name = getattr(fn, "__qualname__", "") or getattr(fn, "__name__", "") or type(fn).__qualname__
    return str(name)[:NAME_CHARACTERS_MAX]
