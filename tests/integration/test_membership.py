"""Gossip between real agents: a loss is noticed, a return too; members are found again; leaving and forgetting."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING

import pytest

from peerload.agent.peers.membership import ADDRESS_FILE, AddressFile
from peerload.model.messages import Identity
from tests.in_process import cli
from tests.integration.cluster import Agent, Cluster
from tests.support import total, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        yield made


def of(agent: Agent, node: str) -> dict[str, object]:
    """What an agent says of a node, {} if it does not know it."""
    shown = agent.call("nodes")["nodes"]
    return next((told for told in shown if told["node"] == node), {})


def history(agent: Agent, node: str, last: str) -> list[object]:
    """The states that a node has been in, as an agent has noted it, until it is in the last."""
    seen: list[object] = []

    def looked() -> bool:
        with agent.client() as client:
            parts = list(client.stream("events", what=["node"]))
        seen[:] = [event["state"] for part in parts for event in part["events"] if event["node"] == node]
        return seen[-1:] == [last]

    wait_until(looked, what=f"{node} to be {last}")
    return seen


@pytest.mark.long
def test_a_kill_is_suspected_then_known_and_a_restart_counts_on(cluster: Cluster) -> None:
    n1, n2, n3 = cluster.linked(3)
    before = of(n1, "n3")["incarnation"]
    assert isinstance(before, int)
    n3.kill()
    assert history(n1, "n3", "dead")[-2:] == ["suspect", "dead"]
    wait_until(lambda: of(n2, "n3")["state"] == "dead")
    n3.start()
    for other in (n1, n2):
        wait_until(lambda other=other: of(other, "n3")["state"] == "alive")  # type: ignore[misc]
        incarnation = of(other, "n3")["incarnation"]
        assert isinstance(incarnation, int)
        assert incarnation > before, "one more, and more for each time that it was suspected since"
    text = cli(n1, "nodes").stdout.decode().splitlines()
    assert [line.split()[0] for line in text[1:4]] == ["n1", "n2", "n3"]


@pytest.mark.long
def test_a_hung_agent_is_noticed_and_objects_when_it_goes_on(cluster: Cluster) -> None:
    n1, n2, _n3 = cluster.linked(3)
    task = n1.submit("sleep", "600", placement={"node": "n2"}, lease_s=600.0)
    n1.await_state(task, "running")
    assert n1.show(task)["unreachable_since"] is None
    n2.pause()
    history(n1, "n2", "dead")
    (listed,) = json.loads(cli(n1, "ls", "--json").stdout)["tasks"]
    assert 0 < listed["unreachable_since"] <= time.time()
    row = cli(n1, "ls").stdout.decode().splitlines()[1].split()
    assert (row[0], row[2:4], row[5]) == (task, ["unreachable", row[3]], "n2")
    n2.resume()
    history(n1, "n2", "alive")
    wait_until(lambda: n1.show(task)["unreachable_since"] is None)
    n1.call("cancel", tasks=[task])
    wait_until(lambda: n2.peers_alive() == {"n1", "n2", "n3"})
    wait_until(lambda: n2.counters().get("stalls_total", 0) >= 1)


@pytest.mark.long
def test_members_find_one_another_again_without_the_one_they_joined_through(cluster: Cluster) -> None:
    n1, n2, n3 = cluster.linked(3)
    n1.kill()
    for agent in (n2, n3):
        wait_until(lambda agent=agent: of(agent, "n1")["state"] == "dead")  # type: ignore[misc]
    n2.kill()
    n3.kill()
    n2.start()
    n3.start()
    cluster.await_acquainted([n2, n3])
    n1.start()  # told of nobody, and forgotten by nobody
    cluster.await_acquainted([n1, n2, n3])


@pytest.mark.long
def test_many_restarted_at_once_agree(cluster: Cluster) -> None:
    agents = cluster.linked(6)
    for agent in agents:
        agent.kill()
    for agent in agents:
        agent.spawn()
    for agent in agents:
        agent.await_ready()
    cluster.await_acquainted(agents)


def test_a_member_that_was_not_met_since_the_start_is_named_and_can_be_forgotten(cluster: Cluster) -> None:
    agent = cluster.add("n1")
    agent.state.mkdir(parents=True)
    file = agent.state / ADDRESS_FILE
    AddressFile(file).set_peers([Identity("gone", "boot", "machine", "store", 1, "127.0.0.1:9")])
    agent.start()
    assert json.loads(cli(agent, "nodes", "--json").stdout)["unmet"] == ["gone"]
    assert b"peerload forget gone" in cli(agent, "doctor", "--json").stdout
    assert json.loads(cli(agent, "forget", "gone", "--json").stdout)["was"] is None
    assert cli(agent, "forget", "gone").returncode == 125
    assert json.loads(cli(agent, "nodes", "--json").stdout)["unmet"] == []
    wait_until(lambda: not AddressFile(file).peers, what="it not to be looked for after a restart")


def test_a_node_that_leaves_has_left_and_one_that_is_forgotten_is_gone(cluster: Cluster) -> None:
    n1, n2, n3 = cluster.linked(3, slots=1)
    for name in ("n3", "n9", "n1"):  # alive, not known, the node itself
        assert cli(n1, "forget", name).returncode == 125

    gate = n1.directory / "gate"
    task = n1.submit("sh", "-c", f"until [ -e {gate} ]; do sleep 0.05; done", placement={"node": "n3"})
    n1.await_state(task, "running")
    for agent, why in ((n1, "1 task of its own at other nodes"), (n3, "1 task of other nodes here")):
        refused = cli(agent, "leave")
        assert refused.returncode == 125
        assert why in refused.stderr.decode()
        assert agent.runs
    gate.touch()
    assert n1.wait(task)[task]["exit_code"] == 0

    def left() -> bool:
        done = cli(n3, "leave", "--json")
        return done.returncode == 0 and json.loads(done.stdout)["node"] == "n3"

    wait_until(left, what="n3 to leave")
    n3.reap()
    for other in (n1, n2):
        wait_until(lambda other=other: of(other, "n3")["state"] == "left")  # type: ignore[misc]
    assert json.loads(cli(n1, "forget", "n3", "--json").stdout)["was"] == "left"
    for other in (n1, n2):
        wait_until(lambda other=other: of(other, "n3") == {})  # type: ignore[misc]
    n3.start()
    wait_until(lambda: of(n1, "n3").get("state") == "alive")

    local = {"local": True}
    running, waiting = n3.submit("sleep", "300", placement=local), n3.submit("true", placement=local)
    n3.await_state(running, "running")
    refused = cli(n3, "leave")
    assert refused.returncode == 125
    for said in ("1 task of its own running here", "1 task of its own waiting", "peerload drain --wait"):
        assert said in refused.stderr.decode()
    assert cli(n3, "leave", "--force").returncode == 0
    n3.reap()
    n3.start()
    assert n3.states() == {running: "running", waiting: "queued"}


@pytest.mark.rule("J5")
def test_datagrams_of_a_stranger_change_nothing(cluster: Cluster) -> None:
    (n1,) = cluster.linked(1)
    host, _, port = n1.listen.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for datagram in (b"", b"x", bytes(1500), b"\x01\x02n1\x04boot" + bytes(60)):
            stranger.sendto(datagram, (host, int(port)))
    wait_until(lambda: n1.counters().get("gossip_datagrams_received_total", 0) == 4)
    assert total(n1.counters(), "gossip_datagrams_dropped_total") == 4
    assert n1.peers_alive() == {"n1"}
