# ruff: noqa: PTH100, PTH110, PTH111, PTH118, PTH123
# os.path, since pathlib would cost every command its quick start.
"""Connections to an agent over its Unix socket: the protocol without any I/O, a blocking connection, and where that socket is.

>>> with AgentConnection() as client:                       # doctest: +SKIP
...     client.call("info")["node"]
'ws1'

It is quick to import, since every command needs it. A driver sends what `Protocol.request` returns. It reads at most
`wanted_bytes` bytes, which never reach beyond the answer that is on its way, and hands them to `receive_data` until
`next_answer` returns that answer. So a socket that can be read means another answer. `AgentConnection` drives it with a
blocking socket, `asynchronous.py` with asyncio. docs/wire.md describes the messages; the verbs and their fields are those of
`peerload.wire.control`; a reply is a plain dict.
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
"""Patience with an agent that has answered before and reads no more. Closing the connection would cancel the tasks that end with it."""
STARTS_WITHIN_S = 120.0
"""Patience with an agent that a service manager is starting: it may have much to read first."""
ANSWERS_BEFORE_END_MAX = 100
"""Answers of an agent that has closed the connection that are searched for a refusal."""
SERVICE_HINT = "systemctl status peerload        its log:  journalctl -u peerload"
SERVICE_MANAGER = 1
"""The pid of init."""
SOCKET_PATH_BYTES_MAX = 107
"""The kernel's bound for the path of a Unix socket."""
RECONNECT_S_MAX = 60.0
"""Patience with an agent that went away, as it does to start itself again."""
RECONNECT_EVERY_S = 0.25
ROOM_S_MAX = 5.0
"""Patience of a quick request with an agent that has no room for one more client."""
EVENTS_MAX = 100_000
"""Bound of the events of one request."""
READ_BYTES_MAX = 256 << 10
"""Bound of one read."""

_KINDS = ("more", "ok", "error")
_REFUSALS: dict[str, type[BadRequest]] = {
    kind.code: kind for kind in (BadRequest, NoSuchTask, NeverRunnable, StagingFailed, SnapshotWanted)
}
_KIND_MASK, _KIND_DIRECTORY = 0o170000, 0o040000  # as in <sys/stat.h>; the module stat is not needed for that

Answer = tuple[int, str, "dict[str, Any]"]
"""The number of the request that it answers, its kind ("more", "ok" or "error"), and its body."""

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
        """Bound on the bytes to read before `next_answer` is asked again."""
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
        malformed, and ClientRefused for a refusal that is about the connection and not about one request."""
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
    """True if the answer to a request has no time limit, since it follows future events."""
    return verb == "wait" or bool(fields.get("follow"))


def accepted(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body of an "ok". Raises the error that an "error" describes."""
    if kind != "ok":
        raise refusal(body)
    return body


def refusal(body: dict[str, Any], kind: type[BadRequest] = BadRequest) -> BadRequest:
    """The error that the body of an "error" describes. ``kind``: its class if its code has none of its own."""
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
    """True if the agent is away, or has no room for one more client now."""
    return isinstance(error, AgentUnavailable) or error.code == SlowDown.code


class Reconnection:
    """Patience of one call with an agent that goes away, as it does to start itself again, or has no room for one more client.

    ``patience_s``: the longest time without the agent. ``until_s`` (monotonic): the end of the call, beyond which it does not wait
    for the agent either. ``was_there``: an agent has answered before the call. One that was never there is not waited for.
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
        """The end of the call has passed while the agent was away."""

    @property
    def is_lost(self) -> bool:
        """True from a failure that is worth another try until the next answer."""
        return self._lost_until_s > 0.0

    def answered(self) -> None:
        """Record that the agent has answered."""
        self._lost_until_s = 0.0

    def continues(self, error: PeerloadError) -> bool:
        """True if, after this failure, the call is to be made again in RECONNECT_EVERY_S."""
        now_s = time.monotonic()
        can_be_back = is_worth_another_try(error) and not isinstance(error, AgentSilent)
        if not self.is_lost:
            self._lost_until_s = min(now_s + self._patience_s, self._until_s)
            can_be_back &= isinstance(error, (AgentUnavailable if self._was_there else AgentGone, ClientRefused))
        self.timed_out = can_be_back and now_s >= self._until_s
        return can_be_back and now_s < self._lost_until_s


def agent_gone(reason: str) -> AgentGone:
    """The error where the connection to an agent has ended."""
    return AgentGone("the agent disconnected", why=reason, hint="is it running?  peerload up")


def beyond(piece: dict[str, Any], came: dict[int, int]) -> dict[str, Any] | None:
    """The part of a piece of output beyond what of its stream came before; None if there is none. Updates ``came``."""
    stream, offset, data = piece["stream"], piece["offset"], piece["data"]
    known = came[stream] - offset
    if known >= len(data):
        return None
    came[stream] = offset + len(data)
    return {**piece, "offset": offset + known, "data": data[known:]} if known > 0 else piece


class OutputPosition:
    """The position in a task's output: the number of bytes of each stream that came, of the attempt whose output is sent."""

    __slots__ = ("_attempt", "_came")

    def __init__(self) -> None:
        self._attempt: object = None
        self._came = {1: 0, 2: 0}

    def beyond(self, piece: dict[str, Any]) -> dict[str, Any] | None:
        """The part of the next piece that did not come before a reconnection; None if there is none, as of a piece that only says
        where the last lines begin."""
        if piece.get("attempt") != self._attempt:
            self._attempt, self._came = piece.get("attempt"), {1: 0, 2: 0}
        new = beyond(piece, self._came)
        return new if new is not None and new["data"] else None


class OutputGaps:
    """Gaps in a task's output, found from the pieces of an `output` answer and from its final reply.

    ``is_whole``: the answer begins at the beginning of the output; otherwise (the last lines only) the bytes before the first piece
    are not counted. ``streams``: those that were asked for. What the agent could not read or fetch is not known by stream, and counts
    with each.
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

    ``socket_path`` None: the path that `default_socket_path` finds. Every method raises AgentUnavailable if the agent is not there
    or goes away, and BadRequest (or a subclass of it, with the ``code`` that the agent sent) if the agent refuses.
    ``timeout_s``: the agent may be silent for this long, then AgentSilent is raised (None: for ever). A request may take longer:
    after half of the time the client asks for `info`, and it waits on while the agent answers that. A request that follows
    something (`wait`, ``follow``) waits for ever once the agent has answered anything; then it may take READS_WITHIN_S to read one.
    ``awaits_start``: an agent that a service manager starts may take STARTS_WITHIN_S to do so.
    ``room_s``: patience with an agent that has no room for one more client, until it has answered the first time (0: the caller tries again).
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
        """Connect, also again after the agent went away; the requests from before are no longer answered."""
        timeout_s = self._timeout_s
        self._protocol = Protocol()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if (
            timeout_s is not None
        ):  # the kernel's limit for connect: a non-blocking socket would not wait for room in the backlog
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
        """The descriptor of the socket, to be polled with others: when it can be read, an answer is coming."""
        return self._socket.fileno()

    def call(self, verb: str, **fields: object) -> dict[str, Any]:
        """Send one request and return its reply, lists that came in parts joined. Answers to other requests are dropped."""
        parts = list(self.stream(verb, **fields))
        return joined(parts, self.last)

    def stream(self, verb: str, **fields: object) -> Iterator[dict[str, Any]]:
        """Send one request and yield each part of its answer as it comes; then `last` is the final reply."""
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
        """Send one request and return its number. Raises BadRequest, with nothing sent, if it is too large."""
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
        """The agent has closed the connection: raise the refusal that it sent before, if there is one. This does not wait."""
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
        """The next answer. ``may_last``: it may take for ever, once the agent has answered anything."""
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
            self.send("info")  # the request may take long; this one is answered at once
            if not poll.poll(half_ms) and not (self._is_being_started() and poll.poll(self._starts_within_s * 1000)):
                raise TimeoutError

    def _is_being_started(self) -> bool:
        """True if the process that listened at this socket is gone: a service manager holds it and starts an agent for it."""
        pid = self._pid()
        if pid == SERVICE_MANAGER:
            return os.path.isdir("/run/systemd/system")  # noqa: PTH112 -- pathlib is slow to load
        return pid > 0 and not is_alive(pid)

    def _pid(self) -> int:
        """The pid of the agent; 0 if the kernel does not say."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(credentials[:4], sys.byteorder)

    def _silent(self) -> AgentSilent:
        if self._is_being_started():
            return AgentSilent(
                "the agent does not come up", why="its service manager has its socket", hint=SERVICE_HINT
            )
        return agent_silent(self._timeout_s, self._pid())


def readable_within(descriptor: int, seconds: float) -> bool:
    """Wait until a descriptor can be read, at most for so long. → True if it can."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def is_alive(pid: int) -> bool:
    """True if there is a process of this number, also one of another user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def agent_silent(timeout_s: float | None, pid: int = 0) -> AgentSilent:
    """The error where an agent has not answered. ``pid``: its process, 0 if that is not known."""
    who = f"the agent (pid {pid})" if pid > 0 else "the agent"
    hint = f"its state:  ps -o stat,cmd -p {pid}        if it was stopped (T):  kill -CONT {pid}" if pid > 0 else ""
    return AgentSilent(f"{who} does not answer", why=f"nothing from it for {timeout_s or 0:g} s", hint=hint)


def default_socket_path() -> str:
    """The path of the agent's socket: PEERLOAD_SOCKET, else that of the user's config file, else the user's own, else the system's if
    only that one exists."""
    named = os.environ.get("PEERLOAD_SOCKET") or _configured_socket()
    if named:
        return named
    own = user_socket_path()
    return SYSTEM_SOCKET if not os.path.exists(own) and os.path.exists(SYSTEM_SOCKET) else own


def _configured_socket() -> str | None:
    """The setting `socket` of the user's config file; None without one, or if the file cannot be read: whoever uses it says so."""
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

    Raises PeerloadError if that last directory belongs to another user or is open to others.
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
    """The error where no connection to this socket can be made."""
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
    """Reason why the agent of this socket ended by itself, and a hint; both "" if it left none."""
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
