from __future__ import annotations

import asyncio
import collections
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peerload.agent.peers.membership import (
    GONE_KEPT_MAX,
    PEERS_KEPT_MAX,
    PORT_TRIES_MAX,
    AddressFile,
    Members,
    PeerFacts,
)
from peerload.core.membership.peers import PeerState
from peerload.model import actions, events
from peerload.model.errors import ConfigError
from peerload.model.events import Instant
from peerload.model.gossip import LAN, GossipAck, MembershipUpdate, MemberStatus
from peerload.model.messages import Identity
from peerload.model.resources import Profile
from peerload.security.address import NetworkAbsence
from peerload.wire.seal import KEY_BYTES, Sealer
from tests.each import each
from tests.support import PATIENCE_S, security_events


async def until(predicate: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not predicate():  # noqa: ASYNC110 -- nothing tells when
            await asyncio.sleep(0.01)


def identity(node: str) -> Identity:
    return Identity(node, "boot", "machine", "store", 1, f"127.0.0.1:{len(node)}")


OWNER: Any = object()
"""The receiver of what comes over the peer links."""


class Links:
    """Peer links that find so many ports taken before one is free."""

    def __init__(self, taken: int = 0) -> None:
        self.taken = taken
        self.asked: list[int] = []
        self.learned: list[Identity] = []
        self.lookups = None

    async def start(self, owner: object, host: str, port: int, advertise: str, without: NetworkAbsence) -> str:
        assert owner is OWNER
        assert not without.may_lack_address
        assert not advertise
        self.asked.append(port)
        if len(self.asked) <= self.taken:
            raise ConfigError("listen", "taken")
        return f"{host}:{port}"

    def learn(self, one: Identity) -> None:
        self.learned.append(one)


class Membership(list[Any]):
    def __init__(self) -> None:
        super().__init__()
        self.gossip = SimpleNamespace(anti_entropy=SimpleNamespace(known={}), shared=SimpleNamespace(members={}))
        self.waking = SimpleNamespace(took_s={})

    def get(self, node: str) -> Any:
        return next((peer for peer in self if peer.identity.node == node), None)


def made(directory: Path, listen: str = "127.0.0.1:0", taken: int = 0, node: str = "n1") -> tuple[Members, Any]:
    world: Any = SimpleNamespace(
        links=Links(taken),
        put=[],
        node=SimpleNamespace(membership=Membership(), state=SimpleNamespace(config=SimpleNamespace(gossip=LAN))),
    )
    sealer = Sealer(b"k" * KEY_BYTES, "c", node, "boot")
    local: Any = SimpleNamespace(cluster=SimpleNamespace(is_local=True, id=""), sealer=lambda _purpose: sealer)

    def identity_of(name: str) -> Identity | None:
        peer = world.node.membership.get(name)
        return None if peer is None else peer.identity

    local.identity_of = identity_of
    info: Any = SimpleNamespace(config=SimpleNamespace(listen=listen, advertise="", state=str(directory)), origins={})
    trust: Any = SimpleNamespace(admits=lambda _node, _boot: True)
    inbox: Any = SimpleNamespace(put=world.put.append)
    security = security_events(collections.Counter())
    return Members(info, local, world.node, world.links, trust, inbox, security), world


def test_both_ports_are_one_and_a_clash_is_tried_again(tmp_path: Path) -> None:
    async def test() -> None:
        members, parts = made(tmp_path, taken=3)
        address = await members.listen(OWNER)
        assert len(parts.links.asked) == 4
        assert address == f"127.0.0.1:{parts.links.asked[-1]}"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", parts.links.asked[-1]))
        members.close()
        again, parts = made(tmp_path)
        assert await again.listen(OWNER) == address  # the port of the last start
        again.close()

    asyncio.run(test())


def test_a_port_that_was_asked_for_is_not_replaced(tmp_path: Path) -> None:
    async def test() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.bind(("127.0.0.1", 0))
            port = other.getsockname()[1]
            members, parts = made(tmp_path, f"127.0.0.1:{port}")
            with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
                await members.listen(OWNER)
            assert parts.links.asked == []
        members, parts = made(tmp_path, taken=PORT_TRIES_MAX)
        with pytest.raises(ConfigError, match="taken"):
            await members.listen(OWNER)

    asyncio.run(test())


def test_what_is_heard_becomes_an_event(tmp_path: Path) -> None:
    async def test() -> None:
        one, told = made(tmp_path / "1", node="n1")
        two, heard = made(tmp_path / "2", node="n2")
        await one.listen(OWNER)
        where = await two.listen(OWNER)
        source = f"127.0.0.1:{told.links.asked[-1]}"
        one.send(actions.SendGossip("n2", where, (GossipAck(7),)))
        await until(lambda: heard.put)
        assert heard.put == [events.GossipReceived("n1", "boot", (GossipAck(7),), source)]
        heard.node.membership.append(SimpleNamespace(identity=identity("n1")))
        two.send(actions.SendGossip("n1", "127.0.0.1:1", (GossipAck(8),)))  # not where it says it is
        await until(lambda: told.put)
        one.close()
        two.close()

    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
    asyncio.run(test())


def test_who_is_known_is_written_down_after_news_and_forgotten_on_leaving(tmp_path: Path) -> None:
    async def test() -> None:
        members, parts = made(tmp_path)
        await members.listen(OWNER)
        for node, state in (("dead", PeerState.DEAD), ("gone", PeerState.LEFT), ("here", PeerState.ALIVE)):
            parts.node.membership.append(SimpleNamespace(identity=identity(node), state=state, is_shut_out=False))
        parts.node.membership.gossip.anti_entropy.known["unmet"] = identity("unmet")
        members.changed()
        members.changed()
        await until(lambda: members.known)
        assert {one.node for one in members.known} == {"dead", "here", "unmet"}
        members.close()
        again, parts = made(tmp_path)
        await again.listen(OWNER)
        assert {one.node for one in parts.links.learned} == {"dead", "here", "unmet"}
        again.close(forget=True)
        assert made(tmp_path)[0].known == ()

    asyncio.run(test())


@each("port", ["99999", "٣", "-1", "", "9" * 5000])
def test_a_kept_port_that_is_none_is_not_tried(tmp_path: Path, port: str) -> None:
    kept = AddressFile(tmp_path / "addresses")
    kept.set_listen(f"127.0.0.1:{port}")
    assert AddressFile(tmp_path / "addresses").port_of("127.0.0.1") == 0
    kept.set_listen("127.0.0.1:65535")
    assert AddressFile(tmp_path / "addresses").port_of("127.0.0.1") == 65535


def test_kept_addresses_are_the_owners_alone(tmp_path: Path) -> None:
    (tmp_path / "addresses.part").touch(0o644)
    before = os.umask(0o022)
    try:
        AddressFile(tmp_path / "addresses").set_listen("127.0.0.1:1")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "addresses").stat().st_mode) == 0o600


def test_kept_addresses_have_a_bound_and_survive_damage(tmp_path: Path) -> None:
    addresses = AddressFile(tmp_path / "addresses")
    addresses.set_peers([identity(f"n{number}") for number in range(PEERS_KEPT_MAX + 5)])
    assert len(AddressFile(tmp_path / "addresses").peers) == PEERS_KEPT_MAX
    assert "n5" in addresses.peers
    addresses.set_peers([identity("y")], {"y": 7.0, "gone": 9.0}, (Profile("y", 4, 4.0), Profile("gone", 1, 1.0)))
    kept = AddressFile(tmp_path / "addresses")
    assert (kept.wake_s, kept.asleep) == ({"y": 7.0}, (Profile("y", 4, 4.0),))
    gone = {
        MembershipUpdate(f"n{number:04}", "boot", "machine", "store", 1, 0, MemberStatus.FORGOTTEN): 1e9 + number
        for number in range(GONE_KEPT_MAX + 5)
    }
    addresses.set_peers([identity("y")], gone=gone)
    addresses.set_peers([identity("z")], gone={one: at + 3600.0 for one, at in gone.items()})  # the date was set
    told = AddressFile(tmp_path / "addresses").gone_since(1e9 + 2000.0)
    assert [(one.node, one.age_s) for one in told[:2]] == [("n0005", 1995.0), ("n0006", 1994.0)]
    assert len(told) == GONE_KEPT_MAX
    AddressFile(tmp_path / "addresses", "one").set_peers([identity("z")])
    assert AddressFile(tmp_path / "addresses", "one").peers
    another = AddressFile(tmp_path / "addresses", "another")
    assert another.peers == {}
    another.set_peers([identity("q")])
    for _ in range(2):
        assert AddressFile(tmp_path / "addresses", "one").peers == {"z": identity("z")}, "after a start in another"
    assert AddressFile(tmp_path / "addresses", "another").peers == {"q": identity("q")}
    addresses.set_peers([])  # the node leaves its cluster
    assert AddressFile(tmp_path / "addresses").gone == {}
    (tmp_path / "addresses").write_bytes(b"\xc1 no such file")
    assert AddressFile(tmp_path / "addresses").peers == {}


def test_a_clock_that_is_set_here_counts_though_a_link_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Instant(1000.0, 1_800_000_000.0)
    facts = PeerFacts(clock_base_s=at.wall_s + 1.0 - at.boot_s)
    for boot_s, wall_s, ahead_s in ((0.0, 0.0, 1.0), (86_400.0, 86_400.0, 1.0), (86_400.0, 82_800.0, 3601.0)):
        later = Instant(at.boot_s + boot_s, at.wall_s + wall_s)
        monkeypatch.setattr("peerload.agent.peers.membership.now", lambda later=later: later)
        assert facts.clock_ahead_s() == pytest.approx(ahead_s)
    assert PeerFacts().clock_ahead_s() is None
