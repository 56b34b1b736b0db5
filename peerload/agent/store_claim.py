"""Machine-wide claim on a store id: no two agents on one machine work with copies of one state directory.

The lock file of a state directory is copied with it and holds nobody back, so an agent also binds an abstract socket that
is named for the id of its database, and so does its launcher. The kernel frees the name when the process ends. Copies on
two machines are noticed by their peers instead (`name_clash.py`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import struct
from typing import TYPE_CHECKING

from peerload.agent.launcher import STOP_GRACE_S
from peerload.agent.launcher_process import is_alive, wait_gone
from peerload.agent.launcher_socket import claim_name
from peerload.model.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path

STOP_S_MAX = STOP_GRACE_S + 10.0
"""A launcher that is told to stop has ended its tasks, and itself, within this."""
_CREDENTIALS = struct.Struct("3i")


def claim(store: str, state: Path) -> socket.socket:
    """Hold the claim for as long as the socket is open. Raises StoreError: another agent here has a copy of this state."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        held.bind(claim_name("agent", store))
        held.listen(1)
    except OSError as error:
        held.close()
        if error.errno != errno.EADDRINUSE:
            raise StoreError(f"the database in {state} cannot be claimed", why=str(error.strerror)) from None
        pid, _ = _holder("agent", store)
        raise StoreError(
            f"another agent (pid {pid or '?'}) works with a copy of {state}: both would run the same tasks",
            why="both have the same database id",
            hint="another node on this machine begins with a state of its own:  peerload up --node NAME --state NEW_DIR",
        ) from None
    return held


def end_strange_launcher(store: str, launcher: Path) -> bool:
    """If a launcher that is not that of this directory runs tasks for this database (the directory was copied, or put back
    from a copy, while tasks ran): end it with its tasks, since nobody knows of them here → whether there was one. Blocks;
    raises StoreError if it does not end."""
    pid, uid = _holder("launcher", store)
    if not pid or uid != os.geteuid() or _is_locked(launcher / "launcher.lock"):
        return False
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return True
    wait_gone(pid, STOP_S_MAX)
    if is_alive(pid):
        raise StoreError(
            f"the launcher of another copy of this state directory (pid {pid}) runs tasks and does not end",
            hint=f"kill -9 {pid}, then start again",
        )
    return True


def _holder(what: str, store: str) -> tuple[int, int]:
    """(pid, uid) of the process that holds a claim; zeros: nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as asks:
        asks.settimeout(1.0)
        try:
            asks.connect(claim_name(what, store))
            raw = asks.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            return 0, 0
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def _is_locked(path: Path) -> bool:
    """Whether the launcher of this very directory lives."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
