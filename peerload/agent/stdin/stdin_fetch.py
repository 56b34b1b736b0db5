"""Standard input of attempts that run here for other homes: pulled from there into a file of this node's spool.

The launcher feeds the task from that file and says how far it is; only so much more is asked for. The file's size is where
to go on, after a broken stream and after a restart of this agent alike, and only the home's word ends an input.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from peerload.agent.background import BackgroundTasks
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

PULLED_AHEAD_BYTES_MAX = 4 << 20
"""So much more than its task has read of an input is pulled."""
TOLD_EVERY_BYTES = 1 << 20
"""Its home is told how far it is each time that so much was read."""
PUNCH_BYTES = 4 << 20
"""What was read is dropped in steps of this."""
RETRY_S_MIN, RETRY_S_MAX = 0.2, 5.0
"""A home that cannot be reached is tried again after the first, then twice as long each time, up to the second."""


class StdinFetch:
    """The input of one attempt: ``size_bytes`` are here, ``fed_bytes`` of these its task has read."""

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
        """Pull until the end has come, or the home knows that no more is read; whatever breaks, again from where it
        broke."""
        wait_s = RETRY_S_MIN
        while True:
            before = self.size_bytes
            try:
                if await self._pull():
                    return
                why = "it knows no such attempt (any more)"
            except (PeerloadError, OSError, TimeoutError) as error:
                why = str(error)
            wait_s = RETRY_S_MIN if self.size_bytes > before else min(wait_s * 2, RETRY_S_MAX)
            log.info("the input of %s does not come: %s", self.guest.task, why)
            await asyncio.sleep(wait_s)

    async def _pull(self) -> bool:
        """One stream, as long as it lasts. → whether that was all; False if its home knows nothing of it."""
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
        elif self.fed_bytes - self._told_bytes >= TOLD_EVERY_BYTES:
            self._tell()

    def _punch(self) -> None:
        if self._holes.punch_file(self.path, self._punched_bytes, self.fed_bytes - self._punched_bytes):
            self._punched_bytes = self.fed_bytes

    def _tell(self) -> None:
        """Its home may drop what is here, and send on."""
        if self._stream is None:
            return
        reader, link = self._stream
        self._told_bytes = self.fed_bytes
        self._asked_bytes = self.fed_bytes + PULLED_AHEAD_BYTES_MAX
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
    """Those of one agent, by execution key."""

    def __init__(self, launcher: LauncherLink, links: PeerLinks, spool: Spool, run: RunState) -> None:
        self._launcher = launcher
        self._links = links
        self._spool = spool
        self._background = BackgroundTasks(run)
        self._pulls: dict[str, StdinFetch] = {}

    def begin(self, guest: RemoteTask) -> None:
        """Pull for an attempt that runs here, if that is not done already; tell the launcher what is here. Raises
        OSError."""
        pull = self._pulls.get(guest.key)
        if pull is None:
            pull = StdinFetch(self._launcher, self._links, self._spool.input_path(guest.key), guest)
            self._pulls[guest.key] = pull
            pull.work = self._background.start(pull.run())
        pull.feed()

    def fed(self, key: str, offset: int, *, is_closed: bool) -> None:
        """The launcher has fed so much to this attempt."""
        pull = self._pulls.get(key)
        if pull is not None:
            pull.fed(offset, is_closed=is_closed)

    def end(self, key: str) -> None:
        """This attempt is over."""
        pull = self._pulls.pop(key, None)
        if pull is not None:
            pull.close()
            remove(pull.path)

    async def close(self) -> None:
        """Stop all; what is here is gone on with by the next start."""
        pulls = list(self._pulls.values())
        self._pulls.clear()
        for pull in pulls:
            pull.close()
        await self._background.close()
