"""The launcher as a process, seen by the agent: started in a session of its own, and looked after until it is gone."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path

import msgpack

import peerload
from peerload.launcher.server import ALREADY_RUNS

GONE_S = 0.2
"""A launcher that hangs up is given so long to be gone: then another one is needed."""


class LauncherProcess:
    """The one that was started here for ``directory``, if any was: a launcher may be there that an earlier agent has
    started. ``files_max``: how many files it and its tasks may have open, unless they ask for more; 0 = as many as we.
    ``store``: the id of the database that it starts tasks for."""

    serves_node = ""
    """It belongs to one agent."""

    def __init__(self, directory: Path, files_max: int = 0, store: str = "") -> None:
        self.directory = directory
        self._store = store
        self._files_max = files_max
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start one. It takes milliseconds, with a large heap more: not for the loop's thread."""
        limit = _limit(self._files_max) if self._files_max else ""
        self.let_go()
        self._popen = subprocess.Popen(
            start_words(
                "server",
                ["--directory", str(self.directory), *(["--store", self._store] if self._store else [])],
                first=limit,
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            close_fds=True,
        )

    def let_go(self) -> None:
        """What we started is meant to outlive us, and may outlive this object: Popen would warn that it does."""
        if self._popen is not None and self._popen.poll() is None:
            self._popen.returncode = 0

    def exit_code(self) -> int | None:
        """Of the one that was started here; None if it runs, or none was."""
        return self._popen.poll() if self._popen is not None else None

    def has_failed(self) -> bool:
        """Whether what we started has ended, other than because a launcher is there that does not answer yet."""
        return self.exit_code() not in {None, ALREADY_RUNS}

    def wait(self, seconds_max: float | None = None) -> None:
        """Return when it has ended, or after that long; at once if none was started here."""
        if self._popen is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(seconds_max)

    def last_words(self) -> str:
        """The last line of its log; "" if there is none."""
        try:
            lines = (self.directory / "launcher.log").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""


class LauncherService:
    """A launcher that a service of its own runs for all users: it is waited for, and neither started nor ended. What
    `LauncherProcess` has. serves_node: the node of the agent that uses it."""

    def __init__(self, directory: Path, serves_node: str) -> None:
        self.directory = directory
        self.serves_node = serves_node

    def start(self) -> None:
        """Its service does that."""

    def let_go(self) -> None:
        """It is not ours."""

    def exit_code(self) -> int | None:
        """None was started here."""
        return None

    def has_failed(self) -> bool:
        """Its service starts it again."""
        return False

    def wait(self, seconds_max: float | None = None) -> None:
        """It is no child of ours."""

    def last_words(self) -> str:
        """What is to be known of one that does not answer."""
        return f"nobody listens in {self.directory}; it is run by peerload-launcher.service"


def start_words(module: str, flags: list[str], first: str = "") -> list[str]:
    """The command line of a launcher that has loaded nothing but itself; ``first``: what it does before."""
    root = str(Path(peerload.__file__).resolve().parent.parent)
    places = [str(Path(peerload.__file__).parent.parent), root, str(Path(msgpack.__file__).parent.parent)]
    code = f"{first}import sys; sys.path[:0] = {places!r}; from peerload.launcher.{module} import main; main()"
    return [sys.executable, "-I", "-S", "-c", code, *flags]


def _limit(files_max: int) -> str:
    """What makes a process have this limit, as it does so itself: what runs between fork and exec makes starting slow."""
    name = "resource.RLIMIT_NOFILE"
    return f"import resource; resource.setrlimit({name}, ({files_max}, resource.getrlimit({name})[1])); "


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    if not pid:
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return _is_hidden(pid)
    return status.rpartition(")")[2].split()[0] != "Z"


def _is_hidden(pid: int) -> bool:
    """Whether there is such a process of another user, which /proc does not show to us."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return False


def stays(pid: int) -> bool:
    """Whether a launcher that hung up is there all the same."""
    wait_gone(pid, GONE_S)
    return is_alive(pid)


def wait_gone(pid: int, seconds_max: float) -> None:
    """Return when this process has ended, or after that long. It need not be our child: the kernel tells by pidfd."""
    try:
        pidfd = os.pidfd_open(pid)
    except (ProcessLookupError, OSError):
        return
    try:
        select.select([pidfd], [], [], seconds_max)
    finally:
        os.close(pidfd)
