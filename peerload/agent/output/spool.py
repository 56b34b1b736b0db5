"""Captured output on disk: two files for each attempt, at the node that runs it, and at its home when fetched.

    STATE/spool/<uid>-<attempt>.out, .err      scratch directories: STATE/scratch/<uid>-<attempt>

Files may have holes, where the capture limit has cut out the middle. Readers skip them (SEEK_DATA). `Follower` reads
growing files; the kernel (inotify) wakes it up, not a timer.

The files belong to tasks, which may change them as they like: remove read permission, or put a directory or a
pipe in their place. A file that cannot be read counts as absent; it blocks neither the agent nor a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import secrets
import shutil
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from peerload.agent.runtime import SHORT_OF
from peerload.launcher.process import Capture, HolePuncher, OwnCredentials
from peerload.launcher.system import write_as_user
from peerload.model.task import without_missing
from peerload.security.private_files import sync

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    from peerload.model.task import Exit


log = logging.getLogger("peerload.agent")

PIECE_BYTES_MAX = 256 << 10
OUTPUT_BYTES_MAX = 16 << 20
"""Default limit of the bytes that are kept of one stream of a task."""
FOLLOWED_BYTES_MAX = 256 << 20
"""Limit of one stream of a task whose whole output is wanted (`TaskSpec.followed`), half of it from each end: a
reader less than half of this behind misses nothing."""
FOLLOWED_S_MAX = 3600.0
"""Maximum time that an output is kept in full after its last write."""
STREAMS = (1, 2)
HELD_BEYOND_BYTES = 64 << 10
_SUFFIX = {1: ".out", 2: ".err"}
_NAMES = {1: "stdout", 2: "stderr"}
_INPUT, _SAVED = ".in", ".saved"
_ENDINGS = (*_SUFFIX.values(), _INPUT, _SAVED)


class Ranges(msgspec.Struct, frozen=True):
    """Data ranges (first, end) of a stream, up to ``end``; missing_bytes: the bytes before ``end`` that were cut
    out."""

    ranges: tuple[tuple[int, int], ...]
    end: int
    missing_bytes: int


class Spool:
    """The output files of one agent. Call the methods that sync or write in a thread."""

    def __init__(self, state: Path, output_bytes_max: int = OUTPUT_BYTES_MAX) -> None:
        """output_bytes_max: bound on one stream of an ended task."""
        self._output_bytes_max = output_bytes_max
        self._holes = HolePuncher()
        self.directory = state / "spool"
        self._scratch = state / "scratch"
        self._directory_name, self._scratch_name = str(self.directory), str(self._scratch)
        self._dropped = self._scratch / ".dropped"
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self._scratch.mkdir(mode=0o700, exist_ok=True)
        self.inotify: Inotify | None = None

    def path(self, key: str, stream: int) -> Path:
        return self.directory / f"{key}{_SUFFIX[stream]}"

    def paths(self, key: str) -> tuple[Path, Path]:
        return self.path(key, 1), self.path(key, 2)

    def names(self, key: str) -> tuple[str, str]:
        """`paths` as strings: the creation of `Path` objects would take too long at the start of a task."""
        return f"{self._directory_name}/{key}{_SUFFIX[1]}", f"{self._directory_name}/{key}{_SUFFIX[2]}"

    def input_path(self, key: str) -> Path:
        """The file that feeds the stdin of an attempt of another home."""
        return self.directory / f"{key}{_INPUT}"

    def sizes(self, key: str) -> tuple[int, int]:
        """The size of each stream, holes included; 0 for a file that does not exist."""
        first, second = (_size(path) for path in self.paths(key))
        return first, second

    def read_small(self, key: str, stdout_bytes: int, stderr_bytes: int) -> tuple[bytes, bytes]:
        """Read both streams whole, for a result that carries them; empty if a file is missing or cannot be read."""
        found = []
        for stream, size in ((1, stdout_bytes), (2, stderr_bytes)):
            if not size:
                found.append(b"")
                continue
            path = self.path(key, stream)
            try:
                with os.fdopen(open_output(path), "rb") as file:  # processes that it left behind may still write
                    found.append(file.read(size))
            except OSError:
                found.append(b"")
        return found[0], found[1]

    def read_tail(self, key: str, stream: int, bytes_max: int) -> bytes:
        """Read the end of a stream; empty if it is missing or cannot be read."""
        try:
            with os.fdopen(open_output(self.path(key, stream)), "rb") as file:
                file.seek(max(os.fstat(file.fileno()).st_size - bytes_max, 0))
                return file.read(bytes_max)
        except OSError:
            return b""

    def keep(self, key: str, stdout: bytes, stderr: bytes) -> None:
        """Write both streams whole and sync them: under another name first, then renamed. Raises OSError."""
        for stream, data in ((1, stdout), (2, stderr)):
            if not data:
                continue
            path = self.path(key, stream)
            part = path.with_suffix(path.suffix + ".part")
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                _write_all(fd, data, 0)
                os.fsync(fd)
            finally:
                os.close(fd)
            part.rename(path)
        sync(self.directory)

    def write_at(self, key: str, stream: int, offset: int, data: bytes) -> None:
        """Write a piece at its offset; gaps between pieces stay holes. Raises OSError."""
        fd = os.open(self.path(key, stream), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, data, offset)
        finally:
            os.close(fd)

    def sync(self, key: str) -> None:
        """Sync both files and their names. Raises OSError."""
        for path in self.paths(key):
            try:
                _sync(path)
            except FileNotFoundError:
                continue
        sync(self.directory)

    def bytes_max(self, *, followed: bool) -> int:
        """Bound on the bytes kept of one stream of a running task. followed: its output is wanted in full."""
        return max(self._output_bytes_max, FOLLOWED_BYTES_MAX) if followed else self._output_bytes_max

    def saved_path(self, key: str) -> Path:
        """The file with the progress of copying the output of an attempt into the user's files."""
        return self.directory / f"{key}{_SAVED}"

    def data_ranges(self, key: str, stream: int, first: int, size: int | None, bytes_max: int) -> Ranges:
        """Data ranges of a stream from this offset on, up to ``size`` and with at most ``bytes_max`` bytes; none if the
        file does not exist. Raises OSError if descriptors or memory are short, or if the disk cannot be
        read."""
        ranges: list[tuple[int, int]] = []
        at = first
        try:
            fd = open_output(self.path(key, stream))
        except OSError as error:
            if error.errno in SHORT_OF:
                raise
            return Ranges((), first, 0)
        try:
            there = os.fstat(fd).st_size
            last = min(there if size is None else min(size, there), first + bytes_max)
            while at < last:
                try:
                    start = min(os.lseek(fd, at, os.SEEK_DATA), last)
                except OSError as error:
                    if error.errno != errno.ENXIO:
                        raise
                    start = last  # only a hole follows
                end = min(os.lseek(fd, start, os.SEEK_HOLE), last) if start < last else last
                if start < end:
                    ranges.append((start, end))
                at = end
        finally:
            os.close(fd)
        return Ranges(tuple(ranges), at, at - first - sum(end - start for start, end in ranges))

    @contextlib.contextmanager
    def watched(self, key: str, call: Callable[[], None]) -> Iterator[None]:
        """Within this context, call ``call`` whenever the output of an attempt grows."""
        stop = self.watch(key, call)
        try:
            yield
        finally:
            stop()

    def watch(self, key: str, call: Callable[[], None]) -> Callable[[], None]:
        """Call ``call`` whenever the output of an attempt grows → a function that ends this."""
        inotify = self.inotify = self.inotify or Inotify(asyncio.get_running_loop(), self.directory)
        names = {path.name for path in self.paths(key)}
        inotify.add(names, call)
        return lambda: inotify.remove(names, call)

    def cut(self, key: str, bytes_max: int | None = None) -> None:
        """Punch a hole into the middle of each stream of an attempt that exceeds ``bytes_max``; default: the limit of an
        ended attempt."""
        for path in self.paths(key):
            Capture(os.fspath(path), bytes_max or self._output_bytes_max, OwnCredentials()).limit(self._holes)

    def large(self, before: float) -> list[str]:
        """The attempts whose output exceeds the limit of an ended one, without a write since ``before`` (Unix
        s)."""
        keys: dict[str, None] = {}
        with os.scandir(self.directory) as entries:
            for entry in entries:
                key, dot, ending = entry.name.rpartition(".")
                if f"{dot}{ending}" not in _SUFFIX.values():
                    continue
                with contextlib.suppress(OSError):  # it was removed meanwhile
                    status = entry.stat(follow_symlinks=False)
                    held = min(status.st_size, status.st_blocks * 512)
                    if stat.S_ISREG(status.st_mode) and status.st_mtime < before and held > self._held_max:
                        keys[key] = None
        return list(keys)

    @property
    def _held_max(self) -> int:
        """Maximum disk use of a stream that was cut: its two ends, in whole blocks."""
        return self._output_bytes_max + HELD_BEYOND_BYTES

    def settle(self, ended: Sequence[tuple[str, Exit]]) -> tuple[tuple[str, Exit], ...]:
        """Sync the outputs of these ended attempts and their names → the same attempts; if a stream is missing or
        short, with its real size and a reason. Raises OSError if descriptors or memory are short."""
        settled = tuple((key, self._settled(key, exit_)) for key, exit_ in ended)
        if any(exit_.stdout_bytes or exit_.stderr_bytes for _, exit_ in settled):
            sync(self.directory)
        return settled

    def _settled(self, key: str, exit_: Exit) -> Exit:
        settled = exit_
        for stream, size in zip(STREAMS, (exit_.stdout_bytes, exit_.stderr_bytes), strict=True):
            if not size:
                continue
            why = ""
            try:
                missing = size - min(_sync(self.path(key, stream)), size)
            except OSError as error:
                if error.errno in SHORT_OF:
                    raise
                missing, why = size, f": {error.strerror}"
            of_both = (missing, 0) if stream == 1 else (0, missing)
            settled = without_missing(settled, of_both, f"its {_NAMES[stream]} cannot be read{why}")
        return settled

    def drop(self, key: str) -> None:
        for ending in _ENDINGS:
            remove(f"{self._directory_name}/{key}{ending}")

    def make_scratch(self, key: str) -> Path:
        """Make a fresh directory for an attempt to work in. Raises OSError."""
        path = self._scratch / key
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def drop_scratch(self, key: str) -> bool:
        """Move the scratch directory of an attempt aside for `remove_dropped` → True if there is one."""
        path = f"{self._scratch_name}/{key}"
        try:
            os.lstat(path)
        except OSError:  # most tasks have none
            return False
        try:
            self._dropped.mkdir(mode=0o700, exist_ok=True)
            os.rename(path, self._dropped / f"{key}.{secrets.token_hex(4)}")  # noqa: PTH104 -- quick
        except OSError:  # the disk is full, or its task has made the directory read-only
            remove(self._scratch / key)
            return False
        return True

    def remove_dropped(self) -> None:
        """Remove the files that were moved aside. There may be many: for a thread."""
        with contextlib.suppress(OSError):
            for path in list(self._dropped.iterdir()):
                if path.is_symlink():  # its task has put a link in its place: do not follow it
                    path.unlink()
                else:
                    remove(path)
            self._dropped.rmdir()  # fails if there are new entries


def remove(path: str | Path) -> None:
    """Remove a file of a task, or anything that the task has put in its place. Errors are ignored."""
    try:
        os.unlink(path)  # noqa: PTH108 -- to make a `Path` takes longer
    except FileNotFoundError:
        return
    except OSError:  # its task has replaced it by a directory
        _remove_tree(Path(path))


def _remove_tree(path: Path) -> None:
    with contextlib.suppress(RecursionError):  # a thousand nested directories
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):  # also directories without write permission, such as Go modules
        try:
            write_as_user.empty(os.fspath(path))
            path.rmdir()
        except OSError as error:
            log.warning("cannot remove a directory: path=%s error=%s", path, error)


class Follower:
    """Yields (stream, offset, data) of an attempt's files from two offsets on, as they grow; holes are skipped.

    Ends when `end` has set the final sizes and everything up to them was read, as far as possible. Only one reader at a
    time. Iterating raises OSError only if descriptors or memory are short.
    """

    def __init__(self, spool: Spool, key: str, stdout_from: int = 0, stderr_from: int = 0) -> None:
        self._spool = spool
        self._paths = {stream: spool.path(key, stream) for stream in STREAMS}
        self._files: dict[int, int] = {}
        self._offsets = {1: stdout_from, 2: stderr_from}
        self._end: dict[int, int] | None = None
        self._changed = asyncio.Event()
        self._unwatch = spool.watch(key, self._changed.set)

    def end(self, stdout_bytes: int, stderr_bytes: int) -> None:
        self._end = {1: stdout_bytes, 2: stderr_bytes}
        self._changed.set()

    def close(self) -> None:
        self._unwatch()
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    async def __aiter__(self) -> AsyncIterator[tuple[int, int, bytes]]:
        while True:
            self._changed.clear()
            end = self._end
            read_any = False
            for stream in STREAMS:
                while (piece := self._next(stream, end)) is not None:
                    read_any = True
                    yield stream, *piece
                    await asyncio.sleep(0)  # a task that writes faster than this reads would starve the loop
            if end is not None and not read_any:
                return
            if not read_any:
                await self._changed.wait()

    def _next(self, stream: int, end: dict[int, int] | None) -> tuple[int, bytes] | None:
        """The next piece of a stream; None if there is none now."""
        try:
            return self._read(stream, end)
        except OSError as error:
            if error.errno in SHORT_OF:
                raise
            return None

    def _read(self, stream: int, end: dict[int, int] | None) -> tuple[int, bytes] | None:
        fd = self._files.get(stream)
        if fd is None:
            fd = self._files[stream] = open_output(self._paths[stream])
        try:
            offset = os.lseek(fd, self._offsets[stream], os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data from here on
                return self._reopened(stream, end)
            raise
        size = PIECE_BYTES_MAX if end is None else min(PIECE_BYTES_MAX, end[stream] - offset)
        if size <= 0:
            return None
        hole = os.lseek(fd, offset, os.SEEK_HOLE)
        data = os.pread(fd, min(size, hole - offset), offset)
        if not data:
            return None
        self._offsets[stream] = offset + len(data)
        return offset, data

    def _reopened(self, stream: int, end: dict[int, int] | None) -> tuple[int, bytes] | None:
        """Open the file that has replaced this one under its name (`Spool.keep` renames), and read from it; None if there is
        none."""
        fd = self._files[stream]
        if os.path.samestat(self._paths[stream].stat(), os.fstat(fd)):
            return None
        os.close(self._files.pop(stream))
        return self._read(stream, end)


def _size(path: Path) -> int:
    try:
        status = path.lstat()
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def open_output(path: Path) -> int:
    """Open a captured file for reading; restores a read permission that its task has removed. Never blocks,
    not even on a pipe. Raises OSError, also if it is not a regular file."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except PermissionError:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise
        path.chmod(0o600)
        fd = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "its task has put something else in its place")
    return fd


def _sync(path: Path) -> int:
    """Sync a file → its size. Raises OSError."""
    fd = open_output(path)
    try:
        os.fsync(fd)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view = view[count:]
        offset += count


BLOCK_BYTES = 64 << 10
"""Bytes read at a time."""


def tail_start(path: Path, lines: int, end: int) -> int:
    """The offset at which the last ``lines`` lines before ``end`` begin; a last line without a newline counts. A hole
    ends the line before it, and is not a line itself. 0 if the file is missing or
    cannot be read. Blocks: for a thread."""
    try:
        fd = open_output(path)
    except OSError:
        return 0
    try:
        return _start(fd, lines, min(end, os.fstat(fd).st_size))
    except OSError:
        return 0
    finally:
        os.close(fd)


def _start(fd: int, lines: int, end: int) -> int:
    if lines <= 0 or end <= 0:
        return max(end, 0)
    left = lines
    at = end
    is_last = True
    while at > 0:
        before = max(at - BLOCK_BYTES, 0)
        first, after = _last_run(fd, before, at)
        if first >= after:  # only a hole
            at = before
            continue
        block = os.pread(fd, after - first, first)
        stop = len(block)
        if is_last and block.endswith(b"\n"):
            stop -= 1
        is_last = False
        while (newline := block.rfind(b"\n", 0, stop)) >= 0:
            left -= 1
            if not left:
                return first + newline + 1
            stop = newline
        if first > before:  # a hole precedes it: a line begins here
            left -= 1
            if not left:
                return first
            is_last = True
        at = first
    return 0


def _last_run(fd: int, first: int, end: int) -> tuple[int, int]:
    """The start and the end of the last run of data in this range; twice ``end`` if there is none."""
    run = end, end
    at = first
    while at < end:
        try:
            data = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # a hole up to the end of the file
            break
        if data >= end:
            break
        at = os.lseek(fd, data, os.SEEK_HOLE)
        run = data, min(at, end)
    return run


IN_MODIFY = 0x002
IN_CLOSE_WRITE = 0x008
IN_MOVED_TO = 0x080
IN_CREATE = 0x100
IN_Q_OVERFLOW = 0x4000
_HEADER = struct.Struct("iIII")
READ_BYTES = 64 << 10


class Inotify:
    """Calls back when a file with a registered name in the directory is written to, created or moved in.

    The directory is watched only while there are listeners, so that an agent without followers sleeps.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, directory: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._loop = loop
        self.directory = os.fsencode(directory)
        self._listeners: dict[str, list[Callable[[], None]]] = {}
        self._watch = -1
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        loop.add_reader(self._fd, self._read)

    def add(self, names: Iterable[str], call: Callable[[], None]) -> None:
        """Call when one of these files changes."""
        if self._watch < 0:
            mask = IN_MODIFY | IN_CLOSE_WRITE | IN_MOVED_TO | IN_CREATE
            self._watch = self._libc.inotify_add_watch(self._fd, self.directory, mask)
            if self._watch < 0:
                raise OSError(ctypes.get_errno(), "inotify_add_watch")
        for name in names:
            self._listeners.setdefault(name, []).append(call)

    def remove(self, names: Iterable[str], call: Callable[[], None]) -> None:
        for name in names:
            calls = self._listeners.get(name, [])
            if call in calls:
                calls.remove(call)
            if not calls:
                self._listeners.pop(name, None)
        if not self._listeners and self._watch >= 0:
            self._libc.inotify_rm_watch(self._fd, self._watch)
            self._watch = -1

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _read(self) -> None:
        try:
            raw = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        changed: set[str] = set()
        at = 0
        while at < len(raw):
            _, mask, _, length = _HEADER.unpack_from(raw, at)
            at += _HEADER.size
            if mask & IN_Q_OVERFLOW:  # events were lost: check everything
                changed.update(self._listeners)
            else:
                changed.add(raw[at : at + length].rstrip(b"\0").decode("utf-8", "replace"))
            at += length
        for name in sorted(changed):
            for call in list(self._listeners.get(name, ())):
                call()
