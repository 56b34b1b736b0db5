"""A real agent on a real small disk that fills up: nothing acknowledged is lost, what runs ends, and it can start there."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from peerload.model.errors import AgentUnavailable, BadRequest
from tests.integration.cluster import Agent, Cluster
from tests.support import wait_until

DISK_BYTES = 64 << 20
CHUNK = b"\0" * (1 << 16)


@contextlib.contextmanager
def mounted(directory: Path) -> Iterator[Path]:
    """A disk of DISK_BYTES at ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    options = f"size={DISK_BYTES},mode=0700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.fixture(name="cluster")
def fixture_cluster() -> Iterator[Cluster]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    with contextlib.ExitStack() as stack:
        cluster = Cluster()
        stack.enter_context(mounted(cluster.directory / "disk"))
        stack.enter_context(cluster)
        yield cluster


def on_small_disk(cluster: Cluster) -> Agent:
    agent = cluster.add("n1")
    agent.state = cluster.directory / "disk" / "state"
    return agent.start()


def fill(disk: Path) -> Path:
    """Take what room there is."""
    path = disk / "filler"
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(CHUNK) == len(CHUNK):
            pass
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0") == 1:
            pass
    return path


def refusal(agent: Agent) -> str:
    with pytest.raises(BadRequest) as refused:
        agent.submit("true")
    assert refused.value.code == "disk-full"
    return str(refused.value)


def disk_events(agent: Agent) -> list[str]:
    with agent.client() as client:
        parts = list(client.stream("events", what=["disk"]))
    return [event["state"] for part in parts for event in part["events"]]


def free_bytes(disk: Path) -> int:
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize


def test_a_full_disk_loses_nothing_and_what_runs_ends(cluster: Cluster) -> None:
    agent = on_small_disk(cluster)
    disk = cluster.directory / "disk"
    go = cluster.directory / "go"
    reserve = agent.state / "reserve"
    reserved = reserve.stat().st_size
    assert reserved == DISK_BYTES // 16
    waits = f"until [ -e {go} ]; do sleep 0.05; done"
    first = agent.submit("sh", "-c", waits, array=[(1, 2, 1)])
    wait_until(lambda: list(agent.states().values()) == ["running"] * 2)
    queued = agent.submit("true", array=[(1, 40, 1)])

    filler = fill(disk)
    assert free_bytes(disk) == 0
    assert "full" in refusal(agent)
    done = agent.cli("submit", "true")
    assert done.returncode == 125
    assert b"the disk of this node is full; nothing was submitted" in done.stderr
    assert len(agent.states()) == 42  # reading goes on
    wait_until(lambda: agent.call("nodes")["nodes"][0]["trouble"] == "disk full")
    assert b"alive, disk full" in agent.cli("nodes").stdout

    go.touch()
    ended = agent.wait(first, queued)
    assert {task["state"] for task in ended.values()} == {"done"}
    assert len(ended) == 42
    assert reserve.stat().st_size < reserved

    agent.kill()
    fill(disk)
    agent.start()
    assert set(agent.states().values()) == {"done"}
    refusal(agent)

    filler.unlink()
    wait_until(lambda: reserve.stat().st_size == reserved, what="the reserve to be taken again")
    assert agent.wait(agent.submit("true"))
    wait_until(lambda: disk_events(agent)[-1:] == ["ok"])
    assert "full" in disk_events(agent)


def test_a_sync_that_fails_stops_the_agent_at_once(strace: Path) -> None:
    with Cluster() as cluster:
        agent = cluster.agent("n1")
        kept = agent.submit("sleep", "60")
        agent.await_state(kept, "running")
        words = [str(strace), "-f", "-qq", "-o", "/dev/null", "-p", str(agent.pid)]
        words += ["-e", "trace=fsync,fdatasync", "-e", "inject=fsync,fdatasync:error=EIO"]
        with subprocess.Popen(words, stderr=subprocess.PIPE) as tracing:
            wait_until(lambda: tracing.poll() is not None or traced(agent.pid) == tracing.pid)
            if tracing.poll() is not None:
                assert tracing.stderr is not None
                pytest.skip(f"no process can be traced here: {tracing.stderr.read().decode().strip()}")
            with pytest.raises(AgentUnavailable):
                agent.submit("true", token="said-once-more")
            assert agent.reap() == 1
            tracing.wait(10)
        assert "the store failed" in agent.log_end()
        agent.start()
        assert agent.states()[kept] == "running"
        # Whether the disk has what was not synced nobody can know: the same token gives one task, either way.
        assert agent.submit("true", token="said-once-more") == "n1/2"
        assert set(agent.states()) == {kept, "n1/2"}


def traced(pid: int) -> int:
    """Who traces every thread of this process, 0 if nobody does."""
    tracers = set()
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        text = status.read_text(encoding="ascii", errors="replace")
        tracers.add(int(text.partition("TracerPid:")[2].split()[0]))
    return tracers.pop() if len(tracers) == 1 else 0


def test_without_a_reserve_what_is_decided_waits_for_room(cluster: Cluster) -> None:
    agent = on_small_disk(cluster)
    disk = cluster.directory / "disk"
    go = cluster.directory / "go"
    tasks = agent.submit("sh", "-c", f"until [ -e {go} ]; do sleep 0.05; done", array=[(1, 8, 1)])
    wait_until(lambda: list(agent.states().values()).count("running") == 2)
    filler = fill(disk)
    (agent.state / "reserve").write_bytes(b"")  # somebody else was quicker
    fill(disk)
    go.touch()
    wait_until(lambda: agent.counters()["commits waiting for room on the disk"])
    assert len(agent.states()) == 8  # it answers, with what was durable
    refusal(agent)
    filler.unlink()
    ended = agent.wait(tasks)
    assert {task["state"] for task in ended.values()} == {"done"}
    assert agent.runs
