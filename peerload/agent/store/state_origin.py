"""Origin of a state directory: the machine that it was made on. A copy of it on another machine does not start.

The file STATE/origin names the machine and the file's own inode. A copy on another machine differs in both, and the agent of
the original may still run the same tasks. Another machine with the same inode is the same disk (a file system that several
machines share, a disk that was moved, a machine that gets a new id with each boot); another inode on the same machine is a
directory that was moved by copying, where `claim.py` sees to it that only one agent runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from peerload.model.errors import StoreError

FILE = "origin"
MACHINE_ID = Path("/etc/machine-id")
ID_DIGITS = 32
LINE_BYTES_MAX = 200


def check(state: Path) -> None:
    """Refuse a copy, else keep where the directory is now. Without a machine id, or a file that can be read, nothing is
    refused. Raises StoreError."""
    machine = _machine()
    path = state / FILE
    with contextlib.suppress(OSError):
        found = _read(path)
        if machine and found is not None and found[0] != machine and found[1] != path.stat().st_ino:
            raise StoreError(
                f"the state directory {state} is a copy that was made on another machine",
                why="an agent there may run the same tasks: each of them would run twice",
                hint=f"a new node:  peerload up --node NAME --state NEW_DIR        if no agent runs with the original any more: "
                f" rm {path}",
            )
        _write(path, machine)


def _machine() -> str:
    """The id of this machine, hashed as its manual page asks for; "" if it has none."""
    try:
        found = MACHINE_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    if len(found) != ID_DIGITS:  # "uninitialized", or nothing
        return ""
    return hashlib.sha256(f"peerload {found}".encode()).hexdigest()[:ID_DIGITS]


def _read(path: Path) -> tuple[str, int] | None:
    """(machine, inode) as they were kept; None: nothing that can be read."""
    try:
        machine, inode = path.read_text(encoding="ascii")[:LINE_BYTES_MAX].split()
        return machine, int(inode)
    except (OSError, ValueError):
        return None


def _write(path: Path, machine: str) -> None:
    """Not synced: a file that is lost refuses nothing."""
    if not machine:
        return
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        line = f"{machine} {os.fstat(fd).st_ino}\n".encode("ascii")
        os.pwrite(fd, line, 0)
        os.ftruncate(fd, len(line))
    finally:
        os.close(fd)
