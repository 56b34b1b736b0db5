"""Agents that know of each other through an MQTT broker alone; the broker dies, is away, or never answers."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from peerload.model.metrics import ADVICE_OVER_PEER_LINK as OVER_PEER_LINK
from tests.integration.broker_fixtures import broker, short_directory  # noqa: F401 -- fixtures
from tests.integration.cluster import Agent, Cluster
from tests.integration.ledger import Ledger
from tests.support import kept_port, total, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peerload.cli.demo.broker import BrokerProcess


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        yield made


def on_the_bus(cluster: Cluster, url: str, count: int = 3, slots: int = 2, preset: str = "adaptive") -> list[Agent]:
    """Agents that were told of the broker and of nobody else."""
    words = ("--mqtt", url, "--policy", preset)
    agents = [cluster.add(f"n{number}", *words, slots=slots).spawn() for number in range(1, count + 1)]
    for agent in agents:
        agent.await_ready()
    cluster.await_acquainted(agents)
    return agents


def nodes_of(ledger: Ledger, tasks: list[str]) -> set[str]:
    """Where these have been started."""
    return {line.node for line in ledger.lines() if line.task in tasks}


def is_connected(agent: Agent) -> bool:
    return agent.call("info")["mqtt"] is not None


@pytest.mark.parametrize("broker", ["mosquitto", pytest.param("amqtt", marks=pytest.mark.long)], indirect=True)
def test_tasks_at_one_node_spread(cluster: Cluster, broker: BrokerProcess) -> None:  # noqa: F811
    agents = on_the_bus(cluster, broker.url)
    ledger = Ledger(cluster.directory / "ledger")
    gate = cluster.directory / "gate"
    tasks = [agents[0].submit(*ledger.argv(2, until=gate)) for _ in range(60)]
    wait_until(lambda: nodes_of(ledger, tasks) == {"n1", "n2", "n3"}, what="all three to have some")
    gate.touch()
    ended = agents[0].wait(*tasks)
    assert all(task["state"] == "done" for task in ended.values())
    ledger.check(tasks)
    assert not ledger.repeated()
    assert all(agents[0].output(task)[0] == f"out {task}\n".encode() for task in tasks)


@pytest.mark.parametrize("broker", ["mosquitto", pytest.param("amqtt", marks=pytest.mark.long)], indirect=True)
@pytest.mark.parametrize(
    ("preset", "says"),
    [
        pytest.param("pairing", {"pair-request", "pair-reply"}, marks=pytest.mark.long),
        pytest.param("bidding", {"probe", "probe-reply"}, marks=pytest.mark.long),
        pytest.param("first-reply", {"state-request", "state-answer", "enough"}, marks=pytest.mark.long),
        ("broadcast-when-idle", {"state-request", "state-answer", "enough", "give-request"}),
        pytest.param("poll-when-idle", {"give-request", "give-reply"}, marks=pytest.mark.long),
        pytest.param("load-balancing", {"probe"}, marks=pytest.mark.long),
    ],
)
def test_every_way_of_sharing_spreads_tasks(
    cluster: Cluster,
    broker: BrokerProcess,  # noqa: F811
    preset: str,
    says: set[str],
) -> None:
    agents = on_the_bus(cluster, broker.url, slots=1, preset=preset)
    ledger = Ledger(cluster.directory / "ledger")
    warm = [agent.submit(*ledger.argv(1)) for agent in agents]  # a receiver acts when a task has ended
    tasks = []

    def is_spread() -> bool:
        """After some more tasks; how the first of them go depends on who hears what first."""
        more = [agents[0].submit(*ledger.argv(2)) for _ in range(30)]
        tasks.extend(more)
        agents[0].wait(*more)
        counted = {name for agent in agents for name in agent.counters()}
        said = {name.partition('"')[2][:-2] for name in counted if name.startswith("mqtt_messages_published_total{")}
        return says <= said and nodes_of(ledger, tasks) > {"n1"}

    wait_until(is_spread, what=f"tasks elsewhere, by {says}")
    for agent, task in zip(agents, warm, strict=True):
        agent.wait(task)
    ledger.check([*tasks, *warm])
    assert not ledger.repeated()


@pytest.mark.parametrize("broker", ["mosquitto", pytest.param("amqtt", marks=pytest.mark.long)], indirect=True)
def test_the_broker_is_killed_and_comes_back(cluster: Cluster, broker: BrokerProcess) -> None:  # noqa: F811
    agents = on_the_bus(cluster, broker.url)
    ledger = Ledger(cluster.directory / "ledger")
    home = agents[0]
    wait_until(lambda: all(map(is_connected, agents)), what="all to be on the bus")
    tasks = [home.submit(*ledger.argv(3)) for _ in range(20)]
    wait_until(lambda: len(ledger.lines()) > 6, what="tasks to run")
    broker.kill()
    wait_until(lambda: not any(map(is_connected, agents)), what="all to notice")
    before = sum(agent.counters().get(OVER_PEER_LINK, 0) for agent in agents)
    gate, last_gate = cluster.directory / "gate", cluster.directory / "last gate"
    tasks += [home.submit(*ledger.argv(3, until=gate)) for _ in range(20)]
    wait_until(lambda: len(nodes_of(ledger, tasks[20:])) > 1, what="work to spread without a broker")
    gate.touch()
    home.wait(*tasks)
    wait_until(
        lambda: sum(agent.counters().get(OVER_PEER_LINK, 0) for agent in agents) > before, what="advice between peers"
    )
    broker.start()
    wait_until(lambda: all(map(is_connected, agents)), what="all to be on the bus again")
    over_bus = sum(total(agent.counters(), "mqtt_messages_received_total") for agent in agents)
    more = [home.submit(*ledger.argv(2, until=last_gate)) for _ in range(20)]
    wait_until(lambda: len(nodes_of(ledger, more)) > 1, what="work to spread with it")
    last_gate.touch()
    home.wait(*more)
    wait_until(
        lambda: sum(total(agent.counters(), "mqtt_messages_received_total") for agent in agents) > over_bus,
        what="words over it",
    )
    ledger.check([*tasks, *more])
    assert not ledger.repeated()


def test_an_unreachable_broker_does_not_matter(cluster: Cluster) -> None:
    with kept_port() as port:
        agent = cluster.agent("n1", "--mqtt", f"mqtt://127.0.0.1:{port}")
        assert agent.cli("run", "echo", "alone").stdout == b"alone\n"
        assert not is_connected(agent)


def test_a_broker_that_never_answers_does_not_matter(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"mqtt://127.0.0.1:{silent.getsockname()[1]}"
        first = cluster.agent("n1", "--mqtt", url, slots=1)
        second = cluster.agent("n2", "--mqtt", url, "--peer", first.listen, slots=1)
        cluster.await_acquainted([first, second])
        ledger = Ledger(cluster.directory / "ledger")
        gate = cluster.directory / "gate"
        tasks = [first.submit(*ledger.argv(2, until=gate)) for _ in range(10)]
        wait_until(lambda: nodes_of(ledger, tasks) == {"n1", "n2"}, what="both to have some")
        gate.touch()
        first.wait(*tasks)
        ledger.check(tasks)
        assert not is_connected(first)


@pytest.mark.parametrize("broker", ["mosquitto", pytest.param("amqtt", marks=pytest.mark.long)], indirect=True)
def test_an_agent_is_killed_and_found_again_over_the_bus(cluster: Cluster, broker: BrokerProcess) -> None:  # noqa: F811
    agents = on_the_bus(cluster, broker.url, 2, slots=1)
    ledger = Ledger(cluster.directory / "ledger")
    gate = cluster.directory / "gate"
    task = agents[0].submit(*ledger.argv(1, 5, gate), placement={"node": "n2"})
    agents[0].await_state(task, "running")
    for agent in agents:
        agent.kill()
        (agent.state / "addresses").unlink(missing_ok=True)  # nothing but the bus tells them of each other
    for agent in agents:
        agent.spawn()
    for agent in agents:
        agent.await_ready()
    gate.touch()
    assert agents[0].wait(task)[task]["exit_code"] == 5
    ledger.check([task])
    assert not ledger.repeated()
