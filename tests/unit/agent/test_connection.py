"""One client's connection: every request is answered, whatever becomes of it, in frames that the client takes."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import pytest

from peerload.agent.control.connection import PART_BYTES, READ_BYTES, UNREAD_BYTES_MAX, LocalConnection
from peerload.client.connection import AgentConnection
from peerload.model.errors import AgentSilent, AgentUnavailable, BadRequest, InvariantBroken, PeerloadError, StoreError
from peerload.wire import control, frame
from peerload.wire.frame import CONTROL_BYTES_MAX
from tests.each import each
from tests.fuzz.more_targets import Deaf, feed
from tests.support import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.agent.control.connection import Connection


class Server:
    """Serves `info` by what the test says."""

    def __init__(self, serve: Callable[[LocalConnection, int], object]) -> None:
        self._serve = serve
        self.counters: Counter[str] = Counter()
        self.broken: list[str] = []
        self.connections: list[LocalConnection] = []
        self.read_buffer = bytearray(READ_BYTES)

    def admit(self, connection: LocalConnection) -> PeerloadError | None:
        self.connections.append(connection)
        return None

    def disconnected(self, connection: LocalConnection) -> None:
        assert connection in self.connections

    def refused(self, connection: Connection, name: str, rule: str, what: str) -> None:
        raise AssertionError(name)

    def handle(self, connection: Connection, request: control.Request) -> None:
        assert isinstance(connection, LocalConnection)
        self._serve(connection, request.id)

    def broke(self, why: str) -> None:
        self.broken.append(why)


def ask(serve: Callable[[LocalConnection, int], object], ask_: Callable[[AgentConnection], Any]) -> tuple[Any, Server]:
    """Have a client ask in a thread, over a real socket → what it got, and the server."""
    directory = tempfile.mkdtemp(dir="/tmp", prefix="pl-")
    server = Server(serve)

    def client() -> Any:
        with AgentConnection(f"{directory}/s", timeout_s=60) as client:
            return ask_(client)

    async def story() -> Any:
        loop = asyncio.get_running_loop()
        listener = await loop.create_unix_server(lambda: LocalConnection(server, cast("Any", server)), f"{directory}/s")
        try:
            return await asyncio.to_thread(client)
        finally:
            listener.close()
            for connection in server.connections:
                connection.hang_up()

    try:
        return asyncio.run(story()), server
    finally:
        shutil.rmtree(directory)


def refusal(client: AgentConnection) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        client.call("info")
    return caught.value


def raises(error: Exception) -> Callable[[LocalConnection, int], object]:
    async def work() -> None:
        raise error

    return lambda connection, number: connection.spawn(number, work())


@each(
    ("error", "code"),
    [(StoreError("row 7 cannot be read"), "store"), (OSError(5, "I/O error"), "error")],
)
def test_an_error_of_the_work_is_the_answer(error: Exception, code: str) -> None:
    told, server = ask(raises(error), refusal)
    assert told.code == code
    assert told.what == str(error)
    assert not server.broken
    assert [connection.pending for connection in server.connections] == [0]


@each("error", [ZeroDivisionError("by zero"), InvariantBroken("impossible")])
def test_a_bug_is_answered_and_stops_the_agent(error: Exception) -> None:
    told, server = ask(raises(error), refusal)
    assert told.what == str(error)
    assert len(server.broken) == 1


def test_what_is_under_way_is_counted() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    def serve(connection: LocalConnection, number: int) -> None:
        before = connection.pending
        connection.spawn(number, forever())
        connection.ok(number, {"pending": [before, connection.pending]})

    told, _ = ask(serve, lambda client: client.call("info"))
    assert told == {"pending": [0, 1]}


def test_work_for_a_client_that_is_gone_at_once_is_dropped() -> None:
    async def never() -> None:
        raise AssertionError("started")

    def serve(connection: LocalConnection, number: int) -> None:
        connection.spawn(number, never())
        connection.connection_lost(None)
        connection.hang_up()

    def hears_nothing(client: AgentConnection) -> None:
        with pytest.raises(AgentUnavailable):
            client.call("info")

    _, server = ask(serve, hears_nothing)
    assert not server.broken


@pytest.mark.rule("L3")
def test_who_asks_and_does_not_read_is_not_listened_to_until_it_has_read() -> None:
    answer = {"text": "x" * 10_000}
    asked: list[int] = []

    def serve(connection: LocalConnection, number: int) -> None:
        asked.append(number)
        connection.ok(number, answer)

    def never_reads(client: AgentConnection) -> tuple[int, int]:
        sent = asks_until_held(client)
        held_at = len(asked)
        for number in range(1, sent + 1):
            assert client.receive() == (number, "ok", answer)
        return held_at, sent

    (held_at, sent), server = ask(serve, never_reads)
    assert UNREAD_BYTES_MAX < held_at * 10_000 < 2 * UNREAD_BYTES_MAX
    assert asked[:sent] == list(range(1, sent + 1)), "all that it asked was carried out, in that order"
    assert not server.broken


PIECE = {"data": b"x" * (256 << 10)}


class Talks:
    """To its first request it answers without end, never out of words; to its second in three parts; to all others at once."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def __call__(self, connection: LocalConnection, number: int) -> None:
        self.heard.append(number)
        if number == 1:
            connection.spawn(number, self._streams(connection, number))
        elif number == 2:
            connection.spawn(number, self._tells(connection, number))
        else:
            connection.ok(number, {"text": "x" * 10_000})

    async def _streams(self, connection: LocalConnection, number: int) -> None:
        while True:
            await connection.stream(number, PIECE)

    async def _tells(self, connection: LocalConnection, number: int) -> None:
        for part in range(3):
            await connection.stream(number, {"part": part})
        connection.ok(number, {})


def asks_until_held(client: AgentConnection) -> int:
    """→ the last that was sent."""
    sent = 0
    client._timeout_s = 1.0
    with contextlib.suppress(AgentSilent):
        while sent < 1_000_000:
            sent = client.send("info")
    client._timeout_s = PATIENCE_S
    return sent


def test_who_has_much_to_say_lets_others_say_theirs_and_the_client_be_heard() -> None:
    talks = Talks()

    def reads(client: AgentConnection) -> tuple[int, int]:
        sent = asks_until_held(client)
        pieces = told = 0
        while told < 4:
            number, _, body = client.receive(may_last=True)
            pieces += body == PIECE
            told += number == 2
        while len(talks.heard) < sent:
            client.receive(may_last=True)
        return pieces, sent

    (pieces, sent), server = ask(talks, reads)
    assert pieces < 50
    assert talks.heard[:sent] == list(range(1, sent + 1))
    assert not server.broken


def test_what_is_given_up_before_it_began_is_not_under_way() -> None:
    async def never() -> None:
        raise AssertionError("begun")

    def serve(connection: LocalConnection, number: int) -> None:
        connection.spawn(number, never())
        for task in connection.tasks:
            task.cancel()
            task.add_done_callback(lambda _: connection.ok(number, {"pending": connection.pending}))

    told, _ = ask(serve, lambda client: client.call("info"))
    assert told == {"pending": 0}


@each("said_with_more", [True, False])
def test_long_lists_come_in_parts_and_are_joined(said_with_more: bool) -> None:
    one, two = ["x" * 1000 for _ in range(8000)], ["y" * 100 for _ in range(20_000)]
    body: dict[str, Any] = {"one": one, "empty": [], "two": two, "truncated": True}

    def serve(connection: LocalConnection, number: int) -> None:
        if said_with_more:
            connection.more(number, body)
        connection.ok(number, {} if said_with_more else body)

    def frames(client: AgentConnection) -> list[int]:
        parts = client.stream("info")
        return [
            sum(len(text) for texts in part.values() if isinstance(texts, list) for text in texts) for part in parts
        ]

    told, _ = ask(serve, lambda client: client.call("info"))
    assert {key: told[key] for key in ("one", "two")} == {"one": one, "two": two}
    assert said_with_more or told == body
    sizes, _ = ask(serve, frames)
    assert len(sizes) >= 9
    assert max(sizes) <= PART_BYTES


def test_an_answer_that_fits_no_frame_is_an_error_that_says_so() -> None:
    async def work(connection: LocalConnection, number: int) -> None:
        connection.ok(number, {"tasks": ["small", "x" * (CONTROL_BYTES_MAX + 1)]})

    told, server = ask(lambda connection, number: connection.spawn(number, work(connection, number)), refusal)
    assert "too large" in told.what
    assert told.hint
    assert not server.broken


class _Takes(Server):
    """Takes requests, and answers none."""

    def __init__(self) -> None:
        super().__init__(lambda _connection, _number: None)
        self.taken: list[control.Request] = []

    def handle(self, connection: Connection, request: control.Request) -> None:
        self.taken.append(request)


def _fed(step: int, raw: bytes, act: Callable[[LocalConnection], None] = lambda _: None) -> _Takes:
    """The server of a connection that receives these bytes, so many at a time; ``act`` is called after each time."""
    server = _Takes()

    async def story() -> None:
        connection = LocalConnection(server, cast("Any", server))
        connection._transport = Deaf()
        for at in range(0, len(raw), step):
            feed(connection, raw[at : at + step])
            act(connection)
        await asyncio.sleep(0)  # what waited for a release

    asyncio.run(story())
    return server


@each("step", [7919, READ_BYTES, 1 << 23])
@each("is_held", [False, True])
def test_large_requests_are_taken_whole_and_their_blocks_not_copied(step: int, *, is_held: bool) -> None:
    sizes = [(10,), (1 << 20, 70_000, 1 << 20), (1 << 20, 5), (1,), (READ_BYTES - 40,), (READ_BYTES, 9)]
    sent = [tuple(bytes([number + 1]) * size for size in one) for number, one in enumerate(sizes)]
    frames = [frame.pack_parts({"id": number, "verb": "files", "blocks": blocks}) for number, blocks in enumerate(sent)]

    def hold(connection: LocalConnection) -> None:
        connection.hold_requests()
        connection.release_requests()

    server = _fed(step, b"".join(part for parts in frames for part in parts), hold if is_held else lambda _: None)
    taken = [request.blocks for request in server.taken if isinstance(request, control.Files)]
    assert taken == sent
    for blocks in taken:
        if sum(map(len, blocks)) > READ_BYTES:
            assert all(isinstance(block.obj, bytearray) for block in blocks)  # what was read into, and no copy of it


def test_a_large_request_has_no_buffer_before_some_of_it_has_come() -> None:
    sizes: list[int] = []
    _fed(100, CONTROL_BYTES_MAX.to_bytes(4, "big") + bytes(READ_BYTES // 2), lambda one: sizes.append(len(one._buffer)))
    assert max(sizes) <= READ_BYTES
