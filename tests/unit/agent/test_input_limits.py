"""What holds a slow or greedy sender back: frames that do not go on, messages that nobody has looked at yet."""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections import Counter
from typing import Any, cast

import pytest

from peerload.agent import runtime
from peerload.agent.control.connection import READ_BYTES, LocalConnection
from peerload.agent.joining import JoinServer
from peerload.agent.peers import connection
from peerload.agent.peers import links as peer_listen
from peerload.agent.peers.connection import BACKLOG_BYTES_MAX, BACKLOG_MESSAGES_MAX, PeerBackpressure, PeerConnection
from peerload.agent.peers.links import Listener
from peerload.agent.runtime import CHECK_EVERY_S, CHECKS_MAX, PROGRESS_BYTES_MIN, ReadTimeout
from peerload.model import metrics
from tests.each import each
from tests.fuzz.more_targets import Deaf, feed
from tests.support import PATIENCE_S, security_events


class Clock:
    """A loop's timers, told by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.due: list[tuple[float, Any]] = []

    def call_later(self, delay_s: float, call: Any, *_: object) -> Any:
        entry = (self.now_s + delay_s, call)
        self.due.append(entry)
        clock = self

        class Handle:
            def cancel(self) -> None:
                clock.due.remove(entry)

        return Handle()

    def to(self, now_s: float) -> None:
        while self.due and min(self.due, key=lambda one: one[0])[0] <= now_s:
            entry = min(self.due, key=lambda one: one[0])
            self.due.remove(entry)
            self.now_s = entry[0]
            entry[1]()
        self.now_s = now_s


def watched() -> tuple[Clock, ReadTimeout, list[float]]:
    clock, given_up = Clock(), []
    frames = ReadTimeout(cast("asyncio.AbstractEventLoop", clock), lambda: given_up.append(clock.now_s))
    return clock, frames, given_up


@pytest.mark.rule("P1")
def test_one_byte_a_second_is_given_up_within_ten_seconds() -> None:
    clock, frames, given_up = watched()
    for second in range(20):
        frames.received(1, is_whole=False, is_partial=True)
        clock.to(second + 1.0)
        if given_up:
            break
    assert given_up == [CHECK_EVERY_S * CHECKS_MAX]
    assert given_up[0] <= 10.0


@pytest.mark.rule("P1")
def test_a_large_frame_over_a_slow_network_is_waited_for() -> None:
    clock, frames, given_up = watched()
    for second in range(600):
        frames.received(PROGRESS_BYTES_MIN, is_whole=False, is_partial=True)
        clock.to(second + 1.0)
    frames.received(10, is_whole=True, is_partial=False)
    clock.to(700.0)
    assert not given_up
    assert not clock.due, "a connection on which nothing is unfinished has no timer"


def test_small_frames_that_come_to_their_end_are_progress() -> None:
    clock, frames, given_up = watched()
    for second in range(60):
        frames.received(5, is_whole=True, is_partial=True)  # each time the beginning of the next
        clock.to(second * 2.0)
    assert not given_up


def test_what_we_do_not_read_ourselves_is_nobodys_fault() -> None:
    clock, frames, given_up = watched()
    frames.received(10, is_whole=False, is_partial=True)
    frames.pause(paused=True)
    clock.to(100.0)
    assert not given_up
    frames.pause(paused=False)
    clock.to(120.0)
    assert given_up


def test_after_a_stop_of_this_process_what_has_come_is_read_first() -> None:
    clock, frames, given_up = watched()
    frames.received(10, is_whole=False, is_partial=True)
    clock.now_s = 1000.0  # stopped for so long; the first timer is due at once, the others not before they are set
    ((_, look),) = clock.due
    clock.due.clear()
    look()
    frames.received(10, is_whole=True, is_partial=False)
    clock.to(2000.0)
    assert not given_up


class _Links:
    """The owner of a link, and the server of a client: what was refused."""

    def __init__(self) -> None:
        self.why: list[str] = []
        self.read_buffer = bytearray(READ_BYTES)

    def refused(self, _connection: object, why: str, *_: str) -> None:
        self.why.append(why)

    def closed(self, _connection: object, why: str) -> None:
        self.why.append(why)

    def malformed(self, _connection: object, error: Exception) -> bool:
        raise AssertionError(str(error))


@pytest.mark.rule("P1")
@each("door", ["link", "client"])
def test_a_connection_with_a_frame_that_does_not_go_on_is_closed(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "CHECK_EVERY_S", 0.01)

    async def story() -> None:
        links, transport = _Links(), Deaf()
        connection: Any
        if door == "link":
            connection = PeerConnection(cast("Any", links), cast("Any", None), cast("Any", None), dialled=False)
        else:
            connection = LocalConnection(cast("Any", links), cast("Any", links))
        connection._transport = transport
        feed(connection, b"\0\0\1\0begin")
        async with asyncio.timeout(PATIENCE_S):
            while not transport.is_over:  # noqa: ASYNC110 -- nobody tells
                await asyncio.sleep(0.01)
        assert links.why

    asyncio.run(story())


class _Held:
    def __init__(self) -> None:
        self.is_held = False

    def pause_reading(self, _why: str = "") -> None:
        self.is_held = True

    def resume_reading(self, _why: str = "") -> None:
        self.is_held = False


class _Transport(_Held, Deaf):
    """Into nowhere, and whether it is read from."""


class _Counting(_Links):
    """The owner of a link that counts what is no frame, and at each wants no more for now, if it ``pauses``."""

    def __init__(self, *, pauses: bool) -> None:
        super().__init__()
        self._pauses = pauses
        self.count = 0

    def malformed(self, connection: object, error: Exception) -> bool:
        del error
        self.count += 1
        if self._pauses:
            cast("PeerConnection", connection).pause_reading("not now")
        return True


def held_back(owner: _Counting) -> tuple[PeerConnection, _Transport]:
    transport = _Transport()
    connection = PeerConnection(cast("Any", owner), cast("Any", None), cast("Any", None), dialled=False)
    connection._transport = transport
    return connection, transport


NO_FRAME = b"\0\0\0\1x"


@pytest.mark.rule("P2")
def test_a_link_is_read_again_when_no_reason_against_it_is_left() -> None:
    async def story() -> None:
        owner = _Counting(pauses=False)
        connection, transport = held_back(owner)
        connection.pause_reading("one")
        connection.pause_reading("another")
        connection.pause_reading("another")
        feed(connection, 3 * NO_FRAME + NO_FRAME[:3])  # it was on its way
        connection.resume_reading("one")
        connection.resume_reading("a third")
        await asyncio.sleep(0)
        assert (owner.count, transport.is_held) == (0, True)
        connection.resume_reading("another")
        await asyncio.sleep(0)
        assert (owner.count, transport.is_held) == (3, False)
        feed(connection, NO_FRAME[3:])
        assert owner.count == 4
        connection.connection_lost(None)

    asyncio.run(story())


def test_a_lost_connection_keeps_no_buffers_of_its_transport_until_garbage_is_collected() -> None:
    async def story() -> None:
        connection, transport = held_back(_Counting(pauses=False))
        kept = weakref.ref(transport)
        del transport
        connection.connection_lost(None)
        assert kept() is None

    asyncio.run(story())


def test_what_came_whole_before_the_end_is_taken_whatever_was_held() -> None:
    async def story() -> None:
        owner = _Counting(pauses=True)
        connection, _ = held_back(owner)
        feed(connection, 12 * NO_FRAME + NO_FRAME[:2])
        assert owner.count == 1
        connection.connection_lost(None)
        assert owner.count == 12
        assert len(owner.why) == 1
        connection.resume_reading("not now")
        await asyncio.sleep(0)
        assert owner.count == 12

    asyncio.run(story())


@pytest.mark.rule("P2")
def test_what_came_together_is_taken_no_further_than_is_wanted() -> None:
    async def story() -> None:
        owner = _Counting(pauses=True)
        connection, transport = held_back(owner)
        feed(connection, 4 * NO_FRAME)
        for count in range(1, 5):
            assert (owner.count, transport.is_held) == (count, True)
            connection.resume_reading("not now")
            await asyncio.sleep(0)
        assert (owner.count, transport.is_held) == (4, False)
        connection.pause_reading("not now")
        feed(connection, NO_FRAME)
        connection.close("over")
        connection.resume_reading("not now")
        await asyncio.sleep(0)
        assert owner.count == 4, "nobody listens any more"
        connection.connection_lost(None)

    asyncio.run(story())


class _Counts:
    put_count = taken_count = 0


@pytest.mark.rule("P2")
@each(("size_bytes", "count"), [(100, BACKLOG_MESSAGES_MAX), (4 << 20, BACKLOG_BYTES_MAX // (4 << 20))])
def test_who_sends_more_than_is_looked_at_is_not_read(
    size_bytes: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CHECK_EVERY_S", 0.001)

    async def story() -> None:
        inbox, link, other = _Counts(), _Held(), _Held()
        backlog = PeerBackpressure(cast("Any", inbox))

        def send(node: str, connection: _Held) -> bool:
            inbox.put_count += 1
            return backlog.queued(cast("Any", connection), node, size_bytes)

        assert not any(send("n2", link) for _ in range(count))
        assert not link.is_held
        assert send("n2", link), "that was too much, and is told once"
        assert link.is_held
        assert not send("n2", link)
        assert not send("n3", other)
        assert not other.is_held, "another node is none the worse"
        await asyncio.sleep(0.01)
        assert link.is_held
        inbox.taken_count = count * 2 // 3
        async with asyncio.timeout(PATIENCE_S):
            while link.is_held:  # noqa: ASYNC110 -- nobody tells
                await asyncio.sleep(0.001)
        inbox.taken_count = inbox.put_count
        assert not send("n2", link)
        inbox.taken_count = inbox.put_count
        assert not backlog.queued(cast("Any", link), "n2", size_bytes)
        assert "n2" not in backlog._backlogs, "who has caught up is forgotten"

    asyncio.run(story())


class _Newcomer:
    def __init__(self, address: str) -> None:
        self.address = address


@pytest.mark.rule("J3")
def test_who_is_at_the_door_is_bounded_for_one_address_and_for_all() -> None:
    async def story() -> None:
        counters: Counter[str] = Counter()
        nothing = cast("Any", None)
        door = JoinServer(nothing, nothing, nothing, security_events(counters))

        def admitted(address: str) -> bool:
            return door.opened(cast("Any", _Newcomer(address)))

        assert all(admitted("192.0.2.1") for _ in range(12))
        assert not admitted("192.0.2.1"), "so many of one address"
        assert all(admitted("192.0.2.2") for _ in range(4)), "another has room"
        assert not admitted("192.0.2.3"), "so many in all"
        assert not admitted("192.0.2.1")
        assert counters[metrics.labelled(metrics.JOIN_CONNECTIONS_DROPPED, reason="too_many_newcomers")] == 3
        door.closed(next(one for one in door.newcomers if one.address == "192.0.2.2"))
        assert not admitted("192.0.2.1"), "one that goes makes room for others, not for who has his share"
        assert admitted("192.0.2.3")

    asyncio.run(story())


@pytest.mark.rule("J3")
def test_the_agent_goes_on_between_strangers_that_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast they come: that there is always another one must not keep the loop from all else."""
    monkeypatch.setattr(peer_listen, "STRANGERS_MAX", 0)
    crowd, turns, turned_away = 100, 0, 0

    async def run() -> None:
        nonlocal turns
        loop = asyncio.get_running_loop()
        everybody = asyncio.Event()

        class Links:
            def drop(self, _why: str, _who: str) -> None:
                nonlocal turned_away
                turned_away += 1
                if turned_away == crowd:
                    everybody.set()

        listener = Listener(cast("Any", None), cast("Any", Links()), cast("Any", None), None)
        host, _, port = (await listener.start("127.0.0.1", 0)).rpartition(":")
        strangers = [socket.create_connection((host, int(port)), 60) for _ in range(crowd)]  # the loop stands still

        def turn() -> None:
            nonlocal turns
            turns += 1
            loop.call_soon(turn)

        loop.call_soon(turn)
        async with asyncio.timeout(60):
            await everybody.wait()
        await listener.close()
        for stranger in strangers:
            stranger.close()

    asyncio.run(run())
    assert turns >= crowd
