"""Opening files beneath a directory: by `openat2`, which follows no link and leaves the directory by no path (rule S5)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from typing import Any

SYS_OPENAT2 = 437
RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 0x02, 0x04, 0x08
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_HOW_BYTES = 24
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc: Any = ctypes.CDLL(None, use_errno=True)


def open_beneath(directory: int, path: str, flags: int, mode: int = 0) -> int:
    """Open ``path`` beneath an open directory. Raises OSError: ELOOP for a link on the way, EXDEV for a way out."""
    how = _How(flags | os.O_CLOEXEC, mode, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS)
    while True:
        fd = int(_libc.syscall(SYS_OPENAT2, directory, os.fsencode(path), ctypes.byref(how), _HOW_BYTES))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), path)


def make_directories(directory: int, path: str, mode: int = 0o777) -> int:
    """Open a directory beneath, made with all above it where it is absent; "" is the directory itself. Raises OSError."""
    try:
        return open_beneath(directory, path or ".", DIRECTORY)
    except FileNotFoundError:
        above, _, name = path.rpartition("/")
        parent = make_directories(directory, above, mode)
        try:
            with contextlib.suppress(FileExistsError):  # somebody was faster
                os.mkdir(name, mode, dir_fd=parent)
            return open_beneath(parent, name, DIRECTORY)
        finally:
            os.close(parent)


class Parents:
    """The directory of the last file beneath an open one, kept open: files come sorted, so that the next one mostly lies there,
    too. makes: directories that are not there are made."""

    def __init__(self, base: int, *, makes: bool = True) -> None:
        self._base = base
        self._makes = makes
        self._path: str | None = None
        self._fd = -1

    def of(self, path: str) -> tuple[int, str]:
        """→ the open directory of this file, and the name in it. Raises OSError."""
        above, _, name = path.rpartition("/")
        if above != self._path:
            self.close()
            self._fd = (
                make_directories(self._base, above)
                if self._makes
                else open_beneath(self._base, above or ".", DIRECTORY)
            )
            self._path = above
        return self._fd, name

    def close(self) -> None:
        """Close the directory."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._path = -1, None


def punch_hole(fd: int, start: int, size: int) -> None:
    """Give the disk of a part of a file back. Raises OSError where the file system cannot."""
    if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(size)) < 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def sync_file_system(directory: int) -> None:
    """Have everything written to this file system on disk. Raises OSError."""
    if _libc.syncfs(directory) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
