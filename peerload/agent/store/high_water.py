"""High-water mark of a node's database, in a file beside it: shows at the next start whether commits have been lost.

SQLite drops the end of a damaged write-ahead log without a word, and with it commits that users and peers were told of.
The mark says how far the database had come. It is written after each commit, before anybody is told of that commit, and
is never synced: a crash of the agent leaves it exact, a power cut may leave it up to half a minute old. It is never ahead
of a sound database.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

FILE = "high-water"
LINE_BYTES = 128
"""The whole file: one write, within one sector."""
GAP = 100_000
"""Numbers of submissions that are skipped after a loss: more than a node gives in the time that a mark may be old."""

ATTEMPTS_GAP = 1_000
"""Numbers of attempts of one task that are skipped after a loss."""


class HighWaterMark(msgspec.Struct, frozen=True):
    """High-water mark of a database: the last submission, the last event, and when (Unix s)."""

    store: str
    counter: int
    event: int
    at: float


class LostCommits(msgspec.Struct, frozen=True):
    """Loss of a database: ``had`` is the high-water mark, ``has`` is what the database holds now."""

    had: HighWaterMark
    has: HighWaterMark

    def words(self, node: str) -> str:
        """The loss, in words for people."""
        first, last = self.has.counter + 1, self.had.counter
        missing = f"{node}/{first}" if first == last else f"{node}/{first} to {node}/{last}"
        submissions = f"{missing} were acknowledged and are missing" if first <= last else "no submission is missing"
        events = max(self.had.event - self.has.event, 0)
        return (
            f"the database has lost its last commits (a damaged or restored file): {submissions}; the last {events} events"
            f" are missing, so that tasks which had ended may be shown as unfinished; new ids begin at {node}/{last + GAP + 1};"
            " a queued task that may run once only is held, others wait until no lease of them can be left"
        )


class HighWaterFile:
    """The file. A mark that cannot be read or written is as if there were none: the database itself is what counts."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._fd: int | None = None

    def read(self) -> HighWaterMark | None:
        """The mark; None: there is none that can be read."""
        try:
            text, _, digest = self._path.read_text(encoding="ascii").rstrip().rpartition(" ")
            store, counter, event, at = text.split(" ")
            if f"{zlib.crc32(text.encode('ascii')):08x}" != digest:
                return None
            return HighWaterMark(store, int(counter), int(event), float(at))
        except (OSError, ValueError):
            return None

    def write(self, mark: HighWaterMark) -> None:
        """Replace the mark; not synced."""
        text = f"{mark.store} {mark.counter} {mark.event} {mark.at:.3f}"
        line = f"{text} {zlib.crc32(text.encode('ascii')):08x}".ljust(LINE_BYTES - 1) + "\n"
        with contextlib.suppress(OSError):
            if self._fd is None:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.pwrite(self._fd, line.encode("ascii"), 0)

    def close(self) -> None:
        """Let go of the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
