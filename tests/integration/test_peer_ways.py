"""Nodes that can only dial out, over real sockets: what is asked for over their links, and that these are kept."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from peerload.agent.peers import links, streams
from peerload.agent.peers.streams import first_of
from peerload.model.errors import LinkUnavailable
from peerload.model.messages import DialBack, Hello, NotDialled, OutputChunk, OutputEnd
from peerload.model.resources import Profile
from tests.integration.broker_fixtures import loop_thread  # noqa: F401 -- a fixture
from tests.integration.test_peer_link import REQUEST, LinkNode, Nodes, Stranger, nodes  # noqa: F401 -- a fixture
from tests.support import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from peerload.agent.peers.connection import Owner, PeerConnection

CLOSED_PORT = "127.0.0.1:1"
PIECES: list[OutputChunk | OutputEnd] = [OutputChunk(1, 0, b"out"), OutputEnd(3, 0)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback counts as a network like any other, and nobody waits long before he looks; for answers, however long it takes."""
    monkeypatch.setattr(streams, "is_loopback", lambda _address: False)
    monkeypatch.setattr(streams, "CHECK_S", 0.05)
    monkeypatch.setattr(streams, "CHECK_EVERY_S", 0.2)
    monkeypatch.setattr(streams, "DIAL_BACK_S", PATIENCE_S)


def behind(nodes: Nodes, name: str) -> LinkNode:  # noqa: F811
    """A node that nobody can dial."""
    made = nodes(name)
    made.local.listens_at(CLOSED_PORT)
    made.pieces = list(PIECES)
    return made


def met(one: LinkNode, other: LinkNode) -> None:
    one.dial(other.address)
    wait_until(lambda: one.met and other.met, what="they meet")


def output(of: LinkNode, by: LinkNode) -> list[OutputChunk | OutputEnd]:
    async def fetch() -> list[OutputChunk | OutputEnd]:
        return [piece async for piece in by.links.fetch_output(of.identity.node, REQUEST)]

    return by.loop.run(fetch())


def way(one: LinkNode, other: LinkNode) -> str:
    return way_to(one, other.identity.node)


def way_to(one: LinkNode, node: str) -> str:
    told: tuple[str, str] = one.loop.call(one.links.reachability.route, node)
    return told[0]


def test_output_of_a_node_that_cannot_be_dialled(nodes: Nodes) -> None:  # noqa: F811
    hub, out = nodes("hub"), behind(nodes, "out")
    met(out, hub)
    for _ in range(3):  # the first perhaps before it is known
        assert output(of=out, by=hub) == PIECES
    assert hub.counters["peer_streams_requested_total"]
    hub.pieces = list(PIECES)
    assert output(of=hub, by=out) == PIECES


def test_it_is_told_how_it_looks_from_outside(nodes: Nodes) -> None:  # noqa: F811
    hub, out = nodes("hub"), behind(nodes, "out")
    met(out, hub)
    wait_until(lambda: way(hub, out) == "theirs" and way(out, hub) == "ours", what="both to know")
    assert hub.counters["peer_unreachable_notices_total"] == 1


def test_whoever_can_be_dialled_is_told_nothing(nodes: Nodes) -> None:  # noqa: F811
    a, b = nodes.linked("a", "b")
    wait_until(lambda: b.loop.call(lambda: b.links._table.entries["a"].reached) == a.address, what="b to have tried")
    assert (way(a, b), way(b, a)) == ("both", "both")
    assert not b.counters["peer_unreachable_notices_total"]


def test_the_only_way_is_not_closed_for_want_of_use(
    nodes: Nodes,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("IDLE_KEPT_MAX", 0), ("IDLE_S", 0.3), ("QUIET_S", 0.0), ("IDLE_CHECK_S", 0.05)):
        monkeypatch.setattr(links, name, value)
    hub, out, near = nodes("hub"), behind(nodes, "out"), nodes("near")
    met(out, hub)
    met(near, hub)
    wait_until(lambda: hub.loop.call(hub.links.linked) == ["out"], what="the link that can be made again to close")
    wait_until(lambda: way(out, hub) == "ours")
    assert hub.loop.call(hub.links.linked) == ["out"]


def test_a_link_that_only_one_end_can_make_is_made_again(nodes: Nodes) -> None:  # noqa: F811
    hub, out, far = nodes("hub"), behind(nodes, "out"), nodes("far")
    out.local.alive += [hub.identity, far.identity]
    met(out, hub)
    wait_until(lambda: "far" in out.loop.call(out.links.linked), what="it to go to those it has not met, too")
    (link,) = hub.loop.call(lambda: list(hub.links._table.entries["out"].links))
    hub.loop.call(link.abort, "cut")
    wait_until(lambda: len(hub.met) == 2, what="it to come again")
    wait_until(lambda: hub.loop.call(hub.links.linked) == ["out"])


def dialling_back(node: LinkNode, name: str = "out", **changes: object) -> Stranger:
    """A member that has introduced itself."""
    made = Stranger(node, name)
    told = msgspec.structs.replace(made.told, address=CLOSED_PORT)
    profile = Profile(node=name, slots=1, cpus=1.0)
    hello = Hello(identity=told, profile=profile)
    made.send(made.frame(msgspec.structs.replace(hello, **changes), dst=""))
    assert isinstance(made.read().body, Hello)
    return made


def asked(link: Stranger) -> int:
    """The number of the stream that it is asked for."""
    while not isinstance(message := link.read().body, DialBack):
        assert message == NotDialled(0, "it refuses connections"), "of what kind it is, and not what is seen from there"
    return message.number


@pytest.mark.rule("P3")
def test_a_number_is_good_for_the_node_that_was_asked_and_once(nodes: Nodes) -> None:  # noqa: F811
    hub = nodes("hub")
    link = dialling_back(hub)
    wait_until(lambda: hub.met)

    async def begin() -> asyncio.Task[object]:
        return asyncio.ensure_future(hub.links.open_stream("out", (OutputChunk,)))

    opening = hub.loop.run(begin())
    number = asked(link)
    for name, wrong in (("another", number), ("out", number + 1)):
        assert dialling_back(hub, name, stream=True, back=wrong).is_closed()
    stream = dialling_back(hub, stream=True, back=number)
    wait_until(opening.done)
    assert dialling_back(hub, stream=True, back=number).is_closed(), "it was used"
    assert not hub.loop.call(lambda: hub.links.reachability._requested)
    hub.loop.call(lambda: opening.result()[1].abort("done"))  # type: ignore[index]
    for one in (link, stream):
        one.close()


def test_who_cannot_dial_back_says_why(nodes: Nodes) -> None:  # noqa: F811
    hub = nodes("hub")
    link = dialling_back(hub)
    wait_until(lambda: hub.met)

    async def begin() -> asyncio.Task[object]:
        return asyncio.ensure_future(hub.links.open_stream("out", (OutputChunk,)))

    opening = hub.loop.run(begin())
    link.send(link.frame(NotDialled(asked(link), "a firewall"), dst_boot=hub.identity.boot))
    wait_until(opening.done, what="the asker to hear of it")
    with pytest.raises(LinkUnavailable):
        hub.loop.call(opening.result)
    link.close()


def test_too_many_are_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(streams, "DIAL_BACKS_MAX", 0)
    hub = nodes("hub")
    link = dialling_back(hub)
    link.send(link.frame(DialBack(7), dst_boot=hub.identity.boot))
    while (said := link.read().body) != NotDialled(7, "0 streams are being made already"):
        assert isinstance(said, NotDialled)
    link.close()


class Made:
    """Stands for a connection."""

    def __init__(self) -> None:
        self.reason = ""

    def abort(self, reason: str) -> None:
        self.reason = reason


def test_of_two_ways_the_quicker_is_taken_and_the_other_closed() -> None:
    one, other = Made(), Made()

    async def way(made: Made, pause_s: float) -> PeerConnection:
        await asyncio.sleep(pause_s)
        return made  # type: ignore[return-value]

    async def broken() -> PeerConnection:
        raise LinkUnavailable("x", "no link", why="first")

    async def test() -> None:
        chosen = await first_of(lambda: way(one, 3600.0), lambda: way(other, 0.0), 0.01)
        assert chosen is other  # type: ignore[comparison-overlap]
        assert not other.reason
        assert await first_of(broken, lambda: way(one, 0.0), 5.0) is one  # type: ignore[comparison-overlap]
        with pytest.raises(LinkUnavailable):
            await first_of(broken, broken, 0.0)
        both = await first_of(lambda: way(one, 0.02), lambda: way(other, 0.01), 0.01)
        assert both in (one, other)  # type: ignore[comparison-overlap]

    asyncio.run(test())


@pytest.mark.rule("P2")
@pytest.mark.parametrize(("said", "times"), [(CLOSED_PORT, 1), ("127.0.0.1:22", 0)])
def test_nobody_has_a_member_knock_at_the_doors_of_others(
    said: str,
    times: int,
    nodes: Nodes,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where somebody says it is, and is not, is tried once a while; what it calls the asked machine's own, never."""
    monkeypatch.setattr(streams, "is_loopback", lambda address: address == "127.0.0.1:22")
    monkeypatch.setattr(streams, "CHECK_S", 1000.0)
    monkeypatch.setattr(streams, "DIAL_BACK_AGAIN_S", 60.0)
    hub, out = nodes("hub"), behind(nodes, "out")
    out.local.listens_at(said)
    met(out, hub)
    ways = hub.links.reachability
    tried: list[str] = []
    dial = ways._connections.open

    async def counted(address: str, who: str, owner: Owner, **more: Any) -> PeerConnection:
        tried.append(address)
        return await dial(address, who, owner, **more)

    monkeypatch.setattr(ways._connections, "open", counted)
    for number in range(1, 6):
        hub.loop.call(ways.received, "out", DialBack(number))
        wait_until(lambda: not ways._dial_backs, what="the answer")
    assert tried == [said] * times
