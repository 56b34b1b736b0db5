"""Append-only logs of the launcher, so that exits survive the agent and the launcher.

`Exits` writes exit records (and syncs them, where requested) before they are reported. Records survive processes, but survive the
machine only after `RecordLog.sync`. The imports are few: the launcher must stay small.
"""

from __future__ import annotations

import _thread
import os
import time
import zlib
from typing import Any

import msgpack

from peerload.launcher.protocol import EndedEvent, ExitRecord, LauncherProtocolError, decode_exit, packed

LOG_BYTES_MAX = 1 << 20
"""A log of this size is rewritten if less than half of it is useful."""
RECORD_BYTES_MAX = 64 << 10
_HEADER_BYTES = 8


class RecordLog:
    """An append-only file of checksummed MessagePack records; a torn or corrupt tail is ignored.

    A record is length (4 bytes, big-endian), crc32 of the body (4 bytes), body.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.size_bytes = os.fstat(self._fd).st_size

    def read(self) -> list[Any]:
        """Read all complete records from the start of the file; truncate the file at the first bad one."""
        records, size = whole_records(self.path)
        if size < self.size_bytes:
            os.ftruncate(self._fd, size)
        self.size_bytes = size
        return records

    def append(self, records: list[Any]) -> bool:
        """Append records with one write → True if they are kept. If the disk is full, none is kept, and this is logged: exits
        are still reported to the agent, and tasks must not end because a disk is full."""
        raw = b"".join(map(_pack, records))
        try:
            written = os.write(self._fd, raw)
            if written < len(raw):  # a partial record would hide all later ones
                os.ftruncate(self._fd, self.size_bytes)
                written = 0
        except OSError as error:
            log_line(f"cannot write: path={self.path} error={error.strerror}")
            return False
        self.size_bytes += written
        return written == len(raw)

    def compact(self, kept: list[Any] | None, kept_count: int) -> None:
        """Shrink the file if it is large and mostly obsolete: to nothing, or to ``kept``."""
        if self.size_bytes <= LOG_BYTES_MAX:
            return
        if not kept_count:
            os.ftruncate(self._fd, 0)
            self.size_bytes = 0
        elif kept is not None:
            try:
                self.rewrite(kept)
            except OSError as error:
                log_line(f"cannot write: path={self.path} error={error.strerror}")

    def rewrite(self, records: list[Any]) -> None:
        """Replace the file by one with these records only. Truncation to zero needs no space, so that it works on a full
        disk."""
        if not records:
            os.ftruncate(self._fd, 0)
            self.size_bytes = 0
            return
        new = self.path + ".new"
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        raw = b"".join(map(_pack, records))
        try:
            left = memoryview(raw)
            while left:
                left = left[os.write(fd, left) :]
            os.fdatasync(fd)  # some may have been synced before; this is rare
            os.replace(new, self.path)
        except OSError:
            os.close(fd)
            os.unlink(new)  # it may occupy the last space of a full disk
            raise
        os.close(self._fd)
        self._fd, self.size_bytes = fd, len(raw)

    def sync(self) -> None:
        """Sync the added records. May block on the disk: not for the launcher's main thread."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def whole_records(path: str) -> tuple[list[Any], int]:
    """All complete records from the start of such a file, and their size in bytes."""
    with open(path, "rb") as file:
        raw = file.read()
    records = []
    at = 0
    while len(raw) - at >= _HEADER_BYTES:
        size = int.from_bytes(raw[at : at + 4], "big")
        body = raw[at + _HEADER_BYTES : at + _HEADER_BYTES + size]
        checksum = int.from_bytes(raw[at + 4 : at + 8], "big")
        if size > RECORD_BYTES_MAX or len(body) != size or zlib.crc32(body) != checksum:
            break
        try:
            records.append(msgpack.unpackb(body))
        except ValueError:
            break
        at += _HEADER_BYTES + size
    return records, at


def _pack(record: Any) -> bytes:  # noqa: ANN401 -- any MessagePack value
    body = packed(record)
    return len(body).to_bytes(4, "big") + zlib.crc32(body).to_bytes(4, "big") + body


def log_line(line: str) -> None:
    """Write a line to the log (stderr is DIR/launcher.log, truncated at each start); lost if the disk is full."""
    try:
        os.write(2, f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {line}\n".encode(errors="replace"))
    except OSError:
        return


def process_fields(pid: int) -> list[bytes]:
    """The fields in /proc/PID/stat from the state (field 3) on; empty if there is no such process."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        raw = os.read(fd, 4096)
    except OSError:
        return []
    finally:
        os.close(fd)
    # The name in parentheses may itself contain spaces and parentheses.
    return raw[raw.rindex(b")") + 2 :].split()


def process_start(pid: int) -> int:
    """Start of a process, in clock ticks since boot (field 22 of its stat); 0 if there is no such process."""
    fields = process_fields(pid)
    return int(fields[19]) if fields else 0


def machine_boot() -> str:
    """The random id of this boot of the machine."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


RECORD_BYTES_WORTH = 500
"""Generous estimate of a record's size. A log larger than this times its useful records is rewritten."""


class Exits:
    """The exits that the agent has not forgotten (``ended``: key → record). Syncs run in a thread, since a disk may be
    slow and leases have to be enforced meanwhile."""

    def __init__(self, directory: str) -> None:
        self._log = RecordLog(f"{directory}/exits.log")
        self.ended = _decoded(self._log.read())
        if not self.ended:
            self._log.rewrite([])
        self._wake = -1
        self.may_wait = True
        """False if there is an exit that has to be reported now."""
        self._new: list[tuple[str, ExitRecord | None]] = []
        """Records to write; None: the record of this key was forgotten, so that no later launcher lists it."""
        self._reportable: list[EndedEvent] = []
        self._to_sync: list[EndedEvent] = []
        self._in_sync: list[EndedEvent] = []
        self._sync_is_done = False

    def set_wake_fd(self, fd: int) -> None:
        """Set the descriptor that a finished sync writes a byte to."""
        self._wake = fd

    def add(self, key: str, record: ExitRecord, *, is_synced: bool, with_start: bool = False) -> None:
        """Add the exit of a task. is_synced: it is reported only when it is on disk; with_start: see `EndedEvent`."""
        self.ended[key] = record
        self._new.append((key, record))
        event = EndedEvent(key, record, with_start)
        (self._to_sync if is_synced else self._reportable).append(event)

    def forget(self, key: str) -> None:
        if self.ended.pop(key, None) is not None:
            self._new.append((key, None))

    def unsynced(self) -> set[str]:
        """Keys of the exits that cannot be reported yet."""
        return {event.key for event in self._to_sync + self._in_sync}

    @property
    def has_unreported(self) -> bool:
        """True if there are exits that can be reported."""
        return bool(self._reportable)

    def write(self) -> None:
        """Write all new records with one write; sync those that need it."""
        if self._new:
            self._log.append(self._new)
            self._new.clear()
            self._compact()
        if self._sync_is_done:
            self._sync_is_done = self.may_wait = False
            self._reportable += self._in_sync
            self._in_sync = []
        if self._to_sync and not self._in_sync:
            self._in_sync, self._to_sync = self._to_sync, []
            try:
                _thread.start_new_thread(self._sync, ())
            except RuntimeError:  # the limit of processes is reached, so this sync blocks the enforcement of leases
                self._sync()

    def reportable(self) -> list[EndedEvent]:
        """The events that can be reported now, each once."""
        self.may_wait = True
        events, self._reportable = self._reportable, []
        return events

    def _sync(self) -> None:
        """Sync the log; runs in a thread."""
        try:
            self._log.sync()
        except OSError as error:
            log_line(f"cannot sync exit records: error={error.strerror}")
        self._sync_is_done = True
        os.write(self._wake, b"\0")

    def _compact(self) -> None:
        if self._log.size_bytes > LOG_BYTES_MAX and not self._new and not self._in_sync:
            rows = list(self.ended.items())
            worth = len(rows) * RECORD_BYTES_WORTH < self._log.size_bytes
            self._log.compact(rows if worth else None, len(rows))


def _decoded(rows: list[Any]) -> dict[str, ExitRecord]:
    ended: dict[str, ExitRecord] = {}
    for row in rows:
        try:
            key, raw = row
            if raw is None:
                ended.pop(str(key), None)
            else:
                ended[str(key)] = decode_exit(raw)
        except (LauncherProtocolError, ValueError, TypeError) as error:
            log_line(f"cannot read an exit record: error={error}")
    return ended
