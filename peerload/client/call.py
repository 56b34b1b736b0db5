"""A function call on its way to a task, and its outcome on the way back; both ends read this file.

To the task goes, as its standard input, one line of JSON (what is needed to understand the rest) and the pickled call.
Back comes, as the last line of its standard output, `peerload-result MARK LENGTH DATA`: MARK was drawn by the client, so
that nothing that the function prints can be taken for it; DATA is base64, so that a terminal is not disturbed by it.
Agents carry bytes, and understand none of them.

The outcome is a pickle, which runs what the node that made it has put there, or JSON, which runs nothing: the client
chooses (`Serializer`), and reads nothing but what it has chosen.
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
"""A pickled call: function and arguments. It is kept until the task has ended, so that it can be run elsewhere."""
RESULT_BYTES_MAX = 5 << 20
"""A pickled result. What a task writes beyond what a node captures is cut from the middle; this much of the end is kept."""
LINE_BYTES_MAX = RESULT_BYTES_MAX * 4 // 3 + 200
WORD = b"peerload-result"
Serializer = Literal["pickle", "json"]
"""How an outcome comes back."""
SERIALIZERS: tuple[Serializer, ...] = ("pickle", "json")
PYTHON = list(sys.version_info[:2])


class TaskFailed(PeerloadError):
    """The task of a function call ended without a result. ``task``: its id; ``exit_code``, ``signal``: None if it has none."""

    code = "task-failed"

    def __init__(
        self, task: str, what: str, *, why: str = "", exit_code: int | None = None, signal: int | None = None
    ) -> None:
        super().__init__(what, why=why, hint=f"peerload show {task}        peerload logs {task}")
        self.task = task
        self.exit_code = exit_code
        self.signal = signal


class RemoteError(Exception):
    """What a function has raised, where results come back as JSON. ``kind``: the name of its class; ``text``: what it said."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}" if text else kind)
        self.kind = kind
        self.text = text


class RemoteTraceback(Exception):
    """Where an exception was raised on another node: the ``__cause__`` of what is raised here."""

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
    """What the task reads. Raises whatever pickling raises, and ValueError if it is too large."""
    told = {"v": VERSION, "mark": mark, "python": PYTHON, "path": path, "serializer": serializer}
    head = json.dumps(told).encode()
    body: bytes = cloudpickle.dumps((function, args, kwargs))
    if len(body) > CALL_BYTES_MAX:
        raise ValueError(
            f"the call has {len(body)} bytes as a pickle; at most {CALL_BYTES_MAX} can be sent: put what is large into a file"
        )
    return head + b"\n" + body


def packed_outcome(mark: str, outcome: dict[str, Any], serializer: Serializer = "pickle") -> bytes:
    """The last line of the task's output. Raises whatever pickling raises, and ValueError if it is too large; of JSON
    TypeError for what it has no words for."""
    body: bytes = cloudpickle.dumps(outcome) if serializer == "pickle" else json.dumps(_plain(outcome)).encode()
    if len(body) > RESULT_BYTES_MAX:
        raise ValueError(
            f"the result has {len(body)} bytes as {'a pickle' if serializer == 'pickle' else 'JSON'}; at most {RESULT_BYTES_MAX} come back:"
            " have the function write it to a file, and return the file's name"
        )
    data = base64.b64encode(body)
    return b"\n%s %s %d %s\n" % (WORD, mark.encode(), len(data), data)


def _plain(value: Any) -> Any:  # noqa: ANN401 -- whatever the function returned
    """The same, if JSON has words for all of it, and for an exception its name and text. Raises TypeError: what would come
    back as something else, as a dict with numbers for keys would, is not sent."""
    if isinstance(value, BaseException):
        return {"kind": type(value).__qualname__, "text": str(value)}
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"a dict with the key {odd[0]!r}, where JSON has text alone")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"JSON has no {type(value).__qualname__}")


def outcome_in(stdout: bytes, mark: str, serializer: Serializer = "pickle") -> dict[str, Any] | None:
    """The outcome in the end of a task's output; None if there is none, or not all of it. Raises whatever unpickling it
    raises; of JSON ValueError."""
    begins = b"\n%s %s " % (WORD, mark.encode())
    at = stdout.rfind(begins)
    if at < 0:
        return None
    size, _, rest = stdout[at + len(begins) :].partition(b" ")
    if not size.isdigit() or len(rest) < int(size):
        return None
    body = base64.b64decode(rest[: int(size)])
    if serializer == "json":
        return _told(json.loads(body))
    outcome: dict[str, Any] = cloudpickle.loads(body)
    return outcome


def _told(outcome: Any) -> dict[str, Any]:  # noqa: ANN401 -- whatever came
    """An outcome that came as JSON. Raises ValueError."""
    match outcome:
        case {"error": {"kind": str(kind), "text": str(text)}, "traceback": str(traceback)}:
            return failure_of(RemoteError(kind, text), traceback)
        case {"value": value}:
            return {"value": value}
    raise ValueError("the task has told no outcome")


def failure_of(error: BaseException, text: str) -> dict[str, Any]:
    """The outcome of a call that has raised this; ``text``: its traceback."""
    return {"error": error, "traceback": text}
