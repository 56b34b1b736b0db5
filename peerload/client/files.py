# ruff: noqa: PTH109, PTH118, PTH119, PTH123
# os.path, since directories are bytes, and it is quick.
"""Files that travel with a submission: found, and sent to the agent, by the user's own process.

`prepare` changes the spec and the terms of a `submit` request, `send` brings the agent what it lacks, and `freeze` does both
where the agent answers that the working directory is to travel (`snapshot = "auto"` of `[files]` in its settings).
"""

from __future__ import annotations

import os

import msgpack

from peerload.client.connection import AgentConnection
from peerload.model.errors import StagingFailed
from peerload.model.text import printable
from peerload.text.format import size_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from peerload.files.tree import Found

SCRATCH = b"-"
LOCK = "lock"
"""The key of a spec under which a lock stands, until `send` has brought it to the agent."""
SCRIPT_BYTES_MAX = 1 << 20
AUTO_BYTES_MAX, AUTO_FILES_MAX = 1 << 30, 10_000
"""A larger directory travels only if its user says so."""


def add_lock(spec: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Have a task find the environment of this lock file. Raises BadRequest."""
    from peerload.environments import locks  # noqa: PLC0415 -- most submissions have none

    spec[LOCK] = locks.read(path)
    spec["placement"]["builder"] = spec[LOCK].kind


def add_script(spec: dict[str, Any]) -> None:
    """Have a script with inline metadata (PEP 723) run in its environment, as `uv run` does. Raises BadRequest."""
    script = spec["argv"][0]
    if LOCK in spec or not script.endswith(b".py"):
        return
    path = os.path.join(os.getcwdb() if spec["directory"] == SCRATCH else spec["directory"], script)
    try:
        with open(path, "rb") as file:
            content = file.read(SCRIPT_BYTES_MAX)
    except OSError:
        return  # it may be on another node
    if b"# /// script" in content:
        from peerload.environments import locks  # noqa: PLC0415 -- as above

        lock = locks.in_script(content, os.fsdecode(os.path.basename(script)))
        if lock is not None:
            spec[LOCK] = lock
            spec["placement"]["builder"] = lock.kind
            spec["argv"] = [b"python", *spec["argv"]]


def prepare(
    spec: dict[str, Any],
    terms: dict[str, Any],
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    snapshot: bool,
    files_max: int | None = None,
) -> list[Found]:
    """Have the task work in a fresh directory whose outputs come home → what goes there; [] if nothing travels. files_max: bound
    on the files of a snapshot. Raises StagingFailed."""
    if not (inputs or outputs or snapshot):
        return []
    from peerload.files import snapshot as reading  # noqa: PLC0415 -- most submissions have none

    home = os.getcwdb() if spec["directory"] == SCRATCH else spec["directory"]
    globs = [_relative(glob, home, is_glob=True) for glob in outputs]
    paths = [_relative(path, home) for path in inputs]
    try:
        limit = {} if files_max is None else {"files_max": files_max}
        found = reading.look(home, paths, everything=snapshot, **limit)
    except OSError as error:
        raise StagingFailed(f"{printable(home)} cannot be read", why=str(error.strerror)) from None
    terms["files_home"], spec["directory"] = home, SCRATCH
    variables = msgpack.unpackb(spec["environment"])
    if variables.pop(b"PWD", None) is not None:
        spec["environment"] = msgpack.packb(variables)
    spec["files"] = {"manifest": bytes(32), "outputs": globs, "returns_changes": snapshot and not globs}
    return found


def _relative(path: str, home: bytes, *, is_glob: bool = False) -> str:
    """A path beneath the working directory. Raises StagingFailed."""
    inside = os.path.relpath(os.path.join(os.fsdecode(home), path), os.fsdecode(home))
    if inside == ".." or inside.startswith("../"):
        raise StagingFailed(
            f"{printable(path)} cannot be staged",
            why=f"it is outside of {printable(home)}",
            hint="name another directory to start from:  -d DIR",
        )
    return "" if inside == "." else inside + ("/" if is_glob and path.endswith("/") else "")


def send(
    client: AgentConnection,
    spec: dict[str, Any],
    terms: dict[str, Any],
    found: Sequence[Found],
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Have the agent keep the files and the lock, and the task name them. progress: called with the bytes that were sent.
    Raises PeerloadError."""
    if hasattr(spec.get(LOCK), "put"):
        spec[LOCK] = spec[LOCK].put(lambda **fields: client.call("files", **fields))
    if "files" not in spec:
        return
    from peerload.files import snapshot as reading  # noqa: PLC0415 -- as above

    try:
        taken = reading.take(terms["files_home"], found, lambda **fields: client.call("files", **fields), progress)
    except OSError as error:
        where = printable(error.filename or terms["files_home"])
        raise StagingFailed(f"{where} cannot be read", why=str(error.strerror)) from None
    spec["files"] |= {
        "manifest": taken.id,
        "size_bytes": taken.manifest.size_bytes,
        "count": len(taken.manifest.files),
    }


def size_of(found: Sequence[Found]) -> int:
    """The bytes of all files."""
    return sum(item.status.st_size for item in found if item.status is not None and not item.target)


def may_freeze(spec: dict[str, Any]) -> bool:
    """True if the agent may answer that the working directory is to travel."""
    return "files" not in spec and spec["directory"] != SCRATCH


def freeze(
    client: AgentConnection,
    spec: dict[str, Any],
    terms: dict[str, Any],
    progress: Callable[[int], None] = lambda _: None,
) -> str:
    """Have the working directory travel → the reason why it does not, "" if it does. Raises PeerloadError."""
    before = dict(spec), dict(terms)
    try:
        found = prepare(spec, terms, (), (), snapshot=True, files_max=AUTO_FILES_MAX)
        size = size_of(found)
        if size <= AUTO_BYTES_MAX:
            send(client, spec, terms, found, progress)
            return ""
        why = f"its files have {size_text(size)}, and no more than {size_text(AUTO_BYTES_MAX)} travel unasked"
    except StagingFailed as error:
        why = str(error)
    for now, was in zip((spec, terms), before, strict=True):
        now.clear()
        now.update(was)
    return why


# -- for Python programs ----------------------------------------------------------------------------------------------


def sender(fields: dict[str, Any], wanted: Mapping[str, Any]) -> Callable[[str], None] | None:
    """A function that sends the files of a submission to the agent at a socket; None if nothing travels. Raises StagingFailed."""
    spec, terms = fields["spec"], fields.get("terms", {})
    if wanted.get("env") is not None:
        add_lock(spec, wanted["env"])
    else:
        add_script(spec)
    found = prepare(spec, terms, wanted.get("in_", ()), wanted.get("out", ()), snapshot=wanted.get("snapshot", False))
    fields |= {"freezes": True} if may_freeze(spec) and wanted.get("snapshot") is None else {}
    if "files" not in spec and LOCK not in spec:
        return None
    fields["terms"] = terms

    def bring(path: str) -> None:
        with AgentConnection(path) as client:
            send(client, spec, terms, found)

    return bring


def freeze_fields(path: str, fields: dict[str, Any]) -> None:
    """As `freeze`, for the fields of a submission that the agent at this socket has refused. Raises PeerloadError."""
    spec, terms = dict(fields["spec"]), dict(fields.get("terms", {}))
    with AgentConnection(path) as client:
        why = freeze(client, spec, terms)
    fields["spec"], fields["terms"] = spec, terms
    fields.pop("freezes", None)
    if why:
        import warnings  # noqa: PLC0415 -- as above

        warnings.warn(f"{printable(spec['directory'])} does not travel with the task: {why}", stacklevel=2)
