"""Exit records of the launcher: they are written (and synced, where requested) before they are reported.

Used by the launcher alone; the imports are few for its sake.
"""

from __future__ import annotations

import _thread
import os
from typing import Any

from peerload.launcher.protocol import EndedEvent, ExitRecord, LauncherProtocolError, decode_exit, exit_fields
from peerload.launcher.record_log import LOG_BYTES_MAX, RecordLog, log_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

RECORD_BYTES_WORTH = 500
"""Usual size of a record, generously. A log of more than this for each useful record is rewritten."""


class Exits:
    """The exits that the agent has not forgotten (``ended``: key → record). Syncs run in a thread, since a disk may be
    slow and leases have to be enforced meanwhile."""

    def __init__(self, directory: str) -> None:
        self._log = RecordLog(f"{directory}/exits.log")
        self.ended = dict(_decoded(self._log.read()))
        if not self.ended:
            self._log.rewrite([])
        self._wake = -1
        self.may_wait = True
        """False if there is an exit that has to be reported now."""
        self._new: list[list[Any]] = []
        self._reportable: list[EndedEvent] = []
        self._to_sync: list[EndedEvent] = []
        self._in_sync: list[EndedEvent] = []
        self._sync_is_done = False

    def set_wake_fd(self, fd: int) -> None:
        """Set the descriptor that a finished sync writes a byte to."""
        self._wake = fd

    def add(self, key: str, record: ExitRecord, *, is_synced: bool) -> None:
        """Add the exit of a task. is_synced: it is reported only when it is on the disk."""
        self.ended[key] = record
        self._new.append([key, exit_fields(record)])
        event = EndedEvent(key, record)
        (self._to_sync if is_synced else self._reportable).append(event)

    def forget(self, key: str) -> None:
        """Drop a record."""
        if self.ended.pop(key, None) is not None:
            self._compact()

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
            except RuntimeError:  # the limit of processes is reached: leases wait for the disk this time
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
            rows = [[key, exit_fields(record)] for key, record in self.ended.items()]
            worth = len(rows) * RECORD_BYTES_WORTH < self._log.size_bytes
            self._log.compact(rows if worth else None, len(rows))


def _decoded(rows: list[Any]) -> Iterator[tuple[str, ExitRecord]]:
    """The readable records of a log."""
    for row in rows:
        try:
            key, raw = row
            yield str(key), decode_exit(raw)
        except (LauncherProtocolError, ValueError, TypeError) as error:
            log_line(f"cannot read an exit record: error={error}")
