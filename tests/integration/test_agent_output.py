"""Output that never comes, or that its task has spoiled: streams end with their attempts, and nobody hangs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from peerload.model.metrics import OUTPUTS_UNREADABLE
from tests.integration.cluster import Agent, Cluster, ended, without_waits
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLLOWED = 4
LISTENS = "0A"
"""A socket's state in /proc/net/tcp."""
SPOIL = "echo hi; file=$(readlink /proc/$$/fd/1); rm $file; mkdir $file; "
"""A command that makes a directory of its captured stdout."""


@pytest.fixture(scope="module")
def agents() -> Iterator[list[Agent]]:
    """n1 and n2, which know each other."""
    with Cluster() as cluster:
        yield cluster.linked(2, slots=6)


def _connections(agent: Agent) -> int:
    """How many connections that peers have made to an agent are open; those of clients come and go."""
    port = int(agent.listen.rpartition(":")[2])
    lines = Path(f"/proc/{agent.pid}/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    rows = [line.split() for line in lines]
    accepted = {f"socket:[{row[9]}]" for row in rows if int(row[1].partition(":")[2], 16) == port and row[3] != LISTENS}
    count = 0
    for entry in Path(f"/proc/{agent.pid}/fd").iterdir():
        try:
            count += str(entry.readlink()) in accepted
        except FileNotFoundError:
            continue  # closed meanwhile
    return count


def _until(gate: Path, before: str = "") -> tuple[str, ...]:
    return "sh", "-c", f"{before}until [ -e {gate} ]; do sleep 0.05; done"


def test_following_silent_tasks_elsewhere_leaves_no_stream_behind(agents: list[Agent]) -> None:
    home, executor = agents
    gate = home.directory / "silent"
    tasks = [home.submit(*_until(gate), placement={"node": "n2"}) for _ in range(FOLLOWED)]
    for task in tasks:
        home.await_state(task, "running")
    before = _connections(executor)
    followers = [home.spawn_cli("logs", "-f", task) for task in tasks]
    try:
        wait_until(lambda: _connections(executor) >= before + FOLLOWED, what="the streams to be open")
        gate.touch()
        for follower in followers:
            assert follower.wait(60) == 0
        wait_until(lambda: _connections(executor) <= before, what="the streams to be closed")
    finally:
        for follower in followers:
            with ended(follower):
                pass


def test_a_stream_ends_with_an_attempt_that_died(agents: list[Agent]) -> None:
    home, executor = agents
    gate = home.directory / "died"
    task = home.submit(*_until(gate, "echo so far; "), placement={"node": "n2"})
    home.await_state(task, "running")
    before = _connections(executor)
    with ended(home.spawn_cli("logs", "-f", task)) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == b"so far\n"
        os.kill(executor.launcher_pid, signal.SIGKILL)
        wait_until(lambda: home.show(task)["attempt"] == 2, what="the second attempt")
        home.await_state(task, "running")
        gate.touch()
        assert follower.wait(60) == 0
    assert home.wait(task)[task]["exit_code"] == 0
    wait_until(lambda: _connections(executor) <= before, what="the streams to be closed")


def test_output_of_a_node_that_fell_silent_is_incomplete_though_a_copy_is_under_way(agents: list[Agent]) -> None:
    home, executor = agents
    gate = home.directory / "fell silent"
    task = home.submit("sh", "-c", f"echo so far; until [ -e '{gate}' ]; do sleep 0.05; done", placement={"node": "n2"})
    with ended(home.spawn_cli("logs", "-f", task)) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == b"so far\n"
        executor.pause()
        try:
            wait_until(lambda: home.show(task)["unreachable_since"], what="n2 to be missed")
            done = home.cli("logs", task)
        finally:
            executor.resume()
        assert (done.returncode, done.stdout) == (125, b"so far\n")
        gate.touch()
        assert follower.wait(60) == 0


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_task_that_spoils_its_output_is_recorded_all_the_same(agents: list[Agent], node: str) -> None:
    home = agents[0]
    before = agents[int(node[1]) - 1].counters().get(OUTPUTS_UNREADABLE, 0)
    done = home.cli("run", "-w", node, "sh", "-c", f"echo apart >&2; {SPOIL} exit 3")
    assert done.returncode == 3
    assert without_waits(done.stderr).startswith(b"apart\n")
    task = home.show("@")
    assert (task["state"], task["node"], task["exit_code"]) == ("failed", node, 3)
    assert "stdout" in task["reason"]
    assert home.output(task["id"]) == (b"", b"apart\n")
    assert agents[int(node[1]) - 1].counters()[OUTPUTS_UNREADABLE] == before + 1


def test_output_that_its_node_cannot_read_any_more_is_no_success(agents: list[Agent]) -> None:
    home, executor = agents
    gate = home.directory / "lost"
    task = home.submit(*_until(gate, "head -c 200000 /dev/zero; "), placement={"node": "n2"})
    home.await_state(task, "running")
    spool = executor.state / "spool"
    wait_until(lambda: [path for path in spool.glob("*.out") if path.stat().st_size == 200_000], what="its output")
    home.pause()
    try:
        gate.touch()
        wait_until(lambda: not executor.call("nodes")["nodes"][0]["tasks_running"], what="it to end")
        for path in spool.glob("*.out"):
            path.unlink()
    finally:
        home.resume()
    waited = home.cli("wait", task)
    assert waited.returncode == 125, waited
    assert home.cli("logs", task).returncode == 125
    shown = home.show(task)
    assert (shown["exit_code"], shown["stdout_bytes"], "200000 bytes" in shown["reason"]) == (0, 0, True)
    again = home.cli("map", "--no-bar", "-w", "n1", f"head -c 9 /dev/zero; {SPOIL} : {{}}", ":::", "x")
    assert again.returncode == 125, again
    assert b".1  " in again.stderr


@pytest.mark.rule("F1")
def test_a_pipe_in_the_place_of_the_output_stops_nobody(agents: list[Agent]) -> None:
    script = "file=$(readlink /proc/$$/fd/1); rm $file; mkfifo $file; sleep 0.3; exit 4"
    assert agents[0].cli("run", "-w", "n2", "sh", "-c", script).returncode == 4
    assert agents[0].cli("run", "-w", "n1", "sh", "-c", script).returncode == 4


def test_a_task_that_ended_while_the_agent_was_away_is_looked_at_as_closely() -> None:
    with Cluster() as cluster:
        agent = cluster.agent()
        gate, end = agent.directory / "gate", agent.directory / "end"
        script = f"until [ -e {gate} ]; do sleep 0.05; done; {SPOIL} : > {end}; exit 5"
        task = agent.submit("sh", "-c", script)
        agent.await_state(task, "running")
        launcher = agent.launcher_pid
        agent.kill()
        gate.touch()
        exits = agent.state / "launcher" / "exits.log"
        wait_until(lambda: end.exists() and exits.stat().st_size > 0, what="the task to end")
        agent.start()
        assert agent.launcher_pid == launcher
        assert agent.wait(task)[task]["exit_code"] == 5
        assert "stdout" in agent.show(task)["reason"]
        assert agent.output(task) == (b"", b"")
