"""The agent's end of the launcher when the launcher is going, hanging, or not a launcher."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import msgspec
import pytest
import uvloop

from peerload.agent.launcher import client
from peerload.agent.launcher.client import LauncherError, LauncherLink
from peerload.agent.launcher.process import LauncherProcess
from peerload.agent.runtime import RunState
from peerload.launcher.protocol import VERSION_MIN, StopRequest
from peerload.model.actions import SpawnTask
from peerload.model.events import LauncherLost, LauncherReady, TaskEnded, TaskLost, TaskStarted
from peerload.model.task import TaskSpec, execution_key
from tests.integration.test_launcher import _state
from tests.integration.test_launcher_link import Node, _run, fixture_directory  # noqa: F401 -- a fixture
from tests.support import wait_until
from tests.wording import Says

if TYPE_CHECKING:
    pass


def test_a_killed_launcher_is_replaced_each_time(directory: Path) -> None:
    async def story(node: Node) -> None:
        await node.link.start(node)
        for _ in range(3):
            node.events.clear()
            os.kill(node.link.pid, signal.SIGKILL)
            await node.until(lambda event: isinstance(event, LauncherReady))
            assert [type(event) for event in node.events] == [LauncherLost, LauncherReady]
            node.link.resume()

    _run(uvloop.new_event_loop, directory, story)


def test_what_was_ordered_of_a_lost_launcher_is_not_done_by_the_next(directory: Path) -> None:
    async def story(node: Node) -> None:
        await node.link.start(node)
        os.kill(node.link.pid, signal.SIGKILL)
        node.spawn("late", b"true")
        await node.until(lambda event: isinstance(event, LauncherReady))
        node.spawn(execution_key(bytes(16), 1), b"true")  # before it was taken note of
        node.link.resume()
        node.spawn("next", b"true")
        await node.ended("next")
        assert {event.key for event in node.events if isinstance(event, TaskStarted | TaskEnded)} == {"next"}

    _run(asyncio.new_event_loop, directory, story)


def test_stopping_while_a_new_launcher_is_on_its_way_leaves_nothing(directory: Path) -> None:
    async def story(node: Node) -> None:
        await node.link.start(node)
        node.spawn("runs", b"sh", b"-c", b"echo $$; exec sleep 1000")
        await node.started("runs")
        out = directory / "runs.out"
        await asyncio.to_thread(wait_until, lambda: out.exists() and out.read_bytes().endswith(b"\n"))
        os.kill(node.link.pid, signal.SIGKILL)
        await node.until(lambda event: isinstance(event, LauncherLost))
        async with asyncio.timeout(60):
            await node.link.stop_all()
        assert _state(int(out.read_bytes())) in {"", "Z"}
        assert not (directory / "launcher/launcher.sock").exists()

    _run(uvloop.new_event_loop, directory, story)


def test_an_agent_that_starts_while_the_launcher_stops_gets_a_new_one(directory: Path) -> None:
    async def story(node: Node) -> None:
        await node.link.start(node)
        node.spawn("stubborn", b"sh", b"-c", b"trap '' TERM; echo; while :; do sleep 1000; done")
        await node.started("stubborn")
        out = directory / "stubborn.out"
        await asyncio.to_thread(wait_until, lambda: out.stat().st_size > 0)  # it traps TERM by now
        old = node.link.pid
        node.link._request(StopRequest())
        await node.link.close()
        node.link = node.new_link()
        await node.link.start(node)
        await node.until(lambda event: isinstance(event, LauncherReady))
        node.link.resume()
        assert node.link.pid != old
        node.spawn("next", b"true")
        await node.ended("next")

    _run(asyncio.new_event_loop, directory, story)


def test_an_environment_that_cannot_be_read_ends_the_task_alone(directory: Path) -> None:
    async def story(node: Node) -> None:
        await node.link.start(node)
        for number, environment in enumerate((b"\xc1", b"\x01", b"\x81\x01\x02", b"")):
            spec = TaskSpec(argv=(b"true",), directory=b"/tmp", environment=environment)
            key = f"k{number}"
            node.link.spawn(SpawnTask(key, "n/1", 1, "n", spec), directory / "o", directory / "e", {b"A": b"b"})
            assert (await node.ended(key)).exit.exit_code == 126
        assert not any(isinstance(event, LauncherLost) for event in node.events)

    _run(asyncio.new_event_loop, directory, story)


@pytest.mark.parametrize(
    "answer", [b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0\0\1\x01", b"\0\0\0\2\x91\x01", b"", b"\0\0"]
)
def test_what_is_not_a_launcher_is_an_error_with_a_reason(directory: Path, answer: bytes) -> None:
    async def story() -> None:
        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answer)
            writer.close()

        (directory / "launcher").mkdir()
        server = await asyncio.start_unix_server(serve, directory / "launcher/launcher.sock")
        events = Received()
        link = LauncherLink(LauncherProcess(directory / "launcher"), 1 << 20, RunState())
        try:
            with pytest.raises(LauncherError, match=Says.NO_REPLY()):
                await link.start(events)
        finally:
            await link.close()
            server.close()
            await server.wait_closed()
        assert events == []

    asyncio.run(story())


class Received(list[Any]):
    """A `LauncherOwner` that is the list of the events that came."""

    def received(self, event: object) -> None:
        self.append(event)


NEWEST = {
    "is": "listed", "pid": 1, "more": False, "ended": [], "system": False,
    "running": [["a-1", 5.0]], "leases": [[7.5, 0.0, False, "and more"]], "ran_s": [0.0], "protocol": 10, "run": "r1", "units": "jails",
    "unenforced": ["what jails cannot hold"], "memory": "scales", "moon": "full",
}  # fmt: skip


@pytest.mark.rule("P6")
def test_a_launcher_of_another_version_is_of_use(directory: Path) -> None:
    """It outlives the agent that started it, and the downgrade of that."""
    heard: list[dict[str, Any]] = []

    def frame(*events: dict[str, Any]) -> bytes:
        body: bytes = msgpack.packb(list(events))
        return len(body).to_bytes(4, "big") + body

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                for request in msgpack.unpackb(await reader.readexactly(size)):
                    heard.append(request)
                    if request["do"] == "list":
                        writer.write(frame(NEWEST))
                    elif request["do"] == "spawn":
                        expired = {"is": "expired", "key": request["key"], "reason": "no room", "never_started": True}
                        writer.write(frame({"is": "born", "key": "?"}, expired))
        writer.close()

    async def story(node: Node) -> None:
        (directory / "launcher").mkdir()
        server = await asyncio.start_unix_server(serve, directory / "launcher/launcher.sock")
        try:
            assert await node.link.start(node) == LauncherReady((("a-1", 5.0, 7.5),))
            assert (node.link.units, bool(node.link.unenforced)) == ("jails", True)
            assert node.link.memory == "scales"
            node.link.set_lease("a-1", 9.0, 8.0)
            node.spawn("b-1", b"true")
            lost = await node.until(lambda event: isinstance(event, TaskLost))
            assert isinstance(lost, TaskLost)
            assert (lost.key, lost.never_started) == ("b-1", True)
            (spawn,) = [request for request in heard if request["do"] == "spawn"]
            assert {"key", "argv", "deadline_s"} <= spawn.keys()
            assert spawn.get("run") == "r1"
            await node.link.close()
            node.link = node.new_link()
        finally:
            server.close()
            (directory / "launcher/launcher.sock").unlink(missing_ok=True)

    _run(asyncio.new_event_loop, directory, story)


@pytest.mark.rule("P6")
def test_a_launcher_that_is_too_old_is_an_error_that_says_so(directory: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(4)
        body: bytes = msgpack.packb([{"is": "listed", "pid": 77, "more": False, "protocol": VERSION_MIN - 1}])
        writer.write(len(body).to_bytes(4, "big") + body)
        writer.close()

    async def story() -> None:
        (directory / "launcher").mkdir()
        server = await asyncio.start_unix_server(serve, directory / "launcher/launcher.sock")
        link = LauncherLink(LauncherProcess(directory / "launcher"), 1 << 20, RunState())
        try:
            with pytest.raises(LauncherError, match="earlier version") as error:
                await link.start(Received())
            assert "kill 77" in error.value.hint
        finally:
            await link.close()
            server.close()
            await server.wait_closed()

    asyncio.run(story())


def test_a_launcher_that_hangs_is_an_error(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "START_S_MAX", 0.3)

    async def story(node: Node) -> None:
        monkeypatch.setattr(client, "START_S_MAX", 60.0)
        await node.link.start(node)
        pid = node.link.pid
        await node.link.close()
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(client, "START_S_MAX", 0.3)
        try:
            node.link = node.new_link()
            with pytest.raises(LauncherError):
                await node.link.start(node)
        finally:
            os.kill(pid, signal.SIGCONT)
        monkeypatch.setattr(client, "START_S_MAX", 60.0)
        await node.link.start(node)
        assert node.link.pid == pid

    _run(asyncio.new_event_loop, directory, story)


def test_a_directory_that_cannot_be_used_is_an_error_that_says_why(directory: Path) -> None:
    async def story() -> None:
        (directory / "launcher").mkdir()
        (directory / "launcher/exits.log").mkdir()  # the launcher cannot open its log
        link = LauncherLink(LauncherProcess(directory / "launcher"), 1 << 20, RunState())
        with pytest.raises(LauncherError) as caught:
            await link.start(Received())
        await link.close()
        assert "Is a directory" in caught.value.why

    asyncio.run(story())


def test_an_exit_as_the_launcher_writes_it_is_one_the_model_takes() -> None:
    """A size beyond what a record may say must not make the agent lose its launcher for ever."""
    from peerload.launcher.process import SIZE_BYTES_MAX
    from peerload.model.task import Exit

    largest = {"exit_code": 192, "reason": "x" * 400, "stdout_bytes": SIZE_BYTES_MAX, "stderr_bytes": SIZE_BYTES_MAX}
    assert msgspec.convert(largest, Exit).stdout_bytes == SIZE_BYTES_MAX
