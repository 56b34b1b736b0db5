# ruff: noqa: PTH118
# os.path, since pathlib would cost every command its quick start.
"""The end of a launcher whose agent is gone, with the tasks that run under it."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from peerload.model.errors import PeerloadError
from peerload.wire import frame

SAYS_WITHIN_S = 5.0


def end_launcher(state: str) -> int | None:
    """Tell the launcher of this state directory to end its tasks and itself → a descriptor that tells when it has; None
    if there is none. Raises PeerloadError if an agent works there."""
    lock = _locked(state)
    if lock is None:
        return None
    try:
        return _told_to_stop(os.path.join(state, "launcher"))
    finally:
        os.close(lock)


def is_worked_in(state: str) -> bool:
    """Whether an agent works in this state directory."""
    try:
        lock = _locked(state)
    except PeerloadError:
        return True
    if lock is not None:
        os.close(lock)
    return False


def _locked(state: str) -> int | None:
    """The agent's lock on its state, so that none starts meanwhile; None if no agent ever worked there."""
    try:
        lock = os.open(os.path.join(state, "lock"), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(lock, 20).decode("ascii", "replace").strip() or "?"
        os.close(lock)
        raise PeerloadError(
            f"an agent works in {state}",
            why=f"pid {pid} has it, and listens at another socket",
            hint="name that:  peerload down --all --socket PATH",
        ) from None
    return lock


def _told_to_stop(directory: str) -> int | None:
    try:
        place = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        with socket.socket(socket.AF_UNIX) as launcher:
            launcher.settimeout(SAYS_WITHIN_S)
            launcher.connect(f"/proc/self/fd/{place}/launcher.sock")  # a long path does not fit into a socket's name
            credentials = launcher.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            descriptor = os.pidfd_open(struct.unpack("3i", credentials)[0])
            launcher.sendall(frame.pack([{"do": "stop"}]))
            return descriptor
    except (FileNotFoundError, ConnectionRefusedError, ProcessLookupError):
        return None
    except OSError as error:
        raise PeerloadError("the launcher cannot be told to stop", why=error.strerror or str(error)) from None
    finally:
        os.close(place)
