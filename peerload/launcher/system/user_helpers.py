"""User helpers: small jobs that a launcher which runs as root has done as a user, each by a child that is that user
and nobody else. They look whether a directory is there, write what the user wants of an output, and remove what a task
has left.

Used by such a launcher alone. A child that hangs in a user's directory holds up nothing but its own errand.
"""

from __future__ import annotations

import os
import select
import signal
import time

from peerload.launcher.process import SpawnRefused
from peerload.launcher.protocol import UserReply
from peerload.launcher.record_log import say
from peerload.launcher.system import sandbox, write_as_user

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from peerload.launcher.protocol import FileAppend, LauncherEvent
    from peerload.launcher.system.accounts import LauncherAccount
    from peerload.launcher.system.fork_server import ForkServer

AT_A_TIME_MAX = 64
OF_A_USER_MAX = 8
"""Errands for one user at a time, or for all users of another node: one whose directories hang holds up nobody else's."""
LOOK_S_MAX = 30.0
"""A look that takes longer is given up: its user's directory hangs, or that user has stopped it …"""
SECONDS_MAX = 300.0
"""… and what writes or removes files after this: it is killed …"""
KILL_AGAIN_S = 60.0
"""… and again, while it hangs where nothing can be killed."""
FILES_MAX = 4
PARTS_MAX = 1024
_LOOKED = "there is no such directory here, or it may not be entered"


class HelperRequest:
    """What the agent wants. ``number``: what it calls it, 0 = it is the launcher's own; ``whose``: whose share of all that can be
    under way it is, a user of this node or another node. A guest's number is its own each time, and so it is no share."""

    __slots__ = ("number", "whose")

    def __init__(self, number: int, whose: str) -> None:
        self.number = number
        self.whose = whose


OWN = HelperRequest(0, "")


class UserHelper:
    """One that is under way. until_s: when it is given up, after ``seconds_max``."""

    __slots__ = ("asked", "done", "is_given_up", "pid", "seconds_max", "uid", "until_s")

    def __init__(self, asked: HelperRequest, pid: int, uid: int, done: Callable[[], None], seconds_max: float) -> None:
        self.asked = asked
        self.pid = pid
        self.uid = uid
        self.done = done
        self.is_given_up = False
        self.seconds_max = seconds_max
        self.until_s = time.monotonic() + seconds_max


class UserHelpers:
    """Done by children of ``forge``; ``events`` is where the launcher gathers what it tells the agent; ``pids``: of these
    children."""

    def __init__(self, epoll: select.epoll, events: list[LauncherEvent], forge: ForkServer, pids: set[int]) -> None:
        self._epoll = epoll
        self._events = events
        self._forge = forge
        self._by_pidfd: dict[int, UserHelper] = {}
        self.pids = pids

    def look(
        self,
        asked: HelperRequest,
        account: LauncherAccount,
        directory: bytes,
        world: tuple[str, ...] | None,
        done: Callable[[], None],
    ) -> None:
        """Whether this directory is there for that account, in the world that its tasks have."""

        def work() -> None:
            if world is not None:
                sandbox.enter(self._forge.kernel, 1 << 20, world, has_devices=False)
            self._forge.become(account)
            try:
                os.chdir(directory)
            except (OSError, ValueError):
                raise SpawnRefused(_LOOKED) from None

        self._begin(asked, account, work, done, LOOK_S_MAX)

    def check(self, asked: HelperRequest, account: LauncherAccount, patterns: list[bytes]) -> None:
        """Whether files of these names can be written by that account."""

        def work() -> None:
            self._forge.become(account)
            for pattern in patterns[:FILES_MAX]:
                write_as_user.check(pattern)

        self._begin(asked, account, work, seconds_max=LOOK_S_MAX)

    def append(self, asked: HelperRequest, account: LauncherAccount, request: FileAppend) -> None:
        """Put parts of what the agent has captured into a file of that account's."""
        parts, umask = request.parts[:PARTS_MAX], request.umask & 0o777

        def work() -> None:
            with self._forge.access:
                sources = {name: write_as_user.source(name) for name, _, _ in parts}
            self._forge.become(account)
            segments = [(sources[name], first, end) for name, first, end in parts if sources[name] >= 0]
            write_as_user.append(request.path, segments, umask, request.at, ends=request.ends)

        self._begin(asked, account, work)

    def sweep(self, path: str, account: LauncherAccount, done: Callable[[], None]) -> None:
        """Remove what is in a directory of that account's; its own place is root's."""

        def work() -> None:
            self._forge.become(account)
            write_as_user.empty(path)

        self._begin(OWN, account, work, done)

    def ask(
        self,
        account: LauncherAccount,
        work: Callable[[], None],
        done: Callable[[], None],
        seconds_max: float,
        keeps: Sequence[int] = (),
    ) -> None:
        """Have some work done as that account that may hang, such as a question to the account database; ``done`` is called when
        it has ended, by itself or since it took longer. ``keeps``: descriptors that it needs."""

        def as_account() -> None:
            self._forge.become(account)
            work()

        self._begin(OWN, account, as_account, done, seconds_max, keeps)

    def refuse(self, number: int, why: str) -> None:
        """It is not done."""
        if number:
            self._events.append(UserReply(number, why))

    def _begin(
        self,
        asked: HelperRequest,
        account: LauncherAccount,
        work: Callable[[], None],
        done: Callable[[], None] = lambda: None,
        seconds_max: float = SECONDS_MAX,
        keeps: Sequence[int] = (),
    ) -> None:
        number = asked.number
        of_user = sum(errand.asked.whose == asked.whose for errand in self._by_pidfd.values())
        if number and (len(self._by_pidfd) >= AT_A_TIME_MAX or of_user >= OF_A_USER_MAX):
            self.refuse(number, "busy: too much is under way for this user")
            done()
            return
        try:
            pid = self._forge.child(work, keeps=keeps)
        except OSError as error:
            self.refuse(number, f"busy: no process can be made: {error.strerror}")
            done()
            return
        pidfd = os.pidfd_open(pid)
        self._epoll.register(pidfd, select.EPOLLIN)
        self._by_pidfd[pidfd] = UserHelper(asked, pid, account.uid, done, seconds_max)
        self.pids.add(pid)

    def ready(self, masks: dict[int, int]) -> None:
        """What epoll said of them: some are back."""
        for pidfd in [fd for fd in masks if fd in self._by_pidfd]:
            errand = self._by_pidfd.pop(pidfd)
            self._epoll.unregister(pidfd)
            os.close(pidfd)
            _, status = os.waitpid(errand.pid, 0)
            self.pids.discard(errand.pid)
            said = self._forge.words.of(errand.pid)
            why = said[1] if said is not None else "" if not status else f"it was ended ({status})"
            if errand.is_given_up and status:
                why = f"it was not done within {errand.seconds_max:g} s"
            if errand.asked.number:
                self.refuse(errand.asked.number, why)
            elif why:
                say(f"an errand for uid {errand.uid}: {why}")
            errand.done()

    def give_up(self) -> None:
        """Those that take too long; each is back when its process has gone."""
        now_s = time.monotonic()
        for errand in self._by_pidfd.values():
            if now_s >= errand.until_s:
                errand.until_s = now_s + KILL_AGAIN_S
                errand.is_given_up = True
                os.kill(errand.pid, signal.SIGKILL)

    def due_s(self) -> float | None:
        """When `give_up` has something to do, by the monotonic clock; None: nothing is under way."""
        return min((errand.until_s for errand in self._by_pidfd.values()), default=None)
