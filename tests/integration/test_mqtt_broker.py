"""The broker that comes along: where it listens, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

from peerload.cli.demo import broker as broker_module
from peerload.cli.demo.broker import BrokerProcess, BrokerUnavailable, find_broker, run_broker, start_broker
from peerload.model.errors import ConfigError
from tests.integration.broker_fixtures import broker, need_broker, short_directory  # noqa: F401 -- fixtures

if TYPE_CHECKING:
    from pathlib import Path


def test_it_keeps_its_port_over_a_restart(broker: BrokerProcess) -> None:  # noqa: F811 -- a fixture
    url, pid = broker.url, broker.pid
    broker.kill()
    assert broker.pid == 0
    broker.start()
    assert broker.url == url
    assert broker.pid not in {0, pid}


def test_it_runs_within_an_event_loop_too() -> None:
    need_broker("amqtt")

    async def work() -> str:
        address, stop = await run_broker()
        await stop()
        return address

    host, _, port = asyncio.run(work()).rpartition(":")
    assert host == "127.0.0.1"
    assert int(port)


def test_it_lets_nobody_in_from_elsewhere() -> None:
    with pytest.raises(ConfigError, match="loopback"):
        asyncio.run(run_broker("0.0.0.0"))


def test_without_the_extra_it_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amqtt.broker", None)
    with pytest.raises(BrokerUnavailable) as caught:
        asyncio.run(run_broker())
    assert "amqtt>=" in caught.value.hint


def test_without_any_broker_it_says_so(monkeypatch: pytest.MonkeyPatch, short_directory: Path) -> None:  # noqa: F811
    monkeypatch.setattr(broker_module, "_mosquitto", lambda: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert find_broker() is None
    with pytest.raises(BrokerUnavailable, match="no MQTT broker"), start_broker(short_directory):
        pass
