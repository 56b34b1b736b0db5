"""`peerload exec`: commands inside running tasks of this node, with the task's working directory, environment and cgroup.

The launcher starts such a command in a cgroup below the task's, so that it is limited, frozen and killed with the task.
It is no task itself: it takes no slot, it is not recorded, and it ends with its client.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from peerload.agent.launcher.task_environment import variables_of
from peerload.agent.requests.live_usage import running_here
from peerload.model.actions import SpawnTask
from peerload.model.errors import BadRequest, PeerloadError, SlowDown
from peerload.model.events import LauncherReady, TaskEnded, TaskLost
from peerload.model.task import Exit, TaskSpec

if TYPE_CHECKING:
    from peerload.agent.control.connection import Connection
    from peerload.agent.control.task_ids import TaskIds
    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.output.output import TaskOutputs
    from peerload.agent.output.spool import Spool
    from peerload.agent.stdin import StdinForwarding, StdinStore, StoredStdin
    from peerload.agent.store.disk_space import DiskSpace
    from peerload.core.node import Node
    from peerload.model.events import Event
    from peerload.wire import control

PREFIX = "exec-"
COMMANDS_MAX = 16
"""Commands inside tasks of this node at a time."""
SIGKILL = 9


class Command(NamedTuple):
    """One command: the client that asked for it, how it ended, and its standard input."""

    connection: Connection
    end: asyncio.Future[Exit]
    input: StoredStdin | None


class InsideCommands:
    """The running commands of one agent, by the keys that the launcher knows them by."""

    def __init__(self, launcher: LauncherLink, spool: Spool) -> None:
        self._launcher = launcher
        self._spool = spool
        self._commands: dict[str, Command] = {}

    def heard(self, event: Event) -> bool:
        """Take an event of the launcher → False if it is not about one of these commands."""
        key = getattr(event, "key", "")
        if not isinstance(key, str) or not key.startswith(PREFIX):
            return False
        command = self._commands.get(key)
        if isinstance(event, TaskEnded | TaskLost) and command is None:
            self._drop(key)
        elif isinstance(event, TaskEnded) and command is not None and not command.end.done():
            command.end.set_result(event.exit)
        elif isinstance(event, TaskLost) and command is not None and not command.end.done():
            command.end.set_exception(PeerloadError("the command was lost", why=event.reason))
        return True

    def listed(self, ready: LauncherReady) -> LauncherReady:
        """The list of a launcher without these commands. Commands of an earlier agent are killed, since their clients have
        gone; clients get the exits of commands that ended meanwhile."""
        running = {key for key, *_ in ready.running if key.startswith(PREFIX)}
        ended = {key: exit_ for key, exit_ in ready.ended if key.startswith(PREFIX)}
        for key in self._commands.keys() - running:
            known = ended.get(key)
            lost = TaskLost(key, "the launcher knows nothing of it any more")
            self.heard(lost if known is None else TaskEnded(key, known))
        mine = running | ended.keys()
        for key in mine - self._commands.keys():
            self._launcher.signal(key, SIGKILL)
            self._drop(key)
        return ready.without(mine)

    def check_room(self) -> None:
        """Raises SlowDown if there are too many commands."""
        if len(self._commands) >= COMMANDS_MAX:
            raise SlowDown("too many commands inside of tasks here", why=f"{COMMANDS_MAX} are under way")

    def add(self, key: str, command: Command) -> None:
        """Register a command."""
        self._commands[key] = command

    def start(self, action: SpawnTask, inside: str, owner: int) -> None:
        """Have the launcher start a registered command inside an attempt, as the user with this uid."""
        stdout, stderr = self._spool.paths(action.key)
        source = self._commands[action.key].input
        path = "" if source is None else str(source.path)
        self._launcher.spawn(action, stdout, stderr, {}, path, owner=owner, inside=inside)

    def finish(self, key: str) -> None:
        """Drop a command when its client is done. If it still runs, it is killed, and dropped with its exit."""
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
        """Set the size of the window of a command's terminal."""
        self.get(connection, request.command)
        self._launcher.resize(request.command, request.rows, request.columns)
        connection.ok(request.id, {})

    def signal(self, connection: Connection, request: control.SendSignal) -> None:
        """Send a signal to the processes of a command."""
        self.get(connection, request.command)
        self._launcher.signal(request.command, request.signal)
        connection.ok(request.id, {})

    def written(self, key: str, end: asyncio.Future[Exit]) -> tuple[int, int]:
        """Sizes of the output of a command that has ended, or was lost."""
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
        told = {"exit_code": exit_.exit_code, "signal": exit_.signal, "reason": exit_.reason}
        connection.ok(request.id, told)

    def _order(self, request: control.Exec) -> tuple[str, SpawnTask, int]:
        """The key of the attempt, the command for the launcher, and the uid of the task's user here. Raises BadRequest."""
        node, here = self._node, self._node.state.node
        key, task = running_here(node, self._task_ids, request.task)
        if not key:
            raise BadRequest(f"{task} does not run on {here}", hint=f"where it is:  peerload show {task}")
        guest = node.executor.guests.get(key)
        own = node.home.by_id[task] if guest is None else None
        spec, home = (guest.spec, guest.home) if guest is not None else (node.home.by_id[task].spec, here)
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
        """Take more of a command's standard input; answer when there is room for more."""
        source = self.commands.get(connection, request.command).input
        if source is None:
            raise BadRequest("this command does not read its standard input", why="it was started without one")
        self._disk.admit_input(len(request.data))
        source.add(request.data, request.offset)
        if request.ends:
            source.end()
        self._forwarding.grown(request.command, source)
        connection.ok(request.id, await source.room())
