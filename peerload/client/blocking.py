"""`peerload.Client`: the verbs of the command line for Python programs, blocking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, Unpack

from peerload.client import connection, request, values

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType


class Task:
    """A task by its id: a handle, which costs nothing and may be made of any id. Of an array `members` has those."""

    def __init__(self, client: Client, id: str, members: Sequence[str] = ()) -> None:  # noqa: A002 -- what it is called
        self._client = client
        self.id = id
        self.members = tuple(Task(client, name) for name in members)

    def __repr__(self) -> str:
        return f"<peerload task {self.id}>"

    def wait(self, timeout_s: float | None = None) -> values.Ended:
        """Block until it has ended. Raises TimeoutError; ValueError for an array (`Client.wait` takes one)."""
        if self.members:
            raise ValueError(f"{self.id} is an array of {len(self.members)} tasks: client.wait(task.members)")
        (ended,) = self._client.wait([self], timeout_s=timeout_s)
        return ended

    def output(self) -> values.Output:
        """What it has written by now. Raises OutputIncomplete if not all of it can be had (any more)."""
        return self._client.output(self)

    def follow(self) -> Iterator[values.Piece]:
        """Its output as it comes, until it has ended."""
        return self._client.follow(self)

    def cancel(self, *, signal: int = 15, force: bool = False) -> bool:
        """Stop it, or all members. → whether there was something to stop."""
        return bool(self._client.cancel([self], signal=signal, force=force))

    def info(self) -> values.TaskInfo:
        """What is known of it now."""
        return self._client.info(self)

    def why(self) -> values.Why:
        """Why it waits, or why it went where it went."""
        return self._client.why(self)


Named = Task | str


class Client:
    """One agent. ``socket_path`` None: the one that `peerload` finds. Every call has a connection of its own, so that a client
    may be used by several threads, and an agent may be restarted between two calls.

    Every method raises AgentUnavailable if no agent answers, and BadRequest, or a kind of it, if it refuses
    (peerload.model.errors).
    """

    def __init__(
        self, socket_path: str | None = None, *, timeout_s: float | None = connection.ANSWERS_WITHIN_S
    ) -> None:
        self._path = socket_path or connection.default_socket_path()
        self._timeout_s = timeout_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing is held open."""

    def task(self, id: str) -> Task:  # noqa: A002 -- what it is called
        """A handle on a task that was submitted before, also elsewhere: ``ws1/42``, ``42.7``, ``@``."""
        return Task(self, id)

    def submit(
        self, argv: Sequence[request.Word] | str, *, shell: bool = False, **wanted: Unpack[request.RunRequest]
    ) -> Task:
        """Queue a command; durable when this returns. ``argv``: its words, or, with ``shell``, one line for /bin/sh. What
        else can be asked for: `peerload.client.request.RunRequest`."""
        return self._submit(request.submission(request.command(argv, shell=shell), wanted))

    def submit_array(
        self,
        argv: Sequence[request.Word] | str,
        indices: Iterable[int],
        *,
        shell: bool = False,
        **wanted: Unpack[request.RunRequest],
    ) -> Task:
        """Queue it once for each number, which the task finds in PEERLOAD_ARRAY_INDEX."""
        numbers = sorted(set(indices))
        fields = request.submission(request.command(argv, shell=shell), wanted)
        return self._submit({**fields, "array": request.array(numbers)}, numbers)

    def submit_each(self, commands: Sequence[Sequence[request.Word]], **wanted: Unpack[request.RunRequest]) -> Task:
        """Queue an array whose members, counted from 1, run one of these commands each: at most 100,000, and 3 MiB in all."""
        each = [request.command(argv, shell=False) for argv in commands]
        fields = request.submission(each[0] if each else [b""], wanted)
        return self._submit({**fields, "each": each}, range(1, len(each) + 1))

    def _submit(self, fields: dict[str, Any], numbers: Sequence[int] = ()) -> Task:
        reply = self._call("submit", **fields)
        return Task(self, reply["id"], [f"{reply['id']}.{number}" for number in numbers])

    def wait(
        self,
        tasks: Iterable[Named],
        *,
        timeout_s: float | None = None,
        any: bool = False,  # noqa: A002 -- the flag's name
    ) -> list[values.Ended]:
        """Block until these, and all members of arrays among them, have ended; with ``any``: one of them. → each end, the
        first first. Raises TimeoutError."""
        names = _names(tasks)
        if not names:
            return []
        with self._connected() as client:
            asked = client.stream("wait", tasks=names, any=any, timeout_s=timeout_s)
            ended = [values.Ended.of(body) for body in asked if body.get("state") != "unknown"]
            if client.last.get("timed_out"):
                raise TimeoutError(f"{len(ended)} had ended after {timeout_s:g} s")
            return ended

    def ended(self, tasks: Iterable[Named]) -> Iterator[values.Ended]:
        """Each end as it comes."""
        with self._connected() as client:
            for body in client.stream("wait", tasks=_names(tasks)):
                if body.get("state") != "unknown":
                    yield values.Ended.of(body)

    def output(self, task: Named) -> values.Output:
        """What a task has written by now. Raises OutputIncomplete if not all of it can be had (any more)."""
        written, gaps = {1: bytearray(), 2: bytearray()}, connection.OutputGaps()
        with self._connected() as client:
            for body in client.stream("output", task=_name(task)):
                if "data" in body:  # other parts tell why some of it may be lacking
                    gaps.add(body)
                    written[body["stream"]] += body["data"]
            gaps.require_all(client.last)
        return values.Output(bytes(written[1]), bytes(written[2]))

    def follow(self, task: Named) -> Iterator[values.Piece]:
        """A task's output as it comes, until it has ended. Raises OutputIncomplete then if not all of it came."""
        gaps = connection.OutputGaps()
        with self._connected() as client:
            for body in client.stream("output", task=_name(task), follow=True):
                if "data" in body:
                    gaps.add(body)
                    yield values.Piece(body["stream"], body["offset"], body["data"])
            gaps.require_all(client.last)

    def cancel(self, tasks: Iterable[Named], *, signal: int = 15, force: bool = False) -> list[str]:
        """Stop tasks. → the ids of those that had not ended."""
        cancelled = self._call("cancel", tasks=_names(tasks), signal=signal, force=force)["cancelled"]
        return list(cancelled)

    def info(self, task: Named) -> values.TaskInfo:
        """What is known of a task now."""
        return values.TaskInfo.of(self._call("show", tasks=[_name(task)])["tasks"][0])

    def tasks(
        self, *, states: Sequence[str] = (), ended_within_s: float = 86_400.0, limit: int = 10_000
    ) -> list[values.TaskInfo]:
        """My tasks: unfinished ones, and those that ended lately."""
        reply = self._call("tasks", states=list(states), ended_within_s=ended_within_s, limit=limit)
        return [values.TaskInfo.of(body) for body in reply["tasks"]]

    def nodes(self) -> list[values.NodeInfo]:
        """Every node known, this one first."""
        return [values.NodeInfo.of(body) for body in self._call("nodes")["nodes"]]

    def why(self, task: Named) -> values.Why:
        """Why a task waits, or why it went where it went."""
        return values.Why.of(self._call("why", task=_name(task)))

    def events(self, *, follow: bool = False, limit: int = 50, tasks: Sequence[Named] = ()) -> Iterator[values.Event]:
        """What happened: the newest ``limit``, oldest first; with ``follow`` also what happens from now on."""
        with self._connected() as client:
            for body in client.stream("events", follow=follow, limit=limit, tasks=_names(tasks)):
                yield from map(values.Event.of, body.get("events", ()))
            yield from map(values.Event.of, client.last.get("events", ()))

    def _connected(self) -> connection.Client:
        return connection.Client(self._path, timeout_s=self._timeout_s)

    def _call(self, verb: str, **fields: object) -> dict[str, Any]:
        with self._connected() as client:
            return client.call(verb, **fields)


def _name(task: Named) -> str:
    return task.id if isinstance(task, Task) else task


def _names(tasks: Iterable[Named]) -> list[str]:
    return [_name(task) for task in tasks]
