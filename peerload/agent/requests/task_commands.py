"""The verbs that change something: submit, retry, cancel, signal, hold, release, drain, undrain, leave and forget.

Each is put to the core as an event; its answer goes out when what it decided is on disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from typing import TYPE_CHECKING

import msgspec

from peerload.agent.accounts.environment import variables_of
from peerload.agent.completion import output_files
from peerload.agent.requests.group_commands import agreed
from peerload.agent.run_state import Ending
from peerload.agent.stdin.stdin_store import input_name
from peerload.model.errors import BadRequest, NoSuchTask, PeerloadError
from peerload.model.events import (
    CancelRequested,
    DrainRequested,
    EmptyAwaited,
    EmptyAwaitedNoMore,
    ForgetRequested,
    HoldRequested,
    ReleaseRequested,
    RemoteCancelRequested,
    SignalRequested,
    TaskSubmitted,
    UndrainRequested,
)
from peerload.model.messages import Need
from peerload.model.submit_options import NO_TERMS
from peerload.model.task import ARGV_BYTES_MAX, ARRAY_MEMBERS_MAX, SCRATCH, TaskState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from peerload.agent.control.connection import Connection
    from peerload.agent.control.pending_replies import PendingReplies
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.parts import Parts
    from peerload.agent.requests.attach import AttachRequests
    from peerload.agent.requests.cancel_wait import CancelWaits
    from peerload.agent.store.rows import Each
    from peerload.core.tasks.work import HomeTask
    from peerload.model.submit_options import SubmitOptions
    from peerload.model.task import TaskRecord, TaskSpec
    from peerload.wire import control


class TaskCommands:
    """``durable()`` returns when everything decided so far is on disk."""

    def __init__(
        self,
        parts: Parts,
        pending: PendingReplies,
        names: TaskIds,
        endings: CancelWaits,
        durable: Callable[[], Awaitable[None]],
        attending: AttachRequests,
    ) -> None:
        self._parts = parts
        self._attending = attending
        self._pending = pending
        self._names = names
        self._endings = endings
        self._durable = durable

    async def submit(self, connection: Connection, request: control.Submit) -> None:
        """Queue a command."""
        indices = members(request)
        spec, terms = self._parts.access.submitted(
            connection.caller, request.spec, agreed(self._names, request.spec, request.terms)
        )
        if output_files.patterns(terms):
            spec = msgspec.structs.replace(spec, followed=True)  # the files get all of its output
        self._parts.access.queues(connection.caller, len(indices) or 1)
        output_files.check_patterns(request.terms, len(indices))
        await self._parts.users.check_files(spec, terms)
        directory_here = await self._admitted(spec, terms, len(indices), request.each, len(request.input))
        digest = submission_digest(request)
        before = self._parts.store.submission_of(request.token)
        name, refused = await self._input(connection, request)
        number = self._pending.expect(connection, request.id, refused)
        client = self._attending.attends(connection) if request.attended else 0
        self._parts.inbox.put(
            TaskSubmitted(
                number,
                request.token,
                digest,
                spec,
                indices,
                directory_here=directory_here,
                before=before,
                held=request.held,
                waits_for_node=request.wait_for_node,
                client=client,
                input=name,
                terms=terms,
                each=request.each,
            )
        )

    async def _input(self, connection: Connection, request: control.Submit) -> tuple[str, Callable[[], None] | None]:
        """Keep what a task is to read, before there is the task → its name, and what undoes it. What is whole is on the disk
        then, as it would be needed after a crash; who sends more is there to notice one."""
        if not request.spec.takes_input:
            return "", None
        inputs, name = self._parts.inputs, input_name(request.token)
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
            self._attending.minds(connection)
        return name, refused

    async def retry(self, connection: Connection, request: control.Retry) -> None:
        """Queue what a task was to run as a new task; of an array those members that have not succeeded."""
        await self._durable()
        records = [record async for page in self._names.pages(request.task) for record in page]
        meant = self._names.meant(request.task)
        counter = meant.counter
        name = self._names.full(str(counter) if meant.is_range else request.task)
        spec, each = self._parts.store.spec(counter), self._parts.store.each(counter)
        terms = self._parts.store.terms(counter).again()
        if spec.takes_input:
            if any(record.input_came for record in records):
                hint = "submit it again, with its input"
                raise BadRequest(f"{name} cannot be repeated", why="its standard input is not kept", hint=hint)
            spec = msgspec.structs.replace(spec, takes_input=False, terminal=None, followed=False)
        chosen = _to_retry(name, records, self._parts.node.home.tasks, request)
        self._parts.access.queues(connection.caller, len(chosen))
        indices = tuple(int(record.task.rpartition(".")[2]) for record in chosen if "." in record.task)
        directory_here = await self._admitted(spec, terms, len(indices), each)
        asked = f"retry {name} {request.all}{' failed' if request.failed else ''}"
        digest = hashlib.sha256(asked.encode()).digest()
        before = self._parts.store.submission_of(request.token)
        number = self._pending.expect(connection, request.id)
        self._parts.inbox.put(
            TaskSubmitted(
                number,
                request.token,
                digest,
                spec,
                indices,
                directory_here=directory_here,
                before=before,
                retry_of=name,
                terms=terms,
                each=each,
            )
        )

    async def _admitted(
        self, spec: TaskSpec, terms: SubmitOptions, tasks: int, each: Each = (), input_bytes: int = 0
    ) -> bool:
        """Admission of a submission: true if its directory is here. Asks the other nodes about it, too. Raises DiskFull if there
        is no room for that many tasks."""
        size = input_bytes + len(spec.environment) + sum(len(word) for argv in (spec.argv, *each) for word in argv)
        self._parts.disk.admit(max(tasks, 1), size)
        users, node = self._parts.users, self._parts.node
        others = node.membership.could_run(Need(spec.request, spec.placement), node.state.node)
        await self._parts.asked_nodes.ask(others, spec.directory, spec.user)
        if users.seen_lately(users.submitter(spec, terms), spec.directory):
            return True
        return await users.admitted(spec, terms)

    async def cancel(self, connection: Connection, request: control.Cancel) -> None:
        """Stop tasks; wait until they have stopped, if that is asked."""
        await self._durable()
        names = tuple([record.task async for page in self._names.all_pages(request.tasks) for record in page])
        if not request.wait:
            number = self._pending.expect(connection, request.id)
            self._parts.inbox.put(CancelRequested(number, names, request.signal, request.force))
            return
        with self._endings.watched() as watch:
            number, answer = self._pending.promise()
            self._parts.inbox.put(CancelRequested(number, names, request.signal, request.force))
            connection.more(request.id, await answer)
            records = [record async for page in self._names.all_pages(request.tasks) for record in page]
            await self._endings.until_gone(connection, request, watch, records)

    def cancel_remote(self, connection: Connection, request: control.CancelRemote) -> None:
        """End tasks of other homes on this node. Raises NoSuchTask for the first that is not here."""
        here = {name for guest in self._parts.node.executor.guests.values() for name in (guest.task, guest.array)}
        for name in request.guests:
            if name not in here:
                raise NoSuchTask(f"no task {name} of another home is here", hint="what is here:  peerload ls --remote")
        by = f"ended on {self._parts.config.node} by {connection.caller.user or 'its user'}"
        number = self._pending.expect(connection, request.id)
        self._parts.inbox.put(RemoteCancelRequested(number, request.guests, request.signal, request.force, by))

    async def signal(self, connection: Connection, request: control.Signal) -> None:
        """Send a signal to a running task."""
        await self._durable()
        task = self._names.first(request.task).task
        number = self._pending.expect(connection, request.id)
        self._parts.inbox.put(SignalRequested(number, task, request.signal))

    async def hold(self, connection: Connection, request: control.Hold) -> None:
        """Keep waiting tasks back."""
        await self._durable()
        names = await self._names.all_known(request.tasks)
        self._parts.inbox.put(HoldRequested(self._pending.expect(connection, request.id), names))

    async def release(self, connection: Connection, request: control.Release) -> None:
        """Let held tasks go on."""
        await self._durable()
        names = await self._names.all_known(request.tasks)
        self._parts.inbox.put(ReleaseRequested(self._pending.expect(connection, request.id), names))

    async def drain(self, connection: Connection, request: control.Drain) -> None:
        """This node takes no more tasks; wait until it has none, if that is asked."""
        if not request.wait:
            self._parts.inbox.put(DrainRequested(self._pending.expect(connection, request.id), request.reason))
            return
        number, answer = self._pending.promise()
        self._parts.inbox.put(DrainRequested(number, request.reason))
        connection.more(request.id, await answer)
        number, answer = self._pending.promise()
        self._parts.inbox.put(EmptyAwaited(number))
        timed_out = False
        try:
            async with asyncio.timeout(request.timeout_s):
                await answer
        except TimeoutError:
            timed_out = True
        finally:  # the client may have gone, too
            if self._pending.withdraw(number):
                self._parts.inbox.put(EmptyAwaitedNoMore(number))
        connection.ok(request.id, {"timed_out": timed_out})

    def undrain(self, connection: Connection, request: control.Undrain) -> None:
        """It takes tasks again; where it was not drained, nothing has happened."""
        self._parts.inbox.put(UndrainRequested(self._pending.expect(connection, request.id)))

    def leave(self, connection: Connection, request: control.Leave) -> None:
        """This node leaves its cluster, and its agent stops. Raises BadRequest while tasks would suffer from it."""
        parts = self._parts
        here = parts.config.node
        suffering = self._suffering(here)
        if suffering and not request.force:
            raise BadRequest(
                f"{here} cannot leave now",
                why="; ".join(suffering),
                hint="peerload drain --wait  first, and for its own tasks  peerload wait  or  peerload cancel;"
                "  or  peerload leave --force",
            )
        parts.journal.happened("agent", "leaving")
        connection.ok(request.id, {"node": here, "pid": os.getpid(), "left_behind": suffering})
        parts.run.stop(Ending.LEAVE)

    def _suffering(self, here: str) -> list[str]:
        """What becomes of the tasks there are when this node leaves."""
        guests = len(self._parts.node.executor.guests)
        unfinished = self._parts.node.home.tasks.values()
        leased = [task for task in unfinished if task.record.state is TaskState.LEASED]
        away = sum(task.record.node != here for task in leased)
        running = len(leased) - away
        waiting = len(unfinished) - len(leased)
        counts = (
            (guests, "of other nodes here: they are frozen at the end of their leases, and run elsewhere"),
            (away, "of its own at other nodes: their results come when it is back"),
            (running, "of its own running here: they run on, and their results are kept"),
            (waiting, "of its own waiting: they are kept, and wait until an agent is started here again"),
        )
        return [f"{counted(number)} {words}" for number, words in counts if number]

    def forget(self, connection: Connection, request: control.Forget) -> None:
        """A node is gone for good."""
        self._parts.inbox.put(ForgetRequested(self._pending.expect(connection, request.id), request.node))


def submission_digest(request: control.Submit) -> bytes:
    """What tells a submission that is repeated from another one with the same token."""
    told: tuple[object, ...] = (request.spec, request.array)
    if request.each or request.terms != NO_TERMS:
        told = (*told, request.each, request.terms)
    if request.spec.takes_input and request.input_ends:
        told = (*told, hashlib.sha256(request.input).digest())
    return hashlib.sha256(msgspec.msgpack.encode(told)).digest()


def members(request: control.Submit) -> tuple[int, ...]:
    """The members of the array, () for a single task. Raises BadRequest for what no task may be."""
    _sound(request.spec.argv, "the command line")
    if b"\0" in request.spec.directory:
        raise BadRequest("the directory has a NUL byte in it")
    if request.spec.directory != SCRATCH and not request.spec.directory.startswith(b"/"):
        directory = request.spec.directory.decode("utf-8", "backslashreplace")
        raise BadRequest("the directory is no absolute path", why=directory)
    _sound_input(request)
    variables_of(request.spec.environment)
    if request.each and request.array:
        raise BadRequest("an array has ranges, or a command line for each member", why="both were given")
    if request.each:
        for number, argv in enumerate(request.each, start=1):
            _sound(argv, f"the command line of member {number}")
        return tuple(range(1, len(request.each) + 1))
    indices: set[int] = set()
    for first, last, step in request.array:
        if last < first:
            raise BadRequest(f"the array range {first}-{last} is empty")
        if len(indices) + (last - first) // step + 1 > ARRAY_MEMBERS_MAX:
            raise BadRequest("the array is too large", why=f"at most {ARRAY_MEMBERS_MAX} members are allowed")
        indices.update(range(first, last + 1, step))
    return tuple(sorted(indices))


def _sound(argv: tuple[bytes, ...], what: str) -> None:
    """Raises BadRequest for what no process can be given."""
    size = sum(map(len, argv))
    if size > ARGV_BYTES_MAX:
        raise BadRequest(f"{what} has {size} bytes", why=f"at most {ARGV_BYTES_MAX} are allowed")
    if any(b"\0" in word for word in argv):
        raise BadRequest(f"{what} has a NUL byte in it")


def _sound_input(request: control.Submit) -> None:
    """Raises BadRequest for input that nobody could read."""
    if (request.input or not request.input_ends) and not request.spec.takes_input:
        raise BadRequest("there is input for a task that takes none", why="takes_input of its spec is false")
    if request.spec.takes_input and (request.array or request.each):
        raise BadRequest("an array cannot read standard input", why="there is one, and many tasks")


def _to_retry(
    name: str, records: list[TaskRecord], unfinished: Mapping[bytes, HomeTask], request: control.Retry
) -> list[TaskRecord]:
    """Which of these are tried again. Raises BadRequest if none is."""
    over = [record for record in records if record.state.is_final or record.state is TaskState.UNKNOWN]
    if request.failed:
        chosen = [record for record in over if record.state in (TaskState.FAILED, TaskState.UNKNOWN)]
    elif len(records) == 1 and over:
        return over  # whoever names one task means it, however it ended
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
        why=f"{len(over)} of {counted(len(records))} have ended, none "
        + ("as failed" if request.failed else "but with success"),
        hint=f"all of them again:  peerload retry --all {name}",
    )


def _why_not_ended(records: list[TaskRecord], unfinished: Mapping[bytes, HomeTask]) -> str:
    """Where these are, none of which has ended, in words."""
    if len(records) > 1:
        return f"none of its {len(records)} members has"
    record = records[0]
    if record.state is not TaskState.LEASED:
        return f"it is {record.state}"
    task = unfinished.get(record.uid)
    runs = task is not None and task.running_at > 0
    return f"it runs on {record.node}" if runs else f"it was given to {record.node}, to start there"


def counted(tasks: int) -> str:
    """``1 task``, ``2 tasks``."""
    return f"{tasks} task{'' if tasks == 1 else 's'}"
