"""Starting a process, and limiting its captured output. Used by the launcher alone."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import errno
import itertools
import os
import signal
from typing import Any

from peerload.launcher.record_log import log_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import NoReturn

    from peerload.launcher.fs_credentials import Access
    from peerload.launcher.protocol import SpawnRequest

PATH_DEFAULT = b"/usr/local/bin:/usr/bin:/bin"
NOT_FOUND = 127
NOT_EXECUTABLE = 126
NEVER_STARTED = -1
"""Reported by a child instead of an exit code if the node is short of a resource: the command never started."""
REASON_CHARS_MAX = 400
BLOCK_BYTES = 4096
SLACK_BYTES = 256 << 10
"""Bytes that a file system may allocate for a file beyond its data."""
SIZE_BYTES_MAX = 1 << 60
"""Largest size in an exit record; a task can make its own file look larger."""
SIGNALS_DEFAULT = tuple(
    number for number in range(1, signal.NSIG) if number not in {signal.SIGKILL, signal.SIGSTOP, 32, 33}
)
_NULL = (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)
_CAPTURE = os.O_CREAT | os.O_APPEND | os.O_WRONLY


SHORTAGES = {
    errno.ENOSPC: "no space or no inodes left on its disk",
    errno.EDQUOT: "disk quota exceeded",
    errno.EMFILE: "too many open files in its launcher",
    errno.ENFILE: "too many open files",
    errno.EAGAIN: "no more processes can be made: the limit of processes is reached",
    errno.ENOMEM: "out of memory",
}
"""Errors before exec that are the node's fault, and their words for people: the attempt never started."""


class CannotStart(Exception):
    """The process could not be started. exit_code: what a shell would show."""

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_code = exit_code
        self.reason = reason[:REASON_CHARS_MAX]


class SpawnRefused(Exception):
    """The policy of this node forbids it."""


def spawn(request: SpawnRequest, reads: int | str = "", fork: Callable[[], int] | None = None) -> int:
    """Start a process in a session of its own and return its pid. reads: descriptor of its stdin; path of the terminal
    that is its stdin, stdout and stderr; "" for /dev/null.

    fork: starts it in its cgroup; else nothing is forked, since the cost would grow with the launcher. Raises CannotStart, or OSError for what is in SHORTAGES.
    """
    argv, environment, umask = request.argv, request.environment, request.umask
    captures = [request.stdout, request.stderr]
    try:
        os.chdir(request.directory)
    except (OSError, ValueError) as error:
        raise_shortage(error)
        why = error.strerror if isinstance(error, OSError) else error
        raise CannotStart(NOT_EXECUTABLE, f"cannot enter {text(request.directory)}: {why}") from None
    if environment is None:
        raise CannotStart(NOT_EXECUTABLE, f"cannot execute {text(argv[0])}: its environment cannot be read")
    before = os.umask(0)
    try:
        if umask & 0o600:
            _make_readable(captures)
        os.umask(umask)
        program = find_program(argv[0], environment)
        if fork is not None:
            return _fork_and_exec(fork, lambda changed: _become(program, request, environment, reads, changed))
        return os.posix_spawn(
            program,
            argv,
            environment,
            file_actions=_standard_files(captures, reads),
            setsid=True,
            setsigmask=(),
            setsigdef=SIGNALS_DEFAULT,
        )
    except OSError as error:
        raise_shortage(error)
        raise CannotStart(NOT_EXECUTABLE, f"cannot execute {_why(argv[0], captures, error)}") from None
    except (ValueError, TypeError) as error:  # a NUL, or a variable that is not bytes
        raise CannotStart(NOT_EXECUTABLE, f"cannot execute {text(argv[0])}: {error}") from None
    finally:
        os.umask(before)
        os.chdir("/")


def _fork_and_exec(fork: Callable[[], int], become: Callable[[Iterable[int]], NoReturn]) -> int:
    """Fork a process that becomes a program, and wait until it has → its pid. ``become`` gets the signals that do not have their
    default here. Raises OSError or ValueError if it has not. The builtins of `signal` are called, since its own functions make an enum of
    each of 64 signals: nothing costs more before a fork, and in the child each page that is written to is copied."""
    changed = list(itertools.compress(SIGNALS_DEFAULT, map(_signal.getsignal, SIGNALS_DEFAULT)))  # SIG_DFL is 0
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        blocked = _signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_DEFAULT)
        try:
            pid = fork()
            if pid == 0:
                try:
                    become(changed)
                except BaseException as error:  # noqa: BLE001 -- it must never become a second launcher
                    number = (error.errno or 0) if isinstance(error, OSError) else 0
                    os.write(writing, b"%d %s" % (number, str(error).encode(errors="replace")[:REASON_CHARS_MAX]))
                finally:
                    os._exit(NOT_EXECUTABLE)
        finally:
            os.close(writing)
            _signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        raw = os.read(reading, 2 * REASON_CHARS_MAX)  # it ends with exec
    finally:
        os.close(reading)
    if raw:
        os.waitpid(pid, 0)
        code, _, why = raw.partition(b" ")
        raise OSError(int(code), os.strerror(int(code))) if int(code) else ValueError(text(why))
    return pid


def _become(
    program: bytes, request: SpawnRequest, environment: dict[bytes, bytes], reads: int | str, changed: Iterable[int]
) -> NoReturn:
    """Do in a forked child what posix_spawn does."""
    for number in changed:
        _signal.signal(number, _signal.SIG_DFL)
    os.setsid()
    if isinstance(reads, str) and reads:
        files = [os.open(reads, os.O_RDWR)] * 3
    else:
        source = reads if isinstance(reads, int) else os.open("/dev/null", os.O_RDONLY)
        files = [source, *(os.open(path, _CAPTURE, 0o600) for path in (request.stdout, request.stderr))]
    for number, fd in enumerate(files):
        os.dup2(fd, number)
    _signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.execve(program, request.argv, environment)  # noqa: S606 -- that is what it is for


def raise_shortage(error: Exception) -> None:
    """Raise the error again if the node is short of something; return if it is the task's."""
    if isinstance(error, OSError) and error.errno in SHORTAGES:
        raise error


def _standard_files(captures: list[str], reads: int | str) -> tuple[tuple[int, ...] | tuple[object, ...], ...]:
    """The file actions for descriptors 0, 1 and 2. They happen after setsid, so the terminal that it opens becomes its
    own."""
    if isinstance(reads, str) and reads:
        opens = (os.POSIX_SPAWN_OPEN, 0, reads, os.O_RDWR, 0)
        return opens, (os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)
    return (
        (os.POSIX_SPAWN_DUP2, reads, 0) if isinstance(reads, int) else _NULL,
        (os.POSIX_SPAWN_OPEN, 1, captures[0], _CAPTURE, 0o600),
        (os.POSIX_SPAWN_OPEN, 2, captures[1], _CAPTURE, 0o600),
    )


def _make_readable(captures: list[str]) -> None:
    """Create the output files before a umask applies that would keep even their owner from reading them."""
    for path in captures:
        os.close(os.open(path, _CAPTURE | os.O_CLOEXEC, 0o600))


def text(raw: bytes) -> str:
    """Bytes for people, cut to a sane length."""
    return raw[:200].decode("utf-8", "backslashreplace")


def find_program(program: bytes, environment: dict[bytes, bytes]) -> bytes:
    """The program, searched along PATH of the task's own environment."""
    if b"/" in program:
        if not os.path.lexists(program):
            raise CannotStart(NOT_FOUND, f"command not found: {text(program)}")
        return program
    found = b""
    for folder in environment.get(b"PATH", PATH_DEFAULT).split(b":"):
        path = (folder or b".") + b"/" + program
        if os.path.isfile(path):  # noqa: PTH113 -- pathlib costs the launcher a megabyte
            if os.access(path, os.X_OK):
                return path
            found = found or path
    if not found or not program:
        raise CannotStart(NOT_FOUND, f"command not found: {text(program)}")
    raise CannotStart(NOT_EXECUTABLE, f"cannot execute {text(found)}: Permission denied")


def _why(program: bytes, captures: list[str], error: OSError) -> str:
    if error.errno == errno.E2BIG:
        return f"{text(program)}: its arguments and environment are too long for this system"
    for path in captures:
        folder = os.path.dirname(path)  # noqa: PTH120 -- as above
        if not os.access(folder, os.W_OK | os.X_OK):
            return f"{text(program)}: its output cannot be written to {folder}"
    return f"{text(program)}: {error.strerror}"


class Capture:
    """One captured stream on disk, limited to its first and its last ``bytes_max`` / 2 bytes.

    The rest becomes a hole: the size goes on growing, so that offsets stay true. Where the file system has no holes,
    the file is cut back to its head whenever it is too large: then the head and the newest bytes are kept, at offsets
    that are no longer those of the stream.
    """

    __slots__ = ("access", "bytes_max", "path", "punched_to")

    def __init__(self, path: str, bytes_max: int, access: Access) -> None:
        self.path = path
        self.bytes_max = bytes_max
        self.access = access
        self.punched_to = 0

    def limit(self, holes: HolePuncher) -> int:
        """Free what is over the limit; returns the size in bytes (0 if there is no file)."""
        with self.access:
            return self._limit(holes)

    def _limit(self, holes: HolePuncher) -> int:
        try:
            status = os.stat(self.path)  # noqa: PTH116 -- pathlib costs the launcher a megabyte
        except OSError:
            return 0
        size = status.st_size
        if size <= self.bytes_max:
            if status.st_blocks * 512 > self._held_max:
                self._give_back(size)
            return size
        half = -(-self.bytes_max // 2 // BLOCK_BYTES) * BLOCK_BYTES
        if status.st_blocks * 512 > half + size - self.punched_to + SLACK_BYTES:
            self.punched_to = 0  # the holes are gone: the task has emptied its file and written it again
        start = max(half, self.punched_to)
        end = (size - half) // BLOCK_BYTES * BLOCK_BYTES
        if end <= start:
            return size
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:  # the task has taken away its own file, or the right to write to it
            return size
        try:
            if holes.punch(fd, start, end - start):
                self.punched_to = end
            else:
                os.ftruncate(fd, half)
                size = half
            status = os.fstat(fd)
            if status.st_blocks * 512 > self._held_max:
                os.ftruncate(fd, status.st_size)
        finally:
            os.close(fd)
        return size

    @property
    def _held_max(self) -> int:
        """Bytes that a file within its limit may occupy on the disk; file systems reserve up to as much again."""
        return 2 * self.bytes_max + SLACK_BYTES

    def _give_back(self, size: int) -> None:
        """Free what a task has reserved beyond the end of its file. What it writes meanwhile is lost."""
        try:
            os.truncate(self.path, size)
        except OSError:  # as above
            return

    def close(self, holes: HolePuncher) -> int:
        """Apply the limit for the last time, and remove the file if it is empty; returns its size in bytes."""
        size = self.limit(holes)
        if not size:
            try:
                with self.access:
                    os.unlink(self.path)  # noqa: PTH108 -- as above
            except OSError:  # not there, or replaced by the task
                return 0
        return min(size, SIZE_BYTES_MAX)


class HolePuncher:
    """fallocate(2), loaded when it is first needed (ctypes costs a megabyte)."""

    _PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01

    def __init__(self) -> None:
        self._fallocate: Any = None
        self._supported = True

    def punch_file(self, path: os.PathLike[str], offset: int, size_bytes: int) -> bool:
        """Punch a hole in the file at ``path``; False if this system cannot, or the file was replaced."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # nothing to drop
            return False
        try:
            return self.punch(fd, offset, size_bytes)
        finally:
            os.close(fd)

    def punch(self, fd: int, offset: int, size_bytes: int) -> bool:
        """Punch a hole; False if this system cannot."""
        if not self._supported:
            return False
        import ctypes  # noqa: PLC0415 -- see above

        if self._fallocate is None:
            function = ctypes.CDLL(None, use_errno=True).fallocate
            function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
            self._fallocate = function
        if self._fallocate(fd, self._PUNCH_HOLE_KEEP_SIZE, offset, size_bytes) == 0:
            return True
        number = ctypes.get_errno()
        if number in {errno.EOPNOTSUPP, errno.ENOSYS}:
            self._supported = False
            log_line("no holes in files here: output over its limit is cut back to its head")
            return False
        return number == errno.EINTR
