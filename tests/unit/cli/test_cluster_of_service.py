"""`peerload cluster` where another user's agent runs, such as the service: its keys are that user's, also for root."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from peerload.cli.verbs import cluster
from peerload.model.errors import BadRequest

if TYPE_CHECKING:
    from pathlib import Path


def test_what_is_to_be_typed_is_typed_as_that_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = os.getuid() + 1
    monkeypatch.setattr(cluster, "owner_of", lambda _path: owner)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_name={owner: "peerload"}[uid]))
    agent = {"node": "ws1", "name": "lab", "id": "1", "directory": "/var/lib/peerload/.config/peerload/cluster"}
    monkeypatch.setattr(cluster, "_in_use", lambda _socket: agent)
    local: Any = SimpleNamespace(is_local=True, id="2")
    flags: Any = SimpleNamespace(host=["broker"], json=False, socket=None)
    with pytest.raises(BadRequest) as caught:
        cluster.make_files(tmp_path / "broker", flags, local)
    assert (
        caught.value.hint
        == "sudo -Hu peerload peerload cluster broker-certificate /var/lib/peerload/broker --host broker"
    )
    cluster._say_in_use(agent, "2")
    assert "sudo -Hu peerload peerload cluster show\n" in capsys.readouterr().err
    owner = os.getuid()
    cluster._say_in_use(agent, "2")
    assert "  peerload cluster show /var/lib" in capsys.readouterr().err
