"""The keeper of an MPS daemon, by the lines that it has for it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peerload.agent.launcher import mps
from peerload.agent.launcher.mps import KeeperState, MpsDaemons, _Daemon
from peerload.launcher.mps_keeper import DaemonFailed, Keeper
from peerload.model.config import AgentConfig
from peerload.model.resources import DeviceMode

NOBODY: Any = None


class Told(Keeper):
    """A keeper whose daemon answers what `answers` says, and refuses to end a client."""

    def __init__(self) -> None:
        super().__init__("control", "nvidia:GPU-0", "")
        self.answers: dict[str, str] = {}
        self.lines: list[str] = []

    def _ask_daemon(self, line: str = "", *_flags: str) -> str:
        self.lines.append(line)
        if line.startswith("terminate_client"):
            raise DaemonFailed("refused")
        return self.answers.get(line, "")


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return Told()


def test_a_client_that_was_killed_and_stays_on_the_server_is_ended_and_no_other(keeper: Told) -> None:
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    server = never_seen = os.getpid()
    keeper.answers = {"get_server_list": f"{server}", f"get_client_list {server}": f"{killed.pid} {os.getppid()}"}
    keeper.look()
    killed.kill()
    killed.communicate()
    keeper.look()
    assert not [line for line in keeper.lines if line.startswith("terminate")]  # the server may be about to notice
    keeper.look()
    assert [line for line in keeper.lines if line.startswith("terminate")] == [
        f"terminate_client {server} {killed.pid}"
    ]
    keeper.answers[f"get_client_list {server}"] = (
        f"{never_seen} {1 << 22}"  # of another namespace: it is not known here
    )
    keeper.lines.clear()
    for _ in range(3):
        keeper.look()
    assert not [line for line in keeper.lines if line.startswith("terminate")]


def test_a_daemon_is_ended_when_no_task_has_needed_it_for_a_while(tmp_path: Path) -> None:
    """It gives the card its memory and its watts back."""

    async def story() -> None:
        signals: list[tuple[str, int]] = []
        launcher: Any = SimpleNamespace(signal=lambda *words: signals.append(words))
        devices = SimpleNamespace(states={})
        node: Any = SimpleNamespace(ledger=SimpleNamespace(devices=devices, running={}))
        config = AgentConfig(node="n1", state=str(tmp_path), socket="s")
        daemons = MpsDaemons(config, node, launcher, NOBODY, NOBODY, idle_s=3600.0)
        daemon = daemons._by_device["nvidia:GPU-0"] = _Daemon("mps0x1-0", "nvidia:GPU-0", "")
        grant = SimpleNamespace(mode=DeviceMode.MPS, ask=SimpleNamespace(owner=""))
        card = SimpleNamespace(grants={"a-1": grant}, reading=SimpleNamespace(ours={}))
        devices.states["nvidia:GPU-0"] = card
        daemon.used_s -= 7200.0
        daemons._check(daemon)
        assert signals == []  # a task has it
        card.grants.clear()
        daemons._check(daemon)
        assert signals == []  # the pause has only begun
        daemon.used_s -= 7200.0
        daemons._check(daemon)
        assert (signals, daemons._by_device) == ([("mps0x1-0", signal.SIGTERM)], {})

    asyncio.run(story())


def test_while_there_is_no_daemon_nothing_looks_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look wakes the agent."""
    looks: list[float] = []

    async def next_tick(every_s: float) -> None:
        looks.append(every_s)
        daemons._by_device.clear()

    config = AgentConfig(node="n1", state=str(tmp_path), socket="s")
    monkeypatch.setattr(mps, "next_tick", next_tick)

    async def story() -> None:
        work = asyncio.get_running_loop().create_task(daemons.run())
        await asyncio.sleep(0)
        assert looks == []
        launcher_has = {"mps0x1-0"}
        daemons.listed(launcher_has, {})  # of an agent before
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert looks == [mps.POLL_S]
        work.cancel()

    monkeypatch.setattr(MpsDaemons, "_read_status", lambda *_: KeeperState("nvidia:GPU-0"))
    daemons = MpsDaemons(config, NOBODY, NOBODY, NOBODY, NOBODY)
    asyncio.run(story())
