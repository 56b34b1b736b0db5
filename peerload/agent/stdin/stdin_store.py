"""Store of standard input: a file for each task of this home, to which its client appends.

    STATE/spool/<name>.in           the data so far; its beginning may be a hole
    STATE/spool/<name>.in-ended     a mark that the input has ended: its size in bytes
    STATE/spool/<name>.in-left      a mark that its client has left it open on purpose: its size in bytes

An input whose end, or leaving, is acknowledged to its client is on the disk as a whole. A mark with a greater size than the
file (the machine stopped in between) does not count. A file is open only while it is written to: there may be many thousands.

The name is made of the submission's token, so that the file exists before the task does. A task that runs here is fed from
this file, one elsewhere from a copy that its node fetches (`stdin_forwarding.py`). A client may send only so much more than was
taken. Up to INPUT_KEPT_BYTES_MAX the whole input is kept, and another attempt reads it from the beginning; beyond that, taken
data is dropped, and the task has this one attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
from typing import TYPE_CHECKING, Any

from peerload.agent.output.spool import remove
from peerload.launcher.process import HolePuncher
from peerload.model.errors import BadRequest, PeerloadError, SlowDown

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

log = logging.getLogger("peerload.input")

INPUT_KEPT_BYTES_MAX = 64 << 20
"""Bound up to which a whole input is kept until its task has ended."""
INPUT_AHEAD_BYTES_MAX = 4 << 20
"""Bound on what a client may send beyond what was taken."""
INPUT_UNASKED_BYTES_MAX = 8 << 20
"""A client that does not wait for the answers, which say that there is room, may send so much beyond that."""
PUNCH_BYTES = 4 << 20
"""Least step in which taken input is dropped from the file."""
NUMBER_CHARS_MAX = 20
_SUFFIX, _ENDED, _LEFT = ".in", ".in-ended", ".in-left"

_ADDING = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class StdinFull(PeerloadError):
    """The input cannot be kept."""

    code = "input"


def input_name(token: str) -> str:
    """The name of the input that is submitted with this token."""
    return hashlib.sha256(token.encode()).hexdigest()[:32]


class StoredStdin:
    """One input. size_bytes: received so far; has_ended: no more will come; taken_bytes: taken by the attempt that runs;
    is_closed: that attempt takes no more; is_dropped: no attempt will, and no file of it stays; feeder: the client that sends
    it; ends_with_feeder: it ends when that client is gone; window: (rows, columns) of its terminal, if they have changed; uid:
    of its task, once there is one."""

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
        self._holes = HolePuncher()
        self._punched_bytes = 0

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """The file, open for appending. Raises OSError."""
        file = os.open(self.path, _ADDING)
        try:
            yield file
        finally:
            os.close(file)

    def add(self, data: bytes, offset: int | None) -> None:
        """Add data. ``offset``: its place, None = at the end; data that came before is not kept twice. Raises
        BadRequest for a gap, StdinFull if the disk does not take it, SlowDown if it is far more than there was room
        for."""
        at = self.size_bytes if offset is None else offset
        if at > self.size_bytes:
            why = f"{self.size_bytes} bytes have come so far, and this begins at {at}"
            raise BadRequest("a piece of the input is missing", why=why)
        data = data[self.size_bytes - at :]
        if self.has_ended or self._is_ending or not data:
            return
        self._hold_back(len(data))
        try:
            with self._opened() as file:
                self._write(file, data)
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
            raise SlowDown("too much input at once: the answers say when there is room for more", why=why)
        self._unasked_bytes += bytes_

    def _write(self, file: int, data: bytes) -> None:
        """All of it, or nothing."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(file, view) :]
        except OSError:
            os.ftruncate(file, self.size_bytes)
            raise

    def end(self) -> None:
        """End the input. Nobody is told, so it need not be on the disk."""
        if self.has_ended:
            return
        self._ended()
        try:
            _mark(self.path.with_suffix(_ENDED), self.size_bytes)
        except OSError as error:  # after a restart nobody comes back to go on with it: it ends there then
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
            if self.is_closed:  # its task was over in the meantime
                return
            raise _full(error) from None
        finally:
            if self._is_ending:  # also of a client that is gone by now: it has said so
                self._ended()

    async def leave(self) -> None:
        """Leave the input open while its client goes: another may continue it. It is on the disk afterwards. Raises
        StdinFull."""
        self.feeder = None
        self.was_left = True
        try:
            await asyncio.to_thread(self._seal, _LEFT)
        except OSError as error:
            if not self.is_closed:
                raise _full(error) from None

    def _seal(self, suffix: str) -> None:
        """Sync the file, then write a mark that says so; for a thread. Raises OSError."""
        size_bytes = self.size_bytes
        with self._opened() as file:
            os.fsync(file)
        mark = self.path.with_suffix(suffix)
        _mark(mark, size_bytes, is_durable=True)
        if self.is_dropped:  # its task was over in the meantime
            remove(mark)

    @property
    def has_room(self) -> bool:
        """True if more may be sent now."""
        return self.size_bytes - self.taken_bytes < INPUT_AHEAD_BYTES_MAX

    async def room(self) -> dict[str, Any]:
        """Wait until more may be sent, or no more is wanted → what its client is told then: offset wanted ended."""
        with self.watched() as changed:
            while not (self.has_room or self.is_closed or self.has_ended):
                changed.clear()
                await changed.wait()
        return {"offset": self.size_bytes, "wanted": not self.is_closed, "ended": self.has_ended}

    @property
    def is_too_large(self) -> bool:
        """True if the beginning of the file is to be dropped."""
        return self.size_bytes > INPUT_KEPT_BYTES_MAX and not self.is_cut

    def began(self, key: str) -> None:
        """This attempt begins to take the input, or goes on with it."""
        if key != self._key:
            self._key = key
            self.taken_bytes = 0
            self.is_closed = False

    def take(self, bytes_: int, *, is_closed: bool) -> None:
        """The attempt that runs has so many bytes of it; ``is_closed``: it takes no more."""
        taken_bytes = max(self.taken_bytes, min(bytes_, self.size_bytes))
        if (taken_bytes, is_closed) == (self.taken_bytes, self.is_closed):
            return
        self.taken_bytes = taken_bytes
        self.is_closed = self.is_closed or is_closed
        if self.is_cut and self.taken_bytes - self._punched_bytes >= PUNCH_BYTES:
            self._punch()
        self.notify()

    def _punch(self) -> None:
        """Drop what was taken."""
        if self._holes.punch_file(self.path, self._punched_bytes, self.taken_bytes - self._punched_bytes):
            self._punched_bytes = self.taken_bytes

    def resize(self, rows: int, columns: int) -> None:
        """The window of its client is another."""
        self.window = (rows, columns)
        self.notify()

    @contextlib.contextmanager
    def watched(self) -> Iterator[asyncio.Event]:
        """An event that is set at each change."""
        event = asyncio.Event()
        self._watchers.add(event)
        try:
            yield event
        finally:
            self._watchers.discard(event)

    def notify(self) -> None:
        """Wake whoever watches the input."""
        for event in self._watchers:
            event.set()


class StdinStore:
    """The inputs of one home, by name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, StoredStdin] = {}

    def get(self, name: str) -> StoredStdin:
        """The input of this name; made if there is none. Raises OSError."""
        known = self._open.get(name)
        if known is None:
            known = self._open[name] = StoredStdin(self._directory / f"{name}{_SUFFIX}")
        return known

    def is_known(self, name: str) -> bool:
        """True if there is an input of this name."""
        return name in self._open or (self._directory / f"{name}{_SUFFIX}").exists()

    def drop(self, name: str) -> None:
        """Remove an input that nobody reads any more."""
        known = self._open.pop(name, None)
        if known is not None:
            known.is_closed = known.is_dropped = True
            known.notify()
        for suffix in (_SUFFIX, _ENDED, _LEFT):
            remove(self._directory / f"{name}{suffix}")

    def drop_others(self, names: set[str]) -> None:
        """Forget what an earlier start of this agent has left, but for these."""
        for path in self._directory.glob(f"*{_SUFFIX}*"):
            name = path.name.partition(".")[0]
            if "-" not in name and name not in names and name not in self._open:
                remove(path)

    def left_by(self, feeder: object) -> list[StoredStdin]:
        """The inputs that this client was sending."""
        return [known for known in self._open.values() if known.feeder is feeder]


def _full(error: OSError) -> StdinFull:
    return StdinFull("the input cannot be kept", why=str(error.strerror), hint="df -h")


def opened(path: Path) -> int:
    """The file of an input, to add to it; what a task has put in its place goes. Raises OSError."""
    flags = _ADDING | os.O_CREAT
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno not in {errno.EISDIR, errno.ELOOP, errno.ENXIO}:
            raise
    remove(path)
    return os.open(path, flags, 0o600)


def _mark(path: Path, size_bytes: int, *, is_durable: bool = False) -> None:
    """Put a mark there, whole; ``is_durable``: on the disk. Raises OSError."""
    fresh = path.with_name(f"{path.name}.new")
    file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.write(file, str(size_bytes).encode())
            if is_durable:
                os.fsync(file)
        finally:
            os.close(file)
        fresh.replace(path)
    except OSError:
        remove(fresh)
        raise
    if is_durable:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _marked(path: Path) -> int:
    """The number in a mark, -1 if there is none."""
    try:
        text = path.read_bytes()[:NUMBER_CHARS_MAX]
    except OSError:
        return -1
    return int(text) if text.isdigit() else -1
