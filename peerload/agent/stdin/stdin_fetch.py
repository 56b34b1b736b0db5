"""Fetches of standard input for attempts that run here for other homes, into a file of this node's spool.

The launcher feeds the task from that file and reports its progress; only so much more is requested. The size of the file says
where to continue, after a broken stream and after a restart of this agent alike. Only the home ends an input.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from peerload.agent.event_loop import BackgroundTasks
from peerload.agent.output.spool import remove
from peerload.agent.stdin.stdin_store import opened
from peerload.launcher.process import HolePuncher
from peerload.model.errors import PeerloadError
from peerload.model.messages import InputChunk, InputEnd, InputRequest, InputWindow

if TYPE_CHECKING:
    from pathlib import Path

    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.output.spool import Spool
    from peerload.agent.peers.connection import PeerConnection
    from peerload.agent.peers.links import PeerLinks
    from peerload.agent.peers.streams import StreamReader
    from peerload.agent.run_state import RunState
    from peerload.core.work import RemoteTask

log = logging.getLogger("peerload.input")

FETCHED_AHEAD_BYTES_MAX = 4 << 20
"""Bound on what is fetched beyond what the task has read."""
REPORT_EVERY_BYTES = 1 << 20
"""Number of bytes read after which the home is told the progress."""
PUNCH_BYTES = 4 << 20
"""Step in which read input is dropped from the file."""
RETRY_S_MIN, RETRY_S_MAX = 0.2, 5.0
"""A home that cannot be reached is tried again after the first, then twice as long each time, up to the second."""


class StdinFetch:
    """The input of one attempt. size_bytes: fetched so far; fed_bytes: read by its task."""

    def __init__(self, launcher: LauncherLink, links: PeerLinks, path: Path, guest: RemoteTask) -> None:
        self._launcher = launcher
        self._links = links
        self.guest = guest
        self._file = opened(path)
        self.path = path
        self.size_bytes = os.fstat(self._file).st_size
        self.fed_bytes = 0
        self.has_ended = False
        self.is_closed = False
        self._told_bytes = self._asked_bytes = 0
        self._punched_bytes = 0
        self._holes = HolePuncher()
        self._stream: tuple[StreamReader, PeerConnection] | None = None
        self.work: asyncio.Task[None] | None = None

    def feed(self) -> None:
        """Tell the launcher what is here."""
        self._launcher.feed(self.guest.key, self.size_bytes, has_ended=self.has_ended)

    async def run(self) -> None:
        """Fetch until the end has come, or the home knows that no more is read. A broken stream is continued."""
        wait_s = RETRY_S_MIN
        while True:
            before = self.size_bytes
            try:
                if await self._fetch():
                    return
                why = "it knows no such attempt (any more)"
            except (PeerloadError, OSError, TimeoutError) as error:
                why = str(error)
            wait_s = RETRY_S_MIN if self.size_bytes > before else min(wait_s * 2, RETRY_S_MAX)
            log.info("cannot fetch standard input: task=%s error=%s", self.guest.task, why)
            await asyncio.sleep(wait_s)

    async def _fetch(self) -> bool:
        """Fetch over one stream. → True if that was all; False if the home knows no such attempt."""
        guest = self.guest
        reader, link = await self._links.open_stream(guest.home, (InputChunk, InputEnd, InputWindow))
        self._stream = reader, link
        try:
            self._tell()
            while not self.is_closed:
                message = await reader.next(link, f"the input of {guest.task}")
                if isinstance(message, InputChunk):
                    self._take(message)
                elif isinstance(message, InputWindow):
                    self._launcher.resize(guest.key, message.rows, message.columns)
                elif isinstance(message, InputEnd):
                    if message.gone:
                        return False
                    self._end(message)
                    if guest.spec.terminal is None:
                        return True
            return True
        finally:
            self._stream = None
            link.close("the input is no longer wanted")

    def _take(self, piece: InputChunk) -> None:
        if piece.offset != self.size_bytes or piece.offset + len(piece.data) > self._asked_bytes:
            why = f"{self.size_bytes} bytes are here, and it begins at {piece.offset}"
            raise PeerloadError(f"a piece of the input of {self.guest.task} is out of place", why=why)
        try:
            data = memoryview(piece.data)
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            os.ftruncate(self._file, self.size_bytes)
            raise
        self.size_bytes += len(piece.data)
        self.feed()

    def _end(self, message: InputEnd) -> None:
        if message.size_bytes != self.size_bytes:
            why = f"{self.size_bytes} bytes are here, of {message.size_bytes}"
            raise PeerloadError(f"the input of {self.guest.task} ends elsewhere", why=why)
        self.has_ended = True
        self.feed()

    def fed(self, offset: int, *, is_closed: bool) -> None:
        """The launcher has fed so much; ``is_closed``: its task reads no more."""
        self.fed_bytes = max(self.fed_bytes, offset)
        if self.fed_bytes - self._punched_bytes >= PUNCH_BYTES:
            self._punch()
        if is_closed and not self.is_closed and not (self.has_ended and self.guest.spec.terminal is not None):
            self.is_closed = True
            if self._stream is not None and self.work is not None:  # else the next one tells it first of all
                self._tell()
                self.work.cancel()
        elif self.fed_bytes - self._told_bytes >= REPORT_EVERY_BYTES:
            self._tell()

    def _punch(self) -> None:
        if self._holes.punch_file(self.path, self._punched_bytes, self.fed_bytes - self._punched_bytes):
            self._punched_bytes = self.fed_bytes

    def _tell(self) -> None:
        """Tell the home how much was read: it may drop that, and send on."""
        if self._stream is None:
            return
        reader, link = self._stream
        self._told_bytes = self.fed_bytes
        self._asked_bytes = self.fed_bytes + FETCHED_AHEAD_BYTES_MAX
        guest = self.guest
        request = InputRequest(
            guest.task, guest.uid, guest.attempt, self.size_bytes, self._asked_bytes, is_closed=self.is_closed
        )
        reader.write(link, request)

    def close(self) -> None:
        """Let go of it."""
        if self.work is not None:
            self.work.cancel()
        os.close(self._file)


class StdinFetches:
    """The fetches of one agent, by execution key."""

    def __init__(self, launcher: LauncherLink, links: PeerLinks, spool: Spool, run: RunState) -> None:
        self._launcher = launcher
        self._links = links
        self._spool = spool
        self._background = BackgroundTasks(run)
        self._fetches: dict[str, StdinFetch] = {}

    def begin(self, guest: RemoteTask) -> None:
        """Fetch for an attempt that runs here, if that is not done already; tell the launcher what is here. Raises
        OSError."""
        fetch = self._fetches.get(guest.key)
        if fetch is None:
            fetch = StdinFetch(self._launcher, self._links, self._spool.input_path(guest.key), guest)
            self._fetches[guest.key] = fetch
            fetch.work = self._background.start(fetch.run())
        fetch.feed()

    def fed(self, key: str, offset: int, *, is_closed: bool) -> None:
        """The launcher has fed so much to this attempt."""
        fetch = self._fetches.get(key)
        if fetch is not None:
            fetch.fed(offset, is_closed=is_closed)

    def end(self, key: str) -> None:
        """End the fetch of an attempt that is over."""
        fetch = self._fetches.pop(key, None)
        if fetch is not None:
            fetch.close()
            remove(fetch.path)

    async def close(self) -> None:
        """Stop all; what is here is gone on with by the next start."""
        fetches = list(self._fetches.values())
        self._fetches.clear()
        for fetch in fetches:
            fetch.close()
        await self._background.close()
