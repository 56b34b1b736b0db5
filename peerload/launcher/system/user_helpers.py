"""User helpers: children of a launcher that runs as root, each of which does a small job as one user. They check
directories and files, write output, and remove what a task has left.

Used by such a launcher alone. A child that hangs in a user's directory delays nothing but its own job.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time

from peerload.launcher.process import PATH_DEFAULT, SpawnRefused
from peerload.launcher.protocol import UserReply
from peerload.launcher.record_log import log_line
from peerload.launcher.system import sandbox, write_as_user

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from peerload.launcher.protocol import FileAppend, LauncherEvent
    from peerload.launcher.system.accounts import LauncherAccount
    from peerload.launcher.system.fork_server import ForkServer

AT_A_TIME_MAX = 64
OF_A_USER_MAX = 8
"""Helpers at a time for one user, or for all users of another node, so that hanging directories delay nobody else."""
LOOK_S_MAX = 30.0
"""Timeout of a check: the user's directory hangs, or the user has stopped the helper."""
SECONDS_MAX = 300.0
"""Timeout of what writes or removes files; it is killed then."""
FILES_S_MAX = 86_400.0
"""Timeout of a job with the files of a task; the agent ends it sooner when nothing moves."""
KILL_AGAIN_S = 60.0
"""Pause before it is killed again, if it hangs where nothing can be killed."""
FILES_MAX = 4
PARTS_MAX = 1024
_NOT_THERE = "there is no such directory here, or it may not be entered"


class HelperRequest:
    """The origin of a job. number: the agent's, 0 = the launcher's own job. quota_key: a user of this node, or another
    node; never a guest's uid, which is new each time."""

    __slots__ = ("number", "quota_key")

    def __init__(self, number: int, quota_key: str) -> None:
        self.number = number
        self.quota_key = quota_key


OWN = HelperRequest(0, "")


class UserHelper:
    """A running helper. until_s: when it is killed, after ``seconds_max``."""

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
    """Starts helpers. ``events`` collects what the agent is told; ``pids``: of the helpers."""

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
        """Check that the account may enter this directory, in the sandbox of its tasks."""

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
                write_as_user.check(pattern)

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
                above = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)  # noqa: PTH120 -- as elsewhere here
                agent.connect(f"/proc/self/fd/{above}/{os.path.basename(path)}")  # noqa: PTH119 -- the path may be too long
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
        """Empty a directory of the account; its parent is root's."""

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
        """Do work as the account that may hang, such as a question to the account database. done: called when it has
        ended or was killed. keeps: descriptors that it needs."""

        def as_account() -> None:
            self._fork_server.become(account)
            work()

        self._begin(OWN, account, as_account, done, seconds_max, keeps)

    def reply(self, number: int, why: str) -> None:
        """Answer a request of the agent: why it was not done, "" if it was."""
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
        """Handle helpers that have ended, as epoll reported."""
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
        """Kill helpers that take too long; they are answered when their process is gone."""
        now_s = time.monotonic()
        for helper in self._by_pidfd.values():
            if now_s >= helper.until_s:
                helper.until_s = now_s + KILL_AGAIN_S
                helper.is_overdue = True
                os.kill(helper.pid, signal.SIGKILL)

    def due_s(self) -> float | None:
        """When `kill_overdue` has to be called, by the monotonic clock; None: no helper runs."""
        return min((helper.until_s for helper in self._by_pidfd.values()), default=None)
