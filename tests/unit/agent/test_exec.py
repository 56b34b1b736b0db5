"""Commands inside of tasks: those that an earlier agent has left with the launcher, and those of clients."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peerload.agent.event_sources import LauncherEvents
from peerload.agent.requests.attach import COMMANDS_MAX, Command, ExecRequests, InsideCommands
from peerload.model.errors import BadRequest, PeerloadError, SlowDown
from peerload.model.events import LauncherReady, TaskEnded, TaskStarted
from peerload.model.task import Exit
from peerload.wire import control


def test_commands_of_an_earlier_agent_are_ended_and_are_no_tasks() -> None:
    told: list[tuple[object, ...]] = []
    launcher = SimpleNamespace(
        signal=lambda key, number: told.append(("signal", key, number)), forget=lambda key: told.append(("forget", key))
    )
    spool = SimpleNamespace(drop=lambda key: told.append(("drop", key)))
    commands = InsideCommands(cast("Any", launcher), cast("Any", spool))
    ready = LauncherReady(
        running=(("exec-1", 1.0, 0.0), ("a-1", 2.0, 0.0)), ended=(("exec-2", Exit(0)), ("b-1", Exit(0)))
    )
    inbox: list[object] = []
    nothing = cast("Any", None)
    received = LauncherEvents(cast("Any", SimpleNamespace(put=inbox.append)), nothing, nothing, [commands])
    left = received.without_own(ready)
    assert [key for key, *_ in left.running] == ["a-1"]
    assert [key for key, _ in left.ended] == ["b-1"]
    assert ("signal", "exec-1", 9) in told
    assert ("drop", "exec-2") in told
    received.received(TaskEnded("exec-1", Exit(137, 9)))
    assert told[-2:] == [("forget", "exec-1"), ("drop", "exec-1")]
    received.release_early()
    received.received(other := TaskStarted("a-1", 1.0))
    assert inbox == [other]


def test_who_waits_for_a_command_hears_what_a_lost_launcher_connection_has_kept_from_it() -> None:
    async def check() -> None:
        nothing = lambda *_: None  # noqa: E731
        launcher: Any = SimpleNamespace(signal=nothing, forget=nothing)
        spool: Any = SimpleNamespace(drop=nothing)
        commands = InsideCommands(launcher, spool)
        client: Any = object()
        loop = asyncio.get_running_loop()
        ends = {key: loop.create_future() for key in ("exec-1", "exec-2", "exec-3")}
        commands._commands = {key: Command(client, end, None) for key, end in ends.items()}
        commands.listed({"exec-1"}, {"exec-2": Exit(4)})
        assert not ends["exec-1"].done()
        assert ends["exec-2"].result() == Exit(4)
        assert isinstance(ends["exec-3"].exception(), PeerloadError)

    asyncio.run(check())


def test_nobody_but_its_own_client_sends_a_command_anything() -> None:
    own: Any = SimpleNamespace(ok=lambda *_: None)
    told: list[tuple[str, int]] = []
    launcher: Any = SimpleNamespace(signal=lambda key, number: told.append((key, number)))
    commands = InsideCommands(launcher, cast("Any", None))
    end: Any = None
    commands._commands["exec-1"] = Command(own, end, None)
    request = control.SendSignal(id=1, task="42", signal=2, command="exec-1")
    other: Any = SimpleNamespace()
    with pytest.raises(BadRequest):
        commands.signal(other, request)
    commands.signal(own, request)
    assert told == [("exec-1", 2)]


def test_a_command_too_many_leaves_no_input_behind() -> None:
    commands = InsideCommands(cast("Any", None), cast("Any", None))
    commands._commands = {f"exec-{number}": cast("Any", None) for number in range(COMMANDS_MAX)}
    made: list[str] = []
    unused, stdin = cast("Any", None), cast("Any", SimpleNamespace(get=made.append))
    requests = ExecRequests(commands, unused, unused, unused, stdin, unused, unused)
    requests._order = lambda _: ("a-1", SimpleNamespace(key="exec-new"), -1)  # type: ignore[method-assign,return-value,assignment]
    request = control.Exec(id=1, task="42", argv=(b"cat",), takes_input=True)
    with pytest.raises(SlowDown):
        asyncio.run(requests.run(unused, request))
    assert made == []
    assert len(commands._commands) == COMMANDS_MAX
