"""Machine-wide claim on a store id: no two agents on one machine work with copies of one state directory.

The lock file of a state directory is copied with it and holds nobody back, so an agent also binds an abstract socket that
is named for the id of its database, and so does its launcher. The kernel frees the name when the process ends. Copies on
two machines are noticed by their peers instead (`duplicate_node_name.py`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
from pathlib import Path

from peerload.agent.launcher.process import is_alive, wait_gone
from peerload.launcher.control_socket import claim_name
from peerload.launcher.server import STOP_GRACE_S
from peerload.model.errors import StoreError

STOP_S_MAX = STOP_GRACE_S + 10.0
"""A launcher that is told to stop has ended its tasks, and itself, within this."""


def claim(store: str, state: Path) -> socket.socket:
    """Hold the claim for as long as the socket is open. Raises StoreError: another agent here has a copy of this state."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        held.bind(claim_name("agent", store))  # nobody may connect: it does not listen
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
    if _is_locked(launcher / "launcher.lock"):
        return False
    pid, uid = _holder("launcher", store)
    if not pid or uid != os.geteuid():
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
    """(pid, uid) of the process that holds a claim, as far as we may see it; zeros: nobody does."""
    shown = claim_name(what, store).replace("\0", "@")
    lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    inodes = {f"socket:[{line.split()[6]}]" for line in lines if line.endswith(f" {shown}")}
    for process in Path("/proc").iterdir() if inodes else ():
        if not process.name.isdigit():
            continue
        try:
            if any(str(fd.readlink()) in inodes for fd in (process / "fd").iterdir()):
                return int(process.name), process.stat().st_uid
        except OSError:
            continue  # it is another user's, or has ended
    return 0, 0


def _is_locked(path: Path) -> bool:
    """True if the launcher of this very directory is alive."""
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
