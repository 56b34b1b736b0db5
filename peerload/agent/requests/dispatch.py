"""Dispatch of requests: each verb, and the method that carries it out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_never

from peerload.wire import control

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from peerload.agent.control.connection import Connection
    from peerload.agent.requests.attach import AttachRequests
    from peerload.agent.requests.cluster_commands import ClusterCommands
    from peerload.agent.requests.durable_reads import DurableReads
    from peerload.agent.requests.exec_in_task import ExecRequests
    from peerload.agent.requests.live_usage import LiveUsage
    from peerload.agent.requests.node_commands import NodeCommands
    from peerload.agent.requests.output_stream import OutputRequests
    from peerload.agent.requests.overview import OverviewCache
    from peerload.agent.requests.status import StatusRequests
    from peerload.agent.requests.submissions import FileRequests, Submissions
    from peerload.agent.requests.task_commands import CleanRequests, TaskCommands
    from peerload.agent.requests.task_queries import EventRequests, TaskQueries
    from peerload.agent.requests.wait_request import WaitRequests
    from peerload.agent.requests.why import WhyRequest

    Work = Coroutine[Any, Any, None]

TaskRequest = (
    control.Submit
    | control.Retry
    | control.Cancel
    | control.CancelRemote
    | control.Signal
    | control.Hold
    | control.Release
    | control.Prio
    | control.Group
    | control.Groups
    | control.Clean
    | control.Wait
    | control.Output
    | control.Exec
    | control.Input
    | control.Resize
    | control.Attend
    | control.Detach
)
"""Requests that change tasks, or are with them."""
Query = (
    control.Tasks
    | control.Select
    | control.History
    | control.Remote
    | control.Show
    | control.Why
    | control.Usage
    | control.Events
    | control.Overview
)
"""Requests that look at tasks."""


class TaskRequests:
    """Requests that change tasks, or are with them."""

    def __init__(
        self,
        submissions: Submissions,
        commands: TaskCommands,
        clean: CleanRequests,
        waits: WaitRequests,
        outputs: OutputRequests,
        execs: ExecRequests,
        attach: AttachRequests,
    ) -> None:
        self._submissions = submissions
        self._commands = commands
        self._clean = clean
        self._waits = waits
        self._outputs = outputs
        self._execs = execs
        self._attach = attach

    def work(self, connection: Connection, request: TaskRequest) -> Work | None:  # noqa: C901, PLR0912
        """Carry it out → the work that answers it, None if it was answered, or is the core's to answer."""
        match request:
            case control.Submit():
                return self._submissions.submit(connection, request)
            case control.Retry():
                return self._submissions.retry(connection, request)
            case control.Cancel():
                return self._commands.cancel(connection, request)
            case control.CancelRemote():
                self._commands.cancel_remote(connection, request)
            case control.Signal() if request.command:
                self._execs.commands.signal(connection, request)
            case control.Signal():
                return self._commands.signal(connection, request)
            case control.Hold():
                return self._commands.hold(connection, request)
            case control.Release():
                return self._commands.release(connection, request)
            case control.Prio():
                return self._commands.prioritize(connection, request)
            case control.Group():
                self._commands.group(connection, request)
            case control.Groups():
                self._commands.groups(connection, request)
            case control.Clean():
                return self._clean.clean(connection, request)
            case control.Wait():
                return self._waits.wait(connection, request)
            case control.Output():
                return self._outputs.output(connection, request)
            case control.Exec():
                return self._execs.run(connection, request)
            case control.Input() if request.command:
                return self._execs.input(connection, request)
            case control.Input():
                return self._attach.input(connection, request)
            case control.Resize() if request.command:
                self._execs.commands.resize(connection, request)
            case control.Resize():
                self._attach.resize(connection, request)
            case control.Attend():
                self._attach.attend(connection, request)
            case control.Detach():
                return self._attach.detach(connection, request)
            case _:
                assert_never(request)
        return None


class Queries:
    """Requests that look at tasks. They see everything that was decided before them."""

    def __init__(
        self,
        reads: DurableReads,
        tasks: TaskQueries,
        why: WhyRequest,
        usage: LiveUsage,
        events: EventRequests,
        overviews: OverviewCache,
    ) -> None:
        self._reads = reads
        self._tasks = tasks
        self._why = why
        self._usage = usage
        self._events = events
        self._overviews = overviews

    def work(self, connection: Connection, request: Query) -> Work:
        """The work that answers it."""
        match request:
            case control.Tasks():
                return self._tasks.tasks(connection, request)
            case control.Select():
                return self._tasks.select(connection, request)
            case control.History():
                return self._tasks.history(connection, request)
            case control.Remote():
                return self._tasks.remote(connection, request)
            case control.Show():
                return self._tasks.show(connection, request)
            case control.Events():
                return self._events.events(connection, request)
            case control.Why():
                return self._why_answer(connection, request)
            case control.Usage():
                return self._usage_answer(connection, request)
            case control.Overview():
                return self._overview_answer(connection, request)
            case _:
                assert_never(request)

    async def _why_answer(self, connection: Connection, request: control.Why) -> None:
        await self._reads.readable(connection, events=True)
        connection.ok(request.id, await self._why.explain(request.task))

    async def _usage_answer(self, connection: Connection, request: control.Usage) -> None:
        await connection.drain()
        connection.ok(request.id, {"tasks": await self._usage.readings(request.tasks)})

    async def _overview_answer(self, connection: Connection, request: control.Overview) -> None:
        await self._reads.readable(connection)
        connection.ok(request.id, self._overviews.of(connection.caller).build(request))


class Dispatcher:
    """Finds for each request what carries it out."""

    def __init__(
        self,
        tasks: TaskRequests,
        queries: Queries,
        status: StatusRequests,
        node_commands: NodeCommands,
        cluster_commands: ClusterCommands,
        files: FileRequests,
    ) -> None:
        self._files = files
        self._tasks = tasks
        self._queries = queries
        self._status = status
        self._node_commands = node_commands
        self._cluster_commands = cluster_commands

    def work(self, connection: Connection, request: control.Request) -> Work | None:  # noqa: C901, PLR0912
        """Carry a request out → the work that answers it, None if it was answered, or is the core's to answer. Raises
        PeerloadError."""
        if isinstance(request, TaskRequest):
            return self._tasks.work(connection, request)
        if isinstance(request, Query):
            return self._queries.work(connection, request)
        match request:
            case control.Files():
                return self._files.files(connection, request)
            case control.Info():
                connection.ok(request.id, self._status.info())
            case control.Nodes():
                connection.ok(request.id, self._status.nodes())
            case control.Policy():
                connection.ok(request.id, self._status.policy())
            case control.Stats():
                connection.ok(request.id, self._status.stats())
            case control.Checkup():
                connection.ok(request.id, self._status.checkup(connection.caller))
            case control.Settings():
                connection.ok(request.id, self._status.settings())
            case control.Drain():
                return self._node_commands.drain(connection, request)
            case control.Undrain():
                self._node_commands.undrain(connection, request)
            case control.Leave():
                self._node_commands.leave(connection, request)
            case control.Forget():
                self._node_commands.forget(connection, request)
            case control.Stop():
                self._node_commands.stop(connection, request)
            case control.Invite():
                self._cluster_commands.invite(connection, request)
            case control.Revoke():
                self._cluster_commands.revoke(connection, request)
            case control.Rotate():
                self._cluster_commands.rotate(connection, request)
            case control.Restart():
                self._node_commands.restart(connection, request)
            case _:
                assert_never(request)
        return None
