"""Private files and directories: readable by their owner only, replaced atomically, durable. And the boot id of the machine."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from peerload.model.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

IN_THE_STATE = ("spool", "scratch", "launcher", "tls")
"""The directories within the state directory."""


def directory_in(state: Path, name: str) -> Path:
    """Directory of IN_THE_STATE, made with mode 0700 if absent. Raises ConfigError if it cannot be made."""
    path = state / name
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        why = "the agent needs a directory of this name"
        raise ConfigError("state", f"{path} is not a directory", why=why, hint=f"mv {path} {path}.aside") from None
    except OSError as error:
        raise ConfigError("state", f"{path} cannot be made", why=str(error.strerror)) from None
    return path


def private_directory(path: Path) -> Path:
    """The state directory, created with mode 0700 if absent. Raises ConfigError if it is a link, belongs to another user or
    is writable by others: its files are executed and trusted."""
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


def write_private(path: Path, data: bytes, *, is_durable: bool = True) -> None:
    """Replace a file atomically, with mode 0600; is_durable: it is on the disk afterwards. Raises OSError."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    try:
        _write_new(part, data, is_durable=is_durable)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    if is_durable:
        sync(path.parent)


def make_directory(path: Path, contents: Mapping[str, bytes]) -> None:
    """Create a directory with these files, all with private modes, atomically. Raises OSError."""
    part = tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent)  # with mode 0700
    try:
        for name, data in contents.items():
            _write_new(Path(part, name), data)
        sync(Path(part))
        Path(part).rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)  # already renamed after a success


def _write_new(path: Path, data: bytes, *, is_durable: bool = True) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        if is_durable:
            file.flush()
            os.fsync(descriptor)


def sync(path: Path) -> None:
    """Sync a file, or the names in a directory. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def machine_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
