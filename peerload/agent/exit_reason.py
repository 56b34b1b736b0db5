"""The exit reason of an agent that had answered already, for whoever types the next command: a file beside its socket."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from peerload.model.errors import ConfigError, PeerloadError
from peerload.wire.frame import LAST_WORDS_BYTES_MAX, LAST_WORDS_ENDING


def write(socket: str, error: PeerloadError) -> None:
    """Write why the agent ends. If the file cannot be written, the log alone has the reason."""
    said = str(error.says if isinstance(error, ConfigError) else error)
    words = " ".join(said.split()) + "\n" + " ".join(error.hint.split()) + "\n"
    with contextlib.suppress(OSError):
        path = _path(socket)
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with os.fdopen(fd, "wb") as file:
            file.write(words.encode("utf-8", "replace")[:LAST_WORDS_BYTES_MAX])


def remove(socket: str) -> None:
    """Remove the file, since an agent runs again."""
    with contextlib.suppress(OSError):
        _path(socket).unlink(missing_ok=True)


def _path(socket: str) -> Path:
    return Path(socket + LAST_WORDS_ENDING)
