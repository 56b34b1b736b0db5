"""What the event loop watches for the broker's connection: its socket, as long as it is open, and no other's."""

from __future__ import annotations

import asyncio
import socket

from peerload.agent.mqtt import _Client
from peerload.security.broker import BrokerUrl
from tests.each import each


@each("is_reused", [True, False])
def test_nothing_is_watched_once_the_connection_is_closed_though_a_write_was_due(*, is_reused: bool) -> None:
    async def connection_that_breaks() -> list[str]:
        loop = asyncio.get_running_loop()
        faults: list[str] = []
        loop.set_exception_handler(lambda _, context: faults.append(str(context.get("exception", context["message"]))))
        client = _Client(BrokerUrl.parse("mqtt://localhost"), "x", asyncio.Queue)  # type: ignore[arg-type]
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        number = ours.fileno()
        library = client._client
        library._sock = ours
        library._call_socket_open(ours)
        library._call_socket_register_write()
        library._sock_close()
        others = socket.socketpair() if is_reused else ()
        assert [other.fileno() for other in others][:1] == [number] * is_reused
        turns = asyncio.Event()
        loop.call_soon_threadsafe(turns.set)  # behind whatever was put off
        await turns.wait()
        assert not loop.remove_writer(number)
        assert not loop.remove_reader(number)
        await client.disconnect()
        for left in (theirs, *others):
            left.close()
        return faults

    assert asyncio.run(connection_that_breaks()) == []
