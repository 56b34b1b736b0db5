"""What the launcher keeps on disk so that an exit survives the agent and the launcher: two append-only logs; and the
end of what a launcher has left behind, found by them.

Imports nothing but the smallest modules: the launcher must stay small. Records are not synced: they outlive processes,
not the machine; whoever needs more (the store) writes its own row.
"""

from __future__ import annotations

import os
import select
import signal
import time
import zlib
from typing import Any

import msgpack

LOG_BYTES_MAX = 1 << 20
"""A log of this size is rewritten with what is still of use, if that is less than half of it."""
RECORD_BYTES_MAX = 64 << 10
LEFT_OVER_REPORT_S = 10.0
_HEADER_BYTES = 8
_ENVIRONMENT_BYTES_MAX = 4 << 20


class RecordLog:
    """An append-only file of checksummed MessagePack records; a torn or corrupt tail is ignored.

    A record is length (4 bytes, big-endian), crc32 of the body (4 bytes), body.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.size_bytes = os.fstat(self._fd).st_size

    def read(self) -> list[Any]:
        """Every whole record from the start of the file; what follows the first bad one is cut off."""
        with open(self.path, "rb") as file:  # noqa: PTH123 -- pathlib costs the launcher a megabyte
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
        if at < len(raw):
            os.ftruncate(self._fd, at)
        self.size_bytes = at
        return records

    def append(self, records: list[Any]) -> None:
        """Add records with one write. Where the disk takes less (it is full), nothing is kept and the log says so: the
        records are still told to the agent, and tasks must not end because a disk is full."""
        raw = b"".join(map(_pack, records))
        try:
            written = os.write(self._fd, raw)
            if written < len(raw):  # half a record would hide those that come after it
                os.ftruncate(self._fd, self.size_bytes)
                written = 0
        except OSError as error:
            say(f"{self.path}: {error.strerror}")
            return
        self.size_bytes += written

    def tidy(self, kept: list[Any] | None, kept_count: int) -> None:
        """Shrink the file if it is large and most of it is of no use: to nothing, or to ``kept``."""
        if self.size_bytes <= LOG_BYTES_MAX:
            return
        if not kept_count:
            os.ftruncate(self._fd, 0)
            self.size_bytes = 0
        elif kept is not None:
            try:
                self.rewrite(kept)
            except OSError as error:
                say(f"{self.path}: {error.strerror}")

    def rewrite(self, records: list[Any]) -> None:
        """Replace the file by one that holds these records only. An emptied one takes no room, so that it can be done on
        a full disk."""
        if not records:
            os.ftruncate(self._fd, 0)
            self.size_bytes = 0
            return
        new = self.path + ".new"
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        raw = memoryview(b"".join(map(_pack, records)))
        self.size_bytes = len(raw)
        while raw:
            raw = raw[os.write(fd, raw) :]
        os.replace(new, self.path)  # noqa: PTH105 -- as above
        os.close(self._fd)
        self._fd = fd

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _pack(record: Any) -> bytes:  # noqa: ANN401 -- any MessagePack value
    body: bytes = msgpack.packb(record)
    return len(body).to_bytes(4, "big") + zlib.crc32(body).to_bytes(4, "big") + body


def say(line: str) -> None:
    """A line for the log (stderr is DIR/launcher.log, cut at each start); lost if the disk is full."""
    try:
        os.write(2, f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {line}\n".encode(errors="replace"))
    except OSError:
        return


def _stat(pid: int) -> list[bytes]:
    """The fields of a process's stat from its state (field 3) on; empty if there is none."""
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
    # The name in parentheses may hold anything, also spaces and parentheses.
    return raw[raw.rindex(b")") + 2 :].split()


def process_start(pid: int) -> int:
    """When a process started, in clock ticks since boot (field 22 of its stat); 0 if there is none."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def machine_boot() -> str:
    """The random id of this boot of the machine."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123 -- as above
        return file.read().strip()


def end_left_overs(rows: list[Any]) -> None:
    """Kill what is left of the tasks in these rows of the log of spawns, and return when it is gone, however long that
    takes: reporting a task as dead while it runs would let it run twice.

    A row is key, pid, start, machine boot, and the files of its output. What is left: the process group of that pid, if
    its leader started then; the rest of that group where the leader is gone, if it is marked by PEERLOAD_TASK_ID; and,
    where the pid is 0 (the launcher was killed in the middle of a spawn), the session that writes to these files.
    """
    leaders = {row[1]: row[2] for row in rows if row[1]}
    outputs = {path for row in rows if not row[1] for path in row[4]}
    while leaders or outputs:
        left = _left_overs(leaders, outputs)
        if not left:
            return
        for pid, start, group in left:
            _end(pid, start, group)


def _left_overs(leaders: dict[int, int], outputs: set[str]) -> list[tuple[int, int, int]]:
    """(pid, start, process group) of the processes that are to end."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 -- as above
        fields = _stat(int(name)) if name.isdecimal() else []
        if not fields or fields[0] in b"ZX":
            continue
        pid, group, session, start = int(name), int(fields[2]), int(fields[3]), int(fields[19])
        if group in leaders:
            leader_start = process_start(group)
            if leader_start == leaders[group] or (
                not leader_start and session == group and start >= leaders[group] and _is_marked(pid)
            ):
                found.append((pid, start, group))
        elif outputs and session == group == pid and _writes_to(pid, outputs):
            leaders[pid] = start  # for the rest of its group
            found.append((pid, start, group))
    return found


def _end(pid: int, start: int, group: int) -> None:
    """Kill a process with its group and wait for its end."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if process_start(pid) != start:
            return
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return
        except PermissionError as error:
            say(f"process {pid}, left by an earlier launcher: {error.strerror}")
        waiting = select.poll()
        waiting.register(pidfd, select.POLLIN)
        while not waiting.poll(LEFT_OVER_REPORT_S * 1000):
            say(f"process {pid}, left by an earlier launcher, does not end")
    finally:
        os.close(pidfd)


def _is_marked(pid: int) -> bool:
    """Whether a process was started with the variables of a task."""
    try:
        fd = os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return b"PEERLOAD_TASK_ID=" in os.read(fd, _ENVIRONMENT_BYTES_MAX)
    except OSError:
        return False
    finally:
        os.close(fd)


def _writes_to(pid: int, paths: set[str]) -> bool:
    """Whether the stdout or the stderr of a process is one of these files."""
    for number in (1, 2):
        try:
            if os.readlink(f"/proc/{pid}/fd/{number}").removesuffix(" (deleted)") in paths:  # noqa: PTH115 -- as above
                return True
        except OSError:
            continue
    return False
