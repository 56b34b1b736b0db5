"""The encoding of a function call for a task, and of its outcome; client and task share this file.

The task reads one line of JSON (versions and options) and the pickled call from its standard input. It writes the outcome as the
last line of its standard output: `peerload-result MARK LENGTH DATA`. The client chooses MARK at random, so that nothing the function
prints can be mistaken for it. DATA is base64, which is harmless to a terminal. Agents do not interpret any of it.

The outcome is a pickle, which can run arbitrary code when it is loaded, or JSON, which cannot. The client chooses
(`Serializer`) and accepts no other format.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import TYPE_CHECKING, Any, Literal

import cloudpickle  # noqa: TID251 -- the user's own function and its outcome: opaque to every agent (rule C1)

from peerload.model.errors import PeerloadError

if TYPE_CHECKING:
    from collections.abc import Callable

VERSION = 1
CALL_BYTES_MAX = 64 << 20
"""Limit of a pickled call (function and arguments). The call is kept until the task has ended, so that another node can run it."""
RESULT_BYTES_MAX = 5 << 20
"""Limit of a result. Output beyond a node's capture limit is cut in the middle; at least this much of its end is kept."""
LINE_BYTES_MAX = RESULT_BYTES_MAX * 4 // 3 + 200
WORD = b"peerload-result"
Serializer = Literal["pickle", "json"]
"""The encoding of an outcome."""
SERIALIZERS: tuple[Serializer, ...] = ("pickle", "json")
PYTHON = list(sys.version_info[:2])


class TaskFailed(PeerloadError):
    """The task of a function call ended without a result. ``task``: its id; ``exit_code``, ``signal``: None if not applicable."""

    code = "task-failed"

    def __init__(
        self, task: str, what: str, *, why: str = "", exit_code: int | None = None, signal: int | None = None
    ) -> None:
        super().__init__(what, why=why, hint=f"peerload show {task}        peerload logs {task}")
        self.task = task
        self.exit_code = exit_code
        self.signal = signal


class RemoteError(Exception):
    """An exception of a function whose result is returned as JSON. ``kind``: the name of its class; ``text``: its message."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind
        self.text = text

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


class RemoteTraceback(Exception):
    """The traceback of an exception on another node: the ``__cause__`` of the exception raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


def packed_call(
    mark: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    path: list[str],
    serializer: Serializer = "pickle",
) -> bytes:
    """The standard input of the task. Raises whatever pickling raises, and ValueError if it is too large."""
    told = {"v": VERSION, "mark": mark, "python": PYTHON, "path": path, "serializer": serializer}
    head = json.dumps(told).encode()
    body: bytes = cloudpickle.dumps((function, args, kwargs))
    if len(body) > CALL_BYTES_MAX:
        raise ValueError(
            f"the pickled call has {len(body)} bytes; at most {CALL_BYTES_MAX} can be sent: put large values into a file"
        )
    return head + b"\n" + body


def packed_outcome(mark: str, outcome: dict[str, Any], serializer: Serializer = "pickle") -> bytes:
    """The last line of the task's output. Raises whatever pickling raises, TypeError for what JSON cannot express, and ValueError if
    it is too large."""
    body: bytes = cloudpickle.dumps(outcome) if serializer == "pickle" else json.dumps(_plain(outcome)).encode()
    if len(body) > RESULT_BYTES_MAX:
        raise ValueError(
            f"the result has {len(body)} bytes as {'a pickle' if serializer == 'pickle' else 'JSON'}; at most {RESULT_BYTES_MAX} come back:"
            " have the function write it to a file, and return the file's name"
        )
    data = base64.b64encode(body)
    return b"\n%s %s %d %s\n" % (WORD, mark.encode(), len(data), data)


def _plain(value: Any) -> Any:  # noqa: ANN401 -- whatever the function returned
    """Convert a value to JSON types; an exception becomes its name and text. Raises TypeError for a value that JSON would change,
    such as a dict with numbers as keys."""
    if isinstance(value, BaseException):
        return {"kind": type(value).__qualname__, "text": str(value)}
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"a dict has the key {odd[0]!r}; JSON allows only text as keys")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"JSON cannot express {type(value).__qualname__}")


def outcome_in(stdout: bytes, mark: str, serializer: Serializer = "pickle") -> dict[str, Any] | None:
    """The outcome at the end of a task's output; None if there is none or it is cut off. Raises whatever unpickling raises, and
    ValueError for JSON that is not an outcome."""
    begins = b"\n%s %s " % (WORD, mark.encode())
    at = stdout.rfind(begins)
    if at < 0:
        return None
    size, _, rest = stdout[at + len(begins) :].partition(b" ")
    if not size.isdigit() or len(rest) < int(size):
        return None
    body = base64.b64decode(rest[: int(size)])
    if serializer == "json":
        return _from_json(json.loads(body))
    outcome: dict[str, Any] = cloudpickle.loads(body)
    return outcome


def _from_json(outcome: Any) -> dict[str, Any]:  # noqa: ANN401 -- any JSON
    """The outcome in JSON. Raises ValueError."""
    match outcome:
        case {"error": {"kind": str(kind), "text": str(text)}, "traceback": str(traceback)}:
            return failure_of(RemoteError(kind, text), traceback)
        case {"value": value}:
            return {"value": value}
    raise ValueError("the task wrote no result")


def failure_of(error: BaseException, text: str) -> dict[str, Any]:
    return {"error": error, "traceback": text}
