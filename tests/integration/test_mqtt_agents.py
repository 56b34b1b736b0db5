"""Real agents and a real Mosquitto by TLS: what doctor says of it, and what listens."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from peerload.cli.doctor.cluster import BrokerAccess, BrokerProbe, _of_tls, anybody_may_publish, probe_broker
from peerload.cli.doctor.machine import DoctorInput
from tests.integration.broker_fixtures import need_broker
from tests.integration.cluster import Cluster
from tests.integration.test_two_machines import listening
from tests.integration.tls_broker import TlsBroker, party
from tests.support import cluster_of, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.integration.cluster import Agent

ROOT = "peerload/default/main"
STATES_HEARD = 'mqtt_messages_received_total{type="state"}'


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsBroker]:
    need_broker("mosquitto")
    made = TlsBroker(cluster_of(), tmp_path_factory.mktemp("tls") / "broker")
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def agents(broker: TlsBroker) -> Iterator[list[Agent]]:
    """Two that know each other."""
    with Cluster() as cluster:
        config = cluster.directory / "config" / "peerload" / "config.toml"
        config.parent.mkdir(parents=True)
        config.write_text(f'mqtt = ["{broker.url}"]\nmqtt_state_every_s = 1\n', encoding="utf-8")
        yield cluster.linked(2)


def finding(agent: Agent) -> tuple[str, str, str]:
    """What doctor finds of the broker."""
    done = agent.cli("doctor", "--json")
    (found,) = [one for one in json.loads(done.stdout)["checks"] if one["name"] == "broker"]
    return found["result"], found["says"], found["fix"]


@pytest.mark.rule("M1")
def test_agents_are_on_the_broker_by_tls_and_doctor_says_so(broker: TlsBroker, agents: list[Agent]) -> None:
    for agent in agents:
        wait_until(lambda a=agent: a.call("info")["mqtt"] == broker.url, what="it to be connected")  # type: ignore[misc]
        wait_until(lambda a=agent: a.call("checkup")["broker"]["heard"], what="it to hear itself")  # type: ignore[misc]
        wait_until(lambda a=agent: a.counters().get(STATES_HEARD, 0), what="the other's State")  # type: ignore[misc]
    wait_until(lambda: finding(agents[0])[0] == "ok", what="doctor to hear of it")
    assert "anybody" not in finding(agents[0])[1].lower()


@pytest.mark.rule("M1")
@pytest.mark.long
def test_doctor_says_that_the_rights_keep_a_node_silent(broker: TlsBroker, agents: list[Agent]) -> None:
    acl = broker.directory / "mosquitto.acl"
    as_it_was = acl.read_text(encoding="utf-8")
    acl.write_text(as_it_was.replace("%u/#", "nobody/#"), encoding="utf-8")
    broker.stop()
    broker.start()
    try:
        wait_until(lambda: "acl_file" in finding(agents[0])[2], what="doctor to say why")
        acl.write_text(as_it_was, encoding="utf-8")
        broker.stop()
        wait_until(lambda: "systemctl" in finding(agents[0])[2], what="doctor to say that it is away")
    finally:
        acl.write_text(as_it_was, encoding="utf-8")
        broker.start()
    done = agents[0].cli("run", "--node", "n2", "-d", "/", "hostname")
    assert done.returncode == 0, "what is shared needs no broker"
    wait_until(lambda: finding(agents[0])[0] == "ok", what="all to be well")


@pytest.mark.rule("P2")
@pytest.mark.long
def test_who_floods_the_broker_is_muted_and_the_broker_is_kept(broker: TlsBroker, agents: list[Agent]) -> None:
    one = agents[0]
    wait_until(lambda: one.call("info")["mqtt"] == broker.url, what="it to be connected")
    connects = one.counters()["mqtt_connects_total"]
    with party(broker, broker.pem_of("n5")) as flooder:

        def is_muted() -> bool:
            for number in range(500):
                flooder.publish(f"{ROOT}/n5/ask", b"%d" % number)
            return bool(one.counters().get("mqtt_publishers_muted_total"))

        wait_until(is_muted, what="it to be muted")
    told = one.counters().get('mqtt_messages_received_total{type="state"}', 0)
    wait_until(
        lambda: one.counters().get('mqtt_messages_received_total{type="state"}', 0) > told,
        what="the others to be heard",
    )
    assert one.counters()["mqtt_connects_total"] == connects
    with one.client() as client:
        said = [event for part in client.stream("events", what=["security"]) for event in part["events"]]
    assert any(event["state"] == "P2" and event["node"] == "n5" for event in said)


@pytest.mark.rule("M1")
def test_doctor_tries_whether_anybody_may_publish(broker: TlsBroker, tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PEERLOAD_CLUSTER": str(cluster_of().directory)}
    facts = DoctorInput(str(tmp_path / "no-agent"), environment=environment)
    assert facts.cluster is not None
    way = BrokerAccess(cluster_ca=cluster_of().authority.certificate, certificate=broker.pem_of("n1"))
    assert not anybody_may_publish(broker.url, way, facts)
    assert probe_broker(broker.url, way).why == ""
    left_s = (probe_broker(broker.url, way).ends_at or 0.0) - time.time()
    assert 729 * 86_400 < left_s < 731 * 86_400
    assert "certificate" in probe_broker(broker.url, way._replace(certificate=None)).why
    assert "mqtt_ca" in probe_broker(broker.url, way._replace(ca="system")).why
    expired = TlsBroker(cluster_of(), tmp_path / "expired", made_at=datetime.now(UTC) - timedelta(days=3650))
    expired.start()
    try:
        assert "expired" in probe_broker(expired.url, way).why
    finally:
        expired.stop()
    open_to_all = TlsBroker(cluster_of(), tmp_path / "open")
    lines = {"require_certificate": "#", "use_identity_as_username": "#", "acl_file": "#", "allow_anonymous": "#"}
    open_to_all.start("allow_anonymous true", **lines)
    try:
        assert anybody_may_publish(open_to_all.url, way, facts)
    finally:
        open_to_all.stop()
    concern = _of_tls(facts, [], ["mqtts://me:***@broker.lab:8883"])
    assert concern is not None
    assert (concern.result, "broker.lab:8883" in concern.says, "secret" in concern.says) == ("warn", True, False)
    told = _of_tls(facts, [BrokerProbe("mqtt://broker.lab:1883", sends_password=True)], [])
    assert told is not None
    assert (told.result, "mqtts://" in told.fix) == ("warn", True)
    ending = _of_tls(facts, [BrokerProbe("mqtts://b:8883", ends_at=facts.now + 86_400.0)], [])
    assert ending is not None
    assert "broker-certificate" in ending.fix


def hears_more(agent: Agent, name: str) -> None:
    """Wait until it has counted some more of that."""
    so_far = agent.counters().get(name, 0)
    wait_until(lambda: agent.counters().get(name, 0) > so_far + 2, what=f"{agent.node}: more of {name}")


@pytest.mark.long
@pytest.mark.rule("J5")
def test_the_key_that_seals_is_changed_under_traffic_and_nothing_is_lost(agents: list[Agent]) -> None:
    one, two = agents
    lost = (
        'gossip_datagrams_dropped_total{reason="not_authentic"}',
        'mqtt_messages_dropped_total{reason="not_authentic"}',
    )
    before = {(agent.node, name): agent.counters().get(name, 0) for agent in agents for name in lost}
    numbers = []
    for _ in range(2):
        tasks = [one.submit("/bin/true", placement={"node": "n2"}) for _ in range(10)]
        assert one.cli("cluster", "rotate").returncode == 0
        numbers.append(one.call("info")["seal_key"])
        wait_until(lambda n=numbers[-1]: two.call("info")["seal_key"] == n, what="the other has it")  # type: ignore[misc]
        assert {task["state"] for task in one.wait(*tasks).values()} == {"done"}
        for agent in agents:
            hears_more(agent, "gossip_datagrams_received_total")
            hears_more(agent, STATES_HEARD)
    after = {(agent.node, name): agent.counters().get(name, 0) for agent in agents for name in lost}
    assert after == before
    wait_until(lambda: all(agent.peers_alive() == {"n1", "n2"} for agent in agents), what="both to be alive")


@pytest.mark.rule("S2")
def test_agents_with_peers_and_a_broker_listen_at_one_address_each(agents: list[Agent]) -> None:
    for agent in agents:
        host, _, port = agent.listen.rpartition(":")
        inet, unix = listening(agent.pid)
        assert inet == {("tcp", host, int(port)), ("udp", host, int(port))}
        assert {path for path in unix if path != "launcher.sock"} <= {agent.socket}
        assert listening(agent.launcher_pid)[0] == set()
