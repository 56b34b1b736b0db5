"""The path of a request: its checks in their order, the method that carries out each verb, and later messages to clients.

Submissions pass all of the checks. The answers and task changes of the core come back through `ClientEffects`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, assert_never

import msgspec

from peerload.agent.accounts import check_output_patterns, output_patterns
from peerload.agent.control.authorization import waits_for
from peerload.agent.runtime import Histogram, now
from peerload.agent.stdin import input_name
from peerload.core.resources.admission import why_never
from peerload.model import metrics
from peerload.model.errors import BadRequest, PeerloadError
from peerload.model.events import TaskSubmitted
from peerload.model.messages import Need
from peerload.model.metrics import labelled
from peerload.model.task import (
    ARGV_BYTES_MAX,
    ARRAY_MEMBERS_MAX,
    NO_TERMS,
    SCRATCH,
    Guarantee,
    TaskState,
    execution_key,
    variables_of,
)
from peerload.text.format import counted
from peerload.wire import control

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from peerload.agent.accounts import DirectoryQueries, UserServices
    from peerload.agent.completion.completion_jobs import OutputSaver
    from peerload.agent.control.authorization import Authorization, Principal, Quotas
    from peerload.agent.control.connection import Connection
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.files.attempts import AttemptFiles
    from peerload.agent.files.environments import Environments
    from peerload.agent.forwarding.request_router import RequestRouter
    from peerload.agent.output.output import TaskOutputs
    from peerload.agent.requests.attach import AttachRequests, ExecRequests
    from peerload.agent.requests.node_verbs import ClusterCommands, NodeCommands
    from peerload.agent.requests.output_and_wait import OutputRequests, WaitRequests
    from peerload.agent.requests.overview import OverviewCache
    from peerload.agent.requests.task_commands import CancelWaits, CleanRequests, TaskCommands
    from peerload.agent.requests.task_queries import DurableReads, EventRequests, LiveUsage, TaskQueries, WhyRequest
    from peerload.agent.runtime import CoreRequests, Decisions, RunState, TaskWatches
    from peerload.agent.sensors.energy import EnergySensors
    from peerload.agent.stdin import StdinForwarding, StdinStore
    from peerload.agent.store.disk_space import DiskSpace
    from peerload.agent.store.schema import Each
    from peerload.agent.store.write_ahead import SecurityEvents
    from peerload.agent.views.agent import AgentView, DiagnosticsView, MetricsView, Samples
    from peerload.agent.views.node import NodesView
    from peerload.core.node import Node
    from peerload.core.work import HomeTask
    from peerload.model.actions import Decided, MembersCancelled, TaskChanged
    from peerload.model.task import SubmitOptions, TaskRecord, TaskSpec

TASK_SECONDS = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0)
AGE_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 90.0)
ENDED = {state: labelled(metrics.TASKS_ENDED, outcome=state.value) for state in TaskState if state.is_final}


class RequestChecks(NamedTuple):
    """The collaborators that check a request, in this order."""

    quotas: Quotas
    access: Authorization
    router: RequestRouter
    users: UserServices
    disk: DiskSpace
    files: AttemptFiles
    directories: DirectoryQueries


@dataclass(eq=False, repr=False)
class RequestServer:
    """Serves the clients of one agent: at its socket, and at other nodes."""

    _checks: RequestChecks
    _submissions: Submissions
    _verbs: Verbs
    _security: SecurityEvents
    _run: RunState

    @property
    def counters(self) -> Counter[str]:
        return self._security.counters

    def handle(self, connection: Connection, request: control.Request) -> None:
        """Start to serve a request, unless its client has too many pending or its user is over the rate."""
        try:
            connection.check_pending()
            self._checks.quotas.check_rate(connection, request)
        except Exception as error:  # noqa: BLE001 -- `report_failure` tells errors from bugs
            connection.report_failure(request.id, error)
        else:
            connection.spawn(request.id, self._serve(connection, request))

    async def _serve(self, connection: Connection, request: control.Request) -> None:
        """Check a request, in this order, and answer it. Raises PeerloadError."""
        quotas, access, router, users, disk, files, directories = self._checks
        caller = connection.caller
        # 1. Authorization: the right to this request, and the ownership of the named tasks.
        request = access.authorize(caller, request)
        # 2. Quota of tasks to wait for, by user and by node.
        with quotas.charge(caller, waits_for(request)), contextlib.ExitStack() as keeps:
            # 3. Routing: other nodes answer requests about their tasks or state.
            if (elsewhere := router.work(connection, request)) is not None:
                await elsewhere
            elif not isinstance(request, control.Submit | control.RetryRequest):
                if (work := self._verbs.work(connection, request)) is not None:
                    await work
            else:
                # 4. Dependencies on tasks of other homes: those homes check who may see the tasks.
                await router.check_dependencies(connection, request)
                submission = await self._submissions.read(caller, request)
                spec, terms, tasks = submission.spec, submission.terms, submission.tasks
                # 5. Quota of the user's tasks and submissions.
                quotas.check_submission(caller, tasks)
                # 6. Output files that this user can write.
                if submission.writes_files:
                    check_output_patterns(terms, len(submission.indices))
                    await users.check_files(spec, terms)
                # 7. Free disk space of this node.
                disk.admit(tasks, submission.size_bytes)
                # 8. Its staged files, which have to be complete here.
                if spec.is_staged:
                    keeps.enter_context(files.held(spec))
                    await files.check(spec, terms)
                # 9. The working directory, on the other nodes and here. Without one here, a task may still run elsewhere.
                nodes = self._submissions.candidates(spec)
                may_freeze = self._submissions.may_freeze(request)
                decides = may_freeze and self._submissions.is_never_here(spec)
                await directories.ask(nodes, spec.directory, spec.user, decides=decides)
                directory_here = await users.admitted(spec, terms)
                # 10. If the settings say so, a directory that is not the same on all these nodes is sent with the task.
                if directory_here and may_freeze:
                    directories.check_same(nodes, spec, users.identity_of(spec.directory))
                await self._submissions.queue(connection, request, submission, directory_here=directory_here)

    def refused(self, connection: Connection, name: str, rule: str, what: str) -> None:
        self._security.counters[name] += 1
        self._security.report(rule, connection.from_node or f"uid {connection.uid}", what)

    def broke(self, why: str) -> None:
        self._run.fail(why)


@dataclass(eq=False, repr=False)
class Verbs:
    """The dispatch of requests to the methods that carry them out, except for requests that queue tasks."""

    _tasks: TaskVerbs
    _queries: QueryVerbs
    _own: NodeAnswers
    _node: NodeCommands
    _cluster: ClusterCommands

    def work(self, connection: Connection, request: control.Request) -> Coroutine[Any, Any, None] | None:  # noqa: C901, PLR0912 -- one line a verb
        """Carry out a request → the work that answers it; None if it was answered, or the core will answer it. Raises
        PeerloadError."""
        if isinstance(request, control.TaskCommand):
            return self._tasks.work(connection, request)
        if isinstance(request, control.TaskQuery):
            return self._queries.work(connection, request)
        if isinstance(request, control.NodeQuery):
            connection.ok(request.id, self._own.answer(connection.caller, request))
            return None
        match request:
            case control.Drain():
                return self._node.drain(connection, request)
            case control.Undrain():
                self._node.undrain(connection, request)
            case control.Leave():
                self._node.leave(connection, request)
            case control.Forget():
                self._node.forget(connection, request)
            case control.Stop():
                self._node.stop(connection, request)
            case control.Restart():
                self._node.restart(connection, request)
            case control.Invite():
                self._cluster.invite(connection, request)
            case control.RevokeRequest():
                self._cluster.revoke(connection, request)
            case control.Rotate():
                self._cluster.rotate(connection, request)
            case control.Submit() | control.RetryRequest():
                raise AssertionError("`RequestServer` queues tasks")
            case _:
                assert_never(request)
        return None


@dataclass(eq=False, repr=False)
class TaskVerbs:
    """The verbs that change or follow tasks of this home, and their processes here."""

    _commands: TaskCommands
    _clean: CleanRequests
    _waits: WaitRequests
    _outputs: OutputRequests
    _execs: ExecRequests
    _attach: AttachRequests

    def work(self, connection: Connection, request: control.TaskCommand) -> Coroutine[Any, Any, None] | None:  # noqa: C901, PLR0912 -- one line a verb
        """See `Verbs.work`."""
        match request:
            case control.Cancel():
                return self._commands.cancel(connection, request)
            case control.CancelRemote():
                self._commands.cancel_remote(connection, request)
            case control.SendSignal() if request.command:
                self._execs.commands.signal(connection, request)
            case control.SendSignal():
                return self._commands.signal(connection, request)
            case control.Hold() | control.Release() | control.Prio():
                return self._commands.change(connection, request)
            case control.Group():
                self._commands.group(connection, request)
            case control.Groups():
                self._commands.groups(connection, request)
            case control.Clean():
                return self._clean.clean(connection, request)
            case control.Wait():
                return self._waits.wait(connection, request)
            case control.ReadOutput():
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


@dataclass(eq=False, repr=False)
class QueryVerbs:
    """The verbs that list and explain tasks and files. They see all earlier decisions."""

    _reads: DurableReads
    _tasks: TaskQueries
    _events: EventRequests
    _why: WhyRequest
    _usage: LiveUsage
    _overviews: OverviewCache
    _files: FileRequests

    def work(self, connection: Connection, request: control.TaskQuery) -> Coroutine[Any, Any, None]:  # noqa: C901 -- one line a verb
        match request:
            case control.TasksRequest():
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
            case control.ExplainTask():
                return self._explain(connection, request)
            case control.ReadUsage():
                return self._read_usage(connection, request)
            case control.Overview():
                return self._overview(connection, request)
            case control.Files():
                return self._files.files(connection, request)
            case _:
                assert_never(request)

    async def _explain(self, connection: Connection, request: control.ExplainTask) -> None:
        await self._reads.readable(connection, events=True)
        connection.ok(request.id, await self._why.explain(request.task))

    async def _read_usage(self, connection: Connection, request: control.ReadUsage) -> None:
        await connection.drain()
        connection.ok(request.id, {"tasks": await self._usage.readings(request.tasks)})

    async def _overview(self, connection: Connection, request: control.Overview) -> None:
        await self._reads.readable(connection)
        connection.ok(request.id, self._overviews.of(connection.caller).build(request))


@dataclass(eq=False, repr=False)
class NodeAnswers:
    """Answers from the state in memory about this node and its cluster."""

    _agent: AgentView
    _nodes: NodesView
    _diagnostics: DiagnosticsView
    _metrics: MetricsView
    _samples: Samples
    _energy: EnergySensors

    def answer(self, caller: Principal, request: control.NodeQuery) -> dict[str, Any]:  # noqa: C901 -- one line a verb
        """The answer to a request. Raises PeerloadError."""
        match request:
            case control.Info():
                return self._agent.info()
            case control.Settings():
                return self._agent.settings()
            case control.Nodes():
                return {"nodes": self._nodes.objects(), "unmet": self._nodes.unmet()}
            case control.Policy():
                return self._agent.policy()
            case control.Power():
                return self._energy.power()
            case control.KeepPowerProfile():
                return self._energy.take_profile(request)
            case control.Energy():
                return self._energy.totals(request.since)
            case control.Stats():
                return self._metrics.stats()
            case control.ReadSamples():
                return self._samples.to_dict(request.since)
            case control.Checkup():
                return self._diagnostics.checkup(caller)
            case _:
                assert_never(request)


# -- submissions -------------------------------------------------------------------------------------------------------


class SubmissionRequest(NamedTuple):
    """A submission with defaults filled in. ``tasks``: number of tasks; ``retry_of``: the tasks that are queued again."""

    spec: TaskSpec
    terms: SubmitOptions
    indices: tuple[int, ...]
    each: Each
    digest: bytes
    size_bytes: int
    retry_of: str = ""

    @property
    def tasks(self) -> int:
        return len(self.indices) or 1

    @property
    def writes_files(self) -> bool:
        """True if its output files have to be checked: those of a retry were checked before."""
        return not self.retry_of


@dataclass(eq=False, repr=False)
class FileRequests:
    """Requests about files: receives files before a submission, and lists the cache."""

    _files: AttemptFiles
    _environments: Environments

    async def files(self, connection: Connection, request: control.Files) -> None:
        caller = connection.caller
        cache = self._files.caches.of(caller.who)
        seen, owner = (self._files.caches.all(), None) if caller.sees_all else ([cache], caller.who)
        if request.blocks:
            await cache.keep(request.blocks)
        if request.gc:
            removed = await asyncio.to_thread(self._environments.collect, owner, everything=True)
            reply: dict[str, object] = {"removed_bytes": removed + await self._files.collect_garbage(seen)}
        elif request.manifest:
            reply = {"complete": await cache.transfer.in_thread(cache.is_complete, request.manifest)}
        elif request.have or request.blocks:
            reply = {"missing": await cache.transfer.in_thread(cache.store.missing, request.have)}
        else:
            reply = {**await self._files.usage(seen), "environments": self._environments.usage(owner)}
        connection.ok(request.id, reply)


@dataclass(eq=False, repr=False)
class Submissions:
    """Submissions: passed to the core; the answer is sent once the decision is durable."""

    _core: CoreRequests
    _access: Authorization
    _reads: DurableReads
    _task_ids: TaskIds
    _stdin: StdinStore
    _attach: AttachRequests
    _node: Node

    def candidates(self, spec: TaskSpec) -> Sequence[str]:
        """The other nodes that could run a task, as far as this node knows."""
        return self._node.membership.could_run(Need(spec.request, spec.placement), self._node.state.node)

    def is_never_here(self, spec: TaskSpec) -> bool:
        """True if this node can never run a task: it is pinned elsewhere, or needs what this node lacks."""
        state = self._node.state
        return bool(why_never(state.profile, spec.request, spec.placement, state.node))

    def may_freeze(self, request: control.Submit | control.RetryRequest) -> bool:
        """True if the client of a new submission can send its directory instead."""
        is_new = isinstance(request, control.Submit) and request.freezes
        return is_new and self._reads.store.submission_of(request.token) is None

    async def read(self, caller: Principal, request: control.Submit | control.RetryRequest) -> SubmissionRequest:
        """Read a submission, or the earlier one of tasks to retry. Raises BadRequest, NoSuchTask."""
        if isinstance(request, control.RetryRequest):
            return await self._read_retry(request)
        indices = members(request)
        terms = with_whole_ids(self._task_ids, request.spec, request.terms)
        if terms.start_by and not self._node.state.prices:
            why = f"no price of energy is known on {self._node.state.node}"
            hint = "set one:  [energy] price_file in the config file"
            raise BadRequest("the start cannot wait for cheaper energy", why=why, hint=hint)
        spec, terms = self._access.with_owner(caller, request.spec, terms)
        if output_patterns(terms):
            spec = msgspec.structs.replace(spec, followed=True)  # the output files get the whole output
        size = len(request.input) + _size(spec, request.each)
        return SubmissionRequest(spec, terms, indices, request.each, submission_digest(request), size)

    async def _read_retry(self, request: control.RetryRequest) -> SubmissionRequest:
        store = await self._reads.durable()
        records = [record async for page in self._task_ids.pages(request.task) for record in page]
        meant = self._task_ids.parse(request.task)
        counter = meant.counter
        name = self._task_ids.whole_id(str(counter) if meant.is_range else request.task)
        spec, each = store.spec(counter), store.each(counter)
        if spec.takes_input:
            if any(record.input_came for record in records):
                hint = "submit it again, with its input"
                raise BadRequest(f"{name} cannot be repeated", why="its standard input is not kept", hint=hint)
            spec = msgspec.structs.replace(spec, takes_input=False, terminal=None, followed=False)
        chosen = _to_retry(name, records, self._node.home.tasks, request)
        indices = tuple(int(record.task.rpartition(".")[2]) for record in chosen if "." in record.task)
        description = f"retry {name} {request.all}{' failed' if request.failed else ''}"
        digest = hashlib.sha256(description.encode()).digest()
        return SubmissionRequest(
            spec, store.terms(counter).again(), indices, each, digest, _size(spec, each), retry_of=name
        )

    async def queue(
        self,
        connection: Connection,
        request: control.Submit | control.RetryRequest,
        submission: SubmissionRequest,
        *,
        directory_here: bool,
    ) -> None:
        """Pass a checked submission to the core."""
        before = self._reads.store.submission_of(request.token)
        name, client, held, waits_for_node = "", 0, False, False
        refused: Callable[[], None] | None = None
        if isinstance(request, control.Submit):
            name, refused = await self._store_input(connection, request)
            client = self._attach.client_number(connection) if request.attended else 0
            held, waits_for_node = request.held, request.wait_for_node
        self._core.put(
            TaskSubmitted(
                self._core.expect(connection, request.id, refused),
                request.token,
                submission.digest,
                submission.spec,
                submission.indices,
                directory_here=directory_here,
                before=before,
                held=held,
                retry_of=submission.retry_of,
                waits_for_node=waits_for_node,
                terms=submission.terms,
                each=submission.each,
                client=client,
                input=name,
            )
        )

    async def _store_input(
        self, connection: Connection, request: control.Submit
    ) -> tuple[str, Callable[[], None] | None]:
        """Store the input before the task exists → its name, and the undo function. A complete input is synced, since it has
        to survive a crash; a client that still sends input would notice the crash."""
        if not request.spec.takes_input:
            return "", None
        inputs, name = self._stdin, input_name(request.token)
        refused = None if inputs.is_known(name) else lambda: inputs.drop(name)
        source = inputs.get(name)
        try:
            source.add(request.input, 0)
            if request.input_ends:
                await source.finish()
        except (OSError, PeerloadError, asyncio.CancelledError):
            if refused is not None:
                refused()
            raise
        if not request.input_ends:
            source.feeder = connection
            source.ends_with_feeder = request.spec.terminal is None
            self._attach.watch_connection(connection)
        return name, refused


def _size(spec: TaskSpec, each: Each) -> int:
    return len(spec.environment) + sum(len(word) for argv in (spec.argv, *each) for word in argv)


def with_whole_ids(task_ids: TaskIds, spec: TaskSpec, terms: SubmitOptions) -> SubmitOptions:
    """Expand the ids of dependencies. Raises BadRequest for contradictory options and invalid ids."""
    if terms.retries and spec.guarantee is Guarantee.ONCE:
        raise BadRequest(
            "a task that may run once only cannot be tried again",
            why=f"it was submitted with retries: {terms.retries}",
            hint="without --once, or without --retries",
        )
    if not terms.awaits:
        return terms
    for ref in (*terms.after, *terms.after_ok):
        if "-" in (members := ref.rpartition("/")[2].partition(".")[2]) or "," in members:
            raise BadRequest(f"{ref}: a range cannot be waited for", why="one task, or a whole array, can")
    after, after_ok = (tuple(dict.fromkeys(map(task_ids.whole_id, refs))) for refs in (terms.after, terms.after_ok))
    return msgspec.structs.replace(terms, after=after, after_ok=after_ok)


def submission_digest(request: control.Submit) -> bytes:
    """Digest that distinguishes a repeated submission from a different one with the same token."""
    parts: tuple[object, ...] = (request.spec, request.array)
    if request.each or request.terms != NO_TERMS:
        parts = (*parts, request.each, request.terms)
    if request.spec.takes_input and request.input_ends:
        parts = (*parts, hashlib.sha256(request.input).digest())
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()


def members(request: control.Submit) -> tuple[int, ...]:
    """The members of the array, () for a single task. Raises BadRequest for an invalid submission."""
    _check_argv(request.spec.argv, "the command line")
    if b"\0" in request.spec.directory:
        raise BadRequest("the directory has a NUL byte in it")
    if request.spec.directory != SCRATCH and not request.spec.directory.startswith(b"/"):
        directory = request.spec.directory.decode("utf-8", "backslashreplace")
        raise BadRequest("the directory is not an absolute path", why=directory)
    _check_input(request)
    variables_of(request.spec.environment)
    if request.each and request.array:
        raise BadRequest("an array has ranges, or a command line for each member", why="both were given")
    if request.each:
        for number, argv in enumerate(request.each, start=1):
            _check_argv(argv, f"the command line of member {number}")
        return tuple(range(1, len(request.each) + 1))
    indices: set[int] = set()
    for first, last, step in request.array:
        if last < first:
            raise BadRequest(f"the array range {first}-{last} is empty")
        if len(indices) + (last - first) // step + 1 > ARRAY_MEMBERS_MAX:
            raise BadRequest("the array is too large", why=f"at most {ARRAY_MEMBERS_MAX} members are allowed")
        indices.update(range(first, last + 1, step))
    return tuple(sorted(indices))


def _check_argv(argv: tuple[bytes, ...], what: str) -> None:
    """Check a command line. Raises BadRequest if no process can be started with it."""
    size = sum(map(len, argv))
    if size > ARGV_BYTES_MAX:
        raise BadRequest(f"{what} has {size} bytes", why=f"at most {ARGV_BYTES_MAX} are allowed")
    if any(b"\0" in word for word in argv):
        raise BadRequest(f"{what} has a NUL byte in it")


def _check_input(request: control.Submit) -> None:
    if (request.input or not request.input_ends) and not request.spec.takes_input:
        raise BadRequest("there is input for a task that takes none", why="takes_input of its spec is false")
    if request.spec.takes_input and (request.array or request.each):
        raise BadRequest("an array cannot read standard input", why="there is one, and many tasks")


def _to_retry(
    name: str, records: list[TaskRecord], unfinished: Mapping[bytes, HomeTask], request: control.RetryRequest
) -> list[TaskRecord]:
    """The records to retry. Raises BadRequest if there are none."""
    over = [record for record in records if record.state.is_final or record.state is TaskState.UNKNOWN]
    if request.failed:
        chosen = [record for record in over if record.state in (TaskState.FAILED, TaskState.UNKNOWN)]
    elif len(records) == 1 and over:
        return over  # one named task is retried however it ended
    else:
        chosen = [record for record in over if request.all or record.state is not TaskState.DONE]
    if chosen:
        return chosen
    if not over:
        raise BadRequest(
            f"{name} has not ended", why=_why_not_ended(records, unfinished), hint=f"peerload cancel {name}  ends it"
        )
    raise BadRequest(
        f"nothing of {name} has failed",
        why=f"{len(over)} of {counted(len(records), 'task')} have ended, none "
        + ("as failed" if request.failed else "but with success"),
        hint=f"all of them again:  peerload retry --all {name}",
    )


def _why_not_ended(records: list[TaskRecord], unfinished: Mapping[bytes, HomeTask]) -> str:
    if len(records) > 1:
        return f"none of its {len(records)} members has"
    record = records[0]
    if record.state is not TaskState.LEASED:
        return f"it is {record.state}"
    task = unfinished.get(record.uid)
    runs = task is not None and task.running_at > 0
    return f"it runs on {record.node}" if runs else f"it was given to {record.node}, to start there"


# -- changes that the core reports --------------------------------------------------------------------------------------


class TaskFigures:
    """Counts starts and ends of the tasks of this home, and the age of the reports used by decisions."""

    def __init__(self, node: str, counters: Counter[str]) -> None:
        self._node = node
        self._counters = counters
        self._wait, self._response = Histogram(TASK_SECONDS), Histogram(TASK_SECONDS)
        self._age = Histogram(AGE_SECONDS)
        self._here, self._elsewhere = (labelled(metrics.TASKS_STARTED, place=place) for place in ("here", "elsewhere"))
        self.histograms = {
            metrics.TASK_WAIT: self._wait,
            metrics.TASK_RESPONSE: self._response,
            metrics.STATE_AGE: self._age,
        }

    def changed(self, action: TaskChanged) -> None:
        """Count a change: a new record of a task, or its start, in which case `started_at` is set in an unfinished record."""
        record = action.record
        if record.state.is_final:
            self._counters[ENDED[record.state]] += 1
            self._response.observe(max(record.ended_at - record.submitted_at, 0.0))
        elif action.running and record.started_at:
            self._counters[self._here if record.node == self._node else self._elsewhere] += 1
            self._wait.observe(max(record.started_at - record.submitted_at, 0.0))

    def cancelled(self, record: TaskRecord, number: int) -> None:
        """Count ``number`` tasks that were cancelled before they ran, all with records like this one."""
        self._counters[ENDED[record.state]] += number
        self._response.observe(max(record.ended_at - record.submitted_at, 0.0), number)

    def decided(self, decision: Decided) -> None:
        """Observe the ages of the load reports that a decision was based on."""
        for _, _, age_s in decision.inputs:
            self._age.observe(age_s)


class TaskObserver(Protocol):
    """Receiver of each change of a task of this home."""

    def changed(self, action: TaskChanged, /) -> None:
        """A task has a new record, or was seen running."""


@dataclass(eq=False, repr=False)
class TaskChanges:
    """Passes changes of tasks on to the parts of the agent that follow them: input, output files, figures, watches and followers of
    output. observers: other receivers of all changes."""

    _stdin: StdinForwarding
    _saving: OutputSaver
    _output: TaskOutputs
    _figures: TaskFigures
    _watches: TaskWatches
    _observers: Sequence[TaskObserver]

    def changed(self, action: TaskChanged) -> None:
        if action.record.input:
            self._stdin.changed(action)
        if action.running or self._saving.live:
            self._saving.changed(action)
        self._figures.changed(action)
        for observer in self._observers:
            observer.changed(action)
        record = action.record
        self._watches.changed(record, running=action.running)
        if record.state.is_final and record.exit is not None:
            key = execution_key(record.uid, record.attempt)
            self._output.ended(key, record.exit.stdout_bytes, record.exit.stderr_bytes)

    def members_cancelled(self, action: MembersCancelled) -> None:
        """Notify followers that untouched members of an array were cancelled. No other part of the agent has state
        about them."""
        if self._observers or self._watches:
            for change in action.changes():
                self.changed(change)
        else:
            self._figures.cancelled(action.row.record, len(action.row.members))


@dataclass(eq=False, repr=False)
class ClientEffects:
    """Effects on clients: answers, decisions, and changes of tasks."""

    core: CoreRequests
    attach: AttachRequests
    cancel_waits: CancelWaits
    tasks: TaskChanges
    _decisions: Decisions
    _figures: TaskFigures

    def decided(self, decision: Decided) -> None:
        self._decisions.add(decision, now().wall_s)
        self._figures.decided(decision)
