"""The verbs that change this node: drain, undrain, leave, forget, stop and restart."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from peerload.agent.requests.submissions import counted
from peerload.agent.run_state import Ending
from peerload.model.errors import BadRequest
from peerload.model.events import DrainRequested, EmptyAwaited, EmptyAwaitedNoMore, ForgetRequested, UndrainRequested
from peerload.model.task import TaskState

if TYPE_CHECKING:
    from peerload.agent.control.connection import Connection
    from peerload.agent.control.core_requests import CoreRequests
    from peerload.agent.run_state import RunState
    from peerload.agent.store.event_log import EventLog
    from peerload.core.node import Node
    from peerload.wire import control


class NodeCommands:
    """Puts changes of the node to the core, or ends the agent."""

    def __init__(self, core: CoreRequests, node: Node, run: RunState, event_log: EventLog) -> None:
        self._core = core
        self._node = node
        self._run = run
        self._event_log = event_log

    async def drain(self, connection: Connection, request: control.Drain) -> None:
        """Let this node take no more tasks; with ``wait`` answer when it has none."""
        if not request.wait:
            self._core.put(DrainRequested(self._core.expect(connection, request.id), request.reason))
            return
        number, answer = self._core.expect_future()
        self._core.put(DrainRequested(number, request.reason))
        connection.more(request.id, await answer)
        number, answer = self._core.expect_future()
        self._core.put(EmptyAwaited(number))
        timed_out = False
        try:
            async with asyncio.timeout(request.timeout_s):
                await answer
        except TimeoutError:
            timed_out = True
        finally:  # also when the client has disconnected
            if self._core.withdraw(number):
                self._core.put(EmptyAwaitedNoMore(number))
        connection.ok(request.id, {"timed_out": timed_out})

    def undrain(self, connection: Connection, request: control.Undrain) -> None:
        """Let this node take tasks again."""
        self._core.put(UndrainRequested(self._core.expect(connection, request.id)))

    def leave(self, connection: Connection, request: control.Leave) -> None:
        """Leave the cluster, and stop the agent. Raises BadRequest while it has tasks."""
        here = self._node.state.node
        suffering = self._suffering(here)
        if suffering and not request.force:
            raise BadRequest(
                f"{here} cannot leave now",
                why="; ".join(suffering),
                hint="peerload drain --wait  first, and for its own tasks  peerload wait  or  peerload cancel;"
                "  or  peerload leave --force",
            )
        self._event_log.record("agent", "leaving")
        connection.ok(request.id, {"node": here, "pid": os.getpid(), "left_behind": suffering})
        self._run.stop(Ending.LEAVE)

    def _suffering(self, here: str) -> list[str]:
        """Consequences of leaving for the current tasks, in words."""
        guests = len(self._node.executor.guests)
        unfinished = self._node.home.tasks.values()
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
        """Forget a node that will not come back."""
        self._core.put(ForgetRequested(self._core.expect(connection, request.id), request.node))

    def stop(self, connection: Connection, request: control.Stop) -> None:
        """Stop the agent; with ``all`` kill its tasks, too."""
        connection.ok(request.id, {"pid": os.getpid()})
        self._run.stop(Ending.END_TASKS if request.all else Ending.STOP)

    def restart(self, connection: Connection, request: control.Restart) -> None:
        """Stop, and start in the same process with the settings as they are then."""
        self._event_log.record("agent", "restarting", reason=request.reason)
        connection.ok(request.id, {"pid": os.getpid(), "boot": self._node.state.identity.boot})
        self._run.stop(Ending.RESTART)
