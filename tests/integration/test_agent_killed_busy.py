"""kill -9 of an agent that is busy: the 50 tasks that run on its node never notice, and each of 200 queued ones ends once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.cluster import Agent, Cluster
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BEATS_MIN = 4
BEAT = r"""
note() { echo "$PEERLOAD_TASK_ID $PEERLOAD_ATTEMPT $1 $$" >>"$0"; }
note start
i=0
while [ $i -lt BEATS_MIN ] || ! [ -e "$1" ]; do sleep 0.5; note beat; i=$((i + 1)); done
note stop
"""


@pytest.fixture(name="cluster")
def fixture_cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def whole_lines(ledger: Path) -> list[str]:
    """What was written; of the last line there may be only a part yet."""
    return ledger.read_text(encoding="ascii").rpartition("\n")[0].splitlines()


def heartbeats(ledger: Path) -> dict[str, list[tuple[str, str, str]]]:
    """Of each task (attempt, word, pid), in order."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for text in whole_lines(ledger):
        task, attempt, word, pid = text.split()
        found.setdefault(task, []).append((attempt, word, pid))
    return found


def members(task: str, count: int) -> set[str]:
    return {f"{task}.{number}" for number in range(1, count + 1)}


def ends(agent: Agent, array: str) -> dict[str, int]:
    """How often each member's end was recorded."""
    final = ("done", "failed", "cancelled", "unknown")
    return {
        task["id"]: sum(step["state"] in final for step in task["history"])
        for task in agent.call("show", tasks=[array])["tasks"]
    }


def test_an_agent_is_killed_with_fifty_running_tasks_and_none_is_disturbed(cluster: Cluster) -> None:
    ledger = cluster.directory / "beats"
    ledger.touch()
    home = cluster.agent("n1", slots=0)
    busy = cluster.agent("n2", "--peer", home.listen, slots=50)
    cluster.await_acquainted([home, busy])
    gate = cluster.directory / "gate"
    words = ("sh", "-c", BEAT.replace("BEATS_MIN", str(BEATS_MIN)), str(ledger), str(gate))
    own = busy.submit(*words, array=[(1, 25, 1)])
    guests = home.submit(*words, array=[(1, 25, 1)])
    every = members(own, 25) | members(guests, 25)
    wait_until(lambda: set(heartbeats(ledger)) == every, what="all 50 to run")

    busy.kill()
    beaten = len(whole_lines(ledger))
    wait_until(lambda: len(whole_lines(ledger)) > beaten + 100, what="two heartbeats of each without an agent")
    busy.start()
    gate.touch()
    ended = busy.wait(own) | home.wait(guests)

    assert {task: how["state"] for task, how in ended.items()} == dict.fromkeys(every, "done")
    told = heartbeats(ledger)
    assert set(told) == every
    for task, beats in told.items():
        assert [word for _, word, _ in beats] == ["start", *["beat"] * (len(beats) - 2), "stop"], task
        assert len(beats) >= BEATS_MIN + 2, task
        assert {attempt for attempt, *_ in beats} == {"1"}, task
        assert len({pid for *_, pid in beats}) == 1, task
    assert set(ends(busy, own).values()) == set(ends(home, guests).values()) == {1}


@pytest.mark.long
def test_two_hundred_queued_tasks_outlive_their_agent_and_end_once(cluster: Cluster) -> None:
    agent = cluster.agent("n1", slots=8)
    assert agent.cli("submit", "--array", "1-200", "sleep", "0.1").stdout == b"n1/1\n"
    agent.kill()
    agent.start()
    waited = agent.cli("wait", "@")
    assert waited.returncode == 0
    assert ends(agent, "n1/1") == dict.fromkeys(members("n1/1", 200), 1)
    attempts = [task["attempt"] for task in agent.call("show", tasks=["n1/1"])["tasks"]]
    assert set(attempts) <= {1, 2}, "again only what was on its way to the launcher when the agent was killed"
    assert attempts.count(2) <= 8
