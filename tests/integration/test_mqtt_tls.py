"""A broker by TLS, a real Mosquitto: who comes in, what each may write, and that nothing goes by without it."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from peerload.security.broker import BrokerTls
from tests.integration.broker_fixtures import BusNode, loop_thread, need_broker  # noqa: F401 -- a fixture
from tests.integration.tls_broker import Party, TlsBroker, party
from tests.support import PATIENCE_S, cluster_of, wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.integration.broker_fixtures import LoopThread

pytestmark = [pytest.mark.rule("M1")]

DAY = timedelta(days=1)
BURST = 300


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsBroker]:
    need_broker("mosquitto")
    made = TlsBroker(cluster_of(), tmp_path_factory.mktemp("tls") / "broker")
    made.start()
    yield made
    made.stop()


def tls_of(broker: TlsBroker, node: str | None, ca: str = "") -> BrokerTls:
    return BrokerTls(ca, broker.cluster.authority.certificate, None if node is None else broker.pem_of(node))


class Buses:
    """Nodes on the bus, closed at the end."""

    def __init__(self, loop: LoopThread) -> None:
        self.loop = loop
        self.made: list[BusNode] = []

    def __call__(self, node: str, url: str, **more: Any) -> BusNode:
        self.made.append(BusNode(self.loop, [url], node, **more))
        return self.made[-1]

    def close(self) -> None:
        for node in self.made:
            self.loop.run(node.bus.close())


@pytest.fixture
def buses(loop_thread: LoopThread) -> Iterator[Buses]:  # noqa: F811 -- a fixture
    made = Buses(loop_thread)
    yield made
    made.close()


NO_ANSWER = {"it has not answered yet", "no answer within 5 s"}


def why_not(node: BusNode, says: str) -> str:
    """Why it has no broker, when it has tried; on a slow machine the first attempt may be over before it is told."""

    def tried() -> bool:
        return (
            node.bus.connected
            or says in node.bus.unavailable_because
            or not NO_ANSWER & set(node.bus.unavailable_because.split(": "))
        )

    wait_until(tried, what="an attempt")
    assert not node.bus.connected
    assert node.changes == []
    return node.bus.unavailable_because


def test_nodes_speak_by_tls_with_the_certificates_they_have(broker: TlsBroker, buses: Buses) -> None:
    from peerload.model.messages import Unpair

    one = buses("n1", broker.url, tls=tls_of(broker, "n1"))
    other = buses("n2", f"mqtts://127.0.0.1:{broker.port}", tls=tls_of(broker, "n2"))
    wait_until(lambda: one.bus.connected and other.bus.connected, what="both to be connected")
    wait_until(lambda: one.bus.is_echoed and other.bus.is_echoed, what="each to hear itself")
    assert one.bus.url == broker.url
    wait_until(lambda: one.heard and other.heard, what="each to hear the other")

    def came() -> list[int]:
        return [body.pairing for body, _ in other.heard if isinstance(body, Unpair)]

    for number in range(BURST):  # many messages in one record of TLS
        assert buses.loop.call(one.bus.send, "n2", "", Unpair(number))
    wait_until(lambda: len(came()) >= BURST, what="all of them")
    assert came() == list(range(BURST))


def test_a_node_writes_below_its_own_name_alone(broker: TlsBroker) -> None:
    root = "peerload/default/main"
    mine = [f"{root}/n1/state", f"{root}/n1/to/n10", f"{root}/n1/ask"]
    others = [
        *(f"{root}/n10/{rest}" for rest in ("state", "ask", "to/n1")),
        *(f"{root}/n2/{rest}" for rest in ("state", "to/n10")),
        f"{root}/n1",
        "peerload/n1/state",
        "peerload/default/n1/state",
        "anything",
        "$SYS/broker/version",
        "$share/n1/x",
    ]
    with party(broker, broker.pem_of("n1")) as one, party(broker, broker.pem_of("n10")) as ten:
        ten.subscribe("peerload/#", "#")
        for topic in (*others, *mine):
            one.publish(topic, topic.encode())
        last = f"{root}/n1/ask"
        one.publish(last, b"the end")
        wait_until(lambda: b"the end" in ten.heard.get(last, []), what="the last one")
        assert {topic for topic in ten.heard if not topic.startswith("$SYS")} == set(mine)


def test_nobody_reads_what_is_for_another(broker: TlsBroker) -> None:
    root = "peerload/default/main"
    with (
        party(broker, broker.pem_of("n1")) as one,
        party(broker, broker.pem_of("n10")) as ten,
        party(broker, broker.pem_of("n2")) as two,
    ):
        for client in (one, ten):
            client.subscribe("#", "peerload/#", f"{root}/n2/to/n1", "peerload/+/+/+/to/+")
        two.publish(f"{root}/n2/to/n1", b"for n1")
        two.publish(f"{root}/n2/ask", b"for all")
        wait_until(lambda: f"{root}/n2/ask" in ten.heard and f"{root}/n2/ask" in one.heard, what="what is for all")
        assert one.heard[f"{root}/n2/to/n1"]
        assert f"{root}/n2/to/n1" not in ten.heard


def test_a_client_that_calls_itself_everybody_gets_nothing(broker: TlsBroker) -> None:
    root = "peerload/default/main"
    with party(broker, broker.pem_of("n1")) as one, party(broker, broker.pem_of("n2"), identifier="+") as all_of_them:
        one.subscribe("peerload/#")
        all_of_them.subscribe("peerload/#")
        all_of_them.publish(f"{root}/n2/ask", b"from everybody")
        one.publish(f"{root}/n1/ask", b"from n1")
        wait_until(lambda: f"{root}/n1/ask" in one.heard, what="n1's own")
        assert not all_of_them.heard
        assert f"{root}/n2/ask" not in one.heard


@pytest.mark.rule("S10")
@pytest.mark.parametrize("who", ["nobody", "another cluster's", "expired", "not yet", "the broker itself"])
def test_who_is_no_node_does_not_come_in(broker: TlsBroker, who: str, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    if who == "nobody":
        pem = None
    elif who == "another cluster's":
        pem = TlsBroker(cluster_of("another"), tmp_path / "other").pem_of("n1")
    elif who == "expired":
        pem = broker.pem_of("n1", "old", now=now - 100 * DAY)
    elif who == "not yet":
        pem = broker.pem_of("n1", "early", now=now + 2 * DAY)
    else:
        pem = tmp_path / "broker.pem"
        pem.write_bytes(b"".join((broker.directory / name).read_bytes() for name in ("broker.key", "broker.pem")))
    try:
        client = Party(broker.port, broker.directory / "ca.pem", pem)
    except OSError:
        return  # TLS 1.3: it may learn of it only when it reads
    try:
        wait_until(lambda: client.is_over, what="it to be thrown out")
        assert not any(code == 0 for code in client.codes)
    finally:
        client.close()


@pytest.mark.parametrize(
    ("who", "says"),
    [
        ("nobody", "it asks for a certificate, and this node has none"),
        ("another cluster's", "it does not trust the CA of this node's certificate"),
        ("expired", "it says that this node's certificate has expired"),
    ],
)
def test_the_agent_is_told_why_the_broker_refuses_it(
    broker: TlsBroker, buses: Buses, tmp_path: Path, who: str, says: str
) -> None:
    pem: Path | None = None
    if who == "another cluster's":
        pem = TlsBroker(cluster_of("another"), tmp_path / "other").pem_of("n1")
    elif who == "expired":
        pem = broker.pem_of("n1", "old", now=datetime.now(UTC) - 100 * DAY)
    tls = BrokerTls("", broker.cluster.authority.certificate, pem)
    assert says in why_not(buses("n1", broker.url, tls=tls), says)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("another CA", "(mqtt_ca)"),
        ("the system's CAs", "(mqtt_ca)"),
        ("another name", Says.OTHER_NAME()),
        ("another address", "for another"),
        ("a node's certificate", Says.OTHER_NAME()),
        ("expired", Says.EXPIRED()),
        ("not yet", Says.NOT_VALID_YET()),
    ],
)
def test_a_broker_that_is_not_who_it_should_be_is_told_nothing(
    broker: TlsBroker, buses: Buses, tmp_path: Path, what: str, says: str
) -> None:
    url, ca = broker.url, ""
    now, own = datetime.now(UTC), None
    if what == "another CA":
        own = TlsBroker(cluster_of("another"), tmp_path / "other")
        own.start(cafile="cafile")
    elif what == "the system's CAs":
        ca = "system"
    elif what in {"another name", "another address"}:
        own = TlsBroker(cluster_of(), tmp_path / "other", ("elsewhere", "192.0.2.1"))
        own.start()
        url = own.url if what == "another name" else f"mqtts://127.0.0.1:{own.port}"
    elif what == "a node's certificate":
        own = TlsBroker(cluster_of(), tmp_path / "other")
        pem = own.pem_of("n7")
        (own.directory / "broker.pem").write_bytes(pem.read_bytes())
        (own.directory / "broker.key").write_bytes(pem.read_bytes())
        own.start()
    else:
        own = TlsBroker(cluster_of(), tmp_path / "other", made_at=now + (-800 * DAY if what == "expired" else 2 * DAY))
        own.start()
    if own is not None and what not in {"another name", "another address"}:
        url = own.url
    try:
        assert says in why_not(buses("n1", url, tls=tls_of(broker, "n1", ca)), says)
    finally:
        if own is not None:
            own.stop()


def test_there_is_no_falling_back_to_plain(buses: Buses, broker: TlsBroker) -> None:
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def record() -> None:
            for _ in range(2):
                accepted, _ = listening.accept()
                with accepted:
                    accepted.settimeout(PATIENCE_S)
                    heard.append(accepted.recv(65536))
                    accepted.sendall(b"\x20\x02\x00\x00" * 4)  # a CONNACK, without TLS

        thread = threading.Thread(target=record)
        thread.start()
        node = buses("n1", f"mqtts://localhost:{listening.getsockname()[1]}", tls=tls_of(broker, "n1"))
        assert Says.NO_TLS() in why_not(node, Says.NO_TLS())
        thread.join(60)
    assert [data[:2] for data in heard] == [b"\x16\x03"] * 2, "a handshake, each time"
    assert not any(b"MQTT" in data for data in heard)


@pytest.mark.long
def test_a_plain_client_gets_nothing(broker: TlsBroker, buses: Buses) -> None:
    url = f"mqtt://127.0.0.1:{broker.port}"
    assert why_not(buses("n1", url), url)


@pytest.mark.parametrize("password", ["right:with:colons", "wrong"])
def test_a_password_from_a_file_and_no_certificate(
    buses: Buses, tmp_path: Path, password: str, capfd: pytest.CaptureFixture[str]
) -> None:
    own = TlsBroker(cluster_of(), tmp_path / "own")
    users = own.directory / "users"
    users.touch()
    subprocess.run(["mosquitto_passwd", "-b", str(users), "n1", "right:with:colons"], check=True, capture_output=True)
    own.start(f"password_file {users}", require_certificate="#", use_identity_as_username="#")
    private = tmp_path / "password"
    private.touch(mode=0o600)
    private.write_text(f"n1:{password}\n", encoding="utf-8")
    try:
        node = buses("n1", own.url, tls=tls_of(own, None), mqtt_password_file=str(private))
        if password == "wrong":
            assert "Not authorized" in why_not(node, "Not authorized")
            private.write_text("n1:right:with:colons\n", encoding="utf-8")  # read anew at each attempt
        wait_until(lambda: node.bus.connected and node.bus.is_echoed, what="it to be let in")
        assert password not in (node.bus.url or "") + node.bus.unavailable_because
        private.chmod(0o640)
        own.stop()
        wait_until(lambda: Says.OPEN_TO_OTHERS() in node.bus.unavailable_because, what="it to be refused")
    finally:
        own.stop()
    assert password not in "".join(capfd.readouterr())


def test_an_old_tls_is_refused(broker: TlsBroker) -> None:
    context = ssl.create_default_context(cafile=str(broker.directory / "ca.pem"))
    context.load_cert_chain(broker.pem_of("n1"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(("localhost", broker.port)) as sock, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(sock, server_hostname="localhost")
    assert BrokerTls("", broker.cluster.authority.certificate, None).context().minimum_version >= ssl.TLSVersion.TLSv1_2
