"""The check of MQTT brokers by `doctor`. It probes each one with a client of its own: its answer, its version, whether it accepts
this node, and whether it accepts everybody."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import threading
from pathlib import Path
from typing import NamedTuple

from peerload.cli.doctor.cluster import is_loopback
from peerload.cli.doctor.facts import FAIL, OK, SKIP, WARN, DoctorInput, Finding
from peerload.distribution import deployed
from peerload.text.format import duration_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import paho.mqtt.client as mqtt

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


def broker(facts: DoctorInput) -> Finding:
    """Check that the configured brokers answer, let this node in, and send without delay."""
    urls = list(facts.config.mqtt) if facts.config is not None else []
    told = facts.checkup.get("broker")
    if not urls and not told:
        return Finding(SKIP, "none is configured, and none is needed")
    way = BrokerAccess.of(facts)
    answers = [probe_broker(url, way) for url in urls]
    fix = "systemctl status mosquitto        TLS and passwords: docs/mqtt.md"
    failed = [answer for answer in answers if answer.why]
    if told and told["url"] is not None and not told.get("heard", True):
        says = f"{told['url']} accepts the agent, but does not forward its messages"
        rights = f"its acl_file must let each node write below its own name:   {deployed('mosquitto.acl')}"
        return Finding(FAIL, says, rights)
    if told and told["url"] is None:
        return Finding(FAIL, f"the agent is not connected: {told['why']}", fix)
    if answers and len(failed) == len(answers):
        return Finding(FAIL, "; ".join(f"{answer.url}: {answer.why}" for answer in failed), fix)
    if failed:
        return Finding(WARN, "; ".join(f"{answer.url}: {answer.why}" for answer in failed), fix)
    is_open = [answer.url for url, answer in zip(urls, answers, strict=True) if anybody_may_publish(url, way, facts)]
    if concern := _of_tls(facts, answers, is_open):
        return concern
    delayed = [answer.url for answer in answers if _is_here(answer.url) and _may_delay(facts)]
    if delayed:
        says = f"the Mosquitto at {delayed[0]} may delay small messages by 40 ms"
        example = deployed("mosquitto.conf")
        return Finding(WARN, says, f"set_tcp_nodelay true  in its configuration (see {example}), then restart it")
    says = "; ".join(f"{answer.url} answers" + (f" ({answer.version})" if answer.version else "") for answer in answers)
    says += "; anybody on this machine may publish there" if is_open else ""
    return Finding(OK, says or f"in use: {told['url'] if told else ''}")


def _of_tls(facts: DoctorInput, answers: list[BrokerProbe], is_open: list[str]) -> Finding | None:
    """Security problem of the brokers; None if there is none. is_open: addresses where everybody may publish."""
    elsewhere = [url for url in is_open if not _is_here(url.rpartition("@")[2])]
    if elsewhere:
        says = f"anybody who reaches {elsewhere[0]} may publish as a node (tested without user and certificate)"
        fix = "set up users and rights:  peerload cluster broker-certificate DIR --host NAME (docs/mqtt.md)"
        return Finding(WARN, says, fix)
    in_clear = [answer.url for answer in answers if answer.sends_password and not _is_here(answer.url)]
    if in_clear:
        says = f"the password for {in_clear[0]} is sent unencrypted"
        return Finding(WARN, says, "use mqtts:// instead of mqtt:// (docs/mqtt.md)")
    for answer in answers:
        if answer.ends_at is not None and answer.ends_at - facts.now < ENDS_WITHIN_S:
            says = f"the certificate of {answer.url} expires in {duration_text(answer.ends_at - facts.now)}"
            return Finding(WARN, says, "peerload cluster broker-certificate DIR --host NAME")
    return None


def _is_here(url: str) -> bool:
    return is_loopback(url.rpartition("://")[2])


def _may_delay(facts: DoctorInput) -> bool:
    """True if a Mosquitto runs here that was not configured to send at once."""
    files = []
    for path in (facts.root / "proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended meanwhile
        if words[0].endswith(b"mosquitto"):
            files += [after.decode("utf-8", "replace") for word, after in itertools.pairwise(words) if word == b"-c"]
    texts = [facts.text(name) for name in files]
    for directory in re.findall(r"^include_dir +(\S+)", "\n".join(texts), re.MULTILINE):
        texts += [facts.text(str(path)) for path in sorted((facts.root / directory.lstrip("/")).glob("*.conf"))]
    is_read = any(texts)
    return is_read and not re.search(r"^\s*set_tcp_nodelay\s+true", "\n".join(texts), re.MULTILINE)
