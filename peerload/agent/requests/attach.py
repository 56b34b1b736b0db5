"""The verbs of a client that is attached to a running task: input, resize, attend and detach; its disconnect; and `exec`.

Input is acknowledged when there is room for more (backpressure). A client that disconnects without `detach` counts as killed: the
core cancels the tasks that it attends, and ends its input to other tasks, as a pipe would.

`peerload exec` runs commands inside tasks of this node, with the task's working directory, environment and cgroup. The launcher
starts such a command in a cgroup below the task's, so that it is limited, frozen and killed with the task. It is not a task itself:
it takes no slot, is not recorded, and ends with its client.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from peerload.agent.requests.task_queries import running_here
from peerload.model.actions import SpawnTask
from peerload.model.errors import BadRequest, PeerloadError, SlowDown
from peerload.model.events import AttendRequested, ClientGone, DetachRequested, TaskEnded, TaskLost
from peerload.model.task import Exit, TaskSpec, variables_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from peerload.agent.control.connection import Connection
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.output.output import TaskOutputs
    from peerload.agent.output.spool import Spool
    from peerload.agent.runtime import CoreRequests
    from peerload.agent.stdin import StdinForwarding, StdinStore, StoredStdin
    from peerload.agent.store.disk_space import DiskSpace
    from peerload.core.node import Node
    from peerload.model.events import Event
    from peerload.model.task import TaskRecord
    from peerload.wire import control


FEEDER_GRACE_S = 30.0
"""Time for the client of an input to reconnect after a restart of this agent; then the input ends."""
PREFIX = "exec-"
COMMANDS_MAX = 16
"""Maximum number of commands inside tasks of this node."""
SIGKILL = 9


@dataclass(eq=False, repr=False)
class AttachRequests:
    """Clients of one agent that are attached to tasks."""

    _core: CoreRequests
    _task_ids: TaskIds
    _stdin: StdinStore
    _forwarding: StdinForwarding
    _disk: DiskSpace
    _node: Node
    _client_numbers: dict[Connection, int] = field(default_factory=dict, init=False)
    _last_number: int = field(default=0, init=False)
    _watched: set[Connection] = field(default_factory=set, init=False)

    # -- verbs ---------------------------------------------------------------------------------------------------------

    async def input(self, connection: Connection, request: control.Input) -> None:
        """Accept a part of a task's standard input; answer when there is room for more."""
        record = self._record(request.task)
        source = self._source(record)
        if source is None:
            connection.ok(request.id, {"offset": 0, "wanted": False, "ended": True})
            return
        self._disk.admit_input(len(request.data))
        self._take_over(connection, record, source, request)
        source.uid = record.uid
        source.add(request.data, request.offset)
        self._forwarding.note_input(record, source)
        if request.ends:
            await source.finish()
        self._forwarding.sent(record.uid)
        connection.ok(request.id, await source.room())

    def _take_over(
        self, connection: Connection, record: TaskRecord, source: StoredStdin, request: control.Input
    ) -> None:
        """Make this client the feeder of the task. Raises BadRequest if it has another one; a terminal may have several."""
        is_shared = self._is_terminal(record)
        if not is_shared and source.feeder not in (None, connection):
            raise BadRequest(f"another client sends the input of {record.task}", why="only one can")
        if (request.data or request.ends or request.offset is not None) and source.feeder is not connection:
            source.feeder = connection
            source.ends_with_feeder = request.is_source and not is_shared
            self.watch_connection(connection)

    def _is_terminal(self, record: TaskRecord) -> bool:
        task = self._node.home.tasks.get(record.uid)
        return task is not None and task.spec.terminal is not None

    def _record(self, ref: str) -> TaskRecord:
        """Newest record of a task; read from the store only if the task has ended."""
        task = self._node.home.by_id.get(self._task_ids.whole_id(ref))
        return task.record if task is not None else self._task_ids.single(ref)

    def _source(self, record: TaskRecord) -> StoredStdin | None:
        """The input of a task; None if the task has ended. Raises BadRequest if it has none."""
        if not record.input:
            raise BadRequest(f"{record.task} does not read its standard input", why="it was submitted without one")
        return None if record.state.is_final else self._stdin.get(record.input)

    def resize(self, connection: Connection, request: control.Resize) -> None:
        record = self._record(request.task)
        if not self._is_terminal(record):
            raise BadRequest(f"{record.task} has no terminal", why="it was not run with --pty, or has ended")
        source = self._source(record)
        if source is not None:
            source.resize(request.rows, request.columns)
            self._forwarding.resized(record.uid)
        connection.ok(request.id, {})

    def attend(self, connection: Connection, request: control.Attend) -> None:
        name = self._task_ids.whole_id(request.task)
        client = self.client_number(connection)
        number = self._core.expect(connection, request.id)
        self._core.put(AttendRequested(number, client, name))

    def client_number(self, connection: Connection) -> int:
        """The number of this connection in the core. From now on the core is notified of its disconnect."""
        if connection not in self._client_numbers:
            self._last_number += 1
            self._client_numbers[connection] = self._last_number
            self.watch_connection(connection)
        return self._client_numbers[connection]

    def watch_connection(self, connection: Connection) -> None:
        if connection not in self._watched:
            self._watched.add(connection)
            connection.on_disconnect.append(lambda: self._client_gone(connection))

    async def detach(self, connection: Connection, request: control.Detach) -> None:
        """Detach the client of a task; the task runs on."""
        record = self._record(request.task)
        if record.input and not record.state.is_final:
            source = self._stdin.get(record.input)
            if source.feeder is connection:
                await source.leave()
        self._core.put(DetachRequested(self._core.expect(connection, request.id), record.task))

    # -- disconnects ---------------------------------------------------------------------------------------------------------

    def _client_gone(self, connection: Connection) -> None:
        self._watched.discard(connection)
        client = self._client_numbers.pop(connection, 0)
        for source in self._stdin.left_by(connection):
            source.feeder = None
            if not client and source.ends_with_feeder:
                source.end()
                self._forwarding.sent(source.uid)
        if client:
            self._core.put(ClientGone(client))

    def restored(self) -> None:
        """Give clients time to reconnect after a restart of the agent: if a client fed a task that does not depend on clients, it
        has FEEDER_GRACE_S before the input ends. The input of a client that has detached stays open."""
        for task in list(self._node.home.tasks.values()):
            if not task.record.input:
                continue
            source = self._stdin.get(task.record.input)
            self._forwarding.note_input(task.record, source)
            if task.record.attended:
                continue
            if not (source.has_ended or source.was_left):
                loop = asyncio.get_running_loop()
                loop.call_later(FEEDER_GRACE_S, self._end_abandoned, task.uid)

    def _end_abandoned(self, uid: bytes) -> None:
        task = self._node.home.tasks.get(uid)
        if task is not None and task.record.input:
            source = self._stdin.get(task.record.input)
            if source.feeder is None and not source.was_left:
                source.end()
                self._forwarding.sent(uid)


# -- commands inside tasks ---------------------------------------------------------------------------------------------


class Command(NamedTuple):
    """A command in a task: the client that requested it, its exit, and its standard input."""

    connection: Connection
    end: asyncio.Future[Exit]
    input: StoredStdin | None


class InsideCommands:
    """The running commands of one agent, by their keys in the launcher."""

    PREFIX = PREFIX

    def __init__(self, launcher: LauncherLink, spool: Spool) -> None:
        self._launcher = launcher
        self._spool = spool
        self._commands: dict[str, Command] = {}

    def event_received(self, event: Event) -> None:
        key = getattr(event, "key", "")
        command = self._commands.get(key)
        if isinstance(event, TaskEnded | TaskLost) and command is None:
            self._drop(key)
        elif isinstance(event, TaskEnded) and command is not None and not command.end.done():
            command.end.set_result(event.exit)
        elif isinstance(event, TaskLost) and command is not None and not command.end.done():
            command.end.set_exception(PeerloadError("the command was lost", why=event.reason))

    def listed(self, running: AbstractSet[str], ended: Mapping[str, Exit]) -> None:
        """Kill the commands of an earlier agent, since their clients have disconnected; report the exits of commands that ended
        meanwhile to their clients."""
        for key in self._commands.keys() - running:
            known = ended.get(key)
            lost = TaskLost(key, "the launcher knows nothing of it any more")
            self.event_received(lost if known is None else TaskEnded(key, known))
        for key in (running | ended.keys()) - self._commands.keys():
            self._launcher.signal(key, SIGKILL)
            self._drop(key)

    def check_room(self) -> None:
        """Raises SlowDown if there are too many commands."""
        if len(self._commands) >= COMMANDS_MAX:
            raise SlowDown("too many commands inside of tasks here", why=f"{COMMANDS_MAX} are running")

    def add(self, key: str, command: Command) -> None:
        self._commands[key] = command

    def start(self, action: SpawnTask, inside: str, owner: int) -> None:
        """Have the launcher start a registered command inside an attempt, as the user with this uid."""
        stdout, stderr = self._spool.paths(action.key)
        source = self._commands[action.key].input
        path = "" if source is None else str(source.path)
        self._launcher.spawn(action, stdout, stderr, {}, path, owner=owner, inside=inside)

    def finish(self, key: str) -> None:
        """Drop a command when its client is done. A running command is killed, and dropped when it has ended."""
        end = self._commands.pop(key).end
        is_over = end.done() and not end.cancelled()
        if not is_over or end.exception() is not None:
            self._launcher.signal(key, SIGKILL)
        if is_over:
            self._drop(key)

    def get(self, connection: Connection, key: str) -> Command:
        """A command of this client. Raises BadRequest if there is none."""
        command = self._commands.get(key)
        if command is None or command.connection is not connection:
            raise BadRequest("no such command", why="it has ended, or is another client's")
        return command

    def resize(self, connection: Connection, request: control.Resize) -> None:
        self.get(connection, request.command)
        self._launcher.resize(request.command, request.rows, request.columns)
        connection.ok(request.id, {})

    def signal(self, connection: Connection, request: control.SendSignal) -> None:
        self.get(connection, request.command)
        self._launcher.signal(request.command, request.signal)
        connection.ok(request.id, {})

    def written(self, key: str, end: asyncio.Future[Exit]) -> tuple[int, int]:
        """Sizes of the output of a command that has ended or was lost."""
        if end.cancelled() or end.exception() is not None:
            return self._spool.sizes(key)
        return end.result().stdout_bytes, end.result().stderr_bytes

    def _drop(self, key: str) -> None:
        self._launcher.forget(key)
        self._spool.drop(key)


@dataclass(eq=False, repr=False)
class ExecRequests:
    """The verb `exec`, and the input of its commands."""

    commands: InsideCommands
    _node: Node
    _task_ids: TaskIds
    _output: TaskOutputs
    _stdin: StdinStore
    _forwarding: StdinForwarding
    _disk: DiskSpace

    async def run(self, connection: Connection, request: control.Exec) -> None:
        """Run a command inside a task, and stream its output to the client, then its exit."""
        inside, action, owner = self._order(request)
        self.commands.check_room()  # before anything is kept for it
        key = action.key
        source = self._stdin.get(key) if request.takes_input else None
        end: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        end.add_done_callback(lambda end: self._output.ended(key, *self.commands.written(key, end)))
        self.commands.add(key, Command(connection, end, source))
        try:
            await connection.stream(request.id, {"stream": 1, "offset": 0, "data": b"", "command": key})
            self.commands.start(action, inside, owner)
            if source is not None:
                source.is_cut = True  # it is read only once
                self._forwarding.begin_command(key, source)
            async with contextlib.aclosing(self._output.follow(key)) as pieces:
                async for stream, offset, data in pieces:
                    await connection.stream(request.id, {"stream": stream, "offset": offset, "data": data})
            exit_ = await end
        finally:
            self._forwarding.end_command(key)
            self._stdin.drop(key)
            self.commands.finish(key)
        outcome = {"exit_code": exit_.exit_code, "signal": exit_.signal, "reason": exit_.reason}
        connection.ok(request.id, outcome)

    def _order(self, request: control.Exec) -> tuple[str, SpawnTask, int]:
        """The key of the attempt, the command for the launcher, and the uid of the task's user here. Raises BadRequest."""
        node, here = self._node, self._node.state.node
        key, task = running_here(node, self._task_ids, request.task)
        if not key:
            raise BadRequest(f"{task} does not run on {here}", hint=f"where it is:  peerload show {task}")
        remote = node.executor.remote_tasks.get(key)
        own = node.home.by_id[task] if remote is None else None
        spec, home = (remote.spec, remote.home) if remote is not None else (node.home.by_id[task].spec, here)
        command = TaskSpec(
            request.argv,
            b"/",
            umask=spec.umask,
            followed=True,
            user=spec.user,
            environment=request.environment,
            named=tuple(variables_of(request.environment)),
            terminal=request.terminal,
            takes_input=request.takes_input,
        )
        action = SpawnTask(PREFIX + secrets.token_hex(8), task, 1, home, command)
        return key, action, -1 if own is None else own.terms.owner

    async def input(self, connection: Connection, request: control.Input) -> None:
        """Accept a part of a command's standard input; answer when there is room for more."""
        source = self.commands.get(connection, request.command).input
        if source is None:
            raise BadRequest("this command does not read its standard input", why="it was started without one")
        self._disk.admit_input(len(request.data))
        source.add(request.data, request.offset)
        if request.ends:
            source.end()
        self._forwarding.grown(request.command, source)
        connection.ok(request.id, await source.room())
