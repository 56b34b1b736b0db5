"""The node's policy about users, read from root's configuration files by a launcher that runs as root. Files that
others could have written are refused."""

from __future__ import annotations

import os
import stat
import time

from peerload.launcher.record_log import log_line
from peerload.launcher.system.accounts import UsersPolicy, policy_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FILE = "/etc/peerload/peerload.toml"
DIRECTORY = "/etc/peerload/conf.d"
CHECK_EVERY_S = 1.0
"""Interval at which changed files are looked for, with the next task."""
BYTES_MAX = 1 << 20


class PolicyError(Exception):
    """A file is not root's own, or its content is invalid; names the file."""


class PolicyFiles:
    """The policy in ``file`` and all ``*.toml`` of ``directory``; later files override; all may be absent."""

    def __init__(self, file: str = FILE, directory: str = DIRECTORY) -> None:
        self._file = file
        self._directory = directory
        self._seen: Any = None
        self._is_missing = False
        self._checked_s = 0.0
        self._policy = UsersPolicy()

    def read(self) -> UsersPolicy:
        """Read the policy. Raises PolicyError."""
        self._seen = self._file_stats()
        settings: dict[str, Any] = {}
        for path, *_ in self._seen:
            settings |= _settings(path)
        try:
            self._policy = policy_of(settings)
        except (ValueError, TypeError) as error:
            raise PolicyError(f"{self._file}: {error}") from None
        self._checked_s = time.monotonic()
        return self._policy

    def current(self) -> UsersPolicy:
        """The policy in force, read again if a file has changed. Invalid files change nothing, and are logged once."""
        if time.monotonic() >= self._checked_s + CHECK_EVERY_S:
            self._checked_s = time.monotonic()
            found = self._file_stats()
            is_missing = not {path for path, *_ in self._seen or ()} <= {path for path, *_ in found}
            was_missing, self._is_missing = self._is_missing, is_missing
            if (
                is_missing and not was_missing
            ):  # an editor may be about to put it back: its rules stay in force until then
                return self._policy
            if found != self._seen:
                try:
                    self.read()
                    log_line("policy about users reloaded")
                except PolicyError as error:
                    log_line(f"policy about users not reloaded: error={error}")
        return self._policy

    def _file_stats(self) -> list[tuple[str, int, int, int]]:
        """The files, each with what changes when it does."""
        try:
            names = sorted(name for name in os.listdir(self._directory) if name.endswith(".toml"))  # noqa: PTH208 -- pathlib costs the launcher a megabyte
        except OSError:
            names = []
        found = []
        for path in (self._file, *(f"{self._directory}/{name}" for name in names)):
            try:
                status = os.stat(path)  # noqa: PTH116 -- as above
            except OSError:
                continue
            found.append((path, status.st_ino, status.st_mtime_ns, status.st_size))
        return found


def check_root_owned(path: str) -> None:
    """Raises PolicyError if anybody but root could write to this file or directory, or replace it."""
    at = os.path.realpath(path)
    while True:
        status = os.stat(at)  # noqa: PTH116 -- as above
        is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if status.st_uid != 0 or (status.st_mode & 0o022 and not is_sticky):
            raise PolicyError(f"{path} is refused: others than root can write to {at}")
        if at == "/":
            return
        at = os.path.dirname(at)  # noqa: PTH120 -- as above


def _settings(path: str) -> dict[str, Any]:
    import tomllib  # noqa: PLC0415 -- it costs memory, and is needed once

    try:
        check_root_owned(path)
        with open(path, "rb") as file:  # noqa: PTH123 -- as above
            return tomllib.loads(file.read(BYTES_MAX).decode())
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path}: {error}") from None
