"""Links between agents over real sockets: introductions, both directions, hostile strangers, losses, output streams."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import struct
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from peerload.agent.peers import connection, links
from peerload.agent.peers.links import PeerLinks
from peerload.agent.peers.streams import RequestStream
from peerload.model.errors import ConfigError, LinkUnavailable
from peerload.model.messages import (
    TOGETHER_MAX,
    Blocks,
    BlocksEnd,
    BlocksRequest,
    Envelope,
    Hello,
    Identity,
    LinkMessage,
    Message,
    Offer,
    OutputChunk,
    OutputEnd,
    OutputRequest,
    Ping,
    Pong,
    Query,
    WrongBoot,
)
from peerload.model.resources import LoadReport, Profile
from peerload.model.task import TaskSpec
from peerload.security.address import join_address, reachable
from peerload.wire import peer
from tests.integration.broker_fixtures import LoopThread, identity_of, loop_thread  # noqa: F401 -- a fixture
from tests.support import PATIENCE_S, credentials_of, kept_port, local_credentials_of, security_events, wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

REQUEST = OutputRequest(task="a/1", uid=b"u" * 16, attempt=1)
CLOSED_PORT = "127.0.0.1:1"


class _LocalNode:
    """What stands for `LocalNode`: this node as its peers see it."""

    def __init__(self, identity: Identity, cluster: str, protocol: tuple[int, int]) -> None:
        self.identity = identity
        self._protocol = protocol
        self.envelopes = peer.Envelopes(cluster, identity.node, identity.boot)
        self.alive: list[Identity] = []

    def listens_at(self, address: str) -> None:
        self.identity = msgspec.structs.replace(self.identity, address=address)

    def hello(self, *, stream: bool = False, back: int = 0) -> Hello:
        low, high = self._protocol
        profile = Profile(node=self.identity.node, slots=1, cpus=1.0, protocol_min=low, protocol_max=high)
        more: Any = {"stream": stream, "back": back}
        return Hello(identity=self.identity, profile=profile, **more)

    def identity_of(self, node: str) -> Identity | None:
        return next((identity for identity in self.alive if identity.node == node), None)

    def alive_peers(self) -> list[Identity]:
        return self.alive

    def reachable_peers(self) -> list[str]:
        return [identity.node for identity in self.alive]


class _Events:
    """The owner of the links of one node: writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Message]] = []
        self.hellos: list[Hello] = []
        self.lost: list[tuple[str, str]] = []
        self.failed: list[tuple[str, Message]] = []
        self.served: list[int] = []
        self.pieces: list[OutputChunk | OutputEnd] = []

    def deliver(self, src: str, message: Message) -> None:
        self.heard.append((src, message))

    def met(self, hello: Hello) -> None:
        self.hellos.append(hello)

    def unreachable(self, node: str, reason: str) -> None:
        self.lost.append((node, reason))

    def send_failed(self, dst: str, message: Message) -> None:
        self.failed.append((dst, message))

    async def serve_output(self, src: str, request: OutputRequest) -> AsyncIterator[OutputChunk | OutputEnd]:
        assert src
        assert request == REQUEST
        for piece in self.pieces:
            self.served.append(1)
            yield piece

    def name_taken(self, by: str) -> None:
        del by

    def copied(self, other: Identity, up_s: float) -> None:
        del other, up_s


class LinkNode:
    """One node with links."""

    def __init__(self, loop: LoopThread, node: str, **more: Any) -> None:
        self.loop = loop
        cluster: str = more.pop("cluster", "default")
        host: str = more.pop("host", "127.0.0.1")
        identity = more.pop("identity", None) or identity_of(node)
        tls = more.pop("tls", None) or credentials_of(identity.node, cluster)
        self.local = _LocalNode(identity, cluster, more.pop("protocol", (1, 1)))
        self.events = _Events()
        self.heard, self.met, self.lost = self.events.heard, self.events.hellos, self.events.lost
        self.failed, self.served = self.events.failed, self.events.served
        self.counters: Counter[str] = Counter()
        self.reported: list[tuple[str, str, str]] = []
        """Security events: rule, who, what."""

        async def make() -> PeerLinks:
            return PeerLinks(cast("Any", self.local), tls, security_events(self.counters, self.reported), **more)

        self.links = loop.run(make())
        self.links.streams.serve({OutputRequest: self.events.serve_output})
        self.address = loop.run(self.links.start(cast("Any", self.events), host, 0))

    @property
    def identity(self) -> Identity:
        return self.local.identity

    @property
    def pieces(self) -> list[OutputChunk | OutputEnd]:
        return self.events.pieces

    @pieces.setter
    def pieces(self, pieces: list[OutputChunk | OutputEnd]) -> None:
        self.events.pieces = pieces

    def send(self, dst: str, message: Message) -> None:
        self.loop.call(self.links.send, dst, message)

    def dial(self, address: str) -> None:
        self.loop.call(self.links.dial, address)

    def learn(self, identity: Identity) -> None:
        self.loop.call(self.links.learn, identity)

    def close(self) -> None:
        self.loop.run(self.links.close())


class Nodes:
    """Makes nodes and closes them at the end of the test."""

    def __init__(self, loop: LoopThread) -> None:
        self.loop = loop
        self.made: list[LinkNode] = []

    def __call__(self, node: str, **more: Any) -> LinkNode:
        made = LinkNode(self.loop, node, **more)
        self.made.append(made)
        return made

    def linked(self, *names: str) -> list[LinkNode]:
        """Two nodes that have met."""
        a, b = (self(name) for name in names)
        a.dial(b.address)
        wait_until(lambda: a.met and b.met, what="they meet")
        return [a, b]


@pytest.fixture
def nodes(loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:  # noqa: F811 -- a fixture
    """Nodes that wait for strangers and answers however long the machine stands still, unless a test says otherwise."""
    for module, name in (
        (connection, "CONNECT_S"),
        (connection, "HANDSHAKE_S"),
        (connection, "HELLO_S"),
        (links, "HANDSHAKE_S"),
    ):
        monkeypatch.setattr(module, name, PATIENCE_S)
    made = Nodes(loop_thread)
    yield made
    for node in made.made:
        node.close()


class Stranger:
    """Raw bytes to a node's port, by a member of its cluster. ``context``: what it shows, if not its own certificate."""

    def __init__(
        self,
        node: LinkNode,
        name: str = "stranger",
        boot: str = "boot-of-stranger",
        context: ssl.SSLContext | None = None,
    ) -> None:
        host, _, port = node.address.rpartition(":")
        plain = socket.create_connection((host, int(port)), timeout=60)
        self.socket = (context or credentials_of(name).client).wrap_socket(plain)
        self.told = identity_of(name, boot)
        self.to = node.identity.node
        self.sequence = 0

    def frame(self, message: Message, **changes: object) -> bytes:
        self.sequence += 1
        made = Envelope(1, "default", self.told.node, self.told.boot, self.sequence, message, self.to)
        return bytes(peer.encode_frame(msgspec.structs.replace(made, **changes)))

    def hello(self, **changes: object) -> bytes:
        profile = Profile(node=self.told.node, slots=1, cpus=1.0)
        return self.frame(Hello(identity=self.told, profile=profile), dst="", **changes)

    def send(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(frames))

    def read(self) -> Envelope:
        return peer.decode(self._exactly(int.from_bytes(self._exactly(4), "big")))

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            assert more, "closed"
            data += more
        return data

    def is_closed(self) -> bool:
        """Read to the end; a reset is one too."""
        with contextlib.suppress(OSError):
            while self.socket.recv(1 << 16):
                pass
        self.socket.close()
        return True

    def close(self) -> None:
        self.socket.close()


def test_two_agents_meet_and_speak_both_ways(nodes: Nodes) -> None:
    a, b = nodes.linked("a", "b")
    assert (a.met[0].identity.node, b.met[0].identity.node) == ("b", "a")
    assert b.met[0].identity.address == a.address
    a.send("b", Ping(sequence=1))
    b.send("a", Pong(sequence=1, report=LoadReport()))
    wait_until(lambda: a.heard and b.heard, what="both hear")
    assert b.heard == [("a", Ping(sequence=1))]
    assert a.heard == [("b", Pong(sequence=1, report=LoadReport()))]
    assert a.loop.call(a.links.linked) == ["b"]
    assert (a.failed, a.lost) == ([], [])


def test_a_burst_arrives_whole_and_in_order(nodes: Nodes) -> None:
    a, b = nodes.linked("a", "b")

    def burst() -> None:
        for number in range(5000):
            a.links.send("b", Ping(sequence=number))

    a.loop.call(burst)
    wait_until(lambda: len(b.heard) == 5000, what="5000 pings")
    assert [message.sequence for _, message in b.heard if isinstance(message, Ping)] == list(range(5000))


def test_messages_about_tasks_of_one_turn_share_a_frame_and_keep_their_order(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    decode = peer.decode

    def counting(raw: bytes) -> Envelope:
        envelope = decode(raw)
        decoded.append(1 + len(envelope.others))
        return envelope

    a, b = nodes.linked("a", "b")
    monkeypatch.setattr(peer, "decode", counting)
    large = TaskSpec(argv=(b"x" * (100 << 10),), directory=b"/")
    sent: list[LinkMessage] = [Query(f"a/{number}", bytes(16), number) for number in range(1, 3000)]
    sent[1500:1500] = [Ping(sequence=7), Offer(task="a/1", uid=b"u" * 16, attempt=1, spec=large, lease_s=60.0)]

    def burst() -> None:
        for message in sent:
            a.links.send("b", message)

    a.loop.call(burst)
    wait_until(lambda: len(b.heard) == len(sent), what="all messages")
    assert [message for _, message in b.heard] == sent
    assert max(decoded) == TOGETHER_MAX + 1
    assert len(decoded) < 20


def test_messages_that_wait_for_a_slow_peer_are_sent_in_frames_that_it_takes(nodes: Nodes) -> None:
    a, b = nodes.linked("a", "b")
    spec = TaskSpec(argv=(b"x" * (30 << 10),), directory=b"/")
    sent: list[Offer] = []

    def burst() -> None:
        for _ in range(300):  # 9 MB
            sent.append(Offer(f"a/{len(sent) + 1}", bytes(16), 1, spec, 60.0))
            a.links.send("b", sent[-1])

    link, reader = a.links._table.entries["b"].link, b.links._table.entries["a"].link
    assert link is not None
    assert reader is not None
    a.loop.call(lambda: reader.pause_reading("test"))
    while not link.paused:
        a.loop.call(burst)
    a.loop.call(burst)
    a.loop.call(lambda: reader.resume_reading("test"))
    wait_until(lambda: len(b.heard) == len(sent), what="all messages")
    assert [message for _, message in b.heard] == sent


def test_the_largest_offer_passes(nodes: Nodes) -> None:
    a, b = nodes.linked("a", "b")
    spec = TaskSpec(argv=(b"x" * (1 << 20),), directory=b"/", environment=b"e" * (256 << 10))
    a.send("b", Offer(task="a/1", uid=b"u" * 16, attempt=1, spec=spec, lease_s=60.0))
    wait_until(lambda: b.heard, what="the offer")
    offer = b.heard[0][1]
    assert isinstance(offer, Offer)
    assert offer.spec == spec


def test_a_send_dials_what_was_learnt_and_waits_for_the_link(nodes: Nodes) -> None:
    a, b = nodes("a"), nodes("b")
    a.learn(b.identity)
    for number in range(10):
        a.send("b", Ping(sequence=number))
    wait_until(lambda: len(b.heard) == 10, what="all pings")
    assert [message for _, message in b.heard] == [Ping(sequence=number) for number in range(10)]
    b.send("a", Ping(sequence=11))
    wait_until(lambda: a.heard, what="the same link backwards")
    assert (len(a.met), len(b.met)) == (1, 1)


def test_what_could_not_be_sent_comes_back_exactly_once(nodes: Nodes) -> None:
    a = nodes("a")
    gone = msgspec.structs.replace(identity_of("gone"), address=CLOSED_PORT)
    a.learn(gone)

    def burst() -> None:
        for number in range(1500):
            a.links.send("gone", Ping(sequence=number))

    a.loop.call(burst)
    wait_until(lambda: len(a.failed) == 1500, what="all back")
    wait_until(lambda: a.lost, what="unreachable")
    assert sorted(message.sequence for _, message in a.failed if isinstance(message, Ping)) == list(range(1500))
    assert a.counters['peer_messages_refused_total{reason="queue_full"}'] == 1500 - 1024
    assert "refused" in a.lost[0][1].lower()
    a.send("never-heard-of", Ping(sequence=1))
    wait_until(lambda: len(a.failed) == 1501, what="an unknown node")
    wait_until(lambda: a.lost[-1] == ("never-heard-of", "its address is not known"), what="why, a turn later")


def test_link_loss_is_told_and_later_messages_dial_anew(nodes: Nodes) -> None:
    a, b = nodes.linked("a", "b")
    b.close()
    wait_until(lambda: a.lost, what="loss is told")
    assert a.lost[0][0] == "b"
    assert a.loop.call(a.links.linked) == []
    again = nodes("b", identity=identity_of("b", "second start", 2))
    a.learn(again.identity)
    a.send("b", Ping(sequence=5))
    wait_until(lambda: again.heard, what="the new start hears")
    assert a.failed == []


@pytest.mark.rule("P2")
def test_messages_that_a_stalled_peer_does_not_take_come_back(nodes: Nodes) -> None:
    a = nodes("a")
    stalled = Stranger(a)
    stalled.send(stalled.hello())
    wait_until(lambda: a.met, what="met")
    spec = TaskSpec(argv=(b"x" * (1 << 20),), directory=b"/")
    offer = Offer(task="a/1", uid=b"u" * 16, attempt=1, spec=spec, lease_s=60.0)

    def burst() -> None:
        for _ in range(80):
            a.links.send("stranger", offer)

    a.loop.call(burst)
    wait_until(lambda: a.failed, what="more than may wait")
    refused = len(a.failed)
    assert 0 < refused < 20
    assert a.counters["peer_messages_sent_total"] < 20
    stalled.close()
    wait_until(lambda: a.lost, what="loss")
    wait_until(lambda: len(a.failed) + a.counters["peer_messages_sent_total"] == 80, what="each is sent or comes back")


@pytest.mark.parametrize("with_hello", [False, True])
def test_garbage_hurts_nobody_else(nodes: Nodes, with_hello: bool) -> None:
    a, b = nodes.linked("a", "b")
    stranger = Stranger(a)
    with contextlib.suppress(OSError):
        stranger.send(
            *([stranger.hello()] if with_hello else []), b"\x00\x00\x00\x10" + b"\xc1" * 16, b"\xff" * (10 << 20)
        )
    assert stranger.is_closed()
    assert a.counters['peer_frames_dropped_total{reason="malformed"}'] >= 1
    b.send("a", Ping(sequence=1))
    wait_until(lambda: a.heard, what="the link still works")


@pytest.mark.rule("P1")
def test_a_frame_that_claims_4_gib_is_refused_before_it_comes(nodes: Nodes) -> None:
    a = nodes("a")
    for with_hello in (False, True):
        stranger = Stranger(a)
        stranger.send(*([stranger.hello()] if with_hello else []), b"\xff\xff\xff\xff")
        assert stranger.is_closed()
    assert a.counters['peer_frames_dropped_total{reason="frame_too_large"}'] == 2


@pytest.mark.rule("P1")
def test_three_malformed_frames_close_and_ban(nodes: Nodes) -> None:
    a = nodes("a")
    stranger = Stranger(a)
    bad = struct.pack(">I", 3) + b"\x93\x01\x02"
    stranger.send(stranger.hello(), bad, bad, stranger.frame(Ping(sequence=1)))
    wait_until(lambda: a.heard, what="two are forgiven")
    stranger.send(bad)
    assert stranger.is_closed()
    assert a.counters["peer_bans_total"] == 1
    again = Stranger(a)
    again.send(again.hello())
    assert again.is_closed()
    assert a.counters['peer_frames_dropped_total{reason="banned"}'] == 1
    other_start = Stranger(a, boot="another start")
    other_start.send(other_start.hello())
    wait_until(lambda: len(a.met) == 2, what="a new start is let in")
    other_start.close()


def test_who_does_not_introduce_itself_is_closed(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HELLO_S", 0.3)
    a = nodes("a")
    silent, slow = Stranger(a), Stranger(a)
    with contextlib.suppress(OSError):  # its time may be over already
        slow.send(slow.hello()[:20])
    assert silent.is_closed()
    assert slow.is_closed()
    assert a.counters['peer_frames_dropped_total{reason="hello_timeout"}'] == 2
    assert a.met == []


def test_strangers_are_bounded(nodes: Nodes) -> None:
    a = nodes("a")
    strangers = [Stranger(a) for _ in range(48)]
    for stranger in strangers:
        assert isinstance(stranger.read().body, Hello)
    with pytest.raises(OSError, match=r"EOF|reset"):
        Stranger(a)
    assert a.counters['peer_frames_dropped_total{reason="too_many_handshakes"}'] == 1
    for stranger in strangers:
        stranger.close()
    wait_until(lambda: not a.links._listener.strangers, what="all gone")
    b = nodes("b")
    b.dial(a.address)
    wait_until(lambda: a.met, what="room again")


def test_who_does_not_belong_here_is_refused(nodes: Nodes) -> None:
    a = nodes("a")
    cases: dict[str, Callable[[Stranger], bytes]] = {
        "other_cluster": lambda it: it.hello(cluster="elsewhere"),
        "wrong_sender": lambda it: it.hello(src="somebody"),
        "no_hello": lambda it: it.frame(Ping(sequence=1)),
        "no_common_version": lambda it: it.frame(
            Hello(identity=it.told, profile=Profile("stranger", 1, 1.0, protocol_min=7, protocol_max=9))
        ),
    }
    for why, frame in cases.items():
        stranger = Stranger(a)
        stranger.send(frame(stranger))
        assert stranger.is_closed()
        assert a.counters[f'peer_frames_dropped_total{{reason="{why}"}}'] == 1
    assert (a.met, a.lost) == ([], [])


@pytest.mark.rule("P3")
def test_frames_in_anothers_name_close_the_link(nodes: Nodes) -> None:
    a = nodes("a")
    stranger = Stranger(a)
    stranger.send(
        stranger.hello(), stranger.frame(Ping(sequence=1), dst="b"), stranger.frame(Ping(sequence=2), src="b")
    )
    assert stranger.is_closed()
    assert a.heard == []
    assert a.counters['peer_frames_dropped_total{reason="wrong_recipient"}'] == 1
    assert a.counters['peer_frames_dropped_total{reason="wrong_sender"}'] == 1
    wait_until(lambda: a.lost, what="the link is lost")


@pytest.mark.rule("P5")
def test_a_frame_for_an_earlier_start_is_answered_and_ignored(nodes: Nodes) -> None:
    a = nodes("a")
    stranger = Stranger(a)
    stranger.send(stranger.hello(), stranger.frame(Ping(sequence=1), dst_boot="long ago"))
    assert isinstance(stranger.read().body, Hello)
    assert stranger.read().body == WrongBoot(boot=a.identity.boot)
    assert a.heard == []
    stranger.close()


@pytest.mark.bad_input("duplicate-node")
def test_a_second_agent_of_the_same_name_is_refused(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    a, b = nodes.linked("a", "b")
    impostor = nodes("b", identity=msgspec.structs.replace(identity_of("b", "x", 9), store="another"))
    impostor.dial(a.address)
    wait_until(lambda: a.counters["peer_name_clashes_total"], what="a sees the clash")
    wait_until(lambda: "duplicate node name: node=b" in caplog.text, what="it is said")
    own = nodes("a", identity=msgspec.structs.replace(identity_of("a", "y", 9), store="another"))
    own.dial(a.address)
    wait_until(
        lambda: a.counters["peer_name_clashes_total"] >= 2 and own.counters["peer_name_clashes_total"],
        what="both see it",
    )
    assert [hello.identity.boot for hello in a.met] == [b.identity.boot]
    b.send("a", Ping(sequence=1))
    wait_until(lambda: a.heard, what="the first keeps its place")


def test_a_later_start_takes_the_place_of_the_earlier(nodes: Nodes) -> None:
    a, _ = nodes.linked("a", "b")
    later = nodes("b", identity=identity_of("b", "second start", 2))
    later.dial(a.address)
    wait_until(lambda: len(a.met) == 2, what="the later start")
    a.send("b", Ping(sequence=1))
    wait_until(lambda: later.heard, what="it hears")
    assert a.lost == []


def test_seeds_are_tried_until_somebody_is_there_and_ourselves_are_dropped(nodes: Nodes) -> None:
    a = nodes("a")

    async def start(port: int) -> None:
        await b.links._listener.close()
        await b.links.start(b.events, "127.0.0.1", port)

    with kept_port() as port:
        a.dial(f"127.0.0.1:{port}")
        a.dial(a.address.replace("127.0.0.1", "localhost"))
        a.dial(f"127.0.0.2:{a.address.rpartition(':')[2]}")
        b = nodes("b")
        b.loop.run(start(port))
    wait_until(lambda: a.met, what="found")
    assert a.met[0].identity.node == "b"
    wait_until(lambda: len(a.links.unanswered) <= 1, what="ourselves dropped")


def test_a_seed_is_dialled_no_more_while_the_node_that_answered_there_is_alive(nodes: Nodes) -> None:
    a, b = nodes("a"), nodes("b")
    seed = b.address.replace("127.0.0.1", "localhost")  # not what b publishes
    a.dial(seed)
    wait_until(lambda: a.met and not a.links.unanswered, what="found")
    a.local.alive.append(b.identity)
    a.dial(seed)
    assert not a.links.unanswered
    a.local.alive.clear()
    a.dial(seed)
    wait_until(lambda: len(b.met) == 2, what="looked for again, once it is lost")


def test_the_memory_of_peers_is_bounded(nodes: Nodes) -> None:
    a = nodes("a", peers_max=4)
    for number in range(100):
        a.learn(msgspec.structs.replace(identity_of(f"n{number}"), address=CLOSED_PORT))
    assert len(a.links._table.entries) == 8
    links = []
    for number in range(4):
        links.append(Stranger(a, f"s{number}"))
        links[-1].send(links[-1].hello())
    wait_until(lambda: len(a.met) == 4, what="as many as may")
    fifth = Stranger(a, "s5")
    fifth.send(fifth.hello())
    assert fifth.is_closed()
    assert a.counters['peer_frames_dropped_total{reason="too_many_peers"}'] == 1
    for link in links:
        link.close()


@pytest.mark.rule("J6")
@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.org", "::"])
def test_only_the_loopback_interface_without_a_cluster_directory(nodes: Nodes, host: str) -> None:
    a = nodes("a", tls=local_credentials_of("a"))
    with pytest.raises(ConfigError) as caught:
        a.loop.run(a.links.start(a.events, host, 0))
    assert caught.value.key == "listen"
    assert Says.NO_CLUSTER_DIRECTORY() in str(caught.value)
    assert "peerload invite" in caught.value.hint
    with pytest.raises(ConfigError):
        a.dial(f"[{host}]:7000")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost"])
def test_any_address_of_this_machine_with_one(nodes: Nodes, host: str) -> None:
    try:
        reachable(host)
    except OSError as error:
        pytest.skip(f"this machine has no way to others over {host}: {error}")
    a, b = nodes("a"), nodes("b", host=host)
    heard_at, _, port = b.address.rpartition(":")
    assert not ipaddress.ip_address(heard_at.strip("[]")).is_unspecified
    a.dial(join_address("localhost" if host != "::" else "::1", int(port)))
    wait_until(lambda: a.met, what="they meet")
    assert a.met[0].identity.address == b.address


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:", ":1", "127.0.0.1:99999", "127.0.0.1:x"])
def test_an_address_that_is_none(nodes: Nodes, address: str) -> None:
    with pytest.raises(ConfigError):
        nodes("a").dial(address)


# -- output streams ----------------------------------------------------------------------------------------------------


def test_fifty_mebibytes_come_as_fast_as_they_are_taken(nodes: Nodes) -> None:
    a, b = nodes.linked("a", "b")
    size, count = 512 << 10, 100
    b.pieces = [OutputChunk(1, number * size, bytes([number]) * size) for number in range(count)]
    b.pieces.append(OutputEnd(stdout_bytes=size * count))
    stalled: list[int] = []

    async def slow_consumer() -> int:
        stream = a.links.fetch_output("b", REQUEST)
        piece = await anext(stream)
        assert isinstance(piece, OutputChunk)
        total = len(piece.data)
        b.links.send("a", Ping(sequence=1))
        while not a.heard or not any(link.paused for link in b.links.streams.served):  # noqa: ASYNC110 -- no event tells it
            await asyncio.sleep(0)
        stalled.append(len(b.served))
        async for rest in stream:
            total += len(rest.data) if isinstance(rest, OutputChunk) else 0
        return total

    assert a.loop.run(slow_consumer(), 60) == size * count
    assert stalled[0] < 60, "the serving side was held back"
    assert len(b.served) == count + 1
    assert (len(a.met), len(b.met)) == (1, 1)
    assert (a.lost, b.lost) == ([], [])


def test_an_output_stream_that_cannot_be_had(nodes: Nodes) -> None:
    a = nodes("a")

    async def fetch(dst: str) -> list[object]:
        return [piece async for piece in a.links.fetch_output(dst, REQUEST)]

    with pytest.raises(LinkUnavailable, match="no address"):
        a.loop.run(fetch("unknown"))
    a.learn(msgspec.structs.replace(identity_of("gone"), address=CLOSED_PORT))
    with pytest.raises(LinkUnavailable, match="gone"):
        a.loop.run(fetch("gone"))
    b = nodes("b")
    a.learn(msgspec.structs.replace(identity_of("c"), address=b.address))
    with pytest.raises(LinkUnavailable, match=Says.ANOTHER_ANSWERS("b")):
        a.loop.run(fetch("c"))
    a.learn(b.identity)
    b.pieces = [OutputChunk(1, 0, b"half")]
    with pytest.raises(LinkUnavailable, match="was interrupted"):
        a.loop.run(fetch("b"))


def test_a_node_that_is_known_by_gossip_alone_is_fetched_from(nodes: Nodes) -> None:
    a, b = nodes("a"), nodes("b")
    a.local.alive.append(b.identity)
    b.pieces = [OutputChunk(1, 0, b"all of it"), OutputEnd(stdout_bytes=9)]

    async def fetch() -> list[object]:
        return [piece async for piece in a.links.fetch_output("b", REQUEST)]

    assert a.loop.run(fetch()) == b.pieces


def test_who_leaves_an_output_stream_ends_it(nodes: Nodes) -> None:
    a, b = nodes.linked("a", "b")
    b.pieces = [OutputChunk(1, 0, b"x" * 1000)] * 100_000

    async def leave() -> None:
        stream = a.links.fetch_output("b", REQUEST)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]

    a.loop.run(leave())
    wait_until(lambda: not b.links.streams.served, what="it has ended")
    assert len(b.served) < 100_000


def blocks_request(number: int) -> BlocksRequest:
    return BlocksRequest((bytes([number]) * 32,))


def test_one_stream_carries_requests_for_blocks_one_after_the_other(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = nodes.linked("a", "b")
    asked: list[int] = []

    async def serve(_: str, request: BlocksRequest) -> AsyncIterator[Blocks | BlocksEnd]:
        asked.append(request.digests[0][0])
        yield Blocks(tuple(map(memoryview, request.digests)))
        yield BlocksEnd()

    b.links.streams.serve({BlocksRequest: serve})
    kept: dict[str, RequestStream] = {}
    opened: list[Any] = []
    open_, received = a.links.streams.open, b.links.streams.received

    async def counted(*words: Any) -> Any:
        opened.append(words)
        return await open_(*words)

    async def fetch(number: int, following: int = 0) -> list[bytes]:
        further = blocks_request(following) if following else None
        pieces = [piece async for piece in a.links.fetch_blocks("b", blocks_request(number), kept, further)]
        assert isinstance(pieces[-1], BlocksEnd)
        return [bytes(block) for piece in pieces if isinstance(piece, Blocks) for block in piece.blocks]

    monkeypatch.setattr(a.links.streams, "open", counted)
    assert [a.loop.run(fetch(number, number + 1)) for number in (1, 2, 3)] == [[bytes([n]) * 32] for n in (1, 2, 3)]
    wait_until(lambda: asked == [1, 2, 3, 4], what="the fourth is asked for before it is fetched, and none twice")
    assert len(opened) == 1
    assert a.loop.run(fetch(8)) == [bytes([8]) * 32]
    assert len(opened) == 2, "the answer to another request is on the way over the first stream"
    closed = iter([True, False])

    def only_one(connection: Any, node: str, message: Message) -> None:
        """As a node that takes one request over each stream."""
        connection.close("another") if next(closed) else received(connection, node, message)

    monkeypatch.setattr(b.links.streams, "received", only_one)
    assert a.loop.run(fetch(9)) == [bytes([9]) * 32]
    assert len(opened) == 3
    a.loop.call(kept["b"].close, "enough")
    wait_until(lambda: not b.links.streams.served, what="no stream is left")


def test_of_the_requests_over_one_stream_one_waits(nodes: Nodes) -> None:
    a, b = nodes.linked("a", "b")
    asked: list[BlocksRequest] = []

    async def serve(_: str, request: BlocksRequest) -> AsyncIterator[Blocks | BlocksEnd]:
        asked.append(request)
        await asyncio.Event().wait()
        yield BlocksEnd()

    b.links.streams.serve({BlocksRequest: serve})

    async def story() -> None:
        reader, connection = await a.links.open_stream("b", (BlocksEnd,))
        connection.send(blocks_request(1))
        while not asked:  # noqa: ASYNC110 -- no event tells it
            await asyncio.sleep(0)
        connection.send(blocks_request(2))
        connection.send(blocks_request(3))
        with pytest.raises(LinkUnavailable):
            await reader.next(connection, "blocks")

    a.loop.run(story())
    assert asked == [blocks_request(1)]
    assert b.counters['peer_frames_dropped_total{reason="no_output_request"}'] == 1


@pytest.mark.rule("J4")
def test_who_is_shut_out_loses_every_link_and_stream_and_gets_no_other(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = nodes.linked("a", "b")
    a.pieces = b.pieces = [OutputChunk(1, 0, b"x" * 1000)] * 100_000

    async def begun(node: LinkNode, dst: str) -> AsyncIterator[object]:
        stream = node.links.fetch_output(dst, REQUEST)
        await anext(stream)
        return stream

    async def rest(stream: AsyncIterator[object]) -> int:
        return sum([1 async for _ in stream])

    dialled, served = a.loop.run(begun(a, "b")), b.loop.run(begun(b, "a"))
    monkeypatch.setattr(a.links._tls, "refuses", lambda facts: facts.name == "b")
    a.loop.call(a.links.connections.close_revoked)
    for node, stream in ((a, dialled), (b, served)):
        with pytest.raises(LinkUnavailable):
            node.loop.run(rest(stream))
    wait_until(lambda: a.links.linked() == b.links.linked() == [], what="no link")
    wait_until(lambda: not a.links.streams.served, what="no stream")
    for node, dst in ((a, "b"), (b, "a")):
        with pytest.raises(LinkUnavailable):
            node.loop.run(begun(node, dst))
    with pytest.raises(LinkUnavailable, match="revoked"):
        a.loop.run(begun(a, "b"))


@pytest.mark.parametrize(("kind", "count"), [(connection.NO_ANSWER, links.COPY_DIALS_MAX), (connection.REFUSED, 1)])
def test_a_copy_that_does_not_answer_in_time_is_dialled_again_and_not_for_ever(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, kind: str, count: int
) -> None:
    dialled: list[str] = []
    a = nodes("a")

    async def nobody(address: str, who: str, _owner: object) -> None:
        dialled.append(address)
        raise LinkUnavailable(who, "no link", kind=kind)

    async def ended() -> None:
        await asyncio.gather(*(task for task in a.links._tasks if task.get_name() == "copy 127.0.0.1:1"))

    monkeypatch.setattr(links, "backoff_s", lambda _failures: 0.0)
    monkeypatch.setattr(a.links.connections, "open", nobody)
    a.loop.call(a.links.dial_copy, "127.0.0.1:1")
    a.loop.run(ended())
    assert dialled == ["127.0.0.1:1"] * count
