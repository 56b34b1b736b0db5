"""The control socket: requests of local clients in, answers and streams out.

Identity is the peer credential of the socket, never the request (`authorization.py`). A client that sends what is no request is
told so and cut off; one that does not read is waited for, and only it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING

from peerload.agent.control import local_socket
from peerload.agent.control.authorization import ADMIN_PLACES
from peerload.agent.control.connection import Connection, LocalConnection
from peerload.agent.control.pending_replies import Decisions, PendingReplies
from peerload.agent.control.quotas import REQUEST_COSTS, WaitQuota, waits_for
from peerload.agent.control.task_ids import TaskIds
from peerload.agent.forwarding.request_router import RequestRouter
from peerload.agent.forwarding.server import ForwardServer
from peerload.agent.requests.dispatch import RequestHandler
from peerload.model.errors import ConfigError, PeerloadError, SlowDown

if TYPE_CHECKING:
    import socket

    from peerload.agent.parts import Parts
    from peerload.model.actions import Answer, Decided, TaskChanged
    from peerload.wire import control

log = logging.getLogger("peerload.agent")

LOOK_EVERY_S = 1.0
"""Interval of the check that the socket is still there."""
REQUESTS_PENDING_MAX = 1024
"""Requests of one client that may be unanswered at a time."""


class ControlServer:
    """Listens on the agent's socket; ``RequestHandler`` knows what each verb does."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._server: asyncio.AbstractServer | None = None
        self._place: tuple[int, int] | None = None
        self._is_closed = False
        self._keeps_name = False
        self._connections: set[LocalConnection] = set()
        self._pending = PendingReplies()
        self._waited = WaitQuota(is_system=parts.access.is_system)
        self._decisions = Decisions()
        self._requests = RequestHandler(parts, self._pending, self._decisions, self._waited)
        self._routes = RequestRouter(parts, TaskIds(parts), self._requests.handle)
        self._forwarded = ForwardServer(self, parts.access)
        parts.links.streams.forwards = self._forwarded

    # -- listening -----------------------------------------------------------------------------------------------------

    async def start(self, handed_over: socket.socket | None = None) -> None:
        """Listen. ``handed_over``: the socket that the service manager has made, which it keeps when we go. Raises
        ConfigError if the place is taken by a living agent or cannot be used."""
        self._keeps_name = handed_over is not None
        listener = local_socket.listen(self._parts.config) if handed_over is None else handed_over
        self._place = local_socket.place(self._parts.config.socket)
        config = self._parts.config
        if config.mode == "system" and config.admin_group != config.group:
            why = local_socket.let_in(config.socket, config.admin_group)
            if why:
                log.warning("members of %s alone cannot connect to %s: %s", config.admin_group, config.socket, why)
        loop = asyncio.get_running_loop()
        if sys.version_info >= (
            3,
            13,
        ):  # from then on it would remove the name at the end, also of a socket handed over
            self._server = await loop.create_unix_server(
                lambda: LocalConnection(self), sock=listener, cleanup_socket=False
            )
        else:
            self._server = await loop.create_unix_server(lambda: LocalConnection(self), sock=listener)

    async def watch(self) -> None:
        """Make the socket anew if it is gone, until cancelled: a runtime directory goes when its user logs out, and what is
        old in /tmp may be removed. What somebody else listens at is left alone."""
        path, said = self._parts.config.socket, ""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._parts.launcher.look_for_socket()
            if self._is_closed:  # the agent winds down, and has taken its socket away itself
                return
            if self._keeps_name or local_socket.place(path) == self._place:
                continue
            before = self._server
            try:
                await self.start()
            except ConfigError as error:
                if str(error) != said:
                    said = str(error)
                    log.error("the socket %s is gone, and cannot be made anew: %s", path, error)  # noqa: TRY400
                continue
            if before is not None:
                before.close()
            said = ""
            log.warning("the socket %s was gone; it was made anew", path)

    async def close(self) -> None:
        """Stop listening; clients that wait are told by the closed connection. That they are gone is told to nobody: it is we
        who go, and they come back to the next start."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        path = self._parts.config.socket
        if self._server is not None and not self._keeps_name and local_socket.place(path) == self._place:
            local_socket.remove(path)
        for connection in list(self._connections):
            for task in list(connection.tasks):
                task.cancel()
            connection.when_gone.clear()
            connection.hang_up()
        self._forwarded.close()
        await self._routes.forwards.close()

    def admit(self, connection: LocalConnection) -> PeerloadError | None:
        """None, or why this client is not served."""
        access, quotas = self._parts.access, self._parts.access.quotas
        try:
            connection.caller = caller = access.local(connection.uid)
        except PeerloadError as error:
            return error
        most = self._parts.config.clients_max + (ADMIN_PLACES if access.is_system and connection.uid == 0 else 0)
        if len(self._connections) >= most:
            self._parts.security.tell("L3", f"uid {connection.uid}", "too many clients at a time")
            return SlowDown("too many clients", why=f"at most {most} at a time")
        if access.is_system and (refusal := quotas.connected(caller.who)) is not None:
            self._parts.security.tell("L3", f"uid {connection.uid}", "too many connections of one user")
            return refusal
        self._connections.add(connection)
        return None

    def gone(self, connection: LocalConnection) -> None:
        """A client hung up."""
        if connection in self._connections:
            self._connections.discard(connection)
            self._parts.access.quotas.hung_up(connection.caller.who)
        self._routes.forwards.gone(connection)

    def refused(self, connection: Connection, name: str, rule: str, what: str) -> None:
        """Count what was refused, and for which rule."""
        self._parts.counters[name] += 1
        self._parts.security.tell(rule, connection.came_from or f"uid {connection.uid}", what)

    # -- requests ------------------------------------------------------------------------------------------------------

    def handle(self, connection: Connection, request: control.Request) -> None:
        """Route one request. Reads wait their turn behind what is on its way to the disk, so that a client never
        sees, or is told, less than was acknowledged."""
        if connection.pending >= REQUESTS_PENDING_MAX:
            connection.fail(request.id, SlowDown("too many requests at once", why=f"{connection.pending} are pending"))
            return
        access = self._parts.access
        tokens = REQUEST_COSTS.get(type(request), 1)
        if access.is_system and (wait_s := access.quotas.requested(connection.caller.counted_as, tokens)):
            self._parts.security.tell("L3", connection.caller.user or f"uid {connection.uid}", "asks too often")
            connection.fail(request.id, access.quotas.slow_down(wait_s))
            connection.rest(wait_s)
            return
        try:
            request = access.checked(connection.caller, request)
            with self._waited.handed_over(connection, waits_for(request)):
                if not self._routes.takes(connection, request):
                    self._requests.handle(connection, request)
        except Exception as error:  # noqa: BLE001 -- `failed` tells errors from bugs
            connection.failed(request.id, error)

    def broke(self, why: str) -> None:
        """A bug: the agent stops."""
        self._parts.run.fail(why)

    # -- what the core says --------------------------------------------------------------------------------------------

    def answered(self, answer: Answer) -> None:
        """Pass an answer on to whoever asked."""
        self._pending.answered(answer)

    def changed(self, action: TaskChanged) -> None:
        """A task has a new durable record, or runs."""
        self._requests.changed(action)

    def attempt_gone(self, key: str) -> None:
        """No process of this attempt is left."""
        self._requests.endings.gone(key)

    def restored(self) -> None:
        """The core knows again what was durable."""
        self._requests.attending.restored()

    def waits(self, task: str, why: str) -> None:
        """A task has ended elsewhere, and its result cannot be brought here for now."""
        self._requests.waits(task, why)

    def follows(self, task: str) -> bool:
        """Whether a client watches this task right now."""
        return self._requests.follows(task)

    def decided(self, decision: Decided) -> None:
        """Remember the newest decision about a task."""
        self._decisions.keep(decision, self._parts.now().wall_s)
