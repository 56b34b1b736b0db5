"""The fork server makes processes as another user: what a launcher that runs as root forks, and what that does until
it is a task. Used by such a launcher alone.

The child opens the files of the agent with the rights of the agent's user, makes the guest's world, drops every right, makes
sure of it, and only then looks at anything of its user's: the working directory, the program. Whatever fails on the way it says
through one pipe that all children share, and ends; the launcher never waits for a child, as a user's directory may hang.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import os
import select
import signal
import stat
import termios

from peerload.launcher.process import (
    NEVER_STARTED,
    NOT_EXECUTABLE,
    REASON_CHARS_MAX,
    SHORTAGES,
    SIGNALS_DEFAULT,
    CannotStart,
    SpawnRefused,
    find_program,
    raise_shortage,
    text,
)
from peerload.launcher.system import drop_privileges, sandbox
from peerload.launcher.system.write_as_user import Unwritable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from peerload.launcher.fs_credentials import AgentCredentials
    from peerload.launcher.protocol import SpawnRequest
    from peerload.launcher.system.accounts import LauncherAccount, UsersPolicy
    from peerload.launcher.system.syscalls import Syscalls

FAILED_BEFORE = 126
"""The exit code of a child that did not get as far as the command; its reason tells more."""
DESCRIPTORS_MAX = 1 << 16
"""The launcher has none beyond this number."""
WORDS_BYTES_MAX = 1024
"""What a child says is written at once, and never cut by another's words."""
_CAPTURE = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READ_BYTES = 1 << 16


class ChildReports:
    """What children say before they end without having been what they were to be: pid → exit code and reason."""

    def __init__(self, epoll: select.epoll) -> None:
        self._reading, self.writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reading, False)
        self._said: dict[int, tuple[int, str]] = {}
        self._rest = b""
        epoll.register(self._reading, select.EPOLLIN)
        self.fd = self._reading

    def say(self, exit_code: int, reason: str) -> None:
        """In a child."""
        words = reason.replace("\n", " ").encode("utf-8", "backslashreplace")[:WORDS_BYTES_MAX]
        os.write(self.writing, b"%d %d " % (os.getpid(), exit_code) + words + b"\n")

    def hear(self) -> None:
        """In the launcher: take in what was said."""
        while True:
            try:
                raw = os.read(self._reading, _READ_BYTES)
            except BlockingIOError:
                return
            *lines, self._rest = (self._rest + raw).split(b"\n")
            for line in lines:
                pid, code, reason = line.split(b" ", 2)
                self._said[int(pid)] = (int(code), reason.decode("utf-8", "backslashreplace")[:REASON_CHARS_MAX])

    def close(self) -> None:
        """There are no children any more."""
        os.close(self._reading)
        os.close(self.writing)

    def of(self, pid: int) -> tuple[int, str] | None:
        """What this child, which has ended, has said; None if nothing."""
        self.hear()
        return self._said.pop(pid, None)


class ForkServer:
    """Makes children; ``access``: the rights of the agent's user."""

    def __init__(self, kernel: Syscalls, access: AgentCredentials, words: ChildReports) -> None:
        self.kernel = kernel
        self.access = access
        self.words = words
        self._pid = os.getpid()

    def child(self, work: Callable[[], None], *, leads: bool = True, keeps: Sequence[int] = ()) -> int:
        """A process that does this work and ends; what it raises becomes its last words → its pid. ``leads``: in a session of
        its own; ``keeps``: the descriptors of ours that it needs. Raises OSError if there can be none."""
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                self._be_child(work, leads=leads, keeps=keeps)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return pid

    def _be_child(self, work: Callable[[], None], *, leads: bool, keeps: Sequence[int]) -> NoReturn:
        code, reason = 0, ""
        try:
            self._let_go(keeps)
            signal.set_wakeup_fd(-1)
            for number in SIGNALS_DEFAULT:
                if signal.getsignal(number) is not signal.SIG_DFL:
                    signal.signal(number, signal.SIG_DFL)
            if leads:
                os.setsid()
            work()
        except CannotStart as failure:
            code, reason = failure.exit_code, failure.reason
        except (SpawnRefused, Unwritable) as failure:
            code, reason = FAILED_BEFORE, str(failure)
        except BaseException as error:  # noqa: BLE001 -- it must never become a second launcher
            code, reason = FAILED_BEFORE, f"{type(error).__name__}: {error}"
            if isinstance(error, OSError) and error.errno in SHORTAGES:
                code, reason = NEVER_STARTED, SHORTAGES[error.errno]
        try:
            if reason:
                self.words.say(code, reason)
        finally:
            os._exit(code)

    def _let_go(self, keeps: Sequence[int]) -> None:
        """Of all that is the launcher's: who will be a user may be stopped by that user, and while it stood still, our lock would be
        taken, our guard would wait for us, and our agent would take us for alive."""
        after = 3
        for fd in sorted({self.words.writing, *keeps}):
            os.closerange(after, fd)
            after = max(after, fd + 1)
        os.closerange(after, DESCRIPTORS_MAX)

    def become(self, account: LauncherAccount) -> None:
        """In a child that does something else than a task, for a user: with that user's rights alone. Raises OSError,
        DropFailed."""
        drop_privileges.limit(account, drop_privileges.HELPER_PROCESSES_MAX)
        drop_privileges.drop(account, self.kernel)
        self.kernel.die_with_parent()  # it may hang in a directory of its user's
        if os.getppid() != self._pid:
            os._exit(FAILED_BEFORE)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def task(self, order: SpawnOrder) -> int:
        """The process of a task → its pid. Raises CannotStart, or OSError for what is in SHORTAGES."""
        try:
            keeps = (order.reads,) if isinstance(order.reads, int) else ()
            return self.child(lambda: self._be_task(order), keeps=keeps)
        except OSError as error:
            raise_shortage(error)
            raise CannotStart(NOT_EXECUTABLE, f"no process can be made: {error.strerror}") from None

    def _be_task(self, order: SpawnOrder) -> NoReturn:
        account, policy, kernel = order.account, order.policy, self.kernel
        os.umask(0)
        self._standard_files(order)
        os.umask(order.umask | (0o077 if account.is_guest else 0))
        drop_privileges.limit(account, policy.task_processes_max)
        if account.is_guest and not policy.guest_network:
            sandbox.leave_network(kernel)
        if order.world is not None:
            sandbox.enter(kernel, policy.guest_bytes_max, order.world, has_devices=order.has_devices)
        kernel.close_on_exec(3)
        os.chdir("/")
        drop_privileges.drop(account, kernel)
        if order.makes_scratch:
            os.mkdir(order.directory, 0o700)  # noqa: PTH102 -- pathlib costs the launcher a megabyte
        _enter(order.directory)
        program = find_program(order.argv[0], order.environment)
        if order.allowed is not None:
            program = _checked(program, order.allowed)
        if order.calls:
            kernel.filter_calls(order.calls)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            os.execve(program, order.argv, order.environment)  # noqa: S606 -- that is what it is for
        except OSError as error:
            raise_shortage(error)
            if error.errno == errno.E2BIG:
                why = "its arguments and environment are too long for this system"
                raise CannotStart(NOT_EXECUTABLE, f"cannot execute {text(order.argv[0])}: {why}") from None
            raise CannotStart(NOT_EXECUTABLE, f"cannot execute {text(order.argv[0])}: {error.strerror}") from None
        except (ValueError, TypeError) as error:  # a NUL, or a variable that is not bytes
            raise CannotStart(NOT_EXECUTABLE, f"cannot execute {text(order.argv[0])}: {error}") from None

    def _standard_files(self, order: SpawnOrder) -> None:
        """0, 1 and 2: a terminal, or what it reads and its two files."""
        if isinstance(order.reads, str) and order.reads:
            terminal = os.open(order.reads, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
            os.fchown(terminal, order.account.uid, -1)
            files = [terminal] * 3
        else:
            null = "/dev/null"
            reads = order.reads if isinstance(order.reads, int) else os.open(null, os.O_RDONLY | os.O_CLOEXEC)
            files = [reads, *(self._capture(path, order.account.gid) for path in order.captures)]
        for number, fd in enumerate(files):
            os.dup2(fd, number)

    def _capture(self, path: str, gid: int) -> int:
        """A file of the agent's that the task writes to, and may open again by its descriptor to write (``/dev/stdout``), but
        neither read nor change otherwise."""
        try:
            with self.access:
                fd = os.open(path, _CAPTURE, 0o600)
        except OSError as error:
            raise_shortage(error)
            folder = os.path.dirname(path)  # noqa: PTH120 -- pathlib costs the launcher a megabyte
            raise CannotStart(NOT_EXECUTABLE, f"its output cannot be written to {folder}: {error.strerror}") from None
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != self.access.uid or found.st_nlink != 1:
            raise CannotStart(NOT_EXECUTABLE, "its output cannot be written: its file is not the agent's own")
        os.set_blocking(fd, True)
        os.fchown(fd, -1, gid)
        os.fchmod(fd, 0o620)
        return fd


class SpawnOrder:
    """What one child is to be. ``account``: whom it runs as; ``reads``, ``captures``: as `spawn` takes them; ``world``: the
    further directories hidden from a guest, None: it sees the machine as it is; ``calls``: the filter of its system calls; ``allowed``: the
    programs that it may be, None: any."""

    __slots__ = (
        "account",
        "allowed",
        "argv",
        "calls",
        "captures",
        "directory",
        "environment",
        "has_devices",
        "makes_scratch",
        "policy",
        "reads",
        "umask",
        "world",
    )

    def __init__(self, account: LauncherAccount, policy: UsersPolicy, request: SpawnRequest) -> None:
        """Raises CannotStart."""
        self.account = account
        self.policy = policy
        self.argv = request.argv
        if request.environment is None:
            raise CannotStart(NOT_EXECUTABLE, f"cannot execute {text(self.argv[0])}: its environment cannot be read")
        self.environment = request.environment
        self.directory = request.directory
        self.umask = request.umask & 0o777
        self.captures = [request.stdout, request.stderr]
        self.reads: int | str = ""
        self.world: tuple[str, ...] | None = None
        self.calls = b""
        self.allowed: tuple[str, ...] | None = None
        self.has_devices = request.devices
        self.makes_scratch = False


def _enter(directory: bytes) -> None:
    try:
        os.chdir(directory)
    except (OSError, ValueError) as error:
        raise_shortage(error)
        why = error.strerror if isinstance(error, OSError) else error
        raise CannotStart(NOT_EXECUTABLE, f"cannot enter {text(directory)}: {why}") from None


def _checked(program: bytes, allowed: tuple[str, ...]) -> bytes:
    """The file itself, which is what is executed then: a link could be another one by that time. Raises NotAllowed."""
    path = os.fsdecode(os.path.realpath(program))
    if not any(fnmatch.fnmatchcase(path, pattern) for pattern in allowed):
        raise SpawnRefused(f"policy: {path} is none of the programs that tasks of other nodes may be here")
    return os.fsencode(path)
