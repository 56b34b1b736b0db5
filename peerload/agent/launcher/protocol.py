"""What the agent says to its launcher of a task, and what it understands of how one ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import msgspec

from peerload.model.task import Exit, Guarantee

if TYPE_CHECKING:
    from peerload.model.actions import SpawnTask

SHORTAGES = ("", "memory", "gpu memory")
"""What the model has a word for, of what an attempt may be short of."""


class StdinFed(NamedTuple):
    """An attempt has read ``offset`` bytes of its standard input; ``is_closed``: it reads no more."""

    key: str
    offset: int
    is_closed: bool


def spawn_request(
    action: SpawnTask, outputs: tuple[str, str], extra: dict[bytes, bytes], source: str = ""
) -> dict[str, Any]:
    """The request to start an attempt, as far as the task says it; ``outputs``: the files of stdout and stderr; ``extra`` is
    added to its environment; ``source``: the file that its stdin is fed from. A launcher of an earlier version does not heed
    what it does not know."""
    spec = action.spec
    request: dict[str, Any] = {
        "do": "spawn",
        "key": action.key,
        "argv": list(spec.argv),
        "environment": _environment(spec.environment, extra),
        "directory": spec.directory,
        "umask": spec.umask,
        "stdout": outputs[0],
        "stderr": outputs[1],
        "deadline_s": action.deadline_s,
        "ts": action.ts,
        "frozen_s_max": action.frozen_s_max,
        "once": spec.guarantee is Guarantee.ONCE,
    }
    if spec.request.mem_bytes:
        request["memory_bytes_max"] = spec.request.mem_bytes
        request["node"] = extra.get(b"PEERLOAD_NODE", b"").decode()
    if source:
        request["input"] = source
    if spec.terminal is not None:
        request["terminal"] = [spec.terminal.rows, spec.terminal.columns]
    return request


def exit_of(record: dict[str, Any]) -> Exit:
    """An exit record, also one of a launcher that knows of more to be short of than we do. Raises ValidationError."""
    if record.get("out_of", "") not in SHORTAGES:
        record = {**record, "out_of": ""}
    return msgspec.convert(record, Exit)


def _environment(packed: bytes, extra: dict[bytes, bytes]) -> dict[bytes, bytes] | None:
    """The variables of a task; None if what its home sent is no map: the launcher then ends it with a reason."""
    try:
        return {**msgpack.unpackb(packed), **extra}
    except (ValueError, TypeError):
        return None
