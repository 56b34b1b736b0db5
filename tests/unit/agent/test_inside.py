"""Commands inside of tasks that an earlier agent has left with the launcher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from peerload.agent.inside import InsideCommands
from peerload.model.events import LauncherReady, TaskEnded
from peerload.model.task import Exit


def test_commands_of_an_earlier_agent_are_ended_and_are_no_tasks() -> None:
    told: list[tuple[object, ...]] = []
    launcher = SimpleNamespace(
        signal=lambda key, number: told.append(("signal", key, number)), forget=lambda key: told.append(("forget", key))
    )
    parts: Any = SimpleNamespace(launcher=launcher, spool=SimpleNamespace(drop=lambda key: told.append(("drop", key))))
    commands = InsideCommands(parts)
    ready = LauncherReady(
        running=(("exec-1", 1.0, 0.0), ("a-1", 2.0, 0.0)), ended=(("exec-2", Exit(0)), ("b-1", Exit(0)))
    )
    left = commands.listed(ready)
    assert [key for key, *_ in left.running] == ["a-1"]
    assert [key for key, _ in left.ended] == ["b-1"]
    assert ("signal", "exec-1", 9) in told
    assert ("drop", "exec-2") in told
    assert commands.heard(TaskEnded("exec-1", Exit(137, 9)))
    assert told[-2:] == [("forget", "exec-1"), ("drop", "exec-1")]
    assert not commands.heard(TaskEnded("a-1", Exit(0)))
