"""Who is waited for, and when a task is stopped and goes on."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest

from peerload.agent.output import output as pace_module
from peerload.agent.output.output import OutputBackpressure
from peerload.agent.output.spool import Spool
from tests.each import each
from tests.support import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

KEY = "00" * 16 + "-1"
STOP, CONT = int(signal.SIGSTOP), int(signal.SIGCONT)


class Scene:
    """A pace with a small reach; ``told``: the signals that were sent."""

    def __init__(self, state: Path) -> None:
        self.spool = Spool(state)
        self.signals: list[int] = []
        self.news = asyncio.Event()
        self.backpressure = OutputBackpressure(self.spool, self)

    def signal(self, key: str, number: int) -> None:
        assert key == KEY
        self.signals.append(int(number))
        self.news.set()

    def write(self, size_bytes: int) -> None:
        with self.spool.path(KEY, 1).open("ab") as file:
            file.write(b"x" * size_bytes)

    async def sends(self, *numbers: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.signals) < len(numbers):
                self.news.clear()
                await self.news.wait()
        assert self.signals == list(numbers)

    def close(self) -> None:
        if self.spool.inotify is not None:
            self.spool.inotify.close()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace_module, "FAR_BYTES", 100)
    monkeypatch.setattr(pace_module, "NEAR_BYTES", 50)


def test_a_reader_that_is_awaited_is_not_left_behind_by_another(tmp_path: Path) -> None:
    async def scene() -> None:
        made = Scene(tmp_path)
        async with (
            made.backpressure.reader(KEY, 0, 0, runs_here=True, is_awaited=True) as saves,
            made.backpressure.reader(KEY, 0, 0, runs_here=True) as looks_on,
        ):
            looks_on.read[0] = 101
            made.write(101)
            await made.sends(STOP)
            saves.read[0], looks_on.read[0] = 101, 0
            made.backpressure.moved(KEY)
            assert made.signals == [STOP, CONT]
        made.close()

    asyncio.run(scene())


def test_it_is_stopped_when_far_ahead_and_goes_on_when_near(tmp_path: Path) -> None:
    async def scene() -> None:
        made = Scene(tmp_path)
        async with made.backpressure.reader(KEY, 0, 0, runs_here=True) as reader:
            made.write(100)
            await asyncio.sleep(0)
            made.write(1)
            await made.sends(STOP)
            reader.read[0] = 50
            made.backpressure.moved(KEY)
            assert made.signals == [STOP]
            reader.read[0] = 51
            made.backpressure.moved(KEY)
            assert made.signals == [STOP, CONT]
            made.write(60)
            await made.sends(STOP, CONT, STOP)
        assert made.signals == [STOP, CONT, STOP, CONT]
        made.close()

    asyncio.run(scene())


def test_the_foremost_reader_counts_and_the_last_to_leave_lets_go(tmp_path: Path) -> None:
    async def scene() -> None:
        made = Scene(tmp_path)
        async with made.backpressure.reader(KEY, 0, 0, runs_here=True):
            async with made.backpressure.reader(KEY, 0, 0, runs_here=True) as second:
                second.read[0] = 200
                made.write(250)
                made.backpressure.moved(KEY)
                second.read[0] = 100
                made.write(1)
                await made.sends(STOP)
            assert made.signals == [STOP]
        assert made.signals == [STOP, CONT]
        made.close()

    asyncio.run(scene())


@each(("number", "is_let_go"), [(signal.SIGTERM, True), (signal.SIGUSR1, True), (signal.SIGTSTP, False)])
def test_a_signal_of_its_user_ends_the_waiting(tmp_path: Path, number: int, *, is_let_go: bool) -> None:
    async def scene() -> None:
        made = Scene(tmp_path)
        async with made.backpressure.reader(KEY, 0, 0, runs_here=True):
            made.write(101)
            await made.sends(STOP)
            made.backpressure.signalled(KEY, number)
            assert made.signals == [STOP, CONT][: 1 + is_let_go]
        made.close()

    asyncio.run(scene())


def test_what_comes_from_elsewhere_waits_for_room(tmp_path: Path) -> None:
    async def scene() -> None:
        made = Scene(tmp_path)
        await made.backpressure.room(KEY)
        async with made.backpressure.reader(KEY, 0, 0, runs_here=False) as reader:
            made.write(100)
            await made.backpressure.room(KEY)
            made.write(1)
            waits = asyncio.get_running_loop().create_task(made.backpressure.room(KEY))
            await asyncio.sleep(0)
            assert not waits.done()
            reader.read[0] = 60
            made.backpressure.moved(KEY)
            async with asyncio.timeout(PATIENCE_S):
                await waits
            made.write(100)
            waits = asyncio.get_running_loop().create_task(made.backpressure.room(KEY))
            await asyncio.sleep(0)
            made.backpressure.release(KEY)
            async with asyncio.timeout(PATIENCE_S):
                await waits
        assert made.signals == []

    asyncio.run(scene())


def test_an_agent_that_starts_lets_go_on_what_may_have_been_stopped(tmp_path: Path) -> None:
    made = Scene(tmp_path)
    made.write(50)
    made.backpressure.adopt([KEY])
    assert made.signals == []
    made.write(1)
    made.backpressure.adopt([KEY])
    assert made.signals == [CONT]
