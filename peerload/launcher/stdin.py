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
from peerload.launcher.record_log import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from peerload.launcher.fs_credentials import Access
    from peerload.launcher.protocol import LauncherEvent, ResizeRequest, SpawnRequest, StdinRequest

READ_BYTES = 256 << 10
TURN_BYTES_MAX = 1 << 20
"""Of one input no more is copied before others have their turn."""
TELL_BYTES = 256 << 10
"""The agent is told each time that so much more was taken, and when all there was is."""
PIPE_BYTES = 256 << 10
"""What a pipe is made to hold, where the system allows it."""
NO_KEY = b"\0"
CONTROL_D = b"\x04"
"""What a terminal takes for the end of its input, as long as nobody has told it another."""
DESCRIPTORS = 2
"""Open for each input: its file and the pipe (or terminal) it goes into."""


class StdinFeed:
    """One input: ``fed`` bytes of the file at ``path`` are taken, ``size`` are there; ``sink`` is where they go."""

    __slots__ = ("ended", "fed", "file", "has_ended", "is_armed", "is_terminal", "key", "last", "sink", "size", "told")

    def __init__(self, key: str, path: str, sink: int, *, is_terminal: bool) -> None:
        self.key = key
        self.sink = sink
        self.is_terminal = is_terminal
        self.fed = self.size = 0
        self.told = -1
        self.last = b""
        self.ended = 0
        self.has_ended = False
        self.is_armed = False
        self.file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def read(self) -> bytes:
        """The next bytes for the task, empty if there are none now. A file that is shorter than was said is waited for."""
        return os.pread(self.file, min(READ_BYTES, self.size - self.fed), self.fed) if self.size > self.fed else b""

    def end(self) -> None:
        """Type the end of the input into the terminal: as a person would, twice after a line that is not finished, since the
        first only hands that over. Called again if the terminal was full (BlockingIOError). Raises OSError."""
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
    """All of them, by the key of their task. ``events`` is where the launcher gathers what it tells the agent."""

    def __init__(self, epoll: select.epoll, events: list[LauncherEvent]) -> None:
        self._epoll = epoll
        self._events = events
        self._by_key: dict[str, StdinFeed] = {}
        self._by_sink: dict[int, StdinFeed] = {}
        self._closed: dict[str, int] = {}

    @property
    def descriptors(self) -> int:
        """How many of the process's descriptors they take."""
        return DESCRIPTORS * len(self._by_key)

    def open(self, key: str, path: str) -> int:
        """A pipe for a task that is about to start, fed from this file → the end that the task reads. Raises OSError."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            os.set_blocking(writing, False)
            self._widen(writing)
            self.add(key, path, writing, is_terminal=False)
        except OSError:
            os.close(reading)
            os.close(writing)
            raise
        return reading

    def _widen(self, pipe: int) -> None:
        import fcntl  # noqa: PLC0415 -- the launcher has it loaded already; others that read this module need not

        try:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:  # a user may have only so many large pipes
            return

    def add(self, key: str, path: str, sink: int, *, is_terminal: bool) -> None:
        """Feed this descriptor, which does not block, from that file. It is closed with the feed. Raises OSError."""
        feed = StdinFeed(key, path, sink, is_terminal=is_terminal)
        self._by_key[key] = self._by_sink[sink] = feed
        self._epoll.register(sink, 0)  # that nobody reads any more is told all the same

    def grown(self, key: str, size: int, *, has_ended: bool) -> None:
        """The file has ``size`` bytes by now; ``has_ended``: it will not grow any more. Answered with how far it was fed."""
        feed = self._by_key.get(key)
        if feed is None:
            if key in self._closed:
                self._events.append(StdinFed(key, self._closed[key], is_closed=True))
            return
        feed.size = max(feed.size, size)
        feed.has_ended = feed.has_ended or has_ended
        feed.told = -1
        self._pump(feed)

    def ready(self, masks: dict[int, int]) -> None:
        """What epoll said of pipes: one has room, or its task reads no more."""
        for sink in [fd for fd in masks if fd in self._by_sink]:
            feed = self._by_sink[sink]
            if masks[sink] & (select.EPOLLERR | select.EPOLLHUP):
                self._close(feed)
            else:
                self._pump(feed)

    def close(self, key: str) -> None:
        """Its task reads no more."""
        feed = self._by_key.get(key)
        if feed is not None:
            self._close(feed)

    def forget(self, key: str) -> None:
        """Its task is over, or was never made."""
        self.close(key)
        self._closed.pop(key, None)

    def _pump(self, feed: StdinFeed) -> None:
        """Copy as much as is there and is taken; be told when there is room for more."""
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
                say(f"the input of {feed.key}: {error}")
            self._close(feed)
            return
        if is_full != feed.is_armed:
            feed.is_armed = is_full
            self._epoll.modify(feed.sink, select.EPOLLOUT if is_full else 0)
        if feed.told < 0 or feed.fed - feed.told >= TELL_BYTES or (feed.fed == feed.size and feed.fed != feed.told):
            self._tell(feed)

    def _tell(self, feed: StdinFeed, *, is_closed: bool = False) -> None:
        feed.told = feed.fed
        self._events.append(StdinFed(feed.key, feed.fed, is_closed))

    def _close(self, feed: StdinFeed) -> None:
        del self._by_key[feed.key], self._by_sink[feed.sink]
        self._epoll.unregister(feed.sink)
        os.close(feed.sink)
        os.close(feed.file)
        self._closed[feed.key] = feed.fed
        self._tell(feed, is_closed=True)


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
