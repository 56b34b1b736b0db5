"""One GPU, one agent: agents on one machine must not give the same card to different tasks, so each claims those it uses.

A claim is a lock on a file that all agents of the machine know; it ends with the process that holds it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerload.model.devices import Device

log = logging.getLogger("peerload.gpus")

PLACES = (Path("/run/lock"), Path("/var/lock"))


class Claims:
    """The claims of this process; ``place``: where the files are (default: where this machine keeps locks)."""

    def __init__(self, place: Path | None = None) -> None:
        self._place = place or _place()
        self._held: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        """Devices that another agent has (id), and who that is."""

    def claim(self, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        """Those that are ours by now."""
        self.refused = {}
        found = []
        for device in devices:
            holder = "" if device.id in self._held else self._lock(device)
            if holder:
                self.refused[device.id] = holder
                log.warning("GPU %d (%s) is left alone: another agent has it (%s)", device.index, device.id, holder)
            else:
                found.append(device)
        return tuple(found)

    def _lock(self, device: Device) -> str:
        """Who has it, "" if we have it now, or if claims cannot be made here."""
        path = self._place / f"peerload-device-{device.mark:08x}"
        before = os.umask(0)  # agents of other users are to find it, too
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as error:
            log.warning("GPU %d cannot be claimed: %s", device.index, error)
            return ""
        finally:
            os.umask(before)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            return ""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
            os.close(fd)
            return f"process {holder}" if holder.isdecimal() else "it does not say who"
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        self._held[device.id] = fd
        return ""

    def close(self) -> None:
        """Give all of them up."""
        for fd in self._held.values():
            os.close(fd)
        self._held = {}


def _place() -> Path:
    for place in PLACES:
        if place.is_dir() and os.access(place, os.W_OK):
            return place
    return Path(tempfile.gettempdir())
