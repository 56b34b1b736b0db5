"""`peerload.AsyncClient`: as `peerload.Client`, for programs that run on asyncio."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from peerload.client import connection, operations, submission
from peerload.client.connection import Protocol, accepted, agent_gone, follows
from peerload.model.errors import SnapshotWanted

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
    """Asynchronous client of an agent. The methods are those of `peerload.Client`, to be awaited, and iterated
    with ``async for``. Every call has a connection of its own. Cancelling a call leaves its task alone."""

    def __init__(
        self, socket_path: str | None = None, *, timeout_s: float | None = connection.ANSWERS_WITHIN_S
    ) -> None:
        self._path = socket_path or connection.default_socket_path()
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: no connection is held open."""

    def task(self, id: str) -> AsyncTask:  # noqa: A002 -- what it is called
        """A handle on a task that was submitted before."""
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
        """Make a call on a connection of its own and read its answer."""
        if request.before is not None:
            await asyncio.to_thread(request.before, self._path)
        try:
            return await self._called(request)
        except SnapshotWanted:
            await asyncio.to_thread(submission.freeze_fields, self._path, request.fields)
            return await self._called(request)

    async def _called(self, request: operations.Call[Result]) -> Result:
        parts: operations.Parts = []
        reply: operations.Reply = {}
        if request.verb:
            async with aclosing(self._answer(request.verb, request.fields)) as answer:
                async for kind, body in answer:
                    if kind == "more":
                        parts.append(body)
                    else:
                        reply = body
        return request.read(parts, reply)

    async def stream(self, request: operations.Stream[Item]) -> AsyncIterator[Item]:
        """Read a stream on a connection of its own."""
        async with aclosing(self._answer(request.verb, request.fields)) as answer:
            async for kind, body in answer:
                for item in request.items(body) if kind == "more" else request.end(body):
                    yield item

    async def _answer(self, verb: str, fields: dict[str, object]) -> AsyncGenerator[tuple[str, operations.Reply], None]:
        """The answer to one request: ("more", body) for each part, then ("ok", body). Raises BadRequest, AgentUnavailable."""
        protocol = Protocol()
        request, raw = protocol.request(verb, fields)
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError as error:
            raise connection.unavailable(self._path, error) from None
        try:
            writer.write(raw)
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
    """The next bytes. After half of the timeout the agent is asked who it is, since a request may take longer than that. Raises
    AgentSilent if it does not answer, AgentUnavailable if the connection is lost."""
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
    """A task by its id. Of an array `members` has those."""

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
