"""What a live view is told by a real agent: all at first, then what has changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from peerload.agent.requests.overview import COMMAND_CHARS_MAX
from peerload.model.errors import BadRequest
from tests.integration.cluster import Agent, Cluster
from tests.integration.shared import end_all, restart
from tests.support import wait_until


def look(agent: Agent, since: str = "", **fields: object) -> dict[str, Any]:
    return agent.call("overview", since=since, **fields)


def ids(told: dict[str, Any], key: str = "tasks") -> set[str]:
    return {task["id"] for task in told[key]}


@pytest.fixture(name="agents", scope="module")
def fixture_agents() -> Iterator[list[Agent]]:
    """n1 and n2, with one slot each."""
    with Cluster() as cluster:
        yield cluster.linked(2, slots=1)


@pytest.fixture(name="pair")
def fixture_pair(agents: list[Agent]) -> Iterator[list[Agent]]:
    """The same, with nothing to do and nothing left of others."""
    for agent in agents:
        agent.call("clean")
    yield agents
    end_all(*agents)


def test_all_then_news_then_what_is_gone(pair: list[Agent]) -> None:
    n1, n2 = pair
    first = look(n1)
    assert first["complete"]
    assert [node["node"] for node in first["nodes"]] == ["n1", "n2"]
    assert first["agent"]["node"] == "n1"
    task = n1.submit("sleep", "600", placement={"node": "n2"})
    n1.await_state(task, "running")
    second = look(n1, first["revision"], events_after=max((event["number"] for event in first["events"]), default=0))
    assert not second["complete"]
    assert second["nodes"][0]["self"]
    assert ids(second) == {task}
    assert second["tasks"][0]["state"] == "running"
    assert second["tasks"][0]["node"] == "n2"
    assert second["tasks"][0]["command"] == "sleep 600"
    assert second["counts"] == {"placed": 1, "waiting": 0, "held": 0}
    assert {event["state"] for event in second["events"] if event["task"] == task} >= {"queued", "leased", "running"}
    assert ids(look(n1, second["revision"])) == set()
    assert ids(look(n1, first["revision"])) == {task}, "who looked earlier is told more"
    there = look(n2)
    assert ids(there, "guests") == {task}
    assert there["guests"][0]["home"] == "n1"
    assert there["guests"][0]["state"] == "running"
    n1.call("cancel", tasks=[task])
    n1.wait(task)
    assert look(n1, second["revision"])["tasks_gone"] == [task]
    wait_until(lambda: look(n2, there["revision"])["guests_gone"] == [task], what="it to be gone there")


def test_a_number_of_another_start_is_told_all(pair: list[Agent]) -> None:
    n1 = pair[0]
    revision = look(n1)["revision"]
    restart(pair)
    for since in (revision, "nonsense", "boot.999999", revision.rpartition(".")[0] + ".-1", "."):
        assert look(n1, since)["complete"], since
    assert not look(n1, look(n1)["revision"])["complete"]
    with pytest.raises(BadRequest):
        look(n1, "x" * 1000)


def test_what_waits_and_what_is_held_are_counted(pair: list[Agent]) -> None:
    n1, local = pair[0], {"local": True}
    running = n1.submit("sleep", "600", placement=local)
    n1.await_state(running, "running")
    waiting = n1.submit("sleep", "600", placement=local)
    held = n1.submit("sleep", "600", placement=local)
    n1.call("hold", tasks=[held])
    told = look(n1)
    assert told["counts"] == {"placed": 1, "waiting": 1, "held": 1}
    states = {task["id"]: task["state"] for task in told["tasks"]}
    assert (states[waiting], states[held]) == ("queued", "held")


def test_a_long_command_is_told_in_short(pair: list[Agent]) -> None:
    n1 = pair[0]
    task = n1.submit("sleep", *(["x" * 1000] * 100), held=True)
    (told,) = [one for one in look(n1)["tasks"] if one["id"] == task]
    assert told["state"] == "held"
    assert len(told["command"]) == COMMAND_CHARS_MAX
    assert "argv" not in told


def test_events_are_bounded_and_the_newest(pair: list[Agent]) -> None:
    n1 = pair[0]
    n1.wait(*[n1.submit("true") for _ in range(5)])
    told = look(n1, events_max=3)["events"]
    assert len(told) == 3
    later = look(n1, events_after=told[-1]["number"])["events"]
    assert [event for event in later if event["task"]] == [], "of tasks that have ended nothing more is to come"
    assert look(n1, events_max=0)["events"] == []
