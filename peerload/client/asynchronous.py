"""`peerload.AsyncClient`: the asyncio version of `peerload.Client`."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing, suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from peerload.client import connection, operations
from peerload.client.connection import Protocol, accepted, agent_gone, follows
from peerload.model.errors import AgentUnavailable, PeerloadError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence


P = ParamSpec("P")
Result = TypeVar("Result")
Item = TypeVar("Item")


def _call(
    operation: Callable[P, operations.Call[Result]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, Result]]:
    @wraps(operation)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return await self.call(operation(*args, **kwargs))

    return method


def _stream(
    operation: Callable[P, operations.Stream[Item]],
) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[Item]]:
    @wraps(operation)
    def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[Item]:
        return self.stream(operation(*args, **kwargs))

    return method


def _submit(
    operation: Callable[P, operations.Call[list[str]]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, AsyncTask]]:
    @wraps(operation)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncTask:
        task, *members = await self.call(operation(*args, **kwargs))
        return AsyncTask(self, task, members)

    return method


def _of_task(
    operation: Callable[Concatenate[AsyncTask, P], operations.Call[Result]],
) -> Callable[Concatenate[AsyncTask, P], Coroutine[Any, Any, Result]]:
    @wraps(operation)
    async def method(self: AsyncTask, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return await self._client.call(operation(self, *args, **kwargs))

    return method


class AsyncClient:
    """Asynchronous client of an agent. It has the methods of `peerload.Client`, used with ``await`` or
    ``async for``. Every call opens its own connection. Cancelling a call does not cancel its task."""

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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: no connection stays open between calls."""

    def task(self, id: str) -> AsyncTask:  # noqa: A002 -- what it is called
        """A handle of an existing task."""
        return AsyncTask(self, id)

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

    async def call(self, request: operations.Call[Result]) -> Result:
        """Make a call and read its answer."""
        parts: operations.Parts = []
        reply: operations.Reply = {}
        async with aclosing(self._answer(request)) as answer:
            async for kind, body in answer:
                if kind == "more":
                    parts.append(body)
                elif kind == "ok":
                    reply = body
                elif not follows(request.verb, request.fields):
                    parts.clear()
        return request.read(parts, reply)

    async def stream(self, request: operations.Stream[Item]) -> AsyncIterator[Item]:
        """Read a stream."""
        async with aclosing(self._answer(request)) as answer:
            async for kind, body in answer:
                if kind != "again":
                    for item in request.items(body) if kind == "more" else request.end(body):
                        yield item

    async def _answer(
        self, request: operations.Call[Any] | operations.Stream[Any]
    ) -> AsyncGenerator[tuple[str, operations.Reply], None]:
        """The answer to a request: ("more", body) for each part, then ("ok", body). ("again", {}) announces a new attempt."""
        if not request.verb:
            return
        attempts = operations.Attempts(request, self._reconnect_s, was_there=self._was_there)
        while True:
            try:
                if attempts.before is not None:
                    await asyncio.to_thread(attempts.before, self._path)
                    attempts.before = None
                async with aclosing(self._attempt(request.verb, attempts.fields())) as answer:
                    async for kind, body in answer:
                        attempts.answered()
                        self._was_there = True
                        yield kind, body
            except PeerloadError as error:
                if not attempts.continues(error):
                    if attempts.timed_out:
                        yield "ok", {"timed_out": True, "away": str(error)}
                        return
                    self._was_there = not isinstance(error, AgentUnavailable)
                    raise
            else:
                return
            if attempts.is_lost:
                await asyncio.sleep(connection.RECONNECT_EVERY_S)
            yield "again", {}

    async def _attempt(
        self, verb: str, fields: dict[str, object]
    ) -> AsyncGenerator[tuple[str, operations.Reply], None]:
        """One attempt, on a new connection: ("more", body) for each part, then ("ok", body). Raises BadRequest, AgentUnavailable."""
        protocol = Protocol()
        request, raw = protocol.request(verb, fields)
        loop, sock = asyncio.get_running_loop(), socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, self._path)
            with suppress(
                OSError
            ):  # an agent that has closed the connection may have sent a refusal, which can be read
                await loop.sock_sendall(sock, raw)
            reader, writer = await asyncio.open_unix_connection(sock=sock)
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):
                raise connection.unavailable(self._path, error) from None
            raise
        try:
            while True:
                while (answer := protocol.next_answer()) is None:
                    waits_on = follows(verb, fields) and protocol.has_answered
                    timeout_s = None if waits_on else self._timeout_s
                    protocol.receive_data(await _received(reader, writer, protocol, timeout_s))
                answered, kind, body = answer
                if answered == request:
                    yield kind, body if kind == "more" else accepted(kind, body)
                    if kind != "more":
                        return
        finally:
            writer.close()


async def _received(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, protocol: Protocol, timeout_s: float | None
) -> bytes:
    """The next bytes. After half of the timeout, sends an `info` request, since the first request may take longer. Raises
    AgentSilent if the agent does not answer that either, AgentUnavailable if the connection is lost."""
    try:
        if timeout_s is None:
            return await reader.read(protocol.wanted_bytes)
        for is_first in (True, False):
            try:
                async with asyncio.timeout(timeout_s / 2):
                    return await reader.read(protocol.wanted_bytes)
            except TimeoutError:
                if is_first:
                    writer.write(protocol.request("info", {})[1])
    except OSError as error:
        raise agent_gone(str(error)) from None
    raise connection.agent_silent(timeout_s)


class AsyncTask(operations.Handle):
    """A task by its id. `members`: the ids of an array's members."""

    members: tuple[AsyncTask, ...]

    def __init__(self, client: AsyncClient, id: str, members: Sequence[str] = ()) -> None:  # noqa: A002 -- what it is called
        self._client = client
        self.id = id
        self.members = tuple(AsyncTask(client, name) for name in members)

    wait = _of_task(operations.wait_one)
    output = _of_task(operations.output)
    cancel = _of_task(operations.cancel_one)
    info = _of_task(operations.info)
    why = _of_task(operations.why)

    def follow(self) -> AsyncIterator[operations.Piece]:
        """Follow the output of the task until it has ended."""
        return self._client.follow(self)
