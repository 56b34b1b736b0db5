"""hold, release, retry, drain and events against real agents; what they say, what becomes of tasks."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peerload.model.errors import BadRequest, NoSuchTask
from tests.in_process import cli
from tests.integration.cluster import SHORT_LEASE_S, Agent, Cluster, is_alive
from tests.integration.shared import end_all, restart
from tests.support import wait_until


@pytest.fixture(name="agents", scope="module")
def fixture_agents() -> Iterator[list[Agent]]:
    """n1 and n2, with one slot each."""
    with Cluster() as cluster:
        yield cluster.linked(2, slots=1)


@pytest.fixture(name="pair")
def fixture_pair(agents: list[Agent]) -> Iterator[list[Agent]]:
    """The two of them, with nothing to do afterwards."""
    yield agents
    end_all(*agents)


@pytest.fixture(name="alone", scope="module")
def fixture_alone() -> Iterator[Agent]:
    """A node that knows no other, with one slot."""
    with Cluster() as cluster:
        yield cluster.agent("n1", slots=1)


@pytest.fixture(name="agent")
def fixture_agent(alone: Agent) -> Iterator[Agent]:
    """The same, with nothing to do afterwards."""
    yield alone
    end_all(alone)


def typed(agent: Agent, *words: str) -> str:
    done = cli(agent, *words)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def refused(agent: Agent, *words: str) -> str:
    done = cli(agent, *words)
    assert done.returncode == 125
    return done.stderr.decode()


def steps(agent: Agent, task: str) -> list[str]:
    return [step["state"] for step in agent.show(task)["history"]]


def events(agent: Agent, *tasks: str, after: int = 0, **asked: Any) -> list[dict[str, Any]]:
    """What it tells of these tasks (of everything), later than the event of this number."""
    with agent.client() as client:
        parts = list(client.stream("events", tasks=list(tasks), **asked))
    return [event for part in parts for event in part["events"] if event["number"] > after]


def newest(agent: Agent) -> int:
    """The number of the last event so far."""
    return max((event["number"] for event in events(agent)), default=0)


# -- hold and release --------------------------------------------------------------------------------------------------


def test_a_held_task_waits_until_it_is_released_also_over_a_restart(agent: Agent) -> None:
    first = agent.submit("sleep", "60")
    agent.await_state(first, "running")
    array = agent.submit("true", array=[(1, 3, 1)])
    held = cli(agent, "hold", "--json", f"{array}.2", first.removeprefix("n1/"))
    assert (held.returncode, json.loads(held.stdout)["held"]) == (125, [f"{array}.2"]), "what runs is not"
    assert json.loads(typed(agent, "hold", "--json", f"{array}.2"))["held"] == [], "it is already"
    agent.call("cancel", tasks=[first])
    agent.wait(f"{array}.1", f"{array}.3")
    agent.kill()
    agent.start()
    assert agent.show(f"{array}.2")["state"] == "held"
    assert json.loads(typed(agent, "release", "--json", "@"))["released"] == [array]
    assert agent.wait(array)[f"{array}.2"]["state"] == "done"
    assert steps(agent, f"{array}.2") == ["queued", "held", "queued", "leased", "running", "done"]
    assert json.loads(typed(agent, "release", "--json", array))["released"] == []
    refused(agent, "hold", "999")


def test_a_task_can_be_submitted_held(agent: Agent) -> None:
    task = typed(agent, "submit", "--held", "true").strip()
    assert agent.show(task)["state"] == "held"
    typed(agent, "release", task)
    assert agent.wait(task)[task]["state"] == "done"


# -- retry -------------------------------------------------------------------------------------------------------------


def test_retry_makes_a_new_task_of_what_has_failed(agent: Agent, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    shell = f'test "$PEERLOAD_ARRAY_INDEX" = 2 || test -e {mark}'
    array = agent.submit("sh", "-c", shell, array=[(1, 3, 1)])
    ended = agent.wait(array)
    assert [ended[f"{array}.{member}"]["state"] for member in (1, 2, 3)] == ["failed", "done", "failed"]
    mark.touch()
    again = typed(agent, "retry", "@").strip()
    assert again != array
    ended = agent.wait(again)
    assert {task: how["state"] for task, how in ended.items()} == {f"{again}.1": "done", f"{again}.3": "done"}
    assert agent.show(f"{again}.3")["retry_of"] == array
    assert agent.show(f"{array}.3")["state"] == "failed"
    told = json.loads(typed(agent, "retry", "--all", "--json", again))
    assert (told["retry_of"], told["members"]) == (again, 2)
    assert again in refused(agent, "retry", again)  # nothing of it has failed
    agent.wait(told["id"])
    single = agent.submit("true")
    agent.wait(single)
    assert agent.wait(typed(agent, "retry", single).strip())


def test_retry_refuses_what_has_not_ended(agent: Agent) -> None:
    task = agent.submit("sleep", "60")
    agent.await_state(task, "running")
    said = refused(agent, "retry", task)
    assert task in said
    waiting = agent.submit("true")
    assert waiting in refused(agent, "retry", waiting)
    array = agent.submit("true", array=[(1, 3, 1)])
    assert array in refused(agent, "retry", array)
    assert f"peerload cancel {task}" in said
    with pytest.raises(NoSuchTask):
        agent.call("retry", token="a-token-of-mine", task="999")


def test_the_same_retry_said_twice_is_one_task(agent: Agent) -> None:
    task = agent.submit("false")
    agent.wait(task)
    first = agent.call("retry", token="a-token-of-mine", task=task)["id"]
    agent.wait(first)
    agent.kill()
    agent.start()
    assert agent.call("retry", token="a-token-of-mine", task=task)["id"] == first
    with pytest.raises(BadRequest):
        agent.call("retry", token="a-token-of-mine", task=first)


def test_many_tasks_are_changed_as_a_whole_although_it_takes_turns(agent: Agent) -> None:
    members = 600

    def count(array: str) -> dict[str, int]:
        return dict(Counter(task["state"] for task in agent.call("show", tasks=[array])["tasks"]))

    first = agent.submit("sleep", "300")
    agent.await_state(first, "running")
    array = agent.submit("true", array=[(1, members, 1)])
    assert count(array) == {"queued": members}
    typed(agent, "hold", array)
    assert count(array) == {"held": members}
    typed(agent, "release", array)
    assert count(array) == {"queued": members}
    typed(agent, "cancel", array)
    assert count(array) == {"cancelled": members}
    again = typed(agent, "retry", array).strip()
    assert count(again) == {"queued": members}
    typed(agent, "cancel", "--wait", again, first)
    assert json.loads(typed(agent, "cancel", "--json", again))["cancelled"] == []


# -- drain -------------------------------------------------------------------------------------------------------------


def test_a_drained_node_takes_nothing_until_it_is_undrained_also_over_a_restart(pair: list[Agent]) -> None:
    home, other = pair
    last = newest(other)
    told = json.loads(typed(other, "drain", "--json", "--reason", "new disk"))
    assert told == {"v": 1, "returned": 0, "running": 0}
    wait_until(lambda: [node["drained"] for node in home.call("nodes")["nodes"]] == [False, True])
    array = home.submit("sleep", "0.1", array=[(1, 3, 1)])
    assert {task["node"] for task in home.wait(array).values()} == {"n1"}
    restart(pair, 1)
    assert other.call("nodes")["nodes"][0]["drained"] is True
    own = other.submit("true")
    assert other.wait(own)[own]["node"] == "n1"
    typed(other, "undrain")
    task = other.submit("true", placement={"local": True})
    assert other.wait(task)[task]["node"] == "n2"
    said = [(event["state"], event["reason"]) for event in events(other, what=["agent"], after=last)]
    assert ("draining", "new disk") in said
    assert said[-1] == ("undrained", "")
    typed(other, "undrain")
    assert [event["state"] for event in events(other, what=["agent"], after=last)].count("undrained") == 1


def test_a_drain_can_be_waited_for(pair: list[Agent], tmp_path: Path) -> None:
    home, other = pair
    gate = tmp_path / "gate"
    script = f"until [ -e {gate} ]; do sleep 0.05; done"
    guest = home.submit("sh", "-c", script, placement={"node": "n2"})
    home.await_state(guest, "running")
    done = cli(other, "drain", "--wait", "--timeout", "0.1s")
    assert done.returncode == 124
    assert other.call("nodes")["nodes"][0]["drained"], "it stays so"
    waiting = other.spawn_cli("drain", "--wait", "--reason", "new disk")
    assert waiting.stdout is not None
    assert waiting.stdout.readline()
    gate.touch()
    waiting.communicate(timeout=60)
    assert waiting.returncode == 0
    assert home.show(guest)["state"] == "done"
    typed(other, "drain", "--wait")
    typed(other, "undrain")


def test_who_waits_for_a_drain_is_told_of_its_end(agent: Agent) -> None:
    task = agent.submit("sleep", "300")
    agent.await_state(task, "running")
    waiting = agent.spawn_cli("drain", "--wait")
    assert waiting.stdout is not None
    assert waiting.stdout.readline()
    wait_until(lambda: agent.call("nodes")["nodes"][0]["drained"])
    typed(agent, "undrain")
    _, said = waiting.communicate(timeout=60)
    assert waiting.returncode == 125
    assert b"n1" in said


# -- events ------------------------------------------------------------------------------------------------------------


def test_events_of_home_and_of_the_node_that_runs_it_are_told_and_followed(pair: list[Agent]) -> None:
    home, other = pair
    last = newest(other)
    task = home.submit("sh", "-c", "exit 3", placement={"node": "n2"})
    following = other.spawn_cli("events", "-f", "--json")
    assert following.stdout is not None
    home.wait(task)
    assert steps(home, task)[-4:] == ["queued", "leased", "running", "failed"]
    seen: list[dict[str, Any]] = []
    while not seen or (seen[-1]["task"], seen[-1]["state"]) != (task, "delivered"):
        seen.append(json.loads(following.stdout.readline()))
    while "undrained" not in seen[-1]["state"]:  # it is told what comes later, too
        typed(other, "drain")
        typed(other, "undrain")
        seen.append(json.loads(following.stdout.readline()))
    following.send_signal(signal.SIGINT)
    following.communicate()
    guest = [event for event in seen if event["task"] == task]
    assert [event["state"] for event in guest] == ["accepted", "started", "running", "ended", "delivered"]
    assert {(event["what"], event["attempt"], event["node"]) for event in guest} == {("attempt", 1, "n1")}
    assert [event["reason"] for event in guest if event["state"] == "ended"] == ["exit code 3"]
    assert all(event["number"] for event in seen)
    assert [event["state"] for event in events(other, task, after=last)] == [event["state"] for event in guest]
    assert f"n2  {task}" not in typed(other, "events")
    assert "exit code 3" in typed(other, "events", task)


def test_a_task_that_is_frozen_and_goes_on_says_so(pair: list[Agent]) -> None:
    home, other = pair
    task = home.submit("sleep", "300", placement={"node": "n2"}, lease_s=SHORT_LEASE_S)
    home.await_state(task, "running")
    home.pause()
    try:
        wait_until(lambda: events(other, task)[-1]["state"] == "frozen", what="it to be frozen")
    finally:
        home.resume()
    wait_until(lambda: events(other, task)[-1]["state"] == "thawed", what="it to go on")
    assert all("n1" in event["reason"] for event in events(other, task)[-2:])


def test_events_tell_of_nodes_of_the_agent_and_of_its_launcher(pair: list[Agent]) -> None:
    home, other = pair
    last = newest(home)

    def told(what: str) -> list[str]:
        return [event["state"] for event in events(home, what=[what], after=last)]

    other.kill()
    wait_until(lambda: "suspect" in told("node"), what="a node to be missed")
    other.start()
    task = home.submit("sleep", "60", placement={"local": True})
    home.await_state(task, "running")
    os.kill(home.launcher_pid, signal.SIGKILL)
    wait_until(lambda: "ready" in told("launcher"))
    # A busy one that did not answer for a while is told of, too.
    assert [state for state in told("launcher") if state in ("lost", "ready")] == ["lost", "ready"]
    wait_until(lambda: "queued" in steps(home, task)[2:])
    restart(pair)
    assert told("agent") == ["started"]
    numbers = [event["number"] for event in events(home)]
    assert numbers == sorted(set(numbers))


# -- down --------------------------------------------------------------------------------------------------------------


def test_down_ends_what_an_agent_has_left_that_is_gone(agent: Agent) -> None:
    task = agent.submit("sleep", "300")
    agent.await_state(task, "running")
    launcher = agent.launcher_pid
    state = str(agent.state)
    elsewhere = ("--socket", str(agent.directory / "nobody-listens-here"))
    assert state in refused(agent, "down", "--all", "--state", state, *elsewhere)  # an agent works there
    agent.kill()
    refused(agent, "down", "--all")  # another's socket: where are its tasks?
    assert is_alive(launcher)
    typed(agent, "down", "--all", "--state", state)
    assert not is_alive(launcher)
    refused(agent, "down", "--all", "--state", state)
    agent.start()
    assert agent.wait(task)[task]["signal"] == signal.SIGTERM
