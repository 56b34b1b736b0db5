"""The path of a request: its checks in their order, and the method that carries out each verb."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, assert_never

from peerload.agent.accounts import check_output_patterns
from peerload.agent.control.authorization import waits_for
from peerload.wire import control

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Coroutine

    from peerload.agent.accounts import DirectoryQueries, UserServices
    from peerload.agent.control.authorization import Authorization, Quotas
    from peerload.agent.control.connection import Connection
    from peerload.agent.files.attempts import AttemptFiles
    from peerload.agent.forwarding.request_router import RequestRouter
    from peerload.agent.requests.attach import AttachRequests
    from peerload.agent.requests.durable_reads import DurableReads
    from peerload.agent.requests.exec_in_task import ExecRequests
    from peerload.agent.requests.live_usage import LiveUsage
    from peerload.agent.requests.node_verbs import ClusterCommands, NodeCommands, StatusRequests
    from peerload.agent.requests.output_stream import OutputRequests
    from peerload.agent.requests.overview import OverviewCache
    from peerload.agent.requests.submissions import FileRequests, Submissions
    from peerload.agent.requests.task_commands import CleanRequests, TaskCommands
    from peerload.agent.requests.task_queries import EventRequests, TaskQueries
    from peerload.agent.requests.wait_request import WaitRequests
    from peerload.agent.requests.why import WhyRequest
    from peerload.agent.runtime import RunState
    from peerload.agent.sensors.energy import EnergySensors
    from peerload.agent.store.disk_space import DiskSpace
    from peerload.agent.store.write_ahead import SecurityEvents

    Work = Coroutine[Any, Any, None]


class Gates(NamedTuple):
    """The collaborators that a request has to pass, in their order."""

    quotas: Quotas
    access: Authorization
    router: RequestRouter
    users: UserServices
    disk: DiskSpace
    files: AttemptFiles
    directories: DirectoryQueries


@dataclass(eq=False, repr=False)
class RequestServer:
    """Serves the clients of one agent: those at its socket, and those of other nodes."""

    _gates: Gates
    _submissions: Submissions
    _verbs: Verbs
    _security: SecurityEvents
    _run: RunState

    @property
    def counters(self) -> Counter[str]:
        """The counters of the agent."""
        return self._security.counters

    def handle(self, connection: Connection, request: control.Request) -> None:
        """Begin to serve a request, unless its client or its user asks too often."""
        try:
            connection.check_pending()
            self._gates.quotas.check_rate(connection.caller, request, connection.rest)
        except Exception as error:  # noqa: BLE001 -- `report_failure` tells errors from bugs
            connection.report_failure(request.id, error)
        else:
            connection.spawn(request.id, self._serve(connection, request))

    async def _serve(self, connection: Connection, request: control.Request) -> None:
        """Check a request, in this order, and answer it. Raises PeerloadError."""
        quotas, access, router, users, disk, files, directories = self._gates
        caller = connection.caller
        # 1. Authorization: the right to ask for this, and the ownership of the tasks that are named.
        request = access.authorize(caller, request)
        # 2. Quota of the tasks that are waited for, by user and by node.
        with quotas.charge(caller, waits_for(request)):
            # 3. Routing: other nodes answer, if they have a part in it.
            if (elsewhere := router.work(connection, request)) is not None:
                await elsewhere
            elif not isinstance(request, control.Submit | control.RetryRequest):
                if (work := self._verbs.work(connection, request)) is not None:
                    await work
            else:
                # 4. Dependencies on tasks of other homes: these know who may see them.
                await router.check_dependencies(connection, request)
                submission = await self._submissions.read(caller, request)
                spec, terms, tasks = submission.spec, submission.terms, submission.tasks
                # 5. Quota of the user's tasks and submissions.
                quotas.check_submission(caller, tasks)
                # 6. Output files that this user can write.
                if submission.writes_files:
                    check_output_patterns(terms, len(submission.indices))
                    await users.check_files(spec, terms)
                # 7. Room on the disk of this node.
                disk.admit(tasks, submission.size_bytes)
                # 8. Its files, which are complete here.
                await files.check(spec, terms)
                # 9. The working directory, on the other nodes and here. A task without one here may run elsewhere.
                nodes = self._submissions.candidates(spec)
                await directories.ask(nodes, spec.directory, spec.user)
                directory_here = await users.admitted(spec, terms)
                # 10. A directory that is not the same on all of them travels, where the settings want that.
                if directory_here and self._submissions.may_freeze(request):
                    directories.check_same(nodes, spec, users.identity_of(spec.directory))
                await self._submissions.queue(connection, request, submission, directory_here=directory_here)

    def refused(self, connection: Connection, name: str, rule: str, what: str) -> None:
        """Count a violation of a security rule."""
        self._security.counters[name] += 1
        self._security.report(rule, connection.from_node or f"uid {connection.uid}", what)

    def broke(self, why: str) -> None:
        """Stop the agent after a bug."""
        self._run.fail(why)


@dataclass(eq=False, repr=False)
class Verbs:
    """The methods that carry out the verbs, besides those that queue tasks."""

    reads: DurableReads
    commands: TaskCommands
    clean: CleanRequests
    waits: WaitRequests
    outputs: OutputRequests
    execs: ExecRequests
    attach: AttachRequests
    tasks: TaskQueries
    events: EventRequests
    why: WhyRequest
    usage: LiveUsage
    overviews: OverviewCache
    status: StatusRequests
    node: NodeCommands
    cluster: ClusterCommands
    files: FileRequests
    energy: EnergySensors

    def work(self, connection: Connection, request: control.Request) -> Work | None:  # noqa: C901, PLR0912, PLR0915 -- one line a verb
        """Carry a request out → the work that answers it; None if it was answered, or is the core's to answer. Raises
        PeerloadError."""
        match request:
            # Tasks of this home, and their processes here
            case control.Cancel():
                return self.commands.cancel(connection, request)
            case control.CancelRemote():
                self.commands.cancel_remote(connection, request)
            case control.SendSignal() if request.command:
                self.execs.commands.signal(connection, request)
            case control.SendSignal():
                return self.commands.signal(connection, request)
            case control.Hold():
                return self.commands.hold(connection, request)
            case control.Release():
                return self.commands.release(connection, request)
            case control.Prio():
                return self.commands.prioritize(connection, request)
            case control.Group():
                self.commands.group(connection, request)
            case control.Groups():
                self.commands.groups(connection, request)
            case control.Clean():
                return self.clean.clean(connection, request)
            case control.Wait():
                return self.waits.wait(connection, request)
            case control.ReadOutput():
                return self.outputs.output(connection, request)
            case control.Exec():
                return self.execs.run(connection, request)
            case control.Input() if request.command:
                return self.execs.input(connection, request)
            case control.Input():
                return self.attach.input(connection, request)
            case control.Resize() if request.command:
                self.execs.commands.resize(connection, request)
            case control.Resize():
                self.attach.resize(connection, request)
            case control.Attend():
                self.attach.attend(connection, request)
            case control.Detach():
                return self.attach.detach(connection, request)
            # Lists and explanations, which see everything that was decided before them
            case control.TasksRequest():
                return self.tasks.tasks(connection, request)
            case control.Select():
                return self.tasks.select(connection, request)
            case control.History():
                return self.tasks.history(connection, request)
            case control.Remote():
                return self.tasks.remote(connection, request)
            case control.Show():
                return self.tasks.show(connection, request)
            case control.Events():
                return self.events.events(connection, request)
            case control.ExplainTask():
                return self._why(connection, request)
            case control.ReadUsage():
                return self._usage(connection, request)
            case control.Overview():
                return self._overview(connection, request)
            case control.Files():
                return self.files.files(connection, request)
            # The node and its cluster
            case control.Info():
                connection.ok(request.id, self.status.agent.info())
            case control.Settings():
                connection.ok(request.id, self.status.agent.settings())
            case control.Nodes():
                connection.ok(request.id, {"nodes": self.status.nodes.objects()})
            case control.Policy():
                connection.ok(request.id, self.status.policy())
            case control.Power():
                connection.ok(request.id, self.energy.power())
            case control.KeepPowerProfile():
                connection.ok(request.id, self.energy.take_profile(request))
            case control.Energy():
                connection.ok(request.id, self.energy.totals(request.since))
            case control.Stats():
                connection.ok(request.id, self.status.stats())
            case control.ReadSamples():
                connection.ok(request.id, self.status.samples.told(request.since))
            case control.Checkup():
                connection.ok(request.id, self.status.checkup(connection.caller))
            case control.Drain():
                return self.node.drain(connection, request)
            case control.Undrain():
                self.node.undrain(connection, request)
            case control.Leave():
                self.node.leave(connection, request)
            case control.Forget():
                self.node.forget(connection, request)
            case control.Stop():
                self.node.stop(connection, request)
            case control.Restart():
                self.node.restart(connection, request)
            case control.Invite():
                self.cluster.invite(connection, request)
            case control.RevokeRequest():
                self.cluster.revoke(connection, request)
            case control.Rotate():
                self.cluster.rotate(connection, request)
            case control.Submit() | control.RetryRequest():
                raise AssertionError("`RequestServer` queues tasks")
            case _:
                assert_never(request)
        return None

    async def _why(self, connection: Connection, request: control.ExplainTask) -> None:
        await self.reads.readable(connection, events=True)
        connection.ok(request.id, await self.why.explain(request.task))

    async def _usage(self, connection: Connection, request: control.ReadUsage) -> None:
        await connection.drain()
        connection.ok(request.id, {"tasks": await self.usage.readings(request.tasks)})

    async def _overview(self, connection: Connection, request: control.Overview) -> None:
        await self.reads.readable(connection)
        connection.ok(request.id, self.overviews.of(connection.caller).build(request))
