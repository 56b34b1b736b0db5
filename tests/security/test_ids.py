"""An id is its task's, and that of nothing that begins alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from peerload.model.errors import NoSuchTask, PeerloadError
from tests.integration.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.cluster import Agent


@pytest.fixture(scope="module")
def agents() -> Iterator[list[Agent]]:
    with Cluster() as cluster:
        first = cluster.agent("n1")
        second = cluster.add("n10", "--peer", first.listen).start()
        cluster.await_acquainted([first, second])
        yield [first, second]


@pytest.mark.rule("S17")
def test_an_id_is_found_by_all_of_it_alone(agents: list[Agent]) -> None:
    first, second = agents
    ids = [second.submit("true") for _ in range(10)]
    assert ids[0] == "n10/1"
    second.wait(*ids)
    for wrong in ("n1/1", "n1/10", "n10/11", "n10/100"):
        with pytest.raises(NoSuchTask):
            second.show(wrong)
    for wrong in ("n10/", "n10", "n1*", "n10/1*", "n10/1.", "n10/%", "N10/1", "n10/1\n"):
        with pytest.raises(PeerloadError):
            second.show(wrong)
    with pytest.raises(PeerloadError):
        first.call("cancel", tasks=["n1/1"])
    assert second.show("n10/1")["state"] == "done"
    assert first.show("n10/1")["state"] == "done", "asked at its home"


@pytest.mark.rule("X5")
def test_nothing_of_the_agents_own_environment_is_in_a_tasks(agents: list[Agent]) -> None:
    first, _ = agents
    task = first.submit("env")
    first.wait(task)
    names = {line.partition(b"=")[0].decode() for line in first.output(task)[0].splitlines()}
    of_the_agent = {"XDG_CONFIG_HOME", "XDG_STATE_HOME", "PEERLOAD_CLUSTER", "PEERLOAD_GPU_CLAIMS", "PEERLOAD_SPEED"}
    assert of_the_agent <= set(first.cluster.environment)
    assert not of_the_agent & names
    assert "PATH" in names
