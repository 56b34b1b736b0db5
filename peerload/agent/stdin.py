"""Standard input of tasks: stored at their home, and forwarded to attempts here and on other nodes.

    STATE/spool/<name>.in           the data so far, to which the client appends; its beginning may be a hole
    STATE/spool/<name>.in-ended     a mark that the input has ended: its size in bytes
    STATE/spool/<name>.in-left      a mark that its client has deliberately left it open: its size in bytes

When the end of an input, or a detach, is acknowledged to its client, the whole input is on disk. A mark with a greater size than
the file (the machine stopped in between) is ignored. A file is open only during writes: there may be many thousands. The name is
derived from the submission's token, so that the file can exist before the task.

A task that runs at home is fed from this file. An attempt of another home is fed from a file in this node's spool, to which
its fetch writes: its home serves the input over a stream, as far as it is requested. The launcher feeds the task and reports its
progress, which limits further requests. The size of the file shows where to continue, both after a broken stream and after a
restart of this agent. Only the home ends an input. A request reports how much the node has: the home need no longer keep that
part, and the client may send as much more. Up to INPUT_KEPT_BYTES_MAX the whole input is kept, so that another attempt can read
it from the beginning. Beyond that, consumed data is dropped, and the task has only this attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from peerload.agent.output.spool import remove
from peerload.agent.runtime import BackgroundTasks
from peerload.core.work import HomePhase, RemotePhase
from peerload.launcher.process import HolePuncher
from peerload.model.errors import BadRequest, PeerloadError, SlowDown
from peerload.model.events import InputCame, InputCut
from peerload.model.messages import InputChunk, InputEnd, InputRequest, InputWindow
from peerload.model.task import TaskState, execution_key
from peerload.security.private_files import write_private

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.output.spool import Spool
    from peerload.agent.peers.connection import PeerConnection
    from peerload.agent.peers.links import PeerLinks
    from peerload.agent.runtime import Inbox, RunState
    from peerload.core.node import Node
    from peerload.core.work import HomeTask, RemoteTask
    from peerload.model.actions import SpawnTask, TaskChanged
    from peerload.model.task import TaskRecord


log = logging.getLogger("peerload.input")

INPUT_KEPT_BYTES_MAX = 64 << 20
"""Maximum size of an input that is kept as a whole until its task has ended."""
INPUT_AHEAD_BYTES_MAX = 4 << 20
"""Maximum number of bytes that a client may send beyond the consumed ones."""
INPUT_UNASKED_BYTES_MAX = 8 << 20
"""Maximum number of bytes beyond that, from a client that does not wait for the answers."""
PUNCH_BYTES = 4 << 20
"""Minimum step in which consumed input is dropped from the file."""
NUMBER_CHARS_MAX = 20
_SUFFIX, _ENDED, _LEFT = ".in", ".in-ended", ".in-left"

_ADDING = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class StdinFull(PeerloadError):
    """The input cannot be stored."""

    code = "input"


def input_name(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()[:32]


class DroppedBeginning:
    """The beginning of an input's file, which is dropped in steps as it is consumed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._holes = HolePuncher()
        self._size_bytes = 0

    def drop(self, taken_bytes: int) -> None:
        step_bytes = taken_bytes - self._size_bytes
        if step_bytes >= PUNCH_BYTES and self._holes.punch_file(self._path, self._size_bytes, step_bytes):
            self._size_bytes = taken_bytes


class StoredStdin:
    """Stored standard input of a task. size_bytes: received so far; has_ended: no more will arrive; taken_bytes:
    consumed by the running attempt; is_closed: that attempt reads no more; is_dropped: no attempt will read it, and its
    files are removed; feeder: the client that sends it; ends_with_feeder: it ends when that client disconnects; window:
    (rows, columns) of its terminal, if they have changed; uid: of its task, when there is one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        file = opened(path)
        try:
            self.size_bytes = os.fstat(file).st_size
        finally:
            os.close(file)
        self.has_ended = _marked(path.with_suffix(_ENDED)) == self.size_bytes
        self.was_left = 0 <= _marked(path.with_suffix(_LEFT)) <= self.size_bytes
        self._is_ending = False
        self._unasked_bytes = 0
        self.uid = b""
        self._key = ""
        self.taken_bytes = 0
        self.is_closed = False
        self.is_cut = False
        self.is_dropped = False
        self.feeder: object = None
        self.ends_with_feeder = False
        self.window: tuple[int, int] | None = None
        self._watchers: set[asyncio.Event] = set()
        self._beginning = DroppedBeginning(path)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        file = os.open(self.path, _ADDING)
        try:
            yield file
        finally:
            os.close(file)

    def add(self, data: bytes, offset: int | None) -> None:
        """Add data. ``offset``: its place, None = at the end; data that has arrived before is ignored. Raises
        BadRequest for a gap, StdinFull if the disk does not accept it, SlowDown if it exceeds the allowed size by
        far."""
        at = self.size_bytes if offset is None else offset
        if at > self.size_bytes:
            why = f"{self.size_bytes} bytes have arrived so far, and this begins at {at}"
            raise BadRequest("a piece of the input is missing", why=why)
        data = data[self.size_bytes - at :]
        if self.has_ended or self._is_ending or not data:
            return
        self._hold_back(len(data))
        try:
            with self._opened() as file:
                _append(file, data, self.size_bytes)
        except OSError as error:
            raise _full(error) from None
        self.size_bytes += len(data)
        self.notify()

    def _hold_back(self, bytes_: int) -> None:
        if self.has_room:
            self._unasked_bytes = 0
            return
        if self._unasked_bytes + bytes_ > INPUT_UNASKED_BYTES_MAX:
            why = f"{self.size_bytes - self.taken_bytes} bytes wait for the task to read them"
            raise SlowDown("too much input at once: wait for the answers before sending more", why=why)
        self._unasked_bytes += bytes_

    def end(self) -> None:
        """End the input. This is not acknowledged, so it need not be on disk."""
        if self.has_ended:
            return
        self._ended()
        try:
            write_private(self.path.with_suffix(_ENDED), b"%d" % self.size_bytes, is_durable=False)
        except OSError as error:  # after a restart of the agent, no client continues the input, so it ends then
            log.warning("cannot write the end mark of an input: error=%s", error)

    def _ended(self) -> None:
        self.has_ended = True
        self.notify()

    async def finish(self) -> None:
        """End the input, durably. Raises StdinFull."""
        if self.has_ended:
            return
        self._is_ending = True
        try:
            await asyncio.to_thread(self._seal, _ENDED)
        except OSError as error:
            self._is_ending = False
            if self.is_closed:  # its task has ended meanwhile
                return
            raise _full(error) from None
        finally:
            if self._is_ending:  # the client had ended it before it disconnected
                self._ended()

    async def leave(self) -> None:
        """Leave the input open while its client detaches, so that another can continue it. It is on disk afterwards. Raises
        StdinFull."""
        self.feeder = None
        self.was_left = True
        try:
            await asyncio.to_thread(self._seal, _LEFT)
        except OSError as error:
            if not self.is_closed:
                raise _full(error) from None

    def _seal(self, suffix: str) -> None:
        """Sync the file, then write a mark for that; for a thread. Raises OSError."""
        size_bytes = self.size_bytes
        with self._opened() as file:
            os.fsync(file)
        mark = self.path.with_suffix(suffix)
        write_private(mark, b"%d" % size_bytes)
        if self.is_dropped:  # its task has ended meanwhile
            remove(mark)

    @property
    def has_room(self) -> bool:
        return self.size_bytes - self.taken_bytes < INPUT_AHEAD_BYTES_MAX

    async def room(self) -> dict[str, Any]:
        """Wait until the client may send more, or no more is needed → the answer to the client: offset, wanted, ended."""
        with self.watched() as changed:
            while not (self.has_room or self.is_closed or self.has_ended):
                changed.clear()
                await changed.wait()
        return {"offset": self.size_bytes, "wanted": not self.is_closed, "ended": self.has_ended}

    @property
    def is_too_large(self) -> bool:
        """True if the beginning of the file has to be dropped."""
        return self.size_bytes > INPUT_KEPT_BYTES_MAX and not self.is_cut

    def began(self, key: str) -> None:
        """Start or continue to send the input to this attempt."""
        if key != self._key:
            self._key = key
            self.taken_bytes = 0
            self.is_closed = False

    def take(self, bytes_: int, *, is_closed: bool) -> None:
        """Record that the running attempt has ``bytes_`` bytes of it; ``is_closed``: it reads no more."""
        taken_bytes = max(self.taken_bytes, min(bytes_, self.size_bytes))
        if (taken_bytes, is_closed) == (self.taken_bytes, self.is_closed):
            return
        self.taken_bytes = taken_bytes
        self.is_closed = self.is_closed or is_closed
        if self.is_cut:
            self._beginning.drop(self.taken_bytes)
        self.notify()

    def resize(self, rows: int, columns: int) -> None:
        self.window = (rows, columns)
        self.notify()

    @contextlib.contextmanager
    def watched(self) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        self._watchers.add(event)
        try:
            yield event
        finally:
            self._watchers.discard(event)

    def notify(self) -> None:
        for event in self._watchers:
            event.set()


class StdinStore:
    """The inputs of one home, by name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, StoredStdin] = {}

    def get(self, name: str) -> StoredStdin:
        """The input of this name; created if there is none. Raises OSError."""
        known = self._open.get(name)
        if known is None:
            known = self._open[name] = StoredStdin(self._directory / f"{name}{_SUFFIX}")
        return known

    def is_known(self, name: str) -> bool:
        return name in self._open or (self._directory / f"{name}{_SUFFIX}").exists()

    def drop(self, name: str) -> None:
        """Remove an input without readers."""
        known = self._open.pop(name, None)
        if known is not None:
            known.is_closed = known.is_dropped = True
            known.notify()
        for suffix in (_SUFFIX, _ENDED, _LEFT):
            remove(self._directory / f"{name}{suffix}")

    def drop_others(self, names: set[str]) -> None:
        """Remove the inputs of earlier starts of this agent, except these."""
        for path in self._directory.glob(f"*{_SUFFIX}*"):
            name = path.name.partition(".")[0]
            if "-" not in name and name not in names and name not in self._open:
                remove(path)

    def left_by(self, feeder: object) -> list[StoredStdin]:
        return [known for known in self._open.values() if known.feeder is feeder]


def _append(file: int, data: bytes, size_bytes: int) -> None:
    """Append all of the data to a file of this size, or nothing. Raises OSError."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(file, view) :]
    except OSError:
        os.ftruncate(file, size_bytes)
        raise


def _full(error: OSError) -> StdinFull:
    return StdinFull("the input cannot be stored", why=str(error.strerror), hint="df -h")


def opened(path: Path) -> int:
    """Open the file of an input for appending; replaces anything that a task has put in its place. Raises OSError."""
    flags = _ADDING | os.O_CREAT
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno not in {errno.EISDIR, errno.ELOOP, errno.ENXIO}:
            raise
    remove(path)
    return os.open(path, flags, 0o600)


def _marked(path: Path) -> int:
    """The number in a mark, -1 if there is none."""
    try:
        text = path.read_bytes()[:NUMBER_CHARS_MAX]
    except OSError:
        return -1
    return int(text) if text.isdigit() else -1


FETCHED_AHEAD_BYTES_MAX = 4 << 20
"""Maximum number of bytes that are fetched beyond those that the task has read."""
REPORT_EVERY_BYTES = 1 << 20
"""Number of read bytes after which the progress is reported to the home."""
RETRY_S_MIN, RETRY_S_MAX = 0.2, 5.0
"""First and longest pause before an unreachable home is tried again; each pause doubles."""


class StdinFetch:
    """The input of one attempt. size_bytes: fetched so far; fed_bytes: read by its task."""

    def __init__(self, launcher: LauncherLink, links: PeerLinks, path: Path, remote: RemoteTask) -> None:
        self._launcher = launcher
        self._links = links
        self.remote = remote
        self._file = opened(path)
        self.path = path
        self.size_bytes = os.fstat(self._file).st_size
        self.fed_bytes = 0
        self.has_ended = False
        self.is_closed = False
        self._reported_bytes = self._requested_bytes = 0
        self._beginning = DroppedBeginning(path)
        self._link: PeerConnection | None = None
        self.work: asyncio.Task[None] | None = None

    def feed(self) -> None:
        self._launcher.feed(self.remote.key, self.size_bytes, has_ended=self.has_ended)

    async def run(self) -> None:
        """Fetch until the end has arrived, or the home knows that no more is read. A broken stream is resumed."""
        wait_s = RETRY_S_MIN
        while True:
            before = self.size_bytes
            try:
                if await self._fetch():
                    return
                why = "its home does not know the attempt (any more)"
            except (PeerloadError, OSError, TimeoutError) as error:
                why = str(error)
            wait_s = RETRY_S_MIN if self.size_bytes > before else min(wait_s * 2, RETRY_S_MAX)
            log.info("cannot fetch standard input: task=%s error=%s", self.remote.task, why)
            await asyncio.sleep(wait_s)

    async def _fetch(self) -> bool:
        """Fetch over one stream → True if the input is complete; False if the home does not know the attempt."""
        remote = self.remote
        reader, link = await self._links.open_stream(remote.home, (InputChunk, InputEnd, InputWindow))
        self._link = link
        try:
            self._report_progress()
            while not self.is_closed:
                message = await reader.next(link, f"the input of {remote.task}")
                if isinstance(message, InputChunk):
                    self._take(message)
                elif isinstance(message, InputWindow):
                    self._launcher.resize(remote.key, message.rows, message.columns)
                elif isinstance(message, InputEnd):
                    if message.gone:
                        return False
                    self._end(message)
                    if remote.spec.terminal is None:
                        return True
            return True
        finally:
            self._link = None
            link.close("the input is no longer wanted")

    def _take(self, piece: InputChunk) -> None:
        if piece.offset != self.size_bytes or piece.offset + len(piece.data) > self._requested_bytes:
            why = f"{self.size_bytes} bytes are here, and the piece begins at {piece.offset}"
            raise PeerloadError(f"the input of {self.remote.task} arrived out of order", why=why)
        _append(self._file, piece.data, self.size_bytes)
        self.size_bytes += len(piece.data)
        self.feed()

    def _end(self, message: InputEnd) -> None:
        if message.size_bytes != self.size_bytes:
            why = f"{self.size_bytes} bytes are here, of {message.size_bytes}"
            raise PeerloadError(f"the input of {self.remote.task} is incomplete", why=why)
        self.has_ended = True
        self.feed()

    def fed(self, offset: int, *, is_closed: bool) -> None:
        """Record that the launcher has fed ``offset`` bytes; ``is_closed``: its task reads no more."""
        self.fed_bytes = max(self.fed_bytes, offset)
        self._beginning.drop(self.fed_bytes)
        if is_closed and not self.is_closed and not (self.has_ended and self.remote.spec.terminal is not None):
            self.is_closed = True
            if (
                self._link is not None and self.work is not None
            ):  # otherwise the first request over the next link reports it
                self._report_progress()
                self.work.cancel()
        elif self.fed_bytes - self._reported_bytes >= REPORT_EVERY_BYTES:
            self._report_progress()

    def _report_progress(self) -> None:
        """Report to the home how much was read: it may drop that part, and send more."""
        if self._link is None:
            return
        self._reported_bytes = self.fed_bytes
        self._requested_bytes = self.fed_bytes + FETCHED_AHEAD_BYTES_MAX
        remote = self.remote
        request = InputRequest(
            remote.task, remote.uid, remote.attempt, self.size_bytes, self._requested_bytes, is_closed=self.is_closed
        )
        self._link.send(request)

    def close(self) -> None:
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

    def begin(self, remote: RemoteTask) -> None:
        """Start the fetch for an attempt that runs here, if it is not running; report the available size to the launcher. Raises
        OSError."""
        fetch = self._fetches.get(remote.key)
        if fetch is None:
            fetch = StdinFetch(self._launcher, self._links, self._spool.input_path(remote.key), remote)
            self._fetches[remote.key] = fetch
            fetch.work = self._background.start(fetch.run())
        fetch.feed()

    def fed(self, key: str, offset: int, *, is_closed: bool) -> None:
        fetch = self._fetches.get(key)
        if fetch is not None:
            fetch.fed(offset, is_closed=is_closed)

    def end(self, key: str) -> None:
        fetch = self._fetches.pop(key, None)
        if fetch is not None:
            fetch.close()
            remove(fetch.path)

    async def close(self) -> None:
        """Stop all fetches; the next start resumes them."""
        fetches = list(self._fetches.values())
        self._fetches.clear()
        for fetch in fetches:
            fetch.close()
        await self._background.close()


@dataclass(eq=False, repr=False)
class StdinForwarding:
    """The forwarding of input in one agent. inputs: of tasks of this home; fetches: for attempts of other homes."""

    _node: Node
    _launcher: LauncherLink
    _inbox: Inbox
    _spool: Spool
    _inputs: StdinStore
    _fetches: StdinFetches
    _here: dict[str, StoredStdin] = field(default_factory=dict, init=False)
    _commands: set[str] = field(default_factory=set, init=False)
    _cuts_requested: set[bytes] = field(default_factory=set, init=False)

    def source(self, action: SpawnTask) -> str:
        """The file that feeds the stdin of an attempt that reads input; "" = /dev/null. Call `begin` when the attempt was
        ordered. Raises OSError."""
        task = self._node.home.by_id.get(action.task) if action.home == self._node.state.identity.node else None
        if task is not None:
            return str(self._inputs.get(task.record.input).path) if task.record.input else ""
        return str(self._spool.input_path(action.key))

    def begin(self, key: str) -> None:
        """Forward the input of an attempt that the launcher starts or runs: report the size of its file, now and when it grows."""
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
        remote = self._node.executor.remote_tasks.get(key)
        if remote is not None and remote.spec.takes_input and remote.phase is RemotePhase.HERE:
            self._fetches.begin(remote)

    def begin_command(self, key: str, source: StoredStdin) -> None:
        """Forward input from ``source`` to this command of `exec`, which the launcher starts or still runs."""
        self._here[key] = source
        self._commands.add(key)
        self.grown(key, source)

    def end_command(self, key: str) -> None:
        self._commands.discard(key)
        self._here.pop(key, None)

    def grown(self, key: str, source: StoredStdin) -> None:
        self._launcher.feed(key, source.size_bytes, has_ended=source.has_ended)

    def adopt(self, *, is_first: bool) -> None:
        """Continue to forward input to all attempts that run here, after a launcher was listed. ``is_first``: this agent has
        just been started, and inputs without a task may be removed."""
        node = self._node
        if is_first:
            self._inputs.drop_others({task.record.input for task in node.home.tasks.values()})
        for task in list(node.home.tasks.values()):
            if task.phase is HomePhase.HERE and task.record.input:
                self.begin(task.key)
        for remote in list(node.executor.remote_tasks.values()):
            if remote.phase is RemotePhase.HERE and remote.spec.takes_input:
                self.begin(remote.key)
        for key in sorted(self._commands):
            self.grown(key, self._here[key])

    def sent(self, uid: bytes) -> None:
        task = self._node.home.tasks.get(uid)
        if task is None or not task.record.input:
            return
        source = self._inputs.get(task.record.input)
        if task.key in self._here:
            self.grown(task.key, source)
        self.cut_if_due(uid, source)

    def resized(self, uid: bytes) -> None:
        task = self._node.home.tasks.get(uid)
        if task is not None and task.key in self._here:
            window = self._here[task.key].window
            if window is not None:
                self._launcher.resize(task.key, *window)

    def cut_if_due(self, uid: bytes, source: StoredStdin) -> None:
        """Drop the beginning of an input that is too large, after the decision is durable."""
        if source.is_too_large and uid not in self._cuts_requested:
            self._cuts_requested.add(uid)
            self._inbox.put(InputCut(uid))

    def fed(self, key: str, offset: int, *, is_closed: bool) -> None:
        """Record that the launcher has fed ``offset`` bytes to this attempt; ``is_closed``: it reads no more."""
        source = self._here.get(key)
        if source is not None:
            source.take(offset, is_closed=is_closed)
        else:
            self._fetches.fed(key, offset, is_closed=is_closed)

    def note_input(self, record: TaskRecord, source: StoredStdin) -> None:
        if source.size_bytes and not record.input_came:
            self._inbox.put(InputCame(record.uid))

    def changed(self, action: TaskChanged) -> None:
        """Process a change of a task with input: if it no longer runs here, forwarding to its last attempt ends."""
        record = action.record
        if record.state.is_final:
            self._cuts_requested.discard(record.uid)
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
    """Standard input that is served to another node: the last request of ``node``, and the progress of sending."""

    def __init__(
        self,
        server: StdinServer,
        link: PeerConnection,
        node: str,
        request: InputRequest,
    ) -> None:
        self._server = server
        self._link = link
        self._node = node
        self.request = request
        self._sent = request.have
        self._window: tuple[int, int] | None = None
        self.request_changed: asyncio.Event | None = None
        self.work: asyncio.Task[None] | None = None

    def requested(self, request: InputRequest) -> None:
        """Process a further request. A report that the task reads no more takes effect immediately: its node then disconnects."""
        self.request = request
        task = self._task() if request.is_closed else None
        if task is not None:
            self._source(task).take(request.have, is_closed=True)
        if self.request_changed is not None:
            self.request_changed.set()

    def _source(self, task: HomeTask) -> StoredStdin:
        source = self._server.inputs.get(task.record.input)
        source.began(execution_key(self.request.uid, self.request.attempt))
        return source

    async def run(self) -> None:
        """Send the requested input as it arrives, then its end."""
        task = self._task()
        if task is None:
            self._link.send(InputEnd(gone=True))
            await self._link.drain()
            return
        source = self._source(task)
        file = os.open(source.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            with source.watched() as changed:
                self.request_changed = changed
                await self._send_all(task, source, file, changed)
        finally:
            os.close(file)

    def _task(self) -> HomeTask | None:
        """The task that the other node runs for this home; None if it does not (any more)."""
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
                self._link.send(InputWindow(*source.window))
            while self._sent < min(source.size_bytes, self.request.up_to):
                size = min(source.size_bytes, self.request.up_to) - self._sent
                data = os.pread(file, min(size, PIECE_BYTES_MAX), self._sent)
                self._link.send(InputChunk(self._sent, data))
                self._sent += len(data)
                await self._link.drain()
            if source.has_ended and self._sent == source.size_bytes and not has_ended:
                has_ended = True
                self._link.send(InputEnd(source.size_bytes))
            await self._link.drain()
            await changed.wait()
        self._link.send(InputEnd(gone=True))
        await self._link.drain()


class StdinServer:
    """The streams of one home that serve standard input."""

    def __init__(self, node: Node, inputs: StdinStore, forwarding: StdinForwarding, run: RunState) -> None:
        self.node = node
        self.inputs = inputs
        self.forwarding = forwarding
        self._background = BackgroundTasks(run)
        self._served: dict[PeerConnection, ServedStdin] = {}

    def received(self, link: PeerConnection, node: str, message: InputRequest, /) -> None:
        """Process a node's request for the input of an attempt, or for more of it."""
        served = self._served.get(link)
        if served is None:
            served = self._served[link] = ServedStdin(self, link, node, message)
            served.requested(message)
            served.work = self._background.start(self._run(served, link))
            return
        known = served.request
        if (known.uid, known.attempt) != (message.uid, message.attempt):
            link.close("another input on one stream")
            return
        served.requested(message)

    async def _run(self, served: ServedStdin, link: PeerConnection) -> None:
        try:
            await served.run()
        except ConnectionError:
            return  # the reader disconnected, and requests the rest again
        except OSError as error:
            log.warning("cannot serve standard input: task=%s error=%s", served.request.task, error)
        link.close("the input is complete")

    def closed(self, link: PeerConnection) -> None:
        served = self._served.pop(link, None)
        if served is not None and served.work is not None:
            served.work.cancel()

    async def close(self) -> None:
        await self._background.close()
