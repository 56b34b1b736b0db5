"""What is promised about the executions of a task, on real processes: parked, at most once, fast, leases of its own."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.integration.cluster import SHORT_LEASE_S, Agent, Cluster, ended, is_alive
from tests.integration.ledger import Ledger
from tests.support import stands_still, wait_until
from tests.wording import Says

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        yield made


@pytest.fixture
def ledger(cluster: Cluster) -> Ledger:
    return Ledger(cluster.directory / "ledger")


def away(cluster: Cluster, ledger: Ledger, gate: Path, *flags: str) -> tuple[Agent, Agent, str]:
    """A task of n1 that runs on n2 until the gate is there, submitted as people do."""
    home, executor = cluster.linked(2, slots=1, lease_s=SHORT_LEASE_S)
    task = home.cli("submit", "-w", "n2", *flags, "--", *ledger.argv(1, 5, gate)).stdout.decode().strip()
    home.await_state(task, "running")
    return home, executor, task


@pytest.fixture
def gate(cluster: Cluster) -> Path:
    """A file that ends the tasks of `away`."""
    return cluster.directory / "gate"


def reasons(agent: Agent, task: str) -> list[str]:
    return [step["reason"] for step in agent.show(task)["history"]]


def beats(ledger: Ledger, task: str) -> int:
    return len(ledger.of(task))


def take_down(agent: Agent, *pids: int) -> None:
    """As if its machine were gone: agent, launcher, and tasks."""
    launcher = agent.launcher_pid
    agent.kill()
    os.kill(launcher, signal.SIGKILL)
    for pid in pids:
        if is_alive(pid):
            os.killpg(pid, signal.SIGKILL)


@pytest.mark.long
def test_a_task_whose_home_stops_politely_runs_on_without_a_lease(cluster: Cluster, ledger: Ledger, gate: Path) -> None:
    home, _, task = away(cluster, ledger, gate)
    before = beats(ledger, task)
    assert home.cli("down").returncode == 0
    home.reap()
    # Four leases: the task would be frozen at the first one's end, had it not been parked.
    wait_until(lambda: beats(ledger, task) > before + 40 * SHORT_LEASE_S // 2, 30, "it to run on")
    home.start()
    gate.touch()
    assert home.wait(task)[task]["exit_code"] == 5
    assert not ledger.repeated()
    assert home.show(task)["attempt"] == 1
    assert Says.PARKED() in reasons(home, task)


@pytest.mark.long
def test_a_parked_task_is_leased_again_when_its_home_is_back(cluster: Cluster, ledger: Ledger, gate: Path) -> None:
    home, executor, task = away(cluster, ledger, gate)
    assert home.cli("down").returncode == 0
    home.reap()
    home.start()
    wait_until(lambda: not home.show(task)["parked"], 20, "its node to have a deadline again")
    assert Says.DEADLINE_AGAIN("n2") in reasons(home, task)
    executor.pause()
    pid = ledger.pids(task)[0]
    wait_until(lambda: stands_still(pid), 15, "its launcher to freeze it")
    executor.resume()
    gate.touch()
    assert home.wait(task)[task]["exit_code"] == 5
    assert not ledger.repeated()


@pytest.mark.long
def test_a_parked_task_outlives_the_agent_of_its_node(cluster: Cluster, ledger: Ledger, gate: Path) -> None:
    home, executor, task = away(cluster, ledger, gate)
    assert home.cli("down").returncode == 0
    home.reap()
    executor.kill()
    executor.start()
    before = beats(ledger, task)
    wait_until(lambda: beats(ledger, task) > before + 15 * SHORT_LEASE_S, 30, "it to run on")
    home.start()
    gate.touch()
    assert home.wait(task)[task]["exit_code"] == 5
    assert not ledger.repeated()


def _said(process: subprocess.Popen[bytes]) -> bytes:
    """The two lines that it says on stderr while it waits; then it is stopped."""
    with ended(process):
        assert process.stderr is not None
        return process.stderr.readline() + process.stderr.readline()


@pytest.mark.long
def test_once_a_lost_node_leaves_the_outcome_unknown(cluster: Cluster, ledger: Ledger, gate: Path) -> None:
    home, executor, task = away(cluster, ledger, gate, "--once")
    third = cluster.agent("n3", "--peer", home.listen, lease_s=SHORT_LEASE_S)
    cluster.await_acquainted([home, third])
    take_down(executor, *ledger.pids(task))
    followed = home.spawn_cli("logs", "-f", task)
    waited = home.spawn_cli("wait", task)
    home.await_state(task, "unknown")
    assert Says.NOT_HEARD_OF() in home.show(task)["reason"]
    later = home.cli("wait", "--timeout", "0.2s", task)
    assert later.returncode == 124
    for said in (later.stderr, *(_said(process) for process in (waited, followed))):
        assert all(fact in said for fact in (task.encode(), b"n2", b"peerload retry", b"peerload cancel"))
        assert f"peerload retry {task}".encode() in said
    executor.start()  # its launcher knows of no process any more
    wait_until(lambda: home.show(task)["node"] is None, 20, "its node to say that it is gone")
    assert home.show(task)["state"] == "unknown"
    assert not ledger.repeated()
    retried = home.cli("retry", task).stdout.decode().strip()
    home.await_state(retried, "running")
    home.call("cancel", tasks=[retried, task], force=True)


def test_once_a_task_that_ended_with_its_own_nodes_launcher_is_not_waited_for_to_come_back(cluster: Cluster) -> None:
    home = cluster.agent("n1")
    task = home.cli("submit", "--once", "sleep", "300").stdout.decode().strip()
    home.await_state(task, "running")
    os.kill(home.launcher_pid, signal.SIGKILL)
    home.await_state(task, "unknown")
    waited = home.cli("wait", "--timeout", "0.2s", task)
    assert waited.returncode == 124
    assert f"peerload retry {task}" in waited.stderr.decode()
    home.call("cancel", tasks=[task])


@pytest.mark.long
def test_once_a_node_that_is_back_late_goes_on(cluster: Cluster, ledger: Ledger, gate: Path) -> None:
    home, executor, task = away(cluster, ledger, gate, "--once")
    executor.pause()
    home.await_state(task, "unknown")
    executor.resume()
    wait_until(
        lambda: [step["state"] for step in home.show(task)["history"]].count("leased") >= 2,
        what="it to be leased again",
    )
    gate.touch()
    assert home.wait(task)[task]["exit_code"] == 5
    assert not ledger.repeated()


@pytest.mark.long
def test_a_longer_lease_rides_out_a_longer_silence(cluster: Cluster, ledger: Ledger, gate: Path) -> None:
    home, executor, task = away(cluster, ledger, gate, "--lease", "60s")
    assert home.show(task)["lease"] == 60.0
    before = beats(ledger, task)
    executor.pause()
    wait_until(lambda: beats(ledger, task) > before + 20 * SHORT_LEASE_S, 30, "it to run on")
    executor.resume()
    gate.touch()
    assert home.wait(task)[task]["exit_code"] == 5
    assert home.show(task)["attempt"] == 1


@pytest.mark.long
def test_fast_a_node_that_is_called_dead_loses_its_task_at_once(cluster: Cluster, ledger: Ledger, gate: Path) -> None:
    home, *_ = cluster.linked(3, slots=1)
    task = home.submit(*ledger.argv(1, 5, gate), placement={"exclude": ["n1"]}, guarantee="fast")
    wait_until(lambda: ledger.started(task), what="it to run")
    home.await_state(task, "running")
    node = home.show(task)["node"]
    executor, first = cluster.agents[node], ledger.pids(task)[0]
    executor.pause()  # its task runs on: the lease is 60 s
    wait_until(lambda: len(ledger.pids(task)) > 1, what="home to run it elsewhere")
    assert is_alive(first)
    executor.resume()
    wait_until(lambda: not is_alive(first), what="the other copy to end")
    gate.touch()
    assert home.wait(task)[task]["exit_code"] == 5
    assert Says.CALLED_DEAD(node) in reasons(home, task)
    assert sum(step["state"] == "failed" for step in home.show(task)["history"]) == 1
