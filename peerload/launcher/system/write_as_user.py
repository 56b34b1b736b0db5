"""Writes of output to a file of a user: by a child of a launcher that runs as root, after it has become the user, and by
the agent of one user (agent/accounts.py, which first follows links to files; here they are not followed).

The user opens the directory once; everything else happens inside it, by names without a slash.
"""

from __future__ import annotations

import errno
import os
import stat

COPY_BYTES = 1 << 20
GONE = "changed: it was emptied, removed or replaced meanwhile"
NULL = os.makedev(1, 3)
"""Device number of `/dev/null`, for which nothing has to be written."""
_SET_ID = stat.S_ISUID | stat.S_ISGID


class Unwritable(Exception):
    """A file cannot be written."""


def source(path: str) -> int:
    """Open a captured file with the agent's rights → its descriptor; -1 if nothing was captured. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return -1
    return fd


def check(path: bytes) -> None:
    """Check that a file can be written. Raises Unwritable if the directory is absent or not writable, or an
    existing file is not a regular, writable one."""
    directory, name = _opened(path)
    try:
        if _found(directory, name) is not None and not os.access(".", os.W_OK | os.X_OK, dir_fd=directory):
            raise Unwritable("you may not write to its directory")
    finally:
        os.close(directory)


class FileChanged(Unwritable):
    """The file was emptied, removed or replaced since the last write."""


def append(path: bytes, segments: list[tuple[int, int, int]], umask: int, at: int, *, ends: bool) -> None:
    """Append parts (descriptor, first, end) of captured files at the offset ``at``; 0 = the file is created or emptied.
    Content beyond that offset is cut off first, so that the call can be repeated. ends: the file is synced to disk afterwards.
    Raises FileChanged, Unwritable, OSError."""
    directory, name = _opened(path)
    try:
        found = _found(directory, name)
        if found is None:
            return
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        if found is _ABSENT and at:
            raise FileChanged(GONE)
        fd = os.open(name, flags | (os.O_CREAT if found is _ABSENT else 0), 0o600, dir_fd=directory)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise Unwritable("it is not a regular file")
            if status.st_size < at:
                raise FileChanged(GONE)
            if found is _ABSENT:
                os.fchmod(fd, 0o666 & ~umask)
            elif status.st_mode & _SET_ID:
                _clear_set_id(fd, status.st_mode)
            os.ftruncate(fd, at)
            os.lseek(fd, at, os.SEEK_SET)
            for captured, first, end in segments:
                _copy_part(captured, first, end, fd)
            if ends:
                os.fsync(fd)
        finally:
            os.close(fd)
        if ends:
            os.fsync(directory)
    finally:
        os.close(directory)


def _clear_set_id(fd: int, mode: int) -> None:
    """Clear set-user-id bits. The kernel does so for files of other users."""
    try:
        os.fchmod(fd, mode & 0o777)
    except PermissionError:
        return


def _copy_part(captured: int, first: int, end: int, fd: int) -> None:
    """Copy a complete part. Raises OSError if a hole was punched in it meanwhile, which would read as zeros."""
    while first < end:
        data = os.pread(captured, min(COPY_BYTES, end - first), first)
        if not data or os.lseek(captured, first, os.SEEK_HOLE) < first + len(data):
            raise OSError(errno.EAGAIN, "the output was cut meanwhile")
        first += len(data)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]


def _opened(path: bytes) -> tuple[int, bytes]:
    where, name = os.path.split(path)
    if not path.startswith(b"/") or name in (b"", b".", b"..") or b"\0" in path:
        raise Unwritable("it is not an absolute path of a file")
    try:
        return os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), name
    except FileNotFoundError:
        raise Unwritable(f"there is no directory {where.decode('utf-8', 'backslashreplace')}") from None
    except OSError as error:
        shown = where.decode("utf-8", "backslashreplace")
        raise Unwritable(f"its directory {shown} cannot be opened: {error.strerror}") from None


_ABSENT = os.stat_result((0, 0, 0, 0, 0, 0, -1, 0, 0, 0))


def _found(directory: int, name: bytes) -> os.stat_result | None:
    """The existing file (`_ABSENT` if there is none), None if nothing has to be written. Raises Unwritable if it must
    not be written."""
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return _ABSENT
    except OSError as error:
        raise Unwritable(str(error.strerror)) from None
    if stat.S_ISCHR(found.st_mode) and found.st_rdev == NULL:
        return None
    if stat.S_ISLNK(found.st_mode):
        raise Unwritable("it is a link")
    if not stat.S_ISREG(found.st_mode):
        raise Unwritable("it is not a regular file")
    if not os.access(name, os.W_OK, dir_fd=directory):
        raise Unwritable("the file that is there may not be written to")
    return found


def empty(path: bytes | str) -> None:
    """Remove everything in a directory, whatever its owner has put there. Deeper directories are moved up
    first, so that no path gets long. Raises OSError if an entry cannot be removed."""
    top = _directory(path)
    try:
        number = 0
        while names := os.listdir(top):
            for name in names:
                number = _removed(top, name, number)
    finally:
        os.close(top)


def _removed(top: int, name: str, number: int) -> int:
    """Remove one entry; directories in it move to ``top``, with names from this number on → the next free number."""
    try:
        os.unlink(name, dir_fd=top)
    except (IsADirectoryError, PermissionError):  # some file systems report EPERM
        within = _directory(name, top)
    else:
        return number
    try:
        for below in os.listdir(within):
            try:
                os.unlink(below, dir_fd=within)
            except (IsADirectoryError, PermissionError):
                os.close(_directory(below, within))  # moving a directory needs write permission on it
                number = _moved_up(within, below, top, number)
    finally:
        os.close(within)
    os.rmdir(name, dir_fd=top)
    return number


def _moved_up(within: int, below: str, top: int, number: int) -> int:
    while True:
        number += 1
        try:
            os.stat(f".{number}", dir_fd=top, follow_symlinks=False)
        except FileNotFoundError:
            os.rename(below, f".{number}", src_dir_fd=within, dst_dir_fd=top)
            return number


def _directory(path: bytes | str, within: int | None = None) -> int:
    """Open a directory with all rights for its owner; links are not followed. Raises OSError."""
    flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    own = os.open(path, os.O_PATH | flags, dir_fd=within)
    try:
        os.chmod(f"/proc/self/fd/{own}", 0o700)  # the task may lack rights; O_PATH has no fchmod
        return os.open(".", os.O_RDONLY | flags, dir_fd=own)
    finally:
        os.close(own)
