"""Heartbeat of the launcher: asked now and then, called silent only if this agent itself ran."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from peerload.agent.launcher import heartbeat
from peerload.agent.launcher.heartbeat import Heartbeat
from tests.support import PATIENCE_S


class Launcher:
    """Answers, or does not."""

    def __init__(self) -> None:
        self.answers = True
        self.pings = 0
        self.changes: list[bool] = []
        self._more = asyncio.Event()
        self.heartbeat = Heartbeat(self, 0.02, 0.02)

    def silence_changed(self, *, silent: bool) -> None:
        self.changes.append(silent)
        self._more.set()

    def ping(self) -> None:
        self.pings += 1
        self._more.set()
        if self.answers:
            asyncio.get_running_loop().call_soon(self.heartbeat.received)

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not is_so():
                self._more.clear()
                await self._more.wait()


def run(story: Callable[[Launcher], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        launcher = Launcher()
        launcher.heartbeat.start()
        try:
            await story(launcher)
        finally:
            launcher.heartbeat.stop()

    asyncio.run(whole())


def test_one_that_answers_is_never_called_silent() -> None:
    async def story(launcher: Launcher) -> None:
        await launcher.until(lambda: launcher.pings > 5)
        assert launcher.changes == []

    run(story)


def test_one_that_says_nothing_is_silent_until_it_does() -> None:
    async def story(launcher: Launcher) -> None:
        launcher.answers = False
        await launcher.until(lambda: launcher.changes == [True])
        pings = launcher.pings
        launcher.answers = True
        launcher.heartbeat.received()
        assert launcher.changes == [True, False]
        await launcher.until(lambda: launcher.pings > pings + 2)
        assert launcher.changes == [True, False]

    run(story)


def test_an_agent_that_did_not_run_itself_waits_again() -> None:
    async def story(launcher: Launcher) -> None:
        await launcher.until(lambda: launcher.pings > 0)
        launcher.answers = False
        pings = launcher.pings
        await launcher.until(lambda: launcher.pings > pings)
        threading.Event().wait(heartbeat.LATE_S + 0.2)  # the loop stands still
        asyncio.get_running_loop().call_later(0.001, launcher.heartbeat.received)  # its answer lay unread
        await launcher.until(lambda: launcher.pings > pings + 1)
        assert launcher.changes == []

    run(story)


def test_an_answered_ping_has_one_timer_which_is_that_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[Any] = []

    def call_later(seconds: float, call: Callable[[], None]) -> Any:
        timers.append(SimpleNamespace(seconds=seconds, call=call, is_set=True))
        timers[-1].cancel = lambda timer=timers[-1]: setattr(timer, "is_set", False)
        return timers[-1]

    loop = SimpleNamespace(call_later=call_later, time=lambda: 0.0)
    monkeypatch.setattr(heartbeat, "asyncio", SimpleNamespace(get_running_loop=lambda: loop))
    monkeypatch.setattr(heartbeat, "coalesced_s", lambda seconds: seconds)
    owner: Any = SimpleNamespace(ping=lambda: None, silence_changed=lambda **_: None)
    made = Heartbeat(owner, 10.0, 5.0)
    made.start()
    timers[0].call()
    assert timers[-1].seconds == 5.0, "the check"
    made.received()
    made.received()
    assert [timer.seconds for timer in timers[1:] if timer.is_set] == [10.0]
