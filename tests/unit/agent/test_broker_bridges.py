"""Bridges between the brokers of sites: what is asked for, and what is made of it."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from peerload.cli.common.options import is_node_name
from peerload.model.errors import BadRequest
from peerload.security import certificates, mosquitto_config
from peerload.security.broker_bridges import Bridge, parse_bridge, user_of
from tests.each import each
from tests.support import cluster_of

if TYPE_CHECKING:
    from pathlib import Path

NOW = datetime.now(UTC)
BASE = {"ca.pem", "broker.pem", "broker.key", "mosquitto.acl", "mosquitto.conf"}
WEST, NORTH = Bridge("west", "broker.west"), Bridge("north")


def made(place: Path, site: str, *bridges: Bridge) -> Path:
    mosquitto_config.make(cluster_of(), place, ("broker.lab",), NOW, site, bridges)
    return place


@each(
    ("text", "bridge"),
    [
        ("west", Bridge("west")),
        ("west=broker.west", Bridge("west", "broker.west")),
        ("west=broker.west:99", Bridge("west", "broker.west", 99)),
        ("west=192.0.2.7", Bridge("west", "192.0.2.7")),
        ("west=[fd00::5]", Bridge("west", "fd00::5")),
        ("west=[fd00::5]:99", Bridge("west", "fd00::5", 99)),
    ],
)
def test_what_is_asked_for(text: str, bridge: Bridge) -> None:
    assert parse_bridge(text) == bridge


@each(
    "text",
    [
        "",
        "=b",
        "west=",
        "we/st",
        "+",
        "#",
        "west=a b",
        "west=b:0",
        "west=b:x",
        "west=fd00::5",
        "west=b\nuser root",
        "W",
    ],
)
def test_what_cannot_be(text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_bridge(text)
    assert caught.value.hint


@each(
    ("site", "bridges"),
    [("", (WEST,)), ("west", (WEST,)), ("east", (WEST, Bridge("west"))), ("east", (NORTH, NORTH))],
)
def test_what_makes_no_sense_together(tmp_path: Path, site: str, bridges: tuple[Bridge, ...]) -> None:
    with pytest.raises(BadRequest):
        made(tmp_path / "broker", site, *bridges)
    assert not (tmp_path / "broker").exists()


@pytest.mark.rule("M1")
def test_nothing_that_came_over_a_bridge_can_go_back_over_one(tmp_path: Path) -> None:
    place = made(tmp_path / "broker", "east", WEST, Bridge("south", "fd00::5", 99), NORTH)
    assert {path.name for path in place.iterdir()} == BASE | {"bridge.pem", "bridge.key"}
    text = (place / "mosquitto.conf").read_text(encoding="ascii")
    assert text.startswith(mosquitto_config.CONFIGURATION)
    bridges = text.split("\nconnection ")[1:]
    assert [re.findall(r"^topic (\S+) (\S+)", one, re.MULTILINE) for one in bridges] == [
        [("peerload/+/east/#", "out"), ("peerload/+/west/#", "in")],
        [("peerload/+/east/#", "out"), ("peerload/+/south/#", "in")],
    ]
    assert re.findall(r"^address (\S+)", text, re.MULTILINE) == ["broker.west:8883", "fd00::5:99"]
    rights = (place / "mosquitto.acl").read_text(encoding="ascii").removeprefix(mosquitto_config.ACL)
    assert rights.splitlines()[2:] == [
        "user bridge.north",
        "topic write peerload/+/north/#",
        "topic read peerload/+/east/#",
    ]


@pytest.mark.rule("M1")
def test_a_bridges_certificate_is_no_nodes_and_no_brokers(tmp_path: Path) -> None:
    pem = (made(tmp_path / "broker", "east", WEST) / "bridge.pem").read_bytes()
    with pytest.raises(ValueError, match="not a node's certificate"):
        certificates.node_facts(cluster_of().authority, pem)
    found = x509.load_pem_x509_certificate(pem)
    [name] = found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert name.value == user_of("east") == "bridge.east"
    assert not is_node_name(str(name.value)), "nobody can be invited by it"
    assert list(found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.CLIENT_AUTH
    ]


def test_a_broker_that_is_dialled_needs_no_certificate_for_it(tmp_path: Path) -> None:
    assert {path.name for path in made(tmp_path / "broker", "east", NORTH).iterdir()} == BASE
