"""kill -9 of agents and launchers at the worst moments: nothing acknowledged is lost, nothing runs twice at a time."""

from __future__ import annotations

import os
import random
import secrets
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from peerload.client.connection import AgentConnection
from peerload.model.errors import AgentUnavailable
from tests.integration.cluster import MARK, SHORT_LEASE_S, Agent, Cluster, ended, is_alive
from tests.integration.ledger import Ledger
from tests.support import stands_still, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        yield made


@pytest.fixture
def ledger(cluster: Cluster) -> Ledger:
    return Ledger(cluster.directory / "ledger")


@pytest.fixture
def gate(cluster: Cluster) -> Path:
    """A file that is not there yet: what waits for it runs until a test makes it."""
    return cluster.directory / "gate"


def busy(cluster: Cluster) -> Agent:
    """An agent whose only slot is taken, so that what is submitted stays queued."""
    agent = cluster.agent("n1", slots=1)
    agent.await_state(agent.submit("sleep", "300"), "running")
    return agent


def results_recorded(agent: Agent, task: str) -> int:
    """How often an end was written into a task's history."""
    return sum(line["state"] in ("done", "failed", "cancelled") for line in agent.show(task)["history"])


@pytest.mark.long
def test_home_is_killed_with_tasks_queued_here_and_elsewhere(cluster: Cluster, ledger: Ledger, gate: Path) -> None:
    home, _ = cluster.linked(2, slots=1)
    here = home.submit(*ledger.argv(1, 3, gate), placement={"local": True})
    away = home.submit(*ledger.argv(1, 4, gate), placement={"node": "n2"})
    home.await_state(here, "running")
    home.await_state(away, "running")
    wait_until(lambda: ledger.started(here), what="it to write that it runs")
    queued = [home.submit(*ledger.argv(1), placement={"local": True}) for _ in range(5)]
    home.kill()
    assert is_alive(ledger.pids(here)[0])
    home.start()
    assert set(home.states()) == {here, away, *queued}
    gate.touch()
    results = home.wait(here, away, *queued)
    assert (results[here]["exit_code"], results[away]["exit_code"]) == (3, 4)
    ledger.check([here, away, *queued])
    assert not ledger.repeated(), "what ran must have run on"
    assert len(ledger.pids(here)) == len(ledger.pids(away)) == 1
    assert all(results_recorded(home, task) == 1 for task in (here, away, *queued))
    assert home.output(away)[0] == f"out {away}\n".encode()
    assert home.output(here)[0] == f"out {here}\n".encode()


@pytest.mark.long
def test_tasks_that_end_while_their_agents_are_away(cluster: Cluster, ledger: Ledger, gate: Path) -> None:
    home, executor = cluster.linked(2, slots=1)
    here = home.submit(*ledger.argv(1, 3, gate), placement={"local": True})
    away = home.submit(*ledger.argv(1, 4, gate), placement={"node": "n2"})
    home.await_state(here, "running")
    home.await_state(away, "running")
    home.kill()
    executor.kill()
    gate.touch()
    wait_until(lambda: not ledger.lost([here, away]), what="both tasks to end by themselves")
    executor.spawn()
    home.start()
    executor.await_ready()
    results = home.wait(here, away)
    assert (results[here]["exit_code"], results[away]["exit_code"]) == (3, 4)
    assert not ledger.repeated()
    assert [results_recorded(home, task) for task in (here, away)] == [1, 1]
    assert home.output(away)[0] == f"out {away}\n".encode()


def test_the_executor_is_killed_and_its_task_runs_on(cluster: Cluster, ledger: Ledger, gate: Path) -> None:
    home, executor = cluster.linked(2, slots=1)
    task = home.submit(*ledger.argv(1, 4, gate), placement={"node": "n2"})
    home.await_state(task, "running")
    executor.kill()
    executor.start()
    gate.touch()
    assert home.wait(task)[task]["exit_code"] == 4
    ledger.check([task])
    assert not ledger.repeated()
    assert home.show(task)["attempt"] == 1


@pytest.mark.long
def test_both_are_killed_again_and_again(cluster: Cluster, ledger: Ledger) -> None:
    home, executor = cluster.linked(2, slots=2)
    tasks = [home.submit(*ledger.argv(20)) for _ in range(20)]  # more than can end while agents start
    for _ in range(4):
        for agent in (executor, home):
            before = len(ledger.lines())
            if not ledger.lost(tasks):  # a slow machine is not as quick in restarting agents as in running these
                break
            wait_until(
                lambda before=before: len(ledger.lines()) > before + 3 or not ledger.lost(tasks),  # type: ignore[misc]
                what="progress",
            )
            agent.kill()
            agent.start()
    results = home.wait(*tasks, timeout_s=90)
    assert all(task["state"] == "done" for task in results.values())
    ledger.check(tasks)
    assert not ledger.repeated(), "no launcher died, so nothing had to be started again"
    assert all(results_recorded(home, task) == 1 for task in tasks)


def test_the_launcher_is_killed(cluster: Cluster, ledger: Ledger, gate: Path) -> None:
    home = cluster.agent("n1", slots=2)
    tasks = [home.submit(*ledger.argv(1, until=gate)) for _ in range(2)]
    wait_until(lambda: all(ledger.started(task) for task in tasks), what="both to start")
    first = [ledger.pids(task)[0] for task in tasks]
    old = home.launcher_pid
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in first), what="its tasks to end")
    gate.touch()
    results = home.wait(*tasks)
    assert all(task["state"] == "done" for task in results.values())
    ledger.check(tasks)
    assert ledger.repeated() == set(tasks)
    assert [home.show(task)["attempt"] for task in tasks] == [2, 2]
    assert home.launcher_pid != old


def test_the_launcher_of_the_executor_is_killed(cluster: Cluster, ledger: Ledger, gate: Path) -> None:
    home, executor = cluster.linked(2, slots=1)
    task = home.submit(*ledger.argv(1, 6, gate), placement={"node": "n2"})
    home.await_state(task, "running")
    wait_until(lambda: ledger.started(task), what="it to write that it runs")
    first = ledger.pids(task)[0]
    os.kill(executor.launcher_pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(first), what="the task to end with it")
    gate.touch()
    assert home.wait(task)[task]["exit_code"] == 6
    ledger.check([task])
    assert home.show(task)["attempt"] == 2
    assert len(ledger.pids(task)) == 2


def test_agent_and_launcher_are_killed_together(cluster: Cluster, ledger: Ledger) -> None:
    home = cluster.agent("n1", slots=2)
    tasks = [home.submit(*ledger.argv(10)) for _ in range(4)]
    wait_until(lambda: len(ledger.lines()) > 4, what="some to start")
    launcher = home.launcher_pid
    home.kill()
    os.kill(launcher, signal.SIGKILL)
    home.start()
    assert all(task["state"] == "done" for task in home.wait(*tasks).values())
    ledger.check(tasks)


def test_a_submit_repeated_across_a_crash_is_the_same_task(cluster: Cluster) -> None:
    home = busy(cluster)
    token = secrets.token_hex(16)
    first = home.submit("true", token=token)
    home.kill()
    home.start()
    assert home.submit("true", token=token) == first
    other = home.submit("true")
    assert other != first
    assert set(home.states()) == {"n1/1", first, other}


@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_a_kill_right_after_each_acknowledgement_loses_none(cluster: Cluster, kills: int) -> None:
    home = busy(cluster)
    acknowledged = []
    for _ in range(kills):
        acknowledged.append(home.submit("true"))
        home.kill()
        home.start()
    assert sorted(home.states()) == sorted(["n1/1", *acknowledged])
    assert home.show("n1/1")["state"] == "running"
    assert len(set(acknowledged)) == kills


@pytest.mark.long
def test_a_kill_in_the_middle_of_a_burst_loses_no_acknowledged_task(cluster: Cluster) -> None:
    home = busy(cluster)
    acknowledged: dict[str, str] = {}
    for _ in range(3):
        with AgentConnection(home.socket, timeout_s=60) as client:
            tokens = {}
            for _ in range(400):
                token = secrets.token_hex(16)
                tokens[client.send("submit", token=token, spec=cluster.spec("true"))] = token
            try:
                for count in range(400):
                    number, kind, body = client.receive()
                    assert kind == "ok"
                    acknowledged[tokens[number]] = body["id"]
                    if count == 150:
                        home.kill()
            except AgentUnavailable:
                pass  # it was killed on purpose; what it had acknowledged by then counts
        home.start()
    states = home.states()
    assert len(acknowledged) > 450
    assert set(acknowledged.values()) <= set(states)
    token, task = next(iter(acknowledged.items()))
    assert home.submit("true", token=token) == task


def test_a_cancelled_task_does_not_come_back(cluster: Cluster) -> None:
    home = cluster.agent("n1", slots=2)
    task = home.submit("sh", "-c", "trap '' TERM; echo $$; while :; do sleep 0.05; done")
    wait_until(lambda: home.output(task)[0], what="the task's pid")
    pid = int(home.output(task)[0])
    home.call("cancel", tasks=[task])
    home.kill()
    assert is_alive(pid)
    home.start()
    assert home.show(task)["state"] == "cancelled"
    wait_until(lambda: not is_alive(pid), what="its process to end")


@pytest.mark.long
def test_a_cancel_while_the_executor_is_away_holds(cluster: Cluster) -> None:
    home, executor = cluster.linked(2, slots=1)
    task = home.submit("sh", "-c", "echo $$; exec sleep 60", placement={"node": "n2"})
    home.await_state(task, "running")
    wait_until(lambda: home.output(task)[0], what="the task's pid")
    pid = int(home.output(task)[0])
    executor.kill()
    home.call("cancel", tasks=[task])
    assert is_alive(pid)
    executor.start()
    wait_until(lambda: not is_alive(pid), 15, "its process to end")
    assert home.show(task)["state"] == "cancelled"


def test_a_follower_is_served_again_after_a_crash(cluster: Cluster) -> None:
    home = cluster.agent("n1")
    gate = cluster.directory / "gate"
    script = f"echo before; until [ -e {gate} ]; do sleep 0.05; done; echo after"
    task = home.submit("sh", "-c", script)
    wait_until(lambda: home.output(task)[0] == b"before\n", what="the first line")
    home.kill()
    home.start()
    gate.touch()
    assert home.cli("logs", "-f", task).stdout == b"before\nafter\n"


@pytest.mark.long
def test_a_frozen_executor_freezes_its_task_and_home_runs_it_again(
    cluster: Cluster, ledger: Ledger, gate: Path
) -> None:
    home, executor = cluster.linked(2, slots=1, lease_s=SHORT_LEASE_S)
    task = home.submit(*ledger.argv(1, 5, gate), placement={"exclude": ["n1"]})
    home.await_state(task, "running")
    wait_until(lambda: ledger.started(task), what="it to write that it runs")
    third = cluster.agent("n3", "--peer", home.listen, lease_s=SHORT_LEASE_S)
    cluster.await_acquainted([home, third])
    executor.pause()
    old = ledger.pids(task)[0]
    wait_until(lambda: stands_still(old), what="its launcher to freeze the task")
    wait_until(lambda: len(ledger.pids(task)) > 1, what="home to run it elsewhere")
    assert stands_still(old)
    executor.resume()
    wait_until(lambda: not is_alive(old), what="the old copy to end")
    gate.touch()
    assert home.wait(task)[task]["exit_code"] == 5
    ledger.check([task])
    assert home.show(task)["node"] == "n3"
    assert home.show(task)["attempt"] == 2


@pytest.mark.long
def test_a_frozen_executor_that_is_back_in_time_goes_on(cluster: Cluster, ledger: Ledger, gate: Path) -> None:
    home, executor = cluster.linked(2, slots=1, lease_s=SHORT_LEASE_S)
    task = home.submit(*ledger.argv(1, 5, gate), placement={"node": "n2"})
    home.await_state(task, "running")
    wait_until(lambda: ledger.started(task), what="it to write that it runs")
    executor.pause()
    pid = ledger.pids(task)[0]
    wait_until(lambda: stands_still(pid), what="its launcher to freeze the task")
    executor.resume()
    wait_until(lambda: not stands_still(pid), what="the task to go on")
    gate.touch()
    assert home.wait(task)[task]["exit_code"] == 5
    ledger.check([task])
    assert not ledger.repeated()


@pytest.mark.long
def test_a_frozen_executor_that_is_back_late_goes_on_if_nobody_else_has_the_task(
    cluster: Cluster, ledger: Ledger, gate: Path
) -> None:
    home, executor = cluster.linked(2, slots=1, lease_s=SHORT_LEASE_S)
    task = home.submit(*ledger.argv(1, 5, gate), placement={"node": "n2"})
    home.await_state(task, "running")
    executor.pause()
    home.await_state(task, "queued")
    executor.resume()
    gate.touch()
    assert home.wait(task)[task]["exit_code"] == 5
    ledger.check([task])
    assert not ledger.repeated()
    assert home.show(task)["attempt"] == 1


def test_a_frozen_home_gets_its_results_afterwards(cluster: Cluster, ledger: Ledger, gate: Path) -> None:
    home, _ = cluster.linked(2, slots=1)
    task = home.submit(*ledger.argv(1, 5, gate), placement={"node": "n2"})
    home.await_state(task, "running")
    home.pause()
    gate.touch()
    wait_until(lambda: not ledger.lost([task]), what="the task to end")
    home.resume()
    assert home.wait(task)[task]["exit_code"] == 5
    assert not ledger.repeated()


@pytest.mark.long
def test_a_lost_executor_with_its_launcher(cluster: Cluster, ledger: Ledger, gate: Path) -> None:
    """As if the machine were gone for good: home waits for the lease, then runs it again."""
    home, executor = cluster.linked(2, slots=1, lease_s=SHORT_LEASE_S)
    task = home.submit(*ledger.argv(1, 5, gate), placement={"exclude": ["n1"]})
    home.await_state(task, "running")
    wait_until(lambda: ledger.started(task), what="it to write that it runs")
    third = cluster.agent("n3", "--peer", home.listen, lease_s=SHORT_LEASE_S)
    cluster.await_acquainted([home, third])
    launcher, pid = executor.launcher_pid, ledger.pids(task)[0]
    executor.kill()
    os.kill(launcher, signal.SIGKILL)
    os.killpg(pid, signal.SIGKILL)
    gate.touch()
    assert home.wait(task)[task]["node"] == "n3"
    ledger.check([task])
    assert home.show(task)["attempt"] == 2


def nothing_waits(agent: Agent) -> bool:
    """Whether all its tasks have ended. Two nodes may have gone down under one, which is no fault of its own here."""
    states = agent.states()
    if held := [task for task, state in states.items() if state == "held"]:
        agent.call("release", tasks=held)
    return set(states.values()) <= {"done", "failed", "cancelled"}


@pytest.mark.long
@pytest.mark.parametrize("seed", [1])
def test_agents_and_launchers_are_killed_at_random(cluster: Cluster, ledger: Ledger, seed: int) -> None:
    agents = cluster.linked(3, slots=2, lease_s=SHORT_LEASE_S)
    chance = random.Random(seed)
    acknowledged: dict[str, str] = {}
    kept: dict[str, list[str]] = {agent.node: [] for agent in agents}
    for _ in range(12):
        agent = chance.choice(agents)
        before = len(ledger.lines())
        for _ in range(4):
            task = agent.submit(*ledger.argv(chance.randint(1, 8)))
            acknowledged[task] = agent.node
            kept[agent.node].append(task)
        wait_until(lambda before=before: len(ledger.lines()) > before, what="progress")  # type: ignore[misc]
        victim, gone = chance.choice(agents), {0}
        if chance.random() < 0.5:
            gone.add(victim.launcher_pid)
            os.kill(max(gone), signal.SIGKILL)
        if chance.random() < 0.7:
            victim.kill()
            victim.start()
        wait_until(
            lambda victim=victim, gone=gone: victim.launcher_pid not in gone,  # type: ignore[misc]
            what="a launcher",
        )
    for agent in agents:
        if tasks := kept[agent.node]:
            wait_until(lambda agent=agent: nothing_waits(agent), 90, "all to end")  # type: ignore[misc]
            results = agent.wait(*tasks, timeout_s=90)
            assert {task["state"] for task in results.values()} == {"done"}
            assert all(results_recorded(agent, task) == 1 for task in tasks)
            assert all(agent.output(task)[0].endswith(f"out {task}\n".encode()) for task in tasks)
    ledger.check(acknowledged)


@pytest.mark.parametrize("ends_meanwhile", [False, True])
def test_a_foreground_run_whose_agent_dies_goes_on_when_it_is_back(cluster: Cluster, ends_meanwhile: bool) -> None:
    home = cluster.agent("n1")
    may_end, has_ended = (cluster.directory / name for name in ("may-end", "has-ended"))
    script = 'echo ready; until [ -e "$0" ]; do sleep 0.05; done; echo late; : >"$1"'
    with ended(home.spawn_cli("run", "sh", "-c", script, str(may_end), str(has_ended))) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        home.kill()
        if ends_meanwhile:
            may_end.touch()
            wait_until(has_ended.exists, what="the task to end")
        home.start()
        may_end.touch()
        assert process.stdout.readline() == b"late\n"
        assert process.wait(60) == 0
    assert home.cli("logs", "-f", "n1/1").stdout == b"ready\nlate\n"


@pytest.mark.long
def test_the_database_tells_the_same_as_the_agent(cluster: Cluster, ledger: Ledger) -> None:
    home, _ = cluster.linked(2, slots=1)
    tasks = [home.submit(*ledger.argv(1)) for _ in range(8)]
    home.wait(*tasks)
    home.kill()
    rows = home.database("SELECT count(*) FROM tasks WHERE state IN ('done', 'failed')")
    assert rows == [(8,)]
    home.start()
    assert set(home.states().values()) == {"done"}
    assert MARK in cluster.environment
