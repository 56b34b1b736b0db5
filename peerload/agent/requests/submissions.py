"""The verbs that queue tasks: submit and retry."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from peerload.agent.accounts import output_files
from peerload.agent.launcher.task_environment import variables_of
from peerload.agent.stdin import input_name
from peerload.model.errors import BadRequest, PeerloadError
from peerload.model.events import TaskSubmitted
from peerload.model.messages import Need
from peerload.model.submit_options import NO_TERMS
from peerload.model.task import ARGV_BYTES_MAX, ARRAY_MEMBERS_MAX, SCRATCH, Guarantee, TaskState
from peerload.wire import control

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from peerload.agent.control.authorization import Authorization, Principal
    from peerload.agent.control.connection import Connection
    from peerload.agent.control.core_requests import CoreRequests
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.files.attempts import AttemptFiles
    from peerload.agent.files.environments import Environments
    from peerload.agent.requests.attach import AttachRequests
    from peerload.agent.requests.durable_reads import DurableReads
    from peerload.agent.stdin import StdinStore
    from peerload.agent.store.rows import Each
    from peerload.core.node import Node
    from peerload.core.work import HomeTask
    from peerload.model.submit_options import SubmitOptions
    from peerload.model.task import TaskRecord, TaskSpec


class SubmissionRequest(NamedTuple):
    """A request for tasks, read and completed. ``tasks``: their number; ``retry_of``: the tasks that are queued again."""

    spec: TaskSpec
    terms: SubmitOptions
    indices: tuple[int, ...]
    each: Each
    digest: bytes
    size_bytes: int
    retry_of: str = ""

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return len(self.indices) or 1

    @property
    def writes_files(self) -> bool:
        """True if its output files are new: those of a retry were checked before."""
        return not self.retry_of


@dataclass(eq=False, repr=False)
class FileRequests:
    """Takes files of clients that are about to submit a task, and shows what is kept."""

    _files: AttemptFiles
    _environments: Environments

    async def files(self, connection: Connection, request: control.Files) -> None:
        """Keep, look for or remove blocks."""
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
    """Puts submissions to the core, whose answer is sent once its decision is durable."""

    _core: CoreRequests
    _access: Authorization
    _reads: DurableReads
    _task_ids: TaskIds
    _stdin: StdinStore
    _attach: AttachRequests
    _node: Node

    def candidates(self, spec: TaskSpec) -> Sequence[str]:
        """The other nodes that could run a task, as far as is known."""
        return self._node.membership.could_run(Need(spec.request, spec.placement), self._node.state.node)

    def may_freeze(self, request: control.Submit | control.RetryRequest) -> bool:
        """True if the client of a new submission can send its directory instead."""
        is_new = isinstance(request, control.Submit) and request.freezes
        return is_new and self._reads.store.submission_of(request.token) is None

    async def read(self, caller: Principal, request: control.Submit | control.RetryRequest) -> SubmissionRequest:
        """Read a submission, or the earlier one of tasks that are to be retried. Raises BadRequest, NoSuchTask."""
        if isinstance(request, control.RetryRequest):
            return await self._read_retry(request)
        indices = members(request)
        terms = with_whole_ids(self._task_ids, request.spec, request.terms)
        if terms.start_by and not self._node.state.prices:
            why = f"no price of energy is known on {self._node.state.node}"
            hint = "set one:  [energy] price_file in the config file"
            raise BadRequest("the start cannot wait for cheaper energy", why=why, hint=hint)
        spec, terms = self._access.with_owner(caller, request.spec, terms)
        if output_files.patterns(terms):
            spec = msgspec.structs.replace(spec, followed=True)  # the output files get all of it
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
        asked = f"retry {name} {request.all}{' failed' if request.failed else ''}"
        digest = hashlib.sha256(asked.encode()).digest()
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
        """Put a submission that has passed all checks to the core."""
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
        """Store the input before the task exists → its name, and the undo function. A complete input is synced, since it is
        needed after a crash; a client that sends more would notice one."""
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
    """Bytes of a submission's command lines and environment."""
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
    """Digest that tells a repeated submission from another one with the same token."""
    told: tuple[object, ...] = (request.spec, request.array)
    if request.each or request.terms != NO_TERMS:
        told = (*told, request.each, request.terms)
    if request.spec.takes_input and request.input_ends:
        told = (*told, hashlib.sha256(request.input).digest())
    return hashlib.sha256(msgspec.msgpack.encode(told)).digest()


def members(request: control.Submit) -> tuple[int, ...]:
    """The members of the array, () for a single task. Raises BadRequest for an invalid submission."""
    _check_argv(request.spec.argv, "the command line")
    if b"\0" in request.spec.directory:
        raise BadRequest("the directory has a NUL byte in it")
    if request.spec.directory != SCRATCH and not request.spec.directory.startswith(b"/"):
        directory = request.spec.directory.decode("utf-8", "backslashreplace")
        raise BadRequest("the directory is no absolute path", why=directory)
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
    """Raises BadRequest for a command line that no process can get."""
    size = sum(map(len, argv))
    if size > ARGV_BYTES_MAX:
        raise BadRequest(f"{what} has {size} bytes", why=f"at most {ARGV_BYTES_MAX} are allowed")
    if any(b"\0" in word for word in argv):
        raise BadRequest(f"{what} has a NUL byte in it")


def _check_input(request: control.Submit) -> None:
    """Raises BadRequest for input that no task reads."""
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
        why=f"{len(over)} of {counted(len(records))} have ended, none "
        + ("as failed" if request.failed else "but with success"),
        hint=f"all of them again:  peerload retry --all {name}",
    )


def _why_not_ended(records: list[TaskRecord], unfinished: Mapping[bytes, HomeTask]) -> str:
    """The state of unfinished tasks, in words."""
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
