"""Inotify: notifications of the kernel when files of one directory change, through one descriptor for the agent; no
polling."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable
    from pathlib import Path

IN_MODIFY = 0x002
IN_CLOSE_WRITE = 0x008
IN_MOVED_TO = 0x080
IN_CREATE = 0x100
IN_Q_OVERFLOW = 0x4000
_HEADER = struct.Struct("iIII")
READ_BYTES = 64 << 10


class Inotify:
    """Calls back when a file of that name in the directory is written to, made or moved in.

    The directory is watched only while somebody listens, so that an agent nobody follows sleeps.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, directory: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._loop = loop
        self._directory = os.fsencode(directory)
        self._listeners: dict[str, list[Callable[[], None]]] = {}
        self._watch = -1
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        loop.add_reader(self._fd, self._read)

    def add(self, names: Iterable[str], call: Callable[[], None]) -> None:
        """Call when one of these files changes."""
        if self._watch < 0:
            mask = IN_MODIFY | IN_CLOSE_WRITE | IN_MOVED_TO | IN_CREATE
            self._watch = self._libc.inotify_add_watch(self._fd, self._directory, mask)
            if self._watch < 0:
                raise OSError(ctypes.get_errno(), "inotify_add_watch")
        for name in names:
            self._listeners.setdefault(name, []).append(call)

    def remove(self, names: Iterable[str], call: Callable[[], None]) -> None:
        """Call no more."""
        for name in names:
            calls = self._listeners.get(name, [])
            if call in calls:
                calls.remove(call)
            if not calls:
                self._listeners.pop(name, None)
        if not self._listeners and self._watch >= 0:
            self._libc.inotify_rm_watch(self._fd, self._watch)
            self._watch = -1

    def close(self) -> None:
        """Stop."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _read(self) -> None:
        try:
            raw = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        changed: set[str] = set()
        at = 0
        while at < len(raw):
            _, mask, _, length = _HEADER.unpack_from(raw, at)
            at += _HEADER.size
            if mask & IN_Q_OVERFLOW:  # too much at once: look at everything
                changed.update(self._listeners)
            else:
                changed.add(raw[at : at + length].rstrip(b"\0").decode("utf-8", "replace"))
            at += length
        for name in sorted(changed):
            for call in list(self._listeners.get(name, ())):
                call()
