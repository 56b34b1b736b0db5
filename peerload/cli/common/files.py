"""`--in`, `--out` and `--snapshot`: the flags about files that travel with a task, and the messages about them."""

from __future__ import annotations

import os
import sys

from peerload.client import submission
from peerload.model.text import printable
from peerload.text.format import counted, say, size_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence
    from typing import Any

    from peerload.cli.common.options import Options
    from peerload.client.connection import AgentConnection
    from peerload.files.tree import Found

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


def prepare(flags: Namespace, spec: dict[str, Any], terms: dict[str, Any]) -> list[Found]:
    """Have the task work in a fresh directory whose outputs come home → what goes there. Raises StagingFailed."""
    return submission.prepare(spec, terms, flags.inputs, flags.outputs, snapshot=flags.snapshot)


def send(client: AgentConnection, spec: dict[str, Any], terms: dict[str, Any], found: Sequence[Found]) -> None:
    """Have the agent keep the files, and the task name them. Raises PeerloadError."""
    submission.send(client, spec, terms, found, _progress(submission.size_of(found)))


def freeze(client: AgentConnection, spec: dict[str, Any], terms: dict[str, Any]) -> None:
    """Have the working directory travel, as the settings of the agent want it, or say why it does not. Raises
    PeerloadError."""
    if why := submission.freeze(client, spec, terms, _progress(0)):
        say(
            f"{printable(spec['directory'])} does not travel: {why}",
            "the task runs where that directory is; leave files out:  .peerloadignore        all of it:  --snapshot",
        )


def _progress(total: int) -> Callable[[int], None]:
    """Shows on a terminal how much of many bytes the agent has. total: 0 = not known."""
    if not os.isatty(2):
        return lambda _: None

    def show(sent: int) -> None:
        if max(sent, total) > PROGRESS_BYTES:
            of = f" of {size_text(total)}" if total else ""
            sys.stderr.write(f"\r{size_text(sent)}{of} sent to the agent \r")
            sys.stderr.flush()

    return show


def described(found: Sequence[Found], spec: dict[str, Any]) -> dict[str, object]:
    """The files and the environment, for `--dry-run`."""
    lock = spec.pop(submission.LOCK, None)
    environment: dict[str, object] = {} if lock is None else {"env": f"{lock.name}, built by {lock.kind}"}
    if spec.pop("files", None) is None:
        return environment
    from peerload.files import tree

    largest = [(item.path, item.status.st_size) for item in tree.largest(found, LARGEST_NAMED) if item.status]
    return environment | {
        "files": counted(sum(item.status is not None and not item.target for item in found), "file"),
        "files_bytes": submission.size_of(found),
        "largest": [f"{printable(path)} ({size_text(size)})" for path, size in largest],
    }


def say_conflicts(task: dict[str, Any]) -> None:
    """Say on stderr which outputs are kept beside a file that was changed here meanwhile."""
    kept = task.get("kept_beside") or 0
    if kept:
        name = printable(task.get("id") or "")
        say(
            f"{counted(kept, 'output')} of {name} {'is' if kept == 1 else 'are'} kept beside files that were changed here meanwhile",
            f"find them:  find . -name '*.peerload-{name.rpartition('/')[2]}'",
        )
