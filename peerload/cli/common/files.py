"""`--in`, `--out` and `--snapshot`: files that travel with a task, read by the user's own process."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from peerload.model.errors import StagingFailed, UsageError
from peerload.model.text import printable
from peerload.text.format import counted, say, size_text

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from peerload.cli.common.options import Options
    from peerload.client.connection import AgentConnection
    from peerload.files.tree import Found

_SCRATCH = b"-"
LARGEST_NAMED = 3
PROGRESS_BYTES = 64 << 20
"""Files larger than this are sent with a line about the progress, on a terminal."""


def add_flags(reader: Options) -> None:
    """The flags about files that travel."""
    reader.flag(
        "--in",
        dest="inputs",
        action="append",
        default=[],
        metavar="PATH",
        help="bring this file or directory to the node that runs it, into a fresh working directory (repeatable)",
    )
    reader.flag(
        "--out",
        dest="outputs",
        action="append",
        default=[],
        metavar="GLOB",
        help="bring these files of its working directory here when it has ended (repeatable)",
    )
    reader.switch(
        "--snapshot",
        help="run it in a copy of this directory as it is now, but for what .gitignore and .peerloadignore name; without --out"
        " all new and changed files come back",
    )


def travel(flags: Namespace) -> bool:
    """True if files travel with the task."""
    return bool(flags.inputs or flags.outputs or flags.snapshot)


def prepare(flags: Namespace, verb: str, spec: dict[str, Any], terms: dict[str, Any]) -> list[Found]:
    """Have the task work in a fresh directory whose outputs come home → what goes there. Raises UsageError,
    StagingFailed."""
    if not travel(flags):
        return []
    from peerload.files import snapshot

    home = os.getcwdb() if spec["directory"] == _SCRATCH else spec["directory"]  # noqa: PTH109 -- bytes, and quick
    terms["files_home"], spec["directory"] = home, _SCRATCH
    outputs = [_relative(glob, home, f"{verb}: --out") for glob in flags.outputs]
    paths = [_relative(path, home, f"{verb}: --in") for path in flags.inputs]
    spec["files"] = {
        "manifest": bytes(32),
        "outputs": outputs,
        "returns_changes": bool(flags.snapshot and not outputs),
    }
    try:
        return snapshot.look(home, paths, everything=flags.snapshot)
    except OSError as error:
        raise StagingFailed(f"{printable(home)} cannot be read", why=str(error.strerror)) from None


def send(client: AgentConnection, spec: dict[str, Any], terms: dict[str, Any], found: Sequence[Found]) -> None:
    """Have the agent keep the files, and the task name them. Raises PeerloadError."""
    if "files" not in spec:
        return
    from peerload.files import snapshot

    total = sum(item.status.st_size for item in found if item.status is not None)
    shows = total > PROGRESS_BYTES and os.isatty(2)

    def progress(sent: int) -> None:
        if shows:
            sys.stderr.write(f"\r{size_text(sent)} of {size_text(total)} sent to the agent \r")
            sys.stderr.flush()

    try:
        taken = snapshot.take(terms["files_home"], found, lambda **fields: client.call("files", **fields), progress)
    except OSError as error:
        where = printable(error.filename or terms["files_home"])
        raise StagingFailed(f"{where} cannot be read", why=str(error.strerror)) from None
    spec["files"] |= {
        "manifest": taken.id,
        "size_bytes": taken.manifest.size_bytes,
        "count": len(taken.manifest.files),
    }


def described(found: Sequence[Found], spec: dict[str, Any]) -> dict[str, object]:
    """Files that would travel, for `--dry-run`."""
    if "files" not in spec:
        return {}
    from peerload.files import tree

    spec.pop("files", None)
    sizes = [item.status.st_size for item in found if item.status is not None and not item.target]
    return {
        "files": counted(len(sizes), "file"),
        "files_bytes": sum(sizes),
        "largest": [
            f"{printable(item.path)} ({size_text(item.status.st_size)})"
            for item in tree.largest(found, LARGEST_NAMED)
            if item.status is not None
        ],
    }


def say_conflicts(task: dict[str, Any]) -> None:
    """Say on stderr which outputs are kept beside a file that was changed here meanwhile."""
    kept = task.get("kept_beside") or 0
    if kept:
        name = printable(task.get("id") or "")
        say(
            f"{counted(kept, 'output')} of {name} {'is' if kept == 1 else 'are'} kept beside what was changed here meanwhile",
            f"find them:  find . -name '*.peerload-{name.rpartition('/')[2]}'",
        )


def _relative(path: str, home: bytes, flag: str) -> str:
    """A path beneath the directory that the user stands in. Raises UsageError."""
    inside = os.path.relpath(os.path.join(os.fsdecode(home), path), os.fsdecode(home))  # noqa: PTH118
    if inside == ".." or inside.startswith("../"):
        raise UsageError(
            f"{flag} {printable(path)} is outside of {printable(home)}",
            hint="name another directory to start from:  -d DIR",
        )
    return "" if inside == "." else inside + ("/" if path.endswith("/") and "--out" in flag else "")
