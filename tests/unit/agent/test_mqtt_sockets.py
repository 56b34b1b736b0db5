"""What the event loop watches for the broker's connection: its socket, as long as it is open, and no other's."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace

import aiomqtt

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


def test_a_socket_that_can_be_watched_no_more_ends_the_connection_and_not_the_agent() -> None:
    async def connection_that_breaks() -> BaseException | None:
        client = _Client(BrokerUrl.parse("mqtt://localhost"), "x", asyncio.Queue)  # type: ignore[arg-type]

        def refuse(*_: object) -> None:
            raise RuntimeError("the handler is closed")

        client._loop = SimpleNamespace(add_writer=refuse, remove_writer=refuse, remove_reader=refuse)  # type: ignore[assignment]
        ours, theirs = socket.socketpair()
        client._client._sock = ours
        client._client._call_socket_register_write()
        broke = client._disconnected.exception()
        client._client._sock_close()
        theirs.close()
        return broke

    assert isinstance(asyncio.run(connection_that_breaks()), aiomqtt.MqttError)
