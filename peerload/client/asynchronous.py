"""`peerload.AsyncClient`: as `peerload.Client`, for programs that run on asyncio."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Self, Unpack

from peerload.client import connection, request, values
from peerload.model.errors import AgentSilent, AgentUnavailable
from peerload.wire import frame

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
    from types import TracebackType

FOLLOWED = ("wait", "output", "events")
"""What these tell may take for ever."""


class AsyncTask:
    """A task by its id. Of an array `members` has those."""

    def __init__(self, client: AsyncClient, id: str, members: Sequence[str] = ()) -> None:  # noqa: A002 -- what it is called
        self._client = client
        self.id = id
        self.members = tuple(AsyncTask(client, name) for name in members)

    def __repr__(self) -> str:
        return f"<peerload task {self.id}>"

    async def wait(self, timeout_s: float | None = None) -> values.Ended:
        """Return when it has ended. Raises TimeoutError; ValueError for an array (`AsyncClient.wait` takes one)."""
        if self.members:
            raise ValueError(f"{self.id} is an array of {len(self.members)} tasks: client.wait(task.members)")
        (ended,) = await self._client.wait([self], timeout_s=timeout_s)
        return ended

    async def output(self) -> values.Output:
        """What it has written by now. Raises OutputIncomplete if not all of it can be had (any more)."""
        return await self._client.output(self)

    def follow(self) -> AsyncIterator[values.Piece]:
        """Its output as it comes, until it has ended."""
        return self._client.follow(self)

    async def cancel(self, *, signal: int = 15, force: bool = False) -> bool:
        """Stop it, or all members. → whether there was something to stop."""
        return bool(await self._client.cancel([self], signal=signal, force=force))

    async def info(self) -> values.TaskInfo:
        """What is known of it now."""
        return await self._client.info(self)

    async def why(self) -> values.Why:
        """Why it waits, or why it went where it went."""
        return await self._client.why(self)


Named = AsyncTask | str


class AsyncClient:
    """One agent; the methods are those of `peerload.Client`, to be awaited, and iterated with ``async for``. Every call has a
    connection of its own. Cancelling a call leaves its task alone."""

    def __init__(
        self, socket_path: str | None = None, *, timeout_s: float | None = connection.ANSWERS_WITHIN_S
    ) -> None:
        self._path = socket_path or connection.default_socket_path()
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing is held open."""

    def task(self, id: str) -> AsyncTask:  # noqa: A002 -- what it is called
        """A handle on a task that was submitted before."""
        return AsyncTask(self, id)

    async def submit(
        self, argv: Sequence[request.Word] | str, *, shell: bool = False, **wanted: Unpack[request.RunRequest]
    ) -> AsyncTask:
        """Queue a command; durable when this returns."""
        return await self._submit(request.submission(request.command(argv, shell=shell), wanted))

    async def submit_array(
        self,
        argv: Sequence[request.Word] | str,
        indices: Iterable[int],
        *,
        shell: bool = False,
        **wanted: Unpack[request.RunRequest],
    ) -> AsyncTask:
        """Queue it once for each number, which the task finds in PEERLOAD_ARRAY_INDEX."""
        numbers = sorted(set(indices))
        fields = request.submission(request.command(argv, shell=shell), wanted)
        return await self._submit({**fields, "array": request.array(numbers)}, numbers)

    async def submit_each(
        self, commands: Sequence[Sequence[request.Word]], **wanted: Unpack[request.RunRequest]
    ) -> AsyncTask:
        """Queue an array whose members, counted from 1, run one of these commands each."""
        each = [request.command(argv, shell=False) for argv in commands]
        fields = request.submission(each[0] if each else [b""], wanted)
        return await self._submit({**fields, "each": each}, range(1, len(each) + 1))

    async def _submit(self, fields: dict[str, Any], numbers: Sequence[int] = ()) -> AsyncTask:
        reply = await self._call("submit", **fields)
        return AsyncTask(self, reply["id"], [f"{reply['id']}.{number}" for number in numbers])

    async def wait(
        self,
        tasks: Iterable[Named],
        *,
        timeout_s: float | None = None,
        any: bool = False,  # noqa: A002 -- the flag's name
    ) -> list[values.Ended]:
        """Return when these, and all members of arrays among them, have ended; with ``any``: one of them. Raises
        TimeoutError."""
        names = _names(tasks)
        if not names:
            return []
        ended: list[values.Ended] = []
        last: dict[str, Any] = {}
        async with aclosing(self._parts("wait", tasks=names, any=any, timeout_s=timeout_s)) as parts:
            async for kind, body in parts:
                if kind == "ok":
                    last = body
                elif body.get("state") != "unknown":
                    ended.append(values.Ended.of(body))
        if last.get("timed_out"):
            raise TimeoutError(f"{len(ended)} had ended after {timeout_s:g} s")
        return ended

    async def ended(self, tasks: Iterable[Named]) -> AsyncIterator[values.Ended]:
        """Each end as it comes."""
        async with aclosing(self._parts("wait", tasks=_names(tasks))) as parts:
            async for kind, body in parts:
                if kind == "more" and body.get("state") != "unknown":
                    yield values.Ended.of(body)

    async def output(self, task: Named) -> values.Output:
        """What a task has written by now. Raises OutputIncomplete if not all of it can be had (any more)."""
        written, gaps = {1: bytearray(), 2: bytearray()}, connection.OutputGaps()
        async with aclosing(self._parts("output", task=_name(task))) as parts:
            async for kind, body in parts:
                if kind == "ok":
                    gaps.require_all(body)
                elif "data" in body:  # other parts tell why some of it may be lacking
                    gaps.add(body)
                    written[body["stream"]] += body["data"]
        return values.Output(bytes(written[1]), bytes(written[2]))

    async def follow(self, task: Named) -> AsyncIterator[values.Piece]:
        """A task's output as it comes, until it has ended. Raises OutputIncomplete then if not all of it came."""
        gaps = connection.OutputGaps()
        async with aclosing(self._parts("output", task=_name(task), follow=True)) as parts:
            async for kind, body in parts:
                if kind == "ok":
                    gaps.require_all(body)
                elif "data" in body:
                    gaps.add(body)
                    yield values.Piece(body["stream"], body["offset"], body["data"])

    async def cancel(self, tasks: Iterable[Named], *, signal: int = 15, force: bool = False) -> list[str]:
        """Stop tasks. → the ids of those that had not ended."""
        reply = await self._call("cancel", tasks=_names(tasks), signal=signal, force=force)
        return list(reply["cancelled"])

    async def info(self, task: Named) -> values.TaskInfo:
        """What is known of a task now."""
        reply = await self._call("show", tasks=[_name(task)])
        return values.TaskInfo.of(reply["tasks"][0])

    async def tasks(
        self, *, states: Sequence[str] = (), ended_within_s: float = 86_400.0, limit: int = 10_000
    ) -> list[values.TaskInfo]:
        """My tasks: unfinished ones, and those that ended lately."""
        reply = await self._call("tasks", states=list(states), ended_within_s=ended_within_s, limit=limit)
        return [values.TaskInfo.of(body) for body in reply["tasks"]]

    async def nodes(self) -> list[values.NodeInfo]:
        """Every node known, this one first."""
        reply = await self._call("nodes")
        return [values.NodeInfo.of(body) for body in reply["nodes"]]

    async def why(self, task: Named) -> values.Why:
        """Why a task waits, or why it went where it went."""
        return values.Why.of(await self._call("why", task=_name(task)))

    async def events(
        self, *, follow: bool = False, limit: int = 50, tasks: Sequence[Named] = ()
    ) -> AsyncIterator[values.Event]:
        """What happened: the newest ``limit``, oldest first; with ``follow`` also what happens from now on."""
        async with aclosing(self._parts("events", follow=follow, limit=limit, tasks=_names(tasks))) as parts:
            async for _, body in parts:
                for event in body.get("events", ()):
                    yield values.Event.of(event)

    async def _call(self, verb: str, **fields: object) -> dict[str, Any]:
        """The reply to one request, lists that came in parts joined."""
        lists: dict[str, list[Any]] = {}
        reply: dict[str, Any] = {}
        async with aclosing(self._parts(verb, **fields)) as parts:
            async for kind, body in parts:
                if kind == "ok":
                    reply = body
                else:
                    for key, value in body.items():
                        if isinstance(value, list):
                            lists.setdefault(key, []).extend(value)
        return reply | {key: [*items, *reply.get(key, ())] for key, items in lists.items()}

    async def _parts(self, verb: str, **fields: object) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Each part of the answer to one request: ("more", body) any number of times, then ("ok", body). Raises what the
        agent refuses, and AgentUnavailable."""
        async with self._connected() as (reader, writer):
            writer.write(frame.pack({"id": 1, "verb": verb, **fields}))
            waits_long = verb in FOLLOWED
            while True:
                try:
                    async with asyncio.timeout(None if waits_long else self._timeout_s):
                        size = int.from_bytes(await reader.readexactly(frame.HEADER_BYTES), "big")
                        if size > frame.CONTROL_BYTES_MAX:
                            raise AgentUnavailable("the agent went away", why=f"a frame that claims {size} bytes")
                        message = frame.unpack(await reader.readexactly(size))
                except TimeoutError:
                    why = f"nothing from it for {self._timeout_s:g} s"
                    raise AgentSilent("the agent does not answer", why=why) from None
                except (OSError, EOFError, ValueError) as error:
                    raise AgentUnavailable(
                        "the agent went away", why=str(error), hint="is it running?  peerload up"
                    ) from None
                kind = next((kind for kind in ("more", "ok", "error") if isinstance(message.get(kind), dict)), "")
                if kind in ("error", ""):
                    connection.raise_refusal(message.get("error") or {"what": "it said something that is no answer"})
                yield kind, message[kind]
                if kind == "ok":
                    return

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError as error:
            raise connection.unavailable(self._path, error) from None
        try:
            yield reader, writer
        finally:
            writer.close()


def _name(task: Named) -> str:
    return task.id if isinstance(task, AsyncTask) else task


def _names(tasks: Iterable[Named]) -> list[str]:
    return [_name(task) for task in tasks]
