"""The log of `map --joblog`: one line for each ended task, with the columns of GNU parallel.

Seq, Host, Starttime (Unix s), JobRuntime (s), Send (always 0), Receive (bytes of stdout), Exitval, Signal, Command. In a
command a line break is written as NUL, as GNU parallel does. Each line is appended by one write, so
after a crash the file has the tasks that had ended; an incomplete last line is dropped when the file is read.
"""

from __future__ import annotations

import os
import stat
from array import array
from typing import TYPE_CHECKING

from peerload.model.errors import PeerloadError, UsageError
from peerload.model.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADER = b"Seq\tHost\tStarttime\tJobRuntime\tSend\tReceive\tExitval\tSignal\tCommand\n"
COLUMNS = 9
SEQUENCE_MAX = 10_000_000
"""The greatest sequence number of a task."""


class Joblog:
    """One job log. ``resumes``: read it first and append to it, else start it anew; ``again_failed``: failed tasks count as not done.
    Raises UsageError if it cannot be used."""

    def __init__(self, path: str, *, resumes: bool = False, again_failed: bool = False) -> None:
        self._path = path
        self._done = array("Q")
        """Sequence number → checksum of its command; 0: not done yet."""
        self.skipped = 0
        kept = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            if resumes:
                kept = self._read(again_failed=again_failed)
            if stat.S_ISREG(os.fstat(self._file).st_mode):
                os.ftruncate(self._file, kept)
            if not kept:
                os.write(self._file, HEADER)
        except OSError as error:
            raise UsageError(
                f"map: --joblog {printable(path)} cannot be used", why=error.strerror or str(error)
            ) from None

    def has(self, number: int, command: bytes) -> bool:
        """True if this task is done. Raises UsageError if the log has another command under its number."""
        mark = self._done[number] if number < len(self._done) else 0
        if not mark:
            return False
        if mark != _mark(command):
            raise UsageError(
                f"map: task {number} in {printable(self._path)} had another command than now",
                why=f"now it would be {printable(command[:200])}",
                hint="--resume goes on with the same command and inputs; for others take another --joblog",
            )
        self.skipped += 1
        return True

    def add(self, number: int, ended: dict[str, object], command: bytes) -> None:
        """Note the end of a task. ``ended``: the part of the answer to `wait`. Raises PeerloadError if it cannot be written."""
        started_at, ended_at = _number(ended.get("started_at")), _number(ended.get("ended_at"))
        code, signal = ended.get("exit_code"), ended.get("signal") or 0
        exit_code = 0 if signal else code if isinstance(code, int) else 125
        fields = (
            str(number),
            str(ended.get("node") or "-"),
            f"{started_at:.3f}",
            f"{max(ended_at - started_at, 0.0) if started_at else 0.0:10.3f}",
            "0",
            str(ended.get("stdout_bytes") or 0),
            str(exit_code),
            str(signal),
        )
        line = "\t".join(fields).encode() + b"\t" + command.replace(b"\n", b"\0") + b"\n"
        try:
            os.write(self._file, line)
        except OSError as error:
            raise PeerloadError(
                f"--joblog {printable(self._path)} cannot be written", why=error.strerror or str(error)
            ) from None

    def _read(self, *, again_failed: bool) -> int:
        """Read which tasks are done → the bytes of the file that are whole lines."""
        kept = 0
        for line in self._lines():
            kept += len(line)
            if line == HEADER:
                continue
            fields = line[:-1].split(b"\t", COLUMNS - 1)
            try:
                number, exit_code, signal = int(fields[0]), int(fields[6]), int(fields[7])
                command = fields[8]
            except (ValueError, IndexError):
                raise self._no_joblog(line) from None
            if not 0 < number <= SEQUENCE_MAX:
                raise self._no_joblog(line)
            if number >= len(self._done):
                self._done.frombytes(bytes(8 * (number + 1 - len(self._done))))
            is_done = not again_failed or (exit_code == 0 and signal == 0)
            self._done[number] = _mark(command) if is_done else 0
        return kept

    def _no_joblog(self, line: bytes) -> UsageError:
        return UsageError(
            f"map: {printable(self._path)} is not a joblog",
            why=f"it has the line {printable(line[:80])}",
            hint="another:  --joblog FILE",
        )

    def _lines(self) -> Iterator[bytes]:
        """The whole lines of the file, with their ends."""
        os.lseek(self._file, 0, os.SEEK_SET)
        rest = b""
        while data := os.read(self._file, 1 << 20):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield line + b"\n"


def _mark(command: bytes) -> int:
    """A checksum of a command, never 0; the same in every process."""
    from zlib import adler32, crc32

    written = command.replace(b"\n", b"\0")
    return (crc32(written) << 32 | adler32(written)) or 1


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
