"""What somebody meets who uses it for the first time, or looks into its corners: each is told in words."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from typing import TYPE_CHECKING

import pytest

from tests.integration.cluster import Agent, Cluster
from tests.support import wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with Cluster() as cluster:
        yield cluster.agent("n1", slots=1)


def refused(agent: Agent, *words: str) -> str:
    done = agent.cli(*words)
    assert done.returncode == 125
    assert done.stdout == b""
    return done.stderr.decode()


def what_happened(agent: Agent, what: str) -> list[str]:
    with agent.client() as client:
        parts = list(client.stream("events", what=[what]))
    return [event["state"] for part in parts for event in part["events"]]


def test_events_of_a_task_that_there_is_not(agent: Agent) -> None:
    for task in ("n1/999", "999", "n1/999.3"):
        assert task in refused(agent, "events", task)
        assert task in refused(agent, "events", "-f", task)


def test_events_of_another_nodes_task_that_was_never_here(agent: Agent) -> None:
    said = refused(agent, "events", "n9/4")
    assert "n9" in said
    assert "peerload nodes" in said


def test_a_signal_is_told_apart_from_an_exit_code(agent: Agent) -> None:
    task, own = agent.submit("sh", "-c", "kill -9 $$"), agent.submit("sh", "-c", "exit 137")
    agent.wait(task, own)
    assert (agent.show(task)["signal"], "KILL" in agent.show(task)["reason"]) == (9, True)
    assert (agent.show(own)["exit_code"], agent.show(own)["signal"]) == (137, None)


def test_a_value_that_cannot_be_is_told_without_a_schemas_words(agent: Agent) -> None:
    config = agent.directory / "wrong.toml"
    config.write_text('slots = "many"\n', encoding="utf-8")
    done = agent.cluster.cli(agent.socket, "agent", "--config", str(config), "--state", str(agent.directory / "other"))
    said = done.stderr.decode()
    assert done.returncode == 125
    assert "slots" in said
    assert "Expected" not in said
    assert "`" not in said


def test_a_file_where_a_directory_is_wanted(agent: Agent) -> None:
    for name in ("spool", "scratch", "launcher", "tls"):
        state = agent.directory / f"state-{name}"
        state.mkdir(mode=0o700)
        (state / name).touch()
        done = agent.cluster.cli(f"{agent.socket}2", "agent", "--node", "n2", "--state", str(state))
        assert done.returncode == 125
        said = done.stderr.decode()
        assert f"mv {state}/{name} " in said
        assert "bug" not in said


def test_the_cluster_that_the_running_agent_uses_is_told(agent: Agent) -> None:
    shown = agent.cli("cluster", "show", "--json")
    told = json.loads(shown.stdout)
    used = agent.call("info")
    assert told["agent"]["node"] == "n1"
    assert told["agent"]["id"] == used["cluster_id"]
    assert agent.cli("cluster", "init", str(agent.directory / "another")).returncode == 0
    other = agent.cluster.cli(
        agent.socket,
        "cluster",
        "show",
        env={**agent.cluster.environment, "PEERLOAD_CLUSTER": str(agent.directory / "another")},
    )
    assert str(used["cluster_directory"]) in other.stderr.decode()


# -- the launcher ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stranger(agent: Agent) -> Iterator[socket.socket]:
    """Somebody connects to the launcher's socket."""
    fd = os.open(agent.state / "launcher", os.O_PATH | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as own:
            own.settimeout(60)
            own.connect(f"/proc/self/fd/{fd}/launcher.sock")
            yield own
    finally:
        os.close(fd)


def lost_and_found(agent: Agent) -> list[str]:
    """What the agent has told of its launcher, apart from a busy one that did not answer for a while."""
    return [state for state in what_happened(agent, "launcher") if state in {"lost", "ready"}]


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def test_somebody_on_the_launchers_socket_changes_nothing(agent: Agent) -> None:
    task = agent.submit("sleep", "300")
    agent.await_state(task, "running")
    before = lost_and_found(agent)
    with contextlib.ExitStack() as stack:
        several = [stack.enter_context(stranger(agent)) for _ in range(12)]
        assert several[0].recv(1) == b""  # one too many
        several[-1].sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert several[-1].recv(1) == b""
        several[-2].sendall(frame(b"\x91\x81\xa2do\xa4stop"))
        assert several[-2].recv(1) == b""
        agent.call("cancel", tasks=[task])
        assert agent.wait(agent.submit("true"))
    assert lost_and_found(agent) == before


def test_whoever_takes_the_launchers_socket_over_does_not_make_it_lost(agent: Agent) -> None:
    task = agent.submit("sleep", "300")
    agent.await_state(task, "running")
    launcher = agent.launcher_pid
    before = lost_and_found(agent)
    with stranger(agent) as own:
        own.sendall(frame(b"\x91\x81\xa2do\xa4list"))
        assert own.recv(1)
        wait_until(lambda: lost_and_found(agent) == [*before, "lost", "ready"])
    assert agent.launcher_pid == launcher
    assert agent.show(task)["state"] == "running"
    agent.cli("cancel", "--wait", task)


@pytest.mark.long
def test_a_launcher_that_stands_still_is_told_and_goes_on(agent: Agent) -> None:
    launcher = agent.launcher_pid
    os.kill(launcher, signal.SIGSTOP)
    try:
        wait_until(lambda: agent.call("nodes")["nodes"][0]["trouble"] == "launcher does not answer", 40)
        assert f"alive, {Says.LAUNCHER_SILENT()}".encode() in agent.cli("nodes").stdout
        task = agent.submit("true")
        assert agent.show(task)["state"] == "queued"
    finally:
        os.kill(launcher, signal.SIGCONT)
    assert agent.wait(task)[task]["state"] == "done"
    wait_until(lambda: agent.call("nodes")["nodes"][0]["trouble"] is None)
    wait_until(lambda: what_happened(agent, "launcher")[-2:] == ["silent", "answers"])
    assert "launcher  silent: " in agent.cli("events", "--what", "launcher").stdout.decode()


# -- other nodes -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_suspect_is_not_forgotten_and_of_the_dead_no_load_is_shown() -> None:
    with Cluster() as cluster:
        home, other = cluster.linked(2, slots=1)
        other.kill()

        def state() -> str:
            return next(str(node["state"]) for node in home.call("nodes")["nodes"] if node["node"] == "n2")

        wait_until(lambda: state() != "alive", 30)
        done = home.cli("forget", "n2")
        if done.returncode:  # seldom: it may be called dead a moment later
            assert Says.NODE_SUSPECT("n2").encode() in done.stderr
            assert b"peerload forget n2" in done.stderr
            wait_until(lambda: state() == "dead", 30)
            (dead,) = [node for node in home.call("nodes")["nodes"] if node["node"] == "n2"]
            assert (dead["load"], dead["region"], dead["tasks_running"]) == (None, None, None)
            assert dead["cpus"]
            assert home.cli("forget", "n2").returncode == 0
        assert [node["node"] for node in home.call("nodes")["nodes"]] == ["n1"]
