"""A real agent with the real pynvml on cards that are not there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.cards import GIB, Cards
from tests.integration.cluster import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cards(cluster: Cluster) -> Cards:
    cards = Cards(cluster.directory)
    cluster.environment |= cards.environment
    return cards


SHOWN = "echo $CUDA_VISIBLE_DEVICES; echo $CUDA_DEVICE_ORDER"


def test_a_task_sees_the_card_it_was_given_and_no_other(cluster: Cluster, cards: Cards) -> None:
    agent = cluster.agent(slots=8)
    task = agent.submit("sh", "-c", SHOWN, request={"gpus": 1, "gpu_prefer": ["2"]})
    none = agent.submit("sh", "-c", SHOWN)
    agent.wait(task, none)
    assert agent.output(task)[0] == b"GPU-fake-2\nPCI_BUS_ID\n"
    assert agent.output(none)[0] == b"\nPCI_BUS_ID\n"


def test_grants_survive_an_agent_that_is_killed(cluster: Cluster, cards: Cards) -> None:
    agent = cluster.agent(slots=8)
    blocking = [agent.submit("sleep", "60", request={"gpus": 1}) for _ in range(4)]
    for task in blocking:
        agent.await_state(task, "running")
    agent.kill()
    agent.start()
    for task in blocking:
        agent.await_state(task, "running")
    waits = agent.submit("true", request={"gpus": 1})
    agent.submit("true")
    assert agent.wait(agent.submit("true"))
    assert agent.show(waits)["state"] == "queued"
    agent.call("cancel", tasks=[blocking[1]])
    assert agent.wait(waits)[waits]["exit_code"] == 0
    agent.call("cancel", tasks=blocking)


def test_a_foreign_process_counts(cluster: Cluster, cards: Cards) -> None:
    for number in range(3):
        cards.use(number, 999_000 + number, 20 * GIB)
    agent = cluster.agent(slots=8)
    tasks = [agent.submit("sh", "-c", SHOWN, request={"gpus": 1}) for _ in range(3)]
    for how in agent.wait(*tasks).values():
        assert how["exit_code"] == 0
    assert {agent.output(task)[0].split()[0] for task in tasks} == {b"GPU-fake-3"}
    small = agent.submit("sh", "-c", SHOWN, request={"gpus": 1, "gpu_mem_bytes": 1 * GIB, "gpu_prefer": ["1"]})
    agent.wait(small)
    assert agent.output(small)[0].split()[0] == b"GPU-fake-1"
