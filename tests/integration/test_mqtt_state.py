"""Task and node state as JSON at a real broker, for other systems (`mqtt_publish_state`)."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from peerload.cli.demo.broker import start_broker
from tests.integration.broker_fixtures import need_broker
from tests.integration.cluster import Cluster
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "peerload/default/main/n1/json/"


@pytest.fixture(name="seen")
def fixture_seen() -> Iterator[tuple[str, dict[str, Any]]]:
    """A broker, and the retained JSON of n1 there, by the end of the topic."""
    need_broker("mosquitto")
    seen: dict[str, Any] = {}

    def came(_client: object, _data: object, message: Any) -> None:
        seen[message.topic.removeprefix(PREFIX)] = json.loads(message.payload) if message.payload else None

    with tempfile.TemporaryDirectory(dir="/tmp") as directory, start_broker(Path(directory), "mosquitto") as broker:
        reader = mqtt.Client(CallbackAPIVersion.VERSION2)
        reader.on_message = came
        reader.connect("127.0.0.1", broker.port)
        reader.subscribe(PREFIX + "#")
        reader.loop_start()
        try:
            yield f"mqtt://127.0.0.1:{broker.port}", seen
        finally:
            reader.disconnect()
            reader.loop_stop()


def test_states_are_retained_json_and_end_with_the_agent(seen: tuple[str, dict[str, Any]]) -> None:
    url, told = seen
    with Cluster() as cluster:
        config = cluster.directory / "mqtt.toml"
        config.write_text(f'mqtt = ["{url}"]\nmqtt_publish_state = true\n')
        agent = cluster.agent("n1", "--config", str(config))
        wait_until(lambda: told.get("node", {}).get("state") == "alive")
        assert "argv" not in told["node"]
        over = agent.submit("sh", "-c", "exit 3", name="<b>" + "x" * 100)
        runs = agent.submit("sleep", "600")
        wait_until(lambda: (told.get("task/1") or {}).get("state") == "failed")
        wait_until(lambda: (told.get("task/2") or {}).get("state") == "running")
        assert (told["task/1"]["id"], told["task/1"]["exit_code"], "argv" in told["task/1"]) == (over, 3, False)
        agent.kill()
        wait_until(lambda: told["node"] == {"v": 1, "node": "n1", "state": "offline"}, what="the will")
        told.clear()
        agent.start()
        wait_until(lambda: (told.get("task/2") or {}).get("state") == "running", what="what still runs")
        agent.call("cancel", tasks=[runs], force=True)
        wait_until(lambda: told["task/2"]["state"] == "cancelled")
        assert agent.cli("down").returncode == 0
        wait_until(lambda: told["node"]["state"] == "offline" and told["task/2"] is None)


def test_nothing_is_published_unless_it_is_asked_for(seen: tuple[str, dict[str, Any]]) -> None:
    url, told = seen
    with Cluster() as cluster:
        agent = cluster.agent("n1", "--mqtt", url)
        wait_until(lambda: agent.call("info")["mqtt"])
        agent.wait(agent.submit("true"))
        published = [name for name in agent.counters() if "mqtt_messages_published" in name]
        assert published
        assert not [name for name in published if "json" in name]
    assert not told
