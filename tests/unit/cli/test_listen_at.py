"""The port at which a new member listens."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peerload.cli.verbs import join
from peerload.model.errors import ConfigError
from tests.support import own_loopback

HOST = own_loopback()


@pytest.fixture(name="usual")
def usual_port(monkeypatch: pytest.MonkeyPatch) -> int:
    with socket.create_server((HOST, 0)) as found:
        port = int(found.getsockname()[1])
    monkeypatch.setattr(join, "PORT", port)
    return port


def test_connections_that_die_away_are_not_in_the_way(usual: int, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server((HOST, usual)) as listening, socket.create_connection((HOST, usual)) as other:
        accepted, _ = listening.accept()
        accepted.close()  # who closes first waits for a minute (TIME_WAIT)
        assert other.recv(1) == b""
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind((HOST, usual))
    assert join.listen_at(HOST) == f"{HOST}:{usual}"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("verb", ["join", "invite"])
def test_an_address_that_this_machine_lacks_is_refused_where_it_is_typed(verb: str, tmp_path: Path) -> None:
    flags: Any = SimpleNamespace(listen="192.0.2.7:7117", name="")
    state = str(tmp_path)

    def typed() -> None:
        if verb == "join":
            join._ask_to_join(None, "n1", {"state": state, "cluster": state}, flags, "")
        else:
            join._make_cluster(flags, {"node": "n1", "state": state})

    with pytest.raises(ConfigError) as caught:
        typed()
    assert caught.value.key == "listen"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_port_that_another_program_has_is_told_and_what_is_kept_is_one_port(
    kind: socket.SocketKind, usual: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(socket.socket(socket.AF_INET, kind)) as taken:
        taken.bind((HOST, usual))
        if kind is socket.SOCK_STREAM:
            taken.listen()
        host, _, port = join.listen_at(HOST).rpartition(":")
        assert join.listen_at(HOST, f"{HOST}:{usual}") == f"{HOST}:{usual}", "the agent that is to start again has it"
    assert host == HOST
    assert int(port) not in (0, usual)
    assert f"{HOST}:{port}" in capsys.readouterr().err
