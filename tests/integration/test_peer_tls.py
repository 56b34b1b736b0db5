"""Who is let in at the peer link, and what everybody else gets: nothing, within seconds, and it is counted."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from peerload.agent.peers import links
from peerload.agent.peers.connection import HANDSHAKE_S
from peerload.model.errors import LinkUnavailable
from peerload.model.messages import Hello, Ping
from peerload.model.resources import Profile
from peerload.security import certificates
from peerload.security.tls import PROTOCOL, Credentials
from tests.integration.broker_fixtures import LoopThread, identity_of, loop_thread  # noqa: F401 -- fixtures
from tests.integration.test_peer_link import REQUEST, LinkNode, Nodes, Stranger, nodes  # noqa: F401 -- fixtures
from tests.support import PATIENCE_S, cluster_of, credentials_of, total, wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator


def plain(node: LinkNode, came_from: str = "127.0.0.1") -> socket.socket:
    host, _, port = node.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60, source_address=(came_from, 0))


def answer(sock: socket.socket) -> bytes:
    """All that is said to us until we are shut out. Raises TimeoutError if we are not."""
    said = b""
    with sock, contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := sock.recv(1 << 16):
            said += data
    return said


def context_of(pair: certificates.KeyPair | None, tmp_path: Path, protocol: str = PROTOCOL) -> ssl.SSLContext:
    """A client that trusts anybody and shows this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([protocol])
    if pair is not None:
        path = tmp_path / "pair.pem"
        path.write_bytes(pair.key + pair.certificate)
        context.load_cert_chain(path)
    return context


def said_to(node: LinkNode, context: ssl.SSLContext, *frames: bytes) -> bytes:
    """What a node says to whoever comes with this context."""
    try:
        sock = context.wrap_socket(plain(node))
    except (ssl.SSLError, ConnectionError):
        return b""
    with contextlib.suppress(OSError):
        sock.sendall(b"".join(frames))
    return answer(sock)


def turned_away(node: LinkNode, why: str) -> bool:
    """True if one connection was dropped, and its security event says why."""
    events = [what for rule, _, what in node.reported if rule == "J3"]
    is_counted = node.counters['peer_frames_dropped_total{reason="handshake_failed"}'] == 1
    return is_counted and events == [f"handshake failed: {why}"]


@pytest.mark.rule("J3")
@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x10" + b"\xc1" * 16,
        b"\xff\xff\xff\xff",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x16\x03\x01\x00\x05aaaaa",
    ],
    ids=["http", "a frame", "4 GiB", "ssh", "no client hello"],
)
def test_who_does_not_speak_tls_gets_no_answer(
    nodes: Nodes,  # noqa: F811 -- a fixture
    monkeypatch: pytest.MonkeyPatch,
    raw: bytes,
) -> None:
    monkeypatch.setattr(links, "HANDSHAKE_S", 0.5)  # some say less than is needed to see that it is no TLS
    a = nodes("a")
    sock = plain(a)
    with contextlib.suppress(ConnectionError):  # its time may be over already
        sock.sendall(raw)
    assert answer(sock) == b""
    wait_until(lambda: total(a.counters, "peer_frames_dropped_total") == 1, what="it is counted")
    assert a.met == []


@pytest.mark.rule("J3", "S10")
def test_a_plaintext_introduction_is_not_read(nodes: Nodes) -> None:  # noqa: F811 -- a fixture
    a, member = nodes("a"), nodes("b")
    sock = plain(a)
    stranger = Stranger(member)
    sock.sendall(stranger.hello())
    stranger.close()
    assert answer(sock) == b""
    assert a.met == []
    wait_until(lambda: turned_away(a, Says.NO_TLS()), what="it is counted")


@pytest.mark.rule("J3")
def test_who_says_nothing_is_shut_out(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811 -- a fixture
    monkeypatch.setattr(links, "HANDSHAKE_S", 0.5)
    a = nodes("a")
    assert HANDSHAKE_S <= 5.0, "a stranger is shut out within 5 s"
    silent, slow = plain(a), plain(a)
    with contextlib.suppress(ConnectionError):  # its time may be over already
        slow.sendall(b"\x16\x03\x01\x01")
    assert answer(silent) == answer(slow) == b""
    wait_until(
        lambda: a.counters['peer_frames_dropped_total{reason="handshake_failed"}'] == 2,
        what="both counted",
    )


@pytest.mark.rule("J3")
def test_strangers_without_proof_are_bounded(nodes: Nodes) -> None:  # noqa: F811 -- a fixture
    a = nodes("a")
    silent = [plain(a) for _ in range(links.STRANGERS_OF_ONE_MAX)]
    wait_until(lambda: len(a.links._listener.strangers) == links.STRANGERS_OF_ONE_MAX, what="all wait")
    assert answer(plain(a)) == b""
    assert a.counters['peer_frames_dropped_total{reason="too_many_handshakes"}'] == 1
    others = links.STRANGERS_MAX - links.STRANGERS_OF_ONE_MAX
    silent += [plain(a, "127.0.0.2") for _ in range(others)]
    wait_until(lambda: len(a.links._listener.strangers) == links.STRANGERS_MAX, what="there is room for others")
    assert answer(plain(a, "127.0.0.3")) == b"", "and an end of it"
    for sock in silent:
        sock.close()
    wait_until(lambda: not a.links._listener.strangers, what="room again")
    b = nodes("b")
    b.dial(a.address)
    wait_until(lambda: a.met, what="a member")


@pytest.mark.rule("J3", "S10")
def test_an_older_tls_is_refused(nodes: Nodes, tmp_path: Path) -> None:  # noqa: F811 -- a fixture
    a = nodes("a")
    context = context_of(None, tmp_path)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(plain(a))
    wait_until(lambda: turned_away(a, Says.NO_TLS_1_3()), what="it is counted")


NOW = datetime.now(UTC)
DAY = timedelta(days=1)


@pytest.mark.rule("J3")
@pytest.mark.parametrize(
    ("cluster", "made_at", "why"),
    [
        ("another", NOW, Says.OTHER_CLUSTER()),
        ("default", NOW - 100 * DAY, f"{Says.EXPIRED()}; {Says.COMPARE_CLOCKS()}"),
        ("default", NOW + 2 * DAY, f"{Says.NOT_VALID_YET()}; {Says.COMPARE_CLOCKS()}"),
        (None, NOW, Says.NO_CERTIFICATE()),
    ],
    ids=["another CA", "expired", "a clock too far ahead", "none"],
)
@pytest.mark.bad_input("wrong-ca", "expired", "skewed-clock")
def test_a_certificate_that_will_not_do(
    nodes: Nodes,  # noqa: F811 -- a fixture
    tmp_path: Path,
    cluster: str | None,
    made_at: datetime,
    why: str,
) -> None:
    a = nodes("a")
    pair = certificates.issue(cluster_of(cluster).authority, "stranger", made_at) if cluster else None
    frames = Stranger(a)
    assert said_to(a, context_of(pair, tmp_path), frames.hello()) == b"", "no introduction"
    frames.close()
    wait_until(lambda: turned_away(a, why), what=why)
    assert a.met == []


@pytest.mark.parametrize("hours", [-23, 23])
@pytest.mark.bad_input("skewed-clock")
def test_clocks_may_differ_by_nearly_a_day(nodes: Nodes, tmp_path: Path, hours: int) -> None:  # noqa: F811 -- a fixture
    a = nodes("a")
    pair = certificates.issue(cluster_of().authority, "stranger", datetime.now(UTC) + timedelta(hours=hours))
    stranger = Stranger(a, context=context_of(pair, tmp_path))
    stranger.send(stranger.hello())
    wait_until(lambda: a.met, what="met")
    stranger.close()


@pytest.mark.rule("S10")
def test_a_member_that_speaks_another_protocol(nodes: Nodes, tmp_path: Path) -> None:  # noqa: F811 -- a fixture
    a = nodes("a")
    pair = certificates.issue(cluster_of().authority, "stranger", datetime.now(UTC))
    assert said_to(a, context_of(pair, tmp_path, "h2")) == b""
    wait_until(
        lambda: a.counters['peer_frames_dropped_total{reason="not_a_node_certificate"}'] == 1, what="it is counted"
    )


@pytest.mark.rule("S16", "P3")
@pytest.mark.parametrize("certified", ["somebody", "stranger1", "strange"])
def test_a_certificate_for_another_node(nodes: Nodes, certified: str) -> None:  # noqa: F811 -- a fixture
    a = nodes("a")
    stranger = Stranger(a, context=credentials_of(certified).client)
    stranger.send(stranger.hello())
    assert stranger.is_closed()
    assert a.counters['peer_frames_dropped_total{reason="name_not_certified"}'] == 1
    assert a.met == []


@pytest.mark.rule("P3")
def test_a_member_cannot_speak_for_another_later_on(nodes: Nodes) -> None:  # noqa: F811 -- a fixture
    a, b = nodes.linked("a", "b")
    stranger = Stranger(a)
    stranger.send(stranger.hello(), stranger.frame(Ping(sequence=1), src="b", src_boot=b.identity.boot))
    assert stranger.is_closed()
    told = Stranger(a)
    profile = Profile(node="b", slots=1, cpus=1.0)
    told.send(told.hello(), told.frame(Hello(identity=b.identity, profile=profile), src="b"))
    assert told.is_closed()
    assert a.counters['peer_frames_dropped_total{reason="wrong_sender"}'] == 2
    assert a.heard == []


def test_a_link_takes_one_introduction(nodes: Nodes) -> None:  # noqa: F811 -- a fixture
    a, b = nodes.linked("a", "b")
    stranger = Stranger(a)
    for told in (b.identity, None):  # somebody else within its own frame; itself with another start of its machine
        stranger = stranger if told else Stranger(a)
        stranger.send(stranger.hello())
        assert isinstance(stranger.read().body, Hello)
        identity = told or msgspec.structs.replace(stranger.told, machine_boot="another")
        profile = Profile(node=identity.node, slots=1, cpus=1.0)
        stranger.send(stranger.frame(Hello(identity=identity, profile=profile)))
        assert stranger.is_closed()
    assert [hello.identity for hello in a.met] == [b.identity, stranger.told, stranger.told]
    assert a.counters['peer_frames_dropped_total{reason="second_hello"}'] == 2


# -- when we dial ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(context: ssl.SSLContext | None) -> Iterator[tuple[str, list[bytes]]]:
    """A server at an address that keeps what it is told once the handshake is over; without a context, all."""
    told: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted, _ = server.accept()
                    accepted.settimeout(PATIENCE_S)
                    with contextlib.suppress(OSError), accepted:
                        if context is None:
                            told.append(accepted.recv(1 << 16))
                            accepted.sendall(b"\x00\x00\x00\x01\xc0")
                        else:
                            with context.wrap_socket(accepted, server_side=True) as secured:
                                told.append(secured.recv(1 << 16))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}", told
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE_S)


def why_not(node: LinkNode, address: str, dst: str = "b") -> str:
    """Dial this address, where ``dst`` is thought to be, and say why there is no link."""

    async def fetch() -> None:
        async for _ in node.links.fetch_output(dst, REQUEST):
            pass

    node.learn(msgspec.structs.replace(identity_of(dst), address=address))
    with pytest.raises(LinkUnavailable) as caught:
        node.loop.run(fetch())
    return str(caught.value)


@pytest.mark.rule("J3")
def test_a_member_of_another_cluster_is_told_nothing(nodes: Nodes) -> None:  # noqa: F811 -- a fixture
    a, other = nodes("a"), nodes("b", cluster="another")
    assert Says.OTHER_CLUSTER() in why_not(a, other.address)
    assert other.met == []
    with serving(credentials_of("b", "another").server) as (address, told):
        assert Says.OTHER_CLUSTER() in why_not(a, address)
    assert told == []


def test_a_server_without_tls_is_told_nothing(nodes: Nodes) -> None:  # noqa: F811 -- a fixture
    a = nodes("a")
    with serving(None) as (address, told):
        assert Says.NO_TLS() in why_not(a, address)
    assert len(told) == 1
    assert told[0][:1] == b"\x16", "a client hello, and nothing after it"
    assert b"boot-of-a" not in told[0]


def test_whoever_answers_in_a_members_place_is_not_taken_for_it(nodes: Nodes) -> None:  # noqa: F811 -- a fixture
    a, c = nodes("a"), nodes("c")
    assert Says.ANOTHER_ANSWERS("c") in why_not(a, c.address, "b")


def test_why_somebody_was_not_let_in_is_logged_without_a_flood(
    nodes: Nodes,  # noqa: F811 -- a fixture
    caplog: pytest.LogCaptureFixture,
) -> None:
    a = nodes("a")
    for _ in range(5):
        answer_to = plain(a)
        answer_to.sendall(b"GET / HTTP/1.1\r\n\r\n")
        answer(answer_to)
    wait_until(lambda: total(a.counters, "peer_frames_dropped_total") == 5, what="all counted")
    (refusal,) = [record for record in caplog.records if record.msg.startswith("connection refused: ")]
    assert "address=127.0.0.1 " in refusal.getMessage()


def test_a_certificate_made_anew_serves_new_links_and_leaves_the_old_ones(
    loop_thread: LoopThread,  # noqa: F811 -- a fixture
    tmp_path: Path,
) -> None:
    made = Nodes(loop_thread)
    try:
        tls = Credentials(cluster_of(), "a", tmp_path / "tls")
        a, b = made("a", tls=tls), made("b")
        a.dial(b.address)
        wait_until(lambda: b.met, what="the first link")
        assert loop_thread.call(tls.renew_if_due, datetime.now(UTC) + timedelta(days=61))
        a.send("b", Ping(sequence=1))
        wait_until(lambda: b.heard, what="the first link goes on")
        # its certificate is now of a clock 61 days ahead, which nobody takes: so it is the new one that is shown
        c = made("c")
        c.dial(a.address)
        wait_until(
            lambda: total(a.counters, "peer_frames_dropped_total") or c.counters["peer_unreachable_total"] or c.met,
            what="an answer",
        )
        assert c.met == []
    finally:
        for node in made.made:
            node.close()
