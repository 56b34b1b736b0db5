"""What the tests of this folder share: one running cluster for each process that runs tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.cluster import Agent, Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def three_agents() -> Iterator[list[Agent]]:
    """n1, n2 and n3 with eight slots each, which know each other."""
    with Cluster() as cluster:
        yield cluster.linked(3, slots=8)


@pytest.fixture
def shared(three_agents: list[Agent]) -> Iterator[list[Agent]]:
    """The same three agents for all tests: a test reads, or adds tasks, tells its own by their ids and leaves none at work.
    It ends, freezes, drains and configures nothing; the agents are the same processes afterwards."""
    pids = [agent.pid for agent in three_agents]
    yield three_agents
    assert [agent.pid for agent in three_agents if agent.runs] == pids
    for agent in three_agents:
        left = [task for task, state in agent.states().items() if state in ("queued", "leased", "running", "held")]
        if left:
            agent.call("cancel", tasks=left, force=True)
            agent.wait(*left)
