"""Connections of clients: the agent's Unix socket, and the frames of each client (rules L1 and S11).

In user mode only the user may open the socket. In system mode it belongs to the agent's user and to the group of allowed
users, in a directory where no other user can create files. Every client is also identified by its credentials.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from peerload.agent.accounts import group_number
from peerload.agent.control.authorization import NOBODY
from peerload.agent.runtime import ReadTimeout, next_tick
from peerload.model import metrics
from peerload.model.errors import (
    BadMessage,
    BadRequest,
    ConfigError,
    FrameTooLarge,
    InvariantBroken,
    PeerloadError,
    SlowDown,
)
from peerload.wire import control
from peerload.wire.frame import CONTROL_BYTES_MAX, HEADER_BYTES

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Coroutine, Iterator

    from peerload.agent.control.authorization import Authorization, Quotas
    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.runtime import AgentInfo
    from peerload.agent.store.write_ahead import SecurityEvents
    from peerload.model.config import AgentConfig


log = logging.getLogger("peerload.agent")

WRITE_BUFFER_BYTES = 1 << 20
"""Bytes buffered for a slow client before streams to it wait (backpressure)."""
UNREAD_BYTES_MAX = 8 << 20
"""A client with more unread bytes than this is not read until it has caught up."""
PART_BYTES = 1 << 20
"""Size of the parts in which longer lists are sent."""
READ_BYTES = 64 << 10
"""Bytes read at a time; a larger frame gets a buffer of its own."""
PAUSE_S_MAX = 1.0
"""Bound on the pause of a client that is over its rate."""
REQUESTS_PENDING_MAX = 1024
"""Maximum number of unanswered requests of one client."""
CLOSE_GRACE_S = 0.5
"""Time between the last frame to a refused client and the end of its connection."""
CHECK_EVERY_S = 4.0
"""Interval of the check that the socket file still exists."""
ADMIN_PLACES = 16
"""Connections reserved for root."""
USER_MODE, SYSTEM_MODE = 0o600, 0o660
_ACL_VERSION, _ACL_ENTRY = struct.Struct("<I"), struct.Struct("<HHI")
"""POSIX ACL in the format of the kernel: a version, then kind, rights and id of each entry."""
_USER, _GROUP, _NAMED_GROUP, _MASK, _OTHER = 0x01, 0x04, 0x08, 0x10, 0x20


class Server(Protocol):
    """Serves the requests of connections."""

    @property
    def counters(self) -> Counter[str]:
        """The counters of the agent."""

    def refused(self, connection: Connection, name: str, rule: str, what: str, /) -> None:
        """Count a violation of a security rule by this client in this metric."""

    def handle(self, connection: Connection, request: control.Request, /) -> None:
        """Carry out a request."""

    def broke(self, why: str, /) -> None:
        """Stop the agent because of a bug."""


class Connection:
    """A connection of a client, local or at another node; subclasses provide the transport. ``from_node``: the
    node that forwards its requests, "" for a client of this machine."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.uid = -1
        self.caller = NOBODY
        self.from_node = ""
        self.on_disconnect: list[Callable[[], None]] = []
        """Callbacks for the time when the client has disconnected."""
        self.pending = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.closed = False
        self._draining: asyncio.Task[None] | None = None

    async def drain(self) -> None:
        """Wait until the client has read most of the written data. Waiters are served in their order."""
        raise NotImplementedError

    @property
    def unread_bytes(self) -> int:
        """Number of written bytes that are not sent yet, as far as known."""
        return 0

    def _write(self, raw: bytes) -> None:
        """Send one frame; do nothing if the client has disconnected. Raises BadRequest if the frame is too large."""
        raise NotImplementedError

    def hold_requests(self) -> None:
        """Stop reading requests. Calls nest: each needs one `release_requests`."""

    def release_requests(self) -> None:
        """Undo one `hold_requests`."""

    def pause_requests(self, seconds: float) -> None:
        """Stop reading requests for this time, at most PAUSE_S_MAX."""
        self.hold_requests()
        asyncio.get_running_loop().call_later(min(seconds, PAUSE_S_MAX), self.release_requests)

    def check_pending(self) -> None:
        """Check the number of unanswered requests of this client. Raises SlowDown."""
        if self.pending >= REQUESTS_PENDING_MAX:
            raise SlowDown("too many requests at once", why=f"{self.pending} are pending")

    def request(self, raw: bytes | memoryview) -> bool:
        """Process the body of one frame → False if it has no request number, so that no answer is possible."""
        try:
            return self._request(raw)
        finally:
            if self._draining is None and self.unread_bytes > UNREAD_BYTES_MAX:
                self.hold_requests()
                self._draining = asyncio.get_running_loop().create_task(self._drain_unread())

    async def _drain_unread(self) -> None:
        await self.drain()
        self._draining = None
        self.release_requests()

    def _request(self, raw: bytes | memoryview) -> bool:
        try:
            request = control.decode_request(raw)
        except BadMessage as error:
            number = request_number(raw)
            if number is None:
                self.server.refused(self, metrics.CONTROL_FRAMES_REFUSED, "L3", f"no request: {error}")
                self._no_request(error)
                return False
            self.fail(number, BadRequest(error.what, why=error.why))
        else:
            self.server.handle(self, request)
        return True

    def _no_request(self, error: PeerloadError) -> None:
        self.fail(0, error)

    def ok(self, number: int, body: dict[str, Any]) -> None:
        """Send the final response, after parts of its long lists. Raises BadRequest if one item is too large."""
        raw = control.encode({"id": number, "ok": body})
        if len(raw) > PART_BYTES:
            *before, last = _in_parts(body)
            for part in before:
                self._write(control.encode({"id": number, "more": part}))
            raw = control.encode({"id": number, "ok": last})
        self._write(raw)

    async def stream(self, number: int, body: dict[str, Any]) -> None:
        """Send a part of the response when the client has read most of the earlier parts."""
        await self.drain()
        self.more(number, body)

    def more(self, number: int, body: dict[str, Any]) -> None:
        """Send a part of the response. Raises BadRequest if one item is too large."""
        raw = control.encode({"id": number, "more": body})
        if len(raw) <= PART_BYTES:
            self._write(raw)
            return
        for part in _in_parts(body):
            self._write(control.encode({"id": number, "more": part}))

    def fail(self, number: int, error: Exception) -> None:
        self._write(control.encode({"id": number, "error": error_object(error)}))

    def forward_frame(self, number: int, kind: str, body: dict[str, Any]) -> None:
        """Send a frame of another node's response: "ok", "more" or "error". Raises BadMessage if no frame can hold it."""
        try:
            raw = control.encode({"id": number, kind: body})
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise BadMessage("a response of another node exceeds a frame", why=str(error)[:200]) from None
        self._write(raw)

    def report_failure(self, number: int, error: Exception) -> None:
        """Send the exception that a request has raised, and count it. If it is due to a bug, the agent stops."""
        code = error.code if isinstance(error, PeerloadError) else "error"
        self.server.counters[metrics.labelled(metrics.REQUESTS_REFUSED, code=code)] += 1
        self.fail(number, error)
        if isinstance(error, InvariantBroken) or not isinstance(error, (PeerloadError, OSError)):
            log.error("bug in a request", exc_info=error)
            self.server.broke(f"a bug: {error!r}")

    def spawn(self, number: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start the work on a request. It is cancelled when the client disconnects; an exception becomes the response."""
        self.pending += 1
        task = asyncio.get_running_loop().create_task(self._carry_out(number, work))
        self.tasks.add(task)
        task.add_done_callback(lambda task: self._work_done(task, work))
        return task

    async def _carry_out(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 -- `report_failure` tells errors from bugs
            self.report_failure(number, error)

    def _work_done(self, task: asyncio.Task[None], work: Coroutine[Any, Any, None]) -> None:
        self.pending -= 1
        self.tasks.discard(task)
        work.close()  # the client had disconnected before the work began

    def lost(self) -> None:
        """Cancel the requests of the disconnected client, but not its tasks."""
        self.closed = True
        for task in self.tasks:
            task.cancel()
        if self._draining is not None:
            self._draining.cancel()
        for act in self.on_disconnect:
            act()


class LocalConnection(Connection, asyncio.BufferedProtocol):
    """A client at the agent's own socket."""

    def __init__(self, server: Server, clients: LocalSocket) -> None:
        super().__init__(server)
        self._clients = clients
        self._buffer = bytearray()
        """Received bytes, followed by space for the rest of a large frame."""
        self._filled = 0
        self._slow = ReadTimeout(asyncio.get_running_loop(), self._read_timed_out)
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._turn = asyncio.Lock()
        self._held = 0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Identify the client by its socket credentials, and admit or refuse it."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own is no subclass
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        raw = transport.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        self.uid = struct.unpack("3i", raw)[1]
        refusal = self._clients.admit(self)
        if refusal is not None:
            self._close_with(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has disconnected."""
        del exc
        self._slow.stop()
        self._can_write.set()
        self.lost()
        self._clients.disconnected(self)

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        """The write buffer has space again."""
        self._can_write.set()

    async def drain(self) -> None:
        """Wait until the client has read most of the written data."""
        if self._can_write.is_set() and not self._turn.locked():
            return
        async with self._turn:  # in their order, so that a long stream does not starve the others
            while not self._can_write.is_set():
                await self._can_write.wait()

    @property
    def unread_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def hold_requests(self) -> None:
        """Stop reading; received frames stay in the buffer."""
        self._held += 1
        self._slow.pause(paused=True)
        if self._held == 1 and not self._transport.is_closing():
            self._transport.pause_reading()

    def release_requests(self) -> None:
        """Process the frames in the buffer, then read again."""
        self._held -= 1
        if not self._held:
            asyncio.get_running_loop().call_soon(self._resume)

    def _resume(self) -> None:
        if self._held or self._transport.is_closing():
            return
        self._slow.pause(paused=False)
        self.buffer_updated(0)
        if not self._held:
            self._transport.resume_reading()

    def get_buffer(self, _: int) -> memoryview | bytearray:
        """Buffer for the next bytes. The rest of a large frame is read directly into its buffer, without a copy."""
        has_room = self._filled < len(self._buffer)
        return memoryview(self._buffer)[self._filled :] if has_room else self._clients.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Process whole frames. The length of a frame is checked before its body is buffered."""
        if self.closed:
            return
        if self._filled == len(self._buffer):
            self._buffer += memoryview(self._clients.read_buffer)[:nbytes]
        self._filled += nbytes
        is_whole = self._take_frames()
        self._slow.received(nbytes, is_whole=is_whole, is_partial=self._filled > 0 and not self.closed)

    def _take_frames(self) -> bool:
        """Process complete frames, until requests are held or refused → True if there was one."""
        is_whole = False
        while self._filled >= HEADER_BYTES and not self.closed and not self._held:
            size = int.from_bytes(self._buffer[:HEADER_BYTES], "big")
            if size > CONTROL_BYTES_MAX:
                self.server.refused(self, metrics.CONTROL_FRAMES_REFUSED, "L3", "a frame too large")
                self._close_with(FrameTooLarge(size, CONTROL_BYTES_MAX))
                break
            end = HEADER_BYTES + size
            if self._filled < end:
                if READ_BYTES <= self._filled == len(self._buffer):
                    begun, self._buffer = self._buffer, bytearray(end)
                    self._buffer[: self._filled] = begun
                break
            is_whole = True
            if not self.request(self._taken(end)):
                break
        return is_whole

    def _taken(self, end: int) -> bytes | memoryview:
        """Remove the frame that ends at ``end`` from the buffer → its body. A large one is not copied."""
        whole = self._buffer
        if end > READ_BYTES:
            self._buffer = whole[end : self._filled]
            raw: bytes | memoryview = memoryview(whole)[HEADER_BYTES:end]
        else:
            with memoryview(whole) as view:
                raw = bytes(view[HEADER_BYTES:end])
            del whole[:end]
        self._filled = len(self._buffer)
        return raw

    def _read_timed_out(self) -> None:
        self.server.refused(self, metrics.CONTROL_FRAMES_REFUSED, "L3", "a frame stopped before its end")
        self._close_with(BadRequest("the request is incomplete", hint="send it whole"))

    def _no_request(self, error: PeerloadError) -> None:
        self._close_with(error)

    def _close_with(self, error: PeerloadError) -> None:
        """Send an error, then close. Input is discarded for a moment before that: a reset would lose the error."""
        self.fail(0, error)
        self._buffer, self._filled = bytearray(), 0
        self.closed = True
        self._transport.write_eof()
        asyncio.get_running_loop().call_later(CLOSE_GRACE_S, self._transport.close)

    def _write(self, raw: bytes) -> None:
        if self.closed or self._transport.is_closing():
            return
        check_size(raw)
        self._transport.write(raw)

    def hang_up(self) -> None:
        """Close when the write buffer has been sent."""
        self._transport.close()


def check_size(raw: bytes) -> None:
    """Check that clients accept a frame of this size. Raises BadRequest."""
    if len(raw) > HEADER_BYTES + CONTROL_BYTES_MAX:
        raise BadRequest(
            "the answer is too large",
            why=f"it has {len(raw) - HEADER_BYTES} bytes; at most {CONTROL_BYTES_MAX} are allowed",
            hint="peerload ls  lists tasks in a short form",
        )


def error_object(error: Exception) -> dict[str, Any]:
    if isinstance(error, PeerloadError):
        return {"code": error.code, "what": error.what, "why": error.why, "hint": error.hint}
    return {"code": "error", "what": str(error), "why": "", "hint": ""}


def _in_parts(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Split a large body: parts of its lists first; the last part has everything else."""
    part: dict[str, Any] = {}
    size = 0
    for key, value in body.items():
        for item in value if isinstance(value, list) else ():
            more = len(control.encode(item))
            if part and size + more > PART_BYTES:
                yield part
                part, size = {}, 0
            part.setdefault(key, []).append(item)
            size += more
    yield {key: [] if isinstance(value, list) else value for key, value in body.items()} | part


def request_number(raw: bytes | memoryview) -> int | None:
    """The request number in a frame that is no valid request; None if it has none."""
    try:
        body = msgspec.msgpack.decode(raw, type=_Numbered)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return body.id


class _Numbered(msgspec.Struct):
    id: control.RequestId


# -- the socket --------------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class LocalSocket:
    """The agent's socket and its connections. ``server`` carries out their requests."""

    _info: AgentInfo
    _requests: Server
    _access: Authorization
    _quotas: Quotas
    _security: SecurityEvents
    _launcher: LauncherLink
    _server: asyncio.AbstractServer | None = field(default=None, init=False)
    _place: tuple[int, int] | None = field(default=None, init=False)
    _is_closed: bool = field(default=False, init=False)
    _keeps_name: bool = field(default=False, init=False)
    _connections: set[LocalConnection] = field(default_factory=set, init=False)
    read_buffer: bytearray = field(default_factory=lambda: bytearray(READ_BYTES), init=False)
    """Read buffer that all connections share: each empties it immediately after a read."""

    async def start(self, handed_over: socket.socket | None = None) -> None:
        """Listen. ``handed_over``: a socket of the service manager, which keeps it when this agent stops. Raises ConfigError
        if a running agent has the path, or the path cannot be used."""
        config = self._info.config
        self._keeps_name = handed_over is not None
        listener = listen(config) if handed_over is None else handed_over
        self._place = place(config.socket)
        if config.mode == "system" and config.admin_group != config.group:
            why = allow_group(config.socket, config.admin_group)
            if why:
                log.warning(
                    "cannot admit the administrators' group to the control socket: group=%s path=%s error=%s",
                    config.admin_group,
                    config.socket,
                    why,
                )
        loop = asyncio.get_running_loop()
        if sys.version_info >= (3, 13):  # by default it would unlink the path, even of the service manager's socket
            self._server = await loop.create_unix_server(self._connected, sock=listener, cleanup_socket=False)
        else:
            self._server = await loop.create_unix_server(self._connected, sock=listener)

    def _connected(self) -> LocalConnection:
        return LocalConnection(self._requests, self)

    async def watch(self) -> None:
        """Until cancelled: recreate the socket if it was removed, and have the launcher recreate its own. A runtime directory
        is removed at logout, and old files in /tmp may be removed. A socket of another process is left alone."""
        path, logged = self._info.config.socket, ""
        while True:
            await next_tick(CHECK_EVERY_S)
            self._launcher.look_for_socket()
            if self._is_closed:  # the agent is stopping, and has removed its socket
                return
            if self._keeps_name or place(path) == self._place:
                continue
            before = self._server
            try:
                await self.start()
            except ConfigError as error:
                if str(error) != logged:
                    logged = str(error)
                    log.error("cannot recreate the control socket: path=%s error=%s", path, error)  # noqa: TRY400
                continue
            if before is not None:
                before.close()
            logged = ""
            log.warning("the control socket was removed; recreated it: path=%s", path)

    def close(self) -> None:
        """Stop listening, and close all connections. Disconnect callbacks are dropped: clients will reconnect after the next
        start."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
            if not self._keeps_name and place(self._info.config.socket) == self._place:
                remove(self._info.config.socket)
        for connection in list(self._connections):
            for task in list(connection.tasks):
                task.cancel()
            connection.on_disconnect.clear()
            connection.hang_up()

    def admit(self, connection: LocalConnection) -> PeerloadError | None:
        """Decide whether to serve a new client → None, or the refusal."""
        try:
            connection.caller = caller = self._access.local(connection.uid)
        except PeerloadError as error:
            return error
        most = self._info.config.clients_max + (ADMIN_PLACES if self._access.is_system and connection.uid == 0 else 0)
        if len(self._connections) >= most:
            self._security.report("L3", f"uid {connection.uid}", "too many clients at a time")
            return SlowDown("too many clients", why=f"at most {most} at a time")
        refusal = self._quotas.connected(caller)
        if refusal is None:
            self._connections.add(connection)
        return refusal

    def disconnected(self, connection: LocalConnection) -> None:
        if connection in self._connections:
            self._connections.discard(connection)
            self._quotas.disconnected(connection.caller)


def check_socket(config: AgentConfig) -> None:
    """Check that `listen` would succeed. Raises ConfigError."""
    listen(config).close()
    remove(config.socket)


def listen(config: AgentConfig) -> socket.socket:
    """Create the socket. Raises ConfigError if a running agent has the path, or the path cannot be used."""
    path, is_system = config.socket, config.mode == "system"
    try:
        if is_system:
            _check_directory(Path(path).parent)
        else:
            Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _answers(path):
            raise ConfigError("socket", f"another agent answers at {path}", hint=f"peerload down --socket {path}")
        remove(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old_umask = os.umask(0o777 & ~USER_MODE)
        try:
            listener.bind(path)
            if is_system:
                _give_to_group(path, config.group)
        except BaseException:
            listener.close()
            raise
        finally:
            os.umask(old_umask)
    except OSError as error:
        raise ConfigError("socket", f"{path} cannot be used", why=str(error.strerror or error)) from None
    return listener


def place(path: str) -> tuple[int, int] | None:
    """Device and inode of the file at a path; None if there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def remove(path: str) -> None:
    """Unlink a socket if permitted."""
    with contextlib.suppress(OSError):
        Path(path).unlink(missing_ok=True)


def _check_directory(directory: Path) -> None:
    """Raises ConfigError if other users could create a socket in this directory, or users cannot enter it."""
    if not os.path.lexists(directory):
        directory.mkdir(mode=0o755, parents=True)
        directory.chmod(0o755)
    found = directory.lstat()
    why = ""
    if not stat.S_ISDIR(found.st_mode):
        why = "it is a link, or no directory"
    elif found.st_uid not in (0, os.getuid()):
        why = f"it belongs to uid {found.st_uid}, neither to root nor to the agent's user"
    elif found.st_mode & 0o022:
        why = f"other users can change its content (mode {stat.S_IMODE(found.st_mode):o})"
    if why:
        hint = f"as root:  rm -r {directory} && install -d -m 755 -o peerload {directory}"
        raise ConfigError("socket", f"{directory} cannot be trusted", why=why, hint=hint)


def _give_to_group(path: str, group: str) -> None:
    """Allow a group to connect. Raises ConfigError if the group does not exist or the agent is not in it; OSError."""
    number = group_number(group)
    if number is None:
        why = "there is no such group on this machine"
        raise ConfigError("group", f"{group!r} cannot be used", why=why, hint=f"as root:  groupadd --system {group}")
    try:
        os.chown(path, -1, number, follow_symlinks=False)
    except PermissionError:
        hint = f"as root:  usermod -aG {group} the agent's user"
        raise ConfigError("group", f"{group!r} cannot be used", why="the agent is not in it", hint=hint) from None
    Path(path).chmod(SYSTEM_MODE)
    found = Path(path).lstat()
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid() or found.st_gid != number:
        raise ConfigError("socket", f"{path} cannot be trusted", why="another user has replaced it")


def allow_group(path: str, group: str) -> str:
    """Allow one more group to connect, by an ACL entry → the error, "" if there is none. Only the owner and root can do so."""
    number = group_number(group)
    if number is None:
        return "there is no such group on this machine"
    nobody = 0xFFFFFFFF
    entries = (
        (_USER, 6, nobody),
        (_GROUP, 6, nobody),
        (_NAMED_GROUP, 6, number),
        (_MASK, 6, nobody),
        (_OTHER, 0, nobody),
    )
    value = _ACL_VERSION.pack(2) + b"".join(_ACL_ENTRY.pack(*entry) for entry in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", value, follow_symlinks=False)
    except OSError as error:
        return str(error.strerror)
    return ""


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
