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


def sync_file_system(directory: int) -> None:
    """Have everything written to this file system on disk. Raises OSError."""
    if _libc.syncfs(directory) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
