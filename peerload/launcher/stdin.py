"""What a task of the launcher reads: nothing, a pipe that is fed from a file, or a terminal. Used by the launcher alone."""

from __future__ import annotations

import os

from peerload.launcher.process import NOT_EXECUTABLE, CannotStart, raise_shortage
from peerload.launcher.pty import PseudoTerminals
from peerload.launcher.stdin_pump import StdinFeeds

TYPE_CHECKING = False
if TYPE_CHECKING:
    import select

    from peerload.launcher.fs_credentials import Access
    from peerload.launcher.protocol import LauncherEvent, ResizeRequest, SpawnRequest, StdinRequest


class LauncherStdin:
    """For all tasks of one launcher, by their keys; ``events`` is where it gathers what is told the agent, ``access`` with whose
    rights it touches the agent's files."""

    def __init__(self, epoll: select.epoll, events: list[LauncherEvent], access: Access) -> None:
        self._access = access
        self._feeds = StdinFeeds(epoll, events)
        self._terminals = PseudoTerminals(epoll)
        self._to_close: dict[str, int] = {}

    @property
    def descriptors(self) -> int:
        """How many of the process's descriptors it takes."""
        return self._feeds.descriptors + self._terminals.descriptors

    def open(self, request: SpawnRequest) -> int | str:
        """What a task is to read, as `spawn` takes it; the output of a terminal goes to the file of its stdout.
        Raises CannotStart, or OSError for what is in SHORTAGES."""
        with self._access:
            return self._open(request)

    def _open(self, request: SpawnRequest) -> int | str:
        key, source, window = request.key, request.input, request.terminal
        try:
            if window:
                terminal = self._terminals.open(key, request.stdout, *window)
                if source:
                    self._feeds.add(key, source, os.dup(terminal.master), is_terminal=True)
                return os.ttyname(terminal.slave)
            if not source:
                return ""
            reading = self._to_close[key] = self._feeds.open(key, source)
        except OSError as error:
            raise_shortage(error)
            what = "terminal" if window else "pipe for its input"
            raise CannotStart(NOT_EXECUTABLE, f"no {what} can be made: {error.strerror}") from None
        return reading

    def started(self, key: str) -> None:
        """The process has its ends of all this: ours of the same are closed, so that it notices when it is over."""
        reading = self._to_close.pop(key, None)
        if reading is not None:
            os.close(reading)

    def grown(self, request: StdinRequest) -> None:
        """There is more to read."""
        self._feeds.grown(request.key, request.size, has_ended=request.ends)

    def resize(self, request: ResizeRequest) -> None:
        """The window of a task's terminal is another."""
        self._terminals.resize(request.key, request.rows, request.columns)

    def ready(self, masks: dict[int, int]) -> None:
        """What epoll said of all this."""
        self._terminals.ready(masks)
        self._feeds.ready(masks)

    def leader_ended(self, key: str) -> None:
        """The task reads no more."""
        self._feeds.close(key)

    def close(self, key: str) -> None:
        """Nothing is left of it, or it was never made."""
        self.started(key)
        self._feeds.forget(key)
        self._terminals.close(key)
