"""Device locks: agents on one machine must not give the same card to different tasks, so each locks those it uses.

A lock is on a file that all agents of the machine know, and ends with the process that holds it. A card that cannot be
locked is not used, since another agent may have it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerload.model.resources import Device

log = logging.getLogger("peerload.gpus")

PLACES = (Path("/run/lock"), Path("/var/lock"))
FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags with which links are not followed, and pipes not waited for, that others have put in the file's place."""


class DeviceLocks:
    """The locks of this process. place: an existing directory for the files (default: the machine's lock directory)."""

    def __init__(self, place: Path | None = None) -> None:
        self._place = place or _place()
        self._held: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        """Devices that are not used (id), and why."""

    def claim(self, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        """Lock devices → those that are ours. New refusals are logged."""
        before, self.refused = self.refused, {}
        found = []
        for device in devices:
            why = "" if device.id in self._held else self._lock(device)
            if not why:
                found.append(device)
                continue
            self.refused[device.id] = why
            if before.get(device.id) != why:
                log.warning("GPU is not used: index=%d id=%s reason=%s", device.index, device.id, why)
        return tuple(found)

    def _lock(self, device: Device) -> str:
        """Lock a device → why it is not ours, "" if it is."""
        path = self._place / f"peerload-device-{device.mark:08x}"
        try:
            fd = _opened(path)
        except OSError as error:
            return f"it cannot be claimed: {path}: {error.strerror}"
        try:
            why = _locked(fd)
        except OSError as error:
            why = f"it cannot be claimed: {path}: {error.strerror}"
        if why:
            os.close(fd)
            return why
        self._held[device.id] = fd
        with contextlib.suppress(OSError):  # another user's file, or a full disk: the claim holds without our number
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        return ""

    def close(self) -> None:
        """Release all locks."""
        for fd in self._held.values():
            os.close(fd)
        self._held = {}


def _opened(path: Path) -> int:
    """Open the lock file, or create it. An existing file must not be opened with O_CREAT: fs.protected_regular forbids
    that in such directories if the file is another user's. Raises OSError."""
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDWR | FLAGS)
    before = os.umask(0)  # agents of other users are to find it, too
    try:
        with contextlib.suppress(FileExistsError):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | FLAGS, 0o666)
    finally:
        os.umask(before)
    return os.open(path, os.O_RDONLY | FLAGS)  # a lock needs no more


def _locked(fd: int) -> str:
    """Lock it → why it could not be locked, "" if it is ours. Raises OSError."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return "it cannot be claimed: something else is in the place of the claim's file"
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
        who = f"process {holder}" if holder.isdecimal() and Path("/proc", holder).exists() else "it does not say who"
        return f"another agent has it ({who})"
    return ""


def _place() -> Path:
    for place in PLACES:
        if place.is_dir() and os.access(place, os.W_OK):
            return place
    return Path(tempfile.gettempdir())
