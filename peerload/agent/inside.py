"""`peerload exec`: commands inside running tasks of this node, with the task's working directory, environment and cgroup.

The launcher starts such a command in a cgroup below the task's, so that it is limited, frozen and ended with the task. It is
no task itself: it takes no slot, nothing of it is recorded, and it ends with the client that asked for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING

import msgspec

from peerload.agent.live_usage import running_here
from peerload.agent.naming import Names
from peerload.model.actions import SpawnTask
from peerload.model.errors import BadRequest, PeerloadError, SlowDown
from peerload.model.events import LauncherReady, TaskEnded, TaskLost
from peerload.model.task import Exit, TaskSpec

if TYPE_CHECKING:
    from peerload.agent.connection import Connection
    from peerload.agent.parts import Parts
    from peerload.model.events import Event
    from peerload.wire import control

PREFIX = "exec-"
COMMANDS_MAX = 16
"""Commands inside of tasks at a time, on this node."""
SIGKILL = 9


class InsideCommands:
    """The commands under way, by the keys that the launcher knows them by; one per agent."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._ends: dict[str, asyncio.Future[Exit]] = {}

    # -- the launcher --------------------------------------------------------------------------------------------------

    def heard(self, event: Event) -> bool:
        """Take an event about one of these commands. False if it is about something else."""
        key = getattr(event, "key", "")
        if not isinstance(key, str) or not key.startswith(PREFIX):
            return False
        end = self._ends.get(key)
        if isinstance(event, TaskEnded | TaskLost) and end is None:
            self._drop(key)
        elif isinstance(event, TaskEnded) and end is not None and not end.done():
            end.set_result(event.exit)
            self._parts.output.ended(key, event.exit.stdout_bytes, event.exit.stderr_bytes)
        elif isinstance(event, TaskLost) and end is not None and not end.done():
            end.set_exception(PeerloadError("the command was lost", why=event.reason))
            self._parts.output.ended(key, *self._parts.spool.sizes(key))
        return True

    def listed(self, ready: LauncherReady) -> LauncherReady:
        """The list of a launcher without these commands. Commands of an earlier agent are ended, since their clients are gone."""
        running = {key for key, *_ in ready.running if key.startswith(PREFIX)}
        mine = running | {key for key, _ in ready.ended if key.startswith(PREFIX)}
        if not mine:
            return ready
        for key in mine - self._ends.keys():
            self._parts.launcher.signal(key, SIGKILL)
            self._drop(key)
        return msgspec.structs.replace(
            ready,
            running=tuple(task for task in ready.running if task[0] not in mine),
            ended=tuple(task for task in ready.ended if task[0] not in mine),
            frozen=tuple(key for key in ready.frozen if key not in mine),
        )

    def _drop(self, key: str) -> None:
        self._parts.launcher.forget(key)
        self._parts.spool.drop(key)

    # -- one command ---------------------------------------------------------------------------------------------------

    async def run(self, connection: Connection, request: control.Exec) -> None:
        """Run a command inside a task; its client gets the output as it comes, then the exit."""
        key, action, owner = self._order(request)
        end: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._ends[action.key] = end
        try:
            await connection.tell(request.id, {"stream": 1, "offset": 0, "data": b""})
            stdout, stderr = self._parts.spool.paths(action.key)
            self._parts.launcher.spawn(action, stdout, stderr, {}, owner=owner, inside=key)
            async with contextlib.aclosing(self._parts.output.follow(action.key)) as pieces:
                async for stream, offset, data in pieces:
                    await connection.tell(request.id, {"stream": stream, "offset": offset, "data": data})
            exit_ = await end
        finally:
            del self._ends[action.key]
            if end.done():
                end.exception()  # it may have come when nobody waited any more
                self._drop(action.key)
            else:
                self._parts.launcher.signal(action.key, SIGKILL)  # its end drops it
        told = {"exit_code": exit_.exit_code, "signal": exit_.signal, "reason": exit_.reason}
        connection.ok(request.id, told)

    def _order(self, request: control.Exec) -> tuple[str, SpawnTask, int]:
        """The key of the attempt that it goes inside of, what the launcher is to start, and the uid of the task's user here.
        Raises BadRequest, SlowDown."""
        parts, here = self._parts, self._parts.config.node
        key, task = running_here(parts, Names(parts), request.task)
        if not key:
            raise BadRequest(f"{task} does not run on {here}", hint=f"where it is:  peerload show {task}")
        if not parts.launcher.goes_inside:
            hint = "peerload down --all ; peerload up"
            raise BadRequest("the launcher here is of an earlier version, which knows no commands inside", hint=hint)
        if len(self._ends) >= COMMANDS_MAX:
            raise SlowDown("too many commands inside of tasks here", why=f"{COMMANDS_MAX} are under way")
        guest = parts.node.executor.guests.get(key)
        own = parts.node.home.by_id[task] if guest is None else None
        spec, home = (guest.spec, guest.home) if guest is not None else (parts.node.home.by_id[task].spec, here)
        command = TaskSpec(request.argv, b"/", umask=spec.umask, followed=True, user=spec.user)
        action = SpawnTask(PREFIX + secrets.token_hex(8), task, 1, home, command)
        return key, action, -1 if own is None else own.terms.owner
