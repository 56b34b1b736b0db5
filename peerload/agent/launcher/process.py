"""The process of the launcher, as the agent sees it: started in a new session, and watched until it has ended."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path

import msgpack

import peerload
from peerload.launcher.protocol import ALREADY_RUNS

GONE_S = 0.2
"""Time for a launcher to end after it has closed the connection; after that it counts as running."""


class LauncherProcess:
    """The launcher in ``directory``. An earlier agent may have started it. files_max: its limit of open files, 0 = that of the
    agent. store: the id of the database whose tasks it starts. cores: it enforces CPU shares as far as possible."""

    serves_node = ""
    """The launcher belongs to one agent."""

    def __init__(self, directory: Path, files_max: int = 0, store: str = "", *, cores: bool = False) -> None:
        self.directory = directory
        self._flags = [*(["--store", store] if store else []), *(["--cores", "enforce"] if cores else [])]
        self._files_max = files_max
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start a launcher. Not for the loop's thread: it takes milliseconds, and more with a large heap."""
        limit = _limit(self._files_max) if self._files_max else ""
        self.detach()
        self._popen = subprocess.Popen(
            command_line(
                "server",
                ["--directory", str(self.directory), *self._flags],
                first=limit,
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            close_fds=True,
        )

    def detach(self) -> None:
        """Forget the process: it has to outlive the agent, and Popen would warn about that."""
        if self._popen is not None and self._popen.poll() is None:
            self._popen.returncode = 0

    def exit_code(self) -> int | None:
        """Exit code of the process started here; None if it runs, or none was started."""
        return self._popen.poll() if self._popen is not None else None

    def has_failed(self) -> bool:
        """True if the process started here has failed, unless the reason was another running launcher."""
        return self.exit_code() not in {None, ALREADY_RUNS}

    def wait(self, seconds_max: float | None = None) -> None:
        """Return when the process started here has ended, or after ``seconds_max``."""
        if self._popen is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(seconds_max)

    def last_log_line(self) -> str:
        """The last line of the launcher's log; "" if there is none."""
        try:
            lines = (self.directory / "launcher.log").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""


class LauncherService(LauncherProcess):
    """A launcher that a service runs for all users: the agent waits for it, but neither starts nor ends it. serves_node: the node
    of the agent."""

    def __init__(self, directory: Path, serves_node: str) -> None:
        super().__init__(directory)
        self.serves_node = serves_node

    def start(self) -> None:
        """Do nothing: its service starts it."""

    def last_log_line(self) -> str:
        """The reason why the launcher of a service may not answer."""
        return f"no launcher listens in {self.directory}; peerload-launcher.service has to run it"


def command_line(module: str, flags: list[str], first: str = "") -> list[str]:
    """The command line of a launcher that loads only itself. first: code to run before."""
    root = str(Path(peerload.__file__).resolve().parent.parent)
    places = [str(Path(peerload.__file__).parent.parent), root, str(Path(msgpack.__file__).parent.parent)]
    code = f"{first}import sys; sys.path[:0] = {places!r}; from peerload.launcher.{module} import main; main()"
    return [sys.executable, "-I", "-S", "-c", code, *flags]


def _limit(files_max: int) -> str:
    """Code that sets the limit of open files in the new process; code between fork and exec would slow down the start."""
    name = "resource.RLIMIT_NOFILE"
    return f"import resource; resource.setrlimit({name}, ({files_max}, resource.getrlimit({name})[1])); "


def is_alive(pid: int) -> bool:
    """True if a process runs; zombies do not."""
    if not pid:
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return _is_hidden(pid)
    return status.rpartition(")")[2].split()[0] != "Z"


def _is_hidden(pid: int) -> bool:
    """True if the process exists and belongs to another user, which hides it from our /proc."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return False


def is_still_there(pid: int) -> bool:
    """True if a launcher that closed the connection still runs."""
    wait_gone(pid, GONE_S)
    return is_alive(pid)


def wait_gone(pid: int, seconds_max: float) -> None:
    """Return when a process, which may be no child, has ended, or after ``seconds_max``."""
    try:
        pidfd = os.pidfd_open(pid)
    except (ProcessLookupError, OSError):
        return
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(seconds_max * 1000)
    finally:
        os.close(pidfd)
