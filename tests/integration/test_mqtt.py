"""The bus over real brokers: who hears what, what is refused, and how it rides out a broker's death."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import aiomqtt
import msgspec
import pytest

from peerload.agent import mqtt
from peerload.agent.mqtt import AdviceFilter, FloodFilter, Received, Topics
from peerload.model.errors import ConfigError, ProtocolError
from peerload.model.messages import (
    Envelope,
    GiveRequest,
    Message,
    Need,
    NotStarted,
    ProbeReply,
    ProbeRequest,
    Query,
    State,
    StateRequest,
)
from peerload.model.resources import LoadReport, Profile
from peerload.security.broker import BrokerUrl
from peerload.wire import peer
from tests.integration.broker_fixtures import (  # noqa: F401 -- fixtures
    BusNode,
    LoopThread,
    broker,
    identity_of,
    loop_thread,
    sealed,
    sealer_of,
    short_directory,
)
from tests.support import PATIENCE_S, kept_port, security_events, total, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peerload.cli.demo.broker import BrokerProcess

ASK = ProbeRequest(search=1, need=Need(), report=LoadReport())
"""Any small advice."""


class Nodes:
    """Makes nodes and closes them at the end of the test."""

    def __init__(self, loop: LoopThread, urls: list[str]) -> None:
        self.loop = loop
        self.urls = urls
        self.made: list[BusNode] = []

    def __call__(self, node: str, **more: Any) -> BusNode:
        made = BusNode(self.loop, self.urls, node, **more)
        self.made.append(made)
        return made


@pytest.fixture
def nodes(
    loop_thread: LoopThread,  # noqa: F811 -- a fixture
    broker: BrokerProcess,  # noqa: F811 -- a fixture
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Nodes]:
    """A broker that a busy machine lets stand still is not given up: who connects again says everything again."""
    monkeypatch.setattr(mqtt, "CONNECT_S", PATIENCE_S)
    made = Nodes(loop_thread, [broker.url])
    yield made
    for node in made.made:
        node.close()


def publish(loop: LoopThread, url: str, messages: list[tuple[str, bytes]], *, retain: bool = False) -> None:
    """A stranger with a client of its own publishes these (topic, payload), in order."""
    parsed = BrokerUrl.parse(url)

    async def work() -> None:
        client = aiomqtt.Client(parsed.host, parsed.port, protocol=aiomqtt.ProtocolVersion.V311)
        async with client:
            for topic, payload in messages:
                await client.publish(topic, payload, qos=1, retain=retain)

    loop.run(work())


@pytest.mark.parametrize("broker", ["mosquitto", "amqtt"], indirect=True)
def test_state_is_retained_for_who_joins_later(nodes: Nodes) -> None:
    first, witness = nodes("ws1"), nodes("ws0")
    wait_until(lambda: first.heard and witness.heard, what="both subscribed")
    assert first.announce(3)
    assert first.send("ws0", ASK)  # the broker retains the State before it handles this
    wait_until(lambda: any(isinstance(message, ProbeRequest) for message, _ in witness.heard), what="State retained")
    witness.close()
    nodes.made.remove(witness)
    late = nodes("ws2")

    def states_of_first() -> list[tuple[int, bool]]:
        return [
            (message.report.load_tasks, retained)
            for message, retained in late.heard
            if isinstance(message, State) and message.identity.node == "ws1"
        ]

    wait_until(states_of_first, what="ws2 hears ws1")
    assert states_of_first() == [(3, True)]
    wait_until(
        lambda: any(m.identity.node == "ws2" for m, _ in first.heard if isinstance(m, State)), what="ws2 is heard"
    )
    assert not any(retained for m, retained in first.heard if isinstance(m, State) and m.identity.node == "ws2")
    assert first.announce(4)
    wait_until(lambda: len(states_of_first()) == 2, what="the live one")
    assert states_of_first()[1] == (4, False)
    assert first.changes == [True]
    assert first.counters["mqtt_connects_total"] == 1


def test_a_directed_message_reaches_its_node_alone_and_once(nodes: Nodes) -> None:
    a, b, c = nodes("a"), nodes("b"), nodes("c")
    wait_until(lambda: all(len(node.heard) == 2 for node in (a, b, c)), what="all states")
    assert a.send("b", ProbeRequest(search=7, need=Need(), report=LoadReport()), b.identity.boot)
    wait_until(lambda: len(b.heard) == 3, what="the probe")
    assert b.send("a", ProbeReply(search=7, accepts=True, report=LoadReport()))
    wait_until(lambda: len(a.heard) == 3, what="the reply")
    reply = a.heard[-1][0]
    assert isinstance(reply, ProbeReply)
    assert (reply.search, reply.accepts) == (7, True)
    assert len(c.heard) == 2
    wait_until(lambda: a.counters['mqtt_messages_published_total{type="probe"}'] == 1, what="it is counted")
    assert b.counters['mqtt_messages_received_total{type="probe"}'] == 1


def test_a_request_reaches_everybody_who_is_there_and_is_not_kept(nodes: Nodes) -> None:
    a, b, c = nodes("a"), nodes("b"), nodes("c")
    wait_until(lambda: all(len(node.heard) == 2 for node in (a, b, c)), what="all states")
    request = StateRequest(7, LoadReport())
    assert a.broadcast(request)
    assert not a.broadcast(ASK)  # a probe is for one node
    wait_until(lambda: len(b.heard) == len(c.heard) == 3, what="b and c hear it")
    assert b.heard[2] == c.heard[2] == (request, False)
    late = nodes("d")
    wait_until(lambda: len(late.heard) == 3, what="d hears the states")
    wait_until(lambda: len(b.heard) == 4, what="b hears that of d")
    assert all(isinstance(message, State) for message, _ in late.heard)
    publish(a.loop, nodes.urls[0], [sealed(a.sealer, "peerload/default/main/a/ask", a.envelope(ASK, "", ""))])
    wait_until(
        lambda: b.counters['mqtt_messages_dropped_total{reason="not_broadcast"}'] == 1,
        what="b drops what is not for all",
    )
    assert len(b.heard) == 4


def test_a_burst_arrives_whole_and_in_order(nodes: Nodes) -> None:
    a, b = nodes("a"), nodes("b")
    wait_until(lambda: a.bus.connected and b.bus.connected, what="connected")

    def burst() -> int:
        return sum(
            a.bus.send("b", "", ProbeReply(search=number, accepts=True, report=LoadReport())) for number in range(900)
        )

    assert a.loop.call(burst) == 900
    wait_until(lambda: b.counters['mqtt_messages_received_total{type="probe-reply"}'] == 900, what="900 replies")
    replies = [message.search for message, _ in b.heard if isinstance(message, ProbeReply)]
    assert replies == list(range(900))


def test_the_outgoing_queue_is_bounded(nodes: Nodes) -> None:
    a = nodes("a")
    wait_until(lambda: a.bus.connected, what="connected")

    def burst() -> int:
        return sum(a.bus.send("b", "", ASK) for _ in range(3000))

    assert a.loop.call(burst) == 1000
    assert a.counters['mqtt_messages_refused_total{reason="queue_full"}'] == 2000


def test_a_killed_broker_is_found_again_by_itself(nodes: Nodes, broker: BrokerProcess) -> None:  # noqa: F811
    a, b = nodes("a"), nodes("b")
    wait_until(lambda: a.heard and b.heard, what="both heard")
    broker.kill()
    wait_until(lambda: not a.bus.connected and not b.bus.connected, what="the loss is seen")
    wait_until(lambda: a.bus.url is None, what="it is noted")
    assert a.send("b", ASK) is False
    assert a.announce(9) is False
    heard = len(b.heard)
    broker.start()
    wait_until(lambda: a.bus.connected and b.bus.connected, what="reconnected")
    wait_until(lambda: len(b.heard) > heard, what="state published again")
    state = b.heard[-1][0]
    assert isinstance(state, State)
    assert state.report.load_tasks == 9
    assert a.changes == [True, False, True]
    assert a.send("b", ASK)
    wait_until(lambda: isinstance(b.heard[-1][0], ProbeRequest), what="directed messages work again")


def test_a_frozen_broker_holds_nobody_up(nodes: Nodes, broker: BrokerProcess) -> None:  # noqa: F811 -- a fixture
    a = nodes("a")
    wait_until(lambda: a.bus.connected, what="connected")
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        big = Profile(node="a", slots=1, cpus=1.0, labels=tuple("x" * 128 for _ in range(20)))
        request = GiveRequest(search=1, report=LoadReport(), profile=big)

        def burst() -> bool:
            return all(a.bus.send("b", "", request) for _ in range(500))

        wait_until(lambda: not a.loop.call(burst), what="the queue is full, or the broker given up")
        a.close()
        nodes.made.remove(a)
    finally:
        os.kill(broker.pid, signal.SIGCONT)


def test_a_clean_close_takes_the_retained_state_away(nodes: Nodes) -> None:
    a, witness = nodes("a"), nodes("w")
    wait_until(lambda: witness.heard, what="a is seen")
    a.close()
    assert a.changes == [True, False]
    late = nodes("late")
    wait_until(lambda: late.heard, what="late hears")
    assert late.send("w", ASK)
    assert late.send("late", ASK)
    wait_until(lambda: any(isinstance(message, ProbeRequest) for message, _ in witness.heard), what="a full round")
    assert {message.identity.node for message, _ in late.heard if isinstance(message, State)} == {"w"}


def test_state_is_repeated(loop_thread: LoopThread, broker: BrokerProcess) -> None:  # noqa: F811 -- fixtures
    node = BusNode(loop_thread, [broker.url], "a", mqtt_state_every_s=0.05)
    wait_until(lambda: node.counters['mqtt_messages_published_total{type="state"}'] >= 4, what="repeated")
    node.close()


@pytest.mark.rule("M2")
@pytest.mark.bad_input("garbage")
def test_what_a_hostile_broker_hands_over_is_dropped_and_counted(nodes: Nodes) -> None:
    me = nodes("me")
    wait_until(lambda: me.bus.connected, what="connected")
    good = ASK

    def envelope(body: Message, **changes: object) -> Envelope:
        made = Envelope(v=1, cluster="default", src="evil", src_boot="x", seq=len(bad), body=body, dst="me")
        return msgspec.structs.replace(made, **changes)

    state = State(identity=identity_of("evil"), profile=Profile(node="evil", slots=1, cpus=1.0), report=LoadReport())
    evil = sealer_of(identity_of("evil", "x"))
    to, states = "peerload/default/main/evil/to/me", "peerload/default/main/evil/state"
    bad: list[tuple[str, bytes, str]] = []
    for topic, body, why in (
        (to, envelope(good, cluster="other"), "other_cluster"),
        (to, envelope(good, src="somebody"), "wrong_sender"),
        (to, envelope(good, src_boot="y"), "wrong_sender"),
        (states, envelope(state, src_boot="not-the-states"), "wrong_sender"),
        (states, envelope(good), "not_advice"),
        (to, envelope(Query(task="me/1", uid=b"u" * 16, attempt=1)), "not_advice"),
        (to, envelope(NotStarted(task="me/1", uid=b"u" * 16, attempt=1)), "not_advice"),
        (to, envelope(good, dst="you"), "wrong_recipient"),
        (to, envelope(good, dst_boot="an-earlier-start"), "wrong_recipient"),
    ):
        bad.append((*sealed(evil, topic, body), why))
    other = sealer_of(identity_of("evil", "y"), "another")
    changed = bytearray(sealed(evil, to, envelope(good))[1])
    changed[-1] ^= 1
    bad += [
        (to, b"\xff\x00garbage", "not_authentic"),
        (states, b"{}", "not_authentic"),
        (to, peer.encode(envelope(good)), "not_authentic"),
        (to, sealed(other, to, envelope(good))[1], "not_authentic"),
        (to, sealed(evil, states, envelope(good))[1], "not_authentic"),
        (to, bytes(changed), "not_authentic"),
        (to, sealed(evil, to, envelope(good))[1][:-1], "not_authentic"),
        (to, evil.seal(b"\xff\x00garbage", to.encode()), "malformed"),
        (to, b"\x90" * 5000, "too_large"),
    ]
    publish(me.loop, nodes.urls[0], [(topic, payload) for topic, payload, _ in bad])
    publish(me.loop, nodes.urls[0], [sealed(evil, to, envelope(good))] * 2)
    wait_until(
        lambda: me.heard and me.counters['mqtt_messages_dropped_total{reason="replayed"}'], what="the good one, once"
    )
    assert [message for message, _ in me.heard] == [good]
    reasons = Counter(why for _, _, why in bad)
    assert {why: me.counters[f'mqtt_messages_dropped_total{{reason="{why}"}}'] for why in reasons} == dict(reasons)
    assert total(me.counters, "mqtt_messages_dropped_total") == len(bad) + 1  # counted before the reason is
    assert me.bus.connected


@pytest.mark.rule("M1")
def test_nothing_can_be_read_on_the_way(nodes: Nodes) -> None:
    a, b = nodes("a"), nodes("b")
    wait_until(lambda: a.heard and b.heard, what="both")
    seen: list[bytes] = []

    async def listen() -> None:
        url = BrokerUrl.parse(nodes.urls[0])
        async with aiomqtt.Client(url.host, url.port) as client:
            await client.subscribe("#")
            async for message in client.messages:
                seen.append(bytes(message.payload))
                if len(seen) == 3:  # both States, retained, and the probe
                    return

    listening = a.loop.start(listen())
    wait_until(lambda: len(seen) >= 2, what="the States")
    assert a.send("b", ASK)
    wait_until(lambda: len(seen) == 3, what="the probe")
    listening.result(60)
    for payload in seen:
        with pytest.raises(ProtocolError):
            peer.decode(payload)
        assert b"slots" not in payload


@pytest.mark.rule("M2")
def test_ownership_is_never_published(nodes: Nodes) -> None:
    a = nodes("a")
    wait_until(lambda: a.bus.connected, what="connected")
    assert a.send("b", Query(task="a/1", uid=b"u" * 16, attempt=1)) is False
    big = Profile(node="a", slots=1, cpus=1.0, labels=tuple("x" * 128 for _ in range(64)))
    assert a.send("b", GiveRequest(search=1, report=LoadReport(), profile=big)) is False
    assert a.counters['mqtt_messages_refused_total{reason="too_large"}'] == 1


@pytest.mark.long
def test_a_broker_that_never_answers_is_away_and_blocks_nobody(
    loop_thread: LoopThread,  # noqa: F811 -- a fixture
    caplog: pytest.LogCaptureFixture,
) -> None:
    accepted = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as mute, caplog.at_level(logging.INFO, "peerload.mqtt"):
        held: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    held.append(mute.accept()[0])
                except OSError:
                    return
                accepted.set()

        thread = threading.Thread(target=accept)
        thread.start()
        node = BusNode(loop_thread, [f"mqtt://someone:s3cret@127.0.0.1:{mute.getsockname()[1]}"], "a")
        assert accepted.wait(60)
        assert node.send("b", ASK) is False
        assert node.announce(1) is False
        wait_until(lambda: caplog.records, timeout_s=60, what="one line about it")
        assert "no answer within" in caplog.text
        assert "s3cret" not in caplog.text
        assert node.changes == []
        node.close()
        mute.shutdown(socket.SHUT_RDWR)
        thread.join(60)
        for sock in held:
            sock.close()
    assert len(caplog.records) == 1


def test_the_next_broker_is_tried(
    loop_thread: LoopThread,  # noqa: F811 -- a fixture
    broker: BrokerProcess,  # noqa: F811 -- a fixture
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "peerload.mqtt"), kept_port() as refused:
        node = BusNode(loop_thread, [f"mqtt://127.0.0.1:{refused}", broker.url], "a")
        wait_until(lambda: node.bus.connected, what="the second broker")
        assert node.bus.url == broker.url
        node.close()
    levels = [
        record.levelname for record in caplog.records
    ]  # what is slow to answer is warned of, too, and tried again
    assert (levels[0], levels[-1], levels.count("INFO")) == ("WARNING", "INFO", 1)


@pytest.mark.rule("S13")
@pytest.mark.parametrize(
    "url",
    [
        "mqtts://u:pass1@h/path",
        "http://u:pass1@h",
        "mqtt://",
        "mqtt://u:pass1@h:99999",
        "mqtt://u:pass1@h/path",
        "pass1",
        "",
    ],
)
def test_an_unusable_address_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BrokerUrl.parse(url)
    assert "pass1" not in str(caught.value) + caught.value.hint + caught.value.why
    assert caught.value.key == "mqtt"


def test_addresses() -> None:
    assert BrokerUrl.parse("mqtt://broker").port == 1883
    full = BrokerUrl.parse("mqtt://user:p%40ss@[::1]:99")
    assert (full.host, full.port, full.user, full.password) == ("::1", 99, "user", "p@ss")
    assert full.text == "mqtt://[::1]:99"
    assert "p@ss" not in repr(full)
    safe = BrokerUrl.parse("mqtts://broker")
    assert (safe.port, safe.tls, safe.text) == (8883, True, "mqtts://broker:8883")


class Sample(msgspec.Struct):
    topic: str
    payload: bytes
    retain: bool = False


def test_waiting_states_coalesce_to_the_newest_of_each_node() -> None:
    counters: Counter[str] = Counter()
    queue: Any = Received(counters, FloodFilter(security_events(counters)), 3)
    for number in range(100):
        queue.put_nowait(Sample("peerload/c/s/a/state", str(number).encode()))
    queue.put_nowait(Sample("peerload/c/s/a/to/me", b"1"))
    queue.put_nowait(Sample("peerload/c/s/a/to/me", b"2"))
    queue.put_nowait(Sample("peerload/c/s/a/to/me", b"3"))
    queue.put_nowait(Sample("peerload/c/s/a/state", b"newest"))
    queue.put_nowait(Sample("peerload/c/s/b/state", b"x" * 5000))
    assert [queue.get_nowait().payload for _ in range(queue.qsize())] == [b"newest", b"1", b"2"]
    assert counters == {
        'mqtt_messages_dropped_total{reason="queue_full"}': 1,
        'mqtt_messages_dropped_total{reason="too_large"}': 1,
    }


def test_of_two_states_the_newer_counts_whatever_the_order() -> None:
    me = identity_of("me")
    accept = AdviceFilter(Topics("default", "me"), me, sealer_of(me), security_events(Counter())).accept
    sealers = {boot: sealer_of(identity_of("a", boot)) for boot in ("first", "second")}

    def state(boot: str, incarnation: int, seq: int) -> bool:
        told = identity_of("a", boot, incarnation)
        body = State(identity=told, profile=Profile(node="a", slots=1, cpus=1.0), report=LoadReport())
        envelope = Envelope(v=1, cluster="default", src="a", src_boot=boot, seq=seq, body=body)
        return accept(*sealed(sealers[boot], "peerload/default/s/a/state", envelope)) is not None

    assert state("first", 1, 10)
    assert not state("first", 1, 10)
    assert not state("first", 1, 9)
    assert state("first", 1, 11)
    assert state("second", 2, 1)
    assert not state("first", 1, 12)
    assert state("second", 2, 2)
