"""The agent's end of the launcher, against real launchers: found, started, lost and found again."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from peerload.agent.launcher import client
from peerload.agent.launcher.client import LauncherLink
from peerload.agent.launcher.process import LauncherProcess
from peerload.agent.runtime import RunState
from peerload.launcher.protocol import ALREADY_RUNS, StdinFed
from peerload.model.actions import SpawnTask
from peerload.model.events import Event, LauncherLost, LauncherReady, TaskEnded, TaskStarted
from peerload.model.task import TaskSpec, execution_key
from tests.integration.test_launcher import Bench

LOOPS = [uvloop.new_event_loop]
ENVIRONMENT = msgspec.msgpack.encode({b"PATH": b"/usr/bin:/bin", b"A": b"task"})


class Node:
    """What the daemon is to the link: it takes events and can wait for one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events: list[Event] = []
        self._more = asyncio.Event()
        self.link = self.new_link()

    def new_link(self) -> LauncherLink:
        return LauncherLink(LauncherProcess(self.directory / "launcher"), 1 << 20, RunState())

    def received(self, event: Event | StdinFed) -> None:
        assert not isinstance(event, StdinFed)
        self.events.append(event)
        self._more.set()

    async def until(self, wanted: Callable[[Event], bool]) -> Event:
        async with asyncio.timeout(60):
            while True:
                for event in self.events:
                    if wanted(event):
                        return event
                self._more.clear()
                await self._more.wait()

    async def ended(self, key: str) -> TaskEnded:
        event = await self.until(lambda event: isinstance(event, TaskEnded) and event.key == key)
        assert isinstance(event, TaskEnded)
        return event

    async def started(self, key: str) -> None:
        await self.until(lambda event: isinstance(event, TaskStarted) and event.key == key)

    def spawn(self, key: str, *argv: bytes) -> None:
        spec = TaskSpec(argv=argv, directory=b"/tmp", environment=ENVIRONMENT)
        action = SpawnTask(key, "n/1", 1, "n", spec)
        self.link.spawn(action, self.directory / f"{key}.out", self.directory / f"{key}.err", {b"B": b"node"})


@pytest.fixture(name="directory")
def fixture_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pl", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def _run(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    directory: Path,
    story: Callable[[Node], Coroutine[Any, Any, None]],
) -> None:
    async def whole() -> None:
        node = Node(directory)
        try:
            await story(node)
        finally:
            await node.link.stop_all()
            await node.link.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(whole())


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_task_from_start_to_end(loop_factory: Callable[[], asyncio.AbstractEventLoop], directory: Path) -> None:
    async def story(node: Node) -> None:
        assert await node.link.start(node) == LauncherReady()
        node.spawn("a", b"sh", b"-c", b"echo $A $B; exit 5")
        end = await node.ended("a")
        assert end.exit.exit_code == 5
        assert [type(event) for event in node.events] == [*([] if end.with_start else [TaskStarted]), TaskEnded]
        assert (directory / "a.out").read_bytes() == b"task node\n"

    _run(loop_factory, directory, story)


def test_many_at_once_and_each_once(directory: Path) -> None:
    async def story(node: Node) -> None:
        await node.link.start(node)
        for number in range(200):
            node.spawn(f"k{number}", b"sh", b"-c", b"exit $1", b"x" * 20_000, str(number % 7).encode())
        for number in range(200):
            end = await node.ended(f"k{number}")
            assert end.exit.exit_code == number % 7
            node.link.forget(end.key)
        ends = [event for event in node.events if isinstance(event, TaskEnded)]
        starts = [
            event for event in node.events if isinstance(event, TaskStarted) or getattr(event, "with_start", False)
        ]
        assert (len(starts), len(ends)) == (200, 200)

    _run(uvloop.new_event_loop, directory, story)


def test_a_new_agent_finds_what_the_old_one_left(directory: Path) -> None:
    async def story(node: Node) -> None:
        await node.link.start(node)
        node.spawn("ended", b"sh", b"-c", b"exit 4")
        node.spawn("runs", b"sleep", b"1000")
        await node.started("runs")
        await node.ended("ended")
        pid = node.link.pid
        await node.link.close()
        node.link = node.new_link()
        ready = await node.link.start(node)
        assert node.link.pid == pid
        assert [key for key, *_ in ready.running] == ["runs"]
        assert [(key, exit_.exit_code) for key, exit_ in ready.ended] == [("ended", 4)]
        node.events.clear()
        node.link.signal("runs", signal.SIGTERM)
        assert (await node.ended("runs")).exit.signal == signal.SIGTERM

    _run(asyncio.new_event_loop, directory, story)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_lost_launcher_is_replaced_and_its_tasks_are_in_neither_list(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], directory: Path
) -> None:
    async def story(node: Node) -> None:
        await node.link.start(node)
        node.spawn("ended", b"true")
        await node.ended("ended")
        node.spawn("runs", b"sleep", b"1000")
        await node.started("runs")
        pid = node.link.pid
        os.kill(pid, signal.SIGKILL)
        ready = await node.until(lambda event: isinstance(event, LauncherReady))
        assert isinstance(ready, LauncherReady)
        assert any(isinstance(event, LauncherLost) for event in node.events)
        assert node.link.pid not in {0, pid}
        assert ready.running == ()
        assert [key for key, _ in ready.ended] == ["ended"]
        late = execution_key(bytes(16), 1)
        node.spawn(late, b"true")  # decided upon before it was known which attempts have died: never carried out
        node.spawn("exec-1", b"true")  # which is no attempt
        await node.ended("exec-1")
        node.link.resume()
        node.spawn("next", b"true")
        await node.ended("next")
        assert not any(isinstance(event, TaskStarted | TaskEnded) and event.key == late for event in node.events)

    _run(loop_factory, directory, story)


def test_a_long_directory_is_no_obstacle(directory: Path) -> None:
    async def story(node: Node) -> None:
        node.directory = directory / ("d" * 100)
        node.directory.mkdir()
        node.link = node.new_link()
        await node.link.start(node)
        node.spawn("a", b"true")
        assert (await node.ended("a")).exit.exit_code == 0

    _run(asyncio.new_event_loop, directory, story)


def test_a_launcher_that_does_not_answer_yet_is_waited_for(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one, started by an agent that died, still ends what was left: it has the lock and no socket."""
    monkeypatch.setattr(client, "START_S_MAX", 60.0)
    place = directory / "launcher"
    place.mkdir()

    async def story(node: Node) -> None:
        with (place / "launcher.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            starting = asyncio.get_running_loop().create_task(node.link.start(node))
            while node.link._process.exit_code() is None:  # noqa: ASYNC110 -- no event tells
                await asyncio.sleep(0.01)
            assert node.link._process.exit_code() == ALREADY_RUNS
            assert not starting.done()
        bench = Bench(place)
        first = bench.start()
        assert await starting == LauncherReady()
        assert node.link.pid == first.pid
        await node.link.stop_all()
        for process in bench.processes:
            process.communicate()

    _run(asyncio.new_event_loop, directory, story)
