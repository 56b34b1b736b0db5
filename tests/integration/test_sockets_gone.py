"""Sockets whose names are removed while agent and launcher run on: both make them anew, and are found again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from peerload.model.errors import AgentUnavailable
from tests.integration.cluster import Agent, Cluster
from tests.support import wait_until


@pytest.fixture(name="cluster")
def fixture_cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def answers(agent: Agent) -> bool:
    try:
        return bool(agent.call("info"))
    except AgentUnavailable:
        return False


def test_an_agent_is_found_again_after_its_runtime_directory_was_made_anew(cluster: Cluster) -> None:
    """As when its user logs out and in again."""
    agent = cluster.add("n1")
    runtime = cluster.directory / "run"
    agent.socket = str(runtime / "peerload" / "agent.sock")
    agent.start()
    with agent.client() as client:
        pid = agent.pid
        shutil.rmtree(runtime / "peerload")
        runtime.rmdir()
        runtime.touch()  # for a while nothing can be made there
        wait_until(lambda: "cannot recreate the control socket" in agent.log_end(), what="the agent to notice")
        runtime.unlink()
        runtime.mkdir(mode=0o700)
        up = agent.cli("up", "--state", str(agent.state), "--socket", agent.socket)
        assert up.returncode == 0, up.stderr
        assert b"already running" in up.stdout
        assert agent.call("info")["pid"] == pid == client.call("info")["pid"]  # old connections stay
    assert agent.cli("ls").returncode == 0
    Path(agent.socket).unlink()
    wait_until(lambda: answers(agent), what="its socket to be there again")
    assert agent.cli("down").returncode == 0
    assert agent.reap() == 0
    assert not Path(agent.socket).exists()


@pytest.mark.long
def test_an_agent_that_winds_down_does_not_make_its_socket_anew(cluster: Cluster) -> None:
    agent = cluster.agent("n1")
    task = agent.submit("sh", "-c", "trap '' TERM; sleep 4; true")  # the wind-down waits for it
    agent.await_state(task, "running")
    assert agent.cli("down", "--all").returncode == 0
    assert agent.reap() == 0
    assert not Path(agent.socket).exists()


def test_a_socket_that_another_agent_listens_at_is_left_to_it(cluster: Cluster) -> None:
    first = cluster.agent("n1")
    second = cluster.add("n2")
    Path(first.socket).unlink()
    first.pause()
    second.socket = first.socket
    second.start()
    first.resume()
    wait_until(lambda: "cannot recreate the control socket" in first.log_end(), what="the first one to notice")
    assert first.call("info")["node"] == "n2"
    first.kill()
    assert second.call("info")["node"] == "n2"


def test_a_launcher_whose_socket_was_removed_is_reached_by_the_next_agent(cluster: Cluster) -> None:
    agent = cluster.agent()
    task = agent.submit("sleep", "1000")
    agent.await_state(task, "running")
    launcher, socket = agent.launcher_pid, agent.state / "launcher" / "launcher.sock"
    socket.unlink()
    wait_until(socket.exists, what="the launcher to make it anew")
    agent.kill()
    socket.unlink()  # while nobody is there to tell it
    agent.start()
    assert agent.launcher_pid == launcher
    assert agent.show(task)["state"] == "running"
    assert agent.cli("cancel", task).returncode == 0
    agent.await_state(task, "cancelled")
