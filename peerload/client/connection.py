# ruff: noqa: PTH110, PTH118
# os.path, since pathlib would cost every command its quick start.
"""Talk to an agent over its Unix socket, from any program.

>>> with Client() as client:                                # doctest: +SKIP
...     client.call("info")["node"]
'ws1'

Blocking, and quick to import: nothing but msgpack, os and socket. The verbs and their fields are those of
`peerload.wire.control`; a reply is a plain dict.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys

from peerload.model.errors import (
    AgentSilent,
    AgentUnavailable,
    BadRequest,
    NeverRunnable,
    NoSuchTask,
    OutputIncomplete,
    PeerloadError,
)
from peerload.wire import frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Any, NoReturn, Self

SYSTEM_SOCKET = "/run/peerload/agent.sock"
ANSWERS_WITHIN_S = 10.0
"""An agent that says nothing at all for so long, not even who it is, counts as stopped."""
STARTS_WITHIN_S = 120.0
"""One that a service manager is starting, whose socket it has meanwhile, is waited for so long: it may have much to read first."""
LAST_WORDS_MAX = 100
"""So many answers of an agent that has hung up are looked through for why."""
SERVICE_MANAGER = 1
"""Its process."""
SOCKET_PATH_BYTES_MAX = 107
"""What the kernel takes as the name of a Unix socket."""

_KIND_MASK, _KIND_DIRECTORY = 0o170000, 0o040000  # as in <sys/stat.h>; the module stat is not needed for that

START_HINT = "start one:  peerload up        if one should be there:  peerload doctor"
_GROUP_HINT = "sudo adduser YOU peerload  and log in anew; or an agent of your own:  peerload up"
_REFUSALS: dict[str, type[BadRequest]] = {kind.code: kind for kind in (BadRequest, NoSuchTask, NeverRunnable)}


class OutputGaps:
    """What is missing of a task's output, found from the pieces of an `output` answer and from the reply that ends it.

    ``is_whole``: the answer begins at the beginning of the output; without it (the last lines only) what comes before the
    first piece does not count.
    """

    __slots__ = ("_next", "missing_bytes")

    def __init__(self, *, is_whole: bool = True) -> None:
        self.missing_bytes = 0
        """So much is known to be missing."""
        self._next: dict[int, int | None] = dict.fromkeys((1, 2), 0 if is_whole else None)

    def add(self, piece: dict[str, Any]) -> int:
        """Note the next piece {stream, offset, data} → how many bytes are missing before it."""
        stream, offset = piece["stream"], piece["offset"]
        expected = self._next[stream]
        self._next[stream] = offset + len(piece["data"])
        gap = 0 if expected is None else max(offset - expected, 0)
        self.missing_bytes += gap
        return gap

    def end(self, reply: dict[str, Any]) -> int:
        """Note the final reply of an answer about both streams → how many bytes are missing at the end of them."""
        gap = int(reply.get("missing_bytes") or 0)
        for stream, key in ((1, "stdout_bytes"), (2, "stderr_bytes")):
            came = self._next[stream]
            if came is not None:
                gap += max(int(reply.get(key) or 0) - came, 0)
        self.missing_bytes += gap
        return gap

    def require_all(self, reply: dict[str, Any]) -> None:
        """The same as `end`. Raises OutputIncomplete if anything is missing."""
        self.end(reply)
        if self.missing_bytes:
            gone = reply.get("output_gone_why")
            why = f"it was removed ({gone})" if gone else "more was written than is kept, or it cannot be read"
            raise OutputIncomplete(str(reply.get("id", "")), self.missing_bytes, why=why)


class Client:
    """One connection to an agent.

    ``socket_path`` None means the one `default_socket_path` finds. Every method raises AgentUnavailable if the agent
    is not there or goes away, BadRequest (or a kind of it, its ``code`` as the agent gave it) if it refuses.
    ``timeout_s``: an agent that says nothing for so long raises AgentSilent (None: it may take for ever), unless a service manager
    is just starting it. A request may
    take longer: half-way the agent is asked who it is, and while it answers that it is waited for. What follows something
    (`wait`, ``follow``) waits for ever for an agent that has answered once: one that was stopped may go on.
    ``last`` is the reply that ended the latest `stream`.
    """

    def __init__(self, socket_path: str | None = None, *, timeout_s: float | None = ANSWERS_WITHIN_S) -> None:
        self.path = socket_path or default_socket_path()
        self.last: dict[str, Any] = {}
        self._request = 0
        self._timeout_s = timeout_s
        self._has_answered = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if timeout_s is not None:  # the kernel's own limit: a socket that does not block would not wait to be let in
            limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            self._socket.connect(self.path)
        except BlockingIOError:
            self._socket.close()
            raise self._silent(0) from None
        except OSError as error:
            self._socket.close()
            raise unavailable(self.path, error) from None
        self._socket.settimeout(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def descriptor(self) -> int:
        """The socket's, to be waited on along with others: when it can be read, `receive` has something."""
        return self._socket.fileno()

    def close(self) -> None:
        """Hang up. Tasks are not touched by that."""
        self._socket.close()

    def fileno(self) -> int:
        """The socket, to be waited for with others: when it can be read there is (the beginning of) an answer."""
        return self._socket.fileno()

    def call(self, verb: str, **fields: object) -> dict[str, Any]:
        """Send one request and return its reply, lists that came in parts joined; what arrives for other requests
        meanwhile is dropped."""
        request = self.send(verb, **fields)
        parts: dict[str, list[Any]] = {}
        while True:
            answered, kind, body = self.receive()
            if answered != request:
                continue
            if kind != "more":
                reply = accepted(kind, body)
                return reply | {key: [*items, *reply.get(key, ())] for key, items in parts.items()}
            for key, value in body.items():
                if isinstance(value, list):
                    parts.setdefault(key, []).extend(value)

    def stream(self, verb: str, **fields: object) -> Iterator[dict[str, Any]]:
        """Send one request and yield each part of its answer as it comes; then `last` is the final reply."""
        request = self.send(verb, **fields)
        follows = verb == "wait" or bool(fields.get("follow"))
        while True:
            answered, kind, body = self.receive(follows=follows)
            if answered != request:
                continue
            if kind != "more":
                self.last = accepted(kind, body)
                return
            yield body

    def send(self, verb: str, **fields: object) -> int:
        """Send one request and return its number. Raises BadRequest, with nothing sent, if it is too large."""
        self._request += 1
        try:
            raw = frame.pack({"id": self._request, "verb": verb, **fields})
        except UnicodeEncodeError as error:
            raise BadRequest("the request is not UTF-8", why=f"{error.object[:80]!r}") from None
        except ValueError as error:
            raise BadRequest("the request is too large", why=str(error)) from None
        try:
            self._socket.sendall(raw)
        except TimeoutError:
            raise self._silent(self._pid()) from None
        except OSError as error:
            self._heed_last_word()
            raise _gone(str(error.strerror or error)) from None
        return self._request

    def _heed_last_word(self) -> None:
        """The agent has hung up: raise what it said before, if that was why. Nothing is waited for: it is here, or never was."""
        looks = select.poll()
        looks.register(self._socket, select.POLLIN)
        try:
            for _ in range(LAST_WORDS_MAX):
                if not looks.poll(0):
                    return
                self.receive()
        except AgentUnavailable:
            return

    def receive(self, *, follows: bool = False) -> tuple[int, str, dict[str, Any]]:
        """The next answer: the number of its request, its kind ("ok", "more" or "error") and its body. ``follows``: it
        may take for ever if there was one before."""
        waits_on = self._timeout_s is None or (follows and self._has_answered)
        try:
            if not waits_on:
                self._await_sign()
            self._socket.settimeout(None if waits_on else self._timeout_s)
            message = frame.read(self._socket)
        except TimeoutError:
            raise self._silent(self._pid()) from None
        except (OSError, ValueError) as error:
            raise _gone(str(error)) from None
        finally:
            self._socket.settimeout(self._timeout_s)
        self._has_answered = True
        if isinstance(message, dict):
            for kind in ("more", "ok", "error"):
                body = message.get(kind)
                if isinstance(body, dict):
                    request = message.get("id")
                    if request == 0 and kind == "error":
                        raise_refusal(body)  # it is about this connection, not about one request
                    return (request if isinstance(request, int) else 0), kind, body
        raise _gone("it said something that is no answer")

    def _await_sign(self) -> None:
        """Wait until the agent says anything; raises TimeoutError if it does not."""
        assert self._timeout_s is not None
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        half_ms = self._timeout_s * 500
        if not poll.poll(half_ms):
            self.send("info")  # what was asked may take its time; who it is it can say at once
            if not poll.poll(half_ms) and not (self._is_being_started() and poll.poll(STARTS_WITHIN_S * 1000)):
                raise TimeoutError

    def _is_being_started(self) -> bool:
        """Whether nobody is there who has listened at this socket: a service manager holds it, and starts an agent for it."""
        pid = self._pid()
        if pid == SERVICE_MANAGER:
            return os.path.isdir("/run/systemd/system")  # noqa: PTH112 -- pathlib is slow to load
        if pid <= 0:
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False

    def _pid(self) -> int:
        """The agent's process; 0 if the kernel does not tell."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(credentials[:4], sys.byteorder)

    def _silent(self, pid: int) -> AgentSilent:
        who = f"the agent (pid {pid})" if pid > 0 else "the agent"
        hint = (
            f"what it does:  ps -o stat,cmd -p {pid}        if it was stopped (T):  kill -CONT {pid}" if pid > 0 else ""
        )
        return AgentSilent(f"{who} does not answer", why=f"nothing from it for {self._timeout_s:g} s", hint=hint)


def accepted(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body of an "ok"; raises the error that an "error" describes."""
    if kind != "ok":
        raise_refusal(body)
    return body


def raise_refusal(body: dict[str, Any]) -> NoReturn:
    """Raise the error that the body of an "error" describes."""
    code = str(body.get("code", ""))
    error = _REFUSALS.get(code, BadRequest)(
        str(body.get("what") or "the agent refused"), why=str(body.get("why") or ""), hint=str(body.get("hint") or "")
    )
    error.code = code or error.code
    raise error


def default_socket_path() -> str:
    """Where to look for an agent: PEERLOAD_SOCKET, else the user's own, else the system's if only that is there."""
    named = os.environ.get("PEERLOAD_SOCKET")
    if named:
        return named
    own = user_socket_path()
    return SYSTEM_SOCKET if not os.path.exists(own) and os.path.exists(SYSTEM_SOCKET) else own


def user_socket_path() -> str:
    """Where the user's own agent listens.

    Below XDG_RUNTIME_DIR; where that is unset, below /run/user/UID, else in /tmp/peerload-UID. Raises PeerloadError
    if that last one belongs to somebody else or is open to others.
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
    """What is raised where no connection to a socket can be had."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        reason = f"the path {path} is longer than the {SOCKET_PATH_BYTES_MAX} bytes a socket's may have"
    elif isinstance(error, FileNotFoundError):
        reason = f"no socket at {path}"
    elif isinstance(error, ConnectionRefusedError):
        reason = f"nobody listens at {path}"
    elif isinstance(error, PermissionError):
        hint = _GROUP_HINT if path == SYSTEM_SOCKET else START_HINT
        return AgentUnavailable(f"you may not use the agent here (you may not connect to {path}).", hint=hint)
    else:
        reason = f"{path}: {error.strerror or error}"
    if isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
        why, hint = _last_words(path)
        if why:
            return AgentUnavailable("no agent is running here any more", why=why, hint=hint or START_HINT)
    return AgentUnavailable(f"no agent is running here ({reason}).", hint=START_HINT)


def _last_words(path: str) -> tuple[str, str]:
    """Why the agent that was at this socket has ended of itself, and what helps; "" where it has not said so."""
    try:
        fd = os.open(path + frame.LAST_WORDS_ENDING, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return "", ""
    try:
        words = os.read(fd, frame.LAST_WORDS_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return "", ""
    finally:
        os.close(fd)
    why, _, hint = words.partition("\n")
    return why.strip(), hint.strip()


def _gone(reason: str) -> AgentUnavailable:
    return AgentUnavailable("the agent went away", why=reason, hint="is it running?  peerload up")
