"""`peerload cancel --wait`: when it returns, the processes are gone, wherever they ran."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.integration.cluster import Agent, Cluster, is_alive
from tests.support import in_short, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

STUBBORN = "trap '' TERM; echo $$; while :; do sleep 0.1; done"


@pytest.fixture(scope="module")
def agents() -> Iterator[tuple[Agent, Agent]]:
    with Cluster() as cluster:
        home, other = cluster.linked(2, slots=2)
        yield home, other


def running(home: Agent, node: str, script: str = "echo $$; exec sleep 300") -> tuple[str, int]:
    """A task that runs on that node, and its process."""
    task = home.submit("sh", "-c", script, placement={"node": node})
    home.await_state(task, "running")
    wait_until(lambda: home.output(task)[0], what="the task's pid")
    return task, int(home.output(task)[0])


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_it_returns_when_the_process_is_gone(agents: tuple[Agent, Agent], node: str) -> None:
    task, pid = running(agents[0], node)
    assert agents[0].cli("cancel", "--wait", task).returncode == 0
    assert not is_alive(pid)
    assert agents[0].show(task)["state"] == "cancelled"
    again = agents[0].cli("cancel", "--wait", "--json", task)
    assert again.returncode == 0
    assert json.loads(again.stdout) == {"v": 1, "cancelled": [], "already_ended": [task], "left": []}


def is_waited_for(home: Agent, node: str) -> bool:
    """Whether one that does not obey was, until KILL came; on a slow machine KILL may come before somebody waits."""
    task, pid = running(home, node, STUBBORN)
    done = home.cli("cancel", "--wait", "--timeout", "0.1s", task)
    assert done.returncode == 124
    assert task in done.stderr.decode()
    lived_on = is_alive(pid)
    assert home.show(task)["state"] == "cancelled"
    forced = home.cli("cancel", "--wait", task)  # it has been told to obey before
    assert forced.returncode == 0
    assert not is_alive(pid)
    return lived_on and f"waiting for the processes of 1 task at {node} to end" in forced.stderr.decode()


@pytest.mark.long
@pytest.mark.parametrize("node", in_short(["n2", "n1"], 2))
def test_one_that_does_not_obey_is_waited_for(agents: tuple[Agent, Agent], node: str) -> None:
    wait_until(lambda: is_waited_for(agents[0], node), what="one to be waited for before KILL comes")


def test_an_array_is_gone_as_a_whole_and_what_ended_before_is_told(agents: tuple[Agent, Agent]) -> None:
    home, _ = agents
    first = home.submit("true")
    home.wait(first)
    array = home.submit("sleep", "300", array=[(1, 6, 1)])
    wait_until(lambda: list(home.states().values()).count("running") == 4, what="four to run on two nodes")
    done = home.cli("cancel", "--wait", array, first)
    assert [line.split()[0] for line in done.stdout.decode().splitlines()] == [array, first]
    wait_until(lambda: home.call("nodes")["nodes"][0]["tasks_running"] == 0, what="its own slots to be free")


def test_a_node_that_does_not_answer_is_named_and_the_end_comes_when_it_is_back() -> None:
    with Cluster() as cluster:
        home, other = cluster.linked(2, slots=1)
        task, pid = running(home, "n2")
        other.pause()
        waiting = home.spawn_cli("cancel", "--wait", task)
        try:
            assert waiting.stderr is not None
            assert b"n2" in waiting.stderr.readline()
            assert waiting.poll() is None
            assert is_alive(pid)
        finally:
            other.resume()
        waiting.communicate(timeout=60)
        assert waiting.returncode == 0
        assert not is_alive(pid)


def test_its_word_may_be_lost(agents: tuple[Agent, Agent]) -> None:
    """The home is started anew while the process ends: what was said to the home before is not known any more."""
    home, other = agents
    task, pid = running(home, "n2")
    home.pause()
    os.kill(home.pid, signal.SIGKILL)
    home.reap()
    home.start()
    home.await_state(task, "running")
    assert home.cli("cancel", task).returncode == 0
    wait_until(lambda: not is_alive(pid))
    wait_until(lambda: other.call("nodes")["nodes"][0]["tasks_running"] == 0)
    assert home.cli("cancel", "--wait", task).returncode == 0


def test_bad_use_is_told(agents: tuple[Agent, Agent]) -> None:
    done = agents[0].cli("cancel", "--timeout", "1s", "1")
    assert done.returncode == 2
    assert b"--wait" in done.stderr
