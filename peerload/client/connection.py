# ruff: noqa: PTH100, PTH110, PTH111, PTH118, PTH123
# os.path, since pathlib would cost every command its quick start.
"""Connections to an agent over its Unix socket: the protocol without any I/O, a blocking connection, and the socket's path.

>>> with AgentConnection() as client:                       # doctest: +SKIP
...     client.call("info")["node"]
'ws1'

This module is quick to import, since every command needs it. A driver sends the bytes that `Protocol.request` returns. It
reads at most `wanted_bytes` bytes, which never extend past the current answer, and passes them to `receive_data` until
`next_answer` returns that answer. So a readable socket always means another answer. `AgentConnection` is the driver for a
blocking socket, `asynchronous.py` the one for asyncio. docs/wire.md describes the messages; `peerload.wire.control` defines the
verbs and their fields; a reply is a plain dict.
"""

from __future__ import annotations

import _socket as socket  # `socket` itself loads enum and selectors, a third of a command's start
import os
import select
import struct
import sys
import time

from peerload.model.errors import (
    AgentGone,
    AgentSilent,
    AgentUnavailable,
    BadRequest,
    ClientRefused,
    NeverRunnable,
    NoSuchTask,
    OutputIncomplete,
    PeerloadError,
    SlowDown,
    SnapshotWanted,
    StagingFailed,
)
from peerload.wire import frame

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any, Self

SYSTEM_SOCKET = "/run/peerload/agent.sock"
ANSWERS_WITHIN_S = 10.0
"""An agent that sends nothing for this long, not even its answer to `info`, counts as stopped."""
READS_WITHIN_S = 60.0
"""Limit for an agent that has answered before but stopped reading. Disconnecting would cancel the attended tasks."""
STARTS_WITHIN_S = 120.0
"""Limit for an agent that a service manager is starting. It may have a large state to load first."""
ANSWERS_BEFORE_END_MAX = 100
"""Number of unread answers to search for a refusal after the agent has closed the connection."""
SERVICE_HINT = "systemctl status peerload        its log:  journalctl -u peerload"
SERVICE_MANAGER = 1
"""The pid of init."""
SOCKET_PATH_BYTES_MAX = 107
"""The kernel's limit for the path of a Unix socket."""
RECONNECT_S_MAX = 60.0
"""Time of attempts to reconnect to an agent that disconnected, for example to restart itself."""
RECONNECT_EVERY_S = 0.25
ROOM_S_MAX = 5.0
"""Patience of a quick request with an agent that has no room for one more client."""
EVENTS_MAX = 100_000
"""Maximum number of events in one request."""
READ_BYTES_MAX = 256 << 10
"""Maximum size of one read."""

_KINDS = ("more", "ok", "error")
_REFUSALS: dict[str, type[BadRequest]] = {
    kind.code: kind for kind in (BadRequest, NoSuchTask, NeverRunnable, StagingFailed, SnapshotWanted)
}
_KIND_MASK, _KIND_DIRECTORY = 0o170000, 0o040000  # as in <sys/stat.h>; the module stat is not needed for that

Answer = tuple[int, str, "dict[str, Any]"]
"""Number of the answered request, kind ("more", "ok" or "error"), body."""

START_HINT = "start one:  peerload up        if one should be there:  peerload doctor"
_GROUP_HINT = "sudo adduser YOU peerload  and log in again; or start an agent of your own:  peerload up"


class Protocol:
    """Protocol of a connection to an agent. ``has_answered``: the agent has sent data."""

    __slots__ = ("_buffer", "_requests", "_size", "has_answered")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._requests = 0
        self._size: int | None = None
        self.has_answered = False

    def request(self, verb: str, fields: dict[str, object]) -> tuple[int, bytes]:
        """The number of a new request and its bytes. Raises BadRequest if it is too large or not UTF-8."""
        number, parts = self.request_parts(verb, fields)
        return number, b"".join(parts)

    def request_parts(self, verb: str, fields: dict[str, object]) -> tuple[int, list[frame.Buffer]]:
        """`request` in parts, which are sent one after the other: large blocks are not copied."""
        self._requests += 1
        try:
            return self._requests, frame.pack_parts({"id": self._requests, "verb": verb, **fields})
        except UnicodeEncodeError as error:
            raise BadRequest("the request is not UTF-8", why=f"{error.object[:80]!r}") from None
        except ValueError as error:
            raise BadRequest("the request is too large", why=str(error)) from None

    @property
    def wanted_bytes(self) -> int:
        """Maximum number of bytes to read before the next call of `next_answer`."""
        return min((frame.HEADER_BYTES if self._size is None else self._size) - len(self._buffer), READ_BYTES_MAX)

    def receive_data(self, data: bytes) -> None:
        """Take bytes from the agent; b"" means that it closed the connection. Raises AgentUnavailable."""
        if not data:
            raise agent_gone("the agent closed the connection")
        self._buffer += data
        if self._size is None and len(self._buffer) == frame.HEADER_BYTES:
            self._size = int.from_bytes(self._buffer, "big")
            self._buffer.clear()
            if self._size > frame.CONTROL_BYTES_MAX:
                why = f"a frame of {self._size} bytes is announced; at most {frame.CONTROL_BYTES_MAX} are allowed"
                raise agent_gone(why)

    def next_answer(self) -> Answer | None:
        """Next answer that has arrived; None if more bytes are needed. Raises AgentUnavailable if it is
        malformed, and ClientRefused if the agent refuses the connection itself."""
        if self._size is None or len(self._buffer) < self._size:
            return None
        raw, self._size = bytes(self._buffer), None
        self._buffer.clear()
        try:
            message = frame.unpack(raw)
        except ValueError as error:
            raise agent_gone(str(error)) from None
        self.has_answered = True
        if isinstance(message, dict):
            for kind in _KINDS:
                body = message.get(kind)
                if isinstance(body, dict):
                    request = message.get("id")
                    if request == 0 and kind == "error":
                        raise refusal(body, ClientRefused)
                    return (request if isinstance(request, int) else 0), kind, body
        raise agent_gone("invalid response from the agent")


def follows(verb: str, fields: dict[str, object]) -> bool:
    """True if the answer to a request has no time limit, since it waits for future events."""
    return verb == "wait" or bool(fields.get("follow"))


def accepted(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body of an "ok". Raises the error that an "error" describes."""
    if kind != "ok":
        raise refusal(body)
    return body


def refusal(body: dict[str, Any], kind: type[BadRequest] = BadRequest) -> BadRequest:
    """The error that the body of an "error" describes. ``kind``: the class for codes without a class."""
    code = str(body.get("code", ""))
    error = _REFUSALS.get(code, kind)(
        str(body.get("what") or "the agent refused"), why=str(body.get("why") or ""), hint=str(body.get("hint") or "")
    )
    error.code = code or error.code
    return error


def joined(parts: Iterable[dict[str, Any]], reply: dict[str, Any]) -> dict[str, Any]:
    """Join the parts of a reply: their lists are concatenated."""
    lists: dict[str, list[Any]] = {}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, list):
                lists.setdefault(key, []).extend(value)
    return reply | {key: [*items, *reply.get(key, ())] for key, items in lists.items()}


def is_worth_another_try(error: PeerloadError) -> bool:
    """True if the agent is unavailable or has too many clients now."""
    return isinstance(error, AgentUnavailable) or error.code == SlowDown.code


class Reconnection:
    """Retry limit of one call whose agent disconnects (for example to restart itself) or has too many clients.

    ``patience_s``: the longest time without the agent. ``until_s`` (monotonic): the deadline of the call, after which it does not
    retry either. ``was_there``: an agent has answered before this call. Without that, a failed connect is not retried.
    """

    __slots__ = ("_lost_until_s", "_patience_s", "_until_s", "_was_there", "timed_out")

    def __init__(
        self, patience_s: float = RECONNECT_S_MAX, *, until_s: float = float("inf"), was_there: bool = False
    ) -> None:
        self._patience_s = patience_s
        self._until_s = until_s
        self._was_there = was_there
        self._lost_until_s = 0.0
        self.timed_out = False
        """The deadline of the call passed while the agent was unavailable."""

    @property
    def is_lost(self) -> bool:
        """True from the first failure until the next answer."""
        return self._lost_until_s > 0.0

    def answered(self) -> None:
        """Record that the agent has answered."""
        self._lost_until_s = 0.0

    def continues(self, error: PeerloadError) -> bool:
        """True if the call should be retried after RECONNECT_EVERY_S."""
        now_s = time.monotonic()
        can_be_back = is_worth_another_try(error) and not isinstance(error, AgentSilent)
        if not self.is_lost:
            self._lost_until_s = min(now_s + self._patience_s, self._until_s)
            can_be_back &= isinstance(error, (AgentUnavailable if self._was_there else AgentGone, ClientRefused))
        self.timed_out = can_be_back and now_s >= self._until_s
        return can_be_back and now_s < self._lost_until_s


def agent_gone(reason: str) -> AgentGone:
    """The error for a lost connection to an agent."""
    return AgentGone("the agent disconnected", why=reason, hint="is it running?  peerload up")


def beyond(piece: dict[str, Any], came: dict[int, int]) -> dict[str, Any] | None:
    """The part of a piece of output that was not received before; None if there is none. Updates ``came`` (bytes by stream)."""
    stream, offset, data = piece["stream"], piece["offset"], piece["data"]
    known = came[stream] - offset
    if known >= len(data):
        return None
    came[stream] = offset + len(data)
    return {**piece, "offset": offset + known, "data": data[known:]} if known > 0 else piece


class OutputPosition:
    """Position in a task's output: the number of bytes received of each stream, for the attempt that the pieces belong to."""

    __slots__ = ("_attempt", "_came")

    def __init__(self) -> None:
        self._attempt: object = None
        self._came = {1: 0, 2: 0}

    def beyond(self, piece: dict[str, Any]) -> dict[str, Any] | None:
        """The part of the next piece that was not received before a reconnection; None if there is none, as for an empty piece
        that only marks where the last lines begin."""
        if piece.get("attempt") != self._attempt:
            self._attempt, self._came = piece.get("attempt"), {1: 0, 2: 0}
        new = beyond(piece, self._came)
        return new if new is not None and new["data"] else None


class OutputGaps:
    """Gaps in a task's output, found from the pieces of an `output` answer and from its final reply.

    ``is_whole``: the answer starts at the beginning of the output; otherwise (the last lines only) the bytes before the first piece
    are not counted. ``streams``: the requested streams. Bytes that the agent could not read or fetch are not known by stream: they
    count even if they belong to another one.
    """

    __slots__ = ("_next", "missing_bytes")

    def __init__(self, *, is_whole: bool = True, streams: Iterable[int] = (1, 2)) -> None:
        self.missing_bytes = 0
        """The missing bytes found so far."""
        self._next: dict[int, int | None] = dict.fromkeys(streams, 0 if is_whole else None)

    def add(self, piece: dict[str, Any]) -> int:
        """Add the next piece {stream, offset, data} → the number of bytes missing before it."""
        stream, offset = piece["stream"], piece["offset"]
        expected = self._next[stream]
        self._next[stream] = offset + len(piece["data"])
        gap = 0 if expected is None else max(offset - expected, 0)
        self.missing_bytes += gap
        return gap

    def end(self, reply: dict[str, Any]) -> int:
        """Add the final reply of an answer → the number of bytes missing at the ends of its streams."""
        gap = int(reply.get("missing_bytes") or 0)
        for stream, key in ((1, "stdout_bytes"), (2, "stderr_bytes")):
            came = self._next.get(stream)
            if came is not None:
                gap += max(int(reply.get(key) or 0) - came, 0)
        self.missing_bytes += gap
        return gap

    def require_all(self, reply: dict[str, Any]) -> None:
        """Add the final reply. Raises OutputIncomplete if anything is missing."""
        self.end(reply)
        if self.missing_bytes:
            gone = reply.get("output_gone_why")
            why = f"it was removed ({gone})" if gone else "it exceeded the capture limit, or it cannot be read"
            raise OutputIncomplete(str(reply.get("id", "")), self.missing_bytes, why=why)


class AgentConnection:
    """A connection to an agent.

    ``socket_path`` None: the result of `default_socket_path`. Every method raises AgentUnavailable if the agent is not running
    or disconnects, and BadRequest (or a subclass of it, with the ``code`` that the agent sent) if the agent refuses.
    ``timeout_s``: AgentSilent is raised after this time without data (None: no limit). A request may take longer:
    after half of the time the client sends `info`, and continues to wait if the agent answers it. A request that waits for future
    events (`wait`, ``follow``) has no limit once the agent has answered anything; the agent then has READS_WITHIN_S to read a request.
    ``awaits_start``: allow STARTS_WITHIN_S for an agent that a service manager is starting.
    ``room_s``: how long to retry if the agent has too many clients, until its first answer (0: the caller retries).
    ``last``: the reply that ended the latest `call` or `stream`.
    """

    def __init__(
        self,
        socket_path: str | None = None,
        *,
        timeout_s: float | None = ANSWERS_WITHIN_S,
        room_s: float = ROOM_S_MAX,
        awaits_start: bool = True,
    ) -> None:
        self._room_s = room_s
        self._starts_within_s = STARTS_WITHIN_S if awaits_start else 0.0
        self.path = socket_path or default_socket_path()
        self.last: dict[str, Any] = {}
        self._timeout_s = timeout_s
        self.connect()

    def connect(self) -> None:
        """Connect or reconnect. Requests on an earlier connection get no answer any more."""
        timeout_s = self._timeout_s
        self._protocol = Protocol()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if (
            timeout_s is not None
        ):  # the kernel applies this timeout to connect; a non-blocking socket would not wait for space in the backlog
            limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            self._socket.connect(self.path)
        except BlockingIOError:
            self._socket.close()
            raise agent_silent(self._timeout_s) from None
        except OSError as error:
            self._socket.close()
            raise unavailable(self.path, error) from None
        self._socket.settimeout(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Tasks are not affected."""
        self._socket.close()

    def fileno(self) -> int:
        """The descriptor of the socket, for poll: readable means that an answer is arriving."""
        return self._socket.fileno()

    def call(self, verb: str, **fields: object) -> dict[str, Any]:
        """Send one request → its reply, with partial lists joined. Answers to other requests are dropped."""
        parts = list(self.stream(verb, **fields))
        return joined(parts, self.last)

    def stream(self, verb: str, **fields: object) -> Iterator[dict[str, Any]]:
        """Send one request and yield each part of its answer as it arrives; then `last` is the final reply."""
        room = Reconnection(self._room_s)
        while True:
            try:
                yield from self._answer(verb, fields)
            except ClientRefused as error:
                if not room.continues(error):
                    raise
            else:
                return
            self.close()
            time.sleep(RECONNECT_EVERY_S)
            self.connect()

    def _answer(self, verb: str, fields: dict[str, object]) -> Iterator[dict[str, Any]]:
        request = self.send(verb, **fields)
        waits_on = follows(verb, fields)
        while True:
            answered, kind, body = self.receive(may_last=waits_on)
            if answered != request:
                continue
            if kind != "more":
                self.last = accepted(kind, body)
                return
            yield body

    def send(self, verb: str, **fields: object) -> int:
        """Send one request → its number. Raises BadRequest, with nothing sent, if it is too large."""
        request, parts = self._protocol.request_parts(verb, fields)
        try:
            if self._timeout_s is not None and self._protocol.has_answered:
                self._socket.settimeout(max(self._timeout_s, READS_WITHIN_S))
            for part in parts:
                self._socket.sendall(part)
        except TimeoutError:
            raise self._silent() from None
        except OSError as error:
            self._raise_refusal_before_end()
            raise agent_gone(str(error.strerror or error)) from None
        finally:
            self._socket.settimeout(self._timeout_s)
        return request

    def _raise_refusal_before_end(self) -> None:
        """Raise the refusal that the agent sent before it closed the connection, if there is one. Does not wait."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        try:
            for _ in range(ANSWERS_BEFORE_END_MAX):
                if not poll.poll(0):
                    return
                self.receive()
        except AgentUnavailable:
            return

    def receive(self, *, may_last: bool = False) -> Answer:
        """The next answer. ``may_last``: wait without limit once the agent has answered anything."""
        waits_on = self._timeout_s is None or (may_last and self._protocol.has_answered)
        try:
            if not waits_on:
                self._await_sign()
            self._socket.settimeout(None if waits_on else self._timeout_s)
            while (answer := self._protocol.next_answer()) is None:
                self._protocol.receive_data(self._socket.recv(self._protocol.wanted_bytes))
        except TimeoutError:
            raise self._silent() from None
        except OSError as error:
            raise agent_gone(str(error)) from None
        finally:
            self._socket.settimeout(self._timeout_s)
        self._room_s = 0.0
        return answer

    def _await_sign(self) -> None:
        """Wait until the agent sends data. Raises TimeoutError."""
        assert self._timeout_s is not None
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        half_ms = self._timeout_s * 500
        if not poll.poll(half_ms):
            self.send("info")  # the request may take long; the agent answers this one immediately
            if not poll.poll(half_ms) and not (self._is_being_started() and poll.poll(self._starts_within_s * 1000)):
                raise TimeoutError

    def _is_being_started(self) -> bool:
        """True if the process that listened on this socket is gone: a service manager holds the socket and starts an agent."""
        pid = self._pid()
        if pid == SERVICE_MANAGER:
            return os.path.isdir("/run/systemd/system")  # noqa: PTH112 -- pathlib is slow to load
        return pid > 0 and not is_alive(pid)

    def _pid(self) -> int:
        """The pid of the agent; 0 if the kernel does not know it."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(credentials[:4], sys.byteorder)

    def _silent(self) -> AgentSilent:
        if self._is_being_started():
            return AgentSilent(
                "the agent does not come up", why="its service manager has its socket", hint=SERVICE_HINT
            )
        return agent_silent(self._timeout_s, self._pid())


def readable_within(descriptor: int, seconds: float) -> bool:
    """Wait until a descriptor is readable, for at most ``seconds`` → True if it is."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def is_alive(pid: int) -> bool:
    """True if a process with this pid exists, under any user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def agent_silent(timeout_s: float | None, pid: int = 0) -> AgentSilent:
    """The error for an agent that does not answer. ``pid``: 0 if unknown."""
    who = f"the agent (pid {pid})" if pid > 0 else "the agent"
    hint = f"its state:  ps -o stat,cmd -p {pid}        if it was stopped (T):  kill -CONT {pid}" if pid > 0 else ""
    return AgentSilent(f"{who} does not answer", why=f"nothing from it for {timeout_s or 0:g} s", hint=hint)


def default_socket_path() -> str:
    """The path of the agent's socket: PEERLOAD_SOCKET, else the setting in the user's config file, else the user's own socket,
    else the system's if only that one exists."""
    named = os.environ.get("PEERLOAD_SOCKET") or _configured_socket()
    if named:
        return named
    own = user_socket_path()
    return SYSTEM_SOCKET if not os.path.exists(own) and os.path.exists(SYSTEM_SOCKET) else own


def _configured_socket() -> str | None:
    """The setting `socket` of the user's config file; None without one. An unreadable file counts as none: its users report that."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    try:
        with open(os.path.join(base, "peerload", "config.toml"), "rb") as file:
            content = file.read()
        if b"socket" not in content:
            return None
        import tomllib  # noqa: PLC0415 -- every command needs its quick start

        found = tomllib.loads(content.decode()).get("socket")
    except (OSError, ValueError):
        return None
    return os.path.abspath(found) if found and isinstance(found, str) else None


def user_socket_path() -> str:
    """The path of the socket of the user's own agent: below XDG_RUNTIME_DIR, else below /run/user/UID, else in /tmp/peerload-UID.

    Raises PeerloadError if /tmp/peerload-UID belongs to another user or is accessible to others.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return os.path.join(runtime, "peerload", "agent.sock")
    user = os.getuid()
    runtime = f"/run/user/{user}"
    if _mode_if_ours(runtime) is not None:
        return os.path.join(runtime, "peerload", "agent.sock")
    private = f"/tmp/peerload-{user}"  # noqa: S108 -- checked below to be a directory of ours that nobody else can enter
    mode = _mode_if_ours(private)
    if os.path.lexists(private) and (mode is None or mode & 0o077):
        raise PeerloadError(
            f"{private} cannot be trusted",
            why="it is not a directory that only you can enter",
            hint="name a socket of your own:  --socket PATH  or  PEERLOAD_SOCKET=PATH",
        )
    return os.path.join(private, "agent.sock")


def _mode_if_ours(directory: str) -> int | None:
    """The mode of a directory (not a link) that belongs to this user, else None."""
    try:
        status = os.lstat(directory)
    except OSError:
        return None
    is_directory = status.st_mode & _KIND_MASK == _KIND_DIRECTORY
    return status.st_mode & 0o7777 if is_directory and status.st_uid == os.getuid() else None


def unavailable(path: str, error: OSError) -> AgentUnavailable:
    """The error for a failed connect to this socket."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        reason = f"the path {path} is longer than the {SOCKET_PATH_BYTES_MAX} bytes that a socket's path may have"
    elif isinstance(error, FileNotFoundError):
        reason = f"no socket at {path}"
    elif isinstance(error, ConnectionRefusedError):
        reason = f"nothing listens at {path}"
    elif isinstance(error, PermissionError):
        hint = _GROUP_HINT if path == SYSTEM_SOCKET else START_HINT
        return AgentUnavailable(f"you may not use the agent here (no permission to connect to {path}).", hint=hint)
    else:
        reason = f"{path}: {error.strerror or error}"
    if isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
        why, hint = _exit_reason(path)
        if why:
            return AgentUnavailable("no agent is running here any more", why=why, hint=hint or START_HINT)
    return AgentUnavailable(f"no agent is running here ({reason}).", hint=START_HINT)


def _exit_reason(path: str) -> tuple[str, str]:
    """The recorded reason why the agent of this socket exited, and a hint; both "" without a record."""
    try:
        fd = os.open(path + frame.LAST_WORDS_ENDING, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return "", ""
    try:
        text = os.read(fd, frame.LAST_WORDS_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return "", ""
    finally:
        os.close(fd)
    why, _, hint = text.partition("\n")
    return why.strip(), hint.strip()
