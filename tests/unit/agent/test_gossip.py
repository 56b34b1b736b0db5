from __future__ import annotations

import asyncio
import collections
import socket
from typing import TYPE_CHECKING

import pytest
import uvloop

from peerload.agent.peers import membership
from peerload.agent.peers.membership import BATCH_MAX, LOOKUPS_MAX, GossipSocket, LagWatch
from peerload.agent.runtime import Inbox
from peerload.model import events
from peerload.model.errors import BadMessage, ConfigError
from peerload.model.gossip import DATAGRAM_BYTES_MAX
from peerload.wire.seal import KEY_BYTES, Sealer
from tests.each import each
from tests.support import PATIENCE_S, security_events, total
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

KEY = b"k" * KEY_BYTES
LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


class End:
    """One socket and what came in."""

    def __init__(self, node: str, host: str = "127.0.0.1", key: bytes = KEY, loopback_only: bool = False) -> None:
        self.counters: collections.Counter[str] = collections.Counter()
        self.delivered: list[tuple[str, str, bytes]] = []
        self.arrived = asyncio.Event()
        self.socket: GossipSocket[bytes, bytes] = GossipSocket(
            Sealer(key, "c", node, f"boot-{node}"),
            bytes,
            self.decode,
            self.deliver,
            security_events(self.counters),
            loopback_only=loopback_only,
        )
        self.port = self.socket.start(host, 0)
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @staticmethod
    def decode(plaintext: bytes) -> bytes:
        if plaintext.startswith(b"bad"):
            raise BadMessage("bad")
        return plaintext

    def deliver(self, src: str, boot: str, address: str, messages: bytes) -> None:
        self.delivered.append((src, boot, messages))
        self.delivered_from = address
        self.arrived.set()

    async def delivers(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.delivered) < count:
                self.arrived.clear()
                await self.arrived.wait()

    async def receives(self, count: int) -> None:
        """So many datagrams, whatever becomes of them."""
        async with asyncio.timeout(PATIENCE_S):
            while self.counters["gossip_datagrams_received_total"] < count:  # noqa: ASYNC110 -- nobody tells of what is dropped
                await asyncio.sleep(0.01)


def play(test: Callable[[], Coroutine[None, None, None]], make: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(test())


def test_a_socket_for_every_address_speaks_to_both_kinds() -> None:
    async def test() -> None:
        both, four, six = End("n1", "::"), End("n2", "127.0.0.1"), End("n3", "::1")
        for end, host in ((four, "127.0.0.1"), (six, "::1")):
            end.socket.send("n1", f"[{host}]:{both.port}" if ":" in host else f"{host}:{both.port}", b"hello")
            both.arrived.clear()
            await both.delivers(1)
            assert both.delivered_from == end.address, "as settings write it"
            both.delivered.clear()
        both.socket.send("n2", four.address, b"well")
        both.socket.send("n3", six.address, b"well")
        await four.delivers(1)
        await six.delivers(1)
        for end in (both, four, six):
            end.socket.close()

    play(test, LOOPS[0])


@each("make", LOOPS)
@each("host", ["127.0.0.1", "::1"])
def test_what_is_said_is_heard_with_its_sender(make: Callable[[], asyncio.AbstractEventLoop], host: str) -> None:
    async def test() -> None:
        one, two = End("n1", host), End("n2", host)
        one.socket.send("n2", two.address, b"hello")
        await two.delivers(1)
        assert two.delivered == [("n1", "boot-n1", b"hello")]
        assert two.delivered_from == one.address
        assert one.counters["gossip_datagrams_sent_total"] == two.counters["gossip_datagrams_received_total"] == 1
        one.socket.close()
        two.socket.close()

    play(test, make)


@pytest.mark.rule("J5")
@each("make", LOOPS)
def test_what_does_not_open_is_dropped_and_counted(make: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def test() -> None:
        end, stranger, friend = End("n1"), End("n2", key=b"x" * KEY_BYTES), End("n3")
        stranger.socket.send("n1", end.address, b"hello")
        sealed = Sealer(KEY, "c", "n4", "b").seal(b"twice", b"n1")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
            for datagram in (b"", b"plain text", sealed, sealed, bytes(DATAGRAM_BYTES_MAX + 1)):
                plain.sendto(datagram, ("127.0.0.1", end.port))
        friend.socket.send("n1", end.address, b"bad messages")
        friend.socket.send("n1", end.address, b"good ones")
        await end.receives(8)
        assert sorted(heard[2] for heard in end.delivered) == [b"good ones", b"twice"]
        dropped = {name.partition('"')[2][:-2]: n for name, n in end.counters.items() if "dropped" in name}
        assert dropped == {"not_authentic": 3, "replayed": 1, "too_large": 1, "malformed": 1}
        for channel in (end, stranger, friend):
            channel.socket.close()

    play(test, make)


@pytest.mark.rule("J5")
@each("make", LOOPS)
def test_what_was_said_to_another_node_is_dropped(make: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def test() -> None:
        one, two, other = End("n1"), End("n2"), End("n3")
        one.socket.send("n2", other.address, b"an answer for n2")  # somebody in between sends it elsewhere
        one.socket.send("n3", other.address, b"for n3")
        one.socket.send("n2", two.address, b"for n2")
        await other.receives(2)
        await two.delivers(1)
        assert [heard[2] for heard in other.delivered + two.delivered] == [b"for n3", b"for n2"]
        assert other.counters['gossip_datagrams_dropped_total{reason="not_authentic"}'] == 1
        for channel in (one, two, other):
            channel.socket.close()

    play(test, make)


@each("make", LOOPS)
def test_a_burst_leaves_others_their_turn(make: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def test() -> None:
        end, friend = End("n1"), End("n2")
        most = 0
        before = 0
        for number in range(4 * BATCH_MAX):
            friend.socket.send("n1", end.address, b"%d" % number)
        async with asyncio.timeout(PATIENCE_S):
            while len(end.delivered) < 4 * BATCH_MAX:
                await asyncio.sleep(0)
                most, before = max(most, len(end.delivered) - before), len(end.delivered)
        assert 0 < most <= BATCH_MAX
        end.socket.close()
        friend.socket.close()

    play(test, make)


def test_what_cannot_be_sent_is_counted() -> None:
    async def test() -> None:
        end, kept_in = End("n1"), End("n2", loopback_only=True)
        for address in ("", "nobody", "127.0.0.1:x", "[::1]:7117"):
            end.socket.send("n2", address, b"x")
        assert total(end.counters, "gossip_datagrams_unsent_total") == 4
        end.socket.send("n2", "127.0.0.1:7117", bytes(DATAGRAM_BYTES_MAX))
        assert end.counters['gossip_datagrams_unsent_total{reason="too_large"}'] == 1
        end.socket.send("n2", "255.255.255.255:7117", b"x")  # broadcasting is not permitted to this socket
        assert end.counters["gossip_send_errors_total"] == 1
        kept_in.socket.send("n2", "192.0.2.1:7117", b"x")
        assert kept_in.counters == {'gossip_datagrams_unsent_total{reason="no_address"}': 1}
        end.socket.close()
        end.socket.send("n2", "127.0.0.1:7117", b"x")
        assert total(end.counters, "gossip_datagrams_unsent_total") == 6
        kept_in.socket.close()

    play(test, uvloop.new_event_loop)


def test_a_host_name_is_resolved_on_the_side() -> None:
    async def test() -> None:
        one, two = End("n1"), End("n2")
        async with asyncio.timeout(PATIENCE_S):
            while not two.delivered:
                one.socket.send("n2", f"localhost:{two.port}", b"hello")
                await asyncio.sleep(0.01)
        assert total(one.counters, "gossip_datagrams_unsent_total") >= 1
        assert two.delivered[0][2] == b"hello"
        one.socket.close()
        two.socket.close()

    play(test, uvloop.new_event_loop)


def test_names_that_nobody_answers_for_hold_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, a few threads wait for them, and those that all share are free for others."""

    async def test() -> None:
        asked: list[str] = []

        async def hangs(host: str, *_: object, **__: object) -> list[object]:
            asked.append(host)
            await asyncio.Event().wait()
            return []

        monkeypatch.setattr("peerload.agent.peers.membership.resolve", hangs)
        one = End("n1")
        for number in range(1000):
            one.socket.send("n2", f"host-{number}.example:7117", b"hello")
            await asyncio.sleep(0)
        assert len(asked) == LOOKUPS_MAX
        one.socket.close()
        await asyncio.sleep(0.01)

    play(test, asyncio.new_event_loop)


@each("host", ["a..b", "a" * 64, "a\0b", "ü" * 64])
@each("make", LOOPS)
def test_a_name_that_can_be_nobodys_is_not_found(make: Callable[[], asyncio.AbstractEventLoop], host: str) -> None:
    async def test() -> None:
        one = End("n1")
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: pytest.fail(str(context)))
        async with asyncio.timeout(PATIENCE_S):
            while not one.counters["gossip_names_unresolved_total"]:
                one.socket.send("n2", f"{host}:7117", b"hello")
                await asyncio.sleep(0.01)
        one.socket.close()

    play(test, make)


def test_a_taken_port_is_refused() -> None:
    async def test() -> None:
        end = End("n1")
        other: GossipSocket[bytes, bytes] = GossipSocket(
            Sealer(KEY, "c", "n2", "b"), bytes, bytes, lambda *_: None, security_events(collections.Counter())
        )
        with pytest.raises(ConfigError, match=Says.NO_DATAGRAMS()):
            other.start("127.0.0.1", end.port)
        end.socket.close()

    play(test, uvloop.new_event_loop)


def test_a_stall_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0  # of a clock that only this test moves on: the machine may stand still by itself, too
    monkeypatch.setattr(membership, "_boot_s", lambda: now_s)

    async def test() -> None:
        nonlocal now_s
        inbox = Inbox(3)
        watch = LagWatch(0.1, 0.2, inbox)
        watch.watch()
        watch.check()
        assert not inbox
        now_s += 0.2 + 0.3
        watch.check()
        watch.check()
        (stall,) = await inbox.turn()
        assert isinstance(stall, events.LoopLagged)
        assert stall.lag_s == pytest.approx(0.3)
        watch.watch()
        now_s += 0.2 + 0.3
        async with asyncio.timeout(PATIENCE_S):
            await inbox.turn()  # its own timer sees it, too
        watch.watch()
        watch.close()
        watch.check()
        assert not inbox

    play(test, uvloop.new_event_loop)
