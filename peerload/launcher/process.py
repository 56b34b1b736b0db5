"""The process of a task: `spawn` starts it, `LauncherStdin` feeds it from a file or a terminal, and `Capture` limits its output
on disk. A launcher that runs as root opens the agent's files with `AgentCredentials`. The imports are few.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import errno
import itertools
import os
import select
import signal
import sys
from typing import Any

from peerload.launcher import protocol
from peerload.launcher.containment import SIGNALS_DEFAULT
from peerload.launcher.record_log import log_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Collection, Sequence

    from peerload.launcher.cgroup_clone import CgroupClone
    from peerload.launcher.cgroup_limits import CgroupLimits
    from peerload.launcher.containment import Units
    from peerload.launcher.powercap import Reading


MPS_KEEPER = tuple(
    os.fsencode(word) for word in (sys.executable, "-I", "-S", os.path.join(os.path.dirname(__file__), "mps_keeper.py"))
)
"""Command of an MPS keeper, without its arguments: the path of the control program, the device and the owner."""


class OwnCredentials:
    """The launcher's own credentials, if it runs as the same user as its agent."""

    uid = -1
    """Value for chown that keeps the owner."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class AgentCredentials:
    """The credentials of the agent's user. While they are entered, every file that the agent names, even a link to a file
    of root, is opened as if the agent had opened it. Can be nested."""

    def __init__(self, uid: int, gid: int) -> None:
        self.uid = uid
        self.gid = gid
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            os.setegid(self.gid)
            os.seteuid(self.uid)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            os.seteuid(0)
            os.setegid(0)


Access = OwnCredentials | AgentCredentials
"""Files are accessed with these credentials while they are entered."""


PATH_DEFAULT = b"/usr/local/bin:/usr/bin:/bin"
NOT_FOUND = 127
NOT_EXECUTABLE = 126
NEVER_STARTED = -1
"""Reported by a child, instead of an exit code, if the node was short of a resource and the command never started."""
REASON_CHARS_MAX = 400
BLOCK_BYTES = 4096
SLACK_BYTES = 256 << 10
"""Bytes that a file system may allocate for a file beyond its data."""
SIZE_BYTES_MAX = 1 << 60
"""Largest size in an exit record; a task can enlarge its own file beyond that without data."""
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
"""Errors before exec that are the node's fault (the attempt never started), and their description for users."""


class CannotStart(Exception):
    """The process could not be started. exit_code: what a shell would show."""

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_code = exit_code
        self.reason = reason[:REASON_CHARS_MAX]


class SpawnRefused(Exception):
    """The policy of this node forbids the request."""


class RequestPending(Exception):
    """The request waits for an answer from outside the launcher. Nothing was done yet; it has to be carried out again."""


def spawn(
    request: protocol.SpawnRequest,
    reads: int | str = "",
    clone: CgroupClone | None = None,
    joins: Sequence[str] = (),
) -> int:
    """Start a process in a session of its own → its pid. reads: descriptor of its stdin; or path of the terminal
    that is its stdin, stdout and stderr; or "" for /dev/null. joins: the process enters these cgroups itself, before its command.

    clone: starts the process in its cgroup. `posix_spawn` is preferred to a fork, whose cost grows with the launcher. Raises
    CannotStart, or OSError with a number in SHORTAGES.
    """
    argv, environment, umask = request.argv, request.environment, request.umask
    captures = [request.stdout, request.stderr]
    enter_directory(request.directory)
    if environment is None:
        raise CannotStart(NOT_EXECUTABLE, f"cannot execute {text(argv[0])}: its environment cannot be read")
    before = os.umask(0)
    try:
        if umask & 0o600:
            _make_readable(captures)
        os.umask(umask)
        program = find_program(argv[0], environment)
        if joins or (clone is not None and not clone.can_spawn):
            return _fork_and_exec(os.fork if clone is None else clone.fork, program, request, environment, reads, joins)
        file_actions = _standard_files(captures, reads)
        if clone is not None:
            return clone.posix_spawn(program, argv, environment, file_actions)
        return os.posix_spawn(
            program,
            argv,
            environment,
            file_actions=file_actions,
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


def enter_directory(directory: bytes) -> None:
    """Change the working directory. Raises CannotStart, or OSError with a number in SHORTAGES."""
    try:
        os.chdir(directory)
    except (OSError, ValueError) as error:
        raise_shortage(error)
        why = error.strerror if isinstance(error, OSError) else error
        raise CannotStart(NOT_EXECUTABLE, f"cannot enter {text(directory)}: {why}") from None


def _fork_and_exec(
    fork: Callable[[], int],
    program: bytes,
    request: protocol.SpawnRequest,
    environment: dict[bytes, bytes],
    reads: int | str,
    joins: Sequence[str],
) -> int:
    """Fork a process and execute the program in it, as posix_spawn does; wait for exec → its pid. Raises OSError or ValueError if
    that fails.

    The child copies each page that it writes to, including those of the objects that Python uses. So as much as possible is done
    before the fork, and the rest calls few functions. The builtins of `signal` are called, since its own functions make an enum
    of each of 64 signals.
    """
    changed = list(itertools.compress(SIGNALS_DEFAULT, map(_signal.getsignal, SIGNALS_DEFAULT)))  # SIG_DFL is 0
    terminal = reads if isinstance(reads, str) else ""
    argv, files = request.argv, list[int]()
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        blocked = _signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_DEFAULT)
        try:
            if not terminal:
                files = _opened(request, reads)
            pid = fork()
            if pid == 0:
                try:
                    if joins:
                        join(joins)
                    for number in changed:
                        _signal.signal(number, _signal.SIG_DFL)
                    os.setsid()
                    if terminal:  # it becomes the controlling terminal
                        files = [os.open(terminal, os.O_RDWR)] * 3
                    os.dup2(files[0], 0)
                    os.dup2(files[1], 1)
                    os.dup2(files[2], 2)
                    _signal.pthread_sigmask(signal.SIG_SETMASK, ())
                    os.execve(program, argv, environment)  # noqa: S606 -- that is what it is for
                except BaseException as error:  # noqa: BLE001 -- it must never become a second launcher
                    number = (error.errno or 0) if isinstance(error, OSError) else 0
                    os.write(writing, b"%d %s" % (number, str(error).encode(errors="replace")[:REASON_CHARS_MAX]))
                finally:
                    os._exit(NOT_EXECUTABLE)
        finally:
            os.close(writing)
            _signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        raw = os.read(reading, 2 * REASON_CHARS_MAX)  # exec closes the pipe
    finally:
        os.close(reading)
        _close(files, reads)
    if raw:
        os.waitpid(pid, 0)
        code, _, why = raw.partition(b" ")
        raise OSError(int(code), os.strerror(int(code))) if int(code) else ValueError(text(why))
    return pid


def _opened(request: protocol.SpawnRequest, reads: int | str) -> list[int]:
    """The standard files of a task without a terminal. Raises OSError."""
    files = [reads if isinstance(reads, int) else os.open("/dev/null", os.O_RDONLY)]
    try:
        for path in (request.stdout, request.stderr):
            files.append(os.open(path, _CAPTURE, 0o600))  # noqa: PERF401 -- those opened so far are closed
    except OSError:
        _close(files, reads)
        raise
    return files


def _close(files: Sequence[int], reads: int | str) -> None:
    for fd in files:
        if fd != reads:  # the caller closes it
            os.close(fd)


def join(entrances: Sequence[str]) -> None:
    """Enter cgroups by writing to these files. Raises OSError."""
    for path in entrances:
        entrance = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        os.write(entrance, b"0")
        os.close(entrance)


def raise_shortage(error: Exception) -> None:
    """Raise the error again if it is due to a shortage on this node; return if the task caused it."""
    if isinstance(error, OSError) and error.errno in SHORTAGES:
        raise error


def _standard_files(captures: list[str], reads: int | str) -> tuple[tuple[int, ...] | tuple[object, ...], ...]:
    """The file actions for descriptors 0, 1 and 2. They happen after setsid, so that an opened terminal becomes the
    controlling one."""
    if isinstance(reads, str) and reads:
        opens = (os.POSIX_SPAWN_OPEN, 0, reads, os.O_RDWR, 0)
        return opens, (os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)
    return (
        (os.POSIX_SPAWN_DUP2, reads, 0) if isinstance(reads, int) else _NULL,
        (os.POSIX_SPAWN_OPEN, 1, captures[0], _CAPTURE, 0o600),
        (os.POSIX_SPAWN_OPEN, 2, captures[1], _CAPTURE, 0o600),
    )


def _make_readable(captures: list[str]) -> None:
    """Create the output files before the task's umask applies, which may deny reading even to their owner."""
    for path in captures:
        os.close(os.open(path, _CAPTURE | os.O_CLOEXEC, 0o600))


def text(raw: bytes) -> str:
    """Bytes as readable text of limited length."""
    return raw[:200].decode("utf-8", "backslashreplace")


def find_program(program: bytes, environment: dict[bytes, bytes]) -> bytes:
    """The program, searched in PATH of the task's own environment."""
    if b"/" in program:
        if not os.path.lexists(program):
            raise CannotStart(NOT_FOUND, f"command not found: {text(program)}")
        return program
    found = b""
    for folder in environment.get(b"PATH", PATH_DEFAULT).split(b":"):
        path = (folder or b".") + b"/" + program
        if os.path.isfile(path):
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
        folder = os.path.dirname(path)
        if not os.access(folder, os.W_OK | os.X_OK):
            return f"{text(program)}: its output cannot be written to {folder}"
    return f"{text(program)}: {error.strerror}"


class SingleUser:
    """The users of a launcher: only the one that it runs as. `MultiUserService` overrides this for all users of a machine.

    sockets: directory of the launcher's socket. access: credentials for the agent's files. unenforced: sentences about
    what cannot be enforced. cores: limits the CPU share of each task, as far as possible.
    """

    serves_all = False
    unenforced: tuple[str, ...] = ()
    enforces_cores = False
    access: Access = OwnCredentials()

    def __init__(self, directory: str, *, cores: bool = False) -> None:
        self.directory = self.sockets = directory
        self._wants_cores = cores
        self._limits: CgroupLimits | None = None

    def open(
        self,
        epoll: select.epoll,  # noqa: ARG002 -- for all users
        events: list[protocol.LauncherEvent],  # noqa: ARG002
        units: Units,
        root_name: str,
        own_children: set[int],  # noqa: ARG002
        kept: Collection[str],  # noqa: ARG002
    ) -> None:
        """Begin. events: collects the events for the agent. root_name: name of the root cgroups of the units. own_children:
        pids of children that are not tasks; kept up to date. kept: ended attempts that the agent has not forgotten."""
        if self._wants_cores:
            from peerload.launcher.cgroup_limits import CPU, CgroupLimits  # noqa: PLC0415 -- only where it is wanted

            self._limits = CgroupLimits(self.directory, units, root_name, (CPU,))
            self.unenforced, self.enforces_cores = self._limits.unenforced, self._limits.enforces_cores

    def close(self) -> None:
        """Clean up, when no task is left."""
        if self._limits is not None:
            self._limits.remove()

    def admits(self, connection: socket.socket) -> bool:  # noqa: ARG002
        """True if the agent is at the other end; here, any process that may enter the directory counts as the agent."""
        return True

    def deferring(self, carry_out: Callable[[protocol.Request], None]) -> Callable[[protocol.Request], None]:
        """Wrap ``carry_out`` so that requests that have to wait for the account database are carried out later."""
        return carry_out

    def carry_out(self, request: protocol.UserRequest) -> None:  # noqa: ARG002
        """Carry out a request as a user. Raises LauncherProtocolError."""
        raise protocol.LauncherProtocolError("this launcher serves one user")

    def admit(self, request: protocol.SpawnRequest) -> protocol.SpawnRequest:
        """Decide which account a task runs as → the request with that account's limits. Raises SpawnRefused."""
        return request

    def check_inside(self, key: str, inside: str) -> None:
        """Raises SpawnRefused unless the attempt ``key`` may run inside of the attempt ``inside``."""

    def spawn(
        self, request: protocol.SpawnRequest, reads: int | str, clone: CgroupClone | None, joins: Sequence[str]
    ) -> int:
        """Start the process of an admitted task, see `spawn` → its pid. Raises CannotStart, or OSError with a number in SHORTAGES."""
        if self._limits is None or request.inside:
            return spawn(request, reads, clone, joins)
        try:
            self._limits.enter(request.key, 0, request.cpus, request.cpus_max)
            return spawn(request, reads, clone)
        finally:
            self._limits.leave()

    def failure_of(self, pid: int) -> tuple[int, str] | None:
        """Exit code and reason of a process that ended before it executed its command; None if it did execute it."""

    def release(self, key: str) -> None:
        if self._limits is not None:
            self._limits.close(key)

    def forget(self, key: str) -> None:
        """Release the directory of an attempt with files; the agent no longer needs it."""

    def counters(self) -> list[Reading]:
        """The energy counters that only root may read."""
        return []

    def ready(self, masks: dict[int, int]) -> None:
        """Handle events of children that epoll reported, and timers that are due."""

    def due_at_s(self) -> list[float]:
        """Time by the monotonic clock at which `ready` has something to do."""
        return []


class Capture:
    """Captured stream on disk, limited to its first and last ``bytes_max`` / 2 bytes.

    The middle becomes a hole: the file size keeps growing, so that offsets stay true. Where the file system has no holes,
    the file is cut back to its head whenever it is too large. Then the head and the newest bytes are kept, and offsets in
    the file are no longer those of the stream. A deleted file keeps the size that was seen last, so that the agent reports
    the missing output.
    """

    __slots__ = ("access", "bytes_max", "path", "punched_to", "seen_bytes")

    def __init__(self, path: str, bytes_max: int, access: Access) -> None:
        self.path = path
        self.bytes_max = bytes_max
        self.access = access
        self.punched_to = 0
        self.seen_bytes = 0

    def limit(self, holes: HolePuncher) -> int:
        """Free the bytes over the limit → the size (the last known one if the file is gone)."""
        with self.access:
            return self._limit(holes)

    def _limit(self, holes: HolePuncher) -> int:
        try:
            status = os.stat(self.path)
        except OSError:
            return self.seen_bytes
        size = self.seen_bytes = status.st_size
        if size <= self.bytes_max:
            if status.st_blocks * 512 > self._held_max:
                self._give_back(size)
            return size
        half = -(-self.bytes_max // 2 // BLOCK_BYTES) * BLOCK_BYTES
        if status.st_blocks * 512 > half + size - self.punched_to + SLACK_BYTES:
            self.punched_to = 0  # no holes left: the task has truncated and rewritten its file
        start = max(half, self.punched_to)
        end = (size - half) // BLOCK_BYTES * BLOCK_BYTES
        if end <= start:
            return size
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:  # the task has removed its own file, or the write permission
            return size
        try:
            is_cut = self._cut(fd, holes, range(start, end), half)
        except OSError as error:  # a full disk or quota, or a failing disk: tried again later
            log_line(f"output of a task cannot be limited: path={self.path} error={error.strerror}")
            return size
        finally:
            os.close(fd)
        return half if is_cut else size

    def _cut(self, fd: int, holes: HolePuncher, middle: range, head_bytes: int) -> bool:
        """Punch a hole in the middle of the file; where there are no holes, cut it back to its head → True if that was done.
        Raises OSError."""
        is_punched = holes.punch(fd, middle.start, len(middle))
        if is_punched:
            self.punched_to = middle.stop
        is_cut = not is_punched and not holes.is_supported
        if is_cut:
            os.ftruncate(fd, head_bytes)
        status = os.fstat(fd)
        if status.st_blocks * 512 > self._held_max:
            os.ftruncate(fd, status.st_size)
        return is_cut

    @property
    def _held_max(self) -> int:
        """Bytes that a file within its limit may occupy on disk; file systems may reserve up to twice its size."""
        return 2 * self.bytes_max + SLACK_BYTES

    def _give_back(self, size: int) -> None:
        """Free the disk space that a task has reserved beyond the end of its file. Data that it writes meanwhile is lost."""
        try:
            os.truncate(self.path, size)
        except OSError:  # as above
            return

    def close(self, holes: HolePuncher) -> int:
        """Apply the limit for the last time, and remove the file if it is empty → its size in bytes."""
        with self.access:
            size = self._limit(holes)
            if size:
                return min(size, SIZE_BYTES_MAX)
            try:
                os.unlink(self.path)
            except OSError:  # not there, or replaced by the task
                return 0
            return 0


class HolePuncher:
    """fallocate(2), loaded at its first use (ctypes takes a megabyte of memory)."""

    _PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01

    def __init__(self) -> None:
        self._fallocate: Any = None
        self.is_supported = True

    def punch_file(self, path: os.PathLike[str], offset: int, size_bytes: int) -> bool:
        """Punch a hole in the file at ``path``; False if this system cannot, or the file was replaced."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # no file, nothing to free
            return False
        try:
            return self.punch(fd, offset, size_bytes)
        finally:
            os.close(fd)

    def punch(self, fd: int, offset: int, size_bytes: int) -> bool:
        """Punch a hole. → False if this system cannot do so (``is_supported``), or not now."""
        if not self.is_supported:
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
            self.is_supported = False
            log_line("no holes in files here: output over its limit is cut back to its head")
            return False
        return number == errno.EINTR


TERMINAL_READ_BYTES = 64 << 10
TURN_BYTES_MAX = 1 << 20
"""Bytes copied from one terminal before others get their turn."""
DRAIN_BYTES_MAX = 4 << 20
"""Bytes copied from the terminal of an ended task."""
SIDE_MAX = 65_535
"""Maximum number of rows and columns that the system supports."""
TERMINAL_DESCRIPTORS = 4
"""Open descriptors for each terminal: the master, its copy for the input, the slave, and the file."""


class PseudoTerminal:
    """A pseudo-terminal. file: where its output goes; lost_bytes: output that could not be written there."""

    __slots__ = ("file", "key", "lost_bytes", "master", "slave")

    def __init__(self, key: str, path: str) -> None:
        self.key = key
        self.lost_bytes = 0
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self.master, self.slave = os.openpty()
        except OSError:
            os.close(self.file)
            raise
        os.set_blocking(self.master, False)

    def resize(self, rows: int, columns: int) -> None:
        """Set the window size; its foreground processes get SIGWINCH if it has changed."""
        import fcntl  # noqa: PLC0415 -- few tasks have a terminal
        import struct  # noqa: PLC0415 -- as above
        import termios  # noqa: PLC0415 -- as above

        if 0 < rows <= SIDE_MAX and 0 < columns <= SIDE_MAX:
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def copy(self, bytes_max: int) -> bool:
        """Copy output to the file. → True if there may be more later."""
        while bytes_max > 0:
            try:
                data = os.read(self.master, TERMINAL_READ_BYTES)
            except BlockingIOError:
                return True
            except OSError as error:
                log_line(f"terminal of a task failed: key={self.key} error={error.strerror}")
                return False
            if not data:
                return False
            bytes_max -= len(data)
            try:
                while data:
                    data = data[os.write(self.file, data) :]
            except OSError as error:
                self.lost_bytes += len(data)
                log_line(f"output of a task is lost: key={self.key} bytes={len(data)} error={error.strerror}")
        return True

    def close(self) -> None:
        """Close it, which sends a hang-up to processes that still have it open."""
        os.close(self.slave)
        os.close(self.master)
        os.close(self.file)


class PseudoTerminals:
    """All terminals, by the key of their task. The output of a task to its terminal goes into the file of its stdout.

    The launcher holds the master. The task opens the slave as the leader of its session, so that it becomes the
    controlling terminal: Ctrl-C is a signal for its foreground processes. stdout and stderr are the same. The launcher keeps
    the slave open, too: a task may close all its descriptors for a while, and open its terminal again.
    """

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._by_key: dict[str, PseudoTerminal] = {}
        self._by_master: dict[int, PseudoTerminal] = {}
        self._lost_bytes: dict[str, int] = {}
        """Lost bytes of the output of tasks whose terminal is closed already, by key."""

    @property
    def descriptors(self) -> int:
        return TERMINAL_DESCRIPTORS * len(self._by_key)

    def open(self, key: str, path: str, rows: int, columns: int) -> PseudoTerminal:
        """Open a terminal for a task that is about to start. Raises OSError."""
        terminal = PseudoTerminal(key, path)
        terminal.resize(rows, columns)
        self._by_key[key] = self._by_master[terminal.master] = terminal
        self._epoll.register(terminal.master, select.EPOLLIN)
        return terminal

    def resize(self, key: str, rows: int, columns: int) -> None:
        terminal = self._by_key.get(key)
        if terminal is not None:
            terminal.resize(rows, columns)

    def ready(self, masks: dict[int, int]) -> None:
        """Copy the output that epoll reported."""
        for master in masks.keys() & self._by_master.keys() if self._by_master else ():
            terminal = self._by_master[master]
            if not terminal.copy(TURN_BYTES_MAX):
                self._drop(terminal)

    def close(self, key: str) -> int:
        """Copy the remaining output, and close the terminal of an ended task → bytes of its output that are lost."""
        terminal = self._by_key.get(key)
        if terminal is not None:
            terminal.copy(DRAIN_BYTES_MAX)
            self._drop(terminal)
        return self._lost_bytes.pop(key, 0)

    def _drop(self, terminal: PseudoTerminal) -> None:
        if terminal.lost_bytes:
            self._lost_bytes[terminal.key] = terminal.lost_bytes
        del self._by_key[terminal.key], self._by_master[terminal.master]
        self._epoll.unregister(terminal.master)
        terminal.close()


READ_BYTES = 256 << 10
"""Bytes copied for one input before others get their turn."""
REPORT_BYTES = 256 << 10
"""The agent gets a report each time this many more bytes were read, and when all were."""
PIPE_BYTES = 256 << 10
"""Capacity of a pipe, where the system allows it."""
NO_KEY = b"\0"
CONTROL_D = b"\x04"
"""Default end-of-input character of a terminal."""
DESCRIPTORS = 2
"""Open descriptors for each input: its file, and the pipe or terminal."""


class StdinFeed:
    """Feed of a standard input. fed: bytes copied from the file; size: bytes in it; sink: descriptor that they are
    written to."""

    __slots__ = (
        "ended", "fed", "file", "has_ended", "is_polled", "is_terminal", "key", "last", "reported", "sink", "size",
    )  # fmt: skip

    def __init__(self, key: str, path: str, sink: int, *, is_terminal: bool) -> None:
        self.key = key
        self.sink = sink
        self.is_terminal = is_terminal
        self.fed = self.size = 0
        self.reported = -1
        self.last = b""
        self.ended = 0
        self.has_ended = False
        self.is_polled = False
        self.file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def read(self) -> bytes:
        """The next bytes for the task; empty if there are none now, even if the file is still shorter than reported."""
        return os.pread(self.file, min(READ_BYTES, self.size - self.fed), self.fed) if self.size > self.fed else b""

    def end(self) -> None:
        """Type the end-of-input character into the terminal; twice after an unfinished line, since the first only submits
        that line. Called again if the terminal was full (BlockingIOError). Raises OSError."""
        import termios  # noqa: PLC0415 -- few tasks have a terminal

        try:
            input_modes, _, _, local_modes, _, _, letters = termios.tcgetattr(self.sink)
        except termios.error as error:
            raise OSError(*error.args) from None
        key = letters[termios.VEOF] if letters[termios.VEOF] != NO_KEY else CONTROL_D
        finishes = {b"", b"\n", key, *(letters[which] for which in (termios.VEOL, termios.VEOL2))} - {NO_KEY}
        if input_modes & termios.ICRNL:
            finishes.add(b"\r")
        times = 2 if local_modes & termios.ICANON and self.last not in finishes else 1
        while self.ended < times:
            self.ended += os.write(self.sink, key)


def _enlarge(pipe: int) -> None:
    import fcntl  # noqa: PLC0415 -- the launcher has it loaded already; others that read this module need not

    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except OSError:  # the number of large pipes of a user is limited
        return


class LauncherStdin:
    """Standard input of all tasks: nothing, a pipe that is fed from a file, or a terminal. ``events`` collects the events for
    the agent; ``access``: credentials for the agent's files.

    The file of an input grows while the agent writes to it. The agent reports its size, and whether it is complete
    (`StdinRequest`). Data is copied as fast as the task reads it, and no further: the launcher never
    waits for a reader. The task sees the end of its input only if the agent has reported it.
    """

    def __init__(self, epoll: select.epoll, events: list[protocol.LauncherEvent], access: Access) -> None:
        self._epoll = epoll
        self._events = events
        self._access = access
        self._terminals = PseudoTerminals(epoll)
        self._to_close: dict[str, int] = {}
        self._by_key: dict[str, StdinFeed] = {}
        self._by_sink: dict[int, StdinFeed] = {}
        self._closed: dict[str, int] = {}

    @property
    def descriptors(self) -> int:
        return DESCRIPTORS * len(self._by_key) + self._terminals.descriptors

    def open(self, request: protocol.SpawnRequest) -> int | str:
        """Open the stdin of a task → the value for `spawn`. Output to a terminal goes to the file of its stdout.
        Raises CannotStart, or OSError with a number in SHORTAGES."""
        with self._access:
            return self._open(request)

    def _open(self, request: protocol.SpawnRequest) -> int | str:
        key, source, window = request.key, request.input, request.terminal
        try:
            if window:
                terminal = self._terminals.open(key, request.stdout, *window)
                if source:
                    self._feed(key, source, os.dup(terminal.master), is_terminal=True)
                return os.ttyname(terminal.slave)
            if not source:
                return ""
            reading = self._to_close[key] = self._open_pipe(key, source)
        except OSError as error:
            raise_shortage(error)
            what = "terminal" if window else "pipe for its input"
            raise CannotStart(NOT_EXECUTABLE, f"cannot make a {what}: {error.strerror}") from None
        return reading

    def _open_pipe(self, key: str, path: str) -> int:
        """Open a pipe that is fed from this file → the read end for the task. Raises OSError."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            os.set_blocking(writing, False)
            _enlarge(writing)
            self._feed(key, path, writing, is_terminal=False)
        except OSError:
            os.close(reading)
            raise
        return reading

    def _feed(self, key: str, path: str, sink: int, *, is_terminal: bool) -> None:
        """Feed a non-blocking descriptor from a file. The descriptor is closed with the feed, or on failure. Raises OSError."""
        try:
            feed = StdinFeed(key, path, sink, is_terminal=is_terminal)
        except OSError:
            os.close(sink)
            raise
        self._by_key[key] = self._by_sink[sink] = feed
        self._epoll.register(sink, 0)  # errors and hang-ups are always reported

    def started(self, key: str) -> None:
        """Close the launcher's copies of the started process's descriptors, so that their end is noticed."""
        reading = self._to_close.pop(key, None)
        if reading is not None:
            os.close(reading)

    def grown(self, request: protocol.StdinRequest) -> None:
        """Feed more, and report the offset to the agent."""
        key = request.key
        feed = self._by_key.get(key)
        if feed is None:
            if key in self._closed:
                self._events.append(protocol.StdinFed(key, self._closed[key], is_closed=True))
            return
        feed.size = max(feed.size, request.size)
        feed.has_ended = feed.has_ended or request.ends
        feed.reported = -1
        self._pump(feed)

    def resize(self, request: protocol.ResizeRequest) -> None:
        self._terminals.resize(request.key, request.rows, request.columns)

    def ready(self, masks: dict[int, int]) -> None:
        """Handle epoll events: a terminal or pipe can take data, or its task has closed it."""
        self._terminals.ready(masks)
        for sink in masks.keys() & self._by_sink.keys() if self._by_sink else ():
            feed = self._by_sink[sink]
            if masks[sink] & (select.EPOLLERR | select.EPOLLHUP):
                self._close(feed)
            else:
                self._pump(feed)

    def leader_ended(self, key: str) -> None:
        """Close the input of a task whose leader has ended."""
        feed = self._by_key.get(key)
        if feed is not None:
            self._close(feed)

    def close(self, key: str) -> int:
        """Close everything of a task that has ended or was never started → lost bytes of its terminal output."""
        self.started(key)
        self.leader_ended(key)
        self._closed.pop(key, None)
        return self._terminals.close(key)

    def _pump(self, feed: StdinFeed) -> None:
        """Copy the available bytes; poll the sink if it is full."""
        left = TURN_BYTES_MAX
        try:
            while left > 0 and (data := feed.read()):
                count = os.write(feed.sink, data)
                feed.fed += count
                feed.last = data[count - 1 : count]
                left -= count
            is_full = left <= 0
            if feed.fed == feed.size and feed.has_ended:
                if feed.is_terminal:
                    feed.end()
                self._close(feed)
                return
        except BlockingIOError:
            is_full = True
        except OSError as error:
            if not isinstance(error, BrokenPipeError) and not feed.is_terminal:
                log_line(f"stdin of a task failed: key={feed.key} error={error}")
            self._close(feed)
            return
        if is_full != feed.is_polled:
            feed.is_polled = is_full
            self._epoll.modify(feed.sink, select.EPOLLOUT if is_full else 0)
        if (
            feed.reported < 0
            or feed.fed - feed.reported >= REPORT_BYTES
            or (feed.fed == feed.size and feed.fed != feed.reported)
        ):
            self._report(feed)

    def _report(self, feed: StdinFeed, *, is_closed: bool = False) -> None:
        feed.reported = feed.fed
        self._events.append(protocol.StdinFed(feed.key, feed.fed, is_closed))

    def _close(self, feed: StdinFeed) -> None:
        del self._by_key[feed.key], self._by_sink[feed.sink]
        self._epoll.unregister(feed.sink)
        os.close(feed.sink)
        os.close(feed.file)
        self._closed[feed.key] = feed.fed
        self._report(feed, is_closed=True)
