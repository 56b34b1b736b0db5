"""The exit records of the launcher: written, and where asked for on the disk, before anybody is told.

Used by the launcher alone; the imports are few for its sake.
"""

from __future__ import annotations

import _thread
import os
from typing import Any

from peerload.launcher.protocol import EndedEvent, ExitRecord, LauncherProtocolError, decode_exit, exit_fields
from peerload.launcher.record_log import LOG_BYTES_MAX, RecordLog, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

RECORD_BYTES_WORTH = 500
"""A record has some 250 bytes: a log that holds more than twice what is of use is written again."""


class Exits:
    """``ended``: key → record of every exit that the agent has not forgotten. ``wake`` is written to when a sync is done:
    that runs in a thread, since a disk may take its time and leases go on."""

    def __init__(self, directory: str) -> None:
        self._log = RecordLog(f"{directory}/exits.log")
        self.ended = dict(_decoded(self._log.read()))
        if not self.ended:
            self._log.rewrite([])
        self._wake = -1
        self._new: list[list[Any]] = []
        self._told: list[EndedEvent] = []
        self._to_sync: list[EndedEvent] = []
        self._in_sync: list[EndedEvent] = []
        self._sync_is_done = False

    def wake_by(self, fd: int) -> None:
        """Where a byte wakes the launcher up."""
        self._wake = fd

    def add(self, key: str, record: ExitRecord, *, is_synced: bool) -> None:
        """It has ended. ``is_synced``: nobody hears of it before it is on the disk."""
        self.ended[key] = record
        self._new.append([key, exit_fields(record)])
        event = EndedEvent(key, record)
        (self._to_sync if is_synced else self._told).append(event)

    def forget(self, key: str) -> None:
        """Nobody needs the record any more."""
        if self.ended.pop(key, None) is not None:
            self._tidy()

    def held(self) -> set[str]:
        """The keys of the ends that cannot be told yet."""
        return {event.key for event in self._to_sync + self._in_sync}

    @property
    def is_syncing(self) -> bool:
        """Whether the thread runs."""
        return bool(self._in_sync)

    def flush(self) -> list[EndedEvent]:
        """Write all that is new, with one write. → the events that may be told now."""
        if self._new:
            self._log.append(self._new)
            self._new.clear()
            self._tidy()
        if self._sync_is_done:
            self._sync_is_done = False
            self._told += self._in_sync
            self._in_sync = []
        if self._to_sync and not self._in_sync:
            self._in_sync, self._to_sync = self._to_sync, []
            try:
                _thread.start_new_thread(self._sync, ())
            except RuntimeError:  # the limit of processes is reached: leases wait for the disk this time
                self._sync()
        told, self._told = self._told, []
        return told

    def _sync(self) -> None:
        """In a thread: all that was written so far."""
        try:
            self._log.sync()
        except OSError as error:
            say(f"exit records are not on the disk: {error.strerror}")
        self._sync_is_done = True
        os.write(self._wake, b"\0")

    def _tidy(self) -> None:
        if self._log.size_bytes > LOG_BYTES_MAX and not self._new and not self._in_sync:
            rows = [[key, exit_fields(record)] for key, record in self.ended.items()]
            worth = len(rows) * RECORD_BYTES_WORTH < self._log.size_bytes
            self._log.tidy(rows if worth else None, len(rows))


def _decoded(rows: list[Any]) -> Iterator[tuple[str, ExitRecord]]:
    """The records of a log, without those that cannot be read."""
    for row in rows:
        try:
            key, raw = row
            yield str(key), decode_exit(raw)
        except (LauncherProtocolError, ValueError, TypeError) as error:
            say(f"an exit record cannot be read: {error}")
