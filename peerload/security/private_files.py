"""What an agent asks of the machine before it starts: a directory of its own, and which start of the machine this is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from peerload.model.errors import ConfigError

IN_THE_STATE = ("spool", "scratch", "launcher", "tls")
"""The directories within the state directory."""


def directory_in(state: Path, name: str) -> Path:
    """One of IN_THE_STATE: made with mode 0700 if absent. Raises ConfigError if something else has its name."""
    path = state / name
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        raise ConfigError(
            "state", f"{path} is no directory", why="the agent keeps its own there", hint=f"mv {path} {path}.aside"
        ) from None
    except OSError as error:
        raise ConfigError("state", f"{path} cannot be made", why=str(error.strerror)) from None
    return path


def private_directory(path: Path) -> Path:
    """The state directory: made with mode 0700 if absent. Raises ConfigError if it is a link, somebody else's or open
    to others (what lies there is run and believed)."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ConfigError("state", f"{path} cannot be used", why=str(error.strerror)) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError("state", f"{path} cannot be used", why="it is not a directory of this user")
    if status.st_mode & 0o022:
        raise ConfigError("state", f"{path} cannot be used", why="others may write to it", hint=f"chmod 700 {path}")
    return path


def machine_boot_id() -> str:
    """Random for each start of this machine, as the kernel tells it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
