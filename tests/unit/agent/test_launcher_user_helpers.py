"""Errands as users, made for real: what their user does to them costs nobody else anything."""

from __future__ import annotations

import os
import select
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from peerload.launcher.process import AgentCredentials
from peerload.launcher.system import fork_server
from peerload.launcher.system.accounts import LauncherAccount
from peerload.launcher.system.fork_server import OF_A_USER_MAX, ChildReports, ForkServer, HelperRequest, UserHelpers
from peerload.launcher.system.sandbox import Syscalls
from tests.security.users import needs_root
from tests.support import stands_still, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs_root
ALICE = LauncherAccount("alice", 20001, 20001, (20001,), "/")


class Stopped(ForkServer):
    """Of a user who stops every process of its own as soon as there is one."""

    def become(self, account: LauncherAccount) -> None:
        """As whom it may be stopped."""
        super().become(account)
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.fixture
def made() -> Iterator[tuple[UserHelpers, select.epoll, list[Any]]]:
    """Errands, what tells of them, and where they tell the agent."""
    epoll = select.epoll()
    words = ChildReports(epoll)
    events: list[Any] = []
    errands = UserHelpers(epoll, events, Stopped(Syscalls(), AgentCredentials(20100, 20100), words), set())
    yield errands, epoll, events
    for pid in errands.pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    words.close()
    epoll.close()


@pytest.mark.rule("X6", "S5")
def test_one_that_its_user_stops_is_given_up(
    made: tuple[UserHelpers, select.epoll, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    errands, epoll, events = made
    monkeypatch.setattr(fork_server, "LOOK_S_MAX", 0.2)
    assert errands.due_s() is None
    for number in range(1, OF_A_USER_MAX + 2):
        errands.check_directory(HelperRequest(number, "alice"), ALICE, b"/", None, lambda: None)
    assert [event.id for event in events] == [OF_A_USER_MAX + 1]
    assert "busy" in events.pop().why
    errands.check_directory(HelperRequest(99, "n2:"), ALICE, b"/", None, lambda: None)
    assert not events, "what one has under way is nothing to another"
    due_s = errands.due_s()
    assert due_s is not None
    until_s = time.monotonic() + 60.0
    while errands.pids and time.monotonic() < until_s:
        masks = dict(epoll.poll(max(0.0, due_s - time.monotonic()) + 0.01))
        errands.ready(masks)
        errands.kill_overdue()
    assert all("0.2 s" in event.why for event in events)
    assert len(events) == OF_A_USER_MAX + 1
    assert errands.due_s() is None


@pytest.mark.rule("X6", "X7")
def test_one_that_stands_still_has_nothing_of_the_launchers(
    made: tuple[UserHelpers, select.epoll, list[Any]],
) -> None:
    """Else its user would keep the guard from seeing that the launcher is gone, and the next launcher from its lock."""
    errands, _, _ = made
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    errands.check_directory(HelperRequest(1, "alice"), ALICE, b"/", None, lambda: None)
    (pid,) = errands.pids
    wait_until(lambda: stands_still(pid), 60.0, "its user to stop it")
    os.close(writing)
    assert os.read(reading, 1) == b"", "nobody else has the other end"
    os.close(reading)
