"""Forwarding of standard input to attempts: those that run here, and those on other nodes.

A task of this home is fed from its input itself (`stdin_store.py`). An attempt of another home is fed from a file in this
node's spool, into which its fetch writes: its home serves the input over a stream, as far as it is asked for. The launcher
feeds, and reports its progress; only so much more is requested. The size of the file says where to continue, after a broken
stream and after a restart of this agent alike. Only the home ends an input. A request says how much the node has: that need
not be kept for it any more, and a client may send so much more."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from peerload.agent.output.spool import remove
from peerload.agent.runtime import BackgroundTasks
from peerload.agent.stdin.stdin_store import opened
from peerload.core.work import HomePhase, RemotePhase
from peerload.launcher.process import HolePuncher
from peerload.model.errors import PeerloadError
from peerload.model.events import InputCame, InputCut
from peerload.model.messages import InputChunk, InputEnd, InputRequest, InputWindow
from peerload.model.task import TaskState, execution_key

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.output.spool import Spool
    from peerload.agent.peers.connection import PeerConnection
    from peerload.agent.peers.links import PeerLinks
    from peerload.agent.peers.streams import StreamReader
    from peerload.agent.runtime import Inbox, RunState
    from peerload.agent.stdin.stdin_store import StdinStore, StoredStdin
    from peerload.core.node import Node
    from peerload.core.work import HomeTask, RemoteTask
    from peerload.model.actions import SpawnTask, TaskChanged
    from peerload.model.messages import Message
    from peerload.model.task import TaskRecord

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


class StdinForwarding:
    """The forwarding of one agent. inputs: of tasks of this home; fetches: for attempts of other homes."""

    def __init__(
        self,
        node: Node,
        launcher: LauncherLink,
        inbox: Inbox,
        spool: Spool,
        inputs: StdinStore,
        fetches: StdinFetches,
    ) -> None:
        self._node = node
        self._launcher = launcher
        self._inbox = inbox
        self._spool = spool
        self._inputs = inputs
        self._fetches = fetches
        self._here: dict[str, StoredStdin] = {}
        self._commands: set[str] = set()
        self._asked_to_cut: set[bytes] = set()

    def source(self, action: SpawnTask) -> str:
        """The file that the stdin of an attempt is to be fed from, "" = /dev/null. `begin` when it was ordered. Raises
        OSError."""
        spec = action.spec
        if not spec.takes_input:
            return ""
        task = self._node.home.by_id.get(action.task) if action.home == self._node.state.identity.node else None
        if task is not None:
            return str(self._inputs.get(task.record.input).path) if task.record.input else ""
        return str(self._spool.input_path(action.key))

    def begin(self, key: str) -> None:
        """The launcher was told to start this attempt, or runs it still: tell it what there is to read, and go on with
        that."""
        uid = bytes.fromhex(key.partition("-")[0])
        task = self._node.home.tasks.get(uid)
        if task is not None and task.key == key and task.phase is HomePhase.HERE:
            if task.record.input:
                source = self._here.get(key)
                if source is None:
                    source = self._here[key] = self._inputs.get(task.record.input)
                    source.is_cut = task.record.input_is_cut
                    source.began(key)
                self.grown(key, source)
            return
        guest = self._node.executor.guests.get(key)
        if guest is not None and guest.spec.takes_input and guest.phase is RemotePhase.HERE:
            self._fetches.begin(guest)

    def begin_command(self, key: str, source: StoredStdin) -> None:
        """The launcher was told to start this command of `exec`, which reads from there, or runs it still."""
        self._here[key] = source
        self._commands.add(key)
        self.grown(key, source)

    def end_command(self, key: str) -> None:
        """A command of `exec` is over."""
        self._commands.discard(key)
        self._here.pop(key, None)

    def grown(self, key: str, source: StoredStdin) -> None:
        """Tell the launcher that the input has grown, or has ended."""
        self._launcher.feed(key, source.size_bytes, has_ended=source.has_ended)

    def adopt(self, *, is_first: bool) -> None:
        """A launcher was listed: go on with all that runs here, whatever it was told before. ``is_first``: this agent has
        just been started, and what is nobody's may go."""
        node = self._node
        if is_first:
            self._inputs.drop_others({task.record.input for task in node.home.tasks.values()})
        for task in list(node.home.tasks.values()):
            if task.phase is HomePhase.HERE and task.record.input:
                self.begin(task.key)
        for guest in list(node.executor.guests.values()):
            if guest.phase is RemotePhase.HERE and guest.spec.takes_input:
                self.begin(guest.key)
        for key in sorted(self._commands):
            self.grown(key, self._here[key])

    def sent(self, uid: bytes) -> None:
        """A client has sent more to a task of this home."""
        task = self._node.home.tasks.get(uid)
        if task is None or not task.record.input:
            return
        source = self._inputs.get(task.record.input)
        if task.key in self._here:
            self.grown(task.key, source)
        self.cut_if_due(uid, source)

    def resized(self, uid: bytes) -> None:
        """The window of a client is another."""
        task = self._node.home.tasks.get(uid)
        if task is not None and task.key in self._here:
            window = self._here[task.key].window
            if window is not None:
                self._launcher.resize(task.key, *window)

    def cut_if_due(self, uid: bytes, source: StoredStdin) -> None:
        """Have the beginning of what is too large dropped: that is durable before it is done."""
        if source.is_too_large and uid not in self._asked_to_cut:
            self._asked_to_cut.add(uid)
            self._inbox.put(InputCut(uid))

    def fed(self, key: str, offset: int, *, is_closed: bool) -> None:
        """The launcher has fed so much to this attempt; ``is_closed``: it reads no more."""
        source = self._here.get(key)
        if source is not None:
            source.take(offset, is_closed=is_closed)
        else:
            self._fetches.fed(key, offset, is_closed=is_closed)

    def note_input(self, record: TaskRecord, source: StoredStdin) -> None:
        """Have the record say that something has come, if it has."""
        if source.size_bytes and not record.input_came:
            self._inbox.put(InputCame(record.uid))

    def changed(self, action: TaskChanged) -> None:
        """A task of this home has another record: what was fed from its input is over if it does not run here any more."""
        record = action.record
        if not record.input:
            return
        if record.state.is_final:
            self._asked_to_cut.discard(record.uid)
            self._inputs.drop(record.input)
        else:
            source = self._inputs.get(record.input)
            source.uid = record.uid
            source.is_cut = record.input_is_cut
            self.note_input(record, source)
        current = f"{record.uid.hex()}-{record.attempt}" if record.node == self._node.state.identity.node else ""
        for key in [key for key in self._here if key.startswith(record.uid.hex()) and key != current]:
            del self._here[key]


PIECE_BYTES_MAX = 256 << 10


class ServedStdin:
    """One stream: what ``node`` has asked for last, and how far it was sent."""

    def __init__(
        self,
        server: StdinServer,
        link: PeerConnection,
        node: str,
        request: InputRequest,
        say: Callable[[Message], None],
    ) -> None:
        self._server = server
        self._link = link
        self._node = node
        self.request = request
        self._say = say
        self._sent = request.have
        self._window: tuple[int, int] | None = None
        self.asked: asyncio.Event | None = None
        self.work: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Send what is asked for as it comes, then the end."""
        task = self._task()
        if task is None:
            self._say(InputEnd(gone=True))
            await self._link.drain()
            return
        source = self._server.inputs.get(task.record.input)
        source.began(execution_key(self.request.uid, self.request.attempt))
        file = os.open(source.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            with source.watched() as changed:
                self.asked = changed
                await self._send_all(task, source, file, changed)
        finally:
            os.close(file)

    def _task(self) -> HomeTask | None:
        """The task that this node runs for us, None if it does not (any more)."""
        request = self.request
        task = self._server.node.home.tasks.get(request.uid)
        if task is None or not task.record.input or task.record.state is not TaskState.LEASED:
            return None
        is_its = (task.record.node, task.record.attempt, task.task) == (self._node, request.attempt, request.task)
        return task if is_its else None

    async def _send_all(self, task: HomeTask, source: StoredStdin, file: int, changed: asyncio.Event) -> None:
        has_ended = False
        while self._task() is task:
            changed.clear()
            source.take(self.request.have, is_closed=self.request.is_closed)
            self._server.forwarding.cut_if_due(task.uid, source)
            if source.window is not None and source.window != self._window:
                self._window = source.window
                self._say(InputWindow(*source.window))
            while self._sent < min(source.size_bytes, self.request.up_to):
                size = min(source.size_bytes, self.request.up_to) - self._sent
                data = os.pread(file, min(size, PIECE_BYTES_MAX), self._sent)
                self._say(InputChunk(self._sent, data))
                self._sent += len(data)
                await self._link.drain()
            if source.has_ended and self._sent == source.size_bytes and not has_ended:
                has_ended = True
                self._say(InputEnd(source.size_bytes))
            await self._link.drain()
            await changed.wait()
        self._say(InputEnd(gone=True))
        await self._link.drain()


class StdinServer:
    """The streams of one home that serve standard input."""

    def __init__(self, node: Node, inputs: StdinStore, forwarding: StdinForwarding, run: RunState) -> None:
        self.node = node
        self.inputs = inputs
        self.forwarding = forwarding
        self._background = BackgroundTasks(run)
        self._served: dict[PeerConnection, ServedStdin] = {}

    def received(self, link: PeerConnection, node: str, message: InputRequest, say: Callable[[Message], None]) -> None:
        """A node asks for the input of an attempt, or for more of it; ``say`` answers."""
        served = self._served.get(link)
        if served is None:
            served = self._served[link] = ServedStdin(self, link, node, message, say)
            served.work = self._background.start(self._run(served, link))
            return
        known = served.request
        if (known.uid, known.attempt) != (message.uid, message.attempt):
            link.close("another input on one stream")
            return
        served.request = message
        if served.asked is not None:
            served.asked.set()

    async def _run(self, served: ServedStdin, link: PeerConnection) -> None:
        try:
            await served.run()
        except ConnectionError:
            return  # the asker went away, and asks again from where it was
        except OSError as error:
            log.warning("cannot serve standard input: task=%s error=%s", served.request.task, error)
        link.close("the input is complete")

    def closed(self, link: PeerConnection) -> None:
        """The other end is gone."""
        served = self._served.pop(link, None)
        if served is not None and served.work is not None:
            served.work.cancel()

    async def close(self) -> None:
        """Serve nobody any more."""
        await self._background.close()
