"""The verbs that change this node and its cluster: drain, undrain, leave, forget, stop and restart; invite, revoke and rotate."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peerload.agent.runtime import Ending
from peerload.model.errors import BadRequest, StoreError
from peerload.model.events import DrainRequested, EmptyAwaited, EmptyAwaitedNoMore, ForgetRequested, UndrainRequested
from peerload.model.task import TaskState
from peerload.security.address import reachable_by_both
from peerload.security.revocation import OVERLAP_S
from peerload.text.format import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.agent.control.connection import Connection
    from peerload.agent.joining import Enrollment, TrustDistribution
    from peerload.agent.peers.membership import Members
    from peerload.agent.runtime import AgentInfo, CoreRequests, RunState
    from peerload.agent.store.write_ahead import EventLog
    from peerload.core.node import Node
    from peerload.wire import control


@dataclass(eq=False, repr=False)
class NodeCommands:
    """Passes changes of the node to the core, or ends the agent."""

    _core: CoreRequests
    _node: Node
    _run: RunState
    _event_log: EventLog

    async def drain(self, connection: Connection, request: control.Drain) -> None:
        """Let this node take no more tasks. With ``wait``, answer when it has none left."""
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
        """Descriptions of what happens to current tasks if this node leaves."""
        remotes = len(self._node.executor.remote_tasks)
        unfinished = self._node.home.tasks.values()
        leased = [task for task in unfinished if task.record.state is TaskState.LEASED]
        away = sum(task.record.node != here for task in leased)
        running = len(leased) - away
        waiting = self._node.home.number - len(leased)
        counts = (
            (remotes, "of other nodes here: they are frozen at the end of their leases, and run elsewhere"),
            (away, "of its own at other nodes: their results come when it is back"),
            (running, "of its own running here: they run on, and their results are kept"),
            (waiting, "of its own waiting: they are kept, and wait until an agent is started here again"),
        )
        return [f"{counted(number, 'task')} {words}" for number, words in counts if number]

    def forget(self, connection: Connection, request: control.Forget) -> None:
        self._core.put(ForgetRequested(self._core.expect(connection, request.id), request.node))

    def stop(self, connection: Connection, request: control.Stop) -> None:
        """Stop the agent; with ``all`` kill its tasks, too."""
        connection.ok(request.id, {"pid": os.getpid(), "running": len(self._node.ledger.running)})
        self._run.stop(Ending.END_TASKS if request.all else Ending.STOP)

    def restart(self, connection: Connection, request: control.Restart) -> None:
        """Stop, and start again in the same process with the current settings."""
        self._event_log.record("agent", "restarting", reason=request.reason)
        connection.ok(request.id, {"pid": os.getpid(), "boot": self._node.state.identity.boot})
        self._run.stop(Ending.RESTART)


@dataclass(eq=False, repr=False)
class ClusterCommands:
    """The commands that need the key of the cluster's CA."""

    _info: AgentInfo
    _node: Node
    _enrollment: Enrollment
    _trust: TrustDistribution
    _members: Members
    _events: EventLog

    def invite(self, connection: Connection, request: control.Invite) -> None:
        self._enrollment.check_issuer("invite", "let nobody in")
        listens_at = self._members.listens_at
        port = int(listens_at.rpartition(":")[2])
        token = self._enrollment.invite(request, (listens_at, *reachable_by_both(self._info.config.listen, port)))
        self._events.record("join", "invited", reason=f"{request.uses} to join within {request.ttl_s:g} s")
        answer = {
            "token": token.text(),
            "address": self._info.identity.address,
            "cluster": self._enrollment.cluster_name,
        }
        connection.ok(request.id, answer | {"ends_at": time.time() + request.ttl_s, "uses": request.uses})

    def revoke(self, connection: Connection, request: control.RevokeRequest) -> None:
        self._enrollment.check_issuer("revoke", "shut nobody out")
        if request.node == self._info.config.node:
            raise BadRequest("a node cannot revoke itself", hint="peerload leave  takes this node out of its cluster")
        known = self._node.membership.get(request.node)
        if known is None and not request.force:
            raise BadRequest(
                f"no node called {request.node} is known here",
                hint="the nodes known:  peerload nodes        all the same:  peerload revoke --force NODE",
            )
        notified = _saved(lambda: self._trust.revoke(request.node))
        was = known.state.value if known is not None else None
        can_invite = bool(known is not None and known.profile.issuer)
        connection.ok(request.id, {"node": request.node, "was": was, "told": notified, "was_issuer": can_invite})

    def rotate(self, connection: Connection, request: control.Rotate) -> None:
        self._enrollment.check_issuer("cluster rotate", "change no key")
        notified = _saved(self._trust.rotate)
        number = self._trust.trust.number
        connection.ok(request.id, {"number": number, "told": notified, "overlap_s": OVERLAP_S})


def _saved(make: Callable[[], int]) -> int:
    try:
        return make()
    except OSError as error:
        raise StoreError("cannot save the statement of the CA", why=str(error.strerror)) from None
