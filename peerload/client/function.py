"""The program of a task of `peerload.Executor`: `python -m peerload.client.function` reads a call, runs it, and writes its outcome.

The output of the function is the task's output, as with any command. The outcome goes to a duplicate of standard output, so that
the function may redirect or close the original.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import cloudpickle  # noqa: TID251 -- the user's own function and its outcome: opaque to every agent (rule C1)

from peerload.client import call

TRACEBACK_CHARACTERS_MAX = 100_000
OTHER_PYTHON = 125
"""Exit code: the call is from another version of Python or of this format."""


def main() -> int:
    """Read the call, run it, write the outcome → the exit code: 0 if the function returned, 1 if it raised."""
    raw = sys.stdin.buffer.read()
    private = os.dup(1)  # not inherited by processes that the function starts
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    head, _, body = raw.partition(b"\n")
    told = json.loads(head)
    mark = str(told["mark"])
    serializer: call.Serializer = "json" if told.get("serializer") == "json" else "pickle"
    del raw
    if told["v"] != call.VERSION or told["python"] != call.PYTHON:
        ours, theirs = (".".join(map(str, version)) for version in (call.PYTHON, told["python"]))
        error = RuntimeError(
            f"the call was made by Python {theirs} (format {told['v']}), and {os.uname().nodename} has Python {ours}"
            f" (format {call.VERSION}) at {sys.executable}: name an interpreter that all nodes have, with python="
        )
        _write(private, mark, serializer, call.failure_of(error, ""))
        return OTHER_PYTHON
    for directory in told["path"]:
        if directory not in sys.path:
            sys.path.append(directory)
    outcome = _outcome(body)
    for stream in (sys.stdout, sys.stderr):
        _flush(stream)
    _write(private, mark, serializer, outcome)
    return 1 if "error" in outcome else 0


def _outcome(body: bytes) -> dict[str, Any]:
    try:
        function, args, kwargs = cloudpickle.loads(body)
    except BaseException as error:  # noqa: BLE001 -- whatever a class's own code raises
        return _failure(error)
    del body
    try:
        return {"value": function(*args, **kwargs)}
    except BaseException as error:  # noqa: BLE001 -- SystemExit and KeyboardInterrupt too: the future raises them
        return _failure(error)


def _failure(error: BaseException) -> dict[str, Any]:
    text = "".join(traceback.format_exception(error))
    if len(text) > TRACEBACK_CHARACTERS_MAX:
        half = TRACEBACK_CHARACTERS_MAX // 2
        text = f"{text[:half]}\n  …\n{text[-half:]}"
    BaseException.__setattr__(error, "__traceback__", None)  # a frozen dataclass refuses a plain assignment
    return call.failure_of(error, text)


def _write(descriptor: int, mark: str, serializer: call.Serializer, outcome: dict[str, Any]) -> None:
    """Write the outcome, or the reason why it cannot be sent."""
    try:
        line = call.packed_outcome(mark, outcome, serializer)
        call.outcome_in(line, mark, serializer)  # some exceptions can be pickled but not unpickled
    except BaseException as error:  # noqa: BLE001 -- whatever a class's own code raises
        line = call.packed_outcome(mark, _unsendable(outcome, error), serializer)
    view = memoryview(line)
    while view:
        view = view[os.write(descriptor, view) :]


def _unsendable(outcome: dict[str, Any], error: BaseException) -> dict[str, Any]:
    if "error" in outcome:
        raised = outcome["error"]
        plain = RuntimeError(f"{type(raised).__qualname__}: {_text(raised)}")
        return call.failure_of(plain, outcome["traceback"])
    kind = ValueError if isinstance(error, ValueError) else TypeError
    return call.failure_of(
        kind(f"the result cannot be sent: {_text(error)}"), f"{type(error).__name__}: {_text(error)}\n"
    )


def _text(error: object) -> str:
    try:
        return str(error)[:10_000]
    except Exception:  # noqa: BLE001 -- a class of the user's
        return "(it cannot be shown)"


def _flush(stream: Any) -> None:  # noqa: ANN401 -- whatever the function has put there
    try:
        stream.flush()
    except (AttributeError, OSError, ValueError):
        return  # it is closed or replaced: there is nothing to flush


if __name__ == "__main__":
    sys.exit(main())
