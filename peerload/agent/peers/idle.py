"""Links that nobody uses are closed: with hundreds of members each is met now and then to compare what is known of the
others (`sync`), and would otherwise keep a link to all of them for good.

A few stay open all the same: in a small cluster a link costs less than making it again and again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from peerload.model.messages import (
    Hello,
    Leaving,
    NotDialled,
    Ping,
    Pong,
    ProfileRequest,
    ProfileTold,
    Sync,
    WrongBoot,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from peerload.agent.peers.connection import PeerConnection
    from peerload.model.messages import Message

IDLE_S = 60.0
"""A link over which nothing but SMALL_TALK went for so long is not in use."""
QUIET_S = 5.0
"""Somebody who has said anything within this is still heard out."""
KEPT_IDLE_MAX = 16
"""Links that a node keeps although they are not in use: those used last."""
LOOK_EVERY_S = 15.0
SMALL_TALK = (Hello, Leaving, NotDialled, Ping, Pong, ProfileRequest, ProfileTold, Sync, WrongBoot)
"""What is said of who is there; any other message means that the two have to do with each other."""
IDLE = "it was not in use"


class IdleLinks:
    """``links`` are those there are; which of them is closed is up to when they were last used, and whether the two could do
    without it, that is, make another."""

    def __init__(
        self, links: Callable[[], Iterable[PeerConnection]], can_do_without: Callable[[PeerConnection], bool]
    ) -> None:
        self._links = links
        self._can_do_without = can_do_without
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look from time to time."""
        self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self.start()
        now_s = asyncio.get_running_loop().time()
        idle = [link for link in self._links() if not link.is_closed and now_s - link.used_s > IDLE_S]
        idle.sort(key=lambda link: link.used_s)
        for link in idle[: max(len(idle) - KEPT_IDLE_MAX, 0)]:
            if now_s - link.spoken_s > QUIET_S and not link.paused and self._can_do_without(link):
                link.close(IDLE)


def spoke(link: PeerConnection, message: Message) -> None:
    """Something went over this link, either way."""
    link.spoken_s = asyncio.get_running_loop().time()
    if not isinstance(message, SMALL_TALK):
        link.used_s = link.spoken_s
