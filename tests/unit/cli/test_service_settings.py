"""The settings of a service for all users, as `config show` and `doctor` compare them: with those of a service started now."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self

import pytest

from peerload.cli.common.agent_process import default_places
from peerload.cli.doctor import machine
from peerload.cli.verbs import config
from peerload.client import connection
from peerload.config import loader
from peerload.model.errors import AgentUnavailable

if TYPE_CHECKING:
    from pathlib import Path


SYSTEM = {"mode": "system"}


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An agent at the system's socket alone → its settings, whose state this user may enter."""
    monkeypatch.delenv("PEERLOAD_SOCKET", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "mine"))
    monkeypatch.setattr(loader, "SYSTEM_FILE", tmp_path / "peerload.toml")
    monkeypatch.setattr(loader, "SYSTEM_DIRECTORY", tmp_path / "conf.d")
    monkeypatch.setattr(connection, "SYSTEM_SOCKET", str(tmp_path / "agent.sock"))
    monkeypatch.setattr("peerload.cli.common.agent_process.SYSTEM_SOCKET", str(tmp_path / "agent.sock"))
    monkeypatch.setattr("peerload.cli.common.agent_process.SYSTEM_STATE", str(tmp_path))
    (tmp_path / "agent.sock").touch()
    (tmp_path / "peerload.toml").write_text("slots = 3\n")
    told = loader.describe(*loader.load_with_origins(SYSTEM, default_places(SYSTEM), {}))

    class Connection:
        def __init__(self, path: str | None = None, **_: Any) -> None:
            if (path or connection.default_socket_path()) != str(tmp_path / "agent.sock"):
                raise AgentUnavailable("no agent is running")

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def call(self, verb: str) -> dict[str, Any]:
            info = {"node": "ws1", "state": str(tmp_path), **SYSTEM}
            answers: dict[str, dict[str, Any]] = {"info": info, "settings": {"settings": told}}
            return answers.get(verb, {"nodes": []})

    monkeypatch.setattr(connection, "AgentConnection", Connection)
    monkeypatch.setattr(machine, "AgentConnection", Connection)
    return {str(row["key"]): row["value"] for row in told}


@pytest.mark.parametrize("changed", [False, True])
def test_it_is_found_and_compared_as_a_service(
    changed: bool,
    service: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PEERLOAD_LABEL", "of my own agents alone")
    if changed:
        (tmp_path / "peerload.toml").write_text("slots = 4\n")
    assert config.main(["show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["agent"] == "ws1"
    assert {row["key"]: row["value"] for row in shown["settings"]} == service
    assert [row["key"] for row in shown["settings"] if row["needs_restart"]] == ["slots"] * changed
    assert machine.restart(machine.DoctorInput()).result == (machine.WARN if changed else machine.OK)
    config.main(["show"])
    assert ("sudo systemctl restart peerload" in capsys.readouterr().out) == changed
