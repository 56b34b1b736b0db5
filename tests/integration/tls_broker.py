"""A real Mosquitto that is reached by TLS, with the configuration and the rights that peerload makes for it; and clients
of it that say what they got."""

from __future__ import annotations

import contextlib
import os
import ssl
import subprocess
import threading
import weakref
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from peerload.security import broker, certificates
from tests.support import kept_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peerload.security.cluster_dir import ClusterDirectory

ANSWER_S = 60.0
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))


class TlsBroker:
    """Of one cluster, at a port of the loopback interface that is its own; its files are in ``directory``, which must not exist."""

    def __init__(
        self,
        cluster: ClusterDirectory,
        directory: Path,
        hosts: tuple[str, ...] = ("localhost", "127.0.0.1"),
        made_at: datetime | None = None,
    ) -> None:
        self.cluster = cluster
        self.directory = directory
        kept = contextlib.ExitStack()
        self.port = kept.enter_context(kept_port())  # also while it does not run
        weakref.finalize(self, kept.close)
        self._process: subprocess.Popen[bytes] | None = None
        broker.make_mosquitto_files(cluster, directory, hosts, made_at or datetime.now(UTC))

    @property
    def url(self) -> str:
        return f"mqtts://localhost:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, more: str = "", **replaced: str) -> None:
        """``more``: further lines; ``replaced``: words of the configuration and what stands there instead."""
        log = self.directory / "log"
        text = broker.MOSQUITTO_CONFIGURATION.replace("listener 8883", f"listener {self.port} 127.0.0.1")
        text = text.replace(broker.MOSQUITTO_PLACE, str(self.directory))
        for old, new in replaced.items():
            text = text.replace(f"\n{old} ", f"\n{new} ")
        configuration = self.directory / "test.conf"
        user = "user root\n" if os.geteuid() == 0 else ""
        configuration.write_text(f"{text}\n{user}log_dest file {log}\n{more}\n", encoding="utf-8")
        log.unlink(missing_ok=True)
        process = self._process = subprocess.Popen(
            ["mosquitto", "-c", str(configuration)],
            env={"PATH": _PATH},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: process.poll() is not None or _says(log, b" running"), 60, "the broker")
        except AssertionError:
            self.stop()
            raise
        if process.poll() is not None:
            raise AssertionError(log.read_text(encoding="utf-8") if log.exists() else "no broker")

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait(60)

    def pem_of(self, node: str, name: str = "", **more: Any) -> Path:
        """Key and certificate of a node of this cluster, in a file."""
        made = certificates.issue(self.cluster.authority, node, more.pop("now", datetime.now(UTC)), **more)
        path = self.directory / f"{name or node}.pem"
        path.write_bytes(made.key + made.certificate)
        return path


def _says(log: Path, words: bytes) -> bool:
    return log.exists() and words in log.read_bytes()


class Party:
    """A client of a broker: what it hears is in ``heard``, topic → payloads."""

    def __init__(self, port: int, ca: Path, pem: Path | None, identifier: str = "") -> None:
        context = ssl.create_default_context(cafile=str(ca))
        if pem is not None:
            context.load_cert_chain(pem)
        self.heard: dict[str, list[bytes]] = {}
        self.codes: list[Any] = []
        self.is_over = False
        self._subscribed = threading.Event()
        self.client = mqtt.Client(CallbackAPIVersion.VERSION2, identifier, reconnect_on_failure=False)
        self.client.tls_set_context(context)
        self.client.on_message = self._on_message
        self.client.on_connect = lambda _c, _d, _f, code, _p: self.codes.append(code)
        self.client.on_subscribe = lambda *_: self._subscribed.set()
        self.client.on_disconnect = lambda *_: setattr(self, "is_over", True)
        self.client.connect_timeout = ANSWER_S
        self.client.connect("localhost", port, keepalive=int(ANSWER_S))
        self.client.loop_start()
        wait_until(lambda: self.codes or self.is_over, ANSWER_S, "an answer of the broker")

    def _on_message(self, _client: mqtt.Client, _data: object, message: mqtt.MQTTMessage) -> None:
        self.heard.setdefault(message.topic, []).append(bytes(message.payload))

    def subscribe(self, *topics: str) -> None:
        self._subscribed.clear()
        self.client.subscribe([(topic, 0) for topic in topics])
        assert self._subscribed.wait(ANSWER_S)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """With QoS 1, so that the broker has dealt with it when this returns."""
        published = self.client.publish(topic, payload, qos=1, retain=retain)
        published.wait_for_publish(ANSWER_S)
        assert published.is_published()

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


@contextlib.contextmanager
def party(broker: TlsBroker, pem: Path | None, ca: Path | None = None, identifier: str = "") -> Iterator[Party]:
    """A client for as long as the block lasts. Raises what its handshake says."""
    made = Party(broker.port, ca or broker.directory / "ca.pem", pem, identifier)
    try:
        yield made
    finally:
        made.close()
