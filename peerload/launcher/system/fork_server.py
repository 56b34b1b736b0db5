"""The fork server makes processes that run as another user, for a launcher that runs as root. Used by such a launcher
alone.

The child opens the agent's files with the credentials of the agent's user, makes the sandbox of a guest, drops all
privileges, verifies that, and only then accesses files of its user: the working directory, the program. It reports
failures through one pipe that all children share. The launcher never waits for a child, since a user's directory may
hang. `UserHelpers` are children that do a small job as one user: they check directories and files, write output, and
remove the files that a task has left.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import os
import select
import signal
import socket
import stat
import sys
import termios
import time

from peerload.launcher.containment import SIGNALS_DEFAULT
from peerload.launcher.process import (
    NEVER_STARTED,
    NOT_EXECUTABLE,
    PATH_DEFAULT,
    REASON_CHARS_MAX,
    SHORTAGES,
    CannotStart,
    SpawnRefused,
    enter_directory,
    find_program,
    join,
    raise_shortage,
    text,
)
from peerload.launcher.protocol import Message, UserReply
from peerload.launcher.record_log import log_line
from peerload.launcher.system import sandbox, write_as_user
from peerload.launcher.system.write_as_user import Unwritable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from peerload.launcher.process import AgentCredentials
    from peerload.launcher.protocol import FileAppend, LauncherEvent, SpawnRequest
    from peerload.launcher.system.accounts import LauncherAccount, UsersPolicy
    from peerload.launcher.system.sandbox import Syscalls


FAILED_BEFORE = 126
"""Exit code of a child that failed before the command; its report has the reason."""
DESCRIPTORS_MAX = 1 << 16
REASON_BYTES_MAX = 1024
"""Limit of a report: short enough for one atomic write to the pipe."""
_CAPTURE = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READ_BYTES = 1 << 16


class ChildReports:
    """Failures that children report before they end."""

    def __init__(self, epoll: select.epoll) -> None:
        self._reading, self.writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reading, False)
        self._failures: dict[int, tuple[int, str]] = {}
        self._rest = b""
        epoll.register(self._reading, select.EPOLLIN)
        self.fd = self._reading

    def report(self, exit_code: int, reason: str) -> None:
        """Report a failure. Called in a child."""
        text = reason.replace("\n", " ").encode("utf-8", "backslashreplace")[:REASON_BYTES_MAX]
        os.write(self.writing, b"%d %d " % (os.getpid(), exit_code) + text + b"\n")

    def read(self) -> None:
        """Read reports. Called in the launcher."""
        while True:
            try:
                raw = os.read(self._reading, _READ_BYTES)
            except BlockingIOError:
                return
            *lines, self._rest = (self._rest + raw).split(b"\n")
            for line in lines:
                pid, code, reason = line.split(b" ", 2)
                self._failures[int(pid)] = (int(code), reason.decode("utf-8", "backslashreplace")[:REASON_CHARS_MAX])

    def close(self) -> None:
        """Close the pipe, after the end of all children."""
        os.close(self._reading)
        os.close(self.writing)

    def failure_of(self, pid: int) -> tuple[int, str] | None:
        """The failure that this ended child has reported; None if there is none."""
        self.read()
        return self._failures.pop(pid, None)


class ForkServer:
    """Forks children. access: credentials of the agent's user."""

    def __init__(self, kernel: Syscalls, access: AgentCredentials, reports: ChildReports) -> None:
        self.kernel = kernel
        self.access = access
        self.reports = reports
        self._pid = os.getpid()

    def fork(self, work: Callable[[], None], *, leads: bool = True, keeps: Sequence[int] = ()) -> int:
        """Fork a process that does this work and ends → its pid. It reports exceptions of the work. leads: in a session
        of its own. keeps: descriptors that it needs. Raises OSError if it cannot be made."""
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                self._run_child(work, leads=leads, keeps=keeps)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return pid

    def _run_child(self, work: Callable[[], None], *, leads: bool, keeps: Sequence[int]) -> NoReturn:
        code, reason = 0, ""
        try:
            self._close_inherited(keeps)
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
                self.reports.report(code, reason)
        finally:
            os._exit(code)

    def _close_inherited(self, keeps: Sequence[int]) -> None:
        """Close the launcher's descriptors. The user may stop this process: with open copies, the launcher's lock would
        seem taken, its watchdog would wait, and its agent would consider it alive."""
        after = 3
        for fd in sorted({self.reports.writing, *keeps}):
            os.closerange(after, fd)
            after = max(after, fd + 1)
        os.closerange(after, DESCRIPTORS_MAX)

    def become(self, account: LauncherAccount) -> None:
        """Drop all privileges in a helper that acts for a user. Raises OSError, DropFailed."""
        sandbox.limit(account, sandbox.HELPER_PROCESSES_MAX)
        sandbox.drop(account, self.kernel)
        self.kernel.die_with_parent()  # it may hang in a directory of its user
        if os.getppid() != self._pid:
            os._exit(FAILED_BEFORE)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def spawn(self, order: SpawnOrder) -> int:
        """Start the process of a task → its pid. Raises CannotStart, or OSError with a number in SHORTAGES."""
        try:
            keeps = (order.reads,) if isinstance(order.reads, int) else ()
            return self.fork(lambda: self._exec_task(order), keeps=keeps)
        except OSError as error:
            raise_shortage(error)
            raise CannotStart(NOT_EXECUTABLE, f"cannot make a process: {error.strerror}") from None

    def _exec_task(self, order: SpawnOrder) -> NoReturn:
        account, policy, kernel = order.account, order.policy, self.kernel
        join(order.joins)
        os.umask(0)
        self._standard_files(order)
        os.umask(order.umask | (0o077 if account.is_guest else 0))
        sandbox.limit(account, policy.task_processes_max)
        if account.is_guest and not policy.guest_network:
            sandbox.isolate_network(kernel)
        if order.hidden is not None:
            devices = order.has_devices
            sandbox.enter(kernel, policy.guest_bytes_max, order.hidden, has_devices=devices, staged=order.staged)
        kernel.close_on_exec(3)
        os.chdir("/")
        sandbox.drop(account, kernel)
        if order.makes_scratch:
            os.mkdir(order.directory, 0o700)
        enter_directory(order.directory)
        program = find_program(order.argv[0], order.environment)
        if order.allowed is not None:
            program = _checked(program, order.allowed)
        if order.seccomp:
            kernel.install_seccomp(order.seccomp)
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
        """Open descriptors 0, 1 and 2: a terminal, or its stdin and two files."""
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
        """Open a file of the agent that the task writes to. The task may open it again for writing (``/dev/stdout``), but
        can neither read nor change it otherwise."""
        try:
            with self.access:
                fd = os.open(path, _CAPTURE, 0o600)
        except OSError as error:
            raise_shortage(error)
            folder = os.path.dirname(path)
            raise CannotStart(NOT_EXECUTABLE, f"its output cannot be written to {folder}: {error.strerror}") from None
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != self.access.uid or found.st_nlink != 1:
            raise CannotStart(NOT_EXECUTABLE, "its output cannot be written: its file is not the agent's own")
        os.set_blocking(fd, True)
        os.fchown(fd, -1, gid)
        os.fchmod(fd, 0o620)
        return fd


class SpawnOrder:
    """The description of one child. reads, joins: see `spawn`. hidden: further directories hidden from a guest, None:
    no sandbox. seccomp: its filter program. allowed: patterns of the programs that may run, None: any. staged: the scratch
    directory with its files, to be mounted in the sandbox."""

    __slots__ = (
        "account", "allowed", "argv", "captures", "directory", "environment", "has_devices", "hidden", "joins",
        "makes_scratch", "policy", "reads", "seccomp", "staged", "umask",
    )  # fmt: skip

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
        self.joins: Sequence[str] = ()
        self.hidden: tuple[str, ...] | None = None
        self.seccomp = b""
        self.allowed: tuple[str, ...] | None = None
        self.has_devices = request.devices
        self.makes_scratch = False
        self.staged = ""


def _checked(program: bytes, allowed: tuple[str, ...]) -> bytes:
    """The resolved path of the program. It is executed instead of ``program``, since a link could change. Raises SpawnRefused."""
    path = os.fsdecode(os.path.realpath(program))
    if not any(fnmatch.fnmatchcase(path, pattern) for pattern in allowed):
        raise SpawnRefused(f"policy: tasks of other nodes may not run {path} here")
    return os.fsencode(path)


AT_A_TIME_MAX = 64
OF_A_USER_MAX = 8
"""Maximum number of helpers for one user, or for all users of another node: hanging directories delay no other user."""
LOOK_S_MAX = 30.0
"""Timeout of a check: the user's directory may hang, or the user may have stopped the helper."""
SECONDS_MAX = 300.0
"""Timeout of helpers that write or remove files, after which they are killed."""
FILES_S_MAX = 21_600.0
"""Timeout of a job with the files of a task; the agent ends it earlier if it makes no progress."""
KILL_AGAIN_S = 60.0
"""Pause before a helper that hangs in the kernel is killed again."""
FILES_MAX = 4
PARTS_MAX = 1024
_NOT_THERE = "the directory does not exist here, or the user may not enter it"


class HelperRequest(Message):
    """The origin of a job. number: of the agent's request, 0 = the launcher's own job. quota_key: a user of this node, or
    another node; never a guest's uid, which is different each time."""

    number: int
    quota_key: str


OWN = HelperRequest(0, "")


class UserHelper:
    """A running helper. until_s: time at which it is killed, after ``seconds_max``."""

    __slots__ = ("done", "is_overdue", "origin", "pid", "seconds_max", "uid", "until_s")

    def __init__(self, origin: HelperRequest, pid: int, uid: int, done: Callable[[], None], seconds_max: float) -> None:
        self.origin = origin
        self.pid = pid
        self.uid = uid
        self.done = done
        self.is_overdue = False
        self.seconds_max = seconds_max
        self.until_s = time.monotonic() + seconds_max


class UserHelpers:
    """Starts helpers. ``events`` collects the events for the agent; ``pids``: pids of the helpers."""

    def __init__(
        self, epoll: select.epoll, events: list[LauncherEvent], fork_server: ForkServer, pids: set[int]
    ) -> None:
        self._epoll = epoll
        self._events = events
        self._fork_server = fork_server
        self._by_pidfd: dict[int, UserHelper] = {}
        self.pids = pids

    def check_directory(
        self,
        origin: HelperRequest,
        account: LauncherAccount,
        directory: bytes,
        hidden: tuple[str, ...] | None,
        done: Callable[[], None],
    ) -> None:
        """Check that the account may enter this directory, inside the sandbox of its tasks."""

        def work() -> None:
            if hidden is not None:
                sandbox.enter(self._fork_server.kernel, 1 << 20, hidden, has_devices=False)
            self._fork_server.become(account)
            try:
                os.chdir(directory)
            except (OSError, ValueError):
                raise SpawnRefused(_NOT_THERE) from None

        self._begin(origin, account, work, done, LOOK_S_MAX)

    def check_files(self, origin: HelperRequest, account: LauncherAccount, patterns: list[bytes]) -> None:
        """Check that the account can write files of these names."""

        def work() -> None:
            self._fork_server.become(account)
            for pattern in patterns[:FILES_MAX]:
                write_as_user.check(pattern.replace(b"%%", b"%"))

        self._begin(origin, account, work, seconds_max=LOOK_S_MAX)

    def append(self, origin: HelperRequest, account: LauncherAccount, request: FileAppend) -> None:
        """Write parts of captured output into a file of the account."""
        parts, umask = request.parts[:PARTS_MAX], request.umask & 0o777

        def work() -> None:
            with self._fork_server.access:
                sources = {name: write_as_user.source(name) for name, _, _ in parts}
            self._fork_server.become(account)
            segments = [(sources[name], first, end) for name, first, end in parts if sources[name] >= 0]
            write_as_user.append(request.path, segments, umask, request.at, ends=request.ends)

        self._begin(origin, account, work)

    def work_with_files(
        self, origin: HelperRequest, account: LauncherAccount, path: str, directory: bytes, done: Callable[[], None]
    ) -> None:
        """Run `peerload.files.as_user` as the account in this directory; its standard input is the agent's socket ``path``."""

        def work() -> None:
            with socket.socket(socket.AF_UNIX) as agent, self._fork_server.access:
                above = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
                agent.connect(f"/proc/self/fd/{above}/{os.path.basename(path)}")
                os.dup2(agent.fileno(), 0)
            null = os.open("/dev/null", os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            self._fork_server.become(account)
            self._fork_server.kernel.close_on_exec(3)
            try:
                os.chdir(directory)
            except (OSError, ValueError):
                raise SpawnRefused(_NOT_THERE) from None
            variables = {"PATH": PATH_DEFAULT.decode(), "LANG": "C.UTF-8"}
            os.execve(sys.executable, [sys.executable, "-I", "-m", "peerload.files.as_user"], variables)  # noqa: S606

        self._begin(origin, account, work, done, FILES_S_MAX)

    def empty(self, path: str, account: LauncherAccount, done: Callable[[], None]) -> None:
        """Empty a directory of the account; root owns its parent."""

        def work() -> None:
            self._fork_server.become(account)
            write_as_user.empty(path)

        self._begin(OWN, account, work, done)

    def run(
        self,
        account: LauncherAccount,
        work: Callable[[], None],
        done: Callable[[], None],
        seconds_max: float,
        keeps: Sequence[int] = (),
    ) -> None:
        """Do work as the account that may hang, such as a query of the account database. done: called when the helper has
        ended or was killed. keeps: descriptors that it needs."""

        def as_account() -> None:
            self._fork_server.become(account)
            work()

        self._begin(OWN, account, as_account, done, seconds_max, keeps)

    def reply(self, number: int, why: str) -> None:
        """Answer a request of the agent. why: the reason why it failed, "" if it succeeded."""
        if number:
            self._events.append(UserReply(number, why))

    def _begin(
        self,
        origin: HelperRequest,
        account: LauncherAccount,
        work: Callable[[], None],
        done: Callable[[], None] = lambda: None,
        seconds_max: float = SECONDS_MAX,
        keeps: Sequence[int] = (),
    ) -> None:
        number = origin.number
        of_user = sum(helper.origin.quota_key == origin.quota_key for helper in self._by_pidfd.values())
        if number and (len(self._by_pidfd) >= AT_A_TIME_MAX or of_user >= OF_A_USER_MAX):
            self.reply(number, "busy: too many requests of this user are under way")
            done()
            return
        try:
            pid = self._fork_server.fork(work, keeps=keeps)
        except OSError as error:
            self.reply(number, f"busy: no process can be made: {error.strerror}")
            done()
            return
        pidfd = os.pidfd_open(pid)
        self._epoll.register(pidfd, select.EPOLLIN)
        self._by_pidfd[pidfd] = UserHelper(origin, pid, account.uid, done, seconds_max)
        self.pids.add(pid)

    def ready(self, masks: dict[int, int]) -> None:
        """Handle epoll events of ended helpers."""
        for pidfd in [fd for fd in masks if fd in self._by_pidfd]:
            helper = self._by_pidfd.pop(pidfd)
            self._epoll.unregister(pidfd)
            os.close(pidfd)
            _, status = os.waitpid(helper.pid, 0)
            self.pids.discard(helper.pid)
            failure = self._fork_server.reports.failure_of(helper.pid)
            why = failure[1] if failure is not None else "" if not status else f"it was ended ({status})"
            if helper.is_overdue and status:
                why = f"it was not done within {helper.seconds_max:g} s"
            if helper.origin.number:
                self.reply(helper.origin.number, why)
            elif why:
                log_line(f"user helper failed: uid={helper.uid} error={why}")
            helper.done()

    def kill_overdue(self) -> None:
        """Kill helpers that take too long; their requests are answered when the process is gone."""
        now_s = time.monotonic()
        for helper in self._by_pidfd.values():
            if now_s >= helper.until_s:
                helper.until_s = now_s + KILL_AGAIN_S
                helper.is_overdue = True
                os.kill(helper.pid, signal.SIGKILL)

    def due_s(self) -> float | None:
        """Time by the monotonic clock at which `kill_overdue` has to be called; None: no helper runs."""
        return min((helper.until_s for helper in self._by_pidfd.values()), default=None)
