"""The protocol between a client and its agent, without any I/O: requests become bytes, bytes become answers.

A driver sends what `request` returns. It reads at most `wanted_bytes` bytes, which never reach beyond the answer that is on its
way, and hands them to `receive_data` until `next_answer` returns that answer. So a socket that can be read means another answer.
`connection.py` drives it with a blocking socket, `asynchronous.py` with asyncio. docs/wire.md describes the messages.
"""

from __future__ import annotations

from peerload.model.errors import (
    AgentUnavailable,
    BadRequest,
    NeverRunnable,
    NoSuchTask,
    OutputIncomplete,
    SnapshotWanted,
    StagingFailed,
)
from peerload.wire import frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    Answer = tuple[int, str, dict[str, Any]]
    """The number of the request that it answers, its kind ("more", "ok" or "error"), and its body."""

READ_BYTES_MAX = 256 << 10
"""Bound of one read."""
_KINDS = ("more", "ok", "error")
_REFUSALS: dict[str, type[BadRequest]] = {
    kind.code: kind for kind in (BadRequest, NoSuchTask, NeverRunnable, StagingFailed, SnapshotWanted)
}


class Protocol:
    """One connection to an agent. ``has_answered``: the agent has sent data."""

    __slots__ = ("_buffer", "_requests", "_size", "has_answered")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._requests = 0
        self._size: int | None = None
        self.has_answered = False

    def request(self, verb: str, fields: dict[str, object]) -> tuple[int, bytes]:
        """The number of a new request and its bytes. Raises BadRequest if it is too large or not UTF-8."""
        self._requests += 1
        try:
            return self._requests, frame.pack({"id": self._requests, "verb": verb, **fields})
        except UnicodeEncodeError as error:
            raise BadRequest("the request is not UTF-8", why=f"{error.object[:80]!r}") from None
        except ValueError as error:
            raise BadRequest("the request is too large", why=str(error)) from None

    @property
    def wanted_bytes(self) -> int:
        """How many bytes to read at most before `next_answer` is asked again."""
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
        """The answer that has arrived; None if more bytes are needed. Raises AgentUnavailable for what is no answer, and
        BadRequest for a refusal that is about the connection and not about one request."""
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
                        raise refusal(body)
                    return (request if isinstance(request, int) else 0), kind, body
        raise agent_gone("invalid response from the agent")


def follows(verb: str, fields: dict[str, object]) -> bool:
    """True if the answer to a request may take for ever, since it tells what happens from now on."""
    return verb == "wait" or bool(fields.get("follow"))


def accepted(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body of an "ok". Raises the error that an "error" describes."""
    if kind != "ok":
        raise refusal(body)
    return body


def refusal(body: dict[str, Any]) -> BadRequest:
    """The error that the body of an "error" describes."""
    code = str(body.get("code", ""))
    error = _REFUSALS.get(code, BadRequest)(
        str(body.get("what") or "the agent refused"), why=str(body.get("why") or ""), hint=str(body.get("hint") or "")
    )
    error.code = code or error.code
    return error


def joined(parts: Iterable[dict[str, Any]], reply: dict[str, Any]) -> dict[str, Any]:
    """One reply that came in parts: their lists joined."""
    lists: dict[str, list[Any]] = {}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, list):
                lists.setdefault(key, []).extend(value)
    return reply | {key: [*items, *reply.get(key, ())] for key, items in lists.items()}


def agent_gone(reason: str) -> AgentUnavailable:
    """The error where the connection to an agent has ended."""
    return AgentUnavailable("the agent went away", why=reason, hint="is it running?  peerload up")


class OutputGaps:
    """Gaps in a task's output, found from the pieces of an `output` answer and from its final reply.

    ``is_whole``: the answer begins at the beginning of the output; otherwise (the last lines only) the bytes before the first piece
    are not counted.
    """

    __slots__ = ("_next", "missing_bytes")

    def __init__(self, *, is_whole: bool = True) -> None:
        self.missing_bytes = 0
        """The missing bytes found so far."""
        self._next: dict[int, int | None] = dict.fromkeys((1, 2), 0 if is_whole else None)

    def add(self, piece: dict[str, Any]) -> int:
        """Add the next piece {stream, offset, data} → the number of bytes missing before it."""
        stream, offset = piece["stream"], piece["offset"]
        expected = self._next[stream]
        self._next[stream] = offset + len(piece["data"])
        gap = 0 if expected is None else max(offset - expected, 0)
        self.missing_bytes += gap
        return gap

    def end(self, reply: dict[str, Any]) -> int:
        """Add the final reply of an answer about both streams → the number of bytes missing at their ends."""
        gap = int(reply.get("missing_bytes") or 0)
        for stream, key in ((1, "stdout_bytes"), (2, "stderr_bytes")):
            came = self._next[stream]
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
