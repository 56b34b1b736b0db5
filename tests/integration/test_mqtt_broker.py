"""The broker that comes along: where it listens, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

from peerload.cli.demo import broker as broker_module
from peerload.cli.demo.broker import BrokerProcess, BrokerUnavailable, find_broker, serve, start_broker
from tests.integration.broker_fixtures import broker, short_directory  # noqa: F401 -- fixtures

if TYPE_CHECKING:
    from pathlib import Path


def test_it_keeps_its_port_over_a_restart(broker: BrokerProcess) -> None:  # noqa: F811 -- a fixture
    url, pid = broker.url, broker.pid
    broker.kill()
    assert broker.pid == 0
    broker.start()
    assert broker.url == url
    assert broker.pid not in {0, pid}


def test_without_the_extra_it_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amqtt.broker", None)
    with pytest.raises(BrokerUnavailable) as caught:
        asyncio.run(serve(0))
    assert "amqtt>=" in caught.value.hint


def test_without_any_broker_it_says_so(monkeypatch: pytest.MonkeyPatch, short_directory: Path) -> None:  # noqa: F811
    monkeypatch.setattr(broker_module, "_mosquitto", lambda: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert find_broker() is None
    with pytest.raises(BrokerUnavailable, match="no MQTT broker"), start_broker(short_directory):
        pass
