"""`peerload.Executor`: a `concurrent.futures.Executor` that runs functions on the nodes of the cluster.

>>> with Executor(cpus=2, mem="4G") as executor:        # doctest: +SKIP
...     print(list(executor.map(pow, [2, 3], [5, 2])))
[32, 9]

Each call is a task: `peerload ls` lists it, `peerload logs` prints its output. One thread (`ExecutorLink`) talks to the agent: it
submits the calls, sends their input, and receives their outcomes. It ends when no calls are pending, so a program that has all
results can exit, and any other program waits for them. If the agent disconnects, the thread reconnects and submits its calls again
with the same tokens, which queues no call twice.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import itertools
import os
import re
import secrets
import select
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack

from peerload.client import call, connection, operations, submission
from peerload.client.connection import RECONNECT_EVERY_S, RECONNECT_S_MAX, readable_within, refusal
from peerload.model.errors import (
    AgentUnavailable,
    BadRequest,
    PeerloadError,
    SlowDown,
    SnapshotWanted,
    StagingFailed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

TASKS_MAX = 500
"""Maximum number of pending calls. `submit` blocks while there are as many."""
TASKS_MAX_LIMIT = 10_000
NAME_CHARACTERS_MAX = 128
FIRST_INPUT_BYTES = 512 << 10
INPUT_BYTES = 512 << 10
"""Size of each piece of input after the first one, which is sent with the submission."""
SENT_BYTES_MAX = 8 << 20
"""Maximum total input of unanswered submissions."""
CALLS_A_SESSION = 250
"""Calls on one connection. Each is one or two requests, and an agent limits the pending requests of one client."""
ERRORS_TOLD_BYTES = 4000
FULL_RETRY_S = 1.0
STAGING = "staging: "
"""Prefix of the end reason of a task whose files could not be staged."""
LOOK_S = 5.0

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_NO_MODULE = re.compile(rb"No module named '?(?:peerload|cloudpickle)\b")


class TaskFuture(concurrent.futures.Future[Result]):
    """A future that can be cancelled even while its function runs, so `running` is never true. ``made``: its call, None if pickling
    failed."""

    def __init__(self, link: ExecutorLink) -> None:
        super().__init__()
        self._link = link
        self.made: PendingCall | None = None
        self._calls_back = False
        self._end = threading.RLock()
        self._was_cancelled = False

    @property
    def task(self) -> str:
        """The id of its task; "" before it is submitted."""
        return self.made.task if self.made is not None else ""

    def cancel(self) -> bool:
        """Cancel the task: a waiting one never starts, a running one gets TERM and, 10 s later, KILL. False if it has ended."""
        with self._end:
            if not super().cancel():
                return False
            is_first, self._was_cancelled = not self._was_cancelled, True
            if is_first:
                self.set_running_or_notify_cancel()  # wakes the waiting threads
        if is_first and self.made is not None:
            self._link.cancel(self.made)
        return True

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[Result]], object]) -> None:
        """Call ``fn(future)`` when the call has ended, in a thread where ``fn`` may block, submit, or shut the executor down."""
        with self._end:
            self._calls_back = True
        super().add_done_callback(fn)

    def _invoke_callbacks(self) -> None:
        """Run the callbacks. User callbacks get their own thread, since they may wait for this or other calls."""
        run = super()._invoke_callbacks  # type: ignore[misc]  # it is not in the stubs
        if self._calls_back:
            self._link.aside(run)
        else:
            run()

    def finish(self, *, value: Any = None, error: BaseException | None = None) -> None:  # noqa: ANN401 -- any result
        """Set the outcome, unless it was cancelled. For the executor."""
        with self._end:
            if self.cancelled():
                return
            self.set_running_or_notify_cancel()  # it can no longer be cancelled
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(value)


class PendingCall:
    """A pending call. ``task``: the id of its task, "" until the agent has answered; ``sent``: input bytes
    acknowledged by the agent."""

    def __init__(
        self, future: TaskFuture[Any], mark: str, fields: dict[str, Any], raw: bytes, serializer: call.Serializer
    ) -> None:
        self.future = future
        self.serializer = serializer
        self.mark = mark
        self.fields = fields
        self.raw = raw
        self.size = len(raw)
        self.task = ""
        self.sent = 0
        self.is_over = False
        self.session: _Session | None = None
        self.problem: PeerloadError | None = None


class ExecutorLink:
    """The pending calls of one executor. fields: the common fields of their submissions."""

    def __init__(self, path: str, fields: dict[str, Any]) -> None:
        self._path = path
        self._fields = fields
        self._lock = threading.Lock()
        self._new: list[PendingCall] = []
        self._cancelled: list[PendingCall] = []
        self._calls: dict[int, PendingCall] = {}
        self._thread: threading.Thread | None = None
        self._wake = -1
        self._beside: set[threading.Thread] = set()
        self._beside_lock = threading.Lock()
        self._refused_until_s = 0.0

    # -- called by other threads ---------------------------------------------------------------------------------------

    def add(self, made: PendingCall) -> None:
        with self._lock:
            self._calls[id(made)] = made
            self._new.append(made)
            self._notify_thread()

    def cancel(self, made: PendingCall) -> None:
        with self._lock:
            if id(made) in self._calls:
                self._cancelled.append(made)
                self._notify_thread()

    def pending(self) -> list[PendingCall]:
        with self._lock:
            return list(self._calls.values())

    def aside(self, work: Callable[[], None]) -> None:
        """Run a user callback in its own thread, since it may wait for other calls."""
        thread = threading.Thread(target=self._aside, args=(work,), name="peerload executor callbacks")
        with self._beside_lock:
            self._beside.add(thread)
        thread.start()

    def _aside(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._beside_lock:
                self._beside.discard(threading.current_thread())

    def join(self) -> None:
        """Return when no call is pending and all callbacks have returned. A callback may call this."""
        while (thread := self._thread) is not None and thread is not threading.current_thread():
            thread.join()
        with self._beside_lock:
            beside = list(self._beside)
        if threading.current_thread() not in beside:
            for thread in beside:
                thread.join()

    def _notify_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="peerload executor")
            self._thread.start()
        elif self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        with self._lock:
            self._wake = wake
        sessions: list[_Session] = []
        was_connected = False
        try:
            while True:
                try:
                    if not sessions:
                        sessions = [self._connected(wake, patience_s=RECONNECT_S_MAX if was_connected else 0.0)]
                        was_connected = True
                    if not self._turn(sessions, wake):
                        return
                except AgentUnavailable:
                    if not sessions:
                        raise
                    self._drop_ended(sessions)
                    _close(sessions)  # the next session resubmits or awaits their calls
                    sessions = []
        except BaseException as error:  # noqa: BLE001 -- the futures raise it
            self._fail_all(error)
        finally:
            _close(sessions)
            os.close(wake)

    def _turn(self, sessions: list[_Session], wake: int) -> bool:
        """Run one round → False if no call is pending: the link has then released this thread."""
        with self._lock:
            new, self._new = self._new, []
            cancelled, self._cancelled = self._cancelled, []
            if not self._calls:
                self._thread, self._wake = None, -1
                return False
        for number, made in enumerate(new):
            if (session := self._with_room(sessions)) is None:
                with self._lock:
                    self._new[:0] = new[number:]
                break
            session.take_up(made)
        for made in cancelled:
            if made.session is not None:
                made.session.cancel(made)
        for session in sessions:
            session.go_on()
        if not self._drop_ended(sessions):
            self._await_answers(sessions, wake)
        return True

    def _with_room(self, sessions: list[_Session]) -> _Session | None:
        """A session below its call limit, a new one if necessary; None while the agent refuses another connection."""
        found = next((one for one in sessions if one.calls < CALLS_A_SESSION), None)
        if found is None and time.monotonic() >= self._refused_until_s:
            try:
                found = _Session(self._path, self._fields)
            except BadRequest as error:
                if error.code != SlowDown.code:
                    raise
                self._refused_until_s = time.monotonic() + FULL_RETRY_S
            else:
                sessions.append(found)
        return found

    def _drop_ended(self, sessions: list[_Session]) -> bool:
        """Remove the calls that have ended → True if there were any."""
        over = [made for session in sessions for made in session.over()]
        with self._lock:
            for made in over:
                self._calls.pop(id(made), None)
        return bool(over)

    def _await_answers(self, sessions: list[_Session], wake: int) -> None:
        """Wait for an answer, a wake-up or the retry time, and receive the answers."""
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        for session in sessions:
            poll.register(session.descriptor, select.POLLIN)
        with self._lock:
            waits = bool(self._new) or any(session.waits_for_room for session in sessions)
        pause_s = FULL_RETRY_S if waits else LOOK_S
        ready = {descriptor for descriptor, _ in poll.poll(pause_s * 1000)}
        if wake in ready:
            os.eventfd_read(wake)
        for session in sessions:
            if session.descriptor in ready:
                session.receive()

    def _connected(self, wake: int, *, patience_s: float) -> _Session:
        """A new session; all pending calls are queued for it. Raises AgentUnavailable if the agent does not return, and
        BadRequest if it refuses the connection. After a refusal for too many clients it retries for RECONNECT_S_MAX."""
        started_s = time.monotonic()
        while True:
            waited_s = time.monotonic() - started_s
            try:
                session = _Session(self._path, self._fields)
            except AgentUnavailable:
                if waited_s >= patience_s:
                    raise
            except BadRequest as error:
                if error.code != SlowDown.code or waited_s >= RECONNECT_S_MAX:
                    raise
            else:
                with self._lock:
                    self._new = list(self._calls.values())
                    for made in self._new:
                        made.session = None
                return session
            if readable_within(wake, RECONNECT_EVERY_S):
                os.eventfd_read(wake)

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            calls = list(self._calls.values())
            self._calls.clear()
            self._new.clear()
            self._cancelled.clear()
            self._thread, self._wake = None, -1
        for made in calls:
            if not made.is_over:  # otherwise its future already has an outcome
                made.future.finish(error=error)


def _close(sessions: list[_Session]) -> None:
    for session in sessions:
        session.close()


class _Session:
    """A connection and its requests. Raises AgentUnavailable, and BadRequest if the agent refuses the connection."""

    def __init__(self, path: str, fields: dict[str, Any]) -> None:
        self._path = path
        self._fields = fields
        self._client = connection.AgentConnection(path, room_s=0.0)
        try:
            self._client.call("info")  # the agent sends a refusal as the answer to the first request
        except PeerloadError:
            self._client.close()
            raise
        self._asked: dict[int, tuple[str, PendingCall]] = {}
        self._waiting: list[PendingCall] = []
        self._unread: list[tuple[PendingCall, dict[str, Any]]] = []
        """Ended calls whose output could not be read, because the agent refused another connection."""
        self._over: list[PendingCall] = []
        self._sent_bytes = 0
        self._retry_at_s = 0.0
        self.calls = 0
        """Pending calls on this connection."""

    def close(self) -> None:
        self._client.close()

    @property
    def descriptor(self) -> int:
        return self._client.fileno()

    @property
    def waits_for_room(self) -> bool:
        return bool(self._waiting or self._unread)

    def over(self) -> list[PendingCall]:
        """The calls that have ended since the last call of this method."""
        ended, self._over = self._over, []
        return ended

    def take_up(self, made: PendingCall) -> None:
        """Submit a call, or wait for it if it was submitted on another connection."""
        made.session = self
        self.calls += 1
        if not made.task:
            self._waiting.append(made)
            return
        if made.fields.get("attended"):
            self._ask("attend", made, task=made.task)
        self._await(made)
        if made.future.cancelled():
            self.cancel(made)  # the agent may not have received the first request

    def go_on(self) -> None:
        """Submit waiting calls up to the input limit, and retry the output that could not be read."""
        if time.monotonic() < self._retry_at_s:
            return
        unread, self._unread = self._unread, []
        for made, body in unread:
            self._finish(made, body)
        while self._waiting and self._sent_bytes < SENT_BYTES_MAX:
            made = self._waiting.pop(0)
            if made.future.cancelled():
                self._ended(made)
                continue
            first = made.raw[:FIRST_INPUT_BYTES]
            more = {} if len(first) == made.size else {"input_ends": False}
            self._sent_bytes += len(first)
            self._ask("submit", made, **made.fields, input=first, **more)

    def cancel(self, made: PendingCall) -> None:
        """Cancel its task. A call without a task id is cancelled when the id arrives."""
        if made.task and not made.is_over:
            self._ask("cancel", made, tasks=[made.task])

    def receive(self) -> None:
        self._received(*self._client.receive(may_last=True))

    def _ask(self, verb: str, made: PendingCall, **fields: Any) -> None:  # noqa: ANN401 -- as each verb has them
        self._asked[self._client.send(verb, **fields)] = verb, made

    def _await(self, made: PendingCall) -> None:
        self._ask("wait", made, tasks=[made.task], outputs=True)
        self._send_more(made)

    def _send_more(self, made: PendingCall) -> None:
        """Send the next piece of its input, if there is one."""
        if made.sent < made.size and not made.is_over:
            piece = made.raw[made.sent : made.sent + INPUT_BYTES]
            ends = made.sent + len(piece) == made.size
            self._ask("input", made, task=made.task, offset=made.sent, data=piece, ends=ends)

    def _received(self, answered: int, kind: str, body: dict[str, Any]) -> None:
        verb, made = self._asked.get(answered, ("", None))
        if made is None:
            return
        if kind != "more":
            del self._asked[answered]
        if verb == "submit":
            self._submitted(made, kind, body)
        elif verb == "input" and kind == "ok" and body.get("wanted", True):
            made.sent = max(made.sent, int(body["offset"]))
            self._send_more(made)
        elif verb == "input" and kind == "error":
            made.problem = refusal(body)
            self.cancel(made)  # a task that has already ended keeps its outcome
        elif verb == "wait" and kind == "more" and body.get("state") != "unknown":
            self._finish(made, body)
        elif verb == "wait" and kind == "more":
            why = str(body.get("reason") or "its node was lost")
            self._set(made, error=call.TaskFailed(made.task, f"the outcome of {made.task} is not known", why=why))
        elif kind == "error" and verb == "wait":
            self._set(made, error=refusal(body))

    def _submitted(self, made: PendingCall, kind: str, body: dict[str, Any]) -> None:
        self._sent_bytes -= min(made.size, FIRST_INPUT_BYTES)
        if kind == "error" and body.get("code") == SlowDown.code:
            self._waiting.insert(0, made)
            self._retry_at_s = time.monotonic() + FULL_RETRY_S
            return
        if kind == "error" and body.get("code") == SnapshotWanted.code:
            self._freeze(made)
            return
        if kind == "error":
            self._set(made, error=refusal(body))
            return
        if declining := body.get("declining"):
            why = "; ".join(f"{node}: {reason}" for node, reason in declining.items())
            with contextlib.suppress(UserWarning):  # if warnings are errors, nobody could catch one in this thread
                warnings.warn(
                    f"no call runs on {why} (Executor(snapshot=True) takes the directory along)", stacklevel=1
                )
        made.task = str(body["id"])
        made.sent = min(made.size, FIRST_INPUT_BYTES)
        if made.future.cancelled():
            self.cancel(made)
        self._await(made)

    def _freeze(self, made: PendingCall) -> None:
        """Submit a call again with a snapshot of its directory. All calls share one snapshot."""
        try:
            if self._fields.get("freezes"):
                submission.freeze_fields(self._path, self._fields)
        except PeerloadError as error:
            self._set(made, error=error)
            return
        name = made.fields["spec"]["name"]
        made.fields = {**self._fields, "token": made.fields["token"], "spec": {**self._fields["spec"], "name": name}}
        self._waiting.insert(0, made)

    def _finish(self, made: PendingCall, body: dict[str, Any]) -> None:
        """Set the outcome of a future whose task has ended."""
        if made.future.cancelled() or made.is_over:
            self._ended(made)
            return
        try:
            has_all = "stdout" in body or not body.get("stdout_bytes")
            stdout = body.get("stdout") or b"" if has_all else self._tail(made, 1, call.LINE_BYTES_MAX)
            outcome = call.outcome_in(stdout, made.mark, made.serializer)
            problem = made.problem or (self._no_outcome(made, body) if outcome is None else None)
        except AgentUnavailable:
            raise  # the output is fetched after the reconnection
        except PeerloadError as error:
            if error.code == SlowDown.code:
                self._unread.append((made, body))
                self._retry_at_s = time.monotonic() + FULL_RETRY_S
            else:
                self._set(made, error=error)
        except BaseException as error:  # noqa: BLE001 -- unpickling may raise anything; only this call fails
            error.add_note(f"raised while the result of {made.task} was read here")
            self._set(made, error=error)
        else:
            if outcome is None:
                self._set(made, error=problem)
            elif "error" in outcome:
                raised = outcome["error"]
                cause = call.RemoteTraceback(outcome["traceback"]) if outcome["traceback"] else None
                BaseException.__setattr__(raised, "__cause__", cause)  # a frozen dataclass refuses a plain assignment
                self._set(made, error=raised)
            elif (reason := str(body.get("reason") or "")).startswith(STAGING):
                what, hint = f"files of {made.task} could not be staged", f"peerload show {made.task}"
                self._set(made, error=StagingFailed(what, why=reason.removeprefix(STAGING), hint=hint))
            else:
                self._set(made, value=outcome["value"])

    def _tail(self, made: PendingCall, stream: int, size: int) -> bytes:
        found = bytearray()
        with connection.AgentConnection(self._path, room_s=0.0) as client:
            for piece in client.stream("output", task=made.task, streams=[stream], tail_bytes=size):
                if piece.get("stream") == stream and "data" in piece:
                    found += piece["data"]
        return bytes(found)

    def _no_outcome(self, made: PendingCall, body: dict[str, Any]) -> call.TaskFailed:
        code, signal = body.get("exit_code"), body.get("signal")
        says = str(body.get("reason") or "")
        how = f"signal {signal}" if signal else f"exit code {code}" if code is not None else str(body.get("state"))
        errors = body.get("stderr") or b""
        if not errors and body.get("stderr_bytes"):
            errors = self._tail(made, 2, ERRORS_TOLD_BYTES)
        last = errors[-ERRORS_TOLD_BYTES:].decode("utf-8", "backslashreplace").strip()
        if _NO_MODULE.search(errors):
            python = os.fsdecode(made.fields["spec"]["argv"][0])
            says = f"{python} on {body.get('node')} has no peerload: name another interpreter with python="
        elif last:
            says = f"{says}; its last output:\n{last}"
        what = f"{made.task} ended without a result ({how})"
        return call.TaskFailed(made.task, what, why=says, exit_code=code, signal=signal)

    def _set(self, made: PendingCall, *, value: Any = None, error: BaseException | None = None) -> None:  # noqa: ANN401 -- a result
        self._ended(made)
        made.future.finish(value=value, error=error)

    def _ended(self, made: PendingCall) -> None:
        if not made.is_over:
            made.is_over = True
            self.calls -= 1
            made.raw = b""
            self._over.append(made)


class Executor(concurrent.futures.Executor):
    """Runs functions as tasks.

    ``wanted``: the resources and placement of each call, as for `peerload.Client.submit`: cpus, mem, gpus, node, labels,
    group, retries, time_limit_s … ``python``: the interpreter on the nodes, which needs peerload and the same minor version
    (default: this one; with ``env`` that of the environment). ``tasks_max``: bound of pending calls. ``keep``: tasks go on
    when this program ends; otherwise they are cancelled then, even if it is killed. ``serializer``: the encoding of results.
    A malicious node can make unpickling a result run any code in this program. With "json" nothing is unpickled: results
    are JSON values (tuples become lists), and an exception becomes a `RemoteError`.

    A call is pickled by cloudpickle, with functions of `__main__`, lambdas and closures; modules must exist on the nodes, in the
    same directories or installed. Files (``in_``, ``out``, ``snapshot``) are read when the executor is created, which needs a
    running agent. Futures raise AgentUnavailable, BadRequest, TaskFailed if a task ends without a result, StagingFailed if its files
    could not be staged, and any exception of the function, with its traceback as ``__cause__``.
    """

    def __init__(
        self,
        socket_path: str | None = None,
        *,
        python: str = "",
        tasks_max: int = TASKS_MAX,
        keep: bool = False,
        serializer: call.Serializer = "pickle",
        **wanted: Unpack[operations.RunRequest],
    ) -> None:
        if not 1 <= tasks_max <= TASKS_MAX_LIMIT:
            raise ValueError(f"tasks_max is {tasks_max}; it must be from 1 to {TASKS_MAX_LIMIT}")
        if serializer not in call.SERIALIZERS:
            raise ValueError(f"serializer is {serializer!r}; there are: {', '.join(call.SERIALIZERS)}")
        if "token" in wanted:
            raise TypeError("no such argument: token: each call is a submission of its own")
        self._serializer = serializer
        own = "python" if wanted.get("env") is not None else sys.executable
        argv = [os.fsencode(python or own), b"-m", b"peerload.client.function"]
        self._fields = operations.submit_fields(argv, wanted)
        self._fields["spec"]["takes_input"] = True
        if not keep:
            self._fields["attended"] = True
        path = socket_path or connection.default_socket_path()
        bring = submission.sender(self._fields, wanted)
        if (
            lock := self._fields["spec"].get(submission.LOCK)
        ) is not None:  # the node must run the Python version that pickled the call
            version = f"=={sys.version_info.major}.{sys.version_info.minor}.*"
            self._fields["spec"][submission.LOCK] = lock._replace(python=",".join(filter(None, (lock.python, version))))
        if bring is not None:
            _bring(bring, path)
        self._named = wanted.get("name") or ""
        self._room = threading.BoundedSemaphore(tasks_max)
        self._tasks_max = tasks_max
        self._lock = threading.Lock()
        self._is_shut = self._is_cancelled = False
        self._maps: dict[_MapCalls, None] = {}
        """Unfinished calls of `map` without ``buffersize``; `shutdown` submits their remaining inputs."""
        self._link = ExecutorLink(path, self._fields)

    def submit(
        self, fn: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> TaskFuture[Result]:
        """Call ``fn(*args, **kwargs)`` on some node. Blocks while ``tasks_max`` calls are pending."""
        return self._submit(fn, args, kwargs)

    def _submit(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, is_begun: bool = False
    ) -> TaskFuture[Any]:
        """Submit a call. ``is_begun``: it belongs to a `map` that was accepted before the shutdown."""
        self._refuse_if_shut(is_begun=is_begun)
        future: TaskFuture[Any] = TaskFuture(self._link)
        mark = secrets.token_hex(16)
        try:
            path = [entry for entry in sys.path if entry]
            raw = call.packed_call(mark, fn, args, kwargs, path, self._serializer)
        except Exception as error:  # noqa: BLE001 -- pickling may raise anything, as in the standard library's executors
            future.set_exception(error)
            return future
        fields = {**self._fields, "token": secrets.token_hex(16)}
        fields["spec"] = {**self._fields["spec"], "name": self._named or _name(args[0] if fn is _called else fn)}
        future.made = made = PendingCall(future, mark, fields, raw, self._serializer)
        self._room.acquire()
        concurrent.futures.Future.add_done_callback(future, lambda _: self._room.release())
        with self._lock:
            try:
                self._refuse_if_shut(is_begun=is_begun)
            except RuntimeError:
                future.cancel()  # frees its place among the pending calls
                raise
            self._link.add(made)
        return future

    def _refuse_if_shut(self, *, is_begun: bool = False) -> None:
        if self._is_shut and (self._is_cancelled or not is_begun):
            raise RuntimeError("cannot schedule new futures after shutdown")

    def map(
        self,
        fn: Callable[..., Result],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[Result]:
        """Yield the results in order. ``chunksize``: calls in one task; more than 1 pays off for calls of under some tens of ms.
        ``buffersize``: maximum number of tasks whose results have not been yielded (None: ``tasks_max``). Inputs are
        consumed as tasks can be submitted; without ``buffersize``, `shutdown` consumes the remaining ones. So for infinite inputs
        set it, or close the iterator."""
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if buffersize is not None and buffersize < 1:
            raise ValueError("buffersize must be None or > 0")
        until_s = None if timeout is None else time.monotonic() + timeout
        self._refuse_if_shut()
        chunks = _chunks(zip(*iterables, strict=False), chunksize)
        is_begun = buffersize is None
        calls = _MapCalls(chunks, lambda chunk: self._submit(_called, (fn, chunk), {}, is_begun=is_begun))
        calls.submit(most := min(self._tasks_max, buffersize or self._tasks_max))
        if is_begun and len(calls.ahead) == most:
            self._maps[calls] = None
        return self._results(calls, until_s)

    def _results(self, calls: _MapCalls, until_s: float | None) -> Iterator[Any]:
        ahead = calls.ahead
        try:
            while ahead:
                left_s = None if until_s is None else max(until_s - time.monotonic(), 0.0)
                results = ahead[0].result(left_s)
                ahead.popleft()
                calls.submit(1)
                yield from results
        finally:
            self._maps.pop(calls, None)
            for future in ahead:
                future.cancel()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls. ``wait``: return when all have ended; ``cancel_futures``: cancel all unfinished calls, also running
        ones."""
        with self._lock:
            self._is_shut = True
            self._is_cancelled |= cancel_futures
        try:
            if cancel_futures:
                for made in self._link.pending():
                    made.future.cancel()
            elif wait:
                for calls in list(self._maps):
                    calls.submit(None)
        finally:
            if wait:
                self._link.join()


def _bring(bring: Callable[[str], None], path: str) -> None:
    """Send the files of the calls to the agent, again if it goes away meanwhile. Raises PeerloadError."""
    tries = connection.Reconnection()
    while True:
        try:
            return bring(path)
        except PeerloadError as error:
            if not tries.continues(error):
                raise
        time.sleep(connection.RECONNECT_EVERY_S)


class _MapCalls:
    """The calls of one `Executor.map`. ``ahead``: calls whose results have not been yielded."""

    def __init__(
        self, chunks: Iterator[list[tuple[Any, ...]]], submit: Callable[[list[tuple[Any, ...]]], TaskFuture[Any]]
    ) -> None:
        self._chunks = chunks
        self._submit = submit
        self._lock = threading.RLock()  # shared by the thread that reads results and the thread that shuts down
        self.ahead: collections.deque[TaskFuture[Any]] = collections.deque()

    def submit(self, number: int | None) -> None:
        """Submit at most ``number`` further calls; None: all remaining ones. Blocks while ``tasks_max`` calls are pending."""
        with self._lock:
            for chunk in itertools.islice(self._chunks, number):
                self.ahead.append(self._submit(chunk))


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
