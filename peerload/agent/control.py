"""The control socket: requests of local clients in, answers and streams out.

Identity is the peer credential of the socket, never the request. In user mode the agent serves its own user (and
root). A client that sends what is no request is told so and cut off; one that does not read is waited for, and only it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import logging
import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from peerload.agent.requests import Requests
from peerload.model.errors import BadMessage, BadRequest, ConfigError, FrameTooLarge, PeerloadError, SlowDown
from peerload.model.events import TaskSubmitted
from peerload.wire import control
from peerload.wire.frame import CONTROL_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from peerload.agent.daemon import Daemon
    from peerload.model.actions import Answer, Decided, TaskChanged

log = logging.getLogger("peerload.control")

REQUESTS_PENDING_MAX = 1024
"""Requests of one client that may wait for an answer at a time."""
DECISIONS_KEPT_MAX = 10_000
WRITE_BUFFER_BYTES = 1 << 20


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, server: ControlServer) -> None:
        self._server = server
        self._buffer = bytearray()
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._transport: asyncio.Transport
        self.uid = -1
        self.pending = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Who is it, and is there room?"""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own is no subclass
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        raw = transport.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        self.uid = struct.unpack("3i", raw)[1]
        refusal = self._server.admit(self)
        if refusal is not None:
            self.fail(0, refusal)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone; what it only watched is dropped, its tasks are not touched."""
        del exc
        self.closed = True
        self._can_write.set()
        for task in self.tasks:
            task.cancel()
        self._server.gone(self)

    def pause_writing(self) -> None:
        """The client reads slower than we write."""
        self._can_write.clear()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._can_write.set()

    async def drain(self) -> None:
        """Wait until the client has read most of what was written."""
        await self._can_write.wait()

    def data_received(self, data: bytes) -> None:
        """Whole frames are requests; a frame's length is looked at before anything is kept for it."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= 4 and not self.closed:  # noqa: PLR2004 -- the header
            size = int.from_bytes(buffer[:4], "big")
            if size > CONTROL_BYTES_MAX:
                self._cut(FrameTooLarge(size, CONTROL_BYTES_MAX))
                return
            if len(buffer) < 4 + size:
                return
            raw = bytes(buffer[4 : 4 + size])
            del buffer[: 4 + size]
            try:
                request = control.decode_request(raw)
            except BadMessage as error:
                number = _number(raw)
                if number is None:
                    self._cut(error)
                    return
                self.fail(number, BadRequest(error.what, why=error.why))
                continue
            self._server.handle(self, request)

    def _cut(self, error: PeerloadError) -> None:
        self._server.count("control frames refused")
        self.fail(0, error)
        self._buffer.clear()
        self.closed = True
        self._transport.close()

    def ok(self, number: int, body: dict[str, Any]) -> None:
        """The answer to a request."""
        self.write({"id": number, "ok": body})

    def more(self, number: int, body: dict[str, Any]) -> None:
        """A part of a stream."""
        self.write({"id": number, "more": body})

    def fail(self, number: int, error: Exception) -> None:
        """A request could not be carried out."""
        if isinstance(error, PeerloadError):
            told = {"code": error.code, "what": error.what, "why": error.why, "hint": error.hint}
        else:
            told = {"code": "error", "what": str(error), "why": "", "hint": ""}
        self.write({"id": number, "error": told})

    def write(self, body: dict[str, Any]) -> None:
        """One frame; to a client that is gone: nothing."""
        if not self._transport.is_closing():
            self._transport.write(control.encode(body))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Work that ends with this client."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def hang_up(self) -> None:
        """Close after what was written has gone out."""
        self._transport.close()


class ControlServer:
    """Listens on the agent's socket; ``Requests`` knows what each verb does."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._server: asyncio.AbstractServer | None = None
        self._connections: set[Connection] = set()
        self._waiting: dict[int, tuple[Connection, int]] = {}
        self._next_request = 0
        self._decisions: collections.OrderedDict[str, Decided] = collections.OrderedDict()
        self._requests = Requests(daemon, self)

    # -- listening -----------------------------------------------------------------------------------------------------

    async def start(self, path: str) -> None:
        """Listen. Raises ConfigError if the place is taken by a living agent or cannot be used."""
        listener = _listen(path)
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: Connection(self), sock=listener)

    async def close(self) -> None:
        """Stop listening; clients that wait are told by the closed connection."""
        if self._server is not None:
            self._server.close()
            _remove(self._daemon.config.socket)
        for connection in list(self._connections):
            for task in list(connection.tasks):
                task.cancel()
            connection.hang_up()

    def admit(self, connection: Connection) -> PeerloadError | None:
        """None, or why this client is not served."""
        if connection.uid not in (os.getuid(), 0):
            return BadRequest("this agent serves its own user only", hint="start your own:  peerload up")
        if len(self._connections) >= self._daemon.config.clients_max:
            return SlowDown("too many clients", why=f"at most {self._daemon.config.clients_max} at a time")
        self._connections.add(connection)
        return None

    def gone(self, connection: Connection) -> None:
        """A client hung up."""
        self._connections.discard(connection)

    def count(self, name: str) -> None:
        """Count what was refused."""
        self._daemon.counters[name] += 1

    # -- requests ------------------------------------------------------------------------------------------------------

    def handle(self, connection: Connection, request: control.Request) -> None:
        """Route one request. Reads wait their turn behind what is on its way to the disk, so that a client never
        sees, or is told, less than was acknowledged."""
        if connection.pending >= REQUESTS_PENDING_MAX:
            connection.fail(request.id, SlowDown("too many requests at once", why=f"{connection.pending} are pending"))
            return
        try:
            self._requests.handle(connection, request)
        except PeerloadError as error:
            connection.fail(request.id, error)

    def expect(self, connection: Connection, number: int) -> int:
        """A number for the core; its Answer goes to this request of this client."""
        self._next_request += 1
        self._waiting[self._next_request] = (connection, number)
        connection.pending += 1
        return self._next_request

    def submit(self, connection: Connection, request: control.Submit, indices: tuple[int, ...], *, here: bool) -> None:
        """Hand a submission to the core."""
        digest = hashlib.sha256(msgspec.msgpack.encode((request.spec, request.array))).digest()
        self._daemon.inbox.put(
            TaskSubmitted(
                self.expect(connection, request.id), request.token, digest, request.spec, indices, directory_here=here
            )
        )

    # -- what the core says --------------------------------------------------------------------------------------------

    def answered(self, answer: Answer) -> None:
        """Pass an answer on to whoever asked."""
        connection, number = self._waiting.pop(answer.request, (None, 0))
        if connection is None:
            return
        connection.pending -= 1
        if answer.error is not None:
            connection.fail(number, answer.error)
        else:
            connection.ok(number, answer.reply)

    def changed(self, action: TaskChanged) -> None:
        """A task has a new durable record, or runs."""
        self._requests.changed(action)

    def decided(self, decision: Decided) -> None:
        """Remember the newest decision about a task."""
        if decision.task:
            self._decisions[decision.task] = decision
            self._decisions.move_to_end(decision.task)
            if len(self._decisions) > DECISIONS_KEPT_MAX:
                self._decisions.popitem(last=False)

    def decision(self, task: str) -> dict[str, object] | None:
        """The newest decision about a task, as `show` shows it."""
        decision = self._decisions.get(task)
        if decision is None:
            return None
        inputs = [{"node": node, "load": load, "age_s": age_s} for node, load, age_s in decision.inputs]
        return {"policy": decision.policy, "choice": decision.choice, "reason": decision.reason, "inputs": inputs}


def _number(raw: bytes) -> int | None:
    """The request number in a frame that is MessagePack but no request; None if it is neither."""
    try:
        body = msgspec.msgpack.decode(raw, type=_Numbered)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return body.id


class _Numbered(msgspec.Struct):
    id: control.RequestId


def _listen(path: str) -> socket.socket:
    """The socket for clients, mode 0600. Raises ConfigError."""
    try:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _answers(path):
            raise ConfigError("socket", f"another agent answers at {path}", hint=f"peerload down --socket {path}")
        _remove(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old_umask = os.umask(0o177)
        try:
            listener.bind(path)
        except OSError:
            listener.close()
            raise
        finally:
            os.umask(old_umask)
    except OSError as error:
        raise ConfigError("socket", f"{path} cannot be used", why=str(error.strerror or error)) from None
    return listener


def _remove(path: str) -> None:
    """Take a socket's name away; where that is not allowed it stays, and nobody answers there."""
    with contextlib.suppress(OSError):
        Path(path).unlink(missing_ok=True)


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
