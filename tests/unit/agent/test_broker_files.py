"""What is made for a broker: files that belong together, and a certificate that is no node's."""

from __future__ import annotations

import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from peerload.model.errors import BadRequest
from peerload.security import broker, certificates
from peerload.security.tls import node_of
from tests.each import each
from tests.support import PATIENCE_S, cluster_of, credentials_of
from tests.wording import Says

if TYPE_CHECKING:
    import asyncio

ROOT = Path(__file__).resolve().parents[3]
NOW = datetime.now(UTC)


def made(place: Path, *hosts: str) -> Path:
    broker.make_mosquitto_files(cluster_of(), place, hosts or ("broker.lab", "192.0.2.7"), NOW)
    return place


@pytest.mark.rule("M1")
def test_what_lies_in_deploy_is_what_is_made() -> None:
    assert (ROOT / "deploy" / "mosquitto-tls.conf").read_text(encoding="utf-8") == broker.MOSQUITTO_CONFIGURATION
    assert (ROOT / "deploy" / "mosquitto.acl").read_text(encoding="utf-8") == broker.MOSQUITTO_ACL
    rights = [line.split() for line in broker.MOSQUITTO_ACL.splitlines() if line and not line.startswith("#")]
    assert [words[2] for words in rights if words[1] != "read"] == ["peerload/+/+/%u/#"], "one thing may be written"


@pytest.mark.rule("S11")
def test_all_of_it_is_private_and_nothing_is_written_over(tmp_path: Path) -> None:
    place = made(tmp_path / "broker")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()}
    assert modes == dict.fromkeys(("ca.pem", "broker.pem", "broker.key", "mosquitto.acl", "mosquitto.conf"), 0o600)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    key = (place / "broker.key").read_bytes()
    (tmp_path / "link").symlink_to(place)
    for there in (place, tmp_path / "link"):
        with pytest.raises(BadRequest, match="exists"):
            made(there)
    with pytest.raises(BadRequest, match=Says.CANNOT_BE_MADE()):
        made(tmp_path / "no" / "such" / "place")
    assert (place / "broker.key").read_bytes() == key
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broker", "link"], "nothing is left of what failed"
    assert (cluster_of().directory / "ca.key").read_bytes() not in b"".join(p.read_bytes() for p in place.iterdir())


@each("host", ["", "a b", "-x", "a..b", "x" * 254, "*.lab", "a/b", "b\x1b[31m", "ü", "1.2.3.4:8883"])
def test_what_is_no_name_of_a_machine(tmp_path: Path, host: str) -> None:
    with pytest.raises(BadRequest):
        made(tmp_path / "broker", host)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.rule("S16")
@each("hosts", [("n1",), ("n1", "n2"), ("n1.lab", "10.0.0.1")])
def test_a_brokers_certificate_is_no_nodes(tmp_path: Path, hosts: tuple[str, ...]) -> None:
    place = made(tmp_path / "broker", *hosts)
    pem = (place / "broker.pem").read_bytes()
    with pytest.raises(ValueError, match=Says.NOT_A_NODES()):
        certificates.verified_info(cluster_of().authority, pem)
    with pytest.raises(ValueError, match=Says.NOT_A_NODES()):
        certificates.proven_info(certificates.der_of(pem))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (tmp_path / "both.pem").write_bytes((place / "broker.key").read_bytes() + pem)
    context.load_cert_chain(tmp_path / "both.pem")
    context.set_alpn_protocols(["peerload/1"])
    shown = handshake(context, credentials_of("n9").client)
    assert node_of(shown) == "", "a node that dials it knows that it is none"
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    client.load_cert_chain(tmp_path / "both.pem")
    with pytest.raises(ssl.SSLError, match="unsuitable certificate purpose"):
        handshake(credentials_of("n9").server, client, raises=True)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, *, raises: bool = False) -> asyncio.BaseTransport:
    """Both ends of a connection; what the client's would be asked of as a transport."""
    import socket

    one, other = socket.socketpair()
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            with server.wrap_socket(one, server_side=True) as sock:
                sock.recv(1)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    shown = None
    try:
        with client.wrap_socket(other) as sock:
            shown = _Shown(sock, sock.getpeercert())
            sock.sendall(b"x")
    except OSError:
        if not raises:
            raise
    finally:
        thread.join(PATIENCE_S)
        one.close()
        other.close()
    if raises:
        raise failed[0]
    return shown  # type: ignore[return-value]  # as much of one as is looked at


class _Shown:
    def __init__(self, session: ssl.SSLSocket, certificate: object) -> None:
        self._told = {"peercert": certificate}
        self._protocol = session.selected_alpn_protocol()

    def selected_alpn_protocol(self) -> str | None:
        return self._protocol

    def get_extra_info(self, name: str) -> object:
        return self if name == "ssl_object" else self._told.get(name)


def test_how_long_it_lasts(tmp_path: Path) -> None:
    until = broker.make_mosquitto_files(cluster_of(), tmp_path / "broker", ["b"], NOW)
    assert abs(until - NOW - timedelta(days=730)) < timedelta(minutes=1)
