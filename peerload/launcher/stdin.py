"""Standard input of the launcher's tasks: nothing, a pipe that is fed from a file, or a terminal. Used by the launcher alone.

The file grows while the agent writes to it; the agent reports how far it has come, and whether that is all (`StdinRequest`). What the
task has not read yet is copied as fast as it reads, and never further: the launcher does not wait for a reader. The task sees the
end of its input only if the agent has reported it, whatever becomes of the agent.
"""

from __future__ import annotations

import os
import select

from peerload.launcher.process import NOT_EXECUTABLE, CannotStart, raise_shortage
from peerload.launcher.protocol import StdinFed
from peerload.launcher.pty import PseudoTerminals
from peerload.launcher.record_log import log_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from peerload.launcher.fs_credentials import Access
    from peerload.launcher.protocol import LauncherEvent, ResizeRequest, SpawnRequest, StdinRequest

READ_BYTES = 256 << 10
TURN_BYTES_MAX = 1 << 20
"""Bytes copied for one input before others have their turn."""
REPORT_BYTES = 256 << 10
"""The agent gets a report each time that this much more was taken, and when everything was."""
PIPE_BYTES = 256 << 10
"""Capacity of a pipe, where the system allows it."""
NO_KEY = b"\0"
CONTROL_D = b"\x04"
"""Default end-of-input character of a terminal."""
DESCRIPTORS = 2
"""Open descriptors for each input: its file, and the pipe or terminal."""


class StdinFeed:
    """One input. fed: bytes taken of the file; size: bytes in it; sink: descriptor that they go to."""

    __slots__ = (
        "ended",
        "fed",
        "file",
        "has_ended",
        "is_polled",
        "is_terminal",
        "key",
        "last",
        "reported",
        "sink",
        "size",
    )

    def __init__(self, key: str, path: str, sink: int, *, is_terminal: bool) -> None:
        self.key = key
        self.sink = sink
        self.is_terminal = is_terminal
        self.fed = self.size = 0
        self.reported = -1
        self.last = b""
        self.ended = 0
        self.has_ended = False
        self.is_polled = False
        self.file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def read(self) -> bytes:
        """The next bytes for the task, empty if there are none now. A file that is shorter than reported is waited for."""
        return os.pread(self.file, min(READ_BYTES, self.size - self.fed), self.fed) if self.size > self.fed else b""

    def end(self) -> None:
        """Type the end-of-input character into the terminal: twice after an unfinished line, since the first only
        submits that. Called again if the terminal was full (BlockingIOError). Raises OSError."""
        import termios  # noqa: PLC0415 -- few tasks have a terminal

        try:
            input_modes, _, _, local_modes, _, _, letters = termios.tcgetattr(self.sink)
        except termios.error as error:
            raise OSError(*error.args) from None
        key = letters[termios.VEOF] if letters[termios.VEOF] != NO_KEY else CONTROL_D
        finishes = {b"", b"\n", key, *(letters[which] for which in (termios.VEOL, termios.VEOL2))} - {NO_KEY}
        if input_modes & termios.ICRNL:
            finishes.add(b"\r")
        times = 2 if local_modes & termios.ICANON and self.last not in finishes else 1
        while self.ended < times:
            self.ended += os.write(self.sink, key)


class StdinFeeds:
    """All inputs, by the key of their task. ``events`` collects what the agent is told."""

    def __init__(self, epoll: select.epoll, events: list[LauncherEvent]) -> None:
        self._epoll = epoll
        self._events = events
        self._by_key: dict[str, StdinFeed] = {}
        self._by_sink: dict[int, StdinFeed] = {}
        self._closed: dict[str, int] = {}

    @property
    def descriptors(self) -> int:
        """Number of open descriptors."""
        return DESCRIPTORS * len(self._by_key)

    def open(self, key: str, path: str) -> int:
        """Open a pipe that is fed from this file → the end that the task reads. Raises OSError."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            os.set_blocking(writing, False)
            self._enlarge_pipe(writing)
            self.add(key, path, writing, is_terminal=False)
        except OSError:
            os.close(reading)
            os.close(writing)
            raise
        return reading

    def _enlarge_pipe(self, pipe: int) -> None:
        import fcntl  # noqa: PLC0415 -- the launcher has it loaded already; others that read this module need not

        try:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:  # a user may have only so many large pipes
            return

    def add(self, key: str, path: str, sink: int, *, is_terminal: bool) -> None:
        """Feed a non-blocking descriptor from a file. It is closed with the feed. Raises OSError."""
        feed = StdinFeed(key, path, sink, is_terminal=is_terminal)
        self._by_key[key] = self._by_sink[sink] = feed
        self._epoll.register(sink, 0)  # errors and hang-ups are reported all the same

    def extend(self, key: str, size: int, *, has_ended: bool) -> None:
        """Note that the file has ``size`` bytes; has_ended: it will not grow any more. Answered with how far it was
        fed."""
        feed = self._by_key.get(key)
        if feed is None:
            if key in self._closed:
                self._events.append(StdinFed(key, self._closed[key], is_closed=True))
            return
        feed.size = max(feed.size, size)
        feed.has_ended = feed.has_ended or has_ended
        feed.reported = -1
        self._pump(feed)

    def ready(self, masks: dict[int, int]) -> None:
        """Handle what epoll reported: a pipe has room, or its task reads no more."""
        for sink in [fd for fd in masks if fd in self._by_sink]:
            feed = self._by_sink[sink]
            if masks[sink] & (select.EPOLLERR | select.EPOLLHUP):
                self._close(feed)
            else:
                self._pump(feed)

    def close(self, key: str) -> None:
        """Close the input of a task that reads no more."""
        feed = self._by_key.get(key)
        if feed is not None:
            self._close(feed)

    def forget(self, key: str) -> None:
        """Forget the input of a task that is over, or was never started."""
        self.close(key)
        self._closed.pop(key, None)

    def _pump(self, feed: StdinFeed) -> None:
        """Copy what is there and is taken; poll the sink if it is full."""
        left = TURN_BYTES_MAX
        try:
            while left > 0 and (data := feed.read()):
                count = os.write(feed.sink, data)
                feed.fed += count
                feed.last = data[count - 1 : count]
                left -= count
            is_full = left <= 0
            if feed.fed == feed.size and feed.has_ended:
                if feed.is_terminal:
                    feed.end()
                self._close(feed)
                return
        except BlockingIOError:
            is_full = True
        except OSError as error:
            if not isinstance(error, BrokenPipeError) and not feed.is_terminal:
                log_line(f"stdin of a task failed: key={feed.key} error={error}")
            self._close(feed)
            return
        if is_full != feed.is_polled:
            feed.is_polled = is_full
            self._epoll.modify(feed.sink, select.EPOLLOUT if is_full else 0)
        if (
            feed.reported < 0
            or feed.fed - feed.reported >= REPORT_BYTES
            or (feed.fed == feed.size and feed.fed != feed.reported)
        ):
            self._report(feed)

    def _report(self, feed: StdinFeed, *, is_closed: bool = False) -> None:
        feed.reported = feed.fed
        self._events.append(StdinFed(feed.key, feed.fed, is_closed))

    def _close(self, feed: StdinFeed) -> None:
        del self._by_key[feed.key], self._by_sink[feed.sink]
        self._epoll.unregister(feed.sink)
        os.close(feed.sink)
        os.close(feed.file)
        self._closed[feed.key] = feed.fed
        self._report(feed, is_closed=True)


class LauncherStdin:
    """Pipes and terminals of all tasks, by their keys. ``events`` collects what the agent is told; ``access``:
    credentials for the agent's files."""

    def __init__(self, epoll: select.epoll, events: list[LauncherEvent], access: Access) -> None:
        self._access = access
        self._feeds = StdinFeeds(epoll, events)
        self._terminals = PseudoTerminals(epoll)
        self._to_close: dict[str, int] = {}

    @property
    def descriptors(self) -> int:
        """Number of open descriptors."""
        return self._feeds.descriptors + self._terminals.descriptors

    def open(self, request: SpawnRequest) -> int | str:
        """Open the stdin of a task, as `spawn` takes it; the output of a terminal goes to the file of its stdout.
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
        """Close the launcher's copies of what the started process has, so that the end is noticed."""
        reading = self._to_close.pop(key, None)
        if reading is not None:
            os.close(reading)

    def grown(self, request: StdinRequest) -> None:
        """Feed more."""
        self._feeds.extend(request.key, request.size, has_ended=request.ends)

    def resize(self, request: ResizeRequest) -> None:
        """Set the window size of a task's terminal."""
        self._terminals.resize(request.key, request.rows, request.columns)

    def ready(self, masks: dict[int, int]) -> None:
        """Handle what epoll reported."""
        self._terminals.ready(masks)
        self._feeds.ready(masks)

    def leader_ended(self, key: str) -> None:
        """Close the input of a task whose leader has ended."""
        self._feeds.close(key)

    def close(self, key: str) -> None:
        """Close everything of a task that is over, or was never started."""
        self.started(key)
        self._feeds.forget(key)
        self._terminals.close(key)
