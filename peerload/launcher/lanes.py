"""Lanes: queues of tasks that the agent has sent ahead. Each task starts as soon as its predecessor has ended. Free of clock and
operating system: the simulated launcher of the chaos harness uses them, too."""

from __future__ import annotations

import signal
from collections import deque
from typing import Generic, Protocol, TypeVar

from peerload.launcher.protocol import LauncherProtocolError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container


class Start(Protocol):
    """A request to start the attempt ``key`` when the attempt ``after`` has ended."""

    @property
    def key(self) -> str: ...
    @property
    def after(self) -> str: ...


AnyStart = TypeVar("AnyStart", bound=Start)
WAITING_MAX = 10_000
WAIT_S_MAX = 0.5
"""If a task with others behind it has run for longer, those are returned to the agent: it was expected to be short."""
HARMLESS = frozenset(
    {
        0,
        signal.SIGCONT,
        signal.SIGCHLD,
        signal.SIGURG,
        signal.SIGWINCH,
        signal.SIGSTOP,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
    }
)
"""Signals that do not end a process that was just started."""


class Lanes(Generic[AnyStart]):
    """waiting: the requests that have not been started, by key."""

    def __init__(self) -> None:
        self.waiting: dict[str, AnyStart] = {}
        self._lanes: dict[str, deque[str]] = {}
        """The lane of each attempt: a running first one, a waiting one, or one that was withdrawn while it waited."""

    def add(self, request: AnyStart, running: Container[str]) -> bool:
        """Keep a request for later. → False if its predecessor has ended: it can start now. Raises LauncherProtocolError."""
        lane = self._lanes.get(request.after)
        if lane is None:
            if request.after not in running:
                return False
            lane = self._lanes[request.after] = deque()
        if len(self.waiting) >= WAITING_MAX:
            raise LauncherProtocolError("too many tasks wait for others")
        lane.append(request.key)
        self._lanes[request.key] = lane
        self.waiting[request.key] = request
        return True

    def next(self, key: str) -> AnyStart | None:
        """The request to start now, after the end of this attempt; None if there is none."""
        lane = self._lanes.pop(key, None)
        while lane:
            following = lane.popleft()
            if (request := self.waiting.pop(following, None)) is not None:
                return request
            del self._lanes[following]
        return None

    def behind(self, key: str) -> list[str]:
        return [following for following in self._lanes.get(key, ()) if following in self.waiting]
