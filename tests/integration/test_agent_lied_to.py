"""A member that lies about tasks which are none of its own: a real agent believes it nothing, and loses nothing."""

from __future__ import annotations

import ssl
import time
from typing import TYPE_CHECKING

import pytest

from peerload.model.messages import Accept, Decline, Hello, Identity, NotStarted, Offer, Ping, Pong, Query, Result
from peerload.model.resources import LoadReport, Profile
from peerload.model.task import Exit, TaskSpec
from tests.integration.cluster import Agent, Cluster
from tests.integration.fake_peer import FakePeer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def agent() -> Iterator[Agent]:
    with Cluster() as cluster:
        yield cluster.agent("n1", slots=1)


def heard_out(liar: FakePeer) -> None:
    """All that it said was looked at."""
    liar.send(Ping(sequence=77))
    liar.expect(Pong)


@pytest.mark.rule("P3")
@pytest.mark.bad_input("foreign-result")
def test_what_another_says_of_a_task_that_a_node_has(agent: Agent) -> None:
    with FakePeer(agent.listen, "victim") as victim:
        task = agent.submit("sleep", "600", placement={"node": "victim"})
        offer, _ = victim.accept_and_take()
        victim.renew(offer, started_at=time.time())
        agent.await_state(task, "running")
        with FakePeer(agent.listen, "mallory") as liar:
            told = offer.task, offer.uid, offer.attempt
            liar.send(Result(*told, Exit(0), inline=True))
            liar.send(Result(offer.task, offer.uid, 0, Exit(0), inline=True))
            liar.send(NotStarted(*told))
            heard_out(liar)
            rebooted = Identity("victim", "boot-2", "another-machine-boot", "store", 50)
            liar.send(Hello(rebooted, Profile("victim", 8, 8.0), LoadReport()))
            with pytest.raises((ConnectionError, ssl.SSLError)):
                liar.expect(Pong)
        shown = agent.show(task)
        assert (shown["state"], shown["node"], shown["attempt"]) == ("running", "victim", 1)
        victim.send(Result(*told, Exit(7), inline=True))
        assert agent.wait(task)[task]["exit_code"] == 7


def test_an_offer_under_the_uid_of_an_own_task(agent: Agent) -> None:
    """While it runs, and when all that is left of it is its output."""
    gate = agent.directory / "gate"
    task = agent.submit("sh", "-c", 'echo mine; until [ -e "$0" ]; do sleep 0.05; done', str(gate))
    agent.await_state(task, "running")
    ((uid,),) = agent.database("SELECT uid FROM tasks")
    with FakePeer(agent.listen, "mallory") as liar:
        lie = Offer("mallory/1", uid, 1, TaskSpec((b"echo", b"lies"), b"-"), 60.0, only=True)
        liar.send(lie)
        assert liar.expect(Decline).code == "cannot"
        liar.send(Query("mallory/1", uid, 1))
        heard_out(liar)
        gate.touch()
        assert agent.wait(task)[task]["state"] == "done"
        said: list[object] = []
        liar.send(lie)
        liar.send(Ping(sequence=78))
        while not isinstance(said[-1:] and said[-1], Pong):
            said.append(liar.receive())
        assert not [message for message in said if isinstance(message, Accept)]
        assert agent.output(task)[0] == b"mine\n"
