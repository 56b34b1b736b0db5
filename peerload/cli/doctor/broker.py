"""Probe of an MQTT broker: its answer, its version, whether it accepts this node, and whether it accepts everybody.
It uses a client of its own, not the agent's."""

from __future__ import annotations

import os
import secrets
import threading
from pathlib import Path
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import paho.mqtt.client as mqtt

    from peerload.cli.doctor.facts import DoctorInput
    from peerload.security.broker import BrokerTls, BrokerUrl

ANSWERS_WITHIN_S = 3.0
VERSION_WITHIN_S = 0.5
ECHO_WITHIN_S = 1.0
VERSION_CHARACTERS_MAX = 80
ENDS_WITHIN_S = 30 * 86_400.0


class BrokerProbe(NamedTuple):
    """url: without user and password; why: why it cannot be used, "" if it can; version: as it says itself, or "";
    ends_at: until when its certificate is valid (Unix s), None without TLS; sends_password: without TLS."""

    url: str
    why: str = ""
    version: str = ""
    ends_at: float | None = None
    sends_password: bool = False


class BrokerAccess(NamedTuple):
    """Access to brokers: the settings `mqtt_ca` and `mqtt_password_file`, the cluster's CA (PEM, empty: none), and
    this node's certificate, None if only the agent can read it."""

    ca: str = ""
    password_file: str = ""
    cluster_ca: bytes = b""
    certificate: Path | None = None

    @classmethod
    def of(cls, facts: DoctorInput) -> BrokerAccess:
        """Make it from the settings."""
        if facts.config is None:
            return cls()
        certificate = Path(str(facts.info.get("state") or facts.config.state), "tls", "node.pem")
        is_ours = os.access(certificate, os.R_OK)
        cluster_ca = facts.cluster.authority.certificate if facts.cluster is not None else b""
        config = facts.config
        return cls(config.mqtt_ca, config.mqtt_password_file, cluster_ca, certificate if is_ours else None)

    def tls(self, *, shows_us: bool) -> BrokerTls:
        """TLS with this node's certificate, or without one."""
        from peerload.security.broker import BrokerTls

        return BrokerTls(self.ca, self.cluster_ca, self.certificate if shows_us else None)


def probe_broker(address: str, way: BrokerAccess | None = None) -> BrokerProbe:
    """Connect with certificate, user and password as the agent would."""
    from peerload.model.errors import ConfigError
    from peerload.security.broker import BrokerUrl, broker_valid_until

    way = way or BrokerAccess()
    try:
        url = BrokerUrl.parse(address).known_as(way.password_file)
        client, answered, found = _client(url, way, shows_us=True)
    except ConfigError as error:
        return BrokerProbe("a broker", str(error))
    told = threading.Event()

    def received(_client: mqtt.Client, _data: object, message: mqtt.MQTTMessage) -> None:
        found["version"] = message.payload.decode("utf-8", "replace")[:VERSION_CHARACTERS_MAX]
        told.set()

    def let_in() -> None:
        found["ends_at"] = broker_valid_until(client.socket())
        client.subscribe("$SYS/broker/version")
        told.wait(VERSION_WITHIN_S)

    client.on_message = received
    why = _tried(client, url, answered, found, let_in)
    if why and url.tls and way.certificate is None and way.ca == "" and "no certificate was shown" in why:
        why += " (this user cannot read the node's: see what the agent reports)"
    return BrokerProbe(
        url.text, why, found.get("version", ""), found.get("ends_at"), bool(url.password and not url.tls)
    )


def anybody_may_publish(address: str, way: BrokerAccess, facts: DoctorInput) -> bool:
    """True if a client without name, password and certificate can publish below this node's topics. The message goes
    to a topic that no agent listens to, and means nothing."""
    from peerload.model.errors import ConfigError
    from peerload.security.broker import ROOT, BrokerUrl

    name, config = facts.cluster.name if facts.cluster is not None else "local", facts.config
    node = config.node if config is not None else "node"
    topic = f"{ROOT}/{name}/main/{node}/to/doctor-{secrets.token_hex(8)}"
    try:
        url = BrokerUrl.parse(address)._replace(user=None, password=None)
        client, answered, found = _client(url, way, shows_us=False)
    except ConfigError:
        return False
    subscribed, came = threading.Event(), threading.Event()
    client.on_message = lambda *_: came.set()
    client.on_subscribe = lambda *_: subscribed.set()

    def let_in() -> None:
        client.subscribe(topic)
        if subscribed.wait(ECHO_WITHIN_S):
            client.publish(topic, b"peerload doctor: may anybody publish here?")
            came.wait(ECHO_WITHIN_S)

    _tried(client, url, answered, found, let_in)
    return came.is_set()


def _client(
    url: BrokerUrl, way: BrokerAccess, *, shows_us: bool
) -> tuple[mqtt.Client, threading.Event, dict[str, Any]]:
    """A client that is not connected yet, an event for the broker's answer, and a dict for the facts of that answer."""
    import paho.mqtt.client as mqtt
    from paho.mqtt.enums import CallbackAPIVersion

    answered = threading.Event()
    found: dict[str, Any] = {"why": f"no answer within {ANSWERS_WITHIN_S:g} s"}

    def connected(_client: mqtt.Client, _data: object, _flags: object, reason: Any, _properties: object) -> None:  # noqa: ANN401 -- the library's own
        found["why"] = f"it refuses the connection: {reason}" if reason.is_failure else ""
        answered.set()

    def gone(_client: mqtt.Client, _data: object, _flags: object, _reason: Any, _properties: object) -> None:  # noqa: ANN401 -- as above
        if not answered.is_set():
            found["why"] = (
                "it refuses the connection, perhaps because no certificate was shown"
                if url.tls
                else "it closed the connection"
            )
            answered.set()

    client = mqtt.Client(CallbackAPIVersion.VERSION2, reconnect_on_failure=False)
    client.username_pw_set(url.user, url.password)
    if url.tls:
        client.tls_set_context(way.tls(shows_us=shows_us).context())
    client.connect_timeout = ANSWERS_WITHIN_S
    client.on_connect = connected
    client.on_disconnect = gone
    return client, answered, found


def _tried(
    client: mqtt.Client, url: BrokerUrl, answered: threading.Event, found: dict[str, Any], let_in: Callable[[], None]
) -> str:
    """Connect, call let_in if the broker accepts, and disconnect → why it refused, "" if it accepted."""
    from peerload.security.broker import broker_error_text

    try:
        client.connect(url.host, url.port, keepalive=10)
        client.loop_start()
        try:
            if answered.wait(ANSWERS_WITHIN_S) and not found["why"]:
                let_in()
            client.disconnect()
        finally:
            client.loop_stop()
    except (OSError, ValueError) as error:
        return broker_error_text(error) or str(getattr(error, "strerror", None) or error) or type(error).__name__
    return str(found["why"])
