"""`peerload.Client`: the commands of the command line as blocking Python calls."""

from __future__ import annotations

import time
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from peerload.client import connection, operations
from peerload.model.errors import AgentUnavailable, PeerloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


P = ParamSpec("P")
Result = TypeVar("Result")
Item = TypeVar("Item")


def _call(operation: Callable[P, operations.Call[Result]]) -> Callable[Concatenate[Client, P], Result]:
    @wraps(operation)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return self.call(operation(*args, **kwargs))

    return method


def _stream(operation: Callable[P, operations.Stream[Item]]) -> Callable[Concatenate[Client, P], Iterator[Item]]:
    @wraps(operation)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[Item]:
        return self.stream(operation(*args, **kwargs))

    return method


def _submit(operation: Callable[P, operations.Call[list[str]]]) -> Callable[Concatenate[Client, P], Task]:
    @wraps(operation)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Task:
        task, *members = self.call(operation(*args, **kwargs))
        return Task(self, task, members)

    return method


def _of_task(
    operation: Callable[Concatenate[Task, P], operations.Call[Result]],
) -> Callable[Concatenate[Task, P], Result]:
    @wraps(operation)
    def method(self: Task, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return self._client.call(operation(self, *args, **kwargs))

    return method


class Client:
    """Blocking client of an agent. ``socket_path`` None: the socket that `peerload` uses. Every call opens its
    own connection, so several threads may share a client.

    If the agent disconnects or has too many clients, a call retries for at most ``reconnect_s`` and continues where it stopped.
    `cancel` and calls for ``@`` are not repeated if the agent may have executed them. Every method raises AgentUnavailable if no
    agent answers, and BadRequest or a subclass if the agent refuses (peerload.model.errors).
    """

    def __init__(
        self,
        socket_path: str | None = None,
        *,
        timeout_s: float | None = connection.ANSWERS_WITHIN_S,
        reconnect_s: float = connection.RECONNECT_S_MAX,
    ) -> None:
        self._path = socket_path or connection.default_socket_path()
        self._timeout_s = timeout_s
        self._reconnect_s = reconnect_s
        self._was_there = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: no connection stays open between calls."""

    def task(self, id: str) -> Task:  # noqa: A002 -- what it is called
        """A handle of an existing task, also of another node: ``ws1/42``, ``42.7``, ``@``."""
        return Task(self, id)

    submit = _submit(operations.submit)
    submit_array = _submit(operations.submit_array)
    submit_each = _submit(operations.submit_each)
    wait = _call(operations.wait)
    ended = _stream(operations.ended)
    output = _call(operations.output)
    follow = _stream(operations.follow)
    cancel = _call(operations.cancel)
    info = _call(operations.info)
    tasks = _call(operations.tasks)
    nodes = _call(operations.nodes)
    why = _call(operations.why)
    events = _stream(operations.events)

    def call(self, request: operations.Call[Result]) -> Result:
        """Make a call and read its answer."""
        parts: operations.Parts = []
        reply: operations.Reply = {}
        for kind, body in self._answer(request):
            if kind == "more":
                parts.append(body)
            elif kind == "ok":
                reply = body
            elif not connection.follows(request.verb, request.fields):
                parts.clear()
        return request.read(parts, reply)

    def stream(self, request: operations.Stream[Item]) -> Iterator[Item]:
        """Read a stream."""
        for kind, body in self._answer(request):
            if kind == "more":
                yield from request.items(body)
            elif kind == "ok":
                yield from request.end(body)

    def _answer(self, request: operations.Call[Any] | operations.Stream[Any]) -> Iterator[tuple[str, operations.Reply]]:
        """The answer to a request: ("more", body) for each part, then ("ok", body). ("again", {}) announces a new attempt."""
        if not request.verb:
            return
        attempts = operations.Attempts(request, self._reconnect_s, was_there=self._was_there)
        while True:
            try:
                if attempts.before is not None:
                    attempts.before(self._path)
                    attempts.before = None
                with connection.AgentConnection(self._path, timeout_s=self._timeout_s, room_s=0.0) as client:
                    for part in client.stream(request.verb, **attempts.fields()):
                        attempts.answered()
                        self._was_there = True
                        yield "more", part
            except PeerloadError as error:
                if not attempts.continues(error):
                    if attempts.timed_out:
                        yield "ok", {"timed_out": True, "away": str(error)}
                        return
                    self._was_there = not isinstance(error, AgentUnavailable)
                    raise
            else:
                self._was_there = True
                yield "ok", client.last
                return
            if attempts.is_lost:
                time.sleep(connection.RECONNECT_EVERY_S)
            yield "again", {}


class Task(operations.Handle):
    """Handle of a task. Creating one sends no request, and the id is not checked. `members`: the ids of an array's members."""

    members: tuple[Task, ...]

    def __init__(self, client: Client, id: str, members: Sequence[str] = ()) -> None:  # noqa: A002 -- what it is called
        self._client = client
        self.id = id
        self.members = tuple(Task(client, name) for name in members)

    wait = _of_task(operations.wait_one)
    output = _of_task(operations.output)
    cancel = _of_task(operations.cancel_one)
    info = _of_task(operations.info)
    why = _of_task(operations.why)

    def follow(self) -> Iterator[operations.Piece]:
        """Follow the output of the task until it has ended."""
        return self._client.follow(self)
