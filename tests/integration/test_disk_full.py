"""A real agent on a real small disk that fills up: nothing acknowledged is lost, what runs ends, and it can start there."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from peerload.model.errors import AgentUnavailable, BadRequest
from peerload.model.metrics import OUTPUTS_WAITING
from tests.integration.cluster import Agent, Cluster, ended
from tests.integration.test_files import User
from tests.integration.test_web import serve
from tests.support import wait_until
from tests.wording import Says

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
        stack.callback(shutil.rmtree, cluster.directory, ignore_errors=True)  # where the disk was
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


def refusal(agent: Agent) -> None:
    with pytest.raises(BadRequest) as refused:
        agent.submit("true")
    assert refused.value.code == "disk-full"


def disk_events(agent: Agent) -> list[str]:
    with agent.client() as client:
        parts = list(client.stream("events", what=["disk"]))
    return [event["state"] for part in parts for event in part["events"]]


def free_bytes(disk: Path) -> int:
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize


@pytest.mark.bad_input("disk-filler")
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
    refusal(agent)
    assert agent.cli("submit", "true").returncode == 125
    assert len(agent.states()) == 42  # reading goes on
    wait_until(lambda: agent.call("nodes")["nodes"][0]["trouble"] == "disk full")

    go.touch()
    found = agent.wait(first, queued)
    assert {task["state"] for task in found.values()} == {"done"}
    assert len(found) == 42
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


def test_files_that_a_disk_has_no_room_for_leave_running_tasks_alone(cluster: Cluster, tmp_path: Path) -> None:
    here = cluster.agent("n1")
    there = cluster.add("n2", "--peer", here.listen)
    there.state = cluster.directory / "disk" / "state"
    cluster.await_acquainted([here, there.start()])
    disk, go = there.state.parent, tmp_path / "go"
    (tmp_path / "small").write_text("small\n")
    (tmp_path / "large").write_bytes(os.urandom(DISK_BYTES // 2))

    def submit(path: str, script: str) -> str:
        words = ("submit", "--node", "n2", "--in", path, "--out", "out", "sh", "-c", script)
        return here.cli(*words, cwd=tmp_path).stdout.decode().strip()

    running = submit("small", f"until [ -e {go} ]; do sleep 0.05; done; cat small > out")
    here.await_state(running, "running", timeout_s=60.0)
    filler = disk / "filler"
    filler.write_bytes(bytes(DISK_BYTES // 4))
    waits = submit("large", "wc -c < large > out")

    def reasons() -> list[str]:
        told: list[dict[str, str]] = json.loads(here.cli("why", "--json", waits).stdout)["nodes"]
        return [one["reason"] for one in told]

    wait_until(lambda: any("on its disk" in reason for reason in reasons()), 60.0, "the disk to be named")
    assert (here.show(waits)["state"], here.show(running)["state"]) == ("queued", "running")
    assert free_bytes(disk) >= DISK_BYTES // 20, "what stays free is not taken for files"
    go.touch()
    assert here.wait(running)[running]["state"] == "done"
    assert (tmp_path / "out").read_text() == "small\n"
    here.cli("cancel", waits)
    filler.unlink()


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
            tracing.wait(60)
        assert Says.STORE_FAILED() in agent.log_end()
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
    wait_until(lambda: agent.counters()["commits_stalled"])
    assert len(agent.states()) == 8  # it answers, with what was durable
    refusal(agent)
    filler.unlink()
    found = agent.wait(tasks)
    assert {task["state"] for task in found.values()} == {"done"}
    assert agent.runs


def test_a_first_start_on_a_full_disk_names_the_disk(cluster: Cluster) -> None:
    agent = cluster.add("n1")
    agent.state = cluster.directory / "disk" / "state"
    fill(cluster.directory / "disk")
    done = agent.cli("up", "--state", str(agent.state), "--slots", "1", "--node", "n1")
    assert done.returncode == 125
    assert f"the disk of {agent.state} is full".encode() in done.stderr
    assert not list((agent.state / "spool").glob("*"))


def test_where_no_agent_can_start_clean_makes_room_by_itself(cluster: Cluster) -> None:
    agent = on_small_disk(cluster)
    disk = cluster.directory / "disk"
    written = agent.submit("head", "-c", "5000000", "/dev/zero", array=[(1, 3, 1)])
    quiet = agent.submit("true")
    agent.wait(written, quiet)
    agent.kill()
    for log in agent.state.glob("*.log*"):
        log.unlink()
    fill(disk)
    (agent.state / "reserve").write_bytes(b"")
    fill(disk)
    assert free_bytes(disk) == 0
    words = ("clean", "--state-dir", str(agent.state))
    assert agent.spawn().reap() == 125
    assert agent.cli("clean", "--all").returncode == 125  # whose agent's tasks these are is not for it to guess
    tried = agent.cli(*words, "--all", "--outputs", "--dry-run", "--json")
    assert tried.returncode == 0, tried.stderr
    assert json.loads(tried.stdout)["outputs"] == 3
    assert agent.cli(*words, "n1/99").returncode == 125
    done = agent.cli(*words, "--all", "--outputs", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["outputs"], found["removed"], found["in_use"]) == (3, 3, 0)
    assert free_bytes(disk) > 14_000_000
    agent.start()
    assert set(agent.states().values()) == {"done"}
    assert agent.cli("logs", f"{written}.1").returncode != 0
    assert agent.cli(*words, "--all").returncode == 0  # by the agent at the socket
    assert agent.states() == {}


@pytest.mark.long
def test_a_result_that_home_has_no_room_for_is_told_and_waits(cluster: Cluster) -> None:
    """Its home's disk is full: `run` says so, and the result comes when there is room."""
    home = on_small_disk(cluster)
    disk = cluster.directory / "disk"
    there = cluster.agent("n2", "--peer", home.listen)
    cluster.await_acquainted([home, there])
    go = cluster.directory / "go"
    line = f"until [ -e {go} ]; do sleep 0.05; done; head -c 3000000 /dev/zero"
    with ended(home.spawn_cli("run", "--node", "n2", "-s", line, stdout=subprocess.DEVNULL)) as running:
        wait_until(lambda: list(home.states().values()) == ["running"], 60)
        filler = fill(disk)
        (home.state / "reserve").write_bytes(b"")
        fill(disk)
        go.touch()
        (task,) = home.states()
        assert running.stderr is not None
        said = b""
        while b"has ended" not in said:
            line_said = running.stderr.readline()
            assert line_said, said
            said += line_said
        assert all(fact in said for fact in (task.encode(), b"n2", b"disk"))
        wait_until(lambda: "disk of its home" in home.show(task)["reason"], what="`show` tells why")
        assert home.show(task)["reason"] in home.cli("why", task).stdout.decode()
        filler.unlink()
        running.communicate(timeout=60)
        assert running.returncode == 0
    assert home.show(task)["state"] == "done"


def test_what_a_task_wrote_on_a_full_disk_is_said_to_be_missing(cluster: Cluster) -> None:
    agent = on_small_disk(cluster)
    go = cluster.directory / "go"
    line = f"until [ -e {go} ]; do sleep 0.05; done; head -c 3000000 /dev/zero || exit 7"
    with ended(agent.spawn_cli("run", "-s", line, stdout=subprocess.DEVNULL)) as running:
        wait_until(lambda: list(agent.states().values()) == ["running"], 60)
        fill(cluster.directory / "disk")
        go.touch()
        _, said = running.communicate(timeout=60)
        assert running.returncode == 7
    (task,) = agent.states()
    reason = agent.show(task)["reason"]
    assert "disk of n1" in reason
    assert reason in said.decode()
    assert reason in agent.cli("why", task).stdout.decode()


def test_a_full_disk_is_scraped_like_any_other(cluster: Cluster) -> None:
    agent = on_small_disk(cluster)
    path = str(cluster.directory / "web")
    process, _ = serve(agent, "--listen", path, "--tokens", str(cluster.directory / "tokens"))

    def scraped() -> dict[str, float]:
        with contextlib.closing(http.client.HTTPConnection("x", timeout=60)) as link:
            link.sock = socket.socket(socket.AF_UNIX)
            link.sock.connect(path)
            link.request("GET", "/metrics")
            lines = link.getresponse().read().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    with ended(process):
        before = scraped()
        fill(cluster.directory / "disk")
        wait_until(lambda: scraped()["peerload_disk_free_bytes"] < before["peerload_disk_free_bytes"] / 10)
        wait_until(lambda: agent.call("checkup")["disk"]["state"] == "full")
        agent.call("events")
        after = scraped()
        assert after["peerload_inbox_events"] == 0
        assert after.keys() >= {"peerload_disk_size_bytes", "peerload_commits_stalled"}


def test_output_files_wait_for_room_at_their_home_through_a_restart_too(cluster: Cluster, tmp_path: Path) -> None:
    agent = on_small_disk(cluster)
    disk = cluster.directory / "disk"
    content = os.urandom(4 << 20)
    (tmp_path / "content").write_bytes(content)
    user = User(cluster, [agent], tmp_path)
    go = tmp_path / "go"
    command = f"until [ -e {go} ]; do sleep 0.05; done; cat {tmp_path}/content > made; exit 3"
    task = user.types("submit", "--in", "content", "--out", "made", "sh", "-c", command).stdout.strip()
    wait_until(lambda: agent.states()[task] == "running")
    filler = fill(disk)
    os.truncate(filler, filler.stat().st_size - (5 << 20))  # the task can write, and below the low mark nothing is kept
    go.touch()
    wait_until(lambda: agent.counters().get(OUTPUTS_WAITING) == 1, what="the outputs to wait")

    def told() -> None:
        assert agent.states() == {task: "running"}
        for verb in ("show", "why"):
            assert "wait in its working directory" in user.types(verb, task).stdout
        checkup = agent.call("checkup")
        assert checkup["outputs_waiting"]["attempts"] == 1
        assert checkup["outputs_waiting"]["why"] in user.types("doctor").stdout

    told()
    agent.kill()
    agent.start()
    wait_until(lambda: agent.call("checkup")["outputs_waiting"] is not None, what="the outputs to wait again")
    told()
    assert not (tmp_path / "made").exists()
    filler.unlink()
    ended = agent.wait(task)[task]
    assert (ended["state"], ended["exit_code"]) == ("failed", 3)
    assert (tmp_path / "made").read_bytes() == content
    assert agent.call("checkup")["outputs_waiting"] is None


@pytest.mark.parametrize("home", ["n1", "n2"])
def test_a_task_whose_output_files_wait_says_so_at_its_home_and_can_be_cancelled(
    cluster: Cluster, tmp_path: Path, home: str
) -> None:
    agent = asked = on_small_disk(cluster)
    if home == "n2":
        asked = cluster.agent("n2", "--peer", agent.listen)
        cluster.await_acquainted([agent, asked])
    user = User(cluster, [asked], tmp_path)
    go = tmp_path / "go"
    command = f"until [ -e {go} ]; do sleep 0.05; done; head -c 100000 /dev/zero | tr '\\0' x > made"
    task = user.types("submit", "--node", "n1", "--out", "made", "sh", "-c", command).stdout.strip()
    wait_until(lambda: asked.states()[task] == "running")
    filler = fill(cluster.directory / "disk")
    os.truncate(filler, filler.stat().st_size - (1 << 20))
    go.touch()
    wait_until(lambda: agent.counters().get(OUTPUTS_WAITING) == 1, what="the outputs to wait")
    for verb in ("show", "why", "ls"):
        shown = functools.partial(user.types, verb, "--json", task)
        wait_until(lambda shown=shown: "its output files wait" in shown().stdout, what=verb)  # type: ignore[misc]
    assert user.types("cancel", task).returncode == 0
    wait_until(lambda: not agent.counters().get(OUTPUTS_WAITING), what="the outputs to be given up")
    assert asked.states() == {task: "cancelled"}
