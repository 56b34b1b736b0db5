"""Disk space of the state directory, in bytes and inodes: how much is free, and a reserve for a full disk.

A full disk must not lose a task. New work is refused while little space is left (`DiskSpace.admit`). For running tasks,
a reserve file is released in slices, each just before the write that needs it, so that the program that fills the disk does
not get all of it. The reserve is filled again when there is space.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import sqlite3
import sys
import threading
from typing import TYPE_CHECKING

from peerload.agent.runtime import SHORT_OF, next_tick
from peerload.agent.store.schema import state_gone
from peerload.model.errors import DiskFull
from peerload.model.events import DiskRoomChanged

if TYPE_CHECKING:
    from pathlib import Path

    from peerload.agent.runtime import EventSink, RunState
    from peerload.agent.store.write_ahead import EventLog

log = logging.getLogger("peerload.agent")

RESERVE_BYTES = 64 << 20
RESERVE_SHARE_MAX = 1 / 16
"""Maximum share of a small disk that the reserve takes."""
SLICE_BYTES = 1 << 20
LOW_SHARE = 0.05
LOW_BYTES_MAX = 10 << 30
"""Free space below which a very large disk is low; a smaller one is low with less than LOW_SHARE of it free."""
LOW_FILES_MAX = 100_000
"""Free inodes below which a file system with very many of them is low."""
ROOM_SHARE = 1.2
"""Free space, as a multiple of the low mark, at which a low disk is ok again; prevents flapping at the mark."""
ADMIT_BYTES = 2 << 20
"""Bytes that must stay free after the rows of a submission, for the ends of running tasks."""
ADMIT_FILES = 64
"""Inodes that must stay free."""
TASK_ROW_BYTES = 1024
"""Maximum size of a queued task on disk: its row in the log, then in the database."""
START_BYTES = 2 << 20
"""Space that an agent needs for its own files when it starts."""
LOOK_EVERY_S = 4.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
SYNC_FAILED = frozenset((sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC))


class DiskReserve:
    """File that reserves disk space for emergencies. Thread-safe."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.wanted_bytes = size_bytes
        self.size_bytes = 0
        with contextlib.suppress(OSError):
            self.size_bytes = path.stat().st_size

    def take(self) -> bool:
        """Fill the reserve. → False if the disk has no space for it."""
        with self._lock:
            if self.size_bytes >= self.wanted_bytes:
                return True
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError:
                return False
            try:
                os.posix_fallocate(fd, 0, self.wanted_bytes)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, self.size_bytes)
                return False
            finally:
                os.close(fd)
            self.size_bytes = self.wanted_bytes
            return True

    def give(self) -> bool:
        """Release one slice. → False if the reserve is empty."""
        with self._lock:
            if not self.size_bytes:
                return False
            left = max(self.size_bytes - SLICE_BYTES, 0)
            try:
                os.truncate(self._path, left)
            except OSError:
                return False
            self.size_bytes = left
            return True


class DiskSpace:
    """The disk below ``directory``. Its state is ``ok``, ``low`` or ``full`` (the reserve has been touched)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        status = os.statvfs(directory)
        self.total_bytes = status.f_blocks * status.f_frsize
        self.total_files = status.f_files
        """Inodes; 0 where the file system has no fixed number of them."""
        size = min(RESERVE_BYTES, int(self.total_bytes * RESERVE_SHARE_MAX))
        self.reserve = DiskReserve(directory / "reserve", size)
        self.state = "ok"

    @property
    def low_bytes(self) -> int:
        return min(int(self.total_bytes * LOW_SHARE), LOW_BYTES_MAX)

    def free_bytes(self) -> int:
        """Number of bytes that an ordinary user may still write."""
        status = os.statvfs(self._directory)
        return status.f_bavail * status.f_frsize

    @property
    def low_files(self) -> int:
        return min(int(self.total_files * LOW_SHARE), LOW_FILES_MAX)

    def free_files(self) -> int:
        """Number of inodes that an ordinary user may still use."""
        return os.statvfs(self._directory).f_favail if self.total_files else sys.maxsize

    @property
    def is_full(self) -> bool:
        """True if almost nothing can be written now."""
        return self.free_bytes() < ADMIT_BYTES

    def prepare(self) -> None:
        """Prepare the start of an agent: get space for its own files, if necessary from the reserve; otherwise fill the
        reserve."""
        while self.free_bytes() < START_BYTES and self.reserve.give():
            log.warning("disk is full: part of the reserve is released")
        self.refill()
        self.state = self._judged()

    def admit(self, tasks: int, spec_bytes: int) -> None:
        """Check that there is space for ``tasks`` more tasks. Raises DiskFull; StoreError if the directory was removed."""
        self._admit(tasks * TASK_ROW_BYTES + 2 * spec_bytes, "nothing was submitted", "submit again")

    def admit_input(self, bytes_: int) -> None:
        """Check that there is space for this many bytes of a task's standard input. Raises the same as `admit`."""
        if bytes_:
            self._admit(bytes_, "no more of this input is taken", "run it again")

    def _admit(self, bytes_: int, outcome: str, then: str) -> None:
        if not self._directory.exists():  # `watch` will soon stop the agent for this
            raise state_gone(self._directory)
        if self.free_files() < min(ADMIT_FILES, self.low_files):
            raise DiskFull(
                f"the disk of this node has no inodes left; {outcome}",
                why=f"{self.free_files()} of {self.total_files} are free at {self._directory}",
                hint=f"remove files there, then {then}:  peerload clean --outputs --older 1d        running tasks go on, and their results are kept",
            )
        needed = ADMIT_BYTES + bytes_
        missing = self.reserve.wanted_bytes - self.reserve.size_bytes  # released space is for existing tasks
        free = max(self.free_bytes() - max(missing, 0), 0)
        if free < needed:
            raise DiskFull(
                f"the disk of this node is full; {outcome}",
                why=f"{_mib(free)} are available at {self._directory}, this needs {_mib(needed)}",
                hint=f"make room, then {then}:  peerload clean --outputs --older 1d        running tasks go on, and their results are kept",
            )

    async def watch(self, inbox: EventSink, event_log: EventLog, run: RunState) -> None:
        """Check every LOOK_EVERY_S, until cancelled, and report changes. A thread fills the reserve, since some disks take long to
        allocate that much space."""
        while True:
            try:
                if self.reserve.size_bytes < self.reserve.wanted_bytes:
                    await asyncio.to_thread(self.refill)
                self.look(inbox, event_log)
            except OSError as error:
                if error.errno not in SHORT_OF:
                    run.fail(f"cannot check the disk of {self._directory}: {error.strerror}")
                    return
            await next_tick(LOOK_EVERY_S)

    def look(self, inbox: EventSink, event_log: EventLog) -> None:
        """Check the disk now, and report a change of its state."""
        now = self._judged()
        if now != self.state:
            self.state = now
            free = f"{_mib(self.free_bytes())} of {_mib(self.total_bytes)}"
            files = f", {self.free_files()} of {self.total_files} inodes" if self.total_files else ""
            self.report(f"{free}{files} are free", inbox, event_log)

    def report(self, reason: str, inbox: EventSink, event_log: EventLog) -> None:
        """Report the state of the disk to the core and to users."""
        state = self.state
        log.warning("disk state changed: directory=%s state=%s reason=%s", self._directory, state, reason)
        event_log.record("disk", state, reason=reason)
        inbox.put(DiskRoomChanged(state == "ok", "" if state == "ok" else f"disk {state}"))

    def refill(self) -> None:
        """Refill the reserve, if the disk has space for more than that. For any thread; may take long."""
        missing = self.reserve.wanted_bytes - self.reserve.size_bytes
        if missing > 0 and self.free_bytes() >= 2 * missing + ADMIT_BYTES:
            self.reserve.take()

    def _judged(self) -> str:
        free, files = self.free_bytes(), self.free_files()
        if free < ADMIT_BYTES or files < min(ADMIT_FILES, self.low_files):
            return "full"
        share = 1 if self.state == "ok" else ROOM_SHARE
        is_low = free < self.low_bytes * share or files < self.low_files * share
        return "low" if is_low else "ok"


def cannot_write(error: OSError) -> str:
    """Description of why a write failed on this node."""
    if error.errno in NO_ROOM:
        return "the disk of its home is full"
    return error.strerror or type(error).__name__


def is_full(error: sqlite3.Error, directory: Path) -> bool:
    """True if an error of the database below this directory only means that the disk is full."""
    code = getattr(error, "sqlite_errorcode", 0)
    if code in SYNC_FAILED:
        return False
    return code & 0xFF == sqlite3.SQLITE_FULL or (code & 0xFF == sqlite3.SQLITE_IOERR and has_no_room(directory))


def has_no_room(directory: Path) -> bool:
    """True if no small file can be written there, for lack of space or quota."""
    path = directory / "room"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, SLICE_BYTES // 16)
        finally:
            os.close(fd)
    except OSError as error:
        return error.errno in NO_ROOM
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return False


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"
