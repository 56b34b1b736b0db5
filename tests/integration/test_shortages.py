"""Real agents on a machine that is short of inodes, processes or descriptors: nothing fails for that, all is done later."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from peerload.model.errors import BadRequest
from tests.integration.cluster import Agent, Cluster
from tests.integration.test_launcher import Bench, fixture_bench  # noqa: F401 -- a fixture
from tests.support import wait_until

TASKS = 12
PIDS_CGROUPS = (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup"))
FILES_MAX = 400


@pytest.fixture(name="cluster")
def fixture_cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


class Pids:
    """A cgroup that bounds how many processes and threads there are in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def limit(self, most: int | None) -> None:
        """Allow so many, None: any number. Those that are there stay."""
        (self.path / "pids.max").write_text("max" if most is None else str(most), encoding="ascii")

    def add(self, pid: int) -> None:
        """Move a process into it, with all of its threads."""
        (self.path / "cgroup.procs").write_text(str(pid), encoding="ascii")


@pytest.fixture(name="pids")
def fixture_pids() -> Iterator[Pids]:
    for parent in PIDS_CGROUPS:
        path = parent / f"peerload-test-{secrets.token_hex(4)}"
        with contextlib.suppress(OSError):
            path.mkdir()
            if (path / "pids.max").exists():
                break
            path.rmdir()
    else:
        pytest.skip("no cgroup that bounds processes can be made here")
    try:
        yield Pids(path)
    finally:
        for pid in (path / "cgroup.procs").read_text(encoding="ascii").split():
            with contextlib.suppress(OSError):
                (path.parent / "cgroup.procs").write_text(pid, encoding="ascii")
        wait_until(lambda: _removed(path), what=f"{path} to be empty")


def _removed(path: Path) -> bool:
    with contextlib.suppress(OSError):
        path.rmdir()
    return not path.exists()


@pytest.fixture(name="small_disk")
def fixture_small_disk(cluster: Cluster) -> Iterator[Path]:
    """A disk with few inodes."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    directory = cluster.directory / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size=128m,nr_inodes={FILES_MAX},mode=0700", "tmpfs", str(directory)]
    done = subprocess.run(mount, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield directory
    finally:
        cluster.close(quiet=True)
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
        shutil.rmtree(cluster.directory, ignore_errors=True)


def is_short(agent: Agent) -> bool:
    return any(event["state"] == "short" for event in launcher_events(agent))


def launcher_events(agent: Agent) -> list[dict[str, object]]:
    with agent.client() as client:
        return [event for part in client.stream("events", what=["launcher"]) for event in part["events"]]


def test_a_launcher_without_processes_says_that_nothing_has_started(bench: Bench, pids: Pids) -> None:
    launcher = bench.launcher()
    agent = bench.agent()
    pids.add(launcher.pid)
    pids.limit(1)
    agent.spawn("a", b"true")
    event = agent.lost("a")
    assert event["never_started"]
    assert event["shortage"]
    assert not list(bench.directory.glob("a.*"))
    agent.spawn("b", b"true", once=True)
    assert agent.lost("b")["shortage"]
    pids.limit(None)
    agent.spawn("c", b"sleep", b"0.2", once=True)
    agent.started("c")
    pids.limit(1)  # no thread can be made when it has ended
    assert agent.ended("c")["exit_code"] == 0
    agent.spawn("a", b"true")
    assert agent.lost("a")["shortage"]
    assert launcher.poll() is None


def test_a_launcher_that_could_have_no_guard_has_one_as_soon_as_it_can(bench: Bench, pids: Pids) -> None:
    launcher = bench.launcher()
    agent = bench.agent()
    agent.spawn("a", b"sleep", b"1000")
    agent.started("a")
    first = guard_of(launcher.pid)
    assert first
    pids.add(launcher.pid)
    pids.limit(1)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not guard_of(launcher.pid), what="the guard to be gone")
    pids.limit(None)
    wait_until(lambda: guard_of(launcher.pid), what="another guard")
    launcher.kill()
    launcher.wait()


def guard_of(launcher: int) -> int:
    """The guard of this launcher, 0 if it has none."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text(encoding="ascii").split()
    for child in children:
        with contextlib.suppress(OSError):
            if b"peerload-guard" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return 0


def test_tasks_wait_while_no_process_can_be_made_and_the_node_says_so(cluster: Cluster, pids: Pids) -> None:
    agent = cluster.agent()
    pids.add(agent.launcher_pid)
    pids.limit(1)
    array = agent.submit("true", array=[(1, TASKS, 1)])
    once = agent.submit("true", guarantee="once")
    wait_until(lambda: is_short(agent), what="the shortage to be noticed")
    assert set(agent.states().values()) <= {"queued", "leased"}
    wait_until(lambda: agent.call("nodes")["nodes"][0]["trouble"])
    assert "processes" in agent.call("nodes")["nodes"][0]["trouble"]
    assert b"processes" in agent.cli("why", once).stdout
    pids.limit(None)
    ended = agent.wait(array, once, timeout_s=120)
    assert {task["state"] for task in ended.values()} == {"done"}
    wait_until(lambda: not agent.call("nodes")["nodes"][0]["trouble"])


def test_an_agent_lives_and_starts_again_where_not_one_thread_can_be_made(cluster: Cluster, pids: Pids) -> None:
    """As beside a fork bomb, which it is there to end."""
    agent = cluster.agent()
    bomb = agent.submit("sleep", "1000")
    agent.await_state(bomb, "running")
    agent.kill()
    pids.limit(0)
    agent.spawn(preexec_fn=lambda: pids.add(os.getpid())).await_ready()
    assert len(list(Path(f"/proc/{agent.pid}/task").iterdir())) == 1
    assert agent.show(bomb)["state"] == "running"
    assert agent.cli("submit", "true").returncode != 0  # its directory cannot be looked at
    assert agent.cli("cancel", bomb).returncode == 0
    assert agent.await_state(bomb, "cancelled")
    pids.limit(None)
    assert agent.wait(agent.submit("true"))
    pids.limit(0)
    assert agent.cli("down").returncode == 0
    assert agent.reap() == 0


def test_tasks_wait_while_no_file_can_be_made_and_no_more_are_taken(cluster: Cluster, small_disk: Path) -> None:
    agent = cluster.add("n1")
    agent.state = small_disk / "state"
    agent.start()
    go = cluster.directory / "go"
    first = agent.submit("sh", "-c", f"until [ -e {go} ]; do sleep 0.05; done; echo done", array=[(1, 2, 1)])
    wait_until(lambda: list(agent.states().values()) == ["running"] * 2)
    queued = agent.submit("echo", "done", array=[(1, TASKS, 1)])
    files = small_disk / "files"
    files.mkdir()
    with contextlib.suppress(OSError):
        for number in range(FILES_MAX):
            (files / str(number)).touch()
    with pytest.raises(BadRequest) as refused:
        agent.submit("true")
    assert refused.value.code == "disk-full"
    assert "inodes" in str(refused.value)
    go.touch()
    wait_until(lambda: is_short(agent), what="the shortage to be noticed")
    wait_until(lambda: "disk full" in (agent.call("nodes")["nodes"][0]["trouble"] or ""))
    agent.wait(first)  # each end gives an inode back, that of its empty stderr
    shutil.rmtree(files)
    ended = agent.wait(first, queued, timeout_s=120)
    assert {task["state"] for task in ended.values()} == {"done"}
