"""Brokers' addresses and the file that a password is in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from peerload.cli.common.agent_process import agent_options, given_settings
from peerload.config import loader
from peerload.model.errors import ConfigError
from peerload.security import broker
from peerload.security.broker import BrokerTls, BrokerUrl, check_ca, read_password
from tests.each import each
from tests.support import cluster_of
from tests.wording import Says

pytestmark = [pytest.mark.rule("S13")]

SECRET = "s3cr:et word"


def private(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


@each("end", ["", "\n"])
def test_a_password_is_what_follows_the_first_colon(tmp_path: Path, end: str) -> None:
    path = private(tmp_path / "p", f"n1:{SECRET}{end}")
    assert read_password(path) == ("n1", SECRET)
    url = BrokerUrl.parse("mqtts://b")
    known = url.known_as(str(path))
    assert (known.user, known.password, known.text) == ("n1", SECRET, "mqtts://b:8883")
    assert SECRET not in repr(known) + str(known)
    assert BrokerUrl.parse("mqtts://n1@b").known_as(str(path)).password == SECRET
    assert BrokerUrl.parse("mqtts://other@b").known_as(str(path)).password is None, "somebody else's"
    assert BrokerUrl.parse("mqtts://u:own@b").known_as(str(path)).password == "own"
    assert url.known_as("") is url


@each(
    ("content", "mode", "says"),
    [
        (f"n1:{SECRET}", 0o640, Says.OPEN_TO_OTHERS()),
        (f"n1:{SECRET}", 0o602, Says.OPEN_TO_OTHERS()),
        ("", 0o600, "one line USER:PASSWORD"),
        (SECRET.replace(":", ""), 0o600, "one line USER:PASSWORD"),
        (f":{SECRET}", 0o600, "one line USER:PASSWORD"),
        ("n1:", 0o600, "one line USER:PASSWORD"),
        (f"n1:{SECRET}\nmore", 0o600, "one line USER:PASSWORD"),
        (f"n1:{SECRET}\0", 0o600, "one line USER:PASSWORD"),
        (b"n1:\xff\xfe", 0o600, "one line USER:PASSWORD"),
        ("n1:" + "x" * broker.PASSWORD_BYTES_MAX, 0o600, "one line USER:PASSWORD"),
    ],
)
def test_a_file_that_is_not_used_is_not_shown(tmp_path: Path, content: str | bytes, mode: int, says: str) -> None:
    path = private(tmp_path / "p", content, mode)
    with pytest.raises(ConfigError, match=says) as caught:
        read_password(path)
    told = f"{caught.value} {caught.value.hint} {caught.value.why}"
    assert SECRET not in told
    assert caught.value.hint


def test_places_where_no_password_is(tmp_path: Path) -> None:
    path = private(tmp_path / "p", f"n1:{SECRET}")
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for place, says in (
        (tmp_path / "link", "it is a symbolic link"),
        (tmp_path / "pipe", "it is not a regular file"),
        (tmp_path / "none", "No such file"),
        (tmp_path, "it is not a regular file"),
        (Path("relative"), "not an absolute path"),
    ):
        with pytest.raises(ConfigError, match=says):
            read_password(place)


def test_somebody_elses_file_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = private(tmp_path / "p", f"n1:{SECRET}")
    owner = path.stat().st_uid
    if owner == 0:
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match="user"):
        read_password(path)


@each("url", [f"mqtts://n1:{SECRET}@b", "mqtt://:x@b"])
def test_no_password_on_a_command_line(url: str) -> None:
    flags = agent_options("up", "").read(["--mqtt", url])
    with pytest.raises(ConfigError, match="password") as caught:
        given_settings(flags)
    assert SECRET not in str(caught.value) + caught.value.hint
    assert given_settings(agent_options("up", "").read(["--mqtt", "mqtts://n1@b"]))["mqtt"] == ["mqtts://n1@b"]


@each("value", [f"mqtts://n1:{SECRET}@b", [f"mqtts://n1:{SECRET}@b", 5], {"url": SECRET}])
def test_a_setting_of_the_wrong_kind_is_not_shown(value: object) -> None:
    with pytest.raises(ConfigError, match="mqtt") as caught:
        loader.converted_value("mqtt", value, "/etc/peerload/peerload.toml")
    assert SECRET not in str(caught.value) + caught.value.hint + caught.value.why


def test_brokers_by_ipv6() -> None:
    url = BrokerUrl.parse("mqtts://n1:x@[FD00::5]")
    assert (url.text, url.host, url.port) == ("mqtts://[fd00::5]:8883", "fd00::5", 8883)
    for wrong in ("mqtts://fd00::5:8883", "mqtts://n1:x@fd00::5", "mqtt://[fe80::5]", "mqtt://[fe80::5%25eth0]:1883"):
        with pytest.raises(ConfigError) as caught:
            BrokerUrl.parse(wrong)
        assert "[fd00::5]" in caught.value.hint, wrong


@pytest.mark.rule("M1")
def test_a_ca_that_cannot_be_used(tmp_path: Path) -> None:
    check_ca("")
    check_ca("system")
    check_ca(str(cluster_of().directory / "ca.pem"))
    for ca, says in (
        (str(tmp_path / "none.pem"), "No such file"),
        (str(private(tmp_path / "empty.pem", "")), "no certificate"),
        (str(private(tmp_path / "key.pem", (cluster_of().directory / "ca.key").read_bytes())), "no certificate"),
        ("ca.pem", "not an absolute path"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_ca(ca)
    context = BrokerTls("", cluster_of().authority.certificate, None).context()
    assert (context.check_hostname, context.verify_mode.name) == (True, "CERT_REQUIRED")
