"""Recorder of the events and decisions of the node in a file for `peerload replay`, which repeats the decisions.

It never blocks or ends the agent: there is no sync, and a file that can no longer be written only ends the recording.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from typing import TYPE_CHECKING

from peerload.model.errors import BadMessage, ConfigError
from peerload.wire import recording

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peerload.model.actions import Action
    from peerload.model.events import Event, Instant

log = logging.getLogger("peerload.agent")

PRIVATE = 0o600
BUFFERED_BYTES_MAX = 1 << 20
"""Size at which the buffer is written; it is also written at the end of every turn of the inbox."""


class Recorder:
    """Recording of events and actions in a file. An existing file is appended to: each start of the agent is a
    separate part."""

    def __init__(self, path: str, started: recording.Started, bytes_max: int = recording.RECORDING_BYTES_MAX) -> None:
        """Raises ConfigError if the file cannot be used, or is not a recording."""
        self._path = path
        self._bytes_max = bytes_max
        self._descriptor: int | None = None
        self._buffer = bytearray()
        try:
            self._descriptor, self._size = _open(path)
        except BlockingIOError:
            raise ConfigError("record", f"{path} cannot be used", why="another agent records there") from None
        except OSError as error:
            raise ConfigError("record", f"{path} cannot be used", why=str(error.strerror or error)) from None
        except BadMessage as error:
            raise ConfigError("record", f"{path} is there", why=str(error), hint="choose another file") from None
        first = recording.encode(started)
        if self._size + len(first) > bytes_max:
            log.warning("recording is full, nothing is recorded: file=%s bytes=%d", path, bytes_max)
            self._forget()
            return
        self._buffer += first if self._size else recording.MAGIC + first
        self.flush()

    def handled(self, now: Instant, event: Event, actions: Sequence[Action], failure: str = "") -> None:
        """Record one event and its actions; ``failure`` if the core raised an error on it."""
        if self._descriptor is None:
            return
        try:
            frame = recording.encode_handled(now, event, actions, failure)
        except (TypeError, ValueError, OverflowError) as error:
            log.warning("cannot record an event, recording ends: event=%s error=%s", type(event).__name__, error)
            self._end(f"{type(event).__name__} could not be recorded")
            return
        if self._size + len(self._buffer) + len(frame) > self._bytes_max:
            log.warning("recording is full, recording ends: file=%s bytes=%d", self._path, self._bytes_max)
            self._end(f"it had reached its bound of {self._bytes_max} bytes")
            return
        self._buffer += frame
        if len(self._buffer) >= BUFFERED_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        """Write the buffered records to the kernel at the end of a turn, so that they survive a killed agent."""
        if self._descriptor is None or not self._buffer:
            return
        try:
            while self._buffer:
                written = os.write(self._descriptor, self._buffer)
                self._size += written
                del self._buffer[:written]
        except OSError as error:
            log.warning("cannot write the recording, recording ends: file=%s error=%s", self._path, error.strerror)
            self._forget()

    def close(self) -> None:
        self._end("the agent stopped")

    def _end(self, reason: str) -> None:
        if self._descriptor is None:
            return
        self._buffer += recording.encode(recording.RecordingEnd(reason))
        self.flush()
        self._forget()

    def _forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self._buffer.clear()


def _open(path: str) -> tuple[int, int]:
    """The file, readable only by its owner (it has tasks' variables), and the size of its complete part; an incomplete
    end, left by a killed agent, is cut off."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until it is closed, or its agent has ended
        size = os.fstat(descriptor).st_size
        if not size:
            return descriptor, 0
        with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            whole = recording.whole_bytes(view)
        if whole < size:
            log.info("incomplete end of a recording cut off: file=%s bytes=%d", path, size - whole)
            os.ftruncate(descriptor, whole)
        os.fchmod(descriptor, PRIVATE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, whole
