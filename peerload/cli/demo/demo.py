"""Base of the demonstrations: real agents of one temporary directory, whose processes are found and ended whatever happens.

The directory's name is in the environment of everything that is started (`MARK`), so that agents, launchers, broker and tasks can be
found in /proc and are gone when the demonstration ends, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from peerload.client.connection import AgentConnection
from peerload.model.errors import PeerloadError
from peerload.model.text import printable
from peerload.text.format import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

MARK = "PEERLOAD_DEMO"
MEET_WITHIN_S = 60.0
TICK_S = 0.1
GONE_WITHIN_S = 30.0
ANSWER_WITHIN_S = 20.0
PATH_BYTES_MAX = 60
"""A longer temporary directory leaves no room for the name of a socket; then it is /tmp."""
LOG_LINES_SHOWN = 5


def run_and_clean(demo: Demo, act: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any] | None, list[tuple[int, str]]]:
    """Run a demonstration, and remove everything whatever happens → its account, None if it was interrupted, and the
    processes that did not end when asked. Raises what ``act`` raises, after the agents' last log lines are shown."""
    account: dict[str, Any] | None = None
    try:
        with contextlib.suppress(KeyboardInterrupt):
            account = act()
    except (PeerloadError, OSError):
        demo.show_logs()
        raise
    finally:
        left = demo.clean()
        report_leftovers(left, demo.started)
    return account, left


class Demo:
    """One demonstration in one directory; call `clean` at its end. nodes: the names of its agents."""

    nodes: tuple[str, ...] = ()

    def __init__(self, directory: Path, policy: str) -> None:
        self.directory = directory
        self.policy = policy
        self.started: set[int] = set()
        self._stack = contextlib.ExitStack()
        for name in [name for name in os.environ if name.startswith("PEERLOAD_")]:
            del os.environ[name]  # settings meant for another agent
        os.environ[MARK] = str(directory)

    def clean(self) -> list[tuple[int, str]]:
        """Stop everything and remove the directory → (pid, command line) of processes that did not end when asked
        and were killed. Takes at most two times GONE_WITHIN_S, and is not interrupted."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        told: list[str] = []
        for node in self.nodes:
            with (
                contextlib.suppress(PeerloadError),
                AgentConnection(self.socket(node), timeout_s=GONE_WITHIN_S) as client,
            ):
                client.call("stop", all=True)
                told.append(node)
        self._stack.close()  # the broker, and our connections
        self._end(
            [pid for pid in self._agents() if not any(self._is_agent_of(pid, node) for node in told)], self._agents
        )
        left: list[tuple[int, str]] = []
        if not self._end(self.processes(), self.processes):  # the launcher of an agent that was interrupted early
            left = [(pid, _command_line(pid)) for pid in self.processes()]
            for pid, _ in left:
                _signal(pid, signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)
        return left

    def _end(self, asked: Sequence[int], those: Callable[[], Sequence[int]]) -> bool:
        """SIGTERM to the ``asked``, then wait: whether none of ``those`` is left after GONE_WITHIN_S."""
        for pid in asked:
            _signal(pid, signal.SIGTERM)
        try:
            wait(lambda: not those(), "some processes do not end", GONE_WITHIN_S)
        except PeerloadError:
            return False
        return True

    def _agents(self) -> list[int]:
        return [pid for pid in self.processes() if any(self._is_agent_of(pid, node) for node in self.nodes)]

    def _is_agent_of(self, pid: int, node: str) -> bool:
        return f" --socket {self.socket(node)} " in f"{_command_line(pid)} "

    def show_logs(self) -> None:
        """The last lines of each agent's log, on stderr, before the directory goes."""
        for node in self.nodes:
            log = self.directory / node / "agent.log"
            if log.exists():
                for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES_SHOWN:]:
                    sys.stderr.write(f"  {node}: {printable(line)}\n")

    def socket(self, node: str) -> str:
        """Path of this node's socket."""
        return str(self.directory / f"{node}.sock")

    def processes(self) -> list[int]:
        """Process ids of all living processes with the mark of this demonstration, after reaping children."""
        mark = f"{MARK}={self.directory}".encode()
        found = []
        for entry in os.listdir("/proc"):  # noqa: PTH208 -- hundreds of names, ten times a second
            if not entry.isdecimal() or int(entry) == os.getpid():
                continue
            pid = int(entry)
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == pid:
                    continue
            try:
                with open(f"/proc/{entry}/environ", "rb") as environ:  # noqa: PTH123 -- as above
                    marked = mark in environ.read().split(b"\0")
            except OSError:
                continue  # it has just ended, or is somebody else's
            if marked:
                found.append(pid)
        return found


def temporary_directory() -> Path:
    """Make a temporary directory for a demonstration."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > PATH_BYTES_MAX:
        base = "/tmp"  # noqa: S108 -- mkdtemp makes a directory there that nobody else can enter
    return Path(tempfile.mkdtemp(prefix="peerload-demo-", dir=base))


def interrupt(_number: int, _frame: object) -> None:
    """Signal handler that raises KeyboardInterrupt: clean up and exit."""
    raise KeyboardInterrupt


def wait(predicate: Callable[[], bool], otherwise: str, within_s: float = MEET_WITHIN_S) -> None:
    """Wait until the predicate is true. Raises PeerloadError saying ``otherwise``."""
    pause = threading.Event()
    deadline_s = time.monotonic() + within_s
    while not predicate():
        if time.monotonic() > deadline_s:
            raise PeerloadError(otherwise, why=f"{within_s:g} s have passed")
        pause.wait(TICK_S)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _command_line(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "?"
    return raw.replace(b"\0", b" ").decode("utf-8", "replace").strip()


def report_leftovers(left: Sequence[tuple[int, str]], started: set[int]) -> None:
    """Say on stderr which processes had to be killed."""
    if not left:
        sys.stderr.write(f"\nStopped: none of {len(started)} processes is left, the directory is removed.\n")
        return
    for pid, command_line in left:
        say(f"process {pid} did not end when asked and was killed: {command_line}")
