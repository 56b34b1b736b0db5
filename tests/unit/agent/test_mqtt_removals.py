"""A topic for other systems that is to be removed is removed, though the connection breaks."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import aiomqtt
import pytest

from peerload.agent.mqtt import MqttBus
from peerload.model.config import AgentConfig
from peerload.model.messages import Identity
from peerload.security.broker import BrokerUrl
from peerload.wire.seal import KEY_BYTES, Sealer
from tests.support import security_events

URL = BrokerUrl.parse("mqtt://broker")


class Connection:
    """A connection to a broker: what it was given, and, once it is flushed, what the broker retains."""

    def __init__(self, retained: dict[str, bytes]) -> None:
        self.retained = retained
        self.given: dict[str, bytes] = {}
        self.is_broken = False

    async def write(self, topic: str, payload: bytes, *, retain: bool) -> None:
        assert retain
        self.given[topic] = payload

    async def flush(self) -> None:
        if self.is_broken:
            raise aiomqtt.MqttError("it broke")
        self.retained |= self.given


def made() -> MqttBus:
    local: Any = SimpleNamespace(
        identity=Identity("n1", "boot-of-n1", "machine", "store", 1, ""),
        cluster=SimpleNamespace(name="lab"),
        sealer=lambda purpose: Sealer(bytes(KEY_BYTES), "c", "n1", "boot", purpose=purpose),
        state=lambda: None,
    )
    owner: Any = SimpleNamespace(bus_changed=lambda *, connected: connected)
    bus = MqttBus(
        AgentConfig(node="n1", state="/", socket="/", mqtt=("mqtt://broker",)), local, owner, security_events(Counter())
    )
    bus.publish_state = lambda state: state is None  # type: ignore[method-assign]
    return bus


async def use(bus: MqttBus, connection: Connection) -> None:
    """Write everything that waits."""
    work = asyncio.ensure_future(bus._publish(connection))  # type: ignore[arg-type]
    bus._work.set()
    await asyncio.sleep(0)  # it waits for nothing but more work
    assert not bus._outgoing
    if work.done():
        with pytest.raises(aiomqtt.MqttError):
            work.result()
    work.cancel()


@pytest.mark.parametrize("is_written", [True, False])
def test_a_removal_that_no_connection_has_taken_is_repeated(*, is_written: bool) -> None:
    async def test() -> None:
        bus, retained = made(), dict[str, bytes]()
        first = Connection(retained)
        bus._opened(first, URL)  # type: ignore[arg-type]
        bus.publish_json("task/1", b"{}")
        bus.publish_json("task/2", b"{}")
        await use(bus, first)
        await first.flush()
        assert set(retained.values()) == {b"{}"}
        first.is_broken = True
        bus.publish_json("task/1", b"")
        if is_written:
            await use(bus, first)
        bus._closed()
        second = Connection(retained)
        bus._opened(second, URL)  # type: ignore[arg-type]
        await use(bus, second)
        assert sorted(retained.values()) == [b"", b"{}"]
        bus._closed()
        third = Connection(retained)
        bus._opened(third, URL)  # type: ignore[arg-type]
        await use(bus, third)
        assert third.given == {}, "it was taken"

    asyncio.run(test())


def test_a_topic_that_is_shown_again_is_not_removed_later() -> None:
    async def test() -> None:
        bus, retained = made(), dict[str, bytes]()
        first = Connection(retained)
        bus._opened(first, URL)  # type: ignore[arg-type]
        bus.publish_json("task/1", b"")
        bus.publish_json("task/1", b"{}")
        bus._closed()
        second = Connection(retained)
        bus._opened(second, URL)  # type: ignore[arg-type]
        await use(bus, second)
        assert second.given == {}

    asyncio.run(test())
